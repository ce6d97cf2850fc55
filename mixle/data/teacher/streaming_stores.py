"""Large samples written past the processor's caches."""

from __future__ import annotations

import os
import platform
import sys

VARIABLE = "GLIBC_TUNABLES"
TUNABLE = "glibc.cpu.x86_non_temporal_threshold"
SMALLEST_BYTES = 256 << 10


def streaming_stores(settings: str = "") -> str | None:
    """Return the value of ``GLIBC_TUNABLES`` with which copies of 256 KiB and more pass the caches by.

    A slot is written by one process and read by another, after many other slots: what goes through the writer's caches
    is read from memory first, though nobody needs it, and drives out what all its neighbours need. The C library avoids
    that only for copies of most of a cache, and takes another limit from the environment at a program's start alone
    (the GNU C Library's manual, "Hardware Capability Tunables").

    Args:
        settings: the variable's value now.

    Returns:
        The new value; None where the limit is set already, or this is not glibc on x86-64.
    """
    if sys.platform != "linux" or platform.machine() != "x86_64" or TUNABLE in settings:
        return None
    try:
        os.confstr("CS_GNU_LIBC_VERSION")
    except ValueError:
        return None
    # First, for some of these libraries end the string behind the first setting, and the next program must find it.
    return ":".join([f"{TUNABLE}={SMALLEST_BYTES:#x}", *filter(None, [settings])])


def restart_with_streaming_stores() -> None:
    """Start the program that runs in this process anew with :func:`streaming_stores`, if they are to be had."""
    value = streaming_stores(os.environ.get(VARIABLE, ""))
    if value is not None and sys.executable:
        os.execve(sys.executable, sys.orig_argv, os.environ | {VARIABLE: value})
