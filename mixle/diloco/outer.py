"""Take the outer optimizer's step on the run's own parameters.

Everything is float32 and in place, over blocks that fit a cache, so that a step needs no memory beside its state.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

_BLOCK = 1 << 15


def nesterov_step(
    theta: NDArray[np.float32],
    momentum: NDArray[np.float32],
    delta: NDArray[np.float32],
    *,
    outer_lr: float,
    outer_momentum: float,
) -> None:
    """Update ``momentum`` and ``theta`` in place: m <- beta m + D, then theta <- theta - eta (D + beta m).

    Nesterov SGD as DiLoCo takes it (arXiv 2311.08105). Elements that overflow float32 become infinite
    without a warning: :func:`mixle.diloco.merge.norm` of the result tells.

    Args:
        theta, momentum, delta: C-contiguous float32 arrays of one shape.
        outer_lr: eta.
        outer_momentum: beta.

    Raises:
        ValueError: an array is not as described.
    """
    _require_arrays(theta=theta, momentum=momentum, delta=delta)
    beta, eta = np.float32(outer_momentum), np.float32(outer_lr)
    flat_theta, flat_momentum, flat_delta = theta.reshape(-1), momentum.reshape(-1), delta.reshape(-1)
    move = np.empty(min(_BLOCK, theta.size), dtype=np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        for start in range(0, theta.size, _BLOCK):
            block = slice(start, start + _BLOCK)
            m, d = flat_momentum[block], flat_delta[block]
            part = move[: m.size]
            m *= beta
            m += d
            np.multiply(m, beta, out=part)
            part += d
            part *= eta
            flat_theta[block] -= part


def final_step(theta: NDArray[np.float32], delta: NDArray[np.float32]) -> None:
    """Update ``theta`` in place as a round of final snapshots alone does: theta <- theta - D; momentum is left alone.

    Raises:
        ValueError: an array is not C-contiguous float32, or their shapes differ.
    """
    _require_arrays(theta=theta, delta=delta)
    with np.errstate(over="ignore", invalid="ignore"):
        theta -= delta


def publish(
    published: NDArray[np.float32],
    master: NDArray[np.float32],
    quantize: Callable[[NDArray[np.float32]], NDArray[np.float32]],
) -> NDArray[np.float32]:
    """Move ``published`` in place towards ``master`` by a quantized update, and return that update, dequantized.

    ``published`` <- ``published`` + quantize(``master`` - ``published``). What rounding left out is what still parts
    the two, and is in the next call's update. A receiver that holds the old ``published`` gets the new one, bit for
    bit, by one float32 addition of the update.

    Args:
        published: the parameters as all sites have them.
        master: the parameters as the outer optimizer has them; left alone.
        quantize: rounds an array to a format and back, and returns float32 of the same shape.

    Raises:
        ValueError: an array is not C-contiguous float32, or the shapes differ.
    """
    _require_arrays(published=published, master=master)
    update = quantize(master - published)
    _require_arrays(published=published, update=update)
    published += update
    return update


def _require_arrays(**arrays: NDArray[np.float32]) -> None:
    (first_name, first), *_ = arrays.items()
    for name, array in arrays.items():
        if array.dtype != np.float32 or not array.flags.c_contiguous:
            raise ValueError(
                f"{name} must be a C-contiguous float32 array, not {array.dtype} of strides {array.strides}"
            )
        if array.shape != first.shape:
            raise ValueError(f"{name} has shape {array.shape} and must have that of {first_name}, {first.shape}")
