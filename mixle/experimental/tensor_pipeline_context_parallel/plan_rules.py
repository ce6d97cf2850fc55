"""The rules that a plan keeps, each a pure function, and the search for a plan nearby that keeps them all."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from mixle.experimental.tensor_pipeline_context_parallel.plan import (
    STAGES_PER_RANK,
    CpMode,
    Plan,
    PpSchedule,
    default_microbatches,
)


@dataclass(frozen=True, kw_only=True)
class Request:
    """The arguments of a plan, and what of the module they are checked against; None is what is not known."""

    tp_size: int
    pp_size: int
    cp_size: int
    world_size: int | None
    batch_size: int | None
    microbatches: int | None
    block: int | None
    cp_mode: CpMode
    pp_schedule: PpSchedule
    n_head: int | None
    n_kv_head: int | None
    d_mlp: int | None
    vocab: int | None
    blocks: int | None
    longest: int | None

    @property
    def ranks_per_replica(self) -> int:
        return self.tp_size * self.pp_size * self.cp_size


class Fault(NamedTuple):
    """What is wrong with one argument."""

    argument: str
    statement: str


Rule = Callable[[Request], Fault | None]


def _divides(attribute: str) -> Rule:
    def rule(request: Request) -> Fault | None:
        total = getattr(request, attribute)
        if total is None or total % request.tp_size == 0:
            return None
        return Fault("tp_size", f"tp_size={request.tp_size} must divide {attribute}={total}")

    return rule


def _enough_blocks(request: Request) -> Fault | None:
    if request.blocks is None or request.pp_size == 1:
        return None
    stages = request.pp_size * STAGES_PER_RANK[request.pp_schedule]
    if stages <= request.blocks:
        return None
    if stages == request.pp_size:
        needs = f"pp_size={request.pp_size} needs at least as many blocks"
    else:
        needs = f"pp_size={request.pp_size} makes {stages} stages with pp_schedule={request.pp_schedule!r}"
    return Fault("pp_size", f"{needs}, and the module has {request.blocks}")


def _fits_positions(request: Request) -> Fault | None:
    if request.block is None or request.longest is None or request.block <= request.longest:
        return None
    return Fault("block", f"block={request.block} must be at most the module's block={request.longest}")


def _even_sequence(request: Request) -> Fault | None:
    length = request.block or request.longest
    if request.cp_size == 1 or length is None:
        return None
    parts = request.cp_size * (2 if request.cp_mode == "ring" else 1)
    if length % parts == 0:
        return None
    return Fault(
        "cp_size",
        f"cp_size={request.cp_size} splits each sequence into {parts} parts, which must divide block={length}",
    )


def _fills_world(request: Request) -> Fault | None:
    if request.world_size is None or request.world_size % request.ranks_per_replica == 0:
        return None
    return Fault(
        "world_size",
        f"tp_size={request.tp_size} x pp_size={request.pp_size} x cp_size={request.cp_size} = "
        f"{request.ranks_per_replica} must divide world_size={request.world_size}",
    )


def _even_microbatches(request: Request) -> Fault | None:
    if request.microbatches is None or request.batch_size is None or request.batch_size % request.microbatches == 0:
        return None
    return Fault("microbatches", f"microbatches={request.microbatches} must divide batch_size={request.batch_size}")


def _whole_rounds(request: Request) -> Fault | None:
    """Looped schedules of torch run in rounds of about ``pp_size`` microbatches, all equally long."""
    if request.pp_size == 1 or STAGES_PER_RANK[request.pp_schedule] == 1 or request.microbatches is None:
        return None
    rounds = max(1, request.microbatches // request.pp_size)
    if request.microbatches % rounds == 0:
        return None
    return Fault(
        "microbatches",
        f"microbatches={request.microbatches} over pp_size={request.pp_size} make {rounds} rounds of "
        f"pp_schedule={request.pp_schedule!r}, which must be equally long",
    )


RULES: tuple[Rule, ...] = (
    _divides("n_head"),
    _divides("n_kv_head"),
    _divides("d_mlp"),
    _divides("vocab"),
    _enough_blocks,
    _fits_positions,
    _even_sequence,
    _fills_world,
    _even_microbatches,
    _whole_rounds,
)


def first_fault(request: Request) -> Fault | None:
    """Return what is wrong with the first rule that the request breaks."""
    return next((fault for rule in RULES if (fault := rule(request)) is not None), None)


def neighbours(request: Request, fault: Fault) -> str:
    """Return values that keep every rule: of the argument at fault, the nearest below and above; else of several.

    ``"2, 4"``, or ``"tp_size=2, cp_size=1"`` for one change of several arguments.
    """
    if fault.argument != "world_size":
        value = getattr(request, fault.argument)
        reach = value + max(value, request.ranks_per_replica, 64)
        below = next((v for v in range(value - 1, 0, -1) if _keeps(request, {fault.argument: v})), None)
        above = next((v for v in range(value + 1, reach + 1) if _keeps(request, {fault.argument: v})), None)
        nearest = [str(v) for v in (below, above) if v is not None]
        if nearest:
            return ", ".join(nearest)
    changes = next((change for change in _changes(request) if _keeps(request, change)), {})
    return ", ".join(f"{name}={value}" for name, value in changes.items() if value != getattr(request, name))


def resolve(request: Request) -> tuple[Plan, tuple[str, ...]]:
    """Return the plan that a request without faults runs as, and notes on what could run better."""
    notes = []
    dp = 1 if request.world_size is None else request.world_size // request.ranks_per_replica
    schedule, microbatches = request.pp_schedule, 1
    if request.pp_size > 1:
        microbatches = request.microbatches or (
            request.pp_size if request.batch_size is None else default_microbatches(request.batch_size, request.pp_size)
        )
        if microbatches < request.pp_size:
            notes.append(
                f"microbatches={microbatches} are fewer than pp_size={request.pp_size}: at no time are all ranks busy"
            )
            if schedule == "1f1b":
                schedule = "gpipe"  # what 1F1B comes to if no rank gets a microbatch back before it has sent the last
    length = request.block or request.longest
    if request.tp_size > 1 and length is not None and (length // request.cp_size) % request.tp_size:
        notes.append(
            f"tp_size={request.tp_size} does not divide the {length // request.cp_size} tokens that a rank has of a "
            "row: the parts that norms work on are uneven"
        )
    plan = Plan(
        dp=dp,
        tp=request.tp_size,
        pp=request.pp_size,
        cp=request.cp_size,
        cp_mode=request.cp_mode,
        microbatches=microbatches,
        pp_schedule=schedule,
    )
    return plan, tuple(notes)


def _keeps(request: Request, change: dict[str, int]) -> bool:
    return first_fault(replace(request, **change)) is None  # type: ignore[arg-type]


def _changes(request: Request) -> Iterator[dict[str, int]]:
    """Yield sizes to try together, the nearest in the ratio of sizes first; all at 1 keeps every rule."""
    world = request.world_size
    sizes = [
        size for size in range(1, (world or 2 * request.ranks_per_replica) + 1) if world is None or world % size == 0
    ]
    asked = (request.tp_size, request.pp_size, request.cp_size)
    bounds = (request.n_head or 1, request.blocks or 1, (request.block or request.longest or 1))
    axes = ([size for size in sizes if size <= bound] for bound in bounds)
    meshes = sorted(
        itertools.product(*axes), key=lambda mesh: sum(abs(math.log(a / b)) for a, b in zip(mesh, asked, strict=True))
    )
    others: dict[str, int] = {}
    if request.block is not None and request.longest is not None:
        others["block"] = min(request.block, request.longest)
    for tp, pp, cp in meshes:
        mesh = {"tp_size": tp, "pp_size": pp, "cp_size": cp}
        yield {**mesh, **others}
        if request.microbatches is not None:
            yield {**mesh, **others, "microbatches": 1}
