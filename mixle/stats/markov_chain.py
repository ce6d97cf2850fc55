"""First-order Markov chains over categories."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Self

import numpy as np

from mixle.stats.categories import Category
from mixle.stats.chain_fit import ChainFit
from mixle.stats.chain_params import ChainParams
from mixle.stats.composite import CompositeEncoding
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
from mixle.stats.encoding import require_encoding, require_parts
from mixle.stats.frames import Vocabulary
from mixle.stats.leaf import require_label
from mixle.stats.null import NullDataEncoder, NullDistribution, NullEstimator
from mixle.stats.payload import require_known_fields, restored_repairs
from mixle.stats.policy import Repair, within
from mixle.stats.row_draws import RowDraws
from mixle.stats.statistics import LeafStatistic, add_leaf_statistics
from mixle.stats.transitions import ChainEncoding, chain_statistic, encode_chains, encode_segment
from mixle.utils.exact import require_finite_float, require_nonnegative_int

__all__ = [
    "MarkovChainAccumulator",
    "MarkovChainAccumulatorFactory",
    "MarkovChainDataEncoder",
    "MarkovChainDistribution",
    "MarkovChainEstimator",
    "MarkovChainSampler",
]


class MarkovChainDataEncoder(DataEncoder):
    """Encodes lists, tuples and 1-D arrays of categories; arrays of integers are the fast path.

    The fields of the encoding are the sequences' transitions and their lengths.
    """

    def __init__(self, len_encoder: DataEncoder) -> None:
        self.len_encoder = len_encoder

    def seq_encode(self, xs: Sequence[Any]) -> CompositeEncoding:
        chains = encode_chains(xs, "MarkovChain")
        return CompositeEncoding((chains, self.len_encoder.seq_encode([len(x) for x in xs])))

    def encode_stream(self, tokens: np.ndarray, previous: int | None) -> CompositeEncoding:
        """Return one row: a segment of one long sequence whose length is left open.

        Args:
            tokens: ``(n,)`` int64.
            previous: the token before the segment, whose transition into it is the segment's; None at the start of the
                sequence, where the segment has the first state.

        Raises:
            TypeError: the chain models the length of its sequences.
        """
        if not isinstance(self.len_encoder, NullDataEncoder):
            raise TypeError(
                "a Markov chain that models lengths cannot read segments of one stream; drop its len_estimator"
            )
        return CompositeEncoding((encode_segment(tokens, previous, "MarkovChain"), self.len_encoder.seq_encode([None])))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, MarkovChainDataEncoder) and self.len_encoder == other.len_encoder

    def __hash__(self) -> int:
        return hash((MarkovChainDataEncoder, self.len_encoder))


def _chains_and_lengths(enc: Any) -> tuple[ChainEncoding, Any]:
    require_encoding(enc, CompositeEncoding, "MarkovChain")
    require_parts(enc.fields, 2, "MarkovChain")
    chains, lengths = enc.fields
    require_encoding(chains, ChainEncoding, "MarkovChain")
    return chains, lengths


class MarkovChainDistribution(ProbabilityDistribution):
    """A first-order Markov chain over categories.

    Args:
        init_prob_map: the probability of each first state; other states are impossible there.
        transition_map: for each state, the probabilities of the next one; a state without a row cannot be left.
        len_dist: the distribution of the length; None leaves it open: sequences are then scored given their length.

    Raises:
        TypeError, ValueError: a map is no mapping from categories to probabilities that sum to one.
    """

    def __init__(
        self,
        init_prob_map: Mapping[Any, float],
        transition_map: Mapping[Any, Mapping[Any, float]],
        len_dist: ProbabilityDistribution | None = None,
        *,
        name: str | None = None,
        keys: str | None = None,
    ) -> None:
        self._settle(ChainParams.from_maps(init_prob_map, transition_map), len_dist, name, keys, ())

    def _settle(
        self,
        params: ChainParams,
        len_dist: ProbabilityDistribution | None,
        name: str | None,
        keys: str | None,
        repairs: tuple[Repair, ...],
    ) -> None:
        self.params = params
        self.name, self.keys = require_label(name, "name"), require_label(keys, "keys")
        (self.len_dist,) = require_distributions((NullDistribution() if len_dist is None else len_dist,), "(len_dist,)")
        self._own_repairs = repairs

    @property
    def init_prob_map(self) -> dict[Category, float]:
        """The probability of each first state."""
        return dict(zip(self.params.states.categories, self.params.initial.tolist(), strict=True))

    @property
    def transition_map(self) -> dict[Category, dict[Category, float]]:
        """The rows in full, the probabilities of the next state for each state that can be left.

        A row that was smoothed, or never observed, reaches every state: this dict then grows with the square of the
        number of states, which the chain itself does not.
        """
        states = self.params.states.categories
        rows: dict[Category, dict[Category, float]] = {}
        for a, targets, p in self.params.rows():
            row = dict(zip((states[b] for b in targets), p.tolist(), strict=True))
            if self.params.spread[a] > 0:
                rest = float(self.params.unlisted[a])
                row = {state: row.get(state, rest) for state in states}
            if row:
                rows[states[a]] = row
        return rows

    @property
    def repairs(self) -> tuple[Repair, ...]:
        return (*self._own_repairs, *within("len_dist", self.len_dist.repairs))

    def seq_log_density(self, enc: CompositeEncoding) -> np.ndarray:
        chains, lengths = _chains_and_lengths(enc)
        return np.asarray(self.params.log_density(chains) + self.len_dist.seq_log_density(lengths))

    def sampler(self, seed: int | np.random.Generator | None = None) -> MarkovChainSampler:
        return MarkovChainSampler(self, seed)

    def estimator(self, pseudo_count: float | None = None) -> MarkovChainEstimator:
        return MarkovChainEstimator(
            pseudo_count=pseudo_count,
            suff_stat=None if pseudo_count is None else self,
            len_estimator=self.len_dist.estimator(pseudo_count),
            name=self.name,
            keys=self.keys,
        )

    def dist_to_encoder(self) -> MarkovChainDataEncoder:
        return MarkovChainDataEncoder(self.len_dist.dist_to_encoder())

    def parameters_to_dict(self) -> dict[str, Any]:
        return {
            "chain": self.params.to_plain(),
            "len_dist": self.len_dist.to_dict(),
            "name": self.name,
            "keys": self.keys,
            "repairs": [[r.parameter, r.reason, r.where] for r in self._own_repairs],
        }

    @classmethod
    def parameters_from_dict(cls, payload: dict[str, Any]) -> Self:
        chain = cls.__new__(cls)
        require_known_fields(payload, cls, ("chain", "len_dist", "name", "keys", "repairs"))
        repairs = restored_repairs(payload, cls)
        len_dist = ProbabilityDistribution.from_dict(payload["len_dist"])
        params = ChainParams.from_plain(payload["chain"])
        chain._settle(params, len_dist, payload.get("name"), payload.get("keys"), repairs)
        return chain

    def __repr__(self) -> str:
        states = self.params.states.categories
        return (
            f"MarkovChainDistribution({len(states)} states, {len(self.params.p)} listed transitions, {self.len_dist!r})"
        )


class MarkovChainSampler(Sampler):
    """Draws lists of states; :meth:`sample` needs the chain to have a ``len_dist`` over non-negative integers."""

    def __init__(self, dist: MarkovChainDistribution, seed: int | np.random.Generator | None = None) -> None:
        self.rng = np.random.default_rng(seed)
        self.lengths = dist.len_dist.sampler(self.rng.spawn(1)[0])
        self.params = dist.params
        self._first = np.cumsum(self.params.initial)
        self._rows = {a: (targets, np.cumsum(p)) for a, targets, p in self.params.rows()}

    def sample(self, size: int | None = None) -> Any:
        """Draw one sequence, or a list of ``size`` of them."""
        lengths = self.lengths.sample(1 if size is None else size)
        draws = [self.sample_length(require_nonnegative_int(n, "a length drawn from len_dist")) for n in lengths]
        return draws[0] if size is None else draws

    def sample_length(self, length: int) -> list[Category]:
        """Draw one sequence of the given length.

        Raises:
            ValueError: the chain comes to a state that it cannot leave before the sequence is complete.
        """
        states = self.params.states.categories
        chain: list[int] = []
        for u in self.rng.random(require_nonnegative_int(length, "length")).tolist():
            chain.append(self._next(chain[-1], u) if chain else self._pick(self._first, u, length))
        return [states[a] for a in chain]

    def _pick(self, cumulative: np.ndarray, u: float, length: int) -> int:
        if not len(cumulative):
            raise ValueError(f"a chain without states has no sequence of length {length}")
        return min(bisect_right(cumulative, u * cumulative[-1]), len(cumulative) - 1)

    def _next(self, state: int, u: float) -> int:
        targets, cumulative = self._rows[state]
        mass = float(cumulative[-1]) if len(targets) else 0.0
        spread = float(self.params.spread[state])
        if not mass + spread > 0:
            raise ValueError(f"the chain cannot leave state {self.params.states.categories[state]!r}, so it ends there")
        u *= mass + spread
        if u < mass or not spread > 0:
            return int(targets[min(bisect_right(cumulative, u), len(targets) - 1)])
        rest = np.setdiff1d(np.arange(len(self.params.states)), targets, assume_unique=True)
        return int(rest[min(int((u - mass) / spread * len(rest)), len(rest) - 1)])


class MarkovChainStatistic(NamedTuple):
    """Counts of first states and transitions, and the statistic of the lengths."""

    chain: LeafStatistic
    lengths: Any


class MarkovChainAccumulator(StatisticAccumulator):
    """Counts first states and transitions; ``keys`` tie these, not the lengths."""

    def __init__(self, len_accumulator: StatisticAccumulator, keys: str | None = None) -> None:
        self.len_accumulator, self.keys = len_accumulator, keys
        self.chain = LeafStatistic(None, ())

    def seq_update(self, enc: CompositeEncoding, weights: np.ndarray, estimate: ProbabilityDistribution | None) -> None:
        chains, lengths = _chains_and_lengths(enc)
        self.chain = add_leaf_statistics(self.chain, chain_statistic(chains, weights))
        len_dist = estimate.len_dist if isinstance(estimate, MarkovChainDistribution) else None
        self.len_accumulator.seq_update(lengths, weights, len_dist)

    def seq_initialize(self, enc: CompositeEncoding, weights: np.ndarray, rng: RowDraws) -> None:
        chains, lengths = _chains_and_lengths(enc)
        self.chain = add_leaf_statistics(self.chain, chain_statistic(chains, weights))
        self.len_accumulator.seq_initialize(lengths, weights, rng)

    def combine(self, suff_stat: MarkovChainStatistic) -> Self:
        chain, lengths = suff_stat
        self.chain = add_leaf_statistics(self.chain, chain)
        self.len_accumulator.combine(lengths)
        return self

    def value(self) -> MarkovChainStatistic:
        return MarkovChainStatistic(self.chain, self.len_accumulator.value())

    def from_value(self, value: MarkovChainStatistic) -> Self:
        self.chain, lengths = value
        self.len_accumulator.from_value(lengths)
        return self

    def key_merge(self, stats: dict[Hashable, Any]) -> None:
        if self.keys is not None:
            self.merge_tied(stats, self.keys)
        self.len_accumulator.key_merge(stats)

    def key_replace(self, stats: dict[Hashable, Any]) -> None:
        if self.keys is not None:
            self.chain = stats[self.keys].chain
        self.len_accumulator.key_replace(stats)

    def acc_to_encoder(self) -> MarkovChainDataEncoder:
        return MarkovChainDataEncoder(self.len_accumulator.acc_to_encoder())


class MarkovChainAccumulatorFactory(AccumulatorFactory):
    """Makes empty :class:`MarkovChainAccumulator`."""

    def __init__(self, len_factory: AccumulatorFactory, keys: str | None = None) -> None:
        self.len_factory, self.keys = len_factory, keys

    def make(self) -> MarkovChainAccumulator:
        return MarkovChainAccumulator(self.len_factory.make(), self.keys)


class MarkovChainEstimator(ParameterEstimator):
    """Fit a :class:`MarkovChainDistribution` by counting.

    A state that was never left keeps its previous row; without any, it moves to every state evenly, and ``repairs``
    says so.

    Args:
        pseudo_count: pseudo-observations added to the first state and to every row of transitions, spread evenly over
            the states of the encoded data and ``levels``, or as ``suff_stat`` says.
        initial_pseudo_count, transition_pseudo_count: the same for one of the two, instead of ``pseudo_count``.
        suff_stat: the chain that the pseudo-observations follow.
        levels: states that exist whether or not they are observed.
        len_estimator: the estimator of the length; None leaves it open.
        keys: chains with equal keys share their counts, not those of the length.

    Raises:
        TypeError, ValueError: both kinds of pseudo-count are given, one is not finite and above zero, or ``suff_stat``
            is no chain, or comes without any.
    """

    def __init__(
        self,
        *,
        pseudo_count: float | None = None,
        initial_pseudo_count: float | None = None,
        transition_pseudo_count: float | None = None,
        suff_stat: MarkovChainDistribution | None = None,
        levels: Iterable[Any] | None = None,
        len_estimator: ParameterEstimator | None = None,
        name: str | None = None,
        keys: str | None = None,
    ) -> None:
        if pseudo_count is not None and not (initial_pseudo_count is None and transition_pseudo_count is None):
            raise ValueError(
                f"pseudo_count={pseudo_count} serves both parts; give either it, or initial_pseudo_count and "
                "transition_pseudo_count"
            )
        initial = _require_count(pseudo_count, initial_pseudo_count, "initial_pseudo_count")
        transition = _require_count(pseudo_count, transition_pseudo_count, "transition_pseudo_count")
        if suff_stat is not None and not isinstance(suff_stat, MarkovChainDistribution):
            raise TypeError(f"suff_stat={suff_stat!r:.60} must be a MarkovChainDistribution")
        if suff_stat is not None and initial is None and transition is None:
            raise ValueError("suff_stat has no effect without pseudo_count; give how many observations it counts for")
        prior = None if suff_stat is None else suff_stat.params
        self._fit = ChainFit(None if levels is None else Vocabulary(levels), initial, transition, prior)
        length = NullEstimator() if len_estimator is None else len_estimator
        (self.len_estimator,) = require_estimators((length,), "(len_estimator,)")
        self.name, self.keys = require_label(name, "name"), require_label(keys, "keys")

    def accumulator_factory(self) -> MarkovChainAccumulatorFactory:
        return MarkovChainAccumulatorFactory(self.len_estimator.accumulator_factory(), self.keys)

    def estimate(
        self, nobs: float | None, suff_stat: MarkovChainStatistic, previous: ProbabilityDistribution | None = None
    ) -> MarkovChainDistribution:
        before = previous if isinstance(previous, MarkovChainDistribution) else None
        params, repairs = self._fit.fit(suff_stat.chain, None if before is None else before.params)
        len_dist = m_step(self.len_estimator, nobs, suff_stat.lengths, None if before is None else before.len_dist)
        chain = MarkovChainDistribution.__new__(MarkovChainDistribution)
        chain._settle(params, len_dist, self.name, self.keys, repairs)
        return chain


def _require_count(both: float | None, one: float | None, name: str) -> float | None:
    value, given = (both, "pseudo_count") if one is None else (one, name)
    return None if value is None else require_finite_float(value, given, exclusive_minimum=0.0)
