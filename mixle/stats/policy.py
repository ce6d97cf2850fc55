"""The numerical policy: what a degenerate fit becomes, decided once for every family.

* A variance is floored at :data:`MIN_VARIANCE_RATIO` times the variance of the whole data along that axis, so that
  rescaling the data rescales the fit; for a mixture's component, the whole is what all components share. Data without
  spread uses ``max(1, mean**2)`` as its scale.
* A covariance has its eigenvalues floored in the units of that per-axis scale.
* A positive mean that is a scale (the exponential's) is floored at :data:`MIN_MEAN_RATIO` times the mean of the whole
  data, or times one where that is zero.
* A part that no observation reaches (an empty component, an unseen row) keeps its previous parameters; without any, it
  gets the family's standard parameters. A total weight of :data:`MIN_MASS` or less is none: it comes from rows that a
  component all but excludes, and products with data would lose their digits to underflow.
* A real number beyond :data:`MAX_MAGNITUDE` is impossible, as infinity is: its products with others overflow.
* A row that no component can produce is left out of the statistic and counted.

Every repair is reported as a :class:`Repair` in the fitted model's ``repairs``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from mixle.utils.exact import require_finite_float

__all__ = [
    "MAX_MAGNITUDE",
    "MIN_MASS",
    "MIN_MEAN_RATIO",
    "MIN_VARIANCE_RATIO",
    "Repair",
    "data_scale",
    "floor_covariance",
    "floor_mean",
    "floor_variance",
    "optional_floor",
    "within",
]

MIN_VARIANCE_RATIO = 1e-6
MIN_MEAN_RATIO = 1e-6
MIN_MASS = 1e-100
MAX_MAGNITUDE = 1e100


@dataclass(frozen=True)
class Repair:
    """One thing that a fit repaired.

    Attributes:
        parameter: the parameter that was repaired.
        reason: what was wrong and what was done.
        where: the path from the root of the model, such as ``components[1].dists[0]``; empty at the root.
    """

    parameter: str
    reason: str
    where: str = ""

    def __str__(self) -> str:
        return f"{self.where + '.' if self.where else ''}{self.parameter}: {self.reason}"


def within(where: str, repairs: Iterable[Repair]) -> tuple[Repair, ...]:
    """Return the repairs of a child that sits at ``where`` in its parent."""
    return tuple(replace(r, where=f"{where}.{r.where}" if r.where else where) for r in repairs)


def data_scale(mean: np.ndarray, variance: np.ndarray) -> np.ndarray:
    """Return the squared scale of data per axis: its variance, or ``max(1, mean**2)`` where it has no spread."""
    # Rounding alone gives constant data a variance of about eps**2 * mean**2.
    spread = variance > 1e-28 * np.square(mean)
    return np.where(spread, variance, np.maximum(1.0, np.square(mean)))


def optional_floor(value: float | None, name: str) -> float | None:
    """Return an absolute floor that a user gave: a finite number above zero, or None for the relative one."""
    return None if value is None else require_finite_float(value, name, exclusive_minimum=0.0)


def floor_variance(
    variance: np.ndarray, scale: np.ndarray, minimum: float | None, parameter: str
) -> tuple[np.ndarray, tuple[Repair, ...]]:
    """Floor variances, elementwise.

    Args:
        variance: any shape.
        scale: squared data scale, same shape (:func:`data_scale`).
        minimum: an absolute floor that replaces the relative one; None for :data:`MIN_VARIANCE_RATIO` times ``scale``.
        parameter: the name to report.
    """
    floor = np.broadcast_to(MIN_VARIANCE_RATIO * scale if minimum is None else minimum, variance.shape)
    low = ~(variance >= floor)
    if not np.any(low):
        return variance, ()
    axes = "" if variance.ndim == 0 else f" on axes {np.flatnonzero(low).tolist()!s:.60}"
    reason = f"variance below the floor{axes}; raised to {np.max(floor[low]):.3g}"
    return np.where(low, floor, variance), (Repair(parameter, reason),)


def floor_mean(mean: float, scale: float, minimum: float | None, parameter: str) -> tuple[float, tuple[Repair, ...]]:
    """Floor a mean that must be positive; ``scale`` is the mean of the whole data."""
    floor = MIN_MEAN_RATIO * (scale if scale > 0 else 1.0) if minimum is None else minimum
    if mean >= floor:
        return mean, ()
    return floor, (Repair(parameter, f"mean below the floor; raised to {floor:.3g}"),)


def floor_covariance(
    covariance: np.ndarray, scale: np.ndarray, minimum: float | None, parameter: str
) -> tuple[np.ndarray, tuple[Repair, ...]]:
    """Floor the eigenvalues of a ``(d, d)`` covariance, in units where each axis has squared scale one.

    Working in units of the data makes the repair independent of the units that each axis was recorded in. Arguments as
    in :func:`floor_variance`, ``scale`` being ``(d,)``.
    """
    unit = np.sqrt(scale) if minimum is None else np.ones_like(scale)
    floor = MIN_VARIANCE_RATIO if minimum is None else minimum
    values, vectors = np.linalg.eigh(covariance / np.outer(unit, unit))
    if values[0] >= floor:
        return covariance, ()
    repaired = (vectors * np.maximum(values, floor)) @ vectors.T * np.outer(unit, unit)
    unit_name = " of the data's scale" if minimum is None else ""
    low = int(np.sum(values < floor))
    reason = f"{low} of {len(values)} eigenvalues below the floor; raised to {floor:.3g}{unit_name}"
    return (repaired + repaired.T) / 2, (Repair(parameter, reason),)
