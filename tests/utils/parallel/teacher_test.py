"""The teacher handle in one process, with a broker and workers in threads."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
from numbered_teacher import LENGTH, TOKENS, VECTORS, VOCAB, generator, tokens, vectors
from teacher_run import teacher_run
from torch import nn

from mixle import seq_estimate, seq_initialize, seq_log_density_sum
from mixle.data.teacher.errors import BrokerUnreachable, GeneratorFailed, LeaderRefused, NoWorker
from mixle.data.teacher.specs import BatchConfig
from mixle.data.teacher.student import StudentClient
from mixle.models.distillation import DistillationEstimator, DistillationLeaf, HiddenStates
from mixle.models.streaming_transformer_leaf import StreamingTransformerLeaf, StreamingTransformerLeafEstimator
from mixle.models.transformer import CausalLM
from mixle.stats.gaussian import GaussianEstimator
from mixle.training import Evaluation, StopTraining, TrainingOptions
from mixle.utils.parallel.teacher import TeacherEncodedData


@pytest.fixture
def run():
    with teacher_run() as each:
        yield each


@pytest.fixture
def taught(run):
    """A run with a broker and one worker of numbered samples."""
    run.start_broker()
    run.start_worker(generator(0, 0.0))
    return run


def handle_on(run, config=VECTORS, **options) -> TeacherEncodedData:
    endpoints = {**run.client}
    frontend = endpoints.pop("frontend_endpoint")
    chosen = {"batch_size": 4, "steps": 6, "deadline_s": 20.0, **endpoints, **options}
    return TeacherEncodedData(frontend, batch_config=config, **chosen)


class Recorded:
    """The squared error of the first two numbers; keeps the numbers and models of the samples that it saw."""

    def __init__(self) -> None:
        self.seen: list[list[tuple[int, int]]] = []

    def losses(self, predicted, wanted):
        self.seen.append([(int(number), int(model)) for number, model in wanted[:, 2:].tolist()])
        return (predicted - wanted)[:, :2].square().mean(-1)


def student(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))


def estimator(module, loss=None, **options) -> DistillationEstimator:
    return DistillationEstimator(module, 0.05, loss=loss or HiddenStates(), inputs="x", targets="y", **options)


# ---- training


@pytest.mark.parametrize("accumulation", [1, 3])
def test_training_is_that_of_a_plain_loop_on_the_same_samples(taught, accumulation):
    loss, module, plain = Recorded(), student(), student()
    options = TrainingOptions(gradient_accumulation=accumulation)
    with handle_on(taught, training=options) as handle:
        leaf = seq_estimate(handle, estimator(module, loss, optimizer="sgd"))
    optimizer = torch.optim.SGD(plain.parameters(), 0.05)
    losses = []
    for step in range(6):
        rows = [row for batch in loss.seen[step * accumulation : (step + 1) * accumulation] for row in batch]
        samples = [vectors(number, model) for number, model in rows]
        x, y = (torch.from_numpy(np.stack([sample[name] for sample in samples])) for name in "xy")
        optimizer.zero_grad()
        mean = (plain(x) - y)[:, :2].square().mean()
        mean.backward()
        optimizer.step()
        losses.append(mean.item())
    assert isinstance(leaf, DistillationLeaf)
    assert [float(record) for record in leaf.history] == pytest.approx(losses, rel=1e-5)
    for found, expected in zip(module.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_the_leaf_goes_on_where_it_was(taught):
    with handle_on(taught) as handle:
        first = seq_estimate(handle, estimator(student()))
        second = seq_estimate(handle, estimator(student(1)), first)
        third = seq_estimate(handle, second.estimator())
    assert second.module is first.module
    assert [len(leaf.history) for leaf in (first, second, third)] == [6, 12, 18]
    assert third.revision == 18


def test_no_sample_is_trained_on_twice(taught):
    loss = Recorded()
    with handle_on(taught, steps=30) as handle:
        seq_estimate(handle, estimator(student(), loss))
    numbers = [number for batch in loss.seen for number, _ in batch]
    assert len(numbers) == len(set(numbers)) == 120


def test_a_language_model_trains_on_the_teachers_tokens(taught):
    torch.manual_seed(0)
    module = CausalLM(VOCAB, 16, 1, 2, LENGTH)
    fixed = torch.from_numpy(np.stack([tokens(number)["ids"] for number in range(16)])).long()
    with handle_on(taught, TOKENS, model_id="tokens", steps=3) as handle:
        leaf = seq_estimate(handle, StreamingTransformerLeafEstimator(module))
    assert isinstance(leaf, StreamingTransformerLeaf)
    assert [record.targets for record in leaf.history] == [4 * (LENGTH - 1)] * 3
    assert np.isfinite(leaf.log_density((fixed[0].numpy(), 3)))


def test_a_step_that_was_stopped_for_is_followed_by_the_rest_of_its_call(taught):
    def stop(record):
        if record.step == 2:
            raise StopTraining

    with handle_on(taught, training=TrainingOptions(callbacks=[stop])) as handle:
        first = seq_estimate(handle, estimator(student()))
        assert len(first.history) == 2
        assert len(seq_estimate(handle, estimator(student()), first).history) == 6


def test_no_steps_return_the_module_untrained(taught):
    with handle_on(taught, steps=0) as handle:
        assert len(seq_estimate(handle, estimator(student())).history) == 0


def test_initializing_returns_the_module_as_it_is(run):
    module = student()
    with handle_on(run) as handle:
        assert seq_initialize(handle, estimator(module), None).module is module


# ---- models


def test_a_switch_in_a_callback_takes_effect_with_the_next_step(taught):
    loss = Recorded()

    def switch(record):
        if record.step == 2:
            handle.set_model("m", {"number": 7})

    options = TrainingOptions(callbacks=[switch])
    with handle_on(taught, model_id="m", model_cfg={"number": 3}, training=options) as handle:
        seq_estimate(handle, estimator(student(), loss))
        receipt = handle.schedule_receipt
    assert [{model for _, model in batch} for batch in loss.seen] == [{3}, {3}, *[{7}] * 4]
    assert receipt["samples_by_generation"] == {1: 8, 2: 16}
    assert receipt["first_step_of_generation"] == {1: 1, 2: 3}


def test_another_thread_may_switch_while_samples_are_waited_for(run):
    run.start_broker()
    run.start_worker(generator(0, 0.0), patterns=["m"])
    loss = Recorded()
    with handle_on(run, model_id="nobody's") as handle:
        leading = threading.Timer(0.2, handle.set_model, ("m", {"number": 5}))
        leading.start()
        seq_estimate(handle, estimator(student(), loss))
        leading.join()
    assert {model for batch in loss.seen for _, model in batch} == {5}


def test_the_receipt_counts_what_was_served(taught):
    with handle_on(taught) as handle:
        assert handle.schedule_receipt["samples_served"] == 0
        seq_estimate(handle, estimator(student()))
        assert handle.schedule_receipt == {
            "world_size": 1,
            "steps": 6,
            "batch_size": 4,
            "samples_asked": 24,
            "samples_served": 24,
            "samples_stale": 0,
            "orders_retried": 0,
            "samples_by_generation": {0: 24},
            "first_step_of_generation": {0: 1},
            "policy": "one-generation-per-step-on-all-ranks",
        }


# ---- a client of one's own


def test_a_client_that_was_given_stays_open(taught):
    with StudentClient(0, 8, VECTORS, **taught.client) as client:
        with TeacherEncodedData(client, batch_config=VECTORS, batch_size=4, steps=2) as handle:
            seq_estimate(handle, estimator(student()))
        with client.request_batch(4, 20_000) as batch:
            assert len(batch) == 4


def test_a_client_of_other_samples_is_refused(run):
    with StudentClient(0, 8, TOKENS, **run.client) as client, pytest.raises(ValueError, match="batch_config is not"):
        TeacherEncodedData(client, batch_config=VECTORS, batch_size=4, steps=2)


def test_a_client_with_too_few_slots_is_refused_with_the_numbers(run):
    with StudentClient(0, 3, VECTORS, **run.client) as client, pytest.raises(ValueError, match="slot_count=3 holds"):
        TeacherEncodedData(client, batch_config=VECTORS, batch_size=4, steps=2)


# ---- refusals


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"batch_size": 0}, "batch_size=0"),
        ({"batch_size": True}, "batch_size=True"),
        ({"steps": -1}, "steps=-1"),
        ({"seed": 0.5}, "seed=0.5"),
        ({"deadline_s": 0}, "deadline_s=0"),
        ({"max_retries": -1}, "max_retries=-1"),
        ({"slot_count": 3}, "slot_count=3 holds less than a step's samples"),
        ({"model_cfg": {"a": 1}}, "model_cfg is given without the model_id"),
        ({"parallel": "tp"}, "parallel='tp'"),
        ({"training": 3}, "training=3"),
        ({"training": TrainingOptions(evaluation=Evaluation([1], 2))}, "evaluation needs data"),
        ({"config": [1]}, r"batch_config=\[1\]"),
        ({"insecure": True, "control_endpoint": "udp://x"}, "control_endpoint='udp://x'"),
        ({"tp_size": 2}, "the samples have no token ids"),
        ({"config": TOKENS, "cp_size": 3}, "must divide"),
    ],
)
def test_a_bad_argument_is_refused_by_name(run, options, told):
    with pytest.raises((TypeError, ValueError), match=told):
        handle_on(run, **options)


def test_a_tensor_that_samples_do_not_have_is_refused_before_anything_is_asked(run):
    with handle_on(run) as handle, pytest.raises(ValueError, match=r"targets='z' is no tensor .* \['x', 'y'\]"):
        seq_estimate(handle, DistillationEstimator(student(), loss=HiddenStates(), inputs="x", targets="z"))


def test_another_kind_of_estimator_and_of_model_are_refused(run):
    with handle_on(run) as handle:
        with pytest.raises(TypeError, match="not a GaussianEstimator"):
            seq_estimate(handle, GaussianEstimator())
        with pytest.raises(TypeError, match="prev_estimate must be"):
            seq_estimate(handle, estimator(student()), 3)
        with pytest.raises(TypeError, match="does not offer pysp_seq_log_density_sum"):
            seq_log_density_sum(handle, None)


def test_ids_outside_the_modules_vocabulary_are_refused_and_nothing_is_trained(taught):
    module = CausalLM(5, 8, 1, 2, LENGTH)
    before = [p.detach().clone() for p in module.parameters()]
    with handle_on(taught, TOKENS, model_id="tokens") as handle, pytest.raises(ValueError, match="vocabulary of 5"):
        seq_estimate(handle, StreamingTransformerLeafEstimator(module))
    assert all(torch.equal(p, q) for p, q in zip(module.parameters(), before, strict=True))


def test_samples_longer_than_the_module_takes_are_refused(run):
    module = CausalLM(VOCAB, 8, 1, 2, LENGTH - 1)
    with handle_on(run, TOKENS) as handle, pytest.raises(ValueError, match="samples have 8 tokens, more than block=7"):
        seq_estimate(handle, StreamingTransformerLeafEstimator(module))


def test_a_plan_trains_only_next_tokens(run):
    config = BatchConfig([*TOKENS.specs, *VECTORS.specs])
    with handle_on(run, config, tp_size=2) as handle, pytest.raises(ValueError, match="a plan trains next tokens"):
        seq_estimate(handle, estimator(student()))


# ---- a teacher that is missing or fails


def test_a_missing_broker_is_an_error_by_the_deadline(run):
    with (
        handle_on(run, deadline_s=0.3) as handle,
        pytest.raises(BrokerUnreachable, match=r"within 0\.3 s: nothing listens"),
    ):
        seq_estimate(handle, estimator(student()))


def test_a_first_model_without_a_broker_is_an_error_by_the_deadline(run):
    with pytest.raises(BrokerUnreachable):
        handle_on(run, deadline_s=0.3, model_id="m")


def test_a_model_that_nobody_serves_is_an_error_by_the_deadline_and_another_one_works(run):
    run.start_broker()
    run.start_worker(generator(0, 0.0), patterns=["m"])
    with handle_on(run, deadline_s=0.5, model_id="other") as handle:
        with pytest.raises(NoWorker, match="no worker served model 'other'"):
            seq_estimate(handle, estimator(student()))
        handle.set_model("m")
        assert len(seq_estimate(handle, estimator(student())).history) == 6


def test_a_generator_that_always_fails_is_an_error_with_its_message(taught):
    with handle_on(taught, model_id="broken", max_retries=1) as handle:
        with pytest.raises(GeneratorFailed, match="no teacher today"):
            seq_estimate(handle, estimator(student()))
        assert handle.schedule_receipt["orders_retried"] == 1


def test_two_leaders_are_refused(taught):
    with handle_on(taught, model_id="m"), pytest.raises(LeaderRefused):
        handle_on(taught, model_id="m")


def test_nothing_is_left_in_shared_memory(taught):
    with handle_on(taught) as handle:
        seq_estimate(handle, estimator(student()))
        assert taught.segments()
    assert not taught.segments()
