"""What a learner's processes have brought into commits, one after the other."""

from __future__ import annotations

import pytest

from mixle.diloco.account import Account
from mixle.diloco.records import Contribution, PayloadRef, RoundRecord, VoidRound

REF = PayloadRef(f"payloads/0000000000/theta-{'0' * 64}.safetensors", 1)


def record(round_, *learners):
    took = tuple(Contribution(each, "0" * 64, 5, 5, 1.0, 1.0, 1.0, 1.0, False) for each in learners)
    return RoundRecord(round_, round_ % 2, round_ - 2, "x", REF, None, None, None, "0" * 64, took, (), None, (0.0, 0.0))


def test_a_snapshot_counts_once_its_commit_is_applied_and_has_taken_it():
    account = Account(2)
    for round_, taken in ((0, True), (1, False)):
        account.hear("published", round_, {"steps": 5})
        account.hear("applied", round_, {"taken": taken})
    assert account.merged == 5 and account.out == {}


@pytest.mark.parametrize(
    ("rounds", "merged"),
    [
        ({4: record(4, "a", "b"), 5: record(5, "a")}, 10 + 5 + 6),
        ({4: record(4, "b"), 5: record(5, "a")}, 10 + 6),
        ({4: VoidRound(4), 5: record(5, "a")}, 10 + 6),
    ],
)
def test_what_a_killed_process_had_published_counts_once_it_is_seen_which_commits_took_it(rounds, merged):
    account = Account(2)
    account.resume(10, {4: 5, 5: 6})
    account.settle("a", 3, rounds.__getitem__)
    assert account.merged == 10 and account.out == {4: 5, 5: 6}
    account.settle("a", 5, rounds.__getitem__)
    account.settle("a", 6, rounds.__getitem__)
    assert account.merged == merged and account.out == {}


def test_what_is_not_settled_is_kept_for_the_process_after_the_next():
    account = Account(2)
    account.resume(10, {4: 5})
    account.hear("published", 5, {"steps": 7})
    assert account.out == {4: 5, 5: 7}
