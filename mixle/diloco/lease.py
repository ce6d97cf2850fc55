"""Who is alive, judged by each observer on its own clock.

A node writes ``leases/<id>/<epoch>-<sequence>`` every ``lease_every`` seconds, with the next sequence, and deletes the
one before. An observer lists ``leases/`` and holds a node alive while its sequence has grown within ``lease_timeout``
of the observer's own time; no two machines' clocks are compared. One gap between two looks counts for at most half the
timeout, so that an observer that was itself stopped looks again before it judges.

An epoch is one process under the id. Its first object, sequence 0, is written if absent and stays while the process
lives: of several processes that want one epoch, one gets it. It holds the process's ``lease_timeout``, for which
whoever wants the id waits, if it is longer than its own. A process that finds a living epoch is refused; one that
finds a silent epoch takes the next, and the old process, should it wake, sees that and stops. Closing writes
``<epoch>-released``, which stays, so that epochs go up for ever: an id that is not running keeps one object.

====================================  ===========================================  ===================================
what is under ``leases/<id>/``        what an observer holds                       what a new process under the id does
====================================  ===========================================  ===================================
nothing                               unknown                                      takes epoch 0
newest key grows                      alive                                        is refused
newest key has not grown in time      silent: its work may be taken over           takes the next epoch
newest key is ``<epoch>-released``    released                                     takes the next epoch, at once
====================================  ===========================================  ===================================
"""

from __future__ import annotations

import logging
import math
import re
import secrets
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from mixle.diloco.clock import SYSTEM_CLOCK, Clock
from mixle.diloco.mailbox import (
    Mailbox,
    MailboxError,
    ObjectTooLarge,
    PermanentMailboxError,
    TransientMailboxError,
    require_id,
)
from mixle.utils.exact import require_finite_float

logger = logging.getLogger(__name__)

LEASES = "leases/"
STOP_S = 30.0
_LONGEST_TIMEOUT_S = 3600.0
_FIRST = f"-{0:012d}"
_SWEEP_EVERY = 64  # renewals between looks for what delayed writes have left
LeaseState = Literal["alive", "silent", "released", "unknown"]
_KEY = re.compile(r"leases/([^/]+)/(\d{8})-(?:(\d{12})|released)")


class IdInUse(RuntimeError):  # noqa: N818  (says what is the matter, as FileExists does)
    """Another process works under this id."""


@dataclass(frozen=True)
class _Seen:
    """The newest lease of one id: ``sequence`` is infinite once it is released."""

    epoch: int
    sequence: float
    counted_until: float
    silent_s: float = 0.0


def require_lease_times(lease_every: object, lease_timeout: object) -> tuple[float, float]:
    """Return both in seconds.

    Raises:
        TypeError, ValueError: they are no positive numbers, or the timeout is less than twice the other.
    """
    every = require_finite_float(lease_every, "lease_every", exclusive_minimum=0.0)
    timeout = require_finite_float(lease_timeout, "lease_timeout", exclusive_minimum=0.0)
    if timeout < 2 * every:
        raise ValueError(
            f"lease_timeout={lease_timeout!r} must be at least twice lease_every={lease_every!r}, "
            f"or one late renewal makes a living node silent"
        )
    return every, timeout


class LeaseTable:
    """Judge liveness from what lists of ``leases/`` returned; it neither reads a clock nor asks a store."""

    def __init__(self, lease_timeout: float) -> None:
        self._timeout = require_finite_float(lease_timeout, "lease_timeout", exclusive_minimum=0.0)
        self._seen: dict[str, _Seen] = {}
        self._begun: set[tuple[str, int]] = set()

    def record(self, keys: Iterable[str], *, asked_at: float, answered_at: float) -> list[str]:
        """Take in one list, asked for and answered at these times; return the keys that are no leases."""
        newest: dict[str, tuple[int, float]] = {}
        strays = []
        self._begun = set()
        for key in keys:
            found = _KEY.fullmatch(key)
            if found is None:
                strays.append(key)
                continue
            at = (int(found[2]), math.inf if found[3] is None else float(int(found[3])))
            if at[1] == 0:
                self._begun.add((found[1], at[0]))
            newest[found[1]] = max(at, newest.get(found[1], at))
        for gone in self._seen.keys() - newest.keys():
            del self._seen[gone]
        for learner, (epoch, sequence) in newest.items():
            seen = self._seen.get(learner)
            if seen is None or (epoch, sequence) > (seen.epoch, seen.sequence):
                self._seen[learner] = _Seen(epoch, sequence, counted_until=answered_at)
            elif asked_at > seen.counted_until:
                more = min(asked_at - seen.counted_until, self._timeout / 2)
                self._seen[learner] = _Seen(seen.epoch, seen.sequence, asked_at, seen.silent_s + more)
        return strays

    def has_first(self, learner_id: str, epoch: int) -> bool:
        """Tell whether the last list had an epoch's first object, which stays while its process lives."""
        return (learner_id, epoch) in self._begun

    def ids(self) -> frozenset[str]:
        """Return every id that has an object under ``leases/``."""
        return frozenset(self._seen)

    def state(self, learner_id: str) -> LeaseState:
        """Return how the newest process under an id is held to be."""
        seen = self._seen.get(learner_id)
        if seen is None:
            return "unknown"
        if seen.sequence == math.inf:
            return "released"
        return "silent" if seen.silent_s >= self._timeout else "alive"

    def newest(self, learner_id: str) -> tuple[int, float] | None:
        """Return (epoch, sequence) of an id's newest lease, None if it has none."""
        seen = self._seen.get(learner_id)
        return None if seen is None else (seen.epoch, seen.sequence)


class Liveness:
    """What one process knows of who is alive; thread-safe.

    Args:
        mailbox: where the leases are.
        lease_timeout: seconds without a renewal after which a node is held silent.
        clock: this process's own.
    """

    def __init__(self, mailbox: Mailbox, *, lease_timeout: float = 4.0, clock: Clock = SYSTEM_CLOCK) -> None:
        self._mailbox = mailbox
        self._clock = clock
        self._table = LeaseTable(lease_timeout)
        self._lock = threading.Lock()
        self._strays: set[str] = set()

    def observe(self) -> None:
        """List the leases once. A node falls silent only by being looked at, so look every ``lease_every`` or so.

        Raises:
            MailboxError: the store did not answer; what was known stays as it is.
        """
        asked_at = self._clock.monotonic()
        keys = self._mailbox.list(LEASES)
        with self._lock:
            strays = set(self._table.record(keys, asked_at=asked_at, answered_at=self._clock.monotonic()))
            new, self._strays = strays - self._strays, strays
        for key in sorted(new):
            logger.warning("%s is no lease and is ignored; it was put there by something else", key)

    @property
    def alive(self) -> frozenset[str]:
        """Return the ids that are held alive."""
        with self._lock:
            return frozenset(each for each in self._table.ids() if self._table.state(each) == "alive")

    @property
    def states(self) -> dict[str, LeaseState]:
        """Return the state of every id that has a lease, by id."""
        with self._lock:
            return {each: self._table.state(each) for each in sorted(self._table.ids())}

    @property
    def strays(self) -> tuple[str, ...]:
        """Return the keys under ``leases/`` that are no leases, as the last look found them."""
        with self._lock:
            return tuple(sorted(self._strays))

    def epoch(self, learner_id: str) -> int | None:
        """Return the newest epoch under an id, None if it has no lease."""
        with self._lock:
            newest = self._table.newest(learner_id)
            return None if newest is None else newest[0]

    def has_first(self, learner_id: str, epoch: int) -> bool:
        """Tell whether the last look found an epoch's first object, which stays while its process lives."""
        with self._lock:
            return self._table.has_first(learner_id, epoch)

    def may_live(self, learner_id: str, epoch: int) -> bool:
        """Tell whether the process that had this epoch may be at work; False frees what it had claimed."""
        with self._lock:
            newest = self._table.newest(learner_id)
            if newest is None:
                return False
            return epoch > newest[0] or (epoch == newest[0] and self._table.state(learner_id) == "alive")


class Lease:
    """Hold an id for this process; a context manager that acquires and releases.

    Args:
        mailbox: where the leases are.
        learner_id: the id.
        lease_every: seconds between renewals.
        lease_timeout: seconds after which others hold this process silent; at least twice ``lease_every``.
        clock: this process's own.

    Raises:
        TypeError, ValueError: an argument that is not what it says above.
    """

    def __init__(
        self,
        mailbox: Mailbox,
        learner_id: str,
        *,
        lease_every: float = 1.0,
        lease_timeout: float = 4.0,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self.learner_id = require_id(learner_id, "learner_id")
        self.lease_every, self.lease_timeout = require_lease_times(lease_every, lease_timeout)
        self._mailbox = mailbox
        self._clock = clock
        self._folder = f"{LEASES}{learner_id}/"
        self._nonce = secrets.token_hex(16).encode()
        self._epoch: int | None = None
        self._sequence = 0

    @property
    def epoch(self) -> int:
        """Return this process's number among those that have had the id.

        Raises:
            RuntimeError: the id is not held.
        """
        if self._epoch is None:
            raise RuntimeError(f"the lease of {self.learner_id!r} is not held; acquire it first")
        return self._epoch

    @property
    def nonce(self) -> bytes:
        """Return what this lease's objects begin with, and no other's (:func:`read_nonce`)."""
        return self._nonce

    @property
    def held(self) -> bool:
        """Tell whether the id was acquired and not released."""
        return self._epoch is not None

    def acquire(self) -> None:
        """Take the id: at once if it is free or released, else when its lease has been silent for its own timeout.

        Raises:
            IdInUse: another process renews the lease, or took the id meanwhile.
            MailboxError: the store did not answer.
        """
        if self._epoch is not None:
            raise RuntimeError(f"the lease of {self.learner_id!r} is held already")
        table, owner = LeaseTable(self.lease_timeout), -1
        watched: tuple[int, float] | None = None
        while True:
            asked_at = self._clock.monotonic()
            keys = self._mailbox.list(self._folder)
            table.record(keys, asked_at=asked_at, answered_at=self._clock.monotonic())
            newest, state = table.newest(self.learner_id), table.state(self.learner_id)
            if state == "alive" and newest is not None:
                if newest[0] != owner:  # whoever has the id may give signs of life more seldom than this process would
                    owner, watched = newest[0], None
                    table = LeaseTable(max(self.lease_timeout, self._timeout_of(owner)))
                    table.record(keys, asked_at=asked_at, answered_at=self._clock.monotonic())
                if watched is not None and newest != watched:
                    raise IdInUse(
                        f"learner_id={self.learner_id!r} is in use: another process renews its lease; "
                        f"give each process an id of its own, or stop the other"
                    )
                watched = newest
            elif self._take(0 if newest is None else newest[0] + 1):
                return
            self._clock.sleep(self.lease_every / 2)

    def renew(self, info: bytes = b"") -> None:
        """Write the next lease object and delete the one before.

        Args:
            info: what this node has to say of itself; :func:`read_info` reads it.

        Raises:
            MailboxError: the store did not answer; the next call goes on with the next sequence.
        """
        epoch = self.epoch
        self._sequence += 1
        key = self._key(epoch, self._sequence)
        if not self._mailbox.put_if_absent(key, self._nonce + b"\n" + info):
            raise IdInUse(f"learner_id={self.learner_id!r} is in use: {key} was written by another process")
        if self._sequence % _SWEEP_EVERY == 0:
            stale = self._mailbox.list(self._folder)
        else:
            stale = [self._key(epoch, self._sequence - 1)]
        self._mailbox.delete([each for each in stale if each < key and each != self._key(epoch, 0)])

    def check(self, liveness: Liveness) -> None:
        """Raise if another process has taken the id, or somebody deleted the lease, as far as ``liveness`` has seen.

        Raises:
            IdInUse: it has; this process was silent for longer than ``lease_timeout`` before.
            PermanentMailboxError: the lease's first object is gone, and so may be all that is under the prefix.
            MailboxError: the store did not answer.
        """
        newest = liveness.epoch(self.learner_id)
        if newest is not None and newest > self.epoch:
            raise IdInUse(
                f"learner_id={self.learner_id!r} was taken over by another process, since this one had not renewed "
                f"its lease for lease_timeout={self.lease_timeout:g} s (was it stopped, or cut off?)"
            )
        first = self._key(self.epoch, 0)
        # A list may lag behind, so that what it lacks is asked for.
        if not liveness.has_first(self.learner_id, self.epoch) and self._mailbox.get(first) is None:
            raise PermanentMailboxError(
                f"{first} is gone: somebody deleted what is under the prefix, and this process may not go on there, "
                "where another run may begin; make another session to join what is there now"
            )

    def release(self, info: bytes = b"") -> None:
        """Give the id up, so that others neither wait for this process nor for its lease to run out.

        Args:
            info: what this node has to say of itself at the last; :func:`read_info` reads it.

        Raises:
            MailboxError: the store did not answer; the lease runs out by itself.
        """
        epoch, self._epoch = self.epoch, None
        released = f"{self._folder}{epoch:08d}-released"
        self._mailbox.put_if_absent(released, self._nonce + b"\n" + info)
        self._mailbox.delete(key for key in self._mailbox.list(self._folder) if key < released)

    def __enter__(self) -> Lease:
        self.acquire()
        return self

    def __exit__(self, *error: object) -> None:
        self.release()

    def _take(self, epoch: int) -> bool:
        first = self._key(epoch, 0)
        if not self._mailbox.put_if_absent(first, self._nonce + b"\n" + str(self.lease_timeout).encode()):
            return False
        keys = self._mailbox.list(self._folder)
        if max([first, *keys]) != first:  # a whole life of this epoch, or a later one, went by meanwhile
            return False  # (a list that lags behind may lack what was just written)
        self._mailbox.delete(key for key in keys if key < first)
        self._epoch, self._sequence = epoch, 0
        return True

    def _timeout_of(self, epoch: int) -> float:
        """Return the ``lease_timeout`` of the process that has an epoch, as it wrote it, or this process's."""
        try:
            data = self._mailbox.get(self._key(epoch, 0), limit=1 << 16) or b""
            told = float(data.partition(b"\n")[2])
        except (ValueError, ObjectTooLarge):
            return self.lease_timeout
        return min(told, _LONGEST_TIMEOUT_S) if told > 0 else self.lease_timeout

    def _key(self, epoch: int, sequence: int) -> str:
        return f"{self._folder}{epoch:08d}-{sequence:012d}"


class LeaseKeeper:
    """Renew a lease and look at the others' every ``lease_every``, on a thread of its own.

    Args:
        lease: held by the caller, who also releases it.
        liveness: what the looks go into.
        clock: this process's own.
    """

    def __init__(self, lease: Lease, liveness: Liveness, *, clock: Clock = SYSTEM_CLOCK) -> None:
        self._lease = lease
        self._liveness = liveness
        self._clock = clock
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._slow = False
        self.info = b""
        self.error: BaseException | None = None

    def tick(self) -> None:
        """Renew and look once; what a simulation calls in place of the thread.

        Raises:
            IdInUse: another process has the id; ``error`` keeps it.
            PermanentMailboxError: the store refuses; ``error`` keeps it.
        """
        began = self._clock.monotonic()
        try:
            self._lease.renew(self.info)
            self._liveness.observe()
            self._lease.check(self._liveness)
            self._warn_if_slow(self._clock.monotonic() - began)
        except TransientMailboxError as error:
            logger.warning("the lease of %s is late: %s", self._lease.learner_id, error)
        except (IdInUse, MailboxError) as error:
            self.error = error
            raise

    def _warn_if_slow(self, took_s: float) -> None:
        timeout = self._lease.lease_timeout
        if took_s > timeout / 2 and not self._slow:
            self._slow = True
            logger.warning(
                "the store took %.1f s for a sign of life of %s, which others miss after lease_timeout=%g s: give all "
                "sites a longer one, and a longer lease_every",
                took_s,
                self._lease.learner_id,
                timeout,
            )

    def start(self) -> None:
        """Start the thread, which ends with :meth:`stop` or with an ``error``."""
        self._thread = threading.Thread(target=self._run, name=f"lease of {self._lease.learner_id}", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread and wait for it, at most :data:`STOP_S` seconds; the lease stays held."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(STOP_S)

    def _run(self) -> None:
        due = self._clock.monotonic()
        while not self._clock.wait(self._stop, max(0.0, due - self._clock.monotonic())):
            due = self._clock.monotonic() + self._lease.lease_every
            try:
                self.tick()
            except BaseException as error:  # whoever reads it ends with it, since nobody else knows of this thread
                self.error = error
                logger.exception("the lease of %s is not renewed any more", self._lease.learner_id)
                return


def read_nonce(mailbox: Mailbox, learner_id: str) -> bytes | None:
    """Return the nonce of the process that has an id, None if nothing is there to read."""
    require_id(learner_id, "learner_id")
    keys = [key for key in mailbox.list(f"{LEASES}{learner_id}/") if _KEY.fullmatch(key)]
    newest = [key for key in keys if key.rpartition("-")[0] == keys[-1].rpartition("-")[0]]
    # An epoch's first object stays, those after it come and go.
    data = mailbox.get(newest[0], limit=1 << 16) if newest else None
    return None if data is None else data.partition(b"\n")[0]


def read_info(mailbox: Mailbox, learner_id: str, *, limit: int = 1 << 16) -> bytes | None:
    """Return what a node last said of itself in renewing or releasing its lease, None if nothing is there to read."""
    require_id(learner_id, "learner_id")
    keys = [key for key in mailbox.list(f"{LEASES}{learner_id}/") if _KEY.fullmatch(key)]
    data = mailbox.get(keys[-1], limit=limit) if keys else None
    if data is None:
        return None
    return b"" if keys[-1].endswith(_FIRST) else data.partition(b"\n")[2]
