"""Let SIGTERM end the process by an exception while sessions are open, so that they are closed on the way."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["deferred_sigterm", "release_sigterm", "take_sigterm"]

_users = 0
_deferring, _due = 0, False


def take_sigterm() -> bool:
    """Handle SIGTERM from now on, unless somebody else does or this is not the main thread; tell whether it is done.

    Whoever is told so calls :func:`release_sigterm`; the last one to do so puts the default back.
    """
    global _users
    if threading.current_thread() is not threading.main_thread():
        return False
    if _users == 0 and signal.getsignal(signal.SIGTERM) not in (signal.SIG_DFL, _leave):
        return False
    if _users == 0:
        signal.signal(signal.SIGTERM, _leave)
    _users += 1
    return True


def release_sigterm() -> None:
    """Undo one :func:`take_sigterm`; the handler of whoever has put one in its place stays."""
    global _users
    _users -= 1
    main = threading.current_thread() is threading.main_thread()
    if _users == 0 and main and signal.getsignal(signal.SIGTERM) is _leave:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


@contextmanager
def deferred_sigterm() -> Iterator[None]:
    """Let a SIGTERM that :func:`take_sigterm` handles end the process only after this; the main thread's alone."""
    global _deferring, _due
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _deferring += 1
    try:
        yield
    finally:
        _deferring -= 1
        if _due and not _deferring:
            _due = False
            raise SystemExit(128 + signal.SIGTERM)


def _leave(number: int, frame: FrameType | None) -> None:
    global _due
    if _deferring:
        _due = True
    else:
        raise SystemExit(128 + number)
