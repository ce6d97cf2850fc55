"""Classical estimators on a rank's tokens: each token an observation, or all of them one long sequence.

The tokens are read in segments, so that a memory-mapped array is never in memory as a whole, and the ranks' statistics
are summed as one vector. A segment knows the token before it, so that every transition is counted once, those across
the edges of segments and shards included.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from mixle.data.token_check import find_bad_token
from mixle.data.token_windows import TokenArray
from mixle.stats.contract import DataEncoder, ParameterEstimator, ProbabilityDistribution, StatisticAccumulator
from mixle.stats.encoding import join_all
from mixle.stats.frames import frame_from_json, frame_to_json
from mixle.stats.row_draws import RowDraws, draw_seed
from mixle.stats.sequence import initialization_weights, resolve_encoder
from mixle.stats.statistics import frames_of, reframe
from mixle.utils.parallel.collectives import all_gather_bytes, sum_everywhere
from mixle.utils.parallel.process_group import Peers
from mixle.utils.parallel.torchrun import fit_from_statistics, together

SEGMENT = 1 << 20


class Segment(NamedTuple):
    """Encoded tokens ``[start, stop)``; one row per token, or one row in all."""

    start: int
    stop: int
    enc: Any


class TokenStatistics:
    """The verbs of a handle for estimators whose observations are tokens, or streams of them.

    Args:
        peers: the ranks that share the stream.
        tokens: the array given to the handle.
        shared: whether every rank has the whole stream, of which rank ``r`` of ``w`` reads ``[r*n//w, (r+1)*n//w)``;
            else each has a stream of its own.
        segment: tokens read at a time.
    """

    def __init__(self, peers: Peers, tokens: TokenArray, *, shared: bool, segment: int = SEGMENT) -> None:
        self._peers, self._tokens, self._segment = peers, tokens, segment
        n, parts, part = len(tokens), peers.world if shared else 1, peers.rank if shared else 0
        self._start, self._stop = part * n // parts, (part + 1) * n // parts

    def estimate(self, estimator: ParameterEstimator, previous: ProbabilityDistribution | None) -> Any:
        """Take one EM step over all ranks' tokens."""

        def gather() -> StatisticAccumulator:
            accumulator = estimator.accumulator_factory().make()
            for part in self._segments(resolve_encoder(estimator=estimator)):
                accumulator.seq_update(part.enc, np.ones(len(part.enc)), previous)
            return accumulator

        accumulator = together(self._peers, "the E-step", gather)
        return self._fit(estimator, float(self._stop - self._start), accumulator, previous)

    def initialize(self, estimator: ParameterEstimator, rng: Any, p: float) -> Any:
        """Return a first model from a random share ``p`` of the tokens; of a stream that is one sequence, from all."""
        own_seed = together(self._peers, "seeding", lambda: draw_seed(rng))
        seed = int(self._peers.exchange("seeding", str(own_seed))[0])
        nobs, accumulator = together(self._peers, "initialization", lambda: self._draw(estimator, seed, p))
        return self._fit(estimator, nobs, accumulator, None)

    def log_density_sum(self, model: ProbabilityDistribution) -> tuple[int, float]:
        """Return the number of tokens and the log-density of all of them, over all ranks."""

        def own() -> float:
            return sum(float(scores.sum()) for scores in self.log_density(model))

        total = together(self._peers, "scoring", own)
        with self._peers.guard("scoring"):
            sums = sum_everywhere(self._peers, np.array([float(self._stop - self._start), total]))
        return int(sums[0]), float(sums[1])

    def log_density(self, model: ProbabilityDistribution) -> list[np.ndarray]:
        """Return the log-densities of this rank's observations, one array per segment."""
        return [model.seq_log_density(part.enc) for part in self._segments(resolve_encoder(model=model))]

    def _segments(self, encoder: DataEncoder) -> Iterator[Segment]:
        """Yield the encoded segments of this rank; at least one, be it empty."""
        for start in range(self._start, max(self._stop, self._start + 1), self._segment):
            stop = min(start + self._segment, self._stop)
            bad = find_bad_token(self._tokens, start, stop, None)
            if bad is not None:
                raise ValueError(f"token_ids[{bad.position}]={bad.value} is not a non-negative integer")
            tokens = np.asarray(self._tokens[start:stop]).astype(np.int64)
            previous = int(self._tokens[start - 1 : start][0]) if start else None
            if hasattr(encoder, "encode_stream"):
                yield Segment(start, stop, encoder.encode_stream(tokens, previous))
            else:
                yield Segment(start, stop, encoder.seq_encode(tokens.tolist()))

    def _draw(self, estimator: ParameterEstimator, seed: int, share: float) -> tuple[float, StatisticAccumulator]:
        accumulator = estimator.accumulator_factory().make()
        taken = 0.0
        for part in self._segments(resolve_encoder(estimator=estimator)):
            draws = RowDraws.for_rows(seed, part.start, len(part.enc))
            per_token = len(part.enc) == part.stop - part.start
            weights = initialization_weights(draws, share) if per_token else np.ones(len(part.enc))
            accumulator.seq_initialize(part.enc, weights, draws.stream(0))
            taken += float(weights.sum())
        return taken, accumulator

    def _fit(
        self,
        estimator: ParameterEstimator,
        nobs: float,
        accumulator: StatisticAccumulator,
        previous: ProbabilityDistribution | None,
    ) -> Any:
        """Bring the ranks' statistics into one frame, sum them and run the M-step."""
        value = accumulator.value()
        told = json.dumps([frame_to_json(frame) for frame in frames_of(value)]).encode()
        with self._peers.guard("agreeing on the statistics"):
            everyone = [json.loads(text) for text in all_gather_bytes(self._peers, told)]
        frames = join_all([[frame_from_json(frame) for frame in one] for one in everyone])
        accumulator.from_value(reframe(value, frames))
        return fit_from_statistics(self._peers, estimator, nobs, accumulator, previous)
