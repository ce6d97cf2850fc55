"""A run of the teacher in processes of its own, which a test may kill; see teacher_roles.py for what they do.

Samples of PATTERN check themselves: every word of ``body`` follows from the ``model`` and the unique ``number``.
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from teacher_folder import teacher_folder

from mixle.data.teacher.specs import BatchConfig, TensorSpec

ROOT = Path(__file__).parents[2]
ROLES = Path(__file__).with_name("teacher_roles.py")
PATIENCE_S = 60.0
WORDS = 500
PATTERN = BatchConfig(
    [TensorSpec("model", (), "int64"), TensorSpec("number", (), "int64"), TensorSpec("body", (WORDS,), "int64")]
)


def body(model: Any, number: Any) -> Any:
    """Return what must be in ``body``; arrays of n give (n, WORDS)."""
    start = np.asarray(model, np.int64) * 1_000_003 + np.asarray(number, np.int64)
    return start[..., None] + np.arange(WORDS, dtype=np.int64) * 7_919


def patterned() -> Callable[[str, dict[str, Any] | None], dict[str, Any]]:
    """Return a generator whose samples no other process makes, nor this one twice."""
    start, made = secrets.randbits(30) << 32, 0

    def generate(model_id: str, model_cfg: dict[str, Any] | None) -> dict[str, Any]:
        nonlocal made
        made += 1
        model, number = 0 if model_cfg is None else model_cfg["number"], start + made
        return {"model": np.int64(model), "number": np.int64(number), "body": body(model, number)}

    return generate


def read(tensors: Any) -> list[tuple[int, int]]:
    """Return (model, number) of each sample of a batch, or of the one; a torn one is an AssertionError."""
    model, number, words = (np.atleast_1d(np.asarray(tensors[name])) for name in ("model", "number", "body"))
    torn = (np.atleast_2d(words) != body(model, number)).any(axis=1)
    assert not torn.any(), f"torn samples: {np.flatnonzero(torn).tolist()}"
    return list(zip(model.tolist(), number.tolist(), strict=True))


def until(condition: Callable[[], Any], what: str, deadline_s: float = PATIENCE_S) -> Any:
    """Wait for a condition and return its value; fail by name at the deadline."""
    deadline = time.monotonic() + deadline_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"{what} did not come about within {deadline_s} s"
        time.sleep(0.005)
    return value


class Processes:
    """Where a run is, and its processes; ``client`` are the keyword arguments of a StudentClient that finds it."""

    def __init__(self, directory: str) -> None:
        self.directory = Path(directory)
        self.frontend, self.backend, self.control, self.pub = (f"ipc://{directory}/{name}" for name in "fbcp")
        self.client = {
            "frontend_endpoint": self.frontend,
            "control_endpoint": self.control,
            "control_pub_endpoint": self.pub,
        }
        self.started: list[subprocess.Popen[str]] = []

    def start(self, role: str, *, ready: bool = True, **options: Any) -> subprocess.Popen[str]:
        """Start a role of teacher_roles.py; if ``ready``, return when it is bound or registered."""
        path = os.pathsep.join([str(ROOT), *(entry for entry in sys.path if entry)])
        process = subprocess.Popen(
            [sys.executable, str(ROLES), role, str(self.directory), json.dumps(options)],
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.started.append(process)
        if ready:
            self.await_ready(process)
        return process

    @staticmethod
    def await_ready(process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line == "up\n", f"{process.args} ended: {line!r}"

    def kill(self, process: subprocess.Popen[str]) -> None:
        """SIGKILL a process and reap it."""
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()
        self.started.remove(process)

    def segments(self) -> set[str]:
        """Return the names of this run's slots in shared memory."""
        told = Path(os.environ["MIXLE_TEACHER_DIR"]).glob("run-*.json")
        runs = [json.loads(path.read_text())["run_id"] for path in told]
        return {path.name for run_id in runs for path in Path("/dev/shm").glob(f"mx{run_id}-*")}

    def close(self) -> None:
        for process in list(self.started):
            self.kill(process)


@contextmanager
def teacher_processes() -> Iterator[Processes]:
    """Give a run whose processes are all killed at the end, and reaped."""
    with teacher_folder() as directory:
        run = Processes(directory)
        try:
            yield run
        finally:
            run.close()
