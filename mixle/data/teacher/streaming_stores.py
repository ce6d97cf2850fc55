"""Large samples written past the processor's caches."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

logger = logging.getLogger(__name__)

VARIABLE = "GLIBC_TUNABLES"
TUNABLE = "glibc.cpu.x86_non_temporal_threshold"
SMALLEST_BYTES = 256 << 10
MARK = "MIXLE_RESTARTED"


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
    if sys.platform != "linux" or os.uname().machine != "x86_64" or TUNABLE in settings:
        return None
    try:
        os.confstr("CS_GNU_LIBC_VERSION")
    except ValueError:
        return None
    # First, for some of these libraries end the string behind the first setting, and the next program must find it.
    return ":".join([f"{TUNABLE}={SMALLEST_BYTES:#x}", *filter(None, [settings])])


def restart_with_streaming_stores() -> None:
    """Start the ``mixle`` command that is this process anew with :func:`streaming_stores`, if they are to be had.

    A program that calls the command's ``main`` is left alone: what it did before would be done again.
    """
    restarted = os.environ.pop(MARK, None) == str(os.getpid())  # some processes may not have the variable
    value = streaming_stores(os.environ.get(VARIABLE, ""))
    if value is None or restarted or not _is_the_command():
        return
    try:
        os.execve(sys.executable, sys.orig_argv, os.environ | {VARIABLE: value, MARK: str(os.getpid())})
    except OSError as error:
        logger.info("large samples go through the caches: %s", error)


def _is_the_command() -> bool:
    """Tell whether Python was started as ``python -m mixle ...`` or with the installed script, and nothing else."""
    before, arguments = sys.orig_argv[: -len(sys.argv) + 1], sys.orig_argv[-len(sys.argv) + 1 :]
    if not sys.executable or arguments != sys.argv[1:]:
        return False
    script = Path(before[-1])
    return before[-2:] == ["-m", "mixle"] or (script.name == "mixle" and script.is_file() and before[-1] == sys.argv[0])
