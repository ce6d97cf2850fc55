"""First-order Markov chains over categories.

The observation is a sequence. Its first state and its transitions are encoded against vocabularies of the states and of
the pairs that occur, so memory grows with the pairs observed, not with the square of the states.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, NamedTuple, Self

import numpy as np

from mixle.stats.categories import Category, category_from_json, category_to_json, ordered_categories, plain_category
from mixle.stats.contract import (
    AccumulatorFactory,
    DataEncoder,
    ParameterEstimator,
    ProbabilityDistribution,
    Sampler,
    StatisticAccumulator,
    m_step,
)
from mixle.stats.encoding import Encoding, LeafEncoding, impossible_rows, take_rows
from mixle.stats.frames import Frame, Vocabulary
from mixle.stats.null import NullDistribution, NullEstimator
from mixle.stats.policy import Repair, within
from mixle.stats.row_draws import RowDraws
from mixle.stats.simplex import require_probabilities, weights_from_counts
from mixle.stats.statistics import LeafStatistic, add_leaf_statistics
from mixle.utils.exact import require_finite_float, require_nonnegative_int

__all__ = [
    "MarkovChainAccumulator",
    "MarkovChainAccumulatorFactory",
    "MarkovChainDataEncoder",
    "MarkovChainDistribution",
    "MarkovChainEstimator",
    "MarkovChainSampler",
]

Row = dict[Category, float]


class MarkovChainEncoding(Encoding):
    """Sequences as first states and transitions.

    Args:
        initial: the first states of the sequences that have one, against a vocabulary of states.
        initial_bounds: ``(n + 1,)`` int64; sequence ``i`` owns first states ``[bounds[i], bounds[i + 1])``.
        transitions: all transitions, against a vocabulary of pairs.
        transition_bounds: ``(n + 1,)`` int64, likewise.
        lengths: the encoded lengths.
    """

    def __init__(
        self,
        initial: LeafEncoding,
        initial_bounds: np.ndarray,
        transitions: LeafEncoding,
        transition_bounds: np.ndarray,
        lengths: Any,
    ) -> None:
        self.initial, self.initial_bounds = initial, initial_bounds
        self.transitions, self.transition_bounds = transitions, transition_bounds
        self.lengths = lengths

    def __len__(self) -> int:
        return len(self.initial_bounds) - 1

    def rows(self, start: int, stop: int) -> MarkovChainEncoding:
        first, moves = self.initial_bounds[start : stop + 1], self.transition_bounds[start : stop + 1]
        return MarkovChainEncoding(
            self.initial.rows(int(first[0]), int(first[-1])),
            first - first[0],
            self.transitions.rows(int(moves[0]), int(moves[-1])),
            moves - moves[0],
            take_rows(self.lengths, start, stop),
        )

    def map_leaves(self, change: Callable[[LeafEncoding], LeafEncoding]) -> MarkovChainEncoding:
        return MarkovChainEncoding(
            change(self.initial),
            self.initial_bounds,
            change(self.transitions),
            self.transition_bounds,
            self.lengths.map_leaves(change) if isinstance(self.lengths, Encoding) else self.lengths,
        )

    @property
    def nbytes(self) -> int:
        return int(self.initial.nbytes + self.transitions.nbytes + self.lengths.nbytes + 16 * len(self.initial_bounds))

    def impossible_rows(self) -> np.ndarray | None:
        return impossible_rows(self.lengths)


def _owners(bounds: np.ndarray) -> np.ndarray:
    return np.repeat(np.arange(len(bounds) - 1), np.diff(bounds))


class MarkovChainDataEncoder(DataEncoder):
    """Encodes sequences of categories: lists, tuples, or 1-D arrays of integers, which are the fast path."""

    def __init__(self, len_encoder: DataEncoder) -> None:
        self.len_encoder = len_encoder

    def seq_encode(self, xs: Sequence[Any]) -> MarkovChainEncoding:
        for i, x in enumerate(xs):
            if not isinstance(x, (list, tuple, np.ndarray)) or (isinstance(x, np.ndarray) and x.ndim != 1):
                raise TypeError(
                    f"a MarkovChain takes sequences (list, tuple or 1-D array), got {type(x).__name__} ({x!r:.60}) "
                    f"at index {i}"
                )
        lengths = np.array([len(x) for x in xs], dtype=np.int64)
        states, codes = _codes(xs)
        return self._encode(
            states, codes, lengths, np.zeros(len(xs), dtype=bool), self.len_encoder.seq_encode(lengths.tolist())
        )

    def encode_stream(self, tokens: np.ndarray, previous: int | None) -> MarkovChainEncoding:
        """Encode one segment of a single long sequence.

        Args:
            tokens: ``(n,)`` integers.
            previous: the token before the segment, whose transition into it is the segment's; None at the start of the
                stream, where the segment has the first state.

        Returns:
            An encoding of one row. The stream's length is not modelled: its encoding here is that of no length.

        Raises:
            TypeError: the chain models the length of its sequences.
        """
        if self.len_encoder != NullDistribution().dist_to_encoder():
            raise TypeError("a Markov chain with a length distribution cannot be fitted to segments of one stream")
        segment = np.asarray(tokens, dtype=np.int64)
        whole = segment if previous is None else np.concatenate([np.array([previous], dtype=np.int64), segment])
        states, codes = _codes([whole])
        continued = np.array([previous is not None])
        return self._encode(states, codes, np.array([len(whole)]), continued, self.len_encoder.seq_encode([None]))

    def _encode(
        self, states: Vocabulary, codes: np.ndarray, lengths: np.ndarray, continued: np.ndarray, length_enc: Any
    ) -> MarkovChainEncoding:
        ends = np.cumsum(lengths)
        starts = ends - lengths
        has_first = (lengths > 0) & ~continued
        first = codes[starts[has_first]]
        moves = np.maximum(lengths - 1, 0)
        leaves = np.ones(len(codes), dtype=bool)
        leaves[ends[lengths > 0] - 1] = False
        source = np.flatnonzero(leaves)
        size = max(len(states), 1)
        keys, pair_codes = _factorize(codes[source] * size + codes[source + 1], size * size)
        pairs = [(states.categories[key // size], states.categories[key % size]) for key in keys.tolist()]
        vocabulary = Vocabulary(pairs)
        place = np.array([vocabulary.index[pair] for pair in pairs], dtype=np.int64)
        return MarkovChainEncoding(
            LeafEncoding((first,), states),
            np.concatenate([[0], np.cumsum(has_first)]),
            LeafEncoding((place[pair_codes] if len(pairs) else pair_codes,), vocabulary),
            np.concatenate([[0], np.cumsum(moves)]),
            length_enc,
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, MarkovChainDataEncoder) and self.len_encoder == other.len_encoder

    def __hash__(self) -> int:
        return hash((MarkovChainDataEncoder, self.len_encoder))


def _factorize(keys: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the distinct keys in ``[0, size)``, ascending, and each key's place among them."""
    if size > max(1 << 16, 4 * len(keys)):
        return np.unique(keys, return_inverse=True)
    present = np.flatnonzero(np.bincount(keys, minlength=size))
    place = np.zeros(size, dtype=np.int64)
    place[present] = np.arange(len(present))
    return present, place[keys]


def _codes(xs: Sequence[Any]) -> tuple[Vocabulary, np.ndarray]:
    """Return the vocabulary of all states, and the states of all sequences end to end as codes."""
    if len(xs) and all(isinstance(x, np.ndarray) and x.dtype.kind in "iu" for x in xs):
        values = np.concatenate(xs).astype(np.int64)
        low = int(values.min()) if len(values) else 0
        span = int(values.max()) - low + 1 if len(values) else 1
        distinct, codes = _factorize(values - low, span)
        return Vocabulary((distinct + low).tolist()), codes
    flat: list[Category] = []
    for i, x in enumerate(xs):
        for j, value in enumerate(x.tolist() if isinstance(x, np.ndarray) else x):
            try:
                flat.append(plain_category(value))
            except (TypeError, ValueError) as error:
                raise type(error)(f"sequence {i}, position {j}: {error}") from error
    states = Vocabulary(flat)
    return states, np.array([states.index[value] for value in flat], dtype=np.int64)


def _require_row(row: Any, name: str) -> Row:
    if not isinstance(row, dict):
        raise TypeError(f"{name}={row!r:.80} must be a dict from states to probabilities")
    if not row:
        return {}
    p = require_probabilities(list(row.values()), f"{name} values")
    return dict(zip(map(plain_category, row), p.tolist(), strict=True))


class MarkovChainDistribution(ProbabilityDistribution):
    """A first-order Markov chain.

    Args:
        init_prob_map: probability of each first state; a state that is missing has probability zero.
        transition_map: for each state, the probabilities of the next; a state without a row cannot be left.
        len_dist: distribution of the length; None leaves it open: sequences are then scored given their length.

    Raises:
        TypeError, ValueError: a map is no dict, or a row no probability vector.
    """

    def __init__(
        self,
        init_prob_map: dict[Any, float],
        transition_map: dict[Any, dict[Any, float]],
        *,
        len_dist: ProbabilityDistribution | None = None,
        name: str | None = None,
    ) -> None:
        self.init_prob_map = _require_row(init_prob_map, "init_prob_map")
        if not isinstance(transition_map, dict):
            raise TypeError(f"transition_map={transition_map!r:.80} must be a dict from states to rows")
        rows = ((plain_category(a), _require_row(row, f"transition_map[{a!r}]")) for a, row in transition_map.items())
        self.transition_map: dict[Category, Row] = dict(rows)
        self.len_dist = NullDistribution() if len_dist is None else len_dist
        self.name = name
        self._own_repairs: tuple[Repair, ...] = ()
        self._tables: dict[int, tuple[Frame, np.ndarray]] = {}

    @property
    def repairs(self) -> tuple[Repair, ...]:
        return (*self._own_repairs, *within("len_dist", self.len_dist.repairs))

    def seq_log_density(self, enc: MarkovChainEncoding) -> np.ndarray:
        n = len(enc)
        first = self._scored(enc.initial, 0, lambda state: self.init_prob_map.get(state, 0.0))
        move = self._scored(enc.transitions, 1, lambda pair: self.transition_map.get(pair[0], {}).get(pair[1], 0.0))
        total = np.zeros(n)  # of no rows, bincount gives integers even with weights
        total += np.bincount(_owners(enc.initial_bounds), weights=first, minlength=n)
        total += np.bincount(_owners(enc.transition_bounds), weights=move, minlength=n)
        return np.asarray(total + self.len_dist.seq_log_density(enc.lengths))

    def _scored(self, leaf: LeafEncoding, part: int, probability: Callable[[Any], float]) -> np.ndarray:
        held = self._tables.get(part)
        if held is None or held[0] is not leaf.frame:
            assert isinstance(leaf.frame, Vocabulary)
            with np.errstate(divide="ignore"):
                table = np.log(np.array([probability(c) for c in leaf.frame.categories], dtype=np.float64))
            held = self._tables[part] = (leaf.frame, table)
        return np.asarray(held[1][leaf.columns[0]])

    def sampler(self, seed: int | np.random.Generator | None = None) -> MarkovChainSampler:
        return MarkovChainSampler(self, seed)

    def estimator(self, pseudo_count: float | None = None) -> MarkovChainEstimator:
        return MarkovChainEstimator(
            pseudo_count=pseudo_count,
            suff_stat=None if pseudo_count is None else self,
            len_estimator=self.len_dist.estimator(pseudo_count),
            name=self.name,
        )

    def dist_to_encoder(self) -> MarkovChainDataEncoder:
        return MarkovChainDataEncoder(self.len_dist.dist_to_encoder())

    def parameters_to_dict(self) -> dict[str, Any]:
        return {
            "init_prob_map": _row_to_json(self.init_prob_map),
            "transition_map": [[category_to_json(a), _row_to_json(row)] for a, row in self.transition_map.items()],
            "len_dist": self.len_dist.to_dict(),
            "name": self.name,
            "repairs": [[r.parameter, r.reason, r.where] for r in self._own_repairs],
        }

    @classmethod
    def parameters_from_dict(cls, payload: dict[str, Any]) -> Self:
        chain = cls(
            _row_from_json(payload["init_prob_map"]),
            {category_from_json(a): _row_from_json(row) for a, row in payload["transition_map"]},
            len_dist=ProbabilityDistribution.from_dict(payload["len_dist"]),
            name=payload.get("name"),
        )
        chain._own_repairs = tuple(Repair(*map(str, r)) for r in payload.get("repairs", ()))
        return chain

    def __repr__(self) -> str:
        return f"MarkovChainDistribution({self.init_prob_map!r}, {self.transition_map!r}, len_dist={self.len_dist!r})"


def _row_to_json(row: Row) -> list[Any]:
    return [[category_to_json(c), p] for c, p in row.items()]


def _row_from_json(plain: list[Any]) -> Row:
    return {category_from_json(c): p for c, p in plain}


class MarkovChainSampler(Sampler):
    """Draws lists of states; the chain needs a length distribution, or the caller gives the length."""

    def __init__(self, dist: MarkovChainDistribution, seed: int | np.random.Generator | None = None) -> None:
        self.dist, self.rng = dist, np.random.default_rng(seed)
        self.lengths = dist.len_dist.sampler(self.rng.spawn(1)[0])
        self._rows = {a: (list(row), np.array(list(row.values()))) for a, row in dist.transition_map.items() if row}
        self._first = (list(dist.init_prob_map), np.array(list(dist.init_prob_map.values())))

    def sample(self, size: int | None = None) -> Any:
        lengths = self.lengths.sample(1 if size is None else size)
        draws = [self.sample_length(int(length)) for length in lengths]
        return draws[0] if size is None else draws

    def sample_length(self, length: int) -> list[Category]:
        """Draw one sequence of the given length.

        Raises:
            ValueError: the chain reaches a state that it cannot leave before the sequence is complete.
        """
        chain: list[Category] = []
        for _ in range(require_nonnegative_int(length, "length")):
            options = self._rows.get(chain[-1]) if chain else self._first
            if not options or not options[0]:
                where = f"state {chain[-1]!r}" if chain else "the start"
                raise ValueError(f"the chain cannot go on from {where}, {len(chain)} states into a length of {length}")
            chain.append(options[0][self.rng.choice(len(options[0]), p=options[1])])
        return chain


class MarkovChainStatistic(NamedTuple):
    """Counts of first states and of transitions, and the statistic of the lengths."""

    initial: LeafStatistic
    transitions: LeafStatistic
    lengths: Any


class MarkovChainAccumulator(StatisticAccumulator):
    """Counts first states and transitions."""

    def __init__(self, len_accumulator: StatisticAccumulator, keys: str | None = None) -> None:
        self.len_accumulator, self.keys = len_accumulator, keys
        self.initial = LeafStatistic(None, ())
        self.transitions = LeafStatistic(None, ())

    def seq_update(
        self, enc: MarkovChainEncoding, weights: np.ndarray, estimate: ProbabilityDistribution | None
    ) -> None:
        self._count(enc, weights)
        len_dist = estimate.len_dist if isinstance(estimate, MarkovChainDistribution) else None
        self.len_accumulator.seq_update(enc.lengths, weights, len_dist)

    def seq_initialize(self, enc: MarkovChainEncoding, weights: np.ndarray, rng: RowDraws) -> None:
        self._count(enc, weights)
        self.len_accumulator.seq_initialize(enc.lengths, weights, rng)

    def _count(self, enc: MarkovChainEncoding, weights: np.ndarray) -> None:
        self.initial = add_leaf_statistics(self.initial, _counts(enc.initial, enc.initial_bounds, weights))
        self.transitions = add_leaf_statistics(
            self.transitions, _counts(enc.transitions, enc.transition_bounds, weights)
        )

    def combine(self, suff_stat: MarkovChainStatistic) -> Self:
        initial, transitions, lengths = suff_stat
        self.initial = add_leaf_statistics(self.initial, initial)
        self.transitions = add_leaf_statistics(self.transitions, transitions)
        self.len_accumulator.combine(lengths)
        return self

    def value(self) -> MarkovChainStatistic:
        return MarkovChainStatistic(self.initial, self.transitions, self.len_accumulator.value())

    def from_value(self, value: MarkovChainStatistic) -> Self:
        self.initial, self.transitions, lengths = value
        self.len_accumulator.from_value(lengths)
        return self

    def key_merge(self, stats: dict[Hashable, Any]) -> None:
        if self.keys is not None:
            self.merge_tied(stats, self.keys)
        self.len_accumulator.key_merge(stats)

    def key_replace(self, stats: dict[Hashable, Any]) -> None:
        if self.keys is not None:
            self.from_value(stats[self.keys].value())
        self.len_accumulator.key_replace(stats)

    def acc_to_encoder(self) -> MarkovChainDataEncoder:
        return MarkovChainDataEncoder(self.len_accumulator.acc_to_encoder())


def _counts(leaf: LeafEncoding, bounds: np.ndarray, weights: np.ndarray) -> LeafStatistic:
    assert isinstance(leaf.frame, Vocabulary)
    counts = np.bincount(leaf.columns[0], weights=np.repeat(weights, np.diff(bounds)), minlength=len(leaf.frame))
    return LeafStatistic(leaf.frame, (np.asarray(counts, dtype=np.float64),))


class MarkovChainAccumulatorFactory(AccumulatorFactory):
    """Makes empty :class:`MarkovChainAccumulator`."""

    def __init__(self, len_factory: AccumulatorFactory, keys: str | None = None) -> None:
        self.len_factory, self.keys = len_factory, keys

    def make(self) -> MarkovChainAccumulator:
        return MarkovChainAccumulator(self.len_factory.make(), self.keys)


class MarkovChainEstimator(ParameterEstimator):
    """Fit a :class:`MarkovChainDistribution` by counting.

    A row of transitions that was never observed keeps its previous values; without any, it is uniform over all states,
    and the fitted chain's ``repairs`` names it.

    Args:
        pseudo_count: pseudo-observations added to the first state and to every row of transitions, each spread evenly
            over all states, or as ``suff_stat`` says.
        initial_pseudo_count, transition_pseudo_count: the same for one of the two, instead of ``pseudo_count``.
        suff_stat: a chain whose probabilities the pseudo-observations follow.
        levels: states that exist whether or not they are observed.
        len_estimator: estimator of the length; None leaves it open.
        keys: chains with equal keys share one statistic.

    Raises:
        ValueError: both kinds of pseudo-count are given, or one is not above zero, or ``suff_stat`` comes without any.
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
        initial = pseudo_count if initial_pseudo_count is None else initial_pseudo_count
        transition = pseudo_count if transition_pseudo_count is None else transition_pseudo_count
        self.initial_pseudo_count = _require_count(initial, "initial_pseudo_count")
        self.transition_pseudo_count = _require_count(transition, "transition_pseudo_count")
        if suff_stat is not None and initial is None and transition is None:
            raise ValueError("suff_stat has no effect without pseudo_count; give how many observations it counts for")
        self.prior = suff_stat
        self.levels = () if levels is None else ordered_categories(levels)
        self.len_estimator = NullEstimator() if len_estimator is None else len_estimator
        self.name, self.keys = name, keys

    def accumulator_factory(self) -> MarkovChainAccumulatorFactory:
        return MarkovChainAccumulatorFactory(self.len_estimator.accumulator_factory(), self.keys)

    def estimate(
        self, nobs: float | None, suff_stat: MarkovChainStatistic, previous: ProbabilityDistribution | None = None
    ) -> MarkovChainDistribution:
        before = previous if isinstance(previous, MarkovChainDistribution) else None
        first = _as_dict(suff_stat.initial)
        moves: dict[Category, Row] = {}
        for pair, count in _as_dict(suff_stat.transitions).items():
            assert isinstance(pair, tuple)
            moves.setdefault(pair[0], {})[pair[1]] = count
        states = self._states(first, moves, before)
        initial, missing = self._row(
            first, states, self.initial_pseudo_count, _initial_of(self.prior), _initial_of(before)
        )
        repairs = [Repair("init_prob_map", "no sequence has a first state; " + missing)] if missing else []
        transitions: dict[Category, Row] = {}
        bare: dict[str, list[Category]] = {}
        for state in states:
            prior = None if self.prior is None else self.prior.transition_map.get(state, {})
            held = None if before is None else before.transition_map.get(state)
            row = moves.get(state, {})
            transitions[state], missing = self._row(row, states, self.transition_pseudo_count, prior, held)
            if missing:
                bare.setdefault(missing, []).append(state)
        for what, unseen in bare.items():
            shown = ", ".join(repr(s) for s in unseen[:5]) + (", ..." if len(unseen) > 5 else "")
            repairs.append(Repair("transition_map", f"{len(unseen)} rows never observed ({shown}); {what}"))
        len_dist = m_step(self.len_estimator, nobs, suff_stat.lengths, None if before is None else before.len_dist)
        chain = MarkovChainDistribution(initial, transitions, len_dist=len_dist, name=self.name)
        chain._own_repairs = tuple(repairs)
        return chain

    def _states(
        self, first: Row, moves: dict[Category, Row], before: MarkovChainDistribution | None
    ) -> tuple[Category, ...]:
        seen: list[Category] = [*first, *moves, *(b for row in moves.values() for b in row), *self.levels]
        for chain in (self.prior, before):
            if chain is not None:
                seen += [*chain.init_prob_map, *chain.transition_map]
                seen += [b for row in chain.transition_map.values() for b in row]
        return ordered_categories(seen)

    @staticmethod
    def _row(
        counts: Row, states: tuple[Category, ...], pseudo_count: float | None, prior: Row | None, held: Row | None
    ) -> tuple[Row, str]:
        """Return the estimated row, and what was done if there was nothing to estimate it from."""
        total = sum(counts.values())
        if not total > 0 and pseudo_count is None:
            if held is not None:
                return held, "kept the previous values"
            return dict.fromkeys(states, 1.0 / len(states)) if states else {}, "made uniform"
        if pseudo_count is None:
            seen = {state: count for state, count in counts.items() if count > 0}
            return dict(
                zip(seen, weights_from_counts(np.array(list(seen.values())), None, None).tolist(), strict=True)
            ), ""
        full = np.array([counts.get(state, 0.0) for state in states])
        base = None if not prior else np.array([prior.get(state, 0.0) for state in states])
        return dict(zip(states, weights_from_counts(full, pseudo_count, base).tolist(), strict=True)), ""


def _as_dict(statistic: LeafStatistic) -> Row:
    if not isinstance(statistic.frame, Vocabulary) or not statistic.sums:
        return {}
    return dict(zip(statistic.frame.categories, statistic.sums[0].tolist(), strict=True))


def _initial_of(chain: MarkovChainDistribution | None) -> Row | None:
    return None if chain is None else chain.init_prob_map


def _require_count(value: float | None, name: str) -> float | None:
    return None if value is None else require_finite_float(value, name, exclusive_minimum=0.0)
