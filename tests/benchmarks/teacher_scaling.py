"""Samples a second of a teacher that sleeps 20 ms a sample, with 1 to 20 workers and 32 slots, beside what is possible.

    python tests/benchmarks/teacher_scaling.py [--seconds 4]

A worker makes 50 a second at most, and on a busy machine fewer: what the same generators make when nobody asks, called
in a loop by as many threads, is measured before and after. The broker is a process of its own.
"""

from __future__ import annotations

import argparse
import itertools
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import torch
from teacher_processes import PATTERN, read, teacher_processes

from mixle.data.teacher.dataset import DistillIterableDataset
from mixle.data.teacher.loader import DistillDataLoader
from mixle.data.teacher.student import StudentClient

SLEEP_S = 0.02
SLOTS = 32
THREADS = 5
BATCH = 4


def by_client(client: StudentClient, dataset: DistillIterableDataset) -> Iterator[Any]:
    while True:
        with client.request_sample(60_000) as ref:
            yield ref.tensors()


def by_dataset(client: StudentClient, dataset: DistillIterableDataset) -> Iterator[Any]:
    return iter(dataset)


def by_loader(client: StudentClient, dataset: DistillIterableDataset) -> Iterator[Any]:
    return iter(DistillDataLoader(dataset, batch_size=BATCH))


def by_loader_apart(client: StudentClient, dataset: DistillIterableDataset) -> Iterator[Any]:
    return iter(DistillDataLoader(dataset, batch_size=BATCH, num_workers=1, multiprocessing_context="fork"))


WAYS = {"client": by_client, "dataset": by_dataset, "loader": by_loader, "num_workers=1": by_loader_apart}


def rate(samples: Iterator[Any], seconds: float, warm: int) -> float:
    """Return samples a second once the first ``warm`` have come; each is read."""
    for _ in itertools.islice(samples, warm):
        pass
    began, count = time.perf_counter(), 0
    while (elapsed := time.perf_counter() - began) < seconds:
        count += len(read(next(samples)))
    return count / elapsed


def measured(workers: int, by: Callable[..., Iterator[Any]], seconds: float) -> float:
    with teacher_processes() as run, ExitStack() as stack:
        run.start("broker", heartbeat_s=0.5)
        sizes = [min(THREADS, workers - first) for first in range(0, workers, THREADS)]
        processes = [run.start("workers", ready=False, count=size, argument=SLEEP_S) for size in sizes]
        for process in processes:
            run.await_ready(process)
        client = stack.enter_context(StudentClient(0, SLOTS, PATTERN, **run.client))
        dataset = DistillIterableDataset(0, client.generation_value, SLOTS, PATTERN, run.frontend)
        samples = by(client, dataset)
        try:
            return rate(samples, seconds, warm=2 * workers)
        finally:
            del samples


def alone(workers: int, seconds: float) -> float:
    """Return what the generators make with nothing around them."""
    with teacher_processes() as run:
        sizes = [min(THREADS, workers - first) for first in range(0, workers, THREADS)]
        how = {"argument": SLEEP_S, "seconds": seconds}
        processes = [run.start("sleepers", ready=False, count=size, **how) for size in sizes]
        return sum(float(process.communicate()[0]) for process in processes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=4.0)
    options = parser.parse_args()
    print(f"torch {torch.__version__}, Python {platform.python_version()}, {os.cpu_count()} cores")
    print(f"load {os.getloadavg()[0]:.1f}; {SLEEP_S * 1000:.0f} ms a sample, {SLOTS} slots")
    heads = " ".join(f"{head:>15}" for head in WAYS)
    print(f"{'workers':>8} {'possible':>9} {'alone':>7} {heads}   samples a second (share of alone)")
    for workers in (1, 2, 4, 8, 20):
        possible = workers / SLEEP_S
        before = alone(workers, options.seconds)
        rates = [measured(workers, by, options.seconds) for by in WAYS.values()]
        base = (before + alone(workers, options.seconds)) / 2
        shares = " ".join(f"{one:8.1f} ({one / base:4.2f})" for one in rates)
        print(f"{workers:>8} {possible:>9.0f} {base:>7.1f} {shares}", flush=True)


if __name__ == "__main__":
    main()
