"""Sleep on a word of shared memory until another process rings: Linux's futexes (``man 2 futex``).

A wake-up through a socket of ZeroMQ costs three of this, one for each thread on the way.
"""

from __future__ import annotations

import ctypes
import platform
import sys

__all__ = ["AVAILABLE", "ring", "sleep"]

_SYSCALL = 202  # of futex on x86-64, the one machine that orders stores well enough for what is slept on here
_WAIT, _WAKE = 0, 1

AVAILABLE = sys.platform == "linux" and platform.machine() == "x86_64" and sys.maxsize > 2**32


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_int64), ("nanoseconds", ctypes.c_int64))


_syscall = ctypes.CDLL(None).syscall if AVAILABLE else None


def sleep(address: int, expected: int, timeout_s: float) -> None:
    """Sleep while the aligned 32-bit word at ``address`` is ``expected``, until :func:`ring` or ``timeout_s``.

    May return early: look again at what is waited for. Other threads run meanwhile.
    """
    assert _syscall is not None
    seconds = int(timeout_s)
    timeout = _Timespec(seconds, int((timeout_s - seconds) * 1e9))
    _syscall(_SYSCALL, ctypes.c_void_p(address), _WAIT, expected, ctypes.byref(timeout), None, 0)


def ring(address: int) -> None:
    """Wake whoever sleeps on the word at ``address``, in whichever process maps it."""
    if _syscall is not None:
        _syscall(_SYSCALL, ctypes.c_void_p(address), _WAKE, 1, None, None, 0)
