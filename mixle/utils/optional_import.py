"""Import what an extra brings, or say which extra to install."""

from __future__ import annotations

import importlib
from types import ModuleType


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
