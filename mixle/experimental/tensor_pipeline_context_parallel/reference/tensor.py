"""Layers split over ranks (Shoeybi et al., arXiv 1909.08053, section 3), one list entry per rank.

The parts of a weight are views of it, so that a backward pass leaves the dense layer's gradient.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mixle.models.transformer import MLP, Block, CausalLM, SelfAttention, rotary_angles, rotate
from mixle.training.next_token import IGNORED


def column_parallel_linear(x: Tensor, layer: nn.Linear, ranks: int) -> list[Tensor]:
    """Return what each rank computes of a linear layer's outputs from the whole input: (..., out / ranks)."""
    biases = [None] * ranks if layer.bias is None else layer.bias.chunk(ranks)
    return [F.linear(x, weight, bias) for weight, bias in zip(layer.weight.chunk(ranks), biases, strict=True)]


def row_parallel_linear(parts: Sequence[Tensor], layer: nn.Linear) -> Tensor:
    """Return a linear layer's output from inputs that are spread over ranks: a sum over ranks, then the bias once."""
    weights = layer.weight.chunk(len(parts), 1)
    total = sum_of([F.linear(part, weight) for part, weight in zip(parts, weights, strict=True)])
    return total if layer.bias is None else total + layer.bias


def parallel_mlp(mlp: MLP, x: Tensor, ranks: int) -> Tensor:
    """Return an MLP's output; each rank has some of the hidden units."""
    return row_parallel_linear([F.gelu(part) for part in column_parallel_linear(x, mlp.up, ranks)], mlp.down)


def head_parallel_attention(attention: SelfAttention, x: Tensor, positions: Tensor, ranks: int) -> Tensor:
    """Return attention's output, (B, T, D); each rank has some of the heads, and no part of one."""
    projected = (column_parallel_linear(x, layer, ranks) for layer in (attention.q, attention.k, attention.v))
    outputs = []
    for parts in zip(*projected, strict=True):
        q, k, v = (part.unflatten(-1, (-1, attention.head_width)).transpose(1, 2) for part in parts)
        if attention.rotary:
            angles = rotary_angles(positions, attention.head_width)
            q, k = rotate(q, *angles), rotate(k, *angles)
        outputs.append(attention.attend(q, k, v).transpose(1, 2).flatten(2))
    return row_parallel_linear(outputs, attention.o)


def tensor_parallel_logits(model: CausalLM, ids: Tensor, ranks: int) -> list[Tensor]:
    """Return each rank's part of the logits, (B, T, V / ranks)."""
    positions = torch.arange(ids.shape[1])
    x = _embedded(model.embedding.weight, ids, ranks)
    if model.position_embedding is not None:
        x = x + model.position_embedding(positions)
    for block in model.blocks:
        assert isinstance(block, Block)
        x = x + head_parallel_attention(block.attention, block.attention_norm(x), positions, ranks)
        x = x + parallel_mlp(block.mlp, block.mlp_norm(x), ranks)
    return column_parallel_linear(model.norm(x), model.head, ranks)


def vocabulary_parallel_losses(parts: Sequence[Tensor], targets: Tensor) -> Tensor:
    """Return the negative log-probability of each target, 0 where masked, from (N, V / ranks) parts of the logits.

    What the ranks exchange is one maximum and two sums per row: of the exponentials, and of the target's logit.
    """
    largest = torch.stack([part.detach().amax(1) for part in parts]).amax(0)
    total = sum_of([(part - largest[:, None]).exp().sum(1) for part in parts])
    first, chosen = 0, []
    for part in parts:
        local = targets - first
        here = (local >= 0) & (local < part.shape[1])
        chosen.append(part.gather(1, local.where(here, 0)[:, None])[:, 0].where(here, 0.0))
        first += part.shape[1]
    return (total.log() + largest - sum_of(chosen)).masked_fill(targets == IGNORED, 0.0)


def _embedded(weight: Tensor, ids: Tensor, ranks: int) -> Tensor:
    """Return the embeddings; each rank looks up the ids of its part of the vocabulary, and gives 0 for the others."""
    first, found = 0, []
    for part in weight.chunk(ranks):
        local = ids - first
        here = (local >= 0) & (local < len(part))
        found.append(F.embedding(local.where(here, 0), part).where(here[..., None], 0.0))
        first += len(part)
    return sum_of(found)


def sum_of(tensors: Sequence[Tensor]) -> Tensor:
    """Return what an all-reduce would."""
    return torch.stack(list(tensors)).sum(0)
