"""Real processes that are killed, stopped and lied to; `programs/chaos.py` says what is checked and runs more seeds."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

CHAOS = Path(__file__).parent / "programs" / "chaos.py"


def chaos(*arguments: str) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(CHAOS), *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=800,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("store", ["file", "s3"])
def test_four_nodes_that_are_killed_and_stopped_lose_no_commit_no_step_and_no_loss(store):
    assert "seed 0: ok" in chaos("--seeds", "1", "--stores", store)


@pytest.mark.slow
@pytest.mark.distributed
def test_another_node_takes_up_the_round_of_a_closer_that_was_killed():
    assert "to the next commit" in chaos("--recovery", "1", "--stores", "file")
