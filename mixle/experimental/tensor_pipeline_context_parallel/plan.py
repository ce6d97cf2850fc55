"""A parallel plan as data: how many ranks share what, and in which order microbatches run."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, pairwise
from typing import Any, Literal

from mixle.utils.exact import require_choice, require_positive_int

CpMode = Literal["ring", "allgather"]
PpSchedule = Literal["gpipe", "1f1b", "interleaved", "zero-bubble"]

CP_MODES: tuple[CpMode, ...] = ("ring", "allgather")
STAGES_PER_RANK: dict[PpSchedule, int] = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zero-bubble": 2}
MOST_RANKS = 1 << 20
MOST_ROWS = 1 << 31
MOST_MICROBATCHES = 1 << 16


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Degrees of the mesh ``(pp, dp, cp, tp)``, outermost first, and how the pipeline runs.

    Attributes:
        dp: data replicas.
        tp: ranks that share every layer.
        pp: ranks that hold successive layers.
        cp: ranks that share every sequence.
        cp_mode: how keys and values reach all ranks of a sequence.
        microbatches: parts that a replica's batch is cut into; 1 without a pipeline.
        pp_schedule: their order.
        stages_per_rank: stages that each pipeline rank holds, in loops over the ranks; by default 1, or 2 for the
            schedules that need several.
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    cp_mode: CpMode = "ring"
    microbatches: int = 1
    pp_schedule: PpSchedule = "1f1b"
    stages_per_rank: int = 0

    def __post_init__(self) -> None:
        for name in ("dp", "tp", "pp", "cp", "microbatches"):
            object.__setattr__(self, name, require_positive_int(getattr(self, name), name))
        require_choice(self.cp_mode, "cp_mode", CP_MODES)
        schedule = require_choice(self.pp_schedule, "pp_schedule", STAGES_PER_RANK)
        least = STAGES_PER_RANK[schedule]
        if self.stages_per_rank == 0:
            object.__setattr__(self, "stages_per_rank", least if self.pp > 1 else 1)
        require_positive_int(self.stages_per_rank, "stages_per_rank")
        if self.pp == 1 and self.stages_per_rank > 1:
            raise ValueError(f"stages_per_rank={self.stages_per_rank} needs pp above 1; use 1")
        if self.pp > 1 and (self.stages_per_rank == 1) != (least == 1):
            raise ValueError(
                f"stages_per_rank={self.stages_per_rank} does not go with pp_schedule={schedule!r}; use {least}"
            )
        if self.pp == 1 and self.microbatches > 1:
            raise ValueError(f"microbatches={self.microbatches} needs pp above 1; use 1")

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return self.dp * self.tp * self.pp * self.cp

    @property
    def ranks_per_replica(self) -> int:
        """Ranks that work on the same rows."""
        return self.tp * self.pp * self.cp

    @property
    def stages(self) -> int:
        """Pipeline stages in all."""
        return self.pp * self.stages_per_rank

    @property
    def bubble(self) -> float:
        """Idle time of a pipeline rank as a multiple of its busy time, if all stages take equally long.

        GPipe and 1F1B idle for ``(pp - 1) / microbatches``; loops divide that by the stages per rank (Narayanan et al.,
        arXiv 2104.04473, section 2.2); splitting the backward pass leaves a third (ZB-H1 of Qi et al., arXiv
        2401.10241, table 2, if forward and both halves of backward take equally long).
        """
        idle = (self.pp - 1) / self.microbatches
        if self.pp_schedule == "zero-bubble":
            return idle / 3
        return idle / self.stages_per_rank

    @property
    def idle_fraction(self) -> float:
        """The part of a step that a pipeline rank waits."""
        return self.bubble / (1 + self.bubble)

    def handle_arguments(self) -> dict[str, Any]:
        """Return the plan as keyword arguments of ``StreamingTokenEncodedData`` and ``validate_tp_pp_cp_plan``.

        Data replicas are what the sizes leave of the ranks.

        Raises:
            ValueError: more stages per rank than handles make.
        """
        usual = STAGES_PER_RANK[self.pp_schedule] if self.pp > 1 else 1
        if self.stages_per_rank != usual:
            raise ValueError(
                f"stages_per_rank={self.stages_per_rank} is not what a handle runs with "
                f"pp_schedule={self.pp_schedule!r}; use {usual}"
            )
        return {
            "tp_size": self.tp,
            "pp_size": self.pp,
            "cp_size": self.cp,
            "cp_mode": self.cp_mode,
            "microbatches": self.microbatches if self.pp > 1 else None,
            "pp_schedule": self.pp_schedule,
        }

    def stages_of(self, pp_rank: int) -> tuple[int, ...]:
        """Return the stages that a pipeline rank holds."""
        return tuple(range(pp_rank, self.stages, self.pp))

    def in_flight(self, pp_rank: int) -> int:
        """Return for how many (microbatch, stage) pairs a rank keeps activations at once, at most.

        GPipe keeps all; 1F1B those that later ranks have not returned; loops some more (Narayanan et al., section
        2.2); zero-bubble as many as the first rank of 1F1B, on every rank.
        """
        everything = self.microbatches * self.stages_per_rank
        match self.pp_schedule:
            case "gpipe":
                return everything
            case "1f1b":
                return min(everything, self.pp - pp_rank)
            case "interleaved":
                warm_up = 2 * (self.pp - pp_rank - 1) + (self.stages_per_rank - 1) * self.pp
                return min(everything, warm_up + 1)
            case "zero-bubble":
                return min(everything, self.stages_per_rank * self.pp)

    def __str__(self) -> str:
        """Name what is above 1."""
        named = [f"{axis}={size}" for axis in ("dp", "tp", "pp", "cp") if (size := getattr(self, axis)) > 1]
        if self.cp > 1:
            named.append(self.cp_mode)
        if self.pp > 1:
            named.append(f"{self.pp_schedule} x{self.microbatches}")
        return " ".join(named) or "one rank"


def split_blocks(n_layer: int, stages: int) -> tuple[range, ...]:
    """Return the blocks of each stage: as even as can be, earlier stages longer, since the last also has the head."""
    shorter, longer = divmod(n_layer, stages)
    ends = [shorter * stage + min(stage, longer) for stage in range(stages + 1)]
    return tuple(range(start, end) for start, end in pairwise(ends))


def makes_whole_rounds(microbatches: int, pp: int, schedule: PpSchedule) -> bool:
    """Return whether a schedule takes so many: looped ones of torch run in equal rounds of about ``pp`` each."""
    return STAGES_PER_RANK[schedule] == 1 or microbatches % max(1, microbatches // pp) == 0


@lru_cache(maxsize=256)
def default_microbatches(batch_size: int, pp: int, schedule: PpSchedule = "1f1b") -> int:
    """Return the smallest divisor of ``batch_size`` that keeps ``pp`` ranks busy, or else the largest.

    Only those count that the schedule takes; more than 65,536 are never chosen.
    """
    tried = chain(range(pp, min(batch_size, MOST_MICROBATCHES) + 1), range(min(pp - 1, batch_size), 0, -1))
    return next(m for m in tried if batch_size % m == 0 and makes_whole_rounds(m, pp, schedule))


@lru_cache(maxsize=256)
def divisors(number: int) -> tuple[int, ...]:
    """Return the divisors of a positive number, smallest first."""
    low = [small for small in range(1, math.isqrt(number) + 1) if number % small == 0]
    return (*low, *(number // small for small in reversed(low) if small * small != number))
