"""Every plan that a model and a number of accelerators allow, ranked by predicted time under the memory limit."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from mixle.experimental.tensor_pipeline_context_parallel.hardware import GIB, HARDWARE, Hardware
from mixle.experimental.tensor_pipeline_context_parallel.memory import memory_by_rank
from mixle.experimental.tensor_pipeline_context_parallel.model_shape import ModelShape, shape_of_size
from mixle.experimental.tensor_pipeline_context_parallel.plan import (
    CP_MODES,
    MOST_RANKS,
    MOST_ROWS,
    STAGES_PER_RANK,
    Plan,
    PpSchedule,
    default_microbatches,
    divisors,
)
from mixle.experimental.tensor_pipeline_context_parallel.plan_rules import Request, first_fault, resolve
from mixle.experimental.tensor_pipeline_context_parallel.proposals import Exclusion, Proposal, Proposals
from mixle.experimental.tensor_pipeline_context_parallel.report import readable
from mixle.experimental.tensor_pipeline_context_parallel.step_time import step_time
from mixle.experimental.tensor_pipeline_context_parallel.workload import RECOMPUTES, Precision, Recompute, Workload
from mixle.utils.exact import require_choice, require_exact_int, require_positive_int

CONTEXT_BYTES = 2 * GIB
"""What an accelerator's driver and communication buffers take beside what the allocator reserves."""
FEWEST_TOKENS = 512
"""Of a row, on one context rank: with fewer, attention's kernels are far from the rate that is assumed."""


def propose_plans(
    model: Any,
    world_size: int,
    *,
    hardware: str | Hardware,
    batch_size: int | None = None,
    global_batch_size: int | None = None,
    seq_len: int,
    precision: Precision = "bf16",
    compiled: bool = False,
    recompute: Recompute | None = None,
    memory_limit: int | None = None,
    max_tp: int | None = None,
) -> Proposals:
    """Rank every plan of ``world_size`` accelerators by predicted time.

    For each mesh ``(pp, dp, cp, tp)`` the fastest way to run it that fits is chosen: schedule and microbatches, ring or
    all-gather, what is computed again in the backward pass. Replicas shard with FSDP2.

    Args:
        model: a :class:`~mixle.models.CausalLM`, a ``ModelShape``, a name such as ``"llama3-8b"`` or a size such as
            ``"8B"``.
        world_size: accelerators.
        hardware: ``"a100"``, ``"h100"``, ``"h200"``, ``"b200"``, ``"cpu"``, or a :class:`Hardware`.
        batch_size: rows of each data replica. Plans with more replicas train more rows in a step, so that the order is
            that of seconds per token.
        global_batch_size: rows of all replicas together, in place of ``batch_size``; a replica takes its part at once
            or accumulates gradients.
        seq_len: tokens of a row.
        precision: of matrix products.
        compiled: elementwise operations are fused.
        recompute: ``"none"``, ``"selective"`` or ``"full"``; by default whichever of the first and the last is faster
            and fits, since these are what ``activation_checkpointing`` offers.
        memory_limit: bytes that a rank may reserve; by default the accelerator's memory less 2 GiB.
        max_tp: largest tensor-parallel size; by default the accelerators of a node.

    Raises:
        TypeError, ValueError: an argument that is not what it says above.
    """
    shape = _shape(model)
    device = HARDWARE[require_choice(hardware, "hardware", HARDWARE)] if isinstance(hardware, str) else hardware
    if not isinstance(device, Hardware):
        raise TypeError(f"hardware={hardware!r} must be a name or a Hardware")
    world = require_exact_int(world_size, "world_size", minimum=1, maximum=MOST_RANKS)
    if (batch_size is None) == (global_batch_size is None):
        raise ValueError("give one of batch_size (rows of each replica) and global_batch_size (rows of all)")
    rows, all_rows = _rows(batch_size, "batch_size"), _rows(global_batch_size, "global_batch_size")
    limit = (
        max(0, device.memory - CONTEXT_BYTES)
        if memory_limit is None
        else require_positive_int(memory_limit, "memory_limit")
    )
    widest = device.per_node if max_tp is None else require_positive_int(max_tp, "max_tp")
    base = Workload(
        batch_size=1, seq_len=require_positive_int(seq_len, "seq_len"), precision=precision, compiled=compiled
    )
    longest = getattr(model, "block", None)
    if isinstance(longest, int) and base.seq_len > longest:
        raise ValueError(f"seq_len={base.seq_len} must be at most the module's block={longest}")
    choices: tuple[Recompute, ...] = ("none", "full")
    if recompute is not None:
        choices = (require_choice(recompute, "recompute", RECOMPUTES),)

    ranked, excluded = [], []
    for dp, tp, pp, cp in _meshes(world, widest):
        mesh = Plan(dp=dp, tp=tp, pp=pp, cp=cp)
        if all_rows is not None and all_rows % dp:
            excluded.append(Exclusion(mesh, f"dp={dp} must divide global_batch_size={all_rows}"))
            continue
        reason, tries = "", []
        for at_once, accumulation in _passes(rows, None if all_rows is None else all_rows // dp, pp):
            workload = replace(base, batch_size=at_once)
            refusal, found = _tries(shape, mesh, workload, choices, device)
            reason = reason or refusal
            tries += [replace(proposal, accumulation=accumulation) for proposal in found]
        fitting = [proposal for proposal in tries if proposal.memory <= limit]
        if fitting:
            ranked.append(max(fitting, key=lambda proposal: proposal.tokens_per_second))
        elif tries:
            smallest = min(tries, key=lambda proposal: proposal.memory)
            needs = f"needs {readable(smallest.memory)} of {readable(limit)}, recompute={smallest.workload.recompute}"
            excluded.append(Exclusion(smallest.plan, needs, smallest))
        else:
            excluded.append(Exclusion(mesh, reason))
    ranked.sort(key=lambda proposal: -proposal.tokens_per_second)
    excluded.sort(key=lambda miss: miss.proposal.memory if miss.proposal else math.inf)
    batch = f"{rows} rows per replica" if rows is not None else f"{all_rows} rows"
    title = (
        f"{shape.name or 'model'}: {_count(shape.parameters)} parameters on {world} x {device.name}, {batch} of "
        f"{seq_len} tokens, {precision}"
    )
    return Proposals(title=title, ranked=tuple(ranked), excluded=tuple(excluded), limit=limit)


def _rows(value: object, name: str) -> int | None:
    return None if value is None else require_exact_int(value, name, minimum=1, maximum=MOST_ROWS)


def _count(parameters: int) -> str:
    return f"{parameters / 1e9:.3g}B" if parameters >= 1e9 else f"{parameters / 1e6:.3g}M"


def _shape(model: Any) -> ModelShape:
    if isinstance(model, ModelShape):
        return model
    return shape_of_size(model) if isinstance(model, str) else ModelShape.of(model)


def _meshes(world: int, widest: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield (dp, tp, pp, cp) with that product."""
    for tp in divisors(world):
        if tp > widest:
            return
        for pp in divisors(world // tp):
            for cp in divisors(world // tp // pp):
                yield world // (tp * pp * cp), tp, pp, cp


def _passes(rows: int | None, rows_per_replica: int | None, pp: int) -> list[tuple[int, int]]:
    """Return (rows at once, passes of a step) worth trying; a pipeline's microbatches make passes needless."""
    if rows_per_replica is None:
        assert rows is not None
        return [(rows, 1)]
    if pp > 1:
        return [(rows_per_replica, 1)]
    return [(rows_per_replica // passes, passes) for passes in divisors(rows_per_replica)]


def _tries(
    shape: ModelShape, mesh: Plan, workload: Workload, recomputes: Sequence[Recompute], hardware: Hardware
) -> tuple[str, list[Proposal]]:
    """Return every way to run a mesh, or why there is none."""
    if mesh.cp > 1 and workload.seq_len < FEWEST_TOKENS * mesh.cp:
        return f"cp={mesh.cp} leaves a rank fewer than {FEWEST_TOKENS} of the {workload.seq_len} tokens of a row", []
    reason, tries = "", []
    schedules: tuple[PpSchedule, ...] = tuple(STAGES_PER_RANK) if mesh.pp > 1 else ("1f1b",)
    modes = CP_MODES if mesh.cp > 1 else CP_MODES[:1]
    parts = _microbatches(workload.batch_size, mesh.pp)
    for schedule, mode, microbatches in itertools.product(schedules, modes, parts):
        request = Request(
            tp_size=mesh.tp,
            pp_size=mesh.pp,
            cp_size=mesh.cp,
            world_size=mesh.world_size,
            batch_size=workload.batch_size,
            microbatches=microbatches,
            block=workload.seq_len,
            cp_mode=mode,
            pp_schedule=schedule,
            n_head=shape.n_head,
            n_kv_head=shape.n_kv_head,
            d_mlp=shape.d_mlp,
            vocab=shape.vocab,
            blocks=shape.n_layer,
            longest=None,
            dropout=None,
        )
        fault = first_fault(request)
        if fault is not None:
            reason = reason or fault.statement
            continue
        plan, _ = resolve(request)
        tries += [_proposal(shape, plan, replace(workload, recompute=choice), hardware) for choice in recomputes]
    return reason, tries


def _proposal(shape: ModelShape, plan: Plan, workload: Workload, hardware: Hardware) -> Proposal:
    return Proposal(
        plan=plan,
        workload=workload,
        time=step_time(shape, plan, workload, hardware),
        memory=max(rank.reserved for rank in memory_by_rank(shape, plan, workload)),
    )


def _microbatches(batch_size: int, pp: int) -> Sequence[int | None]:
    """Return divisors of the batch worth trying: at least as many parts as ranks, two and four times as many, all."""
    if pp == 1:
        return [None]
    return sorted({*(default_microbatches(batch_size, pp * times) for times in (1, 2, 4)), batch_size})
