"""How a Markov chain is estimated from counts of first states and transitions."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mixle.stats.chain_params import ChainParams
from mixle.stats.frames import Frame, Vocabulary, join_frames
from mixle.stats.policy import MIN_MASS, Repair
from mixle.stats.simplex import weights_from_counts
from mixle.stats.statistics import LeafStatistic
from mixle.stats.transitions import TransitionFrame

__all__ = ["ChainFit"]


@dataclass(frozen=True)
class ChainFit:
    """What is added to the counts.

    Attributes:
        levels: states that exist whether or not they are observed, or None.
        initial_pseudo_count, transition_pseudo_count: pseudo-observations of the first state, and of each row.
        prior: the chain that they follow; None to spread them evenly.
    """

    levels: Vocabulary | None = None
    initial_pseudo_count: float | None = None
    transition_pseudo_count: float | None = None
    prior: ChainParams | None = None

    def fit(self, statistic: LeafStatistic, previous: ChainParams | None) -> tuple[ChainParams, tuple[Repair, ...]]:
        """Return the chain that maximizes the likelihood of the counts, and what had to be repaired.

        A row that was never left keeps its values in ``previous``; without any it is uniform.
        """
        frame, sums = statistic
        if not isinstance(frame, TransitionFrame):
            frame = TransitionFrame(Vocabulary(()), np.zeros(0, dtype=np.int64))
            sums = frame.adopt(sums)
        _, initial, transitions = sums
        states = self._states(frame, initial, transitions, previous)
        size = len(states)
        place = frame.states.positions_in(states)
        first = np.zeros(size)
        first[place[place >= 0]] = initial[place >= 0]
        seen = transitions > 0
        keys = (place[frame.sources] * size + place[frame.targets])[seen]
        start, repairs = self._initial(first, states, previous)
        rows, row_repairs = self._rows(keys, transitions[seen], states, previous)
        return ChainParams(rows.frame, start, rows.p, rows.spread), (*repairs, *row_repairs)

    def _states(
        self, frame: TransitionFrame, initial: np.ndarray, transitions: np.ndarray, previous: ChainParams | None
    ) -> Vocabulary:
        states: Frame | None = frame.states
        if self.initial_pseudo_count is None and self.transition_pseudo_count is None:
            seen = initial > 0
            seen[frame.sources[transitions > 0]] = True
            seen[frame.targets[transitions > 0]] = True
            if not seen.all():
                states = Vocabulary(c for c, there in zip(frame.states.categories, seen, strict=True) if there)
        known = [chain.states for chain in (self.prior, previous) if chain is not None]
        for more in (self.levels, *known):
            states = join_frames(states, more)
        assert isinstance(states, Vocabulary)
        return states

    def _initial(
        self, counts: np.ndarray, states: Vocabulary, previous: ChainParams | None
    ) -> tuple[np.ndarray, tuple[Repair, ...]]:
        prior = None if self.prior is None else self.prior.among(states).initial
        held = None if previous is None else previous.among(states).initial
        if not len(states):
            return counts, ()
        start = weights_from_counts(counts, self.initial_pseudo_count, prior, held)
        if self.initial_pseudo_count is not None or counts.sum() > MIN_MASS:
            return start, ()
        did = "made uniform" if held is None else "kept the previous probabilities"
        return start, (Repair("init_prob_map", f"no first state was observed; {did}"),)

    def _rows(
        self, keys: np.ndarray, counts: np.ndarray, states: Vocabulary, previous: ChainParams | None
    ) -> tuple[ChainParams, tuple[Repair, ...]]:
        size = len(states)
        left = np.bincount(keys // max(size, 1), weights=counts, minlength=size)
        # What fills a row up: the prior, with its pseudo-count; else the previous row where nothing was observed.
        model = previous if self.transition_pseudo_count is None else self.prior
        base = ChainParams.uniform(states) if model is None else model.among(states)
        unknown = base.row_mass == 0
        if unknown.any():
            base = ChainParams(base.frame, base.initial, base.p, np.where(unknown, 1.0, base.spread))
        if self.transition_pseudo_count is None:
            bare = left <= MIN_MASS
            share, repairs = bare.astype(np.float64), _row_repairs(states, bare, unknown | (previous is None))
        else:
            share, repairs = np.full(size, self.transition_pseudo_count), ()
        used = base.frame.keys[share[base.frame.sources] > 0]
        merged = np.union1d(keys, used)
        row = merged // max(size, 1)
        p = share[row] * base.probabilities(row, merged % max(size, 1))
        p[np.searchsorted(merged, keys)] += counts
        unlisted = size - np.bincount(row, minlength=size)
        total = left + share
        rows = ChainParams(
            TransitionFrame(states, merged), left, p / total[row], share * base.unlisted * unlisted / total
        )
        return rows, repairs


def _row_repairs(states: Vocabulary, bare: np.ndarray, unknown: np.ndarray) -> tuple[Repair, ...]:
    cases = ((bare & ~unknown, "kept the previous rows"), (bare & unknown, "made uniform"))
    return tuple(
        Repair("transition_map", f"{_some(states, rows)} never left; {did}") for rows, did in cases if rows.any()
    )


def _some(states: Vocabulary, chosen: np.ndarray) -> str:
    which = np.flatnonzero(chosen)
    shown = ", ".join(repr(states.categories[i]) for i in which[:3]) + (", ..." if len(which) > 3 else "")
    return f"{len(which)} states ({shown}) were"
