"""The training loop: one straight line that every rank runs, whatever holds its data and its parameters.

It is given a source of batches, an engine that turns them into gradients and the state that it moves on; it knows
neither DDP from FSDP2 nor tokens from anything else. Apart from what callbacks ask for, it adds no collective to the
engine's own: losses stay where they were computed and are reduced once, at the end. A rank whose data or module fails
says so through the collective that is there anyway: it makes the gradient NaN, whereupon all ranks stop to ask who did.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from mixle.training.buffers import Buffers
from mixle.training.engine import Engine, LocalFailure
from mixle.training.modes import training_mode
from mixle.training.optimizer import OptimizerOptions
from mixle.training.options import StopTraining, TrainingOptions
from mixle.training.progress import Progress
from mixle.training.ranks import PREPARATION_S, Ranks
from mixle.training.state import StepRecord, TrainingState
from mixle.training.wrap import named_parameters

B = TypeVar("B")
B_co = TypeVar("B_co", covariant=True)


class BatchSource(Protocol[B_co]):
    """Where this rank's batches come from; every rank's source has the same steps and knows the same targets."""

    steps_per_epoch: int

    def batch(self, epoch: int, step: int) -> B_co:
        """Return this rank's batch of a schedule step."""

    def blank(self) -> B_co:
        """Return any batch of the same shape with targets; its gradient is not used."""

    def targets(self, epoch: int, steps: range) -> int:
        """Return how many real targets all ranks train in an optimizer step, whose schedule steps these are.

        Called once before its batches are; a source that makes them on demand does so here, with collectives if need
        be, and keeps what goes wrong on this rank for :meth:`batch` to raise.
        """

    def random_seed(self, epoch: int, step: int) -> int:
        """Return the seed, below 2**63, of whatever the module draws at that step."""


def train(
    engine: Engine[B],
    source: BatchSource[B],
    state: TrainingState,
    *,
    epochs: int,
    optimizer_options: OptimizerOptions,
    options: TrainingOptions,
    ranks: Ranks,
    evaluate: Callable[[], float] | None = None,
    after_step: Callable[[int], None] | None = None,
) -> None:
    """Train ``engine.module`` in place until ``epochs`` more epochs are complete, and move ``state`` on.

    The rest of an epoch in which an earlier call was stopped counts as one.

    Args:
        evaluate: returns the mean held-out loss; called on every rank after every ``options.evaluation.every``-th step.
        after_step: called on every rank after every step that moved the parameters, with the step's targets; it may
            move them too.

    Raises:
        ValueError: the ranks are not at the same step, or move parameters differently.
        FloatingPointError: on every rank, at a step that is not finite, unless it is to be skipped. The parameters, the
            buffers and ``state`` are then as they were before that step.
        Exception: whatever a rank's data, module or callback raised; on its peers as ``ranks`` tells of it.
    """
    if not epochs:
        return
    _require_same_start(ranks, state, optimizer_options)
    run = _Run(engine, source, state, epochs, options, optimizer_options, evaluate, after_step, ranks)
    with ranks.guard("training"):
        cuda = [run.device] if run.device.type == "cuda" else []
        try:
            with training_mode(engine.module), torch.random.fork_rng(cuda), run.progress:
                trouble = run.take_steps()
        except BaseException:
            if ranks.world == 1:  # losses that other ranks have a part in are lost with them
                run.settle_history()
            raise
        engine.sync_buffers()
        run.settle_history()
    if trouble is not None:
        raise trouble


def _require_same_start(ranks: Ranks, state: TrainingState, optimizer_options: OptimizerOptions) -> None:
    """Refuse to start ranks apart: they would train models apart."""
    mine = f"step {state.step}, epoch {state.epoch}+{state.epoch_step}, {optimizer_options}"
    starts = ranks.exchange("starting to train", mine, deadline_s=PREPARATION_S)
    for rank, start in enumerate(starts):
        if start != starts[0]:
            raise ValueError(
                f"rank {rank} starts at {start}, but rank 0 at {starts[0]}; give every rank the same estimator and "
                "previous estimate"
            )


class _Run:
    """One call of :func:`train`."""

    def __init__(
        self,
        engine: Engine[Any],
        source: BatchSource[Any],
        state: TrainingState,
        epochs: int,
        options: TrainingOptions,
        optimizer_options: OptimizerOptions,
        evaluate: Callable[[], float] | None,
        after_step: Callable[[int], None] | None,
        ranks: Ranks,
    ) -> None:
        self.engine, self.source, self.state, self.options = engine, source, state, options
        self.rates, self.evaluate, self.ranks = optimizer_options, evaluate, ranks
        self.after_step = after_step
        self.failure: Exception | None = None
        trained = engine.parameters()
        frozen = named_parameters(engine.module).keys() - trained.keys()
        self.optimizer = state.optimizer.bind(optimizer_options, trained, engine.layout, frozen=frozen)
        self.device = engine.device
        self.buffers = Buffers(engine.module)
        if state.epoch_step >= source.steps_per_epoch:  # a position in longer data
            state.epoch, state.epoch_step = state.epoch + 1, 0
        self.last_epoch = state.epoch + epochs
        per_epoch = -(-source.steps_per_epoch // options.gradient_accumulation)
        self.progress = Progress(per_epoch * epochs, options.progress, ranks.rank)
        self.unsettled: list[tuple[Tensor, dict[str, Any]]] = []

    def take_steps(self) -> Exception | None:
        """Take steps until the epochs are complete or a callback stops them; return what went wrong on any rank."""
        state, per_epoch = self.state, self.source.steps_per_epoch
        self.optimizer.zero_grad()
        while state.epoch < self.last_epoch:
            epoch, first = state.epoch, state.epoch_step
            steps = range(first, min(first + self.options.gradient_accumulation, per_epoch))
            started = time.perf_counter()
            targets = self.source.targets(epoch, steps)
            loss_sum, norm, size = self._finished_gradient(epoch, steps, self.engine.averaged_over / targets)
            finite = math.isfinite(size)
            trouble = None if finite else self._trouble(epoch, first)
            if trouble is not None:
                self.optimizer.zero_grad()
                return trouble
            rate = self.rates.learning_rate(state.step)
            if finite:
                self._move(norm, rate)
            self.optimizer.zero_grad()
            state.step += 1
            state.skipped += not finite
            state.epoch, state.epoch_step = (epoch, steps.stop) if steps.stop < per_epoch else (epoch + 1, 0)
            facts: dict[str, Any] = {
                "step": state.step,
                "epoch": epoch,
                "learning_rate": rate,
                "grad_norm": size,
                "targets": targets,
                "skipped": not finite,
                "seconds": time.perf_counter() - started,
            }
            self.unsettled.append((loss_sum, facts))  # before what may be interrupted: a step taken has its record
            if finite and self.after_step is not None:
                self.after_step(targets)
            facts["evaluation"] = self._evaluation()
            self.progress.advance(loss_sum, self.engine.averaged_over / targets, targets)
            if self.options.callbacks:
                stopped, trouble = self._call_back()
                if stopped:
                    return trouble
        return None

    def _finished_gradient(self, epoch: int, steps: range, scale: float) -> tuple[Tensor, Tensor, float]:
        """Leave a gradient, and return its loss, its norm and that as a number; unless it is finite, nothing else."""
        self.buffers.remember()
        size = math.nan
        try:
            loss_sum = self._gradient(epoch, steps, scale)
            norm = self.engine.gradient_norm()
            size = norm.item()
        finally:
            if not math.isfinite(size):
                self.buffers.restore()
        return loss_sum, norm, size

    def _gradient(self, epoch: int, steps: range, scale: float) -> Tensor:
        """Leave the exact mean's gradient over the steps' targets; return the sum of this rank's losses."""
        seed = self.source.random_seed(epoch, steps[0])
        torch.default_generator.manual_seed(seed)
        if self.device.type == "cuda":
            torch.cuda.manual_seed(seed)
        loss_sums = [self._add_gradient(epoch, step, scale, last=step == steps[-1]) for step in steps]
        return loss_sums[0] if len(loss_sums) == 1 else torch.stack(loss_sums).sum()

    def _add_gradient(self, epoch: int, step: int, scale: float, *, last: bool) -> Tensor:
        """Add one schedule step's gradient; NaN once this rank has failed, which every rank will see."""
        if self.failure is None:
            try:
                batch = self.source.batch(epoch, step)
            except Exception as error:
                self.failure = error
            else:
                try:
                    return self.engine.forward_backward(batch, scale, last=last)
                except LocalFailure as error:
                    assert isinstance(error.__cause__, Exception)
                    self.failure = error.__cause__
        try:
            return self.engine.forward_backward(self.source.blank(), math.nan, last=last)
        except LocalFailure:
            raise self.failure from None

    def _trouble(self, epoch: int, first: int) -> Exception | None:
        """Return why a step was not finite, unless that is to be skipped."""
        try:
            self.ranks.agree(f"step {self.state.step + 1}", self.failure)
        except Exception as error:
            return error
        if self.options.nonfinite == "skip":
            return None
        return FloatingPointError(
            f"the loss or its gradient is not finite at step {self.state.step + 1} (epoch {epoch}, schedule step "
            f'{first}); parameters and buffers are as they were before it. nonfinite="skip" passes over such steps'
        )

    def _move(self, norm: Tensor, rate: float) -> None:
        if self.options.max_grad_norm is not None:
            self.engine.scale_gradient(self.options.max_grad_norm, norm)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.state.revision += 1

    def _evaluation(self) -> float | None:
        wanted = self.options.evaluation
        if wanted is None or self.evaluate is None or self.state.step % wanted.every:
            return None
        return self.evaluate()

    def _call_back(self) -> tuple[bool, Exception | None]:
        """Show the step to the callbacks; tell whether one of any rank's asked to stop or failed, and how."""
        self.settle_history()
        stop = False
        try:
            for callback in self.options.callbacks:
                try:
                    callback(self.state.history[-1])
                except StopTraining:
                    stop = True
        except Exception as error:
            self.failure = error
        flags = torch.tensor([stop, self.failure is not None], dtype=torch.float64, device=self.device)
        stops, failures = self.engine.sum_over_ranks(flags).tolist()
        if not failures:
            return stops > 0, None
        try:
            self.ranks.agree(f"the callbacks of step {self.state.step}", self.failure)
        except Exception as error:
            return True, error
        return True, None

    def settle_history(self) -> None:
        """Reduce the losses that are still this rank's own, in one collective, and record them."""
        if not self.unsettled:
            return
        sums = self._reduced([loss_sum for loss_sum, _ in self.unsettled])
        settled = zip(sums, self.unsettled, strict=True)
        self.state.history += [StepRecord(total / facts["targets"], **facts) for total, (_, facts) in settled]
        self.unsettled.clear()

    def _reduced(self, values: list[Tensor]) -> list[float]:
        stacked = torch.stack([value.to(self.device) for value in values]).double()
        return self.engine.sum_over_replicas(stacked).tolist()
