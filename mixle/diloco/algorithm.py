"""The algorithm of a run as one frozen value: all sites hold the same, and a site with another is refused by name."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import KW_ONLY, asdict, dataclass, field, fields
from functools import cached_property
from typing import Any, Literal, Self, get_args

from mixle.diloco.alignment import Adaptive, Alignment, Blend, Carry, Overwrite
from mixle.diloco.merge import Rda, WeightedMean
from mixle.diloco.partition import ByBytes, Strided
from mixle.diloco.schedule import Schedule
from mixle.utils.exact import (
    require_choice,
    require_exact_bool,
    require_finite_float,
    require_nonnegative_int,
    require_positive_int,
)

WireDType = Literal["BF16", "F8_E4M3", "F4"]
Merge = Rda | WeightedMean
Partition = ByBytes | Strided

_CHOICES: dict[str, tuple[type, ...]] = {
    "alignment": (Carry, Overwrite, Blend, Adaptive),
    "merge": (Rda, WeightedMean),
    "partition": (ByBytes, Strided),
}
_DTYPES = ("delta_dtype", "commit_dtype", "master_dtype", "momentum_dtype", "residual_dtype")


class AlgorithmMismatch(ValueError):  # noqa: N818  (named as SchemaMismatch is)
    """Two sites hold different algorithms; ``names`` are the arguments that differ, sorted."""

    def __init__(self, message: str, names: tuple[str, ...]) -> None:
        super().__init__(message)
        self.names = names


@dataclass(frozen=True)
class DiLoCo:
    """Say how sites train one model together: when they meet, what they send, and how it is merged.

    H is ``sync_every`` and P is ``fragments``. Sources: DiLoCo (arXiv 2311.08105), Streaming DiLoCo (2501.18512),
    Decoupled DiLoCo (2604.21428).

    Args:
        sync_every: a learner's steps in which the whole model is sent once.
        fragments: parts of the model that are sent in turn, at most ``sync_every``.
        in_flight: rounds that a learner publishes ahead of the last commit it applied; those beyond ``fragments`` wait
            (:attr:`~mixle.diloco.schedule.Schedule.lead`).
        overlap_steps: steps that a learner takes after a snapshot before it waits for the commit: 0 is the classic
            barrier, None never waits.
        alignment: what becomes of the steps since the snapshot: ``Carry()`` (none is lost), ``Overwrite()``,
            ``Blend(mixing)`` or ``Adaptive()``.
        follow: publish at once when this many others have published the round; None is ``quorum_size - 1``, 0 is never.
        quorum_size: snapshots that a round needs.
        grace_seconds: how long a round waits for more; None follows from what is measured
            (:func:`~mixle.diloco.grace.grace_seconds`).
        outer_lr: the outer optimizer's learning rate.
        outer_momentum: its Nesterov momentum, in [0, 1).
        merge: ``Rda()`` or ``WeightedMean()``.
        partition: ``ByBytes()`` or ``Strided()``.
        global_batch_size: samples per step of all learners together, shared by their speed; None leaves each its own.
        delta_dtype: what deltas are rounded to, with error feedback; None sends them exactly.
        commit_dtype: what a round's update is rounded to; None publishes the parameters themselves.
        master_dtype: what the outer optimizer's own parameters are stored in; None is float32.
        momentum_dtype: what its momentum is stored in; None is float32.
        residual_dtype: what error feedback keeps is stored in; None is float32. It needs ``delta_dtype``.
        flush_on_close: a learner that leaves publishes the steps since its last snapshot.

    Raises:
        TypeError, ValueError: an argument that is not what it says above.
    """

    sync_every: int
    fragments: int
    _: KW_ONLY
    in_flight: int = 2
    overlap_steps: int | None = None
    alignment: Alignment = field(default_factory=Carry)
    follow: int | None = None
    quorum_size: int = 1
    grace_seconds: float | None = None
    outer_lr: float = 0.7
    outer_momentum: float = 0.9
    merge: Merge = field(default_factory=Rda)
    partition: Partition = field(default_factory=ByBytes)
    global_batch_size: int | None = None
    delta_dtype: WireDType | None = None
    commit_dtype: WireDType | None = None
    master_dtype: WireDType | None = None
    momentum_dtype: WireDType | None = None
    residual_dtype: WireDType | None = None
    flush_on_close: bool = True

    def __post_init__(self) -> None:
        for name in ("sync_every", "fragments", "in_flight", "quorum_size"):
            self._set(name, require_positive_int(getattr(self, name), name))
        for name in ("overlap_steps", "follow"):
            if getattr(self, name) is not None:
                self._set(name, require_nonnegative_int(getattr(self, name), name))
        if self.global_batch_size is not None:
            self._set("global_batch_size", require_positive_int(self.global_batch_size, "global_batch_size"))
        if self.grace_seconds is not None:
            self._set("grace_seconds", require_finite_float(self.grace_seconds, "grace_seconds", minimum=0.0))
        self._set("outer_lr", require_finite_float(self.outer_lr, "outer_lr", exclusive_minimum=0.0))
        self._set("outer_momentum", require_finite_float(self.outer_momentum, "outer_momentum", minimum=0.0))
        if self.outer_momentum >= 1.0:
            raise ValueError(f"outer_momentum={self.outer_momentum} must be below 1, or the momentum grows for ever")
        for name, kinds in _CHOICES.items():
            _require_instance(getattr(self, name), name, kinds)
        for name in _DTYPES:
            if getattr(self, name) is not None:
                require_choice(getattr(self, name), name, get_args(WireDType))
        self._set("flush_on_close", require_exact_bool(self.flush_on_close, "flush_on_close"))
        if self.fragments > self.sync_every:
            raise ValueError(
                f"fragments={self.fragments} must be at most sync_every={self.sync_every}: "
                "a learner sends at most one fragment a step"
            )
        if self.residual_dtype is not None and self.delta_dtype is None:
            raise ValueError(
                f"residual_dtype={self.residual_dtype!r} needs a delta_dtype: deltas that are sent exactly leave no "
                "residual; leave it None"
            )

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    @cached_property
    def schedule(self) -> Schedule:
        """The rounds that follow from these numbers."""
        return Schedule(
            sync_every=self.sync_every,
            fragments=self.fragments,
            in_flight=self.in_flight,
            overlap_steps=self.overlap_steps,
            follow=self.quorum_size - 1 if self.follow is None else self.follow,
        )

    def to_dict(self) -> dict[str, Any]:
        """Return every argument as what JSON can hold; a choice is ``{"kind": class name, **its arguments}``."""
        described: dict[str, Any] = {}
        for name in _arguments():
            value = getattr(self, name)
            described[name] = {"kind": type(value).__name__, **asdict(value)} if name in _CHOICES else value
        return described

    @classmethod
    def from_dict(cls, described: Mapping[str, Any]) -> Self:
        """Return the algorithm that :meth:`to_dict` described.

        Raises:
            TypeError, ValueError: it describes none; the message names what is wrong.
        """
        if not isinstance(described, Mapping):
            raise TypeError(f"described={described!r} must be a mapping of DiLoCo's arguments")
        _require_keys(described, _arguments(), "DiLoCo")
        arguments = dict(described)
        for name, kinds in _CHOICES.items():
            arguments[name] = _choice_from_dict(described[name], name, kinds)
        return cls(**arguments)

    def to_json(self) -> str:
        """Return :meth:`to_dict` as compact JSON with sorted keys: equal algorithms have equal text."""
        return json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":"), allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Return the algorithm that :meth:`to_json` described, and raise what :meth:`from_dict` does."""
        return cls.from_dict(json.loads(text))

    def digest(self) -> str:
        """Return the sha256 of :meth:`to_json`, in hexadecimal."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def require_same(self, other: DiLoCo, *, where: str) -> None:
        """Check that ``other``, the algorithm found at ``where``, is this one.

        Raises:
            AlgorithmMismatch: it is not; the message names each argument that differs, with both values.
        """
        names = tuple(sorted(name for name in _arguments() if getattr(self, name) != getattr(other, name)))
        if names:
            differences = "; ".join(
                f"{name}={getattr(self, name)!r} here, {getattr(other, name)!r} there" for name in names
            )
            raise AlgorithmMismatch(
                f"this site's algorithm is not that of {where}: {differences}. Give it the same, or use another prefix",
                names,
            )


def _arguments() -> list[str]:
    return [argument.name for argument in fields(DiLoCo)]


def _require_instance(value: object, name: str, kinds: tuple[type, ...]) -> None:
    if not isinstance(value, kinds):
        raise TypeError(f"{name}={value!r} must be an instance of one of {', '.join(kind.__name__ for kind in kinds)}")


def _choice_from_dict(described: object, name: str, kinds: tuple[type, ...]) -> object:
    if not isinstance(described, Mapping):
        raise TypeError(f"{name}={described!r} must be a mapping with a kind")
    by_name = {kind.__name__: kind for kind in kinds}
    kind = by_name[require_choice(described.get("kind"), f"{name}['kind']", by_name)]
    arguments = {key: value for key, value in described.items() if key != "kind"}
    _require_keys(arguments, [argument.name for argument in fields(kind)], f"{name}={kind.__name__}")
    return kind(**arguments)


def _require_keys(given: Mapping[str, Any], expected: list[str], owner: str) -> None:
    unknown, missing = sorted(map(str, given.keys() - expected)), sorted(set(expected) - given.keys())
    if unknown:
        raise ValueError(f"{owner} has no argument {', '.join(unknown)}: another version of mixle described it")
    if missing:
        raise ValueError(f"{owner} needs {', '.join(missing)}: another version of mixle described it")
