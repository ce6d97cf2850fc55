"""Files that are found whole: replaced in one move, and written by one process at a time."""

from __future__ import annotations

import errno
import logging
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

logger = logging.getLogger(__name__)

_UNSUPPORTED = {errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP}


def replace_file(path: Path, data: bytes, *, private: bool = False) -> None:
    """Put ``data`` at ``path`` in one move, on the disk before it has the name.

    Until then it is in ``.NAME.(16 hexadecimal digits).partial`` beside it, which only a crash leaves behind.

    Args:
        private: let nobody but this user read it, whatever the umask says.
    """
    partial = path.with_name(f".{path.name}.{secrets.token_hex(8)}.partial")
    try:
        with open(partial, "xb", opener=_private if private else None) as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


@contextmanager
def locked(path: Path, *, shared: bool = False, wait: bool = True) -> Iterator[None]:
    """Hold the lock that the file ``path`` stands for, which is made and stays; the system drops a dead holder's.

    Where the file system has no locks, this warns and holds none.

    Args:
        shared: hold it beside others that do, but not beside one that holds it alone.
        wait: until it is free.

    Raises:
        BlockingIOError: it is not free, and ``wait`` is False.
    """
    import fcntl  # here, since Windows has none and only this needs it

    how = (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        try:
            fcntl.flock(descriptor, how)
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise
            logger.warning("%s cannot be locked (%s); let no two processes write there", path, error.strerror)
        try:
            yield
        finally:
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # a forked child has the descriptor, and shall not keep the lock
    finally:
        os.close(descriptor)
