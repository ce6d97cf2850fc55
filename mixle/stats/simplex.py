"""Probability vectors: checking them, and estimating them from counts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mixle.stats.policy import MIN_MASS

__all__ = ["require_probabilities", "weights_from_counts"]


def require_probabilities(values: Sequence[float] | np.ndarray | Any, name: str, size: int | None = None) -> np.ndarray:
    """Return ``values`` as a ``(size,)`` float64 probability vector, normalized exactly.

    Raises:
        TypeError: it is no vector of numbers.
        ValueError: its length differs, an entry is negative or not finite, or the sum is off by more than 1e-6.
    """
    try:
        p = np.array(values, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{name}={values!r:.80} must be a vector of probabilities") from error
    if p.ndim != 1 or p.size == 0 or (size is not None and p.size != size):
        raise ValueError(f"{name} must be a vector of {size or 'at least one'} probabilities, got shape {p.shape}")
    if not np.isfinite(p).all() or (p < 0).any():
        raise ValueError(f"{name}={p.tolist()!r:.80} must hold finite probabilities of at least 0")
    total = float(p.sum())
    if abs(total - 1.0) > 1e-6:
        raise ValueError(f"{name}={p.tolist()!r:.80} must sum to 1, but sums to {total:.9g}")
    # Dividing a vector that sums to one already would move its last bits at every round trip.
    return p if abs(total - 1.0) < 1e-12 else p / total


def weights_from_counts(
    counts: np.ndarray, pseudo_count: float | None, prior: np.ndarray | None, previous: np.ndarray | None = None
) -> np.ndarray:
    """Return the probabilities that maximize the likelihood of ``counts`` plus ``pseudo_count`` draws from ``prior``.

    ``prior`` is uniform if None. Without any count the probabilities are ``previous``, or else ``prior``.
    """
    k = len(counts)
    base = np.full(k, 1.0 / k) if prior is None else prior
    total = counts if pseudo_count is None else counts + pseudo_count * base
    mass = total.sum()
    if mass > MIN_MASS:
        return total / mass
    return base if previous is None else previous
