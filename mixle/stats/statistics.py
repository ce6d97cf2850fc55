"""Sufficient statistics as trees, and their flat form.

A statistic is a tree of tuples, lists and dicts whose leaves are float64 arrays and floats (sums), and
:class:`LeafStatistic` nodes (sums in a frame). Everything that is a float is additive; everything else is structure.
Two statistics of equal :func:`layout` are added by adding their :func:`pack` vectors, so one collective reduces them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from mixle.stats.frames import Frame, Sums, join_frames

__all__ = ["LeafStatistic", "add_leaf_statistics", "frames_of", "layout", "pack", "reframe", "unpack"]


class LeafStatistic(NamedTuple):
    """Sums of one leaf family and the frame that they are in; no sums before the first observation."""

    frame: Frame | None
    sums: Sums


def add_leaf_statistics(a: LeafStatistic, b: LeafStatistic) -> LeafStatistic:
    """Add two statistics of one family, in the join of their frames."""
    if not a.sums:
        return b
    if not b.sums:
        return a
    frame = join_frames(a.frame, b.frame)
    return LeafStatistic(frame, tuple(x + y for x, y in zip(_rebased(a, frame), _rebased(b, frame), strict=True)))


def _rebased(statistic: LeafStatistic, frame: Frame | None) -> Sums:
    if frame is None or statistic.frame == frame:
        return statistic.sums
    if statistic.frame is None:
        return frame.adopt(statistic.sums)
    return statistic.frame.rebase(statistic.sums, frame)


def _is_sum(node: Any) -> bool:
    return isinstance(node, (float, np.floating)) or (isinstance(node, np.ndarray) and node.dtype.kind == "f")


def _map(node: Any, leaf: Callable[[LeafStatistic], LeafStatistic], number: Callable[[Any], Any]) -> Any:
    if isinstance(node, LeafStatistic):
        return leaf(node)
    if isinstance(node, tuple) and hasattr(node, "_fields"):
        return type(node)(*(_map(child, leaf, number) for child in node))
    if isinstance(node, (tuple, list)):
        return type(node)(_map(child, leaf, number) for child in node)
    if isinstance(node, dict):
        return {key: _map(child, leaf, number) for key, child in node.items()}
    return number(node) if _is_sum(node) else node


def _describe(node: Any) -> Iterator[str]:
    if isinstance(node, LeafStatistic):
        yield f"leaf {node.frame.digest if node.frame is not None else None}"
        yield from (f"{s.shape}" for s in node.sums)
    elif isinstance(node, (tuple, list)):
        yield f"{type(node).__name__} {len(node)}"
        for child in node:
            yield from _describe(child)
    elif isinstance(node, dict):
        yield f"dict {len(node)}"
        for key, child in node.items():
            yield repr(key)
            yield from _describe(child)
    elif _is_sum(node):
        yield f"{np.shape(node)}"
    elif isinstance(node, np.ndarray):
        yield f"array {node.dtype} {node.shape} {hashlib.sha256(node.tobytes()).hexdigest()}"
    else:
        yield repr(node)


def layout(statistic: Any) -> str:
    """Return a hash of everything about a statistic but the values of its sums: 64 hex digits."""
    return hashlib.sha256("\n".join(_describe(statistic)).encode()).hexdigest()


def pack(statistic: Any) -> np.ndarray:
    """Return the sums of a statistic as one vector, float64, in the order of its tree."""
    parts: list[np.ndarray] = []

    def take(node: Any) -> Any:
        parts.append(np.ravel(np.asarray(node, dtype=np.float64)))
        return node

    def take_leaf(node: LeafStatistic) -> LeafStatistic:
        for sums in node.sums:
            take(sums)
        return node

    _map(statistic, take_leaf, take)
    return np.concatenate(parts) if parts else np.zeros(0)


def unpack(vector: np.ndarray, like: Any) -> Any:
    """Return a statistic of ``like``'s layout with the sums in ``vector``."""
    position = 0

    def give(node: Any) -> Any:
        nonlocal position
        size = int(np.size(node))
        piece = vector[position : position + size]
        position += size
        if not isinstance(node, np.ndarray):
            return float(piece[0])
        return piece.reshape(node.shape).astype(node.dtype)

    def give_leaf(leaf: LeafStatistic) -> LeafStatistic:
        return LeafStatistic(leaf.frame, tuple(np.asarray(give(s)) for s in leaf.sums))

    statistic = _map(like, give_leaf, give)
    if position != len(vector):
        raise ValueError(f"a vector of {len(vector)} sums does not fit a statistic of {position}")
    return statistic


def frames_of(statistic: Any) -> list[Frame | None]:
    """Return the frames of a statistic's leaves, in the order of its tree."""
    frames: list[Frame | None] = []

    def note(leaf: LeafStatistic) -> LeafStatistic:
        frames.append(leaf.frame)
        return leaf

    _map(statistic, note, lambda number: number)
    return frames


def reframe(statistic: Any, frames: list[Frame | None]) -> Any:
    """Return a statistic with its leaves' sums in the given frames, in the order of :func:`frames_of`."""
    remaining = iter(frames)

    def move(leaf: LeafStatistic) -> LeafStatistic:
        frame = next(remaining)
        return LeafStatistic(frame, _rebased(leaf, frame))

    return _map(statistic, move, lambda number: number)
