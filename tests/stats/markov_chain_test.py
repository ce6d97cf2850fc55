"""Markov chains: sparse rows, smoothing, and streams in segments."""

from __future__ import annotations

import itertools
import json
import math
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mixle import seq_encode, seq_estimate, seq_log_density_sum
from mixle.stats import (
    ExponentialDistribution,
    MarkovChainDistribution,
    MarkovChainEstimator,
    PoissonDistribution,
    PoissonEstimator,
    ProbabilityDistribution,
)
from mixle.stats.markov_chain import MarkovChainDataEncoder
from mixle.stats.null import NullDataEncoder

ROWS = {"a": {"a": 0.25, "b": 0.75}, "b": {"a": 1.0}}


def fit(data, estimator, previous=None, num_chunks=1):
    return seq_estimate(seq_encode(data, estimator=estimator, num_chunks=num_chunks), estimator, previous)


def by_hand(data, states, pseudo_count=0.0):
    """Count in dicts: initial probabilities, and rows with a pseudo-count spread evenly."""
    first = dict.fromkeys(states, pseudo_count / len(states))
    rows = {a: dict.fromkeys(states, pseudo_count / len(states)) for a in states}
    for x in data:
        if x:
            first[x[0]] += 1
        for a, b in itertools.pairwise(x):
            rows[a][b] += 1
    return normalized(first), {a: normalized(row) for a, row in rows.items() if any(row.values())}


def normalized(counts):
    total = sum(counts.values())
    return {key: n / total for key, n in counts.items()}


sequences = st.lists(st.lists(st.sampled_from("abcd"), max_size=8), min_size=1, max_size=8).filter(any)


@settings(max_examples=60, deadline=None)
@given(sequences, st.sampled_from([0.0, 0.5, 3.0]), st.integers(1, 3))
def test_fits_are_the_shares_counted_by_hand(data, pseudo_count, chunks):
    estimator = MarkovChainEstimator(pseudo_count=pseudo_count or None)
    model = fit(data, estimator, num_chunks=chunks)
    states = sorted({s for x in data for s in x})
    first, rows = by_hand(data, states, pseudo_count)
    assert model.init_prob_map == pytest.approx(first)
    for state, row in rows.items():
        full = dict.fromkeys(states, 0.0) | model.transition_map[state]
        assert full == pytest.approx(row)
    for row in model.transition_map.values():
        assert sum(row.values()) == pytest.approx(1.0)
    for x in data:
        expected = math.log(first[x[0]]) if x else 0.0
        expected += sum(math.log(rows[a][b]) for a, b in itertools.pairwise(x))
        assert model.log_density(x) == pytest.approx(expected)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 6), min_size=1, max_size=60), st.lists(st.integers(0, 60), max_size=4))
def test_segments_of_a_stream_count_every_transition_once(tokens, cuts):
    stream = np.array(tokens)
    estimator = MarkovChainEstimator(pseudo_count=0.5, levels=range(8))
    whole = fit([stream], estimator)
    bounds = [0, *sorted(min(c, len(stream)) for c in cuts), len(stream)]
    encoder = estimator.accumulator_factory().make().acc_to_encoder()
    segments = [
        (1, encoder.encode_stream(stream[a:b], int(stream[a - 1]) if a else None))
        for a, b in itertools.pairwise(bounds)
    ]
    model = seq_estimate(segments, estimator)
    assert model.init_prob_map == pytest.approx(whole.init_prob_map)
    for state, row in whole.transition_map.items():
        assert model.transition_map[state] == pytest.approx(row)
    score = seq_log_density_sum(segments, whole)[1]
    assert score == pytest.approx(seq_log_density_sum(seq_encode([stream], model=whole), whole)[1])


def test_a_stream_has_no_length_to_model():
    encoder = MarkovChainEstimator(len_estimator=PoissonEstimator()).accumulator_factory().make().acc_to_encoder()
    with pytest.raises(TypeError, match="drop its len_estimator"):
        encoder.encode_stream(np.array([1, 2]), None)


def test_integers_in_lists_and_in_arrays_of_any_width_are_the_same_states():
    lists = [[1, 2, 2], [0], [], [200, 1]]
    expected = fit(lists, MarkovChainEstimator()).to_dict()
    for dtype in (np.uint8, np.int16, np.int64):
        assert fit([np.array(x, dtype=dtype) for x in lists], MarkovChainEstimator()).to_dict() == expected
    mixed = [np.array([1, 2, 2]), [0], (), np.array([200, 1], dtype=object)]
    assert fit(mixed, MarkovChainEstimator()).to_dict() == expected


def test_sparse_and_dense_counting_agree():
    rng = np.random.default_rng(0)
    few, many = rng.integers(0, 5, (300, 40)), rng.integers(0, 300, (300, 40))
    for rows in (few, many):
        model = fit(list(rows), MarkovChainEstimator())
        first, shares = by_hand([x.tolist() for x in rows], sorted(set(rows.ravel().tolist())))
        assert {k: v for k, v in model.init_prob_map.items() if v} == pytest.approx(
            {k: v for k, v in first.items() if v}
        )
        for state in list(shares)[:20]:
            observed = {b: p for b, p in shares[state].items() if p}
            assert {b: p for b, p in model.transition_map[state].items() if p} == pytest.approx(observed)


def test_memory_follows_the_transitions_that_occur_not_the_square_of_the_states():
    rng = np.random.default_rng(0)
    words = rng.integers(0, 20_000, 40_000)
    estimator = MarkovChainEstimator(pseudo_count=1.0)
    tracemalloc.start()
    model = fit([words], estimator)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(model.params.states) ** 2 * 8 > 1e9
    assert peak < 50e6
    assert math.isfinite(model.log_density(words))
    assert len(json.dumps(model.to_dict())) < 5e6


def test_an_encoding_is_as_large_as_what_it_counts():
    encoder = MarkovChainDataEncoder(NullDataEncoder())
    tokens = np.random.default_rng(0).integers(0, 16, 200_000).astype(np.uint8)
    assert encoder.seq_encode([tokens]).nbytes < 10_000
    assert encoder.encode_stream(tokens.astype(np.int64), None).nbytes < 10_000


def test_smoothing_leaves_zeros_only_outside_the_states():
    model = fit([["a", "b"], ["b", "b"]], MarkovChainEstimator(pseudo_count=1.0, levels="abc"))
    assert model.transition_map["c"] == pytest.approx({"a": 1 / 3, "b": 1 / 3, "c": 1 / 3})
    assert model.transition_map["a"] == pytest.approx({"a": 1 / 6, "b": 2 / 3, "c": 1 / 6})
    assert model.log_density(["c", "c"]) == pytest.approx(math.log(1 / 9) + math.log(1 / 3))
    assert model.log_density(["a", "z"]) == -math.inf
    assert model.repairs == ()


def test_pseudo_observations_follow_a_chain():
    prior = MarkovChainDistribution({"a": 1.0}, ROWS)
    model = fit([["b", "b"]], MarkovChainEstimator(pseudo_count=1.0, suff_stat=prior))
    assert model.init_prob_map == pytest.approx({"a": 0.5, "b": 0.5})
    assert model.transition_map["a"] == pytest.approx(ROWS["a"])
    assert model.transition_map["b"] == pytest.approx({"a": 0.5, "b": 0.5})
    smooth = fit([["a", "b"]], MarkovChainEstimator(pseudo_count=1.0, levels="abc"))
    again = fit([["a", "d"]], smooth.estimator(2.0))
    assert sum(again.transition_map["a"].values()) == pytest.approx(1.0)
    assert again.transition_map["a"]["d"] > again.transition_map["a"]["c"] > 0


def test_a_prior_row_that_cannot_be_left_is_spread_evenly():
    prior = MarkovChainDistribution({"a": 1.0}, {"a": {"b": 1.0}})
    model = fit([["b", "a"]], MarkovChainEstimator(pseudo_count=1.0, suff_stat=prior))
    assert model.transition_map["b"] == pytest.approx({"a": 0.75, "b": 0.25})


def test_rows_keep_previous_values_for_states_that_the_data_lacks():
    previous = MarkovChainDistribution({"a": 1.0}, ROWS)
    model = fit([["c", "a"]], MarkovChainEstimator(), previous)
    assert {s: model.transition_map[s] for s in "ab"} == ROWS
    assert model.transition_map["c"] == {"a": 1.0}


def test_a_chain_without_any_first_state_keeps_or_spreads_it():
    encoder = MarkovChainEstimator().accumulator_factory().make().acc_to_encoder()
    segment = [(1, encoder.encode_stream(np.array([1, 2]), previous=0))]
    fresh = seq_estimate(segment, MarkovChainEstimator())
    assert fresh.init_prob_map == pytest.approx({0: 1 / 3, 1: 1 / 3, 2: 1 / 3})
    assert "no first state was observed; made uniform" in str(fresh.repairs[0])
    kept = seq_estimate(segment, MarkovChainEstimator(), MarkovChainDistribution({2: 1.0}, {}))
    assert kept.init_prob_map[2] == 1.0
    assert "kept the previous probabilities" in str(kept.repairs[0])


def test_json_keeps_smoothed_rows_without_writing_them_out():
    model = fit([[("x", 1), None], [None, b"y"]], MarkovChainEstimator(pseudo_count=0.5, levels=range(1000)))
    text = model.to_json()
    again = ProbabilityDistribution.from_json(text)
    assert len(text) < 60_000
    assert again.to_json() == text
    for x in ([None, 5, 5], [("x", 1)], [b"y", b"y"]):
        assert again.log_density(x) == model.log_density(x)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"transitions": [[0, 1, 9], [0.25, 0.75, 1.0]]}, "do not fit its 2 states"),
        ({"transitions": [[1, 0, 2], [0.25, 0.75, 1.0]]}, "do not fit its 2 states"),
        ({"transitions": [[0, 1], [0.25, 0.75, 1.0]]}, "do not fit its 2 states"),
        ({"spread": [0.0]}, "do not fit its 2 states"),
        ({"spread": [0.5, 0.0]}, "must be probabilities that sum to one"),
        ({"transitions": [[0, 1, 2], [-0.25, 1.25, 1.0]]}, "must be probabilities that sum to one"),
        ({"initial": [0.5, 0.6]}, "must sum to 1"),
    ],
)
def test_json_that_is_no_chain_is_refused(change, message):
    payload = MarkovChainDistribution({"a": 1.0}, ROWS).to_dict()
    payload["chain"] |= change
    with pytest.raises(ValueError, match=message):
        ProbabilityDistribution.from_dict(payload)


@pytest.mark.parametrize(
    ("make", "kind", "message"),
    [
        (lambda: MarkovChainDistribution(["a"], {}), TypeError, r"init_prob_map=\['a'\] must be a dict"),
        (lambda: MarkovChainDistribution({"a": 0.5}, {}), ValueError, r"init_prob_map=\[0\.5\] must sum to 1"),
        (lambda: MarkovChainDistribution({}, ROWS), ValueError, r"init_prob_map=\{\} must give"),
        (lambda: MarkovChainDistribution({"a": 1.0}, [1]), TypeError, r"transition_map=\[1\] must be a dict"),
        (lambda: MarkovChainDistribution({"a": 1.0}, {"a": 1.0}), TypeError, r"transition_map\['a'\]=1\.0 must be"),
        (lambda: MarkovChainDistribution({"a": 1.0}, {"a": {"b": 0.9}}), ValueError, r"transition_map\['a'\]=\[0\.9\]"),
        (lambda: MarkovChainDistribution({"a": 1.0}, {}, len_dist=3), TypeError, "len_dist.*3 must be a distribution"),
        (lambda: MarkovChainEstimator(suff_stat=MarkovChainDistribution({}, {})), ValueError, "has no effect without"),
        (lambda: MarkovChainEstimator(pseudo_count=1.0, suff_stat={}), TypeError, "must be a MarkovChainDistribution"),
        (
            lambda: MarkovChainEstimator(initial_pseudo_count=-1),
            ValueError,
            r"initial_pseudo_count=-1\.0 must be above 0",
        ),
        (lambda: MarkovChainEstimator(len_estimator=PoissonDistribution), TypeError, "must be an estimator"),
    ],
)
def test_wrong_arguments_are_refused_by_name_and_value(make, kind, message):
    with pytest.raises(kind, match=message):
        make()


def test_a_bad_state_is_named_with_its_sequence():
    with pytest.raises(TypeError, match="MarkovChain, sequence 1, index 2: a category must be"):
        fit([["a"], ["a", "b", [1]]], MarkovChainEstimator())
    with pytest.raises(TypeError, match=r"got str \('ab'\) at index 1; give list\(x\) for its characters"):
        fit([["a"], "ab"], MarkovChainEstimator())


def test_sampling_needs_a_length_and_rows_that_can_be_left():
    stuck = MarkovChainDistribution({"a": 1.0}, {"a": {"b": 1.0}})
    with pytest.raises(ValueError, match=r"model this part \(len_dist, or an estimator's len_estimator\)"):
        stuck.sampler(0).sample()
    assert stuck.sampler(0).sample_length(2) == ["a", "b"]
    with pytest.raises(ValueError, match="cannot leave state 'b'"):
        stuck.sampler(0).sample_length(3)
    with pytest.raises(ValueError, match="a chain without states has no sequence of length 1"):
        MarkovChainDistribution({}, {}).sampler(0).sample_length(1)
    fractional = MarkovChainDistribution({"a": 1.0}, ROWS, ExponentialDistribution(3.0))
    with pytest.raises(TypeError, match="a length drawn from len_dist"):
        fractional.sampler(0).sample()


def test_smoothed_rows_are_sampled_as_they_score():
    model = fit([["a", "b", "a", "b", "a", "c"]], MarkovChainEstimator(pseudo_count=1.0, levels="abcd"))
    chain = model.sampler(1).sample_length(20_000)
    for state, row in model.transition_map.items():
        after = [b for a, b in itertools.pairwise(chain) if a == state]
        for target, p in row.items():
            share = after.count(target) / len(after)
            assert abs(share - p) < 5 * math.sqrt(p * (1 - p) / len(after)) + 1e-9


def test_lengths_are_part_of_the_score_where_they_are_modelled():
    chain = MarkovChainDistribution({"a": 1.0}, ROWS, PoissonDistribution(2.0))
    alone = MarkovChainDistribution({"a": 1.0}, ROWS)
    assert chain.log_density(["a", "b"]) == pytest.approx(
        alone.log_density(["a", "b"]) + PoissonDistribution(2.0).log_density(2)
    )
