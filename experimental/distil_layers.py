"""Distil a language model into one of half its layers, layer by layer, on samples that a teacher makes meanwhile.

    torchrun --standalone --nproc-per-node 2 experimental/distil_layers.py

For each of the student's blocks the leader switches the teacher to the block at the same relative depth, and the
block learns to give that one's hidden state; those before it stay as they are. Then the whole student learns the
teacher's softened next-token distributions. Rank 0 runs the broker and starts the teacher, a process of its own.
Without --teacher, a folder saved by `mixle lm` or `leaf.save`, the teacher is trained here first.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mixle.data.teacher.activations import ModelActivations
from mixle.data.teacher.broker import Broker
from mixle.data.teacher.specs import BatchConfig, TensorSpec
from mixle.data.teacher.worker import Worker
from mixle.models.distillation import DistillationEstimator, HiddenStates, SoftLabels
from mixle.models.streaming_transformer_leaf import StreamingTransformerLeaf, StreamingTransformerLeafEstimator
from mixle.models.transformer import CausalLM
from mixle.stats.sequence import seq_estimate, seq_log_density_sum
from mixle.utils.parallel.process_group import join
from mixle.utils.parallel.teacher import TeacherEncodedData
from mixle.utils.parallel.torch_neural import StreamingTokenEncodedData

VOCAB, BLOCK, HELDOUT = 256, 64, 20_000
SAMPLES_PER_CALL, PATIENCE_S = 16, 120.0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--teacher", type=Path, help="a saved leaf of a CausalLM over bytes")
    parser.add_argument("--steps", type=int, default=40, help="optimizer steps per layer, and twice as many at the end")
    parser.add_argument("--batch-size", type=int, default=8, help="per rank")
    parser.add_argument("--plot", type=Path, default=Path("distil_layers.png"))
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def text() -> np.ndarray:
    """The source of Python's own library."""
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:40]
    return np.frombuffer(b"".join(source.read_bytes() for source in sources), np.uint8)


def samples_of(width: int) -> tuple[BatchConfig, BatchConfig]:
    """What the teacher sends: ids with hidden states, and ids with logits."""
    ids = TensorSpec("ids", (BLOCK,), "uint8")
    return (
        BatchConfig([ids, TensorSpec("hidden", (BLOCK, width), "float32")]),
        BatchConfig([ids, TensorSpec("logits", (BLOCK, VOCAB), "bfloat16")]),
    )


# ---- the teacher's process


def serve(folder: Path) -> None:
    """Answer for the teacher, once it is saved: "blocks.3" is the output of that block, "logits" that of the whole."""
    torch.set_num_threads(1)
    while not (folder / "leaf.json").exists():
        time.sleep(0.1)
    module = StreamingTransformerLeaf.load(folder).module.eval()
    tokens, rng = torch.from_numpy(text()[:-HELDOUT].copy()), np.random.default_rng()
    windows = tokens.unfold(0, BLOCK, 1)

    def generate(model_id: str, model_cfg: dict[str, Any] | None, count: int) -> dict[str, Tensor]:
        ids = windows[rng.integers(0, len(windows), count)]
        if model_id == "logits":
            with torch.no_grad():
                return {"ids": ids, "logits": module(ids.long()).bfloat16()}
        return {"ids": ids, "hidden": ModelActivations(module, outputs=[model_id]).run(ids.long()).outputs[model_id]}

    largest = max(config.nbytes() for config in samples_of(module.d_model))
    Worker(generate, largest, max_batch=SAMPLES_PER_CALL, patterns=["blocks.*", "logits"]).run()


@contextmanager
def teacher(folder: Path, wanted: bool) -> Iterator[None]:
    """On rank 0, a broker here and a process that serves."""
    if not wanted:
        yield
        return
    die_with_parent: Callable[[], Any] = lambda: ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # noqa: E731
    command = [sys.executable, __file__, "--serve", str(folder)]
    with Broker(), subprocess.Popen(command, preexec_fn=die_with_parent) as process:
        yield
        process.terminate()


# ---- the student's


class Prefix(nn.Module):
    """The first blocks of a model, of which only the last is trained (and the embedding with the first)."""

    def __init__(self, model: CausalLM, depth: int) -> None:
        super().__init__()
        self.embedding, self.blocks = model.embedding, model.blocks[:depth]
        for p in self.parameters():
            p.requires_grad_(False)
        for part in [self.blocks[-1], *([self.embedding] if depth == 1 else [])]:
            part.requires_grad_(True)

    def forward(self, ids: Tensor) -> Tensor:
        x, positions = self.embedding(ids), torch.arange(ids.shape[1], device=ids.device)
        for block in self.blocks:
            x = block(x, positions)
        return x


def trained_teacher(tokens: np.ndarray) -> StreamingTransformerLeaf:
    torch.manual_seed(0)
    module = CausalLM(VOCAB, 64, 4, 4, BLOCK)
    with StreamingTokenEncodedData(tokens, block=BLOCK, batch_size=16, targets="all") as handle:
        return seq_estimate(handle, StreamingTransformerLeafEstimator(module, 3e-3))


def bits_per_byte(module: CausalLM, heldout: np.ndarray) -> float:
    with StreamingTokenEncodedData(heldout, block=BLOCK, batch_size=32, targets="all") as handle:
        count, total = seq_log_density_sum(handle, StreamingTransformerLeaf(module))
    return -total / count / float(np.log(2))


def distil(student: CausalLM, depth_of_teacher: int, steps: int, batch_size: int) -> Iterator[tuple[str, list[float]]]:
    """Train the student; yield what of the teacher it was trained on, and the losses."""
    hidden, logits = samples_of(student.d_model)
    with TeacherEncodedData(batch_config=hidden, batch_size=batch_size, steps=steps, deadline_s=PATIENCE_S) as handle:
        for depth in range(1, len(student.blocks) + 1):
            model_id = f"blocks.{depth * depth_of_teacher // len(student.blocks) - 1}"
            if handle.rank == 0:
                handle.set_model(model_id)
            estimator = DistillationEstimator(
                Prefix(student, depth), 3e-3, loss=HiddenStates(), targets="hidden", weight_decay=0.0
            )
            yield f"block {depth - 1} <- {model_id}", [float(loss) for loss in seq_estimate(handle, estimator).history]
    student.requires_grad_(True)
    options = {"batch_size": batch_size, "steps": 2 * steps, "model_id": "logits", "deadline_s": PATIENCE_S}
    with TeacherEncodedData(batch_config=logits, **options) as handle:
        estimator = DistillationEstimator(student, 3e-3, loss=SoftLabels(temperature=2.0))
        yield "whole <- logits", [float(loss) for loss in seq_estimate(handle, estimator).history]


def plot(path: Path, losses: dict[str, list[float]]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(losses), figsize=(4 * len(losses), 3), layout="constrained")
    for each, (name, values) in zip(axes, losses.items(), strict=True):
        each.plot(range(1, len(values) + 1), values, color="#2563eb")
        each.set(title=name, xlabel="optimizer step", yscale="log")
        each.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("mean squared difference")
    axes[-1].set_ylabel("T² KL, nats")
    figure.savefig(path, dpi=150)


def main() -> None:
    chosen = arguments()
    if chosen.serve is not None:
        serve(chosen.serve)
        return
    torch.set_num_threads(1)
    with join() as job, tempfile.TemporaryDirectory() as own:
        folder = Path(job.exchange("folder", own)[0])
        os.environ["MIXLE_TEACHER_DIR"] = str(folder / "run")  # a broker of this job's own
        started, tokens = time.perf_counter(), text()
        heldout, saved = tokens[-HELDOUT:], chosen.teacher or folder / "teacher"
        with teacher(saved, wanted=job.rank == 0):
            if chosen.teacher is None:
                leaf = trained_teacher(tokens[:150_000])
                if job.rank == 0:
                    leaf.save(saved)
            else:
                leaf = StreamingTransformerLeaf.load(saved)
            blocks = len(leaf.module.blocks)
            torch.manual_seed(1)
            student = CausalLM.from_config({**leaf.module.config, "n_layer": blocks // 2})
            scores = {"teacher": bits_per_byte(leaf.module, heldout)}
            scores["student, untrained"] = bits_per_byte(student, heldout)
            losses = dict(distil(student, blocks, chosen.steps, chosen.batch_size))
        scores["student"] = bits_per_byte(student, heldout)
        if job.rank == 0:
            for name, values in losses.items():
                print(f"{name:22s} loss {values[0]:8.4f} -> {values[-1]:8.4f} in {len(values)} steps")
            for name, score in scores.items():
                print(f"{name:22s} {score:6.3f} bits per byte, held out")
            plot(chosen.plot, losses)
            print(f"{time.perf_counter() - started:.0f} s; wrote {chosen.plot}")


if __name__ == "__main__":
    main()
