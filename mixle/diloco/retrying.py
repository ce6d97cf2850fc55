"""The mailbox that every node uses: checked arguments, transient errors retried, traffic counted, strays hidden."""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TypeVar

from mixle.diloco.clock import SYSTEM_CLOCK, Clock
from mixle.diloco.mailbox import (
    Mailbox,
    ObjectTooLarge,
    Traffic,
    TransientMailboxError,
    is_key,
    require_data,
    require_key,
    require_prefix,
)
from mixle.utils.exact import require_finite_float, require_nonnegative_int, require_positive_int

logger = logging.getLogger(__name__)

T = TypeVar("T")

FIRST_DELAY_S = 0.1
LONGEST_DELAY_S = 2.0
WARN_AFTER_S = 2.0
PAGE = 1000
_STRAYS_KEPT = 1000


class _Ledger:
    """What went over one store, however many mailboxes stand before it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.traffic = Traffic()
        self.strays: dict[str, None] = {}


class RetryingMailbox:
    """Ask a store again while its errors are transient, with growing random pauses, until a deadline.

    Args:
        inner: the store.
        deadline_s: from the first error of a call to the last attempt; then the error is raised.
        clock: what pauses are taken on.
        rng: what they are drawn from.
    """

    def __init__(
        self,
        inner: Mailbox,
        *,
        deadline_s: float = 30.0,
        clock: Clock = SYSTEM_CLOCK,
        rng: random.Random | None = None,
    ) -> None:
        self._inner = inner
        self._deadline_s = require_finite_float(deadline_s, "deadline_s", minimum=0.0)
        self._clock = clock
        self._rng = random.Random() if rng is None else rng
        self._ledger = _Ledger()

    def with_deadline(self, deadline_s: float) -> RetryingMailbox:
        """Return a mailbox on the same store, with the same traffic and strays, that gives up at another time."""
        other = RetryingMailbox(self._inner, deadline_s=deadline_s, clock=self._clock, rng=self._rng)
        other._ledger = self._ledger
        return other

    def hurry(self, deadline_s: float) -> None:
        """Give up after ``deadline_s`` from now on, in calls that are being retried, too, if that is sooner."""
        self._deadline_s = min(self._deadline_s, require_finite_float(deadline_s, "deadline_s", minimum=0.0))

    def apart(self) -> RetryingMailbox:
        """Return a mailbox as this one, on the same store, that :meth:`hurry` on either leaves the other alone."""
        return self.with_deadline(self._deadline_s)

    @property
    def traffic(self) -> Traffic:
        """Return what this mailbox has sent and received so far."""
        return self._ledger.traffic

    @property
    def strays(self) -> tuple[str, ...]:
        """Return names that lists came upon that can be no key, the first 1,000; each was logged once."""
        with self._ledger.lock:
            return tuple(self._ledger.strays)

    def put_if_absent(self, key: str, data: bytes) -> bool:
        """Write ``data`` at ``key`` if nothing is there; tell whether it is this call's.

        Raises:
            TypeError, ValueError: ``key`` is no key or ``data`` not bytes.
            TransientMailboxError: the deadline passed; the write may have been done.
            PermanentMailboxError: the store refuses.
        """
        require_key(key)
        require_data(data)
        unanswered = False

        def attempt() -> bool | None:
            nonlocal unanswered
            self._count(puts=1, bytes_up=len(data))
            try:
                if self._inner.put_if_absent(key, data):
                    return True
            except TransientMailboxError:
                unanswered = True
                raise
            if not unanswered:
                return False
            self._count(gets=1)
            try:
                found = self._inner.get(key, limit=len(data))
            except ObjectTooLarge:
                return False
            self._count(bytes_down=len(found or b""))
            if found is None:  # written by someone and deleted since
                raise TransientMailboxError(f"{key} came and went")
            return found == data

        return bool(self._retried(attempt, f"put_if_absent({key!r})"))

    def get(self, key: str, *, limit: int | None = None) -> bytes | None:
        """Return the bytes at ``key``, None if there are none.

        Args:
            limit: the most bytes that will be read.

        Raises:
            ObjectTooLarge: there are more.
            TypeError, ValueError: ``key`` is no key or ``limit`` no count.
            TransientMailboxError: the deadline passed.
            PermanentMailboxError: the store refuses.
        """
        require_key(key)
        if limit is not None:
            require_nonnegative_int(limit, "limit")

        def attempt() -> bytes | None:
            self._count(gets=1)
            return self._inner.get(key, limit=limit)

        data = self._retried(attempt, f"get({key!r})")
        self._count(bytes_down=len(data or b""))
        return data

    def list(self, prefix: str, after: str = "", *, limit: int | None = None) -> list[str]:
        """Return the keys in the folder ``prefix`` above ``after``, sorted; names that are no keys are left out.

        Args:
            limit: only the first so many names, those left out among them; up to 1,000 cost one request.

        Raises:
            TypeError, ValueError: ``prefix`` is no folder, ``after`` no key, folder or "", or ``limit`` not positive.
            TransientMailboxError: the deadline passed.
            PermanentMailboxError: the store refuses.
        """
        require_prefix(prefix)
        if after != "":
            require_key(after.removesuffix("/") if isinstance(after, str) else after, "after")
        if limit is not None:
            require_positive_int(limit, "limit")

        def attempt() -> list[str]:
            self._count(lists=1)
            return self._inner.list(prefix, after, limit=limit)

        found = self._retried(attempt, f"list({prefix!r})")
        self._count(lists=max(0, (len(found) - 1) // PAGE))
        keys = []
        for name in found:
            if is_key(name):
                keys.append(name)
            else:
                self._report(name)
        return keys

    def delete(self, keys: Iterable[str]) -> None:
        """Delete the objects at ``keys``; those that are not there are no error.

        Raises:
            TypeError, ValueError: one is no key; nothing was deleted.
            TransientMailboxError: the deadline passed; some may be deleted.
            PermanentMailboxError: the store refuses.
        """
        if isinstance(keys, str):
            raise TypeError(f"keys={keys!r} must be an iterable of keys, not one")
        checked = [require_key(key) for key in keys]
        for start in range(0, len(checked), PAGE):
            page = checked[start : start + PAGE]

            def attempt(page: list[str] = page) -> None:
                self._count(deletes=1)
                self._inner.delete(page)

            self._retried(attempt, f"delete({page[0]!r}{', ...' if page[1:] else ''})")

    def clock(self) -> float:
        """Return the store's own time, in seconds; it costs a small write and a read."""

        def attempt() -> float:
            self._count(puts=1, gets=1)
            return self._inner.clock()

        return self._retried(attempt, "clock()")

    def _retried(self, attempt: Callable[[], T], call: str) -> T:
        tries, first_failure, warned = 0, 0.0, False
        began = self._clock.monotonic()
        while True:
            try:
                return attempt()
            except TransientMailboxError as error:
                now = self._clock.monotonic()
                first_failure = now if tries == 0 else first_failure
                delay = self._rng.uniform(0.0, min(LONGEST_DELAY_S, FIRST_DELAY_S * 2.0 ** min(tries, 30)))
                tries += 1
                if now + delay > first_failure + self._deadline_s:
                    raise TransientMailboxError(
                        f"{call} failed {tries} times in {now - first_failure:.1f} s "
                        f"(deadline_s={self._deadline_s:g}): {error}"
                    ) from error
                logger.debug("%s failed, again in %.2f s: %s", call, delay, error)
                if not warned and now - began >= WARN_AFTER_S:
                    warned = True
                    logger.warning(
                        "%s has failed for %.1f s and is tried again for up to %g s: %s",
                        call,
                        now - began,
                        self._deadline_s,
                        error,
                    )
                self._count(retries=1)
            self._clock.sleep(delay)

    def _count(self, **more: int) -> None:
        with self._ledger.lock:
            so_far = self._ledger.traffic
            self._ledger.traffic = replace(
                so_far, **{name: getattr(so_far, name) + count for name, count in more.items()}
            )

    def _report(self, name: str) -> None:
        with self._ledger.lock:
            if name in self._ledger.strays or len(self._ledger.strays) >= _STRAYS_KEPT:
                return
            self._ledger.strays[name] = None
        logger.warning("%r is no key of a mailbox and is ignored; it was put there by something else", name)
