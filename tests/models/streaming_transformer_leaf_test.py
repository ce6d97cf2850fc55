"""The leaf as a distribution, on disk, and as a sufficient statistic."""

from __future__ import annotations

import json
import pickle

import numpy as np
import pytest
import torch
from torch import nn

from mixle import optimize, seq_encode, seq_estimate, seq_initialize, seq_log_density_sum
from mixle.models.streaming_transformer_leaf import StreamingTransformerLeaf, StreamingTransformerLeafEstimator
from mixle.models.transformer import CausalLM
from mixle.stats.contract import ProbabilityDistribution
from mixle.stats.mixture import MixtureEstimator
from mixle.training import OptimizerOptions
from mixle.utils.parallel.multiprocessing import MultiprocessingEncodedData
from mixle.utils.parallel.torch_neural import StreamingTokenEncodedData

VOCAB, BLOCK = 11, 6
RNG = np.random.default_rng(0)
PAIRS = [(RNG.integers(0, VOCAB, RNG.integers(1, 10)), int(RNG.integers(0, VOCAB))) for _ in range(40)]


def model(seed=0, **options):
    torch.manual_seed(seed)
    return CausalLM(VOCAB, 8, 1, 2, BLOCK, **options)


def trained(**options):
    """A leaf after a few AdamW steps, with moments and a history."""
    tokens = np.arange(60) % VOCAB
    handle = StreamingTokenEncodedData(tokens, block=BLOCK, batch_size=3, targets="all")
    return seq_estimate(handle, StreamingTransformerLeafEstimator(model(**options), 0.01, warmup_steps=2))


class LastLogits(nn.Module):
    """(B, T) ids of any length to (B, V) logits; no attributes to say what it is."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.EmbeddingBag(VOCAB, VOCAB)

    def forward(self, ids):
        return self.table(ids)


# ---- the distribution


@pytest.mark.parametrize("module", [model(), LastLogits()], ids=["(B, T, V)", "(B, V)"])
def test_the_density_is_the_softmax_of_the_logits_after_the_context(module):
    leaf = StreamingTransformerLeaf(module)
    for context, next_id in PAIRS[:10]:
        seen = torch.from_numpy(context[-BLOCK:] if leaf.block else context)[None]
        logits = module(seen).reshape(-1, VOCAB)[-1].double()
        probabilities = logits.softmax(-1).detach().numpy()
        np.testing.assert_allclose(leaf.predict(context), probabilities, rtol=1e-5)
        assert leaf.density((context, next_id)) == pytest.approx(probabilities[next_id], rel=1e-5)


def test_scalar_and_sequence_paths_agree():
    leaf = StreamingTransformerLeaf(model())
    enc = leaf.dist_to_encoder().seq_encode(PAIRS)
    np.testing.assert_allclose(leaf.seq_log_density(enc), [leaf.log_density(pair) for pair in PAIRS], atol=1e-5)


def test_an_encoding_can_be_cut_into_rows():
    leaf = StreamingTransformerLeaf(model())
    enc = leaf.dist_to_encoder().seq_encode(PAIRS)
    parts = [leaf.seq_log_density(enc.rows(a, b)) for a, b in ((0, 7), (7, 7), (7, 40))]
    np.testing.assert_allclose(np.concatenate(parts), leaf.seq_log_density(enc), atol=1e-5)


@pytest.mark.parametrize("pair", [([1, 2], VOCAB), ([1, VOCAB], 2)])
def test_an_id_outside_the_vocabulary_is_impossible(pair):
    assert StreamingTransformerLeaf(model()).log_density(pair) == -np.inf


@pytest.mark.parametrize(
    ("pair", "error", "message"),
    [
        ([1, 2, 3], TypeError, r"observation 0 must be a pair \(context, next_id\)"),
        (([], 1), TypeError, "the context of observation 0"),
        ((np.zeros(0, int), 1), ValueError, "the context of observation 0 must be 1-D with at least one id"),
        (([[1, 2]], 1), ValueError, r"not of shape \(1, 2\)"),
        (([1.5], 1), TypeError, "must be a 1-D array of integers"),
        (([1], 2.0), TypeError, "next_id of observation 0=2.0"),
        (([1], True), TypeError, "next_id of observation 0=True"),
    ],
)
def test_what_is_no_observation_is_refused_by_index(pair, error, message):
    with pytest.raises(error, match=message):
        StreamingTransformerLeaf(model()).log_density(pair)


def test_scoring_leaves_the_module_in_its_mode():
    module = model(dropout=0.5).train()
    leaf = StreamingTransformerLeaf(module)
    assert leaf.log_density(PAIRS[0]) == leaf.log_density(PAIRS[0])
    assert module.training


def test_samples_with_a_context_follow_its_prediction():
    leaf = StreamingTransformerLeaf(LastLogits())
    drawn = leaf.sampler(3, context=[4, 5]).sample(4000)
    assert all(np.array_equal(context, [4, 5]) for context, _ in drawn[:5])
    counts = np.bincount([next_id for _, next_id in drawn], minlength=VOCAB)
    expected = 4000 * leaf.predict([4, 5])
    # A chi-squared statistic of 10 degrees of freedom exceeds 35 once in 8,000 draws; the seed fixes this one.
    assert np.square(counts - expected) @ (1 / expected) < 35


def test_samples_without_a_context_bring_one_of_the_models_own():
    leaf = StreamingTransformerLeaf(model())
    context, next_id = leaf.sampler(0).sample()
    assert context.shape == (BLOCK,)
    assert np.isfinite(leaf.log_density((context, next_id)))
    assert [n for _, n in leaf.sampler(1).sample(5)] == [n for _, n in leaf.sampler(1).sample(5)]


def test_a_module_that_does_not_say_its_context_needs_one_to_sample():
    with pytest.raises(ValueError, match="LastLogits has no block"):
        StreamingTransformerLeaf(LastLogits()).sampler(0)


# ---- generation


def test_generation_continues_the_prompt_reproducibly():
    leaf = StreamingTransformerLeaf(model())
    text = leaf.generate([1, 2, 3], 20, seed=4)
    assert text.dtype == np.int64
    assert text[:3].tolist() == [1, 2, 3]
    assert len(text) == 23
    assert np.array_equal(text, leaf.generate([1, 2, 3], 20, seed=4))
    assert not np.array_equal(text, leaf.generate([1, 2, 3], 20, seed=5))


def test_no_heat_and_one_candidate_both_take_the_likeliest():
    leaf = trained()
    greedy = leaf.generate([1, 2], 12, temperature=0.0)
    assert np.array_equal(greedy, leaf.generate([1, 2], 12, top_k=1, seed=9))
    for at in range(2, len(greedy)):
        assert greedy[at] == leaf.predict(greedy[:at]).argmax()


def test_only_the_top_k_are_drawn():
    leaf = StreamingTransformerLeaf(LastLogits())
    allowed = set(np.argsort(leaf.predict([3]))[-2:].tolist())
    assert {int(leaf.generate([3], 1, top_k=2, seed=seed)[-1]) for seed in range(30)} == allowed


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        (([], 3), {}, TypeError, "prompt_ids"),
        (([1, 11], 3), {}, ValueError, r"prompt_ids\[1\]=11 must be in \[0, 11\)"),
        (([1], -1), {}, ValueError, "max_new_tokens=-1"),
        (([1], 2.0), {}, TypeError, "max_new_tokens=2.0"),
        (([1], 2), {"temperature": -1.0}, ValueError, "temperature=-1.0"),
        (([1], 2), {"top_k": 0}, ValueError, "top_k=0"),
        (([1], 2), {"seed": "a"}, TypeError, "seed='a'"),
    ],
)
def test_wrong_arguments_of_generate_are_refused_by_name(arguments, options, error, message):
    with pytest.raises(error, match=message):
        StreamingTransformerLeaf(model()).generate(*arguments, **options)


# ---- carried elsewhere


def goes_on(leaf):
    """The losses of a further epoch of training."""
    handle = StreamingTokenEncodedData(np.arange(60) % VOCAB, block=BLOCK, batch_size=3, targets="all")
    return list(seq_estimate(handle, leaf.estimator(), leaf).history)


def saved_and_loaded(leaf, path):
    leaf.save(path)
    return StreamingTransformerLeaf.load(path)


@pytest.mark.parametrize("carry", [saved_and_loaded, lambda leaf, _: pickle.loads(pickle.dumps(leaf))])
def test_a_saved_or_pickled_leaf_is_the_same_and_trains_on_the_same(tmp_path, carry):
    leaf = trained()
    carried = carry(leaf, tmp_path / "leaf")
    assert carried.options == leaf.options
    assert list(carried.history) == list(leaf.history)
    assert carried.log_density(PAIRS[0]) == leaf.log_density(PAIRS[0])
    assert goes_on(carried) == goes_on(leaf)


@pytest.mark.parametrize(
    "options", [{}, {"tie_embeddings": False, "position": "learned", "norm": "layer", "bias": True}]
)
def test_json_carries_module_settings_and_history(options):
    leaf = trained(**options)
    carried = ProbabilityDistribution.from_json(leaf.to_json())
    assert isinstance(carried, StreamingTransformerLeaf)
    assert carried.options == leaf.options
    assert carried.revision == leaf.revision
    assert carried.log_density(PAIRS[0]) == leaf.log_density(PAIRS[0])


def test_a_module_without_a_config_is_saved_and_loaded_into_one_that_is_given(tmp_path):
    leaf = StreamingTransformerLeaf(LastLogits())
    with torch.no_grad():
        leaf.module.table.weight += 1.0
    leaf.save(tmp_path)
    with pytest.raises(ValueError, match=r"LastLogits cannot be built from the description; .*pass module="):
        StreamingTransformerLeaf.load(tmp_path)
    loaded = StreamingTransformerLeaf.load(tmp_path, module=LastLogits())
    assert torch.equal(loaded.module.table.weight, leaf.module.table.weight)
    with pytest.raises(TypeError, match="LastLogits has no config and from_config"):
        leaf.to_json()


def test_saving_again_replaces_the_leaf_and_leaves_nothing_behind(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    trained().save(tmp_path)
    StreamingTransformerLeaf(model(seed=3)).save(tmp_path)
    assert torch.equal(StreamingTransformerLeaf.load(tmp_path).module.head.weight, model(seed=3).head.weight)
    assert sorted(path.name.partition("-")[0] for path in tmp_path.iterdir()) == [
        ".lock",
        "leaf.json",
        "module",
        "notes.txt",
    ]


def test_a_save_that_is_cut_short_leaves_the_old_leaf(tmp_path, monkeypatch):
    StreamingTransformerLeaf(model()).save(tmp_path)

    def fail(*arguments, **options):
        raise OSError("disk full")

    monkeypatch.setattr(json, "dumps", fail)
    with pytest.raises(OSError, match="disk full"):
        trained().save(tmp_path)
    assert torch.equal(StreamingTransformerLeaf.load(tmp_path).module.head.weight, model().head.weight)


def edit(path, change):
    described = json.loads((path / "leaf.json").read_text())
    change(described)
    (path / "leaf.json").write_text(json.dumps(described))


def tensor_file(path, part):
    return next(path.glob(f"{part}-*.safetensors"))


@pytest.mark.parametrize(
    ("damage", "error", "message"),
    [
        (lambda p: (p / "leaf.json").unlink(), FileNotFoundError, "holds no saved leaf"),
        (lambda p: (p / "leaf.json").write_text("{"), ValueError, "leaf.json is not JSON"),
        (lambda p: (p / "leaf.json").write_text("[]"), ValueError, "not the description of a mixle leaf"),
        (lambda p: edit(p, lambda d: d.pop("training")), ValueError, "KeyError: 'training'"),
        (lambda p: edit(p, lambda d: d["optimizer"].update(extra=1)), ValueError, "not a leaf's description.*extra"),
        (lambda p: edit(p, lambda d: d["files"].update(module="../x")), ValueError, r"names '../x' as its module file"),
        (lambda p: edit(p, lambda d: d["files"].update(extra="x")), ValueError, "names files"),
        (lambda p: edit(p, lambda d: d["config"].update(n_layer=2)), ValueError, r"lacks 'blocks.1"),
        (lambda p: edit(p, lambda d: d["config"].update(vocab=12)), ValueError, r"shape \(11, 8\).*of \(12, 8\)"),
        (lambda p: edit(p, lambda d: d.update({"class": "os:path"})), ValueError, "os:path cannot be built"),
        (lambda p: tensor_file(p, "moments").unlink(), FileNotFoundError, "is incomplete: moments-"),
        (lambda p: tensor_file(p, "module").write_bytes(b"x" * 99), ValueError, "damaged"),
    ],
)
def test_what_cannot_have_been_saved_is_refused_by_name(tmp_path, damage, error, message):
    trained().save(tmp_path)
    damage(tmp_path)
    with pytest.raises(error, match=message):
        StreamingTransformerLeaf.load(tmp_path)


def test_a_module_that_does_not_fit_is_refused_and_left_as_it_was(tmp_path):
    trained().save(tmp_path)
    other = CausalLM(VOCAB, 16, 1, 2, BLOCK)
    before = other.head.weight.clone()
    with pytest.raises(ValueError, match=r"has '.*' of shape .*CausalLM of"):
        StreamingTransformerLeaf.load(tmp_path, module=other)
    assert torch.equal(other.head.weight, before)


# ---- gradients as a statistic


def estimator(module=None, **options):
    return StreamingTransformerLeafEstimator(module or model(), 0.1, optimizer="sgd", **options)


def gathered(pairs, weights=None, module=None):
    fitted = estimator(module)
    accumulator = fitted.accumulator_factory().make()
    enc = accumulator.acc_to_encoder().seq_encode(pairs)
    accumulator.seq_update(enc, np.ones(len(pairs)) if weights is None else weights, fitted.leaf())
    return accumulator


def flat(statistic):
    return np.concatenate([g.ravel() for g in statistic.gradients.values()])


def test_an_m_step_is_one_step_along_the_mean_gradient():
    module, by_hand = model(), model()
    chunks = seq_encode(PAIRS, estimator=estimator(module))
    leaf = seq_estimate(chunks, estimator(module))
    losses = []
    for context, next_id in PAIRS:
        logits = by_hand(torch.from_numpy(context[-BLOCK:])[None])[0, -1]
        losses.append(nn.functional.cross_entropy(logits, torch.tensor(next_id)))
    mean = torch.stack(losses).mean()
    mean.backward()
    for p, q in zip(by_hand.parameters(), module.parameters(), strict=True):
        torch.testing.assert_close(p - 0.1 * p.grad, q, atol=1e-6, rtol=1e-5)
    assert leaf.history[-1] == pytest.approx(mean.item(), rel=1e-5)


def test_weights_count_like_repetitions_and_a_zero_changes_nothing():
    weights = np.array([3.0, 1.0, 0.0, 2.0])
    repeated = [PAIRS[0]] * 3 + [PAIRS[1]] + [PAIRS[3]] * 2
    a, b = gathered(PAIRS[:4], weights).value(), gathered(repeated).value()
    np.testing.assert_allclose(flat(a), flat(b), atol=1e-5)
    assert (a.weight, b.weight) == (6.0, 6.0)
    assert a.loss == pytest.approx(b.loss, rel=1e-5)


def test_any_split_of_the_data_adds_up():
    whole = gathered(PAIRS).value()
    parts = gathered(PAIRS[:7]).combine(gathered(PAIRS[7:30]).value()).combine(gathered(PAIRS[30:]).value()).value()
    np.testing.assert_allclose(flat(parts), flat(whole), atol=1e-5)
    assert parts.revision == whole.revision == 0


def test_a_gradient_of_an_older_revision_is_refused():
    module = model()
    fitted = estimator(module)
    chunks = seq_encode(PAIRS, estimator=fitted)
    accumulator = fitted.accumulator_factory().make()
    leaf = fitted.leaf()
    accumulator.seq_update(chunks[0][1], np.ones(40), leaf)
    stale = accumulator.value()
    leaf = fitted.estimate(40.0, stale, previous=leaf)
    with pytest.raises(ValueError, match="taken at revision 0 of the module, which is now at 1"):
        fitted.estimate(40.0, stale, previous=leaf)
    with pytest.raises(ValueError, match="has moved from revision 0 to 1"):
        accumulator.seq_update(chunks[0][1], np.ones(40), leaf)
    fresh = fitted.accumulator_factory().make()
    fresh.seq_update(chunks[0][1], np.ones(40), leaf)
    with pytest.raises(ValueError, match="different revisions"):
        fitted.estimate(80.0, fresh.combine(stale).value(), previous=leaf)


def test_no_weight_leaves_the_module_as_it_is():
    module = model()
    fitted = estimator(module)
    fitted.estimate(0.0, fitted.accumulator_factory().make().value())
    assert all(map(torch.equal, module.parameters(), model().parameters()))


def test_an_impossible_observation_cannot_be_fitted():
    with pytest.raises(ValueError, match="1 observations have ids outside the vocabulary of 11, the first in row 1"):
        gathered([([1], 2), ([1], 11)])


def test_a_prior_is_refused():
    with pytest.raises(ValueError, match=r"pseudo_count=1\.0 has no meaning for a gradient"):
        StreamingTransformerLeaf(model()).estimator(pseudo_count=1.0)


def two_languages():
    """Two languages that contradict each other: the token after ``a`` is ``a + 1`` in one, ``a - 1`` in the other."""
    rng = np.random.default_rng(5)
    starts = rng.integers(0, VOCAB, 60)
    return [([int(a)], int((a + (1 if i % 2 else -1)) % VOCAB)) for i, a in enumerate(starts)]


class Table(nn.Module):
    """A bigram model, which can be built from its config."""

    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.table = nn.Embedding(VOCAB, VOCAB)
        self.vocab, self.block, self.config = VOCAB, 1, {}

    @classmethod
    def from_config(cls, config):
        return cls()

    def forward(self, ids):
        return self.table(ids)


def test_a_mixture_of_leaves_is_fitted_by_em():
    components = [StreamingTransformerLeafEstimator(Table(seed), 0.2, weight_decay=0.0) for seed in (0, 1)]
    data, mixture = two_languages(), MixtureEstimator(components)
    chunks = seq_encode(data, estimator=mixture)
    first = seq_initialize(chunks, mixture, 0)
    before = seq_log_density_sum(chunks, first)[1]
    fitted = optimize(None, mixture, enc_data=chunks, prev_estimate=first, max_its=60, delta=None, progress=False)
    after = seq_log_density_sum(chunks, fitted)[1]
    assert after > before + 30
    assert after / len(data) == pytest.approx(-np.log(2), abs=0.25)


def test_gradients_fold_across_processes():
    alone, shared = Table(), Table()
    chunks = seq_encode(PAIRS, estimator=estimator(alone))
    here = seq_estimate(chunks, estimator(alone), estimator(alone).leaf())
    with MultiprocessingEncodedData(PAIRS, estimator=estimator(shared), num_workers=2) as handle:
        there = seq_estimate(handle, estimator(shared), estimator(shared).leaf())
        again = seq_estimate(handle, there.estimator(), there)
    torch.testing.assert_close(here.module.table.weight, alone.table.weight)
    assert again.revision == 2
    once_more = seq_estimate(chunks, here.estimator(), here)
    torch.testing.assert_close(once_more.module.table.weight, again.module.table.weight, atol=1e-5, rtol=0)


# ---- the estimator


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        (("model",), {}, TypeError, "module must be a torch.nn.Module, not str"),
        ((model(), -1.0), {}, ValueError, "lr=-1.0"),
        ((model(), 0.1, "gpu"), {}, ValueError, "device='gpu'"),
        ((model(),), {"schedule": "linear"}, ValueError, "schedule='linear' needs total_steps"),
    ],
)
def test_a_wrong_argument_of_the_estimator_is_refused_by_name(arguments, options, error, message):
    with pytest.raises(error, match=message):
        StreamingTransformerLeafEstimator(*arguments, **options)


def test_the_estimator_holds_how_the_module_is_optimized():
    made = StreamingTransformerLeafEstimator(model(), 1e-3, betas=(0.8, 0.9), schedule="cosine", total_steps=9)
    assert made.options == OptimizerOptions(1e-3, betas=(0.8, 0.9), schedule="cosine", total_steps=9)
    assert made.lr == 1e-3
    assert made.leaf().estimator().options == made.options
