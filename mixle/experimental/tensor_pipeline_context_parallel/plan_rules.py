"""The rules that a plan keeps, each a pure function, and the search for a plan nearby that keeps them all."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
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
    dropout: float | None

    @property
    def ranks_per_replica(self) -> int:
        return self.tp_size * self.pp_size * self.cp_size


class Fault(NamedTuple):
    """What is wrong with one argument."""

    argument: str
    statement: str


Rule = Callable[[Request], Fault | None]
Change = dict[str, int | str]

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


def _whole_attention_weights(request: Request) -> Fault | None:
    if request.cp_size == 1 or request.cp_mode != "ring" or not request.dropout:
        return None
    return Fault(
        "cp_mode",
        f"dropout={request.dropout} of attention weights does not go with cp_size={request.cp_size} and "
        'cp_mode="ring", which never has them in one place',
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
    _whole_attention_weights,
)


def first_fault(request: Request) -> Fault | None:
    """Return what is wrong with the first rule that the request breaks."""
    return next((fault for rule in RULES if (fault := rule(request)) is not None), None)


def refusal(request: Request) -> str | None:
    """Return what is wrong with each argument and what nearby keeps every rule; None if nothing is wrong.

    Values of the first argument at fault, the nearest below and above; or one change of several; or another mode that
    keeps the sizes: ``"... nearest that do: 2, 4"``, ``"tp_size=2, cp_size=1"``, ``"1, 3, or cp_mode="allgather""``.
    """
    faults: dict[str, str] = {}
    for rule in RULES:
        if (fault := rule(request)) is not None:
            faults.setdefault(fault.argument, fault.statement)
    if not faults:
        return None
    statements = "; ".join(faults.values())
    if list(faults) == ["cp_mode"]:  # the sizes keep every other rule, and these do not ask how they are reached
        return f'{statements}; use dropout=0 or cp_mode="allgather"'
    first, *others = faults
    changes = _neighbours(request, faults)
    bare = [] if others else [str(change[first]) for change in changes if list(change) == [first]]
    named = [_named(change) for change in changes[len(bare) :]]
    return f"{statements}; nearest that do: " + ", or ".join([*([", ".join(bare)] if bare else []), *named])


def _named(change: Change) -> str:
    return ", ".join(f'{name}="{new}"' if isinstance(new, str) else f"{name}={new}" for name, new in change.items())


def _neighbours(request: Request, faults: Mapping[str, str]) -> list[Change]:
    """Return changes that keep every rule: of the first argument at fault, else of several; then of the mode alone."""
    first = next(iter(faults))
    found: list[Change] = []
    if first != "world_size":
        asked = getattr(request, first)
        most = _most(request, first, asked + _REACH)
        top = min(asked - 1, most)
        end = min(asked + _REACH, most)
        ranges = range(top, max(0, top - _REACH), -1), range(asked + 1, end + 1)
        nearest = (next((v for v in values if _keeps(request, {first: v})), None) for values in ranges)
        found = [{first: v} for v in nearest if v is not None]
    if not found:
        mode: Change = {"cp_mode": "allgather"} if "cp_mode" in faults else {}
        based = replace(request, **mode)  # type: ignore[arg-type]
        change = next(change for change in _changes(based) if _keeps(based, change))
        found = [{**{name: v for name, v in change.items() if v != getattr(request, name)}, **mode}]
    alone: list[Change] = [{"cp_mode": "allgather"}] if "cp_size" in faults else []
    if not {"pp_size", "microbatches"}.isdisjoint(faults):
        alone.append({"pp_schedule": "1f1b"})
    return found + [change for change in alone if _keeps(request, change)]


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


def _keeps(request: Request, change: Mapping[str, int | str]) -> bool:
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
    asked, most = getattr(request, name), _most(by_itself, name, request.world_size or 1)
    known = divisors(request.world_size) if request.world_size else range(1, min(2 * asked, most, _REACH) + 1)
    keep = [size for size in known if size <= most and _keeps(by_itself, {name: size})]
    if request.world_size:
        return keep
    return sorted(keep, key=lambda size: abs(math.log(size) - math.log(asked)))[:_NEAREST]


def _most(request: Request, name: str, unknown: int) -> int:
    """Return what a value that keeps the rules is at most; ``unknown`` where nothing tells."""
    return min((bound for by in _BOUNDS[name] if (bound := getattr(request, by)) is not None), default=unknown)
