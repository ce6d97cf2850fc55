"""Mailboxes by address, and those in S3, Google Cloud Storage and Azure.

Credentials come from the environment or the machine's role (``AWS_ACCESS_KEY_ID``, ``GOOGLE_APPLICATION_CREDENTIALS``,
``AZURE_STORAGE_ACCOUNT_NAME``, ...). Other servers that speak S3 are reached through ``AWS_ENDPOINT_URL``.

Objects above ``part_bytes`` go up in parallel parts if their key carries the sha256 of their bytes. The client at hand
cannot finish an upload in parts only where the key is free, but two uploads under such a key are the same bytes, so
either may be the one that stays. Under any other key an object is one conditional request. A killed upload in parts is
never seen as an object; the bucket keeps its parts until a lifecycle rule removes them.

Folders and memory are not obstore's: its local store follows links, does not put objects on the disk before it says so,
and fails a whole listing over one bad file name.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote_to_bytes, urlsplit

from mixle.diloco.clock import SYSTEM_CLOCK, Clock
from mixle.diloco.file_mailbox import FileMailbox
from mixle.diloco.mailbox import Mailbox, ObjectTooLarge, PermanentMailboxError, TransientMailboxError, require_id
from mixle.diloco.memory_mailbox import MemoryMailbox
from mixle.diloco.retrying import PAGE, RetryingMailbox
from mixle.utils.exact import require_exact_int
from mixle.utils.optional_import import optional_import

if TYPE_CHECKING:
    from obstore.store import ObjectStore as Store

logger = logging.getLogger(__name__)

PART_BYTES = 8 << 20
PARTS_AT_ONCE = 8
_SMALLEST_PART = 5 << 20  # S3 takes none smaller
_CLOCK = ".clock"
_SCHEMES = ("memory", "file", "s3", "gs", "az")
_STATUS = re.compile(r"status code: (\d{3})")
_RETRIED_STATUSES = {408, 409, 425, 429, 500, 502, 503, 504}
_ENDPOINTS = {
    "s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
    "gs": (),
    "az": ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"),
}
_VARIABLES = {"s3": "AWS_", "gs": "GOOGLE_", "az": "AZURE_"}
_METADATA = "169.254.169.254"
_CREDENTIALS = (
    ("AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY", "Generic S3"),
    ("GOOGLE_APPLICATION_CREDENTIALS", "Generic GCS"),
    ("AZURE_STORAGE_ACCOUNT_KEY", "Generic MicrosoftAzure"),
)
_NO_BUCKET = ("NoSuchBucket", "The specified bucket does not exist", "ContainerNotFound", "ContainerBeingDeleted")

_memory: dict[str, MemoryMailbox] = {}
_memory_lock = threading.Lock()


def open_mailbox(
    url: str | os.PathLike[str], *, deadline_s: float = 30.0, part_bytes: int = PART_BYTES, clock: Clock = SYSTEM_CLOCK
) -> RetryingMailbox:
    """Open the mailbox at ``url``; nothing is asked of a remote store yet.

    Args:
        url: ``memory://name`` (shared by this process, and gone with it), ``file:///folder`` (made if it is missing,
            private to its user), ``s3://bucket/prefix``, ``gs://bucket/prefix`` or ``az://container/prefix``; or the
            path of a folder, such as a :class:`pathlib.Path`.
        deadline_s: how long transient errors of one call are retried.
        part_bytes: larger objects go up, and come down, in parallel parts.
        clock: what the pauses between retries are taken on.

    Raises:
        TypeError: ``url`` is neither a string nor a path.
        ValueError: the address is none of these, or the environment lacks what its store needs, or names an endpoint
            that is no URL.
        ImportError: a cloud's address, and obstore is not installed.
        PermanentMailboxError: the folder cannot be used.
    """
    require_exact_int(part_bytes, "part_bytes", minimum=_SMALLEST_PART)
    return RetryingMailbox(_open(_url_of(url), part_bytes), deadline_s=deadline_s, clock=clock)


def open_existing(url: str | os.PathLike[str]) -> RetryingMailbox:
    """Open the mailbox at ``url`` as :func:`open_mailbox` does, for who only looks: a missing folder is not made.

    Raises:
        TypeError, ValueError, ImportError, PermanentMailboxError: as there; or there is no such folder.
    """
    address = _url_of(url)
    if address.startswith("file://") and not _folder_at(address).exists():
        raise ValueError(f"mailbox={address!r} is a folder that is not there, so there is no run in it")
    return open_mailbox(address)


def _url_of(path: object) -> str:
    if isinstance(path, str):
        return path
    if not isinstance(path, os.PathLike):
        raise TypeError(f"mailbox={path!r} must be a string such as 's3://bucket/prefix', not {type(path).__name__}")
    if os.fspath(path).startswith(tuple(f"{scheme}:" for scheme in _SCHEMES)):
        raise ValueError(f"mailbox={path!r} is a URL that a path has mangled; give it as a string")
    return Path(path).absolute().as_uri()


def _open(url: str, part_bytes: int) -> Mailbox:
    scheme, separator, rest = url.partition("://")
    if not separator or scheme not in _SCHEMES:
        raise ValueError(f"mailbox={url!r} must begin with one of {', '.join(f'{each}://' for each in _SCHEMES)}")
    if "?" in rest or "#" in rest:
        raise ValueError(f"mailbox={url!r} must have no '?' or '#'; options come from the environment")
    if scheme == "memory":
        with _memory_lock:
            return _memory.setdefault(require_id(rest, "the name in memory://"), MemoryMailbox())
    if scheme == "file":
        return FileMailbox(_folder_at(url))
    bucket, _, prefix = rest.partition("/")
    prefix = prefix.strip("/")
    if not bucket or any(part in ("", ".", "..") for part in prefix.split("/") if prefix):
        raise ValueError(f"mailbox={url!r} must be {scheme}://BUCKET or {scheme}://BUCKET/PREFIX, with no empty part")
    return ObjectStoreMailbox(_connect(scheme, bucket, prefix or None), part_bytes=part_bytes)


def _folder_at(url: str) -> Path:
    parts = urlsplit(url)
    path = Path(os.fsdecode(unquote_to_bytes(parts.path)))
    if parts.netloc not in ("", "localhost") or not path.is_absolute() or len(path.parts) < 2 or "\0" in str(path):
        raise ValueError(f"mailbox={url!r} must be file:// and an absolute folder, such as 'file:///data/run'")
    return path


def _connect(scheme: str, bucket: str, prefix: str | None) -> Store:
    """Make obstore's store, without its retries: ours know which write they repeat, and are counted."""
    stores = optional_import("obstore.store", extra="diloco")
    exceptions = optional_import("obstore.exceptions", extra="diloco")
    endpoints = _endpoints(scheme)
    plain = scheme == "s3" and any(endpoint.startswith("http://") for endpoint in endpoints)
    kind = {"s3": stores.S3Store, "gs": stores.GCSStore, "az": stores.AzureStore}[scheme]
    client: dict[str, Any] = {"connect_timeout": "5s", "timeout": "60s"}
    try:
        return kind(
            bucket,
            prefix=prefix,
            client_options=client | {"allow_http": True} if plain else client,
            retry_config={"max_retries": 0},
        )
    except exceptions.BaseError as error:
        raise ValueError(f"{scheme}://{bucket} cannot be opened: {_said(error)}") from error
    except BaseException as error:
        if not _is_panic(error):
            raise
        raise ValueError(
            f"{scheme}://{bucket} cannot be opened, obstore broke down over its settings ({_said(error)}); look at the "
            f"variables of the environment that begin with {_VARIABLES[scheme]}"
        ) from error


def _endpoints(scheme: str) -> list[str]:
    """Return the addresses of servers in the environment that count for a store.

    Raises:
        ValueError: one is no URL, over which the client would break down at its first request.
    """
    found = []
    for variable in _ENDPOINTS[scheme]:
        value = os.environ.get(variable)
        if value is None:
            continue
        try:
            parts = urlsplit(value)
            is_url = (
                parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port > 0)
            )
        except ValueError:
            is_url = False
        if not is_url or any(c.isspace() for c in value):
            raise ValueError(
                f"{variable}={value!r} in the environment must be the URL of a server, such as 'http://127.0.0.1:9000' "
                "or 'https://s3.example.org'; correct or unset it"
            )
        found.append(value)
    return found


def _is_panic(error: BaseException) -> bool:
    """Tell whether the client's own code broke down; its error is no Exception, and its class cannot be imported."""
    return type(error).__name__ == "PanicException"


class ObjectStoreMailbox:
    """A :class:`~mixle.diloco.mailbox.Mailbox` in a bucket, one attempt per call.

    Args:
        store: an obstore store, without retries of its own.
        part_bytes: as in :func:`open_mailbox`.
    """

    def __init__(self, store: Store, *, part_bytes: int = PART_BYTES) -> None:
        self._obstore = optional_import("obstore", extra="diloco")
        self._errors = optional_import("obstore.exceptions", extra="diloco")
        self._store = store
        self._part_bytes = part_bytes

    def put_if_absent(self, key: str, data: bytes) -> bool:
        """See :class:`~mixle.diloco.mailbox.Mailbox`; under a key with the data's sha256, two may both be told True."""
        in_parts = len(data) > self._part_bytes and hashlib.sha256(data).hexdigest() in key
        with self._translated(f"put {key}"):
            try:
                if not in_parts:
                    self._obstore.put(self._store, key, data, mode="create")
                    return True
                if self._exists(key):
                    return False
                self._obstore.put(
                    self._store,
                    key,
                    data,
                    use_multipart=True,
                    chunk_size=self._part_bytes,
                    max_concurrency=PARTS_AT_ONCE,
                )
                return True
            except self._errors.AlreadyExistsError as error:
                # S3 answers so when the write met a delete or another write, neither of which need have left anything.
                if "ConditionalRequestConflict" in str(error):
                    raise TransientMailboxError(f"put {key}: {_said(error)}") from error
                return False
            except FileNotFoundError as error:
                raise PermanentMailboxError(f"put {key}: {_said(error)}") from error

    def get(self, key: str, *, limit: int | None = None) -> bytes | None:
        """See :class:`~mixle.diloco.mailbox.Mailbox`."""
        with self._translated(f"get {key}"):
            try:
                found = self._obstore.get(self._store, key)
                size = found.meta["size"]
                if limit is not None and size > limit:
                    raise ObjectTooLarge(key, size, limit)
                if size <= self._part_bytes:
                    return bytes(found.bytes())
                del found  # it streams, and each part is a request of its own
                starts = range(0, size, self._part_bytes)
                ends = [min(start + self._part_bytes, size) for start in starts]
                parts = self._obstore.get_ranges(self._store, key, starts=list(starts), ends=ends, coalesce=0)
                return b"".join(parts)
            except FileNotFoundError as error:
                self._require_bucket(error)
                return None

    def list(self, prefix: str, after: str = "", *, limit: int | None = None) -> list[str]:
        """See :class:`~mixle.diloco.mailbox.Mailbox`.

        Raises:
            PermanentMailboxError: somebody put an object there whose name obstore cannot read; delete it.
        """
        with self._translated(f"list {prefix}"):
            try:
                return _listed(self._obstore, self._store, prefix, after, limit)
            except self._errors.InvalidPathError as error:
                # Names with an empty or dotted part directly below the prefix sort before every key: go past them.
                past = prefix + "0"
                if after >= past:
                    raise
                logger.warning("listing %r goes past what is no key of a mailbox: %s", prefix, _said(error))
                first = [past] if self._exists(past) else []
                return (first + _listed(self._obstore, self._store, prefix, past, limit))[:limit]

    def delete(self, keys: Iterable[str]) -> None:
        """See :class:`~mixle.diloco.mailbox.Mailbox`."""
        for page in _pages(keys):
            with self._translated(f"delete {page[0]}"):
                try:
                    self._obstore.delete(self._store, page)
                except FileNotFoundError as error:
                    self._require_bucket(error)
                    self._delete_one_by_one(page)

    def clock(self) -> float:
        """Return the time that the store gives to an object written now; S3's has whole seconds."""
        with self._translated("clock"):
            try:
                self._obstore.put(self._store, _CLOCK, b"x")
                return float(self._obstore.head(self._store, _CLOCK)["last_modified"].timestamp())
            except FileNotFoundError as error:
                raise PermanentMailboxError(f"clock: {_said(error)}") from error

    def _delete_one_by_one(self, keys: Iterable[str]) -> None:
        """Delete what a bulk request that met a missing object may have left."""
        for key in keys:
            try:
                self._obstore.delete(self._store, key)
            except FileNotFoundError as error:
                self._require_bucket(error)

    def _exists(self, key: str) -> bool:
        try:
            self._obstore.head(self._store, key)
        except FileNotFoundError as error:
            self._require_bucket(error)
            return False
        return True

    def _require_bucket(self, error: FileNotFoundError) -> None:
        """Tell a missing bucket, which is an error, from a missing object."""
        if any(sign in str(error) for sign in _NO_BUCKET):
            raise PermanentMailboxError(_said(error)) from error

    @contextmanager
    def _translated(self, doing: str) -> Iterator[None]:
        """Raise obstore's error as the mailbox's own, which says whether to try again."""
        refusals = (
            self._errors.PermissionDeniedError,
            self._errors.UnauthenticatedError,
            self._errors.NotSupportedError,
            self._errors.InvalidPathError,
            self._errors.UnknownConfigurationKeyError,
        )
        try:
            yield
        except self._errors.BaseError as error:
            status = _STATUS.search(str(error))
            final = isinstance(error, refusals) or (status is not None and int(status[1]) not in _RETRIED_STATUSES)
            kind = PermanentMailboxError if final else TransientMailboxError
            raise kind(f"{doing}: {_said(error)}{_hint(str(error))}") from error
        except BaseException as error:
            if not _is_panic(error):
                raise
            raise PermanentMailboxError(f"{doing}: obstore broke down: {_said(error)}") from error


def _hint(told: str) -> str:
    """Return what to do where the client found no credentials and asked the machine for its role's."""
    if _METADATA not in told:
        return ""
    for variables, read_by in _CREDENTIALS:
        if read_by in told:
            return f" (no credentials in the environment, so the machine was asked for its role's; set {variables})"
    return ""


def _listed(obstore: Any, store: Store, prefix: str, after: str, limit: int | None) -> list[str]:
    keys: list[str] = []
    page_size = PAGE if limit is None else min(limit, PAGE)
    for page in obstore.list(store, prefix or None, offset=after or None, chunk_size=page_size):
        keys += [each["path"] for each in page if not each["path"].startswith(".")]
        if limit is not None and len(keys) >= limit:
            break
    return sorted(keys)[:limit]


def _pages(keys: Iterable[str]) -> Iterator[list[str]]:
    every = list(keys)
    for start in range(0, len(every), PAGE):
        yield every[start : start + PAGE]


def _said(error: BaseException) -> str:
    """Return what obstore says on one line, without the structure of its own that it prints below."""
    return " ".join(str(error).partition("\n\nDebug source:")[0].split())[:400]
