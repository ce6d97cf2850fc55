"""Proposals fit, are valid, are ranked, and say what is in the way of the rest."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mixle.experimental.tensor_pipeline_context_parallel import validate_tp_pp_cp_plan
from mixle.experimental.tensor_pipeline_context_parallel.hardware import GIB, HARDWARE
from mixle.experimental.tensor_pipeline_context_parallel.memory import memory_by_rank
from mixle.experimental.tensor_pipeline_context_parallel.model_shape import ModelShape
from mixle.experimental.tensor_pipeline_context_parallel.propose import propose_plans
from mixle.models.transformer import CausalLM

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
        plan = proposal.plan
        report = validate_tp_pp_cp_plan(
            ModelShape(**LLAMA_WIDTHS), plan.tp, plan.pp, plan.cp, world_size=8, block=8192, cp_mode=plan.cp_mode,
            batch_size=proposal.workload.batch_size, pp_schedule=plan.pp_schedule,
            microbatches=plan.microbatches if plan.pp > 1 else None, parallel="fsdp",
        )  # fmt: skip
        assert report.plan == plan


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


def test_a_model_that_fits_nowhere_is_said_to():
    proposals = propose("405B", 8, batch_size=1)
    assert len(proposals) == 0
    assert "No plan fits into 78.0 GiB per rank." in str(proposals)
    assert "Near misses" in str(proposals)


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
    assert lines[2].split() == ["plan", "rows", "passes", "recompute", "tokens/s/rank", "step", "s", "memory", "bubble"]
    assert lines[3].startswith(str(eight[0].plan))


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
