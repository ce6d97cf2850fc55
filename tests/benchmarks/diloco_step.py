"""What a training step pays for DiLoCo: python tests/benchmarks/diloco_step.py

A torch model of 16 MB (float32, 4 fragments of 4 MB) takes steps, a matrix product of about 1 ms each, while the
session's thread publishes, closes and commits against a folder. Steps that copy or move a fragment are told apart by
what the session did in them, and reported on their own, beside one plain copy of as many bytes. Times are wall times of
``step()``: where other programs keep the CPUs busy, their turns are in them.
"""

from __future__ import annotations

import os
import platform
import statistics
import tempfile
import time

import numpy as np
import torch

from mixle.diloco import Carry, DiLoCo, Overwrite, Session

STEPS, FRAGMENTS, ROWS, SIDE = 4000, 4, 1024, 320


def percentiles(seconds: list[float]) -> str:
    if not seconds:
        return "none"
    ordered = sorted(seconds)
    p99 = ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
    middle = statistics.median(ordered)
    return f"median {middle * 1e6:8.1f}  p99 {p99 * 1e6:8.1f}  max {ordered[-1] * 1e6:8.1f} us   ({len(ordered)} steps)"


def measure(alignment: object) -> None:
    torch.manual_seed(0)
    square = torch.randn(SIDE, SIDE)
    model = torch.nn.Sequential(*[torch.nn.Linear(ROWS, ROWS, bias=False) for _ in range(FRAGMENTS)])
    algorithm = DiLoCo(200, FRAGMENTS, alignment=alignment)
    taken: dict[str, list[float]] = {
        "ordinary steps": [],
        "that copy 4 MB": [],
        "that move 4 MB": [],
        "that do both": [],
    }
    with tempfile.TemporaryDirectory() as folder:
        session = Session(model, algorithm=algorithm, mailbox=f"file://{folder}", poll_interval=0.05, callbacks=())
        learner = session._learner
        for _ in range(STEPS):
            torch.mm(square, square)
            published, seen = learner.published, learner.seen
            started = time.perf_counter()
            session.step(8)
            took = time.perf_counter() - started
            did = (learner.published != published) + 2 * (learner.seen != seen)
            taken[list(taken)[did]].append(took)
        session.close()
    print(f"{type(alignment).__name__}")
    for name, seconds in taken.items():
        print(f"  {name:16s} {percentiles(seconds)}")


def main() -> None:
    torch.set_num_threads(1)
    print(
        f"Python {platform.python_version()}, torch {torch.__version__}, numpy {np.__version__}, {os.cpu_count()} CPUs"
    )
    source = torch.zeros(ROWS, ROWS)
    copies = []
    for _ in range(50):
        started = time.perf_counter()
        source.clone()
        copies.append(time.perf_counter() - started)
    print(f"one copy of 4 MB   {percentiles(copies)}")
    for alignment in (Carry(), Overwrite()):
        measure(alignment)


if __name__ == "__main__":
    main()
