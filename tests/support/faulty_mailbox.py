"""A mailbox that misbehaves as networks and stores do, from a seed: the same seed and calls give the same faults."""

from __future__ import annotations

import heapq
import itertools
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from mixle.diloco.clock import SYSTEM_CLOCK, Clock
from mixle.diloco.mailbox import Mailbox, TransientMailboxError
from mixle.diloco.memory_mailbox import MemoryMailbox


@dataclass(frozen=True)
class Faults:
    """How often a call is hit: each a probability, at most one per call.

    Args:
        refused: nothing is done, and the caller gets a transient error.
        lost: it is done, and the caller gets a transient error.
        delayed: it is done up to ``longest_delay_s`` later, and the caller gets a transient error now.
        repeated: it is done now and, writes and deletes, once more up to ``longest_delay_s`` later.
    """

    refused: float = 0.0
    lost: float = 0.0
    delayed: float = 0.0
    repeated: float = 0.0
    longest_delay_s: float = 10.0


class FaultyMailbox:
    """A Mailbox around ``inner``; put a RetryingMailbox around it. What is delayed happens before a later call."""

    def __init__(self, faults: Faults, *, seed: int, inner: Mailbox | None = None, clock: Clock = SYSTEM_CLOCK) -> None:
        self.inner = MemoryMailbox(now=clock.monotonic) if inner is None else inner
        self.faults = faults
        self.injected: Counter[str] = Counter()
        self._clock = clock
        self._rng = random.Random(seed)
        self._later: list[tuple[float, int, Callable[[], object]]] = []
        self._order = itertools.count()
        self._lock = threading.RLock()

    def put_if_absent(self, key: str, data: bytes) -> bool:
        return self._call(lambda: self.inner.put_if_absent(key, data), f"put {key}", changes=True)

    def get(self, key: str, *, limit: int | None = None) -> bytes | None:
        return self._call(lambda: self.inner.get(key, limit=limit), f"get {key}", changes=False)

    def list(self, prefix: str, after: str = "", *, limit: int | None = None) -> list[str]:
        return self._call(lambda: self.inner.list(prefix, after, limit=limit), f"list {prefix}", changes=False)

    def delete(self, keys: Iterable[str]) -> None:
        each = tuple(keys)
        return self._call(lambda: self.inner.delete(each), f"delete {each}", changes=True)

    def clock(self) -> float:
        return self._call(self.inner.clock, "clock", changes=False)

    def settle(self) -> None:
        """Do all that is still delayed."""
        with self._lock:
            while self._later:
                heapq.heappop(self._later)[2]()

    def _call(self, act, what, *, changes):
        with self._lock:
            while self._later and self._later[0][0] <= self._clock.monotonic():
                heapq.heappop(self._later)[2]()
            fault = self._draw()
            if fault in ("delayed", "repeated") and not changes:
                fault = "refused" if fault == "delayed" else None
            if fault is None:
                return act()
            self.injected[fault] += 1
            if fault in ("delayed", "repeated"):
                at = self._clock.monotonic() + self._rng.uniform(0.0, self.faults.longest_delay_s)
                heapq.heappush(self._later, (at, next(self._order), act))
            if fault in ("lost", "repeated"):
                result = act()
                if fault == "repeated":
                    return result
            raise TransientMailboxError(f"{what}: injected ({fault})")

    def _draw(self) -> str | None:
        drawn = self._rng.random()
        for fault in ("refused", "lost", "delayed", "repeated"):
            drawn -= getattr(self.faults, fault)
            if drawn < 0:
                return fault
        return None
