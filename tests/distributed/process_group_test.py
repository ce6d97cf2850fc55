"""Ranks agree, name who is missing, and never wait for one another without a deadline."""

from __future__ import annotations

from pathlib import Path

import pytest
from torchrun import launch

pytestmark = pytest.mark.distributed
PROGRAMS = Path(__file__).parent / "programs"


@pytest.fixture(scope="module")
def reports():
    return launch(PROGRAMS / "process_group.py", ranks=2).reports


def test_every_rank_gets_every_ranks_value(reports):
    assert [r["values"] for r in reports] == [["0", "10"]] * 2


def test_one_ranks_error_is_raised_on_every_rank_with_its_type(reports):
    assert [r["verdict"] for r in reports] == ["ValueError: rank 1: id 9 is too large", "ValueError: id 9 is too large"]


def test_a_rank_with_an_error_of_its_own_raises_that(reports):
    assert [r["verdicts differ"] for r in reports] == ["KeyError: 'a'", "TypeError: b"]


def test_the_group_is_usable_after_a_verdict(reports):
    assert [r["usable after a verdict"] for r in reports] == ["", ""]


def test_a_rank_that_comes_alone_is_told_at_the_deadline_who_is_missing(reports):
    assert reports[0]["alone"].startswith("PeerError: scoring: rank 1 did not come within 0.3 s")


def test_the_ranks_can_still_meet_after_one_came_alone(reports):
    assert [r["together after that"] for r in reports] == ["", ""]


def test_the_group_lives_until_its_last_user_closes(reports):
    assert [r["sum after the first user left"] for r in reports] == [2.0, 2.0]
    assert [r["group after the last left"] for r in reports] == [False, False]


def test_a_group_that_is_gone_says_why(reports):
    assert all("its last user has closed it" in r["meeting after the last left"] for r in reports)


def test_a_failure_in_the_middle_is_raised_on_every_rank_under_the_name_of_the_one_that_failed(reports):
    assert reports[1]["failure"] == "ZeroDivisionError: step 3"
    assert reports[0]["failure"] == "PeerError: rank 1 failed in training: ZeroDivisionError: step 3"
    assert [r["prompt"] for r in reports] == [True, True]


def test_a_group_torn_down_by_a_failure_says_so(reports):
    assert all("training failed on rank" in r["after the failure"] for r in reports)


def test_a_new_group_can_be_joined_after_a_failure(reports):
    assert [r["sum after rejoining"] for r in reports] == [2.0, 2.0]


def test_a_rank_that_takes_no_part_is_named_when_the_collective_times_out(reports):
    assert reports[0]["stuck"].startswith("PeerError: training: rank 1 took no part and said nothing")
