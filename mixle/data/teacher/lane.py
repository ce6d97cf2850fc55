"""Orders that go from a student straight to a worker of its host: a datagram there, and a byte in memory back.

An order by way of the broker is two messages and two processes that must wake up; when a generator needs less than
that, they are most of what a sample takes. So the broker tells a student whose last sample an idle worker made where
that worker listens, and while nothing else is on order the student may ask there for a single slot.

The broker knows nothing of such an order, and need not: a lock on the slot, which the system drops when its holder
dies, says who may write there. The worker holds it from before it looks at the slot's token until after it wrote. A
student that finds the slot unlocked and not complete takes the lock, changes the token, and orders through the broker.
"""

from __future__ import annotations

import os
import secrets
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from mixle.data.teacher import doorbell
from mixle.data.teacher.run import LANE_NAME, MAX_IPC_PATH_BYTES, is_running, private_directory, teacher_directory
from mixle.data.teacher.segment import LOCKS_AVAILABLE, MOST_NAME_CHARACTERS, Segment

if TYPE_CHECKING:
    from mixle.data.teacher.messages import Order

__all__ = ["AVAILABLE", "DirectOrder", "Lane", "StudentLane", "remove_dead_lanes"]

AVAILABLE = doorbell.AVAILABLE and LOCKS_AVAILABLE
GRANT_S = 1.0  # that a student may ask the same worker before the broker chooses anew
_WIRE = struct.Struct(f"<{MOST_NAME_CHARACTERS}sIQQ")


class DirectOrder(NamedTuple):
    """One slot to fill, with the token and generation that its header has."""

    segment: str
    slot: int
    token: int
    generation: int


class Lane:
    """A worker's end: where students ask.

    Raises:
        OSError: there is no room for a socket there.
    """

    def __init__(self, directory: str | os.PathLike[str] | None = None) -> None:
        self.name = f"{os.getpid():x}-{secrets.token_hex(4)}"
        self._path = _lanes_directory(directory) / self.name
        if len(os.fsencode(self._path)) > MAX_IPC_PATH_BYTES:
            raise OSError(f"{self._path} is too long for a socket; set a shorter directory")
        self._pid = os.getpid()
        self._socket = _datagrams()
        try:
            self._socket.bind(str(self._path))
        except BaseException:
            self._socket.close()
            raise
        self.fd = self._socket.fileno()

    def take(self) -> DirectOrder | None:
        """Return what was asked for next; None if nothing was, or if it is no order."""
        try:
            said = self._socket.recv(_WIRE.size + 1)
        except BlockingIOError:
            return None
        if len(said) != _WIRE.size:
            return None
        name, slot, token, generation = _WIRE.unpack(said)
        return DirectOrder(name.rstrip(b"\0").decode("ascii", "replace"), slot, token, generation)

    def close(self) -> None:
        """Listen no more."""
        self._socket.close()
        if os.getpid() == self._pid:
            self._path.unlink(missing_ok=True)


class StudentLane:
    """A student's end: the worker that it may ask, and what it asked for last.

    Attributes:
        order: what was asked for, until its owner knows what became of it and puts None here.
        offered_at: when that was, by ``time.monotonic()``.

    Raises:
        OSError: the system has no such locks, or no room for one.
    """

    def __init__(self, segment: Segment, directory: str | os.PathLike[str] | None = None) -> None:
        self.order: Order | None = None
        self.offered_at = 0.0
        self._busy_since: float | None = None
        self._locks = segment.locks()
        try:
            with self.held(0):  # some sandboxes know of these locks, and have none
                pass
        except BaseException:
            self._locks.close()
            raise
        self._name, self._directory = segment.name.encode(), directory
        self._granted: str | None = None
        self._connected: str | None = None
        self._granted_at = 0.0
        self._socket: socket.socket | None = None

    @property
    def is_open(self) -> bool:
        """Whether the next order may go this way: now and then one does not, for workers come and grow slow."""
        return self._granted is not None and self.order is None and time.monotonic() - self._granted_at < GRANT_S

    def grant(self, name: str | None) -> None:
        """Take note of whom the broker lets this student ask: nobody for None.

        The connection outlasts the grant: in a busy run grants come and go many times a second.
        """
        self._granted_at, self._granted = time.monotonic(), name
        if name is None or name == self._connected:
            return
        self._hang_up()
        try:
            self._socket = _datagrams()
            self._socket.connect(str(_lanes_directory(self._directory) / name))
        except OSError:  # it has left, or has another directory
            self._hang_up()
        else:
            self._granted = self._connected = name

    def offer(self, order: Order) -> bool:
        """Ask for the one slot of an order; False if that worker does not listen, and has not heard of it."""
        asked = self._socket
        if asked is None:  # another thread has left
            return False
        try:
            asked.send(_WIRE.pack(self._name, order.first_slot, order.token, order.generation))
        except OSError:  # it has left, or is behind
            self._hang_up()
            return False
        self.order, self._busy_since = order, None
        self.offered_at = time.monotonic()
        return True

    @property
    def busy_s(self) -> float:
        """Seconds since the slot of its order was first found locked."""
        return 0.0 if self._busy_since is None else time.monotonic() - self._busy_since

    @contextmanager
    def held(self, slot: int) -> Iterator[bool]:
        """Keep every worker from a slot; False if one is at it."""
        held = self._locks.hold(slot)
        if not held and self._busy_since is None:
            self._busy_since = time.monotonic()
        try:
            yield held
        finally:
            if held:
                self._locks.let_go(slot)

    def leave(self) -> None:
        """Close everything. Idempotent."""
        self._hang_up()
        self._locks.close()

    def _hang_up(self) -> None:
        self._granted = self._connected = None
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def remove_dead_lanes(directory: str | os.PathLike[str] | None = None) -> list[str]:
    """Remove the sockets of workers that died; return their paths."""
    removed = []
    for path in sorted(_lanes_directory(directory).iterdir()):
        if not LANE_NAME.fullmatch(path.name) or not path.is_socket():
            continue
        if is_running(int(path.name.partition("-")[0], 16)):  # it may be about to bind it
            continue
        with _datagrams() as probe:
            try:
                probe.connect(str(path))
            except ConnectionRefusedError:  # nobody has bound it any more
                with suppress(FileNotFoundError):
                    path.unlink()
                    removed.append(str(path))
            except OSError:
                continue
    return removed


def _lanes_directory(directory: str | os.PathLike[str] | None) -> Path:
    path = teacher_directory(directory) / "lanes"
    private_directory(path)
    return path


def _datagrams() -> socket.socket:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    made.setblocking(False)
    return made
