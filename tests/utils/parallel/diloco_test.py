"""A training handle in step with other sites: one process each."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from diloco_sites import QUICK, Heard, at_once, fresh_url

from mixle import LocalEncodedData, seq_estimate, seq_log_density_sum
from mixle.diloco import DiLoCo, SchemaMismatch, align
from mixle.models.streaming_transformer_leaf import StreamingTransformerLeafEstimator
from mixle.models.transformer import CausalLM
from mixle.stats import CategoricalEstimator, GaussianEstimator
from mixle.training import TrainingOptions
from mixle.utils.parallel.diloco import DiLoCoEncodedData
from mixle.utils.parallel.torch_neural import StreamingTokenEncodedData

VOCAB, BLOCK = 11, 8
TOKENS = np.random.default_rng(0).integers(0, VOCAB, 400)


def model(width: int = 8) -> CausalLM:
    torch.manual_seed(0)
    return CausalLM(VOCAB, width, 1, 2, BLOCK)


def tokens_handle(tokens: np.ndarray = TOKENS, **options: object) -> StreamingTokenEncodedData:
    given = {"block": BLOCK, "batch_size": 5, "targets": "all", "parallel": "none"}
    return StreamingTokenEncodedData(tokens, **{**given, **options})


def site(url: str, handle: object = None, algorithm: DiLoCo | None = None, **options: object) -> DiLoCoEncodedData:
    return DiLoCoEncodedData(
        tokens_handle() if handle is None else handle,
        algorithm=DiLoCo(5, 2) if algorithm is None else algorithm,
        mailbox=url,
        **{**QUICK, "callbacks": (), **options},
    )


def same(a: torch.nn.Module, b: torch.nn.Module) -> bool:
    return all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))


def test_what_a_site_trained_is_what_the_run_has_once_it_has_left():
    url = fresh_url()
    with site(url) as handle:
        leaf = seq_estimate(handle, StreamingTransformerLeafEstimator(model()))
        assert leaf.state.step == handle._handle.steps_per_epoch == 10
        assert handle.leave()
        fetched = model()
        align(fetched, mailbox=url)
        assert same(leaf.module, fetched)


def test_with_an_outer_step_of_one_a_site_alone_trains_as_the_wrapped_handle_does():
    algorithm = DiLoCo(5, 1, outer_lr=1.0, outer_momentum=0.0, overlap_steps=0)
    with tokens_handle(epochs=2) as alone:
        expected = seq_estimate(alone, StreamingTransformerLeafEstimator(model()))
    with site(fresh_url(), tokens_handle(epochs=2), algorithm) as handle:
        leaf = seq_estimate(handle, StreamingTransformerLeafEstimator(model()))
    np.testing.assert_allclose(leaf.history, expected.history, rtol=1e-4)


def test_two_sites_that_train_on_different_data_end_at_one_model():
    url = fresh_url()

    def act(which: int):
        shard = tokens_handle(np.array_split(TOKENS, 2)[which], epochs=3)
        with site(url, shard, learner_id=f"site-{which}") as handle:
            leaf = seq_estimate(handle, StreamingTransformerLeafEstimator(model()))
            return leaf, handle.leave()

    results = at_once(lambda: act(0), lambda: act(1), deadline_s=120)
    fetched = model()
    align(fetched, mailbox=url)
    assert all(left for _, left in results)
    assert any(same(leaf.module, fetched) for leaf, _ in results)


def test_the_session_stays_open_between_calls_and_goes_on_counting():
    heard = Heard()
    with site(fresh_url(), callbacks=(heard,)) as handle:
        leaf = seq_estimate(handle, StreamingTransformerLeafEstimator(model()))
        session = handle.session
        leaf = seq_estimate(handle, StreamingTransformerLeafEstimator(leaf.module), leaf)
        assert handle.session is session
        assert leaf.state.step == 20
    assert [event.kind for event in heard.events].count("joined") == 1
    assert handle.session is None


def test_scores_are_those_of_the_wrapped_handle():
    with site(fresh_url()) as handle:
        leaf = seq_estimate(handle, StreamingTransformerLeafEstimator(model()))
        count, total = seq_log_density_sum(handle, leaf)
        assert (count, total) == seq_log_density_sum(handle._handle, leaf)
        assert count == len(handle) == 399


def test_a_site_that_starts_again_goes_on_from_the_optimizer_and_the_place_that_it_published(tmp_path):
    url, algorithm = fresh_url(), DiLoCo(5, 1, overlap_steps=0)
    with site(url, algorithm=algorithm, state_dir=tmp_path) as handle:
        before = seq_estimate(handle, StreamingTransformerLeafEstimator(model()))
        name = handle.session.learner_id
    with site(url, algorithm=algorithm, state_dir=tmp_path) as handle:
        after = seq_estimate(handle, StreamingTransformerLeafEstimator(model()))
        assert handle.session.learner_id == name
    assert (after.state.step, after.state.epoch) == (20, 2)
    assert [record.step for record in after.history] == list(range(11, 21))
    moments = after.state.optimizer.dense()
    assert {int(slots["step"]) for slots in moments.values()} == {20}
    assert before.state.step == 10


def test_a_failure_leaves_the_run_and_the_next_call_joins_again():
    calls = []

    def failing(record):
        calls.append(record)
        if len(calls) == 7:
            raise RuntimeError("disk full")

    heard = Heard()
    training = TrainingOptions(callbacks=(failing,))
    with site(fresh_url(), tokens_handle(training=training), callbacks=(heard,)) as handle:
        with pytest.raises(RuntimeError, match="disk full"):
            seq_estimate(handle, StreamingTransformerLeafEstimator(model()))
        assert handle.session is None
        assert heard.of("left")
        seq_estimate(handle, StreamingTransformerLeafEstimator(model()))
        assert len(heard.of("joined")) == 2


def test_a_run_of_another_model_is_refused_before_a_step_is_taken():
    url = fresh_url()
    with site(url) as handle:
        seq_estimate(handle, StreamingTransformerLeafEstimator(model()))
    other = model(width=16)
    before = [p.clone() for p in other.parameters()]
    with site(url) as handle, pytest.raises(SchemaMismatch):
        seq_estimate(handle, StreamingTransformerLeafEstimator(other))
    assert all(torch.equal(p, q) for p, q in zip(before, other.parameters(), strict=True))


def test_another_module_than_that_of_the_first_call_is_refused():
    with site(fresh_url()) as handle:
        seq_estimate(handle, StreamingTransformerLeafEstimator(model()))
        with pytest.raises(ValueError, match="make a handle for each module"):
            seq_estimate(handle, StreamingTransformerLeafEstimator(model()))


def test_a_handle_that_has_left_does_not_train():
    with site(fresh_url()) as handle:
        handle.leave()
        with pytest.raises(RuntimeError, match="has left the run"):
            seq_estimate(handle, StreamingTransformerLeafEstimator(model()))


def test_an_estimator_of_statistics_is_refused():
    with site(fresh_url()) as handle, pytest.raises(TypeError, match="sites train modules together"):
        seq_estimate(handle, CategoricalEstimator())


class Planned:
    rank, world, _plan = 0, 4, object()

    def train(self, estimator, prev_estimate, follow=None): ...


@pytest.mark.parametrize(
    ("handle", "options", "error", "told"),
    [
        (LocalEncodedData([1.0], estimator=GaussianEstimator()), {}, TypeError, "without train, rank, world"),
        (Planned(), {}, ValueError, "handle has a plan"),
        (None, {"role": "syncer"}, ValueError, "role='syncer' must be one of"),
        (None, {"algorithm": 5}, TypeError, "algorithm=5 must be a DiLoCo"),
        (None, {"learner_id": "a/b"}, ValueError, "learner_id='a/b' must be"),
        (None, {"poll_interval": -1}, ValueError, "poll_interval=-1.0 must be above"),
        (None, {"lease_every": 9}, ValueError, "lease_timeout=4.0 must be at least twice lease_every=9"),
        (None, {"callbacks": 3}, TypeError, "callbacks=3 must be a sequence"),
        (None, {"compression": "gzip"}, ValueError, "compression='gzip'"),
        (None, {"state_dir": ""}, ValueError, "state_dir='' must be the path of a folder"),
        (None, {"mailbox": 3}, TypeError, "mailbox=3 must be a URL"),
    ],
)
def test_what_cannot_be_meant_is_refused(handle, options, error, told):
    given = {"algorithm": DiLoCo(5, 1), "mailbox": fresh_url(), **options}
    with pytest.raises(error, match=told):
        DiLoCoEncodedData(tokens_handle() if handle is None else handle, **given)
