"""How parameters move: learning rates, which parameters decay, and moments that follow parameters by name."""

from __future__ import annotations

import copy
import math
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from mixle.training import OptimizerOptions, OptimizerState


def test_a_constant_rate_rises_linearly_and_stays():
    options = OptimizerOptions(0.4, warmup_steps=4)
    assert [options.learning_rate(step) for step in range(6)] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.4, 0.4])


def test_a_cosine_falls_to_its_end_half_way_at_half_height():
    options = OptimizerOptions(1.0, schedule="cosine", warmup_steps=10, total_steps=110, min_lr=0.2)
    assert options.learning_rate(10) == pytest.approx(1.0)
    assert options.learning_rate(60) == pytest.approx(0.6)
    assert options.learning_rate(35) == pytest.approx(0.2 + 0.8 * (1 + math.sqrt(0.5)) / 2)
    assert options.learning_rate(110) == options.learning_rate(5000) == pytest.approx(0.2)


def test_a_line_falls_evenly():
    options = OptimizerOptions(1.0, schedule="linear", total_steps=4)
    assert [options.learning_rate(step) for step in range(6)] == pytest.approx([1.0, 0.75, 0.5, 0.25, 0.0, 0.0])


@given(
    schedule=st.sampled_from(["cosine", "linear"]),
    warmup=st.integers(0, 20),
    falling=st.integers(1, 50),
    step=st.integers(0, 100),
)
def test_a_rate_never_leaves_its_bounds_and_never_rises_after_the_warmup(schedule, warmup, falling, step):
    options = OptimizerOptions(0.5, schedule=schedule, warmup_steps=warmup, total_steps=warmup + falling, min_lr=0.1)
    rate, following = options.learning_rate(step), options.learning_rate(step + 1)
    assert 0 < rate <= 0.5 + 1e-12
    assert following <= rate + 1e-12 or step < warmup


def module():
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4), nn.LayerNorm(4))


def step(module, state, options, inputs=(0, 1, 2)):
    parameters = dict(module.named_parameters())
    optimizer = state.bind(options, parameters)
    optimizer.zero_grad()
    module(torch.tensor(inputs)).square().sum().backward()
    optimizer.step()
    return optimizer


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_only_parameters_of_two_or_more_dimensions_decay(kind):
    options = OptimizerOptions(optimizer=kind, weight_decay=0.3)
    optimizer = options.build(module().parameters())
    decays = {p.ndim: group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert decays == {2: 0.3, 1: 0.0}


@pytest.mark.parametrize(
    ("options", "reference"),
    [
        (
            OptimizerOptions(0.01, betas=(0.8, 0.9), weight_decay=0.0),
            lambda p: torch.optim.AdamW(p, lr=0.01, betas=(0.8, 0.9), weight_decay=0.0),
        ),
        (OptimizerOptions(0.01, optimizer="sgd", momentum=0.9), lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9)),
    ],
)
def test_steps_are_those_of_torchs_optimizer(options, reference):
    ours, theirs = module(), module()
    state, optimizer = OptimizerState(), reference(theirs.parameters())
    for _ in range(3):
        step(ours, state, options)
        optimizer.zero_grad()
        theirs(torch.tensor([0, 1, 2])).square().sum().backward()
        optimizer.step()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b)


def test_the_same_parameters_keep_their_optimizer():
    trained, state, options = module(), OptimizerState(), OptimizerOptions()
    assert step(trained, state, options) is step(trained, state, options)


@pytest.mark.parametrize("carry", [copy.deepcopy, lambda state: pickle.loads(pickle.dumps(state)), lambda state: state])
@pytest.mark.parametrize(
    "options", [OptimizerOptions(0.05), OptimizerOptions(0.05, optimizer="sgd", momentum=0.5)], ids=["adamw", "sgd"]
)
def test_moments_follow_the_parameters_of_an_equal_module(options, carry):
    uninterrupted, its_state = module(), OptimizerState()
    for _ in range(2):
        step(uninterrupted, its_state, options)
    first, state = module(), OptimizerState()
    step(first, state, options)
    second = copy.deepcopy(first)
    step(second, carry(state), options)
    assert all(map(torch.equal, uninterrupted.parameters(), second.parameters()))


def test_a_frozen_parameter_keeps_its_moments_until_it_is_trained_again():
    trained, state, options = module(), OptimizerState(), OptimizerOptions()
    expected = copy.deepcopy(trained)
    reference = options.build(expected.parameters())
    for frozen in (set(), {"0.weight"}, set()):
        for name, p in expected.named_parameters():
            p.grad = None if name in frozen else torch.ones_like(p)
        reference.step()
        named = dict(trained.named_parameters())
        optimizer = state.bind(options, {n: p for n, p in named.items() if n not in frozen}, frozen=frozen)
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.grad = torch.ones_like(p)
        optimizer.step()
        assert state.dense().keys() == named.keys()
        state = pickle.loads(pickle.dumps(state))
    assert all(map(torch.equal, trained.parameters(), expected.parameters()))


def test_changed_settings_reach_an_optimizer_that_goes_on():
    trained, state = module(), OptimizerState()
    step(trained, state, OptimizerOptions())
    optimizer = step(trained, state, OptimizerOptions(betas=(0.5, 0.6), weight_decay=0.7))
    assert optimizer.param_groups[0]["betas"] == (0.5, 0.6)
    assert optimizer.param_groups[0]["weight_decay"] == 0.7


def test_moments_that_do_not_fit_are_refused_by_name():
    state = OptimizerState("adamw", {"0.weight": {"exp_avg": torch.zeros(9, 9)}})
    with pytest.raises(ValueError, match=r"0.weight has shape \(9, 9\), its parameter \(5, 4\)"):
        state.bind(OptimizerOptions(), dict(module().named_parameters()))
    state = OptimizerState("adamw", {"lost": {"exp_avg": torch.zeros(1)}})
    with pytest.raises(ValueError, match="'lost', which is no parameter"):
        state.bind(OptimizerOptions(), dict(module().named_parameters()))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"lr": 0}, ValueError, "lr=0.0 must be above 0"),
        ({"lr": "1"}, TypeError, "lr='1'"),
        ({"lr": float("nan")}, ValueError, "lr=nan must be finite"),
        ({"optimizer": "adam"}, ValueError, "optimizer='adam' must be one of 'adamw', 'sgd'"),
        ({"betas": (0.9, 1.0)}, ValueError, r"betas\[1\]=1.0 must be below 1"),
        ({"betas": 0.9}, TypeError, "betas=0.9 must be a pair"),
        ({"betas": (0.9, 0.9), "optimizer": "sgd"}, ValueError, "takes momentum"),
        ({"momentum": 0.9}, ValueError, "takes betas"),
        ({"momentum": 1.5, "optimizer": "sgd"}, ValueError, "momentum=1.5 must be below 1"),
        ({"weight_decay": -0.1}, ValueError, "weight_decay=-0.1"),
        ({"warmup_steps": 1.0}, TypeError, "warmup_steps=1.0"),
        ({"schedule": "cos"}, ValueError, "schedule='cos' must be one of"),
        ({"schedule": "cosine"}, ValueError, "schedule='cosine' needs total_steps"),
        ({"total_steps": 10}, ValueError, 'total_steps=10 has no effect with schedule="constant"'),
        ({"min_lr": 0.001}, ValueError, 'min_lr=0.001 has no effect with schedule="constant"'),
        ({"schedule": "linear", "total_steps": 10, "min_lr": 1.0}, ValueError, "min_lr=1.0 must be at most 0.003"),
        ({"schedule": "linear", "total_steps": 5, "warmup_steps": 5}, ValueError, "total_steps=5 must exceed warmup"),
    ],
)
def test_a_wrong_setting_is_refused_by_name(options, error, message):
    with pytest.raises(error, match=message):
        OptimizerOptions(**options)
