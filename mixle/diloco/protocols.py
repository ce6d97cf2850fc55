"""Check that an argument has the members that its protocol asks for, where it is given and not where it is used."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

__all__ = ["MAILBOX_MEMBERS", "require_clock", "require_mailbox", "require_members", "require_ranks"]

MAILBOX_MEMBERS = ("put_if_absent", "get", "list", "delete", "clock")


def require_members(value: Any, name: str, members: Iterable[str], what: str) -> Any:
    """Return ``value`` if it has these members.

    Raises:
        TypeError: it lacks some; the message says that it must be ``what``.
    """
    missing = [member for member in members if not hasattr(value, member)]
    if missing:
        raise TypeError(f"{name}={value!r:.200} must be {what}; a {type(value).__name__} has no {', '.join(missing)}")
    return value


def require_mailbox(value: Any, name: str = "mailbox") -> Any:
    """Return ``value`` if it is a mailbox, and raise as :func:`require_members` does."""
    what = "a mailbox, such as open_mailbox('s3://bucket/prefix') returns"
    return require_members(value, name, MAILBOX_MEMBERS, what)


def require_ranks(value: Any, name: str = "ranks") -> Any:
    """Return ``value`` if it is a place among ranks, and raise as :func:`require_members` does."""
    return require_members(
        value, name, ("rank", "world", "broadcast"), "None or this rank's place, such as TorchRanks()"
    )


def require_clock(value: Any, name: str = "clock") -> Any:
    """Return ``value`` if it is a clock, and raise as :func:`require_members` does."""
    return require_members(value, name, ("monotonic", "sleep", "wait"), "a mixle.diloco.clock.Clock")
