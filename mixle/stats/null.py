"""The part that is not modelled: every value has log-density zero and nothing is estimated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Self

import numpy as np

from mixle.stats.contract import (
    AccumulatorFactory,
    DataEncoder,
    ParameterEstimator,
    ProbabilityDistribution,
    Sampler,
    StatisticAccumulator,
)
from mixle.stats.encoding import Encoding, LeafEncoding
from mixle.stats.payload import require_known_fields

__all__ = [
    "NullAccumulator",
    "NullAccumulatorFactory",
    "NullDataEncoder",
    "NullDistribution",
    "NullEstimator",
    "NullSampler",
]


class NullEncoding(Encoding):
    """Only the number of rows."""

    nbytes = 0

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def rows(self, start: int, stop: int) -> NullEncoding:
        return NullEncoding(max(0, min(stop, self.count) - start))

    def map_leaves(self, change: Callable[[LeafEncoding], LeafEncoding]) -> NullEncoding:
        return self

    def impossible_rows(self) -> None:
        return None


class NullDataEncoder(DataEncoder):
    """Takes any values."""

    def seq_encode(self, xs: Sequence[Any]) -> NullEncoding:
        return NullEncoding(len(xs))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, NullDataEncoder)

    def __hash__(self) -> int:
        return hash(NullDataEncoder)


class NullDistribution(ProbabilityDistribution):
    """Gives every value log-density zero: for what a model leaves open, such as the length of its sequences."""

    def seq_log_density(self, enc: NullEncoding) -> np.ndarray:
        return np.zeros(len(enc))

    def sampler(self, seed: int | np.random.Generator | None = None) -> NullSampler:
        return NullSampler()

    def estimator(self, pseudo_count: float | None = None) -> NullEstimator:
        return NullEstimator()

    def dist_to_encoder(self) -> NullDataEncoder:
        return NullDataEncoder()

    def parameters_to_dict(self) -> dict[str, Any]:
        return {}

    @classmethod
    def parameters_from_dict(cls, payload: dict[str, Any]) -> Self:
        require_known_fields(payload, cls, ())
        return cls()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, NullDistribution)

    def __hash__(self) -> int:
        return hash(NullDistribution)

    def __repr__(self) -> str:
        return "NullDistribution()"


class NullSampler(Sampler):
    """Cannot draw: there is nothing to draw from."""

    def sample(self, size: int | None = None) -> Any:
        """Raise.

        Raises:
            ValueError: always; the part must be modelled to be sampled.
        """
        raise ValueError(
            "a NullDistribution cannot be sampled; model this part (len_dist, or an estimator's len_estimator)"
        )


class NullAccumulator(StatisticAccumulator):
    """Gathers nothing."""

    def seq_update(self, enc: NullEncoding, weights: np.ndarray, estimate: ProbabilityDistribution | None) -> None:
        return None

    def combine(self, suff_stat: tuple[()]) -> Self:
        return self

    def value(self) -> tuple[()]:
        return ()

    def from_value(self, value: tuple[()]) -> Self:
        return self

    def acc_to_encoder(self) -> NullDataEncoder:
        return NullDataEncoder()


class NullAccumulatorFactory(AccumulatorFactory):
    """Makes :class:`NullAccumulator`."""

    def make(self) -> NullAccumulator:
        return NullAccumulator()


class NullEstimator(ParameterEstimator):
    """Estimates a :class:`NullDistribution` from anything."""

    def accumulator_factory(self) -> NullAccumulatorFactory:
        return NullAccumulatorFactory()

    def estimate(self, nobs: float | None, suff_stat: tuple[()]) -> NullDistribution:
        return NullDistribution()
