"""Measure the peak memory of a whole training step against the length of the sequence, for cp = 1, 2 and 4.

    python experimental/ring_attention_memory.py

Memory is what the step needs above what the process holds before it: parameters, gradients, moments, libraries. The
peak is the kernel's high-water mark of the resident set, reset before the step; the largest over the ranks counts.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import subprocess
import sys
from pathlib import Path

import torch

from mixle.experimental.tensor_pipeline_context_parallel.engine import PlanEngine
from mixle.experimental.tensor_pipeline_context_parallel.mesh import PlanMesh
from mixle.experimental.tensor_pipeline_context_parallel.parallelize import parallelize
from mixle.experimental.tensor_pipeline_context_parallel.plan import Plan
from mixle.models.transformer import CausalLM
from mixle.training import OptimizerOptions
from mixle.training.next_token import TokenTensors
from mixle.utils.parallel.process_group import join

VOCAB, WIDTH, LAYERS, HEADS, WARM_UP = 256, 64, 2, 4, 64


def resident(field: str) -> int:
    """Return a field of this process's status, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise KeyError(field)


def measure(lengths: list[int], mode: str) -> None:
    """Run one step at each length on the ranks of this job; rank 0 prints the largest peak."""
    with join(alone=True) as peers:
        torch.manual_seed(0)
        model = CausalLM(VOCAB, WIDTH, LAYERS, HEADS, max(lengths))
        mesh = PlanMesh.of(pp=1, dp=1, cp=peers.world, tp=1, device_type="cpu")
        parallelize(model, Plan(cp=peers.world, cp_mode=mode), mesh, fsdp=False, precision="fp32")
        engine = PlanEngine(model, batch_size=1, block=max(lengths))
        optimizer = OptimizerOptions(optimizer="sgd", lr=1e-3).build(engine.parameters().values())

        def step(length: int) -> None:
            ids = torch.randint(0, VOCAB, (1, length + 1))
            batch = TokenTensors(ids[:, :-1], ids[:, 1:])
            engine.forward_backward(batch, engine.averaged_over / length, last=True)
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)

        step(WARM_UP)
        for length in lengths:
            gc.collect()
            ctypes.CDLL(None).malloc_trim(0)
            before = resident("VmRSS")
            Path("/proc/self/clear_refs").write_text("5")
            step(length)
            own = resident("VmHWM") - before
            peaks = [int(told) for told in peers.exchange("peaks", str(own), deadline_s=600)]
            if peers.rank == 0:
                print(f"{peers.world} {length} {max(peaks)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 4096, 8192])
    parser.add_argument("--cp", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--cp-mode", choices=("ring", "allgather"), default="ring")
    chosen = parser.parse_args()
    if "RANK" in os.environ:
        measure(chosen.lengths, chosen.cp_mode)
        return
    # glibc keeps what is freed for later, which would hide one length's peak behind another's.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}
    peaks: dict[tuple[int, int], int] = {}
    for size in chosen.cp:
        command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone"]
        command += ["--local-addr", "127.0.0.1", "--nproc-per-node", str(size), *sys.argv]
        done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
        for line in done.stdout.splitlines():
            world, length, peak = map(int, line.split())
            peaks[world, length] = peak
    print(f"torch {torch.__version__}, {chosen.cp_mode}, d_model {WIDTH}, {LAYERS} blocks; MiB, and the ratio to cp=1")
    print("length  " + "".join(f"{f'cp={size}':>16}" for size in chosen.cp))
    for length in chosen.lengths:
        cells = (
            f"{peaks[size, length] / 2**20:8.1f} ({peaks[size, length] / peaks[1, length]:.2f})" for size in chosen.cp
        )
        print(f"{length:<8}" + "".join(f"{cell:>16}" for cell in cells))


if __name__ == "__main__":
    main()
