"""How many bytes each pipeline rank holds when it holds most. Ranks that differ only in dp, cp or tp are alike."""

from __future__ import annotations

from dataclasses import dataclass

from mixle.experimental.tensor_pipeline_context_parallel.model_shape import ModelShape
from mixle.experimental.tensor_pipeline_context_parallel.plan import Plan, split_blocks
from mixle.experimental.tensor_pipeline_context_parallel.workload import Workload

FP32 = 4
ADAMW_MOMENTS = 2 * FP32
DENSE_LOSS_COPIES = 3
"""float32 tensors as large as the logits that live at once in the loss: log-softmax and two gradients."""
SPLIT_LOSS_COPIES = 5
"""The same where the vocabulary is split: torch's ``loss_parallel`` takes the softmax apart into elementwise steps."""
ALLOCATOR_SLACK = 1.05
"""What the CUDA caching allocator reserves over what is live."""


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """Bytes on one rank at its peak.

    Attributes:
        parameters: its part, float32.
        gradients: theirs, float32.
        optimizer: AdamW's moments.
        activations: what the forward pass keeps for the backward pass, of all microbatches in flight.
        transient: the most that lives for a moment besides: the loss, or one block's backward pass.
        gathered: parameters in the precision they are used in, and gradients before they are reduced.
    """

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    transient: int
    gathered: int

    @property
    def total(self) -> int:
        """The sum."""
        return self.parameters + self.gradients + self.optimizer + self.activations + self.transient + self.gathered

    @property
    def reserved(self) -> int:
        """The sum as a CUDA allocator reports it."""
        return round(self.total * ALLOCATOR_SLACK)


def memory_by_rank(shape: ModelShape, plan: Plan, workload: Workload) -> tuple[RankMemory, ...]:
    """Return the peak memory of each pipeline rank, first to last."""
    return tuple(_rank_memory(shape, plan, workload, rank) for rank in range(plan.pp))


def parameters_of_rank(shape: ModelShape, plan: Plan, pp_rank: int) -> int:
    """Return the parameters that a rank works with, before data replicas shard them.

    With tied embeddings the first and the last pipeline rank have a copy each.
    """
    count = sum(map(len, _blocks_of(shape, plan, pp_rank))) * shape.block_parameters(plan.tp)
    if pp_rank == 0:
        count += shape.embedding_parameters(plan.tp)
    if pp_rank == plan.pp - 1:
        count += shape.head_parameters(plan.tp)
        if shape.tied and plan.pp == 1:
            count -= shape.vocab * shape.d_model // plan.tp
    return count


def tokens_per_microbatch(plan: Plan, workload: Workload) -> float:
    """Return the tokens of a microbatch that one context rank works on."""
    return workload.batch_size / plan.microbatches * workload.seq_len / plan.cp


def kept_per_token(shape: ModelShape, plan: Plan, workload: Workload) -> float:
    """Return the bytes that one block keeps for backward per token, on one tensor-parallel rank."""
    stream, width = workload.activation_bytes, shape.d_model / plan.tp
    match workload.recompute:
        case "full":
            return width * stream
        case "selective":
            products = shape.q_width + shape.kv_width + shape.d_mlp + (shape.d_model if shape.gated else 0)
            return (width + (products + shape.q_width) / plan.tp) * stream + shape.n_head / plan.tp * FP32
        case "none":
            return kept_by_whole_block(shape, plan, workload)


def kept_by_whole_block(shape: ModelShape, plan: Plan, workload: Workload) -> float:
    """Return the bytes that one block keeps per token if nothing is computed again.

    Two norms keep input and output (and, unless fused, the normed value); the products keep their inputs, which tensor
    parallelism gathers before the first of each half; attention keeps queries, keys, values, a float32 sum per head and
    its output, and a copy of that for the next product where rotary positions changed the layout.
    """
    d, fused = shape.d_model, workload.compiled or shape.norm == "layer"
    norms = 2 * d if fused else 4 * d
    gathered = 2 * d
    copied = 0 if workload.compiled or shape.learned_positions else shape.q_width
    attention = 2 * (shape.q_width + shape.kv_width) + copied
    mlp = shape.d_mlp * ((3 if workload.compiled else 4) if shape.gated else 2)
    elements = gathered + (norms + attention + mlp) / plan.tp
    return elements * workload.activation_bytes + shape.n_head / plan.tp * FP32


def _blocks_of(shape: ModelShape, plan: Plan, pp_rank: int) -> list[range]:
    split = split_blocks(shape.n_layer, plan.stages)
    return [split[stage] for stage in plan.stages_of(pp_rank)]


def _rank_memory(shape: ModelShape, plan: Plan, workload: Workload, pp_rank: int) -> RankMemory:
    stages = _blocks_of(shape, plan, pp_rank)
    count = parameters_of_rank(shape, plan, pp_rank)
    shards = plan.dp * plan.cp if workload.fsdp else 1
    owned = -(-count // shards)
    tokens = tokens_per_microbatch(plan, workload)
    stream = workload.activation_bytes

    longest = max(map(len, stages))
    boundary = shape.d_model / plan.tp * stream if plan.pp > 1 else 0
    per_pair = (longest * kept_per_token(shape, plan, workload) + boundary) * tokens
    activations = plan.in_flight(pp_rank) * per_pair
    transient = _block_transient(shape, plan, workload) * tokens
    if pp_rank == plan.pp - 1:
        waiting = plan.microbatches if plan.pp_schedule == "gpipe" else 1
        activations += waiting * _kept_by_head(shape, plan, workload) * tokens
        activations += (waiting - 1) * _kept_by_loss(shape, plan, workload) * tokens
        transient = max(transient, _loss_transient(shape, plan, workload) * tokens)

    return RankMemory(
        parameters=owned * FP32,
        gradients=owned * FP32,
        optimizer=owned * ADAMW_MOMENTS,
        activations=round(activations),
        transient=round(transient),
        gathered=round(_gathered(shape, plan, workload, pp_rank, count)),
    )


def _block_transient(shape: ModelShape, plan: Plan, workload: Workload) -> float:
    """Bytes per token that live while one block runs backward: what it computed again, and gradients beside it."""
    again = kept_by_whole_block(shape, plan, workload) - kept_per_token(shape, plan, workload)
    gradients = shape.d_model + (shape.d_model + (3 if shape.gated else 2) * shape.d_mlp) / plan.tp
    keys_and_values = 2 * shape.kv_width / plan.tp
    if plan.cp == 1:
        foreign = 0.0
    elif plan.cp_mode == "ring":
        foreign = 4 * keys_and_values  # one pair used and one in flight, and their gradients
    else:
        foreign = 2 * plan.cp * keys_and_values  # all of the sequence's, and their gradients
    return again + (gradients + foreign) * workload.activation_bytes


def _kept_by_head(shape: ModelShape, plan: Plan, workload: Workload) -> float:
    """Bytes per token that the last norm keeps."""
    norms = 1 if workload.compiled or shape.norm == "layer" else 2
    return shape.d_model * (1 + norms / plan.tp) * workload.activation_bytes


def _kept_by_loss(shape: ModelShape, plan: Plan, workload: Workload) -> float:
    """Bytes per token that the loss of one microbatch keeps until its backward pass: logits, and their log-softmax."""
    return shape.vocab / plan.tp * (workload.activation_bytes + (0 if workload.fused_loss else FP32))


def _loss_transient(shape: ModelShape, plan: Plan, workload: Workload) -> float:
    """Bytes per token that live in the loss."""
    logits = shape.vocab / plan.tp
    if workload.fused_loss:
        return 2 * logits * workload.activation_bytes
    copies = DENSE_LOSS_COPIES if plan.tp == 1 else SPLIT_LOSS_COPIES
    return logits * (workload.activation_bytes + copies * FP32)


def _gathered(shape: ModelShape, plan: Plan, workload: Workload, pp_rank: int, count: int) -> float:
    """Bytes of parameters and gradients beside those that the optimizer sees.

    FSDP2 gathers a block, prefetches the next, and reduces one block's float32 gradients, beside the embeddings and the
    head, which stay. In a pipeline everything stays gathered and gradients add up over the microbatches before they are
    reduced. Without FSDP2, mixed precision keeps a cast copy, and DDP its buckets.
    """
    mixed = 0 if workload.precision == "fp32" else workload.activation_bytes
    if not workload.fsdp:
        return count * mixed + (count * FP32 if plan.dp * plan.cp > 1 else 0)
    if plan.dp * plan.cp == 1:
        return count * mixed
    if plan.pp > 1:
        return count * (workload.activation_bytes + FP32)
    block = shape.block_parameters(plan.tp)
    root = count - shape.n_layer * block
    return (2 * block + root) * workload.activation_bytes + block * FP32
