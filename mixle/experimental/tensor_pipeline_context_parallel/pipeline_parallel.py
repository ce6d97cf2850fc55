"""Successive layers on successive ranks: the stages of one rank, and the order in which microbatches pass them.

Stage 0 has the embeddings, the last one the final norm and the head. Tied embeddings are then one parameter in two
places: both copies start equal, their gradients are exchanged and added, and so they stay equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)

from mixle.experimental.tensor_pipeline_context_parallel.plan import Plan
from mixle.experimental.tensor_pipeline_context_parallel.stage import Stage


class Pipeline:
    """One replica's training steps, by :mod:`torch.distributed.pipelining`.

    Args:
        stages: this rank's, in order.
        hidden: the shape of what passes between stages, (rows of a microbatch, t, D), and its dtype on the meta device.
        ids: likewise of what the first stage takes.
    """

    def __init__(self, stages: Sequence[Stage], plan: Plan, group: ProcessGroup, hidden: Tensor, ids: Tensor) -> None:
        self._scale, self._sums = 0.0, list[Tensor]()
        self.is_first, self.is_last = stages[0].is_first, stages[-1].is_last
        device = next(stages[0].parameters()).device
        own: list[Any] = [
            PipelineStage(
                stage,
                index,
                plan.stages,
                device,
                input_args=ids if stage.is_first else hidden,
                output_args=torch.empty(1, device="meta") if stage.is_last else hidden,
                group=group,
            )
            for stage, index in zip(stages, plan.stages_of(group.rank()), strict=True)
        ]
        options: dict[str, Any] = {"n_microbatches": plan.microbatches, "loss_fn": self._scaled, "scale_grads": False}
        self._schedule: ScheduleGPipe | Schedule1F1B | ScheduleInterleaved1F1B | ScheduleInterleavedZeroBubble
        match plan.pp_schedule:
            case "gpipe":
                self._schedule = ScheduleGPipe(own[0], **options)
            case "1f1b":
                self._schedule = Schedule1F1B(own[0], **options)
            case "interleaved":
                self._schedule = ScheduleInterleaved1F1B(own, **options)
            case "zero-bubble":
                self._schedule = ScheduleInterleavedZeroBubble(own, **options)

    def forward_backward(self, ids: Tensor, targets: Tensor, at: Tensor | None, scale: float) -> Tensor:
        """Add ``scale`` times the gradient of the summed loss; return the sum, (1,), 0 before the last stage."""
        self._scale, self._sums = scale, []
        options: dict[str, Any] = {"targets": targets} if at is None else {"targets": targets, "at": at}
        self._schedule.step(*((ids,) if self.is_first else ()), target=targets, **options)
        return torch.stack(self._sums).sum(0) if self.is_last else torch.zeros(1, device=ids.device)

    def _scaled(self, loss_sum: Tensor, targets: Tensor) -> Tensor:
        total = loss_sum.detach()
        self._sums.append(total)
        return (loss_sum * (total * 0.0 + self._scale)).sum()  # NaN unless the sum is finite


def add_across_ends(own: Tensor, group: ProcessGroup) -> Tensor:
    """Return the sum of the first and the last rank's tensors, the same bits on both."""
    own, peer = own.contiguous(), 0 if group.rank() else group.size() - 1
    other = torch.empty_like(own)
    messages = [
        dist.P2POp(dist.isend, own, group=group, group_peer=peer),
        dist.P2POp(dist.irecv, other, group=group, group_peer=peer),
    ]
    for work in dist.batch_isend_irecv(messages):
        work.wait()
    return own + other
