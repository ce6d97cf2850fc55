"""What one rank has of a model under a plan, and which part of a batch goes with it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from mixle.experimental.tensor_pipeline_context_parallel.collectives import gathered
from mixle.experimental.tensor_pipeline_context_parallel.context_parallel import own_positions, parts_of_sequence
from mixle.experimental.tensor_pipeline_context_parallel.layout import Layout
from mixle.experimental.tensor_pipeline_context_parallel.mesh import PlanMesh
from mixle.experimental.tensor_pipeline_context_parallel.plan import Plan
from mixle.experimental.tensor_pipeline_context_parallel.stage import Stage
from mixle.training.next_token import IGNORED
from mixle.training.wrap import named_parameters


class Share(NamedTuple):
    """A context rank's part of a batch: (B, T) ids, (B, T) or (B, 1) targets, and then the (B,) place they are at."""

    ids: Tensor
    targets: Tensor
    at: Tensor | None


@dataclass(frozen=True)
class Parts:
    """What this rank has of a model under a plan.

    Attributes:
        stages: its own, in order.
        layout: where everyone's parameters lie.
        fsdp: whether the ranks that differ in data and context only share the parameters out.
        hidden_dtype: of what passes between stages.
        tied: the head's weight is the embedding's.
    """

    plan: Plan
    mesh: PlanMesh
    stages: tuple[Stage, ...]
    layout: Layout
    fsdp: bool
    hidden_dtype: torch.dtype
    tied: bool

    @property
    def has_tied_copy(self) -> bool:
        """Whether the head here is a copy of the first stage's embedding."""
        return self.tied and self.plan.pp > 1 and self.stages[-1].is_last

    def parameters(self) -> dict[str, nn.Parameter]:
        """Return this rank's parameters under the whole model's names; a tied copy under the embedding's."""
        found: dict[str, nn.Parameter] = {}
        for stage in self.stages:
            found |= named_parameters(stage)
        if self.has_tied_copy:
            found["embedding.weight"] = found.pop("head.weight")
        return found

    def padded_length(self, length: int) -> int:
        """Return the length at which every rank's part of a sequence is as long."""
        unit = parts_of_sequence(self.plan.cp, self.plan.cp_mode) * self.plan.tp
        return -(-length // unit) * unit

    def hidden_like(self, rows: int, length: int, device: torch.device | str) -> Tensor:
        """Return an empty tensor of the shape that passes between stages, for sequences of ``length``."""
        own = self.padded_length(length) // self.plan.cp // self.plan.tp
        return torch.empty((rows, own, self.stages[0].width), dtype=self.hidden_dtype, device=device)

    def share(self, inputs: Tensor, targets: Tensor) -> Share:
        """Return this context rank's part of (B, T) ids and their (B, T) or (B, 1) targets.

        Sequences are padded at the end to equal parts; causal attention keeps that from the real tokens.
        """
        rows, length = inputs.shape
        ids = self._own_part(inputs, 0)
        if targets.shape[1] == length:
            return Share(ids, self._own_part(targets, IGNORED), None)
        place = self._own_place_of(length - 1)
        own = targets if place is not None else torch.full_like(targets, IGNORED)
        return Share(ids, own, torch.full((rows,), place or 0, device=ids.device))

    def _own_part(self, rows: Tensor, filler: int) -> Tensor:
        length = self.padded_length(rows.shape[1])
        padded = F.pad(rows, (0, length - rows.shape[1]), value=filler)
        return padded if self.plan.cp == 1 else padded[:, self._own_places(length).to(rows.device)].contiguous()

    def _own_places(self, padded_length: int, cp_rank: int | None = None) -> Tensor:
        rank = self.mesh.rank("cp") if cp_rank is None else cp_rank
        return own_positions(padded_length, self.plan.cp, rank, self.plan.cp_mode)

    def _own_place_of(self, position: int) -> int | None:
        found = torch.nonzero(self._own_places(self.padded_length(position + 1)) == position)
        return int(found) if len(found) else None

    # ---- without gradients

    def logits(self, inputs: Tensor, *, last_only: bool) -> Tensor:
        """Return the whole (B, T, V) or (B, V) logits on every rank; a collective call."""
        rows, length = inputs.shape
        share = self.share(inputs, inputs[:, -1:] if last_only else inputs)

        def finish(stage: Stage, logits: Tensor) -> Tensor:
            if self.plan.tp > 1:
                logits = gathered(logits, 2, self.mesh.group("tp"))
            if share.at is not None and self.plan.cp > 1 and self._own_place_of(length - 1) is None:
                logits = torch.zeros_like(logits)
            return self._joined(logits.to(self._result_dtype), share, length)

        vocab = self.layout.shapes["embedding.weight"][0]
        shape = (rows, 1, vocab) if last_only else (rows, length, vocab)
        result = self._forward(share, length, shape, finish)
        return result[:, 0] if last_only else result

    def log_probabilities(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the log-probability of each target, (B, K), 0 where masked, on every rank; a collective call."""
        share = self.share(inputs, targets)

        def finish(stage: Stage, logits: Tensor) -> Tensor:
            return self._joined(-stage.losses(logits, share.targets).to(self._result_dtype), share, inputs.shape[1])

        return self._forward(share, inputs.shape[1], tuple(targets.shape), finish)

    @property
    def _result_dtype(self) -> torch.dtype:
        return torch.promote_types(self.hidden_dtype, torch.float32)

    def _joined(self, local: Tensor, share: Share, length: int) -> Tensor:
        """Bring the context ranks' (B, K, ...) results together, in the order of the sequence."""
        if self.plan.cp == 1:
            return local[:, :length]
        if share.at is not None:  # only one rank's is not zero
            dist.all_reduce(local, group=self.mesh.group("cp"))
            return local
        padded = self.padded_length(length)
        order = torch.cat([self._own_places(padded, rank) for rank in range(self.plan.cp)]).argsort()
        return gathered(local, 1, self.mesh.group("cp"))[:, order.to(local.device)][:, :length]

    def _forward(
        self, share: Share, length: int, shape: tuple[int, ...], finish: Callable[[Stage, Tensor], Tensor]
    ) -> Tensor:
        """Pass a batch through all stages and return on every rank what ``finish`` makes of the last one's logits."""
        pp, group, rows = self.plan.pp, self.mesh.group("pp"), len(share.ids)
        x, device = share.ids, share.ids.device
        result = torch.empty(shape, dtype=self._result_dtype, device=device)
        for stage, index in zip(self.stages, self.plan.stages_of(group.rank()), strict=True):
            if index > 0:
                x = self.hidden_like(rows, length, device)
                dist.recv(x, group=group, group_src=(index - 1) % pp)
            x = stage(x, at=share.at)
            if stage.is_last:
                result = finish(stage, x).contiguous()
            else:
                dist.send(x.contiguous(), group=group, group_dst=(index + 1) % pp)
            for part in stage.modules():  # without a backward pass, some stay gathered
                if isinstance(part, FSDPModule):
                    part.reshard()
        if pp > 1:
            dist.broadcast(result, group=group, group_src=pp - 1)
        return result
