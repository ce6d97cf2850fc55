"""Find ids that are no tokens, in chunks, so that a memory-mapped array is never in memory as a whole."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from mixle.data.token_file import TokenFile


class BadToken(NamedTuple):
    """An id that is no token: where it stands and what it is."""

    position: int
    value: int | float


def find_bad_token(
    tokens: NDArray[Any] | TokenFile, start: int, stop: int, vocab: int | None, *, chunk: int = 1 << 22
) -> BadToken | None:
    """Return the first of ``tokens[start:stop]`` that is no integer in ``[0, vocab)``, None if all are.

    Reads ``chunk`` tokens at a time; with ``vocab=None`` any non-negative integer will do. Unsigned tokens of which no
    value can be bad are not read.
    """
    if tokens.dtype.kind == "u" and (vocab is None or np.iinfo(tokens.dtype).max < vocab):
        return None
    for first in range(start, stop, chunk):
        part = np.asarray(tokens[first : min(first + chunk, stop)])
        if _is_clean(part, vocab):
            continue
        bad = ~(part >= 0)
        if vocab is not None:
            bad |= part >= vocab
        if part.dtype.kind == "f":
            bad |= ~np.isfinite(part) | (part != np.floor(part))
        where = int(np.argmax(bad))
        return BadToken(first + where, part[where].item())
    return None


def _is_clean(part: NDArray[Any], vocab: int | None) -> bool:
    """Judge a chunk by its extremes, so that a clean one costs no temporary arrays of its size."""
    low, high = part.min(), part.max()
    within = bool(low >= 0 and (vocab is None or high < vocab))
    return within and (part.dtype.kind != "f" or bool(np.isfinite(high) and (part == np.floor(part)).all()))
