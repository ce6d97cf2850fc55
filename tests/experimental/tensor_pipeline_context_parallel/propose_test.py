"""Proposals fit, are valid, are ranked, and say what is in the way of the rest."""

from __future__ import annotations

import dataclasses
import inspect
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mixle.experimental.tensor_pipeline_context_parallel import validate_tp_pp_cp_plan
from mixle.experimental.tensor_pipeline_context_parallel.hardware import GIB, HARDWARE
from mixle.experimental.tensor_pipeline_context_parallel.memory import memory_by_rank
from mixle.experimental.tensor_pipeline_context_parallel.model_shape import ModelShape
from mixle.experimental.tensor_pipeline_context_parallel.propose import propose_plans
from mixle.models.streaming_transformer_leaf import StreamingTransformerLeafEstimator
from mixle.models.transformer import CausalLM
from mixle.stats.sequence import seq_estimate
from mixle.training import TrainingOptions
from mixle.utils.parallel.torch_neural import StreamingTokenEncodedData

SHORT = CausalLM(1000, 128, 4, 4, 64)


def propose(model="llama3-8b", world_size=8, **options):
    return propose_plans(model, world_size, **{"hardware": "h100", "seq_len": 8192, **options})


@pytest.fixture(scope="module")
def eight():
    return propose(global_batch_size=16)


def test_the_fastest_comes_first(eight):
    seconds = [proposal.seconds for proposal in eight]
    assert len(eight) > 5
    assert seconds == sorted(seconds)


def test_each_mesh_comes_once_and_fills_the_world(eight):
    meshes = [(p.plan.dp, p.plan.tp, p.plan.pp, p.plan.cp) for p in eight]
    meshes += [(m.plan.dp, m.plan.tp, m.plan.pp, m.plan.cp) for m in eight.excluded]
    assert len(set(meshes)) == len(meshes) == 20  # ordered factorizations of 8 into four
    assert {p.plan.world_size for p in eight} == {8}


def test_all_fit_and_what_does_not_fit_says_by_how_much(eight):
    assert all(p.memory <= eight.limit == 78 * GIB for p in eight)
    tight = propose(global_batch_size=16, memory_limit=20 * GIB)
    assert tight.excluded
    assert all(miss.proposal is None or miss.proposal.memory > 20 * GIB for miss in tight.excluded)
    assert any("of 20.0 GiB, recompute=full" in miss.reason for miss in tight.excluded)


def test_every_proposal_is_a_plan_that_the_validator_passes(eight):
    for proposal in eight:
        report = validate_tp_pp_cp_plan(ModelShape(**LLAMA_WIDTHS), world_size=8, **proposal.handle_arguments())
        assert report.plan == proposal.plan


def test_a_proposal_gives_the_arguments_of_a_handle():
    proposal = propose(batch_size=2, max_tp=2, recompute="full")[0]
    assert proposal.handle_arguments() == {
        **proposal.plan.handle_arguments(), "batch_size": 2, "block": 8192, "parallel": "fsdp", "precision": "bf16",
        "activation_checkpointing": True,
    }  # fmt: skip
    taken = inspect.signature(StreamingTokenEncodedData).parameters
    assert set(proposal.handle_arguments()) <= set(taken)


@pytest.mark.parametrize(("options", "message"), [
    ({"precision": "fp8"}, 'precision="fp8" is for prediction'),
    ({"recompute": "selective"}, 'recompute="selective" is for prediction'),
])  # fmt: skip
def test_what_no_handle_has_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        propose(batch_size=1, **options)[0].handle_arguments()


def test_a_proposal_for_one_process_trains_as_it_is():
    module = CausalLM(24, 16, 2, 2, 8)
    proposal = propose(module, 1, hardware="cpu", global_batch_size=4, seq_len=8, precision="fp32")[0]
    options = TrainingOptions(gradient_accumulation=proposal.accumulation)
    given = proposal.handle_arguments()
    with StreamingTokenEncodedData(np.arange(65) % 24, targets="all", training=options, **given) as handle:
        leaf = seq_estimate(handle, StreamingTransformerLeafEstimator(module))
    assert len(leaf.history) == 2


LLAMA_WIDTHS = {
    "vocab": 128_256, "d_model": 4096, "n_layer": 32, "n_head": 32, "n_kv_head": 8, "d_mlp": 14_336, "gated": True,
    "tied": False,
}  # fmt: skip


def test_all_rows_of_the_step_are_trained(eight):
    assert {p.accumulation * p.workload.batch_size * p.plan.dp for p in eight} == {16}


def test_the_memory_is_that_of_the_fullest_rank(eight):
    best = eight[0]
    ranks = memory_by_rank(ModelShape(**LLAMA_WIDTHS), best.plan, best.workload)
    assert best.memory == max(rank.reserved for rank in ranks)


def test_rows_per_replica_rank_by_time_per_token():
    proposals = propose(batch_size=1)
    rates = [p.tokens_per_second for p in proposals]
    assert rates == sorted(rates, reverse=True)
    assert {p.workload.batch_size for p in proposals} == {1}


def test_more_memory_never_makes_it_slower():
    small, large = (propose(global_batch_size=16, memory_limit=gib * GIB)[0].seconds for gib in (24, 78))
    assert large <= small


def test_a_model_that_fits_nowhere_is_told_how_many_ranks_and_how_much_memory_would_do():
    proposals = propose("405B", 8, batch_size=1)
    assert len(proposals) == 0
    assert len(propose("405B", proposals.enough, batch_size=1)) > 0
    assert len(propose("405B", proposals.enough // 2, batch_size=1)) == 0
    smallest = proposals.excluded[0].proposal
    assert len(propose("405B", 8, batch_size=1, memory_limit=smallest.memory)) == 1
    assert len(propose("405B", 8, batch_size=1, memory_limit=smallest.memory - 1)) == 0
    assert str(proposals).endswith(
        f"No plan fits into 78.0 GiB per rank. {proposals.enough} ranks are enough. On 8, 809.2 GiB per rank are "
        "enough (tp=4 cp=2 ring, recompute=full)."
    )


def test_where_a_rule_is_in_the_way_it_is_told():
    proposals = propose(ModelShape(vocab=1001, d_model=1024, n_layer=1, n_head=8), 2, global_batch_size=1, seq_len=777)
    assert len(proposals) == 0
    reasons = (
        "dp=2 must divide global_batch_size=1; cp=2 leaves .*; pp_size=2 needs .*; tp_size=2 must divide vocab=1001"
    )
    assert re.search(f"No plan works: {reasons}", str(proposals))


def test_what_needs_far_more_memory_or_breaks_a_rule_is_no_near_miss():
    proposals = propose(global_batch_size=16, memory_limit=20 * GIB)
    needs = [miss.proposal.memory for miss in proposals.near_misses]
    assert needs and max(needs) <= 30 * GIB
    assert any(miss.proposal is None or miss.proposal.memory > 30 * GIB for miss in proposals.excluded)
    assert "Near misses" in str(proposals)
    assert "Near misses" not in str(propose("405B", 8, batch_size=1))


class TestTies:
    def test_they_are_those_within_a_tenth_of_the_fastest(self, eight):
        slowest = min(p.tokens_per_second for p in eight.ties)
        assert slowest >= 0.9 * eight[0].tokens_per_second > eight[len(eight.ties)].tokens_per_second

    def test_the_simplest_come_first(self, eight):
        axes = [p.axes for p in eight.ties]
        assert axes == sorted(axes)
        assert axes[0] < axes[-1]

    def test_they_are_marked_and_printed_first(self, eight):
        lines = str(eight).splitlines()
        marked = [line for line in lines[3:] if line.startswith("=  ")]
        assert lines[3 : 3 + len(marked)] == marked
        assert marked[0].split()[1] == str(eight.ties[0].plan).split()[0]
        assert marked

    def test_one_that_only_trades_replicas_for_context_ranks_is_printed_once(self, eight):
        twins = [p for p in eight if (p.plan.tp, p.plan.pp) == (1, 1)]
        assert len(twins) > 1
        assert max(p.seconds for p in twins[:2]) < 1.03 * min(p.seconds for p in twins[:2])
        printed = [line for line in str(eight).splitlines()[3:] if "tp=" not in line and "pp=" not in line]
        assert len([line for line in printed if "=  cp=8" in line or "dp=" in line]) < len(twins)
        assert " alike" in str(eight)


def test_utilization_is_a_share_of_the_published_peak(eight):
    best = eight[0]
    block = 2 * 4096 * (4096 + 1024) + 3 * 4096 * 14_336
    operations = 6 * (32 * block + 128_256 * 4096) + 12 * 32 * 4096 * 8192
    assert best.mfu == pytest.approx(operations * best.tokens_per_second / 989e12)
    assert 0.3 < best.mfu < 0.6


def test_where_no_peak_is_told_there_is_no_utilization():
    proposals = propose("350M", 2, hardware="cpu", batch_size=1, seq_len=1024)
    assert proposals[0].mfu is None
    assert "MFU" not in str(proposals)


def test_cpus_take_context_parts_of_any_length():
    shape = ModelShape(vocab=1000, d_model=64, n_layer=2, n_head=2)
    assert any(p.plan.cp == 2 for p in propose(shape, 2, hardware="cpu", batch_size=1, seq_len=64))
    assert not any(p.plan.cp == 2 for p in propose(shape, 2, batch_size=1, seq_len=64))


def test_the_nearest_misses_come_first():
    memory = [miss.proposal.memory for miss in propose("405B", 64, batch_size=1).excluded if miss.proposal]
    assert memory == sorted(memory)
    assert memory


def test_what_no_rule_allows_gives_the_rule():
    shape = ModelShape(vocab=1000, d_model=1024, n_layer=2, n_head=8, n_kv_head=2)
    reasons = {miss.reason for miss in propose(shape, 8, batch_size=1, seq_len=1024).excluded}
    assert "tp_size=8 must divide n_kv_head=2" in reasons
    assert "pp_size=4 needs at least as many blocks, and the module has 2" in reasons
    assert "cp=4 leaves a rank fewer than 512 of the 1024 tokens of a row" in reasons


def test_it_prints_as_a_table_of_plans_and_near_misses(eight):
    lines = str(eight).splitlines()
    assert lines[0] == "llama3-8b: 8.03B parameters on 8 x h100, 16 rows of 8192 tokens, bf16"
    columns = ["plan", "rows", "passes", "recompute", "tokens/s/rank", "MFU", "step", "s", "memory", "bubble"]
    assert lines[2].split() == columns
    assert lines[3].startswith(f"=  {eight.ties[0].plan}")


def test_a_module_is_as_good_as_a_name():
    module = CausalLM(1000, 128, 4, 4, 1024)
    assert propose(module, 2, hardware="cpu", batch_size=2, seq_len=1024, precision="fp32")[0].plan.world_size == 2


@pytest.mark.parametrize("world", [1, 7, 13])
def test_one_accelerator_and_prime_numbers_of_them_get_plans(world):
    proposals = propose("350M", world, batch_size=2, seq_len=1024)
    assert {p.plan.world_size for p in proposals} == {world}


def test_many_ranks_and_a_prime_number_of_rows_get_an_answer():
    assert len(propose("8B", 2**14, batch_size=1_000_003).excluded) > 0


@pytest.mark.parametrize(("values", "error", "message"), [
    ({"memory": 0}, ValueError, "memory=0 must be at least 1"),
    ({"bandwidth": 0.0}, ValueError, "bandwidth=0.0 must be above 0"),
    ({"link": float("nan")}, ValueError, "link=nan must be finite"),
    ({"network_latency": -1e-6}, ValueError, "network_latency=-1e-06 must be at least 0"),
    ({"matmul": {"bf16": -1.0}}, ValueError, r"matmul\['bf16'\]=-1.0 must be above 0"),
    ({"matmul": {"int4": 1.0}}, ValueError, "precision in matmul='int4' must be one of"),
    ({"peak": {"bf16": 0.0}}, ValueError, r"peak\['bf16'\]=0.0 must be above 0"),
    ({"fewest_tokens": 0}, ValueError, "fewest_tokens=0 must be at least 1"),
    ({"per_node": True}, TypeError, "per_node=True must be an integer"),
])  # fmt: skip
def test_hardware_that_cannot_be_is_refused(values, error, message):
    with pytest.raises(error, match=message):
        dataclasses.replace(HARDWARE["h100"], **values)


def test_a_tiny_accelerator_fits_nothing():
    tiny = dataclasses.replace(HARDWARE["h100"], memory=GIB)
    assert "No plan fits into 0 B per rank." in str(propose("8B", 2, hardware=tiny, batch_size=1))


@settings(deadline=None, max_examples=20)
@given(world=st.sampled_from([1, 2, 6, 8, 12]), rows=st.integers(1, 24), hardware=st.sampled_from([*HARDWARE]))
def test_any_world_and_batch_get_an_answer(world, rows, hardware):
    proposals = propose("350M", world, hardware=hardware, global_batch_size=rows, seq_len=1024)
    assert len(proposals) + len(proposals.excluded) > 0
    assert all(rows % p.plan.dp == 0 for p in proposals)


@pytest.mark.parametrize(("options", "error", "message"), [
    ({"hardware": "h10"}, ValueError, "hardware='h10' must be one of .*did you mean 'h100'"),
    ({"hardware": 3}, TypeError, "hardware=3 must be a name or a Hardware"),
    ({"world_size": 0}, ValueError, "world_size=0 must be at least 1"),
    ({"batch_size": None}, ValueError, "give one of batch_size"),
    ({"global_batch_size": 4}, ValueError, "give one of batch_size"),
    ({"batch_size": 0}, ValueError, "batch_size=0 must be at least 1"),
    ({"seq_len": 1.5}, TypeError, "seq_len=1.5 must be an integer"),
    ({"seq_len": 0}, ValueError, "seq_len=0 must be at least 1"),
    ({"world_size": 10**12}, ValueError, "world_size=1000000000000 must be at most"),
    ({"batch_size": 10**12}, ValueError, "batch_size=1000000000000 must be at most"),
    ({"memory_limit": 0}, ValueError, "memory_limit=0 must be at least 1"),
    ({"model": SHORT, "seq_len": 65}, ValueError, "seq_len=65 must be at most the module's block=64"),
    ({"model": None}, TypeError, "NoneType has no vocab"),
    ({"recompute": "all"}, ValueError, "recompute='all' must be one of"),
    ({"hardware": "a100", "precision": "fp8"}, ValueError, "precision='fp8' is not one that a100 has"),
])  # fmt: skip
def test_a_wrong_argument_is_refused_by_name(options, error, message):
    with pytest.raises(error, match=message):
        propose(**{"batch_size": 1, **options})
