"""Learning across sites beside learning together: python tests/benchmarks/diloco_learning.py [--plot FILE]

A byte-level transformer of 0.4M parameters on the standard library of the Python that runs this, always the same number
of training tokens. Data parallel is one process with the global batch: every step it would send
its gradients, counted as a ring all-reduce does. DiLoCo's sites are threads with a data shard, a module and an
optimizer each; they meet in a mailbox in memory, whose counters say what went up and down. Once they wait for one
another, which is what the bar is about, and once they do not, which is the default. With --rates every side tries
several, and its best counts. A side takes 10 to 25 minutes on two cores; losses on the way go to stderr.
"""

from __future__ import annotations

import argparse
import math
import os
import platform
import sys
import threading
import time
import uuid
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from mixle.diloco import DiLoCo, Session, WeightedMean, align, open_mailbox
from mixle.lm.corpus import standard_library_files
from mixle.models.transformer import CausalLM

SITES, SYNC_EVERY, FRAGMENTS = 4, 50, 4
BLOCK, BATCH = 32, 4
HELDOUT_WINDOWS = 512
TEXT_BYTES = 8_000_000
EVALUATIONS = 10
DEALT = 400  # parts of the text, dealt round to the sites: what they have is alike
BAR = 1.01


class Tuned(NamedTuple):
    """A side's peak learning rate, and the share of its steps in which it warms up to it."""

    rate: float
    warm_up: float


IN_STEP = {
    "overlap_steps": 0,
    "quorum_size": SITES,
    "follow": 0,
    "merge": WeightedMean(),
    "outer_lr": 0.9,
    "outer_momentum": 0.8,
}
WEIGHT_DECAY = 0.02
TUNED = {
    "data parallel": Tuned(3e-3, 0.02),
    "in step": Tuned(2e-3, 0.05),
    "small batch": Tuned(1.5e-3, 0.02),
    "as they come": Tuned(1.5e-3, 0.05),
    "in step, F4": Tuned(2e-3, 0.05),
}


@dataclass
class Curve:
    """Held-out loss against tokens seen and bytes sent, all sites together."""

    name: str
    points: list[tuple[float, float, float]] = field(default_factory=list)
    final: float = math.nan
    sent: float = 0.0
    received: float = 0.0
    seconds: float = 0.0

    def add(self, tokens: int, sent: float, loss: float) -> None:
        self.points.append((tokens, sent, loss))
        print(f"  {self.name}: {loss:.4f} after {tokens / 1e6:.2f} million tokens", file=sys.stderr, flush=True)


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

    def __init__(self, tokens: torch.Tensor, batch: int, steps: int, tuned: Tuned, seed: int) -> None:
        self.model, self.tokens, self.batch, self.steps = make_model(), tokens, batch, steps
        self.tuned = tuned
        self.generator = torch.Generator().manual_seed(seed)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=tuned.rate, betas=(0.9, 0.95), weight_decay=WEIGHT_DECAY, fused=True
        )
        self.taken = 0

    def step(self) -> None:
        warm = min(1.0, (self.taken + 1) / (self.tuned.warm_up * self.steps))
        decay = 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * self.taken / self.steps))
        for group in self.optimizer.param_groups:
            group["lr"] = self.tuned.rate * warm * decay
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


def together(name: str, train: torch.Tensor, heldout: torch.Tensor, batch: int, steps: int, tuned: Tuned) -> Curve:
    """One process; with the global batch, what data parallel on SITES ranks computes."""
    curve, trainer, started = Curve(name), Trainer(train, batch, steps, tuned, seed=1), time.perf_counter()
    ranks = batch // BATCH
    per_step = 2 * (ranks - 1) * 4 * sum(p.numel() for p in trainer.model.parameters())  # a ring all-reduce, all ranks
    for step in range(1, steps + 1):
        trainer.step()
        if step % max(1, steps // EVALUATIONS) == 0:
            curve.add(step * batch * BLOCK, step * per_step, heldout_loss(trainer.model, heldout))
    curve.final, curve.sent = heldout_loss(trainer.model, heldout), steps * per_step
    curve.received, curve.seconds = curve.sent, time.perf_counter() - started
    return curve


def apart(
    name: str, train: torch.Tensor, heldout: torch.Tensor, steps: int, tuned: Tuned, **algorithm: object
) -> Curve:
    """SITES sites that meet in a mailbox."""
    curve, url, started = Curve(name), f"memory://{uuid.uuid4().hex}", time.perf_counter()
    stores = [open_mailbox(url) for _ in range(SITES)]
    shards = [torch.cat(torch.tensor_split(train, DEALT)[i::SITES]) for i in range(SITES)]
    chosen = DiLoCo(SYNC_EVERY, FRAGMENTS, global_batch_size=SITES * BATCH, **algorithm)
    ready = threading.Barrier(SITES)
    taken = [0] * SITES
    failures: list[BaseException] = []

    def site(i: int) -> None:
        try:
            trainer, fetched = Trainer(shards[i], BATCH, steps, tuned, seed=i), make_model()
            session = Session(
                trainer.model,
                algorithm=chosen,
                mailbox=stores[i],
                learner_id=f"site-{i}",
                poll_interval=0.02,
                lease_timeout=120.0,
                callbacks=(),
            )
            # Until each knows of the others, a site's first rounds would be its own.
            while session.batch_size != BATCH and not failures:
                time.sleep(0.01)
            ready.wait()
            for step in range(1, steps + 1):
                trainer.step()
                session.step(BATCH * BLOCK)
                taken[i] = step
                if i == 0 and step % max(1, steps // EVALUATIONS) == 0:
                    align(fetched, mailbox=url)
                    sent = sum(store.traffic.bytes_up for store in stores)
                    curve.add(sum(taken) * BATCH * BLOCK, sent, heldout_loss(fetched, heldout))
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
    curve.add(SITES * steps * BATCH * BLOCK, curve.sent, curve.final)
    return curve


def draw(curves: list[Curve], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams.update({"svg.hashsalt": "mixle", "svg.fonttype": "none"})
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


def run_side(side: str, steps: int, tuned: Tuned) -> Curve:
    """Train one side; called in a process of its own."""
    torch.set_num_threads(1)
    train, heldout = read_text(TEXT_BYTES)
    match side:
        case "data parallel":
            return together("data parallel, same global batch", train, heldout, SITES * BATCH, steps, tuned)
        case "small batch":
            return together("one process, small batch", train, heldout, BATCH, SITES * steps, tuned)
        case "in step":
            return apart("DiLoCo in step", train, heldout, steps, tuned, **IN_STEP)
        case "in step, F4":
            formats = {"delta_dtype": "F4", "commit_dtype": "F4"}
            return apart("DiLoCo in step, F4 both ways", train, heldout, steps, tuned, **IN_STEP, **formats)
        case "as they come":
            return apart("DiLoCo as they come (the defaults)", train, heldout, steps, tuned)
    raise ValueError(f"side={side!r} must be one of {', '.join(TUNED)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=12_000, help="steps of each site")
    parser.add_argument("--rates", type=float, nargs="+", help="peak learning rates to try on every side")
    parser.add_argument("--sides", nargs="+", choices=TUNED, default=list(TUNED), help="what to train")
    parser.add_argument("--jobs", type=int, default=1, help="sides to train at a time")
    parser.add_argument("--plot", type=Path, help="image to write")
    asked = parser.parse_args()
    size = sum(p.numel() for p in make_model().parameters())
    print(f"Python {platform.python_version()}, torch {torch.__version__}, {os.cpu_count()} CPUs")
    print(f"{size:,} parameters; {SITES} sites, H={SYNC_EVERY}, {FRAGMENTS} fragments; {asked.steps} steps a site,")
    print(f"{SITES * asked.steps * BATCH * BLOCK:,} tokens in all, {SITES * BATCH * BLOCK} of them in a global batch")
    curves: dict[str, Curve] = {}
    with ProcessPoolExecutor(asked.jobs, mp_context=get_context("spawn")) as pool:
        tried = [(side, rate) for side in asked.sides for rate in asked.rates or [TUNED[side].rate]]
        running = [pool.submit(run_side, side, asked.steps, TUNED[side]._replace(rate=rate)) for side, rate in tried]
        for (side, rate), each in zip(tried, running, strict=True):
            curve = each.result()
            print(
                f"{curve.name:36s} rate {rate:.2g}   loss {curve.final:.4f}   up {curve.sent / 1e6:9.2f} MB   "
                f"down {curve.received / 1e6:9.2f} MB   {curve.seconds:6.1f} s",
                flush=True,
            )
            if side not in curves or curve.final < curves[side].final:
                curves[side] = curve
                if asked.plot:
                    draw(list(curves.values()), asked.plot)
    if "data parallel" in curves:
        compare(curves)


def compare(curves: dict[str, Curve]) -> None:
    bar = curves["data parallel"].final * BAR
    print(f"bar: {bar:.4f}, the loss of data parallel + {BAR - 1:.0%}")
    for curve in curves.values():
        reached = "within" if curve.final <= bar else "MISSED"
        print(f"{curve.name:36s} {curve.final / curves['data parallel'].final:.4f} of data parallel: {reached}")


if __name__ == "__main__":
    main()
