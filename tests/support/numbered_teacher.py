"""A teacher whose samples say which they are and of what model; run as a program it is a worker of a run.

``numbered_teacher.py DIRECTORY INDEX [SECONDS]``: INDEX below 16 makes its numbers its own, SECONDS is what one takes.
A vector sample is ``x`` (4,) and ``y`` (4,): two numbers to learn, then the sample's number and its model's. A token
sample is ``ids`` (8,). Nothing here needs torch.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from mixle.data.teacher.specs import BatchConfig, TensorSpec
from mixle.data.teacher.worker import Worker

VOCAB, LENGTH = 18, 8
VECTORS = BatchConfig([TensorSpec("x", (4,), "float32"), TensorSpec("y", (4,), "float32")])
TOKENS = BatchConfig([TensorSpec("ids", (LENGTH,), "int32")])
WEIGHTS = np.random.default_rng(5).normal(size=(4, 2)).astype(np.float32)


def vectors(number: int, model: int) -> dict[str, Any]:
    """Return the sample of a number, of a model."""
    x = np.random.default_rng(number).normal(size=4).astype(np.float32)
    return {"x": x, "y": np.concatenate((x @ WEIGHTS * (model + 1), [number, model])).astype(np.float32)}


def tokens(number: int) -> dict[str, Any]:
    return {"ids": np.random.default_rng(number).integers(0, VOCAB, LENGTH, dtype=np.int32)}


def generator(index: int, seconds: float) -> Any:
    """Return a generator: model ids that begin with "tokens" make tokens, others vectors."""
    made = index << 20

    def generate(model_id: str, model_cfg: dict[str, Any] | None) -> dict[str, Any]:
        nonlocal made
        made += 1
        time.sleep(seconds)
        if model_id == "broken":
            raise ZeroDivisionError("no teacher today")
        if model_id.startswith("tokens"):
            return tokens(made)
        return vectors(made, 0 if model_cfg is None else model_cfg["number"])

    return generate


def main(directory: str, index: int, seconds: float) -> None:
    """Serve until killed; ``DIRECTORY/worker-INDEX`` appears once the worker is registered."""

    def on_event(kind: str, details: dict[str, Any]) -> None:
        if kind == "registered":
            Path(directory, f"worker-{index}").touch()

    size = max(VECTORS.nbytes(), TOKENS.nbytes())
    sockets = f"ipc://{directory}/b", f"ipc://{directory}/p"
    patterns = ["m*", "tokens*", "broken"]
    Worker(generator(index, seconds), size, *sockets, patterns=patterns, on_event=on_event).run()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]))
