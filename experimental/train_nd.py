"""Train a byte-level language model under any plan, on CPU or GPU, and print the plan, the loss and the speed.

    torchrun --standalone --nproc-per-node 4 experimental/train_nd.py --tp 2 --pp 2 --microbatches 4

Data replicas are what the other axes leave of the ranks. Without --text it reads the source of Python's own library.
"""

from __future__ import annotations

import argparse
import sysconfig
import time
from pathlib import Path

import numpy as np
import torch

from mixle.experimental.tensor_pipeline_context_parallel import validate_tp_pp_cp_plan
from mixle.experimental.tensor_pipeline_context_parallel.plan import CP_MODES, STAGES_PER_RANK
from mixle.models.streaming_transformer_leaf import StreamingTransformerLeafEstimator
from mixle.models.transformer import CausalLM
from mixle.stats.sequence import seq_estimate, seq_log_density_sum
from mixle.training import TrainingOptions
from mixle.utils.parallel.torch_neural import StreamingTokenEncodedData

VOCAB = 256


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for axis in ("tp", "pp", "cp"):
        parser.add_argument(f"--{axis}", type=int, default=1)
    parser.add_argument("--cp-mode", choices=CP_MODES, default="ring")
    parser.add_argument("--microbatches", type=int)
    parser.add_argument("--pp-schedule", choices=tuple(STAGES_PER_RANK), default="1f1b")
    parser.add_argument("--parallel", choices=("auto", "ddp", "fsdp"), default="auto")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--activation-checkpointing", action="store_true")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    for name, size in {"layers": 4, "heads": 4, "width": 64, "block": 128, "batch-size": 8, "tokens": 200_000}.items():
        parser.add_argument(f"--{name}", type=int, default=size)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--text", type=Path, help="a file; by default the source of Python's own library")
    return parser.parse_args()


def read(path: Path | None, tokens: int) -> np.ndarray:
    if path is not None:
        return np.frombuffer(path.read_bytes()[:tokens], np.uint8)
    text, length = [], 0
    for source in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text.append(source.read_bytes())
        length += len(text[-1])
        if length >= tokens:
            break
    return np.frombuffer(b"".join(text)[:tokens], np.uint8)


def main() -> None:
    chosen = arguments()
    torch.manual_seed(0)
    module = CausalLM(VOCAB, chosen.width, chosen.layers, chosen.heads, chosen.block)
    sizes = {"tp_size": chosen.tp, "pp_size": chosen.pp, "cp_size": chosen.cp}
    how = {"cp_mode": chosen.cp_mode, "microbatches": chosen.microbatches, "pp_schedule": chosen.pp_schedule}
    with StreamingTokenEncodedData(
        read(chosen.text, chosen.tokens),
        block=chosen.block,
        batch_size=chosen.batch_size,
        targets="all",
        parallel=chosen.parallel,
        precision=chosen.precision,
        activation_checkpointing=chosen.activation_checkpointing,
        training=TrainingOptions(max_grad_norm=1.0),
        **sizes,
        **how,
    ) as handle:
        sharded = chosen.parallel == "fsdp" or (chosen.parallel == "auto" and chosen.device != "cpu")
        report = validate_tp_pp_cp_plan(
            module,
            **sizes,
            **how,
            world_size=handle.world,
            batch_size=chosen.batch_size,
            block=chosen.block,
            parallel="fsdp" if sharded else "ddp",
            precision=chosen.precision,
            activation_checkpointing=chosen.activation_checkpointing,
        )
        started = time.perf_counter()
        leaf = seq_estimate(handle, StreamingTransformerLeafEstimator(module, chosen.lr, chosen.device))
        seconds = time.perf_counter() - started
        count, total = seq_log_density_sum(handle, leaf)
        if handle.rank == 0:
            losses = list(leaf.history)
            print(report)
            print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f} in {len(losses)} steps; {-total / count:.4f} afterwards")
            print(f"{len(handle) / seconds:,.0f} tokens/s over {handle.world} ranks")


if __name__ == "__main__":
    main()
