"""Frames: the coordinate systems that statistics and encoded columns are written in.

Counts need a list of categories to be counts of; moments need a centre to be taken about. A frame holds that, and knows
how to join another one and how to carry sums over into it. With one frame on every shard, statistics are vectors that
one reduction adds up (:mod:`mixle.stats.statistics`); with different frames they still combine exactly.

A frame is immutable, compares by content and survives JSON.
"""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import cached_property
from typing import Any, ClassVar, Self

import numpy as np

from mixle.stats.categories import Category, category_from_json, category_to_json, ordered_categories

__all__ = [
    "Centre",
    "Frame",
    "FrameMemo",
    "IntegerRange",
    "Sums",
    "Vocabulary",
    "frame_from_json",
    "frame_to_json",
    "join_frames",
]

Sums = tuple[np.ndarray, ...]

# A median of about this many rows is as good a centre as that of all.
_MEDIAN_ROWS = 1024


class Frame(ABC):
    """What sums and encoded columns are relative to."""

    _kinds: ClassVar[dict[str, type[Frame]]] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        Frame._kinds[cls.__name__] = cls

    @abstractmethod
    def join(self, other: Self) -> Self:
        """Return the frame that both fit in; the order of joining does not matter."""

    @abstractmethod
    def rebase(self, sums: Sums, target: Self) -> Sums:
        """Return ``sums``, given in this frame, in the frame ``target``, a join of this one with others."""

    def recode(self, columns: Sums, target: Self) -> Sums:
        """Return encoded columns, given in this frame, in the frame ``target``."""
        return columns

    @abstractmethod
    def adopt(self, sums: Sums) -> Sums:
        """Return the zero sums that a shard without rows contributes in this frame; ``sums`` gives their number."""

    def adopt_columns(self, columns: Sums) -> Sums:
        """Return the columns of a shard without rows in this frame."""
        return columns

    @abstractmethod
    def to_plain(self) -> Any:
        """Return the content in JSON types, floats exact."""

    @classmethod
    @abstractmethod
    def from_plain(cls, plain: Any) -> Self:
        """Build the frame from :meth:`to_plain`'s value."""

    @cached_property
    def digest(self) -> str:
        """A hash of the content, equal for equal frames."""
        text = json.dumps([type(self).__name__, self.to_plain()])
        return hashlib.sha256(text.encode()).hexdigest()

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Frame) and self.digest == other.digest)

    def __hash__(self) -> int:
        return hash(self.digest)


def join_frames(a: Frame | None, b: Frame | None) -> Frame | None:
    """Join two frames of one kind; None is the frame of a family without coordinates, or of no data yet."""
    if a is None or a is b:
        return b
    if b is None:
        return a
    if type(a) is not type(b):
        raise ValueError(f"statistics of different kinds cannot be combined: {type(a).__name__} and {type(b).__name__}")
    return a if a.digest == b.digest else a.join(b)


def frame_to_json(frame: Frame | None) -> Any:
    """Return a frame in JSON types."""
    return None if frame is None else [type(frame).__name__, frame.to_plain()]


def frame_from_json(plain: Any) -> Frame | None:
    """Build a frame from :func:`frame_to_json`'s value.

    Raises:
        ValueError: ``plain`` is no such value.
    """
    if plain is None:
        return None
    if not (isinstance(plain, list) and len(plain) == 2 and plain[0] in Frame._kinds):
        raise ValueError(f"not an encoded frame: {plain!r:.80}")
    return Frame._kinds[plain[0]].from_plain(plain[1])


class FrameMemo:
    """What a model's parameters come to in the frame that was asked for last; not pickled."""

    def __init__(self) -> None:
        self._frame: Frame | None = None
        self._value: Any = None

    def get(self, frame: Any, make: Callable[[Any], Any]) -> Any:
        """Return ``make(frame)``, from memory if ``frame`` is the object of the last call."""
        if self._frame is not frame:
            self._value, self._frame = make(frame), frame
        return self._value

    def __reduce__(self) -> tuple[Any, ...]:
        return FrameMemo, ()


class Vocabulary(Frame):
    """Distinct categories in canonical order; one sum per category, on the last axis of each array.

    Args:
        categories: any iterable of categories; duplicates are merged and the order made canonical.
    """

    def __init__(self, categories: Any) -> None:
        self.categories: tuple[Category, ...] = ordered_categories(categories)

    @cached_property
    def index(self) -> dict[Category, int]:
        """The position of each category."""
        return {category: i for i, category in enumerate(self.categories)}

    def __len__(self) -> int:
        return len(self.categories)

    def positions_in(self, target: Vocabulary) -> np.ndarray:
        """Return the position in ``target`` of each of these categories, -1 for none, ``(len(self),)`` int64."""
        if target is self:
            return np.arange(len(self))
        return np.fromiter((target.index.get(c, -1) for c in self.categories), np.int64, len(self))

    def join(self, other: Vocabulary) -> Vocabulary:
        return Vocabulary(self.categories + other.categories)

    def rebase(self, sums: Sums, target: Vocabulary) -> Sums:
        (counts,) = sums
        moved = np.zeros(len(target))
        moved[self.positions_in(target)] = counts
        return (moved,)

    def adopt(self, sums: Sums) -> Sums:
        return (np.zeros(len(self)),)

    def recode(self, columns: Sums, target: Vocabulary) -> Sums:
        (codes,) = columns
        return (self.positions_in(target)[codes],)

    def to_plain(self) -> Any:
        return [category_to_json(c) for c in self.categories]

    @classmethod
    def from_plain(cls, plain: Any) -> Vocabulary:
        return cls(category_from_json(c) for c in plain)


class IntegerRange(Frame):
    """The integers ``low, ..., high``; one sum per integer, on the last axis of each array."""

    def __init__(self, low: int, high: int) -> None:
        self.low, self.high = int(low), int(high)

    def __len__(self) -> int:
        return self.high - self.low + 1

    def join(self, other: IntegerRange) -> IntegerRange:
        return IntegerRange(min(self.low, other.low), max(self.high, other.high))

    def rebase(self, sums: Sums, target: IntegerRange) -> Sums:
        (counts,) = sums
        moved = np.zeros(len(target))
        moved[self.low - target.low : self.low - target.low + len(self)] = counts
        return (moved,)

    def adopt(self, sums: Sums) -> Sums:
        return (np.zeros(len(self)),)

    def to_plain(self) -> Any:
        return [self.low, self.high]

    @classmethod
    def from_plain(cls, plain: Any) -> IntegerRange:
        return cls(*plain)


class Centre(Frame):
    """A point that moments are taken about, with the moments of the data that was encoded.

    Centring keeps second moments exact for data far from zero; the point is a median, so that a few rows far away,
    which may not even have weight, do not spoil it. Sums are ``(w, s1, s2)``: total weight ``()``, first moments
    ``(d,)`` or ``()``, second moments ``(d, d)``, ``(d,)`` or ``()``, about ``point``; or ``(w, s1)`` alone.

    Args:
        point: ``(d,)`` or ``()`` float64.
        count, mean, m2: the number of encoded rows, their mean and their sum of squared deviations per axis.
        support: the number of rows that the point was chosen for.
        whole: mean and variance per axis of the data that the sums are a share of, where they are one component's.
    """

    def __init__(
        self,
        point: Any,
        count: float,
        mean: Any,
        m2: Any,
        *,
        support: float | None = None,
        whole: tuple[np.ndarray, np.ndarray] | None = None,
    ) -> None:
        self.point, self.mean, self.m2 = (np.asarray(a, dtype=np.float64) for a in (point, mean, m2))
        self.count = float(count)
        self.support = self.count if support is None else float(support)
        self.whole = whole

    @classmethod
    def of(cls, x: np.ndarray) -> Centre | None:
        """Return the frame of the data ``x``, ``(d, n)`` or ``(n,)``; None without rows."""
        n = x.shape[-1]
        if n == 0:
            return None
        mean = x.mean(axis=-1)
        m2 = np.square(x - mean[..., None]).sum(axis=-1)
        return cls(np.median(x[..., :: 1 + n // _MEDIAN_ROWS], axis=-1), n, mean, m2)

    def about(self, point: np.ndarray) -> Centre:
        """Return the same data's frame centred on another point."""
        return Centre(point, self.count, self.mean, self.m2)

    def share_of(self, whole: tuple[np.ndarray, np.ndarray]) -> Centre:
        """Return this frame for sums that are a share of data with the given mean and variance."""
        share = Centre(self.point, self.count, self.mean, self.m2, support=self.support, whole=whole)
        share.digest = self.digest
        return share

    @property
    def variance(self) -> np.ndarray:
        """The population variance of the encoded data per axis."""
        return self.m2 / max(self.count, 1.0)

    def moments(self, sums: Sums) -> tuple[np.ndarray, np.ndarray]:
        """Return mean and variance per axis of the data of ``sums``; without second moments the variance is zero."""
        w, s1, *rest = sums
        offset = s1 / w
        s2 = rest[0] if rest else w * np.square(offset)
        return self.point + offset, (np.diagonal(s2) if s2.ndim == 2 else s2) / w - np.square(offset)

    def scale_moments(self, sums: Sums) -> tuple[np.ndarray, np.ndarray]:
        """Return the mean and variance that floors are relative to: those of the whole data, or of ``sums``."""
        return self.moments(sums) if self.whole is None else self.whole

    def join(self, other: Centre) -> Centre:
        # Chan, Golub, LeVeque, "Algorithms for computing the sample variance", 1983, eq. 2.1.
        count = self.count + other.count
        share = other.count / count if count else 0.5
        gap = other.mean - self.mean
        mean = self.mean + gap * share
        m2 = self.m2 + other.m2 + np.square(gap) * (self.count * share)
        # The better founded point; any rule that does not depend on the order of joining would do.
        better = max((self, other), key=lambda frame: (frame.support, frame.point.ravel().tolist()))
        return Centre(better.point, count, mean, m2, support=better.support)

    def rebase(self, sums: Sums, target: Centre) -> Sums:
        w, s1, *rest = sums
        shift = self.point - target.point
        moved = s1 + w * shift
        if not rest:
            return w, moved
        (s2,) = rest
        if s2.ndim == 2:
            cross = np.outer(shift, s1)
            return w, moved, s2 + cross + cross.T + w * np.outer(shift, shift)
        return w, moved, s2 + 2 * shift * s1 + w * np.square(shift)

    def adopt(self, sums: Sums) -> Sums:
        shape = self.point.shape
        return np.zeros(()), *(np.zeros(shape * 2 if s.ndim == 2 else shape) for s in sums[1:])

    def adopt_columns(self, columns: Sums) -> Sums:
        return (np.zeros((*self.point.shape, 0)),)

    def to_plain(self) -> Any:
        return [self.point.tolist(), self.count, self.mean.tolist(), self.m2.tolist(), self.support]

    @classmethod
    def from_plain(cls, plain: Any) -> Centre:
        point, count, mean, m2, support = plain
        return cls(point, count, mean, m2, support=support)
