"""Train and eval mode, borrowed: every part of a module goes back into the mode that it was in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule


@contextmanager
def training_mode(module: nn.Module) -> Iterator[None]:
    """Put a module in train mode."""
    with _mode(module, True):
        yield


@contextmanager
def scoring_mode(module: nn.Module) -> Iterator[None]:
    """Put a module in eval mode, without gradients."""
    with _mode(module, False), torch.no_grad():
        yield
    # A forward pass without a backward leaves the root's parameters gathered.
    if isinstance(module, FSDPModule):
        module.reshard()


@contextmanager
def _mode(module: nn.Module, training: bool) -> Iterator[None]:
    before = [(part, part.training) for part in module.modules()]
    module.train(training)
    try:
        yield
    finally:
        for part, mode in before:
            part.training = mode
