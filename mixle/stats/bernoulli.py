"""The Bernoulli distribution."""

from __future__ import annotations

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
from mixle.stats.statistics import LeafStatistic
from mixle.utils.exact import require_finite_float

__all__ = [
    "BernoulliAccumulator",
    "BernoulliAccumulatorFactory",
    "BernoulliDataEncoder",
    "BernoulliDistribution",
    "BernoulliEstimator",
    "BernoulliSampler",
]


class BernoulliParams(NamedTuple):
    p: float


class BernoulliFamily(LeafFamily[BernoulliParams]):
    name = "Bernoulli"

    def encode(self, values: Any) -> LeafEncoding:
        x = number_column(values, self.name, bools=True)
        return supported(x, (x == 0) | (x == 1), 0.0)

    def log_density(self, params: BernoulliParams, enc: LeafEncoding) -> np.ndarray:
        with np.errstate(divide="ignore"):
            failure, success = np.log1p(-params.p), np.log(params.p)
        return np.asarray(np.where(enc.columns[0] == 1, success, failure))

    def statistics(self, enc: LeafEncoding, weights: np.ndarray, frame: Frame | None) -> Sums:
        return np.asarray(weights.sum()), np.asarray(enc.columns[0] @ weights)

    def maximize(self, sums: Sums, frame: Frame | None, previous: BernoulliParams | None) -> Fit[BernoulliParams]:
        weight, successes = sums
        # The two sums round apart: by themselves they may give a little more than one.
        return Fit(BernoulliParams(min(1.0, float(successes / weight))))

    def standard(self, frame: Frame | None) -> BernoulliParams:
        return BernoulliParams(0.5)

    def sample(self, params: BernoulliParams, rng: np.random.Generator, size: int) -> np.ndarray:
        return rng.random(size) < params.p

    def expected(self, params: BernoulliParams) -> LeafStatistic:
        return LeafStatistic(None, (np.asarray(1.0), np.asarray(params.p)))

    def uniform_prior(self, frame: Frame | None) -> LeafStatistic:
        return self.expected(self.standard(frame))


class BernoulliDataEncoder(LeafDataEncoder):
    """Encodes bools, and the numbers 0 and 1; other numbers are impossible."""


class BernoulliSampler(LeafSampler):
    """Draws bools: one, or a bool array."""


class BernoulliDistribution(LeafDistribution[BernoulliParams]):
    """The distribution of a truth value: True, or 1, with probability ``p``.

    Raises:
        TypeError, ValueError: ``p`` is not in ``[0, 1]``.
    """

    sampler_type = BernoulliSampler
    encoder_type = BernoulliDataEncoder

    def __init__(self, p: float, *, name: str | None = None, keys: str | None = None) -> None:
        params = BernoulliParams(require_finite_float(p, "p", minimum=0.0, maximum=1.0))
        self._settle(BernoulliFamily(), params, name, keys)

    @property
    def p(self) -> float:
        """The probability of True."""
        return self.params.p

    def parameters_to_dict(self) -> dict[str, Any]:
        return {"p": self.p, **self._labels()}

    @classmethod
    def parameters_from_dict(cls, payload: dict[str, Any]) -> Self:
        return cls(payload["p"], name=payload.get("name"), keys=payload.get("keys"))._restore_repairs(payload)


class BernoulliAccumulator(LeafAccumulator):
    """Gathers weight and successes."""

    encoder_type = BernoulliDataEncoder


class BernoulliAccumulatorFactory(LeafAccumulatorFactory):
    """Makes empty :class:`BernoulliAccumulator`."""

    accumulator_type = BernoulliAccumulator


class BernoulliEstimator(LeafEstimator[BernoulliParams]):
    """Fit a :class:`BernoulliDistribution` by maximum likelihood.

    Args:
        pseudo_count: how many observations ``suff_stat`` counts for.
        suff_stat: the probability to regularize toward; one half if not given.
        keys: estimators with equal keys share one statistic and, given equal settings, one fit.
    """

    distribution_type = BernoulliDistribution
    factory_type = BernoulliAccumulatorFactory

    def __init__(
        self,
        *,
        pseudo_count: float | None = None,
        suff_stat: float | None = None,
        name: str | None = None,
        keys: str | None = None,
    ) -> None:
        prior = None if suff_stat is None else BernoulliDistribution(suff_stat).params
        self._settle(BernoulliFamily(), pseudo_count, prior, name, keys)


BernoulliDistribution.estimator_type = BernoulliEstimator
