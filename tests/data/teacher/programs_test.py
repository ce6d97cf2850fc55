"""The programs beside this file, for a short time; they run for long by hand."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

PROGRAMS = Path(__file__).with_name("programs")


def output(program, *arguments):
    """Return what a program printed; it has to end well."""
    path = os.pathsep.join(entry for entry in sys.path if entry)
    process = subprocess.run(
        [sys.executable, str(PROGRAMS / program), *arguments],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout


def test_whatever_is_killed_no_sample_is_stale_torn_or_repeated_and_nothing_is_left():
    assert "no stale, duplicate or torn sample; nothing left" in output("soak.py", "--seconds", "16")


def test_direct_orders_survive_the_same_deaths():
    said = output("soak.py", "--seconds", "12", "--seed", "3", "--direct")
    assert "no stale, duplicate or torn sample; nothing left" in said


def test_no_rank_is_handed_a_sample_older_than_what_it_knows_of():
    assert "40 switches" in output("fence.py", "--switches", "40")


def test_a_broker_lives_through_senseless_messages_and_serves_on():
    assert "2000 messages" in output("fuzz.py", "--messages", "2000")
