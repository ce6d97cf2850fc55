"""Values that may be missing."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, Self

import numpy as np

from mixle.stats.categories import category_from_json, category_to_json
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
from mixle.stats.leaf import require_label
from mixle.stats.payload import require_known_fields
from mixle.stats.policy import Repair, within
from mixle.stats.row_draws import RowDraws
from mixle.stats.simplex import weights_from_counts
from mixle.utils.exact import require_exact_bool, require_finite_float

__all__ = [
    "OptionalAccumulator",
    "OptionalAccumulatorFactory",
    "OptionalDataEncoder",
    "OptionalDistribution",
    "OptionalEstimator",
    "OptionalSampler",
]


def _is_nan(value: Any) -> bool:
    return isinstance(value, (float, np.floating)) and bool(value != value)


def _is_missing(value: Any, missing_value: Any) -> bool:
    if value is missing_value:
        return True
    if _is_nan(missing_value):
        return _is_nan(value)
    # A number that equals a bool or a string that equals nothing else is still a value of its own type.
    return type(value) is type(missing_value) and bool(value == missing_value)


class OptionalEncoding(Encoding):
    """The values that are present, and which rows they belong to.

    Args:
        present: ``(n,)`` bool.
        values: the encoding of the present values, in row order.
    """

    def __init__(self, present: np.ndarray, values: Any) -> None:
        self.present, self.values = present, values
        self._before = np.concatenate([[0], np.cumsum(present)])

    def __len__(self) -> int:
        return len(self.present)

    def rows(self, start: int, stop: int) -> OptionalEncoding:
        stop = min(stop, len(self))
        values = take_rows(self.values, int(self._before[start]), int(self._before[stop]))
        return OptionalEncoding(self.present[start:stop], values)

    def map_leaves(self, change: Callable[[LeafEncoding], LeafEncoding]) -> OptionalEncoding:
        values = self.values.map_leaves(change) if isinstance(self.values, Encoding) else self.values
        return OptionalEncoding(self.present, values)

    @property
    def nbytes(self) -> int:
        return int(self.values.nbytes + 9 * len(self.present))

    def impossible_rows(self) -> np.ndarray | None:
        bad = impossible_rows(self.values)
        if bad is None:
            return None
        mask = np.zeros(len(self), dtype=bool)
        mask[self.present] = bad
        return mask


class OptionalDataEncoder(DataEncoder):
    """Encodes values of which some are ``missing_value``; NaN is a missing value like any other."""

    def __init__(self, encoder: DataEncoder, missing_value: Any = None) -> None:
        self.encoder, self.missing_value = encoder, missing_value

    def seq_encode(self, xs: Any) -> OptionalEncoding:
        kept: Any
        if isinstance(xs, np.ndarray) and xs.dtype.kind == "f" and xs.ndim == 1 and _is_nan(self.missing_value):
            present = ~np.isnan(xs)
            kept = xs[present]
        else:
            present = np.array([not _is_missing(x, self.missing_value) for x in xs], dtype=bool)
            kept = [x for x, there in zip(xs, present, strict=True) if there]
        try:
            return OptionalEncoding(present, self.encoder.seq_encode(kept))
        except (TypeError, ValueError):
            # Its index counts the present values only: say which observation instead.
            for i in np.flatnonzero(present).tolist():
                self._encode_one(i, xs[i])
            raise

    def _encode_one(self, i: int, x: Any) -> None:
        try:
            self.encoder.seq_encode([x])
        except (TypeError, ValueError) as error:
            raise type(error)(f"observation {i}, which is not missing: {error}") from error

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, OptionalDataEncoder)
            and self.encoder == other.encoder
            and _is_missing(other.missing_value, self.missing_value)
        )

    def __hash__(self) -> int:
        return hash((OptionalDataEncoder, self.encoder))


class OptionalDistribution(ProbabilityDistribution):
    """A value that is missing with probability ``p``, else drawn from ``dist``.

    Args:
        dist: the distribution of the values that are present.
        p: the probability that the value is missing; None leaves it open: a missing value then has log-density zero.
        missing_value: what stands for a missing value; NaN is allowed.

    Raises:
        TypeError, ValueError: ``p`` is not in ``[0, 1]``.
    """

    def __init__(
        self,
        dist: ProbabilityDistribution,
        p: float | None = None,
        *,
        missing_value: Any = None,
        name: str | None = None,
    ) -> None:
        (self.dist,) = require_distributions((dist,), "(dist,)")
        self.p = None if p is None else require_finite_float(p, "p", minimum=0.0, maximum=1.0)
        self.missing_value = missing_value
        self.name = name

    @property
    def repairs(self) -> tuple[Repair, ...]:
        return within("dist", self.dist.repairs)

    def seq_log_density(self, enc: OptionalEncoding) -> np.ndarray:
        require_encoding(enc, OptionalEncoding, "Optional")
        with np.errstate(divide="ignore"):
            absent, there = (0.0, 0.0) if self.p is None else (np.log(self.p), np.log1p(-self.p))
        out = np.full(len(enc), absent)
        out[enc.present] = self.dist.seq_log_density(enc.values) + there
        return out

    def sampler(self, seed: int | np.random.Generator | None = None) -> OptionalSampler:
        return OptionalSampler(self, seed)

    def estimator(self, pseudo_count: float | None = None) -> OptionalEstimator:
        modelled = self.p is not None
        return OptionalEstimator(
            self.dist.estimator(pseudo_count),
            missing_value=self.missing_value,
            est_prob=modelled,
            pseudo_count=pseudo_count if modelled else None,
            suff_stat=self.p if modelled and pseudo_count is not None else None,
            name=self.name,
        )

    def dist_to_encoder(self) -> OptionalDataEncoder:
        return OptionalDataEncoder(self.dist.dist_to_encoder(), self.missing_value)

    def parameters_to_dict(self) -> dict[str, Any]:
        missing = self.missing_value
        return {
            "dist": self.dist.to_dict(),
            "p": self.p,
            "missing_value": {"float": "nan"} if _is_nan(missing) else category_to_json(missing),
            "name": self.name,
        }

    @classmethod
    def parameters_from_dict(cls, payload: dict[str, Any]) -> Self:
        require_known_fields(payload, cls, ("dist", "p", "missing_value", "name"))
        plain = payload["missing_value"]
        missing = float("nan") if plain == {"float": "nan"} else category_from_json(plain)
        dist = ProbabilityDistribution.from_dict(payload["dist"])
        return cls(dist, payload["p"], missing_value=missing, name=payload.get("name"))

    def __repr__(self) -> str:
        return f"OptionalDistribution({self.dist!r}, p={self.p!r}, missing_value={self.missing_value!r})"


class OptionalSampler(Sampler):
    """Draws values, and the missing value with probability ``p`` (never, if ``p`` is left open)."""

    def __init__(self, dist: OptionalDistribution, seed: int | np.random.Generator | None = None) -> None:
        self.dist, self.rng = dist, np.random.default_rng(seed)
        self.values = dist.dist.sampler(self.rng.spawn(1)[0])

    def sample(self, size: int | None = None) -> Any:
        """Draw one value, or a list of ``size`` of them."""
        present = self.rng.random(1 if size is None else size) >= (self.dist.p or 0.0)
        values = iter(self.values.sample(int(present.sum())) if present.any() else ())
        draws = [next(values) if there else self.dist.missing_value for there in present]
        return draws[0] if size is None else draws


class OptionalStatistic(NamedTuple):
    """Weights of missing and present rows, ``(2,)``, and the statistic of the values that are present."""

    counts: np.ndarray
    values: Any


class OptionalAccumulator(StatisticAccumulator):
    """Gathers how many values are missing, and the statistic of the others."""

    def __init__(self, accumulator: StatisticAccumulator, missing_value: Any, keys: str | None) -> None:
        self.accumulator, self.missing_value, self.keys = accumulator, missing_value, keys
        self.counts = np.zeros(2)

    def seq_update(self, enc: OptionalEncoding, weights: np.ndarray, estimate: ProbabilityDistribution | None) -> None:
        kept = self._count(enc, weights)
        dist = estimate.dist if isinstance(estimate, OptionalDistribution) else None
        self.accumulator.seq_update(enc.values, kept, dist)

    def seq_initialize(self, enc: OptionalEncoding, weights: np.ndarray, rng: RowDraws) -> None:
        kept = self._count(enc, weights)
        self.accumulator.seq_initialize(enc.values, kept, rng.select(enc.present))

    def _count(self, enc: OptionalEncoding, weights: np.ndarray) -> np.ndarray:
        require_encoding(enc, OptionalEncoding, "Optional")
        kept = weights[enc.present]
        self.counts += weights[~enc.present].sum(), kept.sum()
        return kept

    def combine(self, suff_stat: OptionalStatistic) -> Self:
        counts, values = suff_stat
        self.counts = self.counts + counts
        self.accumulator.combine(values)
        return self

    def value(self) -> OptionalStatistic:
        return OptionalStatistic(self.counts.copy(), self.accumulator.value())

    def from_value(self, value: OptionalStatistic) -> Self:
        counts, values = value
        self.counts = np.array(counts)
        self.accumulator.from_value(values)
        return self

    def key_merge(self, stats: dict[Hashable, Any]) -> None:
        if self.keys is not None:
            self.merge_tied(stats, self.keys)
        self.accumulator.key_merge(stats)

    def key_replace(self, stats: dict[Hashable, Any]) -> None:
        if self.keys is not None:
            self.from_value(stats[self.keys].value())
        self.accumulator.key_replace(stats)

    def acc_to_encoder(self) -> OptionalDataEncoder:
        return OptionalDataEncoder(self.accumulator.acc_to_encoder(), self.missing_value)


class OptionalAccumulatorFactory(AccumulatorFactory):
    """Makes empty :class:`OptionalAccumulator`."""

    def __init__(self, factory: AccumulatorFactory, missing_value: Any, keys: str | None) -> None:
        self.factory, self.missing_value, self.keys = factory, missing_value, keys

    def make(self) -> OptionalAccumulator:
        return OptionalAccumulator(self.factory.make(), self.missing_value, self.keys)


class OptionalEstimator(ParameterEstimator):
    """Fit an :class:`OptionalDistribution`.

    Args:
        estimator: of the values that are present.
        missing_value: what stands for a missing value; NaN is allowed.
        est_prob: estimate the probability of a missing value; False leaves it open.
        pseudo_count: pseudo-observations added to that probability's counts.
        suff_stat: the share of them that is missing; one half if not given.
        keys: parts with equal keys share one statistic.

    Raises:
        ValueError: ``pseudo_count`` without ``est_prob``, or ``suff_stat`` without ``pseudo_count``.
    """

    def __init__(
        self,
        estimator: ParameterEstimator,
        *,
        missing_value: Any = None,
        est_prob: bool = True,
        pseudo_count: float | None = None,
        suff_stat: float | None = None,
        name: str | None = None,
        keys: str | None = None,
    ) -> None:
        (self.estimator,) = require_estimators((estimator,), "(estimator,)")
        self.missing_value = missing_value
        self.est_prob = require_exact_bool(est_prob, "est_prob")
        if pseudo_count is not None:
            pseudo_count = require_finite_float(pseudo_count, "pseudo_count", exclusive_minimum=0.0)
            if not self.est_prob:
                raise ValueError(
                    f"pseudo_count={pseudo_count} has no effect with est_prob=False; leave one of them out"
                )
        if suff_stat is not None:
            suff_stat = require_finite_float(suff_stat, "suff_stat", minimum=0.0, maximum=1.0)
            if pseudo_count is None:
                raise ValueError(f"suff_stat={suff_stat} has no effect without pseudo_count")
        self.pseudo_count, self.prior = pseudo_count, suff_stat
        self.name, self.keys = require_label(name, "name"), require_label(keys, "keys")

    def accumulator_factory(self) -> OptionalAccumulatorFactory:
        return OptionalAccumulatorFactory(self.estimator.accumulator_factory(), self.missing_value, self.keys)

    def estimate(
        self, nobs: float | None, suff_stat: OptionalStatistic, previous: ProbabilityDistribution | None = None
    ) -> OptionalDistribution:
        counts, values = suff_stat
        before = previous if isinstance(previous, OptionalDistribution) else None
        dist = m_step(self.estimator, float(counts[1]), values, None if before is None else before.dist)
        p = self._missing_probability(counts, before) if self.est_prob else None
        return OptionalDistribution(dist, p, missing_value=self.missing_value, name=self.name)

    def _missing_probability(self, counts: np.ndarray, before: OptionalDistribution | None) -> float:
        if before is not None and before.p is not None and self.pseudo_count is None and not counts.sum() > 0:
            return before.p
        prior = None if self.prior is None else np.array([self.prior, 1.0 - self.prior])
        return float(weights_from_counts(counts, self.pseudo_count, prior)[0])
