"""The probabilities of a Markov chain, whose sequences are scored given their lengths.

A row of transitions lists some states with their probabilities and spreads what is left of one evenly over the states
that it does not list. So a pseudo-count on every transition, or a row of which nothing is known, takes no memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

import numpy as np

from mixle.stats.categories import Category, plain_category
from mixle.stats.frames import FrameMemo, Vocabulary
from mixle.stats.payload import list_field
from mixle.stats.simplex import require_probabilities
from mixle.stats.transitions import ChainEncoding, TransitionFrame

__all__ = ["ChainParams"]


class ChainParams:
    """The probabilities of a chain with ``V`` states.

    Args:
        frame: the states, and the transitions that the rows list.
        initial: ``(V,)`` probabilities of the first state.
        p: ``(P,)`` probabilities of the listed transitions.
        spread: ``(V,)``, the part of each row that is spread evenly over the states that it does not list.
    """

    def __init__(self, frame: TransitionFrame, initial: np.ndarray, p: np.ndarray, spread: np.ndarray) -> None:
        self.frame, self.initial, self.p, self.spread = frame, initial, p, spread
        self._tables = FrameMemo()

    @property
    def states(self) -> Vocabulary:
        return self.frame.states

    @property
    def unlisted(self) -> np.ndarray:
        """The probability of each single transition that a row does not list, ``(V,)``."""
        size = len(self.states)
        return self.spread / np.maximum(size - np.bincount(self.frame.sources, minlength=size), 1)

    @property
    def row_mass(self) -> np.ndarray:
        """What each row adds up to, ``(V,)``: one, or zero for a state that cannot be left."""
        return np.bincount(self.frame.sources, weights=self.p, minlength=len(self.states)) + self.spread

    def probabilities(self, sources: np.ndarray, targets: np.ndarray) -> np.ndarray:
        """Return the probabilities of transitions between states given by position; -1 is no state of the chain."""
        known = (sources >= 0) & (targets >= 0)
        sources, targets = sources[known], targets[known]
        keys = sources * len(self.states) + targets
        place = np.searchsorted(self.frame.keys, keys)
        listed = np.append(self.frame.keys, -1)[place] == keys
        out = np.zeros(len(known))
        out[known] = np.where(listed, np.append(self.p, 0.0)[place], self.unlisted[sources])
        return out

    def log_tables(self, frame: TransitionFrame) -> tuple[np.ndarray, np.ndarray]:
        """Return the log-probabilities of the frame's states as the first one, and of its transitions."""
        tables: tuple[np.ndarray, np.ndarray] = self._tables.get(frame, self._log_tables)
        return tables

    def _log_tables(self, frame: TransitionFrame) -> tuple[np.ndarray, np.ndarray]:
        place = frame.states.positions_in(self.states)
        with np.errstate(divide="ignore"):
            initial = np.log(np.append(self.initial, 0.0)[place])
            return initial, np.log(self.probabilities(place[frame.sources], place[frame.targets]))

    def log_density(self, enc: ChainEncoding) -> np.ndarray:
        """Return the log-probabilities of encoded sequences given their lengths, ``(n,)``."""
        assert isinstance(enc.frame, TransitionFrame)
        initial, transitions = self.log_tables(enc.frame)
        total = np.bincount(enc.owners, weights=transitions[enc.places] * enc.counts, minlength=len(enc))
        # The last entry is where -1, no first state, points.
        return np.asarray(total + np.append(initial, 0.0)[enc.first])

    def among(self, states: Vocabulary) -> ChainParams:
        """Return the same chain among more states; what a row spreads, it spreads over those as well."""
        if states is self.states:
            return self
        place = self.states.positions_in(states)
        initial, spread = np.zeros(len(states)), np.zeros(len(states))
        initial[place], spread[place] = self.initial, self.spread
        return ChainParams(TransitionFrame(states, self.frame.keys_in(states)), initial, self.p, spread)

    def rows(self) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        """Yield each state's position, the targets that its row lists, and their probabilities."""
        bounds = np.searchsorted(self.frame.sources, np.arange(len(self.states) + 1))
        targets = self.frame.targets
        for a, (start, stop) in enumerate(pairwise(bounds.tolist())):
            yield a, targets[start:stop], self.p[start:stop]

    @classmethod
    def uniform(cls, states: Vocabulary) -> ChainParams:
        """Return the chain whose first state and transitions are uniform."""
        size = len(states)
        frame = TransitionFrame(states, np.zeros(0, dtype=np.int64))
        return cls(frame, np.full(size, 1.0 / max(size, 1)), np.zeros(0), np.ones(size))

    @classmethod
    def from_maps(cls, initial: Mapping[Any, float], transitions: Mapping[Any, Mapping[Any, float]]) -> ChainParams:
        """Build a chain from dicts; a state without a row cannot be left.

        Raises:
            TypeError, ValueError: a map is no mapping from categories to probabilities that sum to one.
        """
        first = _row(initial, "init_prob_map")
        if not isinstance(transitions, Mapping):
            raise TypeError(f"transition_map={transitions!r:.80} must be a dict from states to rows")
        rows = {plain_category(a): _row(row, f"transition_map[{a!r}]") for a, row in transitions.items()}
        states = Vocabulary([*first, *rows, *(b for row in rows.values() for b in row)])
        if len(states) and not first:
            raise ValueError("init_prob_map={} must give the probabilities of the first state")
        index, size = states.index, len(states)
        keyed = sorted((index[a] * size + index[b], p) for a, row in rows.items() for b, p in row.items())
        keys = np.array([key for key, _ in keyed], dtype=np.int64)
        start = np.array([first.get(state, 0.0) for state in states.categories])
        return cls(TransitionFrame(states, keys), start, np.array([p for _, p in keyed]), np.zeros(size))

    def to_plain(self) -> dict[str, Any]:
        """Return the content in JSON types."""
        return {
            "states": self.states.to_plain(),
            "initial": self.initial.tolist(),
            "transitions": [self.frame.keys.tolist(), self.p.tolist()],
            "spread": self.spread.tolist(),
        }

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> ChainParams:
        """Build a chain from :meth:`to_plain`'s dict.

        Raises:
            TypeError, ValueError: ``plain`` is no such dict, or its parts do not fit together.
        """
        if not isinstance(plain, dict):
            raise TypeError(f"chain={plain!r:.60} must be a dict of states, initial, transitions and spread")
        states = Vocabulary.from_plain(list_field(plain, "states", cls))
        size = len(states)
        listed = list_field(plain, "transitions", cls)
        if len(listed) != 2:
            raise ValueError(f"transitions={listed!r:.60} of a chain must be two lists, keys and probabilities")
        keys, p = (np.array(column, dtype=kind) for column, kind in zip(listed, (np.int64, float), strict=True))
        spread = np.array(plain["spread"], dtype=np.float64)
        initial = require_probabilities(plain["initial"], "initial", size) if size else np.zeros(0)
        fits = len(keys) == len(p) and spread.shape == (size,) and (np.diff(keys) > 0).all()
        if not fits or (len(keys) and not 0 <= keys[0] <= keys[-1] < size * size):
            raise ValueError(f"the transitions and spreads of a chain do not fit its {size} states")
        chain = cls(TransitionFrame(states, keys), initial, p, spread)
        mass = chain.row_mass
        if not ((p >= 0).all() and (spread >= 0).all() and ((np.abs(mass - 1) < 1e-6) | (mass == 0)).all()):
            raise ValueError("the rows of a chain must be probabilities that sum to one")
        return chain


def _row(row: Any, name: str) -> dict[Category, float]:
    if not isinstance(row, Mapping):
        raise TypeError(f"{name}={row!r:.80} must be a dict from states to probabilities")
    if not row:
        return {}
    p = require_probabilities(list(row.values()), name)
    return dict(zip(map(plain_category, row), p.tolist(), strict=True))
