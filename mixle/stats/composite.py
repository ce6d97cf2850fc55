"""Tuples of independent fields, each with its own distribution."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, Self

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
from mixle.stats.encoding import (
    Encoding,
    LeafEncoding,
    any_impossible,
    require_encoding,
    require_parts,
    row_count,
    take_rows,
)
from mixle.stats.numeric_columns import is_row
from mixle.stats.payload import list_field, require_known_fields
from mixle.stats.policy import Repair, within
from mixle.stats.row_draws import RowDraws

__all__ = [
    "CompositeAccumulator",
    "CompositeAccumulatorFactory",
    "CompositeDataEncoder",
    "CompositeDistribution",
    "CompositeEstimator",
    "CompositeSampler",
]


class CompositeEncoding(Encoding):
    """One encoding per field, all of the same rows."""

    def __init__(self, fields: tuple[Any, ...]) -> None:
        self.fields = fields

    def __len__(self) -> int:
        return row_count(self.fields[0])

    def rows(self, start: int, stop: int) -> CompositeEncoding:
        return CompositeEncoding(tuple(take_rows(f, start, stop) for f in self.fields))

    def map_leaves(self, change: Callable[[LeafEncoding], LeafEncoding]) -> CompositeEncoding:
        return CompositeEncoding(tuple(f.map_leaves(change) if isinstance(f, Encoding) else f for f in self.fields))

    @property
    def nbytes(self) -> int:
        return sum(f.nbytes for f in self.fields)

    def impossible_rows(self) -> np.ndarray | None:
        return any_impossible(self.fields)


def _fields(enc: Any, width: int) -> tuple[Any, ...]:
    require_encoding(enc, CompositeEncoding, "Composite")
    require_parts(enc.fields, width, "Composite")
    return tuple(enc.fields)


class CompositeDataEncoder(DataEncoder):
    """Encodes tuples (or lists) with one value per field."""

    def __init__(self, encoders: Sequence[DataEncoder]) -> None:
        self.encoders = tuple(encoders)

    def seq_encode(self, xs: Sequence[Any]) -> CompositeEncoding:
        width = len(self.encoders)
        for i, x in enumerate(xs):
            if not is_row(x):
                raise TypeError(
                    f"a Composite takes tuples of {width} fields, got {type(x).__name__} ({x!r:.60}) at index {i}"
                )
            if len(x) != width:
                raise ValueError(f"a Composite takes tuples of {width} fields, got {len(x)} at index {i} ({x!r:.60})")
        columns = [[x[j] for x in xs] for j in range(width)]
        fields = []
        for j, (encoder, column) in enumerate(zip(self.encoders, columns, strict=True)):
            try:
                fields.append(encoder.seq_encode(column))
            except (TypeError, ValueError) as error:
                raise type(error)(f"field {j}: {error}") from error
        return CompositeEncoding(tuple(fields))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CompositeDataEncoder) and self.encoders == other.encoders

    def __hash__(self) -> int:
        return hash(self.encoders)


class CompositeDistribution(ProbabilityDistribution):
    """The product of independent distributions, one per field of a tuple.

    Raises:
        TypeError, ValueError: ``dists`` is empty or holds something else than distributions.
    """

    def __init__(self, dists: Sequence[ProbabilityDistribution], *, name: str | None = None) -> None:
        self.dists: tuple[ProbabilityDistribution, ...] = require_distributions(dists, "dists")
        self.name = name

    @property
    def repairs(self) -> tuple[Repair, ...]:
        return tuple(r for j, d in enumerate(self.dists) for r in within(f"dists[{j}]", d.repairs))

    def seq_log_density(self, enc: CompositeEncoding) -> np.ndarray:
        fields = _fields(enc, len(self.dists))
        total = np.zeros(len(enc))
        for dist, field in zip(self.dists, fields, strict=True):
            total += dist.seq_log_density(field)
        return total

    def sampler(self, seed: int | np.random.Generator | None = None) -> CompositeSampler:
        return CompositeSampler(self, seed)

    def estimator(self, pseudo_count: float | None = None) -> CompositeEstimator:
        return CompositeEstimator([d.estimator(pseudo_count) for d in self.dists], name=self.name)

    def dist_to_encoder(self) -> CompositeDataEncoder:
        return CompositeDataEncoder([d.dist_to_encoder() for d in self.dists])

    def parameters_to_dict(self) -> dict[str, Any]:
        return {"dists": [d.to_dict() for d in self.dists], "name": self.name}

    @classmethod
    def parameters_from_dict(cls, payload: dict[str, Any]) -> Self:
        require_known_fields(payload, cls, ("dists", "name"))
        dists = [ProbabilityDistribution.from_dict(d) for d in list_field(payload, "dists", cls)]
        return cls(dists, name=payload.get("name"))

    def __repr__(self) -> str:
        return f"CompositeDistribution({list(self.dists)!r})"


def _fields_of(
    previous: ProbabilityDistribution | None, width: int
) -> tuple[ProbabilityDistribution, ...] | tuple[None, ...]:
    """Return the previous estimate's fields; None for each if there is none of this kind."""
    if not isinstance(previous, CompositeDistribution):
        return (None,) * width
    if len(previous.dists) != width:
        raise ValueError(f"the previous estimate of a Composite of {width} fields has {len(previous.dists)}")
    return previous.dists


class CompositeSampler(Sampler):
    """Draws tuples."""

    def __init__(self, dist: CompositeDistribution, seed: int | np.random.Generator | None = None) -> None:
        rng = np.random.default_rng(seed)
        self.samplers = [d.sampler(child) for d, child in zip(dist.dists, rng.spawn(len(dist.dists)), strict=True)]

    def sample(self, size: int | None = None) -> Any:
        draws = list(zip(*(s.sample(1 if size is None else size) for s in self.samplers), strict=True))
        return draws[0] if size is None else draws


class CompositeAccumulator(StatisticAccumulator):
    """One accumulator per field; the statistic is the tuple of theirs."""

    def __init__(self, accumulators: Sequence[StatisticAccumulator]) -> None:
        self.accumulators = tuple(accumulators)

    def seq_update(self, enc: CompositeEncoding, weights: np.ndarray, estimate: ProbabilityDistribution | None) -> None:
        fields = _fields(enc, len(self.accumulators))
        dists = _fields_of(estimate, len(self.accumulators))
        for accumulator, field, dist in zip(self.accumulators, fields, dists, strict=True):
            accumulator.seq_update(field, weights, dist)

    def seq_initialize(self, enc: CompositeEncoding, weights: np.ndarray, rng: RowDraws) -> None:
        fields = _fields(enc, len(self.accumulators))
        for j, (accumulator, field) in enumerate(zip(self.accumulators, fields, strict=True)):
            accumulator.seq_initialize(field, weights, rng.stream(j))

    def combine(self, suff_stat: tuple[Any, ...]) -> Self:
        for accumulator, value in zip(self.accumulators, suff_stat, strict=True):
            accumulator.combine(value)
        return self

    def value(self) -> tuple[Any, ...]:
        return tuple(a.value() for a in self.accumulators)

    def from_value(self, value: tuple[Any, ...]) -> Self:
        for accumulator, part in zip(self.accumulators, value, strict=True):
            accumulator.from_value(part)
        return self

    def key_merge(self, stats: dict[Hashable, Any]) -> None:
        for accumulator in self.accumulators:
            accumulator.key_merge(stats)

    def key_replace(self, stats: dict[Hashable, Any]) -> None:
        for accumulator in self.accumulators:
            accumulator.key_replace(stats)

    def acc_to_encoder(self) -> CompositeDataEncoder:
        return CompositeDataEncoder([a.acc_to_encoder() for a in self.accumulators])


class CompositeAccumulatorFactory(AccumulatorFactory):
    """Makes empty :class:`CompositeAccumulator`."""

    def __init__(self, factories: Sequence[AccumulatorFactory]) -> None:
        self.factories = tuple(factories)

    def make(self) -> CompositeAccumulator:
        return CompositeAccumulator([f.make() for f in self.factories])


class CompositeEstimator(ParameterEstimator):
    """Fit each field of a tuple by its own estimator.

    Raises:
        TypeError, ValueError: ``estimators`` is empty or holds something else than estimators.
    """

    def __init__(self, estimators: Sequence[ParameterEstimator], *, name: str | None = None) -> None:
        self.estimators: tuple[ParameterEstimator, ...] = require_estimators(estimators, "estimators")
        self.name = name

    def accumulator_factory(self) -> CompositeAccumulatorFactory:
        return CompositeAccumulatorFactory([e.accumulator_factory() for e in self.estimators])

    def estimate(
        self, nobs: float | None, suff_stat: tuple[Any, ...], previous: ProbabilityDistribution | None = None
    ) -> CompositeDistribution:
        before = _fields_of(previous, len(self.estimators))
        parts = zip(self.estimators, suff_stat, before, strict=True)
        return CompositeDistribution([m_step(e, nobs, value, prev) for e, value, prev in parts], name=self.name)
