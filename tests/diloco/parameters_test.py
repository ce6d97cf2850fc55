"""Parameters are trained in place: one that was replaced is named, and not left behind without a word."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from diloco_sites import Heard, descend, fresh_url, open_session, zeros
from torch import nn

from mixle.diloco import DiLoCo, NumpyParameters
from mixle.diloco.torch_parameters import TorchParameters

EVERY_STEP = DiLoCo(1, 1, overlap_steps=0)


def test_an_array_that_was_replaced_is_named_at_the_next_step_that_sends_it():
    model, heard = zeros(), Heard()
    session = open_session(model, EVERY_STEP, fresh_url(), callbacks=(heard,))
    descend(model, 1.0)
    session.step()
    model["weight"] = model["weight"] - 1.0
    with pytest.raises(RuntimeError, match="parameter 'weight' was replaced since the session joined"):
        session.step()
    assert not session.close(flush_s=1.0)
    assert heard.of("unflushed")


def test_an_array_that_was_replaced_is_named_when_a_commit_would_move_the_one_before():
    arrays = zeros()
    parameters = NumpyParameters(arrays)
    del arrays["bias"]
    parameters.require_in_place(["weight"])
    with pytest.raises(RuntimeError, match="parameter 'bias' was replaced"):
        parameters.require_in_place(["weight", "bias"])


def test_a_tensor_that_was_replaced_is_named_and_its_data_may_be():
    module = nn.Linear(2, 1)
    session = open_session(module, EVERY_STEP, fresh_url())
    module.weight.data = torch.ones(1, 2)
    session.step()
    module.weight = nn.Parameter(torch.ones(1, 2))
    with pytest.raises(RuntimeError, match="parameter 'weight' was replaced"):
        session.step()
    session.close(flush_s=1.0)


def reparametrize(module: nn.Module) -> None:
    nn.utils.parametrizations.weight_norm(module[0])


def replace_statistics(module: nn.Module) -> None:
    module[1].running_var = torch.zeros(2)


def replace_layer(module: nn.Module) -> None:
    module[0] = nn.Linear(2, 2)


@pytest.mark.parametrize(
    ("change", "name"), [(reparametrize, "0.weight"), (replace_statistics, "1.running_var"), (replace_layer, "0.bias")]
)
def test_every_way_to_replace_a_tensor_is_seen(change, name):
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    parameters = TorchParameters(module)
    parameters.require_in_place(parameters.schema.names)
    change(module)
    with pytest.raises(RuntimeError, match=f"parameter '{name}' was replaced"):
        parameters.require_in_place([name])


def halve(module: nn.Module) -> None:
    module.half()


def double(module: nn.Module) -> None:
    module.double()


def reshape(module: nn.Module) -> None:
    module[0].weight.data = torch.zeros(1, 2)


@pytest.mark.parametrize(
    ("change", "now"),
    [
        (halve, r"torch\.float16 of shape"),
        (double, r"torch\.float64 of shape"),
        (reshape, r"torch\.float32 of shape \(1,"),
    ],
)
def test_a_module_that_was_cast_or_reshaped_is_not_what_the_session_joined_with(change, now):
    module = nn.Sequential(nn.Linear(2, 2))
    parameters = TorchParameters(module)
    change(module)
    with pytest.raises(RuntimeError, match=rf"parameter '0\.weight' is {now}.*joined with F32 of shape \(2, 2\)"):
        parameters.require_in_place(["0.weight"])


def test_an_array_that_was_reshaped_is_not_what_the_session_joined_with():
    arrays = zeros()
    parameters = NumpyParameters(arrays)
    arrays["weight"].shape = (12,)
    with pytest.raises(RuntimeError, match=r"parameter 'weight' is float32 of shape \(12,\) now"):
        parameters.require_in_place(["weight"])


def unfreeze(module: nn.Module) -> None:
    module[0].requires_grad_(True)


def append(module: nn.Module) -> None:
    module.append(nn.Linear(2, 2))


@pytest.mark.parametrize(("change", "name"), [(unfreeze, "0.weight"), (append, "2.weight")])
def test_what_is_trained_only_since_the_session_joined_is_named_and_not_left_to_each_site(change, name):
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    module[0].requires_grad_(False)
    session = open_session(module, EVERY_STEP, fresh_url())
    session.step()
    change(module)
    with pytest.raises(RuntimeError, match=f"parameter '{name}' is trained since the session joined"):
        session.step()
    session.close(flush_s=0.0)


def test_what_is_frozen_later_stays_in_the_run():
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with open_session(module, EVERY_STEP, fresh_url()) as session:
        session.step()
        module[0].requires_grad_(False)
        session.step()


def test_shared_and_checkpointed_parameters_are_found_where_they_are():
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    module[1].weight = module[0].weight
    parameters = TorchParameters(module)
    parameters.require_in_place(parameters.schema.names)
    assert parameters.schema.names == ("0.bias", "0.weight", "1.bias")


@pytest.mark.parametrize("argument", ["embeddings", "buffers"])
def test_names_that_are_not_among_the_arrays_are_refused(argument):
    with pytest.raises(ValueError, match=f"{argument} names 'other', which is not among the arrays"):
        NumpyParameters({"w": np.zeros(2, np.float32)}, **{argument: ["other"]})
