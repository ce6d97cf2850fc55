"""The records that nodes read from one another: small JSON objects, sealed, whose every field is checked as it is read.

The seal finds what decayed; the checks are for what was never right.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self, TypeVar

from mixle.diloco import names
from mixle.diloco.mailbox import require_id

__all__ = [
    "Claim",
    "Contribution",
    "MalformedRecord",
    "PayloadRef",
    "Rejection",
    "RoundRecord",
    "RunRecord",
    "Snapshot",
    "VoidRound",
]

FORMAT = 1
RECORD_LIMIT = 16 << 20
PAYLOAD_LIMIT = 1 << 46
COUNT_LIMIT = 1 << 62
SLOWEST_STEP_S = 1e9
REASON_LIMIT = 400

_HEX64 = re.compile(r"[0-9a-f]{64}")
_RUN_ID = re.compile(r"[0-9a-f]{15}")
T = TypeVar("T")


class MalformedRecord(ValueError):  # noqa: N818  (what it is)
    """An object under the prefix is not the record that its key promises."""


@dataclass(frozen=True)
class PayloadRef:
    """A payload as a record names it: its key, which carries the sha256 of its bytes, and how many bytes those are."""

    key: str
    nbytes: int

    @property
    def digest(self) -> str:
        found = names.digest_of_payload(self.key)
        assert found is not None
        return found

    @classmethod
    def parse(cls, value: object) -> PayloadRef:
        fields = _Fields(value, "payload", ("key", "nbytes"))
        key = fields.text("key", 200)
        if names.digest_of_payload(key) is None:
            raise MalformedRecord(f"payload key {key!r} is not one of a payload")
        return cls(key, fields.count("nbytes", PAYLOAD_LIMIT))


def sealed(fields: Mapping[str, Any]) -> bytes:
    """Return a record of these fields: compact JSON with sorted keys, the format, and the sha256 of all that."""
    body = {"format": FORMAT, **fields}
    return _compact({"sha256": hashlib.sha256(_compact(body)).hexdigest(), **body})


def _compact(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, separators=(",", ":"), sort_keys=True).encode()


class _Record:
    """What every record does: to bytes and back."""

    def to_bytes(self) -> bytes:
        return sealed(asdict(self))  # type: ignore[call-overload]

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Return the record that ``data`` holds.

        Raises:
            MalformedRecord: it holds none, or one of another format, or one that has decayed; says what is wrong.
        """
        try:
            value = json.loads(data)
            if not isinstance(value, dict) or value.get("format") != FORMAT:
                raise MalformedRecord(f"not a record of format {FORMAT}")
            seal, body = value.pop("sha256", None), _compact(value)
        except MalformedRecord:
            raise
        except (ValueError, RecursionError) as error:
            raise MalformedRecord(f"not JSON: {error}") from None
        if seal != hashlib.sha256(body).hexdigest():
            raise MalformedRecord("it does not have the sha256 that it names")
        del value["format"]
        return cls._parse(value)

    @classmethod
    def _parse(cls, value: dict[str, Any]) -> Self:
        raise NotImplementedError


@dataclass(frozen=True)
class RunRecord(_Record):
    """What all nodes of a run have in common.

    Attributes:
        algorithm: the algorithm's settings as JSON values.
        parameters: name, dtype and shape of each, sorted by name.
        fragments: the names in each fragment.
        base: where the first node put each fragment's parameters.
        embeddings: parameters of which a step moves few rows; every closer merges the same ones by the mean.
        buffers: those that are statistics and not trained; every closer averages the same ones.
        id: drawn when the run was made, 15 hexadecimal digits.
    """

    algorithm: dict[str, Any]
    parameters: tuple[tuple[str, str, tuple[int, ...]], ...]
    fragments: tuple[tuple[str, ...], ...]
    base: tuple[PayloadRef, ...]
    embeddings: tuple[str, ...]
    buffers: tuple[str, ...]
    id: str

    @classmethod
    def _parse(cls, value: dict[str, Any]) -> RunRecord:
        known = ("algorithm", "parameters", "fragments", "base", "embeddings", "buffers", "id")
        fields = _Fields(value, "run", known)
        algorithm = fields.value["algorithm"]
        if not isinstance(algorithm, dict):
            raise MalformedRecord("algorithm is not an object")
        parameters = fields.items("parameters", _parse_parameter)
        fragments = fields.items("fragments", lambda some: tuple(_Fields.list_of(some, str, "fragments")))
        base = fields.items("base", PayloadRef.parse)
        named = sorted(name for fragment in fragments for name in fragment)
        if not fragments or len(base) != len(fragments) or named != [name for name, _, _ in parameters]:
            raise MalformedRecord("fragments are not a partition of the parameters, with a base each")
        embeddings = tuple(_Fields.list_of(fields.value["embeddings"], str, "embeddings"))
        buffers = tuple(_Fields.list_of(fields.value["buffers"], str, "buffers"))
        if not {*embeddings, *buffers} <= set(named):
            raise MalformedRecord("embeddings or buffers are not among the parameters")
        run_id = fields.text("id", 15)
        if not _RUN_ID.fullmatch(run_id):
            raise MalformedRecord(f"id={run_id!r} is not 15 hexadecimal digits")
        return cls(algorithm, parameters, fragments, base, embeddings, buffers, run_id)


@dataclass(frozen=True)
class Snapshot(_Record):
    """A learner's progress on the fragment of a round.

    Attributes:
        payload: the delta; None where it is not finite.
        anchor: the round whose version of the fragment the delta starts from; negative for the base.
        steps, tokens: what it trained since its last progress on the fragment that was merged; 0 where it leaves and
            has nothing to add.
        seconds_per_step: its speed.
        final: it is leaving, and this is the rest of its work.
    """

    round: int
    learner: str
    payload: PayloadRef | None
    anchor: int
    steps: int
    tokens: int
    seconds_per_step: float
    final: bool

    @classmethod
    def _parse(cls, value: dict[str, Any]) -> Snapshot:
        known = ("round", "learner", "payload", "anchor", "steps", "tokens", "seconds_per_step", "final")
        fields = _Fields(value, "snapshot", known)
        return cls(
            fields.count("round"),
            fields.learner("learner"),
            fields.optional("payload", PayloadRef.parse),
            fields.count("anchor", least=-COUNT_LIMIT),
            *fields.work(least=0),
            fields.number("seconds_per_step", most=SLOWEST_STEP_S),
            fields.flag("final"),
        )


@dataclass(frozen=True)
class Claim(_Record):
    """Who wants to close a round."""

    round: int
    attempt: int
    node: str

    @classmethod
    def _parse(cls, value: dict[str, Any]) -> Claim:
        fields = _Fields(value, "claim", ("round", "attempt", "node"))
        return cls(fields.count("round"), fields.count("attempt"), fields.learner("node"))


@dataclass(frozen=True)
class Contribution:
    """What a round took from one learner; ``clipped`` is the factor its delta was scaled by, 1 if it was not."""

    learner: str
    digest: str
    steps: int
    tokens: int
    seconds_per_step: float
    weight: float
    norm: float
    clipped: float
    final: bool

    @classmethod
    def parse(cls, value: object) -> Contribution:
        known = ("learner", "digest", "steps", "tokens", "seconds_per_step", "weight", "norm", "clipped", "final")
        fields = _Fields(value, "contribution", known)
        return cls(
            fields.learner("learner"),
            fields.digest("digest"),
            *fields.work(least=1),
            fields.number("seconds_per_step", most=SLOWEST_STEP_S),
            fields.number("weight"),
            fields.number("norm"),
            fields.number("clipped"),
            fields.flag("final"),
        )


@dataclass(frozen=True)
class Rejection:
    """A snapshot that a round did not take, and why: one word, then what was seen."""

    learner: str
    reason: str

    @classmethod
    def of(cls, learner: str, reason: str) -> Rejection:
        """Return one whose reason, which may tell what a stranger wrote, is printable and short."""
        return cls(learner, "".join(c if c.isprintable() else "?" for c in reason)[:REASON_LIMIT])

    @classmethod
    def parse(cls, value: object) -> Rejection:
        fields = _Fields(value, "rejection", ("learner", "reason"))
        return cls.of(fields.learner("learner"), fields.text("reason", REASON_LIMIT))


@dataclass(frozen=True)
class RoundRecord(_Record):
    """The commit of a round.

    Attributes:
        parent: the round whose version of the fragment this one continues; negative for the base.
        theta: the fragment's parameters after the round.
        master: the outer optimizer's own parameters, None where they are ``theta``.
        momentum: the outer optimizer's, None while it is zero.
        update: the quantized change of theta, where one is published.
        theta_digest: sha256 over the parameters' bytes in the order of their names, for who rebuilds them.
        steps, tokens: sums over the contributions.
        cosine: mean cosine between the deltas, None of one alone.
        waited_s: from the first snapshot that the closer saw until quorum, and from then until it closed.
    """

    round: int
    fragment: int
    parent: int
    closer: str
    theta: PayloadRef
    master: PayloadRef | None
    momentum: PayloadRef | None
    update: PayloadRef | None
    theta_digest: str
    contributions: tuple[Contribution, ...]
    rejections: tuple[Rejection, ...]
    cosine: float | None
    waited_s: tuple[float, float]

    @property
    def steps(self) -> int:
        return sum(c.steps for c in self.contributions)

    @property
    def tokens(self) -> int:
        return sum(c.tokens for c in self.contributions)

    @classmethod
    def _parse(cls, value: dict[str, Any]) -> RoundRecord:
        known = (
            "round",
            "fragment",
            "parent",
            "closer",
            "theta",
            "master",
            "momentum",
            "update",
            "theta_digest",
            "contributions",
            "rejections",
            "cosine",
            "waited_s",
        )
        fields = _Fields(value, "round", known)
        waited = [_number(item, "waited_s") for item in _Fields.list_of(value["waited_s"], object, "waited_s")]
        if len(waited) != 2:
            raise MalformedRecord("waited_s is not two numbers")
        return cls(
            fields.count("round"),
            fields.count("fragment"),
            fields.count("parent", least=-COUNT_LIMIT),
            fields.learner("closer"),
            PayloadRef.parse(value["theta"]),
            fields.optional("master", PayloadRef.parse),
            fields.optional("momentum", PayloadRef.parse),
            fields.optional("update", PayloadRef.parse),
            fields.digest("theta_digest"),
            fields.items("contributions", Contribution.parse),
            fields.items("rejections", Rejection.parse),
            fields.optional("cosine", lambda cosine: _number(cosine, "cosine", least=-1.0, most=1.0)),
            (waited[0], waited[1]),
        )


@dataclass(frozen=True)
class VoidRound:
    """What lies where a round's record belongs is none: the round is over, and has changed nothing."""

    round: int


class _Fields:
    """The fields of a JSON object, each of which is asked for with what it must be."""

    def __init__(self, value: object, what: str, known: tuple[str, ...]) -> None:
        if not isinstance(value, Mapping) or value.keys() != set(known):
            raise MalformedRecord(f"{what} does not have the fields {', '.join(known)}")
        self.value = value

    def text(self, name: str, longest: int) -> str:
        found = self.value[name]
        if not isinstance(found, str) or len(found) > longest:
            raise MalformedRecord(f"{name} is not a text of at most {longest} characters")
        return found

    def learner(self, name: str) -> str:
        try:
            return require_id(self.value[name], name)
        except (TypeError, ValueError) as error:
            raise MalformedRecord(str(error)) from None

    def digest(self, name: str) -> str:
        found = self.text(name, 64)
        if not _HEX64.fullmatch(found):
            raise MalformedRecord(f"{name}={found!r} is not a sha256")
        return found

    def count(self, name: str, most: int = COUNT_LIMIT, *, least: int = 0) -> int:
        found = self.value[name]
        if type(found) is not int or not least <= found <= most:
            raise MalformedRecord(f"{name} is not an integer in [{least}, {most}]")
        return found

    def work(self, *, least: int) -> tuple[int, int]:
        """Return steps and tokens: neither is there without the other."""
        steps, tokens = self.count("steps", least=least), self.count("tokens", least=least)
        if (steps == 0) != (tokens == 0):
            raise MalformedRecord(f"steps={steps} with tokens={tokens}: none without the other")
        return steps, tokens

    def number(self, name: str, *, most: float = math.inf) -> float:
        return _number(self.value[name], name, most=most)

    def flag(self, name: str) -> bool:
        found = self.value[name]
        if type(found) is not bool:
            raise MalformedRecord(f"{name} is not true or false")
        return found

    def optional(self, name: str, parse: Callable[[Any], T]) -> T | None:
        found = self.value[name]
        return None if found is None else parse(found)

    def items(self, name: str, parse: Callable[[Any], T]) -> tuple[T, ...]:
        return tuple(parse(item) for item in self.list_of(self.value[name], object, name))

    @staticmethod
    def list_of(value: object, kind: Any, name: str) -> list[Any]:
        if not isinstance(value, list) or not all(isinstance(item, kind) for item in value):
            raise MalformedRecord(f"{name} is not a list of what it should hold")
        return value


def _number(found: object, name: str, *, least: float = 0.0, most: float = math.inf) -> float:
    # Python's JSON has integers of any size, which are no floats, and spells NaN and Infinity.
    if type(found) is int and abs(found) <= COUNT_LIMIT:
        found = float(found)
    if type(found) is not float or not math.isfinite(found) or not least <= found <= most:
        raise MalformedRecord(f"{name} is not a finite number in [{least}, {most}]")
    return found


def _parse_parameter(value: object) -> tuple[str, str, tuple[int, ...]]:
    if not isinstance(value, list) or len(value) != 3:
        raise MalformedRecord("a parameter is not [name, dtype, shape]")
    name, dtype, shape = value
    if not isinstance(name, str) or not isinstance(dtype, str):
        raise MalformedRecord("a parameter's name or dtype is not a text")
    sizes = _Fields.list_of(shape, int, "shape")
    if any(type(size) is not int or size < 0 for size in sizes):
        raise MalformedRecord(f"shape of {name} is not of non-negative integers")
    return name, dtype, tuple(sizes)
