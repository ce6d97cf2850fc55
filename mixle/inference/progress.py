"""A one-line progress display for loops over the dispatch."""

from __future__ import annotations

import sys
from typing import TextIO

__all__ = ["ProgressLine"]


class ProgressLine:
    """Rewrites one line on a terminal; silent where the stream is none.

    Args:
        total: the largest number of steps.
        label: what is running.
        shown: whether to show it at all.
    """

    def __init__(self, total: int, label: str, *, shown: bool, stream: TextIO | None = None) -> None:
        self.total, self.label = total, label
        self.stream = sys.stderr if stream is None else stream
        self.shown = shown and self.stream.isatty()

    def update(self, step: int, text: str) -> None:
        """Show that ``step`` of the total is done."""
        if self.shown:
            width = 20
            done = width * step // max(self.total, 1)
            bar = "#" * done + "-" * (width - done)
            self.stream.write(f"\r\x1b[K{self.label} [{bar}] {step}/{self.total} {text}")
            self.stream.flush()

    def close(self) -> None:
        """End the line."""
        if self.shown:
            self.stream.write("\n")
            self.stream.flush()
