"""Small inputs whose right answer is known, each of a kind that statistics libraries were seen to get wrong."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mixle import optimize, seq_encode, seq_estimate, seq_initialize, seq_log_density, seq_log_density_sum
from mixle.stats import (
    BernoulliEstimator,
    CategoricalDistribution,
    CategoricalEstimator,
    CompositeEstimator,
    DiagonalGaussianEstimator,
    ExponentialEstimator,
    GaussianDistribution,
    GaussianEstimator,
    IntegerCategoricalEstimator,
    MarkovChainDistribution,
    MarkovChainEstimator,
    MixtureDistribution,
    MixtureEstimator,
    MultivariateGaussianDistribution,
    MultivariateGaussianEstimator,
    OptionalEstimator,
    PoissonDistribution,
    PoissonEstimator,
    ProbabilityDistribution,
    SequenceEstimator,
)
from mixle.stats.policy import MIN_VARIANCE_RATIO


def fit(data, estimator, previous=None, steps=1):
    chunks = seq_encode(data, estimator=estimator)
    for _ in range(steps):
        previous = seq_estimate(chunks, estimator, previous)
    return previous


def total(data, model):
    return seq_log_density_sum(seq_encode(data, model=model), model)[1]


# ---- 1: covariances of degenerate data


@pytest.mark.parametrize(
    "rows",
    [
        [[0, 0], [1, 1], [2, 2], [3, 3]],
        [[0, 0], [0, 1], [0, 2]],
        [[5.0, 7.0]],
        [[1e8, 1e8], [1e8, 1e8]],
        [[1e-9, 2e9], [2e-9, 4e9], [3e-9, 6e9]],
        [[1, 2, 3, 4, 5], [5, 4, 3, 2, 2]],
    ],
    ids=["collinear", "constant axis", "one row", "equal rows far from zero", "unlike units", "fewer rows than axes"],
)
def test_a_degenerate_covariance_is_made_positive_definite_and_reported(rows):
    model = fit(rows, MultivariateGaussianEstimator())
    assert np.isfinite(model.covar).all()
    assert (np.linalg.eigvalsh(model.covar) > 0).all()
    assert [r.parameter for r in model.repairs] == ["covar"]
    np.testing.assert_allclose(model.mu, np.mean(rows, axis=0), rtol=1e-12)


def test_the_repair_of_a_covariance_keeps_the_directions_that_have_spread():
    model = fit([[0, 0], [1, 1], [2, 2], [3, 3]], MultivariateGaussianEstimator())
    values, vectors = np.linalg.eigh(model.covar)
    assert values[1] == pytest.approx(2.5)
    assert abs(vectors[:, 1] @ [1, 1]) == pytest.approx(math.sqrt(2))
    assert values[0] == pytest.approx(MIN_VARIANCE_RATIO * 1.25)


@settings(max_examples=30, deadline=None)
@given(st.floats(-6, 6), st.floats(-6, 6))
def test_the_repair_does_not_depend_on_the_units_of_an_axis(a, b):
    rows = np.array([[0.0, 0.0], [1.0, 1.0], [2.0, 2.0], [3.0, 3.0]])
    units = 10.0 ** np.array([a, b])
    plain, scaled = (fit(x, MultivariateGaussianEstimator()) for x in (rows, rows * units))
    np.testing.assert_allclose(scaled.covar, plain.covar * np.outer(units, units), rtol=1e-8)


def test_a_full_rank_covariance_is_left_alone():
    rows = np.random.default_rng(0).normal(size=(50, 3)) + 1e8
    model = fit(rows, MultivariateGaussianEstimator())
    assert model.repairs == ()
    np.testing.assert_allclose(model.covar, np.cov(rows.T, bias=True), rtol=1e-9)


# ---- 2: a component that collapses on equal values


def collapsing(scale=1.0, shift=0.0, **options):
    data = [shift + scale * x for x in (0, 0, 0, 0, 5, 5.1, 4.9)]
    start = MixtureDistribution(
        [GaussianDistribution(shift, scale**2), GaussianDistribution(shift + 5 * scale, scale**2)], [0.5, 0.5]
    )
    return fit(data, MixtureEstimator([GaussianEstimator(**options), GaussianEstimator(**options)]), start, 30), data


def test_a_collapsing_component_stops_at_a_floor_relative_to_the_data_and_reports_it():
    model, data = collapsing()
    assert model.components[0].sigma2 == pytest.approx(MIN_VARIANCE_RATIO * np.var(data))
    assert [(r.where, r.parameter) for r in model.repairs] == [("components[0]", "sigma2")]
    assert model.components[1].sigma2 == pytest.approx(np.var([5, 5.1, 4.9]))
    assert total(data, model) < 20


@pytest.mark.parametrize(("scale", "shift"), [(1e-9, 0.0), (1e9, 0.0), (1.0, 1e8), (1e-3, 1e6)])
def test_the_floor_moves_with_the_units_of_the_data(scale, shift):
    plain, moved = collapsing()[0], collapsing(scale, shift)[0]
    for a, b in zip(plain.components, moved.components, strict=True):
        assert b.sigma2 == pytest.approx(a.sigma2 * scale**2, rel=1e-5)
        assert b.mu == pytest.approx(a.mu * scale + shift)


def test_an_absolute_floor_can_be_set_instead():
    assert collapsing(min_variance=0.25)[0].components[0].sigma2 == 0.25


# ---- 3: a component without observations


def test_an_empty_component_keeps_its_parameters_and_gets_the_estimate_of_its_weight():
    start = MixtureDistribution([GaussianDistribution(0, 1), GaussianDistribution(1e6, 1)], [0.5, 0.5])
    for steps in (1, 5):
        model = fit([0, 0.1, -0.1], MixtureEstimator([GaussianEstimator(), GaussianEstimator()]), start, steps)
        assert (model.components[1].mu, model.components[1].sigma2) == (1e6, 1.0)
        assert model.w.tolist() == [1.0, 0.0]
        assert model.components[0].mu == pytest.approx(0.0)
        assert "components[1]" in [r.where for r in model.repairs]


def test_empty_components_of_vectors_and_records_keep_their_parameters_too():
    far = MultivariateGaussianDistribution([1e6, 0.0], np.eye(2))
    start = MixtureDistribution([MultivariateGaussianDistribution([0.0, 0.0], np.eye(2)), far], [0.5, 0.5])
    rows = np.random.default_rng(0).normal(size=(20, 2))
    model = fit(rows, MixtureEstimator([MultivariateGaussianEstimator(), MultivariateGaussianEstimator()]), start)
    assert model.components[1].mu.tolist() == [1e6, 0.0]
    assert model.components[1].covar.tolist() == [[1.0, 0.0], [0.0, 1.0]]


def test_a_component_whose_weight_all_but_vanishes_stays_finite():
    start = MixtureDistribution([GaussianDistribution(0, 1), GaussianDistribution(38.5, 1)], [0.5, 0.5])
    model = fit([0.0, 0.1, -0.1], MixtureEstimator([GaussianEstimator(), GaussianEstimator()]), start, 20)
    assert all(math.isfinite(c.mu) and c.sigma2 > 0 for c in model.components)


# ---- 4: categories that were never seen


def test_unseen_integers_score_minus_infinity_alone_and_together():
    model = fit([1, 2, 3, 4, 5], IntegerCategoricalEstimator())
    unseen = fit([1, 2, 3, 5], IntegerCategoricalEstimator())
    assert [model.log_density(x) for x in (0, 6, -(10**20))] == [-math.inf] * 3
    expected = [math.log(0.25), -math.inf, -math.inf, math.log(0.25)]
    (together,) = seq_log_density(seq_encode([2, 6, 4, 2], model=unseen), unseen)
    np.testing.assert_allclose(together, expected)
    assert [unseen.log_density(x) for x in (2, 6, 4, 2)] == pytest.approx(expected)


def test_an_unseen_category_scores_minus_infinity_alone_and_together():
    model = fit(["a", "b", "a"], CategoricalEstimator())
    assert model.log_density("z") == -math.inf
    (together,) = seq_log_density(seq_encode(["a", "z", "b"], model=model), model)
    np.testing.assert_allclose(together, [math.log(2 / 3), -math.inf, math.log(1 / 3)])


# ---- 5: evidence that is impossible


def test_an_impossible_sequence_scores_minus_infinity():
    chain = MarkovChainDistribution({"a": 1.0}, {"a": {"b": 1.0}, "b": {"a": 1.0}})
    assert [chain.log_density(x) for x in (["b"], ["a", "a"], ["a", "b", "a"], [])] == [-math.inf, -math.inf, 0.0, 0.0]


def test_rows_that_no_component_can_produce_are_left_out_and_counted():
    chain = MarkovChainDistribution({"a": 1.0}, {"a": {"b": 1.0}, "b": {"a": 1.0}})
    start = MixtureDistribution([chain, chain], [0.5, 0.5])
    model = fit([["b", "a"], ["a", "b"]], MixtureEstimator([MarkovChainEstimator(), MarkovChainEstimator()]), start)
    assert str(model.repairs[0]) == "w: rows of total weight 1 are impossible under every component; left out"
    assert model.log_density(["a", "b"]) == pytest.approx(0.0)
    assert not np.isnan(model.w).any()


def test_a_leaf_cannot_be_fitted_to_what_it_cannot_produce_and_names_it():
    with pytest.raises(ValueError, match=r"outside the support of Poisson, such as -1\.0 \(row 1"):
        fit([3, -1], PoissonEstimator())


# ---- 6: rows of transitions that were never observed


def test_rows_that_were_never_observed_keep_their_previous_values():
    previous = MarkovChainDistribution({"a": 0.5, "b": 0.5}, {"a": {"a": 0.25, "b": 0.75}, "b": {"b": 1.0}})
    model = fit([["a"], ["b"], ["b"]], MarkovChainEstimator(), previous)
    assert model.transition_map == previous.transition_map
    assert model.init_prob_map == pytest.approx({"a": 1 / 3, "b": 2 / 3})
    assert [r.parameter for r in model.repairs] == ["transition_map"]


def test_rows_that_were_never_observed_are_proper_without_previous_values():
    model = fit([["a", "b"], ["c"]], MarkovChainEstimator())
    for row in model.transition_map.values():
        assert sum(row.values()) == pytest.approx(1.0)
    assert model.transition_map["c"] == pytest.approx({"a": 1 / 3, "b": 1 / 3, "c": 1 / 3})
    assert "2 states ('b', 'c') were never left; made uniform" in str(model.repairs[0])


# ---- 7: missing values


def test_a_plain_leaf_refuses_nan_and_names_its_index():
    with pytest.raises(ValueError, match="NaN at index 1"):
        fit([1, float("nan"), 3], GaussianEstimator())
    with pytest.raises(TypeError, match=r"NoneType .* at index 1; wrap the family in Optional"):
        fit([1, None, 3], GaussianEstimator())


@pytest.mark.parametrize("missing", [None, float("nan"), -999, "n/a"])
def test_optional_fits_the_share_of_missing_values_and_the_rest(missing):
    model = fit([1, missing, 3], OptionalEstimator(GaussianEstimator(), missing_value=missing))
    assert model.p == pytest.approx(1 / 3)
    assert model.dist.mu == pytest.approx(2.0)
    assert model.log_density(missing) == pytest.approx(math.log(1 / 3))


# ---- 8: weights


def test_weights_count_as_repetition_and_zero_as_absence():
    for values, weights in (([1, 5, 9], [3, 1, 0]), ([1, 1, 1, 5], [1, 1, 1, 1]), ([1, 5, 1e9], [3, 1, 0])):
        accumulator = GaussianEstimator().accumulator_factory().make()
        encoded = accumulator.acc_to_encoder().seq_encode(values)
        accumulator.seq_update(encoded, np.array(weights, dtype=np.float64), None)
        model = GaussianEstimator().estimate(None, accumulator.value())
        assert model.mu == pytest.approx(2.0)
        assert model.sigma2 == pytest.approx(3.0)


# ---- 9: tied parameters


def test_two_fields_with_one_key_are_pooled():
    record = CompositeEstimator([GaussianEstimator(keys="k"), GaussianEstimator(keys="k")])
    for chunks in (1, 2):
        encoded = seq_encode([(0, 4), (0.2, 4.4)], estimator=record, num_chunks=chunks)
        model = seq_estimate(encoded, record)
        assert [d.mu for d in model.dists] == pytest.approx([2.15, 2.15])
        assert [d.sigma2 for d in model.dists] == pytest.approx([4.2275, 4.2275])


def test_a_tied_estimate_takes_its_pseudo_count_once():
    options = {"pseudo_count": 2.0, "suff_stat": (10.0, 1.0)}
    record = CompositeEstimator([GaussianEstimator(keys="k", **options), GaussianEstimator(keys="k", **options)])
    tied = fit([(0, 4), (0.2, 4.4)], record)
    alone = fit([0, 4, 0.2, 4.4], GaussianEstimator(**options))
    for dist in tied.dists:
        assert (dist.mu, dist.sigma2) == pytest.approx((alone.mu, alone.sigma2))


def test_components_that_share_one_key_are_alike():
    start = MixtureDistribution([GaussianDistribution(0, 1), GaussianDistribution(5, 1)], [0.5, 0.5])
    model = fit(
        [0.0, 1.0, 5.0, 6.0], MixtureEstimator([GaussianEstimator(keys="k"), GaussianEstimator(keys="k")]), start
    )
    assert [c.mu for c in model.components] == pytest.approx([3.0, 3.0])
    assert model.components[0].sigma2 == pytest.approx(np.var([0, 1, 5, 6]))


def two_mixtures(leaf_keys, mixture_keys):
    def mixture():
        return MixtureEstimator([GaussianEstimator(keys=k) for k in leaf_keys], keys=mixture_keys)

    start = MixtureDistribution([GaussianDistribution(0, 1), GaussianDistribution(9, 1)], [0.5, 0.5])
    estimator = CompositeEstimator([mixture(), mixture()])
    data = [(0.0, 1.0), (0.5, 9.5), (9.0, 8.0), (0.25, 9.0)]
    previous = estimator.estimate(None, estimator.accumulator_factory().make().value())
    previous.dists = (start, start)
    return fit(data, estimator, previous).dists


def test_mixtures_with_a_weight_key_share_their_weights_only():
    a, b = two_mixtures((None, None), ("w", None))
    np.testing.assert_allclose(a.w, [0.5, 0.5])
    np.testing.assert_allclose(b.w, [0.5, 0.5])
    assert a.components[0].mu != pytest.approx(b.components[0].mu)


def test_mixtures_with_a_component_key_share_their_components_one_by_one():
    a, b = two_mixtures((None, None), (None, "c"))
    np.testing.assert_allclose(a.w, [0.75, 0.25])
    np.testing.assert_allclose(b.w, [0.25, 0.75])
    assert [c.mu for c in a.components] == [c.mu for c in b.components]
    assert a.components[0].mu == pytest.approx(np.mean([0.0, 0.5, 0.25, 1.0]))


def test_a_key_of_a_part_goes_before_the_component_key_around_it():
    a, b = two_mixtures(("k", "k"), (None, "c"))
    everything = np.mean([0.0, 0.5, 9.0, 0.25, 1.0, 9.5, 8.0, 9.0])
    assert [c.mu for m in (a, b) for c in m.components] == pytest.approx([everything] * 4)


def test_a_key_shared_by_unlike_parts_is_refused():
    with pytest.raises(ValueError, match=r"keys='k' is shared by GaussianAccumulator and PoissonAccumulator"):
        fit([(1, 2)], CompositeEstimator([GaussianEstimator(keys="k"), PoissonEstimator(keys="k")]))
    inner = MixtureEstimator([GaussianEstimator(), GaussianEstimator()], keys=("k", None))
    with pytest.raises(ValueError, match="keys='k' is shared"):
        seq_initialize(
            seq_encode([(1, 2)], estimator=CompositeEstimator([GaussianEstimator(keys="k"), inner])),
            CompositeEstimator([GaussianEstimator(keys="k"), inner]),
            0,
            1.0,
        )


def test_tied_categories_are_pooled_over_different_vocabularies():
    record = CompositeEstimator([CategoricalEstimator(keys="k"), CategoricalEstimator(keys="k")])
    model = fit([("a", "b"), ("a", "c")], record)
    assert model.dists[0].pmap == model.dists[1].pmap == {"a": 0.5, "b": 0.25, "c": 0.25}


def test_tied_chains_are_pooled_without_their_lengths():
    chain = CompositeEstimator([MarkovChainEstimator(keys="k", len_estimator=PoissonEstimator()) for _ in range(2)])
    model = fit([(["a", "b"], ["a", "a", "a"])], chain)
    assert model.dists[0].transition_map == model.dists[1].transition_map
    assert model.dists[0].transition_map["a"] == pytest.approx({"a": 2 / 3, "b": 1 / 3})
    assert [d.len_dist.lam for d in model.dists] == [2.0, 3.0]


# ---- 10, 11: categories


def test_categories_of_unlike_kinds_survive_json_exactly():
    model = CategoricalDistribution({"a": 0.1, None: 0.2, ("t", 1): 0.3, 1: 0.15, b"\x00": 0.15, math.inf: 0.1})
    again = ProbabilityDistribution.from_json(model.to_json())
    assert again.pmap == model.pmap
    assert json.loads(model.to_json())["type"] == "CategoricalDistribution"
    for x in model.pmap:
        assert again.log_density(x) == model.log_density(x)


def test_strings_never_merge_with_numbers_and_numbers_merge_as_in_a_dict():
    for data in ([1, True, 1.0, "1"], ["1", 1.0, True, 1]):
        model = fit(data, CategoricalEstimator())
        assert list(map(repr, model.pmap)) == ["1", "'1'"]
        assert list(model.pmap.values()) == [0.75, 0.25]
        (together,) = seq_log_density(seq_encode(data, model=model), model)
        assert [model.log_density(x) for x in data] == together.tolist()


# ---- 12: EM


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.one_of(st.floats(-50, 50), st.sampled_from([0.0, 0.0, 1e6, 1e-6, 7.0])), min_size=2, max_size=25),
    st.integers(1, 4),
    st.integers(0, 2**32),
)
def test_the_log_likelihood_never_falls(data, k, seed):
    estimator = MixtureEstimator([GaussianEstimator() for _ in range(k)])
    chunks = seq_encode(data, estimator=estimator)
    model = seq_initialize(chunks, estimator, seed, 0.7)
    model = seq_estimate(chunks, estimator, model)
    last = seq_log_density_sum(chunks, model)[1]
    for _ in range(12):
        model = seq_estimate(chunks, estimator, model)
        now = seq_log_density_sum(chunks, model)[1]
        assert now >= last - 1e-9 * max(abs(last), 1.0)
        last = now


# ---- 13: data at the edge


def test_a_poisson_of_zeros_is_certain_of_zero():
    model = fit([0, 0, 0], PoissonEstimator())
    assert model.lam == 0.0
    assert [model.log_density(x) for x in (0, 1)] == [0.0, -math.inf]
    assert seq_log_density(seq_encode([0, 2], model=model), model)[0].tolist() == [0.0, -math.inf]


def test_an_exponential_of_zeros_is_floored_and_reported():
    model = fit([0.0, 0.0], ExponentialEstimator())
    assert 0 < model.beta < 1e-3
    assert [r.parameter for r in model.repairs] == ["beta"]
    assert fit([0.0, 0.0], ExponentialEstimator(min_beta=0.5)).beta == 0.5


def test_certain_truth_values_are_proper():
    model = fit([True, True], BernoulliEstimator())
    assert (model.p, model.log_density(True), model.log_density(False)) == (1.0, 0.0, -math.inf)


@pytest.mark.parametrize(
    "estimator", [SequenceEstimator(GaussianEstimator(), PoissonEstimator()), SequenceEstimator(GaussianEstimator())]
)
def test_sequences_of_lengths_zero_and_three_are_fitted(estimator):
    model = fit([[], [1.0, 2.0, 3.0]], estimator)
    assert model.dist.mu == pytest.approx(2.0)
    assert math.isfinite(model.log_density([]))


def test_only_empty_sequences_give_a_proper_model():
    model = fit([[], []], SequenceEstimator(GaussianEstimator(), PoissonEstimator()))
    assert model.log_density([]) == 0.0
    assert [r.where for r in model.repairs] == ["dist"]
    chain = fit([[], []], MarkovChainEstimator(len_estimator=PoissonEstimator()))
    assert chain.log_density([]) == 0.0
    assert ProbabilityDistribution.from_json(chain.to_json()).log_density(["a"]) == -math.inf


def test_chains_of_lengths_zero_and_three_are_fitted():
    model = fit([[], ["a", "b", "a"]], MarkovChainEstimator(len_estimator=PoissonEstimator()))
    assert model.init_prob_map == {"a": 1.0, "b": 0.0}
    assert model.transition_map == {"a": {"b": 1.0}, "b": {"a": 1.0}}
    assert model.len_dist.lam == pytest.approx(1.5)


# ---- 14: pseudo-counts with names


def test_the_parts_of_a_chain_take_pseudo_counts_by_name():
    data = [["a", "b"]]
    first = fit(data, MarkovChainEstimator(initial_pseudo_count=2.0))
    assert first.init_prob_map == pytest.approx({"a": 2 / 3, "b": 1 / 3})
    assert first.transition_map["a"] == {"b": 1.0}
    rows = fit(data, MarkovChainEstimator(transition_pseudo_count=2.0))
    assert rows.init_prob_map == {"a": 1.0, "b": 0.0}
    assert rows.transition_map["a"] == pytest.approx({"a": 1 / 3, "b": 2 / 3})
    both = fit(data, MarkovChainEstimator(pseudo_count=2.0))
    assert both.init_prob_map == first.init_prob_map
    assert both.transition_map == rows.transition_map


def test_an_ambiguous_pseudo_count_is_refused():
    with pytest.raises(ValueError, match=r"pseudo_count=1\.0 serves both parts"):
        MarkovChainEstimator(pseudo_count=1.0, transition_pseudo_count=2.0)
    with pytest.raises(TypeError, match=r"pseudo_count=\(1\.0, 2\.0\)"):
        MarkovChainEstimator(pseudo_count=(1.0, 2.0))


# ---- 15: a start that violates a tie


def test_a_fit_from_a_start_that_violates_its_tie_ends_tied():
    data = [(0.0, 4.0), (0.2, 4.4), (0.1, 4.1)]
    record = CompositeEstimator([GaussianEstimator(keys="k"), GaussianEstimator(keys="k")])
    untied = fit(data, CompositeEstimator([GaussianEstimator(), GaussianEstimator()]))
    assert total(data, untied) > total(data, fit(data, record))
    for model in (fit(data, record, untied), optimize(data, record, prev_estimate=untied, progress=False)):
        assert model.dists[0].mu == model.dists[1].mu == pytest.approx(np.mean(data))
        assert model.dists[0].sigma2 == model.dists[1].sigma2


# ---- data that is no data


@pytest.mark.parametrize(
    "estimator",
    [
        CategoricalEstimator(pseudo_count=1.0),
        DiagonalGaussianEstimator(2),
        OptionalEstimator(SequenceEstimator(MarkovChainEstimator())),
    ],
    ids=lambda e: type(e).__name__,
)
def test_fitting_nothing_says_that_the_data_is_empty(estimator):
    with pytest.raises(ValueError, match="the data is empty"):
        fit([], estimator)


def test_a_poisson_is_not_confused_by_large_counts():
    assert PoissonDistribution(1e6).log_density(1_000_000) == pytest.approx(-7.8266939, rel=1e-6)
