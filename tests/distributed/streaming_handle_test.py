"""The streaming handle on two ranks: what is refused is refused everywhere, what fails fails everywhere, none hangs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from conditional import Conditional
from torchrun import launch

from mixle import seq_encode, seq_estimate
from mixle.models.streaming_transformer_leaf import StreamingTransformerLeafEstimator
from mixle.stats.markov_chain import MarkovChainEstimator
from mixle.training import TrainingOptions
from mixle.utils.parallel.torch_neural import StreamingTokenEncodedData

pytestmark = [pytest.mark.distributed, pytest.mark.slow]
PROGRAM = Path(__file__).parent / "programs" / "streaming_handle.py"
TOKENS = np.random.default_rng(0).integers(0, 17, 300)


@pytest.fixture(scope="module")
def reports():
    return launch(PROGRAM, ranks=2, timeout_s=240).reports


def everywhere(reports, name):
    """The value that both ranks report under ``name``."""
    assert reports[0][name] == reports[1][name]
    return reports[0][name]


# ---- refusals


def test_shards_too_short_for_a_window_are_refused_naming_the_ranks_and_the_remedy(reports):
    message = everywhere(reports, "short shards")
    assert message.startswith("ValueError: no window of block=16 fits into the shards of ranks 0, 1")
    assert 'boundary="overlap" trains all 16' in message


def test_overlapping_shards_train_every_target(reports):
    assert everywhere(reports, "short shards, overlapping") == 16
    assert everywhere(reports, "short shards, trained") == 16


def test_training_several_ranks_apart_is_refused(reports):
    assert everywhere(reports, "none").startswith('ValueError: parallel="none" on 2 ranks')


def test_ranks_that_disagree_on_the_data_or_an_argument_are_refused_naming_both_values(reports):
    assert "token_ids has 299 tokens on rank 1 and 300 on rank 0" in everywhere(reports, "other lengths")
    assert everywhere(reports, "other arguments") == "ValueError: batch_size=5 on rank 1, but 4 on rank 0"


@pytest.mark.parametrize(
    ("case", "told"),
    [
        ("recomputation", "activation_checkpointing=True on rank 1, but False on rank 0"),
        ("gradient_accumulation", "gradient_accumulation=2 on rank 1, but 1 on rank 0"),
        ("max_grad_norm", "max_grad_norm=0.5 on rank 1, but None on rank 0"),
        ("nonfinite", "nonfinite='skip' on rank 1, but 'raise' on rank 0"),
        ("deadline_s", "deadline_s=20.0 on rank 1, but 30.0 on rank 0"),
        ("callbacks", "callbacks=() on rank 1, but (...) on rank 0"),
        ("evaluation", "evaluation=Evaluation(every=2) of 50 tokens on rank 1, but None on rank 0"),
        (
            "held-out data",
            "evaluation=Evaluation(every=2) of 51 tokens on rank 1, but Evaluation(every=2) of 50 tokens on rank 0",
        ),
    ],
)
def test_ranks_that_disagree_on_how_to_train_are_refused_naming_both_values(reports, case, told):
    assert everywhere(reports, f"other {case}") == f"ValueError: {told}"


def test_callbacks_and_the_progress_line_are_each_ranks_own(reports):
    assert everywhere(reports, "own callbacks and progress") == 5


@pytest.mark.parametrize("case", ["bad id", "bad id, global"])
def test_an_id_outside_the_vocabulary_on_one_rank_is_refused_on_every_rank_naming_value_place_and_vocabulary(
    reports, case
):
    for report in reports:
        assert report[case].startswith("ValueError: ")
        assert "token_ids[280]=99 on rank 1 is not an id of the module's vocabulary of 17" in report[case]


def test_a_refused_id_leaves_the_parameters_as_they_were(reports):
    assert everywhere(reports, "bad id, parameters") is True


def test_modules_of_different_shapes_are_refused(reports):
    assert "the modules of ranks 1 differ from rank 0's" in everywhere(reports, "other modules")


def test_a_sharded_module_is_not_fitted_in_another_precision(reports):
    assert "precision='fp32' does not fit a module that is sharded" in everywhere(reports, "resharded otherwise")


# ---- what works


def test_a_second_handle_trains_on_after_the_first_is_closed(reports):
    assert everywhere(reports, "second handle") == [True, 10, True]


@pytest.mark.parametrize("wrapping", ["ddp", "fsdp"])
class TestVerbs:
    def test_every_block_has_one_checkpoint_wrapper_after_three_calls(self, reports, wrapping):
        assert all(r[wrapping]["checkpoint wrappers"] == 2 for r in reports)

    def test_the_names_in_state_dict_stay(self, reports, wrapping):
        assert all(r[wrapping]["names kept"] for r in reports)

    def test_the_score_is_global_and_covers_every_target(self, reports, wrapping):
        first, second = (r[wrapping]["scores"] for r in reports)
        assert first == second
        assert first[0] == first[2] == 298

    def test_each_ranks_own_scores_add_up_to_the_global_one(self, reports, wrapping):
        own = [r[wrapping]["own scores"] for r in reports]
        assert [count for count, _, _ in own] == [expected for _, _, expected in own]
        assert sum(total for _, total, _ in own) == pytest.approx(reports[0][wrapping]["scores"][1], rel=1e-12)

    @pytest.mark.parametrize("copy", ["dense", "loaded", "pickled"])
    def test_an_unsharded_a_saved_and_a_pickled_leaf_score_alike(self, reports, wrapping, copy):
        for report in reports:
            case = report[wrapping]
            assert case[f"{copy} scores"] == pytest.approx(case["scores"][1], rel=1e-6)

    def test_a_loaded_leaf_goes_on_exactly_like_the_one_that_was_saved(self, reports, wrapping):
        assert all(r[wrapping]["goes on from the loaded"] for r in reports)

    def test_a_prediction_sums_to_one(self, reports, wrapping):
        assert all(r[wrapping]["predicted"] == pytest.approx(1.0) for r in reports)


def test_sharded_training_is_sharded_and_replicated_training_is_not(reports):
    assert [r["fsdp"]["sharded"] for r in reports] == [True, True]
    assert [r["ddp"]["sharded"] for r in reports] == [False, False]


def test_a_sharded_leaf_generates_the_same_tokens_on_every_rank_without_a_seed(reports):
    generated = [r["fsdp"]["generated"] for r in reports]
    assert generated[0] == generated[1]
    assert len(generated[0]) == 8


def test_bf16_keeps_float32_parameters_and_trains(reports):
    first, last, dtype = everywhere(reports, "bf16")
    assert dtype == "torch.float32"
    assert np.isfinite([first, last]).all()


def test_optimize_and_initialize_start_every_rank_from_rank_0s_module(reports):
    assert everywhere(reports, "optimize") == ["StreamingTransformerLeaf", True]
    assert everywhere(reports, "initialize") is True


@pytest.mark.parametrize("accumulation", [1, 2])
def test_parameters_that_some_forward_passes_leave_out_are_trained_as_in_one_process(reports, accumulation):
    module, options = Conditional(17), TrainingOptions(gradient_accumulation=accumulation)
    how = {"block": 8, "batch_size": 4, "targets": "all", "sampling": "global", "epochs": 2, "training": options}
    seq_estimate(StreamingTokenEncodedData(TOKENS, **how), StreamingTransformerLeafEstimator(module, 0.01))
    trained = everywhere(reports, f"conditional, {accumulation}")
    assert trained.keys() == dict(module.named_parameters()).keys()
    for name, p in module.named_parameters():
        np.testing.assert_allclose(trained[name], p.detach().numpy(), rtol=0, atol=1e-4)
    assert everywhere(reports, f"conditional, {accumulation}, equal") is True


def test_a_markov_chain_on_the_stream_counts_transitions_across_the_shards_edge_once(reports):
    fitted, (count, total) = everywhere(reports, "chain")
    alone = seq_estimate(seq_encode([TOKENS.tolist()], estimator=MarkovChainEstimator()), MarkovChainEstimator())
    assert fitted == alone.to_dict()
    assert count == 300
    assert total == pytest.approx(alone.log_density(TOKENS.tolist()), rel=1e-12)


def test_five_tokens_on_two_ranks_finish_in_every_verb(reports):
    steps, scored, chunks = everywhere(reports, "five")
    assert (steps, scored, chunks) == (1, 4, 1)
    assert everywhere(reports, "five, chain") == 5


def test_one_ranks_callback_stops_all_and_evaluation_is_the_same_on_all(reports):
    steps, evaluations = everywhere(reports, "stopped")
    assert steps == 4
    assert [value is None for value in evaluations] == [True, False, True, False]


# ---- what goes wrong while training


@pytest.mark.parametrize("wrapping", ["ddp", "fsdp"])
@pytest.mark.parametrize("fault", ["nan", "inf"])
def test_a_step_that_is_not_finite_on_one_rank_is_skipped_and_counted_on_all(reports, fault, wrapping):
    assert everywhere(reports, f"skip {fault} {wrapping}") == [1, [3], True, True]


def test_a_step_that_is_not_finite_stops_every_rank_by_default_and_leaves_the_group(reports):
    assert everywhere(reports, "raise").startswith(
        "FloatingPointError: the loss or its gradient is not finite at step 3"
    )
    assert everywhere(reports, "raise, group alive") == ""


@pytest.mark.parametrize(
    ("cause", "own", "told"),
    [
        ("module", "ZeroDivisionError: in the module", "ZeroDivisionError: rank 1: in the module"),
        ("callback", "KeyError: 'in the callback'", "KeyError: \"rank 1: 'in the callback'\""),
        ("data", "OSError: the disk is gone", "PeerError: rank 1: OSError: the disk is gone"),
    ],
)
def test_a_failure_on_one_rank_is_raised_on_every_rank_and_a_new_fit_works(reports, cause, own, told):
    assert [r[f"fails: {cause}"] for r in reports] == [told, own]
    assert everywhere(reports, f"fails: {cause}, then trains") == 5


def test_a_collective_call_on_one_rank_raises_at_the_deadline_and_names_who_is_missing(reports):
    assert reports[0]["alone"].startswith("PeerError: scoring: rank 1 did not come within 2 s")
    assert reports[0]["alone, predicting"].startswith("PeerError: predict on a sharded leaf: rank 1 did not come")
    assert everywhere(reports, "together again") == 298


def test_a_sharded_leaf_used_after_its_group_is_gone_says_so(reports):
    assert "the process group is gone: its last user has closed it" in everywhere(reports, "after the group")
