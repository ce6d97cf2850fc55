"""What a parallel plan brings to the training of a module on tokens; data parallelism alone needs none."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import nn

from mixle.training.engine import Engine
from mixle.training.next_token import NextToken, TokenTensors


class TokenPlan(Protocol):
    """How the ranks share a module, and which of them work on the same rows."""

    @property
    def replica(self) -> int:
        """Whose rows this rank works on."""

    def replica_of(self, rank: int) -> int:
        """Return whose rows a rank works on."""

    @property
    def replicas(self) -> int:
        """How many have rows of their own."""

    @property
    def speaks_for_replica(self) -> bool:
        """Whether what all ranks of a replica know is counted here."""

    def objective(self, module: nn.Module) -> NextToken:
        """Return what scores ``module``; its ``vocabulary`` refuses a module that the plan does not fit."""

    def engine(self, module: nn.Module, device: torch.device) -> Engine[TokenTensors]:
        """Take ``module`` apart in place, unless it was before, and return what trains it; a collective call."""
