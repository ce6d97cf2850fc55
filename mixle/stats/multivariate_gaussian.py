"""The normal distribution on vectors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

import numpy as np

from mixle.stats.encoding import LeafEncoding
from mixle.stats.frames import Centre, Frame, Sums
from mixle.stats.gaussian_kernels import FullKernel
from mixle.stats.leaf import (
    Fit,
    LeafAccumulator,
    LeafAccumulatorFactory,
    LeafDataEncoder,
    LeafDistribution,
    LeafEstimator,
    LeafFamily,
    LeafSampler,
)
from mixle.stats.numeric_columns import finite_vector, require_axes, supported, vector_columns
from mixle.stats.policy import MAX_MAGNITUDE, data_scale, floor_covariance, optional_floor
from mixle.stats.statistics import LeafStatistic
from mixle.utils.exact import require_positive_int

__all__ = [
    "MultivariateGaussianAccumulator",
    "MultivariateGaussianAccumulatorFactory",
    "MultivariateGaussianDataEncoder",
    "MultivariateGaussianDistribution",
    "MultivariateGaussianEstimator",
    "MultivariateGaussianSampler",
]


@dataclass(frozen=True, eq=False)
class MultivariateGaussianParams:
    mu: np.ndarray
    covar: np.ndarray

    @cached_property
    def whitener(self) -> np.ndarray:
        """The inverse of the covariance's Cholesky factor, ``(d, d)``."""
        return np.asarray(np.linalg.inv(np.linalg.cholesky(self.covar)))

    @cached_property
    def log_det(self) -> float:
        return -2.0 * float(np.log(np.diagonal(self.whitener)).sum())


class MultivariateGaussianFamily(LeafFamily[MultivariateGaussianParams]):
    name = "MultivariateGaussian"

    def __init__(self, dim: int | None, min_variance: float | None = None) -> None:
        self.dim, self.min_variance = dim, min_variance

    def encode(self, values: Sequence[Any]) -> LeafEncoding:
        x = vector_columns(values, self.name, self.dim)
        return supported(x, (np.abs(x) <= MAX_MAGNITUDE).all(axis=0), 0.0, Centre.of)

    def require_fit(self, params: MultivariateGaussianParams | None, enc: LeafEncoding) -> None:
        require_axes(enc, self.dim if params is None else len(params.mu), self.name)

    def log_density(self, params: MultivariateGaussianParams, enc: LeafEncoding) -> np.ndarray:
        white = params.whitener @ (enc.columns[0] - params.mu[:, None])
        constant = len(params.mu) * math.log(2 * math.pi) + params.log_det
        return -0.5 * (np.einsum("dn,dn->n", white, white) + constant)

    def linear(self, params: Sequence[MultivariateGaussianParams], frame: Frame | None) -> FullKernel | None:
        if not isinstance(frame, Centre):
            return None
        mu, covar, whitener = (np.stack([getattr(p, part) for p in params]) for part in ("mu", "covar", "whitener"))
        log_det = np.array([p.log_det for p in params])
        kernel = FullKernel(mu, covar, np.einsum("kai,kaj->kij", whitener, whitener), log_det, frame)
        return kernel if kernel.exact else None

    def statistic_frame(self, frame: Frame | None, params: MultivariateGaussianParams | None) -> Frame | None:
        return frame.about(params.mu) if isinstance(frame, Centre) and params is not None else frame

    def statistics(self, enc: LeafEncoding, weights: np.ndarray, frame: Frame | None) -> Sums:
        (x,) = enc.columns
        gap = x - frame.point[:, None] if isinstance(frame, Centre) else x
        return np.asarray(weights.sum()), gap @ weights, (gap * weights) @ gap.T

    def maximize(
        self, sums: Sums, frame: Frame | None, previous: MultivariateGaussianParams | None
    ) -> Fit[MultivariateGaussianParams]:
        assert isinstance(frame, Centre)
        w, s1, s2 = sums
        offset = s1 / w
        raw = (s2 + s2.T) / (2 * w) - np.outer(offset, offset)
        covar, repairs = floor_covariance(raw, data_scale(*frame.scale_moments(sums)), self.min_variance, "covar")
        return Fit(MultivariateGaussianParams(frame.point + offset, covar), repairs)

    def standard(self, frame: Frame | None) -> MultivariateGaussianParams:
        if isinstance(frame, Centre):
            return MultivariateGaussianParams(frame.mean, np.diag(data_scale(frame.mean, frame.variance)))
        if self.dim is None:
            raise ValueError(f"a {self.name} without observations needs dim to know its number of axes")
        return MultivariateGaussianParams(np.zeros(self.dim), np.eye(self.dim))

    def sample(self, params: MultivariateGaussianParams, rng: np.random.Generator, size: int) -> np.ndarray:
        return params.mu + rng.standard_normal((size, len(params.mu))) @ np.linalg.cholesky(params.covar).T

    def expected(self, params: MultivariateGaussianParams) -> LeafStatistic:
        zero = np.zeros_like(params.mu)
        return LeafStatistic(Centre(params.mu, 0.0, params.mu, zero), (np.asarray(1.0), zero, params.covar))


def _covariance(covar: Any, d: int) -> np.ndarray:
    try:
        matrix = np.array(covar, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise TypeError(f"covar={covar!r:.80} must be a matrix of real numbers") from error
    if matrix.shape != (d, d):
        raise ValueError(f"covar must have shape {(d, d)} to fit mu, got {matrix.shape}")
    if not np.isfinite(matrix).all():
        raise ValueError("covar must be finite")
    scale = np.sqrt(np.abs(np.diagonal(matrix)))
    if (np.abs(matrix - matrix.T) > 1e-8 * np.outer(scale, scale)).any():
        raise ValueError(f"covar must be symmetric; its largest asymmetry is {np.abs(matrix - matrix.T).max():.3g}")
    try:
        np.linalg.cholesky(matrix)
    except np.linalg.LinAlgError:
        low = float(np.linalg.eigvalsh(matrix)[0])
        raise ValueError(f"covar must be positive definite; its smallest eigenvalue is {low:.3g}") from None
    return matrix


class MultivariateGaussianDataEncoder(LeafDataEncoder):
    """Encodes vectors of real numbers; infinite and overflowing entries are impossible, NaN is refused."""


class MultivariateGaussianSampler(LeafSampler):
    """Draws vectors: ``(d,)``, or ``(size, d)``."""


class MultivariateGaussianDistribution(LeafDistribution[MultivariateGaussianParams]):
    """The normal distribution on vectors.

    Args:
        mu: ``(d,)`` means.
        covar: ``(d, d)`` covariance.

    Raises:
        TypeError, ValueError: the shapes differ, an entry is not finite, or the covariance is not symmetric and
            positive definite.
    """

    sampler_type = MultivariateGaussianSampler
    encoder_type = MultivariateGaussianDataEncoder

    def __init__(self, mu: Any, covar: Any, *, name: str | None = None, keys: str | None = None) -> None:
        mean = finite_vector(mu, "mu")
        matrix = _covariance(covar, len(mean))
        self._settle(MultivariateGaussianFamily(len(mean)), MultivariateGaussianParams(mean, matrix), name, keys)

    @property
    def mu(self) -> np.ndarray:
        """The means, ``(d,)``."""
        return self.params.mu

    @property
    def covar(self) -> np.ndarray:
        """The covariance, ``(d, d)``."""
        return self.params.covar

    def parameters_to_dict(self) -> dict[str, Any]:
        return {"mu": self.mu.tolist(), "covar": self.covar.tolist(), **self._labels()}

    @classmethod
    def parameters_from_dict(cls, payload: dict[str, Any]) -> Self:
        dist = cls(payload["mu"], payload["covar"], name=payload.get("name"), keys=payload.get("keys"))
        return dist._restore_repairs(payload)


class MultivariateGaussianAccumulator(LeafAccumulator):
    """Gathers weight and first and second moments."""

    encoder_type = MultivariateGaussianDataEncoder


class MultivariateGaussianAccumulatorFactory(LeafAccumulatorFactory):
    """Makes empty :class:`MultivariateGaussianAccumulator`."""

    accumulator_type = MultivariateGaussianAccumulator


class MultivariateGaussianEstimator(LeafEstimator[MultivariateGaussianParams]):
    """Fit a :class:`MultivariateGaussianDistribution` by maximum likelihood.

    Args:
        dim: the number of axes; None to take it from the data.
        pseudo_count: how many observations ``suff_stat`` counts for.
        suff_stat: ``(mu, covar)`` to regularize toward.
        min_variance: an absolute variance floor instead of the relative one of :mod:`mixle.stats.policy`.
        keys: estimators with equal keys share one statistic and, given equal settings, one fit.
    """

    distribution_type = MultivariateGaussianDistribution
    factory_type = MultivariateGaussianAccumulatorFactory

    def __init__(
        self,
        dim: int | None = None,
        *,
        pseudo_count: float | None = None,
        suff_stat: tuple[Any, Any] | None = None,
        min_variance: float | None = None,
        name: str | None = None,
        keys: str | None = None,
    ) -> None:
        prior = None if suff_stat is None else MultivariateGaussianDistribution(*suff_stat).params
        size = require_positive_int(dim, "dim") if dim is not None else None if prior is None else len(prior.mu)
        if prior is not None and len(prior.mu) != size:
            raise ValueError(f"dim={size} does not fit suff_stat of {len(prior.mu)} axes")
        family = MultivariateGaussianFamily(size, optional_floor(min_variance, "min_variance"))
        self._settle(family, pseudo_count, prior, name, keys)


MultivariateGaussianDistribution.estimator_type = MultivariateGaussianEstimator
