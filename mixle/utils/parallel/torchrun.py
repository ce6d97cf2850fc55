"""Shards on the ranks of a torchrun job: statistics go to the root, one model comes back.

Every rank makes the same calls. A rank whose part raises says so before anyone enters a collective, and then every rank
raises that error. What crosses between ranks is JSON and float64 vectors, never pickles.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from mixle.stats.contract import DataEncoder, ParameterEstimator, ProbabilityDistribution, StatisticAccumulator
from mixle.stats.encoding import encoding_frames, join_all, reframe_encoding
from mixle.stats.frames import frame_from_json, frame_to_json
from mixle.stats.row_draws import draw_seed
from mixle.stats.sequence import (
    EncodedChunks,
    accumulate,
    accumulate_initialization,
    finish,
    resolve_encoder,
    seq_log_density,
    seq_log_density_sum,
)
from mixle.stats.statistics import layout, pack, unpack
from mixle.utils.exact import require_exact_bool, require_finite_float
from mixle.utils.parallel.collectives import all_gather_bytes, broadcast_bytes, sum_everywhere, sum_to_root
from mixle.utils.parallel.planner import EncodedDataHandle
from mixle.utils.parallel.process_group import Peers, join

__all__ = ["TorchRunEncodedData", "fit_from_statistics", "together"]

T = TypeVar("T")


class TorchRunEncodedData(EncodedDataHandle):
    """One shard per rank of a torchrun job, encoded there and kept there.

    ``seq_estimate`` reduces the ranks' statistics to rank 0 as one vector, runs the M-step there and broadcasts the
    model, so that every rank ends with the same bits. In one process, without torchrun, it is a local handle.

    Args:
        data: with ``shard_by_rank`` the whole data, the same on every rank, of which rank ``r`` of ``w`` encodes rows
            ``[r*n//w, (r+1)*n//w)``; without it, this rank's own rows. A shard may be empty.
        encoder, estimator, model: exactly one of them, to say how to encode.
        init_process_group: join the job that ``RANK`` and ``WORLD_SIZE`` describe; :meth:`close` leaves it.
        backend: as in :func:`torch.distributed.init_process_group`.
        deadline_s: how long a rank waits for the others at each step, in seconds.

    Raises:
        TypeError, ValueError: some rank's rows are refused; every rank raises the error.
        PeerError: a rank is missing at the deadline; names it.
    """

    def __init__(
        self,
        data: Sequence[Any],
        *,
        encoder: DataEncoder | None = None,
        estimator: ParameterEstimator | None = None,
        model: ProbabilityDistribution | None = None,
        shard_by_rank: bool = True,
        init_process_group: bool = True,
        backend: str | None = None,
        deadline_s: float = 600.0,
    ) -> None:
        encode = resolve_encoder(encoder, estimator, model)
        split = require_exact_bool(shard_by_rank, "shard_by_rank")
        init = require_exact_bool(init_process_group, "init_process_group")
        deadline = require_finite_float(deadline_s, "deadline_s", exclusive_minimum=0.0)
        self._peers = join(init_process_group=init, backend=backend, deadline_s=deadline)
        self.rank, self.world = self._peers.rank, self._peers.world
        try:
            self._chunks, self._first_row, self._n = self._encode(data, encode, split)
        except BaseException:
            self.close()
            raise

    def _encode(self, data: Sequence[Any], encoder: DataEncoder, split: bool) -> tuple[EncodedChunks, int, int]:
        def own() -> tuple[int, Any]:
            n = len(data)
            low, high = (n * self.rank // self.world, n * (self.rank + 1) // self.world) if split else (0, n)
            return high - low, encoder.seq_encode(data[low:high])

        count, enc = together(self._peers, "encoding", own)
        told = json.dumps([count, [frame_to_json(f) for f in encoding_frames(enc)]]).encode()
        with self._peers.guard("agreeing on the encoding"):
            shards = [json.loads(piece) for piece in all_gather_bytes(self._peers, told)]
        counts = [shard[0] for shard in shards]
        frames = join_all([[frame_from_json(f) for f in shard[1]] for shard in shards])
        return [(count, reframe_encoding(enc, frames))], sum(counts[: self.rank]), sum(counts)

    def pysp_seq_estimate(self, estimator: Any, prev_estimate: Any) -> Any:
        nobs, accumulator = together(
            self._peers, "the E-step", lambda: accumulate(self._chunks, estimator, prev_estimate)
        )
        return fit_from_statistics(self._peers, estimator, nobs, accumulator, prev_estimate)

    def pysp_seq_initialize(self, estimator: Any, rng: Any, p: float) -> Any:
        own_seed = together(self._peers, "seeding", lambda: draw_seed(rng))
        seed = int(self._peers.exchange("seeding", str(own_seed))[0])
        nobs, accumulator = together(
            self._peers,
            "initialization",
            lambda: accumulate_initialization(self._chunks, estimator, seed, p, self._first_row),
        )
        return fit_from_statistics(self._peers, estimator, nobs, accumulator, None)

    def pysp_seq_log_density_sum(self, model: Any) -> tuple[float, float]:
        own = together(self._peers, "scoring", lambda: seq_log_density_sum(self._chunks, model))
        with self._peers.guard("scoring"):
            count, total = sum_everywhere(self._peers, np.array(own))
        return float(count), float(total)

    def pysp_seq_log_density(self, model: Any) -> list[np.ndarray]:
        """Return the log-densities of this rank's rows."""
        return seq_log_density(self._chunks, model)

    def __len__(self) -> int:
        return self._n

    def close(self) -> None:
        """Leave the process group; the last handle to leave destroys the one that was made here."""
        self._peers.close()


def together(peers: Peers, what: str, compute: Callable[[], T]) -> T:
    """Return ``compute()`` once every rank has computed; if it raises on any rank, every rank raises that error."""
    error: Exception | None = None
    result: T | None = None
    try:
        result = compute()
    except Exception as caught:
        error = caught
    peers.agree(what, error)
    return result  # type: ignore[return-value]


def fit_from_statistics(
    peers: Peers, estimator: ParameterEstimator, nobs: float, accumulator: StatisticAccumulator, previous: Any
) -> Any:
    """Reduce the ranks' statistics to rank 0 as one vector, run the M-step there and return its model on every rank.

    Args:
        nobs: this rank's number of observations.
        accumulator: this rank's, all in the same frames.

    Raises:
        ValueError: the ranks' statistics are laid out differently; or whatever the M-step raises, on every rank.
    """
    if peers.world == 1:
        return finish(estimator, nobs, accumulator, previous)
    own = accumulator.value()
    vector = np.concatenate([[nobs], pack(own)])
    layouts = peers.exchange("the reduction", layout(own))
    if len(set(layouts)) > 1:
        odd = [r for r, other in enumerate(layouts) if other != layouts[0]]
        raise ValueError(
            f"ranks {odd} hold statistics of another layout than rank 0; every rank must pass the same estimator and "
            "previous estimate"
        )
    with peers.guard("reducing the statistics"):
        total = sum_to_root(peers, vector)

    def m_step() -> bytes:
        if peers.rank:
            return b""
        accumulator.from_value(unpack(total[1:], own))
        model: ProbabilityDistribution = finish(estimator, float(total[0]), accumulator, previous)
        return model.to_json().encode()

    text = together(peers, "the M-step", m_step)
    with peers.guard("broadcasting the model"):
        text = broadcast_bytes(peers, text)
    return ProbabilityDistribution.from_json(text.decode())
