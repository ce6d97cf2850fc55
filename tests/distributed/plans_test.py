"""A plan trains what one process would, through the same handle: whoever holds which layers, heads and tokens."""

from __future__ import annotations

import signal
from pathlib import Path

import numpy as np
import pytest
from torchrun import launch

pytestmark = [pytest.mark.distributed, pytest.mark.slow]
PROGRAMS = Path(__file__).parent / "programs"


@pytest.fixture(scope="module")
def reports():
    return launch(PROGRAMS / "plan_handle.py", ranks=4, timeout_s=290).reports


@pytest.mark.parametrize("world", [2, 4, 8])
def test_every_step_of_a_plan_is_one_processs_step(world):
    results = launch(PROGRAMS / "plan_matrix.py", "--subset", ranks=world, timeout_s=280).reports[0]
    assert len(results) >= 3
    for name, row in results.items():
        assert row["gradient"] <= 1e-5, name
        assert row["loss"] <= 1e-5, name
        assert row["parameter"] <= 1e-5, name


def test_the_gathered_leaf_has_the_same_bits_on_every_rank(reports):
    for name, digests in reports[0]["digests"].items():
        assert len(set(digests)) == 1, name


def test_every_rank_reports_the_same_losses(reports):
    for report in reports:
        assert report["losses"] == reports[0]["losses"]


def test_two_calls_of_one_epoch_are_one_call_of_two(reports):
    assert reports[0]["continued"] and all(all(report["continued"].values()) for report in reports)


def test_adamw_traces_the_loss_of_one_process(reports):
    for name, losses in reports[0]["losses"].items():
        np.testing.assert_allclose(losses, reports[0]["alone"], atol=1e-5, rtol=0, err_msg=name)


def test_a_proposal_trains_as_it_is(reports):
    np.testing.assert_allclose(reports[0]["proposed"], reports[0]["alone"], atol=1e-5, rtol=0)


def test_activations_computed_again_change_nothing(reports):
    for name, losses in reports[0]["recomputed"].items():
        np.testing.assert_allclose(losses, reports[0]["alone"], atol=1e-5, rtol=0, err_msg=name)


def test_bfloat16_stays_near(reports):
    for name, losses in reports[0]["bf16"].items():
        np.testing.assert_allclose(losses, reports[0]["alone"], atol=0.03, rtol=0, err_msg=name)


def test_clipping_bounds_the_norm_of_the_whole_gradient(reports):
    for name, ratios in reports[0]["clipped"].items():
        np.testing.assert_allclose(ratios, 1.0, rtol=1e-4, err_msg=name)


def test_gradients_accumulate_to_the_mean_over_all_their_targets(reports):
    for name, losses in reports[0]["accumulated"].items():
        np.testing.assert_allclose(losses, reports[0]["accumulated_alone"], atol=1e-5, rtol=0, err_msg=name)


def test_scores_of_a_planned_leaf_are_the_gathered_leafs(reports):
    for report in reports:
        for name, (planned, gathered) in report["scores"].items():
            np.testing.assert_allclose(planned, gathered, rtol=1e-6, err_msg=name)


def test_a_dense_leaf_is_scored_by_the_handle_of_a_plan(reports):
    for report in reports:
        for name, (planned, dense) in report["dense"].items():
            np.testing.assert_allclose(planned, dense, rtol=1e-6, err_msg=name)


def test_rows_that_ranks_cannot_share_evenly_are_padded(reports):
    for name, (losses, alone) in reports[0]["odd"].items():
        np.testing.assert_allclose(losses, alone, atol=1e-5, rtol=0, err_msg=name)


def test_a_planned_leaf_predicts_and_generates_as_the_gathered_one(reports):
    for report in reports:
        for name, (planned, gathered) in report["predictions"].items():
            np.testing.assert_allclose(planned, gathered, atol=1e-6, err_msg=name)
        for name, (planned, gathered) in report["generated"].items():
            assert planned == gathered, name


def test_a_saved_planned_leaf_is_the_dense_one(reports):
    assert all(all(report["saved"].values()) for report in reports)


def test_training_goes_on_from_the_gathered_leaf_under_another_plan(reports):
    np.testing.assert_allclose(reports[0]["moved"], reports[0]["alone"], atol=1e-5, rtol=0)


def test_ranks_of_a_replica_draw_different_dropout_and_still_agree(reports):
    for name, digests in reports[0]["dropout"].items():
        assert len(set(digests)) == 1, name


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("ring and dropout", "dropout=0.1"),
        ("another module", "a plan takes a mixle.models.transformer.CausalLM apart, not a Other"),
        ("heads", "tp_size=4 must divide n_head=2"),
        ("too many stages", "pp_size=4"),
        ("odd sequence", "cp_size=2 splits each sequence into 4 parts"),
        ("too few ranks", "must divide world_size=4"),
        ("arrays of one replica", "all ranks of a replica give the same array"),
        ("statistics of replicas", "would count several times"),
        ("another plan", "give that of leaf.unshard() instead"),
        ("scored under another plan", "is sharded in another way than under the plan dp=2 cp=2 ring"),
        ("scored without a plan", "is sharded under the plan tp=2 pp=2 1f1b x4, and the handle has none"),
        ("different plans", "cp_mode='allgather' on rank 1"),
        ("none", 'parallel="none" on 4 ranks'),
        ("positions", "positions are dealt out by the plan"),
        ("frozen", "does not require a gradient"),
        ("frozen since", "does not require a gradient"),
    ],
)
def test_what_cannot_be_combined_is_refused_on_every_rank(reports, case, message):
    for report in reports:
        assert message in report["refused"][case]


def test_an_id_outside_the_vocabulary_on_one_rank_is_refused_on_all_before_the_parameters_move(reports):
    for report in reports:
        told, unchanged = report["failed"]["is not an id"]
        assert "is not an id" in told
        assert unchanged


def test_data_that_fails_on_one_rank_fails_on_all(reports):
    for report in reports:
        assert "the data broke" in report["failed"]["the data broke"][0]


def test_one_ranks_wish_to_stop_ends_it_on_all(reports):
    assert all(report["stopped"] == 2 for report in reports)


@pytest.fixture(scope="module")
def killed():
    return launch(PROGRAMS / "plan_killed.py", ranks=2, timeout_s=200).reports


@pytest.mark.parametrize("axis", ["tp_size", "pp_size", "cp_size"])
def test_a_rank_killed_on_any_axis_ends_its_peers_with_its_name(killed, axis):
    assert killed[1][axis][0] == -signal.SIGKILL
    ended, told = killed[0][axis]
    assert ended == 0
    assert "PeerError: training: rank 1 took no part" in told
