"""One line on stderr that says how far training is."""

from __future__ import annotations

import sys
import time
from typing import Self, SupportsFloat

REDRAW_S = 0.25


class Progress:
    """Redraw a line a few times per second; a context manager that ends it.

    The loss is this rank's, so that showing it takes no collective.

    Args:
        steps: optimizer steps of the call.
        shown: whether to show the line; None shows it if stderr is a terminal.
        rank: only rank 0 shows it.
    """

    def __init__(self, steps: int, shown: bool | None, rank: int) -> None:
        self._shown = rank == 0 and (sys.stderr.isatty() if shown is None else shown)
        self._total, self._done, self._targets = steps, 0, 0
        self._started = self._drawn = time.monotonic()

    def advance(self, loss_sum: SupportsFloat, scale: float, targets: int) -> None:
        """Count a step of ``targets``; its loss, ``scale * loss_sum``, is read only when the line is redrawn."""
        self._done += 1
        self._targets += targets
        now = time.monotonic()
        if self._shown and (now - self._drawn > REDRAW_S or self._done == self._total):
            self._drawn = now
            loss = float(loss_sum) * scale
            speed = self._targets / max(now - self._started, 1e-9)
            left = (now - self._started) / self._done * max(0, self._total - self._done)
            sys.stderr.write(
                f"\rstep {self._done}/{self._total}  loss {loss:.4f}  {speed:,.0f} targets/s  {left:.0f} s left\x1b[K"
            )
            sys.stderr.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._shown and self._done:
            sys.stderr.write("\n")
