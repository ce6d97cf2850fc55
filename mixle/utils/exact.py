"""Check arguments exactly: no truthiness, no rounding, and bools are not numbers.

Every function returns the checked value as a plain Python object and otherwise raises an error that names the argument,
the value and the bound: ``TypeError`` for a wrong type, ``ValueError`` for a wrong value.
"""

from __future__ import annotations

import difflib
import math
import operator
import sys
from collections.abc import Iterable
from numbers import Real
from typing import TypeVar

T = TypeVar("T")


def require_exact_bool(value: object, name: str) -> bool:
    """Return ``value`` as a bool if it is a ``bool`` or a ``numpy.bool_``.

    Raises:
        TypeError: anything else, 0, 1 and "false" included.
    """
    numpy = sys.modules.get("numpy")  # without it there is no numpy.bool_, and a process that needs none saves 10 MB
    if isinstance(value, bool) or (numpy is not None and isinstance(value, numpy.bool_)):
        return bool(value)
    raise TypeError(f"{name}={_shown(value)} must be True or False, not {_kind(value)}")


def require_exact_int(value: object, name: str, *, minimum: int | None = None, maximum: int | None = None) -> int:
    """Return ``value`` as an int if it is one: an int, a NumPy integer or a 0-d integer array or tensor.

    Raises:
        TypeError: a bool, a float (2.0 included), a string, or anything else that is not an integer.
        ValueError: the integer is below ``minimum`` or above ``maximum``.
    """
    if not _is_scalar_number(value):
        raise TypeError(f"{name}={_shown(value)} must be an integer, not {_kind(value)}")
    try:
        exact = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"{name}={_shown(value)} must be an integer, not {_kind(value)}") from None
    if minimum is not None and exact < minimum:
        raise ValueError(f"{name}={_shown(exact)} must be at least {minimum}")
    if maximum is not None and exact > maximum:
        raise ValueError(f"{name}={_shown(exact)} must be at most {maximum}")
    return exact


def require_positive_int(value: object, name: str) -> int:
    """Return ``value`` as an int if it is an exact integer of at least 1 (see :func:`require_exact_int`)."""
    return require_exact_int(value, name, minimum=1)


def require_nonnegative_int(value: object, name: str) -> int:
    """Return ``value`` as an int if it is an exact integer of at least 0 (see :func:`require_exact_int`)."""
    return require_exact_int(value, name, minimum=0)


def require_finite_float(
    value: object,
    name: str,
    *,
    minimum: float | None = None,
    exclusive_minimum: float | None = None,
    maximum: float | None = None,
) -> float:
    """Return ``value`` as a float if it is a finite real number: Python's, NumPy's, or a 0-d array or tensor.

    Raises:
        TypeError: a bool, a complex number, a string, or anything else that is not a real number.
        ValueError: NaN, an infinity, or a number outside the bounds.
    """
    if not (isinstance(value, Real) or hasattr(value, "dtype")) or not _is_scalar_number(value):
        raise TypeError(f"{name}={_shown(value)} must be a real number, not {_kind(value)}")
    try:
        real = float(value)  # type: ignore[arg-type]
    except OverflowError:
        real = math.inf
    if not math.isfinite(real):
        raise ValueError(f"{name}={_shown(value)} must be finite")
    if minimum is not None and real < minimum:
        raise ValueError(f"{name}={real!r} must be at least {minimum}")
    if exclusive_minimum is not None and real <= exclusive_minimum:
        raise ValueError(f"{name}={real!r} must be above {exclusive_minimum}")
    if maximum is not None and real > maximum:
        raise ValueError(f"{name}={real!r} must be at most {maximum}")
    return real


def require_choice(value: object, name: str, choices: Iterable[T]) -> T:
    """Return the member of ``choices`` that ``value`` is; True is not 1.

    Raises:
        ValueError: ``value`` is none of them; names them all, and the likely one for a misspelt string.
    """
    accepted = tuple(choices)
    for choice in accepted:
        if isinstance(value, type(choice)) and isinstance(value, bool) == isinstance(choice, bool) and value == choice:
            return choice
    names = [choice for choice in accepted if isinstance(choice, str)]
    near = difflib.get_close_matches(value.lower(), names, n=1) if isinstance(value, str) else []
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ValueError(f"{name}={_shown(value)} must be one of {', '.join(map(repr, accepted))}{hint}")


def _is_scalar_number(value: object) -> bool:
    """Tell whether ``value`` can be one number; arrays and tensors must be 0-d and neither boolean nor complex."""
    if isinstance(value, (bool, str, bytes)):
        return False
    dtype = str(getattr(value, "dtype", ""))
    return getattr(value, "ndim", 0) == 0 and not any(
        kind in dtype for kind in ("bool", "complex", "<U", "|S", "object")
    )


def _kind(value: object) -> str:
    """Name the type of ``value``, with the shape and dtype of an array or tensor."""
    if getattr(value, "ndim", 0):
        return f"an array of shape {tuple(getattr(value, 'shape', ()))}"
    return type(value).__name__


def _shown(value: object) -> str:
    """Return how ``value`` is written, no longer than a message can be; Python writes no integer of 4,300 digits."""
    if isinstance(value, int) and value.bit_length() > 128:
        return f"an integer of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= 500 else f"{text[:250]} ... {text[-200:]}"
