"""The objectives of distillation: how far a student is from its teacher, at each place of a sample.

A *place* is what has one loss: a row of the last axis of the targets, such as the logits after one token or the hidden
state at it. The loss of a batch is the sum over its places; training divides by the places of all ranks.

Shapes: B samples, then the axes of a sample's tensors; F the last of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mixle.data.teacher.specs import BatchConfig, TensorSpec
from mixle.training.modes import scoring_mode
from mixle.utils.exact import require_finite_float

_LOWEST = torch.finfo(torch.float32).min


@runtime_checkable
class DistillationLoss(Protocol):
    """How far predictions are from a teacher's."""

    def losses(self, predicted: Tensor, wanted: Tensor) -> Tensor:
        """Return the loss of each place, (B, ...), from two (B, ..., F) tensors; at least float32."""


@dataclass(frozen=True)
class SoftLabels:
    """The Kullback-Leibler divergence of the student's softened distribution from the teacher's, in nats.

    Both sides are logits, or log-probabilities, of the same classes. They are divided by ``temperature`` and the
    divergence is multiplied by its square, so that its gradient stays of one size (Hinton, Vinyals and Dean,
    arXiv 1503.02531, section 2). A teacher's logit of ``-inf`` is a class that it excludes.

    Args:
        temperature: 1 compares the distributions themselves; more shows how the teacher ranks unlikely classes.

    Raises:
        TypeError, ValueError: ``temperature`` is not a positive number.
    """

    temperature: float = 1.0

    def __post_init__(self) -> None:
        checked = require_finite_float(self.temperature, "temperature", exclusive_minimum=0.0)
        object.__setattr__(self, "temperature", checked)

    def losses(self, predicted: Tensor, wanted: Tensor) -> Tensor:
        student = F.log_softmax(_wide(predicted) / self.temperature, dim=-1)
        teacher = F.log_softmax(_wide(wanted) / self.temperature, dim=-1).clamp_min(_LOWEST)
        return (teacher.exp() * (teacher - student)).sum(-1) * self.temperature**2


@dataclass(frozen=True)
class HiddenStates:
    """The mean squared difference of two hidden states, over their last axis.

    A student of another width needs a projection as its own last layer (Romero et al., arXiv 1412.6550).
    """

    def losses(self, predicted: Tensor, wanted: Tensor) -> Tensor:
        return (_wide(predicted) - _wide(wanted)).square().mean(-1)


class TaughtBatch(NamedTuple):
    """Samples of a teacher on the module's device.

    Attributes:
        inputs: (B, ...), what the module takes.
        targets: (B, ..., F), what it is to return.
        mask: (B, ...) bool, the places that count; None if all do.
    """

    inputs: Tensor
    targets: Tensor
    mask: Tensor | None


@dataclass(frozen=True)
class Distillation:
    """Bring a module's output for one tensor of a sample to another one.

    Args:
        loss: how far they are apart.
        inputs, targets: names of the sample's tensors.
        mask: name of a bool tensor with the shape of the places, False where one does not count; None if all do.
    """

    loss: DistillationLoss
    inputs: str
    targets: str
    mask: str | None = None

    def __post_init__(self) -> None:
        if isinstance(self.loss, type) or not isinstance(self.loss, DistillationLoss):
            raise TypeError(f"loss={self.loss!r} must be a loss, such as SoftLabels() or HiddenStates()")
        names = {"inputs": self.inputs, "targets": self.targets, "mask": "" if self.mask is None else self.mask}
        for argument, name in names.items():
            if not isinstance(name, str):
                raise TypeError(f"{argument}={name!r} must be the name of a tensor, not {type(name).__name__}")

    def require_config(self, config: BatchConfig) -> None:
        """Refuse samples that lack a tensor, or whose tensors cannot be what they are to be.

        Raises:
            ValueError: names the tensor, what it is and what it must be.
        """
        self._spec(config, "inputs", self.inputs)
        targets = self._spec(config, "targets", self.targets)
        if not targets.torch_dtype.is_floating_point:
            raise ValueError(
                f"targets={self.targets!r} is {targets.dtype}, and a distillation has targets of floats; a teacher of "
                "tokens trains a StreamingTransformerLeafEstimator"
            )
        if self.mask is not None:
            mask, places = self._spec(config, "mask", self.mask), targets.shape[:-1]
            if mask.dtype != "bool" or mask.shape != places:
                raise ValueError(
                    f"mask={self.mask!r} is {mask.dtype} of shape {mask.shape}; targets of shape {targets.shape} "
                    f"take bool of {places}"
                )

    def _spec(self, config: BatchConfig, argument: str, name: str) -> TensorSpec:
        if name not in config.tensor_names:
            raise ValueError(f"{argument}={name!r} is no tensor of the samples; there are {config.tensor_names}")
        return config.get_spec(name)

    def blank(self, config: BatchConfig, rows: int, device: torch.device) -> TaughtBatch:
        """Return ``rows`` samples of zeros, of which every place counts."""
        zeros = {s.name: torch.zeros((rows, *s.shape), dtype=s.torch_dtype) for s in config.specs}
        if self.mask is not None:
            zeros[self.mask].fill_(True)
        return self.batch(zeros, device)

    def batch(self, tensors: Mapping[str, Tensor], device: torch.device) -> TaughtBatch:
        """Return samples on the device; those in the host's memory are not copied."""
        inputs, targets = tensors[self.inputs], tensors[self.targets]
        if not inputs.is_floating_point() and inputs.dtype != torch.bool:
            inputs = inputs.long()
        mask = None if self.mask is None else tensors[self.mask].to(device)
        return TaughtBatch(inputs.to(device), _with_features(targets).to(device), mask)

    def places(self, tensors: Mapping[str, Tensor]) -> int:
        """Return how many places of these samples count."""
        if self.mask is not None:
            return int(tensors[self.mask].sum())
        return _with_features(tensors[self.targets]).shape[:-1].numel()

    def loss_sum(self, call: Callable[..., Tensor], batch: TaughtBatch, *, autocast: bool = False) -> Tensor:
        """Return the sum of the places' losses; a module's output may lack a last axis of one."""
        with torch.autocast(batch.inputs.device.type, torch.bfloat16, enabled=autocast):
            predicted = call(batch.inputs)
        losses = self.loss.losses(predicted.reshape(batch.targets.shape), batch.targets)
        return losses.sum() if batch.mask is None else torch.where(batch.mask, losses, 0.0).sum()

    def require_fits(self, module: nn.Module, blank: TaughtBatch) -> None:
        """Run the module once on a blank sample, in eval mode; a collective call if it is sharded.

        Raises:
            TypeError, ValueError: what it returns does not have the shape of the targets.
        """
        with scoring_mode(module):
            predicted = module(blank.inputs[:1])
        kind, wanted = type(module).__name__, tuple(blank.targets[:1].shape)
        if not isinstance(predicted, Tensor):
            raise TypeError(f"{kind} returned a {type(predicted).__name__}, not a tensor")
        found = tuple(predicted.shape)
        if found not in (wanted, wanted[:-1] if wanted[-1] == 1 else wanted):
            raise ValueError(
                f"{kind} maps {self.inputs!r} of shape {tuple(blank.inputs[:1].shape)} to {found}, but targets "
                f"{self.targets!r} have {wanted}; give the module a last layer of that shape"
            )


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _with_features(targets: Tensor) -> Tensor:
    """Give a sample that is one number a last axis."""
    return targets[:, None] if targets.ndim == 1 else targets
