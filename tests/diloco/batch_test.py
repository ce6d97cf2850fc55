from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mixle.diloco.batch import batch_sizes

fleets = st.dictionaries(
    st.text("abcdef", min_size=1, max_size=3), st.none() | st.floats(1e-3, 1e6), min_size=1, max_size=8
)


def test_samples_are_shared_by_speed():
    assert batch_sizes(100, {"slow": 10.0, "fast": 30.0}) == {"fast": 75, "slow": 25}


def test_remainders_go_to_the_largest_fractions_and_ties_by_id():
    assert batch_sizes(10, {"c": 1.0, "b": 1.0, "a": 1.0}) == {"a": 4, "b": 3, "c": 3}
    assert batch_sizes(10, {"a": 1.0, "b": 2.0, "c": 4.0}) == {"a": 1, "b": 3, "c": 6}


def test_a_learner_not_measured_yet_counts_as_the_median():
    assert batch_sizes(100, {"a": 10.0, "b": 20.0, "c": 1000.0, "new": None})["new"] == 2


def test_learners_none_of_which_is_measured_share_evenly():
    assert batch_sizes(9, {"a": None, "b": None}) == {"a": 5, "b": 4}


def test_a_learner_however_slow_has_a_sample():
    assert batch_sizes(8, {"a": 1e-9, "b": 1.0, "c": 1.0}) == {"a": 1, "b": 4, "c": 3}


def test_more_learners_than_samples_get_one_each():
    assert batch_sizes(2, {"a": 1.0, "b": 2.0, "c": 3.0}) == {"a": 1, "b": 1, "c": 1}


def test_no_learners_have_no_batch():
    assert batch_sizes(8, {}) == {}


@given(st.integers(1, 500), fleets)
def test_sizes_are_positive_and_sum_to_the_global_batch(total, speeds):
    sizes = batch_sizes(total, speeds)
    assert sizes.keys() == speeds.keys()
    assert min(sizes.values()) >= 1
    assert sum(sizes.values()) == max(total, len(speeds))


@given(st.integers(1, 500), fleets, st.data())
def test_faster_learners_get_no_less_and_every_site_computes_the_same(total, speeds, data):
    sizes = batch_sizes(total, speeds)
    assert batch_sizes(total, dict(data.draw(st.permutations(list(speeds.items()))))) == sizes
    known = sorted((speed, sizes[learner]) for learner, speed in speeds.items() if speed is not None)
    for (slower, small), (faster, large) in pairwise(known):
        assert slower == faster or small <= large


@pytest.mark.parametrize("speed", [0.0, -1.0, float("nan")])
def test_a_speed_that_is_none_is_refused_by_name(speed):
    with pytest.raises(ValueError, match=r"speeds\['a'\]="):
        batch_sizes(8, {"a": speed})
