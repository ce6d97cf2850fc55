"""Causal attention over a sequence in parts, by the online softmax, with a receipt of what was in memory."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from mixle.experimental.tensor_pipeline_context_parallel.context_parallel import own_positions
from mixle.experimental.tensor_pipeline_context_parallel.plan import CpMode


@dataclass(frozen=True)
class AttentionReceipt:
    """What one rank has in memory at once, at most, and what it does.

    Attributes:
        key_value_elements: of keys and values: those that it attends to.
        score_elements: of attention weights.
        scores_by_rank: attention weights that each rank computes, those that causality makes zero left out.
    """

    key_value_elements: int
    score_elements: int
    scores_by_rank: tuple[int, ...]


def sharded_attention(
    q: Tensor, k: Tensor, v: Tensor, *, ranks: int, mode: CpMode = "ring"
) -> tuple[Tensor, AttentionReceipt]:
    """Attend causally, each rank with its own queries to one rank's keys and values after the other's.

    A running maximum, a running denominator and a running output are all that is kept between them.

    Args:
        q, k, v: (B, H, T, K), T divisible into the parts that ``mode`` cuts it into.

    Returns:
        (B, H, T, K), in the order of the sequence, and a receipt.
    """
    length, places = q.shape[2], [own_positions(q.shape[2], ranks, rank, mode) for rank in range(ranks)]
    outputs, computed, largest = [], [], 0
    for own in places:
        maximum = torch.full(q[:, :, own, :1].shape, -math.inf, dtype=q.dtype)
        denominator, output = torch.zeros_like(maximum), torch.zeros_like(q[:, :, own])
        needed = 0
        for theirs in places:
            allowed = theirs <= own[:, None]
            needed += int(allowed.sum()) * q.shape[0] * q.shape[1]
            scores = (q[:, :, own] @ k[:, :, theirs].mT / math.sqrt(q.shape[-1])).masked_fill(~allowed, -math.inf)
            largest = max(largest, scores.numel())
            # The maximum only keeps exponentials in range: it cancels, and needs no gradient.
            higher = torch.maximum(maximum, scores.detach().amax(-1, keepdim=True))
            origin = higher.masked_fill(higher == -math.inf, 0.0)
            weights, correction = (scores - origin).exp(), (maximum - origin).exp()
            denominator = denominator * correction + weights.sum(-1, keepdim=True)
            output = output * correction + weights @ v[:, :, theirs]
            maximum = higher
        outputs.append(output / denominator)
        computed.append(needed)
    joined = torch.cat(outputs, 2)[:, :, torch.cat(places).argsort()]
    held = 2 * k.numel() * (length // ranks) // length
    return joined, AttentionReceipt(held, largest, tuple(computed))
