"""Whole runs on a virtual clock, hundreds of them; `diloco_simulation.check` says what is checked of each."""

from __future__ import annotations

import numpy as np
import pytest
from diloco_simulation import KINDS, SHAPES, Facts, Plan, Run, Scenario, check, scenario, simulate
from faulty_mailbox import Faults
from virtual_processes import Process, World

from mixle.diloco.algorithm import DiLoCo

SEEDS_EACH = 20


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_every_run_of_a_kind_keeps_what_every_run_must(kind):
    for number in range(SEEDS_EACH):
        simulate(number * len(KINDS) + KINDS.index(kind))


def test_a_seed_gives_the_same_run_every_time():
    histories = [Run(scenario(7)).go().ledger for _ in range(2)]
    assert histories[0].commits == histories[1].commits
    assert [key for key in histories[0].history if "leases/" not in key] == [
        key for key in histories[1].history if "leases/" not in key
    ]


def test_the_kinds_of_scenario_are_what_they_say():
    drawn = [scenario(seed) for seed in range(20 * len(KINDS))]
    by_kind = {kind: [each for each in drawn if each.kind == kind] for kind in KINDS}
    assert all(not any((each.strays, each.flips, each.faults.lost, each.slow_share)) for each in by_kind["calm"])
    assert any(plan.crash_at for each in by_kind["crash"] for plan in each.plans)
    assert any(plan.pauses for each in by_kind["pause"] for plan in each.plans)
    assert all(each.faults.refused and each.faults.delayed for each in by_kind["store"])
    assert all(each.strays for each in by_kind["strays"]) and all(each.flips for each in by_kind["flips"])
    assert {plan.role for each in drawn for plan in each.plans} == {"both", "learner", "syncer", "either"}


def test_threads_take_turns_in_the_order_of_virtual_time():
    world, seen = World(0), []
    for name, pause in (("slow", 3.0), ("quick", 1.0)):
        process = Process(world, name)

        def work(name=name, pause=pause):
            for _ in range(3):
                world.elapse(pause)
                seen.append((world.now, name))

        process.spawn(work)
    assert world.run(until=100.0)
    assert [at for at, _ in seen] == [1.0, 2.0, 3.0, 3.0, 6.0, 9.0]
    assert [name for _, name in seen[:2] + seen[4:]] == ["quick", "quick", "slow", "slow"]


def test_a_killed_process_does_nothing_more():
    world, seen = World(0), []
    process = Process(world, "victim")

    def work():
        while True:
            world.elapse(1.0)
            seen.append(world.now)

    process.spawn(work)
    world.call_at(2.5, process.kill)
    assert world.run(until=100.0)
    assert seen == [1.0, 2.0]


NOISE = 0.5
WEIGHTS = {name: np.random.default_rng(index).normal(size=shape) for index, (name, shape) in enumerate(SHAPES.items())}


class Regression(Run):
    """Every site trains a linear regression by SGD, on samples of its own from one distribution."""

    def train(self, site):
        rng = np.random.default_rng([self.scenario.seed, int(site.process.name[1:]), site.life, site.trained])
        x = rng.normal(size=(512, sum(array.size for array in WEIGHTS.values())))
        missing = np.concatenate([(WEIGHTS[name] - array).ravel() for name, array in site.arrays.items()])
        gradient = -x.T @ (x @ missing + NOISE * rng.normal(size=512)) / 512
        for array in site.arrays.values():
            part, gradient = np.split(gradient, [array.size])
            array -= (0.02 * part.reshape(array.shape)).astype(np.float32)

    def loss(self):
        """Return the expected squared error at the newest version of every fragment."""
        facts = Facts(self)
        newest = {record.fragment: round_ for round_, record in sorted(facts.records.items())}
        theta = {name: array for f, round_ in newest.items() for name, array in facts.theta(f, round_).items()}
        return NOISE**2 + sum(float(np.sum((theta[name] - weight) ** 2)) for name, weight in WEIGHTS.items())


def learning(seed, **trouble):
    algorithm = DiLoCo(10, 2, grace_seconds=1.0, outer_momentum=0.5)
    plans = tuple(
        Plan(f"n{i}", "both", 0.0, 0.1, 300, returns_after=2.0, returns_as=f"n{i}", **trouble.get(f"n{i}", {}))
        for i in range(3)
    )
    return Regression(Scenario(seed, "calm", algorithm, plans, 0.1, trouble.get("faults", Faults()), 0.0, 1.0)).go()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_faults_leave_the_loss_of_a_convex_problem_within_two_per_cent_of_the_run_without(seed):
    calm = learning(seed)
    rough = learning(
        seed,
        n0={"crash_at": 300 + 100 * seed},
        n1={"pauses": ((200, 6.0), (700, 2.0))},
        faults=Faults(refused=0.05, lost=0.05, delayed=0.02, repeated=0.02),
    )
    assert rough.crashed and calm.loss() < 0.05 * sum(float(np.sum(weight**2)) for weight in WEIGHTS.values())
    assert rough.loss() <= 1.02 * calm.loss()


def test_the_check_of_a_run_finds_a_step_that_was_merged_twice():
    run = Run(scenario(0)).go()
    key = next(key for key in sorted(run.ledger.history) if "/delta-" in key)
    data = bytearray(run.ledger.history[key])
    data[-2] ^= 0x20
    run.ledger.history[key] = bytes(data)
    with pytest.raises(AssertionError):
        check(run)
