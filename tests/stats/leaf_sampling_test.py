"""Samplers of the leaf families follow the distribution functions of another library."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from scipy import stats

from mixle.stats import (
    BernoulliDistribution,
    CategoricalDistribution,
    DiagonalGaussianDistribution,
    ExponentialDistribution,
    GaussianDistribution,
    IntegerCategoricalDistribution,
    MarkovChainDistribution,
    MixtureDistribution,
    MultivariateGaussianDistribution,
    OptionalDistribution,
    PoissonDistribution,
)
from mixle.stats.contract import Sampler

N = 20_000


@pytest.mark.parametrize(
    ("dist", "law"),
    [
        (GaussianDistribution(3.0, 4.0), stats.norm(3.0, 2.0)),
        (ExponentialDistribution(2.5), stats.expon(scale=2.5)),
    ],
    ids=["Gaussian", "Exponential"],
)
def test_draws_follow_the_distribution_function(dist, law):
    assert stats.kstest(dist.sampler(1).sample(N), law.cdf).pvalue > 1e-3


def test_vectors_follow_their_marginals_and_correlate():
    mu, covar = np.array([1.0, -2.0]), np.array([[2.0, 1.0], [1.0, 3.0]])
    full = MultivariateGaussianDistribution(mu, covar).sampler(1).sample(N)
    diagonal = DiagonalGaussianDistribution(mu, np.diagonal(covar)).sampler(1).sample(N)
    for draws in (full, diagonal):
        for axis in range(2):
            law = stats.norm(mu[axis], np.sqrt(covar[axis, axis]))
            assert stats.kstest(draws[:, axis], law.cdf).pvalue > 1e-3
    assert np.corrcoef(full.T)[0, 1] == pytest.approx(1 / np.sqrt(6), abs=0.02)
    assert np.corrcoef(diagonal.T)[0, 1] == pytest.approx(0.0, abs=0.02)


def frequencies_fit(draws, expected):
    """Chi-square test of draws against a dict of probabilities."""
    observed = [sum(1 for x in draws if x == value) for value in expected]
    assert sum(observed) == len(draws)
    return stats.chisquare(observed, len(draws) * np.array(list(expected.values()))).pvalue > 1e-3


@pytest.mark.parametrize(
    ("dist", "expected"),
    [
        (CategoricalDistribution({"a": 0.6, None: 0.1, 3: 0.3}), {"a": 0.6, None: 0.1, 3: 0.3}),
        (IntegerCategoricalDistribution(-1, [0.2, 0.5, 0.3]), {-1: 0.2, 0: 0.5, 1: 0.3}),
        (BernoulliDistribution(0.3), {True: 0.3, False: 0.7}),
        (OptionalDistribution(BernoulliDistribution(0.5), 0.2), {None: 0.2, True: 0.4, False: 0.4}),
        (
            MixtureDistribution([CategoricalDistribution({"a": 1.0}), CategoricalDistribution({"b": 1.0})], [0.3, 0.7]),
            {"a": 0.3, "b": 0.7},
        ),
    ],
    ids=["Categorical", "IntegerCategorical", "Bernoulli", "Optional", "Mixture"],
)
def test_frequencies_follow_the_probabilities(dist, expected):
    assert frequencies_fit(list(dist.sampler(2).sample(N)), expected)


def test_counts_follow_the_poisson_law():
    draws = PoissonDistribution(2.0).sampler(3).sample(N)
    law = {x: stats.poisson(2.0).pmf(x) for x in range(7)}
    law[7] = 1 - sum(law.values())
    assert frequencies_fit(np.minimum(draws, 7).tolist(), law)


def test_steps_of_a_chain_follow_its_rows():
    rows = {"a": {"a": 0.2, "b": 0.8}, "b": {"a": 0.5, "c": 0.5}, "c": {"a": 1.0}}
    chain = MarkovChainDistribution({"a": 1.0}, rows).sampler(4).sample_length(N)
    for state, row in rows.items():
        after = [b for a, b in itertools.pairwise(chain) if a == state]
        assert len(row) == 1 or frequencies_fit(after, row)


@pytest.mark.parametrize(
    "dist", [GaussianDistribution(0, 1), CategoricalDistribution({"a": 1.0}), PoissonDistribution(0.0)]
)
def test_one_draw_is_a_value_and_several_are_a_collection(dist):
    sampler = dist.sampler(0)
    assert isinstance(sampler, Sampler)
    assert np.ndim(sampler.sample()) == 0
    assert len(sampler.sample(3)) == 3
    assert len(sampler.sample(0)) == 0
