"""Memory that processes share: POSIX shared memory, or a private file that is mapped, by a name of the run.

A name is ``/mx`` + run id (8 hexadecimal digits) + ``-`` + pid of its maker + ``-`` + 6 random digits, at most 31
characters. Nothing is registered with multiprocessing's resource tracker, whose clean-up at one process's end would
take the memory from the others. The maker holds a lock on the segment, which the system drops when it dies, however it
dies: by that :mod:`mixle.data.teacher.cleanup` knows what is left over.
"""

from __future__ import annotations

import _posixshmem  # type: ignore[import-not-found]
import errno
import fcntl
import mmap
import os
import re
import secrets
import stat
import struct
from contextlib import suppress
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias

from mixle.utils.exact import require_choice, require_positive_int

SegmentMedium: TypeAlias = Literal["shm", "file"]
SEGMENT_MEDIUMS: tuple[SegmentMedium, ...] = ("shm", "file")
MOST_NAME_CHARACTERS = 31
SHM_DIRECTORY = Path("/dev/shm")

LOCKS_AVAILABLE = hasattr(fcntl, "F_OFD_SETLK")

_NAME = re.compile(r"/mx([0-9a-f]{8})-([1-9a-f][0-9a-f]{0,6})-([0-9a-f]{6})")
_RUN_ID = re.compile(r"[0-9a-f]{8}")
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENOMEM}


class SegmentName(NamedTuple):
    """The parts of a segment's name."""

    run_id: str
    pid: int


def parse_segment_name(name: object) -> SegmentName:
    """Return the parts of a name, with or without its leading slash.

    Raises:
        ValueError: it is not the name of a segment.
    """
    match = _NAME.fullmatch(f"/{name.removeprefix('/')}") if isinstance(name, str) else None
    if match is None or len(match.group()) > MOST_NAME_CHARACTERS:
        raise ValueError(f"name={str(name)[:80]!r} is not the name of a segment, such as /mx0123abcd-1f2e-c0ffee")
    return SegmentName(match.group(1), int(match.group(2), 16))


def require_run_id(run_id: object) -> str:
    """Return ``run_id`` if it is 8 hexadecimal digits, else raise a ``ValueError``."""
    if not isinstance(run_id, str) or not _RUN_ID.fullmatch(run_id):
        raise ValueError(f"run_id={run_id!r} must be 8 hexadecimal digits, such as '0123abcd'")
    return run_id


class Segment:
    """Hold memory that other processes of this user can attach by its name; made by :meth:`create` or :meth:`attach`.

    Attributes:
        name: with the leading slash.
        medium: ``"shm"`` or ``"file"``.
        size: bytes.
        owner: whether this object made it.
    """

    name: str
    medium: SegmentMedium
    size: int
    owner: bool

    def __init__(self, name: str, medium: SegmentMedium, directory: Path | None, memory: mmap.mmap, lock: int) -> None:
        self.name, self.medium, self.size, self.owner = name, medium, len(memory), lock >= 0
        self._directory = directory
        self._memory: mmap.mmap | None = memory
        self._buffer: memoryview | None = memoryview(memory)
        if self.owner:
            _locks.add(lock)
            # Runs once, in this process only: at unlink(), when the object is dropped, or when the process ends.
            self._leave = Finalize(self, _leave, args=(lock, name, directory), exitpriority=0)

    @classmethod
    def create(
        cls, size: int, *, run_id: str, medium: SegmentMedium = "shm", directory: str | Path | None = None
    ) -> Segment:
        """Make a segment of ``size`` zero bytes, all of them reserved, that this user alone can open.

        Args:
            size: bytes.
            run_id: 8 hexadecimal digits.
            medium: ``"shm"`` or ``"file"``.
            directory: where the file is, for ``"file"``: a directory of this user's that no other can write.

        Raises:
            OSError: there is no room for ``size`` bytes; says how many there is room for.
            PermissionError: ``directory`` is another user's, or others can write there.
        """
        size = require_positive_int(size, "size")
        require_run_id(run_id)
        where = _require_place(medium, directory)
        while True:
            name = f"/mx{run_id}-{os.getpid():x}-{secrets.token_hex(3)}"
            try:
                descriptor = _open(name, where, os.O_RDWR | os.O_CREAT | os.O_EXCL)
            except FileExistsError:
                continue
            break
        lock = -1
        try:
            lock = _open(name, where, os.O_RDWR)  # one that the mapping, which children inherit, knows nothing of
            fcntl.flock(lock, fcntl.LOCK_SH)
            _reserve(descriptor, size, where or SHM_DIRECTORY)
            return cls(name, medium, where, mmap.mmap(descriptor, size), lock)
        except BaseException:
            if lock >= 0:
                os.close(lock)
            _unlink(name, where)
            raise
        finally:
            os.close(descriptor)

    @classmethod
    def attach(
        cls,
        name: str,
        *,
        run_id: str,
        size: int,
        medium: SegmentMedium = "shm",
        directory: str | Path | None = None,
        pid: int | None = None,
    ) -> Segment:
        """Map a segment that another process of this user and this run has made.

        Args:
            name: with or without its leading slash.
            run_id: the run that it must be of.
            size: the bytes that it must have.
            medium, directory: as for :meth:`create`.
            pid: the process that must have made it.

        Raises:
            ValueError: no name of a segment, one of another run or process, or of another size.
            PermissionError: it is another user's, open to others, or no plain file.
            FileNotFoundError: it is gone.
        """
        size = require_positive_int(size, "size")
        parts = parse_segment_name(name)
        name = f"/{name.removeprefix('/')}"
        if parts.run_id != require_run_id(run_id):
            raise ValueError(f"name={name!r} is a segment of run {parts.run_id}, not of this run, {run_id}")
        if pid is not None and parts.pid != pid:
            raise ValueError(f"name={name!r} is a segment of process {parts.pid}, not of {pid}, which named it")
        where = _require_place(medium, directory)
        descriptor = _open(name, where, os.O_RDWR)
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
                raise PermissionError(f"segment {name} is not a plain file of this user alone; it is not attached")
            if status.st_size != size:
                raise ValueError(f"segment {name} has {status.st_size} bytes, not the size={size} that was said")
            return cls(name, medium, where, mmap.mmap(descriptor, size), -1)
        finally:
            os.close(descriptor)

    @property
    def buffer(self) -> memoryview:
        """The memory, writable.

        Raises:
            ValueError: the segment is closed.
        """
        if self._buffer is None:
            raise ValueError(f"segment {self.name} is closed")
        return self._buffer

    def close(self) -> None:
        """Let go of the memory; it stays mapped for as long as arrays or tensors over it live. Idempotent."""
        memory, self._memory, self._buffer = self._memory, None, None
        if memory is not None:
            with suppress(BufferError):  # the last view over it unmaps it
                memory.close()

    def locks(self) -> SlotLocks:
        """Return locks on the slots, which exclude those of every other holder, be it in this process.

        Raises:
            FileNotFoundError: the name was taken away.
        """
        return SlotLocks(_open(self.name, self._directory, os.O_RDWR))

    def unlink(self) -> None:
        """Take the name away, if this process made the segment; who has it mapped keeps the memory. Idempotent."""
        if self.owner:
            self._leave()

    def __enter__(self) -> Segment:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
        self.unlink()

    def __repr__(self) -> str:
        return f"Segment({self.name}, {self.medium}, {self.size} bytes{'' if self._memory else ', closed'})"


class SlotLocks:
    """Exclusive locks on slots of one segment; the system drops them when their holder dies. Made by a segment."""

    _LOCK = struct.Struct("hhqqi4x")  # struct flock of 64-bit Linux

    def __init__(self, descriptor: int) -> None:
        self._descriptor, self._pid = descriptor, os.getpid()
        _locks.add(descriptor)

    def hold(self, slot: int) -> bool:
        """Take the lock on a slot; False if another has it, or these are closed. Does not wait.

        Raises:
            OSError: the system has no such locks, or no room for one.
        """
        if self._descriptor < 0:
            return False
        try:
            fcntl.fcntl(self._descriptor, fcntl.F_OFD_SETLK, self._LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, slot, 1, 0))
        except BlockingIOError:
            return False
        return True

    def let_go(self, slot: int) -> None:
        """Drop the lock on a slot."""
        if self._descriptor >= 0:
            fcntl.fcntl(self._descriptor, fcntl.F_OFD_SETLK, self._LOCK.pack(fcntl.F_UNLCK, os.SEEK_SET, slot, 1, 0))

    def close(self) -> None:
        """Drop all of them. Idempotent."""
        descriptor, self._descriptor = self._descriptor, -1  # first: it may be another file's as soon as it is closed
        if descriptor >= 0 and self._pid == os.getpid():  # in a fork it was closed, and may be another's by now
            _locks.discard(descriptor)
            os.close(descriptor)


def unlink_segment(name: str, *, medium: SegmentMedium, directory: str | Path | None = None) -> bool:
    """Take away the name of a segment, such as that of a process that died; return whether it was there.

    Raises:
        ValueError: not the name of a segment.
        PermissionError: it is another user's.
    """
    parse_segment_name(name)
    return _unlink(f"/{name.removeprefix('/')}", _require_place(medium, directory))


def _open(name: str, directory: Path | None, flags: int) -> int:
    flags |= os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        if directory is None:
            return int(_posixshmem.shm_open(name, flags, mode=0o600))
        return os.open(directory / name[1:], flags, 0o600)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise PermissionError(f"segment {name} is a symbolic link; it is not followed") from error
        raise


def _unlink(name: str, directory: Path | None) -> bool:
    try:
        if directory is None:
            _posixshmem.shm_unlink(name)
        else:
            os.unlink(directory / name[1:])
    except FileNotFoundError:
        return False
    return True


def _require_place(medium: SegmentMedium, directory: str | Path | None) -> Path | None:
    """Return the directory of a file; None for shared memory, which has none."""
    if require_choice(medium, "medium", SEGMENT_MEDIUMS) == "shm":
        if directory is not None:
            raise ValueError(f"directory={str(directory)!r} is of no use to medium='shm'; leave it out")
        return None
    if directory is None:
        raise ValueError("medium='file' needs directory=, where the files of the run are")
    status = os.lstat(directory)
    if not stat.S_ISDIR(status.st_mode):
        raise PermissionError(f"directory={str(directory)!r} is a link or no directory; give the real one")
    if status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise PermissionError(f"directory={str(directory)!r} must be this user's, with mode 0700")
    return Path(directory)


def _reserve(descriptor: int, size: int, place: Path) -> None:
    room = os.statvfs(place)
    free = room.f_bavail * room.f_frsize
    try:
        if size > free:  # a file system may fill up before it notices
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(descriptor, 0, size)
        else:
            os.ftruncate(descriptor, size)
    except OSError as error:
        if error.errno not in _FULL:
            raise
        raise OSError(
            error.errno,
            f"{size} bytes of slots do not fit in {place}, which has {free} of {room.f_blocks * room.f_frsize} bytes "
            "free; ask for fewer slots or enlarge it",
        ) from error


def _leave(lock: int, name: str, directory: Path | None) -> None:
    _unlink(name, directory)
    _locks.discard(lock)
    os.close(lock)


_locks: set[int] = set()


def _drop_locks_in_child() -> None:
    """Close a forked child's copies of the locks, which would outlast the parent."""
    while _locks:
        os.close(_locks.pop())


os.register_at_fork(after_in_child=_drop_locks_in_child)
