"""Who trains which windows when, computed by every rank from the lengths alone.

All replicas run ``steps_per_epoch`` steps; one that runs out of windows pads and masks, and every one of them knows how
many real targets each of the others trains at each step, so that the exact mean over all of them needs no message.
At most one window of a shard is short (its last one), so its place in the order, found with the inverse permutation,
is all there is to know beside the lengths.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from mixle.data.permutation import Permutation
from mixle.data.window_spec import Boundary, Shard, WindowSpec, shard_tokens
from mixle.utils.exact import (
    require_choice,
    require_exact_bool,
    require_exact_int,
    require_nonnegative_int,
    require_positive_int,
)

Sampling = Literal["sharded", "global"]
POLICY = "pad-and-mask-to-global-max-steps"
_CHUNK = 4096


@dataclass(frozen=True)
class Schedule:
    """Plan the training of ``replicas`` data-parallel replicas over windows of tokens.

    Args:
        spec: the geometry of the windows.
        batch_size: windows that one replica trains per step.
        replicas: how many replicas there are.
        n_tokens: length of the one array that the replicas share out; or
        lengths: the lengths of the arrays that they bring, one each (``shard_by_rank=False``).
        epochs: passes over the data, 0 included.
        shuffle: permute the windows, anew in each epoch.
        seed: any integer; fixes every order.
        sampling: ``"sharded"``: each replica trains the windows of its own shard. ``"global"``: all replicas share one
            order of all windows of the array, and step ``t`` trains the next ``replicas * batch_size`` of it.
        boundary: how ``n_tokens`` are sharded (see :func:`~mixle.data.window_spec.shard_tokens`); ``"exclude"`` unless
            given.

    Raises:
        TypeError, ValueError: an argument that is not what it says above, a combination in which one would be ignored,
            or data too short for one window; the message has the numbers.
    """

    spec: WindowSpec
    batch_size: int
    replicas: int = 1
    n_tokens: int | None = None
    lengths: Sequence[int] | None = None
    epochs: int = 1
    shuffle: bool = True
    seed: int = 0
    sampling: Sampling = "sharded"
    boundary: Boundary | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.spec, WindowSpec):
            raise TypeError(f"spec={self.spec!r} must be a WindowSpec, not {type(self.spec).__name__}")
        for name in ("batch_size", "replicas"):
            object.__setattr__(self, name, require_positive_int(getattr(self, name), name))
        object.__setattr__(self, "epochs", require_nonnegative_int(self.epochs, "epochs"))
        object.__setattr__(self, "shuffle", require_exact_bool(self.shuffle, "shuffle"))
        object.__setattr__(self, "seed", require_exact_int(self.seed, "seed"))
        require_choice(self.sampling, "sampling", ("sharded", "global"))
        require_choice(self.boundary, "boundary", (None, "exclude", "overlap"))
        if (self.n_tokens is None) == (self.lengths is None):
            raise TypeError(
                "give either n_tokens, the length of one shared array, or lengths, one of each replica's own"
            )
        if self.n_tokens is not None:
            self._check_shared(require_nonnegative_int(self.n_tokens, "n_tokens"))
        if self.lengths is not None:
            self._check_own(tuple(require_nonnegative_int(length, "lengths") for length in self.lengths))

    def _check_shared(self, n_tokens: int) -> None:
        object.__setattr__(self, "n_tokens", n_tokens)
        if self.sampling == "global" and self.boundary is not None:
            raise ValueError(
                f'boundary={self.boundary!r} does not apply to sampling="global", which excludes nothing; leave it out'
            )
        self._refuse_short(n_tokens)
        if self.sampling == "sharded" and not any(self.shard_window_counts):
            raise ValueError(
                f"no window of block={self.spec.block} fits into the shards of ranks "
                f"{', '.join(map(str, range(self.replicas)))} ({', '.join(str(len(s)) for s in self.shards)} of "
                f'{n_tokens} tokens) under boundary="exclude"; boundary="overlap" trains all '
                f"{self.spec.target_count(n_tokens)} targets"
            )

    def _check_own(self, lengths: tuple[int, ...]) -> None:
        object.__setattr__(self, "lengths", lengths)
        if len(lengths) != self.replicas:
            raise ValueError(f"lengths={lengths} must have one length for each of replicas={self.replicas}")
        if self.sampling == "global":
            raise ValueError('sampling="global" needs one array that all ranks share, not shard_by_rank=False')
        if self.boundary == "overlap":
            raise ValueError('boundary="overlap" does not apply to shard_by_rank=False: each rank brings its own array')
        self._refuse_short(max(lengths))

    def _refuse_short(self, longest: int) -> None:
        if longest == 0:
            raise ValueError(f"token_ids is empty: 0 tokens, and block={self.spec.block} needs {self.spec.shortest}")
        if longest < self.spec.shortest:
            raise ValueError(
                f"{longest} tokens are too short for one window: block={self.spec.block} with "
                f'targets="{self.spec.targets}" needs {self.spec.shortest}'
            )

    # ---- lengths

    @cached_property
    def shards(self) -> tuple[Shard, ...]:
        """The tokens of each replica: of the shared array, or of its own; under global sampling, all for each."""
        if self.lengths is not None:
            return tuple(Shard(0, length) for length in self.lengths)
        assert self.n_tokens is not None
        if self.sampling == "global":
            return (Shard(0, self.n_tokens),) * self.replicas
        return tuple(
            shard_tokens(self.n_tokens, self.replicas, replica, self.spec, boundary=self.boundary or "exclude")
            for replica in range(self.replicas)
        )

    @cached_property
    def shard_window_counts(self) -> tuple[int, ...]:
        """Windows of each of :attr:`shards`."""
        return tuple(self.spec.window_count(len(shard)) for shard in self.shards)

    @cached_property
    def window_counts_by_replica(self) -> tuple[int, ...]:
        """Windows that each replica trains in one epoch."""
        if self.sampling == "sharded":
            return self.shard_window_counts
        rounds, rest = divmod(self.shard_window_counts[0], self.replicas * self.batch_size)
        return tuple(
            rounds * self.batch_size + min(max(0, rest - replica * self.batch_size), self.batch_size)
            for replica in range(self.replicas)
        )

    @cached_property
    def steps_per_epoch(self) -> int:
        """Steps that every replica runs per epoch: as many as the one with the most windows needs."""
        return -(-max(self.window_counts_by_replica) // self.batch_size)

    @cached_property
    def real_targets_per_epoch(self) -> int:
        """Targets that all replicas together train in one epoch."""
        shards = self.shards[:1] if self.sampling == "global" else self.shards
        return sum(self.spec.target_count(len(shard)) for shard in shards)

    @cached_property
    def excluded_target_tokens(self) -> int:
        """Targets of the whole array that no shard has the context for, over all epochs."""
        if self.n_tokens is None or self.sampling == "global" or self.boundary == "overlap":
            return 0
        reachable = sum(self.spec.reachable_targets(len(shard)) for shard in self.shards)
        return (self.spec.reachable_targets(self.n_tokens) - reachable) * self.epochs

    @cached_property
    def skipped_target_tokens(self) -> int:
        """Targets that a stride larger than the block passes over, over all epochs."""
        whole = (self.n_tokens,) if self.n_tokens is not None else self.lengths or ()
        reachable = sum(self.spec.reachable_targets(length) for length in whole)
        return (reachable - self.real_targets_per_epoch) * self.epochs - self.excluded_target_tokens

    # ---- steps

    def window_indices(self, replica: int, epoch: int, step: int) -> NDArray[np.int64]:
        """Return the windows of the replica's shard that it trains at a step, at most ``batch_size``, int64.

        Epochs are counted from the beginning of training, whatever this schedule's ``epochs``.

        Raises:
            IndexError: ``step`` is not in ``[0, steps_per_epoch)``.
        """
        first = self._first_position(replica, step)
        count = min(max(0, self.shard_window_counts[replica] - first), self.batch_size)
        if not self.shuffle:
            return np.arange(first, first + count, dtype=np.int64)
        chunk, place = divmod(step, self._steps_per_chunk)
        begin = place * self.batch_size
        return self._chunk_indices(replica, epoch, chunk)[begin : begin + count]

    def _chunk_indices(self, replica: int, epoch: int, chunk: int) -> NDArray[np.int64]:
        """Return the windows of a run of steps one after the other: permuting few at a time is all overhead."""
        key = (replica, epoch, chunk)
        known = self._newest_chunk.get(key)
        if known is None:
            first = chunk * self._steps_per_chunk
            steps = range(first, min(first + self._steps_per_chunk, self.steps_per_epoch))
            starts = np.array([self._first_position(replica, step) for step in steps], dtype=np.int64)
            positions = (starts[:, None] + np.arange(self.batch_size)).ravel()
            known = self._order(replica, epoch).apply(positions[positions < self.shard_window_counts[replica]])
            known.flags.writeable = False
            self._newest_chunk.clear()
            self._newest_chunk[key] = known
        return known

    @property
    def _steps_per_chunk(self) -> int:
        return max(1, _CHUNK // self.batch_size)

    @cached_property
    def _newest_chunk(self) -> dict[tuple[int, int, int], NDArray[np.int64]]:
        """The last answer of :meth:`_chunk_indices`: a replica asks for one step after the other."""
        return {}

    def target_counts(self, epoch: int, step: int) -> NDArray[np.int64]:
        """Return how many real targets each replica trains at a step, (replicas,) int64."""
        first = self._first_positions + self._first_position(0, step)
        windows = np.clip(self._windows - first, 0, self.batch_size)
        last = self._last_window_positions(epoch) - first
        short = (last >= 0) & (last < windows)
        return windows * self.spec.targets_per_window - np.where(short, self._padding, 0)

    def global_targets(self, epoch: int, step: int, steps: int = 1) -> int:
        """Return how many real targets all replicas train in the ``steps`` steps from ``step`` that the epoch has."""
        stop = min(step + steps, self.steps_per_epoch)
        return sum(int(self.target_counts(epoch, each).sum()) for each in range(step, stop))

    def _first_position(self, replica: int, step: int) -> int:
        if not 0 <= step < self.steps_per_epoch:
            raise IndexError(f"step={step} is outside [0, {self.steps_per_epoch}), the steps of one epoch")
        if self.sampling == "sharded":
            return step * self.batch_size
        return (step * self.replicas + replica) * self.batch_size

    @cached_property
    def _first_positions(self) -> NDArray[np.int64]:
        """Where each replica's first step begins, from replica 0's."""
        apart = self.batch_size if self.sampling == "global" else 0
        return np.arange(self.replicas, dtype=np.int64) * apart

    @cached_property
    def _windows(self) -> NDArray[np.int64]:
        return np.array(self.shard_window_counts, dtype=np.int64)

    @cached_property
    def _padding(self) -> NDArray[np.int64]:
        return np.array([self.spec.padding(len(shard)) for shard in self.shards], dtype=np.int64)

    def _order(self, replica: int, epoch: int) -> Permutation:
        own = replica if self.sampling == "sharded" else None
        return Permutation(self.shard_window_counts[replica], self.seed, epoch, own)

    def _last_window_positions(self, epoch: int) -> NDArray[np.int64]:
        """Return where in its order each replica's last window stands, -1 where it has none."""
        if not self.shuffle or not self._padding.any():
            return self._windows - 1
        known = self._positions_by_epoch.get(epoch)
        if known is None:
            replicas = range(1 if self.sampling == "global" else self.replicas)
            places = [
                int(self._order(replica, epoch).inverse(count - 1))
                if (count := self.shard_window_counts[replica])
                else -1
                for replica in replicas
            ]
            known = np.resize(np.array(places, dtype=np.int64), self.replicas)
            self._positions_by_epoch.clear()
            self._positions_by_epoch[epoch] = known
        return known

    @cached_property
    def _positions_by_epoch(self) -> dict[int, NDArray[np.int64]]:
        """The newest answer of :meth:`_last_window_positions`: every step of an epoch asks for the same."""
        return {}

    # ---- disclosure

    def local_target_tokens(self, replica: int, *, epoch: int = 0) -> int:
        """Return how many real targets a replica trains in an epoch; under global sampling epochs may differ."""
        windows = self.window_counts_by_replica[replica] * self.spec.targets_per_window
        if self.sampling == "sharded":
            return windows - int(self._padding[replica])
        last = int(self._last_window_positions(epoch)[0])
        trains_last = last // self.batch_size % self.replicas == replica
        return windows - int(self._padding[0]) * trains_last

    def masked_target_tokens(self, replica: int, *, first_epoch: int = 0) -> int:
        """Return how many targets a replica pads and masks over all epochs, the first being ``first_epoch``."""
        slots = self.steps_per_epoch * self.batch_size * self.spec.targets_per_window
        if self.sampling == "sharded":
            return (slots - self.local_target_tokens(replica)) * self.epochs
        epochs = range(first_epoch, first_epoch + self.epochs)
        return sum(slots - self.local_target_tokens(replica, epoch=epoch) for epoch in epochs)

    def receipt(self, replica: int, *, first_epoch: int = 0) -> dict[str, object]:
        """Return what the schedule trains, pads, excludes and skips, as seen by one replica."""
        return {
            "world_size": self.replicas,
            "epochs": self.epochs,
            "steps_per_epoch": self.steps_per_epoch,
            "window_counts_by_rank": self.window_counts_by_replica,
            "global_real_target_tokens_per_epoch": self.real_targets_per_epoch,
            "local_masked_target_tokens": self.masked_target_tokens(replica, first_epoch=first_epoch),
            "excluded_target_tokens": self.excluded_target_tokens,
            "skipped_target_tokens": self.skipped_target_tokens,
            "policy": POLICY,
        }
