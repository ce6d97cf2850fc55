"""Sequences of categories as first states and counted transitions.

Only transitions that occur take memory: a frame lists them, and a sequence is encoded as how often it has each. What a
chain's likelihood and its statistic need of a sequence is just that, however long it is.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mixle.stats.category_codes import category_codes
from mixle.stats.encoding import LeafEncoding
from mixle.stats.frames import Frame, Sums, Vocabulary, join_frames
from mixle.stats.numeric_columns import concatenated
from mixle.stats.statistics import LeafStatistic

__all__ = ["ChainEncoding", "TransitionFrame", "chain_statistic", "encode_chains", "encode_segment"]

# Counting in a table of all possible transitions beats sorting while the table is this small, or smaller than the data.
_TABLE_SIZE = 1 << 22


class TransitionFrame(Frame):
    """States, and the transitions between them that occur.

    Sums are ``(w, initial, transitions)``: the total weight of the sequences ``()``, counts of first states ``(V,)``
    and of transitions ``(P,)``.

    Args:
        states: the ``V`` states.
        keys: ``(P,)`` int64, ascending; the transition from state ``a`` to state ``b`` is ``a * V + b``.
    """

    def __init__(self, states: Vocabulary, keys: np.ndarray) -> None:
        self.states, self.keys = states, keys

    @property
    def sources(self) -> np.ndarray:
        """The state that each transition leaves, ``(P,)``."""
        return self.keys // max(len(self.states), 1)

    @property
    def targets(self) -> np.ndarray:
        """The state that each transition enters, ``(P,)``."""
        return self.keys % max(len(self.states), 1)

    def keys_in(self, states: Vocabulary) -> np.ndarray:
        """Return the keys of the transitions among ``states``, which include this frame's; they stay ascending."""
        place = self.states.positions_in(states)
        return place[self.sources] * len(states) + place[self.targets]

    def join(self, other: TransitionFrame) -> TransitionFrame:
        states = join_frames(self.states, other.states)
        assert isinstance(states, Vocabulary)
        return TransitionFrame(states, np.union1d(self.keys_in(states), other.keys_in(states)))

    def rebase(self, sums: Sums, target: TransitionFrame) -> Sums:
        weight, initial, transitions = sums
        moved, counts = np.zeros(len(target.states)), np.zeros(len(target.keys))
        moved[self.states.positions_in(target.states)] = initial
        counts[np.searchsorted(target.keys, self.keys_in(target.states))] = transitions
        return weight, moved, counts

    def adopt(self, sums: Sums) -> Sums:
        return np.zeros(()), np.zeros(len(self.states)), np.zeros(len(self.keys))

    def to_plain(self) -> Any:
        return [self.states.to_plain(), self.keys.tolist()]

    @classmethod
    def from_plain(cls, plain: Any) -> TransitionFrame:
        states, keys = plain
        return cls(Vocabulary.from_plain(states), np.array(keys, dtype=np.int64))


class ChainEncoding(LeafEncoding):
    """``n`` sequences.

    Args:
        first: ``(n,)`` int64, the first states; -1 for a sequence that is empty or goes on from another.
        bounds: ``(n + 1,)`` int64; sequence ``i`` has the entries ``[bounds[i], bounds[i + 1])``.
        places: ``(m,)`` int64, which of the frame's transitions an entry counts.
        counts: ``(m,)`` float64, how often the sequence has it.
        frame: the states and transitions.
    """

    name = "MarkovChain"

    def __init__(
        self, first: np.ndarray, bounds: np.ndarray, places: np.ndarray, counts: np.ndarray, frame: TransitionFrame
    ) -> None:
        super().__init__((first,), frame, family=ChainEncoding)
        self.first, self.bounds, self.places, self.counts = first, bounds, places, counts

    @property
    def owners(self) -> np.ndarray:
        """The sequence that each entry belongs to, ``(m,)``."""
        return np.repeat(np.arange(len(self)), np.diff(self.bounds))

    def rows(self, start: int, stop: int) -> ChainEncoding:
        bounds = self.bounds[start : stop + 1]
        entries = slice(bounds[0], bounds[-1])
        assert isinstance(self.frame, TransitionFrame)
        return ChainEncoding(
            self.first[start:stop], bounds - bounds[0], self.places[entries], self.counts[entries], self.frame
        )

    def in_frame(self, frame: Frame | None) -> ChainEncoding:
        assert isinstance(self.frame, TransitionFrame) and isinstance(frame, TransitionFrame)
        if frame == self.frame:
            return ChainEncoding(self.first, self.bounds, self.places, self.counts, frame)
        states = np.append(self.frame.states.positions_in(frame.states), -1)
        places = np.searchsorted(frame.keys, self.frame.keys_in(frame.states))
        return ChainEncoding(states[self.first], self.bounds, places[self.places], self.counts, frame)

    @property
    def nbytes(self) -> int:
        return self.first.nbytes + self.bounds.nbytes + self.places.nbytes + self.counts.nbytes


def encode_chains(xs: Any, family: str) -> ChainEncoding:
    """Return the encoding of sequences of categories; arrays of integers never become Python objects.

    Raises:
        TypeError, ValueError: one is no list, tuple or 1-D array of categories; names its index.
    """
    for i, x in enumerate(xs):
        if not isinstance(x, (list, tuple, np.ndarray)) or (isinstance(x, np.ndarray) and x.ndim != 1):
            hint = "; give list(x) for its characters" if isinstance(x, str) else ""
            raise TypeError(
                f"{family} takes lists, tuples and 1-D arrays of categories, got {type(x).__name__} ({x!r:.60}) "
                f"at index {i}{hint}"
            )
    lengths = np.array([len(x) for x in xs], dtype=np.int64)
    flat: Any = concatenated(xs, "iu")
    if flat is None:
        flat = [state for x in xs for state in (x.tolist() if isinstance(x, np.ndarray) else x)]
    try:
        states, codes = category_codes(flat, family)
    except (TypeError, ValueError):
        # Its index counts through all sequences: say which sequence instead.
        for i, x in enumerate(xs):
            category_codes(x, f"{family}, sequence {i}")
        raise
    return _encode(states, codes, lengths)


def encode_segment(tokens: np.ndarray, previous: int | None, family: str) -> ChainEncoding:
    """Return the one row of a segment of a long sequence: its transitions, and its first state if it starts it."""
    if previous is not None:
        tokens = np.concatenate([np.array([previous], dtype=np.int64), tokens])
    states, codes = category_codes(tokens, family)
    return _encode(states, codes, np.array([len(codes)]), goes_on=previous is not None)


def chain_statistic(enc: ChainEncoding, weights: np.ndarray) -> LeafStatistic:
    """Return the weighted counts of encoded sequences."""
    assert isinstance(enc.frame, TransitionFrame)
    starts = enc.first >= 0
    initial = np.bincount(enc.first[starts], weights=weights[starts], minlength=len(enc.frame.states))
    each = np.repeat(weights, np.diff(enc.bounds)) * enc.counts
    transitions = np.bincount(enc.places, weights=each, minlength=len(enc.frame.keys))
    # Without rows, bincount counts in integers.
    sums = np.asarray(weights.sum()), initial.astype(np.float64), transitions.astype(np.float64)
    return LeafStatistic(enc.frame, sums)


def _encode(states: Vocabulary, codes: np.ndarray, lengths: np.ndarray, *, goes_on: bool = False) -> ChainEncoding:
    """Return the encoding of sequences that are given as codes, end to end.

    Args:
        states: what the codes are positions in.
        codes: ``(lengths.sum(),)`` int64.
        lengths: ``(n,)`` int64.
        goes_on: whether each sequence goes on from another, so that its first code is no first state.
    """
    n, size = len(lengths), len(states)
    ends = np.cumsum(lengths)
    first = np.full(n, -1, dtype=np.int64)
    if not goes_on:
        first[lengths > 0] = codes[(ends - lengths)[lengths > 0]]
    if n == 1:
        owners: Any = 0
        keys = codes[:-1] * size + codes[1:]
    else:
        inner = np.ones(len(codes), dtype=bool)
        inner[ends[lengths > 0] - 1] = False
        source = np.flatnonzero(inner)
        owners = np.repeat(np.arange(n), np.maximum(lengths - 1, 0))
        keys = codes[source] * size + codes[source + 1]
    cells, counts = _count(owners, keys, n, size * size)
    occurring, places = np.unique(cells[1], return_inverse=True)
    bounds = np.concatenate([[0], np.cumsum(np.bincount(cells[0], minlength=n))])
    return ChainEncoding(first, bounds, places, counts, TransitionFrame(states, occurring))


def _count(owners: Any, keys: np.ndarray, n: int, size: int) -> tuple[tuple[np.ndarray, np.ndarray], np.ndarray]:
    """Return the distinct pairs of owner and key, by owner, and how often each occurs."""
    if not len(keys):
        return (np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)), np.zeros(0)
    if n * size <= max(_TABLE_SIZE, len(keys)):
        table = np.bincount(owners * size + keys, minlength=n * size)
        cells = np.flatnonzero(table)
        return (cells // size, cells % size), table[cells].astype(np.float64)
    # Positions among the keys that occur, so that owner and key fit one integer.
    occurring, places = np.unique(keys, return_inverse=True)
    cells, counts = np.unique(owners * len(occurring) + places, return_counts=True)
    return (cells // len(occurring), occurring[cells % len(occurring)]), counts.astype(np.float64)
