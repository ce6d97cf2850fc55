"""The distribution over a finite set of categories."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Self

import numpy as np

from mixle.stats.categories import Category, category_from_json, category_to_json
from mixle.stats.category_codes import category_codes
from mixle.stats.encoding import LeafEncoding
from mixle.stats.frames import Frame, FrameMemo, Sums, Vocabulary
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
from mixle.stats.payload import list_field
from mixle.stats.simplex import require_probabilities
from mixle.stats.statistics import LeafStatistic

__all__ = [
    "CategoricalAccumulator",
    "CategoricalAccumulatorFactory",
    "CategoricalDataEncoder",
    "CategoricalDistribution",
    "CategoricalEstimator",
    "CategoricalSampler",
]


class CategoricalParams:
    """Probabilities ``p``, ``(len(vocabulary),)``, of the categories of a vocabulary."""

    def __init__(self, vocabulary: Vocabulary, p: np.ndarray) -> None:
        self.vocabulary, self.p = vocabulary, p
        self._tables = FrameMemo()

    def log_table(self, frame: Vocabulary) -> np.ndarray:
        """Return the log-probability of each of the frame's categories, ``(len(frame),)``."""
        return np.asarray(self._tables.get(frame, self._log_table))

    def _log_table(self, frame: Vocabulary) -> np.ndarray:
        with np.errstate(divide="ignore"):
            # The last entry is where position -1, an unknown category, points.
            log_p = np.log(np.append(self.p, 0.0))
        return np.asarray(log_p[frame.positions_in(self.vocabulary)])


class CategoricalFamily(LeafFamily[CategoricalParams]):
    name = "Categorical"

    def __init__(self, levels: Vocabulary | None = None) -> None:
        self.levels = levels

    def encode(self, values: Any) -> LeafEncoding:
        vocabulary, codes = category_codes(values, self.name)
        return LeafEncoding((codes,), vocabulary)

    def log_density(self, params: CategoricalParams, enc: LeafEncoding) -> np.ndarray:
        assert isinstance(enc.frame, Vocabulary)
        return params.log_table(enc.frame)[enc.columns[0]]

    def statistics(self, enc: LeafEncoding, weights: np.ndarray, frame: Frame | None) -> Sums:
        assert isinstance(frame, Vocabulary)
        # Without rows, bincount counts in integers.
        return (np.bincount(enc.columns[0], weights=weights, minlength=len(frame)).astype(np.float64),)

    def maximize(self, sums: Sums, frame: Frame | None, previous: CategoricalParams | None) -> Fit[CategoricalParams]:
        assert isinstance(frame, Vocabulary)
        (counts,) = sums
        seen = np.flatnonzero(counts)
        if len(seen) < len(frame):
            frame, counts = Vocabulary([frame.categories[i] for i in seen]), counts[seen]
        return Fit(CategoricalParams(frame, counts / counts.sum()))

    def standard(self, frame: Frame | None) -> CategoricalParams:
        prior = self.uniform_prior(frame)
        if not isinstance(prior.frame, Vocabulary) or not len(prior.frame):
            raise ValueError(
                "a Categorical without observations has no categories; give levels, and pseudo_count, to name them"
            )
        return CategoricalParams(prior.frame, prior.sums[0])

    def sample(self, params: CategoricalParams, rng: np.random.Generator, size: int) -> list[Category]:
        drawn = rng.choice(len(params.p), size=size, p=params.p)
        return [params.vocabulary.categories[i] for i in drawn]

    def expected(self, params: CategoricalParams) -> LeafStatistic:
        return LeafStatistic(params.vocabulary, (params.p,))

    def uniform_prior(self, frame: Frame | None) -> LeafStatistic:
        known = self.levels
        if isinstance(frame, Vocabulary):
            known = frame if known is None else frame.join(known)
        if known is None or not len(known):
            return LeafStatistic(None, ())
        return LeafStatistic(known, (np.full(len(known), 1.0 / len(known)),))


class CategoricalDataEncoder(LeafDataEncoder):
    """Encodes None, bools, numbers, strings, bytes and tuples of these; arrays of integers are the fast path."""


class CategoricalSampler(LeafSampler):
    """Draws categories: one, or a list."""


class CategoricalDistribution(LeafDistribution[CategoricalParams]):
    """The distribution over a finite set of categories.

    Categories are equal as in a dict (:mod:`mixle.stats.categories`): ``1``, ``1.0`` and ``True`` are one category,
    ``"1"`` is another.

    Args:
        pmap: the probability of each category; any other category is impossible.

    Raises:
        TypeError, ValueError: ``pmap`` is no mapping of categories to probabilities that sum to one.
    """

    sampler_type = CategoricalSampler
    encoder_type = CategoricalDataEncoder

    def __init__(self, pmap: Mapping[Any, float], *, name: str | None = None, keys: str | None = None) -> None:
        if not isinstance(pmap, Mapping):
            raise TypeError(f"pmap={pmap!r:.80} must be a dict from categories to probabilities")
        vocabulary = Vocabulary(pmap)
        p = require_probabilities([pmap[c] for c in vocabulary.categories], "pmap")
        self._settle(CategoricalFamily(), CategoricalParams(vocabulary, p), name, keys)

    @property
    def pmap(self) -> dict[Category, float]:
        """The probability of each category, in canonical order."""
        return dict(zip(self.params.vocabulary.categories, self.params.p.tolist(), strict=True))

    def parameters_to_dict(self) -> dict[str, Any]:
        return {"pmap": [[category_to_json(c), p] for c, p in self.pmap.items()], **self._labels()}

    @classmethod
    def parameters_from_dict(cls, payload: dict[str, Any]) -> Self:
        pmap: dict[Category, float] = {}
        for i, pair in enumerate(list_field(payload, "pmap", cls)):
            if not isinstance(pair, list) or len(pair) != 2:
                raise TypeError(f"payload of a {cls.__name__}: pmap[{i}]={pair!r:.60} must be [category, probability]")
            category = category_from_json(pair[0])
            if category in pmap:
                raise ValueError(f"payload of a {cls.__name__}: pmap[{i}] gives the category {category!r:.60} again")
            pmap[category] = pair[1]
        return cls(pmap, name=payload.get("name"), keys=payload.get("keys"))._restore_repairs(payload)

    def __repr__(self) -> str:
        return f"CategoricalDistribution({self.pmap!r})"


class CategoricalAccumulator(LeafAccumulator):
    """Counts categories."""

    encoder_type = CategoricalDataEncoder


class CategoricalAccumulatorFactory(LeafAccumulatorFactory):
    """Makes empty :class:`CategoricalAccumulator`."""

    accumulator_type = CategoricalAccumulator


class CategoricalEstimator(LeafEstimator[CategoricalParams]):
    """Fit a :class:`CategoricalDistribution` by counting.

    Args:
        pseudo_count: how many observations ``suff_stat`` counts for; without ``suff_stat`` they are spread evenly over
            ``levels`` and the categories of the encoded data.
        suff_stat: the probabilities to regularize toward, a dict.
        levels: categories that exist whether or not they are observed; needs ``pseudo_count``.
        keys: estimators with equal keys share one statistic and, given equal settings, one fit.
    """

    distribution_type = CategoricalDistribution
    factory_type = CategoricalAccumulatorFactory

    def __init__(
        self,
        *,
        pseudo_count: float | None = None,
        suff_stat: Mapping[Any, float] | None = None,
        levels: Iterable[Any] | None = None,
        name: str | None = None,
        keys: str | None = None,
    ) -> None:
        if levels is not None and (pseudo_count is None or suff_stat is not None):
            raise ValueError(
                "levels has an effect only with pseudo_count and without suff_stat, which names them itself"
            )
        prior = None if suff_stat is None else CategoricalDistribution(suff_stat).params
        family = CategoricalFamily(None if levels is None else Vocabulary(levels))
        self._settle(family, pseudo_count, prior, name, keys)


CategoricalDistribution.estimator_type = CategoricalEstimator
