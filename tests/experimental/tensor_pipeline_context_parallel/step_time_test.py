"""Time and traffic follow from counting, and go the way that they must."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mixle.experimental.tensor_pipeline_context_parallel.hardware import HARDWARE
from mixle.experimental.tensor_pipeline_context_parallel.model_shape import NAMED_SHAPES, ModelShape
from mixle.experimental.tensor_pipeline_context_parallel.plan import Plan
from mixle.experimental.tensor_pipeline_context_parallel.step_time import GEMM_SHARE, step_time, tokens_per_second
from mixle.experimental.tensor_pipeline_context_parallel.traffic import AxisTraffic, Traffic, traffic
from mixle.experimental.tensor_pipeline_context_parallel.workload import Workload

LLAMA = NAMED_SHAPES["llama3-8b"]
H100 = HARDWARE["h100"]


def workload(**options) -> Workload:
    return Workload(**{"batch_size": 8, "seq_len": 8192, **options})


def time_of(plan: Plan, **options):
    return step_time(LLAMA, plan, workload(**options), H100)


def test_one_rank_sends_nothing():
    assert traffic(LLAMA, Plan(), workload()) == Traffic()


def test_ddp_sends_each_gradient_in_float32_twice_less_its_own_part():
    sent = traffic(LLAMA, Plan(dp=4), workload(fsdp=False)).dp
    assert sent.bytes == pytest.approx(2 * 3 / 4 * 4 * LLAMA.parameters)


def test_fsdp_gathers_parameters_twice_and_scatters_gradients():
    sent = traffic(LLAMA, Plan(dp=4), workload()).dp
    assert sent.bytes == pytest.approx(3 / 4 * (2 + 2 + 4) * LLAMA.parameters)


def test_tensor_parallelism_moves_the_stream_four_times_each_way_per_block():
    sent = traffic(LLAMA, Plan(tp=2), workload()).tp
    stream = 8 * 8192 * 4096 * 2
    assert sent == AxisTraffic(bytes=(32 * 8 + 4) * stream // 2, messages=32 * 8 + 4)


def test_the_ring_and_the_all_gather_send_the_same_in_more_or_fewer_messages():
    ring, gather = (traffic(LLAMA, Plan(cp=4, cp_mode=mode), workload()).cp for mode in ("ring", "allgather"))
    assert ring.bytes == gather.bytes == 3 * 3 * 32 * 8 * 2048 * 2 * 1024 * 2
    assert ring.messages == 3 * gather.messages


def test_a_pipeline_sends_the_stream_onward_and_its_gradient_back():
    sent = traffic(LLAMA, Plan(pp=4, microbatches=8), workload()).pp
    assert sent.bytes == 2 * 8 * 8192 * 4096 * 2


def test_the_ends_of_a_pipeline_of_two_send_one_way_each():
    sent = traffic(LLAMA, Plan(pp=2, microbatches=8), workload()).pp
    assert sent.bytes == 8 * 8192 * 4096 * 2


def test_copies_of_a_tied_weight_add_their_gradients():
    tied, untied = (
        traffic(dataclasses.replace(LLAMA, tied=tied), Plan(pp=2, microbatches=8), workload()).pp
        for tied in (True, False)
    )
    assert tied.bytes - untied.bytes == 128_256 * 4096 * 4


def test_products_take_six_operations_per_element_and_token():
    products = 6 * (32 * LLAMA.block_matrices + LLAMA.vocab * LLAMA.d_model) * 8 * 8192
    assert time_of(Plan()).products == pytest.approx(products / (H100.matmul["bf16"] * GEMM_SHARE))


def test_computing_blocks_again_adds_a_third_of_their_products():
    head = 6 * LLAMA.vocab * LLAMA.d_model * 8 * 8192 / (H100.matmul["bf16"] * GEMM_SHARE)
    kept, again = (time_of(Plan(), recompute=recompute).products - head for recompute in ("none", "full"))
    assert again == pytest.approx(kept * 4 / 3)


def test_attention_grows_with_the_square_of_the_sequence():
    short, long = (time_of(Plan(), seq_len=length).attention for length in (8192, 16_384))
    assert long == pytest.approx(4 * short)


@pytest.mark.parametrize("axis", ["dp", "tp", "cp"])
def test_the_work_of_a_rank_is_its_part(axis):
    alone, shared = time_of(Plan()), time_of(Plan(**{axis: 4}))
    parts = 1 if axis == "dp" else 4
    assert shared.products == pytest.approx(alone.products / parts)


def test_the_parts_are_the_whole():
    time = time_of(Plan(dp=2, tp=2, pp=2, cp=2, microbatches=4))
    assert time.total == pytest.approx(sum(dataclasses.asdict(time).values()))
    assert min(dataclasses.asdict(time).values()) >= 0


def test_a_rank_accounts_for_its_part_of_the_tokens():
    plan = Plan(dp=2, tp=4)
    rate = tokens_per_second(plan, workload(), time_of(plan))
    assert rate * 8 * time_of(plan).total == pytest.approx(2 * 8 * 8192)


def test_a_group_that_leaves_the_node_is_slower():
    within, across = (time_of(Plan(tp=tp)).tp * tp / (tp - 1) for tp in (8, 16))
    assert across > within


@given(microbatches=st.sampled_from([4, 8, 16, 32]))
def test_more_microbatches_wait_less(microbatches):
    few, many = (time_of(Plan(pp=4, microbatches=m), batch_size=64).bubble for m in (microbatches, 2 * microbatches))
    assert many == pytest.approx(few / 2, rel=1e-6)


def test_a_precision_that_the_hardware_lacks_is_refused_with_those_it_has():
    with pytest.raises(ValueError, match="precision='fp8' is not one that a100 has; choose fp32, bf16"):
        step_time(LLAMA, Plan(), workload(precision="fp8"), HARDWARE["a100"])


def test_faster_hardware_takes_less_time():
    times = [step_time(LLAMA, Plan(dp=8), workload(), HARDWARE[name]).total for name in ("cpu", "a100", "h100", "b200")]
    assert times == sorted(times, reverse=True)


def test_uneven_stages_wait_for_the_longest():
    shape = ModelShape(vocab=100, d_model=1024, n_layer=5, n_head=8)
    even = dataclasses.replace(shape, n_layer=6)
    plan = Plan(pp=2, microbatches=4)
    assert step_time(shape, plan, workload(), H100).attention == step_time(even, plan, workload(), H100).attention
