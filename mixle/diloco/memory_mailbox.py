"""A mailbox in this process's memory."""

from __future__ import annotations

import threading
import time
from bisect import bisect_right, insort
from collections.abc import Callable, Iterable

from mixle.diloco.mailbox import ObjectTooLarge


class MemoryMailbox:
    """A :class:`~mixle.diloco.mailbox.Mailbox` that lives as long as its process.

    Args:
        now: the store's time, in seconds.
    """

    def __init__(self, *, now: Callable[[], float] = time.time) -> None:
        self._now = now
        self._lock = threading.Lock()
        self._objects: dict[str, bytes] = {}
        self._keys: list[str] = []

    def put_if_absent(self, key: str, data: bytes) -> bool:
        """See :class:`~mixle.diloco.mailbox.Mailbox`."""
        with self._lock:
            if key in self._objects:
                return False
            self._objects[key] = data
            insort(self._keys, key)
            return True

    def get(self, key: str, *, limit: int | None = None) -> bytes | None:
        """See :class:`~mixle.diloco.mailbox.Mailbox`."""
        with self._lock:
            data = self._objects.get(key)
        if data is not None and limit is not None and len(data) > limit:
            raise ObjectTooLarge(key, len(data), limit)
        return data

    def list(self, prefix: str, after: str = "", *, limit: int | None = None) -> list[str]:
        """See :class:`~mixle.diloco.mailbox.Mailbox`."""
        with self._lock:
            start = bisect_right(self._keys, max(prefix, after))
            end = bisect_right(self._keys, prefix + "\U0010ffff") if prefix else len(self._keys)
            return self._keys[start : end if limit is None else min(end, start + limit)]

    def delete(self, keys: Iterable[str]) -> None:
        """See :class:`~mixle.diloco.mailbox.Mailbox`."""
        with self._lock:
            for key in keys:
                if self._objects.pop(key, None) is not None:
                    del self._keys[bisect_right(self._keys, key) - 1]

    def clock(self) -> float:
        """Return the time that the mailbox was given."""
        return self._now()
