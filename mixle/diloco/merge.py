"""Merge the deltas of several learners into one, and keep a broken or runaway one from deciding it.

Arrays are float32; sums run in float64 over blocks that fit a cache, so that the result is that of exact arithmetic
rounded once, whatever the order of the learners.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median_low

import numpy as np
from numpy.typing import NDArray

Delta = Mapping[str, NDArray[np.float32]]

CLIP_MULTIPLE = 10.0
"""A delta's norm is cut to this multiple of the median norm of its round."""

_BLOCK = 1 << 15
_CANCELLED = 1e-6


@dataclass(frozen=True)
class WeightedMean:
    """The weighted mean of the deltas."""


@dataclass(frozen=True)
class Rda:
    """Radial-directional averaging: per tensor, the weighted mean of norms times the direction of the mean of units.

    Deltas that point apart then do not shrink one another. Tensors that the caller names as embeddings take the
    weighted mean, because most of their rows are moved by few learners; so do tensors whose unit deltas cancel to less
    than 1e-6, whose direction is rounding noise. Source: Decoupled DiLoCo (arXiv 2604.21428).
    """


def norm(delta: Delta) -> float:
    """Return the 2-norm of all tensors together; NaN or infinity if, and only if, an element is not finite."""
    return math.sqrt(math.fsum(_squared_norm(tensor) for tensor in delta.values()))


def clip_factors(norms: Sequence[float], steps: Sequence[int]) -> list[float]:
    """Return what each delta is to be multiplied by: 1, or less where its norm is beyond the round's.

    Delta i may be :data:`CLIP_MULTIPLE` times as long as the median of the round's nonzero norms, the lower one of two.
    The norm of a learner that took fewer steps than i counts in proportion to i's steps, so that a learner that trained
    for longer is not taken for a runaway.

    Args:
        norms: of the deltas, finite.
        steps: behind each of them, at least 1.
    """
    moved = [(size, count) for size, count in zip(norms, steps, strict=True) if size > 0]
    factors = []
    for size, count in zip(norms, steps, strict=True):
        usual = median_low([other * max(1.0, count / taken) for other, taken in moved]) if moved else 0.0
        limit = CLIP_MULTIPLE * usual
        factors.append(limit / size if size > limit else 1.0)
    return factors


def merge_deltas(
    how: WeightedMean | Rda,
    deltas: Sequence[Delta],
    shares: Sequence[float],
    *,
    factors: Sequence[float] | None = None,
    embeddings: Container[str] = (),
) -> dict[str, NDArray[np.float32]]:
    """Return the merged delta, in new arrays; a single delta that is not clipped is returned as it is, copied.

    Args:
        how: the rule.
        deltas: one mapping of name to finite float32 array per learner, all of the same names and shapes.
        shares: the weight of each, summing to 1 (see :func:`mixle.diloco.weights.shares`).
        factors: what each is multiplied by first (see :func:`clip_factors`); None is 1.
        embeddings: names that :class:`Rda` merges by the mean.

    Raises:
        ValueError: there is no delta, or they differ in names or shapes.
    """
    scales = [1.0] * len(deltas) if factors is None else list(factors)
    _require_alike(deltas)
    merged = {}
    for name, first in deltas[0].items():
        tensors = [delta[name] for delta in deltas]
        if len(tensors) == 1 and scales[0] == 1.0:
            merged[name] = np.array(first, dtype=np.float32)
            continue
        weights = [share * scale for share, scale in zip(shares, scales, strict=True)]
        mean_only = isinstance(how, WeightedMean) or name in embeddings
        merged[name] = _weighted_sum(tensors, weights)[0] if mean_only else _radial(tensors, shares, weights)
    return merged


def averaged(
    start: NDArray[np.float32], deltas: Sequence[NDArray[np.float32]], shares: Sequence[float]
) -> NDArray[np.float32]:
    """Return the weighted mean of ``start - delta``, which is no less than the least of them and no more than the most.

    Args:
        start: what all deltas are taken from.
        deltas: finite, of its shape; at least one.
        shares: the weight of each, summing to 1.
    """
    with np.errstate(over="ignore"):
        ends = [np.asarray(start - delta) for delta in deltas]
    mean = _weighted_sum(ends, shares)[0]
    least, most = ends[0].copy(), ends[0].copy()
    for end in ends[1:]:
        np.minimum(least, end, out=least)
        np.maximum(most, end, out=most)
    return np.clip(mean, least, most, out=mean)


def mean_cosine(deltas: Sequence[Delta]) -> float | None:
    """Return the mean of the cosines between all pairs of deltas, each taken as one vector, in [-1, 1].

    Deltas of norm zero have no direction and are left out; None if fewer than two remain.
    """
    lengths = [norm(delta) for delta in deltas]
    moved = [(delta, length) for delta, length in zip(deltas, lengths, strict=True) if length > 0]
    count = len(moved)
    if count < 2:
        return None
    units = [1.0 / length for _, length in moved]
    # The square of the sum of unit vectors is `count` plus the cosines of all ordered pairs.
    squared = math.fsum(
        _weighted_sum([delta[name] for delta, _ in moved], units, keep=False)[1] for name in moved[0][0]
    )
    return min(1.0, max(-1.0, (squared - count) / (count * (count - 1))))


def _require_alike(deltas: Sequence[Delta]) -> None:
    if not deltas:
        raise ValueError("deltas must hold at least one learner's delta")
    shapes = {name: tensor.shape for name, tensor in deltas[0].items()}
    for index, delta in enumerate(deltas[1:], start=1):
        if {name: tensor.shape for name, tensor in delta.items()} != shapes:
            raise ValueError(f"deltas[{index}] must have the names and shapes of deltas[0]: {shapes}")


def _radial(
    tensors: Sequence[NDArray[np.float32]], shares: Sequence[float], weights: Sequence[float]
) -> NDArray[np.float32]:
    lengths = [math.sqrt(_squared_norm(tensor)) for tensor in tensors]
    radius = math.fsum(weight * length for weight, length in zip(weights, lengths, strict=True))
    per_unit = [share / length if length else 0.0 for share, length in zip(shares, lengths, strict=True)]
    direction, squared = _weighted_sum(tensors, per_unit)
    if math.sqrt(squared) <= _CANCELLED:
        return _weighted_sum(tensors, weights)[0]
    with np.errstate(over="ignore"):
        direction *= np.float64(radius / math.sqrt(squared)).astype(np.float32)
    return direction


def _weighted_sum(
    tensors: Sequence[NDArray[np.float32]], weights: Sequence[float], *, keep: bool = True
) -> tuple[NDArray[np.float32], float]:
    """Return the weighted sum, left empty unless ``keep``, and the square of its norm before rounding."""
    total = np.empty(tensors[0].shape if keep else 0, dtype=np.float32)
    flat = total.reshape(-1)
    squares = []
    for block in _blocks(tensors[0].size):
        part = np.zeros(block.stop - block.start)
        for tensor, weight in zip(tensors, weights, strict=True):
            part += tensor.reshape(-1)[block] * np.float64(weight)
        squares.append(float(part @ part))
        if keep:
            with np.errstate(over="ignore"):
                flat[block] = part
    return total, math.fsum(squares)


def _squared_norm(tensor: NDArray[np.float32]) -> float:
    flat = tensor.reshape(-1)
    blocks = (flat[block].astype(np.float64) for block in _blocks(flat.size))
    squares = [float(part @ part) for part in blocks]
    return math.fsum(squares) if all(map(math.isfinite, squares)) else math.nan


def _blocks(size: int) -> Iterator[slice]:
    for start in range(0, size, _BLOCK):
        yield slice(start, min(start + _BLOCK, size))
