"""The parts put together, without a mailbox, against algorithms and totals that are known beforehand."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mixle.diloco.algorithm import DiLoCo
from mixle.diloco.alignment import Carry, Overwrite, align
from mixle.diloco.merge import Rda, WeightedMean, clip_factors, merge_deltas, norm
from mixle.diloco.outer import final_step, nesterov_step
from mixle.diloco.weights import Tally, Work, shares

Tensors = dict[str, np.ndarray]


def close_round(algorithm: DiLoCo, theta: Tensors, momentum: Tensors, deltas: list[Tensors], works: list[Work]) -> None:
    factors = clip_factors([norm(delta) for delta in deltas], [work.steps for work in works])
    merged = merge_deltas(algorithm.merge, deltas, shares(works), factors=factors)
    for name, delta in merged.items():
        nesterov_step(
            theta[name],
            momentum[name],
            delta,
            outer_lr=algorithm.outer_lr,
            outer_momentum=algorithm.outer_momentum,
        )


def sgd_step(theta: np.ndarray, target: np.ndarray) -> None:
    """One inner step on half the squared distance to a target."""
    theta -= np.float32(0.1) * (theta - target)


@pytest.mark.parametrize("outer", [(0.7, 0.9), (1.0, 0.0)])
def test_one_fragment_behind_a_barrier_is_classical_diloco(outer):
    outer_lr, outer_momentum = outer
    algorithm = DiLoCo(
        5,
        1,
        overlap_steps=0,
        alignment=Overwrite(),
        merge=WeightedMean(),
        outer_lr=outer_lr,
        outer_momentum=outer_momentum,
        quorum_size=3,
    )
    targets = [np.random.default_rng(seed).normal(size=6).astype(np.float32) for seed in range(3)]
    theta, momentum = {"w": np.zeros(6, np.float32)}, {"w": np.zeros(6, np.float32)}
    learners = [theta["w"].copy() for _ in targets]
    for round_ in range(8):
        deltas = []
        for local, target in zip(learners, targets, strict=True):
            steps = 0
            while not algorithm.schedule.is_due(round_, steps=steps, others=0):
                sgd_step(local, target)
                steps += 1
            deltas.append({"w": theta["w"] - local})
            assert algorithm.schedule.must_wait(0)
        close_round(algorithm, theta, momentum, deltas, [Work(5 * 8, 5)] * 3)
        for local in learners:
            align(local, theta["w"], None, algorithm.alignment)

    # The same by the paper: H inner steps in float64, the mean of what they moved, one Nesterov step.
    expected, m = np.zeros(6), np.zeros(6)
    for _ in range(8):
        moved = []
        for target in targets:
            local = expected.copy()
            for _ in range(5):
                local -= 0.1 * (local - target)
            moved.append(expected - local)
        delta = np.mean(moved, axis=0)
        m = outer_momentum * m + delta
        expected = expected - outer_lr * (delta + outer_momentum * m)
    np.testing.assert_allclose(theta["w"], expected, atol=2e-6)


@pytest.mark.parametrize("merge", [Rda(), WeightedMean()])
@pytest.mark.parametrize("fragments", [1, 3])
def test_one_learner_without_outer_optimizer_trains_as_if_alone(merge, fragments):
    algorithm = DiLoCo(
        7, fragments, alignment=Overwrite(), overlap_steps=0, outer_lr=1.0, outer_momentum=0.0, merge=merge
    )
    target = np.random.default_rng(1).normal(size=(fragments, 4)).astype(np.float32)
    theta, momentum = np.zeros((fragments, 4), np.float32), np.zeros((fragments, 4), np.float32)
    local, alone = theta.copy(), theta.copy()
    for round_ in range(4 * fragments):
        fragment = algorithm.schedule.fragment(round_)
        for _ in range(algorithm.schedule.gap(round_)):
            sgd_step(local, target)
            sgd_step(alone, target)
        delta = {"w": theta[fragment] - local[fragment]}
        close_round(algorithm, {"w": theta[fragment]}, {"w": momentum[fragment]}, [delta], [Work(1, 1)])
        align(local[fragment], theta[fragment], None, algorithm.alignment)
        np.testing.assert_allclose(local, alone, atol=1e-6)
        np.testing.assert_allclose(theta[fragment], alone[fragment], atol=1e-6)


@dataclass
class Learner:
    """A learner whose steps add known whole numbers, so that what a commit holds can be told exactly."""

    algorithm: DiLoCo
    theta: np.ndarray
    tally: Tally = field(init=False)
    anchor: np.ndarray = field(init=False)
    published: int = -1
    seen: int = -1
    steps: int = 0
    snapshots: dict[int, tuple[np.ndarray, tuple[int, int]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.tally = Tally(self.algorithm.fragments)
        self.anchor = self.theta.copy()

    def step(self, increment: int) -> tuple[int, np.ndarray, Work] | None:
        """Take a step and return the round, the delta and its work if the schedule says to publish."""
        schedule = self.algorithm.schedule
        self.theta += np.float32(increment)
        self.tally.add(1)
        self.steps += 1
        round_ = schedule.next_round(published=self.published, seen=self.seen)
        if round_ is None or not schedule.is_due(round_, steps=self.steps, others=0):
            return None
        self.published, self.steps = round_, 0
        fragment = schedule.fragment(round_)
        self.snapshots[round_] = self.theta[fragment].copy(), self.tally.now()
        return round_, self.anchor[fragment] - self.theta[fragment], self.tally.work(fragment)

    def apply(self, round_: int, committed: np.ndarray, *, taken: bool) -> None:
        fragment = self.algorithm.schedule.fragment(round_)
        snapshot, totals = self.snapshots.pop(round_)
        align(self.theta[fragment], committed, snapshot if taken else self.anchor[fragment], Carry())
        if taken:
            self.tally.begin(fragment, totals)
        self.anchor[fragment] = committed
        self.seen = round_


@given(
    sync_every=st.integers(1, 8),
    fragments=st.integers(1, 4),
    in_flight=st.integers(1, 5),
    steps=st.lists(st.tuples(st.integers(-9, 9), st.booleans(), st.booleans()), min_size=40, max_size=80),
)
def test_carrying_loses_no_step_and_counts_none_twice(sync_every, fragments, in_flight, steps):
    """Commits land late or at once, and some rounds are closed without this learner's snapshot."""
    fragments = min(fragments, sync_every)
    algorithm = DiLoCo(sync_every, fragments, in_flight=in_flight, outer_lr=1.0, outer_momentum=0.0)
    theta, momentum = np.zeros((fragments, 2), np.float32), np.zeros((fragments, 2), np.float32)
    learner = Learner(algorithm, theta.copy())
    waiting: list[tuple[int, np.ndarray, Work]] = []
    committed_steps = [0] * fragments
    for increment, lands, taken in steps:
        publication = learner.step(increment)
        if publication is not None:
            waiting.append(publication)
        if lands and waiting:
            round_, delta, work = waiting.pop(0)
            fragment = algorithm.schedule.fragment(round_)
            if taken:
                close_round(algorithm, {"w": theta[fragment]}, {"w": momentum[fragment]}, [{"w": delta}], [work])
                committed_steps[fragment] += work.steps
            learner.apply(round_, theta[fragment], taken=taken)
    # The learner leaves: its open rounds are dropped, and what is in no commit goes into a final one per fragment.
    for fragment in range(fragments):
        work = learner.tally.work(fragment)
        if work is not None:
            final_step(theta[fragment], learner.anchor[fragment] - learner.theta[fragment])
            committed_steps[fragment] += work.steps
    np.testing.assert_array_equal(theta, np.full((fragments, 2), sum(step[0] for step in steps), np.float32))
    assert committed_steps == [len(steps)] * fragments


def test_a_learner_a_million_times_off_moves_the_run_a_documented_bit_only():
    algorithm = DiLoCo(5, 1, merge=WeightedMean(), outer_lr=1.0, outer_momentum=0.0)
    honest = [{"w": np.full(4, 0.5, np.float32)} for _ in range(3)]
    broken = {"w": np.full(4, -0.5e6, np.float32)}
    theta, momentum = {"w": np.zeros(4, np.float32)}, {"w": np.zeros(4, np.float32)}
    close_round(algorithm, theta, momentum, [*honest, broken], [Work(40, 5)] * 4)
    np.testing.assert_allclose(theta["w"], np.full(4, -(3 * 0.5 - 10 * 0.5) / 4), rtol=1e-6)
