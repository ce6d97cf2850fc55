"""What each leaf family takes, refuses, and adds as pseudo-observations."""

from __future__ import annotations

import math

import numpy as np
import pytest

from mixle import seq_encode, seq_estimate
from mixle.stats import (
    BernoulliDistribution,
    BernoulliEstimator,
    CategoricalDistribution,
    CategoricalEstimator,
    DiagonalGaussianDistribution,
    DiagonalGaussianEstimator,
    ExponentialDistribution,
    ExponentialEstimator,
    GaussianDistribution,
    GaussianEstimator,
    IntegerCategoricalDistribution,
    IntegerCategoricalEstimator,
    MultivariateGaussianDistribution,
    MultivariateGaussianEstimator,
    PoissonDistribution,
    PoissonEstimator,
)


def fit(data, estimator, previous=None):
    return seq_estimate(seq_encode(data, estimator=estimator), estimator, previous)


@pytest.mark.parametrize(
    ("make", "kind", "message"),
    [
        (lambda: GaussianDistribution(0.0, 0.0), ValueError, r"sigma2=0\.0 must be above 0"),
        (lambda: GaussianDistribution(math.nan, 1.0), ValueError, "mu=nan must be finite"),
        (lambda: GaussianDistribution("0", 1.0), TypeError, "mu='0'"),
        (lambda: DiagonalGaussianDistribution([0.0, 1.0], [1.0]), ValueError, "covar must be a vector of 2 numbers"),
        (
            lambda: DiagonalGaussianDistribution([0.0], [0.0]),
            ValueError,
            r"covar=\[0\.0\] must hold positive variances",
        ),
        (
            lambda: MultivariateGaussianDistribution([0.0], [[0.0]]),
            ValueError,
            r"positive definite; .* eigenvalue is 0",
        ),
        (lambda: MultivariateGaussianDistribution([0.0], [1.0]), ValueError, r"shape \(1, 1\) to fit mu, got \(1,\)"),
        (lambda: MultivariateGaussianDistribution([0.0], [[math.inf]]), ValueError, "covar must be finite"),
        (lambda: MultivariateGaussianDistribution([0.0], "a"), TypeError, "covar='a' must be a matrix"),
        (
            lambda: MultivariateGaussianDistribution([0, 0], [[2, 1], [0, 2]]),
            ValueError,
            "covar must be symmetric; its largest asymmetry is 1",
        ),
        (lambda: CategoricalDistribution({"a": 0.5}), ValueError, r"pmap=\[0\.5\] must sum to 1"),
        (lambda: CategoricalDistribution(["a"]), TypeError, "must be a dict from categories to probabilities"),
        (lambda: CategoricalDistribution({object(): 1.0}), TypeError, "a category must be"),
        (lambda: CategoricalDistribution({}), ValueError, "pmap must be a vector of at least one"),
        (lambda: IntegerCategoricalDistribution(0.5, [1.0]), TypeError, r"min_val=0\.5 must be an integer"),
        (lambda: IntegerCategoricalDistribution(0, [0.5]), ValueError, r"p_vec=\[0\.5\] must sum to 1"),
        (lambda: PoissonDistribution(-1.0), ValueError, r"lam=-1\.0 must be at least 0"),
        (lambda: ExponentialDistribution(0), ValueError, r"beta=0\.0 must be above 0"),
        (lambda: BernoulliDistribution(1.5), ValueError, r"p=1\.5 must be at most 1"),
        (lambda: BernoulliDistribution(True), TypeError, "p=True must be a real number"),
        (lambda: DiagonalGaussianEstimator(0), ValueError, "dim=0 must be at least 1"),
        (
            lambda: DiagonalGaussianEstimator(3, pseudo_count=1.0, suff_stat=([0.0], [1.0])),
            ValueError,
            "dim=3 does not fit",
        ),
        (lambda: GaussianEstimator(pseudo_count=0.0), ValueError, r"pseudo_count=0\.0 must be above 0"),
        (lambda: GaussianEstimator(suff_stat=(0.0, 1.0)), ValueError, "suff_stat has no effect without pseudo_count"),
        (lambda: GaussianEstimator(pseudo_count=1.0), ValueError, "pseudo_count for a Gaussian needs suff_stat"),
        (lambda: IntegerCategoricalEstimator(3, 2), ValueError, "max_val=2 must be at least 3"),
        (lambda: CategoricalEstimator(levels="ab"), ValueError, "levels has an effect only with pseudo_count"),
    ],
)
def test_wrong_arguments_are_refused_by_name_and_value(make, kind, message):
    with pytest.raises(kind, match=message):
        make()


@pytest.mark.parametrize(
    ("estimator", "data", "expected"),
    [
        (GaussianEstimator(pseudo_count=2.0, suff_stat=(0.0, 1.0)), [3.0, 5.0], (2.0, 5.0)),
        (PoissonEstimator(pseudo_count=2.0, suff_stat=1.0), [4, 6], (3.0,)),
        (ExponentialEstimator(pseudo_count=2.0, suff_stat=1.0), [4.0, 6.0], (3.0,)),
        (BernoulliEstimator(pseudo_count=2.0), [True, True], (0.75,)),
        (BernoulliEstimator(pseudo_count=2.0, suff_stat=0.0), [True, True], (0.5,)),
    ],
)
def test_pseudo_observations_add_to_the_statistic(estimator, data, expected):
    assert tuple(fit(data, estimator).params) == pytest.approx(expected)


def test_pseudo_observations_of_vectors_add_to_the_statistic():
    rows = [[3.0, 0.0], [5.0, 0.0]]
    prior = ([0.0, 0.0], [1.0, 1.0])
    diagonal = fit(rows, DiagonalGaussianEstimator(pseudo_count=2.0, suff_stat=prior))
    np.testing.assert_allclose(diagonal.mu, [2.0, 0.0])
    np.testing.assert_allclose(diagonal.covar, [5.0, 0.5])
    full = fit(rows, MultivariateGaussianEstimator(pseudo_count=2.0, suff_stat=(prior[0], np.eye(2))))
    np.testing.assert_allclose(full.covar, [[5.0, 0.0], [0.0, 0.5]], atol=1e-12)


def test_pseudo_observations_of_categories_are_spread_over_what_was_seen_and_the_levels():
    assert fit(["a", "a", "b"], CategoricalEstimator(pseudo_count=1.0)).pmap == {"a": 2.5 / 4, "b": 1.5 / 4}
    smoothed = fit(["a", "a"], CategoricalEstimator(pseudo_count=2.0, levels="abcd")).pmap
    assert smoothed == {"a": 2.5 / 4, "b": 0.5 / 4, "c": 0.5 / 4, "d": 0.5 / 4}
    toward = fit(["a"], CategoricalEstimator(pseudo_count=1.0, suff_stat={"b": 1.0}))
    assert toward.pmap == {"a": 0.5, "b": 0.5}


def test_pseudo_observations_of_integers_are_spread_over_the_range():
    assert fit([0, 2], IntegerCategoricalEstimator(pseudo_count=3.0)).p_vec.tolist() == [0.4, 0.2, 0.4]
    wide = fit([0], IntegerCategoricalEstimator(-1, 2, pseudo_count=4.0))
    assert (wide.min_val, wide.max_val) == (-1, 2)
    assert wide.p_vec.tolist() == [0.2, 0.4, 0.2, 0.2]
    toward = fit([5], IntegerCategoricalEstimator(pseudo_count=1.0, suff_stat=(3, [1.0])))
    assert (toward.min_val, toward.p_vec.tolist()) == (3, [0.5, 0.0, 0.5])


def test_the_range_of_integers_can_be_wider_than_the_data_but_not_narrower():
    model = fit([2, 3], IntegerCategoricalEstimator(0, 4))
    assert model.p_vec.tolist() == [0.0, 0.0, 0.5, 0.5, 0.0]
    with pytest.raises(ValueError, match="min_val=0, max_val=4 exclude observed values: they go from 2 to 9"):
        fit([2, 9], IntegerCategoricalEstimator(0, 4))


def test_integers_too_far_apart_for_a_table_are_refused():
    data = [0, 10**9]
    with pytest.raises(ValueError, match=r"each integer from 0 to 1000000000: .* use Categorical"):
        fit(data, IntegerCategoricalEstimator())
    assert fit(data, CategoricalEstimator()).pmap == {0: 0.5, 10**9: 0.5}
    assert IntegerCategoricalDistribution(0, [1.0]).log_density(10**9) == -math.inf


def test_integers_are_told_apart_beyond_the_precision_of_floats():
    model = fit([2**60, 2**60 + 1, 2**60 + 1], IntegerCategoricalEstimator())
    assert (model.min_val, model.p_vec.tolist()) == (2**60, pytest.approx([1 / 3, 2 / 3]))


def test_the_categories_of_weight_zero_are_no_part_of_the_fit():
    accumulator = CategoricalEstimator().accumulator_factory().make()
    accumulator.seq_update(accumulator.acc_to_encoder().seq_encode(["a", "b"]), np.array([1.0, 0.0]), None)
    assert CategoricalEstimator().estimate(1.0, accumulator.value()).pmap == {"a": 1.0}


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        (GaussianEstimator(), GaussianDistribution(0.0, 1.0)),
        (DiagonalGaussianEstimator(2), DiagonalGaussianDistribution([0, 0], [1, 1])),
        (MultivariateGaussianEstimator(2), MultivariateGaussianDistribution([0, 0], np.eye(2))),
        (PoissonEstimator(), PoissonDistribution(1.0)),
        (ExponentialEstimator(), ExponentialDistribution(1.0)),
        (BernoulliEstimator(), BernoulliDistribution(0.5)),
        (IntegerCategoricalEstimator(1, 2), IntegerCategoricalDistribution(1, [0.5, 0.5])),
        (CategoricalEstimator(pseudo_count=1.0, levels="ab"), CategoricalDistribution({"a": 0.5, "b": 0.5})),
    ],
    ids=lambda x: type(x).__name__,
)
def test_without_any_observation_the_standard_parameters_are_taken(estimator, expected):
    model = estimator.estimate(0.0, estimator.accumulator_factory().make().value())
    assert {**model.to_dict(), "repairs": None} == {**expected.to_dict(), "repairs": None}


@pytest.mark.parametrize(
    ("estimator", "message"),
    [
        (DiagonalGaussianEstimator(), "needs dim"),
        (MultivariateGaussianEstimator(), "needs dim"),
        (CategoricalEstimator(), "give levels"),
        (IntegerCategoricalEstimator(1), "needs min_val and max_val"),
    ],
)
def test_a_family_that_has_no_standard_parameters_says_what_it_needs(estimator, message):
    with pytest.raises(ValueError, match=message):
        estimator.estimate(0.0, estimator.accumulator_factory().make().value())


@pytest.mark.parametrize(
    ("estimator", "data"),
    [
        (GaussianEstimator(), [2.0, 4.0]),
        (DiagonalGaussianEstimator(), [[2.0, 0.0], [4.0, 1.0]]),
        (MultivariateGaussianEstimator(), [[2.0, 0.0], [4.0, 1.0], [0.0, 5.0]]),
        (ExponentialEstimator(), [1.0, 5.0]),
        (CategoricalEstimator(), ["a", "b"]),
        (IntegerCategoricalEstimator(), [1, 3]),
    ],
    ids=lambda x: type(x).__name__,
)
def test_a_part_without_weight_and_without_a_previous_model_looks_like_the_whole_data(estimator, data):
    accumulator = estimator.accumulator_factory().make()
    enc = accumulator.acc_to_encoder().seq_encode(data)
    accumulator.seq_update(enc, np.zeros(len(data)), None)
    model = estimator.estimate(0.0, accumulator.value())
    assert np.isfinite(model.seq_log_density(enc)).all()
    assert "took the standard parameters" in model.repairs[0].reason


def test_a_previous_model_of_another_family_is_refused():
    with pytest.raises(
        TypeError, match="the previous estimate of a Gaussian must be a Gaussian, got PoissonDistribution"
    ):
        fit([1.0, 2.0], GaussianEstimator(), PoissonDistribution(1.0))


def test_an_estimator_made_from_a_model_keeps_its_settings():
    model = fit([1.0, 1.0], GaussianEstimator(min_variance=0.5, name="x", keys="k"))
    again = model.estimator()
    assert (again.family.min_variance, again.name, again.keys) == (0.5, "x", "k")
    assert fit([1.0, 1.0], again).sigma2 == 0.5


def test_equal_parameters_make_equal_leaves():
    assert PoissonDistribution(2) == PoissonDistribution(2.0)
    assert PoissonDistribution(2.0) != PoissonDistribution(3.0)
    assert PoissonDistribution(2.0) != ExponentialDistribution(2.0)
    assert PoissonDistribution(2.0) != PoissonDistribution(2.0, name="x")


@pytest.mark.parametrize("estimator", [CategoricalEstimator(), IntegerCategoricalEstimator(), PoissonEstimator()])
def test_tokens_of_a_stream_are_observations_of_their_own(estimator):
    encoder = estimator.accumulator_factory().make().acc_to_encoder()
    enc = encoder.encode_stream(np.array([3, 1, 3]), previous=7)
    assert len(enc) == 3
    model = seq_estimate([(3, enc)], estimator)
    np.testing.assert_allclose(model.seq_log_density(enc), [model.log_density(x) for x in (3, 1, 3)])


def test_density_of_large_counts_is_accurate():
    from scipy import stats

    for lam, x in ((1e6, 1_000_000), (0.1, 50), (1e-300, 1)):
        assert PoissonDistribution(lam).log_density(x) == pytest.approx(stats.poisson(lam).logpmf(x), rel=1e-9)


def test_a_density_beyond_floats_is_infinite():
    narrow = DiagonalGaussianDistribution(np.zeros(200), np.full(200, 1e-12))
    assert narrow.log_density(np.zeros(200)) > 1000
    assert narrow.density(np.zeros(200)) == math.inf
