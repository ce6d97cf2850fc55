"""Train a model under a tensor, pipeline and context plan on tokens that a teacher makes meanwhile.

    torchrun --standalone --nproc-per-node 4 experimental/distil_plan.py --tp 2 --pp 2

The plan is checked against the module and against the samples that the teacher will send, before any is made; then one
rank of each data replica asks for them and its peers get what it has. The teacher is a Markov chain, whose entropy
is the loss of a perfect student. Rank 0 runs it, and the broker.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from mixle.data.teacher.broker import Broker
from mixle.data.teacher.specs import BatchConfig, TensorSpec
from mixle.data.teacher.worker import Worker
from mixle.experimental.tensor_pipeline_context_parallel import validate_tp_pp_cp_plan
from mixle.models.streaming_transformer_leaf import StreamingTransformerLeafEstimator
from mixle.models.transformer import CausalLM
from mixle.stats.sequence import seq_estimate
from mixle.utils.parallel.process_group import join
from mixle.utils.parallel.teacher import TeacherEncodedData

VOCAB, BLOCK, SAMPLES_PER_CALL = 16, 32, 32


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for axis in ("tp", "pp", "cp"):
        parser.add_argument(f"--{axis}", type=int, default=1)
    parser.add_argument("--microbatches", type=int)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch-size", type=int, default=16, help="samples per data replica")
    return parser.parse_args()


def samples_of(length: int) -> BatchConfig:
    """What the teacher sends: ids, and for each of them the id that it would put next."""
    return BatchConfig([TensorSpec("ids", (length,), "uint8"), TensorSpec("labels", (length,), "uint8")])


class Chain:
    """A chain over ids."""

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        self.next = rng.dirichlet(np.full(VOCAB, 0.1), VOCAB).cumsum(-1)
        self.rng = rng

    def __call__(self, model_id: str, model_cfg: dict[str, Any] | None, count: int) -> dict[str, np.ndarray]:
        ids = self.rng.integers(0, VOCAB, (count, BLOCK + 1))
        for at in range(1, BLOCK + 1):
            drawn = self.rng.random((count, 1)) > self.next[ids[:, at - 1]]
            ids[:, at] = drawn.sum(-1).clip(max=VOCAB - 1)
        return {"ids": ids[:, :-1].astype(np.uint8), "labels": ids[:, 1:].astype(np.uint8)}

    @property
    def entropy(self) -> float:
        """Mean entropy of the next id over equally likely ones, in nats; near that of the chain."""
        p = np.diff(self.next, prepend=0.0)
        return float(-(p * np.log(p.clip(min=1e-300))).sum(-1).mean())


@contextmanager
def teacher(wanted: bool) -> Iterator[None]:
    """On rank 0, a broker and a worker."""
    if not wanted:
        yield
        return
    with Broker(), Worker(Chain(), samples_of(BLOCK).nbytes(), max_batch=SAMPLES_PER_CALL):
        yield


def refusal(check: Callable[..., object], *arguments: object, **options: Any) -> str:
    try:
        check(*arguments, **options)
    except ValueError as error:
        return str(error)
    raise AssertionError("the plan was to be refused")


def main() -> None:
    chosen = arguments()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    module = CausalLM(VOCAB, 64, 4, 4, BLOCK)
    sizes = {"tp_size": chosen.tp, "pp_size": chosen.pp, "cp_size": chosen.cp}
    how = {**sizes, "microbatches": chosen.microbatches, "batch_size": chosen.batch_size}
    with join() as job, tempfile.TemporaryDirectory() as own:
        os.environ["MIXLE_TEACHER_DIR"] = job.exchange("folder", own)[0]  # a broker of this job's own
        report = validate_tp_pp_cp_plan(module, **how, world_size=job.world, sample=samples_of(BLOCK))
        longer = refusal(validate_tp_pp_cp_plan, module, **how, world_size=job.world, sample=samples_of(BLOCK + 1))
        with (
            teacher(wanted=job.rank == 0),
            TeacherEncodedData(batch_config=samples_of(BLOCK), steps=chosen.steps, **how) as handle,
        ):
            started = time.perf_counter()
            leaf = seq_estimate(handle, StreamingTransformerLeafEstimator(module, 3e-3))
            seconds, receipt = time.perf_counter() - started, handle.schedule_receipt
        if job.rank == 0:
            losses = [float(loss) for loss in leaf.history]
            print(report)
            print(f"samples of {BLOCK + 1} ids: {longer}")
            print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f} nats in {len(losses)} steps")
            print(f"entropy of the teacher, about: {Chain().entropy:.3f} nats")
            print(f"{receipt['samples_served']} samples for {receipt['world_size']} replicas, {seconds:.0f} s")


if __name__ == "__main__":
    main()
