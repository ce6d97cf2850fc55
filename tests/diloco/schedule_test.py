from __future__ import annotations

from fractions import Fraction
from math import floor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mixle.diloco.schedule import Schedule


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    sync_every = draw(st.integers(1, 400))
    return Schedule(
        sync_every=sync_every,
        fragments=draw(st.integers(1, sync_every)),
        in_flight=draw(st.integers(1, 6)),
        overlap_steps=draw(st.none() | st.integers(0, 50)),
        follow=draw(st.integers(0, 4)),
    )


def test_the_due_steps_of_three_fragments_in_ten_steps():
    schedule = Schedule(sync_every=10, fragments=3)
    assert [schedule.due(round_) for round_ in range(-1, 7)] == [0, 3, 6, 10, 13, 16, 20, 23]
    assert [schedule.gap(round_) for round_ in range(6)] == [3, 3, 4, 3, 3, 4]
    assert [schedule.fragment(round_) for round_ in range(6)] == [0, 1, 2, 0, 1, 2]


@given(schedules(), st.integers(0, 10**12))
def test_a_due_step_is_the_published_formula(schedule, round_):
    turn, position = round_ // schedule.fragments, round_ % schedule.fragments
    exact = Fraction((position + 1) * schedule.sync_every, schedule.fragments)
    assert schedule.due(round_) == turn * schedule.sync_every + floor(exact)


@given(schedules(), st.integers(0, 20))
def test_each_fragment_is_due_exactly_once_in_every_sync_every_steps(schedule, turn):
    first, last = turn * schedule.sync_every, (turn + 1) * schedule.sync_every
    due = {round_: schedule.due(round_) for round_ in range((turn + 2) * schedule.fragments)}
    within = [schedule.fragment(round_) for round_, step in due.items() if first < step <= last]
    assert within == list(range(schedule.fragments))


@given(schedules(), st.integers(0, 2000))
def test_due_steps_increase_by_the_gap_which_is_at_least_one_step(schedule, round_):
    assert schedule.gap(round_) == schedule.due(round_) - schedule.due(round_ - 1) >= 1


@given(schedules(), st.integers(-1, 50), st.integers(-1, 50))
def test_a_learner_publishes_the_round_after_its_last_and_the_newest_it_applied(schedule, published, seen):
    round_ = schedule.next_round(published=published, seen=seen)
    following = max(published, seen) + 1
    ahead = following - seen
    assert round_ == (following if ahead <= min(schedule.in_flight, schedule.fragments) else None)


@given(schedules(), st.integers(0, 30))
def test_a_learner_never_sends_a_fragment_whose_last_snapshot_is_unanswered(schedule, seen):
    published, unanswered = seen, []
    while (round_ := schedule.next_round(published=published, seen=seen)) is not None:
        unanswered.append(schedule.fragment(round_))
        published = round_
    assert len(unanswered) == len(set(unanswered)) == schedule.lead


def test_a_learner_that_was_away_goes_on_after_the_newest_round():
    assert Schedule(sync_every=10, fragments=2).next_round(published=3, seen=1000) == 1001


def test_a_round_is_due_when_the_steps_reach_its_gap():
    schedule = Schedule(sync_every=10, fragments=3)
    assert [schedule.is_due(2, steps=steps, others=5) for steps in (1, 3, 4, 5)] == [False, False, True, True]


def test_a_round_is_due_at_once_when_enough_others_have_published_it():
    schedule = Schedule(sync_every=100, fragments=2, follow=2)
    assert [schedule.is_due(0, steps=1, others=others) for others in (0, 1, 2, 3)] == [False, False, True, True]


def test_a_follower_without_a_step_has_nothing_to_publish():
    assert not Schedule(sync_every=100, fragments=2, follow=1).is_due(0, steps=0, others=4)


@pytest.mark.parametrize(
    ("overlap_steps", "waits"),
    [(None, [False, False, False, False]), (0, [False, True, True, True]), (2, [False, False, False, True])],
)
def test_a_learner_waits_once_an_unanswered_snapshot_is_overlap_steps_old(overlap_steps, waits):
    schedule = Schedule(sync_every=10, fragments=2, overlap_steps=overlap_steps)
    assert [schedule.must_wait(age) for age in (None, 0, 1, 2)] == waits


@pytest.mark.parametrize(
    ("in_flight", "overlap_steps", "allowance"), [(2, None, 50), (2, 7, 7), (1, 40, 25), (9, None, 100)]
)
def test_the_allowance_is_the_lesser_of_the_window_in_flight_and_the_overlap(in_flight, overlap_steps, allowance):
    schedule = Schedule(sync_every=100, fragments=4, in_flight=in_flight, overlap_steps=overlap_steps)
    assert schedule.allowance(5) == allowance
