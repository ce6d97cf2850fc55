"""What a node reports: everything that a user would want to know of and that nothing else tells."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

__all__ = ["Event", "Kind", "log_events"]

Kind = Literal[
    "joined",
    "left",
    "published",
    "committed",
    "applied",
    "rejected",
    "clipped",
    "takeover",
    "corrupt",
    "foreign",
    "store",
    "unflushed",
    "stopped",
]
_WARNINGS = frozenset(("rejected", "clipped", "takeover", "corrupt", "foreign", "store", "unflushed", "stopped"))

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Event:
    """One thing that happened at a node.

    Attributes:
        kind: ``joined``, ``left``; ``published`` a snapshot; ``committed`` a round; ``applied`` one; ``rejected`` a
            snapshot; ``clipped`` a delta; ``takeover`` of a claim; ``corrupt`` payload, passed over; ``foreign`` object
            under the prefix, passed over; ``store`` trouble, to be tried again; ``unflushed`` work that is lost;
            ``stopped`` before it was closed.
        node: whose event it is.
        round: the round it is about, None if about none.
        detail: what else is known, by name.
    """

    kind: Kind
    node: str
    round: int | None = None
    detail: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        where = "" if self.round is None else f" round {self.round}"
        told = ", ".join(f"{name} {value}" for name, value in self.detail.items())
        return f"{self.node}: {self.kind}{where}{': ' if told else ''}{told}"


Callback = Callable[[Event], None]


def log_events(event: Event) -> None:
    """Write an event to the log: trouble as a warning, the rest as information."""
    _log.log(logging.WARNING if event.kind in _WARNINGS else logging.INFO, "%s", event)
