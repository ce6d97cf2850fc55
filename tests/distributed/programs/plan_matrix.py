"""Train under every plan of a world of 1, 2, 4 or 8 ranks, and compare each step with one process's.

    python tests/distributed/programs/plan_matrix.py          # all worlds, a table at the end

Under torchrun it runs the plans of that world; with ``--subset`` those that between them have every axis, schedule,
mode and wrapping. Replicas bring arrays of different lengths, down to none, and the last batch is partial. Training is
by SGD: AdamW would magnify rounding where gradients are nearly zero.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch.optim.optimizer import register_optimizer_step_pre_hook

BLOCK, BATCH, VOCAB, RATE, STEPS = 16, 4, 24, 0.05, 10
WINDOWS = (38, 29, 3, 0)
EIGHT = ((2, 2, 2, 1), (1, 2, 2, 2), (2, 1, 2, 2), (2, 2, 1, 2))
SUBSET = {
    4: [
        "dp=2 tp=2 fsdp",
        "tp=2 cp=2 ring ddp",
        "tp=4 plain",
        "cp=4 ring fsdp",
        "dp=2 cp=2 allgather ddp",
        "dp=2 pp=2 interleaved ddp",
        "dp=2 pp=2 zero-bubble fsdp",
        "pp=2 cp=2 ring gpipe ddp",
        "pp=4 1f1b plain",
    ],
    8: ["dp=2 tp=2 pp=2 zero-bubble fsdp", "dp=2 pp=2 cp=2 ring 1f1b ddp", "tp=2 pp=2 cp=2 ring interleaved fsdp"],
}


def plans(world: int) -> dict[str, dict[str, object]]:
    """Every plan of a world: what the handle is given, by name."""
    found: dict[str, dict[str, object]] = {}
    for dp, tp, pp, cp in itertools.product((1, 2, 4), repeat=4):
        if dp * tp * pp * cp != world or (world == 8 and (dp, tp, pp, cp) not in EIGHT):
            continue
        schedules = ("gpipe", "1f1b", "interleaved", "zero-bubble") if pp > 1 else ("1f1b",)
        for schedule, mode in itertools.product(schedules, ("ring", "allgather") if cp > 1 else ("ring",)):
            if mode == "allgather" and schedule != "1f1b":
                continue
            for wrapping in ("ddp", "fsdp") if dp * cp > 1 else ("plain",):
                axes = [f"{axis}={size}" for axis, size in zip(("dp", "tp", "pp", "cp"), (dp, tp, pp, cp), strict=True)]
                words = [axis for axis in axes if not axis.endswith("=1")]
                words += ([mode] if cp > 1 else []) + ([schedule] if pp > 1 else []) + [wrapping]
                found[" ".join(words)] = {
                    "tp_size": tp,
                    "pp_size": pp,
                    "cp_size": cp,
                    "cp_mode": mode,
                    "pp_schedule": schedule,
                    "microbatches": BATCH if pp > 1 else None,
                    "parallel": "auto" if wrapping == "plain" else wrapping,
                }
    return found


def model(layers: int, seed: int = 0):
    from mixle.models.transformer import CausalLM

    torch.manual_seed(seed)
    return CausalLM(VOCAB, 16, layers, 4, BLOCK)


def array(replica: int) -> np.ndarray:
    count = WINDOWS[replica]
    return np.random.default_rng(replica).integers(0, VOCAB, count * BLOCK - 2 if count else 1)


def reference(replicas: int, layers: int) -> dict[str, object]:
    """One process, by hand: losses and gradients of every step, and the parameters at the end."""
    module = model(layers)
    rows = []
    for replica in range(replicas):
        shard = array(replica)
        starts = range(0, len(shard) - 1, BLOCK)
        rows.append([(shard[i : min(i + BLOCK, len(shard) - 1)], shard[i + 1 : i + BLOCK + 1]) for i in starts])
    losses, gradients = [], []
    for step in range(STEPS):
        batch = [row for own in rows for row in own[step * BATCH : (step + 1) * BATCH]]
        each = [
            F.cross_entropy(module(torch.from_numpy(x)[None])[0], torch.from_numpy(y), reduction="none")
            for x, y in batch
        ]
        loss = torch.cat(each).mean()
        found = torch.autograd.grad(loss, list(module.parameters()))
        losses.append(loss.item())
        gradients.append(dict(zip(dict(module.named_parameters()), found, strict=True)))
        with torch.no_grad():
            for p, g in zip(module.parameters(), found, strict=True):
                p -= RATE * g
    return {"losses": losses, "gradients": gradients, "parameters": dict(module.named_parameters())}


def furthest(found: dict, expected: dict) -> float:
    """The largest difference, relative to the largest entry of all where that is above 1."""
    assert found.keys() == expected.keys()
    largest = max(1.0, *(float(t.detach().abs().max()) for t in expected.values()))
    return max(float((found[name] - expected[name]).detach().abs().max()) for name in expected) / largest


def run(name: str, options: dict[str, object], known: dict, rank: int) -> dict[str, float]:
    from mixle import seq_estimate
    from mixle.experimental.tensor_pipeline_context_parallel.parallelize import PlannedCausalLM, parts_of
    from mixle.models.streaming_transformer_leaf import StreamingTransformerLeafEstimator
    from mixle.utils.parallel.torch_neural import StreamingTokenEncodedData

    layers = 8 if options["pp_size"] == 4 and options["pp_schedule"] in ("interleaved", "zero-bubble") else 4
    world, within = int(os.environ["WORLD_SIZE"]), options["tp_size"] * options["pp_size"] * options["cp_size"]
    replicas = world // within
    replica = rank // (options["tp_size"] * options["cp_size"]) % replicas
    if rank == 0 and (replicas, layers) not in known:
        known[replicas, layers] = reference(replicas, layers)
    started = time.perf_counter()
    module, gradients = model(layers, seed=rank), []  # every rank begins with other parameters: rank 0's win

    def record(*_: object) -> None:
        if isinstance(module, PlannedCausalLM):
            parts = parts_of(module)
            gradients.append(parts.layout.whole({n: p.grad for n, p in parts.parameters().items()}))
        else:
            gradients.append({n: whole(p.grad) for n, p in module.named_parameters()})

    handle = StreamingTokenEncodedData(
        array(replica), block=BLOCK, batch_size=BATCH, targets="all", shuffle=False, shard_by_rank=False, **options
    )
    hook = register_optimizer_step_pre_hook(record)
    leaf = seq_estimate(handle, StreamingTransformerLeafEstimator(module, RATE, optimizer="sgd"))
    hook.remove()
    parameters = dict(leaf.unshard().module.named_parameters())
    handle.close()
    if rank:
        return {}
    expected = known[replicas, layers]
    assert len(gradients) == len(leaf.history) == STEPS
    return {
        "gradient": max(furthest(g, e) for g, e in zip(gradients, expected["gradients"], strict=True)),
        "loss": max(abs(a - b) for a, b in zip(leaf.history, expected["losses"], strict=True)),
        "parameter": furthest(parameters, expected["parameters"]),
        "seconds": time.perf_counter() - started,
    }


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def main() -> None:
    from torchrun import report

    from mixle.utils.parallel.process_group import join

    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    chosen = plans(world)
    if "--subset" in sys.argv and world in SUBSET:
        chosen = {name: chosen[name] for name in SUBSET[world]}
    known: dict = {}
    with join(alone=True):  # one process group for all handles
        results = {name: run(name, options, known, rank) for name, options in chosen.items()}
    report(results)


def main_of_all() -> None:
    """Launch every world and print one table."""
    root = Path(__file__).parents[3]
    sys.path[:0] = [str(root), str(root / "tests" / "support")]
    from torchrun import launch

    print(f"torch {torch.__version__}, gloo; largest difference from one process")
    print(f"{'plan':<46}{'gradient':>10}{'loss':>10}{'parameter':>11}{'seconds':>9}")
    worst: dict[str, float] = {}
    for world in (1, 2, 4, 8):
        results = launch(Path(__file__), ranks=world, timeout_s=3000).reports[0]
        for name, row in results.items():
            print(
                f"{name:<46}{row['gradient']:>10.1e}{row['loss']:>10.1e}{row['parameter']:>11.1e}{row['seconds']:>9.1f}"
            )
            worst = {what: max(worst.get(what, 0.0), row[what]) for what in ("gradient", "loss", "parameter")}
    print(json.dumps(worst))
    sys.exit(any(value > 1e-5 for value in worst.values()))


if __name__ == "__main__":
    if "RANK" in os.environ:
        main()
    else:
        main_of_all()
