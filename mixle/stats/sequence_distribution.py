"""Sequences of independent draws from one distribution, with a distribution of the length."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, Self

import numpy as np

from mixle.stats.contract import (
    AccumulatorFactory,
    DataEncoder,
    ParameterEstimator,
    ProbabilityDistribution,
    Sampler,
    StatisticAccumulator,
    m_step,
    require_distributions,
    require_estimators,
)
from mixle.stats.encoding import Encoding, LeafEncoding, impossible_rows, require_encoding, take_rows
from mixle.stats.null import NullDistribution, NullEstimator
from mixle.stats.numeric_columns import concatenated, is_row
from mixle.stats.payload import require_known_fields
from mixle.stats.policy import Repair, within
from mixle.stats.row_draws import RowDraws
from mixle.utils.exact import require_nonnegative_int

__all__ = [
    "SequenceAccumulator",
    "SequenceAccumulatorFactory",
    "SequenceDataEncoder",
    "SequenceDistribution",
    "SequenceEstimator",
    "SequenceSampler",
]


class SequenceEncoding(Encoding):
    """The elements of all sequences end to end.

    Args:
        bounds: ``(n + 1,)`` int64; sequence ``i`` has elements ``[bounds[i], bounds[i + 1])``.
        elements: their encoding.
        lengths: the encoding of the lengths.
    """

    def __init__(self, bounds: np.ndarray, elements: Any, lengths: Any) -> None:
        self.bounds, self.elements, self.lengths = bounds, elements, lengths

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def rows(self, start: int, stop: int) -> SequenceEncoding:
        bounds = self.bounds[start : stop + 1]
        elements = take_rows(self.elements, int(bounds[0]), int(bounds[-1]))
        return SequenceEncoding(bounds - bounds[0], elements, take_rows(self.lengths, start, stop))

    def map_leaves(self, change: Callable[[LeafEncoding], LeafEncoding]) -> SequenceEncoding:
        parts = (p.map_leaves(change) if isinstance(p, Encoding) else p for p in (self.elements, self.lengths))
        return SequenceEncoding(self.bounds, *parts)

    @property
    def counts(self) -> np.ndarray:
        """The length of each sequence, ``(n,)`` int64."""
        return np.diff(self.bounds)

    @property
    def nbytes(self) -> int:
        return int(self.elements.nbytes + self.lengths.nbytes + self.bounds.nbytes)

    def impossible_rows(self) -> np.ndarray | None:
        bad, mask = impossible_rows(self.elements), impossible_rows(self.lengths)
        if bad is None:
            return mask
        owners = np.repeat(np.arange(len(self)), self.counts)
        inside = np.bincount(owners[bad], minlength=len(self)) > 0
        return inside if mask is None else inside | mask


class SequenceDataEncoder(DataEncoder):
    """Encodes lists, tuples or arrays of elements."""

    def __init__(self, encoder: DataEncoder, len_encoder: DataEncoder) -> None:
        self.encoder, self.len_encoder = encoder, len_encoder

    def seq_encode(self, xs: Sequence[Any]) -> SequenceEncoding:
        for i, x in enumerate(xs):
            if not is_row(x):
                raise TypeError(
                    f"a Sequence takes lists, tuples or arrays, got {type(x).__name__} ({x!r:.60}) at index {i}"
                )
        lengths = [len(x) for x in xs]
        bounds = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.int64)
        flat: Any = concatenated(xs, "iuf")
        if flat is None:
            flat = [element for x in xs for element in x]
        try:
            elements = self.encoder.seq_encode(flat)
        except (TypeError, ValueError):
            # Its index counts through all sequences: say which sequence instead.
            for i, x in enumerate(xs):
                self._encode_one(i, list(x))
            raise
        return SequenceEncoding(bounds, elements, self.len_encoder.seq_encode(lengths))

    def _encode_one(self, i: int, x: list[Any]) -> None:
        try:
            self.encoder.seq_encode(x)
        except (TypeError, ValueError) as error:
            raise type(error)(f"sequence {i}: {error}") from error

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, SequenceDataEncoder)
            and self.encoder == other.encoder
            and self.len_encoder == other.len_encoder
        )

    def __hash__(self) -> int:
        return hash((SequenceDataEncoder, self.encoder, self.len_encoder))


class SequenceDistribution(ProbabilityDistribution):
    """Sequences whose elements are independent draws from ``dist``.

    Args:
        dist: the distribution of an element.
        len_dist: the distribution of the length; None leaves it open: sequences are then scored given their length.
    """

    def __init__(
        self, dist: ProbabilityDistribution, len_dist: ProbabilityDistribution | None = None, *, name: str | None = None
    ) -> None:
        self.len_dist: ProbabilityDistribution
        self.dist, self.len_dist = require_distributions(
            (dist, NullDistribution() if len_dist is None else len_dist), "(dist, len_dist)"
        )
        self.name = name

    @property
    def repairs(self) -> tuple[Repair, ...]:
        return (*within("dist", self.dist.repairs), *within("len_dist", self.len_dist.repairs))

    def seq_log_density(self, enc: SequenceEncoding) -> np.ndarray:
        require_encoding(enc, SequenceEncoding, "Sequence")
        owners = np.repeat(np.arange(len(enc)), enc.counts)
        total = np.bincount(owners, weights=self.dist.seq_log_density(enc.elements), minlength=len(enc))
        return np.asarray(total + self.len_dist.seq_log_density(enc.lengths))

    def sampler(self, seed: int | np.random.Generator | None = None) -> SequenceSampler:
        return SequenceSampler(self, seed)

    def estimator(self, pseudo_count: float | None = None) -> SequenceEstimator:
        len_estimator = self.len_dist.estimator(pseudo_count)
        return SequenceEstimator(self.dist.estimator(pseudo_count), len_estimator, name=self.name)

    def dist_to_encoder(self) -> SequenceDataEncoder:
        return SequenceDataEncoder(self.dist.dist_to_encoder(), self.len_dist.dist_to_encoder())

    def parameters_to_dict(self) -> dict[str, Any]:
        return {"dist": self.dist.to_dict(), "len_dist": self.len_dist.to_dict(), "name": self.name}

    @classmethod
    def parameters_from_dict(cls, payload: dict[str, Any]) -> Self:
        require_known_fields(payload, cls, ("dist", "len_dist", "name"))
        dist, len_dist = (ProbabilityDistribution.from_dict(payload[key]) for key in ("dist", "len_dist"))
        return cls(dist, len_dist, name=payload.get("name"))

    def __repr__(self) -> str:
        return f"SequenceDistribution({self.dist!r}, len_dist={self.len_dist!r})"


class SequenceSampler(Sampler):
    """Draws lists; the distribution needs a ``len_dist`` over non-negative integers."""

    def __init__(self, dist: SequenceDistribution, seed: int | np.random.Generator | None = None) -> None:
        elements, lengths = np.random.default_rng(seed).spawn(2)
        self.elements, self.lengths = dist.dist.sampler(elements), dist.len_dist.sampler(lengths)

    def sample(self, size: int | None = None) -> Any:
        drawn = self.lengths.sample(1 if size is None else size)
        lengths = [require_nonnegative_int(n, "a length drawn from len_dist") for n in drawn]
        draws = [list(self.elements.sample(n)) if n else [] for n in lengths]
        return draws[0] if size is None else draws


class SequenceStatistic(NamedTuple):
    """The statistics of the elements and of the lengths, and the weight of the elements."""

    elements: Any
    lengths: Any
    weight: float


class SequenceAccumulator(StatisticAccumulator):
    """Gathers the elements' and the lengths' statistics; an element has the weight of its sequence."""

    def __init__(self, accumulator: StatisticAccumulator, len_accumulator: StatisticAccumulator) -> None:
        self.accumulator, self.len_accumulator = accumulator, len_accumulator
        self.weight = 0.0

    def seq_update(self, enc: SequenceEncoding, weights: np.ndarray, estimate: ProbabilityDistribution | None) -> None:
        known = estimate if isinstance(estimate, SequenceDistribution) else None
        each = self._spread(enc, weights)
        self.accumulator.seq_update(enc.elements, each, None if known is None else known.dist)
        self.len_accumulator.seq_update(enc.lengths, weights, None if known is None else known.len_dist)

    def seq_initialize(self, enc: SequenceEncoding, weights: np.ndarray, rng: RowDraws) -> None:
        each = self._spread(enc, weights)
        self.accumulator.seq_initialize(enc.elements, each, rng.stream(0).elements(enc.counts))
        self.len_accumulator.seq_initialize(enc.lengths, weights, rng.stream(1))

    def _spread(self, enc: SequenceEncoding, weights: np.ndarray) -> np.ndarray:
        require_encoding(enc, SequenceEncoding, "Sequence")
        each = np.repeat(weights, enc.counts)
        self.weight += float(each.sum())
        return each

    def combine(self, suff_stat: SequenceStatistic) -> Self:
        elements, lengths, weight = suff_stat
        self.accumulator.combine(elements)
        self.len_accumulator.combine(lengths)
        self.weight += weight
        return self

    def value(self) -> SequenceStatistic:
        return SequenceStatistic(self.accumulator.value(), self.len_accumulator.value(), float(self.weight))

    def from_value(self, value: SequenceStatistic) -> Self:
        elements, lengths, self.weight = value
        self.accumulator.from_value(elements)
        self.len_accumulator.from_value(lengths)
        return self

    def key_merge(self, stats: dict[Hashable, Any]) -> None:
        self.accumulator.key_merge(stats)
        self.len_accumulator.key_merge(stats)

    def key_replace(self, stats: dict[Hashable, Any]) -> None:
        self.accumulator.key_replace(stats)
        self.len_accumulator.key_replace(stats)

    def acc_to_encoder(self) -> SequenceDataEncoder:
        return SequenceDataEncoder(self.accumulator.acc_to_encoder(), self.len_accumulator.acc_to_encoder())


class SequenceAccumulatorFactory(AccumulatorFactory):
    """Makes empty :class:`SequenceAccumulator`."""

    def __init__(self, factory: AccumulatorFactory, len_factory: AccumulatorFactory) -> None:
        self.factory, self.len_factory = factory, len_factory

    def make(self) -> SequenceAccumulator:
        return SequenceAccumulator(self.factory.make(), self.len_factory.make())


class SequenceEstimator(ParameterEstimator):
    """Fit a :class:`SequenceDistribution`; ``len_estimator`` is the estimator of the length, None leaves it open."""

    def __init__(
        self, estimator: ParameterEstimator, len_estimator: ParameterEstimator | None = None, *, name: str | None = None
    ) -> None:
        self.estimator, self.len_estimator = require_estimators(
            (estimator, NullEstimator() if len_estimator is None else len_estimator), "(estimator, len_estimator)"
        )
        self.name = name

    def accumulator_factory(self) -> SequenceAccumulatorFactory:
        return SequenceAccumulatorFactory(
            self.estimator.accumulator_factory(), self.len_estimator.accumulator_factory()
        )

    def estimate(
        self, nobs: float | None, suff_stat: SequenceStatistic, previous: ProbabilityDistribution | None = None
    ) -> SequenceDistribution:
        before = previous if isinstance(previous, SequenceDistribution) else None
        dist = m_step(self.estimator, suff_stat.weight, suff_stat.elements, None if before is None else before.dist)
        len_dist = m_step(self.len_estimator, nobs, suff_stat.lengths, None if before is None else before.len_dist)
        return SequenceDistribution(dist, len_dist, name=self.name)
