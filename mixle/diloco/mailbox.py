"""What DiLoCo asks of a store: objects that are written once, read, listed and deleted.

``put_if_absent`` is the only conditional operation; S3, GCS, Azure, file systems and memory all have it. A key is
written by whoever comes first and never changes. Keys are folders and a name, ``"rounds/000000000017"``, and no key is
another's folder.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

_SEGMENT = r"[A-Za-z0-9_](?:[A-Za-z0-9._-]*[A-Za-z0-9_-])?"
_KEY = re.compile(rf"{_SEGMENT}(?:/{_SEGMENT})*")
_ID = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,61}[A-Za-z0-9_-])?")
MAX_KEY_LENGTH = 512
MAX_SEGMENT_LENGTH = 200


class MailboxError(RuntimeError):
    """The store could not do what it was asked; ``TransientMailboxError`` says that asking again may help."""


class TransientMailboxError(MailboxError):
    """A lost connection, a timeout, an overloaded server, a full disk; what was asked may have been done."""


class PermanentMailboxError(MailboxError):
    """No permission, no such bucket, a read-only disk: asking again changes nothing."""


class ObjectTooLarge(PermanentMailboxError):  # noqa: N818  (named as the store's own answer)
    """An object is larger than its reader's bound, and was not read."""

    def __init__(self, key: str, size: int, limit: int) -> None:
        super().__init__(f"{key} holds {size} bytes, more than the {limit} that it may hold here")
        self.key, self.size, self.limit = key, size, limit


class Mailbox(Protocol):
    """A store of objects that are written once. Thread-safe; usable inside a running event loop."""

    def put_if_absent(self, key: str, data: bytes) -> bool:
        """Write ``data`` at ``key`` if nothing is there, whole or not at all; tell whether it is this call's.

        Where one of several must win, the data must tell the writers apart: a call whose acknowledgement was lost
        knows its own write by the bytes.
        """
        ...

    def get(self, key: str, *, limit: int | None = None) -> bytes | None:
        """Return the bytes at ``key``, None if there are none.

        Raises:
            ObjectTooLarge: there are more than ``limit``; none was held in memory.
        """
        ...

    def list(self, prefix: str, after: str = "", *, limit: int | None = None) -> list[str]:
        """Return the keys in the folder ``prefix`` (it ends with "/", or is "" for all) above ``after``, sorted.

        With ``limit`` only the first so many; up to 1,000 cost one request.
        """
        ...

    def delete(self, keys: Iterable[str]) -> None:
        """Delete the objects at ``keys``; those that are not there are no error."""
        ...

    def clock(self) -> float:
        """Return the store's own time in seconds since 1970; never compare it with a machine's."""
        ...


@dataclass(frozen=True)
class Traffic:
    """What went to a store and came from it: requests of each kind as sent, bytes of objects, requests repeated.

    A list counts one request per 1,000 keys found, a delete one per 1,000 keys, an object in parts one.
    """

    puts: int = 0
    gets: int = 0
    lists: int = 0
    deletes: int = 0
    bytes_up: int = 0
    bytes_down: int = 0
    retries: int = 0


def is_key(text: str) -> bool:
    """Tell whether ``text`` can be a key: ASCII letters, digits and ``._-``, no part beginning or ending with a dot."""
    return (
        len(text) <= MAX_KEY_LENGTH
        and _KEY.fullmatch(text) is not None
        and max(map(len, text.split("/"))) <= MAX_SEGMENT_LENGTH
    )


def require_key(value: object, name: str = "key") -> str:
    """Return ``value`` if it is a key.

    Raises:
        TypeError: it is no string.
        ValueError: it is none that every store has.
    """
    if not isinstance(value, str):
        raise TypeError(f"{name}={value!r} must be a string, not {type(value).__name__}")
    if not is_key(value):
        raise ValueError(
            f"{name}={value[:MAX_KEY_LENGTH]!r} must be parts joined by '/', each of 1 to {MAX_SEGMENT_LENGTH} of "
            f"A-Z a-z 0-9 . _ -, beginning with neither '.' nor '-' and not ending with '.'; "
            f"{MAX_KEY_LENGTH} characters at most"
        )
    return value


def require_prefix(value: object, name: str = "prefix") -> str:
    """Return ``value`` if it is "" or a key followed by "/".

    Raises:
        TypeError: it is no string.
        ValueError: it is not of that form.
    """
    if not isinstance(value, str):
        raise TypeError(f"{name}={value!r} must be a string, not {type(value).__name__}")
    if value and not (value.endswith("/") and is_key(value[:-1])):
        raise ValueError(f"{name}={value!r} must be '' or a folder such as 'rounds/', with the '/' at its end")
    return value


def require_id(value: object, name: str) -> str:
    """Return ``value`` if it can name a node, a queue or a barrier: one part of a key, 63 characters at most.

    Raises:
        TypeError: it is no string.
        ValueError: it holds what a key cannot.
    """
    if not isinstance(value, str):
        raise TypeError(f"{name}={value!r} must be a string, not {type(value).__name__}")
    if _ID.fullmatch(value) is None:
        raise ValueError(
            f"{name}={value[:MAX_KEY_LENGTH]!r} must be 1 to 63 of A-Z a-z 0-9 . _ -, "
            f"beginning with a letter or digit and not ending with '.'"
        )
    return value


def require_data(value: object) -> bytes:
    """Return ``value`` if it is bytes.

    Raises:
        TypeError: it is anything else.
    """
    if not isinstance(value, bytes):
        raise TypeError(f"data must be bytes, not {type(value).__name__}; convert it with bytes(...)")
    return value
