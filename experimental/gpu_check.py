"""Train a 124M-parameter model through the streaming handle on every CUDA path, beside a loop written by hand.

Each row trains the same model from the same parameters on the same batches, twice: once to warm up, once timed. All
must end with the same loss; the ratio is tokens per second over those of the hand-written loop that computes alike.
Run it with experimental/gpu_check.sh; with --rehearse a tiny model does the same on the CPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import platform
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn.functional import cross_entropy

from mixle.models.streaming_transformer_leaf import StreamingTransformerLeafEstimator
from mixle.models.transformer import CausalLM
from mixle.stats.sequence import seq_estimate
from mixle.training import OptimizerOptions
from mixle.utils.parallel.torch_neural import StreamingTokenEncodedData

# Dense peaks from the vendor's data sheets, FLOP/s: bf16 on tensor cores, fp32 off them.
PEAKS = {
    "H200": {"bf16": 989e12, "fp32": 67e12},
    "H100": {"bf16": 989e12, "fp32": 67e12},
    "A100": {"bf16": 312e12, "fp32": 19.5e12},
}
LOSS_TOLERANCE = 0.02
OPTIMIZER = OptimizerOptions(lr=3e-4)


@dataclass(frozen=True)
class Size:
    """The model and the work of one row."""

    vocab: int
    d_model: int
    layers: int
    heads: int
    block: int
    batch: int
    steps: int

    def model(self) -> CausalLM:
        torch.manual_seed(0)
        return CausalLM(self.vocab, self.d_model, self.layers, self.heads, self.block)

    def tokens(self) -> np.ndarray:
        """Return ids of a Zipf-like distribution, so that there is something to learn."""
        draws = np.random.default_rng(0).zipf(1.2, self.steps * self.batch * self.block + 1)
        return np.minimum(draws - 1, self.vocab - 1).astype(np.uint16)

    def flops_per_token(self, parameters: int) -> float:
        """Return FLOP per token, both passes (arXiv 2204.02311, appendix B), causal attention counted whole."""
        return 6 * parameters + 12 * self.layers * self.d_model * self.block


GPT2_SMALL = Size(vocab=50304, d_model=768, layers=12, heads=12, block=1024, batch=16, steps=20)
TINY = Size(vocab=64, d_model=32, layers=2, heads=2, block=32, batch=4, steps=6)


@dataclass(frozen=True)
class Case:
    """One row: how the handle trains, or that a loop is written by hand."""

    name: str
    precision: str = "bf16"
    parallel: str = "none"
    checkpointing: bool = False
    compiled: bool = False
    by_hand: bool = False


CASES = (
    Case("by hand, fp32", precision="fp32", by_hand=True),
    Case("handle, fp32", precision="fp32"),
    Case("by hand, bf16", by_hand=True),
    Case("handle, bf16"),
    Case("handle, bf16, DDP on NCCL", parallel="ddp"),
    Case("handle, bf16, FSDP2", parallel="fsdp"),
    Case("handle, bf16, FSDP2, checkpointing", parallel="fsdp", checkpointing=True),
    Case("by hand, bf16, compiled", compiled=True, by_hand=True),
    Case("handle, bf16, compiled", compiled=True),
    Case("handle, bf16, FSDP2, compiled", parallel="fsdp", compiled=True),
)


@dataclass(frozen=True)
class Row:
    """What a case did."""

    tokens_per_second: float
    final_loss: float
    peak_gib: float


def run_case(case: Case, size: Size, device: torch.device) -> Row:
    """Warm up, then time one pass over the tokens."""
    model = size.model().to(device)
    if case.compiled:
        for block in model.blocks:
            block.compile()
    one_pass = (by_hand if case.by_hand else with_handle)(case, size, model, device)
    one_pass()
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    started = time.perf_counter()
    loss = one_pass()
    if device.type == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - started
    peak = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else float("nan")
    return Row(size.steps * size.batch * size.block / seconds, loss, peak)


def with_handle(case: Case, size: Size, model: CausalLM, device: torch.device) -> Callable[[], float]:
    """Return a pass through ``seq_estimate``; the second goes on from the first."""
    handle = StreamingTokenEncodedData(
        size.tokens(),
        block=size.block,
        batch_size=size.batch,
        shuffle=False,
        targets="all",
        parallel=case.parallel,
        precision=case.precision,
        activation_checkpointing=case.checkpointing,
    )
    estimator = StreamingTransformerLeafEstimator(model, lr=OPTIMIZER.lr, device=device.type)
    leaf = None

    def one_pass() -> float:
        nonlocal leaf
        leaf = seq_estimate(handle, estimator, leaf)
        return leaf.history[-1].loss

    return one_pass


def by_hand(case: Case, size: Size, model: CausalLM, device: torch.device) -> Callable[[], float]:
    """Return a pass of the same steps without the library's loop."""
    optimizer = OPTIMIZER.build(model.parameters())
    windows = size.steps * size.batch
    starts = np.arange(windows)[:, None] * size.block + np.arange(size.block + 1)
    batches = size.tokens()[starts].reshape(size.steps, size.batch, size.block + 1)

    def one_pass() -> float:
        model.train()
        for batch in batches:
            ids = torch.from_numpy(batch.astype(np.int64)).to(device)
            with torch.autocast(device.type, torch.bfloat16, enabled=case.precision == "bf16"):
                logits = model(ids[:, :-1])
                loss = cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return loss.item()

    return one_pass


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rehearse", action="store_true", help="a tiny model on the CPU, to try the program itself")
    rehearse = parser.parse_args().rehearse
    device = torch.device("cpu" if rehearse else "cuda")
    size = TINY if rehearse else GPT2_SMALL
    name = platform.machine() if rehearse else torch.cuda.get_device_name()
    peaks = next((peak for key, peak in PEAKS.items() if key in name), {})
    parameters = sum(parameter.numel() for parameter in size.model().parameters())
    print(f"{time.strftime('%Y-%m-%d')}  {name}  python {platform.python_version()}  torch {torch.__version__}")
    print(f"{parameters / 1e6:.1f}M parameters, {dataclasses.asdict(size)}")
    # Compiling on the CPU takes a C++ compiler that a rehearsal should not need.
    cases = [case for case in CASES if not (rehearse and case.compiled)]
    rows: dict[Case, Row] = {}
    failed = []
    for case in cases:
        try:
            rows[case] = run_case(case, size, device)
        except Exception:
            traceback.print_exc()
            failed.append(f"{case.name}: raised")
        if device.type == "cuda":
            torch.cuda.empty_cache()
        torch.compiler.reset()
    print(f"{'':38}{'tokens/s':>12}{'ratio':>8}{'MFU':>8}{'peak GiB':>10}{'loss':>9}")
    for case, row in rows.items():
        alike = Case(name="", precision=case.precision, compiled=case.compiled, by_hand=True)
        rival = next((r for c, r in rows.items() if dataclasses.replace(c, name="") == alike), row)
        ratio = row.tokens_per_second / rival.tokens_per_second
        flops = row.tokens_per_second * size.flops_per_token(parameters)
        mfu = f"{flops / peaks[case.precision]:.1%}" if peaks else "n/a"
        print(
            f"{case.name:38}{row.tokens_per_second:12,.0f}{ratio:8.3f}{mfu:>8}{row.peak_gib:10.2f}{row.final_loss:9.4f}"
        )
        if abs(row.final_loss - rival.final_loss) > LOSS_TOLERANCE * rival.final_loss:
            failed.append(f"{case.name}: its loss {row.final_loss:.4f} is not {rival.final_loss:.4f}, as by hand")
    for reason in failed:
        print(f"FAILED  {reason}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
