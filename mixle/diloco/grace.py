"""How long a round that has its quorum waits for the others: no longer than the waiting is free.

Learners go on training while a round closes. The grace window uses half of the time that is left until they would miss
its commit, and never outlasts the time to the next round (Decoupled DiLoCo, arXiv 2604.21428).
"""

from __future__ import annotations

from collections import deque
from math import inf
from statistics import median_low

from mixle.utils.exact import require_finite_float, require_positive_int


class RunningMedian:
    """Estimate a duration in seconds by the lower median of its most recent values.

    Warm-up makes durations long by any factor (the first steps compile, the first commits open connections), and so do
    pauses: a mean would carry them for long, and so would a decaying one. The median of n values is within the range of
    the ordinary ones as long as fewer than half are not. Since the first few may all be warm-up, there is no estimate
    until ``ready`` values are there; and the window forgets speeds that have changed.

    Args:
        window: how many recent values count.
        ready: how many values there must be for an estimate.

    Raises:
        TypeError, ValueError: they are no positive integers, or ``ready`` is above ``window``.
    """

    def __init__(self, *, window: int = 31, ready: int = 1) -> None:
        self._values: deque[float] = deque(maxlen=require_positive_int(window, "window"))
        self._ready = require_positive_int(ready, "ready")
        if self._ready > window:
            raise ValueError(f"ready={ready} must be at most window={window}")

    def add(self, seconds: float) -> None:
        """Take in one value.

        Raises:
            TypeError, ValueError: it is not a finite number of at least 0.
        """
        if type(seconds) is float and 0.0 <= seconds < inf:  # every training step comes here
            self._values.append(seconds)
        else:
            self._values.append(require_finite_float(seconds, "seconds", minimum=0.0))

    @property
    def value(self) -> float | None:
        """The estimate in seconds, or None while there is none."""
        return median_low(self._values) if len(self._values) >= self._ready else None


class GraceClock:
    """What a closer has measured of the run, and the grace window that follows from it.

    Attributes:
        step: seconds of a learner's step; five values are needed, so that two may be warm-up.
        quorum: seconds from a round's first snapshot to its quorum.
        sync: seconds from the end of a round's grace to the commit's being applied.
    """

    def __init__(self) -> None:
        self.step = RunningMedian(ready=5)
        self.quorum = RunningMedian()
        self.sync = RunningMedian()

    def grace(self, *, gap: int, allowance: int) -> float:
        """Return the grace window in seconds; 0 while the duration of a step is unknown (see :func:`grace_seconds`)."""
        step = self.step.value
        if step is None:
            return 0.0
        return grace_seconds(
            gap=gap,
            allowance=allowance,
            xi_step=step,
            xi_quorum=self.quorum.value or 0.0,
            xi_sync=self.sync.value or 0.0,
        )


def grace_seconds(*, gap: int, allowance: int, xi_step: float, xi_quorum: float, xi_sync: float) -> float:
    """Return min(max(A xi_step - xi_quorum - xi_sync, 0) / 2, gap xi_step), in seconds.

    Args:
        gap: steps between this round and the one before (:meth:`mixle.diloco.schedule.Schedule.gap`).
        allowance: A, the steps that learners can take before they miss the commit
            (:meth:`mixle.diloco.schedule.Schedule.allowance`).
        xi_step: seconds of a step.
        xi_quorum: seconds until the quorum is there.
        xi_sync: seconds that closing and applying the round take.
    """
    slack = max(allowance * xi_step - xi_quorum - xi_sync, 0.0)
    return min(slack / 2, gap * xi_step)
