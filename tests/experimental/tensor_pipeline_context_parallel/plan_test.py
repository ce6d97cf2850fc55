"""A plan checks itself, and knows its mesh, its stages and how long its ranks wait."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mixle.experimental.tensor_pipeline_context_parallel import ModelShape, validate_tp_pp_cp_plan
from mixle.experimental.tensor_pipeline_context_parallel.plan import Plan, default_microbatches, split_blocks


@pytest.mark.parametrize(("values", "error", "message"), [
    ({"dp": 0}, ValueError, "dp=0 must be at least 1"),
    ({"tp": 2.0}, TypeError, "tp=2.0 must be an integer"),
    ({"cp_mode": "all"}, ValueError, "cp_mode='all' must be one of"),
    ({"pp_schedule": "dual"}, ValueError, "pp_schedule='dual' must be one of"),
    ({"microbatches": 4}, ValueError, "microbatches=4 needs pp above 1"),
    ({"stages_per_rank": 2}, ValueError, "stages_per_rank=2 needs pp above 1"),
    ({"pp": 2, "stages_per_rank": 2}, ValueError, "stages_per_rank=2 does not go with pp_schedule='1f1b'; use 1"),
    ({"pp": 2, "pp_schedule": "interleaved", "stages_per_rank": 1}, ValueError, "stages_per_rank=1 .* use 2"),
])  # fmt: skip
def test_a_plan_that_contradicts_itself_is_refused(values, error, message):
    with pytest.raises(error, match=message):
        Plan(**values)


def test_a_plan_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Plan().dp = 2


def test_its_ranks_are_the_product_of_its_axes():
    assert Plan(dp=2, tp=3, pp=5, cp=7).world_size == 210
    assert Plan(dp=2, tp=3, pp=5, cp=7).ranks_per_replica == 105


def test_it_prints_what_is_above_one():
    assert str(Plan()) == "one rank"
    assert str(Plan(dp=2, pp=4, microbatches=8)) == "dp=2 pp=4 1f1b x8"
    assert str(Plan(tp=2, cp=4, cp_mode="allgather")) == "tp=2 cp=4 allgather"


def one_by_one(stages: int, microbatches: int) -> float:
    """How long a rank waits, in units of its busy time, when each stage takes 1 forward and 1 backward, by simulation
    of GPipe: a stage starts a microbatch when it is free and the stage before has finished it."""
    finished = [[0.0] * microbatches for _ in range(stages)]
    for direction in (range(stages), range(stages - 1, -1, -1)):
        start = max(max(row) for row in finished)
        previous = [start] * microbatches
        for stage in direction:
            free = start
            for microbatch in range(microbatches):
                free = max(free, previous[microbatch]) + 1
                finished[stage][microbatch] = free
            previous = finished[stage]
    return max(max(row) for row in finished) / (2 * microbatches) - 1


@given(pp=st.integers(2, 8), microbatches=st.integers(1, 16))
def test_the_bubble_of_gpipe_is_what_a_simulation_waits(pp, microbatches):
    plan = Plan(pp=pp, microbatches=microbatches, pp_schedule="gpipe")
    assert plan.bubble == pytest.approx(one_by_one(pp, microbatches))
    assert plan.idle_fraction == pytest.approx(plan.bubble / (1 + plan.bubble))


def test_loops_wait_less_and_split_backwards_least():
    bubbles = [Plan(pp=4, microbatches=8, pp_schedule=s).bubble for s in ("1f1b", "interleaved", "zero-bubble")]
    assert bubbles == pytest.approx([3 / 8, 3 / 16, 1 / 8])


@given(n_layer=st.integers(1, 200), stages=st.integers(1, 64))
def test_blocks_are_split_into_runs_that_differ_by_one_at_most(n_layer, stages):
    parts = split_blocks(n_layer, stages)
    assert [block for part in parts for block in part] == list(range(n_layer))
    lengths = [len(part) for part in parts]
    assert lengths == sorted(lengths, reverse=True)
    assert max(lengths) - min(lengths) <= 1


@given(pp=st.integers(2, 8), schedule=st.sampled_from(["gpipe", "1f1b", "interleaved", "zero-bubble"]))
def test_the_stages_of_all_ranks_are_all_stages_once(pp, schedule):
    plan = Plan(pp=pp, pp_schedule=schedule)
    assert sorted(stage for rank in range(pp) for stage in plan.stages_of(rank)) == list(range(plan.stages))


def test_1f1b_keeps_no_more_than_it_has_sent_and_not_got_back():
    plan = Plan(pp=4, microbatches=8)
    assert [plan.in_flight(rank) for rank in range(4)] == [4, 3, 2, 1]


@given(batch_size=st.integers(1, 200), pp=st.integers(1, 16))
def test_microbatches_chosen_divide_the_batch_and_keep_all_ranks_busy_if_rows_allow(batch_size, pp):
    chosen = default_microbatches(batch_size, pp)
    assert batch_size % chosen == 0
    assert chosen >= min(pp, batch_size)


class TestHandleArguments:
    @pytest.mark.parametrize("plan", [
        Plan(), Plan(dp=2, tp=2),
        Plan(pp=2, microbatches=4, pp_schedule="interleaved"), Plan(cp=2, cp_mode="allgather"),
    ])  # fmt: skip
    def test_the_validator_makes_the_same_plan_of_them(self, plan):
        module = ModelShape(vocab=8, d_model=8, n_layer=4, n_head=2)
        made = validate_tp_pp_cp_plan(module, **plan.handle_arguments(), world_size=plan.world_size, block=8)
        assert made.plan == plan

    def test_more_stages_than_a_handle_makes_are_refused(self):
        plan = Plan(pp=2, microbatches=4, pp_schedule="interleaved", stages_per_rank=4)
        with pytest.raises(ValueError, match=r"stages_per_rank=4 is not what a handle runs with .*; use 2"):
            plan.handle_arguments()
