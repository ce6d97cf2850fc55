"""Shuffle without an index array: a keyed bijection on ``[0, n)`` that is computed where it is asked for.

A position is split into two digits ``(left, right)`` of the mixed radix ``a * b >= n`` with ``a = ceil(sqrt(n))`` and
``b = ceil(n / a)``, and sixteen Feistel rounds add a keyed hash of one digit to the other, in turn. What falls outside
``[0, n)`` walks on along its cycle until it is back inside (Black and Rogaway, "Ciphers with Arbitrary Finite Domains",
CT-RSA 2002, methods 2 and 3); fewer than ``a`` of the ``a * b`` values can. Sixteen rounds are what it takes for the
permutations of very few elements, where a round has few functions to choose from, to be equally likely. The order is a
function of the arguments alone: a resumed run relies on it, and it does not change between versions.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mixle.utils.exact import require_exact_int, require_nonnegative_int

_MAX_LENGTH = 1 << 62
_ROUNDS = 16


@dataclass(frozen=True)
class Permutation:
    """Map positions to indices, one to one on ``[0, n)``, in O(1) memory.

    Args:
        n: how many are permuted, at most 2**62.
        seed: any integer; the one number that a user gives.
        epoch: each epoch has its own order.
        replica: where replicas permute each their own windows, which one; None for an order that all share.
    """

    n: int
    seed: int
    epoch: int = 0
    replica: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "n", require_exact_int(self.n, "n", minimum=0, maximum=_MAX_LENGTH))
        object.__setattr__(self, "seed", require_exact_int(self.seed, "seed"))
        object.__setattr__(self, "epoch", require_nonnegative_int(self.epoch, "epoch"))
        if self.replica is not None:
            object.__setattr__(self, "replica", require_nonnegative_int(self.replica, "replica"))

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, positions: ArrayLike) -> NDArray[np.int64]:
        """Return :meth:`apply` of an array of positions."""
        return self.apply(positions)

    def apply(self, positions: ArrayLike) -> NDArray[np.int64]:
        """Return the indices at ``positions``, int64 of the same shape.

        Raises:
            TypeError: positions that are not integers.
            IndexError: a position outside ``[0, n)``.
        """
        return self._walk(positions, "position", inverse=False)

    def inverse(self, indices: ArrayLike) -> NDArray[np.int64]:
        """Return the positions at which ``indices`` stand, int64 of the same shape (raises as :meth:`apply`)."""
        return self._walk(indices, "index", inverse=True)

    @cached_property
    def _radix(self) -> tuple[int, int]:
        left = max(1, math.isqrt(max(0, self.n - 1)) + 1)
        return left, max(1, -(-self.n // left))

    @cached_property
    def _round_keys(self) -> tuple[np.uint64, ...]:
        message = f"mixle order: seed={self.seed} epoch={self.epoch} replica={self.replica}".encode()
        return tuple(np.frombuffer(hashlib.shake_256(message).digest(8 * _ROUNDS), dtype="<u8"))

    def _walk(self, values: ArrayLike, name: str, *, inverse: bool) -> NDArray[np.int64]:
        array = np.asarray(values)
        if array.size and array.dtype.kind not in "iu":
            raise TypeError(f"{name} must be an integer or an array of them, not {array.dtype}")
        outside = (array < 0) | (array >= self.n)
        if outside.any():
            raise IndexError(f"{name} {array[outside].flat[0]} is outside [0, {self.n})")
        walked = self._rounds(array.astype(np.uint64).ravel(), inverse=inverse)
        away = np.flatnonzero(walked >= self.n)
        while away.size:
            walked[away] = self._rounds(walked[away], inverse=inverse)
            away = away[walked[away] >= self.n]
        return walked.astype(np.int64).reshape(array.shape)

    def _rounds(self, x: NDArray[np.uint64], *, inverse: bool) -> NDArray[np.uint64]:
        """Send ``x`` through the network once, on the whole of ``[0, a * b)``."""
        left_size, right_size = map(np.uint64, self._radix)
        left, right = x // right_size, x % right_size
        numbered = list(enumerate(self._round_keys))
        for turn, key in reversed(numbered) if inverse else numbered:
            if turn % 2 == 0:
                shift = _mix(right + key) % left_size
                left = (left + (left_size - shift if inverse else shift)) % left_size
            else:
                shift = _mix(left + key) % right_size
                right = (right + (right_size - shift if inverse else shift)) % right_size
        return left * right_size + right


def _mix(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return the SplitMix64 finalizer of ``z`` (Steele, Lea and Flood, OOPSLA 2014, figure 16)."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
