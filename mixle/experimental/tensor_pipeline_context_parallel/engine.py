"""The engine that trains a model under a plan: the loop sees one gradient, whichever ranks it was made on."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from mixle.experimental.tensor_pipeline_context_parallel.parallelize import parts_of
from mixle.experimental.tensor_pipeline_context_parallel.parts import Share
from mixle.experimental.tensor_pipeline_context_parallel.pipeline_parallel import Pipeline, add_across_ends
from mixle.experimental.tensor_pipeline_context_parallel.tensor_parallel import split_dim
from mixle.training.next_token import TokenTensors
from mixle.training.optimizer import Layout
from mixle.training.wrap import replicate

_BUCKET_BYTES = 25 << 20


class PlanEngine:
    """Train a module that :func:`~.parallelize.parallelize` took apart; all ranks of a replica get the same batches.

    Args:
        module: this rank's part of the model.
        batch_size: rows of every batch; the plan's microbatches divide it.
        block: tokens of every row.
    """

    def __init__(self, module: nn.Module, *, batch_size: int, block: int) -> None:
        self.module, self._parts = module, parts_of(module)
        plan, mesh = self._parts.plan, self._parts.mesh
        self.averaged_over = plan.dp * plan.cp
        self.layout: Layout | None = self._parts.layout
        self._stages = self._parts.stages
        self._parameters = {name: p for name, p in self._parts.parameters().items() if p.requires_grad}
        self.device = next(iter(self._parameters.values())).device
        self._replicas = mesh.data.get_group()
        self._replicated = not self._parts.fsdp and self.averaged_over > 1
        self._pipeline: Pipeline | None = None
        self._failed = False
        self._call: nn.Module = self._stages[0]
        if plan.pp > 1:
            rows = batch_size // plan.microbatches
            length = self._parts.padded_length(block) // plan.cp
            ids = torch.empty((rows, length), dtype=torch.int64, device="meta")
            hidden = self._parts.hidden_like(rows, block, "meta").requires_grad_()
            self._pipeline = Pipeline(self._stages, plan, mesh.group("pp"), hidden, ids)
        elif self._replicated:
            self._call = replicate(self._stages[0], self.device, self._replicas)

    def parameters(self) -> dict[str, nn.Parameter]:
        return self._parameters

    def forward_backward(self, batch: TokenTensors, scale: float, *, last: bool) -> Tensor:
        share = self._parts.share(batch.inputs, batch.targets)
        if self._pipeline is None:
            total = self._one_stage(share, scale, last)
        else:
            total = self._pipeline.forward_backward(*share, scale)
            pp = self._parts.mesh.group("pp")
            dist.broadcast(total, group=pp, group_src=pp.size() - 1)
        if last:
            self._complete_gradients()
            self._failed = math.isnan(scale)
        return total[0]

    def _one_stage(self, share: Share, scale: float, last: bool) -> Tensor:
        call = self._call
        if isinstance(call, FSDPModule):
            call.set_requires_gradient_sync(last)
        if isinstance(call, DistributedDataParallel):
            call.require_backward_grad_sync = last
        loss = call(*share)
        total = loss.detach()
        loss.backward(total * 0.0 + scale)  # NaN unless the sum is finite
        return total

    def _complete_gradients(self) -> None:
        """Average over the replicas where nothing else did, and add up the parts of gradients that ranks share."""
        parts, mesh = self._parts, self._parts.mesh
        if self._pipeline is not None and self._replicated:
            _all_reduce(self._gradients(), self._replicas, average=True)
        if parts.plan.tp > 1:
            everywhere = [g for name, g in self._named_gradients() if split_dim(name) is None]
            _all_reduce(everywhere, mesh.group("tp"), average=False)
        if parts.tied and parts.plan.pp > 1 and (self._stages[0].is_first or self._stages[-1].is_last):
            weight = self._parameters.get("embedding.weight")
            if weight is not None:
                own = _local(weight.grad)
                own.copy_(add_across_ends(own, mesh.group("pp")))

    def _named_gradients(self) -> list[tuple[str, Tensor]]:
        return [(name, _local(p.grad)) for name, p in self._parameters.items() if p.grad is not None]

    def _gradients(self) -> list[Tensor]:
        return [gradient for _, gradient in self._named_gradients()]

    def gradient_norm(self) -> Tensor:
        counted = [gradient for name, gradient in self._named_gradients() if self._is_first_holder(name)]
        # Not every rank's scale reaches a gradient: that of a stage before the last does not.
        square = torch.full((), math.nan if self._failed else 0.0, dtype=torch.float64, device=self.device)
        if counted:
            square += torch.stack(torch._foreach_norm(counted)).double().square().sum()
        dist.all_reduce(square)
        return square.sqrt()

    def _is_first_holder(self, name: str) -> bool:
        """Whether this rank is the first of those that hold the same part of a parameter."""
        parts, mesh = self._parts, self._parts.mesh
        if name == "embedding.weight" and parts.has_tied_copy:
            return False
        if not parts.fsdp and self._replicas.rank() > 0:
            return False
        return split_dim(name) is not None or mesh.rank("tp") == 0

    def scale_gradient(self, max_norm: float, norm: Tensor) -> None:
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for gradient in self._gradients():
            gradient.mul_(factor.to(gradient.dtype))

    def sum_over_replicas(self, values: Tensor) -> Tensor:
        if self.averaged_over > 1:
            dist.all_reduce(values, group=self._replicas)
        return values

    def sum_over_ranks(self, values: Tensor) -> Tensor:
        dist.all_reduce(values)
        return values

    def sync_buffers(self) -> None:
        """Do nothing: a :class:`CausalLM` has no buffers."""


def _local(gradient: Tensor | None) -> Tensor:
    assert gradient is not None
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


def _all_reduce(gradients: list[Tensor], group: dist.ProcessGroup, *, average: bool) -> None:
    """Add up tensors over ranks, in place, few at a time."""
    bucket: list[Tensor] = []
    for place, gradient in enumerate(gradients):
        bucket.append(gradient)
        full = sum(g.numel() * g.element_size() for g in bucket) >= _BUCKET_BYTES
        if full or place == len(gradients) - 1:
            flat = torch.cat([g.flatten() for g in bucket])
            dist.all_reduce(flat, group=group)
            if average:
                flat /= group.size()
            for g, part in zip(bucket, flat.split([g.numel() for g in bucket]), strict=True):
                g.copy_(part.view_as(g))
            bucket = []
