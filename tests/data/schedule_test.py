"""The oracle lists windows one token at a time; tokens are their own positions, so that a batch tells what it is."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from mixle.data.schedule import Schedule
from mixle.data.token_windows import gather
from mixle.data.window_spec import WindowSpec


class Case(NamedTuple):
    block: int
    targets: str
    stride: int | None
    batch_size: int
    replicas: int
    n_tokens: int | None
    lengths: tuple[int, ...] | None
    epochs: int
    shuffle: bool
    seed: int
    sampling: str
    boundary: str | None

    def schedule(self) -> Schedule:
        block, targets, stride, *rest = self
        return Schedule(WindowSpec(block, targets, stride), *rest)


@st.composite
def cases(draw) -> Case:
    block = draw(st.integers(1, 9))
    targets = draw(st.sampled_from(["last", "all"]))
    stride = draw(st.none() | st.integers(block, block + 6)) if targets == "all" else None
    replicas = draw(st.integers(1, 5))
    sampling = draw(st.sampled_from(["sharded", "global"]))
    lengths = n_tokens = boundary = None
    if sampling == "sharded" and draw(st.booleans()):
        lengths = tuple(draw(st.lists(st.integers(0, 50), min_size=replicas, max_size=replicas)))
    else:
        n_tokens = draw(st.integers(0, 130))
        boundary = draw(st.sampled_from([None, "exclude", "overlap"])) if sampling == "sharded" else None
    epochs, shuffle, seed = draw(st.integers(0, 3)), draw(st.booleans()), draw(st.integers(-5, 10**12))
    batch_size = draw(st.integers(1, 7))
    case = Case(
        block, targets, stride, batch_size, replicas, n_tokens, lengths, epochs, shuffle, seed, sampling, boundary
    )
    assume(any(windows_of_replica(case, replica) for replica in range(replicas)))
    return case


def windows_of(tokens: list[int], case: Case) -> list[list[int]]:
    """List the targets of every window of a run of tokens."""
    windows = []
    for start in range(0, len(tokens), 1 if case.targets == "last" else case.stride or case.block):
        if case.targets == "last":
            trained = tokens[start + case.block : start + case.block + 1]
        else:
            trained = tokens[start + 1 : start + case.block + 1]
        if trained:
            windows.append(trained)
    return windows


def windows_of_replica(case: Case, replica: int) -> list[list[int]]:
    """List the windows, each as its targets, that a replica draws from."""
    if case.lengths is not None:
        return windows_of(list(range(case.lengths[replica])), case)
    tokens = list(range(case.n_tokens))
    if case.sampling == "global":
        return windows_of(tokens, case)
    if case.boundary != "overlap":
        return windows_of(share(tokens, case, replica), case)
    if case.targets == "last" or (case.stride or 0) > case.block:
        return share(windows_of(tokens, case), case, replica)
    mine = share(tokens[1:], case, replica)
    return [mine[start : start + case.block] for start in range(0, len(mine), case.block)]


def share(items: list, case: Case, replica: int) -> list:
    return items[replica * len(items) // case.replicas : (replica + 1) * len(items) // case.replicas]


def with_context(tokens: list[int], case: Case) -> int:
    """Count the targets that a run of tokens has when no stride skips any."""
    return sum(map(len, windows_of(tokens, case._replace(stride=None))))


def batches(case: Case, schedule: Schedule, epoch: int, step: int):
    """Yield what each replica trains at a step."""
    longest = case.n_tokens if case.lengths is None else max(case.lengths)
    tokens = np.arange(longest)
    for replica in range(case.replicas):
        yield gather(tokens, schedule.shards[replica], schedule.spec, schedule.window_indices(replica, epoch, step))


# ---- who trains what


@given(case=cases())
@settings(max_examples=400, deadline=None)
def test_each_epoch_trains_exactly_the_expected_targets_once(case):
    schedule = case.schedule()
    expected: Counter = Counter()
    for replica in range(1 if case.sampling == "global" else case.replicas):
        source = replica if case.lengths is not None else None
        expected.update((source, target) for window in windows_of_replica(case, replica) for target in window)
    for epoch in range(case.epochs):
        trained: Counter = Counter()
        for step in range(schedule.steps_per_epoch):
            for replica, batch in enumerate(batches(case, schedule, epoch, step)):
                source = replica if case.lengths is not None else None
                trained.update((source, target) for target in batch.targets[batch.mask].tolist())
        assert trained == expected
        assert schedule.lengths is not None or set(trained.values()) <= {1}


@given(case=cases())
@settings(max_examples=200, deadline=None)
def test_every_target_is_the_token_after_its_context(case):
    schedule = case.schedule()
    for step in range(schedule.steps_per_epoch):
        for inputs, targets, mask in batches(case, schedule, 0, step):
            if case.targets == "last":
                np.testing.assert_array_equal(inputs, targets - np.arange(case.block, 0, -1))
            else:
                np.testing.assert_array_equal((inputs + 1)[mask], targets[mask])
                assert not inputs[~mask].any()
                assert not targets[~mask].any()


@given(case=cases())
@settings(max_examples=300, deadline=None)
def test_every_rank_knows_the_real_targets_of_all_replicas_at_every_step(case):
    schedule = case.schedule()
    for epoch in (0, 7):
        for step in range(schedule.steps_per_epoch):
            real = [int(batch.mask.sum()) for batch in batches(case, schedule, epoch, step)]
            assert schedule.target_counts(epoch, step).tolist() == real
            assert schedule.global_targets(epoch, step) == sum(real)


@given(case=cases(), steps=st.integers(1, 4))
@settings(max_examples=100, deadline=None)
def test_targets_of_several_steps_together_stop_at_the_end_of_the_epoch(case, steps):
    schedule = case.schedule()
    each = [schedule.global_targets(1, step) for step in range(schedule.steps_per_epoch)]
    for first in range(0, schedule.steps_per_epoch, steps):
        assert schedule.global_targets(1, first, steps) == sum(each[first : first + steps])
    assert sum(each) == schedule.real_targets_per_epoch


# ---- the receipt


@given(case=cases())
@settings(max_examples=500, deadline=None)
def test_the_receipt_equals_a_count_of_windows_listed_one_by_one(case):
    schedule = case.schedule()
    if case.sampling == "global":
        whole = list(range(len(windows_of_replica(case, 0))))
        together = case.replicas * case.batch_size
        rounds = [whole[first : first + together] for first in range(0, len(whole), together)]
        counts = [
            sum(len(each[r * case.batch_size : (r + 1) * case.batch_size]) for each in rounds)
            for r in range(case.replicas)
        ]
        steps = len(rounds)
        trained = sum(map(len, windows_of_replica(case, 0)))
    else:
        counts = [len(windows_of_replica(case, replica)) for replica in range(case.replicas)]
        steps = max(len(range(0, count, case.batch_size)) for count in counts)
        trained = sum(sum(map(len, windows_of_replica(case, replica))) for replica in range(case.replicas))
    runs = [list(range(case.n_tokens))] if case.lengths is None else [list(range(each)) for each in case.lengths]
    trainable = sum(with_context(run, case) for run in runs)
    local = np.zeros(case.replicas, dtype=int)
    for epoch in range(case.epochs):
        for step in range(steps):
            local += [int(batch.mask.sum()) for batch in batches(case, schedule, epoch, step)]
    for replica in range(case.replicas):
        receipt = schedule.receipt(replica)
        slots = steps * case.batch_size * (1 if case.targets == "last" else case.block) * case.epochs
        excluded, skipped = receipt.pop("excluded_target_tokens"), receipt.pop("skipped_target_tokens")
        assert receipt == {
            "world_size": case.replicas,
            "epochs": case.epochs,
            "steps_per_epoch": steps,
            "window_counts_by_rank": tuple(counts),
            "global_real_target_tokens_per_epoch": trained,
            "local_masked_target_tokens": slots - local[replica],
            "policy": "pad-and-mask-to-global-max-steps",
        }
        assert excluded + skipped == (trainable - trained) * case.epochs
        if (case.stride or 0) <= case.block:
            assert skipped == 0
        if case.sampling == "global" or case.boundary == "overlap" or case.lengths is not None:
            assert excluded == 0


@pytest.mark.parametrize(
    ("targets", "block", "lost_per_boundary"), [("last", 4, 4), ("all", 4, 1), ("last", 1, 1), ("all", 1, 1)]
)
def test_excluding_loses_a_block_per_boundary_for_last_and_one_target_for_all(targets, block, lost_per_boundary):
    schedule = Schedule(WindowSpec(block, targets), 2, replicas=3, n_tokens=90, epochs=5)
    assert schedule.excluded_target_tokens == 2 * lost_per_boundary * 5


def test_what_a_stride_skips_is_told_from_what_a_boundary_excludes():
    schedule = Schedule(WindowSpec(2, "all", 10), 1, replicas=2, n_tokens=24, boundary="exclude")
    # Each half has 11 targets, of which its windows at 0 and 10 train 2 and 1.
    assert schedule.real_targets_per_epoch == 6
    assert schedule.excluded_target_tokens == 1
    assert schedule.skipped_target_tokens == 16


def test_masked_targets_under_global_sampling_follow_the_short_window_through_the_epochs():
    schedule = Schedule(WindowSpec(4, "all"), 1, replicas=3, n_tokens=23, epochs=4, sampling="global")
    by_epoch = [[schedule.local_target_tokens(replica, epoch=epoch) for replica in range(3)] for epoch in range(8)]
    assert len(set(map(tuple, by_epoch))) > 1
    assert schedule.masked_target_tokens(1, first_epoch=4) == sum(8 - by_epoch[epoch][1] for epoch in range(4, 8))


# ---- order


def global_batches(replicas: int, batch_size: int, epoch: int) -> list[list[int]]:
    schedule = Schedule(
        WindowSpec(5, "all"), batch_size, replicas=replicas, n_tokens=333, seed=8, sampling="global", epochs=2
    )
    return [
        np.concatenate([schedule.window_indices(replica, epoch, step) for replica in range(replicas)]).tolist()
        for step in range(schedule.steps_per_epoch)
    ]


@pytest.mark.parametrize("replicas", [2, 3, 4, 6, 12])
@pytest.mark.parametrize("epoch", [0, 5])
def test_equal_global_batches_are_the_same_whatever_the_number_of_replicas(replicas, epoch):
    assert global_batches(replicas, 12 // replicas, epoch) == global_batches(1, 12, epoch)


def test_epochs_and_replicas_have_orders_of_their_own_and_a_seed_fixes_them_all():
    def order(seed: int, replica: int, epoch: int) -> tuple[int, ...]:
        schedule = Schedule(WindowSpec(4), 100, replicas=2, lengths=(104, 104), seed=seed)
        return tuple(schedule.window_indices(replica, epoch, 0).tolist())

    arguments = [(0, 0, 0), (0, 1, 0), (0, 0, 1), (1, 0, 0)]
    assert len({order(*each) for each in arguments}) == len(arguments)
    assert [order(*each) for each in arguments] == [order(*each) for each in arguments]


def test_steps_may_be_asked_for_in_any_order():
    schedule = Schedule(WindowSpec(3), 1000, n_tokens=20_003, seed=4)
    steps = [7, 3, 19, 4, 0, 7]
    fresh = [Schedule(WindowSpec(3), 1000, n_tokens=20_003, seed=4).window_indices(0, 2, step) for step in steps]
    for step, expected in zip(steps, fresh, strict=True):
        np.testing.assert_array_equal(schedule.window_indices(0, 2, step), expected)


def test_without_shuffle_windows_come_in_order_in_every_epoch():
    schedule = Schedule(WindowSpec(4), 3, n_tokens=12, shuffle=False)
    for epoch in (0, 1):
        assert [schedule.window_indices(0, epoch, step).tolist() for step in range(3)] == [[0, 1, 2], [3, 4, 5], [6, 7]]


def test_a_replica_without_windows_left_trains_nothing():
    schedule = Schedule(WindowSpec(4), 2, replicas=2, lengths=(2, 12))
    assert schedule.steps_per_epoch == 4
    assert schedule.window_indices(0, 0, 3).shape == (0,)
    assert schedule.target_counts(0, 3).tolist() == [0, 2]


def test_a_schedule_over_a_trillion_tokens_is_computed_at_once():
    schedule = Schedule(WindowSpec(1024, "all"), 64, replicas=512, n_tokens=10**12 + 1, boundary="overlap")
    assert schedule.real_targets_per_epoch == 10**12
    assert schedule.target_counts(0, schedule.steps_per_epoch - 1).shape == (512,)
    assert schedule.window_indices(511, 3, 17).shape == (64,)


# ---- refusals


def test_the_case_in_which_no_shard_has_a_window_names_the_ranks_and_what_to_do():
    with pytest.raises(ValueError, match=r"block=16 .* ranks 0, 1 \(16, 16 of 32 tokens\)") as refusal:
        Schedule(WindowSpec(16), 4, replicas=2, n_tokens=32)
    assert 'boundary="overlap" trains all 16' in str(refusal.value)
    assert Schedule(WindowSpec(16), 4, replicas=2, n_tokens=32, boundary="overlap").real_targets_per_epoch == 16


def test_one_shard_with_a_window_is_enough():
    schedule = Schedule(WindowSpec(16), 4, replicas=2, n_tokens=33)
    assert schedule.window_counts_by_replica == (0, 1)
    assert schedule.real_targets_per_epoch == 1


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"n_tokens": 0}, ValueError, "token_ids is empty: 0 tokens, and block=8 needs 9"),
        ({"n_tokens": 8}, ValueError, "8 tokens are too short for one window: block=8 .* needs 9"),
        ({"n_tokens": 1, "spec": WindowSpec(8, "all")}, ValueError, "1 tokens are too short .* block=8 .* needs 2"),
        ({"lengths": (3, 8), "replicas": 2}, ValueError, "8 tokens are too short for one window: block=8"),
        ({"lengths": (30, 30)}, ValueError, r"lengths=\(30, 30\) must have one length for each of replicas=1"),
        ({"lengths": (30.0,)}, TypeError, r"lengths=30\.0 must be an integer"),
        ({"lengths": (30,), "sampling": "global"}, ValueError, 'sampling="global" .* not shard_by_rank=False'),
        ({"lengths": (30,), "boundary": "overlap"}, ValueError, 'boundary="overlap" .* shard_by_rank=False'),
        ({"sampling": "global", "boundary": "exclude"}, ValueError, "boundary='exclude' does not apply"),
        ({"sampling": "global", "boundary": "overlap"}, ValueError, "boundary='overlap' does not apply"),
        ({"sampling": "golbal"}, ValueError, "sampling='golbal' must be .*did you mean 'global'"),
        ({"boundary": "overlapp"}, ValueError, "boundary='overlapp' must be .*did you mean 'overlap'"),
        ({"batch_size": 0}, ValueError, "batch_size=0 must be at least 1"),
        ({"batch_size": True}, TypeError, "batch_size=True must be an integer"),
        ({"replicas": 1.5}, TypeError, r"replicas=1\.5 must be an integer"),
        ({"epochs": -1}, ValueError, "epochs=-1 must be at least 0"),
        ({"shuffle": "false"}, TypeError, "shuffle='false' must be True or False"),
        ({"seed": "0"}, TypeError, "seed='0' must be an integer"),
        ({"spec": 8}, TypeError, "spec=8 must be a WindowSpec"),
        ({"n_tokens": None}, TypeError, "give either n_tokens"),
    ],
)
def test_arguments_that_cannot_be_are_refused_by_name_and_value(arguments, error, message):
    usual = {"spec": WindowSpec(8), "batch_size": 2, "n_tokens": None if "lengths" in arguments else 100}
    with pytest.raises(error, match=message):
        Schedule(**{**usual, **arguments})


def test_a_length_of_its_own_or_a_share_not_both():
    with pytest.raises(TypeError, match="give either n_tokens"):
        Schedule(WindowSpec(8), 2, n_tokens=100, lengths=(100,))


@pytest.mark.parametrize("step", [-1, 46])
def test_steps_outside_the_epoch_are_refused(step):
    schedule = Schedule(WindowSpec(8), 2, n_tokens=100)
    with pytest.raises(IndexError, match=rf"step={step} is outside \[0, 46\)"):
        schedule.window_indices(0, 0, step)
    with pytest.raises(IndexError, match=rf"step={step} is outside \[0, 46\)"):
        schedule.target_counts(0, step)


def test_no_epochs_are_a_schedule_of_nothing():
    receipt = Schedule(WindowSpec(8), 2, n_tokens=100, epochs=0).receipt(0)
    assert receipt["local_masked_target_tokens"] == receipt["excluded_target_tokens"] == 0
