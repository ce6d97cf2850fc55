"""A clock that moves only when someone sleeps on it; for tests and simulations in one thread."""

from __future__ import annotations

import heapq
import itertools
import threading
from collections.abc import Callable


class VirtualClock:
    """Implements mixle.diloco.clock.Clock; calls that were scheduled run, in order of time, while somebody sleeps."""

    def __init__(self, now: float = 0.0) -> None:
        self._now = now
        self._calls: list[tuple[float, int, Callable[[], object]]] = []
        self._order = itertools.count()

    def monotonic(self) -> float:
        return self._now

    def sleep(self, seconds: float) -> None:
        until = self._now + seconds
        while self._calls and self._calls[0][0] <= until:
            at, _, call = heapq.heappop(self._calls)
            self._now = max(self._now, at)
            call()
        self._now = max(self._now, until)

    def wait(self, event: threading.Event, timeout: float) -> bool:
        if not event.is_set():
            self.sleep(timeout)
        return event.is_set()

    def call_at(self, at: float, call: Callable[[], object]) -> None:
        heapq.heappush(self._calls, (at, next(self._order), call))

    def call_every(self, seconds: float, call: Callable[[], object]) -> Callable[[], None]:
        """Call now and then, until the function that this returns is called."""
        stopped = threading.Event()

        def once() -> None:
            if not stopped.is_set():
                self.call_at(self._now + seconds, once)
                call()

        self.call_at(self._now, once)
        return stopped.set
