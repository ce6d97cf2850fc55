"""The training thread's half of a learner, apart from any store."""

from __future__ import annotations

import numpy as np
import pytest
from virtual_clock import VirtualClock

from mixle.diloco.algorithm import DiLoCo
from mixle.diloco.alignment import Adaptive, Blend, Carry, Overwrite
from mixle.diloco.learner import Landing, Learner
from mixle.diloco.parameters import NumpyParameters


class Trainee:
    """A learner of two parameters, one in each fragment, whose every step adds 1 to both."""

    def __init__(self, algorithm, clock=None):
        self.clock = VirtualClock() if clock is None else clock
        self.arrays = {"a": np.zeros(2, np.float32), "b": np.zeros(3, np.float32)}
        zeros = [{"a": np.zeros(2, np.float32)}, {"b": np.zeros(3, np.float32)}]
        self.learner = Learner(
            NumpyParameters(self.arrays),
            algorithm,
            [("a",), ("b",)],
            anchors=zeros,
            versions=[-2, -1],
            seen=-1,
            clock=self.clock,
        )

    def train(self, steps, samples=2):
        for _ in range(steps):
            for array in self.arrays.values():
                array += 1.0
            self.learner.step(samples)

    def land(self, round_, value, *, taken=None, cosine=None, broken=None):
        name = "ab"[round_ % 2]
        theta = None if value is None else {name: np.full_like(self.arrays[name], value)}
        self.learner.land([Landing(round_, round_ % 2, theta, taken, cosine, broken)])
        self.learner.move()


def test_fragments_are_copied_in_turn_when_they_are_due():
    trainee = Trainee(DiLoCo(4, 2))
    trainee.train(5)
    first, second = trainee.learner.captured
    assert (first.round, first.fragment, first.version, first.totals) == (0, 0, -2, (4, 2))
    assert (second.round, second.fragment, second.version, second.totals) == (1, 1, -1, (8, 4))
    assert np.all(first.theta["a"] == 2.0) and np.all(second.theta["b"] == 4.0)
    assert (first.work.steps, first.work.tokens) == (2, 4)


def test_a_learner_goes_no_further_than_its_lead_ahead_of_the_commits():
    trainee = Trainee(DiLoCo(2, 2, in_flight=1))
    trainee.train(20)
    assert [captured.round for captured in trainee.learner.captured] == [0]
    trainee.land(0, 1.0, taken=0)
    trainee.train(1)
    assert [captured.round for captured in trainee.learner.captured] == [0, 1]


@pytest.mark.parametrize(
    ("alignment", "taken", "expected"),
    [
        (Carry(), 0, 10.0 + 3.0),
        (Carry(), None, 10.0 + 5.0),
        (Overwrite(), 0, 10.0),
        (Blend(0.25), 0, 0.25 * 5.0 + 0.75 * 10.0),
    ],
)
def test_a_commit_moves_its_fragment_as_the_alignment_says_and_no_other(alignment, taken, expected):
    trainee = Trainee(DiLoCo(4, 2, alignment=alignment))
    trainee.train(5)  # the snapshot of round 0 was taken after two
    trainee.land(0, 10.0, taken=taken)
    assert np.all(trainee.arrays["a"] == expected) and np.all(trainee.arrays["b"] == 5.0)


@pytest.mark.parametrize(("alignment", "taken", "left"), [(Carry(), 0, 3), (Carry(), None, 5), (Overwrite(), None, 0)])
def test_steps_count_again_from_where_the_parameters_do(alignment, taken, left):
    trainee = Trainee(DiLoCo(4, 2, alignment=alignment))
    trainee.train(5)
    trainee.land(0, 10.0, taken=taken)
    assert trainee.learner.unmerged_steps == [left, 5]


def test_adaptive_alignment_follows_the_agreement_of_the_learners():
    trainee = Trainee(DiLoCo(2, 2, alignment=Adaptive()))
    trainee.train(3)
    trainee.land(0, 10.0, cosine=0.1)
    assert np.all(trainee.arrays["a"] == 10.0)
    trainee.land(1, 10.0, cosine=0.9)
    assert np.all(trainee.arrays["b"] == 13.0)


def test_a_commit_that_cannot_be_read_moves_nothing_and_its_snapshot_waits_for_the_next():
    trainee = Trainee(DiLoCo(4, 2))
    trainee.train(5)
    trainee.land(0, None)
    assert trainee.learner.seen == 0 and np.all(trainee.arrays["a"] == 5.0)
    trainee.land(2, 10.0, taken=0)
    assert np.all(trainee.arrays["a"] == 13.0) and trainee.learner.unmerged_steps == [3, 5]


def test_broken_parameters_go_back_to_their_anchors_once_however_many_rounds_say_so():
    trainee = Trainee(DiLoCo(4, 2))
    trainee.train(4)
    trainee.arrays["b"][0] = np.nan
    trainee.land(0, 10.0, broken=0)
    assert np.all(trainee.arrays["a"] == 10.0) and np.all(trainee.arrays["b"] == 0.0)
    trainee.train(1)
    trainee.land(1, 20.0, broken=1)
    assert np.all(trainee.arrays["a"] == 11.0) and np.all(trainee.arrays["b"] == 21.0)


def test_the_classic_barrier_waits_at_every_snapshot_until_its_commit_is_there():
    clock = VirtualClock()
    trainee = Trainee(DiLoCo(2, 2, overlap_steps=0), clock)
    clock.call_at(7.0, lambda: trainee.learner.land([Landing(0, 0, {"a": np.ones(2, np.float32)}, 0, None, None)]))
    trainee.train(1)
    assert 7.0 <= clock.monotonic() < 8.0
    assert np.all(trainee.arrays["a"] == 1.0)


def test_the_last_snapshots_are_one_of_every_fragment():
    trainee = Trainee(DiLoCo(10, 2))
    trainee.train(3)
    assert trainee.learner.capture_rest()
    assert [(each.round, each.work.steps, each.final) for each in trainee.learner.captured] == [
        (0, 3, True),
        (1, 3, True),
    ]
    trainee.land(0, 3.0, taken=0)
    trainee.land(1, 3.0, taken=1)
    assert trainee.learner.unmerged_steps == [0, 0] and not trainee.learner.capture_rest()


def test_flushing_gives_up_when_its_time_is_over():
    trainee = Trainee(DiLoCo(10, 2))
    trainee.train(3)
    trainee.learner.flush(30.0)
    assert 30.0 <= trainee.clock.monotonic() < 31.0 and trainee.learner.unmerged_steps == [3, 3]


def test_what_stopped_the_node_is_raised_where_the_model_trains():
    trainee = Trainee(DiLoCo(10, 2, overlap_steps=0))
    trainee.learner.fail(OSError("gone"))
    with pytest.raises(OSError, match="gone"):
        trainee.train(1)


class Interrupted(NumpyParameters):
    """Parameters whose next move ends between its two passes, as Ctrl-C ends it."""

    def __init__(self, arrays):
        super().__init__(arrays)
        self.is_next = False

    def align(self, committed, reference, how):
        if self.is_next:
            self.is_next = False
            for name in committed:
                self._arrays[name] -= reference[name]
            raise KeyboardInterrupt
        super().align(committed, reference, how)


@pytest.mark.parametrize("alignment", [Carry(), Blend(0.5)])
def test_a_move_that_was_interrupted_is_finished_by_the_commit_itself(alignment, caplog):
    trainee = Trainee(DiLoCo(4, 2, alignment=alignment))
    parameters = trainee.learner._parameters = Interrupted(trainee.arrays)
    trainee.train(3)
    parameters.is_next = True
    with pytest.raises(KeyboardInterrupt):
        trainee.land(0, 7.0, taken=0)
    trainee.learner.move()
    assert np.all(trainee.arrays["a"] == 7.0) and np.all(trainee.arrays["b"] == 3.0)
    assert "the move to round 0 was interrupted" in caplog.text
    assert trainee.learner.unmerged_steps == [0, 3]
    trainee.train(1)
    trainee.land(1, 9.0)
    trainee.land(2, 20.0)
    assert trainee.arrays["a"][0] == (21.0 if alignment == Carry() else 14.0)  # the moves after it are as ever


@pytest.mark.parametrize("samples", [0, -1, 1.0, True, "2", None])
def test_samples_that_are_no_positive_integer_count_nothing(samples):
    trainee = Trainee(DiLoCo(2, 2))
    with pytest.raises((TypeError, ValueError), match="samples"):
        trainee.train(1, samples)
    assert trainee.learner.tally.steps == 0 and not trainee.learner.captured


def test_the_speed_of_a_snapshot_is_the_median_time_of_a_step_without_its_waits():
    clock = VirtualClock()
    trainee = Trainee(DiLoCo(6, 2), clock)
    for seconds in (60.0, 2.0, 2.0):
        clock.sleep(seconds)
        trainee.train(1)
    assert trainee.learner.captured[0].seconds_per_step == 2.0


@pytest.mark.parametrize("alignment", [Carry(), Blend(0.5), Adaptive()])
def test_a_commit_overwrites_the_buffers_whatever_becomes_of_the_weights(alignment):
    arrays = {"var": np.full(2, 100.0, np.float32), "w": np.zeros(2, np.float32)}
    learner = Learner(
        NumpyParameters(arrays, buffers=["var"]),
        DiLoCo(2, 1, alignment=alignment),
        [("var", "w")],
        anchors=[{name: array.copy() for name, array in arrays.items()}],
        versions=[-1],
        seen=-1,
        buffers=frozenset({"var"}),
        clock=VirtualClock(),
    )
    learner.step(1)
    learner.step(1)
    arrays["var"][:] = 1.0  # carried on, this would be 50 + 1 - 100
    arrays["w"] += 3.0
    learner.step(1)
    learner.land([Landing(0, 0, {"var": np.full(2, 50.0, np.float32), "w": np.zeros(2, np.float32)}, 0, 1.0, None)])
    learner.move()
    np.testing.assert_array_equal(arrays["var"], [50.0, 50.0])
    assert (arrays["w"] > 0).all()
