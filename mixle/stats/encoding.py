"""Encoded observations: trees of arrays that can be cut into row blocks and moved into a shared frame."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Self

import numpy as np

from mixle.stats.frames import Frame, Sums, join_frames

__all__ = [
    "Encoding",
    "LeafEncoding",
    "any_impossible",
    "encoding_frames",
    "impossible_rows",
    "join_all",
    "reframe_encoding",
    "require_encoding",
    "require_parts",
    "row_count",
    "take_rows",
]


class Encoding(ABC):
    """The encoding of ``len(self)`` observations."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def rows(self, start: int, stop: int) -> Self:
        """Return the encoding of a range of the observations, as views where possible."""

    @abstractmethod
    def map_leaves(self, change: Callable[[LeafEncoding], LeafEncoding]) -> Self:
        """Return the same tree with every leaf changed; leaves are visited in a fixed order."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """The size of the arrays in bytes."""

    @abstractmethod
    def impossible_rows(self) -> np.ndarray | None:
        """Return which observations lie outside the support whatever the parameters, ``(n,)`` bool; None for none."""


class LeafEncoding(Encoding):
    """Observations of one leaf family.

    Args:
        columns: arrays whose **last** axis indexes rows, so that a family's axes are contiguous.
        frame: what the columns are relative to, or None.
        impossible: ``(n,)`` bool, rows outside the family's support, or None; the columns hold a stand-in there.
        example: the first impossible value, for messages.
        family: the class of the family that it was encoded for; None if unknown.
    """

    def __init__(
        self,
        columns: Sums,
        frame: Frame | None = None,
        impossible: np.ndarray | None = None,
        example: str = "",
        family: type[Any] | None = None,
    ) -> None:
        self.columns, self.frame = columns, frame
        self.impossible, self.example = impossible, example
        self.family = family

    def __len__(self) -> int:
        return int(self.columns[0].shape[-1])

    def rows(self, start: int, stop: int) -> LeafEncoding:
        impossible = None if self.impossible is None else self.impossible[start:stop]
        columns = tuple(c[..., start:stop] for c in self.columns)
        return LeafEncoding(columns, self.frame, impossible, self.example, self.family)

    def map_leaves(self, change: Callable[[LeafEncoding], LeafEncoding]) -> LeafEncoding:
        return change(self)

    def in_frame(self, frame: Frame | None) -> LeafEncoding:
        """Return the same observations with their columns in a frame that this one's joined."""
        if frame is None or frame == self.frame:
            columns = self.columns
        elif self.frame is None:
            columns = frame.adopt_columns(self.columns)
        else:
            columns = self.frame.recode(self.columns, frame)
        return LeafEncoding(columns, frame, self.impossible, self.example, self.family)

    @property
    def nbytes(self) -> int:
        return sum(c.nbytes for c in self.columns)

    def impossible_rows(self) -> np.ndarray | None:
        return self.impossible


def require_encoding(enc: Any, kind: type[Encoding], reader: str, *, family: type[Any] | None = None) -> None:
    """Check that an encoding was made for the model that reads it.

    Args:
        kind: the class that the encoding must have.
        reader: the model's name, to report.
        family: the family that a leaf's encoding must be of.

    Raises:
        TypeError: it was encoded for another model; names both.
    """
    # Asking an abstract class for its instances is slow beside a short block of rows.
    made = type(enc) is kind or isinstance(enc, kind)
    if made and (family is None or getattr(enc, "family", None) in (family, None)):
        return
    raise TypeError(f"encoded for {_encoded_for(enc)}, read by {reader}: encode with model.dist_to_encoder()")


def require_parts(held: Sequence[Any], count: int, reader: str) -> None:
    """Check that an encoding has as many parts as the model that reads it.

    Raises:
        ValueError: their numbers differ.
    """
    if len(held) != count:
        raise ValueError(
            f"encoded in {len(held)} parts, read by a {reader} of {count}: encode with model.dist_to_encoder()"
        )


def _encoded_for(enc: Any) -> str:
    family = getattr(enc, "family", None)
    return type(enc).__name__.removesuffix("Encoding") if family is None else str(family.name)


def row_count(enc: Any) -> int:
    """Return the number of observations in an :class:`Encoding`, or in an array with rows on its first axis."""
    return len(enc)


def take_rows(enc: Any, start: int, stop: int) -> Any:
    """Return the encoding of a range of observations.

    Raises:
        TypeError: the encoding is neither an :class:`Encoding` nor an array.
    """
    if isinstance(enc, Encoding):
        return enc.rows(start, stop)
    if isinstance(enc, np.ndarray):
        return enc[start:stop]
    raise TypeError(
        f"an encoding must be a mixle Encoding or a NumPy array to be cut into rows, got {type(enc).__name__}"
    )


def impossible_rows(enc: Any) -> np.ndarray | None:
    """Return :meth:`Encoding.impossible_rows`; None for encodings of other libraries."""
    return enc.impossible_rows() if isinstance(enc, Encoding) else None


def any_impossible(encs: Iterable[Any]) -> np.ndarray | None:
    """Return the rows that are impossible in any of several encodings of the same rows."""
    masks = [m for m in map(impossible_rows, encs) if m is not None]
    return np.logical_or.reduce(masks) if masks else None


def encoding_frames(enc: Any) -> list[Frame | None]:
    """Return the frames of an encoding's leaves in visiting order; none for encodings of other libraries."""
    frames: list[Frame | None] = []

    def note(leaf: LeafEncoding) -> LeafEncoding:
        frames.append(leaf.frame)
        return leaf

    if isinstance(enc, Encoding):
        enc.map_leaves(note)
    return frames


def join_all(frame_lists: list[list[Frame | None]]) -> list[Frame | None]:
    """Join the frames of several shards, leaf by leaf.

    Raises:
        ValueError: the shards have different numbers of leaves.
    """
    if len({len(frames) for frames in frame_lists}) > 1:
        raise ValueError("the shards were encoded for different models: their numbers of leaves differ")
    joined: list[Frame | None] = []
    for leaf in zip(*frame_lists, strict=True):
        frame: Frame | None = None
        for other in leaf:
            frame = join_frames(frame, other)
        joined.append(frame)
    return joined


def reframe_encoding(enc: Any, frames: list[Frame | None]) -> Any:
    """Return an encoding with its leaves in the given frames, in the order of :func:`encoding_frames`."""
    if not isinstance(enc, Encoding):
        return enc
    remaining = iter(frames)
    return enc.map_leaves(lambda leaf: leaf.in_frame(next(remaining)))
