"""Take groups of samples from one session after another, within the deadlines that were asked for."""

from __future__ import annotations

import os
import time
import weakref

from mixle.data.teacher.errors import BrokerUnreachable, NoWorker, TeacherError
from mixle.data.teacher.fence import Fence
from mixle.data.teacher.peer import unreachable
from mixle.data.teacher.session import OnEvent, Session
from mixle.data.teacher.station import Station
from mixle.data.teacher.stats import SERVING, BrokerStats

__all__ = ["Desk"]

LOOK_S = 0.05
STATS_S = 2.0


class Desk:
    """Have a session with the broker from the first use on, and a new one when that is spent.

    Args:
        station: who asks.
        fence: what is known of the model.
        deadline_s: seconds that the broker, or a worker, may be missing in all before an error says so.
        on_event: called with what happens.
    """

    def __init__(self, station: Station, fence: Fence, *, deadline_s: float, on_event: OnEvent | None) -> None:
        self.station, self.fence, self.deadline_s = station, fence, deadline_s
        self.closed = ""
        self._on_event = on_event or _ignore
        self._pid: int | None = None
        self._size: int | None = None
        self._waited_s = 0.0
        self._sessions: list[Session] = []  # at most one; shared with the finalizer
        self._leave = weakref.finalize(self, _leave, self._sessions)

    def session(self, within_s: float) -> Session:
        """Return the session, registered within so many seconds.

        Raises:
            RuntimeError: the desk is closed, or this is a fork of the process that used it.
            BrokerUnreachable: no broker answered.
            TeacherError: it refused.
        """
        self._require_usable()
        if self._sessions and self._sessions[0].spent:
            spent = self._sessions.pop()
            spent.close()
            if spent.failures:
                raise spent.failures.popleft()
        if not self._sessions:
            self._pid = os.getpid()
            session = Session(self.station, self.fence, deadline_s=within_s, on_event=self._on_event)
            self._sessions.append(session)
            if self.closed:  # from another thread, meanwhile
                self._leave()
        return self._sessions[0]

    def take(self, size: int, timeout_s: float) -> tuple[Session, int] | None:
        """Return a session and the first slot of a group that is held there now; None after ``timeout_s``.

        Raises:
            ValueError: groups of another size were taken before.
            TeacherError: an order failed, or broker or workers are missing for ``deadline_s`` in all.
        """
        if size != self._size:
            if self._size is not None:
                raise ValueError(
                    f"size={size}: this client has asked for {self._size} at a time; use another for these"
                )
            self._size = size
        begun = now = time.monotonic()
        until = begun + timeout_s
        while True:
            patience = min(until, now + max(self.deadline_s - self._waited_s, 0.0))
            session, missing, first = None, None, None
            try:
                session = self.session(max(patience - now, LOOK_S))
            except BrokerUnreachable as error:
                missing = error
            else:
                with session.whole():
                    first = session.next_group(size, patience)
            if session is not None and first is not None:
                self._waited_s = 0.0
                return session, first
            before, now = now, time.monotonic()
            self._waited_s += now - before
            if self._waited_s >= self.deadline_s:
                self._waited_s = 0.0
                self._explain(session, missing)
            if now >= until:
                return None

    def release(self, first: int) -> None:
        """Take back a group of the present session.

        Raises:
            ValueError: it is not held.
        """
        self._require_usable()
        if not self._sessions:
            raise ValueError(f"slot_id={first} is not held; release what was handed out, once")
        self._sessions[0].release(first)

    def close(self, why: str = "closed") -> bool:
        """Leave the broker, from any thread; return whether that was still to do, and in this process."""
        if self.closed or self._pid not in (None, os.getpid()):
            return False
        self.closed = why
        self._leave()
        return True

    def abandon(self) -> None:
        """Take the slots' name away, and nothing more: the process is about to end."""
        for session in list(self._sessions):
            session.segment.unlink()

    def _require_usable(self) -> None:
        if self.closed:
            raise RuntimeError(f"this client is {self.closed}; make a new one")
        if self._pid not in (None, os.getpid()):
            raise RuntimeError(
                f"this client belongs to process {self._pid}, which used it before it forked {os.getpid()}; "
                "make a new one in the child, or use it in the parent only after the fork"
            )

    def _explain(self, session: Session | None, missing: BrokerUnreachable | None) -> None:
        """Say why nothing came for ``deadline_s``; return if it may still come."""
        if missing is not None:
            raise unreachable(self.station.frontend, self.deadline_s, missing.why) from missing
        if session is None or session.spent:
            return
        if session.all_held:
            raise TeacherError(
                f"all {self.station.slot_count} slots are held by the reader; release() what was handed out, or have "
                "more slots"
            )
        packed = session.statistics(STATS_S)
        if packed is None:
            raise session.peer.unreachable(self.deadline_s)
        _require_worker(session, packed, self.deadline_s)


def _require_worker(session: Session, packed: bytes, deadline_s: float) -> None:
    """Raise a ``NoWorker`` that says what the broker knows, unless a worker can make what is asked for."""
    stats = BrokerStats.unpack(packed)
    known = session.fence.generation
    if stats.generation < known:
        raise TeacherError(
            f"the broker at {session.station.frontend} is at generation {stats.generation}, and generation {known} was "
            "known here, as if its directory was lost: rank 0 must call set_model again"
        )
    if stats.workers_serving:
        needed = session.station.layout.packed_bytes
        serving = [row.slot_size for row in stats.workers if row.state in SERVING]
        if not serving or max(serving) >= needed or len(stats.workers) < stats.workers_registered:
            return
        raise NoWorker(
            f"a sample has {needed} bytes, and the workers that serve model {stats.model_id!r} at "
            f"{session.station.frontend} make at most {max(serving)}: start them with slot_size={needed}"
        )
    there = ", ".join(f"{row.worker} ({row.state}, serves {row.patterns})" for row in stats.workers[:8])
    raise NoWorker(
        f"no worker served model {stats.model_id!r} (generation {stats.generation}) at {session.station.frontend} "
        f"for {deadline_s:g} s; workers there: {there or 'none'}"
    )


def _leave(sessions: list[Session]) -> None:
    while sessions:
        sessions.pop().close()


def _ignore(name: str, details: object) -> None:
    """Do nothing about an event."""
