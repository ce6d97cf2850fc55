"""Finite mixtures, fitted by EM.

The E-step runs over blocks of rows small enough for the cache: each block's component log-densities form a ``(k, n)``
array, become responsibilities in place, and go straight into the components' statistics. Nothing of size ``n * k`` is
ever held.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, Self

import numpy as np

from mixle.stats.component_stack import ComponentStack, stack_components
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
    impossible_rows,
    require_encoding,
    require_parts,
    row_count,
    take_rows,
)
from mixle.stats.leaf import LeafDistribution, require_label, resolve_prior
from mixle.stats.mixture_statistic import MixtureStatistic, tell_whole
from mixle.stats.payload import list_field, require_known_fields, restored_repairs
from mixle.stats.policy import MIN_MASS, Repair, within
from mixle.stats.row_draws import RowDraws
from mixle.stats.simplex import require_probabilities, weights_from_counts

__all__ = [
    "MixtureAccumulator",
    "MixtureAccumulatorFactory",
    "MixtureDataEncoder",
    "MixtureDistribution",
    "MixtureEstimator",
    "MixtureSampler",
]

# Blocks that stay in a common last-level cache, and are long enough that calls cost little beside arithmetic.
_BLOCK_BYTES = 1 << 21

# At initialization each component sees every row, with weights of its own from a Pareto distribution. With a tail this
# heavy a few rows have most of the weight, however many there are: components start well apart. With shares of equal
# weight they would start at nearly the same point, from where EM takes steps too small to see.
_EMPHASIS = 1.5


class MixtureEncoding(Encoding):
    """The rows once per distinct component encoder; components that encode alike share one."""

    def __init__(self, parts: tuple[Any, ...]) -> None:
        self.parts = parts

    def __len__(self) -> int:
        return row_count(self.parts[0])

    def rows(self, start: int, stop: int) -> MixtureEncoding:
        return MixtureEncoding(tuple(take_rows(p, start, stop) for p in self.parts))

    def map_leaves(self, change: Callable[[LeafEncoding], LeafEncoding]) -> MixtureEncoding:
        return MixtureEncoding(tuple(p.map_leaves(change) if isinstance(p, Encoding) else p for p in self.parts))

    @property
    def nbytes(self) -> int:
        return sum(p.nbytes for p in self.parts)

    def impossible_rows(self) -> np.ndarray | None:
        masks = [m for m in map(impossible_rows, self.parts) if m is not None]
        return np.logical_and.reduce(masks) if len(masks) == len(self.parts) else None


class MixtureDataEncoder(DataEncoder):
    """Encodes observations once for every distinct component encoder."""

    def __init__(self, encoders: Sequence[DataEncoder]) -> None:
        self.encoders: list[DataEncoder] = []
        #: for each component, which part of the encoding it reads
        self.part_of: list[int] = []
        for encoder in encoders:
            if encoder not in self.encoders:
                self.encoders.append(encoder)
            self.part_of.append(self.encoders.index(encoder))

    def seq_encode(self, xs: Sequence[Any]) -> MixtureEncoding:
        return MixtureEncoding(tuple(e.seq_encode(xs) for e in self.encoders))

    def require_encoding(self, enc: Any) -> None:
        """Check that an encoding has the parts that this encoder makes.

        Raises:
            TypeError, ValueError: it is no mixture's, or has another number of parts.
        """
        require_encoding(enc, MixtureEncoding, "Mixture")
        require_parts(enc.parts, len(self.encoders), "Mixture")

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, MixtureDataEncoder) and self.encoders == other.encoders and self.part_of == other.part_of
        )

    def __hash__(self) -> int:
        return hash((tuple(self.encoders), tuple(self.part_of)))


class MixtureDistribution(ProbabilityDistribution):
    """The mixture of ``components`` with weights ``w``.

    Raises:
        TypeError, ValueError: there is no component, one is no distribution, or ``w`` is not a probability vector with
            one entry per component.
    """

    def __init__(
        self, components: Sequence[ProbabilityDistribution], w: Sequence[float] | np.ndarray, *, name: str | None = None
    ) -> None:
        self.components: tuple[ProbabilityDistribution, ...] = require_distributions(components, "components")
        self.w = require_probabilities(w, "w", len(self.components))
        self.name = name
        with np.errstate(divide="ignore"):
            self.log_w = np.log(self.w)
        self._encoder = MixtureDataEncoder([c.dist_to_encoder() for c in self.components])
        self._own_repairs: tuple[Repair, ...] = ()

    @property
    def repairs(self) -> tuple[Repair, ...]:
        children = (r for j, c in enumerate(self.components) for r in within(f"components[{j}]", c.repairs))
        return (*self._own_repairs, *children)

    def seq_component_log_density(self, enc: MixtureEncoding) -> np.ndarray:
        """Return ``log w_j + log p_j(x_i)``, shape ``(k, n)``."""
        return self._stack(enc).score(self._encodings(enc))[0]

    def seq_log_density(self, enc: MixtureEncoding) -> np.ndarray:
        out = np.empty(len(enc))
        stack = self._stack(enc)
        for start, stop in row_blocks(len(enc), stack.row_bytes):
            scored = stack.likelihoods(self._encodings(enc.rows(start, stop)))
            with np.errstate(divide="ignore"):
                np.add(np.log(scored.total), scored.log_scale, out=out[start:stop])
        return out

    def seq_posterior(self, enc: MixtureEncoding) -> np.ndarray:
        """Return the probability of each component given each observation, shape ``(k, n)``.

        It is NaN where no component can produce the observation.
        """
        with np.errstate(invalid="ignore"):
            return np.asarray(np.exp(self.seq_component_log_density(enc) - self.seq_log_density(enc)))

    def _stack(self, enc: MixtureEncoding) -> ComponentStack:
        self._encoder.require_encoding(enc)
        encs = self._encodings(enc)
        for component, part in zip(self.components, encs, strict=True):
            # A stack may read leaves by other ways than their own.
            if isinstance(component, LeafDistribution):
                component.require_encoding(part)
        return stack_components(self.components, self.log_w, encs)

    def _encodings(self, enc: MixtureEncoding) -> list[Any]:
        return [enc.parts[part] for part in self._encoder.part_of]

    def sampler(self, seed: int | np.random.Generator | None = None) -> MixtureSampler:
        return MixtureSampler(self, seed)

    def estimator(self, pseudo_count: float | None = None) -> MixtureEstimator:
        prior = None if pseudo_count is None else self.w
        components = [c.estimator(pseudo_count) for c in self.components]
        return MixtureEstimator(components, pseudo_count=pseudo_count, suff_stat=prior, name=self.name)

    def dist_to_encoder(self) -> MixtureDataEncoder:
        return self._encoder

    def parameters_to_dict(self) -> dict[str, Any]:
        own = [[r.parameter, r.reason, r.where] for r in self._own_repairs]
        components = [c.to_dict() for c in self.components]
        return {"components": components, "w": self.w.tolist(), "name": self.name, "repairs": own}

    @classmethod
    def parameters_from_dict(cls, payload: dict[str, Any]) -> Self:
        require_known_fields(payload, cls, ("components", "w", "name", "repairs"))
        components = [ProbabilityDistribution.from_dict(c) for c in list_field(payload, "components", cls)]
        mixture = cls(components, payload["w"], name=payload.get("name"))
        mixture._own_repairs = restored_repairs(payload, cls)
        return mixture

    def __repr__(self) -> str:
        return f"MixtureDistribution({list(self.components)!r}, w={self.w.tolist()!r})"


def row_blocks(n: int, row_bytes: float) -> Iterator[tuple[int, int]]:
    """Yield the bounds of row blocks whose working set fits the cache; one empty block for no rows."""
    size = max(64, int(_BLOCK_BYTES / row_bytes))
    for start in range(0, max(n, 1), size):
        yield start, min(start + size, n)


class MixtureSampler(Sampler):
    """Draws a component, then an observation from it."""

    def __init__(self, dist: MixtureDistribution, seed: int | np.random.Generator | None = None) -> None:
        self.rng = np.random.default_rng(seed)
        self.w = dist.w
        children = self.rng.spawn(len(dist.components))
        self.samplers = [c.sampler(child) for c, child in zip(dist.components, children, strict=True)]

    def sample(self, size: int | None = None) -> Any:
        """Draw one observation, or a list of ``size`` of them."""
        chosen = self.rng.choice(len(self.w), size=1 if size is None else size, p=self.w)
        draws: list[Any] = [None] * len(chosen)
        for j, sampler in enumerate(self.samplers):
            at = np.flatnonzero(chosen == j)
            for i, x in zip(at, sampler.sample(len(at)) if len(at) else (), strict=True):
                draws[i] = x
        return draws[0] if size is None else draws


class MixtureAccumulator(StatisticAccumulator):
    """Gathers responsibilities and the components' statistics."""

    def __init__(self, accumulators: Sequence[StatisticAccumulator], keys: tuple[str | None, str | None]) -> None:
        self.accumulators = tuple(accumulators)
        self.weight_key, self.component_key = keys
        self.counts = np.zeros(len(self.accumulators))
        self.impossible = 0.0
        self._encoder = MixtureDataEncoder([a.acc_to_encoder() for a in accumulators])

    def seq_update(self, enc: MixtureEncoding, weights: np.ndarray, estimate: ProbabilityDistribution | None) -> None:
        if not isinstance(estimate, MixtureDistribution) or len(estimate.components) != len(self.accumulators):
            raise TypeError(
                f"updating a mixture of {len(self.accumulators)} components needs a previous estimate of that kind, "
                f"got {estimate!r:.60}; start with seq_initialize or optimize"
            )
        if estimate._encoder != self._encoder:
            raise TypeError("the components of the previous estimate are of other families than the estimators are")
        stack = estimate._stack(enc)
        for start, stop in row_blocks(len(enc), stack.row_bytes):
            joint, total, _, block = stack.likelihoods(estimate._encodings(enc.rows(start, stop)))
            lost = total == 0
            if lost.any():
                self.impossible += float(weights[start:stop][lost].sum())
                total[lost] = 1.0
            joint *= weights[start:stop] / total
            mass = stack.add(block, joint, self.accumulators)
            self.counts = self.counts + np.where(mass <= MIN_MASS, 0.0, mass)
        stack.finish(self.accumulators)

    def seq_initialize(self, enc: MixtureEncoding, weights: np.ndarray, rng: RowDraws) -> None:
        self._encoder.require_encoding(enc)
        parts = [enc.parts[part] for part in self._encoder.part_of]
        masks = [impossible_rows(part) for part in parts]
        able = np.array([np.ones(len(enc)) if mask is None else (~mask).astype(np.float64) for mask in masks])
        able_count = able.sum(axis=0)
        self.impossible += float(weights[able_count == 0].sum())
        self.counts = self.counts + (able * (weights / np.maximum(able_count, 1.0))).sum(axis=1)
        emphasis = 1.0 + (1.0 - rng.uniform(len(parts))) ** -_EMPHASIS
        for j, (accumulator, part) in enumerate(zip(self.accumulators, parts, strict=True)):
            accumulator.seq_initialize(part, weights * able[j] * emphasis[j], rng.stream(j))

    def combine(self, suff_stat: MixtureStatistic) -> Self:
        counts, components, impossible = suff_stat
        self.counts = self.counts + counts
        self.impossible += impossible
        for accumulator, value in zip(self.accumulators, components, strict=True):
            accumulator.combine(value)
        return self

    def value(self) -> MixtureStatistic:
        return MixtureStatistic(self.counts, tuple(a.value() for a in self.accumulators), float(self.impossible))

    def from_value(self, value: MixtureStatistic) -> Self:
        counts, components, impossible = value
        self.counts, self.impossible = np.array(counts), float(impossible)
        for accumulator, part in zip(self.accumulators, components, strict=True):
            accumulator.from_value(part)
        return self

    def key_merge(self, stats: dict[Hashable, Any]) -> None:
        if self.weight_key is not None:
            held = stats.get(self.weight_key)
            if held is not None and np.shape(held) != self.counts.shape:
                raise ValueError(f"keys={self.weight_key!r} is shared by weights of different lengths or other parts")
            stats[self.weight_key] = self.counts if held is None else held + self.counts
        if self.component_key is not None:
            for j, accumulator in enumerate(self.accumulators):
                accumulator.merge_tied(stats, (self.component_key, j))
        for accumulator in self.accumulators:
            accumulator.key_merge(stats)

    def key_replace(self, stats: dict[Hashable, Any]) -> None:
        if self.weight_key is not None:
            self.counts = np.array(stats[self.weight_key])
        if self.component_key is not None:
            for j, accumulator in enumerate(self.accumulators):
                accumulator.from_value(stats[self.component_key, j].value())
        for accumulator in self.accumulators:
            accumulator.key_replace(stats)

    def acc_to_encoder(self) -> MixtureDataEncoder:
        return self._encoder


class MixtureAccumulatorFactory(AccumulatorFactory):
    """Makes empty :class:`MixtureAccumulator`."""

    def __init__(self, factories: Sequence[AccumulatorFactory], keys: tuple[str | None, str | None]) -> None:
        self.factories, self.keys = tuple(factories), keys

    def make(self) -> MixtureAccumulator:
        return MixtureAccumulator([f.make() for f in self.factories], self.keys)


class MixtureEstimator(ParameterEstimator):
    """Fit a :class:`MixtureDistribution` by EM.

    Args:
        estimators: one per component.
        fixed_weights: ``(k,)`` weights to hold fixed instead of estimating them.
        pseudo_count: how many observations ``suff_stat`` counts for in the weights.
        suff_stat: ``(k,)`` weights to regularize toward; uniform if only ``pseudo_count`` is given.
        keys: ``(weights, components)``: mixtures with an equal key share their weights, or their components one by one.
            A key of a component's own part goes before that: components whose parts share one key are alike there.

    Raises:
        TypeError, ValueError: there is no component, one is no estimator, or the weights do not fit them.
    """

    def __init__(
        self,
        estimators: Sequence[ParameterEstimator],
        *,
        fixed_weights: Sequence[float] | np.ndarray | None = None,
        pseudo_count: float | None = None,
        suff_stat: Sequence[float] | np.ndarray | None = None,
        name: str | None = None,
        keys: tuple[str | None, str | None] = (None, None),
    ) -> None:
        self.estimators: tuple[ParameterEstimator, ...] = require_estimators(estimators, "estimators")
        k = len(self.estimators)
        self.fixed_weights = None if fixed_weights is None else require_probabilities(fixed_weights, "fixed_weights", k)
        if self.fixed_weights is not None and pseudo_count is not None:
            raise ValueError("pseudo_count has no effect on fixed_weights; give one of the two")
        self.prior = None if suff_stat is None else require_probabilities(suff_stat, "suff_stat", k)
        self.pseudo_count = resolve_prior(pseudo_count, self.prior)
        if not isinstance(keys, tuple) or len(keys) != 2:
            raise TypeError(f"keys={keys!r} must be a pair (weights, components) of names or None")
        self.name = require_label(name, "name")
        self.keys = (require_label(keys[0], "keys[0]"), require_label(keys[1], "keys[1]"))

    def accumulator_factory(self) -> MixtureAccumulatorFactory:
        return MixtureAccumulatorFactory([e.accumulator_factory() for e in self.estimators], self.keys)

    def estimate(
        self, nobs: float | None, suff_stat: MixtureStatistic, previous: ProbabilityDistribution | None = None
    ) -> MixtureDistribution:
        counts, statistics, impossible = suff_stat
        statistics = tell_whole(statistics)
        k = len(self.estimators)
        before = previous.components if isinstance(previous, MixtureDistribution) else (None,) * k
        parts = zip(self.estimators, counts, statistics, before, strict=True)
        components = [m_step(e, float(c), s, prev) for e, c, s, prev in parts]
        if self.fixed_weights is not None:
            w = self.fixed_weights
        else:
            held = previous.w if isinstance(previous, MixtureDistribution) and len(previous.w) == k else None
            w = weights_from_counts(counts, self.pseudo_count, self.prior, held)
        mixture = MixtureDistribution(components, w, name=self.name)
        if impossible > 0:
            reason = f"rows of total weight {impossible:g} are impossible under every component; left out"
            mixture._own_repairs = (Repair("w", reason),)
        return mixture
