"""The streaming handle in one process: what it refuses, how training goes on, and what it leaves alone."""

from __future__ import annotations

import copy
import itertools
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.utils._python_dispatch import TorchDispatchMode

from mixle import optimize, seq_encode, seq_estimate, seq_initialize, seq_log_density, seq_log_density_sum
from mixle.models.streaming_transformer_leaf import StreamingTransformerLeafEstimator
from mixle.models.transformer import CausalLM
from mixle.stats.gaussian import GaussianEstimator
from mixle.stats.markov_chain import MarkovChainEstimator
from mixle.training import Evaluation, StopTraining, TrainingOptions
from mixle.utils.parallel.process_group import join
from mixle.utils.parallel.token_statistics import TokenStatistics
from mixle.utils.parallel.torch_neural import StreamingTokenEncodedData

BLOCK, VOCAB = 8, 23
TOKENS = np.random.default_rng(0).integers(0, VOCAB, 200)


def model(**options):
    torch.manual_seed(0)
    return CausalLM(VOCAB, 16, 2, 2, BLOCK, **options)


def handle_on(tokens=TOKENS, **options):
    return StreamingTokenEncodedData(tokens, **{"block": BLOCK, "batch_size": 4, **options})


def estimator(module, **options):
    return StreamingTransformerLeafEstimator(module, 0.01, **options)


def parameters_of(module):
    return [p.detach().clone() for p in module.parameters()]


def handle_parameters(module):
    """This process's shards of the parameters."""
    return [getattr(p, "_local_tensor", p).detach().clone() for p in module.parameters()]


def same(a, b):
    return all(map(torch.equal, a, b))


class Bigram(nn.Module):
    """An embedding and nothing else: no vocab, no block, no blocks."""

    def __init__(self, vocab=VOCAB, rows=None):
        super().__init__()
        self.table = nn.Embedding(rows or vocab, vocab)

    def forward(self, ids):
        return self.table(ids)


# ---- continuity


@pytest.mark.parametrize("targets", ["last", "all"])
def test_three_calls_of_one_epoch_are_one_call_of_three_bit_for_bit(targets):
    once, thrice = model(dropout=0.1), model(dropout=0.1)
    leaf = seq_estimate(handle_on(targets=targets, epochs=3), estimator(once))
    handle, going = handle_on(targets=targets), None
    for _ in range(3):
        going = seq_estimate(handle, estimator(thrice), going)
    assert same(parameters_of(once), parameters_of(thrice))
    assert list(leaf.history) == list(going.history)


def test_a_call_without_a_previous_estimate_starts_afresh_from_the_module_as_it_is():
    handle, module = handle_on(), model()
    first = seq_estimate(handle, estimator(module))
    trained = copy.deepcopy(module)
    again = seq_estimate(handle, estimator(module))
    assert [r.step for r in again.history] == [r.step for r in first.history]
    assert list(again.history) == list(seq_estimate(handle_on(), estimator(trained)).history)
    assert again.history[0] != first.history[0]


def test_training_goes_on_from_the_previous_leafs_module_not_the_estimators():
    handle, trained, idle = handle_on(), model(), model()
    leaf = seq_estimate(handle, estimator(trained))
    seq_estimate(handle, estimator(idle), leaf)
    assert same(parameters_of(idle), parameters_of(model()))


def test_a_leafs_estimator_carries_the_rate_and_the_optimizers_state():
    handle = handle_on()
    by_estimator, by_previous = model(), model()
    leaf = seq_estimate(handle, StreamingTransformerLeafEstimator(by_estimator, 1e-5, warmup_steps=3))
    other = seq_estimate(handle, StreamingTransformerLeafEstimator(by_previous, 1e-5, warmup_steps=3))
    assert leaf.estimator().lr == 1e-5
    seq_estimate(handle, leaf.estimator())
    seq_estimate(handle, other.estimator(), other)
    assert same(parameters_of(by_estimator), parameters_of(by_previous))


def rows_seen(module, handle, calls):
    """Every row of ids that the module is trained on, in order."""
    rows, leaf = [], None

    def note(module, arguments):
        if module.training:
            rows.extend(map(tuple, arguments[0].tolist()))

    hook = module.register_forward_pre_hook(note)
    for _ in range(calls):
        leaf = seq_estimate(handle, estimator(module), leaf)
    hook.remove()
    return rows


def test_the_order_of_the_data_goes_on_from_call_to_call_and_one_seed_fixes_it():
    thrice = rows_seen(model(), handle_on(seed=5), 3)
    assert thrice == rows_seen(model(), handle_on(seed=5, epochs=3), 1)
    assert thrice != rows_seen(model(), handle_on(seed=6), 3)
    epochs = [thrice[i : i + len(thrice) // 3] for i in range(0, len(thrice), len(thrice) // 3)]
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert len({tuple(sorted(epoch)) for epoch in epochs}) == 1


def test_a_run_that_a_callback_stopped_in_mid_epoch_goes_on_where_it_was():
    def stop_at_5(record):
        if record.step == 5:
            raise StopTraining

    whole, parts = model(), model()
    seq_estimate(handle_on(), estimator(whole))
    leaf = seq_estimate(handle_on(training=TrainingOptions(callbacks=[stop_at_5])), estimator(parts))
    assert len(leaf.history) == 5
    seq_estimate(handle_on(), estimator(parts), leaf)
    assert same(parameters_of(whole), parameters_of(parts))


def freeze(module):
    module.blocks[0].requires_grad_(False)


def unfreeze(module):
    module.blocks[0].requires_grad_(True)


def renew(module):
    for part in module.blocks[0].modules():
        for name, p in part._parameters.items():
            part._parameters[name] = None if p is None else nn.Parameter(p.detach() * 0.5)


@pytest.mark.parametrize(
    ("parallel", "changes"),
    [
        *itertools.product(("none", "ddp", "fsdp"), [(freeze, unfreeze), (unfreeze, freeze, unfreeze)]),
        ("none", (unfreeze, renew)),
        ("ddp", (unfreeze, renew)),
    ],
)
def test_parameters_that_change_between_calls_are_trained_as_on_a_handle_of_their_own(parallel, changes):
    with handle_on(parallel=parallel) as handle:
        kept, afresh, going, other = model(), model(), None, None
        for change in changes:
            change(kept)
            before = copy.deepcopy(handle_parameters(kept.blocks[0]))
            going = seq_estimate(handle, estimator(kept), going)
            moved = not same(before, handle_parameters(kept.blocks[0]))
            assert moved == (change is not freeze)
            change(afresh)
            with handle_on(parallel=parallel) as another:
                other = seq_estimate(another, estimator(afresh), other)
        assert list(going.history) == list(other.history)
        assert same(handle_parameters(kept), handle_parameters(afresh))


def test_a_parameter_replaced_in_a_sharded_module_is_refused_by_name():
    with handle_on(parallel="fsdp") as handle:
        module = model()
        leaf = seq_estimate(handle, estimator(module))
        module.norm.weight = nn.Parameter(torch.ones(16))
        with pytest.raises(ValueError, match=r"norm.weight of a sharded module was replaced"):
            seq_estimate(handle, estimator(module), leaf)


def test_ids_are_checked_against_the_vocabulary_of_a_table_that_was_replaced():
    handle, module = handle_on(), Bigram()
    seq_estimate(handle, estimator(module))
    module.table = nn.Embedding(VOCAB - 1, VOCAB - 1)
    with pytest.raises(ValueError, match=f"vocabulary of {VOCAB - 1}"):
        seq_estimate(handle, estimator(module))


def test_whoever_follows_the_training_hears_of_every_step_that_moved_it_and_may_move_it_too():
    heard = []

    def follow(engine):
        def after_step(targets):
            heard.append(targets)
            with torch.no_grad():
                for p in engine.parameters().values():
                    p.zero_()

        return after_step

    with handle_on(epochs=1) as handle:
        leaf = handle.train(estimator(model(tie_embeddings=False)), None, follow)
    assert heard == [record.targets for record in leaf.history]
    assert not any(p.any() for p in leaf.module.parameters())


def test_no_epochs_return_the_leaf_untrained():
    module = model()
    leaf = seq_estimate(handle_on(epochs=0), estimator(module))
    assert same(parameters_of(module), parameters_of(model()))
    assert list(leaf.history) == []


def test_the_callers_random_numbers_are_left_alone():
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    before = torch.rand(1)
    seq_estimate(handle_on(), estimator(CausalLMWithoutDraws()))
    assert torch.equal(torch.cat([before, torch.rand(1)]), expected)


class CausalLMWithoutDraws(Bigram):
    """Built without touching torch's generator, so that only training could."""

    def __init__(self):
        nn.Module.__init__(self)
        self.table = nn.Embedding.from_pretrained(torch.zeros(VOCAB, VOCAB), freeze=False)


# ---- the module


@pytest.mark.parametrize("mode", [True, False])
def test_a_module_is_trained_in_train_mode_and_put_back_into_its_own(mode):
    module, modes = model(dropout=0.5), []
    module.train(mode)
    module.blocks[0].eval()
    module.register_forward_pre_hook(lambda part, _: modes.append((part.training, part.blocks[0].training)))
    seq_estimate(handle_on(), estimator(module))
    assert modes[0] == (False, False)  # the look at what it returns
    assert set(modes[1:]) == {(True, True)}
    assert (module.training, module.blocks[0].training) == (mode, False)


def test_a_plain_embedding_is_a_language_model_and_its_vocabulary_is_the_width_of_its_logits():
    leaf = seq_estimate(handle_on(targets="all"), estimator(Bigram()))
    assert leaf.vocabulary() == VOCAB
    with pytest.raises(ValueError, match=r"token_ids\[3\]=23 .* vocabulary of 23"):
        seq_estimate(handle_on(np.array([1, 2, 3, 23] * 9)), estimator(Bigram()))


def test_ids_beyond_the_exact_range_of_float32_arrive_exactly():
    class Recorder(nn.Module):
        vocab = 16777220

        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(1))
            self.seen = set()

        def forward(self, ids):
            assert ids.dtype == torch.int64
            self.seen.update(ids.flatten().tolist())
            return self.weight.expand(len(ids), self.vocab)

    module = Recorder()
    tokens = np.array([16777217, 16777219, 1, 16777216, 16777217], dtype=np.uint32)
    seq_estimate(handle_on(tokens, block=2, batch_size=1), estimator(module, optimizer="sgd"))
    assert module.seen == {0, 1, 16777216, 16777217, 16777219}


def test_a_module_that_returns_no_logits_of_the_right_shape_is_refused_with_the_shapes():
    last = nn.Sequential(nn.Embedding(VOCAB, 4), nn.Flatten(), nn.Linear(4 * BLOCK, VOCAB))
    seq_estimate(handle_on(targets="last"), estimator(last))
    with pytest.raises(ValueError, match=r'maps ids of shape \(1, 8\) to \(1, 23\); targets="all" needs \(1, 8, V\)'):
        seq_estimate(handle_on(targets="all"), estimator(last))


def test_activation_checkpointing_gives_each_block_one_wrapper_and_the_same_gradients():
    plain, recomputed = model(), model()
    handle, leaf = handle_on(activation_checkpointing=True), None
    for _ in range(3):
        leaf = seq_estimate(handle, estimator(recomputed), leaf)
    assert [type(block) for block in recomputed.blocks] == [CheckpointWrapper] * 2
    assert recomputed.state_dict().keys() == plain.state_dict().keys()
    seq_estimate(handle_on(epochs=3), estimator(plain))
    assert same(parameters_of(plain), parameters_of(recomputed))
    seq_estimate(handle_on(epochs=0), estimator(recomputed))
    assert not any(isinstance(block, CheckpointWrapper) for block in recomputed.blocks)


def test_activation_checkpointing_of_a_module_without_blocks_is_refused():
    with pytest.raises(ValueError, match=r"activation_checkpointing=True needs .* named blocks, which Bigram lacks"):
        seq_estimate(handle_on(targets="all", activation_checkpointing=True), estimator(Bigram()))


def test_a_module_without_anything_to_train_is_refused():
    with pytest.raises(ValueError, match="CausalLM has no parameter that requires a gradient"):
        seq_estimate(handle_on(), estimator(model().requires_grad_(False)))


def test_a_fresh_model_on_uniform_ids_starts_at_the_entropy_of_the_uniform_distribution():
    leaf = seq_initialize(handle_on(targets="all"), estimator(model()), 0)
    count, total = seq_log_density_sum(handle_on(targets="all"), leaf)
    assert -total / count == pytest.approx(np.log(VOCAB), rel=0.05)


class Nan(nn.Module):
    """A model whose loss is NaN at its seventh training step."""

    def __init__(self):
        super().__init__()
        self.inner, self.vocab, self.steps = model(), VOCAB, 0

    def forward(self, ids):
        self.steps += self.training
        return self.inner(ids) * (float("nan") if self.training and self.steps == 7 else 1.0)


def test_a_loss_that_becomes_nan_ends_the_fit_before_it_reaches_the_parameters():
    module = Nan()
    with pytest.raises(FloatingPointError, match=r"not finite at step 7 \(epoch 0, schedule step 6\)"):
        seq_estimate(handle_on(), estimator(module))
    assert all(torch.isfinite(p).all() for p in module.parameters())


def test_a_loss_that_becomes_nan_is_skipped_and_counted_if_so_chosen():
    module = Nan()
    leaf = seq_estimate(handle_on(training=TrainingOptions(nonfinite="skip")), estimator(module))
    assert leaf.state.skipped == 1
    assert [r.step for r in leaf.history if r.skipped] == [7]
    assert all(torch.isfinite(p).all() for p in module.parameters())


class Averaging(nn.Module):
    """A bigram with running averages, of which a training step is spoilt or interrupted."""

    def __init__(self, fault=None, at=2):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.norm = nn.Embedding(VOCAB, VOCAB), nn.BatchNorm1d(VOCAB)
        self.register_buffer("seen", torch.zeros(1))
        self.fault, self.at, self.steps = fault, at, 0

    def forward(self, ids):
        rows = self.table(ids)
        if self.training:
            self.seen = self.seen + 1
            self.steps += 1
            if self.steps == self.at and self.fault == "nan":
                rows = rows * float("nan")
        logits = self.norm(rows.transpose(1, 2)).transpose(1, 2)
        if self.training and self.steps == self.at and isinstance(self.fault, BaseException):
            raise self.fault
        return logits


def buffers_of(module):
    return {name: buffer.clone() for name, buffer in module.named_buffers()}


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_skipped_step_leaves_the_buffers_as_they_were(accumulation):
    module, after = Averaging("nan", at=accumulation + 1), []
    options = {"nonfinite": "skip", "gradient_accumulation": accumulation}
    callbacks = [lambda record: after.append(buffers_of(module))]
    leaf = seq_estimate(handle_on(training=TrainingOptions(**options, callbacks=callbacks)), estimator(module))
    assert [record.step for record in leaf.history if record.skipped] == [2]
    assert after[0]["seen"] == accumulation
    assert same(after[0].values(), after[1].values())
    assert after[2]["seen"] == 2 * accumulation
    assert all(torch.isfinite(buffer).all() for buffer in module.buffers())


@pytest.mark.parametrize(
    ("fault", "raised"),
    [
        ("nan", FloatingPointError),
        (ZeroDivisionError(), ZeroDivisionError),
        (KeyboardInterrupt(), KeyboardInterrupt),
    ],
    ids=["nan", "error", "interrupt"],
)
def test_a_step_that_ends_the_fit_leaves_the_buffers_as_they_were(fault, raised):
    module, one_step = Averaging(fault), Averaging()

    def stop(record):
        raise StopTraining

    seq_estimate(handle_on(training=TrainingOptions(callbacks=[stop])), estimator(one_step))
    with pytest.raises(raised):
        seq_estimate(handle_on(), estimator(module))
    assert same(buffers_of(module).values(), buffers_of(one_step).values())
    assert same(parameters_of(module), parameters_of(one_step))


def test_an_interrupted_fit_has_a_record_of_every_step_it_took_and_goes_on_from_there():
    whole, module = Averaging(), Averaging(KeyboardInterrupt(), at=5)
    expected = seq_estimate(handle_on(), estimator(whole))
    handle = handle_on()
    leaf = seq_initialize(handle, estimator(module), 0)
    with pytest.raises(KeyboardInterrupt):
        seq_estimate(handle, estimator(module), leaf)
    assert leaf.state.step == 4
    assert leaf.state.history == list(expected.history[:4])
    module.fault = None
    assert list(seq_estimate(handle, estimator(module), leaf).history) == list(expected.history)
    assert same(parameters_of(module), parameters_of(whole))


def test_a_fit_interrupted_while_it_scores_held_out_data_has_the_record_of_the_step_before():
    class Interrupted(Bigram):
        held_out = 0

        def forward(self, ids):
            self.held_out += not self.training and len(ids) > 1
            if self.held_out:
                raise KeyboardInterrupt
            return super().forward(ids)

    handle, module = handle_on(training=TrainingOptions(evaluation=Evaluation(TOKENS[:50], every=3))), Interrupted()
    leaf = seq_initialize(handle, estimator(module), 0)
    with pytest.raises(KeyboardInterrupt):
        seq_estimate(handle, estimator(module), leaf)
    assert [record.step for record in leaf.state.history] == [1, 2, 3]
    assert leaf.state.history[2].evaluation is None


@pytest.mark.parametrize("targets", ["last", "all"])
def test_bf16_trains_float32_parameters(targets):
    leaf = seq_estimate(handle_on(TOKENS % 2, targets=targets, precision="bf16", epochs=3), estimator(model()))
    assert leaf.history[-1] < leaf.history[0]
    assert {p.dtype for p in leaf.module.parameters()} == {torch.float32}


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_one_process_can_be_wrapped_too_and_takes_the_same_steps(parallel):
    with handle_on(parallel=parallel) as wrapped:
        leaf = seq_estimate(wrapped, estimator(model(), optimizer="sgd"))
        dense = leaf.unshard().module
    plain = model()
    seq_estimate(handle_on(), estimator(plain, optimizer="sgd"))
    for a, b in zip(dense.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=0)


# ---- what a call costs


class Operations(TorchDispatchMode):
    """Counts the operations on tensors of at least ``size`` elements."""

    def __init__(self, size):
        super().__init__()
        self.size, self.names = size, []

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        large = [a for a in arguments if isinstance(a, torch.Tensor) and a.numel() >= self.size]
        if large and not str(function).startswith("aten.detach"):
            self.names.append(str(function))
        return function(*arguments, **(options or {}))


def test_further_calls_do_nothing_to_the_parameters_but_train_them():
    handle, module = handle_on(epochs=0), model()
    leaf = seq_estimate(handle, estimator(module))
    with Operations(size=16) as operations:
        for _ in range(100):
            leaf = seq_estimate(handle, estimator(module), leaf)
    assert operations.names == []


def test_a_memory_mapped_array_is_not_copied_into_memory(tmp_path):
    program = """
        import sys
        import numpy as np
        import torch
        from mixle import seq_estimate, seq_log_density_sum
        from mixle.models.streaming_transformer_leaf import StreamingTransformerLeafEstimator
        from mixle.training import StopTraining, TrainingOptions
        from mixle.utils.parallel.torch_neural import StreamingTokenEncodedData

        def anonymous_mb():
            lines = open("/proc/self/status").read().splitlines()
            return int(next(line for line in lines if line.startswith("RssAnon")).split()[1]) / 1024

        class Bigram(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.table = torch.nn.Embedding(200, 200)
            def forward(self, ids):
                return self.table(ids)

        def stop_at_20(record):
            if record.step % 20 == 0:
                raise StopTraining

        def fit(tokens, **options):
            training = TrainingOptions(callbacks=[stop_at_20])
            with StreamingTokenEncodedData(tokens, block=32, batch_size=8, training=training, **options) as handle:
                seq_estimate(handle, StreamingTransformerLeafEstimator(Bigram()))

        fit(np.arange(1000) % 200)
        tokens = np.memmap(sys.argv[1], dtype=np.uint8, mode="r")
        before = anonymous_mb()
        for shuffle in (True, False):
            for targets in ("last", "all"):
                fit(tokens, shuffle=shuffle, targets=targets)
        print(anonymous_mb() - before)
    """
    path = tmp_path / "tokens.bin"
    np.resize(np.arange(200, dtype=np.uint8), 48_000_000).tofile(path)
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), str(path)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
    )
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 20


# ---- the verbs


def test_every_verb_works():
    handle, module = handle_on(targets="all"), model()
    leaf = optimize(None, estimator(module), enc_data=handle, max_its=2, progress=False)
    count, total = seq_log_density_sum(handle, leaf)
    own = seq_log_density(handle, leaf)
    assert count == len(handle) == len(own[0]) == 199
    assert total == pytest.approx(own[0].sum())


@pytest.mark.parametrize("targets", ["last", "all"])
def test_scores_are_the_leafs_own_log_densities_in_the_order_of_the_tokens(targets):
    handle = handle_on(targets=targets, sampling="sharded")
    leaf = seq_estimate(handle, estimator(model()))
    (scores,) = seq_log_density(handle, leaf)
    if targets == "last":
        pairs = [(TOKENS[i : i + BLOCK], TOKENS[i + BLOCK]) for i in range(len(TOKENS) - BLOCK)]
    else:
        pairs = [(TOKENS[i // BLOCK * BLOCK : i + 1], TOKENS[i + 1]) for i in range(len(TOKENS) - 1)]
    np.testing.assert_allclose(scores, [leaf.log_density(pair) for pair in pairs], atol=1e-5)


def test_held_out_data_is_scored_every_so_many_steps():
    heldout = TOKENS[:50]
    training = TrainingOptions(evaluation=Evaluation(heldout, every=4))
    leaf = seq_estimate(handle_on(targets="all", training=training, epochs=2), estimator(model()))
    evaluated = {r.step: r.evaluation for r in leaf.history if r.evaluation is not None}
    assert list(evaluated) == [4, 8, 12]
    count, total = seq_log_density_sum(handle_on(heldout, targets="all"), leaf)
    stopped = model()
    again = seq_estimate(
        handle_on(targets="all", training=TrainingOptions(evaluation=Evaluation(heldout, every=14)), epochs=2),
        estimator(stopped),
    )
    assert again.history[-1].evaluation == pytest.approx(-total / count, rel=1e-5)


def test_a_previous_estimate_of_another_kind_is_refused():
    with pytest.raises(TypeError, match="prev_estimate must be a StreamingTransformerLeaf or None, not float"):
        seq_estimate(handle_on(), estimator(model()), 3.0)


def test_moments_of_another_optimizer_are_refused():
    leaf = seq_estimate(handle_on(), estimator(model()))
    with pytest.raises(ValueError, match="optimizer='sgd' cannot go on from the moments of 'adamw'"):
        seq_estimate(handle_on(), estimator(leaf.module, optimizer="sgd"), leaf)


# ---- classical estimators


@pytest.mark.parametrize("segment", [1, 7, 1000])
def test_a_markov_chain_on_the_stream_is_that_of_the_whole_sequence_whatever_the_segments(segment):
    whole = seq_estimate(seq_encode([TOKENS.tolist()], estimator=MarkovChainEstimator()), MarkovChainEstimator())
    with join() as peers:
        statistics = TokenStatistics(peers, TOKENS, shared=True, segment=segment)
        chain = statistics.estimate(MarkovChainEstimator(), None)
        assert chain.to_dict() == whole.to_dict()
        assert statistics.log_density_sum(chain) == (200, pytest.approx(whole.log_density(TOKENS.tolist())))


def test_a_gaussian_takes_tokens_as_numbers():
    handle = handle_on()
    fitted = seq_estimate(handle, GaussianEstimator())
    assert (fitted.mu, fitted.sigma2) == (pytest.approx(TOKENS.mean()), pytest.approx(TOKENS.var()))
    assert seq_log_density_sum(handle, fitted)[0] == 200
    assert isinstance(seq_initialize(handle, GaussianEstimator(), 0), type(fitted))


def test_a_negative_id_is_refused_by_classical_estimators_too():
    with pytest.raises(ValueError, match=r"token_ids\[2\]=-1 is not a non-negative integer"):
        seq_estimate(handle_on(np.array([1, 2, -1] * 9)), GaussianEstimator())


# ---- refusals


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"tokens": np.zeros(0, int)}, ValueError, r"0 tokens.*block=8"),
        ({"tokens": TOKENS[:8]}, ValueError, r"8 tokens are too short.*block=8"),
        ({"tokens": TOKENS.reshape(2, 100)}, ValueError, r"token_ids must be 1-D, not of shape \(2, 100\)"),
        ({"tokens": "text"}, TypeError, "token_ids must be a 1-D array of integers"),
        ({"tokens": TOKENS > 3}, TypeError, "token_ids must be a 1-D array of integers, not of dtype bool"),
        ({"block": 0}, ValueError, "block=0"),
        ({"block": 8.0}, TypeError, "block=8.0"),
        ({"batch_size": True}, TypeError, "batch_size=True"),
        ({"batch_size": -1}, ValueError, "batch_size=-1"),
        ({"epochs": -1}, ValueError, "epochs=-1"),
        ({"epochs": 1.5}, TypeError, "epochs=1.5"),
        ({"shuffle": 1}, TypeError, "shuffle=1"),
        ({"shard_by_rank": "false"}, TypeError, "shard_by_rank='false'"),
        ({"init_process_group": None}, TypeError, "init_process_group=None"),
        ({"backend": "nope"}, ValueError, "backend='nope'.*'gloo'"),
        ({"parallel": "fdsp"}, ValueError, "parallel='fdsp' must be one of .*did you mean 'fsdp'"),
        ({"precision": "fp16"}, ValueError, "precision='fp16' must be one of 'fp32', 'bf16'"),
        ({"precision": "bfloat16"}, ValueError, "precision='bfloat16' must be one of 'fp32', 'bf16'"),
        ({"precision": None}, ValueError, "precision=None must be one of 'fp32', 'bf16'"),
        ({"precision": "fp8"}, ValueError, "precision='fp8' must be one of 'fp32', 'bf16'"),
        ({"activation_checkpointing": 0}, TypeError, "activation_checkpointing=0"),
        ({"targets": "first"}, ValueError, "targets='first' must be one of 'last', 'all'"),
        ({"stride": 4, "targets": "all"}, ValueError, "stride=4 must be at least block=8"),
        ({"stride": 2}, ValueError, "stride=2"),
        ({"boundary": "drop"}, ValueError, "boundary='drop' must be one of"),
        ({"boundary": "exclude", "sampling": "global"}, ValueError, "boundary='exclude' does not apply"),
        ({"sampling": "local"}, ValueError, "sampling='local' must be one of 'sharded', 'global'"),
        ({"sampling": "global", "shard_by_rank": False}, ValueError, 'sampling="global" needs one array'),
        ({"seed": "1"}, TypeError, "seed='1'"),
        ({"cp_mode": "star"}, ValueError, "cp_mode='star' must be one of 'ring', 'allgather'"),
        ({"training": {}}, TypeError, r"training=\{\} must be a TrainingOptions or None"),
        ({"tp_size": 0}, ValueError, "tp_size=0"),
        ({"pp_size": -4}, ValueError, "pp_size=-4"),
        ({"cp_size": 1.9}, TypeError, "cp_size=1.9"),
        ({"tp_size": True}, TypeError, "tp_size=True"),
        ({"tp_size": "2"}, TypeError, "tp_size='2'"),
        ({"training": TrainingOptions(evaluation=Evaluation(TOKENS[:3], 2))}, ValueError, "3 tokens are too short"),
    ],
)
def test_a_wrong_argument_is_refused_by_name_and_value(options, error, message):
    with pytest.raises(error, match=message):
        handle_on(**options)
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize("value", [-1, 23, 2.5, np.nan, np.inf])
def test_an_id_that_is_none_is_refused_with_its_place_when_the_vocabulary_is_known(value):
    tokens = TOKENS.astype(np.float64) if isinstance(value, float) else TOKENS.copy()
    tokens[150] = value
    module = model()
    with pytest.raises(ValueError, match=rf"token_ids\[150\]={value} .* vocabulary of 23"):
        seq_estimate(handle_on(tokens), estimator(module))
    assert same(parameters_of(module), parameters_of(model()))


def test_ids_that_are_whole_floats_are_ids():
    assert len(seq_estimate(handle_on(TOKENS.astype(np.float32)), estimator(model())).history) == 48


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"tp_size": 3}, "tp_size=3 must divide n_head=2"),
        ({"pp_size": 3}, "pp_size=3"),
        ({"cp_size": 3}, "cp_size=3"),
    ],
)
def test_a_plan_that_does_not_fit_the_module_is_refused_with_the_numbers(plan, message):
    with pytest.raises(ValueError, match=message):
        seq_estimate(handle_on(**plan), estimator(model()))


def test_a_plan_that_fits_the_module_but_not_the_ranks_is_refused_with_the_numbers():
    with pytest.raises(ValueError, match="tp_size=2 x pp_size=2 x cp_size=2 = 8 must divide world_size=1"):
        seq_estimate(handle_on(tp_size=2, pp_size=2, cp_size=2), estimator(CausalLM(24, 16, 2, 2, BLOCK)))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"pp_size": 2, "microbatches": 3}, "microbatches=3 must divide batch_size"),
        ({"microbatches": 2}, "microbatches=2 needs a pipeline"),
        ({"pp_size": 2, "microbatches": True}, "microbatches"),
        ({"pp_size": 2, "pp_schedule": "2f2b"}, "pp_schedule='2f2b'"),
        ({"cp_size": 2, "cp_mode": "ulysses"}, "cp_mode='ulysses'"),
    ],
)
def test_a_plan_that_makes_no_sense_is_refused_when_the_handle_is_made(arguments, message):
    with pytest.raises((TypeError, ValueError), match=message):
        handle_on(**arguments)


# ---- the receipt


def test_the_receipt_says_what_is_trained_padded_and_excluded():
    handle = handle_on(targets="all", epochs=3)
    assert handle.schedule_receipt == {
        "world_size": 1,
        "epochs": 3,
        "steps_per_epoch": 7,
        "window_counts_by_rank": (25,),
        "global_real_target_tokens_per_epoch": 199,
        "local_masked_target_tokens": (7 * 4 * BLOCK - 199) * 3,
        "excluded_target_tokens": 0,
        "skipped_target_tokens": 0,
        "policy": "pad-and-mask-to-global-max-steps",
    }
    assert (handle.steps_per_epoch, handle.local_target_tokens, handle.excluded_target_tokens) == (7, 199, 0)
    assert handle.masked_target_tokens == (7 * 4 * BLOCK - 199) * 3
    assert sum(r.targets for r in seq_estimate(handle, estimator(model())).history) == 199 * 3
