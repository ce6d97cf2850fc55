"""Memory for copies of batches, used again when nothing refers to it any more.

A large batch in fresh memory costs more in page faults than in copying.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

__all__ = ["Buffers"]

MOST = 4  # kept for each name: more batches in use at a time get memory of their own


class Buffers:
    """Copy tensors into memory that is reused once every tensor over it is gone."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: dict[str, list[tuple[NDArray[np.uint8], weakref.ref[Any]]]] = {}

    def copy(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return contiguous copies of CPU tensors."""
        return {name: self._room(name, tensor).copy_(tensor) for name, tensor in tensors.items()}

    def _room(self, name: str, like: torch.Tensor) -> torch.Tensor:
        size = like.numel() * like.element_size()
        if size == 0:
            return torch.empty(like.shape, dtype=like.dtype, device="cpu")
        with self._lock:
            kept = self._kept.setdefault(name, [])
            for at, (memory, lease) in enumerate(kept):
                if lease() is None and memory.nbytes == size:
                    del kept[at]
                    break
            else:
                memory = np.empty(size, np.uint8)
            # Whatever tensor lies over it keeps this very array alive, through the storage that they share.
            leased = memory[:]
            kept.append((memory, weakref.ref(leased)))
            del kept[:-MOST]
        return torch.from_numpy(leased).view(like.dtype).view(like.shape)
