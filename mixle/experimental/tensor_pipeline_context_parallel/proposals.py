"""What proposing plans returns: those that work, ranked, those that nearly do, and a table of both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mixle.experimental.tensor_pipeline_context_parallel.plan import Plan
from mixle.experimental.tensor_pipeline_context_parallel.report import readable
from mixle.experimental.tensor_pipeline_context_parallel.step_time import StepTime
from mixle.experimental.tensor_pipeline_context_parallel.workload import Workload

_HEADER = ["plan", "rows", "passes", "recompute", "tokens/s/rank", "step s", "memory", "bubble"]


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """A plan with what it is predicted to cost.

    Attributes:
        plan: sizes and schedule.
        workload: the rows that a replica takes at once, and what it computes again.
        time: seconds of one pass over them with an optimizer step, by what they go to.
        memory: bytes that the fullest rank reserves.
        accumulation: passes of an optimizer step.
    """

    plan: Plan
    workload: Workload
    time: StepTime
    memory: int
    accumulation: int = 1

    @property
    def seconds(self) -> float:
        """Seconds of an optimizer step."""
        return self.accumulation * (self.time.total - self.time.optimizer) + self.time.optimizer

    @property
    def tokens_per_second(self) -> float:
        """Tokens of a step per second and rank."""
        rows = self.accumulation * self.workload.batch_size * self.plan.dp
        return rows * self.workload.seq_len / self.plan.world_size / self.seconds


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
    """

    title: str
    ranked: tuple[Proposal, ...]
    excluded: tuple[Exclusion, ...]
    limit: int

    def __getitem__(self, index: Any) -> Any:
        return self.ranked[index]

    def __len__(self) -> int:
        return len(self.ranked)

    def table(self, *, rows: int = 10, near_misses: int = 5) -> str:
        """Return the fastest plans and the nearest misses as a table."""
        lines = [self.title, ""]
        if self.ranked:
            cells = [_HEADER, *(_cells(proposal) for proposal in self.ranked[:rows])]
            lines += _aligned(cells)
            if len(self.ranked) > rows:
                lines.append(f"and {len(self.ranked) - rows} slower ones")
        else:
            lines.append(f"No plan fits into {readable(self.limit)} per rank.")
        if self.excluded and near_misses:
            lines += ["", "Near misses"]
            lines += _aligned([[str(miss.plan), miss.reason] for miss in self.excluded[:near_misses]])
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.table()


def _cells(proposal: Proposal) -> list[str]:
    return [
        str(proposal.plan),
        str(proposal.workload.batch_size),
        str(proposal.accumulation),
        proposal.workload.recompute,
        f"{proposal.tokens_per_second:,.0f}",
        f"{proposal.seconds:.3g}",
        readable(proposal.memory),
        f"{proposal.plan.idle_fraction:.0%}" if proposal.plan.pp > 1 else "",
    ]


def _aligned(cells: list[list[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]
