"""A replica's batches of token windows, as tensors on its device."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from mixle.data.schedule import Schedule
from mixle.data.token_windows import TokenArray, gather, pad_batch
from mixle.training.draws import step_seed
from mixle.training.next_token import IGNORED, TokenTensors


class TokenBatches:
    """Cut one replica's batches out of a token array as a schedule says; a :class:`~mixle.training.loop.BatchSource`.

    Args:
        tokens: the array that the schedule's shards are in.
        schedule: who trains which windows when.
        replica: whose batches these are.
        device: where they go.
        rank: whose draws these are, of several that work on the same batches; ``replica`` by default.
    """

    def __init__(
        self, tokens: TokenArray, schedule: Schedule, replica: int, device: torch.device, *, rank: int | None = None
    ) -> None:
        self._tokens, self._schedule, self._replica, self._device = tokens, schedule, replica, device
        self._rank = replica if rank is None else rank
        self.steps_per_epoch = schedule.steps_per_epoch

    def batch(self, epoch: int, step: int) -> TokenTensors:
        """Return a step's batch; rows that the replica is short of are zeros, masked."""
        schedule, replica = self._schedule, self._replica
        windows = schedule.window_indices(replica, epoch, step)
        cut = gather(self._tokens, schedule.shards[replica], schedule.spec, windows)
        rows = pad_batch(cut, schedule.batch_size)
        targets = rows.targets if rows.mask.all() else np.where(rows.mask, rows.targets, IGNORED)
        return TokenTensors(torch.from_numpy(rows.inputs).to(self._device), torch.from_numpy(targets).to(self._device))

    def blank(self) -> TokenTensors:
        """Return a batch of zeros."""
        spec, rows = self._schedule.spec, self._schedule.batch_size
        inputs = torch.zeros((rows, spec.block), dtype=torch.int64, device=self._device)
        return TokenTensors(inputs, inputs[:, : spec.targets_per_window])

    def targets(self, epoch: int, steps: range) -> int:
        """Return how many real targets all replicas train at some steps."""
        return sum(self._schedule.global_targets(epoch, step) for step in steps)

    def random_seed(self, epoch: int, step: int) -> int:
        """Return a seed of this rank and step, below 2**63."""
        return step_seed(self._schedule.seed, epoch, step, self._rank)

    def __iter__(self) -> Iterator[TokenTensors]:
        """Yield the batches of the first epoch."""
        return (self.batch(0, step) for step in range(self.steps_per_epoch))
