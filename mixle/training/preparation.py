"""Make a module trainable as a handle's arguments say, once, and keep what was made until another module comes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

import torch
from torch import Tensor, nn

from mixle.training.anatomy import Anatomy
from mixle.training.engine import DataParallelEngine, Engine
from mixle.training.ranks import Ranks
from mixle.training.wrap import (
    Parallel,
    Precision,
    refuse_planned,
    refuse_replaced_parameters,
    resolve_wrapping,
    sharding_of,
    wrap,
)

B = TypeVar("B")
LossSum: TypeAlias = Callable[[Callable[..., Tensor], B], Tensor]


class EngineMaker(Protocol):
    """The part of a plan that trains modules."""

    def engine(self, module: nn.Module, device: torch.device) -> Engine[Any]:
        """Take ``module`` apart in place, unless it was before, and return what trains it; a collective call."""


class Preparation(Generic[B]):
    """Bring modules onto the ranks.

    Args:
        ranks: each is one replica, unless a plan says otherwise.
        parallel, precision, activation_checkpointing: how a module is wrapped.
        plan: how the ranks share a module, if they do.

    Raises:
        ValueError: ``parallel="none"`` on several ranks.
    """

    def __init__(
        self,
        ranks: Ranks,
        *,
        parallel: Parallel,
        precision: Precision,
        activation_checkpointing: bool,
        plan: EngineMaker | None,
    ) -> None:
        self._ranks, self._parallel, self._precision = ranks, parallel, precision
        self._recompute, self._plan = activation_checkpointing, plan
        if plan is None:
            resolve_wrapping(parallel, ranks.world, "cpu")
        self.release()

    def release(self) -> None:
        """Let go of the module that was prepared last."""
        self._engine: Engine[B] | None = None
        self._prepared: Anatomy | None = None
        self._purpose: object = None

    def autocasts(self, module: nn.Module) -> bool:
        """Whether a forward pass runs under autocast: a sharded module computes in what it was sharded with."""
        return self._precision == "bf16" and sharding_of(module) is None

    def place(self, module: nn.Module, device: torch.device) -> None:
        """Put a module where it is to run.

        Raises:
            ValueError: it is sharded in a way that these ranks cannot train.
        """
        if sharding_of(module) is None:
            module.to(device)
        refuse_replaced_parameters(module)
        if self._plan is None:
            refuse_planned(module)

    def engine(
        self,
        module: nn.Module,
        device: torch.device,
        *,
        check: Callable[[], None],
        loss_sum: Callable[[], LossSum[B]],
        purpose: object = None,
    ) -> Engine[B]:
        """Return the engine that trains ``module``; making one costs as much as the module is large.

        Args:
            check: called before one is made; raises on all ranks or none.
            loss_sum: called once the module is wrapped; returns what sums a batch's losses, given what to call. A plan
                has its own.
            purpose: what ``loss_sum`` computes; an engine made for another is not used again.

        Raises:
            ValueError: a plan took the module apart, and its parameters have been replaced, frozen or unfrozen since.
        """
        engine, before = self._engine, self._prepared
        if engine is not None and before is not None and before.is_of(module) and engine.device == device:
            if purpose == self._purpose:
                return engine
        elif self._plan is not None and engine is not None and engine.module is module:
            raise ValueError(
                f"parameters of the {type(module).__name__} were replaced, frozen or unfrozen after a plan took it "
                "apart; fit the module of leaf.unshard() instead"
            )
        check()
        self._engine = self._make(module, device, loss_sum)
        self._prepared, self._purpose = Anatomy.of(module), purpose
        return self._engine

    def _make(self, module: nn.Module, device: torch.device, loss_sum: Callable[[], LossSum[B]]) -> Engine[B]:
        if self._plan is not None:
            return self._plan.engine(module, device)
        call = wrap(
            module,
            wrapping=resolve_wrapping(self._parallel, self._ranks.world, device.type),
            ranks=self._ranks,
            device=device,
            precision=self._precision,
            activation_checkpointing=self._recompute,
        )
        return DataParallelEngine(module, call, loss_sum(), world=self._ranks.world)
