"""What one run of the job is, checked before anything starts and kept beside its results."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Device = Literal["auto", "cpu", "cuda"]
Parallel = Literal["auto", "ddp", "fsdp", "none"]
Precision = Literal["fp32", "bf16"]

SMALLEST_HELDOUT_IN_BLOCKS = 4


@dataclass(frozen=True)
class Settings:
    """The data, the model and the budget of a run. Every error names the command-line option to change.

    Attributes:
        files: text files, or none for the standard library.
        max_bytes: bytes read in all.
        heldout: fraction of them held out.
        epochs: passes over the training bytes.
        d_model: width of the transformer.
        layers: number of its blocks.
        heads: attention heads of a block.
        block: bytes of context.
        batch_size: windows of ``block`` bytes in one step, all processes together.
        lr: peak learning rate.
        seed: fixes the split, the initial parameters, the data order and the sample.
    """

    files: tuple[str, ...] = ()
    max_bytes: int = 1_400_000
    heldout: float = 0.1
    epochs: int = 1
    d_model: int = 64
    layers: int = 3
    heads: int = 2
    block: int = 128
    batch_size: int = 8
    lr: float = 1e-2
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("max_bytes", "epochs", "d_model", "layers", "heads", "block", "batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{option(name)} {getattr(self, name)} must be at least 1")
        if self.seed < 0:
            raise ValueError(f"--seed {self.seed} must be at least 0")
        if not 0 < self.heldout < 1:
            raise ValueError(f"--heldout {self.heldout} must lie between 0 and 1, for example 0.1")
        if not (math.isfinite(self.lr) and self.lr > 0):
            raise ValueError(f"--lr {self.lr} must be positive and finite, for example 0.01")
        if self.d_model % self.heads or (self.d_model // self.heads) % 2:
            fits = [heads for heads in range(1, self.d_model + 1) if self.d_model % (2 * heads) == 0]
            if not fits:
                raise ValueError(f"--d-model {self.d_model} must be even, for example {self.d_model + 1}")
            raise ValueError(
                f"--heads {self.heads} must divide --d-model {self.d_model} into an even width per head; "
                f"nearest that do: {nearest(fits, self.heads)}"
            )
        for name in self.files:
            path = Path(name)
            if not path.is_file():
                raise ValueError(f"FILES: {name} is {'a folder' if path.is_dir() else 'not there'}; give text files")

    def per_process(self, processes: int) -> int:
        """Return the windows that each of ``processes`` takes in a step."""
        if self.batch_size % processes:
            fits = [processes * (self.batch_size // processes + extra) for extra in (0, 1)]
            raise ValueError(
                f"--batch-size {self.batch_size} must be divisible by the {processes} processes of --nproc; "
                f"nearest that are: {nearest([size for size in fits if size], self.batch_size)}"
            )
        return self.batch_size // processes

    def require_enough(self, *, training_bytes: int, heldout_bytes: int) -> None:
        """Refuse a corpus too short to train on, or to judge by."""
        if training_bytes <= self.block or heldout_bytes < SMALLEST_HELDOUT_IN_BLOCKS * self.block:
            raise ValueError(
                f"FILES: {training_bytes:,} bytes to train on and {heldout_bytes:,} held out are too few for --block "
                f"{self.block}, which needs more than {self.block:,} and at least "
                f"{SMALLEST_HELDOUT_IN_BLOCKS * self.block:,}; give more text, or a smaller --block"
            )


@dataclass(frozen=True)
class Execution:
    """Where and how a run works; its results do not depend on it beyond rounding.

    Attributes:
        device: where the module lives; ``"auto"`` is CUDA where there is one.
        parallel: how replicas keep in step.
        precision: of the forward and backward pass.
    """

    device: Device = "auto"
    parallel: Parallel = "auto"
    precision: Precision = "fp32"


def option(name: str) -> str:
    """Return the command-line spelling of a setting."""
    return "--" + name.replace("_", "-")


def nearest(choices: list[int], value: int) -> str:
    """Return the one or two choices on either side of ``value``."""
    below = [choice for choice in choices if choice <= value][-1:]
    above = [choice for choice in choices if choice > value][:1]
    return ", ".join(map(str, below + above))
