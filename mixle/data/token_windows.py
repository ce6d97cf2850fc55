"""Check token arrays, and cut batches of training windows out of them.

A token array is a 1-D NumPy array, a ``numpy.memmap`` or a :class:`~mixle.data.token_file.TokenFile`; only the tokens
of the windows asked for are read.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from mixle.data.token_file import TokenFile, refuse_masked
from mixle.data.window_spec import Shard, WindowSpec

TokenArray: TypeAlias = NDArray[Any] | TokenFile


class TokenBatch(NamedTuple):
    """Rows of windows: K is 1 with ``targets="last"`` and ``block`` with ``targets="all"``.

    Attributes:
        inputs: (m, block) int64.
        targets: (m, K) int64, 0 where masked.
        mask: (m, K) bool, True at real targets.
    """

    inputs: NDArray[np.int64]
    targets: NDArray[np.int64]
    mask: NDArray[np.bool_]


def validate_token_array(token_ids: object, name: str = "token_ids") -> TokenArray:
    """Return ``token_ids`` as an array that can be sliced, without copying an array and without reading its content.

    Raises:
        TypeError: strings, bytes, booleans, objects, complex numbers, masked arrays.
        ValueError: not 1-D; the message has the shape.
    """
    if isinstance(token_ids, TokenFile):
        return token_ids
    if isinstance(token_ids, (str, bytes, bytearray)):
        raise TypeError(
            f"{name} must be a 1-D array of integers, not {type(token_ids).__name__}; "
            f"for the bytes of a text: numpy.frombuffer(text.encode(), numpy.uint8)"
        )
    refuse_masked(token_ids, name)
    array = np.asarray(token_ids)
    if array.dtype.kind not in "iuf":
        raise TypeError(f"{name} must be a 1-D array of integers, not of dtype {array.dtype}")
    if array.ndim != 1:
        raise ValueError(f"{name} must be 1-D, not of shape {array.shape}")
    return array


def gather(tokens: TokenArray, shard: Shard, spec: WindowSpec, window_indices: NDArray[np.int64]) -> TokenBatch:
    """Cut windows out of a shard of ``tokens``.

    Args:
        window_indices: (m,) int64, windows counted from the shard's start.

    Returns:
        (m, block) inputs with their targets; past the shard's last target, inputs and targets are 0 and masked.

    Raises:
        IndexError: an index that is no window of the shard.
    """
    windows = spec.window_count(len(shard))
    indices = np.asarray(window_indices, dtype=np.int64)
    if indices.size and (indices.min() < 0 or indices.max() >= windows):
        raise IndexError(f"window indices must be in [0, {windows}), not in [{indices.min()}, {indices.max()}]")
    starts = indices * spec.hop + shard.start
    width = spec.block + 1
    short = np.flatnonzero(indices == windows - 1) if spec.padding(len(shard)) else indices[:0]
    rows = _rows(tokens, np.delete(starts, short) if short.size else starts, width)
    if short.size:
        rows = _with_short_rows(rows, tokens, shard, starts, short, width)
    inputs = rows[:, :-1].astype(np.int64)
    if spec.targets == "last":
        return TokenBatch(inputs, rows[:, -1:].astype(np.int64), np.ones((len(indices), 1), dtype=np.bool_))
    targets = rows[:, 1:].astype(np.int64)
    mask = np.ones(targets.shape, dtype=np.bool_)
    for row in short:
        real = shard.stop - 1 - int(starts[row])
        inputs[row, real:] = 0
        mask[row, real:] = False
    return TokenBatch(inputs, targets, mask)


def _rows(tokens: TokenArray, starts: NDArray[np.int64], width: int) -> NDArray[Any]:
    """Return ``tokens[start : start + width]`` of every start, (m, width)."""
    if isinstance(tokens, TokenFile):
        return tokens.windows(starts, width)
    return np.asarray(tokens)[starts[:, None] + np.arange(width)]


def _with_short_rows(
    full: NDArray[Any],
    tokens: TokenArray,
    shard: Shard,
    starts: NDArray[np.int64],
    short: NDArray[np.int64],
    width: int,
) -> NDArray[Any]:
    """Put the rows that the shard's end cuts short, zeros behind their tokens, among the full ones."""
    rows = np.zeros((len(starts), width), dtype=full.dtype)
    whole = np.ones(len(starts), dtype=np.bool_)
    whole[short] = False
    rows[whole] = full
    for row in short:
        tail = np.asarray(tokens[int(starts[row]) : shard.stop])
        rows[row, : len(tail)] = tail
    return rows


def pad_batch(batch: TokenBatch, batch_size: int) -> TokenBatch:
    """Return ``batch`` with rows of zeros, masked, up to ``batch_size`` rows.

    Raises:
        ValueError: the batch has more rows than that.
    """
    missing = batch_size - len(batch.inputs)
    if missing < 0:
        raise ValueError(f"batch_size={batch_size} is less than the {len(batch.inputs)} rows of the batch")
    if missing == 0:
        return batch
    return TokenBatch(*(_with_rows(part, batch_size) for part in batch))


def _with_rows(part: NDArray[Any], rows: int) -> Any:
    padded = np.zeros((rows, part.shape[1]), dtype=part.dtype)
    padded[: len(part)] = part
    return padded
