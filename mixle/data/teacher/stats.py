"""The figures of a broker: as a frozen value, as bytes in an answer, and as text that Prometheus reads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, fields
from typing import Any, Self

from mixle.data.teacher.errors import ProtocolError
from mixle.utils.optional_import import optional_import

MAX_ROWS = 256  # of each kind in one answer, which must fit a message
SERVING = ("idle", "busy")  # states of workers that beat and serve the model


@dataclass(frozen=True)
class StudentStats:
    """One student; counts are slots."""

    student: str
    process: str
    rank: int
    slots: int
    queued: int
    working: int
    completed: int
    failed: int
    silent: bool


@dataclass(frozen=True)
class WorkerStats:
    """One worker; counts are slots, ``rate`` is samples per second lately, ``seconds`` what one sample takes.

    ``slot_size`` is the largest sample that it makes, in bytes.
    """

    worker: str
    process: str
    state: str
    patterns: str
    outstanding: int
    completed: int
    failed: int
    rate: float
    seconds: float | None
    slot_size: int


@dataclass(frozen=True)
class BrokerStats:
    """What a broker knows of its run; counts are slots since its start, times are seconds."""

    run_id: str
    pid: int
    uptime_s: float
    generation: int
    model_id: str
    leader: str
    students_registered: int
    workers_registered: int
    workers_serving: int
    queued: int
    working: int
    ordered: int
    completed: int
    direct: int
    failed: int
    retried: int
    requeued: int
    stale_dropped: int
    cancelled: int
    lost: int
    rate: float
    latency_p50_s: float | None
    latency_p99_s: float | None
    unknown_tickets: int
    garbage_frontend: int
    garbage_backend: int
    garbage_control: int
    strangers: int
    keys_refused: int
    undeliverable: int
    internal_errors: int
    students: tuple[StudentStats, ...] = ()
    workers: tuple[WorkerStats, ...] = ()

    @property
    def garbage(self) -> int:
        """Messages that were not what the protocol says, on all sockets."""
        return self.garbage_frontend + self.garbage_backend + self.garbage_control

    def pack(self) -> bytes:
        """Return the figures as bytes, with at most 256 students and workers each."""
        values = asdict(self)
        values["students"] = [list(row.values()) for row in values["students"][:MAX_ROWS]]
        values["workers"] = [list(row.values()) for row in values["workers"][:MAX_ROWS]]
        packed: bytes = optional_import("msgpack", extra="teacher").packb(values)
        return packed

    @classmethod
    def unpack(cls, packed: bytes) -> Self:
        """Return what :meth:`pack` packed.

        Raises:
            ProtocolError: these bytes are not that.
        """
        try:
            values: dict[str, Any] = optional_import("msgpack", extra="teacher").unpackb(packed)
            values["students"] = tuple(StudentStats(*row) for row in values["students"])
            values["workers"] = tuple(WorkerStats(*row) for row in values["workers"])
            return cls(**values)
        except Exception as error:  # whatever an unpacker makes of hostile bytes
            raise ProtocolError(f"these are no statistics: {type(error).__name__}") from None

    def prometheus(self) -> str:
        """Return the figures in Prometheus's text exposition format 0.0.4."""
        return "".join(self._prometheus_lines())

    def _prometheus_lines(self) -> Iterator[str]:
        labels = f'{{run_id="{_label(self.run_id)}"}}'
        for name, (kind, text) in _METRICS.items():
            value = getattr(self, name)
            metric = f"mixle_teacher_{_spelt_out(name)}" + ("_total" if kind == "counter" else "")
            yield f"# HELP {metric} {text}\n# TYPE {metric} {kind}\n"
            yield f"{metric}{labels} {float('nan') if value is None else value}\n"
        yield from self._rows("worker", self.workers, ("worker", "process"), _WORKER_METRICS)
        yield "# HELP mixle_teacher_worker_state 1 for the state that a worker is in.\n"
        yield "# TYPE mixle_teacher_worker_state gauge\n"
        for row in self.workers:
            labels = self._labels(row, ("worker", "process", "state"))
            yield f"mixle_teacher_worker_state{labels} 1\n"
        yield from self._rows("student", self.students, ("student", "process", "rank"), _STUDENT_METRICS)

    def _rows(
        self, of: str, rows: Iterable[Any], labels: tuple[str, ...], metrics: dict[str, tuple[str, str]]
    ) -> Iterator[str]:
        for name, (kind, text) in metrics.items():
            metric = f"mixle_teacher_{of}_{name}" + ("_total" if kind == "counter" else "")
            yield f"# HELP {metric} {text}\n# TYPE {metric} {kind}\n"
            for row in rows:
                yield f"{metric}{self._labels(row, labels)} {getattr(row, name)}\n"

    def _labels(self, row: Any, names: tuple[str, ...]) -> str:
        told = [("run_id", self.run_id), *((name, str(getattr(row, name))) for name in names)]
        return "{" + ",".join(f'{name}="{_label(value)}"' for name, value in told) + "}"


_METRICS = {
    "uptime_s": ("gauge", "Seconds since the broker started."),
    "generation": ("gauge", "Generation of the model."),
    "students_registered": ("gauge", "Students."),
    "workers_registered": ("gauge", "Workers."),
    "workers_serving": ("gauge", "Workers that beat and serve the model."),
    "queued": ("gauge", "Slots that wait for a worker."),
    "working": ("gauge", "Slots that workers have."),
    "rate": ("gauge", "Samples per second lately."),
    "latency_p50_s": ("gauge", "Median seconds from order to completion, lately."),
    "latency_p99_s": ("gauge", "99th percentile of seconds from order to completion, lately."),
    "ordered": ("counter", "Slots ordered."),
    "completed": ("counter", "Slots completed."),
    "direct": ("counter", "Slots of these that students ordered from workers directly."),
    "failed": ("counter", "Slots given up after their last try."),
    "retried": ("counter", "Slots tried again after a generator failed."),
    "requeued": ("counter", "Slots given to another worker."),
    "stale_dropped": ("counter", "Ordered slots dropped because the model was switched."),
    "cancelled": ("counter", "Ordered slots that their student cancelled."),
    "lost": ("counter", "Slots whose worker fell silent."),
    "unknown_tickets": ("counter", "Reports about work that their sender does not have."),
    "garbage_frontend": ("counter", "Malformed messages at the frontend."),
    "garbage_backend": ("counter", "Malformed messages at the backend."),
    "garbage_control": ("counter", "Malformed messages at the control socket."),
    "strangers": ("counter", "Messages of peers that are not registered."),
    "keys_refused": ("counter", "Connections refused for their keys: those of others, or none."),
    "undeliverable": ("counter", "Messages whose receiver was gone or read nothing."),
    "internal_errors": ("counter", "Messages whose handling failed."),
}
_WORKER_METRICS = {
    "completed": ("counter", "Samples that a worker completed."),
    "failed": ("counter", "Slots that a worker's generator failed."),
    "rate": ("gauge", "Samples per second of a worker."),
    "outstanding": ("gauge", "Slots that a worker has."),
}
_STUDENT_METRICS = {
    "completed": ("counter", "Samples that a student got."),
    "failed": ("counter", "Slots of a student given up after their last try."),
    "queued": ("gauge", "Slots of a student that wait for a worker."),
    "working": ("gauge", "Slots of a student that workers have."),
}
assert set(_METRICS) <= {one.name for one in fields(BrokerStats)}


def _spelt_out(name: str) -> str:
    return f"{name.removesuffix('_s')}_seconds" if name.endswith("_s") else name


def _label(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
