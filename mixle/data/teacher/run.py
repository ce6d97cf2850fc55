"""Where a run lives and who takes part: directory, endpoints, locks, run id, and the identity of hosts and processes.

A run is what shares one broker. Its sockets, locks and id are files in a directory of the user's own. No path ever
travels in a message: every process finds the directory by itself.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import platform
import re
import secrets
import stat
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from mixle.data.teacher.errors import BrokerRunning
from mixle.utils.whole_file import replace_file

DIRECTORY_VARIABLE = "MIXLE_TEACHER_DIR"
MAX_IPC_PATH_BYTES = 107
RUN_ID = re.compile(r"[0-9a-f]{8}")
HOST_ID = re.compile(r"[0-9a-f]{16}")
LANE_NAME = re.compile(r"[1-9a-f][0-9a-f]{0,6}-[0-9a-f]{8}")
SECRET_BYTES = 32

_TCP = re.compile(r"tcp://(?P<host>\*|\[[0-9A-Fa-f:.%a-z]+\]|[0-9A-Za-z_.-]+):(?P<port>[0-9]{1,5}|\*)")


class ProcessIdentity(NamedTuple):
    """One process of one host, told from any later one with the same pid by when it started."""

    host: str
    pid: int
    start: int


def host_id() -> str:
    """Return 16 hexadecimal digits that two processes share if they see each other's shared memory and processes.

    It hashes the boot, the network namespace, the process namespace and the device of ``/dev/shm``.
    """
    parts = [_text("/proc/sys/kernel/random/boot_id") or platform.node()]
    for namespace in ("net", "pid"):
        try:
            parts.append(str(os.stat(f"/proc/self/ns/{namespace}").st_ino))
        except OSError:
            parts.append("")
    try:
        parts.append(str(os.stat("/dev/shm").st_dev))
    except OSError:
        parts.append("")
    return hashlib.sha256(":".join(parts).encode()).hexdigest()[:16]


def require_host_id(value: object) -> str:
    """Return ``value`` if it is a host id, or this host's own for None.

    Raises:
        TypeError, ValueError: it is not 16 lower-case hexadecimal digits.
    """
    if value is None:
        return host_id()
    if not isinstance(value, str):
        raise TypeError(f"host_id={value!r} must be 16 hexadecimal digits or None, not {type(value).__name__}")
    if not HOST_ID.fullmatch(value):
        raise ValueError(f"host_id={value!r} must be 16 lower-case hexadecimal digits")
    return value


def process_identity(host: str | None = None) -> ProcessIdentity:
    """Return who this process is; ask again after a fork."""
    pid = os.getpid()
    return ProcessIdentity(host_id() if host is None else host, pid, start_ticks(pid) or 0)


def start_ticks(pid: int) -> int | None:
    """Return when a process started, in clock ticks since boot; None if it is gone, or this system does not say."""
    status = _text(f"/proc/{pid}/stat")
    if not status:
        return None
    after_name = status.rpartition(")")[2].split()  # the name, in parentheses, may hold anything
    return None if after_name[0] in "ZX" else int(after_name[19])


def is_alive(identity: ProcessIdentity, host: str | None = None) -> bool | None:
    """Tell whether a process still runs; None if it is another host's. A zombie is dead."""
    if identity.host != (host_id() if host is None else host):
        return None
    return is_running(identity.pid, identity.start)


def is_running(pid: int, start: int | None = None) -> bool:
    """Tell whether a process of this host runs; with ``start``, its start time in ticks, that one and no later one.

    A zombie is dead. Systems without ``/proc`` tell no start times.
    """
    if os.path.exists("/proc/self/stat"):
        ticks = start_ticks(pid)
        return ticks is not None if start is None else ticks == start
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def teacher_directory(directory: str | os.PathLike[str] | None = None) -> Path:
    """Return the directory of this user's runs, made if need be: as given, ``$MIXLE_TEACHER_DIR``, or in ``~/.cache``.

    Raises:
        PermissionError: it belongs to another user, or others may enter it.
        NotADirectoryError: something else has that name (a symbolic link is refused too).
    """
    given = os.environ.get(DIRECTORY_VARIABLE) if directory is None else os.fspath(directory)
    if given == "":
        raise ValueError(
            "directory='' must name a directory" if directory is not None else f"${DIRECTORY_VARIABLE} is empty"
        )
    path = (
        Path(given).absolute() if given else Path.home() / ".cache" / "mixle" / f"teacher-{platform.node() or 'host'}"
    )
    private_directory(path)
    return path


def private_directory(path: Path) -> None:
    """Make ``path`` a directory that only this user may enter, or refuse the one that is there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        path.mkdir(mode=0o700)
        path.chmod(0o700)
    except FileExistsError:
        pass
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, "must be a directory, and no symbolic link", str(path))
    if found.st_uid != os.geteuid():
        raise PermissionError(
            errno.EPERM, f"belongs to user {found.st_uid}, not to {os.geteuid()}; set {DIRECTORY_VARIABLE}", str(path)
        )
    if found.st_mode & 0o077:
        raise PermissionError(
            errno.EPERM, f"has mode {stat.S_IMODE(found.st_mode):04o}; others must not enter it: chmod 700", str(path)
        )


def slots_directory(directory: str | os.PathLike[str] | None = None) -> Path:
    """Return where memory-mapped slots lie (``slots/`` in :func:`teacher_directory`), made if need be."""
    path = teacher_directory(directory) / "slots"
    private_directory(path)
    return path


@dataclass(frozen=True)
class Endpoints:
    """The four addresses of a broker."""

    frontend: str
    backend: str
    control: str
    control_pub: str

    @classmethod
    def of(
        cls,
        frontend: str | None = None,
        backend: str | None = None,
        control: str | None = None,
        control_pub: str | None = None,
        *,
        directory: str | os.PathLike[str] | None = None,
        keyed: bool,
        insecure: bool,
    ) -> Endpoints:
        """Return the addresses, checked; None stands for the socket of that name in :func:`teacher_directory`."""
        given = {"frontend": frontend, "backend": backend, "control": control, "control_pub": control_pub}
        checked = {
            name: require_endpoint(value, name, directory=directory, keyed=keyed, insecure=insecure, listens=True)
            for name, value in given.items()
        }
        fixed = [value for value in checked.values() if not value.endswith(":*")]
        if len(set(fixed)) < len(fixed):
            raise ValueError(f"the four endpoints must differ: {', '.join(f'{k}={v!r}' for k, v in checked.items())}")
        return cls(**checked)

    def __iter__(self) -> Iterator[str]:
        return iter((self.frontend, self.backend, self.control, self.control_pub))


def require_endpoint(
    value: object,
    name: str,
    *,
    directory: str | os.PathLike[str] | None = None,
    keyed: bool,
    insecure: bool,
    listens: bool = False,
) -> str:
    """Return an ``ipc://`` or ``tcp://`` address; None stands for the socket ``name`` in :func:`teacher_directory`.

    Args:
        name: ``"frontend"``, ``"backend"``, ``"control"`` or ``"control_pub"``.
        keyed: keys were given.
        insecure: the caller accepts TCP without keys.
        listens: it is the broker's own, who may leave host and port to the system with ``*``.

    Raises:
        TypeError: it is no string.
        ValueError: another transport, a path too long for a socket, a malformed address, or TCP without keys.
    """
    argument = f"{name}_endpoint"
    if value is None:
        value = f"ipc://{teacher_directory(directory) / name}.sock"
    if not isinstance(value, str):
        raise TypeError(f"{argument}={value!r} must be a string or None, not {type(value).__name__}")
    if value.startswith("ipc://"):
        path = value.removeprefix("ipc://")
        size = len(os.fsencode(path))
        if not path.startswith("/") or "\0" in path or path.endswith("/"):
            raise ValueError(f"{argument}={value!r} must have the absolute path of a socket after ipc://")
        if size > MAX_IPC_PATH_BYTES:
            raise ValueError(
                f"{argument}={value!r} has a path of {size} bytes; a socket's may have {MAX_IPC_PATH_BYTES}: "
                f"set {DIRECTORY_VARIABLE} to a shorter directory"
            )
        return value
    match = _TCP.fullmatch(value)
    if match is None or (match["port"] != "*" and not 0 < int(match["port"]) < 65536):
        raise ValueError(f"{argument}={value!r} must be ipc:///absolute/path or tcp://host:port")
    if not listens and "*" in match.groups():
        raise ValueError(
            f"{argument}={value!r}: * is for the broker, which listens; give its address and port to connect to"
        )
    if not keyed and not insecure:
        raise ValueError(
            f"{argument}={value!r} is TCP, which needs keys: make some with `mixle teacher keys` and give keys=, "
            "or say insecure=True"
        )
    return value


@dataclass(frozen=True)
class Run:
    """The id of a run and the secret by which its brokers know their own words again."""

    run_id: str
    secret: bytes
    returning: bool  # an earlier broker of this run may have left work with workers


@contextmanager
def held_run(endpoints: Endpoints, directory: str | os.PathLike[str] | None = None) -> Iterator[Run]:
    """Hold the endpoints as their only broker; a dead holder's locks are free at once.

    Raises:
        BrokerRunning: another process holds one; names it.
    """
    base = teacher_directory(directory)
    fixed = [endpoint for endpoint in endpoints if not endpoint.endswith(":*")]
    with ExitStack() as stack:
        for endpoint in fixed:
            stack.enter_context(_held(_lock_path(endpoint, base), endpoint))
        if len(fixed) < len(tuple(endpoints)):  # nobody can come back to a port that the system chose
            yield Run(secrets.token_hex(4), secrets.token_bytes(SECRET_BYTES), returning=False)
            return
        yield _remembered(base / f"run-{_digest(endpoints)}.json")


def forget_stopped_runs(directory: str | os.PathLike[str] | None = None) -> list[Path]:
    """Delete the ids, locks and sockets of brokers that no longer run; returns what was deleted."""
    base = teacher_directory(directory)
    deleted = []
    running = False
    for lock in sorted(base.glob("*.lock")):
        try:
            with _held(lock, str(lock)):
                socket = lock.with_name(lock.name.removesuffix(".lock"))
                if socket.is_socket():
                    socket.unlink()
                    deleted.append(socket)
            deleted.append(lock)
        except BrokerRunning:
            running = True
    if not running:
        for path in sorted(base.glob("run-*.json")):
            path.unlink(missing_ok=True)
            deleted.append(path)
    return deleted


def _remembered(path: Path) -> Run:
    """Return the run that ``path`` tells of, or a new one written there."""
    try:
        told = json.loads(path.read_text())
        run_id, secret = told["run_id"], bytes.fromhex(told["secret"])
        if isinstance(run_id, str) and RUN_ID.fullmatch(run_id) and len(secret) == SECRET_BYTES:
            return Run(run_id, secret, returning=True)
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        pass
    run = Run(secrets.token_hex(4), secrets.token_bytes(SECRET_BYTES), returning=False)
    replace_file(path, json.dumps({"run_id": run.run_id, "secret": run.secret.hex()}).encode(), private=True)
    return run


@contextmanager
def _held(path: Path, endpoint: str) -> Iterator[None]:
    """Hold the lock file ``path``, which has the holder's pid, and delete it after."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            written = os.pread(descriptor, 32, 0).decode("ascii", "replace").strip()
            os.close(descriptor)
            pid = int(written) if written.isdigit() else None
            raise BrokerRunning(
                f"{endpoint} has a broker already"
                + (f": process {pid}" if pid else "")
                + "; stop it, or give this run a directory of its own (directory=, --directory) or other endpoints",
                pid,
            ) from None
        if _is_at(descriptor, path):  # else its last holder deleted it between our open and our lock
            break
        os.close(descriptor)
    try:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        if _is_at(descriptor, path):
            path.unlink(missing_ok=True)
        os.close(descriptor)


def _is_at(descriptor: int, path: Path) -> bool:
    """Tell whether ``path`` is the file that ``descriptor`` has open."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return False
    held = os.fstat(descriptor)
    return (held.st_dev, held.st_ino) == (found.st_dev, found.st_ino)


def _lock_path(endpoint: str, base: Path) -> Path:
    """Return the lock of one endpoint: beside an ipc socket, wherever two brokers would meet; else in ``base``."""
    if endpoint.startswith("ipc://"):
        path = Path(endpoint.removeprefix("ipc://"))
        return path.with_name(path.name + ".lock")
    return base / (re.sub(r"[^0-9A-Za-z.-]", "_", endpoint.removeprefix("tcp://")) + ".lock")


def _digest(endpoints: Sequence[str] | Endpoints) -> str:
    return hashlib.sha256("\n".join(endpoints).encode()).hexdigest()[:16]


def _text(path: str) -> str:
    """Return a small file of the system, or nothing where there is none."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read().strip()
    except OSError:
        return ""
