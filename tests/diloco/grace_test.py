from __future__ import annotations

from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mixle.diloco.grace import GraceClock, RunningMedian, grace_seconds

seconds = st.floats(0, 1e4)


@pytest.mark.parametrize(
    ("gap", "allowance", "xi_step", "xi_quorum", "xi_sync", "expected"),
    [
        (10, 20, 1.0, 4.0, 6.0, 5.0),  # half of 20 - 4 - 6
        (10, 50, 1.0, 4.0, 6.0, 10.0),  # half of 40 is beyond the next round
        (10, 20, 1.0, 15.0, 6.0, 0.0),  # late already
        (10, 0, 1.0, 0.0, 0.0, 0.0),  # a barrier waits for nobody
    ],
)
def test_the_grace_window_by_hand(gap, allowance, xi_step, xi_quorum, xi_sync, expected):
    grace = grace_seconds(gap=gap, allowance=allowance, xi_step=xi_step, xi_quorum=xi_quorum, xi_sync=xi_sync)
    assert grace == expected


@given(st.integers(1, 100), st.integers(0, 200), seconds, seconds, seconds)
def test_waiting_never_makes_a_learner_miss_the_commit_or_lasts_until_the_next_round(
    gap, allowance, step, quorum, sync
):
    grace = grace_seconds(gap=gap, allowance=allowance, xi_step=step, xi_quorum=quorum, xi_sync=sync)
    assert 0 <= grace <= gap * step
    if grace:
        assert quorum + grace + sync <= allowance * step * (1 + 1e-9)


@given(st.lists(st.floats(0, 100), min_size=1, max_size=40))
def test_the_estimate_is_the_lower_median_of_the_recent_values(values):
    estimate = RunningMedian(window=7)
    for value in values:
        estimate.add(value)
    recent = sorted(values[-7:])
    assert estimate.value == recent[(len(recent) - 1) // 2] <= median(recent)


@given(st.lists(st.floats(30, 1e6), max_size=2), st.lists(st.floats(0.09, 0.11), min_size=3, max_size=40))
def test_two_warm_up_steps_never_show_in_the_estimate(warm_up, ordinary):
    clock = GraceClock()
    for count, value in enumerate([*warm_up, *ordinary], start=1):
        clock.step.add(value)
        assert clock.step.value is None if count < 5 else 0.09 <= clock.step.value <= 0.11


def test_a_speed_that_changed_is_forgotten():
    estimate = RunningMedian(window=5)
    for value in [1.0] * 100 + [2.0] * 3:
        estimate.add(value)
    assert estimate.value == 2.0


def test_there_is_no_grace_before_the_duration_of_a_step_is_known():
    clock = GraceClock()
    for _ in range(4):
        clock.step.add(1.0)
    assert clock.grace(gap=10, allowance=20) == 0.0
    clock.step.add(1.0)
    assert clock.grace(gap=10, allowance=20) == 10.0


def test_the_grace_of_a_run_follows_from_its_estimates():
    clock = GraceClock()
    for estimate, value in ((clock.step, 1.0), (clock.quorum, 4.0), (clock.sync, 6.0)):
        for _ in range(5):
            estimate.add(value)
    assert clock.grace(gap=10, allowance=20) == 5.0


@pytest.mark.parametrize(
    ("value", "error"), [(-1.0, ValueError), (float("nan"), ValueError), (True, TypeError), ("1", TypeError)]
)
def test_what_is_no_duration_is_refused_and_changes_nothing(value, error):
    estimate = RunningMedian()
    with pytest.raises(error, match="seconds="):
        estimate.add(value)
    assert estimate.value is None


def test_a_median_that_could_never_be_ready_is_refused():
    with pytest.raises(ValueError, match="ready=4 must be at most window=3"):
        RunningMedian(window=3, ready=4)
