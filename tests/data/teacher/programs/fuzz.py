"""Send messages that make no sense to all four sockets of a broker: ``fuzz.py --messages 100000``.

The broker must live, its memory stay flat, and a student and a worker of the honest kind be served all along.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3] / "support"))

from teacher_fuzz import fuzz
from teacher_processes import PATTERN, read, teacher_processes

from mixle.data.teacher.run import Endpoints
from mixle.data.teacher.stats_client import StatsClient
from mixle.data.teacher.student import StudentClient

ROUNDS = 10
GROWTH_MIB = 8.0


def mebibytes(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize() / 2**20


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=100_000)
    options = parser.parse_args()
    with teacher_processes() as run:
        broker = run.start("broker")
        run.start("worker")
        endpoints = Endpoints(run.frontend, run.backend, run.control, run.pub)
        numbers: list[tuple[int, int]] = []
        sizes = []
        with StudentClient(0, 8, PATTERN, **run.client) as client, StatsClient(run.frontend) as witness:
            for seed in range(ROUNDS):
                began = time.monotonic()
                fuzz(endpoints, options.messages // ROUNDS, seed=seed)
                for _ in range(100):
                    ref = client.request_sample(60_000)
                    assert ref is not None, "the honest student got nothing for a minute"
                    numbers += read(ref.tensors())
                    ref.release()
                sizes.append(mebibytes(broker.pid))
                stats = witness.ask()
                print(
                    f"{(seed + 1) * options.messages // ROUNDS:>8} sent, {time.monotonic() - began:5.1f} s, "
                    f"{sizes[-1]:5.1f} MiB, garbage {stats.garbage}, strangers {stats.strangers}"
                )
        alive = broker.poll() is None
    assert alive and stats.internal_errors == 0 and len(set(numbers)) == len(numbers)
    assert sizes[-1] - sizes[0] < GROWTH_MIB, f"the broker grew from {sizes[0]:.1f} to {sizes[-1]:.1f} MiB"
    print(f"{options.messages} messages; the broker has {sizes[-1]:.1f} MiB and serves")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
