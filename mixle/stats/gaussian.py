"""The normal distribution on the real line."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, Self

import numpy as np

from mixle.stats.encoding import LeafEncoding
from mixle.stats.frames import Centre, Frame, Sums
from mixle.stats.gaussian_kernels import DiagonalKernel
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
from mixle.stats.policy import MAX_MAGNITUDE, data_scale, floor_variance, optional_floor
from mixle.stats.statistics import LeafStatistic
from mixle.utils.exact import require_finite_float

__all__ = [
    "GaussianAccumulator",
    "GaussianAccumulatorFactory",
    "GaussianDataEncoder",
    "GaussianDistribution",
    "GaussianEstimator",
    "GaussianSampler",
]


class GaussianParams(NamedTuple):
    mu: float
    sigma2: float


class GaussianFamily(LeafFamily[GaussianParams]):
    name = "Gaussian"

    def __init__(self, min_variance: float | None = None) -> None:
        self.min_variance = min_variance

    def encode(self, values: Sequence[Any]) -> LeafEncoding:
        x = number_column(values, self.name)
        return supported(x, np.abs(x) <= MAX_MAGNITUDE, 0.0, Centre.of)

    def log_density(self, params: GaussianParams, enc: LeafEncoding) -> np.ndarray:
        (x,) = enc.columns
        return -0.5 * (math.log(2 * math.pi * params.sigma2) + np.square(x - params.mu) / params.sigma2)

    def linear(self, params: Sequence[GaussianParams], frame: Frame | None) -> DiagonalKernel | None:
        if not isinstance(frame, Centre):
            return None
        mu, sigma2 = (np.array(column)[:, None] for column in zip(*params, strict=True))
        kernel = DiagonalKernel(mu, sigma2, frame)
        return kernel if kernel.exact else None

    def statistic_frame(self, frame: Frame | None, params: GaussianParams | None) -> Frame | None:
        return frame.about(np.asarray(params.mu)) if isinstance(frame, Centre) and params is not None else frame

    def statistics(self, enc: LeafEncoding, weights: np.ndarray, frame: Frame | None) -> Sums:
        x = enc.columns[0] - frame.point if isinstance(frame, Centre) else enc.columns[0]
        return np.asarray(weights.sum()), np.asarray(x @ weights), np.asarray(np.square(x) @ weights)

    def maximize(self, sums: Sums, frame: Frame | None, previous: GaussianParams | None) -> Fit[GaussianParams]:
        assert isinstance(frame, Centre)
        w, s1, s2 = sums
        offset = s1 / w
        raw = s2 / w - np.square(offset)
        variance, repairs = floor_variance(raw, data_scale(*frame.scale_moments(sums)), self.min_variance, "sigma2")
        return Fit(GaussianParams(float(frame.point + offset), float(variance)), repairs)

    def standard(self, frame: Frame | None) -> GaussianParams:
        if not isinstance(frame, Centre):
            return GaussianParams(0.0, 1.0)
        return GaussianParams(float(frame.mean), float(data_scale(frame.mean, frame.variance)))

    def sample(self, params: GaussianParams, rng: np.random.Generator, size: int) -> np.ndarray:
        return rng.normal(params.mu, math.sqrt(params.sigma2), size)

    def expected(self, params: GaussianParams) -> LeafStatistic:
        sums = (np.asarray(1.0), np.asarray(0.0), np.asarray(params.sigma2))
        return LeafStatistic(Centre(params.mu, 0.0, params.mu, 0.0), sums)


class GaussianDataEncoder(LeafDataEncoder):
    """Encodes real numbers; infinite and overflowing ones are impossible, NaN and None are refused."""


class GaussianSampler(LeafSampler):
    """Draws floats."""


class GaussianDistribution(LeafDistribution[GaussianParams]):
    """The normal distribution with mean ``mu`` and variance ``sigma2``.

    Raises:
        TypeError, ValueError: ``mu`` is not finite, or ``sigma2`` not finite and positive.
    """

    sampler_type = GaussianSampler
    encoder_type = GaussianDataEncoder

    def __init__(self, mu: float, sigma2: float, *, name: str | None = None, keys: str | None = None) -> None:
        mean = require_finite_float(mu, "mu")
        variance = require_finite_float(sigma2, "sigma2", exclusive_minimum=0.0)
        self._settle(GaussianFamily(), GaussianParams(mean, variance), name, keys)

    @property
    def mu(self) -> float:
        """The mean."""
        return self.params.mu

    @property
    def sigma2(self) -> float:
        """The variance."""
        return self.params.sigma2

    def parameters_to_dict(self) -> dict[str, Any]:
        return {"mu": self.mu, "sigma2": self.sigma2, **self._labels()}

    @classmethod
    def parameters_from_dict(cls, payload: dict[str, Any]) -> Self:
        dist = cls(payload["mu"], payload["sigma2"], name=payload.get("name"), keys=payload.get("keys"))
        return dist._restore_repairs(payload)


class GaussianAccumulator(LeafAccumulator):
    """Gathers weight and first and second moments."""

    encoder_type = GaussianDataEncoder


class GaussianAccumulatorFactory(LeafAccumulatorFactory):
    """Makes empty :class:`GaussianAccumulator`."""

    accumulator_type = GaussianAccumulator


class GaussianEstimator(LeafEstimator[GaussianParams]):
    """Fit a :class:`GaussianDistribution` by maximum likelihood.

    Args:
        pseudo_count: how many observations ``suff_stat`` counts for.
        suff_stat: ``(mu, sigma2)`` to regularize toward.
        min_variance: an absolute variance floor instead of the relative one of :mod:`mixle.stats.policy`.
        keys: estimators with equal keys share one statistic and, given equal settings, one fit.
    """

    distribution_type = GaussianDistribution
    factory_type = GaussianAccumulatorFactory

    def __init__(
        self,
        *,
        pseudo_count: float | None = None,
        suff_stat: tuple[float, float] | None = None,
        min_variance: float | None = None,
        name: str | None = None,
        keys: str | None = None,
    ) -> None:
        prior = None if suff_stat is None else GaussianDistribution(*suff_stat).params
        family = GaussianFamily(optional_floor(min_variance, "min_variance"))
        self._settle(family, pseudo_count, prior, name, keys)


GaussianDistribution.estimator_type = GaussianEstimator
