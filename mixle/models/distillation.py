"""A student: a module that learns to answer as a teacher does, and how it is optimized."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from mixle.models.streaming_transformer_leaf import StreamingTransformerLeaf, require_module
from mixle.training.distillation import Distillation, DistillationLoss, HiddenStates, SoftLabels
from mixle.training.optimizer import Kind, LearningRateSchedule, OptimizerOptions
from mixle.training.state import StepRecord, TrainingState
from mixle.training.wrap import resolve_device, sharding_of, unsharded

__all__ = ["DistillationEstimator", "DistillationLeaf", "DistillationLoss", "HiddenStates", "SoftLabels"]


class DistillationLeaf:
    """A module as far as it has been distilled.

    What it predicts is whatever the teacher gave, so that it is no distribution by itself. A module of token ids that
    was given logits is one of next tokens: :meth:`language_model` returns it as a leaf that scores and generates.

    Args:
        module: the student.
        device: where it runs.
        task: what it was distilled from, and how.
        options: how it is optimized when training goes on.
        state: how far its training has come.
    """

    def __init__(
        self,
        module: nn.Module,
        device: str | torch.device = "cpu",
        *,
        task: Distillation,
        options: OptimizerOptions | None = None,
        state: TrainingState | None = None,
    ) -> None:
        self.module, self.device, self.task = require_module(module), resolve_device(device), task
        self.options = OptimizerOptions() if options is None else options
        self.state = TrainingState() if state is None else state
        self._steps = len(self.state.history)

    def __repr__(self) -> str:
        return f"DistillationLeaf({type(self.module).__name__} on {self.device}, {self.state.step} optimizer steps)"

    @property
    def history(self) -> Sequence[StepRecord]:
        """A record per optimizer step until this leaf was returned; each is its mean loss per place, as a number."""
        return self.state.history[: self._steps]

    @property
    def revision(self) -> int:
        """Counts the changes of the module by training."""
        return self.state.revision

    @property
    def is_sharded(self) -> bool:
        """Whether each rank holds a shard of the parameters."""
        return sharding_of(self.module) is not None

    def estimator(self) -> DistillationEstimator:
        """Return an estimator that goes on from here: the module, the loss, and the optimizer's state."""
        return DistillationEstimator._of(self.module, self.device, self.task, self.options, self.state)

    def language_model(self) -> StreamingTransformerLeaf:
        """Return the module as the distribution of the next token given those before; both leaves share it.

        The module maps (B, T) ids to logits; whether it does shows when the leaf is used.
        """
        return StreamingTransformerLeaf(self.module, self.device, options=self.options, state=self.state)

    def unshard(self) -> DistillationLeaf:
        """Return a leaf with the whole module and optimizer state on every rank; itself if dense. A collective call."""
        sharding = sharding_of(self.module)
        if sharding is None:
            return self
        sharding.ranks.meet("unshard on a sharded leaf")
        return DistillationLeaf(
            unsharded(self.module), self.device, task=self.task, options=self.options, state=self.state.dense()
        )

    def __getstate__(self) -> dict[str, Any]:
        return vars(self.unshard()).copy()


class DistillationEstimator:
    """A student, what of a teacher's samples it learns, and how; a teacher handle moves it, in place.

    Args:
        module: called with the samples' ``inputs``, ``(B, *shape)``, integers as int64; returns a tensor with the shape
            of their ``targets``.
        lr: peak learning rate.
        device: where it runs; ``"cuda"`` is this rank's GPU under torchrun.
        loss: :class:`SoftLabels`, :class:`HiddenStates`, or any object with their ``losses`` and an ``==`` by value.
        inputs, targets: names of the samples' tensors.
        mask: name of a bool tensor, False at the places whose loss does not count; None if all do. A place is a row of
            the targets' last axis.
        optimizer, betas, weight_decay, momentum, warmup_steps, schedule, total_steps, min_lr: see
            :class:`~mixle.training.OptimizerOptions`.

    Raises:
        TypeError, ValueError: an argument that is not what it says above.
    """

    def __init__(
        self,
        module: nn.Module,
        lr: float = 3e-3,
        device: str | torch.device = "cpu",
        *,
        loss: DistillationLoss | None = None,
        inputs: str = "ids",
        targets: str = "logits",
        mask: str | None = None,
        optimizer: Kind = "adamw",
        betas: tuple[float, float] | None = None,
        weight_decay: float | None = None,
        momentum: float | None = None,
        warmup_steps: int = 0,
        schedule: LearningRateSchedule = "constant",
        total_steps: int | None = None,
        min_lr: float = 0.0,
    ) -> None:
        options = OptimizerOptions(
            lr, optimizer, betas, weight_decay, momentum, warmup_steps, schedule, total_steps, min_lr
        )
        task = Distillation(SoftLabels() if loss is None else loss, inputs, targets, mask)
        self._settle(require_module(module), resolve_device(device), task, options, None)

    @classmethod
    def _of(
        cls,
        module: nn.Module,
        device: torch.device,
        task: Distillation,
        options: OptimizerOptions,
        state: TrainingState,
    ) -> DistillationEstimator:
        estimator = cls.__new__(cls)
        estimator._settle(module, device, task, options, state)
        return estimator

    def _settle(
        self,
        module: nn.Module,
        device: torch.device,
        task: Distillation,
        options: OptimizerOptions,
        state: TrainingState | None,
    ) -> None:
        self.module, self.device, self.task, self.options, self.state = module, device, task, options, state

    @property
    def lr(self) -> float:
        """The peak learning rate."""
        return self.options.lr

    def leaf(self, state: TrainingState | None = None) -> DistillationLeaf:
        """Return the module as it is now; ``state`` instead of the estimator's own."""
        return DistillationLeaf(
            self.module, self.device, task=self.task, options=self.options, state=state or self.state
        )
