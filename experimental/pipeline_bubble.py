"""Measure how long pipeline ranks wait, against what the plan predicts.

    python experimental/pipeline_bubble.py

Each microbatch has as many rows, so a pipeline of p ranks needs the time of (m + wait) microbatches for m of them, and
the plan predicts the wait. What one microbatch costs once the pipeline is full is the slope from many to more.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time

import torch

from mixle.experimental.tensor_pipeline_context_parallel.engine import PlanEngine
from mixle.experimental.tensor_pipeline_context_parallel.mesh import PlanMesh
from mixle.experimental.tensor_pipeline_context_parallel.parallelize import parallelize
from mixle.experimental.tensor_pipeline_context_parallel.plan import STAGES_PER_RANK, Plan
from mixle.models.transformer import CausalLM
from mixle.training.next_token import TokenTensors
from mixle.utils.parallel.process_group import join

VOCAB, WIDTH, HEADS, BLOCK, ROWS, REPEATS = 256, 128, 4, 128, 2, 5


def measure(ranks: int, layers: int, counts: list[int]) -> None:
    """Time a step for every schedule and number of microbatches; rank 0 prints."""
    with join() as peers:
        mesh = PlanMesh.of(pp=ranks, dp=1, cp=1, tp=1, device_type="cpu")
        print_here = peers.rank == 0
        if print_here:
            print(f"torch {torch.__version__}, pp={ranks}, {layers} blocks of width {WIDTH}, {ROWS} rows a microbatch")
            print("schedule      microbatches   step ms   waits, measured   predicted")
        for schedule in STAGES_PER_RANK:
            times = {}
            for count in counts:
                torch.manual_seed(0)
                model = CausalLM(VOCAB, WIDTH, layers, HEADS, BLOCK)
                plan = Plan(pp=ranks, microbatches=count, pp_schedule=schedule)
                parallelize(model, plan, mesh, fsdp=False, precision="fp32")
                engine = PlanEngine(model, batch_size=ROWS * count, block=BLOCK)
                ids = torch.randint(0, VOCAB, (ROWS * count, BLOCK))
                times[count] = _seconds(engine, TokenTensors(ids, ids), peers)
            one = (times[counts[-1]] - times[counts[-2]]) / (counts[-1] - counts[-2])
            for count in counts:
                plan = Plan(pp=ranks, microbatches=count, pp_schedule=schedule)
                idle = 1 - count * one / times[count]
                if print_here:
                    shares = f"{idle:>17.0%}{plan.idle_fraction:>12.0%}"
                    print(f"{schedule:<14}{count:>12}{1000 * times[count]:>10.1f}{shares}", flush=True)


def _seconds(engine: PlanEngine, batch: TokenTensors, peers) -> float:
    """Return the median time of a step, after one that sets the pipeline up."""
    engine.forward_backward(batch, 1.0, last=True)
    times = []
    for _ in range(REPEATS):
        peers.meet("a step", deadline_s=120)
        started = time.perf_counter()
        engine.forward_backward(batch, 1.0, last=True)
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pp", type=int, default=2)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--microbatches", type=int, nargs="+", default=[2, 4, 8, 16])
    chosen = parser.parse_args()
    if "RANK" in os.environ:
        measure(chosen.pp, chosen.layers, chosen.microbatches)
        return
    command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone"]
    command += ["--local-addr", "127.0.0.1", "--nproc-per-node", str(chosen.pp), *sys.argv]
    sys.exit(subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False).returncode)


if __name__ == "__main__":
    main()
