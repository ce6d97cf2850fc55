"""Attention over a sequence whose parts lie on different ranks.

With ``"ring"`` a sequence is cut into ``2 * cp`` parts and rank r holds parts r and ``2 * cp - 1 - r``: an early and a
late one, so that causal attention costs every rank the same. Keys and values travel around the ring while each rank
attends to those that it has; in the backward pass their gradients travel with them, and arrive where they belong. No
rank ever holds more of them than its own, those it attends to and those that are on their way.

With ``"allgather"`` rank r holds the r-th part of ``cp``, and every rank gathers the keys and values of all of them.

Shapes: B batch, H heads, T tokens of this rank, K head width.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from mixle.experimental.tensor_pipeline_context_parallel.attention_blocks import block_backward, block_forward, merge
from mixle.experimental.tensor_pipeline_context_parallel.collectives import gather_along, gathered
from mixle.experimental.tensor_pipeline_context_parallel.plan import CpMode


def parts_of_sequence(cp_size: int, mode: CpMode) -> int:
    """Return into how many parts a sequence is cut."""
    return 2 * cp_size if mode == "ring" and cp_size > 1 else cp_size


def own_positions(length: int, cp_size: int, cp_rank: int, mode: CpMode) -> Tensor:
    """Return which positions of a sequence a rank holds, in its order, (length / cp_size,) int64.

    Raises:
        ValueError: ``length`` is not divisible by the number of parts.
    """
    count = parts_of_sequence(cp_size, mode)
    if length % count:
        raise ValueError(f"a sequence of {length} tokens cannot be cut into {count} equal parts")
    parts = torch.arange(length).chunk(count)
    return parts[cp_rank] if count == cp_size else torch.cat((parts[cp_rank], parts[count - 1 - cp_rank]))


def attention_over(group: ProcessGroup, mode: CpMode, dropout: float = 0.0) -> nn.Module:
    """Return what takes the place of a block's ``attention.attend``.

    Raises:
        ValueError: dropout of attention weights, which a ring never has at one place.
    """
    if mode == "allgather":
        return GatheredAttention(group, dropout)
    if dropout:
        raise ValueError(
            f'dropout={dropout} drops attention weights, which cp_mode="ring" never has in one place; '
            'use dropout=0 or cp_mode="allgather"'
        )
    return RingAttention(group)


class RingAttention(nn.Module):
    """Causal attention of this rank's queries to the keys of all ranks, which come by."""

    def __init__(self, group: ProcessGroup) -> None:
        super().__init__()
        self.group = group

    def forward(self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None) -> Tensor:
        """Attend; ``documents`` (B, T) int64 confine each token to those of its own document."""
        return ring_attention(q, k, v, self.group, documents)


class GatheredAttention(nn.Module):
    """Causal attention of this rank's queries to the gathered keys of this rank and those before it."""

    def __init__(self, group: ProcessGroup, dropout: float = 0.0) -> None:
        super().__init__()
        self.group, self.dropout = group, dropout

    def forward(self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None) -> Tensor:
        """Attend; ``documents`` (B, T) int64 confine each token to those of its own document."""
        own = q.shape[2]
        first, seen = own * self.group.rank(), own * (self.group.rank() + 1)
        k, v = (gather_along(x, 2, self.group)[:, :, :seen] for x in (k, v))
        places = torch.arange(seen, device=q.device)
        mask = places <= places[first:, None]
        if documents is not None:
            everyones = gathered(documents, 1, self.group)[:, :seen]
            mask = (mask & (documents[:, :, None] == everyones[:, None]))[:, None]
        dropout = self.dropout if self.training else 0.0
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout)


def ring_attention(q: Tensor, k: Tensor, v: Tensor, group: ProcessGroup, documents: Tensor | None = None) -> Tensor:
    """Attend causally over a sequence that is split over the ranks of ``group`` as :func:`own_positions` says.

    Exact in forward and backward (Liu et al., arXiv 2310.01889).

    Args:
        q, k, v: (B, H, T, K), T even unless the group has one rank.
        documents: (B, T) int64; a token attends to those of its own document only.
    """
    return _Ring.apply(q, k, v, group, documents)


class _Messages:
    """Tensors on their way to the next rank of the ring, and from the one before."""

    def __init__(self, group: ProcessGroup, outgoing: Tensor, incoming: Tensor) -> None:
        rank, size = group.rank(), group.size()
        self.incoming, self._outgoing = incoming, outgoing
        self._works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, outgoing, group=group, group_peer=(rank + 1) % size),
                dist.P2POp(dist.irecv, incoming, group=group, group_peer=(rank - 1) % size),
            ]
        )

    def wait(self) -> Tensor:
        for work in self._works:
            work.wait()
        return self.incoming


def _travelling(own: Tensor, group: ProcessGroup) -> Any:
    """Yield (source rank, its tensor) for every rank, this one first; the next is on its way while one is used."""
    rank, size = group.rank(), group.size()
    present, spare = own, None
    for step in range(size):
        last = step == size - 1
        arriving = None
        if not last:
            arriving = _Messages(group, present, torch.empty_like(own) if spare is None else spare)
        yield (rank - step) % size, present
        if arriving is not None:
            spare = None if present is own else present
            present = arriving.wait()


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, group: ProcessGroup, documents: Tensor | None) -> Tensor:
        everyones = None if documents is None else gathered(documents[None], 0, group)
        exact = torch.float64 if q.dtype == torch.float64 else torch.float32
        out = torch.zeros_like(q, dtype=exact)
        lse = torch.full(q.shape[:3], -torch.inf, dtype=exact, device=q.device)
        own = torch.stack((k, v))
        for source, (k_block, v_block) in _travelling(own, group):
            rows, keys, causal = _causal_part(group.rank(), source, q.shape[2])
            part, part_lse = block_forward(
                q[:, :, rows],
                k_block[:, :, keys],
                v_block[:, :, keys],
                causal=causal,
                mask=_mask(everyones, group.rank(), source, rows, keys),
            )
            merge(out[:, :, rows], lse[:, :, rows], part, part_lse)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, own, out, lse, everyones)
        ctx.group = group
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        q, own, out, lse, everyones = ctx.saved_tensors
        group, grad = ctx.group, grad.contiguous()
        dq = torch.zeros_like(q, dtype=lse.dtype)
        homeward: _Messages | None = None
        for source, (k_block, v_block) in _travelling(own, group):
            rows, keys, causal = _causal_part(group.rank(), source, q.shape[2])
            dq_part, *dkv_part = block_backward(
                grad[:, :, rows],
                q[:, :, rows],
                k_block[:, :, keys],
                v_block[:, :, keys],
                out[:, :, rows],
                lse[:, :, rows],
                causal=causal,
                mask=_mask(everyones, group.rank(), source, rows, keys),
            )
            dq[:, :, rows] += dq_part
            # What the ranks before this one found for the same keys has travelled one rank behind the keys.
            dkv = torch.zeros_like(own, dtype=lse.dtype) if homeward is None else homeward.wait()
            for gradient, part in zip(dkv, dkv_part, strict=True):
                gradient[:, :, keys] += part
            if group.size() > 1:
                homeward = _Messages(group, dkv, torch.empty_like(dkv))
        if homeward is not None:
            dkv = homeward.wait()
        dk, dv = dkv.to(own.dtype)
        return dq.to(q.dtype), dk, dv, None, None


def _causal_part(rank: int, source: int, length: int) -> tuple[slice, slice, bool]:
    """Return which of a rank's queries attend to which of a source's keys, and whether causally among them.

    Of keys from a lower rank every query sees the early half and none the late half; of a higher rank's keys the late
    queries see all and the early ones none.
    """
    everything, half = slice(0, length), length // 2
    if source == rank:
        return everything, everything, True
    if source < rank:
        return everything, slice(0, half), False
    return slice(half, length), everything, False


def _mask(everyones: Tensor | None, rank: int, source: int, rows: slice, keys: slice) -> Tensor | None:
    if everyones is None:
        return None
    return everyones[rank][:, rows, None] == everyones[source][:, None, keys]
