"""Every layer's matrices split over ranks, whole heads each, and the vocabulary with them.

Between the layers' halves each rank holds a part of the sequence (Korthikanti et al., arXiv 2205.05198): norms and
residual sums are done once per token, not once per rank. Before attention and before the MLP the parts are gathered;
after them the ranks' partial sums are added and scattered again. Each rank has the logits of its own part of the
vocabulary; what the loss needs of the others are a maximum and two sums per token.

A parameter that is not split (norms, biases after a row-parallel layer, learned positions) sees its own rank's tokens
only: its gradient is a part, and the ranks' parts have to be summed.

Shapes: B batch, T tokens, t = T / tp, D width, N tokens in one row, V vocabulary, v = V / tp.
"""

from __future__ import annotations

import re
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from mixle.experimental.tensor_pipeline_context_parallel.collectives import gather_along, sum_scatter_along
from mixle.models.transformer import CausalLM
from mixle.training.next_token import IGNORED

SEQUENCE = 1
# By rows: a rank's outputs are whole heads, hidden units, token ids. By columns: what it adds to is everyone's.
_BY_ROWS = re.compile(r"(.+\.attention\.[qkv]\.(weight|bias)|.+\.mlp\.up\.(weight|bias)|(embedding|head)\.weight)$")
_BY_COLUMNS = re.compile(r"(.+\.attention\.o|.+\.mlp\.down)\.weight$")


def split_dim(name: str) -> int | None:
    """Return along which dimension the parameter of that name in a ``CausalLM`` is split; None if it is not."""
    if _BY_ROWS.match(name):
        return 0
    return 1 if _BY_COLUMNS.match(name) else None


def split_over(model: CausalLM, group: ProcessGroup) -> None:
    """Leave in ``model`` this rank's part of every matrix, in place, with the collectives where they belong.

    Afterwards its blocks take and give (B, t, D), its embedding takes (B, T) ids and gives (B, t, D), and its head
    takes (B, T, D) and gives (B, T, v). Tied embeddings stay tied.
    """
    size, rank = group.size(), group.rank()
    if size == 1:
        return
    tied = model.head.weight is model.embedding.weight
    for name, parameter in list(model.named_parameters(remove_duplicate=False)):
        dim = split_dim(name)
        if dim is not None:
            owner, _, leaf = name.rpartition(".")
            part = parameter.detach().chunk(size, dim)[rank].clone()
            setattr(model.get_submodule(owner), leaf, nn.Parameter(part, parameter.requires_grad))
    own_ids = model.embedding.weight
    model.add_module("embedding", VocabularyParallelEmbedding(own_ids, group))
    if tied:
        model.head.weight = own_ids
    blocks: list[Any] = list(model.blocks)
    for block in blocks:
        block.attention.register_forward_pre_hook(_gather_first(group))
        block.mlp.register_forward_pre_hook(_gather_first(group))
        block.attention.o = RowParallelLinear(block.attention.o, group)
        block.mlp.down = RowParallelLinear(block.mlp.down, group)


def _gather_first(group: ProcessGroup) -> Any:
    def hook(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return (gather_along(inputs[0], SEQUENCE, group), *inputs[1:])

    return hook


class RowParallelLinear(nn.Module):
    """A linear layer of which this rank has some columns, and so some of the inputs: (B, T, .) to (B, t, D)."""

    def __init__(self, part: nn.Linear, group: ProcessGroup) -> None:
        super().__init__()
        self.weight, self.bias, self.group = part.weight, part.bias, group

    def forward(self, x: Tensor) -> Tensor:
        y = sum_scatter_along(F.linear(x, self.weight), SEQUENCE, self.group)
        return y if self.bias is None else y + self.bias


class VocabularyParallelEmbedding(nn.Module):
    """Embeddings of this rank's part of the vocabulary: (B, T) ids, the same on all ranks, to (B, t, D)."""

    def __init__(self, weight: Tensor, group: ProcessGroup) -> None:
        super().__init__()
        self.weight, self.group = weight, group

    def forward(self, ids: Tensor) -> Tensor:
        own = len(self.weight)
        local = ids - own * self.group.rank()
        elsewhere = (local < 0) | (local >= own)
        found = F.embedding(local.masked_fill(elsewhere, 0), self.weight)
        return sum_scatter_along(found.masked_fill(elsewhere[..., None], 0.0), SEQUENCE, self.group)


def next_token_losses(logits_Nv: Tensor, targets_N: Tensor, group: ProcessGroup | None) -> Tensor:
    """Return the negative log-probability of each target, (N,), from the ranks' parts of the logits; 0 where masked.

    Args:
        logits_Nv: float32, this rank's part of the vocabulary.
        targets_N: int64 in [0, V), ``IGNORED`` where masked; the same on all ranks.
        group: None where there is one rank.
    """
    if group is None or group.size() == 1:
        return F.cross_entropy(logits_Nv, targets_N, ignore_index=IGNORED, reduction="none")
    return _VocabularyParallelLosses.apply(logits_Nv, targets_N, group)


class _VocabularyParallelLosses(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_Nv: Tensor, targets_N: Tensor, group: ProcessGroup) -> Tensor:
        own = logits_Nv.shape[1]
        local_N = targets_N - own * group.rank()
        here_N = (local_N >= 0) & (local_N < own)
        local_N = local_N.masked_fill(~here_N, 0)[:, None]
        largest_N = logits_Nv.amax(1)
        dist.all_reduce(largest_N, dist.ReduceOp.MAX, group=group)
        shifted_Nv = logits_Nv - largest_N[:, None]
        of_target_N = shifted_Nv.gather(1, local_N)[:, 0] * here_N
        weights_Nv = shifted_Nv.exp_()
        sums_2N = torch.stack((weights_Nv.sum(1), of_target_N))
        dist.all_reduce(sums_2N, group=group)
        ctx.save_for_backward(weights_Nv.div_(sums_2N[0][:, None]), local_N, here_N, targets_N == IGNORED)
        return (sums_2N[0].log() - sums_2N[1]).masked_fill(targets_N == IGNORED, 0.0)

    @staticmethod
    def backward(ctx: Any, grad_N: Tensor) -> tuple[Tensor, None, None]:
        probabilities_Nv, local_N, here_N, ignored_N = ctx.saved_tensors
        grad_Nv = probabilities_Nv.scatter_add(1, local_N, -here_N[:, None].to(probabilities_Nv.dtype))
        return grad_Nv * grad_N.masked_fill(ignored_N, 0.0)[:, None], None, None
