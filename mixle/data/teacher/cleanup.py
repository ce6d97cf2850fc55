"""Remove the memory of processes that died without removing it.

The maker of a segment holds a lock on it as long as it lives. Where no lock is held, the maker is dead if its process
is gone or the segment is no longer new: a number that another process has by now does not keep it.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import stat
import time
from pathlib import Path

from mixle.data.teacher.lane import remove_dead_lanes
from mixle.data.teacher.run import is_running, slots_directory
from mixle.data.teacher.segment import SHM_DIRECTORY, SegmentMedium, parse_segment_name, require_run_id, unlink_segment

logger = logging.getLogger(__name__)

_NEW_SECONDS = 10.0
_NO_LOCKS = {errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL}


def clean(run_id: str | None = None, *, directory: str | os.PathLike[str] | None = None) -> list[str]:
    """Remove this user's segments in shared memory and files whose makers are dead, and the sockets of dead workers.

    Returns their paths.

    Args:
        run_id: only segments of this run; None for all.
        directory: the teacher's directory; None for the default one.

    Raises:
        ValueError: ``run_id`` is not 8 hexadecimal digits.
        PermissionError: the directory is not this user's alone.
    """
    if run_id is not None:
        require_run_id(run_id)
    removed = _clean_place(SHM_DIRECTORY, "shm", run_id) if SHM_DIRECTORY.is_dir() else []
    return removed + _clean_place(slots_directory(directory), "file", run_id) + remove_dead_lanes(directory)


def tidy(run_id: str, *, directory: str | os.PathLike[str] | None = None) -> None:
    """Do what :func:`clean` does, as a process of the run starts; it starts too if that fails, which is logged."""
    try:
        removed = clean(run_id, directory=directory)
    except OSError as error:
        logger.warning("could not remove what dead processes of run %s left: %s", run_id, error)
        return
    if removed:
        logger.info("removed what dead processes of run %s left: %s", run_id, ", ".join(removed))


def _clean_place(place: Path, medium: SegmentMedium, run_id: str | None) -> list[str]:
    removed = []
    for name in sorted(os.listdir(place)):
        try:
            parts = parse_segment_name(name)
        except ValueError:
            continue  # somebody else's
        wanted = run_id is None or parts.run_id == run_id
        if wanted and _is_left_over(place / name, parts.pid):
            unlink_segment(name, medium=medium, directory=place if medium == "file" else None)
            removed.append(str(place / name))
    return removed


def _is_left_over(path: Path, pid: int) -> bool:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except (FileNotFoundError, PermissionError):
        return False
    except OSError as error:
        if error.errno == errno.ELOOP:
            return False
        raise
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in _NO_LOCKS:  # held: its maker lives
                return False
            return not is_running(pid)
        return not is_running(pid) or time.time() - status.st_ctime > _NEW_SECONDS
    finally:
        os.close(descriptor)
