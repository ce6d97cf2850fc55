"""How long a step takes: products, attention, elementwise work, what is sent and not hidden, and waiting."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from mixle.experimental.tensor_pipeline_context_parallel.hardware import Hardware
from mixle.experimental.tensor_pipeline_context_parallel.memory import (
    kept_by_whole_block,
    parameters_of_rank,
    tokens_per_microbatch,
)
from mixle.experimental.tensor_pipeline_context_parallel.model_shape import ModelShape
from mixle.experimental.tensor_pipeline_context_parallel.plan import Plan, split_blocks
from mixle.experimental.tensor_pipeline_context_parallel.traffic import AxisTraffic, traffic
from mixle.experimental.tensor_pipeline_context_parallel.workload import Workload

GEMM_SHARE = 0.72
"""Of what the largest products reach, the share that a model's reach in training."""
ATTENTION_SHARE = 0.42
"""The same for fused causal attention, against products in bfloat16."""
RING_SHARE = 0.8
"""Of that, the share that attention over keys and values in pieces reaches."""
EAGER_TRAFFIC, COMPILED_TRAFFIC = 3.0, 1.0
"""How often elementwise operations move what backward needs through memory, in one forward pass."""
LINK_SHARE = 0.8
"""Of a link's rate, the share that large messages reach."""
DATA_OVERLAP = 0.8
"""Of the time of the blocks, the share that data-parallel collectives can hide behind."""
ASYNC_TP_HIDDEN = 0.3
"""Of tensor-parallel collectives, the share that asynchronous ones hide."""
ADAMW_TRAFFIC = 28
"""Bytes per parameter that AdamW reads (parameter, gradient, two moments) and writes (all but the gradient)."""
BACKWARD_OF_ATTENTION = 2.5
"""Operations of fused attention's backward pass over its forward pass's: five products for two (arXiv 2205.14135)."""


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Seconds of one step on the slowest rank, by what they go to.

    Attributes:
        products: matrix products, computed again ones included.
        attention: inside the fused kernel.
        elementwise: norms, activations, rotary angles and the loss, at the rate of memory.
        tp: tensor-parallel collectives.
        cp: keys and values that attention does not hide.
        pp: messages between stages.
        dp: data-parallel collectives that the blocks do not hide.
        optimizer: the update.
        bubble: waiting for other stages.
    """

    products: float
    attention: float
    elementwise: float
    tp: float
    cp: float
    pp: float
    dp: float
    optimizer: float
    bubble: float

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return math.fsum(getattr(self, field.name) for field in fields(self))


def step_time(shape: ModelShape, plan: Plan, workload: Workload, hardware: Hardware) -> StepTime:
    """Predict the time of one optimizer step.

    Raises:
        ValueError: the hardware lacks ``workload.precision``.
    """
    if workload.precision not in hardware.matmul:
        known = ", ".join(hardware.matmul)
        raise ValueError(f"precision={workload.precision!r} is not one that {hardware.name} has; choose {known}")
    busy = [_compute(shape, plan, workload, hardware, rank) for rank in range(plan.pp)]
    products, attention, elementwise = max(busy, key=sum)

    sent = traffic(shape, plan, workload)
    tp = _seconds(sent.tp, hardware, stride=1, ranks=plan.tp)
    cp = _seconds(sent.cp, hardware, stride=plan.tp, ranks=plan.cp)
    pp = _seconds(sent.pp, hardware, stride=plan.tp * plan.cp * plan.dp, ranks=plan.pp, ring=False)
    dp = _seconds(sent.dp, hardware, stride=plan.tp, ranks=plan.dp * plan.cp)
    if workload.async_tp:
        tp *= 1 - ASYNC_TP_HIDDEN
    if plan.cp_mode == "ring":
        cp = max(0.0, cp - attention)
    blocks = products + attention + elementwise + tp + cp
    return StepTime(
        products=products,
        attention=attention,
        elementwise=elementwise,
        tp=tp,
        cp=cp,
        pp=pp,
        dp=max(0.0, dp - DATA_OVERLAP * blocks),
        optimizer=_optimizer(shape, plan, workload, hardware),
        bubble=blocks * plan.bubble,
    )


def tokens_per_second(plan: Plan, workload: Workload, time: StepTime) -> float:
    """Return the tokens per second that each rank accounts for."""
    return workload.batch_size * workload.seq_len * plan.dp / plan.world_size / time.total


def _compute(
    shape: ModelShape, plan: Plan, workload: Workload, hardware: Hardware, pp_rank: int
) -> tuple[float, float, float]:
    """Return the seconds of products, attention and elementwise work of one pipeline rank in a step."""
    split = split_blocks(shape.n_layer, plan.stages)
    blocks = sum(len(split[stage]) for stage in plan.stages_of(pp_rank))
    has_head = pp_rank == plan.pp - 1
    tokens = tokens_per_microbatch(plan, workload) * plan.microbatches

    product = 6 * shape.block_matrices + 2 * _matrices_again(shape, workload)
    products = blocks * product / hardware.matmul[workload.precision]
    head_precision = "bf16" if workload.precision == "fp8" else workload.precision
    if has_head:
        products += 6 * shape.vocab * shape.d_model / hardware.matmul[head_precision]

    forward = 2 * workload.seq_len * shape.q_width  # two products over half of the keys on average
    passes = 1 + BACKWARD_OF_ATTENTION + (1 if workload.recompute == "full" else 0)
    rate = hardware.matmul[head_precision] * ATTENTION_SHARE * (RING_SHARE if plan.cp > 1 else 1)
    attention = blocks * passes * forward / rate

    moves = (COMPILED_TRAFFIC if workload.compiled else EAGER_TRAFFIC) * (3 if workload.recompute == "none" else 4)
    moved = blocks * moves * kept_by_whole_block(shape, plan, workload) * plan.tp
    if has_head:
        moved += shape.vocab * (2 if workload.fused_loss else 8) * 2 * workload.activation_bytes
    share = tokens / plan.tp
    return share * products / GEMM_SHARE, share * attention, share * moved / hardware.bandwidth


def _matrices_again(shape: ModelShape, workload: Workload) -> int:
    """Elements of a block's matrices whose products are computed again."""
    match workload.recompute:
        case "full":
            return shape.block_matrices
        case "selective":  # keys, the output projection, and the second product of the MLP
            second = shape.d_mlp * shape.d_model
            return shape.d_model * (shape.kv_width + shape.q_width) + second
        case "none":
            return 0


def _optimizer(shape: ModelShape, plan: Plan, workload: Workload, hardware: Hardware) -> float:
    count = max(parameters_of_rank(shape, plan, rank) for rank in range(plan.pp))
    return count / (plan.dp * plan.cp if workload.fsdp else 1) * ADAMW_TRAFFIC / hardware.bandwidth


def _seconds(sent: AxisTraffic, hardware: Hardware, *, stride: int, ranks: int, ring: bool = True) -> float:
    """Return how long an axis takes to send, if nothing hides it.

    Args:
        stride: ranks from one member of a group to the next.
        ranks: members of a group.
        ring: a collective, which enters and leaves a node once on the links of all members there; a message between two
            ranks uses one.
    """
    if sent.bytes == 0:
        return 0.0
    near = min(ranks, max(1, hardware.per_node // stride))
    within = near == ranks
    rate = hardware.link if within else min(hardware.link, hardware.network * (near if ring else 1))
    latency = hardware.link_latency if within else hardware.network_latency
    return sent.bytes / (rate * LINK_SHARE) + sent.messages * latency * max(1.0, math.log2(ranks))
