"""The messages between students, workers and the broker: what each may hold, to the byte.

A message is two frames: a command and a msgpack map that has exactly the fields of the command's class below. Every
field is checked for type, range and length when it is read, so that what :func:`parse` returns can be trusted to be
well-formed, whoever sent it. A sample never travels here; neither does anything that would have to be unpickled.

A model's configuration and a slot's layout travel as packed bytes: only those who use them unpack them.
"""

# ruff: noqa: RUF009  (`checked` declares fields)
from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Literal, NamedTuple

from mixle.data.teacher.errors import ProtocolError, VersionMismatch
from mixle.data.teacher.field_checks import Check, choice, flag, integer, octets, optional, real, row, rows, text
from mixle.data.teacher.run import HOST_ID, LANE_NAME, RUN_ID, ProcessIdentity
from mixle.utils.optional_import import optional_import

msgpack = optional_import("msgpack", extra="teacher")

PROTOCOL_VERSION = 1
MAX_MESSAGE_BYTES = 256 * 1024
MAX_SLOTS = 65_536
MAX_PIECES = 1_024
MAX_PREFETCH = 16  # pieces of work, each of at most 256 slots unless the worker makes larger batches
MAX_PATTERNS = 64
MAX_PATTERN_BYTES = 256
MAX_MODEL_ID_BYTES = 1_024
MAX_MODEL_CFG_BYTES = 64 * 1024
MAX_LAYOUT_BYTES = 32 * 1024
MAX_TEXT_BYTES = 4_096
MAX_SAMPLE_BYTES = 2**40
MAX_GENERATION = 2**62
MAX_SEGMENT_ID = 2**32
U64 = 2**64 - 1

MediumName = Literal["shm", "file"]
ErrorKind = Literal["protocol", "version", "identity", "refused", "leader", "limit"]
# What became of a piece: complete; its generator failed; nothing was or will be written.
DONE, FAILED, SKIPPED = 0, 1, 2


class ModelState(NamedTuple):
    """The model that is to be served from one switch to the next; peers keep the newest and return it as they got it.

    ``packed_cfg`` is msgpack. ``seal`` proves to a later broker of the run that an earlier one said so.
    """

    generation: int
    model_id: str
    packed_cfg: bytes | None
    seal: bytes

    @property
    def model_cfg(self) -> dict[str, Any] | None:
        """The configuration, unpacked anew at each call."""
        return unpack_cfg(self.packed_cfg)


NO_MODEL = ModelState(0, "", None, b"")


class Order(NamedTuple):
    """``count`` neighbouring slots to fill; the token of slot ``first_slot + i`` is ``token + i`` modulo 2**64."""

    order_id: bytes
    first_slot: int
    count: int  # type: ignore[assignment]
    token: int
    generation: int


class Piece(NamedTuple):
    """Part of an order."""

    order_id: bytes
    first_slot: int
    count: int  # type: ignore[assignment]


class WorkPiece(NamedTuple):
    """Neighbouring slots of one segment that one worker is to fill; ``ticket`` is good for that worker only."""

    ticket: bytes
    segment_id: int
    first_slot: int
    count: int  # type: ignore[assignment]
    token: int
    generation: int


class DonePiece(NamedTuple):
    """What became of a work piece, or of part of it: ``outcome`` is DONE, FAILED (with a message) or SKIPPED."""

    ticket: bytes
    first_slot: int
    count: int  # type: ignore[assignment]
    outcome: int
    message: str | None


class HeldPiece(NamedTuple):
    """What a worker still holds of an earlier broker's work; nobody else may write there until it is done."""

    ticket: bytes
    segment: str
    first_slot: int
    count: int  # type: ignore[assignment]
    token: int


class ServedSlots(NamedTuple):
    """How many slots of one segment were ordered from a worker directly, and are complete."""

    segment_id: int
    count: int  # type: ignore[assignment]


class SegmentInfo(NamedTuple):
    """A student's slots, as a worker gets to know of them; ``layout`` is packed, see :mod:`.layout`."""

    segment_id: int
    medium: MediumName
    name: str
    slot_count: int
    packed_bytes: int
    layout: bytes
    data_endpoint: str | None
    data_key: bytes | None
    owner: ProcessIdentity


def _range(inner: Check, first: int, count: int) -> Check:
    """Add to a row's checks that its slots, from item ``first`` on and as many as item ``count`` says, can exist."""

    def check(value: object) -> Any:
        checked_row = inner(value)
        if checked_row[first] + checked_row[count] > MAX_SLOTS:
            raise ProtocolError(f"has slots beyond {MAX_SLOTS}")
        return checked_row

    return check


_VERSION = integer(0, 2**31)
_ATTEMPT = integer(0, 2**62)
_SESSION = octets(16)
_TICKET = octets(16)
_ORDER_ID = octets(8)
_FIRST = integer(0, MAX_SLOTS - 1)
_COUNT = integer(1, MAX_SLOTS)
_TOKEN = integer(0, U64)
_GENERATION = integer(0, MAX_GENERATION)
_MODEL_ID = text(MAX_MODEL_ID_BYTES)
_CFG = optional(octets(1, MAX_MODEL_CFG_BYTES))
_STUDENT_ID = text(32, re.compile(r"[0-9a-f]{32}"))
_SEGMENT_NAME = text(31, re.compile(r"/mx[0-9a-f]{8}-[0-9a-f]{1,8}-[0-9a-f]{6}"))
_TEXT = text(MAX_TEXT_BYTES)
_HEARTBEAT = real(0.001, 3_600.0)
_DATA_ENDPOINT = optional(text(256, re.compile(r"tcp://\S+:[0-9]{1,5}")))
_DATA_KEY = optional(octets(40))
_MEDIUM = choice("shm", "file")
_LANE = optional(text(16, LANE_NAME))

_MODEL_ROW = row(ModelState, _GENERATION, _MODEL_ID, _CFG, octets(0, 16))
_IDENTITY = row(ProcessIdentity, text(16, HOST_ID), integer(1, 2**31), integer(0, 2**62))
_ANY_ORDER = _range(row(Order, _ORDER_ID, _FIRST, _COUNT, _TOKEN, _GENERATION), 1, 2)
_ANY_PIECE = _range(row(Piece, _ORDER_ID, _FIRST, _COUNT), 1, 2)
_ANY_WORK_PIECE = _range(
    row(WorkPiece, _TICKET, integer(0, MAX_SEGMENT_ID), _FIRST, _COUNT, _TOKEN, _GENERATION),
    2,
    3,
)
_ANY_DONE_PIECE = _range(row(DonePiece, _TICKET, _FIRST, _COUNT, integer(0, 2), optional(_TEXT)), 1, 2)
_HELD_PIECE = _range(row(HeldPiece, _TICKET, _SEGMENT_NAME, _FIRST, _COUNT, _TOKEN), 2, 3)
_SERVED = row(ServedSlots, integer(0, MAX_SEGMENT_ID), integer(1, 2**31))
_SEGMENT = row(
    SegmentInfo,
    integer(0, MAX_SEGMENT_ID),
    _MEDIUM,
    _SEGMENT_NAME,
    integer(1, MAX_SLOTS),
    integer(0, MAX_SAMPLE_BYTES),
    octets(0, MAX_LAYOUT_BYTES),
    _DATA_ENDPOINT,
    _DATA_KEY,
    _IDENTITY,
)


def _order(value: object) -> Order:
    """Check an order as ``_ANY_ORDER`` does, which has the words for one that is wrong; a broker reads many."""
    if type(value) is list and len(value) == 5:
        order_id, first, count, token, generation = value
        if (
            type(order_id) is bytes
            and len(order_id) == 8
            and type(first) is type(count) is type(token) is type(generation) is int
            and 0 <= first < first + count <= MAX_SLOTS
            and 0 <= token <= U64
            and 0 <= generation <= MAX_GENERATION
        ):
            return Order(order_id, first, count, token, generation)
    checked_order: Order = _ANY_ORDER(value)
    return checked_order


def _done_piece(value: object) -> DonePiece:
    """Check a report as ``_ANY_DONE_PIECE`` does, at once where it is one without a message."""
    if type(value) is list and len(value) == 5:
        ticket, first, count, outcome, message = value
        if (
            type(ticket) is bytes
            and len(ticket) == 16
            and type(first) is type(count) is type(outcome) is int
            and 0 <= first < first + count <= MAX_SLOTS
            and 0 <= outcome <= 2
            and message is None
        ):
            return DonePiece(ticket, first, count, outcome, None)
    checked_piece: DonePiece = _ANY_DONE_PIECE(value)
    return checked_piece


def _piece(value: object) -> Piece:
    """Check part of an order as ``_ANY_PIECE`` does; a student reads many."""
    if type(value) is list and len(value) == 3:
        order_id, first, count = value
        if (
            type(order_id) is bytes
            and len(order_id) == 8
            and type(first) is type(count) is int
            and 0 <= first < first + count <= MAX_SLOTS
        ):
            return Piece(order_id, first, count)
    checked_piece: Piece = _ANY_PIECE(value)
    return checked_piece


def _work_piece(value: object) -> WorkPiece:
    """Check work as ``_ANY_WORK_PIECE`` does; a worker reads many."""
    if type(value) is list and len(value) == 6:
        ticket, segment_id, first, count, token, generation = value
        if (
            type(ticket) is bytes
            and len(ticket) == 16
            and type(segment_id) is type(first) is type(count) is type(token) is type(generation) is int
            and 0 <= segment_id <= MAX_SEGMENT_ID
            and 0 <= first < first + count <= MAX_SLOTS
            and 0 <= token <= U64
            and 0 <= generation <= MAX_GENERATION
        ):
            return WorkPiece(ticket, segment_id, first, count, token, generation)
    checked_piece: WorkPiece = _ANY_WORK_PIECE(value)
    return checked_piece


def checked(check: Check) -> Any:
    """Declare a field that is read with ``check``."""
    return field(metadata={"check": check})


class Message:
    """Base of the messages; each names its command."""

    __slots__ = ()
    COMMAND: ClassVar[bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask(Message):
    """Anyone to frontend or backend: which run is this? Answered with :class:`Run`, and changes nothing."""

    COMMAND = b"ASK"
    version: int = checked(_VERSION)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run(Message):
    """What a peer must know before it can name its segments."""

    COMMAND = b"RUN"
    version: int = checked(_VERSION)
    run_id: str = checked(text(8, RUN_ID))
    broker_id: bytes = checked(octets(8))
    model: ModelState = checked(_MODEL_ROW)
    heartbeat_s: float = checked(_HEARTBEAT)
    timeout_s: float = checked(_HEARTBEAT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello(Message):
    """Student to frontend: register, with one segment; ``session`` is its last one, if it had any.

    ``attempt`` counts the registrations of the connection.
    """

    COMMAND = b"HELLO"
    version: int = checked(_VERSION)
    attempt: int = checked(_ATTEMPT)
    session: bytes | None = checked(optional(_SESSION))
    student_id: str = checked(_STUDENT_ID)
    rank: int = checked(integer(0, 2**31))
    identity: ProcessIdentity = checked(_IDENTITY)
    medium: MediumName = checked(_MEDIUM)
    segment: str = checked(_SEGMENT_NAME)
    slot_count: int = checked(integer(1, MAX_SLOTS))
    packed_bytes: int = checked(integer(0, MAX_SAMPLE_BYTES))
    layout: bytes = checked(octets(0, MAX_LAYOUT_BYTES))
    data_endpoint: str | None = checked(_DATA_ENDPOINT)
    data_key: bytes | None = checked(_DATA_KEY)
    model: ModelState = checked(_MODEL_ROW)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready(Message):
    """Worker to backend: register. ``slot_size`` is the largest sample in bytes, ``held`` what it may still write.

    ``lane`` is the name of the socket at which students of its host may order directly, ``attempt`` as in
    :class:`Hello`.
    """

    COMMAND = b"READY"
    version: int = checked(_VERSION)
    attempt: int = checked(_ATTEMPT)
    session: bytes | None = checked(optional(_SESSION))
    worker_id: str = checked(text(128))
    identity: ProcessIdentity = checked(_IDENTITY)
    slot_size: int = checked(integer(0, MAX_SAMPLE_BYTES))
    max_batch: int | None = checked(optional(integer(1, MAX_SLOTS)))
    patterns: tuple[str, ...] = checked(rows(text(MAX_PATTERN_BYTES), MAX_PATTERNS, at_least=1))
    prefetch: int = checked(integer(1, MAX_PREFETCH))
    held: tuple[HeldPiece, ...] = checked(rows(_HELD_PIECE, MAX_PIECES))
    model: ModelState = checked(_MODEL_ROW)
    lane: str | None = checked(_LANE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome(Message):
    """Broker to a student or worker: registered. ``session`` is a secret of the two.

    ``attempt`` says which registration it answers; the answer to any but the last is void.
    """

    COMMAND = b"WELCOME"
    version: int = checked(_VERSION)
    attempt: int = checked(_ATTEMPT)
    run_id: str = checked(text(8, RUN_ID))
    broker_id: bytes = checked(octets(8))
    session: bytes = checked(_SESSION)
    model: ModelState = checked(_MODEL_ROW)
    heartbeat_s: float = checked(_HEARTBEAT)
    timeout_s: float = checked(_HEARTBEAT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Beat(Message):
    """Student or worker, from a socket of its own: alive. Answered with :class:`Pong`, or :class:`Who`."""

    COMMAND = b"BEAT"
    session: bytes = checked(_SESSION)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pong(Message):
    """Broker, in answer to a beat."""

    COMMAND = b"PONG"
    broker_id: bytes = checked(octets(8))
    model: ModelState = checked(_MODEL_ROW)


@dataclass(frozen=True, slots=True, kw_only=True)
class Who(Message):
    """Broker, to a connection or session that it does not know: register, and send again what is outstanding."""

    COMMAND = b"WHO"


@dataclass(frozen=True, slots=True, kw_only=True)
class Error(Message):
    """Broker: the message before was not obeyed."""

    COMMAND = b"ERROR"
    kind: str = checked(choice("protocol", "version", "identity", "refused", "leader", "limit"))
    message: str = checked(_TEXT)
    request_id: bytes | None = checked(optional(octets(8)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Request(Message):
    """Student: fill these slots. ``resent``: an earlier broker or connection may have passed them on already."""

    COMMAND = b"REQUEST"
    orders: tuple[Order, ...] = checked(rows(_order, MAX_PIECES, at_least=1))
    resent: bool = checked(flag)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancel(Message):
    """Student: drop what no worker has yet of these orders; what was dropped comes back in :class:`Dropped`."""

    COMMAND = b"CANCEL"
    order_ids: tuple[bytes, ...] = checked(rows(_ORDER_ID, MAX_PIECES, at_least=1))


@dataclass(frozen=True, slots=True, kw_only=True)
class Complete(Message):
    """Broker to student: final. The worker says that these slots are complete; their headers are the truth.

    ``lane`` is where the student may order a slot directly while it has no other on order.
    """

    COMMAND = b"COMPLETE"
    pieces: tuple[Piece, ...] = checked(rows(_piece, MAX_PIECES, at_least=1))
    lane: str | None = checked(_LANE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed(Message):
    """Broker to student: final. The generator failed ``tries`` times; nobody writes there any more."""

    COMMAND = b"FAILED"
    order_id: bytes = checked(_ORDER_ID)
    first_slot: int = checked(_FIRST)
    count: int = checked(_COUNT)
    message: str = checked(_TEXT)
    tries: int = checked(integer(1, 2**31))


@dataclass(frozen=True, slots=True, kw_only=True)
class Dropped(Message):
    """Broker to student: final. Cancelled, or of an older generation than ``model``; nobody writes there any more."""

    COMMAND = b"DROPPED"
    pieces: tuple[Piece, ...] = checked(rows(_piece, MAX_PIECES, at_least=1))
    model: ModelState = checked(_MODEL_ROW)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost(Message):
    """Broker to student: the worker that has these slots is silent and may still write (``dead=False``), or is dead.

    ``dead=True`` is final. After ``dead=False`` a COMPLETE, FAILED, DROPPED or ``dead=True`` follows if the worker
    comes back or is seen to die; until then the slots stay out of use, and the broker will not pass them on.
    """

    COMMAND = b"LOST"
    pieces: tuple[Piece, ...] = checked(rows(_piece, MAX_PIECES, at_least=1))
    worker: ProcessIdentity = checked(_IDENTITY)
    dead: bool = checked(flag)


@dataclass(frozen=True, slots=True, kw_only=True)
class Work(Message):
    """Broker to worker: fill these slots; ``model`` and ``segments`` have what it was not told since it registered."""

    COMMAND = b"WORK"
    model: ModelState | None = checked(optional(_MODEL_ROW))
    pieces: tuple[WorkPiece, ...] = checked(rows(_work_piece, MAX_PIECES, at_least=1))
    segments: tuple[SegmentInfo, ...] = checked(rows(_SEGMENT, MAX_PIECES))


@dataclass(frozen=True, slots=True, kw_only=True)
class Done(Message):
    """Worker: what became of pieces, and the seconds that the generator took for them."""

    COMMAND = b"DONE"
    pieces: tuple[DonePiece, ...] = checked(rows(_done_piece, MAX_PIECES, at_least=1))
    seconds: float = checked(real(0.0, 1e9))


@dataclass(frozen=True, slots=True, kw_only=True)
class Served(Message):
    """Worker: what students ordered from it directly since it last said so, and the seconds that the generator took."""

    COMMAND = b"SERVED"
    segments: tuple[ServedSlots, ...] = checked(rows(_SERVED, MAX_PIECES, at_least=1))
    seconds: float = checked(real(0.0, 1e9))


@dataclass(frozen=True, slots=True, kw_only=True)
class Retire(Message):
    """Broker to worker: close the maps of these segments; their student is gone."""

    COMMAND = b"RETIRE"
    segment_ids: tuple[int, ...] = checked(rows(integer(0, MAX_SEGMENT_ID), MAX_PIECES, at_least=1))


@dataclass(frozen=True, slots=True, kw_only=True)
class Bye(Message):
    """Student or worker: leaving. What a worker held is given to others, so it must be done writing."""

    COMMAND = b"BYE"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop(Message):
    """To control: stop broker and workers. Broker to worker: finish what is begun, and leave."""

    COMMAND = b"STOP"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopping(Message):
    """Broker, in answer to :class:`Stop` on control."""

    COMMAND = b"STOPPING"


@dataclass(frozen=True, slots=True, kw_only=True)
class SetModel(Message):
    """Leader to control: switch; one with the ``request_id`` of the last switch is answered and changes nothing.

    The new generation is above ``known``, the newest that the leader has heard of, be it of a run that was lost.
    """

    COMMAND = b"SET_MODEL"
    request_id: bytes = checked(octets(8))
    student_id: str = checked(_STUDENT_ID)
    session: bytes = checked(_SESSION)
    rank: int = checked(integer(0, 2**31))
    known: int = checked(integer(0, MAX_GENERATION))
    model_id: str = checked(_MODEL_ID)
    packed_cfg: bytes | None = checked(_CFG)


@dataclass(frozen=True, slots=True, kw_only=True)
class Model(Message):
    """Broker, in answer to :class:`SetModel`."""

    COMMAND = b"MODEL"
    request_id: bytes = checked(octets(8))
    model: ModelState = checked(_MODEL_ROW)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats(Message):
    """Anyone to the frontend: how is it going? Answered with :class:`StatsReply`."""

    COMMAND = b"STATS"


@dataclass(frozen=True, slots=True, kw_only=True)
class StatsReply(Message):
    """Broker: its figures, packed; see :meth:`.stats.BrokerStats.unpack`."""

    COMMAND = b"STATISTICS"
    stats: bytes = checked(octets(1, MAX_MESSAGE_BYTES))


@dataclass(frozen=True, slots=True, kw_only=True)
class News(Message):
    """Published to all: ``topic`` MODEL at a switch, BEAT once a heartbeat, STOP at the end. Read by ``parse_news``."""

    COMMAND = b"NEWS"
    topic: str = checked(choice("MODEL", "BEAT", "STOP"))
    run_id: str = checked(text(8, RUN_ID))
    broker_id: bytes = checked(octets(8))
    model: ModelState = checked(_MODEL_ROW)


_KINDS: tuple[type[Any], ...] = tuple(
    kind for kind in list(globals().values()) if isinstance(kind, type) and Message in kind.__bases__
)
_BY_COMMAND: dict[bytes, type[Message]] = {kind.COMMAND: kind for kind in _KINDS if kind is not News}
_CHECKS: dict[type[Message], tuple[tuple[str, Check], ...]] = {
    kind: tuple((one.name, one.metadata["check"]) for one in fields(kind)) for kind in _KINDS
}
_FIELDS = {kind: tuple(name for name, _ in checks) for kind, checks in _CHECKS.items()}


def frames(message: Message) -> list[bytes]:
    """Return a message as it is sent: command and body, or topic and body for :class:`News`."""
    body = {name: getattr(message, name) for name in _FIELDS[type(message)]}
    command = body.pop("topic").encode() if isinstance(message, News) else message.COMMAND
    return [command, msgpack.packb(body)]


def parse(command: bytes, body: bytes, accepted: Collection[type[Message]] | None = None) -> Message:
    """Return the message that two frames hold.

    Args:
        command: the first frame.
        body: the second.
        accepted: the classes that make sense where this came in; None takes any.

    Raises:
        ProtocolError: it is not one of these, or a field is missing, unknown, of another type or out of range.
    """
    kind = _BY_COMMAND.get(command)
    if kind is None or (accepted is not None and kind not in accepted):
        raise ProtocolError(f"{command[:32]!r} is no command here")
    return _read(kind, command.decode(), _unpacked_map(body, command.decode()))


def parse_news(topic: bytes, body: bytes) -> News:
    """Return the news that two frames hold.

    Raises:
        ProtocolError: as :func:`parse`.
    """
    values = _unpacked_map(body, "NEWS")
    values["topic"] = topic.decode("ascii", "replace")
    news = _read(News, "NEWS", values)
    assert isinstance(news, News)
    return news


def _read(kind: type[Message], command: str, values: dict[Any, Any]) -> Message:
    checks = _CHECKS[kind]
    version = values.get("version", PROTOCOL_VERSION)
    if type(version) is int and version != PROTOCOL_VERSION and "version" in _FIELDS[kind]:
        raise VersionMismatch(
            f"{command} speaks version {version} of the protocol; this side speaks {PROTOCOL_VERSION}"
        )
    if len(values) != len(checks):
        raise ProtocolError(f"{command} must have the fields {', '.join(_FIELDS[kind]) or '(none)'} and no other")
    read = {}
    for name, check in checks:
        if name not in values:
            raise ProtocolError(f"{command} has no field {name}")
        try:
            read[name] = check(values[name])
        except (ProtocolError, UnicodeError) as error:
            raise ProtocolError(f"{command}.{name} {error}") from None
    return kind(**read)


def _unpacked_map(body: bytes, command: str) -> dict[Any, Any]:
    if len(body) > MAX_MESSAGE_BYTES:
        raise ProtocolError(f"{command} has {len(body)} bytes; the limit is {MAX_MESSAGE_BYTES}")
    try:
        values = msgpack.unpackb(body, raw=False, strict_map_key=True, max_array_len=MAX_PIECES, max_ext_len=0)
    except Exception as error:  # whatever an unpacker makes of hostile bytes
        raise ProtocolError(f"{command} has a body that is no msgpack: {type(error).__name__}") from None
    if type(values) is not dict:
        raise ProtocolError(f"{command} has a body that is {type(values).__name__}, not a map")
    return values


def require_model_id(value: object) -> str:
    """Return ``value`` if it can name a model.

    Raises:
        TypeError: it is no string.
        ValueError: it is longer than 1,024 bytes in UTF-8, or cannot be written in it.
    """
    if not isinstance(value, str):
        raise TypeError(f"model_id={value!r} must be a string, not {type(value).__name__}")
    try:
        size = len(value.encode())
    except UnicodeEncodeError as error:
        raise ValueError(f"model_id={value!r} cannot be written in UTF-8: {error.reason}") from None
    if size > MAX_MODEL_ID_BYTES:
        raise ValueError(f"model_id={value[:40]!r}... has {size} bytes in UTF-8; the limit is {MAX_MODEL_ID_BYTES}")
    return value


def pack_cfg(model_cfg: object) -> bytes | None:
    """Return a model's configuration as it travels: a map of what msgpack has, at most 64 KiB; None stays None.

    Raises:
        TypeError: it is no mapping, or holds something that msgpack has not.
        ValueError: it is larger, or does not come back as it was.
    """
    if model_cfg is None:
        return None
    if not isinstance(model_cfg, Mapping):
        raise TypeError(f"model_cfg must be a mapping or None, not {type(model_cfg).__name__}")
    try:
        packed: bytes = msgpack.packb(dict(model_cfg))
        unpack_cfg(packed)
    except (TypeError, OverflowError) as error:
        raise TypeError(f"model_cfg holds what msgpack has not: {error}") from None
    except ValueError as error:
        raise ValueError(f"model_cfg cannot be sent: {error}") from None
    if len(packed) > MAX_MODEL_CFG_BYTES:
        raise ValueError(f"model_cfg takes {len(packed)} bytes; the limit is {MAX_MODEL_CFG_BYTES}")
    return packed


def unpack_cfg(packed: bytes | None) -> dict[str, Any] | None:
    """Return what :func:`pack_cfg` packed.

    Raises:
        ProtocolError: these bytes are not that.
    """
    return None if packed is None else _unpacked_map(packed, "model_cfg")
