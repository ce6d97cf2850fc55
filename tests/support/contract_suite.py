"""The contract of :mod:`mixle.stats`, as checks that hold for every family: each takes a ``FamilyCase``.

A test module runs them over its cases with ``@pytest.mark.parametrize("case, check", contract(CASES))``.
"""

from __future__ import annotations

import json
import math
import pickle
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from family_cases import FamilyCase
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

import mixle
from mixle.stats import NullDistribution, ProbabilityDistribution
from mixle.stats.contract import m_step
from mixle.stats.encoding import encoding_frames, join_all, reframe_encoding, row_count, take_rows
from mixle.stats.frames import frame_from_json, frame_to_json
from mixle.stats.row_draws import RowDraws
from mixle.stats.statistics import frames_of, layout, pack, reframe, unpack

Check = Callable[[FamilyCase], None]
_checks: list[tuple[Check, Callable[[FamilyCase], bool]]] = []


def check(function: Check) -> Check:
    """Add a check to the suite, for every case."""
    _checks.append((function, lambda case: True))
    return function


def check_where(applies: Callable[[FamilyCase], bool]) -> Callable[[Check], Check]:
    """Add a check to the suite, for the cases that it applies to."""

    def add(function: Check) -> Check:
        _checks.append((function, applies))
        return function

    return add


def contract(cases: Iterable[FamilyCase]) -> list[Any]:
    """Return the parameters ``(case, check)`` of a test, one for each check that applies to a case."""
    return [
        pytest.param(case, function, id=f"{case.name}-{function.__name__}")
        for case in cases
        for function, applies in _checks
        if applies(case)
    ]


def can_be_sampled(case: FamilyCase) -> bool:
    return not case.values


# ---- helpers


def scores(dist: ProbabilityDistribution, data: list[Any]) -> np.ndarray:
    return dist.seq_log_density(dist.dist_to_encoder().seq_encode(data))


def gathered(case: FamilyCase, data: list[Any], weights: Any = None) -> Any:
    """Return an accumulator of ``case.estimator`` with ``data``."""
    accumulator = case.estimator.accumulator_factory().make()
    w = np.ones(len(data)) if weights is None else np.asarray(weights, dtype=np.float64)
    accumulator.seq_update(accumulator.acc_to_encoder().seq_encode(data), w, case.first_model)
    return accumulator


def estimated(case: FamilyCase, value: Any, nobs: float | None = None) -> ProbabilityDistribution:
    return m_step(case.estimator, nobs, value, case.first_model)


def assert_same_fit(
    a: ProbabilityDistribution, b: ProbabilityDistribution, data: list[Any], tolerance: float = 1e-9
) -> None:
    """Two models are the same where they give every observation the same log-density, and list the same structure."""
    np.testing.assert_allclose(scores(a, data), scores(b, data), rtol=tolerance, atol=tolerance)
    assert_close_dicts(a.to_dict(), b.to_dict(), tolerance)


def assert_close_dicts(a: Any, b: Any, tolerance: float) -> None:
    if isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            if key != "repairs":
                assert_close_dicts(a[key], b[key], tolerance)
    elif isinstance(a, list):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_close_dicts(x, y, tolerance)
    elif isinstance(a, float):
        assert a == pytest.approx(b, rel=tolerance, abs=tolerance)
    else:
        assert a == b


def assert_proper(dist: ProbabilityDistribution, data: list[Any]) -> None:
    """Every parameter is finite (JSON refuses what is not) and the data is possible."""
    dist.to_json()
    assert np.isfinite(scores(dist, data)).all()
    assert isinstance(dist.repairs, tuple)


# ---- scoring


@check
def scalar_and_vectorised_paths_agree(case: FamilyCase) -> None:
    data = case.data(50)
    one_by_one = [case.dist.log_density(x) for x in data]
    np.testing.assert_allclose(scores(case.dist, data), one_by_one, rtol=1e-10, atol=1e-10)


@check
def log_densities_are_float64_of_the_number_of_rows(case: FamilyCase) -> None:
    for n in (0, 1, 7):
        values = scores(case.dist, case.data(n))
        assert values.shape == (n,)
        assert values.dtype == np.float64


@check
def density_is_the_exponential_of_log_density(case: FamilyCase) -> None:
    for x in case.data(5):
        assert case.dist.density(x) == pytest.approx(math.exp(case.dist.log_density(x)), rel=1e-14)


@check_where(lambda case: case.oracle is not None)
def log_density_agrees_with_another_library(case: FamilyCase) -> None:
    data = case.data(50)
    np.testing.assert_allclose(scores(case.dist, data), [case.oracle(x) for x in data], rtol=1e-9, atol=1e-12)


@check
def impossible_values_have_log_density_minus_infinity(case: FamilyCase) -> None:
    good = case.data(3)
    for bad in case.impossible:
        assert case.dist.log_density(bad) == -math.inf
        assert case.dist.density(bad) == 0.0
        together = scores(case.dist, [*good, bad, *good])
        assert np.isneginf(together).tolist() == [False] * 3 + [True] + [False] * 3


@check
def values_of_the_wrong_type_are_refused_by_index_and_value(case: FamilyCase) -> None:
    good = case.data(3)
    for bad in case.wrong:
        with pytest.raises((TypeError, ValueError), match=r"\d"):
            case.dist.dist_to_encoder().seq_encode([*good, bad])
        with pytest.raises((TypeError, ValueError)):
            case.dist.log_density(bad)


@check
def rows_of_an_encoding_score_as_they_do_together(case: FamilyCase) -> None:
    enc = case.dist.dist_to_encoder().seq_encode(case.data(40))
    together = case.dist.seq_log_density(enc)
    bounds = [0, 0, 1, 13, 14, 40, 40]
    apart = [case.dist.seq_log_density(take_rows(enc, a, b)) for a, b in pairwise(bounds)]
    np.testing.assert_allclose(np.concatenate(apart), together, rtol=1e-12, atol=1e-12)
    assert row_count(enc) == 40
    assert enc.nbytes >= 0


@check
def a_model_and_its_estimator_encode_alike(case: FamilyCase) -> None:
    of_model = case.dist.dist_to_encoder()
    of_estimator = case.estimator.accumulator_factory().make().acc_to_encoder()
    assert of_model == of_estimator
    assert hash(of_model) == hash(of_estimator)
    assert of_model != object()


# ---- sampling


@check_where(can_be_sampled)
def samplers_are_reproducible(case: FamilyCase) -> None:
    first, again, other = (repr(list(case.dist.sampler(seed).sample(20))) for seed in (3, 3, 4))
    assert first == again
    assert first != other
    assert case.dist.log_density(case.dist.sampler(3).sample()) > -math.inf


@check_where(can_be_sampled)
def samples_are_as_likely_as_the_best_fit_to_them_allows(case: FamilyCase) -> None:
    """Twice the log-likelihood ratio of fit and truth follows a chi-square law; a wrong sampler leaves it."""
    data = case.data(4000, seed=5)
    chunks = mixle.seq_encode(data, model=case.dist)
    model = case.dist
    for _ in range(5 if case.latent else 1):
        model = mixle.seq_estimate(chunks, case.estimator, model)
    gain = 2 * (mixle.seq_log_density_sum(chunks, model)[1] - mixle.seq_log_density_sum(chunks, case.dist)[1])
    assert -1e-6 <= gain <= stats.chi2(case.parameters).ppf(0.9999)


# ---- statistics


@check
def rows_of_weight_zero_change_nothing(case: FamilyCase) -> None:
    data, more = case.data(30), case.data(15, seed=9)
    mixed = [x for pair in zip(data[:15], more, strict=True) for x in pair] + data[15:]
    weights = [1.0, 0.0] * 15 + [1.0] * 15
    plain = estimated(case, gathered(case, data).value(), 30.0)
    with_zeros = estimated(case, gathered(case, mixed, weights).value(), 30.0)
    assert_same_fit(with_zeros, plain, data)


@check
def weights_count_as_repetition(case: FamilyCase) -> None:
    data = case.data(12)
    times = np.array([3, 1, 0, 2] * 3)
    repeated = [x for x, n in zip(data, times, strict=True) for _ in range(n)]
    a = estimated(case, gathered(case, data, times).value())
    b = estimated(case, gathered(case, repeated).value())
    assert_same_fit(a, b, repeated)


@check
def combining_is_associative_and_commutative(case: FamilyCase) -> None:
    data = case.data(40)
    parts = [gathered(case, part) for part in (data[:11], data[11:12], data[12:])]
    values = [p.value() for p in parts]

    def total(order: tuple[int, ...]) -> Any:
        accumulator = case.estimator.accumulator_factory().make()
        for i in order:
            accumulator.combine(values[i])
        return accumulator.value()

    nested = case.estimator.accumulator_factory().make().from_value(total((1, 2)))
    expected = estimated(case, gathered(case, data).value())
    for value in (total((0, 1, 2)), total((2, 1, 0)), total((1, 0, 2)), nested.combine(values[0]).value()):
        assert_same_fit(estimated(case, value), expected, data)


@check
def any_split_gives_the_same_m_step(case: FamilyCase) -> None:
    data = case.data(40)
    expected = estimated(case, gathered(case, data).value())

    @settings(max_examples=15, deadline=None)
    @given(st.lists(st.integers(0, 40), max_size=5))
    def holds(cuts: list[int]) -> None:
        bounds = [0, *sorted(cuts), 40]
        total = case.estimator.accumulator_factory().make()
        for a, b in pairwise(bounds):
            total.combine(gathered(case, data[a:b]).value())
        assert_same_fit(estimated(case, total.value()), expected, data)

    holds()


@check
def packed_statistics_of_any_shards_add_up(case: FamilyCase) -> None:
    data = case.data(40)
    encoder = case.dist.dist_to_encoder()
    encs = [encoder.seq_encode(part) for part in (data[:3], [], data[3:])]
    frames = join_all([encoding_frames(enc) for enc in encs])
    values = []
    for enc in encs:
        accumulator = case.estimator.accumulator_factory().make()
        shared = reframe_encoding(enc, frames)
        accumulator.seq_update(shared, np.ones(row_count(shared)), case.first_model)
        values.append(accumulator.value())
    assert len({layout(value) for value in values}) == 1
    summed = unpack(np.sum([pack(value) for value in values], axis=0), values[0])
    assert_same_fit(estimated(case, summed), estimated(case, gathered(case, data).value()), data)


@check
def statistics_of_separate_shards_can_be_brought_into_one_frame(case: FamilyCase) -> None:
    data = case.data(40)
    values = [gathered(case, part).value() for part in (data[:3], data[3:25], data[25:])]
    told = [json.loads(json.dumps([frame_to_json(f) for f in frames_of(value)])) for value in values]
    frames = join_all([[frame_from_json(f) for f in one] for one in told])
    moved = [reframe(value, frames) for value in values]
    summed = unpack(np.sum([pack(value) for value in moved], axis=0), moved[0])
    assert_same_fit(estimated(case, summed), estimated(case, gathered(case, data).value()), data)


@check
def an_accumulator_takes_back_its_value(case: FamilyCase) -> None:
    data = case.data(20)
    value = gathered(case, data[:10]).value()
    before = pack(value).copy()
    resumed = case.estimator.accumulator_factory().make().from_value(value)
    resumed.combine(gathered(case, data[10:]).value())
    assert_same_fit(estimated(case, resumed.value()), estimated(case, gathered(case, data).value()), data)
    np.testing.assert_array_equal(pack(value), before)


@check
def scalar_updates_add_up_to_the_vectorised_one(case: FamilyCase) -> None:
    data = case.data(20)
    weights = np.linspace(0.5, 2.0, 20)
    accumulator = case.estimator.accumulator_factory().make()
    for x, weight in zip(data, weights, strict=True):
        accumulator.update(x, weight, case.first_model)
    expected = estimated(case, gathered(case, data, weights).value())
    assert_same_fit(estimated(case, accumulator.value()), expected, data)


# ---- estimation


@check_where(lambda case: case.nearby is not None)
def the_m_step_is_the_best_in_its_neighbourhood(case: FamilyCase) -> None:
    data = case.data(60)
    weights = np.random.default_rng(1).uniform(0.2, 3.0, 60)
    best = estimated(case, gathered(case, data, weights).value())
    score = float(scores(best, data) @ weights)
    rng = np.random.default_rng(2)
    for _ in range(50):
        assert float(scores(case.nearby(best, rng), data) @ weights) <= score + 1e-9 * abs(score)


@check
def em_never_lowers_the_log_likelihood(case: FamilyCase) -> None:
    data = case.data(120, seed=3)
    chunks = mixle.seq_encode(data, estimator=case.estimator)
    model = mixle.seq_initialize(chunks, case.estimator, 1, 0.5)
    last = mixle.seq_log_density_sum(chunks, mixle.seq_estimate(chunks, case.estimator, model))[1]
    for _ in range(15):
        model = mixle.seq_estimate(chunks, case.estimator, model)
        total = mixle.seq_log_density_sum(chunks, model)[1]
        assert total >= last - 1e-9 * abs(last)
        last = total


@check
def initialization_does_not_depend_on_the_split(case: FamilyCase) -> None:
    data = case.data(60)
    models = [
        mixle.seq_initialize(mixle.seq_encode(data, estimator=case.estimator, num_chunks=k), case.estimator, 7, 0.4)
        for k in (1, 2, 7)
    ]
    for other in models[1:]:
        assert_same_fit(models[0], other, data)


@check
def scalar_initialization_adds_up_to_the_vectorised_one(case: FamilyCase) -> None:
    data = case.data(10)
    one_by_one, together = (case.estimator.accumulator_factory().make() for _ in range(2))
    draws = RowDraws.for_rows(11, 0, 10)
    for i, x in enumerate(data):
        one_by_one.initialize(x, 1.0, draws.rows(i, i + 1))
    together.seq_initialize(together.acc_to_encoder().seq_encode(data), np.ones(10), draws)
    fits = [case.estimator.estimate(10.0, a.value()) for a in (one_by_one, together)]
    np.testing.assert_allclose(scores(fits[0], data), scores(fits[1], data), rtol=1e-9, atol=1e-9)


@check
def pseudo_observations_pull_the_fit_toward_the_distribution(case: FamilyCase) -> None:
    other, data = case.data(5, seed=8), case.data(40)
    chunks = mixle.seq_encode(other, model=case.dist)
    distances = []
    for pseudo_count in (1e-3, 1e1, 1e12):
        model = mixle.seq_estimate(chunks, case.dist.estimator(pseudo_count), case.dist)
        distances.append(np.abs(scores(model, data) - scores(case.dist, data)).max())
    assert distances[2] < 1e-6
    assert not distances[1] > distances[0]


@check
def empty_data_is_named(case: FamilyCase) -> None:
    with pytest.raises(ValueError, match="empty"):
        mixle.seq_estimate(mixle.seq_encode([], estimator=case.estimator), case.estimator, case.first_model)
    with pytest.raises(ValueError, match="empty"):
        mixle.seq_initialize(mixle.seq_encode([], estimator=case.estimator), case.estimator, 0)


@check
def degenerate_data_gives_a_proper_distribution(case: FamilyCase) -> None:
    some = case.data(3)
    for data in (some[:1], some[:1] * 4, some[:1] * 3 + some[1:2]):
        chunks = mixle.seq_encode(data, estimator=case.estimator)
        assert_proper(mixle.seq_initialize(chunks, case.estimator, 0, 1.0), data)
        model = mixle.seq_estimate(chunks, case.estimator, case.first_model)
        assert_proper(model, data)
        assert_proper(mixle.seq_estimate(chunks, case.estimator, model), data)


@check
def a_weight_that_is_none_is_refused_and_nothing_is_added(case: FamilyCase) -> None:
    data = case.data(3)
    accumulator = gathered(case, data)
    before = pickle.dumps(accumulator.value())
    for weight, error in ((-1, ValueError), (math.nan, ValueError), (math.inf, ValueError), ("1", TypeError)):
        with pytest.raises(error, match="weight="):
            accumulator.update(data[0], weight, case.first_model)
        with pytest.raises(error, match="weight="):
            accumulator.initialize(data[0], weight, np.random.RandomState(1))
    assert pickle.dumps(accumulator.value()) == before


@check
def without_any_weight_the_previous_model_stays(case: FamilyCase) -> None:
    data = case.data(20)
    empty = gathered(case, data, np.zeros(20)).value()
    kept = m_step(case.estimator, 0.0, empty, case.dist)
    np.testing.assert_allclose(scores(kept, data), scores(case.dist, data), rtol=1e-12)


@check
def estimates_of_one_estimator_do_not_influence_each_other(case: FamilyCase) -> None:
    data = case.data(20)
    value = gathered(case, data).value()
    first = estimated(case, value)
    estimated(case, gathered(case, data[:3]).value())
    assert estimated(case, value).to_dict() == first.to_dict()


# ---- persistence


@check
def json_keeps_the_distribution_exactly(case: FamilyCase) -> None:
    for dist in (case.dist, estimated(case, gathered(case, case.data(1)).value())):
        again = ProbabilityDistribution.from_json(dist.to_json())
        assert type(again) is type(dist)
        assert again.to_json() == dist.to_json()
        assert again.repairs == dist.repairs
        np.testing.assert_array_equal(scores(again, case.data(20)), scores(dist, case.data(20)))


@check_where(lambda case: not isinstance(case.dist, NullDistribution))
def names_survive_json_and_estimation(case: FamilyCase) -> None:
    dist = ProbabilityDistribution.from_dict({**case.dist.to_dict(), "name": "income"})
    assert dist.name == "income"
    assert dist.estimator().name == "income"


@check
def pickles_are_equal(case: FamilyCase) -> None:
    data = case.data(10)
    accumulator = gathered(case, data)
    parts = (case.dist, case.estimator, accumulator, case.estimator.accumulator_factory(), case.dist.dist_to_encoder())
    dist, estimator, gathered_again, factory, encoder = pickle.loads(pickle.dumps(parts))
    np.testing.assert_array_equal(scores(dist, data), scores(case.dist, data))
    expected = estimated(case, accumulator.value())
    assert m_step(estimator, None, gathered_again.value(), case.first_model).to_dict() == expected.to_dict()
    assert factory.make().acc_to_encoder() == encoder


@check
def representations_name_the_class(case: FamilyCase) -> None:
    assert repr(case.dist).startswith(type(case.dist).__name__)
