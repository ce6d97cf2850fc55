"""A mailbox in a folder, local or shared over a network file system.

An object is written to ``.partial/`` first, put on the disk, and then linked to its name, which fails if the name is
taken: it is seen whole or not at all, and what a killed writer leaves is under no key. A partial file is locked while
it is written, so that the next process that opens the mailbox can tell and remove a dead writer's.
"""

from __future__ import annotations

import errno
import logging
import os
import secrets
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from mixle.diloco.mailbox import MailboxError, ObjectTooLarge, PermanentMailboxError, TransientMailboxError

logger = logging.getLogger(__name__)

_PARTIAL = ".partial"
_CLOCK = ".clock"
_TRIES = 100
_TRANSIENT = {
    errno.EINTR, errno.EAGAIN, errno.EBUSY, errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EMFILE, errno.ENFILE,
    errno.ENOMEM, errno.ENOSPC, errno.EDQUOT, errno.ECONNRESET, errno.EHOSTDOWN, errno.EHOSTUNREACH,
    errno.ENETUNREACH,
}  # fmt: skip
_NO_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS}


class FileMailbox:
    """A :class:`~mixle.diloco.mailbox.Mailbox` in the folder ``root``, which is made private to its user (0700).

    An object is on the disk when ``put_if_absent`` returns. Links and special files are neither listed nor read.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        with _translated(f"opening {root}"):
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
            if root.stat().st_mode & stat.S_IWOTH:
                logger.warning("every user of this machine can write to %s; make it private: chmod 700", root)
            (root / _PARTIAL).mkdir(mode=0o700, exist_ok=True)
            self._remove_abandoned()

    def put_if_absent(self, key: str, data: bytes) -> bool:
        """See :class:`~mixle.diloco.mailbox.Mailbox`."""
        path = self._root / key
        with _translated(f"writing {path}"):
            if os.path.lexists(path):
                return False
            for _ in range(_TRIES):
                self._make_folders(path.parent)
                try:
                    with self._partial(data) as partial:
                        os.link(partial, path, follow_symlinks=False)
                        _sync(path.parent)
                        return True
                except FileExistsError:
                    return False
                except FileNotFoundError:  # a concurrent delete emptied and removed the folder, or a sweep the partial
                    continue
                except OSError as error:
                    if error.errno in _NO_LINKS:
                        raise PermanentMailboxError(
                            f"{path} cannot be linked ({error.strerror}): the file system under {self._root} has no "
                            f"hard links, which a mailbox needs; put it on another"
                        ) from error
                    raise
        raise TransientMailboxError(f"writing {path}: its folder vanished {_TRIES} times in a row")

    def get(self, key: str, *, limit: int | None = None) -> bytes | None:
        """See :class:`~mixle.diloco.mailbox.Mailbox`."""
        path = self._root / key
        with _translated(f"reading {path}"):
            try:
                descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
            except (FileNotFoundError, NotADirectoryError):
                return None
            except OSError as error:
                if error.errno in (errno.ELOOP, errno.ENXIO):  # a symbolic link, a socket
                    return None
                raise
            try:
                status = os.fstat(descriptor)
                if not stat.S_ISREG(status.st_mode):
                    return None
                if limit is not None and status.st_size > limit:
                    raise ObjectTooLarge(key, status.st_size, limit)
                with open(descriptor, "rb", buffering=0, closefd=False) as file:
                    return file.read()
            finally:
                os.close(descriptor)

    def list(self, prefix: str, after: str = "", *, limit: int | None = None) -> list[str]:
        """See :class:`~mixle.diloco.mailbox.Mailbox`; subfolders that end below ``after`` are not read."""
        with _translated(f"listing {self._root / prefix}"):
            return sorted(_walk(self._root / prefix, prefix, after))[:limit]

    def delete(self, keys: Iterable[str]) -> None:
        """See :class:`~mixle.diloco.mailbox.Mailbox`; folders that become empty go too."""
        for key in keys:
            path = self._root / key
            with _translated(f"deleting {path}"), suppress(FileNotFoundError, NotADirectoryError):
                path.unlink()
            for folder in list(path.parents)[: key.count("/")]:
                try:
                    folder.rmdir()
                except OSError:  # not empty, or gone
                    break

    def clock(self) -> float:
        """Return the time that the file system gives to a file written now."""
        path = self._root / _CLOCK
        with _translated(f"writing {path}"):
            with open(path, "wb") as file:
                file.write(b"x")
            return path.stat().st_mtime

    @contextmanager
    def _partial(self, data: bytes) -> Iterator[Path]:
        """Hold a locked file with ``data``, on the disk, that is no object yet."""
        path = self._root / _PARTIAL / secrets.token_hex(16)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            with open(descriptor, "wb", buffering=0) as file:
                with suppress(OSError):  # without locks nothing is swept, either
                    _lock(descriptor)
                view = memoryview(data)
                while view:
                    view = view[file.write(view) :]
                os.fsync(descriptor)
                yield path
        finally:
            path.unlink(missing_ok=True)

    def _remove_abandoned(self) -> None:
        """Remove partial files that no living process holds."""
        for path in (self._root / _PARTIAL).iterdir():
            try:
                descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
            except OSError:  # another process removed it, or it is none of ours
                continue
            try:
                _lock(descriptor)
                path.unlink(missing_ok=True)
            except OSError:  # its writer lives, or the file system has no locks
                continue
            finally:
                os.close(descriptor)

    def _make_folders(self, folder: Path) -> None:
        """Make ``folder`` and those above it below the root, each on the disk before what is in it."""
        if folder.is_dir():
            return
        if folder != self._root:
            self._make_folders(folder.parent)
        try:
            folder.mkdir(mode=0o700)
        except FileExistsError:
            if not folder.is_dir():
                raise NotADirectoryError(errno.ENOTDIR, "a file is where a folder belongs", str(folder)) from None
            return
        _sync(folder.parent)


def _walk(folder: Path, prefix: str, after: str) -> Iterator[str]:
    """Yield the keys of the regular files below ``folder`` that are above ``after``."""
    try:
        entries = os.scandir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return
    with entries:
        for entry in entries:
            key = prefix + entry.name
            if entry.name.startswith("."):
                continue
            if entry.is_dir(follow_symlinks=False):
                if key + "/" >= after or after.startswith(key + "/"):
                    yield from _walk(folder / entry.name, key + "/", after)
            elif key > after and entry.is_file(follow_symlinks=False):
                yield key


def _lock(descriptor: int) -> None:
    """Lock an open file without waiting; the system drops a dead process's lock."""
    import fcntl  # here, since Windows has none and buckets do not need it

    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _sync(folder: Path) -> None:
    """Put the names in ``folder`` on the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _translated(doing: str) -> Iterator[None]:
    """Raise an OSError as the mailbox's own error, which says whether to try again."""
    try:
        yield
    except MailboxError:
        raise
    except OSError as error:
        kind = TransientMailboxError if error.errno in _TRANSIENT else PermanentMailboxError
        raise kind(f"{doing}: {error.strerror or error}") from error
