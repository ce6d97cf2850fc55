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


def test_a_broker_holds_no_numpy():
    command = "from mixle.cli import build_app; build_app('teacher')"
    for statement in ("import mixle", "import mixle.data.teacher.broker", command):
        assert "numpy" not in modules_loaded_by(statement)


def test_the_names_of_the_package_are_those_of_their_modules():
    import mixle

    for name in mixle.__all__:
        assert getattr(mixle, name) is vars(mixle)[name]
    assert set(mixle.__all__) <= set(dir(mixle))
    with pytest.raises(AttributeError, match="has no attribute 'seq_estimat'"):
        mixle.seq_estimat  # noqa: B018


def test_the_list_covers_every_optional_dependency_at_run_time():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    runtime = ("torch", "teacher", "diloco", "dask", "kernels", "cli", "tensorboard")
    packages = {requirement.partition(">=")[0] for extra in runtime for requirement in extras[extra]}
    import_names = {"pyzmq": "zmq", "pyyaml": "yaml"}
    assert {import_names.get(name, name) for name in packages} <= HEAVY
