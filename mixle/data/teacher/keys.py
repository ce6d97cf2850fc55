"""CURVE keys for sockets that others could reach: one key pair of the broker, one that all its clients share.

A directory holds both. Copy ``client.json``, which has no secret of the broker, to machines of workers and students.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from mixle.utils.optional_import import optional_import

SERVER_FILE = "server.json"
CLIENT_FILE = "client.json"
ZAP_ENDPOINT = "inproc://zeromq.zap.01"

_KEY = re.compile(r"[0-9A-Za-z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")  # Z85


@dataclass(frozen=True)
class Keys:
    """The keys of one run, 40 characters each (Z85); only the broker needs ``server_secret``."""

    server_public: str
    client_public: str
    client_secret: str = field(repr=False)
    server_secret: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        for name in ("server_public", "client_public", "client_secret", "server_secret"):
            value = getattr(self, name)
            if name == "server_secret" and value is None:
                continue
            if not isinstance(value, str) or not _KEY.fullmatch(value):
                raise ValueError(f"{name} must be a key of 40 characters of Z85, as `mixle teacher keys` makes them")

    @classmethod
    def generate(cls) -> Self:
        """Return new keys."""
        server_public, server_secret = _pair()
        client_public, client_secret = _pair()
        return cls(server_public, client_public, client_secret, server_secret)

    @classmethod
    def load(cls, directory: str | os.PathLike[str]) -> Self:
        """Return the keys in ``directory``, without the broker's secret where only ``client.json`` is there.

        Raises:
            FileNotFoundError: there are none; says how to make some.
            PermissionError: others may read them.
            ValueError: a file does not hold keys.
        """
        path = Path(directory)
        client = _read(path / CLIENT_FILE, ("server_public", "client_public", "client_secret"))
        server = path / SERVER_FILE
        return cls(**client, **(_read(server, ("server_secret",)) if server.exists() else {}))

    def save(self, directory: str | os.PathLike[str]) -> None:
        """Write the keys to files that only this user may read, in a directory that only this user may enter.

        Raises:
            FileExistsError: there are keys already.
        """
        path = Path(directory)
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        for name in (CLIENT_FILE, SERVER_FILE):
            if (path / name).exists():
                raise FileExistsError(f"{path / name} exists; give another directory, or delete it")
        if self.server_secret is not None:
            _write(path / SERVER_FILE, {"server_secret": self.server_secret})
        names = ("server_public", "client_public", "client_secret")
        _write(path / CLIENT_FILE, {name: getattr(self, name) for name in names})

    def require_server(self) -> str:
        """Return the broker's secret.

        Raises:
            ValueError: these keys lack it.
        """
        if self.server_secret is None:
            raise ValueError(f"keys lack the broker's secret, {SERVER_FILE}; a broker needs it")
        return self.server_secret

    def secure_server(self, socket: Any) -> None:
        """Make ``socket`` one that admits holders of the client key only (with :class:`Admission`); before it binds."""
        socket.curve_server = 1
        socket.curve_publickey = self.server_public.encode()
        socket.curve_secretkey = self.require_server().encode()

    def secure_client(self, socket: Any, server_public: bytes | None = None) -> None:
        """Make ``socket`` one that talks to the broker, or to the holder of ``server_public``; before it connects."""
        socket.curve_serverkey = self.server_public.encode() if server_public is None else server_public
        socket.curve_publickey = self.client_public.encode()
        socket.curve_secretkey = self.client_secret.encode()

    def secure_receiver(self, socket: Any) -> bytes:
        """Make ``socket`` a server with a key pair of its own; return its public key, for ``secure_client``."""
        public, secret = _pair()
        socket.curve_server = 1
        socket.curve_publickey = public.encode()
        socket.curve_secretkey = secret.encode()
        return public.encode()


def require_keys(keys: object) -> Keys | None:
    """Return ``keys``: a :class:`Keys`, the directory of some, or None.

    Raises:
        TypeError: it is none of these.
        FileNotFoundError, PermissionError, ValueError: see :meth:`Keys.load`.
    """
    if keys is None or isinstance(keys, Keys):
        return keys
    if isinstance(keys, (str, os.PathLike)):
        return Keys.load(keys)
    raise TypeError(f"keys must be a directory, Keys or None, not {type(keys).__name__}")


class Admission:
    """Decide which client keys a context's CURVE servers admit (ZeroMQ's ZAP, RFC 27): poll ``socket`` and ``handle``.

    Make it before the servers bind, one for each context; without it a CURVE server admits any key.
    """

    def __init__(self, context: Any, keys: Keys) -> None:
        self._zmq = optional_import("zmq", extra="teacher")
        self._admitted = optional_import("zmq.utils.z85", extra="teacher").decode(keys.client_public.encode())
        self.refused = 0
        self.socket = context.socket(self._zmq.ROUTER)
        self.socket.linger = 0
        self.socket.bind(ZAP_ENDPOINT)

    def handle(self) -> None:
        """Answer all that wait."""
        while True:
            try:
                request = self.socket.recv_multipart(self._zmq.NOBLOCK)
            except self._zmq.Again:
                return
            # caller, empty, version, request id, domain, address, identity, mechanism, credentials...
            version, request_id = request[2], request[3]
            good = len(request) == 9 and request[7] == b"CURVE" and request[8] == self._admitted
            self.refused += not good
            verdict = [b"200", b"OK", b"client"] if good else [b"400", b"this key is not admitted", b""]
            self.socket.send_multipart([*request[:2], version, request_id, *verdict, b""], self._zmq.NOBLOCK)

    def close(self) -> None:
        """Stop deciding; what still connects is refused or waits."""
        self.socket.close(linger=0)


def _pair() -> tuple[str, str]:
    zmq = optional_import("zmq", extra="teacher")
    if not zmq.has("curve"):
        raise RuntimeError("this libzmq was built without CURVE; install pyzmq from a wheel")
    public, secret = zmq.curve_keypair()
    return public.decode(), secret.decode()


def _write(path: Path, content: dict[str, str]) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        json.dump(content, file)
        file.write("\n")


def _read(path: Path, names: tuple[str, ...]) -> dict[str, str]:
    try:
        opened = open(path, encoding="utf-8")  # noqa: SIM115  (closed below)
    except FileNotFoundError:
        made = f"make some with `mixle teacher keys {path.parent}`, or copy {CLIENT_FILE} from the broker's machine"
        raise FileNotFoundError(errno.ENOENT, f"there are no keys; {made}", str(path)) from None
    with opened as file:
        found = os.fstat(file.fileno())
        if found.st_mode & 0o077:
            raise PermissionError(f"{path} has mode {stat.S_IMODE(found.st_mode):04o}; others may read it: chmod 600")
        try:
            content = json.load(file)
        except ValueError:
            content = None
    if not isinstance(content, dict) or set(content) != set(names):
        raise ValueError(f"{path} must hold {', '.join(names)}, as `mixle teacher keys` writes them")
    return {name: content[name] for name in names}
