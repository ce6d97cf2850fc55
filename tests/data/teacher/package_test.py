"""The teacher's names are in one place, and load no more than what is used of them."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module

import pytest

import mixle.data.teacher as teacher

HEAVY = ("torch", "zmq", "msgpack", "yaml", "scipy")


def run(program: str) -> str:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def loaded_by(statement: str) -> set[str]:
    return set(run(f"{statement}\nimport sys\nprint(*(name for name in {HEAVY!r} if name in sys.modules))").split())


def error_without(package: str, statement: str) -> str:
    """What a statement raises where a package is not installed; nothing if it raises no ImportError."""
    block = f"import sys\nsys.modules[{package!r}] = None"
    return run(f"{block}\ntry:\n    {statement}\nexcept ImportError as error:\n    print(error)")


@pytest.mark.parametrize("name", teacher.__all__)
def test_a_name_is_that_of_its_module(name):
    value = getattr(teacher, name)
    assert value.__module__.startswith("mixle.data.teacher.")
    assert getattr(import_module(value.__module__), name) is value


def test_every_name_is_listed_once_and_shown_by_dir():
    assert len(set(teacher.__all__)) == len(teacher.__all__)
    assert set(teacher.__all__) <= set(dir(teacher))


def test_a_name_that_is_none_is_an_attribute_error():
    with pytest.raises(AttributeError, match=r"has no attribute 'Brocker'"):
        teacher.Brocker  # noqa: B018


def test_the_package_and_a_batch_config_load_nothing_optional():
    assert loaded_by("import mixle.data.teacher") == set()
    assert loaded_by("from mixle.data.teacher import BatchConfig, TensorSpec, clean, setup_logging") == set()


def test_broker_and_worker_load_no_torch():
    assert "torch" not in loaded_by("from mixle.data.teacher import Broker, BrokerStats, Worker, StudentClient, Keys")


@pytest.mark.parametrize(
    "package, extra, statement",
    [
        ("msgpack", "teacher", "from mixle.data.teacher import Broker"),
        ("msgpack", "teacher", "from mixle.data.teacher import Worker"),
        ("zmq", "teacher", "from mixle.data.teacher import Broker; Broker(directory='.')"),
        ("zmq", "teacher", "from mixle.data.teacher import Keys; Keys.generate()"),
        ("torch", "torch", "from mixle.data.teacher import ModelActivations"),
        ("torch", "torch", "from mixle.data.teacher import DistillIterableDataset"),
        ("torch", "torch", "from mixle.data.teacher import DistillDataLoader"),
    ],
)
def test_what_is_not_installed_is_asked_for_by_its_extra(package, extra, statement):
    assert error_without(package, statement) == (
        f"{package} is not installed; install it with: pip install 'mixle[{extra}]'"
    )
