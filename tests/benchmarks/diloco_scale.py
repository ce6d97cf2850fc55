"""DiLoCo at scale: the real protocol on a virtual clock, with learners that fail as a fleet of 1.2 million chips does.

    python tests/benchmarks/diloco_scale.py [--learners 8 16 64 256] [--learner-seconds 20000]

The model of failures: a chip fails once a year, and any failure stops the learner that it belongs to for 30 s, so that
a learner of N fails every 26.3 N s on average. Working is the share of all learners' time in which their chips work,
training that in which they train, and goodput that which went into steps that a commit holds. Beside it stands what
Decoupled DiLoCo (arXiv 2604.21428) publishes for 8 and 16 learners, whose own simulation may count otherwise. Requests
and bytes are what nodes send, leases included, where the store does not fail; the model has 52 bytes, so bytes are
those of the protocol itself.
"""

from __future__ import annotations

import argparse
import logging
import platform
import sys
import time
from dataclasses import fields, replace
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from diloco_simulation import Facts, Plan, Run, Scenario
from faulty_mailbox import Faults

from mixle.diloco.algorithm import DiLoCo
from mixle.diloco.mailbox import Traffic

CHIPS, YEAR_S, REPAIR_S = 1.2e6, 365.25 * 86400.0, 30.0
STEP_S, POLL_S, REQUEST_S = 0.25, 1.0, 0.03
ALGORITHM = DiLoCo(16, 4)
SHORTEST_S = 60.0
PUBLISHED = {8: 0.88, 16: 0.93}


class Fleet(Run):
    """Learners that fail at random times for as long as the run lasts."""

    until = 0.0

    def start(self, plan: Plan, name: str, *, life: int) -> None:
        super().start(plan, name, life=life)
        site = self.sites[-1]
        fails_at = self.world.now + self._rng.expovariate(CHIPS / YEAR_S / len(self.scenario.plans))
        self.world.call_at(fails_at, site.crash)

    @property
    def up(self) -> float:
        """Seconds in which learners were not being repaired, summed over them."""
        ends = [site.done_at if site.process.dead and site.done_at is not None else self.until for site in self.sites]
        return sum(end - site.born for end, site in zip(ends, self.sites, strict=True))


def fleet(learners: int, seconds: float) -> dict[str, float]:
    """Simulate a fleet and return its figures."""
    steps = round(2 * seconds / STEP_S)
    plans = tuple(
        Plan(f"n{i}", "both", 0.0, STEP_S, steps, returns_after=REPAIR_S, returns_as=f"n{i}") for i in range(learners)
    )
    scenario = Scenario(learners, "fleet", ALGORITHM, plans, POLL_S, Faults(), 0.0, 1.0, quick_s=REQUEST_S)
    run = Fleet(scenario)
    run.until = seconds
    run.world.run(until=seconds)
    if run.world.failures:
        raise run.world.failures[0][1]
    facts = Facts(run)
    merged = np.mean([sum(r.steps for r in facts.chain(fragment)) for fragment in range(ALGORITHM.fragments)])
    traffic = Traffic()
    for site in run.sites:
        if site.traffic is not None:
            sent = site.traffic()
            traffic = replace(
                traffic, **{f.name: getattr(traffic, f.name) + getattr(sent, f.name) for f in fields(sent)}
            )
    rounds = len(facts.records)
    requests = traffic.puts + traffic.gets + traffic.lists + traffic.deletes
    return {
        "learners": learners,
        "failures": sum(site.life > 0 for site in run.sites),
        "rounds": rounds,
        "possible": run.up / (learners * seconds),
        "goodput": float(merged) * STEP_S / (learners * seconds),
        "trained": sum(site.trained for site in run.sites) * STEP_S / (learners * seconds),
        "quorum": float(np.mean([len(record.contributions) for record in facts.records.values()])),
        "requests": requests / seconds / learners,
        "gets": traffic.gets / rounds / learners,
        "kilobytes": (traffic.bytes_up + traffic.bytes_down) / rounds / learners / 1e3,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--learners", type=int, nargs="+", default=[8, 16, 64, 256])
    parser.add_argument("--learner-seconds", type=float, default=2e4, help="virtual, of all learners together")
    arguments = parser.parse_args()
    logging.disable(logging.CRITICAL)
    print(
        f"{time.strftime('%Y-%m-%d')}, Python {platform.python_version()}, NumPy {np.__version__}, {platform.machine()}"
    )
    print(
        "learners  failures  rounds  working  training  goodput  published  learners  requests/s  GETs/round  kB/round"
    )
    print(
        "                                                                   a round   a learner   a learner  a learner"
    )
    for learners in arguments.learners:
        it = fleet(learners, max(arguments.learner_seconds / learners, SHORTEST_S))
        published = f"{PUBLISHED[learners]:.0%}" if learners in PUBLISHED else "-"
        print(
            f"{learners:8d}  {it['failures']:8.0f}  {it['rounds']:6.0f}  {it['possible']:7.1%}  {it['trained']:8.1%}  "
            f"{it['goodput']:7.1%}  {published:>9s}  {it['quorum']:8.1f}  {it['requests']:10.1f}  {it['gets']:10.1f}  "
            f"{it['kilobytes']:9.1f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
