"""Collectives that gradients pass through: along one dimension of a tensor, over one axis of the mesh.

Gathering and summing-and-scattering are each other's transpose, so each is the other's backward pass.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

# Torch renamed these, and warns of the old names.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def gather_along(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """Return the ranks' tensors one after the other along ``dim``; the gradient is summed and scattered back."""
    return _Gather.apply(x, dim, group) if group.size() > 1 else x


def sum_scatter_along(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """Return this rank's part along ``dim`` of the sum over the ranks; the gradient is gathered."""
    return _SumScatter.apply(x, dim, group) if group.size() > 1 else x


def gathered(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """Return the ranks' tensors one after the other along ``dim``, without history."""
    x = x.detach().contiguous()
    parts = x.new_empty((group.size(), *x.shape))
    _all_gather_single(parts, x[None], group=group)
    return torch.cat(parts.unbind(), dim)


def sum_scattered(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """Return this rank's part along ``dim`` of the sum over the ranks, without history."""
    parts = torch.stack(x.detach().chunk(group.size(), dim))
    own = parts.new_empty((1, *parts.shape[1:]))
    _reduce_scatter_single(own, parts, group=group)
    return own[0]


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return gathered(x, dim, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return sum_scattered(grad, ctx.dim, ctx.group), None, None


class _SumScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return sum_scattered(x, dim, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return gathered(grad, ctx.dim, ctx.group), None, None
