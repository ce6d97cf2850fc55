"""A module that leaves parameters out of some forward passes, in which its rows do not depend on each other."""

from __future__ import annotations

import torch
from torch import nn


class Conditional(nn.Module):
    """Add a table to the rows that start with one id, which few batches hold, and another at every third step."""

    def __init__(self, vocab: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.rare, self.third, self.never = (nn.Embedding(vocab, vocab) for _ in range(4))
        self.steps = 0

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits = self.table(ids)
        self.steps += self.training
        chosen = ids[:, 0] == 0
        if chosen.any():
            logits = logits + chosen[:, None, None] * self.rare(ids)
        if self.steps % 3 == 0:
            logits = logits + self.third(ids)
        return logits
