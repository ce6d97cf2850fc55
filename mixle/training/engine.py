"""Where a step's arithmetic runs: the loop gives it batches and gets back one gradient, the same for every engine."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Generic, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from mixle.training.optimizer import Layout
from mixle.training.wrap import named_buffers, named_parameters

B = TypeVar("B")
B_contra = TypeVar("B_contra", contravariant=True)


class LocalFailure(Exception):  # noqa: N818  (it carries the error of this rank to where all ranks agree on it)
    """This rank failed before it entered a collective of the step; the cause says how."""


class Engine(Protocol[B_contra]):
    """One rank's part of the arithmetic. All ranks make the same calls in the same order.

    Attributes:
        module: what is trained.
        device: where it runs.
        averaged_over: how many ranks' gradients the collective averages.
        layout: how the parameters lie on the ranks; None where every rank has all of them.
    """

    module: nn.Module
    device: torch.device
    averaged_over: int
    layout: Layout | None

    def parameters(self) -> dict[str, nn.Parameter]:
        """Return what is trained here, by name: shards where the parameters are sharded."""

    def forward_backward(self, batch: B_contra, scale: float, *, last: bool) -> Tensor:
        """Add ``scale`` times the gradient of the batch's summed loss, and return that sum, without history.

        The gradients of the ranks are averaged when ``last`` of the optimizer step is done. A sum that is not finite
        makes the whole gradient NaN, on every rank.

        Raises:
            LocalFailure: the batch failed, but this rank can still take part in the step with another one.
        """

    def gradient_norm(self) -> Tensor:
        """Return the 2-norm of the whole gradient: the same scalar on every rank."""

    def scale_gradient(self, max_norm: float, norm: Tensor) -> None:
        """Scale the gradient of 2-norm ``norm`` down to ``max_norm`` if it is larger."""

    def sum_over_replicas(self, values: Tensor) -> Tensor:
        """Return the sum of ``values``, float64, over the ranks that have different data."""

    def sum_over_ranks(self, values: Tensor) -> Tensor:
        """Return the sum of ``values``, float64, over all ranks."""

    def sync_buffers(self) -> None:
        """Make the buffers that are part of the model the same on all ranks."""


class DataParallelEngine(Generic[B]):
    """Replicas of a module (plain or DDP) or shards of it (FSDP2), each rank with batches of its own.

    Args:
        module: the module that :func:`~mixle.training.wrap.wrap` prepared.
        call: what it returned.
        loss_sum: the summed loss of a batch, given what to call.
        world: how many ranks there are.
    """

    def __init__(
        self,
        module: nn.Module,
        call: Callable[..., Tensor],
        loss_sum: Callable[[Callable[..., Tensor], B], Tensor],
        *,
        world: int,
    ) -> None:
        self.module, self.averaged_over = module, world
        self.layout: Layout | None = None
        self.device = next(module.parameters()).device
        self._call, self._loss_sum = call, loss_sum
        self._parameters = {name: p for name, p in named_parameters(module).items() if p.requires_grad}
        self._saved = sorted(named_buffers(module).keys() & module.state_dict().keys())

    def parameters(self) -> dict[str, nn.Parameter]:
        return self._parameters

    def forward_backward(self, batch: B, scale: float, *, last: bool) -> Tensor:
        with self._synchronizing(last):
            try:
                loss = self._loss_sum(self._call, batch)
            except Exception as error:
                if isinstance(self.module, FSDPModule):  # somewhere among the gathers of its forward pass
                    raise
                raise LocalFailure from error
            total = loss.detach()
            loss.backward(total * 0.0 + scale)  # NaN unless the sum is finite
        return total

    def _synchronizing(self, wanted: bool) -> AbstractContextManager[None]:
        if isinstance(self.module, FSDPModule):
            self.module.set_requires_gradient_sync(wanted)
        if isinstance(self._call, DistributedDataParallel) and not wanted:
            return self._call.no_sync()
        return nullcontext()

    def gradient_norm(self) -> Tensor:
        norm = get_total_norm(self._gradients())
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def scale_gradient(self, max_norm: float, norm: Tensor) -> None:
        clip_grads_with_norm_(self._parameters.values(), max_norm, norm)

    def _gradients(self) -> list[Tensor]:
        return [p.grad for p in self._parameters.values() if p.grad is not None]

    def sum_over_replicas(self, values: Tensor) -> Tensor:
        if self.averaged_over > 1:
            dist.all_reduce(values)
        return values

    def sum_over_ranks(self, values: Tensor) -> Tensor:
        return self.sum_over_replicas(values)

    def sync_buffers(self) -> None:
        if self.averaged_over > 1 and self._saved:
            now = named_buffers(self.module)  # a module may put a new tensor in the place of a buffer
            for name in self._saved:
                dist.broadcast(now[name], src=0)
