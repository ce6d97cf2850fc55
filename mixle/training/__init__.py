"""One SPMD training loop and its parts: what moves the parameters, on which ranks, and what is recorded."""

from __future__ import annotations

from mixle.utils.optional_import import optional_import

optional_import("torch", extra="torch")  # before a module of this package fails to import it without naming the extra

from mixle.training.engine import DataParallelEngine, Engine  # noqa: E402
from mixle.training.loop import BatchSource, train  # noqa: E402
from mixle.training.optimizer import OptimizerOptions, OptimizerState  # noqa: E402
from mixle.training.options import Evaluation, StopTraining, TrainingOptions  # noqa: E402
from mixle.training.state import StepRecord, TrainingState  # noqa: E402

__all__ = [
    "BatchSource",
    "DataParallelEngine",
    "Engine",
    "Evaluation",
    "OptimizerOptions",
    "OptimizerState",
    "StepRecord",
    "StopTraining",
    "TrainingOptions",
    "TrainingState",
    "train",
]
