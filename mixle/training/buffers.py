"""A module's buffers before a step: what a forward pass counts or averages there must not outlive a step not taken."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Buffers:
    """Remember the buffers that are part of a module's state, and put them back; a module without any costs nothing.

    Args:
        module: whose buffers these are; the parts of it that have some stay the same while it is trained.
    """

    def __init__(self, module: nn.Module) -> None:
        self._places = [
            (part, name)
            for part in module.modules()
            for name in part._buffers
            if name not in part._non_persistent_buffers_set
        ]
        self._before: list[tuple[Tensor | None, Tensor | None]] = []

    def remember(self) -> None:
        """Copy them as they are now."""
        now = [part._buffers[name] for part, name in self._places]
        self._before = [(buffer, None if buffer is None else buffer.detach().clone()) for buffer in now]

    def restore(self) -> None:
        """Make them what they were when they were remembered: the same tensors with the same values."""
        with torch.no_grad():
            for (part, name), (buffer, values) in zip(self._places, self._before, strict=True):
                part._buffers[name] = buffer
                if buffer is not None and values is not None:
                    buffer.copy_(values)
