"""Linear kernels: components of one exponential family, scored and gathered together by two matrix products.

In an exponential family the log-density is linear in features of the observation, ``theta_j . phi(x) + c_j``, and the
sufficient statistic is the weighted sum of the same features. With the features of a block of rows as an ``(F, n)``
matrix, ``theta @ phi`` scores ``k`` components and ``weights @ phi.T`` gathers for them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np

from mixle.stats.statistics import LeafStatistic

__all__ = ["LinearKernel"]


class LinearKernel(ABC):
    """The features of one family, and the coefficients of ``k`` of its members.

    Attributes:
        coefficients: ``(k, F)``.
        constants: ``(k,)``.
        peaks: ``(k,)``, the largest log-density that each member reaches.
    """

    coefficients: np.ndarray
    constants: np.ndarray
    peaks: np.ndarray

    @abstractmethod
    def write_features(self, enc: Any, out: np.ndarray) -> None:
        """Write the features of encoded rows into ``out``, ``(F, n)``."""

    @abstractmethod
    def statistic(self, weight: float, totals: np.ndarray) -> LeafStatistic:
        """Return a member's statistic from its total weight and its ``(F,)`` weighted feature sums."""
