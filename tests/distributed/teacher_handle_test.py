"""Two ranks train on a teacher's samples: one model at each step, one process's result, whatever dies."""

from __future__ import annotations

from pathlib import Path

import pytest
from torchrun import launch

pytestmark = [pytest.mark.distributed, pytest.mark.slow]
PROGRAM = Path(__file__).parent / "programs" / "teacher_handle.py"
TRAINED = [
    "switched in a callback",
    "switched from a thread",
    "sharded",
    "after an error",
    "broker killed",
    "workers back",
]


@pytest.fixture(scope="module")
def reports():
    return launch(PROGRAM, ranks=2, timeout_s=400).reports


def everywhere(reports, name):
    """The value that both ranks report under ``name``."""
    assert reports[0][name] == reports[1][name]
    return reports[0][name]


# ---- training


@pytest.mark.parametrize("name", TRAINED)
def test_the_parameters_are_those_of_one_process_on_the_samples_of_both_ranks(reports, name):
    for report in reports:
        assert report[name]["deviation"] < 1e-5


@pytest.mark.parametrize("name", TRAINED)
def test_both_ranks_report_the_same_losses_and_receipt(reports, name):
    for part in ("losses", "receipt", "by generation", "first steps"):
        assert reports[0][name][part] == reports[1][name][part]


@pytest.mark.parametrize("name", TRAINED)
def test_no_step_mixes_models_and_no_sample_is_used_twice(reports, name):
    case = everywhere(reports, name)
    assert all(len(models) == 1 for models in case["models"])
    assert len(set(case["numbers"])) == len(case["numbers"]) >= 8 * len(case["losses"])


def test_workers_of_uneven_speed_and_their_ranks_share_the_same_steps(reports):
    case = everywhere(reports, "switched in a callback")
    assert {number >> 20 for number in case["numbers"]} == {1, 2}
    assert case["receipt"]["samples_served"] == 2 * 4 * 8


def test_after_a_switch_in_a_callback_all_ranks_take_the_next_step_with_the_new_model(reports):
    case = everywhere(reports, "switched in a callback")
    assert case["models"] == [[1]] * 3 + [[2]] * 5
    assert case["first steps"] == [[1, 1], [2, 4]]
    assert case["by generation"] == [[1, 24], [2, 40]]


def test_after_a_switch_from_another_thread_all_ranks_change_at_one_step(reports):
    case = everywhere(reports, "switched from a thread")
    models = [model for (model,) in case["models"]]
    assert models == sorted(models) and models[:3] == [2] * 3 and models[5:] == [3] * 3


def test_training_goes_on_from_the_leaf(reports):
    assert everywhere(reports, "goes on") == [8, 16, 16]


def test_only_rank_0_may_set_the_model(reports):
    assert reports[1]["set_model on rank 1"] == "LeaderRefused: rank 1 does not lead; rank 0 calls set_model"


# ---- refusals


def test_unfitting_names_and_shapes_are_refused_on_every_rank_before_anything_is_asked(reports):
    unknown = "ValueError: targets='logits' is no tensor of the samples; there are ['x', 'y']"
    assert everywhere(reports, "unknown tensor") == unknown
    assert "to (1, 5), but targets 'y' have (1, 4)" in everywhere(reports, "other shape")
    assert everywhere(reports, "asked meanwhile") == 0


def test_ranks_that_disagree_on_an_argument_are_refused_naming_both_values(reports):
    assert everywhere(reports, "other arguments") == "ValueError: steps=9 on rank 1, but 8 on rank 0"


def test_an_error_on_one_rank_is_raised_on_both_under_its_name(reports):
    assert reports[1]["loss of rank 1"] == "ArithmeticError: a loss of rank 1"
    assert reports[0]["loss of rank 1"] == "ArithmeticError: rank 1: a loss of rank 1"


# ---- what is missing, dies or fails


def test_without_a_broker_both_ranks_raise_and_say_where_they_looked(reports):
    for report in reports:
        assert "no broker answered at ipc://" in report["no broker"]


def test_a_broker_that_is_killed_and_started_again_does_not_interrupt_the_training(reports):
    case = everywhere(reports, "broker killed")
    assert case["receipt"]["samples_served"] == 2 * 4 * 8


def test_when_all_workers_die_both_ranks_raise_and_training_works_once_there_is_a_new_one(reports):
    for report in reports:
        assert "no worker" in report["workers killed"]
    assert everywhere(reports, "workers back")["receipt"]["steps"] == 50


def test_a_generator_that_fails_is_an_error_on_both_ranks_with_its_message(reports):
    for report in reports:
        assert "no teacher today" in report["broken"]


def test_nothing_is_left_in_shared_memory(reports):
    assert everywhere(reports, "left behind") == []


# ---- plans


@pytest.mark.parametrize("axis", ["tp_size", "pp_size", "cp_size"])
def test_under_a_plan_one_rank_asks_and_its_peers_train_on_the_same_samples(reports, axis):
    first, second = (report[axis] for report in reports)
    assert first["losses"] == second["losses"] and len(first["losses"]) == 3
    assert (first["served"], second["served"]) == (12, 12)
    assert (first["asks"], second["asks"]) == (True, False)


@pytest.mark.parametrize("axis", ["tp_size", "pp_size", "cp_size"])
def test_training_under_a_plan_is_that_of_one_process_on_the_same_samples(reports, axis):
    assert everywhere(reports, f"{axis}, deviation") < 1e-5


def test_a_plan_that_the_module_does_not_fit_is_refused_on_every_rank(reports):
    assert "tp_size=2 must divide n_head=1" in everywhere(reports, "plan that does not fit")
