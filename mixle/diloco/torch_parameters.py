"""The trainable parameters of a torch module, as DiLoCo sees them."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor, nn

from mixle.diloco.alignment import Blend, Carry, Overwrite, align
from mixle.diloco.parameters import Arrays
from mixle.diloco.serialization import DType, ParameterSpec, Schema

__all__ = ["TorchParameters"]

_DTYPES: dict[torch.dtype, DType] = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


class TorchParameters:
    """The parameters of a module that require a gradient; those that do not stay where they are.

    Shared parameters travel once. Running statistics of normalization layers travel like parameters, so that they are
    averaged; other floating-point buffers in the state dict are refused, since nothing says what merging them means.

    Args:
        module: on any device; moved in place, and not replaced while this lives.

    Raises:
        TypeError: a trainable parameter is not float32, float16 or bfloat16; names it.
        ValueError: a buffer cannot be merged; names it.
    """

    def __init__(self, module: nn.Module) -> None:
        self._tensors: dict[str, Tensor] = {}
        for name, parameter in module.named_parameters():
            if parameter.requires_grad:
                self._tensors[name] = parameter
        for name, buffer in _running_statistics(module).items():
            self._tensors[name] = buffer
        specs = []
        for name, tensor in sorted(self._tensors.items()):
            dtype = _DTYPES.get(tensor.dtype)
            if dtype is None:
                raise TypeError(
                    f"{name} is {tensor.dtype}; DiLoCo trains float32, float16 and bfloat16 parameters: convert it, or "
                    "freeze it with requires_grad_(False)"
                )
            specs.append(ParameterSpec(name, dtype, tuple(tensor.shape)))
        self.schema = Schema(tuple(specs))
        self.embeddings = frozenset(
            f"{prefix}.{name}" if prefix else name
            for prefix, part in module.named_modules()
            if isinstance(part, (nn.Embedding, nn.EmbeddingBag))
            for name, _ in part.named_parameters(recurse=False)
        )

    @torch.no_grad()
    def read(self, names: Iterable[str]) -> Arrays:
        """Return copies, float32, in host memory."""
        return {name: _copied(self._tensors[name]) for name in names}

    @torch.no_grad()
    def align(self, committed: Arrays, reference: Arrays, how: Carry | Overwrite | Blend) -> None:
        """Bring the parameters that ``committed`` names to it, in place."""
        for name, target in committed.items():
            tensor = self._tensors[name]
            start = target if isinstance(how, Overwrite) else reference[name]
            align(tensor, _like(target, tensor), _like(start, tensor), how)


def _copied(tensor: Tensor) -> np.ndarray:
    return tensor.detach().to("cpu", torch.float32, copy=True).contiguous().numpy()


def _like(array: np.ndarray, tensor: Tensor) -> Tensor:
    return torch.from_numpy(array).to(tensor.device)


def _running_statistics(module: nn.Module) -> dict[str, Tensor]:
    """Return the running means and variances of normalization layers by name; refuse other buffers of the model."""
    statistics = {}
    kept = module.state_dict().keys()
    for prefix, part in module.named_modules():
        for name, buffer in part.named_buffers(recurse=False):
            path = f"{prefix}.{name}" if prefix else name
            if path not in kept or not buffer.is_floating_point():
                continue
            if not isinstance(part, nn.modules.batchnorm._NormBase):
                raise ValueError(
                    f"buffer {path} of a {type(part).__name__} is part of the model, and nothing says how sites would "
                    "merge it; make it a parameter, or register it with persistent=False"
                )
            statistics[path] = buffer
    return statistics
