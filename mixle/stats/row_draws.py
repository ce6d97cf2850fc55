"""Random numbers that belong to rows, not to the order in which rows are visited.

Initialization draws by global row: row ``i`` gets the same numbers whether it is the first row of the third shard or
the thirtieth of the only one. Each draw is a hash of (seed, stream, row, position): nothing has to be skipped or sent.
The hash is the finalizer of SplitMix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014).
"""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["RowDraws"]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _mix(z: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))


class RowDraws:
    """Uniform draws for rows with given identities.

    Args:
        seed: a non-negative integer below ``2**63``.
        ids: ``(n,)`` uint64, the identity of each row.
    """

    def __init__(self, seed: int, ids: np.ndarray) -> None:
        self.seed = int(seed)
        self.ids = ids

    @classmethod
    def for_rows(cls, seed: int, start: int, count: int) -> RowDraws:
        """Return the draws of the global rows ``start, ..., start + count - 1``."""
        return cls(seed, np.arange(start, start + count, dtype=np.uint64))

    @classmethod
    def coerce(cls, rng: Any, count: int) -> RowDraws:
        """Return ``rng`` if it is a RowDraws; else draws for ``count`` rows seeded from a NumPy generator or an int."""
        return rng if isinstance(rng, cls) else cls.for_rows(draw_seed(rng), 0, count)

    def __len__(self) -> int:
        return len(self.ids)

    def rows(self, start: int, stop: int) -> RowDraws:
        """Return the draws of a range of these rows."""
        return RowDraws(self.seed, self.ids[start:stop])

    def select(self, rows: np.ndarray) -> RowDraws:
        """Return the draws of the rows that a mask or an index array picks."""
        return RowDraws(self.seed, self.ids[rows])

    def stream(self, index: int) -> RowDraws:
        """Return an independent stream for the same rows; each child of a combinator takes its own."""
        steps = np.array([index + 1], dtype=np.uint64)
        child = _mix(np.uint64(self.seed) + _GOLDEN * steps)
        return RowDraws(int(child[0] >> np.uint64(1)), self.ids)

    def elements(self, lengths: np.ndarray) -> RowDraws:
        """Return draws for the elements of rows with ``lengths`` of shape ``(n,)``: ``lengths.sum()`` of them."""
        lengths = np.asarray(lengths, dtype=np.int64)
        starts = np.cumsum(lengths) - lengths
        position = np.arange(int(lengths.sum()), dtype=np.int64) - np.repeat(starts, lengths)
        with np.errstate(over="ignore"):
            ids = _mix(np.repeat(self.ids, lengths) * _GOLDEN + position.astype(np.uint64) + np.uint64(1))
        return RowDraws(self.seed, ids)

    def uniform(self, count: int) -> np.ndarray:
        """Return ``(count, n)`` float64 draws, uniform on ``[0, 1)``; the same at every call."""
        with np.errstate(over="ignore"):
            lanes = _mix(np.uint64(self.seed) + _GOLDEN * np.arange(1, count + 1, dtype=np.uint64))
            bits = _mix(_mix(self.ids[None, :] * _GOLDEN + lanes[:, None]) + lanes[:, None])
        return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def draw_seed(rng: Any) -> int:
    """Return a 63-bit seed: from an int, or one draw of a NumPy ``Generator`` or ``RandomState``.

    Raises:
        TypeError: ``rng`` is none of these.
        ValueError: an int outside ``[0, 2**63)``.
    """
    if isinstance(rng, np.random.Generator):
        return int(rng.integers(0, 2**63 - 1))
    if isinstance(rng, np.random.RandomState):
        return int(rng.randint(0, 2**63 - 1, dtype=np.int64))
    if isinstance(rng, (int, np.integer)) and not isinstance(rng, bool):
        if not 0 <= int(rng) < 2**63:
            raise ValueError(f"rng={rng} must be a seed in [0, 2**63)")
        return int(rng)
    raise TypeError(f"rng must be an int seed, a numpy Generator or a RandomState, got {type(rng).__name__} ({rng!r})")
