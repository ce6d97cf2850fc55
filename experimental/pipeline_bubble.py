"""Measure how long pipeline ranks wait, against what the plan predicts.

    python experimental/pipeline_bubble.py

Blocks sleep instead of computing, as long for forward as for either half of backward, so that neither the number of
cores nor who else uses them matters; messages, order and waiting are real. A rank is busy for as long as its blocks
sleep; the rest of the step it waits.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from typing import Any

import torch
from torch import Tensor, nn

from mixle.experimental.tensor_pipeline_context_parallel.engine import PlanEngine
from mixle.experimental.tensor_pipeline_context_parallel.mesh import PlanMesh
from mixle.experimental.tensor_pipeline_context_parallel.parallelize import parallelize
from mixle.experimental.tensor_pipeline_context_parallel.plan import STAGES_PER_RANK, Plan
from mixle.models.transformer import CausalLM
from mixle.training.next_token import TokenTensors
from mixle.utils.parallel.process_group import Peers, join

VOCAB, WIDTH, HEADS, BLOCK, REPEATS = 64, 16, 2, 8, 3


class _Sleep(torch.autograd.Function):
    """Pass a tensor on; sleep in the forward pass, in the backward pass, or in both."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward_s: float, backward_s: float) -> Tensor:
        ctx.backward_s = backward_s
        time.sleep(forward_s)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        time.sleep(ctx.backward_s)
        return grad, None, None


class SleepingBlock(nn.Module):
    """A block that takes ``seconds`` forward, as long for its input's gradient, and as long for its weight's."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.weight, self.seconds = nn.Parameter(torch.zeros(())), seconds

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        weight = _Sleep.apply(self.weight, 0.0, self.seconds)
        return _Sleep.apply(x, self.seconds, self.seconds) + weight


def measure(ranks: int, layers: int, counts: list[int], seconds: float) -> None:
    """Time a step for every schedule and number of microbatches; rank 0 prints."""
    with join() as peers:
        mesh = PlanMesh.of(pp=ranks, dp=1, cp=1, tp=1, device_type="cpu")
        print_here = peers.rank == 0
        if print_here:
            print(f"torch {torch.__version__}, gloo, pp={ranks}, {layers} blocks of 3 x {1000 * seconds:g} ms")
            print("schedule      microbatches   step ms   waits, measured   predicted")
        for schedule in STAGES_PER_RANK:
            for count in counts:
                torch.manual_seed(0)
                model = CausalLM(VOCAB, WIDTH, layers, HEADS, BLOCK)
                model.blocks = nn.ModuleList(SleepingBlock(seconds) for _ in range(layers))
                plan = Plan(pp=ranks, microbatches=count, pp_schedule=schedule)
                parallelize(model, plan, mesh, fsdp=False, precision="fp32")
                engine = PlanEngine(model, batch_size=count, block=BLOCK)
                ids = torch.randint(0, VOCAB, (count, BLOCK))
                took = _seconds(engine, TokenTensors(ids, ids), peers)
                idle = 1 - 3 * seconds * count * layers / ranks / took
                if print_here:
                    shares = f"{idle:>17.0%}{plan.idle_fraction:>12.0%}"
                    print(f"{schedule:<14}{count:>12}{1000 * took:>10.1f}{shares}", flush=True)


def _seconds(engine: PlanEngine, batch: TokenTensors, peers: Peers) -> float:
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
    parser.add_argument("--microbatches", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--ms", type=float, default=10.0, help="a block's forward pass, and each half of its backward")
    chosen = parser.parse_args()
    if "RANK" in os.environ:
        measure(chosen.pp, chosen.layers, chosen.microbatches, chosen.ms / 1000)
        return
    command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone"]
    command += ["--local-addr", "127.0.0.1", "--nproc-per-node", str(chosen.pp), *sys.argv]
    sys.exit(subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False).returncode)


if __name__ == "__main__":
    main()
