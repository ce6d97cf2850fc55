"""How many samples a batch has, where its shape leaves no doubt."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

__all__ = ["samples_in"]

_REMEDY = "give run() samples=, a function that tells how many samples a batch has"


def samples_in(batch: Any) -> int:
    """Return how many samples ``batch`` has.

    That is the first dimension of an array or tensor, and of those in a tuple, list or mapping, which must agree; a
    list without any has as many as it is long.

    Raises:
        TypeError: it is none of these, or an array in it has no dimension.
        ValueError: the first dimensions differ.
    """
    if _is_array(batch):
        return _first_dimensions({"": batch}, batch)[""]
    values: Mapping[Any, Any] | None = None
    if isinstance(batch, Mapping):
        values = batch
    elif isinstance(batch, list | tuple):
        values = dict(enumerate(batch))
    arrays = {key: value for key, value in (values or {}).items() if _is_array(value)}
    if arrays:
        found = _first_dimensions(arrays, batch)
        if len(set(found.values())) > 1:
            told = ", ".join(f"[{key!r}] has {count}" for key, count in found.items())
            raise ValueError(f"the first dimensions of a batch's arrays differ: {told}; {_REMEDY}")
        return next(iter(found.values()))
    if isinstance(batch, list) and not any(_holds_arrays(each) for each in batch):
        return len(batch)
    raise TypeError(f"how many samples a batch of type {type(batch).__name__} has is not to be seen; {_REMEDY}")


def _is_array(value: Any) -> bool:
    return isinstance(getattr(value, "shape", None), tuple)


def _holds_arrays(value: Any) -> bool:
    inner: Iterable[Any] = ()
    if isinstance(value, Mapping):
        inner = value.values()
    elif isinstance(value, list | tuple):
        inner = value
    return any(_is_array(each) or _holds_arrays(each) for each in inner)


def _first_dimensions(arrays: Mapping[Any, Any], batch: Any) -> dict[Any, int]:
    if not all(array.shape for array in arrays.values()):
        raise TypeError(f"a batch of type {type(batch).__name__} holds an array without dimensions; {_REMEDY}")
    return {key: int(array.shape[0]) for key, array in arrays.items()}
