"""Learning across sites beside learning together: python tests/benchmarks/diloco_learning.py [--plot FILE]

A byte-level transformer of 0.4M parameters on the standard library of the Python that runs this, always the same number
of training tokens. Data parallel is one process with the global batch: every step it would send its gradients, counted
as a ring all-reduce does. DiLoCo's sites are threads with a data shard, a module and an optimizer each; they meet in a
mailbox in memory, whose counters say what went up and down. Rates are tried for every side, and the best counts.
"""

from __future__ import annotations

import argparse
import math
import os
import platform
import threading
import time
import uuid
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from mixle.diloco import DiLoCo, Session, align, open_mailbox
from mixle.lm.corpus import standard_library_files
from mixle.models.transformer import CausalLM

SITES, SYNC_EVERY, FRAGMENTS = 4, 50, 4
BLOCK, BATCH = 64, 8
HELDOUT_WINDOWS = 256
TEXT_BYTES = 8_000_000
EVALUATIONS = 10


@dataclass
class Curve:
    """Held-out loss against tokens seen and bytes sent, all sites together."""

    name: str
    points: list[tuple[float, float, float]] = field(default_factory=list)
    final: float = math.nan
    sent: float = 0.0
    received: float = 0.0
    seconds: float = 0.0


def read_text(limit: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The bytes to train on, and those held out: every tenth file."""
    train, heldout, size = [], [], 0
    for i, path in enumerate(sorted(standard_library_files())):
        if size >= limit:
            break
        data = Path(path).read_bytes()
        (heldout if i % 10 == 0 else train).append(data)
        size += len(data)
    return tuple(torch.from_numpy(np.frombuffer(b"".join(d), np.uint8).astype(np.int64)) for d in (train, heldout))


def make_model() -> CausalLM:
    torch.manual_seed(0)
    return CausalLM(256, 96, 3, 4, BLOCK)


class Trainer:
    """A module, its optimizer and its place in the data."""

    def __init__(self, tokens: torch.Tensor, batch: int, steps: int, rate: float, seed: int) -> None:
        self.model, self.tokens, self.batch, self.steps, self.rate = make_model(), tokens, batch, steps, rate
        self.generator = torch.Generator().manual_seed(seed)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.1)
        self.taken = 0

    def step(self) -> None:
        warm = min(1.0, (self.taken + 1) / 50)
        decay = 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * self.taken / self.steps))
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate * warm * decay
        starts = torch.randint(len(self.tokens) - BLOCK - 1, (self.batch,), generator=self.generator)
        rows = self.tokens[starts[:, None] + torch.arange(BLOCK + 1)]
        logits = self.model(rows[:, :-1])
        self.optimizer.zero_grad()
        F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten()).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.taken += 1


def heldout_loss(model: CausalLM, heldout: torch.Tensor) -> float:
    starts = torch.linspace(0, len(heldout) - BLOCK - 2, HELDOUT_WINDOWS).long()
    rows = heldout[starts[:, None] + torch.arange(BLOCK + 1)]
    with torch.no_grad():
        return F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten()).item()


def together(name: str, train: torch.Tensor, heldout: torch.Tensor, batch: int, steps: int, rate: float) -> Curve:
    """One process; with the global batch, what data parallel on SITES ranks computes."""
    curve, trainer, started = Curve(name), Trainer(train, batch, steps, rate, seed=1), time.perf_counter()
    ranks = batch // BATCH
    per_step = 2 * (ranks - 1) * 4 * sum(p.numel() for p in trainer.model.parameters())  # a ring all-reduce, all ranks
    for step in range(1, steps + 1):
        trainer.step()
        if step % max(1, steps // EVALUATIONS) == 0:
            curve.points.append((step * batch * BLOCK, step * per_step, heldout_loss(trainer.model, heldout)))
    curve.final, curve.sent = heldout_loss(trainer.model, heldout), steps * per_step
    curve.received, curve.seconds = curve.sent, time.perf_counter() - started
    return curve


def apart(name: str, train: torch.Tensor, heldout: torch.Tensor, steps: int, rate: float, **algorithm: object) -> Curve:
    """SITES sites that meet in a mailbox."""
    curve, url, started = Curve(name), f"memory://{uuid.uuid4().hex}", time.perf_counter()
    shards, stores = torch.tensor_split(train, SITES), [open_mailbox(url) for _ in range(SITES)]
    chosen = DiLoCo(SYNC_EVERY, FRAGMENTS, **algorithm)
    ready = threading.Barrier(SITES)
    taken = [0] * SITES
    failures: list[BaseException] = []

    def site(i: int) -> None:
        try:
            trainer, fetched = Trainer(shards[i], BATCH, steps, rate, seed=i), make_model()
            session = Session(
                trainer.model,
                algorithm=chosen,
                mailbox=stores[i],
                learner_id=f"site-{i}",
                poll_interval=0.05,
                lease_timeout=120.0,
                callbacks=(),
            )
            ready.wait()
            for step in range(1, steps + 1):
                trainer.step()
                session.step(BATCH * BLOCK)
                taken[i] = step
                if i == 0 and step % max(1, steps // EVALUATIONS) == 0:
                    align(fetched, mailbox=url)
                    sent = sum(store.traffic.bytes_up for store in stores)
                    curve.points.append((sum(taken) * BATCH * BLOCK, sent, heldout_loss(fetched, heldout)))
            session.close()
        except BaseException as error:
            failures.append(error)
            ready.abort()

    threads = [threading.Thread(target=site, args=(i,)) for i in range(SITES)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    model = make_model()
    align(model, mailbox=url)
    curve.final = heldout_loss(model, heldout)
    curve.sent = sum(store.traffic.bytes_up for store in stores)
    curve.received = sum(store.traffic.bytes_down for store in stores)
    curve.seconds = time.perf_counter() - started
    curve.points.append((SITES * steps * BATCH * BLOCK, curve.sent, curve.final))
    return curve


def best(curves: list[Curve]) -> Curve:
    return min(curves, key=lambda curve: curve.final)


def draw(curves: list[Curve], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (by_tokens, by_bytes) = pyplot.subplots(1, 2, figsize=(10, 4), sharey=True)
    for curve in curves:
        tokens, sent, losses = zip(*curve.points, strict=True)
        by_tokens.plot([t / 1e6 for t in tokens], losses, ".-", label=curve.name)
        if curve.sent:
            by_bytes.plot([s / 1e6 for s in sent], losses, ".-", label=curve.name)
    by_tokens.set_xlabel("training tokens, millions")
    by_bytes.set_xlabel("sent by all sites, MB")
    by_bytes.set_xscale("log")
    by_tokens.set_ylabel("held-out loss, nats per byte")
    by_tokens.legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(path, dpi=100)


def run_side(side: str, steps: int, rate: float) -> Curve:
    """Train one side; called in a process of its own."""
    torch.set_num_threads(1)
    train, heldout = read_text(TEXT_BYTES)
    match side:
        case "data parallel":
            return together("data parallel, same global batch", train, heldout, SITES * BATCH, steps, rate)
        case "small batch":
            return together("one process, small batch", train, heldout, BATCH, SITES * steps, rate)
        case "F4":
            return apart("DiLoCo, F4 both ways", train, heldout, steps, rate, delta_dtype="F4", commit_dtype="F4")
        case _:
            return apart("DiLoCo, float32", train, heldout, steps, rate)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1000, help="steps of each site")
    parser.add_argument(
        "--rates", type=float, nargs="+", default=[3e-3], help="peak learning rates to try on each side"
    )
    parser.add_argument("--plot", type=Path, help="image to write")
    asked = parser.parse_args()
    size = sum(p.numel() for p in make_model().parameters())
    print(f"Python {platform.python_version()}, torch {torch.__version__}, {os.cpu_count()} CPUs")
    print(f"{size:,} parameters; {SITES} sites, H={SYNC_EVERY}, {FRAGMENTS} fragments; {asked.steps} steps a site,")
    print(f"{SITES * asked.steps * BATCH * BLOCK:,} tokens in all; peak rates {asked.rates}", flush=True)
    sides = ("data parallel", "float32", "F4", "small batch")
    with ProcessPoolExecutor(len(sides), mp_context=get_context("spawn")) as pool:
        running = [[pool.submit(run_side, side, asked.steps, rate) for rate in asked.rates] for side in sides]
        curves = [best([each.result() for each in tried]) for tried in running]
    for curve in curves:
        ratio = curve.final / curves[0].final
        print(
            f"{curve.name:34s} loss {curve.final:.4f} ({ratio:.4f} of data parallel)   up {curve.sent / 1e6:9.2f} MB   "
            f"down {curve.received / 1e6:9.2f} MB   {curve.seconds:6.1f} s"
        )
    if asked.plot:
        draw(curves, asked.plot)


if __name__ == "__main__":
    main()
