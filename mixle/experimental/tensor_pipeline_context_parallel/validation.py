"""Whether a plan fits a module, a world and a batch, and what it costs: checked before anything runs."""

from __future__ import annotations

from collections.abc import Sized
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from mixle.experimental.tensor_pipeline_context_parallel.memory import (
    ADAMW_MOMENTS,
    FP32,
    memory_by_rank,
)
from mixle.experimental.tensor_pipeline_context_parallel.model_shape import ModelShape
from mixle.experimental.tensor_pipeline_context_parallel.plan import (
    CP_MODES,
    MOST_RANKS,
    MOST_ROWS,
    STAGES_PER_RANK,
    CpMode,
    Plan,
    PpSchedule,
    split_blocks,
)
from mixle.experimental.tensor_pipeline_context_parallel.plan_rules import Request, refusal, resolve
from mixle.experimental.tensor_pipeline_context_parallel.report import PlanReport
from mixle.experimental.tensor_pipeline_context_parallel.sample_check import check_sample
from mixle.experimental.tensor_pipeline_context_parallel.traffic import traffic
from mixle.experimental.tensor_pipeline_context_parallel.workload import Workload
from mixle.utils.exact import require_choice, require_exact_bool, require_exact_int, require_positive_int

if TYPE_CHECKING:
    from torch import nn

__all__ = ["validate_tp_pp_cp_plan"]

_FACTS = ("n_head", "n_kv_head", "d_mlp", "vocab", "blocks", "block")


def validate_tp_pp_cp_plan(
    module: Any,
    tp_size: int = 1,
    pp_size: int = 1,
    cp_size: int = 1,
    *,
    world_size: int | None = None,
    batch_size: int | None = None,
    microbatches: int | None = None,
    block: int | None = None,
    cp_mode: CpMode = "ring",
    sample: Any = None,
    pp_schedule: PpSchedule = "1f1b",
    parallel: Literal["ddp", "fsdp"] = "ddp",
    precision: Literal["fp32", "bf16"] = "fp32",
    activation_checkpointing: bool = False,
) -> PlanReport:
    """Check a plan and return what it costs.

    Args:
        module: a :class:`~mixle.models.CausalLM` whose parameters all require gradients, or, with all sizes 1, any
            torch module. For the numbers alone a ``ModelShape``, or any other object that has ``n_head``, ``d_mlp`` and
            ``vocab`` where ``tp_size > 1``, ``blocks`` where ``pp_size > 1``, ``block`` where ``cp_size > 1`` and none
            is given.
        tp_size: ranks that share every layer; divides query and key/value heads, the MLP's width and the vocabulary.
        pp_size: ranks that hold successive layers; every stage has at least one block.
        cp_size: ranks that share every sequence; it divides the sequence's length, twice with the ring, which gives
            each rank an early and a late part so that all have the same causal work.
        world_size: ranks in all, a multiple of the product of the sizes; by default their product.
        batch_size: rows of one data replica in a step; by default one per microbatch.
        microbatches: parts that it is cut into for a pipeline; by default its smallest divisor of at least ``pp_size``.
        block: tokens of a row; by default the sample's, or else the module's longest.
        cp_mode: ``"ring"`` passes keys and values from rank to rank, ``"allgather"`` gathers those of the sequence.
        sample: a ``BatchConfig`` of what a teacher sends, or any object with its ``specs``.
        pp_schedule: the order of microbatches.
        parallel: what data replicas do, for the numbers of the report; likewise the next two.
        precision: of forward and backward.
        activation_checkpointing: blocks are computed again in the backward pass.

    Raises:
        TypeError: an argument of the wrong type, a module that lacks what an axis needs, or one that a plan cannot take
            apart; names it.
        ValueError: arguments that do not fit, each named, dropout with the ring and frozen parameters included; gives
            the numbers, and the nearest that pass every check.
    """
    _require_module(module)
    request = Request(
        tp_size=require_positive_int(tp_size, "tp_size"),
        pp_size=require_positive_int(pp_size, "pp_size"),
        cp_size=require_positive_int(cp_size, "cp_size"),
        world_size=_optional(world_size, "world_size", MOST_RANKS),
        batch_size=_optional(batch_size, "batch_size", MOST_ROWS),
        microbatches=_optional(microbatches, "microbatches"),
        block=_optional(block, "block"),
        cp_mode=require_choice(cp_mode, "cp_mode", CP_MODES),
        pp_schedule=require_choice(pp_schedule, "pp_schedule", STAGES_PER_RANK),
        n_head=_fact(module, "n_head"),
        n_kv_head=_fact(module, "n_kv_head"),
        d_mlp=_fact(module, "d_mlp"),
        vocab=_fact(module, "vocab"),
        blocks=_block_count(module),
        longest=_fact(module, "block"),
        dropout=_dropout(module),
    )
    require_choice(parallel, "parallel", ("ddp", "fsdp"))
    require_choice(precision, "precision", ("fp32", "bf16"))
    require_exact_bool(activation_checkpointing, "activation_checkpointing")
    _require_facts(module, request)
    if request.ranks_per_replica > 1 and _is_torch_module(module):
        require_trainable(module)
        require_known(module)
    along = whole = 0
    if sample is not None:
        parts = request.cp_size * (2 if request.cp_mode == "ring" and request.cp_size > 1 else 1)
        tokens, along, whole = check_sample(
            sample, length=request.block, longest=request.longest, vocab=request.vocab, parts=parts
        )
        request = replace(request, block=tokens)
    refused = refusal(request)
    if refused is not None:
        raise ValueError(refused)

    plan, notes = resolve(request)
    rows = request.batch_size or plan.microbatches
    sample_bytes = None if sample is None else rows * (along // plan.cp + whole)
    length, shape = request.block or request.longest, _shape(module)
    if shape is None or length is None:
        return _counted_only(module, plan, fsdp=parallel == "fsdp", sample_bytes=sample_bytes, notes=notes)
    workload = Workload(
        batch_size=rows,
        seq_len=length,
        precision=precision,
        recompute="full" if activation_checkpointing else "none",
        fsdp=parallel == "fsdp",
    )
    ranks = memory_by_rank(shape, plan, workload)
    return PlanReport(
        plan=plan,
        parameters=max(rank.parameters for rank in ranks),
        gradients=max(rank.gradients for rank in ranks),
        optimizer=max(rank.optimizer for rank in ranks),
        activations=max(rank.activations for rank in ranks),
        peak=max(rank.total for rank in ranks),
        holds=_holds(plan, shape.n_layer, tied=shape.tied),
        by_rank=ranks,
        wire=traffic(shape, plan, workload),
        bubble=plan.idle_fraction,
        sample_bytes=sample_bytes,
        notes=notes,
    )


def require_trainable(module: nn.Module) -> None:
    """Refuse a module with parameters that a plan could not train."""
    frozen = next((name for name, parameter in module.named_parameters() if not parameter.requires_grad), None)
    if frozen is not None:
        raise ValueError(
            f"{frozen} does not require a gradient; a plan trains every parameter of a module: set requires_grad, or "
            "leave tp_size, pp_size and cp_size at 1"
        )


def require_known(module: nn.Module) -> None:
    """Refuse a module of which a plan does not know the parts."""
    from mixle.models.transformer import CausalLM

    if type(module) is not CausalLM:
        raise TypeError(
            f"a plan takes a mixle.models.transformer.CausalLM apart, not a {type(module).__name__}; leave "
            "tp_size, pp_size and cp_size at 1 for other modules"
        )


def _is_torch_module(module: Any) -> bool:
    return callable(getattr(module, "named_parameters", None))


def _dropout(module: Any) -> float | None:
    dropout = getattr(module, "dropout", None)
    return dropout if isinstance(dropout, float) else None


def _require_module(module: Any) -> None:
    tells = callable(getattr(module, "parameters", None)) or any(hasattr(module, name) for name in _FACTS)
    if isinstance(module, type) or not tells:
        raise TypeError(f"module={module!r:.80} must be a torch module or a ModelShape, not {type(module).__name__}")


def _optional(value: object, name: str, most: int | None = None) -> int | None:
    return None if value is None else require_exact_int(value, name, minimum=1, maximum=most)


def _fact(module: Any, name: str) -> int | None:
    """Return a number that the module tells; its attribute of that name may also be a layer, or a table of words."""
    try:
        return require_positive_int(getattr(module, name, None), name)
    except TypeError:
        return None


def _block_count(module: Any) -> int | None:
    if isinstance(module, ModelShape):
        return module.n_layer
    blocks = getattr(module, "blocks", None)
    return len(blocks) if isinstance(blocks, Sized) else None


def _require_facts(module: Any, request: Request) -> None:
    """Refuse a module that an axis cannot work on."""
    needs = {
        "tp_size": {name: getattr(request, name) for name in ("n_head", "d_mlp", "vocab")},
        "pp_size": {"blocks": request.blocks},
        "cp_size": {"block": request.block or request.longest},
    }
    for axis, facts in needs.items():
        lacking = [name for name, value in facts.items() if value is None]
        if getattr(request, axis) > 1 and lacking:
            raise TypeError(
                f"{axis}={getattr(request, axis)} needs a module with {lacking[0]}, which {type(module).__name__} "
                f"lacks; use {axis}=1" + (", or give block" if axis == "cp_size" else "")
            )


def _shape(module: Any) -> ModelShape | None:
    if isinstance(module, ModelShape):
        return module
    try:
        return ModelShape.of(module)
    except (TypeError, ValueError):
        return None


def _counted_only(
    module: Any, plan: Plan, *, fsdp: bool, sample_bytes: int | None, notes: tuple[str, ...]
) -> PlanReport:
    """Report the parameters of a module that does not tell its widths, as if ranks of a replica had like parts."""
    parameters = getattr(module, "parameters", None)
    count = sum(parameter.numel() for parameter in parameters()) if callable(parameters) else int(parameters or 0)
    owned = -(-count // (plan.tp * plan.pp * (plan.dp * plan.cp if fsdp else 1)))
    return PlanReport(
        plan=plan,
        parameters=owned * FP32,
        gradients=owned * FP32,
        optimizer=owned * ADAMW_MOMENTS,
        holds=_holds(plan, _block_count(module) or 0, tied=False),
        bubble=plan.idle_fraction,
        sample_bytes=sample_bytes,
        notes=notes,
    )


def _holds(plan: Plan, n_layer: int, *, tied: bool) -> tuple[str, ...]:
    """Say what each pipeline rank has."""
    if plan.pp == 1:
        return (f"everything, 1/{plan.tp} of each matrix" if plan.tp > 1 else "everything",)
    split = split_blocks(n_layer, plan.stages)
    held = []
    for rank in range(plan.pp):
        runs = [split[stage] for stage in plan.stages_of(rank)]
        parts = [
            "blocks " + ", ".join(f"{run.start}-{run.stop - 1}" if len(run) > 1 else f"{run.start}" for run in runs)
        ]
        if rank == 0:
            parts.insert(0, "embedding")
        if rank == plan.pp - 1:
            parts.append("norm, head" + (" (a copy of the embedding's weight, kept equal)" if tied else ""))
        held.append(", ".join(parts))
    return tuple(held)
