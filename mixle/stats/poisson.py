"""The Poisson distribution."""

from __future__ import annotations

import math
from typing import Any, NamedTuple, Self

import numpy as np

from mixle.stats.encoding import LeafEncoding
from mixle.stats.frames import Frame, Sums
from mixle.stats.leaf import (
    Fit,
    LeafAccumulator,
    LeafAccumulatorFactory,
    LeafDataEncoder,
    LeafDistribution,
    LeafEstimator,
    LeafFamily,
    LeafSampler,
)
from mixle.stats.numeric_columns import number_column, supported
from mixle.stats.policy import MAX_MAGNITUDE
from mixle.stats.statistics import LeafStatistic
from mixle.utils.exact import require_finite_float

__all__ = [
    "PoissonAccumulator",
    "PoissonAccumulatorFactory",
    "PoissonDataEncoder",
    "PoissonDistribution",
    "PoissonEstimator",
    "PoissonSampler",
]


# Up to this mean, what the terms of the plain formula lose in each other is below 1e-12.
_PLAIN_MEAN = 256.0

# log(n!) - (n log n - n) for n below 16; above, Stirling's series is exact to the last bit.
_SMALL_STIRLING = np.array(
    [0.0, *(math.log(math.factorial(n)) - n * math.log(n) + n for n in range(1, 16))], dtype=np.float64
)


class PoissonParams(NamedTuple):
    lam: float


class PoissonFamily(LeafFamily[PoissonParams]):
    """Columns: the counts, and the logarithms of their factorials."""

    name = "Poisson"

    def encode(self, values: Any) -> LeafEncoding:
        from scipy.special import gammaln

        x = number_column(values, self.name)
        enc = supported(x, (x >= 0) & (x <= MAX_MAGNITUDE) & (x == np.floor(x)), 0.0)
        return LeafEncoding((*enc.columns, gammaln(enc.columns[0] + 1.0)), None, enc.impossible, enc.example)

    def log_density(self, params: PoissonParams, enc: LeafEncoding) -> np.ndarray:
        x, log_factorial = enc.columns
        if params.lam == 0:
            return np.where(x == 0, 0.0, -np.inf)
        if params.lam <= _PLAIN_MEAN:
            return x * np.log(params.lam) - params.lam - log_factorial
        # Loader, "Fast and accurate computation of binomial probabilities", 2000: the saddle-point form.
        return -_deviance(x, params.lam) - _stirling(x)

    def statistics(self, enc: LeafEncoding, weights: np.ndarray, frame: Frame | None) -> Sums:
        return np.asarray(weights.sum()), np.asarray(enc.columns[0] @ weights)

    def maximize(self, sums: Sums, frame: Frame | None, previous: PoissonParams | None) -> Fit[PoissonParams]:
        weight, total = sums
        return Fit(PoissonParams(float(total / weight)))

    def standard(self, frame: Frame | None) -> PoissonParams:
        return PoissonParams(1.0)

    def sample(self, params: PoissonParams, rng: np.random.Generator, size: int) -> np.ndarray:
        return rng.poisson(params.lam, size)

    def expected(self, params: PoissonParams) -> LeafStatistic:
        return LeafStatistic(None, (np.asarray(1.0), np.asarray(params.lam)))


def _deviance(x: np.ndarray, lam: float) -> np.ndarray:
    """Return ``x log(x / lam) + lam - x`` without cancellation where ``x`` is near ``lam``, ``(n,)``."""
    gap = x - lam
    v = gap / (x + lam)
    near = np.abs(v) < 0.1
    far = x * np.log(np.maximum(x, 1.0) / lam) - gap
    square = np.square(np.where(near, v, 0.0))
    series = np.zeros_like(x)
    for term in range(9, 0, -1):
        series = (series + 1.0 / (2 * term + 1)) * square
    return np.where(near, gap * v + 2.0 * x * v * series, far)


def _stirling(x: np.ndarray) -> np.ndarray:
    """Return ``log(x!) - (x log x - x)`` for counts, ``(n,)``."""
    n = np.maximum(x, 16.0)
    square = np.square(1.0 / n)
    series = (1 / 12 - (1 / 360 - (1 / 1260 - (1 / 1680 - square / 1188) * square) * square) * square) / n
    small = _SMALL_STIRLING[np.minimum(x, 15.0).astype(np.int64)]
    return np.where(x < 16, small, 0.5 * np.log(2 * math.pi * n) + series)


class PoissonDataEncoder(LeafDataEncoder):
    """Encodes counts; negative numbers and fractions are impossible."""


class PoissonSampler(LeafSampler):
    """Draws counts: one, or an int64 array."""


class PoissonDistribution(LeafDistribution[PoissonParams]):
    """The Poisson distribution with mean ``lam``; at ``lam=0`` all of it is at zero.

    Raises:
        TypeError, ValueError: ``lam`` is not finite and at least 0.
    """

    sampler_type = PoissonSampler
    encoder_type = PoissonDataEncoder

    def __init__(self, lam: float, *, name: str | None = None, keys: str | None = None) -> None:
        self._settle(PoissonFamily(), PoissonParams(require_finite_float(lam, "lam", minimum=0.0)), name, keys)

    @property
    def lam(self) -> float:
        """The mean."""
        return self.params.lam

    def parameters_to_dict(self) -> dict[str, Any]:
        return {"lam": self.lam, **self._labels()}

    @classmethod
    def parameters_from_dict(cls, payload: dict[str, Any]) -> Self:
        dist = cls(payload["lam"], name=payload.get("name"), keys=payload.get("keys"))
        return dist._restore_repairs(payload)


class PoissonAccumulator(LeafAccumulator):
    """Gathers weight and sum."""

    encoder_type = PoissonDataEncoder


class PoissonAccumulatorFactory(LeafAccumulatorFactory):
    """Makes empty :class:`PoissonAccumulator`."""

    accumulator_type = PoissonAccumulator


class PoissonEstimator(LeafEstimator[PoissonParams]):
    """Fit a :class:`PoissonDistribution` by maximum likelihood.

    Args:
        pseudo_count: how many observations ``suff_stat`` counts for.
        suff_stat: the mean to regularize toward.
        keys: estimators with equal keys share one statistic and, given equal settings, one fit.
    """

    distribution_type = PoissonDistribution
    factory_type = PoissonAccumulatorFactory

    def __init__(
        self,
        *,
        pseudo_count: float | None = None,
        suff_stat: float | None = None,
        name: str | None = None,
        keys: str | None = None,
    ) -> None:
        prior = None if suff_stat is None else PoissonDistribution(suff_stat).params
        self._settle(PoissonFamily(), pseudo_count, prior, name, keys)


PoissonDistribution.estimator_type = PoissonEstimator
