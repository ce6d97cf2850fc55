"""What the training loop does around the optimizer's steps; serves every training handle."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from mixle.utils.exact import require_choice, require_exact_bool, require_finite_float, require_positive_int

if TYPE_CHECKING:
    from mixle.training.state import StepRecord

NonFinite = Literal["raise", "skip"]


class StopTraining(Exception):  # noqa: N818  (a request, like StopIteration, not an error)
    """Raise it in a callback to end the call after the present step; one rank's request ends it on all."""


@dataclass(frozen=True)
class Evaluation:
    """Score held-out data while training; results go to the step's record.

    Args:
        data: what the handle trains on, held out: for token handles a token array, the same one on every rank.
        every: optimizer steps between evaluations, counted over the whole training.
    """

    data: object = field(repr=False)
    every: int

    def __post_init__(self) -> None:
        require_positive_int(self.every, "every")


@dataclass(frozen=True)
class TrainingOptions:
    """Say what happens around the optimizer's steps; the same on every rank, but for ``progress``.

    Args:
        gradient_accumulation: schedule steps per optimizer step; its gradient is the mean over their targets together.
        max_grad_norm: scale the gradient down to this 2-norm, that of the whole model and all ranks.
        checkpoint: not built yet; only None.
        evaluation: score held-out data every so often.
        callbacks: called in order after each optimizer step, on every rank, with its
            :class:`~mixle.training.state.StepRecord`. With callbacks the loss is reduced at every step (two small
            collectives), otherwise once per call: every rank has some, or none has.
        progress: show a line on rank 0's stderr; None shows it if that is a terminal.
        nonfinite: an optimizer step with a loss or gradient that is NaN or infinite on any rank ends the fit with a
            ``FloatingPointError`` on every rank (``"raise"``), or leaves the parameters and is counted (``"skip"``).
        deadline_s: seconds to wait for a rank that does not come to a collective call before an error names it.

    Raises:
        TypeError, ValueError: an argument that is not what it says above.
        NotImplementedError: ``checkpoint`` is given.
    """

    gradient_accumulation: int = 1
    max_grad_norm: float | None = None
    checkpoint: None = None
    evaluation: Evaluation | None = None
    callbacks: Sequence[Callable[[StepRecord], None]] = ()
    progress: bool | None = None
    nonfinite: NonFinite = "raise"
    deadline_s: float = 30.0

    def __post_init__(self) -> None:
        require_positive_int(self.gradient_accumulation, "gradient_accumulation")
        if self.max_grad_norm is not None:
            require_finite_float(self.max_grad_norm, "max_grad_norm", exclusive_minimum=0.0)
        if self.checkpoint is not None:
            raise NotImplementedError(f"checkpoint={self.checkpoint!r} is not built yet; leave it None")
        if not isinstance(self.evaluation, (Evaluation, type(None))):
            raise TypeError(f"evaluation={self.evaluation!r} must be an Evaluation or None")
        if not isinstance(self.callbacks, Sequence):
            raise TypeError(f"callbacks={self.callbacks!r} must be a sequence of callables")
        for callback in self.callbacks:
            if not callable(callback):
                raise TypeError(f"callbacks holds {callback!r}, which is not callable")
        object.__setattr__(self, "callbacks", tuple(self.callbacks))
        if self.progress is not None:
            require_exact_bool(self.progress, "progress")
        require_choice(self.nonfinite, "nonfinite", ("raise", "skip"))
        require_finite_float(self.deadline_s, "deadline_s", exclusive_minimum=0.0)
