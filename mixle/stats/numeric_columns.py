"""Turn raw numbers into float64 columns, refusing by index and value what is no number."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from mixle.stats.encoding import LeafEncoding
from mixle.stats.frames import Frame

__all__ = [
    "concatenated",
    "finite_vector",
    "integer_column",
    "is_row",
    "number_column",
    "refuse_masked",
    "require_axes",
    "supported",
    "vector_columns",
]


def finite_vector(value: Any, name: str, size: int | None = None) -> np.ndarray:
    """Return a parameter as a ``(size,)`` float64 vector, a copy.

    Raises:
        TypeError: it is no vector of numbers.
        ValueError: it is empty, has another length, or holds NaN or an infinity.
    """
    try:
        vector = np.array(value, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{name}={value!r:.80} must be a vector of real numbers") from error
    if vector.ndim != 1 or not vector.size or (size is not None and vector.size != size):
        raise ValueError(f"{name} must be a vector of {size or 'at least one'} numbers, got shape {vector.shape}")
    if not np.isfinite(vector).all():
        raise ValueError(f"{name}={vector.tolist()!r:.80} must be finite")
    return vector


def number_column(values: Any, family: str, *, bools: bool = False) -> np.ndarray:
    """Return ``values`` as ``(n,)`` float64; an int too large for that is infinite.

    Args:
        values: real numbers, in any sequence.
        family: the name to report.
        bools: whether bools count as the numbers 0 and 1.

    Raises:
        TypeError: a value is not a real number (None and a string are not); names its index.
        ValueError: a value is NaN; names its index.
    """
    refuse_masked(values, family)
    if isinstance(values, np.ndarray) and values.ndim == 1 and values.dtype.kind in ("iufb" if bools else "iuf"):
        column = values.astype(np.float64)
    elif {type(value) for value in values} == {float}:
        column = np.array(values)
    else:
        for i, value in enumerate(values):
            if not (_is_real(value) or (bools and isinstance(value, (bool, np.bool_)))):
                hint = "; wrap the family in Optional for missing values" if value is None else ""
                raise TypeError(
                    f"{family} takes real numbers, got {type(value).__name__} ({value!r:.60}) at index {i}{hint}"
                )
        column = np.fromiter(map(_to_float, values), np.float64, len(values))
    missing = np.isnan(column)
    if missing.any():
        raise ValueError(
            f"{family} takes real numbers, got NaN at index {int(np.argmax(missing))}; "
            "drop it, or wrap the family in Optional and give None for missing values"
        )
    return column


def refuse_masked(values: Any, family: str) -> None:
    """Refuse a masked array: read as an array, it would give the values behind its mask.

    Raises:
        TypeError: ``values`` is one.
    """
    if isinstance(values, np.ma.MaskedArray):
        raise TypeError(
            f"{family} does not read masks, got a masked array; give its tolist(), in which masked values are None, "
            "and wrap the family in Optional for them; or drop them with compressed()"
        )


def is_row(value: Any) -> bool:
    """Return whether a value has elements by position, as lists, tuples and arrays do; text does not count."""
    held = hasattr(value, "__len__") and hasattr(value, "__getitem__")
    return held and not isinstance(value, (str, bytes, Mapping))


def concatenated(arrays: Any, kinds: str) -> np.ndarray | None:
    """Return arrays end to end if all are NumPy's, of one dtype whose kind is one of ``kinds``; else None."""
    for x in arrays:
        refuse_masked(x, "a sequence")
    types = {x.dtype if isinstance(x, np.ndarray) else None for x in arrays}
    dtype = types.pop() if len(types) == 1 else None
    if dtype is None or dtype.kind not in kinds:
        return None
    return np.asarray(arrays[0]) if len(arrays) == 1 else np.concatenate(arrays)


def _to_float(value: Any) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def integer_column(values: Any, family: str) -> tuple[np.ndarray, np.ndarray]:
    """Return ``values`` as ``(n,)`` int64, and which of them are integers that fit, ``(n,)`` bool.

    Raises:
        TypeError, ValueError: a value is not a real number; names its index.
    """
    refuse_masked(values, family)
    if isinstance(values, np.ndarray) and values.ndim == 1 and values.dtype.kind in "iu":
        column = values.astype(np.int64)
        return column, np.ones(len(column), dtype=bool) if values.dtype != np.uint64 else column >= 0
    number_column(values, family)
    fits = np.array([_fits_int64(value) for value in values], dtype=bool)
    # Through a float, integers above 2**53 would be rounded.
    exact = (int(value) if fit else 0 for value, fit in zip(values, fits, strict=True))
    return np.fromiter(exact, np.int64, len(fits)), fits


def _fits_int64(value: Any) -> bool:
    if isinstance(value, (float, np.floating)) and not (np.isfinite(value) and value == int(value)):
        return False
    return -(2**63) <= int(value) < 2**63


def vector_columns(values: Any, family: str, dim: int | None) -> np.ndarray:
    """Return vectors as ``(d, n)`` float64, one row of the result per axis.

    Raises:
        TypeError, ValueError: a value is not a vector of ``dim`` real numbers; names its index.
    """
    refuse_masked(values, family)
    if not isinstance(values, np.ndarray):
        values = list(values)
        if not values:
            return np.zeros((dim or 0, 0))
        width = dim
        for i, value in enumerate(values):
            refuse_masked(value, family)
            if not is_row(value):
                raise TypeError(f"{family} takes vectors, got {type(value).__name__} ({value!r:.60}) at index {i}")
            width = len(value) if width is None else width
            if len(value) != width:
                raise ValueError(
                    f"{family} takes vectors of {width} numbers, got {len(value)} at index {i} ({value!r:.60})"
                )
        kinds = set[type]().union(*(map(type, value) for value in values if not isinstance(value, np.ndarray)))
        try:
            # NumPy would take a bool among numbers for a number.
            values = np.array(values, dtype=object if kinds & {bool, np.bool_} else None)
        except ValueError as error:
            raise ValueError(f"{family} takes vectors of real numbers: {error}") from error
    if values.ndim == 2 and len(values) and not values.shape[1]:
        raise ValueError(f"{family} takes vectors of at least one number, got an empty vector at index 0")
    if values.ndim != 2 or (dim is not None and values.shape[1] != dim):
        raise ValueError(f"{family} takes vectors of {dim or 'd'} numbers, got an array of shape {values.shape}")
    if values.dtype.kind not in "iuf":
        bad = next(((i, v) for i, row in enumerate(values) for v in row if not _is_real(v)), (0, values.dtype))
        raise TypeError(f"{family} takes vectors of real numbers, got {bad[1]!r:.60} at index {bad[0]}")
    columns = np.array(values.T, dtype=np.float64, order="C")
    missing = np.isnan(columns).any(axis=0)
    if missing.any():
        i = int(np.argmax(missing))
        raise ValueError(
            f"{family} takes vectors of real numbers, got NaN at index {i} ({values[i].tolist()!r:.60}); drop the row"
        )
    return columns


def require_axes(enc: LeafEncoding, dim: int | None, family: str) -> None:
    """Check that encoded vectors have ``dim`` axes; any number will do if it is None, or if there are no vectors.

    Raises:
        ValueError: they have another number of axes.
    """
    axes = len(enc.columns[0])
    if dim is not None and axes != dim and len(enc):
        raise ValueError(
            f"the vectors were encoded with {axes} axes, but are read by a {family} of {dim}: "
            "encode, fit and score with one number of axes"
        )


def _is_real(value: Any) -> bool:
    return isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, (bool, np.bool_))


def supported(
    columns: np.ndarray,
    possible: np.ndarray,
    stand_in: float,
    frame: Callable[[np.ndarray], Frame | None] = lambda columns: None,
    values: Any = None,
) -> LeafEncoding:
    """Return an encoding that marks the rows outside a family's support and holds ``stand_in`` there.

    Args:
        columns: ``(n,)`` or ``(d, n)``.
        possible: ``(n,)`` bool.
        frame: makes the frame from the columns of the possible rows.
        values: the raw observations, to show one, if the columns do not hold it.
    """
    if possible.all():
        return LeafEncoding((columns,), frame(columns))
    first = int(np.argmin(possible))
    example = repr(columns[..., first].tolist() if values is None else values[first])
    kept = np.where(possible, columns, stand_in)
    return LeafEncoding((kept,), frame(columns[..., possible]), ~possible, example)
