"""Collectives over plain bytes and float64 vectors; no object is ever pickled between ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from mixle.utils.optional_import import optional_import

if TYPE_CHECKING:
    from mixle.utils.parallel.process_group import Peers

__all__ = ["all_gather_bytes", "broadcast_bytes", "sum_everywhere", "sum_to_root"]


def sum_to_root(peers: Peers, vector: np.ndarray) -> np.ndarray:
    """Return the sum of every rank's ``vector``, ``(m,)`` float64 of one length, on rank 0.

    What the other ranks get is undefined.
    """
    if peers.world == 1:
        return vector
    torch, dist = optional_import("torch", extra="torch"), optional_import("torch.distributed", extra="torch")
    total = torch.from_numpy(np.array(vector, dtype=np.float64))
    dist.reduce(total, dst=0)
    return np.asarray(total.numpy())


def sum_everywhere(peers: Peers, vector: np.ndarray) -> np.ndarray:
    """Return the sum of every rank's ``vector``, ``(m,)`` float64 of one length, the same bits on every rank."""
    if peers.world == 1:
        return vector
    torch, dist = optional_import("torch", extra="torch"), optional_import("torch.distributed", extra="torch")
    total = torch.from_numpy(np.array(vector, dtype=np.float64))
    dist.all_reduce(total)
    return np.asarray(total.numpy())


def all_gather_bytes(peers: Peers, payload: bytes) -> list[bytes]:
    """Return every rank's ``payload``, in rank order."""
    if peers.world == 1:
        return [payload]
    torch, dist = optional_import("torch", extra="torch"), optional_import("torch.distributed", extra="torch")
    lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(peers.world)]
    dist.all_gather(lengths, torch.tensor([len(payload)]))
    longest = max(int(length) for length in lengths)
    padded = torch.zeros(longest, dtype=torch.uint8)
    padded[: len(payload)] = torch.frombuffer(bytearray(payload), dtype=torch.uint8) if payload else padded[:0]
    gathered = [torch.empty(longest, dtype=torch.uint8) for _ in range(peers.world)]
    dist.all_gather(gathered, padded)
    return [piece[: int(n)].numpy().tobytes() for piece, n in zip(gathered, lengths, strict=True)]


def broadcast_bytes(peers: Peers, payload: bytes) -> bytes:
    """Return rank 0's ``payload``; the others' is ignored."""
    if peers.world == 1:
        return payload
    torch, dist = optional_import("torch", extra="torch"), optional_import("torch.distributed", extra="torch")
    length = torch.tensor([len(payload)])
    dist.broadcast(length, src=0)
    if peers.rank == 0:
        content = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
    else:
        content = torch.empty(int(length), dtype=torch.uint8)
    dist.broadcast(content, src=0)
    return content.numpy().tobytes()
