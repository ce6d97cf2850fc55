"""Linear kernels of the Gaussian families.

Writing a squared distance as a polynomial in the data cancels digits where a component is narrow and far from the point
that the data is centred on. The kernels are offered only where that costs less than about 1e-11 in a log-density;
elsewhere the families' direct formulas, which subtract the mean first, are used.
"""

from __future__ import annotations

import math

import numpy as np

from mixle.stats.encoding import LeafEncoding
from mixle.stats.frames import Centre
from mixle.stats.linear import LinearKernel
from mixle.stats.statistics import LeafStatistic

__all__ = ["DiagonalKernel", "FullKernel"]

# The largest term of the polynomial one standard deviation from a component's mean; times the machine epsilon, 2e-11.
_LARGEST_TERM = 1e5


class DiagonalKernel(LinearKernel):
    """Features ``x - c`` and ``(x - c)**2`` per axis, ``c`` being the frame's point.

    Args:
        mu, variance: ``(k, d)``.
        frame: a :class:`Centre` whose point is ``(d,)``, or ``()`` for scalar data.
    """

    def __init__(self, mu: np.ndarray, variance: np.ndarray, frame: Centre) -> None:
        self.frame = frame
        self.point = frame.point.reshape(-1, 1)
        gap = mu - frame.point
        precision = 1.0 / variance
        self.coefficients = np.concatenate([gap * precision, -0.5 * precision], axis=1)
        self.peaks = -0.5 * np.log(2 * math.pi * variance).sum(axis=1)
        self.constants = self.peaks - 0.5 * (np.square(gap) * precision).sum(axis=1)
        self.exact = bool(
            np.max(np.sum(np.square(np.abs(gap) + np.sqrt(variance)) * precision, axis=1)) < _LARGEST_TERM
        )

    def write_features(self, enc: LeafEncoding, out: np.ndarray) -> None:
        d = len(self.point)
        np.subtract(enc.columns[0], self.point, out=out[:d])
        np.square(out[:d], out=out[d:])

    def statistic(self, weight: float, totals: np.ndarray) -> LeafStatistic:
        s1, s2 = totals.reshape(2, *self.frame.point.shape)
        return LeafStatistic(self.frame, (np.asarray(weight), np.asarray(s1), np.asarray(s2)))


class FullKernel(LinearKernel):
    """Features ``x - c`` and the upper triangle of ``(x - c)(x - c)'``.

    Args:
        mu: ``(k, d)``.
        covar, precision: ``(k, d, d)``.
        log_det: ``(k,)``, of the covariances.
        frame: a :class:`Centre` whose point is ``(d,)``.
    """

    def __init__(
        self, mu: np.ndarray, covar: np.ndarray, precision: np.ndarray, log_det: np.ndarray, frame: Centre
    ) -> None:
        self.frame = frame
        d = mu.shape[1]
        gap = mu - frame.point
        linear = np.einsum("kij,kj->ki", precision, gap)
        self.upper = np.triu_indices(d)
        quadratic = -precision
        quadratic[:, np.arange(d), np.arange(d)] *= 0.5
        self.coefficients = np.concatenate([linear, quadratic[:, *self.upper]], axis=1)
        self.peaks = -0.5 * (d * math.log(2 * math.pi) + log_det)
        self.constants = self.peaks - 0.5 * np.sum(linear * gap, axis=1)
        reach = np.abs(gap) + np.sqrt(np.einsum("kii->ki", covar))
        self.exact = bool(np.max(np.einsum("ki,kij,kj->k", reach, np.abs(precision), reach)) < _LARGEST_TERM)

    def write_features(self, enc: LeafEncoding, out: np.ndarray) -> None:
        d = len(self.frame.point)
        np.subtract(enc.columns[0], self.frame.point[:, None], out=out[:d])
        row = d
        for i in range(d):
            np.multiply(out[i:d], out[i], out=out[row : row + d - i])
            row += d - i

    def statistic(self, weight: float, totals: np.ndarray) -> LeafStatistic:
        d = len(self.frame.point)
        s2 = np.empty((d, d))
        s2[self.upper] = totals[d:]
        s2.T[self.upper] = totals[d:]
        return LeafStatistic(self.frame, (np.asarray(weight), totals[:d].copy(), s2))
