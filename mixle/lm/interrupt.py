"""Ctrl-C as a request: noted when it comes, acted on where the work can be left."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType
from typing import Any, Self


class Interrupt:
    """While entered, notes the first SIGINT or SIGTERM; a second one acts as if this were not here.

    Attributes:
        signal: the signal that came, None so far.
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._restore()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.signal = number
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()
