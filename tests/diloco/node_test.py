"""The protocol of a node, one situation each; whole runs are in simulation_test.py."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from diloco_members import Hand, flip_bit, record_of
from virtual_clock import VirtualClock

from mixle.diloco import names
from mixle.diloco.algorithm import DiLoCo
from mixle.diloco.mailbox import TransientMailboxError
from mixle.diloco.memory_mailbox import MemoryMailbox
from mixle.diloco.merge import WeightedMean
from mixle.diloco.records import Claim

ONE = DiLoCo(4, 1, outer_lr=1.0, outer_momentum=0.5, merge=WeightedMean(), grace_seconds=0.0)


@pytest.fixture
def clock():
    return VirtualClock()


@pytest.fixture
def store(clock):
    return MemoryMailbox(now=clock.monotonic)


@pytest.fixture
def hand(store, clock):
    return lambda name, algorithm=ONE, **more: Hand(store, name, algorithm, clock=clock, **more)


def fail_once(member, operation, part, *, done=False):
    """Have the member's next such operation on a key with ``part`` in it fail, before or after it is done."""
    waiting = [True]

    def check(seen, key):
        if waiting and seen == operation and part in key:
            waiting.clear()
            raise TransientMailboxError(f"{operation} {key}: injected")

    setattr(member.hooks, "after" if done else "before", check)


def committed(member, algorithm):
    versions = [member.node._versions.newest(fragment, member.node.newest) for fragment in range(algorithm.fragments)]
    return {name: array for version in versions for name, array in version.theta.items()}


def test_a_lone_learner_takes_the_outer_step_of_its_own_delta(hand, store):
    alone = hand("alone")
    alone.train(4)
    alone.tick()
    # m = D = -4, theta = 0 - (D + m/2) = 6; no steps since the snapshot.
    alone.learner.move()
    assert all(np.all(array == 6.0) for array in alone.arrays.values())
    assert record_of(store, 0).contributions[0].steps == 4


def test_the_steps_since_a_snapshot_are_carried_on_from_the_commit(hand, clock):
    alone = hand("alone")
    alone.train(4)
    alone.train(3)
    alone.tick()
    alone.learner.move()
    assert all(np.all(array == 6.0 + 3.0) for array in alone.arrays.values())
    assert alone.learner.unmerged_steps == [3]


@pytest.mark.parametrize("done", [False, True])
@pytest.mark.parametrize("part", ["delta-", "snapshots/", "claims/", "theta-", "momentum-", "rounds/"])
def test_a_write_that_fails_is_done_again_and_the_outer_step_is_taken_once(hand, store, part, done):
    alone = hand("alone")
    alone.train(4)
    alone.tick()
    alone.train(4)
    fail_once(alone, "put", part, done=done)
    with pytest.raises(TransientMailboxError):
        alone.tick()
    alone.tick()
    alone.learner.move()
    # m = 0.5 * -4 - 4 = -6, theta = 6 - (-4 - 3) = 13
    assert all(np.all(array == 13.0) for array in alone.arrays.values())
    assert [record_of(store, round_).steps for round_ in (0, 1)] == [4, 4]


def test_a_read_that_fails_while_a_commit_is_taken_in_leaves_nothing_half_done(hand, store):
    closer, other = hand("closer"), hand("other", push=3.0)
    closer.renew()
    closer.train(4)
    other.train(4)
    other.node._publish()
    closer.tick()
    fail_once(other, "get", "theta-")
    with pytest.raises(TransientMailboxError):
        other.tick()
    other.tick()
    other.learner.move()
    assert other.learner.unmerged_steps == [0]
    assert np.array_equal(other.arrays["a"], closer.node._versions.newest(0, 0).theta["a"])


def test_a_node_that_was_away_moves_to_the_newest_commits_at_once(hand, store):
    algorithm = DiLoCo(3, 3, grace_seconds=0.0)
    closer, away = hand("closer", algorithm), hand("away", algorithm)
    away.train(1)
    for _ in range(30):
        closer.train(1)
        closer.tick()
    before = away.mailbox.traffic.gets
    away.tick()
    away.learner.move()
    assert away.learner.seen == 29
    assert away.mailbox.traffic.gets - before < 20
    for name, array in committed(closer, algorithm).items():  # its one step is carried on
        np.testing.assert_allclose(away.arrays[name], array + 1.0, rtol=1e-6)


def test_a_jump_that_fails_half_way_is_finished_by_the_next_call(hand):
    algorithm = DiLoCo(3, 3, grace_seconds=0.0)
    closer, away = hand("closer", algorithm), hand("away", algorithm)
    for _ in range(30):
        closer.train(1)
        closer.tick()
    reads = []

    def third_fails(operation, key):
        reads.extend([key] if operation == "get" and "theta-" in key else [])
        if len(reads) == 3:
            away.hooks.before = lambda operation, key: None
            raise TransientMailboxError("injected")

    away.hooks.before = third_fails
    with pytest.raises(TransientMailboxError):
        away.tick()
    away.tick()
    away.learner.move()
    for name, array in committed(closer, algorithm).items():
        np.testing.assert_array_equal(away.arrays[name], array)


def test_a_claim_is_taken_over_when_its_node_has_left_and_not_before(hand, store, clock):
    slow, other = hand("slow"), hand("other")
    slow.node._exchange.claim(Claim(0, 0, "slow"))
    other.renew()
    other.train(4)
    for _ in range(40):
        clock.sleep(1.0)
        slow.renew()
        other.renew()
        other.tick()
    assert other.node.newest == -1 and not other.told("takeover")
    for _ in range(6):
        clock.sleep(1.0)
        other.renew()
    other.tick()
    assert other.node.newest == 0 and other.told("takeover") == [(0, {"from": "slow"})]


def test_a_claimant_that_nobody_has_looked_at_yet_is_not_taken_for_dead(hand, store):
    other, fresh = hand("other"), hand("fresh")
    fresh.node._exchange.claim(Claim(0, 0, "fresh"))
    other.train(4)
    other.tick()
    assert other.node.newest == -1 and not other.told("takeover")


def test_a_closer_that_was_overtaken_follows_the_record_that_landed(hand, store, clock):
    slow, taker = hand("slow"), hand("taker")
    for each in (slow, taker):
        each.renew()
        each.train(4)
        each.node._publish()

    def commit_of_the_slow_one(operation, key):
        if operation == "put" and key.startswith("claims/"):
            taker.hooks.after = lambda operation, key: None
            slow.node._claim = lambda seen: True
            slow.tick()

    taker.hooks.after = commit_of_the_slow_one
    taker.tick()
    assert record_of(store, 0).closer == "slow"
    assert taker.node.newest == 0
    taker.learner.move()
    assert np.array_equal(taker.arrays["a"], slow.node._versions.newest(0, 0).theta["a"])


def test_only_the_node_that_closes_a_round_reads_its_snapshots_and_it_does_not_read_its_own(hand):
    nodes = [hand(f"n{index}", push=1.0 + index) for index in range(3)]
    read = {each.name: [] for each in nodes}
    for each in nodes:
        each.hooks.before = lambda operation, key, to=read[each.name]: to.append(key) if operation == "get" else None
    for each in nodes:
        each.renew()
        each.train(4)
        each.node._publish()
    for each in nodes:
        each.tick()
    deltas = {name: [key for key in keys if "/delta-" in key] for name, keys in read.items()}
    assert [len(deltas[name]) for name in ("n0", "n1", "n2")] == [2, 0, 0]
    assert not any(key.startswith("snapshots/") for key in read["n1"] + read["n2"])


@pytest.mark.parametrize("part", ["snapshots/", "/delta-"])
def test_what_the_others_published_is_read_at_one_time(hand, store, part):
    nodes = [hand(f"n{index}", push=1.0 + index) for index in range(4)]
    for each in nodes:
        each.renew()
        each.train(4)
        each.node._publish()
    together = threading.Barrier(3, timeout=60.0)
    nodes[0].renew()
    nodes[0].hooks.before = lambda operation, key: together.wait() if operation == "get" and part in key else None
    if part == "snapshots/":
        together = threading.Barrier(4, timeout=60.0)  # its own record is one of them
    nodes[0].tick()
    assert len(record_of(store, 0).contributions) == 4


def test_a_void_round_changes_nothing_and_the_work_of_its_snapshots_goes_into_the_next(hand, store):
    alone = hand("alone")
    store.put_if_absent(names.round_record(0), b"garbage")
    alone.train(4)
    alone.tick()
    assert alone.node.newest == 0 and alone.told("corrupt")[0][0] == 0
    alone.train(4)
    alone.tick()
    assert record_of(store, 1).steps == 8 and record_of(store, 1).parent == -1


def test_work_that_a_round_took_is_not_offered_again_where_the_round_itself_cannot_be_read(hand, store):
    closer, other = hand("closer"), hand("other", push=3.0)
    for each in (closer, other):
        each.renew()
        each.train(4)
        each.node._publish()
    closer.tick()
    theta = record_of(store, 0).theta.key
    good = store._objects[theta]
    flip_bit(store, theta)
    other.tick()
    assert other.told("corrupt")[0][0] == 0
    other.learner.move()
    assert np.all(other.arrays["a"] == 12.0)  # it has stayed where it was
    closer.train(4)
    closer.tick()  # which holds round 0 in memory
    other.tick()
    other.learner.move()
    assert record_of(store, 1).parent == 0
    assert other.learner.unmerged_steps == [0]
    assert np.array_equal(other.arrays["a"], closer.node._versions.newest(0, 1).theta["a"])
    assert store._objects[theta] != good


def test_a_round_that_nobody_else_can_read_is_passed_by_and_its_work_is_offered_again(hand, store):
    closer, other = hand("closer"), hand("other", push=3.0)
    for each in (closer, other):
        each.renew()
        each.train(4)
        each.node._publish()
    closer.tick()
    flip_bit(store, record_of(store, 0).theta.key)
    other.tick()
    other.train(4)
    other.tick()
    assert record_of(store, 1).parent == -1
    assert [(each.learner, each.steps) for each in record_of(store, 1).contributions] == [("other", 8)]
    other.learner.move()
    assert other.learner.unmerged_steps == [0]


def test_a_late_reader_whose_versions_were_swept_moves_on_without_calling_them_corrupt(hand, store):
    closer, late = hand("closer"), hand("late")
    for _ in range(5):
        closer.train(4)
        closer.tick()
    late.tick()
    late.learner.move()
    assert late.learner.seen == 4 and not late.told("corrupt")
    np.testing.assert_array_equal(late.arrays["a"], closer.node._versions.newest(0, 4).theta["a"])


def test_a_learner_whose_parameters_are_not_finite_goes_back_to_the_commits_in_all_fragments(hand, store):
    algorithm = DiLoCo(4, 2, grace_seconds=0.0)
    good, broken = hand("good", algorithm), hand("broken", algorithm)
    for each in (good, broken):
        each.renew()
    broken.arrays["b"][0, 0] = np.nan
    with np.errstate(invalid="ignore"):
        broken.train(2)
        good.train(2)
        broken.node._publish()
        good.tick()
        broken.tick()
        broken.learner.move()
    assert [each.reason.partition(":")[0] for each in record_of(store, 0).rejections] == ["nonfinite"]
    assert all(np.all(np.isfinite(array)) for array in broken.arrays.values())
    assert broken.learner.unmerged_steps == [0, 0]
    broken.train(2)
    broken.tick()
    assert ("broken", 2) in [(each.learner, each.steps) for each in record_of(store, 1).contributions]


def test_a_healthy_process_is_not_reset_by_what_an_earlier_one_under_its_id_published(hand, store, clock):
    first = hand("n0")
    first.arrays["a"][0] = np.inf
    with np.errstate(invalid="ignore"):
        first.train(4)
    first.node._publish()
    first.member.lease.release()
    second = hand("n0")
    second.train(4)
    second.tick()
    second.learner.move()
    assert np.all(second.arrays["a"] == 4.0) and second.learner.unmerged_steps == [4]


def test_a_lone_runaway_that_overflows_leaves_the_global_parameters_as_they_were(hand, store):
    alone = hand("alone", push=8e37)
    alone.train(4)
    alone.tick()
    alone.learner.move()
    assert record_of(store, 0).contributions == ()
    assert all(np.all(np.isfinite(array)) for array in alone.arrays.values())


def test_what_rounding_drops_from_a_delta_is_in_the_next_one(hand, store):
    algorithm = DiLoCo(4, 1, outer_lr=1.0, outer_momentum=0.0, delta_dtype="F4", residual_dtype="BF16")
    alone = hand("alone", algorithm, push=0.3)
    for _ in range(20):
        alone.train(4)
        alone.tick()
    alone.learner.move()
    theta = alone.node._versions.newest(0, 19).theta
    assert np.abs(theta["a"] - 20 * 4 * 0.3).max() < 0.5 * 4 * 0.3


def test_who_learns_a_round_by_its_update_has_the_parameters_of_its_closer_bit_for_bit(hand, store):
    algorithm = DiLoCo(4, 1, commit_dtype="F4", grace_seconds=0.0)
    closer, reader = hand("closer", algorithm, push=0.1), hand("reader", algorithm)
    read = []
    reader.hooks.before = lambda operation, key: read.append(key) if operation == "get" else None
    for _ in range(3):
        closer.train(4)
        closer.tick()
        reader.tick()
    reader.learner.move()
    theirs = closer.node._versions.newest(0, 2).theta
    assert all(np.array_equal(reader.node._versions.newest(0, 2).theta[name], theirs[name]) for name in theirs)
    assert any("/update-" in key for key in read) and not any("/theta-" in key for key in read)


def test_learners_that_leave_together_are_merged_into_one_round_and_added_whole_once(hand, store, clock):
    algorithm = DiLoCo(4, 1, merge=WeightedMean())
    first, second = hand("first", algorithm), hand("second", algorithm, push=3.0)
    for each in (first, second):
        each.renew()
        each.train(2)
    first.renew()
    first.learner.capture_rest()
    first.tick()
    assert first.node.newest == -1
    clock.sleep(1.0)
    second.learner.capture_rest()
    second.tick()
    first.tick()
    assert [each.learner for each in record_of(store, 0).contributions] == ["first", "second"]
    assert np.all(first.node._versions.newest(0, 0).theta["a"] == 4.0)


def test_a_learner_that_leaves_does_not_wait_long_for_those_who_stay(hand, store, clock):
    algorithm = DiLoCo(4, 2)
    leaving, staying = hand("leaving", algorithm), hand("staying", algorithm)
    leaving.train(1)
    staying.renew()
    leaving.renew()
    leaving.learner.capture_rest()
    leaving.tick()
    clock.sleep(3.0)
    leaving.tick()
    leaving.learner.move()
    assert leaving.learner.unmerged_steps == [0, 0]


def test_a_syncer_closes_rounds_and_reads_the_parameters_of_its_parents_only(hand, store):
    syncer, learner = hand("syncer", role="syncer"), hand("learner", role="learner")
    syncer.renew()
    for round_ in range(3):
        learner.train(4)
        learner.tick()
        syncer.tick()
        learner.tick()
        assert record_of(store, round_).closer == "syncer"


def test_one_that_may_do_either_closes_rounds_while_no_syncer_lives(hand, store, clock):
    syncer, either = hand("syncer", role="syncer"), hand("either", role="either")
    either.renew()
    either.train(4)
    either.tick()
    assert either.node.newest == -1
    syncer.member.lease.release()
    either.renew()
    either.tick()
    assert record_of(store, 0).closer == "either"


def test_one_that_has_claimed_a_round_closes_it_though_a_syncer_has_come_since(hand, store):
    either = hand("either", role="either")
    either.train(4)
    fail_once(either, "put", "theta-")
    with pytest.raises(TransientMailboxError):
        either.tick()
    syncer = hand("syncer", role="syncer")
    either.renew()
    syncer.tick()
    assert syncer.node.newest == -1
    either.tick()
    assert record_of(store, 0).closer == "either"


def test_learners_follow_the_others_where_the_algorithm_says_so(hand):
    algorithm = DiLoCo(10, 1, quorum_size=2, grace_seconds=0.0)
    early, late = hand("early", algorithm), hand("late", algorithm)
    early.renew()
    early.train(10)
    early.tick()
    late.tick()
    late.train(1)
    late.tick()
    assert len(late.told("published")) == 1


def test_a_run_without_a_version_that_can_be_read_is_not_begun_again_from_its_base(hand, store):
    closer = hand("closer")
    for _ in range(6):
        closer.train(4)
        closer.tick()
    for key in store.list("payloads/"):
        if "/theta-" in key:
            flip_bit(store, key)
    with pytest.raises(RuntimeError, match="no version of fragment 0 can be read, the newest of round 5"):
        hand("late")


def test_a_learner_that_jumps_past_a_round_it_cannot_read_does_not_wait_for_it(hand, store):
    algorithm = DiLoCo(3, 3, grace_seconds=0.0)
    closer, late = hand("closer", algorithm), hand("late", algorithm)
    for each in (closer, late):
        each.renew()
        each.train(1)
        each.node._publish()
    for _ in range(5):
        closer.tick()
        closer.train(1)
    flip_bit(store, record_of(store, 0).theta.key)
    flip_bit(store, record_of(store, 3).theta.key)
    late.tick()
    late.learner.move()
    assert late.learner.seen == closer.node.newest == 4
    assert not late.learner.is_waiting_for_commits
