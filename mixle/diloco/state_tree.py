"""Nested dicts and lists of arrays, tensors and plain values, as bytes; nothing in them is ever executed.

What an optimizer's ``state_dict()`` holds fits, its integer keys included. The bytes are a ``.npz`` file: the arrays,
and a JSON text that says where they go.
"""

from __future__ import annotations

import io
import json
import sys
import zipfile
from collections.abc import Callable
from typing import Any

import numpy as np

from mixle.utils.optional_import import is_tensor, optional_import

__all__ = ["frozen", "from_bytes", "to_bytes"]

_TREE = "tree"


def frozen(tree: Any) -> Any:
    """Return a copy of ``tree``, its arrays and tensors copied.

    Raises:
        TypeError: it holds something else than dicts with string or integer keys, lists, tuples, arrays, tensors,
            numbers, strings, bools and None; says where.
    """
    return _mapped(tree, _copy, "state")


def to_bytes(tree: Any) -> bytes:
    """Return what :func:`from_bytes` reads, and raise what :func:`frozen` does."""
    arrays: dict[str, np.ndarray] = {}

    def stored(leaf: Any) -> Any:
        if is_tensor(leaf):
            dtype, shape = str(leaf.dtype).removeprefix("torch."), list(leaf.shape)
            flat = leaf.detach().cpu().contiguous().reshape(-1)
            leaf = flat.view(sys.modules["torch"].uint8).numpy() if flat.numel() else np.empty(0, np.uint8)
            told: list[Any] = ["tensor", dtype, shape]
        elif isinstance(leaf, np.ndarray):
            told = ["array"]
        else:
            return leaf
        name = f"array{len(arrays)}"
        arrays[name] = leaf
        return _Reference([*told, name])

    described = json.dumps(_described(_mapped(tree, stored, "state")))
    buffer = io.BytesIO()
    np.savez(buffer, **{_TREE: np.frombuffer(described.encode(), np.uint8)}, **arrays)  # type: ignore[arg-type]
    return buffer.getvalue()


def from_bytes(data: bytes) -> Any:
    """Return the tree that :func:`to_bytes` stored; tensors are on the CPU.

    Raises:
        ValueError: it is something else.
        ImportError: there are tensors in it, and no torch is installed.
    """
    try:
        with np.load(io.BytesIO(data), allow_pickle=False) as stored:
            return _restored(json.loads(stored[_TREE].tobytes()), stored.__getitem__)
    except ValueError as error:
        # What numpy says of a file that is none of its own invites to execute it.
        why = "no .npz file of numbers" if "pickle" in str(error) else str(error)
        raise ValueError(f"not a stored state: {why}") from None
    except (KeyError, IndexError, TypeError, RuntimeError, EOFError, OSError, zipfile.BadZipFile) as error:
        raise ValueError(f"not a stored state: {error}") from error


class _Reference(list[Any]):
    """Where a leaf was stored."""


def _mapped(tree: Any, leaf: Callable[[Any], Any], where: str) -> Any:
    if isinstance(tree, dict):
        for key in tree:
            if type(key) not in (str, int):
                raise TypeError(f"{where} has the key {key!r}; keys are strings or integers")
        return {key: _mapped(value, leaf, f"{where}[{key!r}]") for key, value in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(_mapped(value, leaf, f"{where}[{i}]") for i, value in enumerate(tree))
    if tree is None or type(tree) in (bool, int, float, str) or is_tensor(tree) or isinstance(tree, np.ndarray):
        if isinstance(tree, np.ndarray) and tree.dtype.hasobject:
            raise TypeError(f"{where} is an array of Python objects; give numbers")
        return leaf(tree)
    if isinstance(tree, np.generic):
        return leaf(tree.item())
    raise TypeError(
        f"{where} is a {type(tree).__name__}; a state holds dicts, lists, tuples, arrays, tensors, numbers, strings, "
        "bools and None"
    )


def _copy(leaf: Any) -> Any:
    if is_tensor(leaf):
        return leaf.detach().clone()
    return leaf.copy() if isinstance(leaf, np.ndarray) else leaf


def _described(tree: Any) -> Any:
    """Return the tree as what JSON keeps apart: [kind, ...] for whatever is not a plain value."""
    if isinstance(tree, _Reference):
        return list(tree)
    if isinstance(tree, dict):
        return ["dict", [[key, _described(value)] for key, value in tree.items()]]
    if isinstance(tree, (list, tuple)):
        return [type(tree).__name__, [_described(value) for value in tree]]
    return tree


def _restored(told: Any, array: Callable[[str], np.ndarray]) -> Any:
    if not isinstance(told, list):
        return told
    match told:
        case ["dict", items]:
            return {key: _restored(value, array) for key, value in items}
        case ["list", items]:
            return [_restored(value, array) for value in items]
        case ["tuple", items]:
            return tuple(_restored(value, array) for value in items)
        case ["array", name]:
            return array(name)
        case ["tensor", dtype, shape, name]:
            torch = optional_import("torch", extra="torch")
            flat = torch.from_numpy(array(name).copy())
            wanted = _dtype_of(torch, dtype)
            return flat.view(wanted).reshape(shape) if flat.numel() else torch.empty(shape, dtype=wanted)
    raise ValueError(f"{told!r:.100} says of nothing what it is")


def _dtype_of(torch: Any, name: str) -> Any:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"dtype {name!r:.100}")
    return dtype
