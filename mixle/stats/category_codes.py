"""Turn raw categories into codes of a vocabulary, refusing by index and value what is no category."""

from __future__ import annotations

from typing import Any

import numpy as np

from mixle.stats.categories import plain_category
from mixle.stats.frames import Vocabulary
from mixle.stats.numeric_columns import refuse_masked

__all__ = ["category_codes", "distinct_integers"]

# A table over the range of the integers beats sorting them while it stays this small, or this small beside the data.
_TABLE_SIZE = 1 << 20
_TABLE_PER_ROW = 4


def category_codes(values: Any, family: str) -> tuple[Vocabulary, np.ndarray]:
    """Return the vocabulary of ``values``, and each value's position in it, ``(n,)`` int64.

    Arrays of integers never become Python objects.

    Raises:
        TypeError, ValueError: a value is no category; names its index.
    """
    refuse_masked(values, family)
    if isinstance(values, np.ndarray):
        if values.ndim == 1 and values.dtype.kind in "iu" and values.dtype != np.uint64:
            distinct, codes = distinct_integers(values.astype(np.int64))
            return Vocabulary(distinct.tolist()), codes
        values = values.tolist()
    if {type(v) for v in values} in ({int}, {str}, {bytes}, {bool}):
        vocabulary = Vocabulary(set(values))
    else:
        values = [_category(value, i, family) for i, value in enumerate(values)]
        vocabulary = Vocabulary(values)
    index = vocabulary.index
    return vocabulary, np.fromiter(map(index.__getitem__, values), np.int64, len(values))


def _category(value: Any, i: int, family: str) -> Any:
    try:
        return plain_category(value)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{family}, index {i}: {error}") from error


def distinct_integers(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the distinct integers of an int64 array, ascending, and each element's position among them."""
    if not len(values):
        return values, np.zeros(0, dtype=np.int64)
    low, high = int(values.min()), int(values.max())
    if high - low >= max(_TABLE_SIZE, _TABLE_PER_ROW * len(values)):
        distinct, codes = np.unique(values, return_inverse=True)
        return distinct, codes
    offsets = values - low
    distinct = np.flatnonzero(np.bincount(offsets, minlength=high - low + 1))
    place = np.zeros(high - low + 1, dtype=np.int64)
    place[distinct] = np.arange(len(distinct))
    return distinct + low, place[offsets]
