"""Attention of some queries to some keys, with the log-sum-exp that lets such blocks be merged exactly.

Shapes: B batch, H heads, Q queries, T keys, K head width. The log of a row's softmax denominator is its ``lse``;
blocks over different keys merge by it (online softmax: Milakov and Gimelshein, arXiv 1805.02867), and a block's
backward pass needs only the merged output and lse (Dao et al., arXiv 2205.14135, algorithm 4).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_FUSED = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_FUSED_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
# Scores of one tile in the unfused form, which serves masks and devices other than the CPU.
_TILE_ELEMENTS = 1 << 24


def block_forward(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Attend to one block of keys.

    Args:
        q: (B, H, Q, K).
        k, v: (B, H, T, K).
        causal: query i attends to keys 0 to i.
        mask: (B, Q, T) bool, True where a query may attend; besides ``causal``.

    Returns:
        The (B, H, Q, K) output, and (B, H, Q) lse; 0 and ``-inf`` for a query with no key.
    """
    if mask is None and q.device.type == "cpu":
        out, lse = _FUSED(q, k, v, 0.0, causal)
        return out, lse
    outs, sums = [], []
    for rows in _tiles(q, k):
        scores = _scores(q, k, rows, causal, mask)
        lse = scores.logsumexp(-1)
        weights = _weights(scores, lse)
        outs.append((weights @ v.to(weights.dtype)).to(q.dtype))
        sums.append(lse)
    return torch.cat(outs, 2), torch.cat(sums, 2)


def block_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    causal: bool,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return this block's part of the gradients of q, k and v, given the output and lse over all blocks."""
    if mask is None and q.device.type == "cpu":
        dq, dk, dv = _FUSED_BACKWARD(grad, q, k, v, out, lse, 0.0, causal)
        return dq, dk, dv
    dq = torch.zeros_like(q, dtype=lse.dtype)
    dk, dv = torch.zeros_like(k, dtype=lse.dtype), torch.zeros_like(v, dtype=lse.dtype)
    scale = 1 / math.sqrt(q.shape[-1])
    for rows in _tiles(q, k):
        weights = _weights(_scores(q, k, rows, causal, mask), lse[:, :, rows])
        grad_rows = grad[:, :, rows].to(lse.dtype)
        dv += weights.mT @ grad_rows
        delta = (grad_rows * out[:, :, rows]).sum(-1, keepdim=True)
        dscores = weights * (grad_rows @ v.to(lse.dtype).mT - delta) * scale
        dq[:, :, rows] = dscores @ k.to(lse.dtype)
        dk += dscores.mT @ q[:, :, rows].to(lse.dtype)
    return dq, dk, dv


def merge(out: Tensor, lse: Tensor, other_out: Tensor, other_lse: Tensor) -> None:
    """Merge attention over other keys into ``out`` and ``lse``, in place."""
    total = torch.logaddexp(lse, other_lse)
    total_or_0 = total.masked_fill(total == -math.inf, 0.0)
    out.mul_((lse - total_or_0).exp()[..., None]).add_(other_out * (other_lse - total_or_0).exp()[..., None])
    lse.copy_(total)


def _tiles(q: Tensor, k: Tensor) -> list[slice]:
    queries = q.shape[2]
    rows = max(1, _TILE_ELEMENTS // max(1, q.shape[0] * q.shape[1] * k.shape[2]))
    return [slice(first, min(first + rows, queries)) for first in range(0, queries, rows)]


def _scores(q: Tensor, k: Tensor, rows: slice, causal: bool, mask: Tensor | None) -> Tensor:
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    scores = q[:, :, rows].to(dtype) @ k.to(dtype).mT / math.sqrt(q.shape[-1])
    if causal:
        places = torch.arange(k.shape[2], device=q.device)
        scores.masked_fill_(places > places[rows, None], -math.inf)
    if mask is not None:
        scores.masked_fill_(~mask[:, None, rows], -math.inf)
    return scores


def _weights(scores: Tensor, lse: Tensor) -> Tensor:
    return (scores - lse.masked_fill(lse == -math.inf, 0.0)[..., None]).exp()
