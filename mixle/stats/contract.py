"""The contract: five roles that every family plays, and the rules that hold between them.

A **distribution** scores and samples, an **estimator** turns a sufficient statistic into a distribution, an
**accumulator** gathers that statistic (its **factory** makes empty ones), an **encoder** turns raw observations into
arrays once. Estimators never store data and accumulators never store parameters, so a statistic may be gathered
anywhere and the M-step may run anywhere.

Rules, checked by one test suite over every family: scalar and ``seq_`` paths agree; a row of weight zero changes
nothing; ``combine`` is associative and commutative; the log-density of an impossible value is ``-inf``; a degenerate
fit returns a proper distribution and says in :attr:`ProbabilityDistribution.repairs` what was repaired.
"""

from __future__ import annotations

import copy
import inspect
import json
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Sequence
from functools import lru_cache
from typing import Any, ClassVar, Self

import numpy as np

from mixle.stats.policy import Repair
from mixle.stats.row_draws import RowDraws
from mixle.utils.exact import require_finite_float

__all__ = [
    "AccumulatorFactory",
    "DataEncoder",
    "ParameterEstimator",
    "ProbabilityDistribution",
    "Sampler",
    "StatisticAccumulator",
    "m_step",
    "require_distributions",
    "require_estimators",
]


class ProbabilityDistribution(ABC):
    """A distribution over observations of one kind.

    A subclass gives :meth:`seq_log_density`, :meth:`sampler`, :meth:`estimator`, :meth:`dist_to_encoder` and the pair
    :meth:`parameters_to_dict` / :meth:`parameters_from_dict`; the rest is written here.
    """

    _types: ClassVar[dict[str, type[ProbabilityDistribution]]] = {}

    name: str | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        ProbabilityDistribution._types[cls.type_name()] = cls

    @classmethod
    def type_name(cls) -> str:
        """Return the name under which this class is serialized: bare for mixle's own, qualified for others."""
        return cls.__name__ if cls.__module__.startswith("mixle.") else f"{cls.__module__}:{cls.__qualname__}"

    @property
    def repairs(self) -> tuple[Repair, ...]:
        """What the fit had to repair to stay proper; empty for a clean fit or a distribution made by hand."""
        return ()

    def log_density(self, x: Any) -> float:
        """Return the natural log of the density or probability of one observation; ``-inf`` if it is impossible."""
        return float(self.seq_log_density(self.dist_to_encoder().seq_encode([x]))[0])

    def density(self, x: Any) -> float:
        """Return ``exp(log_density(x))``, infinite where that overflows."""
        with np.errstate(over="ignore"):
            return float(np.exp(self.log_density(x)))

    @abstractmethod
    def seq_log_density(self, enc: Any) -> np.ndarray:
        """Return the log-densities of ``n`` encoded observations, shape ``(n,)`` float64."""

    @abstractmethod
    def sampler(self, seed: int | np.random.Generator | None = None) -> Sampler:
        """Return a sampler whose draws are fixed by ``seed``."""

    @abstractmethod
    def estimator(self, pseudo_count: float | None = None) -> ParameterEstimator:
        """Return an estimator of this family; with ``pseudo_count``, regularized toward this distribution."""

    @abstractmethod
    def dist_to_encoder(self) -> DataEncoder:
        """Return the encoder whose output :meth:`seq_log_density` reads."""

    def __eq__(self, other: object) -> bool:
        """Two distributions of one type are equal if they serialize alike, names and repairs included."""
        return type(self) is type(other) and self.to_dict() == other.to_dict()

    def parameters_to_dict(self) -> dict[str, Any]:
        """Return what :meth:`parameters_from_dict` needs, in JSON types."""
        raise TypeError(f"{type(self).__name__} does not define parameters_to_dict, so it cannot be serialized")

    @classmethod
    def parameters_from_dict(cls, payload: dict[str, Any]) -> Self:
        """Build the distribution from what :meth:`parameters_to_dict` returned."""
        raise TypeError(f"{cls.__name__} does not define parameters_from_dict, so it cannot be deserialized")

    def to_dict(self) -> dict[str, Any]:
        """Return the distribution as a JSON-safe dict, floats exact."""
        return {"type": self.type_name(), **self.parameters_to_dict()}

    @classmethod
    def from_dict(cls, payload: dict[str, Any]) -> Self:
        """Build a distribution from :meth:`to_dict`'s dict; only classes that are already imported can be named.

        Raises:
            ValueError: ``payload`` is no such dict, names an unknown type, or names a type that is not a ``cls``.
        """
        if not isinstance(payload, dict) or not isinstance(payload.get("type"), str):
            raise ValueError(f"payload must be a dict with a 'type' name, got {payload!r:.80}")
        kind = ProbabilityDistribution._types.get(payload["type"])
        if kind is None:
            raise ValueError(f"payload names the type {payload['type']!r}, which no imported module defines")
        if not issubclass(kind, cls):
            raise ValueError(f"payload holds a {kind.__name__}, not a {cls.__name__}")
        try:
            return kind.parameters_from_dict({key: value for key, value in payload.items() if key != "type"})
        except KeyError as error:
            raise ValueError(f"payload of a {kind.__name__} lacks {error.args[0]!r}") from error

    def to_json(self) -> str:
        """Return :meth:`to_dict` as JSON text."""
        return json.dumps(self.to_dict(), allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Build a distribution from :meth:`to_json`'s text."""
        return cls.from_dict(json.loads(text))


class Sampler(ABC):
    """A reproducible stream of observations."""

    @abstractmethod
    def sample(self, size: int | None = None) -> Any:
        """Draw one observation, or with ``size`` a list or array of that many."""


class ParameterEstimator(ABC):
    """What is fitted: turns a sufficient statistic into a distribution.

    Attributes:
        trains_in_place: whether successive models are one object in different states, as those of a torch module are.
    """

    name: str | None = None
    trains_in_place: ClassVar[bool] = False

    @abstractmethod
    def accumulator_factory(self) -> AccumulatorFactory:
        """Return the factory of the accumulators that gather this estimator's statistic."""

    @abstractmethod
    def estimate(self, nobs: float | None, suff_stat: Any) -> ProbabilityDistribution:
        """Return the distribution that maximizes the (regularized) likelihood of ``suff_stat``.

        ``nobs`` is the total weight, None if unknown. An implementation may take a further keyword ``previous``: the
        distribution that the statistic was gathered under, which parts without any observation keep.
        """


class AccumulatorFactory(ABC):
    """Makes empty accumulators; small and picklable, so it can travel to where the data lives."""

    @abstractmethod
    def make(self) -> StatisticAccumulator:
        """Return an empty accumulator."""


class StatisticAccumulator(ABC):
    """Gathers a sufficient statistic from encoded observations.

    A subclass gives :meth:`seq_update`, :meth:`seq_initialize`, :meth:`combine`, :meth:`value`, :meth:`from_value` and
    :meth:`acc_to_encoder`, and overrides :meth:`key_merge` and :meth:`key_replace` if it has keys or children.
    """

    def update(self, x: Any, weight: float, estimate: ProbabilityDistribution | None) -> None:
        """Add one observation; ``estimate`` is the current model, which latent families need.

        Raises:
            TypeError, ValueError: ``weight`` is not a finite number of at least 0, or ``x`` is none of the family's.
        """
        weights = np.array([require_finite_float(weight, "weight", minimum=0.0)])
        self.seq_update(self.acc_to_encoder().seq_encode([x]), weights, estimate)

    def initialize(self, x: Any, weight: float, rng: Any) -> None:
        """Add one observation when there is no model yet; latent families assign it at random. Raises as update."""
        draws = RowDraws.coerce(rng, 1)
        weights = np.array([require_finite_float(weight, "weight", minimum=0.0)])
        self.seq_initialize(self.acc_to_encoder().seq_encode([x]), weights, draws)

    @abstractmethod
    def seq_update(self, enc: Any, weights: np.ndarray, estimate: ProbabilityDistribution | None) -> None:
        """Add ``n`` encoded observations with ``weights`` of shape ``(n,)``, float64, non-negative."""

    def seq_initialize(self, enc: Any, weights: np.ndarray, rng: RowDraws) -> None:
        """Add ``n`` encoded observations when there is no model yet.

        ``rng`` draws by global row (:class:`~mixle.stats.row_draws.RowDraws`), so that the result does not depend on
        how the data was split. Families without latent parts need no draws: the default is a plain update.
        """
        self.seq_update(enc, weights, None)

    @abstractmethod
    def combine(self, suff_stat: Any) -> Self:
        """Add another accumulator's :meth:`value`; return self."""

    @abstractmethod
    def value(self) -> Any:
        """Return the statistic as plain arrays, numbers, tuples and dicts."""

    @abstractmethod
    def from_value(self, value: Any) -> Self:
        """Replace the statistic by ``value``; return self."""

    def key_merge(self, stats: dict[Hashable, Any]) -> None:  # noqa: B027  (no keys is a legitimate default)
        """Pool the parts that carry keys into ``stats``, which maps a key to its pooled statistic."""

    def key_replace(self, stats: dict[Hashable, Any]) -> None:  # noqa: B027
        """Take the pooled statistic from ``stats`` for the parts that carry keys."""

    @abstractmethod
    def acc_to_encoder(self) -> DataEncoder:
        """Return the encoder whose output :meth:`seq_update` reads."""

    def merge_tied(self, stats: dict[Hashable, Any], key: Hashable) -> None:
        """Pool this accumulator under ``key``.

        Raises:
            ValueError: another kind of statistic already carries the key.
        """
        held = stats.get(key)
        if held is None:
            stats[key] = copy.deepcopy(self)
        elif type(held) is not type(self):
            raise ValueError(
                f"keys={key!r} is shared by {type(held).__name__} and {type(self).__name__}; tie only alike parts"
            )
        else:
            held.combine(self.value())


class DataEncoder(ABC):
    """Turns raw observations into arrays, and validates them: here and nowhere later."""

    @abstractmethod
    def seq_encode(self, xs: Sequence[Any]) -> Any:
        """Return the encoding of ``xs``.

        Raises:
            TypeError, ValueError: an observation has the wrong type or shape; the message names its index and value.
        """

    @abstractmethod
    def __eq__(self, other: object) -> bool:
        """Two encoders that encode alike are equal."""

    def __hash__(self) -> int:
        return hash(type(self))


def require_distributions(parts: Iterable[Any], name: str) -> tuple[Any, ...]:
    """Return ``parts`` as a tuple of at least one distribution.

    Raises:
        TypeError: a part is no distribution.
        ValueError: there is none.
    """
    return _require_parts(parts, name, "seq_log_density", "a distribution")


def require_estimators(parts: Iterable[Any], name: str) -> tuple[Any, ...]:
    """Return ``parts`` as a tuple of at least one estimator.

    Raises:
        TypeError: a part is no estimator.
        ValueError: there is none.
    """
    return _require_parts(parts, name, "accumulator_factory", "an estimator")


def _require_parts(parts: Iterable[Any], name: str, method: str, kind: str) -> tuple[Any, ...]:
    held = tuple(parts)
    for i, part in enumerate(held):
        if isinstance(part, type) or not hasattr(part, method):
            raise TypeError(f"{name}[{i}]={part!r:.60} must be {kind}")
    if not held:
        raise ValueError(f"{name}=() must hold at least one part, {kind}")
    return held


@lru_cache(maxsize=256)
def _takes_previous(kind: type[ParameterEstimator]) -> bool:
    return "previous" in inspect.signature(kind.estimate).parameters


def m_step(
    estimator: ParameterEstimator, nobs: float | None, suff_stat: Any, previous: ProbabilityDistribution | None
) -> Any:
    """Run the estimator's M-step, handing it the previous distribution if its ``estimate`` takes one."""
    if _takes_previous(type(estimator)):
        return estimator.estimate(nobs, suff_stat, previous=previous)  # type: ignore[call-arg]
    return estimator.estimate(nobs, suff_stat)
