"""What of a torch module travels, and how it is moved."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from diloco_sites import fresh_url, open_session
from torch import nn

from mixle.diloco import Carry, DiLoCo, Overwrite, align, open_mailbox
from mixle.diloco.records import RunRecord
from mixle.diloco.torch_parameters import TorchParameters


def parameters_of(module: nn.Module) -> dict[str, str]:
    return {spec.name: spec.dtype for spec in TorchParameters(module).schema.parameters}


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3, 5, bias=False)
        self.table = nn.Embedding(5, 3)
        self.table.weight = self.head.weight


def test_frozen_parameters_stay_at_home():
    module = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    module[0].requires_grad_(False)
    assert parameters_of(module) == {"1.bias": "F32", "1.weight": "F32"}


def test_shared_parameters_travel_once_and_an_embedding_is_one_under_any_name():
    tied = TorchParameters(Tied())
    assert tied.schema.names == ("head.weight",)
    assert tied.embeddings == {"head.weight"}


def test_two_parameters_on_one_memory_are_refused_since_a_commit_would_move_it_twice():
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    module[1].bias = nn.Parameter(module[0].bias.detach())
    with pytest.raises(ValueError, match=r"'0\.bias' and '1\.bias' are the same memory"):
        TorchParameters(module)


def test_half_precision_is_read_as_float32():
    module = nn.Linear(2, 3).to(torch.bfloat16)
    assert set(parameters_of(module).values()) == {"BF16"}
    read = TorchParameters(module).read(["weight"])["weight"]
    assert read.dtype == np.float32
    np.testing.assert_array_equal(read, module.weight.detach().float().numpy())


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64])
def test_a_dtype_that_cannot_travel_is_refused_by_the_parameters_name(dtype):
    module = nn.Linear(2, 3)
    module.gain = nn.Parameter(torch.ones(2, dtype=dtype))
    with pytest.raises(TypeError, match=f"gain is {dtype}"):
        TorchParameters(nn.Sequential(module))


def test_an_integer_parameter_cannot_be_trained_and_stays_at_home():
    module = nn.Linear(2, 1)
    module.codes = nn.Parameter(torch.arange(3), requires_grad=False)
    assert "codes" not in parameters_of(module)


def test_running_statistics_travel_and_counters_do_not():
    names = parameters_of(nn.BatchNorm1d(3))
    assert set(names) == {"bias", "weight", "running_mean", "running_var"}


def test_a_buffer_that_nobody_knows_how_to_merge_is_refused_by_name():
    module = nn.Linear(2, 1)
    module.register_buffer("average", torch.zeros(2))
    with pytest.raises(ValueError, match="buffer average of a Linear"):
        TorchParameters(module)
    module.register_buffer("average", torch.zeros(2), persistent=False)
    assert parameters_of(module)


def test_what_is_read_does_not_change_with_the_module():
    module = nn.Linear(2, 1)
    adapter = TorchParameters(module)
    before = adapter.read(["weight"])["weight"]
    kept = before.copy()
    with torch.no_grad():
        module.weight += 1
    np.testing.assert_array_equal(before, kept)


def test_aligning_moves_the_very_tensors_that_the_optimizer_holds():
    module = nn.Linear(2, 1)
    weight, adapter = module.weight, TorchParameters(module)
    start = adapter.read(["weight"])
    with torch.no_grad():
        weight += 0.5
    committed = {"weight": start["weight"] + 2}
    adapter.align(committed, start, Carry())
    torch.testing.assert_close(weight.detach(), torch.from_numpy(start["weight"] + 2.5))
    adapter.align(committed, start, Overwrite())
    assert torch.equal(module.weight.detach(), torch.from_numpy(committed["weight"]))
    assert module.weight is weight


def test_an_unread_name_is_left_alone():
    module = nn.Linear(2, 1)
    bias = module.bias.detach().clone()
    adapter = TorchParameters(module)
    new = {"weight": np.ones((1, 2), np.float32)}
    adapter.align(new, new, Overwrite())
    assert torch.equal(module.bias.detach(), bias)


def test_a_module_trains_through_a_session_and_is_found_again():
    torch.manual_seed(0)
    url, module = fresh_url(), nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    with open_session(module, DiLoCo(4, 2, overlap_steps=0), url) as session:
        for _ in range(20):
            optimizer.zero_grad()
            x = torch.randn(8, 2)
            (module(x) - x.sum(1, keepdim=True)).square().mean().backward()
            optimizer.step()
            session.step(8)
    torch.manual_seed(1)
    other = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    align(other, mailbox=url)
    for (name, mine), theirs in zip(module.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(theirs, mine, msg=name)
    torch.testing.assert_close(other[1].running_mean, module[1].running_mean)


@pytest.mark.parametrize(("model", "backend"), [({"a": np.zeros(2, np.float32)}, "torch"), (nn.Linear(1, 1), "numpy")])
def test_a_backend_that_the_model_is_none_of_is_refused(model, backend):
    with pytest.raises(TypeError, match=f'backend="{backend}"'):
        open_session(model, DiLoCo(4, 1), fresh_url(), backend=backend)


@pytest.mark.parametrize("quantized", [{}, {"delta_dtype": "F4", "commit_dtype": "F4", "master_dtype": "F8_E4M3"}])
def test_running_variances_stay_those_of_the_sites_however_far_they_move(quantized):
    url, module = fresh_url(), nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4))
    module[1].running_var.fill_(1e4)
    with open_session(module, DiLoCo(4, 1, overlap_steps=0, **quantized), url) as session:
        for step in range(24):
            module[1].running_var.mul_(0.5)
            with torch.no_grad():
                module[0].weight += 1e-3
            session.step()
            if step % 4 == 3:
                torch.testing.assert_close(
                    module[1].running_var, torch.full((4,), 1e4 * 0.5 ** (step + 1)), rtol=0.01, atol=1e-2
                )
    record = RunRecord.from_bytes(open_mailbox(url).get("run.json"))
    assert record.buffers == ("1.running_mean", "1.running_var")
    assert torch.isfinite(module.eval()(torch.randn(8, 2))).all()
    other = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4))
    align(other, mailbox=url)
    assert torch.equal(other[1].running_var, module[1].running_var)


def test_a_state_dict_is_no_model():
    with pytest.raises(
        TypeError, match=r"model\['weight'\] is a torch Tensor; give the module itself, not its state_dict"
    ):
        open_session(nn.Linear(1, 1).state_dict(), DiLoCo(4, 1), fresh_url())
