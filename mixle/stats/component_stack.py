"""The components of a mixture as one thing: scored and gathered together where their family allows it.

A stack scores ``k`` distributions into a ``(k, n)`` array and later adds weighted rows to their ``k`` statistics. Leaf
components of one family that has a linear kernel do both by matrix products; records are stacked field by field; any
other components take turns.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from mixle.stats.contract import ProbabilityDistribution, StatisticAccumulator
from mixle.stats.encoding import LeafEncoding
from mixle.stats.leaf import LeafDistribution
from mixle.stats.linear import LinearKernel
from mixle.stats.policy import MIN_MASS

__all__ = ["ComponentStack", "Likelihoods", "stack_components"]

# Further below the peak of all components exp is slow, and what it gives is nothing beside MIN_MASS.
_LEAST_EXPONENT = -500.0


class Likelihoods(NamedTuple):
    """The weighted likelihoods of a block of rows.

    Attributes:
        joint: ``(k, n)``; times ``exp(log_scale)``, the weight of component ``j`` times its density at row ``i``.
        total: ``(n,)``, the sum over components; zero for a row that no component can produce.
        log_scale: ``(n,)`` or a number.
        block: what :meth:`ComponentStack.add` needs to know of the rows.
    """

    joint: np.ndarray
    total: np.ndarray
    log_scale: Any
    block: Any


class Workspace:
    """Memory for one array, used again and again."""

    def __init__(self) -> None:
        self._flat = np.empty(0)

    def array(self, rows: int, columns: int) -> np.ndarray:
        """Return an uninitialized ``(rows, columns)`` array over this memory."""
        if self._flat.size < rows * columns:
            self._flat = np.empty(rows * columns)
        return self._flat[: rows * columns].reshape(rows, columns)


class ComponentStack(ABC):
    """``k`` distributions with log-weights, for one pass over row blocks of the encodings that it was made for.

    Encodings are given as a sequence of ``k``, one for each component; components that encode alike share theirs. A
    block's arrays are overwritten by the next block's: fresh memory for each costs more than the arithmetic.
    """

    #: bytes that a row of a block occupies while it is scored
    row_bytes: float

    @abstractmethod
    def score(self, encs: Sequence[Any]) -> tuple[np.ndarray, Any]:
        """Return a block's weighted log-densities, ``(k, n)``, and what :meth:`add` needs to know of the block."""

    def likelihoods(self, encs: Sequence[Any]) -> Likelihoods:
        """Return a block's weighted likelihoods, scaled by that of each row's best component."""
        joint, block = self.score(encs)
        top = joint.max(axis=0)
        top[top == -np.inf] = 0.0
        joint -= top
        np.exp(joint, out=joint)
        return Likelihoods(joint, joint.sum(axis=0), top, block)

    @abstractmethod
    def add(self, block: Any, weights: np.ndarray, accumulators: Sequence[StatisticAccumulator]) -> np.ndarray:
        """Add a scored block's rows with ``(k, n)`` weights, and return what these add up to, ``(k,)``.

        They may reach the accumulators only at :meth:`finish`.
        """

    def finish(self, accumulators: Sequence[StatisticAccumulator]) -> None:  # noqa: B027  (most stacks hold nothing back)
        """Hand over what :meth:`add` held back."""


class TurnStack(ComponentStack):
    """Components that take turns."""

    def __init__(self, dists: Sequence[ProbabilityDistribution], log_w: np.ndarray, encs: Sequence[Any]) -> None:
        self.dists, self.log_w = dists, log_w
        self.joint = Workspace()
        distinct = {id(e): e for e in encs}.values()
        self.row_bytes = 24 * len(dists) + sum(3 * e.nbytes / max(len(e), 1) for e in distinct)

    def score(self, encs: Sequence[Any]) -> tuple[np.ndarray, Any]:
        joint = self.joint.array(len(self.dists), len(encs[0]))
        for row, dist, log_w, enc in zip(joint, self.dists, self.log_w, encs, strict=True):
            np.add(dist.seq_log_density(enc), log_w, out=row)
        return joint, encs

    def add(self, block: Any, weights: np.ndarray, accumulators: Sequence[StatisticAccumulator]) -> np.ndarray:
        for accumulator, enc, w, dist in zip(accumulators, block, weights, self.dists, strict=True):
            accumulator.seq_update(enc, w, dist)
        return np.asarray(weights.sum(axis=1))


class LinearStack(ComponentStack):
    """Leaf components of one family, by its linear kernel.

    Behind the kernel's features comes a row of ones, so that the products add the constants and the weights too.
    """

    def __init__(self, kernel: LinearKernel, log_w: np.ndarray) -> None:
        self.kernel = kernel
        self.peak = float(np.max(kernel.peaks + log_w))
        constants = (kernel.constants + log_w)[:, None]
        self.coefficients = np.concatenate([kernel.coefficients, constants], axis=1)
        self.below_peak = np.concatenate([kernel.coefficients, constants - self.peak], axis=1)
        self.near_peak = True
        self.joint, self.features = Workspace(), Workspace()
        k, features = self.coefficients.shape
        self.row_bytes = 8 * features + 16 * k
        self.totals = np.zeros((k, features))

    def likelihoods(self, encs: Sequence[LeafEncoding]) -> Likelihoods:
        """Return a block's weighted likelihoods, scaled by the largest that there can be where all rows are near it."""
        if self.near_peak:
            joint, block = self._score(encs, self.below_peak)
            np.maximum(joint, _LEAST_EXPONENT, out=joint)
            np.exp(joint, out=joint)
            total = joint.sum(axis=0)
            self.near_peak = not (total <= MIN_MASS).any()
            if self.near_peak:
                return Likelihoods(joint, total, self.peak, block)
        return super().likelihoods(encs)

    def score(self, encs: Sequence[LeafEncoding]) -> tuple[np.ndarray, Any]:
        return self._score(encs, self.coefficients)

    def _score(self, encs: Sequence[LeafEncoding], coefficients: np.ndarray) -> tuple[np.ndarray, Any]:
        k, count = coefficients.shape
        n = len(encs[0])
        features = self.features.array(count, n)
        self.kernel.write_features(encs[0], features[:-1])
        features[-1] = 1.0
        joint = np.matmul(coefficients, features, out=self.joint.array(k, n))
        if encs[0].impossible is not None:
            joint[:, encs[0].impossible] = -np.inf
        return joint, features

    def add(self, block: np.ndarray, weights: np.ndarray, accumulators: Sequence[StatisticAccumulator]) -> np.ndarray:
        totals = (block @ weights.T).T  # this way round BLAS packs the smaller operand
        self.totals += totals
        return np.asarray(totals[:, -1])

    def finish(self, accumulators: Sequence[StatisticAccumulator]) -> None:
        for accumulator, totals in zip(accumulators, self.totals, strict=True):
            accumulator.combine(self.kernel.statistic(totals[-1], totals[:-1]))


def stack_components(
    dists: Sequence[ProbabilityDistribution], log_w: np.ndarray, encs: Sequence[Any]
) -> ComponentStack:
    """Return the stack for components, their ``(k,)`` log-weights and their encodings, one for each component."""
    kernel = _linear_kernel(dists, encs)
    return TurnStack(dists, log_w, encs) if kernel is None else LinearStack(kernel, log_w)


def _linear_kernel(dists: Sequence[ProbabilityDistribution], encs: Sequence[Any]) -> LinearKernel | None:
    leaves = [d for d in dists if isinstance(d, LeafDistribution)]
    enc = encs[0]
    alike = len(leaves) == len(dists) and len({type(d.family) for d in leaves}) == 1 and all(e is enc for e in encs)
    if not alike or not isinstance(enc, LeafEncoding):
        return None
    return leaves[0].family.linear([d.params for d in leaves], enc.frame)
