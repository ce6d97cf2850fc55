"""The estimator and the leaf of distillation, without a teacher."""

from __future__ import annotations

import pickle

import pytest
import torch
from torch import nn

from mixle.models.distillation import DistillationEstimator, DistillationLeaf, HiddenStates, SoftLabels
from mixle.models.streaming_transformer_leaf import StreamingTransformerLeaf
from mixle.models.transformer import CausalLM
from mixle.training import StepRecord, TrainingState


def record(step: int) -> StepRecord:
    return StepRecord(1.0 / step, step=step, epoch=0, learning_rate=0.1, grad_norm=1.0, targets=4, seconds=0.1)


def test_the_default_is_to_learn_logits_of_ids_as_they_are():
    task = DistillationEstimator(nn.Linear(2, 2)).task
    assert (task.loss, task.inputs, task.targets, task.mask) == (SoftLabels(1.0), "ids", "logits", None)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"module": "student"}, "module must be a torch.nn.Module"),
        ({"loss": "kl"}, "loss='kl' must be a loss"),
        ({"inputs": 3}, "inputs=3 must be the name of a tensor"),
        ({"mask": True}, "mask=True must be the name of a tensor"),
        ({"lr": 0.0}, "lr=0.0"),
        ({"optimizer": "sgd", "betas": (0.9, 0.9)}, "betas="),
    ],
)
def test_a_bad_argument_is_refused_by_name(arguments, told):
    with pytest.raises((TypeError, ValueError), match=told):
        DistillationEstimator(**{"module": nn.Linear(2, 2), **arguments})


def test_a_leaf_shows_the_steps_until_it_was_returned():
    state = TrainingState(step=2, revision=2, history=[record(1), record(2)])
    leaf = DistillationEstimator(nn.Linear(2, 2)).leaf(state)
    state.history.append(record(3))
    assert [float(each) for each in leaf.history] == [1.0, 0.5]
    assert leaf.revision == 2


def test_the_estimator_of_a_leaf_has_its_module_its_loss_and_its_optimizer():
    first = DistillationEstimator(
        nn.Linear(2, 2), 0.5, loss=HiddenStates(), inputs="x", targets="h", mask="use", optimizer="sgd", momentum=0.9
    )
    leaf = first.leaf(TrainingState(step=4))
    again = leaf.estimator()
    assert again.module is first.module
    assert (again.task, again.options, again.lr) == (first.task, first.options, 0.5)
    assert again.state is leaf.state


def test_a_student_of_logits_is_a_language_model_that_shares_its_module_and_training():
    torch.manual_seed(0)
    student = CausalLM(11, 8, 1, 2, 4)
    leaf = DistillationEstimator(student).leaf(TrainingState(step=3))
    model = leaf.language_model()
    assert isinstance(model, StreamingTransformerLeaf)
    assert model.module is student and model.state is leaf.state
    expected = student(torch.tensor([[1, 2]]))[0, -1].log_softmax(-1)[5].item()
    assert model.log_density(([1, 2], 5)) == pytest.approx(expected, abs=1e-6)


def test_a_dense_leaf_is_its_own_unsharded_one_and_can_be_pickled():
    leaf = DistillationEstimator(nn.Linear(2, 3), loss=SoftLabels(2.0)).leaf(TrainingState(step=5))
    copy = pickle.loads(pickle.dumps(leaf))
    assert leaf.unshard() is leaf and not leaf.is_sharded
    assert isinstance(copy, DistillationLeaf)
    assert copy.task == leaf.task and copy.state.step == 5
    torch.testing.assert_close(copy.module.weight, leaf.module.weight)


def test_a_leaf_says_what_it_is():
    leaf = DistillationEstimator(nn.Linear(2, 3)).leaf(TrainingState(step=5))
    assert repr(leaf) == "DistillationLeaf(Linear on cpu, 5 optimizer steps)"
