"""The GPU check says so where there is none, and its program works, as far as a CPU can tell."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from torchrun import launch

ROOT = Path(__file__).parents[1]


def test_without_a_gpu_it_says_so_and_succeeds():
    environment = {**os.environ, "PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""}
    script = ROOT / "experimental" / "gpu_check.sh"
    done = subprocess.run(["bash", str(script)], env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    assert "sees no GPU" in done.stdout


@pytest.mark.distributed
def test_every_case_trains_to_the_loss_of_the_loop_by_hand():
    output = launch(ROOT / "experimental" / "gpu_check.py", "--rehearse", ranks=1).output
    assert "FAILED" not in output
    for row in ("by hand, fp32", "handle, bf16, DDP on NCCL", "handle, bf16, FSDP2, checkpointing"):
        assert row in output
