"""Leaf families: four pure functions become the five roles.

An author writes a :class:`LeafFamily`: ``encode`` (validate once), ``log_density``, ``statistics`` and ``maximize``,
plus ``sample`` and ``expected``. The role classes here do the rest once for all: combining, tying, priors,
serialization, impossible rows, repairs. A family's module subclasses the roles only to name them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from typing import Any, ClassVar, Generic, NamedTuple, Self, TypeVar

import numpy as np

from mixle.stats.contract import (
    AccumulatorFactory,
    DataEncoder,
    ParameterEstimator,
    ProbabilityDistribution,
    Sampler,
    StatisticAccumulator,
)
from mixle.stats.encoding import LeafEncoding, require_encoding
from mixle.stats.frames import Frame, Sums
from mixle.stats.linear import LinearKernel
from mixle.stats.payload import require_known_fields, restored_repairs
from mixle.stats.policy import MIN_MASS, Repair
from mixle.stats.statistics import LeafStatistic, add_leaf_statistics
from mixle.utils.exact import require_finite_float

__all__ = [
    "Fit",
    "LeafAccumulator",
    "LeafAccumulatorFactory",
    "LeafDataEncoder",
    "LeafDistribution",
    "LeafEstimator",
    "LeafFamily",
    "LeafSampler",
    "require_label",
    "resolve_prior",
]

P = TypeVar("P")


class Fit(NamedTuple, Generic[P]):
    """An M-step's result: the parameters, and what had to be repaired."""

    params: P
    repairs: tuple[Repair, ...] = ()


class LeafFamily(ABC, Generic[P]):
    """The pure functions of one leaf family; ``P`` is its immutable parameter type.

    Arrays are float64 unless said otherwise and have rows on their last axis.
    """

    name: ClassVar[str]

    @abstractmethod
    def encode(self, values: Any) -> LeafEncoding:
        """Validate ``values`` and return their columns, with the frame of these values alone."""

    def require_fit(self, params: P | None, enc: LeafEncoding) -> None:
        """Check that columns of this family have the shape that the family, or its parameters, can read.

        Raises:
            ValueError: they have another number of axes.
        """

    @abstractmethod
    def log_density(self, params: P, enc: LeafEncoding) -> np.ndarray:
        """Return ``(n,)`` log-densities; rows marked impossible may hold anything."""

    def statistic_frame(self, frame: Frame | None, params: P | None) -> Frame | None:
        """Return the frame to gather sums in, given the encoding's frame and the current parameters."""
        return frame

    @abstractmethod
    def statistics(self, enc: LeafEncoding, weights: np.ndarray, frame: Frame | None) -> Sums:
        """Return the weighted sums of the rows in ``frame``; the first adds up to the total weight."""

    @abstractmethod
    def maximize(self, sums: Sums, frame: Frame | None, previous: P | None) -> Fit[P]:
        """Return the parameters that maximize the likelihood of ``sums``, whose total weight is positive.

        Parts that no observation reached keep their values in ``previous`` if there is one.
        """

    @abstractmethod
    def standard(self, frame: Frame | None) -> P:
        """Return the parameters to take when there is neither an observation nor a previous value."""

    @abstractmethod
    def sample(self, params: P, rng: np.random.Generator, size: int) -> Any:
        """Return ``size`` draws: a list, or an array with draws on its first axis."""

    @abstractmethod
    def expected(self, params: P) -> LeafStatistic:
        """Return the expected statistic of one observation under ``params``: what one pseudo-observation adds."""

    def linear(self, params: Sequence[P], frame: Frame | None) -> LinearKernel | None:
        """Return a kernel that scores and gathers for several parameters at once; None if there is no exact one."""
        return None

    def uniform_prior(self, frame: Frame | None) -> LeafStatistic:
        """Return the statistic of one pseudo-observation spread evenly over what was seen.

        Raises:
            ValueError: the family has no such natural prior.
        """
        raise ValueError(f"pseudo_count for a {self.name} needs suff_stat, the parameters to regularize toward")


class LeafDistribution(ProbabilityDistribution, Generic[P]):
    """A leaf distribution: a family and its parameters.

    Subclasses set ``params``, ``family`` and call ``_settle``.
    """

    family: LeafFamily[P]
    params: P
    estimator_type: ClassVar[type[LeafEstimator[Any]]]
    sampler_type: ClassVar[type[LeafSampler]]
    encoder_type: ClassVar[type[LeafDataEncoder]]

    _repairs: tuple[Repair, ...] = ()
    keys: str | None = None

    def _settle(self, family: LeafFamily[P], params: P, name: str | None, keys: str | None) -> None:
        self.family, self.params = family, params
        self.name, self.keys = require_label(name, "name"), require_label(keys, "keys")

    @property
    def repairs(self) -> tuple[Repair, ...]:
        return self._repairs

    def require_encoding(self, enc: Any) -> None:
        """Check that an encoding was made for this distribution.

        Raises:
            TypeError: it is another family's.
            ValueError: it has another number of axes.
        """
        require_encoding(enc, LeafEncoding, self.family.name, family=type(self.family))
        self.family.require_fit(self.params, enc)

    def seq_log_density(self, enc: LeafEncoding) -> np.ndarray:
        self.require_encoding(enc)
        if not len(enc):
            return np.zeros(0)
        log_density = self.family.log_density(self.params, enc)
        if enc.impossible is not None:
            log_density = np.where(enc.impossible, -np.inf, log_density)
        return log_density

    def sampler(self, seed: int | np.random.Generator | None = None) -> LeafSampler:
        return self.sampler_type(self, seed)

    def dist_to_encoder(self) -> LeafDataEncoder:
        return self.encoder_type(self.family)

    def estimator(self, pseudo_count: float | None = None) -> LeafEstimator[P]:
        estimator = self.estimator_type.__new__(self.estimator_type)
        prior = None if pseudo_count is None else self.params
        estimator._settle(self.family, pseudo_count, prior, self.name, self.keys)
        return estimator

    def _labels(self) -> dict[str, Any]:
        labels: dict[str, Any] = {
            key: value for key, value in (("name", self.name), ("keys", self.keys)) if value is not None
        }
        if self._repairs:
            labels["repairs"] = [[r.parameter, r.reason, r.where] for r in self._repairs]
        return labels

    def _restore_repairs(self, payload: dict[str, Any]) -> Self:
        own = (field for field in self.parameters_to_dict() if field not in ("name", "keys"))
        require_known_fields(payload, type(self), (*own, "name", "keys", "repairs"))
        self._repairs = restored_repairs(payload, type(self))
        return self

    def __repr__(self) -> str:
        shown = {k: v for k, v in self.parameters_to_dict().items() if k != "repairs"}
        return f"{type(self).__name__}({', '.join(f'{k}={v!r}' for k, v in shown.items())})"


class LeafSampler(Sampler):
    """Draws from a leaf distribution with a NumPy generator."""

    def __init__(self, dist: LeafDistribution[Any], seed: int | np.random.Generator | None = None) -> None:
        self.dist, self.rng = dist, np.random.default_rng(seed)

    def sample(self, size: int | None = None) -> Any:
        draws = self.dist.family.sample(self.dist.params, self.rng, 1 if size is None else size)
        return draws[0] if size is None else draws


class LeafDataEncoder(DataEncoder):
    """Encodes observations of a leaf family."""

    def __init__(self, family: LeafFamily[Any]) -> None:
        self.family = family

    def seq_encode(self, xs: Sequence[Any]) -> LeafEncoding:
        return self._encode(xs)

    def encode_stream(self, tokens: np.ndarray, previous: int | None) -> LeafEncoding:
        """Return the encoding of a segment of one long stream of tokens: each is an observation of its own.

        Args:
            tokens: ``(n,)`` int64.
            previous: the token before the segment, None at the start of the stream.
        """
        return self._encode(tokens)

    def _encode(self, values: Any) -> LeafEncoding:
        enc = self.family.encode(values)
        enc.family = type(self.family)
        return enc

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LeafDataEncoder) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def _key(self) -> tuple[Hashable, ...]:
        return (type(self.family),)


class LeafAccumulator(StatisticAccumulator):
    """Gathers a leaf family's sums."""

    encoder_type: ClassVar[type[LeafDataEncoder]]

    def __init__(self, family: LeafFamily[Any], keys: str | None = None) -> None:
        self.family, self.keys = family, keys
        self._statistic = LeafStatistic(None, ())
        self._framed: tuple[Any, Any, Frame | None] | None = None

    def seq_update(self, enc: LeafEncoding, weights: np.ndarray, estimate: ProbabilityDistribution | None) -> None:
        require_encoding(enc, LeafEncoding, self.family.name, family=type(self.family))
        params = family_params(self.family, estimate)
        self.family.require_fit(None, enc)
        if params is not None:
            self.family.require_fit(params, enc)
        if enc.impossible is not None:
            self._refuse_impossible(enc, weights)
        frame = self._statistic_frame(enc.frame, params)
        sums = self.family.statistics(enc, weights, frame)
        held = self._statistic
        if held.sums and held.frame is frame:
            self._statistic = LeafStatistic(frame, tuple(a + b for a, b in zip(held.sums, sums, strict=True)))
        else:
            self._statistic = add_leaf_statistics(held, LeafStatistic(frame, sums))

    def _statistic_frame(self, frame: Frame | None, params: Any) -> Frame | None:
        # Row blocks of one encoding share its frame object: the derived frame is made once, not per block.
        if self._framed is None or self._framed[0] is not frame or self._framed[1] is not params:
            self._framed = (frame, params, self.family.statistic_frame(frame, params))
        return self._framed[2]

    def _refuse_impossible(self, enc: LeafEncoding, weights: np.ndarray) -> None:
        assert enc.impossible is not None
        bad = np.flatnonzero(enc.impossible & (weights > 0))
        if len(bad):
            raise ValueError(
                f"{len(bad)} observations lie outside the support of {self.family.name}, such as {enc.example} "
                f"(row {bad[0]} of its chunk): it cannot be fitted to them"
            )

    def combine(self, suff_stat: LeafStatistic) -> Self:
        self._statistic = add_leaf_statistics(self._statistic, suff_stat)
        return self

    def value(self) -> LeafStatistic:
        return self._statistic

    def from_value(self, value: LeafStatistic) -> Self:
        self._statistic = value
        return self

    def key_merge(self, stats: dict[Hashable, Any]) -> None:
        if self.keys is not None:
            self.merge_tied(stats, self.keys)

    def key_replace(self, stats: dict[Hashable, Any]) -> None:
        if self.keys is not None and self.keys in stats:
            self.from_value(stats[self.keys].value())

    def acc_to_encoder(self) -> LeafDataEncoder:
        return self.encoder_type(self.family)


class LeafAccumulatorFactory(AccumulatorFactory):
    """Makes empty accumulators of a leaf family."""

    accumulator_type: ClassVar[type[LeafAccumulator]]

    def __init__(self, family: LeafFamily[Any], keys: str | None = None) -> None:
        self.family, self.keys = family, keys

    def make(self) -> LeafAccumulator:
        return self.accumulator_type(self.family, self.keys)


class LeafEstimator(ParameterEstimator, Generic[P]):
    """Estimates a leaf family.

    ``pseudo_count`` pseudo-observations of ``suff_stat``, given as the family's parameters, are added to the statistic.
    """

    distribution_type: ClassVar[type[LeafDistribution[Any]]]
    factory_type: ClassVar[type[LeafAccumulatorFactory]]

    family: LeafFamily[P]
    pseudo_count: float | None
    prior: P | None
    keys: str | None

    def _settle(
        self, family: LeafFamily[P], pseudo_count: float | None, prior: P | None, name: str | None, keys: str | None
    ) -> None:
        self.family, self.prior = family, prior
        self.pseudo_count = resolve_prior(pseudo_count, prior)
        self.name, self.keys = require_label(name, "name"), require_label(keys, "keys")
        if self.pseudo_count is not None and prior is None:
            family.uniform_prior(None)

    def accumulator_factory(self) -> LeafAccumulatorFactory:
        return self.factory_type(self.family, self.keys)

    def estimate(
        self, nobs: float | None, suff_stat: LeafStatistic, previous: ProbabilityDistribution | None = None
    ) -> Any:
        if self.pseudo_count is not None:
            suff_stat = self._with_prior(suff_stat, self.pseudo_count)
        before = family_params(self.family, previous)
        fit = self._fit(suff_stat, before)
        dist = self.distribution_type.__new__(self.distribution_type)
        dist._settle(self.family, fit.params, self.name, self.keys)
        dist._repairs = fit.repairs
        return dist

    def _fit(self, statistic: LeafStatistic, before: P | None) -> Fit[P]:
        if statistic.sums and np.sum(statistic.sums[0]) > MIN_MASS:
            return self.family.maximize(statistic.sums, statistic.frame, before)
        if before is not None:
            return Fit(before, (Repair("params", "no observation has weight; kept the previous parameters"),))
        standard = self.family.standard(statistic.frame)
        return Fit(standard, (Repair("params", "no observation has weight; took the standard parameters"),))

    def _with_prior(self, data: LeafStatistic, pseudo_count: float) -> LeafStatistic:
        one = self.family.uniform_prior(data.frame) if self.prior is None else self.family.expected(self.prior)
        scaled = LeafStatistic(one.frame, tuple(pseudo_count * s for s in one.sums))
        return add_leaf_statistics(data, scaled)


def family_params(family: LeafFamily[P], dist: ProbabilityDistribution | None) -> P | None:
    """Return the parameters of a distribution of ``family``; None for no distribution.

    Raises:
        TypeError: the distribution is of another family.
    """
    if dist is None:
        return None
    if isinstance(dist, LeafDistribution) and type(dist.family) is type(family):
        return dist.params
    raise TypeError(f"the previous estimate of a {family.name} must be a {family.name}, got {type(dist).__name__}")


def require_label(value: object, argument: str) -> str | None:
    """Return a name, or None for none.

    Raises:
        TypeError: ``value`` is neither a str nor None.
    """
    if value is None or isinstance(value, str):
        return value
    raise TypeError(f"{argument}={value!r:.60} must be a name, a str, or None, not {type(value).__name__}")


def resolve_prior(pseudo_count: float | None, prior: Any) -> float | None:
    """Check a ``pseudo_count`` and its ``suff_stat`` together.

    Raises:
        TypeError, ValueError: ``pseudo_count`` is not a finite number above zero, or ``suff_stat`` comes without one.
    """
    if pseudo_count is None:
        if prior is not None:
            raise ValueError("suff_stat has no effect without pseudo_count; give how many observations it counts for")
        return None
    return require_finite_float(pseudo_count, "pseudo_count", exclusive_minimum=0.0)
