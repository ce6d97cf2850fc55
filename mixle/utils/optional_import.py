"""Import what an extra brings, or say which extra to install; know torch's objects without importing it."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any


def optional_import(module: str, *, extra: str) -> ModuleType:
    """Import ``module`` and return it.

    Raises:
        ImportError: the module (or its parent package) is not installed; the message names ``extra``.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or module.partition(".")[0] != error.name.partition(".")[0]:
            raise
        raise ImportError(f"{module} is not installed; install it with: pip install 'mixle[{extra}]'") from error


def is_tensor(value: object) -> bool:
    """Tell whether ``value`` is a torch tensor, without importing torch."""
    return _is_of_torch(value, "Tensor")


def is_torch_module(value: object) -> bool:
    """Tell whether ``value`` is a ``torch.nn.Module``, without importing torch."""
    return _is_of_torch(value, "nn", "Module")


def _is_of_torch(value: object, *path: str) -> bool:
    kind: Any = sys.modules.get("torch")  # another thread may be in the middle of importing it
    for name in path:
        kind = getattr(kind, name, None)
    return isinstance(kind, type) and isinstance(value, kind)
