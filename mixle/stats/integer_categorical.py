"""The distribution over a range of integers, one probability each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Self

import numpy as np

from mixle.stats.encoding import LeafEncoding
from mixle.stats.frames import Frame, IntegerRange, Sums
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
from mixle.stats.numeric_columns import integer_column, supported
from mixle.stats.simplex import require_probabilities
from mixle.stats.statistics import LeafStatistic
from mixle.utils.exact import require_exact_int

__all__ = [
    "IntegerCategoricalAccumulator",
    "IntegerCategoricalAccumulatorFactory",
    "IntegerCategoricalDataEncoder",
    "IntegerCategoricalDistribution",
    "IntegerCategoricalEstimator",
    "IntegerCategoricalSampler",
]

# One count is kept for every integer of the range: 128 MiB at most.
_MAX_VALUES = 1 << 24


class IntegerCategoricalParams(NamedTuple):
    min_val: int
    p_vec: np.ndarray


class IntegerCategoricalFamily(LeafFamily[IntegerCategoricalParams]):
    name = "IntegerCategorical"

    def __init__(self, min_val: int | None = None, max_val: int | None = None) -> None:
        self.min_val, self.max_val = min_val, max_val

    def encode(self, values: Any) -> LeafEncoding:
        x, possible = integer_column(values, self.name)
        return supported(x, possible, 0, lambda x: IntegerRange(x.min(), x.max()) if len(x) else None, values)

    def log_density(self, params: IntegerCategoricalParams, enc: LeafEncoding) -> np.ndarray:
        (x,) = enc.columns
        with np.errstate(divide="ignore"):
            table = np.log(np.append(params.p_vec, 0.0))
        inside = (x >= params.min_val) & (x < params.min_val + len(params.p_vec))
        return table[np.where(inside, x - params.min_val, -1)]

    def statistics(self, enc: LeafEncoding, weights: np.ndarray, frame: Frame | None) -> Sums:
        if not isinstance(frame, IntegerRange):
            return (np.zeros(0),)
        _require_countable(frame)
        (x,) = enc.columns
        if enc.impossible is not None:
            x, weights = x[~enc.impossible], weights[~enc.impossible]
        return (np.bincount(x - frame.low, weights=weights, minlength=len(frame)).astype(np.float64),)

    def maximize(
        self, sums: Sums, frame: Frame | None, previous: IntegerCategoricalParams | None
    ) -> Fit[IntegerCategoricalParams]:
        assert isinstance(frame, IntegerRange)
        seen = np.flatnonzero(sums[0])
        low, high = frame.low + int(seen[0]), frame.low + int(seen[-1])
        bounds = IntegerRange(
            low if self.min_val is None else self.min_val, high if self.max_val is None else self.max_val
        )
        if low < bounds.low or high > bounds.high:
            raise ValueError(
                f"min_val={self.min_val}, max_val={self.max_val} exclude observed values: they go from {low} to {high}"
            )
        counts = np.zeros(len(bounds))
        counts[low - bounds.low : high - bounds.low + 1] = sums[0][seen[0] : seen[-1] + 1]
        return Fit(IntegerCategoricalParams(bounds.low, counts / counts.sum()))

    def standard(self, frame: Frame | None) -> IntegerCategoricalParams:
        prior = self.uniform_prior(frame)
        if not isinstance(prior.frame, IntegerRange):
            raise ValueError("an IntegerCategorical without observations needs min_val and max_val")
        return IntegerCategoricalParams(prior.frame.low, prior.sums[0])

    def sample(self, params: IntegerCategoricalParams, rng: np.random.Generator, size: int) -> np.ndarray:
        return params.min_val + rng.choice(len(params.p_vec), size=size, p=params.p_vec)

    def expected(self, params: IntegerCategoricalParams) -> LeafStatistic:
        return LeafStatistic(IntegerRange(params.min_val, params.min_val + len(params.p_vec) - 1), (params.p_vec,))

    def uniform_prior(self, frame: Frame | None) -> LeafStatistic:
        low, high = self.min_val, self.max_val
        if isinstance(frame, IntegerRange):
            low, high = frame.low if low is None else low, frame.high if high is None else high
        if low is None or high is None or low > high:
            return LeafStatistic(None, ())
        span = IntegerRange(low, high)
        _require_countable(span)
        return LeafStatistic(span, (np.full(len(span), 1.0 / len(span)),))


def _require_countable(span: IntegerRange) -> None:
    # Its len() could be too large for Python.
    count = span.high - span.low + 1
    if count > _MAX_VALUES:
        raise ValueError(
            f"an IntegerCategorical keeps a probability for each integer from {span.low} to {span.high}: {count} are "
            f"more than {_MAX_VALUES}; use Categorical for values far apart"
        )


class IntegerCategoricalDataEncoder(LeafDataEncoder):
    """Encodes integers, also as floats without a fraction; other numbers are impossible."""


class IntegerCategoricalSampler(LeafSampler):
    """Draws integers: one, or an int64 array."""


class IntegerCategoricalDistribution(LeafDistribution[IntegerCategoricalParams]):
    """The distribution with probability ``p_vec[i]`` at ``min_val + i``.

    Args:
        min_val: the least value; all values fit 64 bits.
        p_vec: ``(n,)`` probabilities.

    Raises:
        TypeError, ValueError: ``min_val`` is no such integer, or ``p_vec`` no probability vector.
    """

    sampler_type = IntegerCategoricalSampler
    encoder_type = IntegerCategoricalDataEncoder

    def __init__(
        self, min_val: int, p_vec: Sequence[float] | np.ndarray, *, name: str | None = None, keys: str | None = None
    ) -> None:
        p = require_probabilities(p_vec, "p_vec")
        low = require_exact_int(min_val, "min_val", minimum=-(2**63), maximum=2**63 - len(p))
        self._settle(IntegerCategoricalFamily(), IntegerCategoricalParams(low, p), name, keys)

    @property
    def min_val(self) -> int:
        """The least value."""
        return self.params.min_val

    @property
    def max_val(self) -> int:
        """The greatest value."""
        return self.params.min_val + len(self.params.p_vec) - 1

    @property
    def p_vec(self) -> np.ndarray:
        """The probabilities of ``min_val, ..., max_val``."""
        return self.params.p_vec

    def parameters_to_dict(self) -> dict[str, Any]:
        return {"min_val": self.min_val, "p_vec": self.p_vec.tolist(), **self._labels()}

    @classmethod
    def parameters_from_dict(cls, payload: dict[str, Any]) -> Self:
        dist = cls(payload["min_val"], payload["p_vec"], name=payload.get("name"), keys=payload.get("keys"))
        return dist._restore_repairs(payload)


class IntegerCategoricalAccumulator(LeafAccumulator):
    """Counts integers."""

    encoder_type = IntegerCategoricalDataEncoder


class IntegerCategoricalAccumulatorFactory(LeafAccumulatorFactory):
    """Makes empty :class:`IntegerCategoricalAccumulator`."""

    accumulator_type = IntegerCategoricalAccumulator


class IntegerCategoricalEstimator(LeafEstimator[IntegerCategoricalParams]):
    """Fit an :class:`IntegerCategoricalDistribution` by counting.

    Args:
        min_val, max_val: the range; a bound that is None is taken from the observations.
        pseudo_count: how many observations ``suff_stat`` counts for; without ``suff_stat`` they are spread evenly over
            the range, each bound that is None being that of the encoded data.
        suff_stat: ``(min_val, p_vec)`` to regularize toward.
        keys: estimators with equal keys share one statistic and, given equal settings, one fit.
    """

    distribution_type = IntegerCategoricalDistribution
    factory_type = IntegerCategoricalAccumulatorFactory

    def __init__(
        self,
        min_val: int | None = None,
        max_val: int | None = None,
        *,
        pseudo_count: float | None = None,
        suff_stat: tuple[int, Any] | None = None,
        name: str | None = None,
        keys: str | None = None,
    ) -> None:
        low = None if min_val is None else require_exact_int(min_val, "min_val")
        high = None if max_val is None else require_exact_int(max_val, "max_val", minimum=low)
        prior = None if suff_stat is None else IntegerCategoricalDistribution(*suff_stat).params
        self._settle(IntegerCategoricalFamily(low, high), pseudo_count, prior, name, keys)


IntegerCategoricalDistribution.estimator_type = IntegerCategoricalEstimator
