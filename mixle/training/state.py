"""What training carries from one call to the next: all that a resumed run needs beside the parameters."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from mixle.training.optimizer import OptimizerState


class StepRecord(float):
    """One optimizer step. As a number it is the loss, so that a history is a sequence of losses.

    Attributes:
        step: which optimizer step this was, the first being 1.
        epoch: the epoch it was taken in, the first being 0.
        loss: mean over the step's targets on all ranks, in nats.
        learning_rate: of the step.
        grad_norm: 2-norm of the whole gradient, before clipping.
        targets: real targets on all ranks.
        seconds: wall time, on this rank; None for an M-step, which did not compute the gradient.
        skipped: whether the loss or the gradient was not finite and the parameters were left as they were.
        evaluation: mean loss over the held-out targets after this step, where it was evaluated.
    """

    step: int
    epoch: int
    learning_rate: float
    grad_norm: float
    targets: int
    seconds: float | None
    skipped: bool
    evaluation: float | None

    def __new__(
        cls,
        loss: float,
        *,
        step: int,
        epoch: int,
        learning_rate: float,
        grad_norm: float,
        targets: int,
        seconds: float | None,
        skipped: bool = False,
        evaluation: float | None = None,
    ) -> StepRecord:
        record = super().__new__(cls, loss)
        record.step, record.epoch, record.learning_rate = step, epoch, learning_rate
        record.grad_norm, record.targets, record.seconds = grad_norm, targets, seconds
        record.skipped, record.evaluation = skipped, evaluation
        return record

    @property
    def loss(self) -> float:
        return float(self)

    def __getnewargs_ex__(self) -> tuple[tuple[float], dict[str, Any]]:
        return (float(self),), dict(vars(self))

    def to_dict(self) -> dict[str, Any]:
        """Return the record as a dict of numbers, from which ``StepRecord(**d)`` makes an equal one."""
        return {"loss": float(self), **vars(self)}

    def __repr__(self) -> str:
        return f"StepRecord({', '.join(f'{name}={value!r}' for name, value in self.to_dict().items())})"


@dataclass
class TrainingState:
    """How far the training of one module has come; it is trained in place, and so is this.

    Attributes:
        optimizer: moments, by parameter name.
        step: optimizer steps so far, skipped ones included.
        epoch: epochs completed: the number of the one to go on with.
        epoch_step: schedule steps done in that epoch.
        skipped: optimizer steps skipped for a loss or gradient that was not finite.
        revision: counts every change of the parameters by a fit: gradients of one revision are not added to another's.
        history: a record per optimizer step.
    """

    optimizer: OptimizerState = field(default_factory=OptimizerState)
    step: int = 0
    epoch: int = 0
    epoch_step: int = 0
    skipped: int = 0
    revision: int = 0
    history: list[StepRecord] = field(default_factory=list)

    def dense(self) -> TrainingState:
        """Return a copy that holds the moments whole; a collective call if they are sharded."""
        moments = OptimizerState(self.optimizer.kind, self.optimizer.dense())
        return replace(self, optimizer=moments, history=list(self.history))
