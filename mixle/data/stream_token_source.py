"""Iterate over batches of next-token examples in plain NumPy: what one replica trains, without a handle."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from mixle.data.schedule import Schedule
from mixle.data.token_check import find_bad_token
from mixle.data.token_windows import TokenArray, gather, validate_token_array
from mixle.data.window_spec import WindowSpec


def stream_token_source(
    token_ids: object, block: int, batch_size: int, *, epochs: int = 1, shuffle: bool = True, seed: int = 0
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Return an iterator over the windows of ``token_ids``, each with the token after it.

    Args:
        token_ids: (n,) integers: an array, a ``numpy.memmap`` or a :class:`~mixle.data.token_file.TokenFile`.
        block: input tokens per window; there are ``n - block`` windows.
        batch_size: windows per batch; an epoch's last batch has what is left.
        epochs: passes over the windows, 0 included.
        shuffle: permute the windows, anew in each epoch, in O(1) memory.
        seed: any integer; fixes the order.

    Returns:
        Pairs of (b, block) int64 contexts and (b,) int64 next tokens.

    Raises:
        TypeError, ValueError: at the call, not at the first batch: an argument that is not what it says above, data
            too short for one window, or an id that is negative or has a fraction.
    """
    tokens = validate_token_array(token_ids)
    spec = WindowSpec(block)
    schedule = Schedule(spec, batch_size, n_tokens=len(tokens), epochs=epochs, shuffle=shuffle, seed=seed)
    bad = find_bad_token(tokens, 0, len(tokens), None)
    if bad is not None:
        raise ValueError(f"token_ids[{bad.position}]={bad.value} is not a non-negative integer")
    return _batches(tokens, spec, schedule)


def _batches(
    tokens: TokenArray, spec: WindowSpec, schedule: Schedule
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    for epoch in range(schedule.epochs):
        for step in range(schedule.steps_per_epoch):
            batch = gather(tokens, schedule.shards[0], spec, schedule.window_indices(0, epoch, step))
            yield batch.inputs, batch.targets[:, 0]
