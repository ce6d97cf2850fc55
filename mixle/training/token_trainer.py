"""Train and score modules on the token windows of a schedule, on whatever ranks there are."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from mixle.data.schedule import Schedule
from mixle.data.token_check import find_bad_token
from mixle.data.token_windows import TokenArray
from mixle.training.anatomy import Anatomy
from mixle.training.engine import Engine
from mixle.training.loop import train
from mixle.training.next_token import NextToken, TokenTensors
from mixle.training.optimizer import OptimizerOptions
from mixle.training.options import TrainingOptions
from mixle.training.preparation import Preparation
from mixle.training.ranks import PREPARATION_S, Ranks
from mixle.training.scoring import log_densities, log_density_sum
from mixle.training.state import TrainingState
from mixle.training.token_batches import TokenBatches
from mixle.training.token_plan import TokenPlan
from mixle.training.wrap import Parallel, Precision, sharding_of

Follow = Callable[[Engine[TokenTensors]], Callable[[int], None]]


class TokenTrainer:
    """Bring modules to a token array; what is made for one is kept until another comes.

    Args:
        tokens: the array that the schedule's shards are in.
        schedule: who trains which windows when.
        ranks: each is one replica, unless a plan says otherwise.
        options: what the loop does around the steps.
        heldout: the tokens of ``options.evaluation``, the same on every rank.
        parallel, precision, activation_checkpointing: how a module is wrapped.
        plan: how the ranks share a module, if they do.

    Raises:
        ValueError: ``heldout`` is too short for one window, or ``parallel="none"`` on several ranks.
    """

    def __init__(
        self,
        tokens: TokenArray,
        schedule: Schedule,
        ranks: Ranks,
        options: TrainingOptions,
        *,
        heldout: TokenArray | None,
        parallel: Parallel,
        precision: Precision,
        activation_checkpointing: bool,
        plan: TokenPlan | None = None,
    ) -> None:
        self._tokens, self._schedule, self._ranks, self._options = tokens, schedule, ranks, options
        self._preparation: Preparation[TokenTensors] = Preparation(
            ranks,
            parallel=parallel,
            precision=precision,
            activation_checkpointing=activation_checkpointing,
            plan=plan,
        )
        self._plan = plan
        self._replica, replicas = (ranks.rank, ranks.world) if plan is None else (plan.replica, plan.replicas)
        self._heldout = heldout
        self._scored = replace(schedule, shuffle=False, epochs=1)
        self._heldout_schedule = None
        if heldout is not None:
            self._heldout_schedule = Schedule(
                schedule.spec,
                schedule.batch_size,
                replicas=replicas,
                n_tokens=len(heldout),
                shuffle=False,
                boundary="overlap",
            )
        self.release()

    def release(self) -> None:
        """Let go of the module that was trained last."""
        self._preparation.release()
        self._checked: Anatomy | None = None
        self.vocabulary: int | None = None

    def fit(
        self,
        module: nn.Module,
        device: torch.device,
        state: TrainingState,
        optimizer_options: OptimizerOptions,
        follow: Follow | None = None,
    ) -> None:
        """Train ``module`` in place for the schedule's epochs, and move ``state`` on.

        Args:
            follow: given the engine, returns what is called after every step with its targets.
        """
        engine = self.prepare(module, device)
        train(
            engine,
            TokenBatches(self._tokens, self._schedule, self._replica, device, rank=self._ranks.rank),
            state,
            epochs=self._schedule.epochs,
            optimizer_options=optimizer_options,
            options=self._options,
            ranks=self._ranks,
            evaluate=lambda: self._heldout_loss(module, device),
            after_step=None if follow is None else follow(engine),
        )

    def prepare(self, module: nn.Module, device: torch.device) -> Engine[TokenTensors]:
        """Return the engine that trains ``module``; making one costs as much as the module is large.

        Raises:
            ValueError: a plan took the module apart, and its parameters have been replaced, frozen or unfrozen since.
        """
        engine = self._preparation.engine(
            module,
            device,
            check=lambda: self._check(module, device),
            loss_sum=lambda: self._objective(module).loss_sum,
        )
        self._checked = Anatomy.of(module)
        return engine

    def log_density_sum(self, module: nn.Module, device: torch.device) -> tuple[int, float]:
        """Return how many targets an epoch has, and the sum of their log-densities, over all ranks."""
        self._ranks.meet("scoring")
        batches = self._scoring_batches(module, device)
        with self._ranks.guard("scoring"):
            return self._summed(module, batches)

    def log_densities(self, module: nn.Module, device: torch.device) -> NDArray[np.float64]:
        """Return the log-densities of this rank's targets, in the order of the tokens; collective if it is sharded."""
        if sharding_of(module) is not None:
            self._ranks.meet("scoring")
        batches = self._scoring_batches(module, device)
        return log_densities(module, self._objective(module), batches).numpy()

    def _scoring_batches(self, module: nn.Module, device: torch.device) -> TokenBatches:
        self._check(module, device)
        return TokenBatches(self._tokens, self._scored, self._replica, device)

    def _heldout_loss(self, module: nn.Module, device: torch.device) -> float:
        assert self._heldout is not None and self._heldout_schedule is not None
        batches = TokenBatches(self._heldout, self._heldout_schedule, self._replica, device)
        count, total = self._summed(module, batches)
        return -total / count

    def _summed(self, module: nn.Module, batches: Iterable[TokenTensors]) -> tuple[int, float]:
        counted = self._plan is None or self._plan.speaks_for_replica
        objective = self._objective(module)
        sums = log_density_sum(module, objective, batches, world=self._ranks.world, counted=counted)
        count, total = sums.tolist()
        return int(count), total

    def _objective(self, module: nn.Module) -> NextToken:
        if self._plan is not None:
            return self._plan.objective(module)
        return NextToken(module, self._schedule.spec.targets, autocast=self._preparation.autocasts(module))

    def _check(self, module: nn.Module, device: torch.device) -> None:
        """Check what the module returns, then every token against its vocabulary; one verdict for all ranks."""
        if self._checked is not None and self._checked.is_of(module):
            return
        vocab, error = 0, None
        try:
            self._preparation.place(module, device)
            self._refuse_longer_windows(module)
            vocab = self._objective(module).vocabulary(module, self._schedule.spec.block, device)
        except Exception as caught:
            error = caught
        self._ranks.agree("checking the module", error, deadline_s=PREPARATION_S)
        self._ranks.agree("checking the tokens", self._bad_token(vocab), deadline_s=PREPARATION_S)
        self._checked, self.vocabulary = Anatomy.of(module), vocab

    def _refuse_longer_windows(self, module: nn.Module) -> None:
        block, longest = self._schedule.spec.block, getattr(module, "block", None)
        if isinstance(longest, int) and block > longest:
            raise ValueError(
                f"block={block} of the handle exceeds block={longest}, the longest sequence that the "
                f"{type(module).__name__} takes; give the handle at most that"
            )

    def _bad_token(self, vocab: int) -> ValueError | None:
        rank, world, n = self._ranks.rank, self._ranks.world, len(self._tokens)
        shard = self._schedule.shards[self._replica]
        start, stop = shard.start, shard.stop
        if self._schedule.sampling == "global":  # every rank has the whole array; each reads its share of it
            start, stop = rank * n // world, (rank + 1) * n // world
        looked_at = [("token_ids", self._tokens, start, stop)]
        if self._heldout is not None:
            looked_at.append(("evaluation.data", self._heldout, 0, len(self._heldout)))
        for name, tokens, first, last in looked_at:
            bad = find_bad_token(tokens, first, last, vocab)
            if bad is not None:
                return ValueError(
                    f"{name}[{bad.position}]={bad.value} on rank {rank} is not an id of the module's vocabulary of "
                    f"{vocab}: an integer in [0, {vocab})"
                )
        return None
