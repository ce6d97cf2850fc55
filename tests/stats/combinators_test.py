"""Composite, Sequence, Optional and Null: what they take, refuse and pass on."""

from __future__ import annotations

import math

import numpy as np
import pytest

from mixle import seq_encode, seq_estimate
from mixle.stats import (
    BernoulliDistribution,
    CompositeDistribution,
    CompositeEstimator,
    GaussianDistribution,
    GaussianEstimator,
    NullDistribution,
    NullEstimator,
    OptionalDistribution,
    OptionalEstimator,
    PoissonDistribution,
    PoissonEstimator,
    SequenceDistribution,
    SequenceEstimator,
)

NAN = float("nan")


def fit(data, estimator, previous=None):
    return seq_estimate(seq_encode(data, estimator=estimator), estimator, previous)


@pytest.mark.parametrize(
    ("make", "kind", "message"),
    [
        (lambda: CompositeDistribution([]), ValueError, r"dists=\(\) must hold at least one"),
        (lambda: CompositeDistribution([GaussianDistribution]), TypeError, r"dists\[0\]=.* must be a distribution"),
        (lambda: CompositeEstimator([]), ValueError, r"estimators=\(\) must hold at least one"),
        (lambda: CompositeEstimator([GaussianEstimator(), 3]), TypeError, r"estimators\[1\]=3 must be an estimator"),
        (lambda: SequenceDistribution(3), TypeError, "3 must be a distribution"),
        (lambda: SequenceEstimator(GaussianEstimator(), 3), TypeError, "3 must be an estimator"),
        (lambda: OptionalDistribution(GaussianDistribution(0, 1), 1.5), ValueError, r"p=1\.5 must be at most 1"),
        (lambda: OptionalDistribution(3), TypeError, "3 must be a distribution"),
        (
            lambda: OptionalEstimator(GaussianEstimator(), est_prob="no"),
            TypeError,
            "est_prob='no' must be True or False",
        ),
        (
            lambda: OptionalEstimator(GaussianEstimator(), est_prob=False, pseudo_count=1.0),
            ValueError,
            r"pseudo_count=1\.0 has no effect with est_prob=False",
        ),
        (lambda: OptionalEstimator(GaussianEstimator(), suff_stat=0.5), ValueError, "suff_stat=0.5 has no effect"),
        (
            lambda: OptionalEstimator(GaussianEstimator(), pseudo_count=1.0, suff_stat=2.0),
            ValueError,
            r"suff_stat=2\.0 must be at most 1",
        ),
    ],
)
def test_wrong_arguments_are_refused_by_name_and_value(make, kind, message):
    with pytest.raises(kind, match=message):
        make()


def test_a_record_names_the_field_and_the_index_of_a_bad_value():
    record = CompositeEstimator([GaussianEstimator(), PoissonEstimator()])
    with pytest.raises(TypeError, match=r"field 1: Poisson takes real numbers, got str \('x'\) at index 1"):
        fit([(0.0, 1), (0.0, "x")], record)
    with pytest.raises(ValueError, match="tuples of 2 fields, got 3 at index 0"):
        fit([(0.0, 1, 2)], record)
    with pytest.raises(TypeError, match="tuples of 2 fields, got str"):
        fit(["ab"], record)


def test_records_come_as_tuples_lists_and_rows_of_an_array():
    record = CompositeEstimator([GaussianEstimator(), PoissonEstimator()])
    expected = fit([(0.5, 1), (1.5, 3)], record).to_dict()
    for data in ([[0.5, 1], [1.5, 3]], np.array([[0.5, 1], [1.5, 3]])):
        assert fit(data, record).to_dict() == expected


def test_a_sequence_names_itself_and_the_index_of_a_bad_value():
    estimator = SequenceEstimator(GaussianEstimator())
    with pytest.raises(TypeError, match=r"sequence 1: Gaussian takes real numbers, got str \('x'\) at index 2"):
        fit([[1.0], [1.0, 2.0, "x"]], estimator)
    with pytest.raises(TypeError, match="lists, tuples or arrays, got str"):
        fit(["abc"], estimator)


def test_a_length_that_is_left_open_costs_nothing():
    model = fit([[1.0, 3.0], []], SequenceEstimator(GaussianEstimator()))
    assert model.log_density([]) == 0.0
    assert model.log_density([2.0, 2.0]) == pytest.approx(2 * model.dist.log_density(2.0))
    with pytest.raises(ValueError, match="cannot be sampled; model this part"):
        model.sampler(0).sample()


def test_sequences_of_arrays_are_sequences():
    estimator = SequenceEstimator(GaussianEstimator(), PoissonEstimator())
    lists = fit([[1.0, 2.0], [3.0]], estimator)
    arrays = fit([np.array([1.0, 2.0]), np.array([3.0])], estimator)
    assert arrays.to_dict() == lists.to_dict()


def test_the_weight_of_a_sequence_is_that_of_its_elements():
    estimator = SequenceEstimator(GaussianEstimator(), PoissonEstimator())
    accumulator = estimator.accumulator_factory().make()
    enc = accumulator.acc_to_encoder().seq_encode([[0.0, 0.0], [6.0]])
    accumulator.seq_update(enc, np.array([1.0, 4.0]), None)
    model = estimator.estimate(5.0, accumulator.value())
    assert model.dist.mu == pytest.approx(4.0)
    assert model.len_dist.lam == pytest.approx(6 / 5)


@pytest.mark.parametrize(
    ("missing", "values"),
    [
        (None, [1.0, None, 3.0]),
        (NAN, [1.0, NAN, 3.0]),
        (NAN, np.array([1.0, np.nan, 3.0])),
        (-999, [1.0, -999, 3.0]),
        ("", [1.0, "", 3.0]),
    ],
    ids=["None", "NaN", "NaN in an array", "a number", "a string"],
)
def test_what_is_missing_is_told_by_the_missing_value(missing, values):
    model = fit(values, OptionalEstimator(GaussianEstimator(), missing_value=missing))
    assert (model.p, model.dist.mu) == (pytest.approx(1 / 3), pytest.approx(2.0))
    again = type(model).from_json(model.to_json())
    assert again.log_density(missing) == model.log_density(missing) == pytest.approx(math.log(1 / 3))
    drawn = model.sampler(0).sample(50)
    assert 5 < sum(1 for x in drawn if again.log_density(x) == math.log(model.p)) < 30


def test_a_value_of_another_type_is_not_missing():
    model = OptionalDistribution(BernoulliDistribution(0.5), 0.25, missing_value=0)
    assert model.log_density(0) == pytest.approx(math.log(0.25))
    assert model.log_density(False) == pytest.approx(math.log(0.75 * 0.5))


def test_a_bad_value_among_missing_ones_is_named_by_its_own_index():
    with pytest.raises(TypeError, match=r"observation 2, which is not missing: Gaussian takes real numbers, got str"):
        fit([None, 1.0, "x"], OptionalEstimator(GaussianEstimator()))


def test_missing_values_can_be_left_unmodelled():
    model = fit([1.0, None, 3.0], OptionalEstimator(GaussianEstimator(), est_prob=False))
    assert model.p is None
    assert model.log_density(None) == 0.0
    assert model.log_density(2.0) == pytest.approx(model.dist.log_density(2.0))
    assert None not in model.sampler(0).sample(20)


def test_the_probability_of_a_missing_value_takes_pseudo_counts():
    def share(**options):
        return fit([1.0, None, 3.0], OptionalEstimator(GaussianEstimator(), **options)).p

    assert share(pseudo_count=3.0) == pytest.approx(2.5 / 6)
    assert share(pseudo_count=3.0, suff_stat=0.0) == pytest.approx(1 / 6)


def test_only_missing_values_keep_the_previous_distribution():
    before = OptionalDistribution(GaussianDistribution(3.0, 2.0), 0.5)
    model = fit([None, None], OptionalEstimator(GaussianEstimator()), before)
    assert (model.p, model.dist.mu, model.dist.sigma2) == (1.0, 3.0, 2.0)
    fresh = fit([None, None], OptionalEstimator(GaussianEstimator()))
    assert [r.where for r in fresh.repairs] == ["dist"]


def test_tied_optional_values_share_one_statistic():
    estimator = CompositeEstimator([OptionalEstimator(GaussianEstimator(), keys="k") for _ in range(2)])
    model = fit([(1.0, None), (None, 5.0), (3.0, 7.0)], estimator)
    assert [d.p for d in model.dists] == pytest.approx([1 / 3, 1 / 3])
    assert [d.dist.mu for d in model.dists] == pytest.approx([4.0, 4.0])


def test_missing_and_impossible_probabilities_are_minus_infinity():
    never, always = (OptionalDistribution(PoissonDistribution(1.0), p) for p in (0.0, 1.0))
    assert never.log_density(None) == -math.inf
    assert [always.log_density(x) for x in (None, 1, -1)] == [0.0, -math.inf, -math.inf]


def test_the_unmodelled_part_takes_anything_and_gives_nothing():
    model = fit([1, "a", None], NullEstimator())
    assert model == NullDistribution()
    assert hash(model) == hash(NullDistribution())
    assert model != GaussianDistribution(0, 1)
    assert model.log_density(object()) == 0.0
    with pytest.raises(ValueError, match="a NullDistribution cannot be sampled"):
        model.sampler(0).sample(2)
