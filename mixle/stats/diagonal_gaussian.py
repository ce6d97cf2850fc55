"""The normal distribution on vectors with independent axes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, Self

import numpy as np

from mixle.stats.encoding import LeafEncoding
from mixle.stats.frames import Centre, Frame, Sums
from mixle.stats.gaussian_kernels import DiagonalKernel
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
from mixle.stats.policy import MAX_MAGNITUDE, data_scale, floor_variance, optional_floor
from mixle.stats.statistics import LeafStatistic
from mixle.utils.exact import require_positive_int

__all__ = [
    "DiagonalGaussianAccumulator",
    "DiagonalGaussianAccumulatorFactory",
    "DiagonalGaussianDataEncoder",
    "DiagonalGaussianDistribution",
    "DiagonalGaussianEstimator",
    "DiagonalGaussianSampler",
]


class DiagonalGaussianParams(NamedTuple):
    mu: np.ndarray
    covar: np.ndarray


class DiagonalGaussianFamily(LeafFamily[DiagonalGaussianParams]):
    name = "DiagonalGaussian"

    def __init__(self, dim: int | None, min_variance: float | None = None) -> None:
        self.dim, self.min_variance = dim, min_variance

    def encode(self, values: Sequence[Any]) -> LeafEncoding:
        x = vector_columns(values, self.name, self.dim)
        return supported(x, (np.abs(x) <= MAX_MAGNITUDE).all(axis=0), 0.0, Centre.of)

    def require_fit(self, params: DiagonalGaussianParams | None, enc: LeafEncoding) -> None:
        require_axes(enc, self.dim if params is None else len(params.mu), self.name)

    def log_density(self, params: DiagonalGaussianParams, enc: LeafEncoding) -> np.ndarray:
        squares = np.square(enc.columns[0] - params.mu[:, None])
        constant = -0.5 * np.log(2 * math.pi * params.covar).sum()
        return np.asarray((-0.5 / params.covar) @ squares + constant)

    def linear(self, params: Sequence[DiagonalGaussianParams], frame: Frame | None) -> DiagonalKernel | None:
        if not isinstance(frame, Centre):
            return None
        kernel = DiagonalKernel(np.stack([p.mu for p in params]), np.stack([p.covar for p in params]), frame)
        return kernel if kernel.exact else None

    def statistic_frame(self, frame: Frame | None, params: DiagonalGaussianParams | None) -> Frame | None:
        return frame.about(params.mu) if isinstance(frame, Centre) and params is not None else frame

    def statistics(self, enc: LeafEncoding, weights: np.ndarray, frame: Frame | None) -> Sums:
        (x,) = enc.columns
        gap = x - frame.point[:, None] if isinstance(frame, Centre) else x
        return np.asarray(weights.sum()), gap @ weights, np.square(gap) @ weights

    def maximize(
        self, sums: Sums, frame: Frame | None, previous: DiagonalGaussianParams | None
    ) -> Fit[DiagonalGaussianParams]:
        assert isinstance(frame, Centre)
        w, s1, s2 = sums
        offset = s1 / w
        raw = s2 / w - np.square(offset)
        variance, repairs = floor_variance(raw, data_scale(*frame.scale_moments(sums)), self.min_variance, "covar")
        return Fit(DiagonalGaussianParams(frame.point + offset, variance), repairs)

    def standard(self, frame: Frame | None) -> DiagonalGaussianParams:
        if isinstance(frame, Centre):
            return DiagonalGaussianParams(frame.mean, data_scale(frame.mean, frame.variance))
        if self.dim is None:
            raise ValueError(f"a {self.name} without observations needs dim to know its number of axes")
        return DiagonalGaussianParams(np.zeros(self.dim), np.ones(self.dim))

    def sample(self, params: DiagonalGaussianParams, rng: np.random.Generator, size: int) -> np.ndarray:
        return rng.normal(params.mu, np.sqrt(params.covar), (size, len(params.mu)))

    def expected(self, params: DiagonalGaussianParams) -> LeafStatistic:
        zero = np.zeros_like(params.mu)
        return LeafStatistic(Centre(params.mu, 0.0, params.mu, zero), (np.asarray(1.0), zero, params.covar))


class DiagonalGaussianDataEncoder(LeafDataEncoder):
    """Encodes vectors of real numbers; infinite and overflowing entries are impossible, NaN is refused."""


class DiagonalGaussianSampler(LeafSampler):
    """Draws vectors: ``(d,)``, or ``(size, d)``."""


class DiagonalGaussianDistribution(LeafDistribution[DiagonalGaussianParams]):
    """The normal distribution on vectors with independent axes.

    Args:
        mu: ``(d,)`` means.
        covar: ``(d,)`` variances, the diagonal of the covariance.

    Raises:
        TypeError, ValueError: the shapes differ, an entry is not finite, or a variance is not positive.
    """

    sampler_type = DiagonalGaussianSampler
    encoder_type = DiagonalGaussianDataEncoder

    def __init__(self, mu: Any, covar: Any, *, name: str | None = None, keys: str | None = None) -> None:
        mean = finite_vector(mu, "mu")
        variance = finite_vector(covar, "covar", len(mean))
        if not (variance > 0).all():
            raise ValueError(f"covar={variance.tolist()!r:.80} must hold positive variances")
        self._settle(DiagonalGaussianFamily(len(mean)), DiagonalGaussianParams(mean, variance), name, keys)

    @property
    def mu(self) -> np.ndarray:
        """The means, ``(d,)``."""
        return self.params.mu

    @property
    def covar(self) -> np.ndarray:
        """The variances, ``(d,)``."""
        return self.params.covar

    def parameters_to_dict(self) -> dict[str, Any]:
        return {"mu": self.mu.tolist(), "covar": self.covar.tolist(), **self._labels()}

    @classmethod
    def parameters_from_dict(cls, payload: dict[str, Any]) -> Self:
        dist = cls(payload["mu"], payload["covar"], name=payload.get("name"), keys=payload.get("keys"))
        return dist._restore_repairs(payload)


class DiagonalGaussianAccumulator(LeafAccumulator):
    """Gathers weight and first and second moments per axis."""

    encoder_type = DiagonalGaussianDataEncoder


class DiagonalGaussianAccumulatorFactory(LeafAccumulatorFactory):
    """Makes empty :class:`DiagonalGaussianAccumulator`."""

    accumulator_type = DiagonalGaussianAccumulator


class DiagonalGaussianEstimator(LeafEstimator[DiagonalGaussianParams]):
    """Fit a :class:`DiagonalGaussianDistribution` by maximum likelihood.

    Args:
        dim: the number of axes; None to take it from the data.
        pseudo_count: how many observations ``suff_stat`` counts for.
        suff_stat: ``(mu, covar)`` to regularize toward.
        min_variance: an absolute variance floor instead of the relative one of :mod:`mixle.stats.policy`.
        keys: estimators with equal keys share one statistic and, given equal settings, one fit.
    """

    distribution_type = DiagonalGaussianDistribution
    factory_type = DiagonalGaussianAccumulatorFactory

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
        prior = None if suff_stat is None else DiagonalGaussianDistribution(*suff_stat).params
        size = require_positive_int(dim, "dim") if dim is not None else None if prior is None else len(prior.mu)
        if prior is not None and len(prior.mu) != size:
            raise ValueError(f"dim={size} does not fit suff_stat of {len(prior.mu)} axes")
        family = DiagonalGaussianFamily(size, optional_floor(min_variance, "min_variance"))
        self._settle(family, pseudo_count, prior, name, keys)


DiagonalGaussianDistribution.estimator_type = DiagonalGaussianEstimator
