"""The teacher beside softs, a ring in shared memory, ZeroMQ and the DataLoader: samples per second, time of one order.

    python tests/benchmarks/teacher.py [--peer PYTHON] [--quick] [--profile]

``--peer`` is a Python that has softs; without it softs is left out. Every side runs in processes of its own and waits
while another is measured, in turns; the median of the turns counts. The generator returns a buffer that is ready. Our
own sides also show the CPU time of each process per sample, which another load on the machine changes little. Every
side, ours or not, copies past the caches as ``mixle teacher worker`` does; with ``--plain-stores`` none does.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import pstats
import statistics
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from typing import Any, Self

from mixle.data.teacher.streaming_stores import VARIABLE, streaming_stores

SIDES = Path(__file__).with_name("teacher_sides.py")
SIZES = {"4 KiB": 4 << 10, "64 KiB": 64 << 10, "600 KiB": 600 << 10, "4 MiB": 4 << 20}
THROUGHPUT = {
    "mixle_batches": "mixle, batches in place",
    "mixle_samples": "mixle, samples in place",
    "mixle_dataset": "mixle, dataset",
    "mixle_loader": "mixle, loader",
    "mixle_loader_apart": "mixle, loader, num_workers=1",
    "mixle_network": "mixle, batches over TCP",
    "softs_samples": "softs, client",
    "softs_loader": "softs, loader",
    "ring": "ring read in place",
    "inline_zmq": "ZeroMQ inline",
    "dataloader": "torch DataLoader",
}
LATENCY = {
    "mixle_order": "mixle",
    "softs_order": "softs",
    "bare_zmq": "two bare ZeroMQ messages, a pipe back",
    "pipe": "a byte through two pipes",
}
PAUSES = (0.0, 0.0007)  # seconds before each order: right after the last, and when every process sleeps
BARS = {"4 KiB": 20, "64 KiB": 20, "600 KiB": 6, "4 MiB": 3}
READY_S = 120.0


class Runner:
    """One side in processes of its own."""

    def __init__(self, name: str, size: int, workers: int, python: str, directory: str | None = None) -> None:
        environment = (
            os.environ | {"PYTHONWARNINGS": "ignore"} | ({} if directory is None else {"TEACHER_PROFILE": directory})
        )
        command = [python, str(SIDES), name, str(size), str(workers)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def wait(self) -> Self:
        """Wait until it is ready."""
        self._answer()
        return self

    def measure(self, what: float | str) -> dict[str, Any]:
        assert self._process.stdin is not None
        print(what, file=self._process.stdin, flush=True)
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self._process.args} ended with {self._process.wait(READY_S)}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def runners(stack: ExitStack, names: list[str], size: int, workers: int, peer: str | None) -> dict[str, Runner]:
    """Start the sides that there is a Python for."""
    started = {}
    for name in names:
        python = peer if name.startswith("softs") else sys.executable
        if python is not None:
            started[name] = stack.enter_context(Runner(name, size, workers, python))
    return {name: side.wait() for name, side in started.items()}


def throughput(label: str, workers: int, names: list[str], peer: str | None, turns: int, seconds: float) -> None:
    """Print one table."""
    size = SIZES[label]
    rates: dict[str, list[float]] = {}
    cpu: dict[str, dict[str, list[float]]] = {}
    with ExitStack() as stack:
        sides = runners(stack, names, size, workers, peer)
        for turn in range(turns + 1):  # the first is for warming up
            for name in sides if turn % 2 else reversed(sides):
                measured = sides[name].measure(seconds)
                if turn:
                    rates.setdefault(name, []).append(measured["samples"] / measured["seconds"])
                    for role, spent in measured["cpu"].items():
                        cpu.setdefault(name, {}).setdefault(role, []).append(1e6 * spent / measured["samples"])
    median = {name: statistics.median(values) for name, values in rates.items()}
    beside = [name for name in ("softs_samples", "ring", "inline_zmq", "dataloader") if name in median]
    print(f"\n{label}, {workers} worker(s)")
    print(f"{'':<30}{'samples/s':>11}{'MB/s':>9}" + "".join(f"{'/ ' + one:>16}" for one in beside) + "   CPU us/sample")
    for name, rate in median.items():
        ratios = "".join(f"{rate / median[one]:>16.2f}" for one in beside)
        spent = " ".join(f"{role} {statistics.median(values):.1f}" for role, values in cpu.get(name, {}).items())
        print(f"{THROUGHPUT[name]:<30}{rate:>11,.0f}{rate * size / 1e6:>9,.0f}{ratios}   {spent}")
    if {"mixle_batches", "softs_samples"} <= median.keys():
        reached = median["mixle_batches"] / median["softs_samples"]
        print(f"bar: {BARS[label]}x softs; reached {reached:.1f}x{'' if reached >= BARS[label] else ', BELOW'}")


def latency(peer: str | None, turns: int) -> None:
    """Print what one order takes at an idle broker."""
    times: dict[tuple[str, float], list[float]] = {}
    for _ in range(turns):
        for one in LATENCY:  # alone: what idle processes of the others do would count
            with ExitStack() as stack:
                for (name, side), pause in product(runners(stack, [one], SIZES["4 KiB"], 1, peer).items(), PAUSES):
                    times.setdefault((name, pause), []).append(1e6 * side.measure(f"latency {pause}")["p50"])
    print("\none order at an idle broker, 4 KiB, from the request to the tensor, median us (bar: 150)")
    print(f"{'':<44}" + "".join(f"{f'after {1e3 * pause:g} ms' if pause else 'at once':>14}" for pause in PAUSES))
    for name in dict.fromkeys(name for name, _ in times):
        print(f"{LATENCY[name]:<44}" + "".join(f"{statistics.median(times[name, pause]):>14.0f}" for pause in PAUSES))


def profile(label: str, seconds: float) -> None:
    """Print where each process spends its time at one size."""
    with tempfile.TemporaryDirectory() as directory:
        with Runner("mixle_batches", SIZES[label], 1, sys.executable, directory) as side:
            print(side.wait().measure(seconds))
        for role in ("student", "broker", "worker"):
            print(f"---- {role}, {label}")
            pstats.Stats(f"{directory}/{role}").sort_stats("tottime").print_stats(16)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peer", metavar="PYTHON", help="a Python with softs")
    parser.add_argument("--quick", action="store_true", help="short turns")
    parser.add_argument("--workers", nargs="+", type=int, default=[1, 2], help="how many workers, one table each")
    parser.add_argument("--profile", action="store_true", help="show instead what bounds our side")
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--sides", nargs="+", choices=THROUGHPUT, default=list(THROUGHPUT))
    parser.add_argument("--plain-stores", action="store_true", help="leave the C library's copies as they are")
    args = parser.parse_args()
    stores = None if args.plain_stores else streaming_stores(os.environ.get(VARIABLE, ""))
    if stores is not None:
        os.environ[VARIABLE] = stores
    packages = " ".join(f"{name} {importlib.metadata.version(name)}" for name in ("mixle", "torch", "numpy", "pyzmq"))
    print(f"{packages}, python {platform.python_version()}, {os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}")
    print(f"{VARIABLE}={os.environ.get(VARIABLE, '')}")
    if args.profile:
        for label in args.sizes:
            profile(label, 2.0)
        return
    latency(args.peer, 1 if args.quick else 5)
    for label in args.sizes:
        for workers in args.workers:
            throughput(label, workers, args.sides, args.peer, 3 if args.quick else 7, 0.3 if args.quick else 1.0)


if __name__ == "__main__":
    main()
