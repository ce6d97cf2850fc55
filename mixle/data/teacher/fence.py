"""What a process knows of the model that is wanted: it only ever goes forward.

The generation of a student's client lies in memory that its DataLoader workers share, so that they know of a switch as
soon as it does. One process writes there (the client's); the others read, and keep what they hear themselves. Reading
and writing take no lock that a process could die with: eight aligned bytes are written at once.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import threading
from multiprocessing.sharedctypes import SynchronizedBase
from typing import Any

from mixle.data.teacher.messages import NO_MODEL, ModelState

__all__ = ["Fence", "GenerationReader", "shared_generation"]


class _Cell(ctypes.Structure):
    _fields_ = (("value", ctypes.c_uint64), ("closed", ctypes.c_uint64))


class _OwnLock:
    """A lock of each process's own, for ``multiprocessing.Value``: it survives fork, spawn and a holder's death."""

    def __init__(self) -> None:
        self._lock = threading.RLock()

    def acquire(self, block: bool = True, timeout: float = -1) -> bool:
        return self._lock.acquire(block, timeout)

    def release(self) -> None:
        self._lock.release()

    def __enter__(self) -> bool:
        return self._lock.acquire()

    def __exit__(self, *exception: object) -> None:
        self._lock.release()

    def __reduce__(self) -> tuple[type[_OwnLock], tuple[()]]:
        return _OwnLock, ()


def shared_generation() -> Any:
    """Return a new ``multiprocessing.Value``: ``.value`` is the generation, ``.closed`` says that its client is."""
    return multiprocessing.Value(_Cell, lock=_OwnLock())  # type: ignore[call-overload]  # any lock will do


class GenerationReader:
    """Read a shared generation; picklable where a ``multiprocessing.Value`` is, and for other start methods too.

    Args:
        value: a client's ``generation_value``, or any ``multiprocessing.Value`` of an integer.

    Raises:
        TypeError: ``value`` is none of these.
    """

    def __init__(self, value: Any) -> None:
        self.cell = value.get_obj() if isinstance(value, SynchronizedBase) else value
        shown = getattr(self.cell, "value", None)
        if not isinstance(shown, int) or isinstance(shown, bool):
            raise TypeError(f"generation_value={value!r} must be a client's, or a multiprocessing.Value of an integer")
        self._newest = 0

    def shares(self, other: GenerationReader) -> bool:
        """Whether both read the same value."""
        return self.cell is other.cell

    def retire(self) -> None:
        """Show those who share a client's value that the client is closed."""
        if isinstance(self.cell, _Cell):
            self.cell.closed = 1

    def reopen(self) -> None:
        """Undo :meth:`retire`."""
        if isinstance(self.cell, _Cell):
            self.cell.closed = 0

    @property
    def closed(self) -> bool:
        """Whether the client that the value belongs to was closed."""
        return isinstance(self.cell, _Cell) and bool(self.cell.closed)

    def newest(self) -> int:
        """Return the newest generation that this reader has seen or been told of."""
        shared = self.cell.value
        if shared > self._newest:
            self._newest = shared
        return self._newest

    def note(self, generation: int) -> int:
        """Take note of a generation that was heard of elsewhere; return the newest."""
        if generation > self._newest:
            self._newest = generation
        return self.newest()


class Fence:
    """Keep the newest model that a client knows of, and show its generation to those who share ``reader``'s cell.

    Args:
        reader: of the shared generation.
        publishes: write there what is learnt; for one process only.
    """

    def __init__(self, reader: GenerationReader, *, publishes: bool) -> None:
        self._reader, self._publishes = reader, publishes
        self._lock = threading.Lock()
        self.model: ModelState = NO_MODEL

    @property
    def generation(self) -> int:
        """The newest generation that this process knows of."""
        return self._reader.newest()

    def learn(self, model: ModelState) -> None:
        """Take note of a model, from any thread; older ones are ignored."""
        with self._lock:
            if model.generation > self.model.generation:
                self.model = model
            newest = self._reader.note(model.generation)
            if self._publishes and self._reader.cell.value < newest:
                self._reader.cell.value = newest
