"""Train the same data on however many ranks there are, and compare every gradient with a plain loop's.

The reference knows nothing of schedules: it walks over every rank's windows in their natural order, in one process.
"""

from __future__ import annotations

import copy
import hashlib

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torchrun import report

from mixle import seq_estimate
from mixle.models.streaming_transformer_leaf import StreamingTransformerLeafEstimator
from mixle.models.transformer import CausalLM
from mixle.training import TrainingOptions
from mixle.utils.parallel.process_group import join
from mixle.utils.parallel.torch_neural import StreamingTokenEncodedData

BLOCK, BATCH, VOCAB, RATE = 8, 4, 29, 0.05
peers = join()
rank, world = peers.rank, peers.world
wrappings = ["ddp", "fsdp"] if world > 1 else ["none", "ddp", "fsdp"]
WINDOWS = {1: [(50,)], 2: [(3, 50), (0, 50)], 3: [(0, 3, 50)]}[world]


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def model(seed: int = 0) -> CausalLM:
    torch.manual_seed(seed)
    return CausalLM(VOCAB, 16, 2, 2, BLOCK)


def shards(windows: tuple[int, ...], targets: str) -> list[np.ndarray]:
    rng = np.random.default_rng(7)
    if targets == "last":
        lengths = [count + BLOCK if count else BLOCK - 2 for count in windows]
    else:
        lengths = [count * BLOCK - 2 if count else 1 for count in windows]
    return [rng.integers(0, VOCAB, length) for length in lengths]


def mean_loss(module: nn.Module, rows: list[tuple[np.ndarray, np.ndarray]]) -> torch.Tensor:
    """The mean over all targets of rows of (context, targets of its last positions)."""
    losses = []
    for context, targets in rows:
        logits = module(torch.from_numpy(context)[None])[0, -len(targets) :]
        losses.append(F.cross_entropy(logits, torch.from_numpy(targets), reduction="none"))
    return torch.cat(losses).mean()


def rows_of(shard: np.ndarray, targets: str) -> list[tuple[np.ndarray, np.ndarray]]:
    if targets == "last":
        return [(shard[i : i + BLOCK], shard[i + BLOCK : i + BLOCK + 1]) for i in range(len(shard) - BLOCK)]
    starts = range(0, len(shard) - 1, BLOCK)
    return [(shard[i : min(i + BLOCK, len(shard) - 1)], shard[i + 1 : i + BLOCK + 1]) for i in starts]


def reference(module: nn.Module, arrays: list[np.ndarray], targets: str, accumulation: int) -> list[list[torch.Tensor]]:
    """The gradient of every optimizer step, of the mean over all ranks' targets."""
    rows = [rows_of(array, targets) for array in arrays]
    steps = max(-(-len(own) // BATCH) for own in rows)
    gradients = []
    for first in range(0, steps, accumulation):
        low, high = first * BATCH, (first + accumulation) * BATCH
        loss = mean_loss(module, [row for own in rows for row in own[low:high]])
        found = torch.autograd.grad(loss, list(module.parameters()))
        gradients.append(list(found))
        with torch.no_grad():
            for p, g in zip(module.parameters(), found, strict=True):
                p -= RATE * g
    return gradients


def fit(module: nn.Module, handle: StreamingTokenEncodedData, previous: object = None, **options: object) -> object:
    estimator = StreamingTransformerLeafEstimator(module, RATE, optimizer="sgd", **options)
    return seq_estimate(handle, estimator, previous)


def recorded_gradients(module: nn.Module, handle: StreamingTokenEncodedData) -> list[list[torch.Tensor]]:
    gradients: list[list[torch.Tensor]] = []
    hook = register_optimizer_step_pre_hook(lambda *_: gradients.append([whole(p.grad) for p in module.parameters()]))
    fit(module, handle)
    hook.remove()
    return gradients


def deviation(found: list[list[torch.Tensor]], expected: list[list[torch.Tensor]]) -> float:
    """The largest difference at any step, relative to that step's largest entry; infinite if steps are missing."""
    if len(found) != len(expected):
        return float("inf")
    worst = 0.0
    for a, b in zip(found, expected, strict=True):
        largest = max(float(g.abs().max()) for g in b)
        worst = max(worst, *(float((x - y).abs().max()) / largest for x, y in zip(a, b, strict=True)))
    return worst


def digest(module: nn.Module) -> str:
    return hashlib.sha256(b"".join(whole(p).numpy().tobytes() for p in module.parameters())).hexdigest()


def flat(module: nn.Module) -> list[float]:
    return torch.cat([whole(p).flatten() for p in module.parameters()]).tolist()


gradients = {}
for windows in WINDOWS:
    for targets in ("last", "all"):
        for wrapping in wrappings:
            for accumulation in (1, 3):
                arrays = shards(windows, targets)
                handle = StreamingTokenEncodedData(
                    arrays[rank],
                    block=BLOCK,
                    batch_size=BATCH,
                    targets=targets,
                    shuffle=False,
                    shard_by_rank=False,
                    parallel=wrapping,
                    training=TrainingOptions(gradient_accumulation=accumulation),
                )
                # Every rank but 0 begins with other parameters: rank 0's win.
                found = recorded_gradients(model(seed=rank), handle)
                expected = reference(model(), arrays, targets, accumulation)
                gradients[f"{windows} {targets} {wrapping} accumulation={accumulation}"] = deviation(found, expected)
                handle.close()

tokens = np.random.default_rng(3).integers(0, VOCAB, 400)
traces, same, continued, clipped = {}, {}, {}, {}
for wrapping in wrappings:
    for targets in ("last", "all"):
        module = model(seed=rank)
        options = {"block": BLOCK, "batch_size": 12 // world, "targets": targets, "parallel": wrapping}
        handle = StreamingTokenEncodedData(tokens, **options, epochs=2, sampling="global")
        leaf = fit(module, handle)
        traces[f"{wrapping} {targets}"] = {"losses": list(leaf.history), "parameters": flat(module)}
        handle.close()

    options = {"block": BLOCK, "batch_size": BATCH, "targets": "all", "parallel": wrapping, "boundary": "overlap"}
    once, twice = model(), model()
    handle = StreamingTokenEncodedData(tokens, **options, epochs=2)
    fit(once, handle, momentum=0.9)
    handle.close()
    handle = StreamingTokenEncodedData(tokens, **options)
    fit(twice, handle, fit(twice, handle, momentum=0.9), momentum=0.9)
    handle.close()
    continued[wrapping] = digest(once) == digest(twice)
    same[wrapping] = peers.exchange("digest", digest(once))

    limit, free = 0.01, copy.deepcopy(model())
    bounded = model()
    handle = StreamingTokenEncodedData(tokens, **options, shuffle=False, training=TrainingOptions(max_grad_norm=limit))
    found = recorded_gradients(bounded, handle)
    handle.close()
    clipped[wrapping] = [float(torch.stack([g.norm() for g in step]).norm()) / limit for step in found]

report({"gradients": gradients, "traces": traces, "same": same, "continued": continued, "clipped": clipped})
