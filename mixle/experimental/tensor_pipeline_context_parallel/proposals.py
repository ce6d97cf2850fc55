"""What proposing plans returns: those that work, ranked, those that nearly do, and a table of both."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mixle.experimental.tensor_pipeline_context_parallel.plan import Plan
from mixle.experimental.tensor_pipeline_context_parallel.report import readable
from mixle.experimental.tensor_pipeline_context_parallel.step_time import StepTime
from mixle.experimental.tensor_pipeline_context_parallel.workload import Workload

TIE = 0.10
"""Plans that are slower than the fastest by no more count as equally fast, since predictions are less exact."""
NEAR_MISS = 1.5
"""Times the memory that there is: what needs more is no near miss."""
_ALIKE = 0.03
_REASONS = 4
_AXES = ("dp", "tp", "pp", "cp")
_HEADER = ["", "plan", "rows", "passes", "recompute", "tokens/s/rank", "MFU", "step s", "memory", "bubble"]


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """A plan with what it is predicted to cost.

    Attributes:
        plan: sizes and schedule.
        workload: the rows that a replica takes at once, and what it computes again.
        time: seconds of one pass over them with an optimizer step, by what they go to.
        memory: bytes that the fullest rank reserves.
        accumulation: passes of an optimizer step.
        mfu: model FLOP utilization: the operations that training takes, those computed again not counted, as a share of
            the accelerator's published peak; None where the hardware tells none.
    """

    plan: Plan
    workload: Workload
    time: StepTime
    memory: int
    accumulation: int = 1
    mfu: float | None = None

    @property
    def seconds(self) -> float:
        """Seconds of an optimizer step."""
        return self.accumulation * (self.time.total - self.time.optimizer) + self.time.optimizer

    @property
    def tokens_per_second(self) -> float:
        """Tokens of a step per second and rank."""
        rows = self.accumulation * self.workload.batch_size * self.plan.dp
        return rows * self.workload.seq_len / self.plan.world_size / self.seconds

    @property
    def axes(self) -> int:
        """The number of axes with more than one rank, each of which is something to understand and to go wrong."""
        return sum(getattr(self.plan, axis) > 1 for axis in _AXES)

    def handle_arguments(self) -> dict[str, Any]:
        """Return keyword arguments of ``StreamingTokenEncodedData`` and ``validate_tp_pp_cp_plan``.

        Passes are not among them: give the handle
        ``training=TrainingOptions(gradient_accumulation=proposal.accumulation)``.

        Raises:
            ValueError: a precision or recomputation that handles do not have.
        """
        how = self.workload
        if how.precision == "fp8":
            raise ValueError('precision="fp8" is for prediction; handles have "fp32" and "bf16"')
        if how.recompute == "selective":
            raise ValueError(
                'recompute="selective" is for prediction; handles have "none" and, as activation_checkpointing, "full"'
            )
        wrapping = {"parallel": "fsdp" if how.fsdp else "ddp"} if self.plan.dp * self.plan.cp > 1 else {}
        return {
            **self.plan.handle_arguments(),
            **wrapping,
            "batch_size": how.batch_size,
            "block": how.seq_len,
            "precision": how.precision,
            "activation_checkpointing": how.recompute == "full",
        }


@dataclass(frozen=True)
class Exclusion:
    """A mesh that does not work, with the reason; ``proposal`` is its best try if only memory is in the way."""

    plan: Plan
    reason: str
    proposal: Proposal | None = None


@dataclass(frozen=True, kw_only=True)
class Proposals(Sequence[Proposal]):
    """What works, the fastest first, one entry per mesh; and what does not. Prints as a table.

    Attributes:
        ranked: by seconds per token; of equal batches, by seconds per step.
        excluded: the nearest to fitting first, and after what only lacks memory what no rule allows.
        limit: bytes that a rank may reserve.
        enough: the smallest number of ranks, doubled from those asked for, on which some plan fits; None if it fits
            already, or on none that was looked at.
    """

    title: str
    ranked: tuple[Proposal, ...]
    excluded: tuple[Exclusion, ...]
    limit: int
    enough: int | None = None

    def __getitem__(self, index: Any) -> Any:
        return self.ranked[index]

    def __len__(self) -> int:
        return len(self.ranked)

    @property
    def ties(self) -> tuple[Proposal, ...]:
        """Those within 10 % of the fastest, which predictions cannot tell apart; those with the fewest axes first."""
        enough = (1 - TIE) * self.ranked[0].tokens_per_second if self.ranked else 0.0
        tied = [proposal for proposal in self.ranked if proposal.tokens_per_second >= enough]
        return tuple(sorted(tied, key=lambda proposal: proposal.axes))

    @property
    def near_misses(self) -> tuple[Exclusion, ...]:
        """Those that need at most one and a half times the memory that there is, the nearest first."""
        most = NEAR_MISS * self.limit
        return tuple(miss for miss in self.excluded if miss.proposal is not None and miss.proposal.memory <= most)

    def table(self, *, rows: int = 10, near_misses: int = 5) -> str:
        """Return a table: ties first, the simplest of them at the top, then slower plans, then the nearest misses.

        Of plans that cost the same and only trade replicas for context ranks the simplest is shown.
        """
        lines = [self.title, ""]
        if self.ranked:
            tied = self.ties
            shown = _told_apart([*tied, *self.ranked[len(tied) :]])
            lines += _aligned([_HEADER, *(_cells(each, "=" if each in tied else "") for each in shown[:rows])])
            hidden = [f"{len(self.ranked) - len(shown)} alike"] if len(shown) < len(self.ranked) else []
            slower = [f"{len(shown) - rows} slower"] if len(shown) > rows else []
            if slower or hidden:
                lines.append(f"and {', '.join(slower + hidden)}")
            if len(tied) > 1:
                lines.append(f"= within {TIE:.0%} of the fastest, the simplest first: predictions are less exact")
        else:
            lines.append(self._what_would_do())
        if self.near_misses and near_misses:
            lines += ["", "Near misses"]
            lines += _aligned([[str(miss.plan), miss.reason] for miss in self.near_misses[:near_misses]])
        return "\n".join(lines)

    def _what_would_do(self) -> str:
        """Say that nothing fits, and how many ranks or how much memory would do; or which rule is in the way."""
        ranks = "" if self.enough is None else f" {self.enough} ranks are enough."
        smallest = self.excluded[0].proposal
        if smallest is None:
            reasons = list(dict.fromkeys(miss.reason for miss in self.excluded))
            return f"No plan works: {'; '.join(reasons[:_REASONS])}.{ranks}"
        how = f"{smallest.plan}, recompute={smallest.workload.recompute}"
        return (
            f"No plan fits into {readable(self.limit)} per rank.{ranks} On {smallest.plan.world_size}, "
            f"{readable(smallest.memory)} per rank are enough ({how})."
        )

    def __str__(self) -> str:
        return self.table()


def _told_apart(proposals: list[Proposal]) -> list[Proposal]:
    """Drop those that differ from one before only in how many of the same ranks are replicas and context ranks."""
    shown: list[Proposal] = []
    for proposal in proposals:
        if not any(_alike(proposal, other) for other in shown):
            shown.append(proposal)
    return shown


def _alike(one: Proposal, other: Proposal) -> bool:
    return (
        (one.plan.tp, one.plan.pp) == (other.plan.tp, other.plan.pp)
        and math.isclose(one.tokens_per_second, other.tokens_per_second, rel_tol=_ALIKE)
        and math.isclose(one.memory, other.memory, rel_tol=_ALIKE)
    )


def _cells(proposal: Proposal, mark: str) -> list[str]:
    return [
        mark,
        str(proposal.plan),
        str(proposal.workload.batch_size),
        str(proposal.accumulation),
        proposal.workload.recompute,
        f"{proposal.tokens_per_second:,.0f}",
        "" if proposal.mfu is None else f"{proposal.mfu:.0%}",
        f"{proposal.seconds:.3g}",
        readable(proposal.memory),
        f"{proposal.plan.idle_fraction:.0%}" if proposal.plan.pp > 1 else "",
    ]


def _aligned(cells: list[list[str]]) -> list[str]:
    columns = [column for column in zip(*cells, strict=True) if any(column[1:]) or column[0] not in ("", "MFU")]
    widths = [max(map(len, column)) for column in columns]
    rows = zip(*columns, strict=True)
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
