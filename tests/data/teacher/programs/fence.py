"""Switch the model at random moments and look for a sample that is too old: ``fence.py --switches 1000``.

Two ranks with two DataLoader workers each (DistillDataLoader) and three workers. The model's number is its generation,
and every sample carries it. Each rank reads what generation it knows of before it takes a batch: nothing older may
come, and no batch may mix two. Rank 0 switches after a batch, at once after another switch, or while it waits.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3] / "support"))

from teacher_processes import teacher_processes, until

WORKERS = 3
SECONDS_A_SAMPLE = 0.001


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--switches", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    began = time.monotonic()
    with teacher_processes() as run:
        run.start("broker")
        for _ in range(WORKERS):
            run.start("worker", argument=SECONDS_A_SAMPLE)
        how = {"switches": options.switches, "seed": options.seed}
        ranks = [run.start("fenced", ready=False, rank=rank, **how) for rank in (0, 1)]
        reports = [process.communicate()[0].splitlines()[-1] for process in ranks]
        codes = [process.wait() for process in ranks]
        until(lambda: not run.segments(), f"the end of {run.segments()}", 20.0)
    print(f"{options.switches} switches in {time.monotonic() - began:.0f} s")
    for rank, (report, code) in enumerate(zip(reports, codes, strict=True)):
        print(f"rank {rank}: {report}{'' if code == 0 else f' (ended with {code})'}")
    return int(any(codes))


if __name__ == "__main__":
    raise SystemExit(main())
