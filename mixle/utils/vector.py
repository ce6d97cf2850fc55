"""Check the numbers that vectorised code takes: probabilities and the like."""

from __future__ import annotations

from numbers import Real

import numpy as np


def validate_initialization_probability(p: object) -> float:
    """Return ``p``, the chance that a row takes part in random initialization, as a float in (0, 1].

    Raises:
        TypeError: ``p`` is a bool or not a real number.
        ValueError: ``p`` is NaN, or outside (0, 1].
    """
    if isinstance(p, (bool, np.bool_)) or not isinstance(p, Real):
        raise TypeError(f"p={p!r} must be a real number in (0, 1], not {type(p).__name__}")
    probability = float(p)
    if not 0 < probability <= 1:
        raise ValueError(f"p={p!r} must be in (0, 1]")
    return probability
