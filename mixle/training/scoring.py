"""Score batches of tokens without training on them."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mixle.training.modes import scoring_mode
from mixle.training.next_token import IGNORED, NextToken, TokenTensors


def log_density_sum(
    module: nn.Module, objective: NextToken, batches: Iterable[TokenTensors], *, world: int, counted: bool = True
) -> Tensor:
    """Return the count of real targets and the sum of their log-probabilities, over all ranks, (2,) float64.

    Every rank must have as many batches if the module is sharded.

    Args:
        world: how many ranks there are.
        counted: whether this rank's targets are added: not if another rank scores the same.
    """
    device = next(module.parameters()).device
    sums = torch.zeros(2, dtype=torch.float64, device=device)
    with scoring_mode(module):
        for batch in batches:
            log_probabilities = objective.log_probabilities(module, batch)
            sums[0] += (batch.targets != IGNORED).sum()
            sums[1] += log_probabilities.double().sum()
    if not counted:
        sums.zero_()
    if world > 1:
        dist.all_reduce(sums)
    return sums


def log_densities(module: nn.Module, objective: NextToken, batches: Iterable[TokenTensors]) -> Tensor:
    """Return the log-probabilities of this rank's real targets, in order, (n,) float64 on the CPU."""
    with scoring_mode(module):
        parts = [
            objective.log_probabilities(module, batch)[batch.targets != IGNORED].double().cpu() for batch in batches
        ]
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.float64)
