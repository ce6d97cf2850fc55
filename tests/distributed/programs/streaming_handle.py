"""Two ranks use the streaming handle in every way that was seen to go wrong; each case's results go under its name."""

from __future__ import annotations

import pickle
import tempfile
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from conditional import Conditional
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torchrun import error_of, report, wait_for_report

from mixle import optimize, seq_estimate, seq_initialize, seq_log_density, seq_log_density_sum
from mixle.data.token_file import TokenFile
from mixle.models.streaming_transformer_leaf import StreamingTransformerLeaf, StreamingTransformerLeafEstimator
from mixle.models.transformer import CausalLM
from mixle.stats.markov_chain import MarkovChainEstimator
from mixle.training import Evaluation, StopTraining, TrainingOptions
from mixle.utils.parallel.process_group import join
from mixle.utils.parallel.torch_neural import StreamingTokenEncodedData

BLOCK, VOCAB = 8, 17
job = join()
rank = job.rank
results: dict[str, object] = {}
folder = Path(job.exchange("folder", tempfile.mkdtemp())[0])
tokens = np.random.default_rng(0).integers(0, VOCAB, 300)


def model(seed: int = 0, **options: object) -> CausalLM:
    torch.manual_seed(seed)
    return CausalLM(VOCAB, 16, 2, 2, BLOCK, **options)


def handle_on(data: object = tokens, **options: object) -> StreamingTokenEncodedData:
    return StreamingTokenEncodedData(data, **{"block": BLOCK, "batch_size": 4, "targets": "all", **options})


def estimator(module: nn.Module, **options: object) -> StreamingTransformerLeafEstimator:
    return StreamingTransformerLeafEstimator(module, 0.01, **options)


def equal_everywhere(leaf: StreamingTransformerLeaf) -> bool:
    dense = leaf.unshard().module
    mine = float(sum(p.detach().double().sum() for p in dense.parameters()))
    return len(set(job.exchange("sums", repr(mine)))) == 1


class Faulty(nn.Module):
    """A model whose loss is NaN, or that raises, on rank 1 at one of its training steps."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.inner, self.fault, self.calls = model(), fault, 0
        self.vocab = VOCAB

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits = self.inner(ids)
        self.calls += self.training
        if self.training and rank == 1 and self.calls == 3:
            if self.fault == "raise":
                raise ZeroDivisionError("in the module")
            logits = logits * float(self.fault)
        return logits


class Unreadable(TokenFile):
    """Tokens on a disk that fails at the third batch."""

    reads = 0

    def windows(self, starts: np.ndarray, width: int) -> np.ndarray:
        self.reads += 1
        if self.reads == 3:
            raise OSError("the disk is gone")
        return super().windows(starts, width)


# ---- what is refused, on every rank

results["short shards"] = error_of(handle_on, np.arange(32) % VOCAB, block=16, targets="last")
with handle_on(np.arange(32) % VOCAB, block=16, targets="last", boundary="overlap") as handle:
    results["short shards, overlapping"] = handle.schedule_receipt["global_real_target_tokens_per_epoch"]
    module = CausalLM(VOCAB, 16, 1, 2, 16)
    results["short shards, trained"] = sum(r.targets for r in seq_estimate(handle, estimator(module)).history)
results["none"] = error_of(handle_on, parallel="none")
results["other lengths"] = error_of(handle_on, tokens[: 300 - rank])
results["other arguments"] = error_of(handle_on, batch_size=4 + rank)
results["other recomputation"] = error_of(handle_on, activation_checkpointing=rank == 1)
other_options: dict[str, tuple[object, object]] = {
    "gradient_accumulation": (1, 2),
    "max_grad_norm": (None, 0.5),
    "nonfinite": ("raise", "skip"),
    "deadline_s": (30.0, 20.0),
    "callbacks": ([print], []),
    "evaluation": (None, Evaluation(tokens[:50], every=2)),
}
for name, values in other_options.items():
    results[f"other {name}"] = error_of(handle_on, training=TrainingOptions(**{name: values[rank]}))
heldout = Evaluation(tokens[: 50 + rank], every=2)
results["other held-out data"] = error_of(handle_on, training=TrainingOptions(evaluation=heldout))
own_options = TrainingOptions(callbacks=[str, repr][: 1 + rank], progress=rank == 1)
with handle_on(training=own_options) as handle:
    results["own callbacks and progress"] = len(seq_estimate(handle, estimator(model())).history)

spoilt = tokens.copy()
spoilt[-20] = 99
module = model()
with handle_on(spoilt) as handle:
    results["bad id"] = error_of(seq_estimate, handle, estimator(module))
    results["bad id, parameters"] = all(map(torch.equal, module.parameters(), model().parameters()))
with handle_on(spoilt, sampling="global") as handle:
    results["bad id, global"] = error_of(seq_estimate, handle, estimator(model()))
with handle_on() as handle:
    other = CausalLM(VOCAB, 16 + 16 * rank, 2, 2, BLOCK)
    results["other modules"] = error_of(seq_estimate, handle, estimator(other))

# ---- two handles in one process, one of them closed

first, second = handle_on(), handle_on()
leaf = seq_estimate(first, estimator(model(seed=rank)))
first.close()
leaf = seq_estimate(second, leaf.estimator(), leaf)
results["second handle"] = [dist.is_initialized(), len(leaf.history), equal_everywhere(leaf)]
second.close()

# ---- the verbs, replicated and sharded

for wrapping in ("ddp", "fsdp"):
    case: dict[str, object] = {}
    recompute = TrainingOptions(deadline_s=60.0)
    with handle_on(parallel=wrapping, activation_checkpointing=True, training=recompute) as handle:
        module = model(seed=rank)
        names = sorted(module.state_dict())
        leaf = None
        for _ in range(3):
            leaf = seq_estimate(handle, estimator(module), leaf)
        case["checkpoint wrappers"] = sum(isinstance(part, CheckpointWrapper) for part in module.modules())
        case["names kept"] = names == sorted(module.state_dict())
        case["sharded"] = leaf.is_sharded
        count, total = seq_log_density_sum(handle, leaf)
        case["scores"] = [count, total, len(handle)]
        own = np.concatenate(seq_log_density(handle, leaf))
        case["own scores"] = [len(own), float(own.sum()), handle.local_target_tokens]
        case["generated"] = leaf.generate([1, 2, 3], 5).tolist() if wrapping == "fsdp" else []
        case["predicted"] = float(leaf.predict([1, 2, 3]).sum())
        dense = leaf.unshard()
        case["dense scores"] = seq_log_density_sum(handle, dense)[1]
        leaf.save(folder / wrapping)
        job.meet("saved")
        loaded = StreamingTransformerLeaf.load(folder / wrapping)
        case["loaded scores"] = seq_log_density_sum(handle, loaded)[1]
        case["pickled scores"] = seq_log_density_sum(handle, pickle.loads(pickle.dumps(leaf)))[1]
        further = seq_estimate(handle, estimator(module), leaf)
        reloaded = seq_estimate(handle, loaded.estimator(), loaded)
        case["goes on from the loaded"] = list(reloaded.history) == list(further.history)
    results[wrapping] = case

# ---- a collective call on one rank only

with handle_on(parallel="fsdp", training=TrainingOptions(deadline_s=2.0)) as handle:
    leaf = seq_estimate(handle, estimator(model()))
    if rank == 0:
        results["alone"] = error_of(seq_log_density_sum, handle, leaf)
        results["alone, predicting"] = error_of(leaf.predict, [1, 2])
        report(results)
    wait_for_report(0)
    job.meet("together again")
    results["together again"] = seq_log_density_sum(handle, leaf)[0]

with handle_on(parallel="fsdp", precision="bf16") as handle:
    leaf = seq_estimate(handle, estimator(model()))
    results["bf16"] = [leaf.history[0].loss, leaf.history[-1].loss, str(next(leaf.module.parameters()).dtype)]
    results["resharded otherwise"] = ""
    with handle_on(parallel="fsdp", precision="fp32") as other_handle:
        results["resharded otherwise"] = error_of(seq_estimate, other_handle, leaf.estimator(), leaf)

with handle_on(epochs=2) as handle:
    fitted = optimize(None, estimator(model(seed=rank)), enc_data=handle, max_its=2, progress=False)
    results["optimize"] = [type(fitted).__name__, equal_everywhere(fitted)]
    initial = seq_initialize(handle, estimator(model(seed=rank)), 0)
    results["initialize"] = equal_everywhere(initial)
    chain = seq_estimate(handle, MarkovChainEstimator())
    results["chain"] = [chain.to_dict(), seq_log_density_sum(handle, chain)]

# ---- parameters that a forward pass leaves out on one rank or on all

for accumulation in (1, 2):
    options = TrainingOptions(gradient_accumulation=accumulation)
    with handle_on(sampling="global", parallel="ddp", batch_size=2, epochs=2, training=options) as handle:
        module = Conditional(VOCAB)
        leaf = seq_estimate(handle, estimator(module))
        results[f"conditional, {accumulation}"] = {n: p.tolist() for n, p in module.named_parameters()}
        results[f"conditional, {accumulation}, equal"] = equal_everywhere(leaf)

# ---- five tokens of work

five = np.arange(5) % VOCAB
with handle_on(five, block=2, batch_size=1, boundary="overlap") as handle:
    module = CausalLM(VOCAB, 8, 1, 1, 2)
    leaf = seq_estimate(handle, estimator(module))
    results["five"] = [len(leaf.history), seq_log_density_sum(handle, leaf)[0], len(seq_log_density(handle, leaf))]
    chain = seq_initialize(handle, MarkovChainEstimator(), 0)
    chain = optimize(None, MarkovChainEstimator(), enc_data=handle, max_its=2, progress=False)
    results["five, chain"] = seq_log_density_sum(handle, chain)[0]

# ---- evaluation and callbacks

seen: list[float | None] = []


def stop_on_rank_1_after_4(record: object) -> None:
    seen.append(record.evaluation)
    if rank == 1 and record.step == 4:
        raise StopTraining


options = TrainingOptions(evaluation=Evaluation(tokens[:101], every=2), callbacks=[stop_on_rank_1_after_4])
with handle_on(training=options) as handle:
    leaf = seq_estimate(handle, estimator(model()))
    results["stopped"] = [len(leaf.history), seen]

# ---- what goes wrong while training

for fault in ("nan", "inf"):
    for wrapping in ("ddp", "fsdp"):
        with handle_on(parallel=wrapping, training=TrainingOptions(nonfinite="skip")) as handle:
            leaf = seq_estimate(handle, estimator(Faulty(fault)))
            results[f"skip {fault} {wrapping}"] = [
                leaf.state.skipped,
                [r.step for r in leaf.history if r.skipped],
                bool(np.isfinite(seq_log_density_sum(handle, leaf)[1])),
                equal_everywhere(leaf),
            ]
with handle_on() as handle:
    module = Faulty("nan")
    results["raise"] = error_of(seq_estimate, handle, estimator(module))
    results["raise, group alive"] = error_of(job.meet, "after a step that is not finite")


def fail_on_rank_1_at_2(record: object) -> None:
    if rank == 1 and record.step == 2:
        raise KeyError("in the callback")


if rank == 0:
    TokenFile.write(folder / "tokens.bin", tokens)
job.meet("the file is written")
for cause in ("module", "callback", "data"):
    data = Unreadable(folder / "tokens.bin") if cause == "data" and rank == 1 else tokens
    callbacks = [fail_on_rank_1_at_2] if cause == "callback" else []
    with handle_on(data, training=TrainingOptions(callbacks=callbacks)) as handle:
        module = Faulty("raise") if cause == "module" else model()
        results[f"fails: {cause}"] = error_of(seq_estimate, handle, estimator(module))
    with handle_on() as handle:
        results[f"fails: {cause}, then trains"] = len(seq_estimate(handle, estimator(model())).history)

# ---- the group is gone

job.close()
with handle_on(parallel="fsdp") as handle:
    leaf = seq_estimate(handle, estimator(model()))
results["after the group"] = error_of(leaf.predict, [1, 2])
report(results)
