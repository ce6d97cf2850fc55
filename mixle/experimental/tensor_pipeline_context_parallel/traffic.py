"""What one rank sends in one step, by axis of the mesh.

Collectives are counted as rings send them: an all-gather or reduce-scatter over n ranks sends ``(n - 1) / n`` of the
whole from each, an all-reduce twice that.
"""

from __future__ import annotations

from dataclasses import dataclass

from mixle.experimental.tensor_pipeline_context_parallel.memory import (
    FP32,
    parameters_of_rank,
    tokens_per_microbatch,
)
from mixle.experimental.tensor_pipeline_context_parallel.model_shape import ModelShape
from mixle.experimental.tensor_pipeline_context_parallel.plan import Plan, split_blocks
from mixle.experimental.tensor_pipeline_context_parallel.workload import Workload


@dataclass(frozen=True)
class AxisTraffic:
    """What the busiest rank sends along one axis in a step.

    Attributes:
        bytes: in all.
        messages: collectives, or sends, that they are in.
    """

    bytes: int = 0
    messages: int = 0


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """The same for each axis; ``dp`` is the group that reduces gradients, dp x cp."""

    tp: AxisTraffic = AxisTraffic()
    pp: AxisTraffic = AxisTraffic()
    cp: AxisTraffic = AxisTraffic()
    dp: AxisTraffic = AxisTraffic()


def traffic(shape: ModelShape, plan: Plan, workload: Workload) -> Traffic:
    """Return what the rank that sends most sends along each axis."""
    return Traffic(
        tp=_tensor(shape, plan, workload),
        pp=_pipeline(shape, plan, workload),
        cp=_context(shape, plan, workload),
        dp=_data(shape, plan, workload),
    )


def blocks_of_busiest(shape: ModelShape, plan: Plan) -> int:
    """Return the most blocks that a pipeline rank has."""
    lengths = [len(blocks) for blocks in split_blocks(shape.n_layer, plan.stages)]
    return max(sum(lengths[stage] for stage in plan.stages_of(rank)) for rank in range(plan.pp))


def _passes(workload: Workload) -> int:
    """How often a block's collectives run: forward, backward, and forward again if it is computed again."""
    return 3 if workload.recompute == "full" else 2


def _tensor(shape: ModelShape, plan: Plan, workload: Workload) -> AxisTraffic:
    """Gather the stream before attention and MLP, scatter it after, reverse in backward; the ends do half of that."""
    if plan.tp == 1:
        return AxisTraffic()
    once = (plan.tp - 1) / plan.tp * tokens_per_microbatch(plan, workload) * shape.d_model * workload.activation_bytes
    per_microbatch = 4 * _passes(workload) * blocks_of_busiest(shape, plan) + (4 if plan.pp == 1 else 2)
    messages = per_microbatch * plan.microbatches
    return AxisTraffic(round(messages * once), messages)


def _pipeline(shape: ModelShape, plan: Plan, workload: Workload) -> AxisTraffic:
    """Send activations onward and gradients back at each stage boundary; copies of a tied weight add up once."""
    if plan.pp == 1:
        return AxisTraffic()
    once = tokens_per_microbatch(plan, workload) * shape.d_model / plan.tp * workload.activation_bytes
    per_microbatch = 2 * plan.stages_per_rank if plan.pp > 2 or plan.stages_per_rank > 1 else 1
    messages = per_microbatch * plan.microbatches
    tied = shape.vocab * shape.d_model // plan.tp * FP32 if shape.tied else 0
    return AxisTraffic(round(messages * once) + tied, messages + (1 if tied else 0))


def _context(shape: ModelShape, plan: Plan, workload: Workload) -> AxisTraffic:
    """Pass keys and values on, once per forward; in backward once more, and with them their gradients."""
    if plan.cp == 1:
        return AxisTraffic()
    own = tokens_per_microbatch(plan, workload) * 2 * shape.kv_width / plan.tp * workload.activation_bytes
    pairs = _passes(workload) + 1  # forward passes and, in backward, keys and values again and their gradients
    per_pair = plan.cp - 1 if plan.cp_mode == "ring" else 1
    blocks = blocks_of_busiest(shape, plan) * plan.microbatches
    sent = pairs * (plan.cp - 1) * own
    return AxisTraffic(round(blocks * sent), blocks * pairs * per_pair)


def _data(shape: ModelShape, plan: Plan, workload: Workload) -> AxisTraffic:
    """All-reduce gradients (DDP); or gather parameters twice, once in a pipeline, and scatter gradients (FSDP2)."""
    ranks = plan.dp * plan.cp
    if ranks == 1:
        return AxisTraffic()
    count = max(parameters_of_rank(shape, plan, rank) for rank in range(plan.pp))
    share = (ranks - 1) / ranks
    units = blocks_of_busiest(shape, plan) + 1
    if not workload.fsdp:
        return AxisTraffic(round(2 * share * count * FP32), units)
    gathers = 1 if plan.pp > 1 else 2
    per_parameter = gathers * workload.activation_bytes + FP32
    return AxisTraffic(round(share * count * per_parameter), units * (gathers + 1))
