"""One case for every family, and for nestings of them: what the contract suite runs over.

A new family adds a :class:`FamilyCase` here and gets the whole suite.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import stats

import mixle
from mixle.stats import (
    BernoulliDistribution,
    CategoricalDistribution,
    CompositeDistribution,
    DiagonalGaussianDistribution,
    ExponentialDistribution,
    GaussianDistribution,
    IntegerCategoricalDistribution,
    MarkovChainDistribution,
    MarkovChainEstimator,
    MixtureDistribution,
    MultivariateGaussianDistribution,
    NullDistribution,
    OptionalDistribution,
    ParameterEstimator,
    PoissonDistribution,
    PoissonEstimator,
    ProbabilityDistribution,
    SequenceDistribution,
)

NAN, INF = float("nan"), float("inf")


@dataclass(frozen=True)
class FamilyCase:
    """A distribution and what is known of it from elsewhere.

    Attributes:
        name: how tests call it.
        dist: the distribution.
        parameters: how many are estimated.
        impossible: values of log-density ``-inf``.
        wrong: values that an encoder refuses.
        oracle: the log-density by another library, or None.
        nearby: ``nearby(dist, rng)`` is another member of the family close to ``dist``; None where EM fits.
        latent: whether the M-step needs a previous model.
        values: observations, for what cannot be sampled.
    """

    name: str
    dist: ProbabilityDistribution
    parameters: int
    impossible: tuple[Any, ...] = ()
    wrong: tuple[Any, ...] = ()
    oracle: Callable[[Any], float] | None = None
    nearby: Callable[[Any, np.random.Generator], ProbabilityDistribution] | None = None
    latent: bool = False
    values: tuple[Any, ...] = ()

    @property
    def estimator(self) -> ParameterEstimator:
        """The unregularized estimator of the family."""
        return self.dist.estimator()

    def data(self, n: int, seed: int = 0) -> list[Any]:
        """Return ``n`` observations."""
        if self.values:
            return [self.values[i % len(self.values)] for i in range(n)]
        return list(self.dist.sampler(seed).sample(n))

    @property
    def first_model(self) -> ProbabilityDistribution | None:
        """The model that one EM step starts from, if it needs one."""
        return self.dist if self.latent else None


def fitted(estimator: ParameterEstimator, data: list[Any]) -> ProbabilityDistribution:
    """Return the fit of ``estimator`` to ``data`` in one step."""
    return mixle.seq_estimate(mixle.seq_encode(data, estimator=estimator), estimator)


def simplex_step(p: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Return a probability vector near ``p`` with the same zeros."""
    q = p * np.exp(rng.normal(0, 0.05, len(p)))
    return q / q.sum()


def categorical_nearby(dist: CategoricalDistribution, rng: np.random.Generator) -> CategoricalDistribution:
    return CategoricalDistribution(
        dict(zip(dist.pmap, simplex_step(np.array(list(dist.pmap.values())), rng), strict=True))
    )


def row_nearby(row: dict[Any, float], rng: np.random.Generator) -> dict[Any, float]:
    return dict(zip(row, simplex_step(np.array(list(row.values())), rng).tolist(), strict=True))


def chain_nearby(dist: MarkovChainDistribution, rng: np.random.Generator) -> MarkovChainDistribution:
    rows = {state: row_nearby(row, rng) for state, row in dist.transition_map.items()}
    return MarkovChainDistribution(row_nearby(dist.init_prob_map, rng), rows, dist.len_dist)


def covariance_nearby(covar: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    factor = np.linalg.cholesky(covar) @ (np.eye(len(covar)) + rng.normal(0, 0.05, covar.shape))
    return factor @ factor.T


MU, DIAGONAL = np.array([1.0, -2.0, 50.0]), np.array([0.5, 2.0, 30.0])
COVAR = np.array([[2.0, 0.6, 1.0], [0.6, 1.0, -0.4], [1.0, -0.4, 9.0]])
WORDS = {"a": 0.5, None: 0.2, ("t", 1): 0.2, 7: 0.1}
CHAIN = MarkovChainDistribution(
    {"a": 0.6, "b": 0.4},
    {"a": {"a": 0.2, "b": 0.8}, "b": {"a": 0.5, "c": 0.5}, "c": {"a": 1.0}},
    PoissonDistribution(4.0),
)
OTHER_CHAIN = MarkovChainDistribution(
    {"a": 0.2, "c": 0.8},
    {"a": {"c": 1.0}, "b": {"b": 0.9, "a": 0.1}, "c": {"a": 0.3, "b": 0.7}},
    PoissonDistribution(7.0),
)


def chain_oracle(x: list[str]) -> float:
    """The log-probability of a sequence of ``CHAIN``, term by term."""
    p = stats.poisson.pmf(len(x), 4.0)
    for i, state in enumerate(x):
        row = CHAIN.transition_map[x[i - 1]] if i else CHAIN.init_prob_map
        p *= row.get(state, 0.0)
    return math.log(p)


LEAVES = (
    FamilyCase(
        "Gaussian",
        GaussianDistribution(1.5, 2.25),
        2,
        impossible=(INF, -INF, 1e300, 10**400),
        wrong=("a", None, True, NAN, [1.0], 1j),
        oracle=stats.norm(1.5, 1.5).logpdf,
        nearby=lambda d, rng: GaussianDistribution(d.mu + rng.normal(0, 0.1), d.sigma2 * math.exp(rng.normal(0, 0.1))),
    ),
    FamilyCase(
        "DiagonalGaussian",
        DiagonalGaussianDistribution(MU, DIAGONAL),
        6,
        impossible=([INF, 0.0, 0.0],),
        wrong=("abc", 3.0, [1.0, 2.0], [1.0, 2.0, "x"], [NAN, 0.0, 0.0], [[1.0], [2.0], [3.0]], None),
        oracle=stats.multivariate_normal(MU, np.diag(DIAGONAL)).logpdf,
        nearby=lambda d, rng: DiagonalGaussianDistribution(
            d.mu + rng.normal(0, 0.1, 3), d.covar * np.exp(rng.normal(0, 0.1, 3))
        ),
    ),
    FamilyCase(
        "MultivariateGaussian",
        MultivariateGaussianDistribution(MU, COVAR),
        9,
        impossible=([0.0, -INF, 0.0],),
        wrong=("abc", 3.0, [1.0, 2.0], [1.0, 2.0, None], [0.0, NAN, 0.0], True),
        oracle=stats.multivariate_normal(MU, COVAR).logpdf,
        nearby=lambda d, rng: MultivariateGaussianDistribution(
            d.mu + rng.normal(0, 0.1, 3), covariance_nearby(d.covar, rng)
        ),
    ),
    FamilyCase(
        "Categorical",
        CategoricalDistribution(WORDS),
        3,
        impossible=("z", 0, ("t", 2), b"a", "7"),
        wrong=([1], {}, NAN, object(), 1j, ("t", [1])),
        oracle=lambda x: math.log(WORDS[x]),
        nearby=categorical_nearby,
    ),
    FamilyCase(
        "IntegerCategorical",
        IntegerCategoricalDistribution(-1, [0.1, 0.4, 0.3, 0.2]),
        3,
        impossible=(-2, 3, 0.5, INF, 10**30),
        wrong=("1", None, True, NAN, (1,)),
        oracle=stats.rv_discrete(values=([-1, 0, 1, 2], [0.1, 0.4, 0.3, 0.2])).logpmf,
        nearby=lambda d, rng: IntegerCategoricalDistribution(d.min_val, simplex_step(d.p_vec, rng)),
    ),
    FamilyCase(
        "Poisson",
        PoissonDistribution(3.5),
        1,
        impossible=(-1, 2.5, INF, -INF),
        wrong=("a", None, True, NAN, b"1"),
        oracle=stats.poisson(3.5).logpmf,
        nearby=lambda d, rng: PoissonDistribution(d.lam * math.exp(rng.normal(0, 0.1))),
    ),
    FamilyCase(
        "Exponential",
        ExponentialDistribution(2.5),
        1,
        impossible=(-0.1, -INF, INF),
        wrong=("a", None, False, NAN, {}),
        oracle=stats.expon(scale=2.5).logpdf,
        nearby=lambda d, rng: ExponentialDistribution(d.beta * math.exp(rng.normal(0, 0.1))),
    ),
    FamilyCase(
        "Bernoulli",
        BernoulliDistribution(0.3),
        1,
        impossible=(2, 0.5, -1, INF),
        wrong=("a", None, NAN, [True]),
        oracle=stats.bernoulli(0.3).logpmf,
        nearby=lambda d, rng: BernoulliDistribution(float(simplex_step(np.array([d.p, 1 - d.p]), rng)[0])),
    ),
)

RECORD = CompositeDistribution(
    [GaussianDistribution(0.0, 1.0), CategoricalDistribution({"x": 0.7, "y": 0.3}), PoissonDistribution(2.0)]
)
OTHER_RECORD = CompositeDistribution(
    [GaussianDistribution(3.0, 2.0), CategoricalDistribution({"x": 0.1, "y": 0.6, "z": 0.3}), PoissonDistribution(9.0)]
)
NEAR_AND_FAR = MixtureDistribution([GaussianDistribution(-2.0, 1.0), GaussianDistribution(3.0, 4.0)], [0.3, 0.7])

COMBINATORS = (
    FamilyCase("Null", NullDistribution(), 0, values=(None, "a", 3, [1, 2]), oracle=lambda x: 0.0),
    FamilyCase(
        "MarkovChain",
        CHAIN,
        4,
        impossible=(["c"], ["a", "z"], ["b", "b"], ["z"]),
        wrong=("ab", b"ab", 3, None, ["a", NAN], [["a"]], np.zeros((2, 2), dtype=int)),
        oracle=chain_oracle,
        nearby=chain_nearby,
    ),
    FamilyCase(
        "Composite",
        RECORD,
        4,
        impossible=((0.0, "z", 1), (INF, "x", 1), (0.0, "x", -1)),
        wrong=((0.0, "x"), 3.0, "abc", ("a", "x", 1), (0.0, "x", None), None),
        oracle=lambda x: (
            stats.norm.logpdf(x[0]) + math.log({"x": 0.7, "y": 0.3}[x[1]]) + stats.poisson.logpmf(x[2], 2.0)
        ),
    ),
    FamilyCase(
        "Sequence",
        SequenceDistribution(ExponentialDistribution(2.0), PoissonDistribution(3.0)),
        2,
        impossible=([1.0, -1.0], [INF]),
        wrong=(3.0, "ab", [1.0, "b"], [None], None, [[1.0]]),
        oracle=lambda x: stats.expon.logpdf(x, scale=2.0).sum() + stats.poisson.logpmf(len(x), 3.0),
    ),
    FamilyCase(
        "Optional",
        OptionalDistribution(GaussianDistribution(1.0, 4.0), 0.25),
        3,
        impossible=(INF,),
        wrong=("a", NAN, True),
        oracle=lambda x: math.log(0.25) if x is None else math.log(0.75) + stats.norm.logpdf(x, 1.0, 2.0),
    ),
    FamilyCase(
        "Mixture",
        NEAR_AND_FAR,
        5,
        impossible=(INF,),
        wrong=("a", None, NAN, True),
        oracle=lambda x: math.log(0.3 * stats.norm.pdf(x, -2.0, 1.0) + 0.7 * stats.norm.pdf(x, 3.0, 2.0)),
        latent=True,
    ),
)

NESTINGS = (
    FamilyCase(
        "MixtureOfComposites",
        MixtureDistribution([RECORD, OTHER_RECORD], [0.4, 0.6]),
        10,
        impossible=((0.0, "q", 1), (0.0, "x", 0.5)),
        wrong=((0.0, "x"), (0.0, "x", "y")),
        latent=True,
    ),
    FamilyCase(
        "SequenceOfMixtures",
        SequenceDistribution(NEAR_AND_FAR, IntegerCategoricalDistribution(0, [0.1, 0.2, 0.7])),
        7,
        impossible=([0.0, 0.0, 0.0], [INF]),
        wrong=([None], 1.0),
        latent=True,
    ),
    FamilyCase(
        "OptionalInComposite",
        CompositeDistribution(
            [OptionalDistribution(PoissonDistribution(2.0), 0.3, missing_value=NAN), BernoulliDistribution(0.4)]
        ),
        3,
        impossible=((2.5, True), (NAN, 3)),
        wrong=((None, True), ("a", True), (1, "b")),
    ),
    FamilyCase(
        "OptionalWithoutProbability",
        OptionalDistribution(ExponentialDistribution(3.0), missing_value=-1),
        1,
        values=(0.5, -1, 2.0, 7.25, -1),
        impossible=(-2.0,),
        wrong=("a", None),
        oracle=lambda x: 0.0 if x == -1 else stats.expon.logpdf(x, scale=3.0),
    ),
    FamilyCase(
        "MixtureOfSequences",
        MixtureDistribution(
            [
                SequenceDistribution(GaussianDistribution(0.0, 1.0), PoissonDistribution(3.0)),
                SequenceDistribution(GaussianDistribution(2.0, 0.5), PoissonDistribution(6.0)),
            ],
            [0.5, 0.5],
        ),
        7,
        impossible=([INF],),
        wrong=([None], 1.0),
        latent=True,
    ),
    FamilyCase(
        "MixtureOfMarkovChains",
        MixtureDistribution([CHAIN, OTHER_CHAIN], [0.5, 0.5]),
        9,
        impossible=(["z"], ["a", "a", "z"]),
        wrong=("ab", [NAN]),
        latent=True,
    ),
    FamilyCase(
        "MixtureOfDiagonalGaussians",
        MixtureDistribution(
            [DiagonalGaussianDistribution(MU, DIAGONAL), DiagonalGaussianDistribution(MU + 3, DIAGONAL / 2)], [0.8, 0.2]
        ),
        13,
        impossible=([INF, 0.0, 0.0],),
        wrong=([0.0], "abc"),
        latent=True,
    ),
    FamilyCase(
        "MixtureOfMultivariateGaussians",
        MixtureDistribution(
            [MultivariateGaussianDistribution(MU, COVAR), MultivariateGaussianDistribution(MU + 2, COVAR * 2)],
            [0.3, 0.7],
        ),
        19,
        impossible=([INF, 0.0, 0.0],),
        wrong=([0.0], "abc"),
        latent=True,
    ),
    FamilyCase(
        "MixtureOfUnlikeFamilies",
        MixtureDistribution([ExponentialDistribution(1.0), GaussianDistribution(-3.0, 1.0)], [0.5, 0.5]),
        4,
        impossible=(INF,),
        wrong=("a", None),
        oracle=lambda x: math.log(0.5 * stats.expon.pdf(x) + 0.5 * stats.norm.pdf(x, -3.0)),
        latent=True,
    ),
    FamilyCase(
        "MixtureOfMixtures",
        MixtureDistribution([NEAR_AND_FAR, GaussianDistribution(20.0, 1.0)], [0.5, 0.5]),
        8,
        impossible=(-INF,),
        wrong=("a",),
        latent=True,
    ),
    FamilyCase(
        "SmoothedMarkovChain",
        fitted(
            MarkovChainEstimator(pseudo_count=0.5, levels="abcde", len_estimator=PoissonEstimator()),
            [["a", "b", "a", "a"], ["b"], []],
        ),
        25,
        impossible=(["z"], ["a", "z"]),
        wrong=("ab",),
    ),
)

CASES = (*LEAVES, *COMBINATORS, *NESTINGS)
