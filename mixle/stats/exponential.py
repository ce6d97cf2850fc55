"""The exponential distribution."""

from __future__ import annotations

import math
from typing import Any, NamedTuple, Self

import numpy as np

from mixle.stats.encoding import LeafEncoding
from mixle.stats.frames import Centre, Frame, Sums
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
from mixle.stats.policy import MAX_MAGNITUDE, floor_mean, optional_floor
from mixle.stats.statistics import LeafStatistic
from mixle.utils.exact import require_finite_float

__all__ = [
    "ExponentialAccumulator",
    "ExponentialAccumulatorFactory",
    "ExponentialDataEncoder",
    "ExponentialDistribution",
    "ExponentialEstimator",
    "ExponentialSampler",
]


class ExponentialParams(NamedTuple):
    beta: float


class ExponentialFamily(LeafFamily[ExponentialParams]):
    name = "Exponential"

    def __init__(self, min_beta: float | None = None) -> None:
        self.min_beta = min_beta

    def encode(self, values: Any) -> LeafEncoding:
        x = number_column(values, self.name)
        return supported(x, (x >= 0) & (x <= MAX_MAGNITUDE), 0.0, Centre.of)

    def log_density(self, params: ExponentialParams, enc: LeafEncoding) -> np.ndarray:
        return -enc.columns[0] / params.beta - math.log(params.beta)

    def statistics(self, enc: LeafEncoding, weights: np.ndarray, frame: Frame | None) -> Sums:
        x = enc.columns[0] - frame.point if isinstance(frame, Centre) else enc.columns[0]
        return np.asarray(weights.sum()), np.asarray(x @ weights)

    def maximize(self, sums: Sums, frame: Frame | None, previous: ExponentialParams | None) -> Fit[ExponentialParams]:
        assert isinstance(frame, Centre)
        weight, total = sums
        whole, _ = frame.scale_moments(sums)
        beta, repairs = floor_mean(float(frame.point + total / weight), float(whole), self.min_beta, "beta")
        return Fit(ExponentialParams(beta), repairs)

    def standard(self, frame: Frame | None) -> ExponentialParams:
        return ExponentialParams(float(frame.mean) if isinstance(frame, Centre) and frame.mean > 0 else 1.0)

    def sample(self, params: ExponentialParams, rng: np.random.Generator, size: int) -> np.ndarray:
        return rng.exponential(params.beta, size)

    def expected(self, params: ExponentialParams) -> LeafStatistic:
        return LeafStatistic(Centre(params.beta, 0.0, params.beta, 0.0), (np.asarray(1.0), np.asarray(0.0)))


class ExponentialDataEncoder(LeafDataEncoder):
    """Encodes real numbers; negative, infinite and overflowing ones are impossible."""


class ExponentialSampler(LeafSampler):
    """Draws floats."""


class ExponentialDistribution(LeafDistribution[ExponentialParams]):
    """The exponential distribution with mean ``beta``: density ``exp(-x / beta) / beta`` for ``x >= 0``.

    Raises:
        TypeError, ValueError: ``beta`` is not finite and positive.
    """

    sampler_type = ExponentialSampler
    encoder_type = ExponentialDataEncoder

    def __init__(self, beta: float, *, name: str | None = None, keys: str | None = None) -> None:
        params = ExponentialParams(require_finite_float(beta, "beta", exclusive_minimum=0.0))
        self._settle(ExponentialFamily(), params, name, keys)

    @property
    def beta(self) -> float:
        """The mean."""
        return self.params.beta

    def parameters_to_dict(self) -> dict[str, Any]:
        return {"beta": self.beta, **self._labels()}

    @classmethod
    def parameters_from_dict(cls, payload: dict[str, Any]) -> Self:
        dist = cls(payload["beta"], name=payload.get("name"), keys=payload.get("keys"))
        return dist._restore_repairs(payload)


class ExponentialAccumulator(LeafAccumulator):
    """Gathers weight and sum."""

    encoder_type = ExponentialDataEncoder


class ExponentialAccumulatorFactory(LeafAccumulatorFactory):
    """Makes empty :class:`ExponentialAccumulator`."""

    accumulator_type = ExponentialAccumulator


class ExponentialEstimator(LeafEstimator[ExponentialParams]):
    """Fit an :class:`ExponentialDistribution` by maximum likelihood.

    Args:
        pseudo_count: how many observations ``suff_stat`` counts for.
        suff_stat: the mean to regularize toward.
        min_beta: an absolute floor of the mean instead of the relative one of :mod:`mixle.stats.policy`.
        keys: estimators with equal keys share one statistic and, given equal settings, one fit.
    """

    distribution_type = ExponentialDistribution
    factory_type = ExponentialAccumulatorFactory

    def __init__(
        self,
        *,
        pseudo_count: float | None = None,
        suff_stat: float | None = None,
        min_beta: float | None = None,
        name: str | None = None,
        keys: str | None = None,
    ) -> None:
        prior = None if suff_stat is None else ExponentialDistribution(suff_stat).params
        self._settle(ExponentialFamily(optional_floor(min_beta, "min_beta")), pseudo_count, prior, name, keys)


ExponentialDistribution.estimator_type = ExponentialEstimator
