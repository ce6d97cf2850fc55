"""Every plan that a model and a number of accelerators allow, ranked by predicted time under the memory limit."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

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
MOST_DOUBLINGS = 8
"""Of the ranks, when none fits, to find out how many would do."""


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
    all-gather, what is computed again in the backward pass. Replicas shard with FSDP2. Plans whose context ranks would
    have fewer than 512 tokens of a row (``Hardware.fewest_tokens``; on CPUs any number will do) are left out.

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

    def fits(ranks: int) -> bool:
        return any(
            _memory(shape, way) <= limit
            for mesh in _meshes(ranks, widest)
            for way in _ways(shape, mesh, rows, all_rows, base, choices[-1:], device)[1]
        )

    ranked, excluded = [], []
    for mesh in _meshes(world, widest):
        reason, ways = _ways(shape, mesh, rows, all_rows, base, choices, device)
        tries = [_proposal(shape, way, device) for way in ways]
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
    enough = None
    if not ranked:
        larger = itertools.takewhile(MOST_RANKS.__ge__, (world << times for times in range(1, MOST_DOUBLINGS + 1)))
        enough = next((count for count in larger if fits(count)), None)
    return Proposals(title=title, ranked=tuple(ranked), excluded=tuple(excluded), limit=limit, enough=enough)


def _rows(value: object, name: str) -> int | None:
    return None if value is None else require_exact_int(value, name, minimum=1, maximum=MOST_ROWS)


def _count(parameters: int) -> str:
    return f"{parameters / 1e9:.3g}B" if parameters >= 1e9 else f"{parameters / 1e6:.3g}M"


def _shape(model: Any) -> ModelShape:
    if isinstance(model, ModelShape):
        return model
    return shape_of_size(model) if isinstance(model, str) else ModelShape.of(model)


def _meshes(world: int, widest: int) -> Iterator[Plan]:
    """Yield meshes of so many ranks."""
    for tp in divisors(world):
        if tp > widest:
            return
        for pp in divisors(world // tp):
            for cp in divisors(world // tp // pp):
                yield Plan(dp=world // (tp * pp * cp), tp=tp, pp=pp, cp=cp)


def _passes(rows: int | None, rows_per_replica: int | None, pp: int) -> list[tuple[int, int]]:
    """Return (rows at once, passes of a step) worth trying; a pipeline's microbatches make passes needless."""
    if rows_per_replica is None:
        assert rows is not None
        return [(rows, 1)]
    if pp > 1:
        return [(rows_per_replica, 1)]
    return [(rows_per_replica // passes, passes) for passes in divisors(rows_per_replica)]


class _Way(NamedTuple):
    """One way to run a mesh: rows at once, and passes of them."""

    plan: Plan
    workload: Workload
    passes: int


def _ways(
    shape: ModelShape,
    mesh: Plan,
    rows: int | None,
    all_rows: int | None,
    base: Workload,
    recomputes: Sequence[Recompute],
    hardware: Hardware,
) -> tuple[str, list[_Way]]:
    """Return every way to run a mesh, or why there is none."""
    if all_rows is not None and all_rows % mesh.dp:
        return f"dp={mesh.dp} must divide global_batch_size={all_rows}", []
    if mesh.cp > 1 and base.seq_len < hardware.fewest_tokens * mesh.cp:
        return (
            f"cp={mesh.cp} leaves a rank fewer than {hardware.fewest_tokens} of the {base.seq_len} tokens of a row",
            [],
        )
    reason, ways = "", []
    for at_once, passes in _passes(rows, None if all_rows is None else all_rows // mesh.dp, mesh.pp):
        refusal, plans = _plans(shape, mesh, at_once, base.seq_len)
        reason = reason or refusal
        workloads = [replace(base, batch_size=at_once, recompute=choice) for choice in recomputes]
        ways += [_Way(plan, workload, passes) for plan, workload in itertools.product(plans, workloads)]
    return reason, ways


def _plans(shape: ModelShape, mesh: Plan, batch_size: int, seq_len: int) -> tuple[str, list[Plan]]:
    """Return every schedule, cut of the batch and way of context parallelism, or which rule is in the way."""
    reason, plans = "", []
    schedules: tuple[PpSchedule, ...] = tuple(STAGES_PER_RANK) if mesh.pp > 1 else ("1f1b",)
    modes = CP_MODES if mesh.cp > 1 else CP_MODES[:1]
    for schedule, mode, microbatches in itertools.product(schedules, modes, _microbatches(batch_size, mesh.pp)):
        request = Request(
            tp_size=mesh.tp,
            pp_size=mesh.pp,
            cp_size=mesh.cp,
            world_size=mesh.world_size,
            batch_size=batch_size,
            microbatches=microbatches,
            block=seq_len,
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
        if fault is None:
            plans.append(resolve(request)[0])
        else:
            reason = reason or fault.statement
    return reason, plans


def _memory(shape: ModelShape, way: _Way) -> int:
    return max(rank.reserved for rank in memory_by_rank(shape, way.plan, way.workload))


def _proposal(shape: ModelShape, way: _Way, hardware: Hardware) -> Proposal:
    proposal = Proposal(
        plan=way.plan,
        workload=way.workload,
        time=step_time(shape, way.plan, way.workload, hardware),
        memory=_memory(shape, way),
        accumulation=way.passes,
    )
    peak = hardware.peak.get(way.workload.precision)
    if peak is None:
        return proposal
    return replace(proposal, mfu=proposal.tokens_per_second * shape.operations_per_token(way.workload.seq_len) / peak)


def _microbatches(batch_size: int, pp: int) -> Sequence[int | None]:
    """Return divisors of the batch worth trying: at least as many parts as ranks, two and four times as many, all."""
    if pp == 1:
        return [None]
    return sorted({*(default_microbatches(batch_size, pp * times) for times in (1, 2, 4)), batch_size})
