"""Training options and step records."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest

from mixle.training import Evaluation, StepRecord, TrainingOptions


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"gradient_accumulation": 0}, ValueError, "gradient_accumulation=0"),
        ({"gradient_accumulation": True}, TypeError, "gradient_accumulation=True"),
        ({"max_grad_norm": 0.0}, ValueError, "max_grad_norm=0.0 must be above 0"),
        ({"max_grad_norm": "1"}, TypeError, "max_grad_norm='1'"),
        ({"checkpoint": "folder"}, NotImplementedError, "checkpoint='folder' is not built yet"),
        ({"evaluation": 3}, TypeError, "evaluation=3 must be an Evaluation"),
        ({"callbacks": print}, TypeError, "must be a sequence of callables"),
        ({"callbacks": [3]}, TypeError, "callbacks holds 3, which is not callable"),
        ({"progress": 1}, TypeError, "progress=1 must be True or False"),
        ({"nonfinite": "ignore"}, ValueError, "nonfinite='ignore' must be one of 'raise', 'skip'"),
        ({"deadline_s": 0}, ValueError, "deadline_s=0.0 must be above 0"),
    ],
)
def test_a_wrong_option_is_refused_by_name(options, error, message):
    with pytest.raises(error, match=message):
        TrainingOptions(**options)


@pytest.mark.parametrize("every", [0, 2.0, True])
def test_an_evaluation_comes_after_a_whole_number_of_steps(every):
    with pytest.raises((TypeError, ValueError), match=f"every={every}"):
        Evaluation([1, 2, 3], every=every)


def record():
    facts = {"step": 3, "epoch": 1, "learning_rate": 0.1, "grad_norm": 2.0, "targets": 64, "seconds": 0.5}
    return StepRecord(1.25, **facts)


def test_a_record_is_its_loss():
    assert record() == record().loss == 1.25
    assert np.mean([record(), record()]) == 1.25


@pytest.mark.parametrize("carry", [copy.copy, copy.deepcopy, lambda r: pickle.loads(pickle.dumps(r))])
def test_a_record_is_carried_whole(carry):
    assert carry(record()).to_dict() == record().to_dict()
    assert StepRecord(**record().to_dict()).to_dict() == record().to_dict()
    assert eval(repr(record())).to_dict() == record().to_dict()
