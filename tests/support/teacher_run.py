"""A run of the teacher in this process: a broker and workers in threads, in a directory of their own."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from teacher_folder import teacher_folder

from mixle.data.teacher.broker import Broker
from mixle.data.teacher.specs import BatchConfig, TensorSpec
from mixle.data.teacher.worker import Worker

CONFIG = BatchConfig([TensorSpec("x", (3,), "float32"), TensorSpec("y", (), "int64")])


def sample(value: float) -> dict[str, Any]:
    """A sample of CONFIG that carries one number."""
    return {"x": np.full(3, value, np.float32), "y": np.array(int(value), np.int64)}


class Run:
    """Where the sockets are; ``client`` are the keyword arguments of a StudentClient that finds them."""

    def __init__(self, directory: str) -> None:
        self.frontend, self.backend, self.control, self.pub = (f"ipc://{directory}/{name}" for name in "fbcp")
        self.client = {
            "frontend_endpoint": self.frontend,
            "control_endpoint": self.control,
            "control_pub_endpoint": self.pub,
        }
        self._stack = ExitStack()

    def start_broker(self, **options: Any) -> Broker:
        return self._stack.enter_context(
            Broker(self.frontend, self.backend, self.control, self.pub, heartbeat_s=0.05, **options)
        )

    def start_worker(self, generator: Callable[..., Any], slot_size: int = 4096, **options: Any) -> Worker:
        return self._stack.enter_context(Worker(generator, slot_size, self.backend, self.pub, **options))

    def segments(self) -> set[str]:
        """Return the names of this run's slots in shared memory."""
        told = Path(os.environ["MIXLE_TEACHER_DIR"]).glob("run-*.json")
        runs = [json.loads(path.read_text())["run_id"] for path in told]
        return {path.name for run_id in runs for path in Path("/dev/shm").glob(f"mx{run_id}-*")}

    def close(self) -> None:
        self._stack.close()


@contextmanager
def teacher_run() -> Iterator[Run]:
    with teacher_folder() as directory:
        run = Run(directory)
        try:
            yield run
        finally:
            run.close()


def free_ports(count: int) -> list[int]:
    """Return ports of the loopback interface that nothing listens on now."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
