"""Find the adapter that shows a model's parameters to DiLoCo."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from mixle.diloco.parameters import NumpyParameters, Parameters

__all__ = ["parameters_of"]


def parameters_of(model: Any) -> Parameters:
    """Return the parameters of a torch module, a mapping of numpy arrays, or what is a ``Parameters`` already.

    Raises:
        TypeError: it is none of these.
        ValueError: it has no trainable parameter.
    """
    torch = sys.modules.get("torch")  # a torch module cannot be without it
    if torch is not None and isinstance(model, torch.nn.Module):
        from mixle.diloco.torch_parameters import TorchParameters

        found: Parameters = TorchParameters(model)
    elif isinstance(model, Mapping):
        found = NumpyParameters(model)
    elif all(hasattr(model, name) for name in ("schema", "embeddings", "read", "align")):
        found = model
    else:
        raise TypeError(
            f"model is a {type(model).__name__}; give a torch.nn.Module, a mapping of names to numpy arrays, or an "
            "object with the members of mixle.diloco.parameters.Parameters"
        )
    if not found.schema.parameters:
        raise ValueError("model has no trainable parameter; there is nothing to train together")
    return found
