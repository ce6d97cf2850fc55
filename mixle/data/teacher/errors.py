"""What can go wrong between students, broker and workers, each kind that a caller may want to catch by its own name."""

# ruff: noqa: N818  (named by what happened)
from __future__ import annotations


class TeacherError(RuntimeError):
    """Base of every error of the teacher's processes."""


class ProtocolError(TeacherError, ValueError):
    """A message that is not what the protocol says; the message names the command and the field."""


class VersionMismatch(ProtocolError):
    """The two sides speak different versions of the protocol."""


class BrokerUnreachable(TeacherError):
    """No broker answered before the deadline; ``why`` is what is known of the reason."""

    def __init__(self, message: str, why: str = "") -> None:
        super().__init__(message)
        self.why = why


class BrokerRunning(TeacherError):
    """Another broker holds one of the endpoints; ``pid`` is its process where that is known."""

    def __init__(self, message: str, pid: int | None) -> None:
        super().__init__(message)
        self.pid = pid


class NoWorker(TeacherError):
    """The broker answers, but no worker served the order before the deadline."""


class GeneratorFailed(TeacherError):
    """A generator raised, or returned something that is not a sample, as often as the broker would try."""


class LeaderRefused(TeacherError):
    """The model may be switched by the leader only; the message names who that is."""


class RequestRefused(TeacherError):
    """The broker understood the message and will not do what it asks; the message says why."""
