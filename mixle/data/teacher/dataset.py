"""Samples on demand as an infinite ``IterableDataset``."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch.utils.data import IterableDataset, get_worker_info

from mixle.data.teacher.batch_ref import BatchRef
from mixle.data.teacher.desk import Desk
from mixle.data.teacher.errors import GeneratorFailed
from mixle.data.teacher.fence import Fence, GenerationReader
from mixle.data.teacher.keys import Keys
from mixle.data.teacher.readers import RETIRED, add_reader
from mixle.data.teacher.run import start_ticks
from mixle.data.teacher.segment import SegmentMedium
from mixle.data.teacher.session import OnEvent, Session
from mixle.data.teacher.specs import BatchConfig
from mixle.data.teacher.station import Station
from mixle.utils.exact import require_finite_float, require_nonnegative_int

__all__ = ["DistillIterableDataset", "Tagged"]

WATCH_S = 0.25


class Tagged(NamedTuple):
    """A sample and the generation of the model that made it."""

    generation: int
    sample: dict[str, torch.Tensor]


class DistillIterableDataset(IterableDataset[dict[str, torch.Tensor]]):
    """Yield samples for ever, each a dict of tensors that own their memory.

    Each iterator has slots and a connection of its own, in whichever process it runs: ``slot_count`` is for each worker
    of a DataLoader. Those are freed when the iterator is closed or dropped, when its process or the trainer dies, and
    when the client that ``generation_value`` belongs to is closed. A plain DataLoader may still hand out
    ``num_workers * prefetch_factor + 1`` batches that were made before a switch of the model; the
    :class:`.DistillDataLoader` hands out none.

    Args:
        student_rank: this rank.
        generation_value: the ``generation_value`` of this rank's client, or any ``multiprocessing.Value`` of an integer
            that follows the generation.
        slot_count: samples ordered ahead.
        batch_config: what a sample is; a :class:`BatchConfig` or the mapping of one.
        frontend_endpoint: the broker's; None for this user's own on this host.
        max_retries: failed orders in a row after which the next one's error is raised.
        retry_delay: seconds before ordering anew after a failed order.
        deadline_s: seconds that the broker, or a worker for the model, may be missing before an error says so.
        medium, keys, insecure, host_id, directory, data_port, on_event: as for :class:`.StudentClient`; each iterator
            needs a ``data_port`` of its own.

    Raises:
        TypeError, ValueError: an argument that is not what it says above.
        OSError: the slots do not fit where they would lie; says both sizes.
    """

    def __init__(
        self,
        student_rank: int,
        generation_value: Any,
        slot_count: int,
        batch_config: BatchConfig | Mapping[str, Any],
        frontend_endpoint: str | None = None,
        max_retries: int = 10,
        retry_delay: float = 0.01,
        *,
        deadline_s: float = 30.0,
        medium: SegmentMedium = "shm",
        keys: Keys | str | os.PathLike[str] | None = None,
        insecure: bool = False,
        host_id: str | None = None,
        directory: str | os.PathLike[str] | None = None,
        data_port: int | tuple[int, int] | None = None,
        on_event: OnEvent | None = None,
    ) -> None:
        super().__init__()
        self._shared = GenerationReader(generation_value)
        self._max_retries = require_nonnegative_int(max_retries, "max_retries")
        self._retry_delay = require_finite_float(retry_delay, "retry_delay", minimum=0.0)
        self._deadline_s = require_finite_float(deadline_s, "deadline_s", exclusive_minimum=0.0)
        if on_event is not None and not callable(on_event):
            raise TypeError(f"on_event={on_event!r} must be callable or None")
        self._on_event = on_event
        self._arguments: dict[str, Any] = {
            "student_rank": student_rank,
            "slot_count": slot_count,
            "batch_config": batch_config,
            "frontend_endpoint": frontend_endpoint,
            "control_pub_endpoint": "",
            "medium": medium,
            "keys": keys,
            "insecure": insecure,
            "host_id": host_id,
            "directory": directory,
            "data_port": data_port,
        }
        self._slot_count = Station.of(**self._arguments).slot_count

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        for tagged in self.tagged():
            yield tagged.sample

    def tagged(self) -> Iterator[Tagged]:
        """Yield samples with their generations.

        Raises:
            GeneratorFailed: ``max_retries`` orders in a row had failed, and one more did.
            BrokerUnreachable, NoWorker: for ``deadline_s`` nothing came, and this is why.
            RuntimeError: the client that ``generation_value`` belongs to was closed.
        """
        for session, slot in self._taken(1):
            _, generation = session.order_of(slot)
            sample = {name: tensor.clone() for name, tensor in session.slots.tensor(slot).items()}
            session.release(slot)
            if generation >= self._shared.newest():
                yield Tagged(generation, sample)

    def lent(self, size: int) -> Iterator[BatchRef]:
        """Yield batches of ``size`` samples, at most ``slot_count``, where they lie; raises as :meth:`tagged`."""
        for session, first in self._taken(size):
            yield BatchRef(session.slots, first, size, *session.order_of(first), session.give_back)

    @property
    def slot_count(self) -> int:
        """The samples that each iterator orders ahead."""
        return self._slot_count

    def _taken(self, size: int) -> Iterator[tuple[Session, int]]:
        """Yield sessions and the first slots of groups that are held there."""
        fence = Fence(self._shared, publishes=False)
        desk = Desk(Station.of(**self._arguments), fence, deadline_s=self._deadline_s, on_event=self._on_event)
        add_reader(desk, self._shared)
        watch = None if get_worker_info() is None else _Watch(desk, self._shared)
        try:
            failures = 0
            while True:
                try:
                    taken = desk.take(size, self._deadline_s)
                except GeneratorFailed:
                    failures += 1
                    if failures > self._max_retries:
                        raise
                    time.sleep(self._retry_delay)
                    continue
                if taken is not None:
                    failures = 0
                    yield taken
        finally:
            if watch is not None:
                watch.stop()
            desk.close()

    def note_generation(self, generation: int) -> int:
        """Take note of a generation that a sample came with; return the newest."""
        return self._shared.note(generation)


class _Watch:
    """In a DataLoader worker: end with the trainer, and free the slots when the trainer's client is closed.

    Without the trainer nobody takes the samples, and the worker may be waiting where it would never notice.
    """

    def __init__(self, desk: Desk, shared: GenerationReader) -> None:
        self._desk, self._shared = desk, shared
        parent = multiprocessing.parent_process()
        self._parent = os.getppid() if parent is None or parent.pid is None else parent.pid
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._attend, name="mixle-teacher-watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()

    def _attend(self) -> None:
        while not self._stop.wait(WATCH_S):
            if not _runs(self._parent):
                self._desk.abandon()
                os._exit(1)
            if self._shared.closed:
                self._desk.close(RETIRED)
                return


def _runs(pid: int) -> bool:
    """Whether a process is there that is no zombie; one of another user's is."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    ticks = start_ticks(pid)
    return ticks is not None or not os.path.exists("/proc/self/stat")
