"""Importing mixle is cheap: the optional parts, and scipy, load where they are used."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
HEAVY = {
    "dask",
    "distributed",
    "matplotlib",
    "msgpack",
    "numba",
    "obstore",
    "rich",
    "safetensors",
    "scipy",
    "tensorboard",
    "torch",
    "typer",
    "yaml",
    "zmq",
    "zstandard",
}


def modules_loaded_by(statement: str) -> set[str]:
    program = f"{statement}\nimport sys\nprint(*{{name.partition('.')[0] for name in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


@pytest.mark.parametrize(
    "module",
    [
        "mixle",
        "mixle.stats",
        "mixle.inference",
        "mixle.utils.parallel",
        "mixle.cli",
        "mixle.data.teacher",
        "mixle.diloco",
    ],
)
def test_importing_loads_nothing_that_is_optional_or_slow(module):
    assert modules_loaded_by(f"import {module}") & HEAVY == set()


def test_the_list_covers_every_optional_dependency_at_run_time():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    runtime = ("torch", "teacher", "diloco", "dask", "kernels", "cli", "tensorboard")
    packages = {requirement.partition(">=")[0] for extra in runtime for requirement in extras[extra]}
    import_names = {"pyzmq": "zmq", "pyyaml": "yaml"}
    assert {import_names.get(name, name) for name in packages} <= HEAVY
