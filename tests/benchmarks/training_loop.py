"""The streaming handle beside a hand-written PyTorch loop: the same module, the same batches, the same optimizer.

    python tests/benchmarks/training_loop.py

Both sides run on one thread, in turns of one epoch each, first one and then the other in the lead; times are CPU
seconds, and the median of the turns counts. The hand-written loop does what such loops do: cut the windows out of the
array, forward, cross-entropy, backward, a step of the fused AdamW. The handle also takes the exact mean over masks,
looks at every step whether its gradient is finite, and records losses.
"""

from __future__ import annotations

import os

for _threads in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[_threads] = "1"

import argparse  # noqa: E402  (the thread counts are read when NumPy and torch are imported)
import copy  # noqa: E402
import platform  # noqa: E402
import statistics  # noqa: E402
import time  # noqa: E402

import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402

import mixle  # noqa: E402
from mixle.data.schedule import Schedule  # noqa: E402
from mixle.data.window_spec import WindowSpec  # noqa: E402
from mixle.models.streaming_transformer_leaf import StreamingTransformerLeafEstimator  # noqa: E402
from mixle.models.transformer import CausalLM  # noqa: E402
from mixle.utils.parallel.torch_neural import StreamingTokenEncodedData  # noqa: E402

BAR = 0.97
VOCAB, BLOCK, RATE = 256, 128, 1e-3


class HandWritten:
    """The loop that one would write for these windows."""

    def __init__(self, module: CausalLM, tokens: np.ndarray, targets: str, batch_size: int) -> None:
        self.module, self.targets, self.batch_size = module.train(), targets, batch_size
        self.tokens, self.offsets, self.epoch = torch.from_numpy(tokens), torch.arange(BLOCK + 1), 0
        self.spec = WindowSpec(BLOCK, targets)
        self.schedule = Schedule(self.spec, batch_size, n_tokens=len(tokens))
        matrices = [p for p in module.parameters() if p.ndim >= 2]
        others = [p for p in module.parameters() if p.ndim < 2]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.95), fused=True)

    def order(self) -> list[torch.Tensor]:
        """The starts of every batch of the next epoch: those that the handle trains."""
        steps = range(self.schedule.steps_per_epoch)
        return [torch.from_numpy(self.schedule.window_indices(0, self.epoch, step) * self.spec.hop) for step in steps]

    def train(self, order: list[torch.Tensor]) -> None:
        for starts in order:
            rows = self.tokens[starts[:, None] + self.offsets]
            if self.targets == "last":
                loss = F.cross_entropy(self.module(rows[:, :-1], last_only=True), rows[:, -1])
            else:
                logits = self.module(rows[:, :-1])
                loss = F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.epoch += 1


def compare(targets: str, steps: int, rounds: int, batch_size: int) -> tuple[float, float, int, float]:
    """Return CPU seconds per epoch of handle and loop, targets per epoch, and how far the parameters differ."""
    windows = steps * batch_size
    n = windows + BLOCK if targets == "last" else windows * BLOCK + 1
    tokens = np.random.default_rng(0).integers(0, VOCAB, n)
    torch.manual_seed(0)
    module = CausalLM(VOCAB, 128, 4, 4, BLOCK)
    by_hand = HandWritten(copy.deepcopy(module), tokens, targets, batch_size)
    handle = StreamingTokenEncodedData(tokens, block=BLOCK, batch_size=batch_size, targets=targets)
    estimator, leaf = StreamingTransformerLeafEstimator(module, RATE), None
    ours: list[float] = []
    theirs: list[float] = []
    for turn in range(rounds + 1):  # the first is for warming up
        for side in ("ours", "theirs") if turn % 2 else ("theirs", "ours"):
            order = by_hand.order()
            began = time.process_time()
            if side == "ours":
                leaf = mixle.seq_estimate(handle, estimator, leaf)
                ours.append(time.process_time() - began)
            else:
                by_hand.train(order)
                theirs.append(time.process_time() - began)
    pairs = zip(module.parameters(), by_hand.module.parameters(), strict=True)
    gap = max(float((a - b).detach().abs().max()) for a, b in pairs)
    return statistics.median(ours[1:]), statistics.median(theirs[1:]), len(handle), gap


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=6, help="steps per turn")
    parser.add_argument("--rounds", type=int, default=8, help="turns of each side")
    parser.add_argument("--batch-size", type=int, default=16)
    args = parser.parse_args()
    print(f"mixle {mixle.__version__}, torch {torch.__version__}, numpy {np.__version__}, one thread")
    print(f"python {platform.python_version()} on {platform.platform()}, {processor()}")
    print(f"CausalLM of 4 layers, d_model 128, block {BLOCK}, vocab {VOCAB}; batches of {args.batch_size} windows")
    print(f"median of {args.rounds} turns of {args.steps} steps; tokens per CPU second")
    print(f"{'targets':<9}{'handle':>12}{'by hand':>12}{'ratio':>8}{'trained targets':>18}{'parameters differ by':>23}")
    for targets in ("last", "all"):
        ours, theirs, trained, gap = compare(targets, args.steps, args.rounds, args.batch_size)
        tokens, ratio = args.steps * args.batch_size * BLOCK, theirs / ours
        rates = f"{tokens / ours:>12,.0f}{tokens / theirs:>12,.0f}{ratio:>8.3f}{trained / ours:>18,.0f}"
        print(f"{targets:<9}{rates}{gap:>23.1e}{'' if ratio >= BAR else f'  below the bar of {BAR}'}")


def processor() -> str:
    """Return the processor's name and number, where the system tells."""
    try:
        with open("/proc/cpuinfo") as info:
            names = [line.split(":", 1)[1].strip() for line in info if line.startswith("model name")]
    except OSError:
        names = []
    return f"{os.cpu_count()} x {names[0] if names else platform.machine()}"


if __name__ == "__main__":
    main()
