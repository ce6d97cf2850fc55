"""How parameters move: the optimizer, its learning rate at each step, and moments that follow parameters by name."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from mixle.utils.exact import (
    require_choice,
    require_finite_float,
    require_nonnegative_int,
    require_positive_int,
)

Kind = Literal["adamw", "sgd"]
LearningRateSchedule = Literal["constant", "cosine", "linear"]
Moments = dict[str, dict[str, Tensor]]

ADAMW_BETAS = (0.9, 0.95)
ADAMW_WEIGHT_DECAY = 0.1
# The moments each optimizer keeps; all have their parameter's shape, except "step", a count.
SLOTS: dict[str, tuple[str, ...]] = {"adamw": ("exp_avg", "exp_avg_sq", "step"), "sgd": ("momentum_buffer",)}


@dataclass(frozen=True)
class OptimizerOptions:
    """Say how the parameters move.

    Args:
        lr: learning rate at its peak.
        optimizer: ``"adamw"`` (Loshchilov and Hutter, arXiv 1711.05101) or ``"sgd"``.
        betas: AdamW's decay rates of the two moments; (0.9, 0.95) by default.
        weight_decay: decoupled from the gradient, times the learning rate, under AdamW; added to the gradient under
            SGD. Applied to parameters of two or more dimensions: gains and biases are left to find their own scale.
            0.1 by default under AdamW, 0 under SGD.
        momentum: SGD's.
        warmup_steps: optimizer steps in which the rate rises linearly to ``lr``.
        schedule: what follows: ``"constant"``; ``"cosine"`` or ``"linear"`` down to ``min_lr`` at ``total_steps``,
            where it stays.
        total_steps: the horizon of the schedule, in optimizer steps over the whole training, however many calls.
        min_lr: where a falling schedule ends.

    Raises:
        TypeError, ValueError: an argument that is not what it says above, or one that the others make meaningless.
    """

    lr: float = 3e-3
    optimizer: Kind = "adamw"
    betas: tuple[float, float] | None = None
    weight_decay: float | None = None
    momentum: float | None = None
    warmup_steps: int = 0
    schedule: LearningRateSchedule = "constant"
    total_steps: int | None = None
    min_lr: float = 0.0

    def __post_init__(self) -> None:
        settle = self._settle
        require_choice(self.optimizer, "optimizer", ("adamw", "sgd"))
        adamw = self.optimizer == "adamw"
        settle("lr", require_finite_float(self.lr, "lr", exclusive_minimum=0.0))
        if self.betas is not None and not adamw:
            raise ValueError(f'betas={self.betas} are AdamW\'s; optimizer="sgd" takes momentum')
        if self.momentum is not None and adamw:
            raise ValueError(f'momentum={self.momentum} is SGD\'s; optimizer="adamw" takes betas')
        settle("betas", _require_betas(ADAMW_BETAS if self.betas is None else self.betas) if adamw else None)
        momentum = 0.0 if self.momentum is None else self.momentum
        settle("momentum", None if adamw else _require_below_one(momentum, "momentum"))
        decay = (ADAMW_WEIGHT_DECAY if adamw else 0.0) if self.weight_decay is None else self.weight_decay
        settle("weight_decay", require_finite_float(decay, "weight_decay", minimum=0.0))
        settle("warmup_steps", require_nonnegative_int(self.warmup_steps, "warmup_steps"))
        self._check_schedule()

    def _check_schedule(self) -> None:
        require_choice(self.schedule, "schedule", ("constant", "cosine", "linear"))
        self._settle("min_lr", require_finite_float(self.min_lr, "min_lr", minimum=0.0, maximum=self.lr))
        if self.schedule == "constant":
            for name in ("total_steps", "min_lr"):
                if getattr(self, name):
                    raise ValueError(f'{name}={getattr(self, name)} has no effect with schedule="constant"')
        elif self.total_steps is None:
            raise ValueError(f"schedule={self.schedule!r} needs total_steps, the optimizer steps of the whole training")
        else:
            self._settle("total_steps", require_positive_int(self.total_steps, "total_steps"))
            if self.total_steps <= self.warmup_steps:
                raise ValueError(f"total_steps={self.total_steps} must exceed warmup_steps={self.warmup_steps}")

    def _settle(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def learning_rate(self, step: int) -> float:
        """Return the rate of the optimizer step after ``step`` others."""
        if step < self.warmup_steps:
            return self.lr * (step + 1) / self.warmup_steps
        if self.total_steps is None:
            return self.lr
        done = min(1.0, (step - self.warmup_steps) / (self.total_steps - self.warmup_steps))
        share = 1.0 - done if self.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
        return self.min_lr + (self.lr - self.min_lr) * share

    def build(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """Return an optimizer with one group of parameters that decay and one of those that do not."""
        chosen = list(parameters)
        matrices, others = [p for p in chosen if p.ndim >= 2], [p for p in chosen if p.ndim < 2]
        groups = [{"params": matrices}, {"params": others}]
        made: torch.optim.Optimizer
        if self.optimizer == "sgd":
            made = torch.optim.SGD(groups, lr=self.lr)
        else:
            fused = all(p.is_floating_point() and p.device.type in ("cpu", "cuda") for p in chosen)
            made = torch.optim.AdamW(groups, lr=self.lr, fused=fused)
        self.apply_to(made)
        return made

    def apply_to(self, optimizer: torch.optim.Optimizer) -> None:
        """Give an optimizer of this kind these settings."""
        matrices, others = optimizer.param_groups
        matrices["weight_decay"], others["weight_decay"] = self.weight_decay, 0.0
        for group in (matrices, others):
            group |= {"betas": self.betas} if self.optimizer == "adamw" else {"momentum": self.momentum}


def _require_betas(betas: object) -> tuple[float, float]:
    if not isinstance(betas, Sequence) or isinstance(betas, str) or len(betas) != 2:
        raise TypeError(f"betas={betas!r} must be a pair of numbers in [0, 1)")
    first, second = (_require_below_one(beta, f"betas[{i}]") for i, beta in enumerate(betas))
    return first, second


def _require_below_one(value: object, name: str) -> float:
    number = require_finite_float(value, name, minimum=0.0)
    if number >= 1:
        raise ValueError(f"{name}={number} must be below 1")
    return number


class Layout(Protocol):
    """How tensors of a module's parameters lie on this rank, and how they are made whole; both are collective calls."""

    def whole(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return whole tensors, of all ranks' parameters, from those of this rank's; scalars are whole already."""

    def part(self, tensor: Tensor, parameter: nn.Parameter, name: str) -> Tensor:
        """Return what of a whole tensor goes with this rank's parameter ``name``.

        Raises:
            ValueError: it has not the parameter's shape.
        """


class OwnLayout:
    """Every rank has all parameters, whole or as a :class:`~torch.distributed.tensor.DTensor`."""

    def whole(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in tensors.items()}

    def part(self, tensor: Tensor, parameter: nn.Parameter, name: str) -> Tensor:
        if tensor.shape != parameter.shape:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}, its parameter {tuple(parameter.shape)}")
        moved = tensor.detach().to(device=parameter.device, dtype=parameter.dtype, copy=True)
        if isinstance(parameter, DTensor):
            moved = distribute_tensor(moved, parameter.device_mesh, parameter.placements)
        return moved


class OptimizerState:
    """An optimizer's moments, which follow a module's parameters by name when it is moved, sharded or gathered.

    Those of a parameter that is frozen are kept, as an optimizer of torch keeps them, until it is trained again.

    Args:
        kind: the optimizer that they are of; None before the first step.
        moments: dense tensors, ``{parameter: {slot: tensor}}``.
    """

    def __init__(self, kind: Kind | None = None, moments: Moments | None = None) -> None:
        self.kind = kind
        self._moments: Moments = moments or {}
        self._bound: torch.optim.Optimizer | None = None
        self._parameters: dict[str, nn.Parameter] = {}
        self._device: torch.device | None = None
        self._layout: Layout = OwnLayout()

    def bind(
        self,
        options: OptimizerOptions,
        parameters: dict[str, nn.Parameter],
        layout: Layout | None = None,
        *,
        frozen: Collection[str] = (),
    ) -> torch.optim.Optimizer:
        """Return the optimizer of ``parameters`` with these moments; the same one as before while they are the same.

        Args:
            layout: how the parameters lie on the ranks; by default every rank has all of them.
            frozen: names of the module's parameters that are not to be trained.

        Raises:
            ValueError: the moments are another optimizer's, or do not fit the parameters.
        """
        if self.kind is not None and self.kind != options.optimizer:
            raise ValueError(
                f"optimizer={options.optimizer!r} cannot go on from the moments of {self.kind!r}; "
                "fit without a previous estimate to start afresh"
            )
        if self._bound is None or not self._is_bound_to(parameters):
            moments = self.dense()
            optimizer = options.build(parameters.values())
            self._layout = OwnLayout() if layout is None else layout
            odd = moments.keys() - (parameters.keys() | set(frozen) if layout is None else moments.keys())
            if odd:
                raise ValueError(f"the optimizer's state has {min(odd)!r}, which is no parameter of the module")
            # In one order on all ranks: sharding a moment is a collective.
            for name, parameter in parameters.items():
                if name in moments:
                    optimizer.state[parameter] = self._fitted(name, moments[name], parameter)
            self._bound, self._parameters = optimizer, parameters
            self._moments = {
                name: {slot: value.cpu() for slot, value in moments[name].items()}
                for name in sorted(moments.keys() & set(frozen))
            }
            self._device = next(iter(parameters.values())).device
        self.kind = options.optimizer
        options.apply_to(self._bound)
        return self._bound

    def _is_bound_to(self, parameters: dict[str, nn.Parameter]) -> bool:
        return self._parameters.keys() == parameters.keys() and all(
            p is self._parameters[name] and p.device == self._device for name, p in parameters.items()
        )

    def dense(self) -> Moments:
        """Return the moments as whole tensors; a collective call if they are sharded."""
        if self._bound is None or self.kind is None:
            return self._moments
        state, moments = self._bound.state, dict(self._moments)
        for slot in SLOTS[self.kind]:
            here = {
                name: state[p][slot]
                for name, p in self._parameters.items()
                if isinstance(state.get(p, {}).get(slot), Tensor)
            }
            if here:  # on all ranks or none
                for name, tensor in self._layout.whole(here).items():
                    moments.setdefault(name, {})[slot] = tensor
        return moments

    def __getstate__(self) -> dict[str, Any]:
        return vars(OptimizerState(self.kind, self.dense())).copy()

    def _fitted(self, name: str, slots: dict[str, Tensor], parameter: nn.Parameter) -> dict[str, Any]:
        return {
            slot: value.detach().to(parameter.device, copy=True)
            if slot == "step"
            else self._layout.part(value, parameter, name)
            for slot, value in sorted(slots.items())
        }
