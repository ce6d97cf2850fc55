"""A failure of a rank becomes the exit status of the command, without torchrun's own account of it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.distributed
def test_the_status_of_a_failed_rank_is_passed_on_without_a_traceback():
    program = "import sys; from mixle.lm.launch import run_under_torchrun; sys.exit(run_under_torchrun(2, ['no-job']))"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200", "TERM": "dumb"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 2
    assert "No such command 'no-job'" in done.stderr
    assert "Traceback" not in done.stderr
    assert "ChildFailedError" not in done.stderr
