"""Mixtures: posteriors, weights, random starts, and the scale of what components share."""

from __future__ import annotations

import math

import numpy as np
import pytest

from mixle import seq_encode, seq_estimate, seq_initialize
from mixle.stats import (
    CompositeEstimator,
    ExponentialDistribution,
    ExponentialEstimator,
    GaussianDistribution,
    GaussianEstimator,
    MixtureDistribution,
    MixtureEstimator,
    OptionalDistribution,
    OptionalEstimator,
    PoissonDistribution,
    PoissonEstimator,
    SequenceDistribution,
    SequenceEstimator,
)
from mixle.stats.policy import MIN_VARIANCE_RATIO

PAIR = MixtureDistribution([GaussianDistribution(0.0, 1.0), GaussianDistribution(4.0, 1.0)], [0.25, 0.75])


def fit(data, estimator, previous, steps=1):
    chunks = seq_encode(data, estimator=estimator)
    for _ in range(steps):
        previous = seq_estimate(chunks, estimator, previous)
    return previous


def test_posteriors_follow_bayes_rule():
    enc = PAIR.dist_to_encoder().seq_encode([0.0, 2.0, 4.0])
    posterior = PAIR.seq_posterior(enc)
    odds = [math.exp(-0.5 * (x - 4.0) ** 2 + 0.5 * x**2) * 3 for x in (0.0, 2.0, 4.0)]
    np.testing.assert_allclose(posterior[1] / posterior[0], odds)
    np.testing.assert_allclose(posterior.sum(axis=0), 1.0)


def test_joint_log_densities_add_up_to_the_density():
    enc = PAIR.dist_to_encoder().seq_encode([0.0, 2.0])
    joint = PAIR.seq_component_log_density(enc)
    assert joint.shape == (2, 2)
    np.testing.assert_allclose(np.exp(joint).sum(axis=0), np.exp(PAIR.seq_log_density(enc)))


def test_the_posterior_of_an_impossible_row_is_not_a_number():
    model = MixtureDistribution([PoissonDistribution(1.0), PoissonDistribution(2.0)], [0.5, 0.5])
    posterior = model.seq_posterior(model.dist_to_encoder().seq_encode([1, -1]))
    assert np.isnan(posterior[:, 1]).all()
    assert not np.isnan(posterior[:, 0]).any()


def test_weights_can_be_held_fixed_or_pulled():
    data = [0.1, -0.1, 0.2, 4.0]
    parts = [GaussianEstimator(), GaussianEstimator()]
    assert fit(data, MixtureEstimator(parts, fixed_weights=[0.5, 0.5]), PAIR).w.tolist() == [0.5, 0.5]
    pulled = fit(data, MixtureEstimator(parts, pseudo_count=1e9, suff_stat=[0.1, 0.9]), PAIR)
    np.testing.assert_allclose(pulled.w, [0.1, 0.9], atol=1e-6)
    even = fit(data, MixtureEstimator(parts, pseudo_count=1e9), PAIR)
    np.testing.assert_allclose(even.w, [0.5, 0.5], atol=1e-6)


@pytest.mark.parametrize(
    ("make", "kind", "message"),
    [
        (lambda: MixtureDistribution([], []), ValueError, r"components=\(\) must hold at least one"),
        (lambda: MixtureDistribution([3], [1.0]), TypeError, r"components\[0\]=3 must be a distribution"),
        (
            lambda: MixtureDistribution([GaussianDistribution(0, 1)], [0.5, 0.5]),
            ValueError,
            "vector of 1 probabilities",
        ),
        (lambda: MixtureEstimator([]), ValueError, r"estimators=\(\) must hold at least one"),
        (lambda: MixtureEstimator([GaussianEstimator]), TypeError, r"estimators\[0\]=<class .* must be an estimator"),
        (lambda: MixtureEstimator([PAIR]), TypeError, "must be an estimator"),
        (lambda: MixtureEstimator([GaussianEstimator()], keys="ab"), TypeError, r"keys='ab' must be a pair"),
        (
            lambda: MixtureEstimator([GaussianEstimator()], fixed_weights=[1.0], pseudo_count=1.0),
            ValueError,
            "pseudo_count has no effect on fixed_weights",
        ),
        (lambda: MixtureEstimator([GaussianEstimator()], suff_stat=[1.0]), ValueError, "suff_stat has no effect"),
    ],
)
def test_wrong_arguments_are_refused_by_name_and_value(make, kind, message):
    with pytest.raises(kind, match=message):
        make()


def test_an_update_needs_a_mixture_of_the_same_size():
    estimator = MixtureEstimator([GaussianEstimator(), GaussianEstimator()])
    for previous in (None, GaussianDistribution(0, 1), MixtureDistribution([GaussianDistribution(0, 1)], [1.0])):
        with pytest.raises(
            TypeError, match="updating a mixture of 2 components needs a previous estimate of that kind"
        ):
            fit([1.0], estimator, previous)


def test_a_random_start_gives_rows_only_to_components_that_can_produce_them():
    data = [-3.0, -2.5, -3.5, 0.5, 1.0, 0.2] * 5
    estimator = MixtureEstimator([ExponentialEstimator(), GaussianEstimator()])
    model = seq_initialize(seq_encode(data, estimator=estimator), estimator, 0, 1.0)
    assert model.repairs == ()
    assert model.w[1] > 0.5
    assert 0.2 <= model.components[0].beta <= 1.0


def test_a_random_start_counts_rows_that_no_component_can_produce():
    estimator = MixtureEstimator([PoissonEstimator(), ExponentialEstimator()])
    model = seq_initialize(seq_encode([1, 2, -1], estimator=estimator), estimator, 0, 1.0)
    assert "w: rows of total weight 1 are impossible under every component; left out" in map(str, model.repairs)


def test_impossible_rows_of_nested_parts_are_given_away_too():
    def part(leaf):
        return SequenceEstimator(OptionalEstimator(leaf), PoissonEstimator())

    estimator = MixtureEstimator([part(PoissonEstimator()), MixtureEstimator([part(GaussianEstimator())])])
    data = [[1, 2], [0.5, None], [], [None, 3]]
    model = seq_initialize(seq_encode(data, estimator=estimator), estimator, 3, 1.0)
    scores = model.seq_log_density(seq_encode(data, model=model)[0][1])
    assert np.isfinite(scores).all()


def test_a_random_start_tells_components_apart():
    data = PAIR.sampler(0).sample(200)
    estimator = MixtureEstimator([GaussianEstimator() for _ in range(3)])
    model = seq_initialize(seq_encode(data, estimator=estimator), estimator, 0)
    assert len({round(c.mu, 6) for c in model.components}) == 3


def test_every_component_of_a_random_start_sees_a_little_of_every_row():
    estimator = MixtureEstimator([PoissonEstimator() for _ in range(5)])
    model = seq_initialize(seq_encode([3], estimator=estimator), estimator, 0, 1.0)
    assert [c.lam for c in model.components] == pytest.approx([3.0] * 5)
    assert min(model.w) > 0


ZEROS = [0.0] * 6 + [5.0, 5.1, 4.9]


def collapsing(wrap, unwrap, data):
    """Fit a mixture of wrapped Gaussians of which one collapses on zeros; return its variance."""
    parts = [wrap(GaussianDistribution(0.0, 1.0)), wrap(GaussianDistribution(5.0, 1.0))]
    start = MixtureDistribution(parts, [0.5, 0.5])
    return unwrap(fit(data, start.estimator(), start, 40).components[0]).sigma2


def test_a_floor_is_relative_to_what_the_components_share_at_any_depth():
    expected = MIN_VARIANCE_RATIO * np.var(ZEROS)
    assert collapsing(lambda g: g, lambda m: m, ZEROS) == pytest.approx(expected)
    rows = [[x] for x in ZEROS]
    assert collapsing(SequenceDistribution, lambda m: m.dist, rows) == pytest.approx(expected)
    missing = [None, *ZEROS]
    wrapped = collapsing(lambda g: OptionalDistribution(g, 0.1), lambda m: m.dist, missing)
    assert wrapped == pytest.approx(expected)


def test_a_floor_in_a_mixture_of_mixtures_is_relative_to_all_of_them():
    inner = MixtureDistribution([GaussianDistribution(0.0, 1.0), GaussianDistribution(0.1, 1.0)], [0.5, 0.5])
    outer = MixtureDistribution(
        [inner, MixtureDistribution([GaussianDistribution(5.0, 1.0)] * 2, [0.5, 0.5])], [0.5, 0.5]
    )
    model = fit(ZEROS, outer.estimator(), outer, 40)
    for component in model.components[0].components:
        assert component.sigma2 == pytest.approx(MIN_VARIANCE_RATIO * np.var(ZEROS))


def test_a_floor_among_unlike_components_is_relative_to_the_encoded_data():
    start = MixtureDistribution([GaussianDistribution(0.0, 1.0), ExponentialDistribution(5.0)], [0.5, 0.5])
    model = fit(ZEROS, start.estimator(), start, 100)
    assert model.components[0].sigma2 == pytest.approx(MIN_VARIANCE_RATIO * np.var(ZEROS))
    unlike = MixtureDistribution(
        [MixtureDistribution([GaussianDistribution(0.0, 1.0), ExponentialDistribution(5.0)], [0.5, 0.5])] * 2,
        [0.5, 0.5],
    )
    assert fit(ZEROS, unlike.estimator(), unlike, 5).repairs is not None


def test_a_row_without_weight_moves_no_floor():
    estimator = MixtureEstimator([GaussianEstimator(), GaussianEstimator()])
    values = []
    for data, weights in ((ZEROS, np.ones(9)), ([*ZEROS, 1e9], np.append(np.ones(9), 0.0))):
        model = MixtureDistribution([GaussianDistribution(0.0, 1.0), GaussianDistribution(5.0, 1.0)], [0.5, 0.5])
        for _ in range(20):
            accumulator = estimator.accumulator_factory().make()
            accumulator.seq_update(accumulator.acc_to_encoder().seq_encode(data), weights, model)
            model = estimator.estimate(None, accumulator.value(), previous=model)
        values.append([model.components[0].sigma2, model.components[1].sigma2])
    np.testing.assert_allclose(values[1], values[0], rtol=1e-9)


def test_a_composite_of_tied_mixtures_inside_a_mixture_is_fitted():
    leaf = CompositeEstimator([GaussianEstimator(keys="k"), GaussianEstimator(keys="k")])
    estimator = MixtureEstimator([leaf, leaf])
    data = [(0.0, 1.0), (9.0, 8.0), (0.5, 1.5)]
    model = seq_initialize(seq_encode(data, estimator=estimator), estimator, 0, 1.0)
    model = fit(data, estimator, model, 5)
    means = [d.mu for c in model.components for d in c.dists]
    assert means == pytest.approx([np.mean(data)] * 4)
