"""What the memory model says is what a real model has: parameters to the last one, activations to a few percent."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from mixle.experimental.tensor_pipeline_context_parallel.memory import (
    memory_by_rank,
    parameters_of_rank,
)
from mixle.experimental.tensor_pipeline_context_parallel.model_shape import ModelShape
from mixle.experimental.tensor_pipeline_context_parallel.plan import Plan
from mixle.experimental.tensor_pipeline_context_parallel.workload import Workload
from mixle.models.transformer import CausalLM
from mixle.training.next_token import NextToken, TokenTensors

ACTIVATION_TOLERANCE = 0.03
"""The model leaves out what does not grow with the width: rotary angles, and one number per norm and row."""


def model(**options) -> CausalLM:
    sizes = {"vocab": 512, "d_model": 128, "n_layer": 4, "n_head": 4, "block": 64}
    return CausalLM(**{**sizes, **options})


def count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def saved_bytes(module: CausalLM, batch_size: int) -> int:
    """Bytes of the storages that autograd keeps after a forward pass and its loss, parameters and ids apart."""
    ids = torch.randint(module.vocab, (batch_size, module.block + 1))
    inputs, targets = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
    apart = {tensor.untyped_storage().data_ptr() for tensor in (*module.parameters(), ids, inputs, targets)}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in apart:
            kept[storage.data_ptr()] = storage
        return tensor

    objective = NextToken(module, "all")
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = objective.loss_sum(module, TokenTensors(inputs, targets))
    assert loss.requires_grad
    return sum(storage.nbytes() for storage in kept.values())


@pytest.mark.parametrize("options", [
    {},
    {"tie_embeddings": False},
    {"bias": True},
    {"norm": "layer"},
    {"norm": "layer", "bias": True, "position": "learned"},
    {"d_mlp": 200, "n_head": 8},
])  # fmt: skip
def test_a_module_has_the_parameters_that_its_shape_says(options):
    module = model(**options)
    assert ModelShape.of(module).parameters == count(module)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("pp", "tp"), [*itertools.product([1, 2, 4], repeat=2)])
def test_the_ranks_parts_add_up_to_the_model_and_what_they_share(pp, tp, tied):
    module = model(tie_embeddings=tied)
    shape, plan = ModelShape.of(module), Plan(pp=pp, tp=tp)
    held = tp * sum(parameters_of_rank(shape, plan, rank) for rank in range(pp))
    norms = (2 * module.n_layer + 1) * module.d_model
    copied = module.vocab * module.d_model if tied and pp > 1 else 0
    assert held == count(module) + (tp - 1) * norms + copied


@pytest.mark.parametrize(("name", "billions"), [
    ("llama2-7b", 6.738), ("llama2-13b", 13.016), ("llama2-70b", 68.977),
    ("llama3-8b", 8.030), ("llama3-70b", 70.554), ("llama3-405b", 405.853),
])  # fmt: skip
def test_named_shapes_have_the_parameters_of_the_released_models(name, billions):
    from mixle.experimental.tensor_pipeline_context_parallel.model_shape import NAMED_SHAPES

    assert NAMED_SHAPES[name].parameters / 1e9 == pytest.approx(billions, abs=1e-3)


def predicted_activations(module: CausalLM, batch_size: int, recompute: str) -> int:
    workload = Workload(batch_size=batch_size, seq_len=module.block, precision="fp32", recompute=recompute)
    [rank] = memory_by_rank(ModelShape.of(module), Plan(), workload)
    log_softmax = batch_size * module.block * module.vocab * 4
    return rank.activations + log_softmax  # the loss keeps one tensor of those that live in it for a moment


@pytest.mark.parametrize("options", [
    {},
    {"d_mlp": 1000},
    {"n_layer": 8, "d_model": 256},
    {"norm": "layer", "position": "learned"},
    {"block": 256, "vocab": 2000},
])  # fmt: skip
@pytest.mark.parametrize("batch_size", [2, 5])
def test_autograd_keeps_as_many_bytes_as_predicted(options, batch_size):
    module = model(**options)
    measured = saved_bytes(module, batch_size)
    assert predicted_activations(module, batch_size, "none") == pytest.approx(measured, rel=ACTIVATION_TOLERANCE)


@pytest.mark.parametrize("batch_size", [2, 5])
def test_with_activation_checkpointing_autograd_keeps_the_inputs_of_blocks(batch_size):
    module = model(n_layer=8)
    predicted = predicted_activations(module, batch_size, "full")
    for index, block in enumerate(module.blocks):
        module.blocks[index] = checkpoint_wrapper(block)
    assert predicted == pytest.approx(saved_bytes(module, batch_size), rel=ACTIVATION_TOLERANCE)


SHAPE = ModelShape(vocab=512, d_model=128, n_layer=16, n_head=8)


def peak(plan: Plan, **options) -> list[int]:
    workload = Workload(**{"batch_size": 8, "seq_len": 64, "precision": "fp32", **options})
    return [rank.total for rank in memory_by_rank(SHAPE, plan, workload)]


def test_recomputing_more_keeps_less():
    kept = [
        memory_by_rank(SHAPE, Plan(), Workload(batch_size=8, seq_len=64, recompute=recompute))[0].activations
        for recompute in ("none", "selective", "full")
    ]
    assert kept == sorted(kept, reverse=True)
    assert len(set(kept)) == 3


def test_the_first_rank_of_1f1b_keeps_a_microbatch_per_stage_and_the_last_keeps_one():
    def kept(schedule):
        plan = Plan(pp=4, microbatches=8, pp_schedule=schedule)
        workload = Workload(batch_size=8, seq_len=64, recompute="full")
        return [rank.activations for rank in memory_by_rank(SHAPE, plan, workload)]

    one, everything = kept("1f1b"), kept("gpipe")
    assert one[0] == 4 * everything[0] / 8
    assert one[:3] == [one[0], one[0] * 3 / 4, one[0] / 2]


@settings(deadline=None, max_examples=50)
@given(
    dp=st.sampled_from([1, 2, 4]), tp=st.sampled_from([1, 2, 4]), pp=st.sampled_from([1, 2, 4]),
    cp=st.sampled_from([1, 2, 4]),
)  # fmt: skip
def test_a_rank_of_a_larger_mesh_never_owns_more(dp, tp, pp, cp):
    def owned(**axes):
        ranks = memory_by_rank(SHAPE, Plan(**axes, microbatches=8 if axes["pp"] > 1 else 1), workload)
        return max(rank.parameters + rank.gradients + rank.optimizer for rank in ranks)

    workload = Workload(batch_size=8, seq_len=64)
    axes = {"dp": dp, "tp": tp, "pp": pp, "cp": cp}
    for axis in axes:
        assert owned(**{**axes, axis: 2 * axes[axis]}) < owned(**axes)


def test_a_longer_sequence_over_as_many_more_context_ranks_keeps_the_same():
    assert peak(Plan(dp=4), seq_len=64) == pytest.approx(peak(Plan(dp=2, cp=2), seq_len=128), rel=0.02)


def test_replicas_without_fsdp_own_everything():
    [rank] = memory_by_rank(SHAPE, Plan(dp=4), Workload(batch_size=8, seq_len=64, fsdp=False))
    assert rank.parameters == 4 * SHAPE.parameters
