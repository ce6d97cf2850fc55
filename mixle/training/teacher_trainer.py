"""Train modules on a teacher's samples, on whatever ranks there are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from mixle.data.teacher.specs import BatchConfig
from mixle.training.distillation import Distillation, TaughtBatch
from mixle.training.engine import Engine
from mixle.training.loop import train
from mixle.training.next_token import NextToken, TokenTensors
from mixle.training.optimizer import OptimizerOptions
from mixle.training.options import TrainingOptions
from mixle.training.preparation import LossSum, Preparation
from mixle.training.ranks import PREPARATION_S, Ranks
from mixle.training.state import TrainingState
from mixle.training.taught_tokens import TaughtTokens
from mixle.training.teacher_batches import Deliveries, SampleSupply, Share, Task, TeacherBatches
from mixle.training.token_plan import TokenPlan
from mixle.training.wrap import Parallel, Precision

B = TypeVar("B", bound=tuple[Tensor | None, ...])
Follow = Callable[[Engine[Any]], Callable[[int], None]]


@dataclass(frozen=True)
class _Job(Generic[B]):
    """What an estimator wants of the samples, for one module."""

    task: Task[B]
    blank: B
    loss_sum: Callable[[], LossSum[B]]
    check: Callable[[], None]


class TeacherTrainer:
    """Bring modules to a supply of samples; what is made for one is kept until another comes.

    Args:
        supply: where this rank's samples come from; None for one that another fetches for.
        config: what a sample is.
        ranks: each is one replica, unless a plan says otherwise.
        options: what the loop does around the steps.
        share: who works on which samples.
        steps: optimizer steps of a fit.
        batch_size: samples of a replica's batch.
        seed: of what modules draw.
        max_retries: failed orders in a row after which a rank gives up.
        parallel, precision, activation_checkpointing: how a module is wrapped.
        plan: how the ranks share a module, if they do.
        require_plan_fits: checks the plan against a module and the samples.

    Raises:
        ValueError: ``parallel="none"`` on several ranks.
    """

    def __init__(
        self,
        supply: SampleSupply | None,
        config: BatchConfig,
        ranks: Ranks,
        options: TrainingOptions,
        share: Share,
        *,
        steps: int,
        batch_size: int,
        seed: int,
        max_retries: int,
        parallel: Parallel,
        precision: Precision,
        activation_checkpointing: bool,
        plan: TokenPlan | None = None,
        require_plan_fits: Callable[[nn.Module], None] | None = None,
    ) -> None:
        self._supply, self._config, self._ranks, self._options = supply, config, ranks, options
        self._share, self._plan, self._require_plan_fits = share, plan, require_plan_fits
        self._batch_size = batch_size
        self._order: dict[str, Any] = {
            "steps": steps,
            "accumulation": options.gradient_accumulation,
            "batch_size": batch_size,
            "seed": seed,
            "max_retries": max_retries,
        }
        self._preparation: Preparation[Any] = Preparation(
            ranks,
            parallel=parallel,
            precision=precision,
            activation_checkpointing=activation_checkpointing,
            plan=plan,
        )
        self.deliveries = Deliveries()

    def release(self) -> None:
        """Let go of the module that was trained last."""
        self._preparation.release()

    def fit(
        self,
        purpose: Distillation | None,
        module: nn.Module,
        device: torch.device,
        state: TrainingState,
        optimizer_options: OptimizerOptions,
        follow: Follow | None = None,
    ) -> None:
        """Train ``module`` in place for the steps of a fit, and move ``state`` on.

        Args:
            purpose: the distillation; None trains next tokens.
            follow: given the engine, returns what is called after every step with its targets.

        Raises:
            ValueError: the samples, the module or the plan do not fit together.
            TeacherError: the teacher failed on this rank; on its peers as ``ranks`` tells of it.
        """
        job = self._job(purpose, module, device)
        engine = self._engine(job, purpose, module, device)
        batches = TeacherBatches(
            self._supply, job.task, job.blank, self._share, deliveries=self.deliveries, **self._order
        )
        try:
            train(
                engine,
                batches,
                state,
                epochs=1 if self._order["steps"] else 0,
                optimizer_options=optimizer_options,
                options=self._options,
                ranks=self._ranks,
                after_step=None if follow is None else follow(engine),
            )
        finally:
            batches.release()

    def prepare(self, purpose: Distillation | None, module: nn.Module, device: torch.device) -> None:
        """Make ``module`` trainable, with rank 0's parameters on every rank."""
        self._engine(self._job(purpose, module, device), purpose, module, device)

    def _engine(
        self, job: _Job[Any], purpose: Distillation | None, module: nn.Module, device: torch.device
    ) -> Engine[Any]:
        return self._preparation.engine(
            module, device, check=lambda: self._agree(job), loss_sum=job.loss_sum, purpose=purpose
        )

    def _job(self, purpose: Distillation | None, module: nn.Module, device: torch.device) -> _Job[Any]:
        """Return what is to be done; checks nothing that needs the other ranks."""
        if purpose is None:
            return self._tokens(module, device)
        return self._distillation(purpose, module, device)

    def _agree(self, job: _Job[Any]) -> None:
        error = None
        try:
            job.check()
        except Exception as caught:
            error = caught
        self._ranks.agree("checking the module", error, deadline_s=PREPARATION_S)

    def _tokens(self, module: nn.Module, device: torch.device) -> _Job[TokenTensors]:
        tokens = TaughtTokens.of(self._config)

        def check() -> None:
            self._preparation.place(module, device)
            longest = getattr(module, "block", None)
            if isinstance(longest, int) and tokens.length > longest:
                raise ValueError(
                    f"samples have {tokens.length} tokens, more than block={longest}, the longest sequence that the "
                    f"{type(module).__name__} takes"
                )
            if self._require_plan_fits is not None:
                self._require_plan_fits(module)
            self._objective(module).vocabulary(module, tokens.length, device)

        vocab = getattr(module, "vocab", None)
        known = replace(tokens, vocab=vocab) if isinstance(vocab, int) else tokens
        blank = tokens.blank(self._batch_size, device)
        return _Job(known, blank, lambda: self._objective(module).loss_sum, check)

    def _objective(self, module: nn.Module) -> NextToken:
        if self._plan is not None:
            return self._plan.objective(module)
        return NextToken(module, "all", autocast=self._preparation.autocasts(module))

    def _distillation(self, task: Distillation, module: nn.Module, device: torch.device) -> _Job[TaughtBatch]:
        task.require_config(self._config)
        if self._plan is not None:
            raise ValueError(
                "a plan trains next tokens, with a StreamingTransformerLeafEstimator; for a DistillationEstimator "
                "leave tp_size, pp_size and cp_size at 1"
            )
        blank = task.blank(self._config, self._batch_size, device)

        def check() -> None:
            self._preparation.place(module, device)
            task.require_fits(module, blank)

        def loss_sum() -> LossSum[TaughtBatch]:
            return partial(task.loss_sum, autocast=self._preparation.autocasts(module))

        return _Job(task, blank, loss_sum, check)
