"""Time, as all of DiLoCo takes it, so that a simulation can put its own in place."""

from __future__ import annotations

import threading
import time
from typing import Protocol


class Clock(Protocol):
    """One process's own time; it never goes back, and no two processes' are compared."""

    def monotonic(self) -> float:
        """Return seconds since an arbitrary instant."""
        ...

    def sleep(self, seconds: float) -> None:
        """Wait ``seconds``."""
        ...

    def wait(self, event: threading.Event, timeout: float) -> bool:
        """Wait until ``event`` is set, at most ``timeout`` seconds; tell whether it is."""
        ...


LONGEST_WAIT_S = 1e9
"""What threads can wait for is not much longer; nobody sees the end of it."""


class SystemClock:
    """The machine's monotonic clock."""

    def monotonic(self) -> float:
        """Return the seconds of :func:`time.monotonic`."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Sleep ``seconds``."""
        time.sleep(min(seconds, LONGEST_WAIT_S))

    def wait(self, event: threading.Event, timeout: float) -> bool:
        """Wait for ``event``, at most ``timeout`` seconds; tell whether it is set."""
        return event.wait(min(timeout, LONGEST_WAIT_S))


SYSTEM_CLOCK = SystemClock()
