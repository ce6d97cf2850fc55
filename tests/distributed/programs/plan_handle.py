"""What a handle with a plan does around the steps, on 4 ranks, under plans that between them have every axis."""

from __future__ import annotations

import hashlib
import os
import tempfile

import numpy as np
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torchrun import error_of, report

from mixle import seq_estimate
from mixle.data.token_windows import TokenBatch, gather
from mixle.experimental.tensor_pipeline_context_parallel import propose_plans
from mixle.experimental.tensor_pipeline_context_parallel.parallelize import parts_of
from mixle.models.streaming_transformer_leaf import StreamingTransformerLeaf, StreamingTransformerLeafEstimator
from mixle.models.transformer import CausalLM
from mixle.stats.categorical import CategoricalEstimator
from mixle.stats.sequence import seq_log_density_sum
from mixle.training import Evaluation, StopTraining, TrainingOptions, token_batches
from mixle.utils.parallel.process_group import join
from mixle.utils.parallel.torch_neural import StreamingTokenEncodedData

BLOCK, VOCAB, GLOBAL_BATCH = 8, 24, 8
TOKENS = np.random.default_rng(1).integers(0, VOCAB, 170)
PLANS = {
    "tp=2 pp=2": {"tp_size": 2, "pp_size": 2, "microbatches": 4},
    "dp=2 cp=2 fsdp": {"cp_size": 2, "parallel": "fsdp"},
    "dp=2 pp=2 zero-bubble fsdp": {"pp_size": 2, "pp_schedule": "zero-bubble", "parallel": "fsdp"},
    "tp=2 cp=2 allgather": {"tp_size": 2, "cp_size": 2, "cp_mode": "allgather"},
}
COMBINED = ("tp=2 pp=2", "dp=2 cp=2 fsdp")
peers = join()
rank, world = peers.rank, peers.world


def model(block: int = BLOCK, **options: object) -> CausalLM:
    torch.manual_seed(0)
    return CausalLM(VOCAB, 16, 4, 2, block, **options)


def handle_on(tokens: object = TOKENS, **options: object) -> StreamingTokenEncodedData:
    within = options.get("tp_size", 1) * options.get("pp_size", 1) * options.get("cp_size", 1)
    given = {"batch_size": GLOBAL_BATCH // (world // within if within <= world else 1), "sampling": "global"}
    return StreamingTokenEncodedData(tokens, **{"block": BLOCK, "targets": "all", "epochs": 2, **given, **options})


def fit(module: nn.Module, previous: object = None, tokens: object = TOKENS, **options: object):
    handle = handle_on(tokens, **options)
    try:
        return seq_estimate(handle, StreamingTransformerLeafEstimator(module), previous)
    finally:
        handle.close()


def alone(module: nn.Module | None = None, **options: object) -> list[float]:
    """The losses of one process: all ranks train the same replica."""
    given = {"block": BLOCK, "targets": "all", "epochs": 2, "sampling": "global", **options}
    own = StreamingTokenEncodedData(TOKENS, batch_size=GLOBAL_BATCH // world, **given)
    leaf = seq_estimate(own, StreamingTransformerLeafEstimator(module or model()))
    own.close()
    return list(leaf.history)


def score(leaf: StreamingTransformerLeaf, **options: object) -> tuple[float, float]:
    handle = handle_on(**options)
    try:
        return seq_log_density_sum(handle, leaf)
    finally:
        handle.close()


def digest(leaf: StreamingTransformerLeaf) -> str:
    dense = leaf.unshard()
    tensors = [p for _, p in sorted(dense.module.named_parameters())]
    moments = sorted(dense.state.optimizer.dense().items())
    tensors += [t for _, slots in moments for _, t in sorted(slots.items())]
    return hashlib.sha256(b"".join(t.detach().numpy().tobytes() for t in tensors)).hexdigest()


results: dict[str, dict] = {
    name: {}
    for name in [
        "digests",
        "losses",
        "continued",
        "recomputed",
        "bf16",
        "clipped",
        "accumulated",
        "scores",
        "dense",
        "predictions",
        "generated",
        "saved",
        "dropout",
    ]
}
results["alone"] = alone()
results["accumulated_alone"] = alone(training=TrainingOptions(gradient_accumulation=2))
for name, plan in PLANS.items():
    once = fit(model(), **plan)
    results["losses"][name] = list(once.history)
    results["digests"][name] = peers.exchange("digest", digest(once))
    twice = model()
    again = fit(twice, fit(twice, epochs=1, **plan), epochs=1, **plan)
    results["continued"][name] = digest(again) == digest(once)
    if name in COMBINED:
        results["recomputed"][name] = list(fit(model(), activation_checkpointing=True, **plan).history)
        results["bf16"][name] = list(fit(model(), precision="bf16", **plan).history)
        accumulation = TrainingOptions(gradient_accumulation=2)
        results["accumulated"][name] = list(fit(model(), training=accumulation, **plan).history)

    bounded, norms = model(), []

    def record(*_: object, module: CausalLM = bounded, norms: list = norms) -> None:
        parts = parts_of(module)
        whole = parts.layout.whole({n: p.grad for n, p in parts.parameters().items()})
        norms.append(float(torch.stack([g.norm() for g in whole.values()]).norm()) / 0.01)

    hook = register_optimizer_step_pre_hook(record)
    fit(bounded, training=TrainingOptions(max_grad_norm=0.01), epochs=1, **plan)
    hook.remove()
    results["clipped"][name] = norms

    dense = once.unshard()
    scoring = handle_on(**plan)
    planned = seq_log_density_sum(scoring, once)
    results["dense"][name] = [planned, seq_log_density_sum(scoring, dense)]
    pairs = [(TOKENS[i : i + 5], int(TOKENS[i + 5])) for i in range(3)]
    encoded = once.dist_to_encoder().seq_encode(pairs)
    scored = [float(x) for x in once.seq_log_density(encoded)]
    scoring.close()
    data_parallel = handle_on(batch_size=2)
    gathered = seq_log_density_sum(data_parallel, dense)
    data_parallel.close()
    expected = [float(x) for x in dense.seq_log_density(encoded)]
    results["scores"][name] = [[*planned, *scored], [*gathered, *expected]]
    results["predictions"][name] = [once.predict([1, 2, 3]).tolist(), dense.predict([1, 2, 3]).tolist()]
    results["generated"][name] = [leaf.generate([1, 2], 6, seed=3).tolist() for leaf in (once, dense)]
    folder = peers.exchange("folder", tempfile.mkdtemp())[0]
    once.save(os.path.join(folder, "leaf"))
    loaded = StreamingTransformerLeaf.load(os.path.join(folder, "leaf"))
    results["saved"][name] = digest(loaded) == digest(once)

    if plan.get("cp_size", 1) == 1 or plan.get("cp_mode") == "allgather":
        results["dropout"][name] = peers.exchange("dropout", digest(fit(model(dropout=0.1), epochs=1, **plan)))

proposals = propose_plans(model(), 4, hardware="cpu", global_batch_size=GLOBAL_BATCH, seq_len=BLOCK, precision="fp32")
proposal = next(each for each in proposals if each.plan.tp == 2 and each.plan.cp == 2 and each.accumulation == 1)
results["proposed"] = list(fit(model(), **proposal.handle_arguments()).history)

ODD = {"position": "learned", "norm": "layer", "bias": True, "tie_embeddings": False}
results["odd"] = {
    f"{plan} {targets}": [
        list(fit(model(block, **ODD), block=block, targets=targets, **sizes).history),
        alone(model(block, **ODD), block=block, targets=targets),
    ]
    for targets in ("all", "last")
    for block, plan, sizes in [
        (7, "tp=2 pp=2 zero-bubble", {"tp_size": 2, "pp_size": 2, "pp_schedule": "zero-bubble"}),
        (12, "tp=2 cp=2", {"tp_size": 2, "cp_size": 2}),
    ]
}

first, *others = PLANS.values()
moved = fit(model(), epochs=1, **first).unshard()
results["moved"] = list(fit(moved.module, moved, epochs=1, **others[0]).history)


class Other(CausalLM):
    """A module that a plan does not know."""


frozen = model()
frozen.norm.weight.requires_grad_(False)
planned = model()
held = fit(planned, epochs=1, **first)
tp4 = CausalLM(VOCAB, 16, 2, 2, BLOCK)
later = model()
thawed = fit(later, epochs=1, **first)
next(later.parameters()).requires_grad_(False)
results["refused"] = {
    "ring and dropout": error_of(fit, model(dropout=0.1), **PLANS["dp=2 cp=2 fsdp"]),
    "another module": error_of(fit, Other(VOCAB, 16, 4, 2, BLOCK), tp_size=2),
    "heads": error_of(fit, tp4, tp_size=4),
    "too many stages": error_of(fit, tp4, pp_size=4),
    "odd sequence": error_of(fit, CausalLM(VOCAB, 16, 4, 2, 10), cp_size=2, block=10),
    "too few ranks": error_of(handle_on, tp_size=3),
    "arrays of one replica": error_of(
        handle_on, TOKENS[: 100 + rank], shard_by_rank=False, sampling="sharded", tp_size=2
    ),
    "another plan": error_of(fit, planned, **others[0]),
    "different plans": error_of(handle_on, cp_size=2, cp_mode="allgather" if rank == 1 else "ring"),
    "none": error_of(handle_on, tp_size=1, cp_size=4, parallel="none"),
    "frozen": error_of(fit, frozen, tp_size=2),
    "frozen since": error_of(fit, later, thawed, **first),
    "scored under another plan": error_of(score, held, **others[0]),
    "scored without a plan": error_of(score, held),
    "positions": error_of(planned, torch.zeros((1, 4), dtype=torch.int64), torch.arange(4)),
}
own = handle_on(shard_by_rank=False, sampling="sharded", tp_size=2)
results["refused"]["statistics of replicas"] = error_of(seq_estimate, own, CategoricalEstimator())
own.close()


def breaking_gather(*arguments: object) -> TokenBatch:
    """Cut windows out of tokens, until rank 2 cannot read them any more."""
    reads.append(arguments)
    if len(reads) > 2 and rank == 2:
        raise OSError("the data broke")
    return gather(*arguments)


reads: list[object] = []
results["failed"] = {}
untouched = model()
bad = TOKENS.copy()
if rank == 1:
    bad[60] = VOCAB
told = error_of(fit, untouched, tokens=bad, **first)
same = all(torch.equal(a, b) for a, b in zip(untouched.parameters(), model().parameters(), strict=True))
results["failed"]["is not an id"] = [told, same]

stop = model()
steps: list[float] = []


def ask_to_stop(record: object) -> None:
    steps.append(float(record))
    if record.step == 2 and rank == 3:
        raise StopTraining


evaluation = Evaluation(TOKENS[:50], every=1)
options = TrainingOptions(callbacks=(ask_to_stop,), evaluation=evaluation)
stopped = fit(stop, training=options, **first)
results["stopped"] = len(steps)
assert all(np.isfinite(record.evaluation) for record in stopped.history)

broken = model()
handle = handle_on(**first)
token_batches.gather = breaking_gather
told = error_of(seq_estimate, handle, StreamingTransformerLeafEstimator(broken))
results["failed"]["the data broke"] = [told]
handle.close()

report(results)
