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
    divisors,
    makes_whole_rounds,
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

_SIZES = ("tp_size", "pp_size", "cp_size")
_BOUNDS = {
    "tp_size": ("n_head", "n_kv_head", "d_mlp", "vocab", "world_size"),
    "pp_size": ("blocks", "world_size"),
    "cp_size": ("block", "longest", "world_size"),
    "microbatches": ("batch_size",),
    "block": ("longest",),
}
_REACH = 4096  # how far a value is looked for
_NEAREST = 4  # sizes of each axis that are tried together


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


def _parts_pass_a_pipeline(request: Request) -> Fault | None:
    if request.pp_size > 1 or request.microbatches in (None, 1):
        return None
    return Fault("microbatches", f"microbatches={request.microbatches} must pass a pipeline, and pp_size=1 is none")


def _whole_rounds(request: Request) -> Fault | None:
    if request.pp_size == 1 or request.microbatches is None:
        return None
    if makes_whole_rounds(request.microbatches, request.pp_size, request.pp_schedule):
        return None
    return Fault(
        "microbatches",
        f"microbatches={request.microbatches} over pp_size={request.pp_size} make "
        f"{request.microbatches // request.pp_size} rounds of pp_schedule={request.pp_schedule!r}, which must be "
        "equally long",
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
    _parts_pass_a_pipeline,
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
        most = _most(request, fault.argument, value + _REACH)
        top = min(value - 1, most)
        below = next((v for v in range(top, max(0, top - _REACH), -1) if _keeps(request, {fault.argument: v})), None)
        end = min(value + _REACH, most)
        above = next((v for v in range(value + 1, end + 1) if _keeps(request, {fault.argument: v})), None)
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
            request.pp_size
            if request.batch_size is None
            else default_microbatches(request.batch_size, request.pp_size, schedule)
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
    others: dict[str, int] = {}
    if request.block is not None and request.longest is not None:
        others["block"] = min(request.block, request.longest)
    alone = {"tp_size": 1, "pp_size": 1, "cp_size": 1, "world_size": None, "batch_size": None, "microbatches": None}
    by_itself = replace(request, **alone, **others)  # type: ignore[arg-type]
    tp_sizes, pp_sizes, cp_sizes = (_sizes(request, by_itself, name) for name in _SIZES)
    world = request.world_size or 0  # 0 is divided by all
    meshes = [
        (tp, pp, cp)
        for tp, pp in itertools.product(tp_sizes, pp_sizes)
        if world % (tp * pp) == 0
        for cp in cp_sizes
        if world % (tp * pp * cp) == 0
    ]
    asked = [math.log(getattr(request, name)) for name in _SIZES]
    meshes.sort(key=lambda mesh: sum(abs(math.log(a) - b) for a, b in zip(mesh, asked, strict=True)))
    for mesh in meshes:
        sizes = dict(zip(_SIZES, mesh, strict=True))
        yield {**sizes, **others}
        if request.microbatches is not None:
            yield {**sizes, **others, "microbatches": 1}


def _sizes(request: Request, by_itself: Request, name: str) -> list[int]:
    """Return sizes of one axis that keep every rule if the others are 1; those nearest to what was asked."""
    asked, most = getattr(request, name), _most(by_itself, name, 1)
    known = divisors(request.world_size) if request.world_size else range(1, min(2 * asked, most, _REACH) + 1)
    keep = [size for size in known if size <= most and _keeps(by_itself, {name: size})]
    if request.world_size:
        return keep
    return sorted(keep, key=lambda size: abs(math.log(size) - math.log(asked)))[:_NEAREST]


def _most(request: Request, name: str, unknown: int) -> int:
    """Return what a value that keeps the rules is at most; ``unknown`` where nothing tells."""
    return min((bound for by in _BOUNDS[name] if (bound := getattr(request, by)) is not None), default=unknown)
