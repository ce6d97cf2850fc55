"""A plan that cannot work is refused by name, with a plan nearby that passes; one that can is reported."""

from __future__ import annotations

import dataclasses
import re
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mixle.data.teacher.specs import BatchConfig, TensorSpec
from mixle.experimental.tensor_pipeline_context_parallel import validate_tp_pp_cp_plan
from mixle.experimental.tensor_pipeline_context_parallel.execution import PlanExecution
from mixle.experimental.tensor_pipeline_context_parallel.model_shape import NAMED_SHAPES
from mixle.models.transformer import CausalLM

MODEL = CausalLM(vocab=96, d_model=64, n_layer=6, n_head=8, block=48)
GROUPED = NAMED_SHAPES["llama3-8b"]

BAD_PLANS = [
    ({"tp_size": 3}, "tp_size=3 must divide n_head=8"),
    ({"tp_size": 5}, "tp_size=5 must divide n_head=8"),
    ({"tp_size": 16}, "tp_size=16 must divide n_head=8"),
    ({"tp_size": 1000}, "tp_size=1000 must divide n_head=8"),
    ({"pp_size": 7}, "pp_size=7 needs at least as many blocks, and the module has 6"),
    ({"pp_size": 100}, "pp_size=100 needs at least as many blocks"),
    ({"pp_size": 4, "pp_schedule": "interleaved"}, "pp_size=4 makes 8 stages with pp_schedule='interleaved'"),
    ({"pp_size": 6, "pp_schedule": "zero-bubble"}, "pp_size=6 makes 12 stages with pp_schedule='zero-bubble'"),
    ({"cp_size": 5}, "cp_size=5 splits each sequence into 10 parts, which must divide block=48"),
    ({"cp_size": 16}, "cp_size=16 splits each sequence into 32 parts, which must divide block=48"),
    ({"cp_size": 48}, "cp_size=48 splits each sequence into 96 parts"),
    ({"cp_size": 5, "cp_mode": "allgather"}, "cp_size=5 splits each sequence into 5 parts"),
    ({"cp_size": 7, "cp_mode": "allgather", "block": 36}, "cp_size=7 splits .* must divide block=36"),
    ({"cp_size": 4, "block": 36}, "cp_size=4 splits each sequence into 8 parts, which must divide block=36"),
    ({"cp_size": 2, "block": 30}, "cp_size=2 splits each sequence into 4 parts, which must divide block=30"),
    ({"cp_size": 2, "block": 47}, "cp_size=2 splits each sequence into 4 parts, which must divide block=47"),
    ({"block": 49}, "block=49 must be at most the module's block=48"),
    ({"block": 4096, "tp_size": 2}, "block=4096 must be at most the module's block=48"),
    ({"tp_size": 2, "world_size": 3}, "tp_size=2 x pp_size=1 x cp_size=1 = 2 must divide world_size=3"),
    ({"tp_size": 2, "pp_size": 2, "world_size": 6}, "= 4 must divide world_size=6"),
    ({"tp_size": 2, "pp_size": 2, "cp_size": 2, "world_size": 4}, "= 8 must divide world_size=4"),
    ({"tp_size": 8, "cp_size": 3, "world_size": 64}, "= 24 must divide world_size=64"),
    ({"cp_size": 2, "world_size": 1}, "= 2 must divide world_size=1"),
    ({"pp_size": 5, "world_size": 8}, "= 5 must divide world_size=8"),
    ({"pp_size": 2, "batch_size": 6, "microbatches": 4}, "microbatches=4 must divide batch_size=6"),
    ({"pp_size": 2, "batch_size": 7, "microbatches": 2}, "microbatches=2 must divide batch_size=7"),
    ({"pp_size": 2, "batch_size": 4, "microbatches": 8}, "microbatches=8 must divide batch_size=4"),
    ({"batch_size": 9, "microbatches": 2}, "microbatches=2 must divide batch_size=9"),
    ({"batch_size": 8, "microbatches": 4}, "microbatches=4 must pass a pipeline, and pp_size=1 is none"),
    ({"tp_size": 10**400}, "must divide n_head=8"),
    ({"tp_size": 10**9, "pp_size": 10**9, "cp_size": 10**9, "world_size": 2**20}, "tp_size=1000000000 must divide"),
    ({"pp_size": 10**9, "world_size": 720_720}, "pp_size=1000000000 needs at least as many blocks"),
    ({"module": GROUPED, "cp_size": 10**9, "block": 2**30 + 1}, "cp_size=1000000000 splits each sequence"),
    ({"module": GROUPED, "tp_size": 64, "pp_size": 33, "cp_size": 3, "block": 8192}, "tp_size=64 must divide n_head"),
    (
        {"pp_size": 2, "batch_size": 15, "microbatches": 5, "pp_schedule": "interleaved"},
        "microbatches=5 over pp_size=2 make 2 rounds",
    ),
    (
        {"pp_size": 3, "batch_size": 10, "microbatches": 10, "pp_schedule": "zero-bubble"},
        "microbatches=10 over pp_size=3 make 3 rounds",
    ),
    ({"tp_size": 3, "pp_size": 9}, "tp_size=3 must divide n_head=8"),
    ({"tp_size": 3, "cp_size": 5, "world_size": 8}, "tp_size=3 must divide n_head=8"),
    ({"tp_size": 6, "pp_size": 12, "cp_size": 7, "world_size": 11}, "tp_size=6 must divide n_head=8"),
    ({"pp_size": 9, "cp_size": 5}, "pp_size=9 needs at least as many blocks"),
    ({"block": 100, "cp_size": 7}, "block=100 must be at most"),
    ({"pp_size": 2, "batch_size": 6, "microbatches": 4, "cp_size": 5}, "cp_size=5 splits"),
    ({"module": GROUPED, "tp_size": 16, "block": 8192}, "tp_size=16 must divide n_kv_head=8"),
    ({"module": GROUPED, "tp_size": 32, "block": 8192}, "tp_size=32 must divide n_kv_head=8"),
    ({"module": GROUPED, "tp_size": 64, "block": 8192}, "tp_size=64 must divide n_head=32"),
    ({"module": GROUPED, "pp_size": 33, "block": 8192}, "pp_size=33 needs .* the module has 32"),
    ({"module": GROUPED, "cp_size": 3, "block": 8192}, "cp_size=3 splits each sequence into 6 parts"),
    ({"module": CausalLM(97, 64, 2, 8, 16), "tp_size": 2}, "tp_size=2 must divide vocab=97"),
    ({"module": CausalLM(96, 64, 2, 8, 16, d_mlp=100), "tp_size": 8}, "tp_size=8 must divide d_mlp=100"),
]


def suggestions(message: str) -> list[dict[str, int | str]]:
    """What a refusal proposes: values of the argument it begins with, or alternatives of one or more arguments each."""
    found: list[dict[str, int | str]] = []
    for alternative in message.partition("; nearest that do: ")[2].split(", or "):
        items = alternative.split(", ")
        if all("=" in item for item in items):
            found.append(dict(map(setting, items)))
        else:
            found += [{re.match(r"\w+", message)[0]: int(item)} for item in items]
    return found


def setting(item: str) -> tuple[str, int | str]:
    name, _, value = item.partition("=")
    return name, value.strip('"') if '"' in value else int(value)


@pytest.mark.parametrize(("arguments", "message"), BAD_PLANS)
def test_a_bad_plan_is_refused_with_neighbours_that_pass(arguments, message):
    arguments = {"module": MODEL, **arguments}
    with pytest.raises(ValueError, match=message) as refusal:
        validate_tp_pp_cp_plan(**arguments)
    proposed = suggestions(str(refusal.value))
    assert proposed
    for change in proposed:
        validate_tp_pp_cp_plan(**{**arguments, **change})


def test_the_nearest_sizes_are_those_below_and_above():
    with pytest.raises(ValueError, match=r"^tp_size=3 must divide n_head=8; nearest that do: 2, 4$"):
        validate_tp_pp_cp_plan(MODEL, 3)


def test_a_world_that_does_not_divide_is_offered_a_mesh_that_fills_it():
    with pytest.raises(ValueError, match=r"must divide world_size=6; nearest that do: tp_size=2$"):
        validate_tp_pp_cp_plan(MODEL, 4, world_size=6)


@pytest.mark.parametrize(("arguments", "nearest"), [
    ({"cp_size": 2, "block": 30}, '1, 3, or cp_mode="allgather"'),
    ({"cp_size": 7, "block": 30}, "5, 15"),
    ({"pp_size": 4, "pp_schedule": "interleaved"}, '3, or pp_schedule="1f1b"'),
    (
        {"pp_size": 2, "batch_size": 15, "microbatches": 5, "pp_schedule": "zero-bubble"},
        '3, or pp_schedule="1f1b"',
    ),
])  # fmt: skip
def test_another_mode_that_keeps_the_sizes_is_offered_where_one_does(arguments, nearest):
    with pytest.raises(ValueError, match=f"; nearest that do: {nearest}$"):
        validate_tp_pp_cp_plan(MODEL, **arguments)


def test_each_argument_at_fault_is_named():
    with pytest.raises(ValueError) as refusal:
        validate_tp_pp_cp_plan(MODEL, tp_size=3, pp_size=9, cp_size=5)
    assert str(refusal.value) == (
        "tp_size=3 must divide n_head=8; pp_size=9 needs at least as many blocks, and the module has 6; cp_size=5 "
        "splits each sequence into 10 parts, which must divide block=48; nearest that do: tp_size=4, pp_size=6, "
        "cp_size=6"
    )


def test_one_change_that_mends_several_faults_says_of_which_argument():
    with pytest.raises(ValueError, match=r"block=100 .*; cp_size=7 splits .*; nearest that do: block=42$"):
        validate_tp_pp_cp_plan(MODEL, block=100, cp_size=7)


class TestModulesThatTrainingWouldRefuse:
    dropped = CausalLM(96, 64, 6, 8, 48, dropout=0.1)

    def test_the_ring_with_dropout_and_what_goes_with_it(self):
        with pytest.raises(ValueError, match=r'^dropout=0\.1 .* cp_size=2 .*; use dropout=0 or cp_mode="allgather"$'):
            validate_tp_pp_cp_plan(self.dropped, cp_size=2)
        assert validate_tp_pp_cp_plan(self.dropped, cp_size=2, cp_mode="allgather").plan.cp == 2
        assert validate_tp_pp_cp_plan(self.dropped, 2, 2).plan.tp == 2

    @pytest.mark.parametrize("arguments", [{"tp_size": 3, "cp_size": 2}, {"cp_size": 5}, {"pp_size": 9, "cp_size": 4}])
    def test_neighbours_of_other_faults_go_with_dropout(self, arguments):
        with pytest.raises(ValueError, match=r"dropout=0\.1") as refusal:
            validate_tp_pp_cp_plan(self.dropped, **arguments)
        proposed = suggestions(str(refusal.value))
        assert proposed
        for change in proposed:
            validate_tp_pp_cp_plan(self.dropped, **{**arguments, **change})

    @pytest.mark.parametrize("axis", ["tp_size", "pp_size", "cp_size"])
    def test_a_frozen_parameter(self, axis):
        frozen = CausalLM(96, 64, 6, 8, 48)
        frozen.norm.weight.requires_grad_(False)
        with pytest.raises(ValueError, match=r"^norm\.weight does not require a gradient; .*leave tp_size"):
            validate_tp_pp_cp_plan(frozen, **{axis: 2})
        assert validate_tp_pp_cp_plan(frozen, world_size=2).plan.dp == 2

    @pytest.mark.parametrize("axis", ["tp_size", "pp_size", "cp_size"])
    def test_a_module_whose_parts_it_does_not_know(self, axis):
        class Other(CausalLM):
            pass

        other = Other(96, 64, 6, 8, 48)
        with pytest.raises(TypeError, match=r"a plan takes a .*CausalLM apart, not a Other; leave tp_size"):
            validate_tp_pp_cp_plan(other, **{axis: 2})
        assert validate_tp_pp_cp_plan(other, world_size=2).plan.dp == 2


class TestAHandleWithoutAModule:
    def refusal(self, world, **sizes):
        given = {"tp_size": 1, "pp_size": 1, "cp_size": 1, "cp_mode": "ring", "microbatches": None, **sizes}
        how = {"targets": "all", "parallel": "auto", "precision": "fp32", "activation_checkpointing": False}
        with pytest.raises(ValueError) as refusal:
            PlanExecution.of(
                SimpleNamespace(rank=0, world=world), **given, pp_schedule="1f1b", batch_size=4, block=48, **how
            )
        return str(refusal.value).partition("; nearest that do: ")[2]

    @pytest.mark.parametrize("axis", ["tp_size", "pp_size", "cp_size"])
    def test_it_is_offered_the_size_that_fills_the_world(self, axis):
        assert self.refusal(2, **{axis: 4}) == f"{axis}=2"

    def test_it_is_offered_the_nearest_of_several_sizes(self):
        assert self.refusal(8, tp_size=5) == "tp_size=4"
        assert self.refusal(8, tp_size=4, pp_size=4) in ("tp_size=2", "pp_size=2")


@settings(deadline=None, max_examples=200)
@given(
    tp_size=st.integers(1, 12), pp_size=st.integers(1, 9), cp_size=st.integers(1, 9),
    world_size=st.none() | st.integers(1, 40), batch_size=st.none() | st.integers(1, 12),
    microbatches=st.none() | st.integers(1, 12), block=st.none() | st.integers(1, 60),
    cp_mode=st.sampled_from(["ring", "allgather"]),
    pp_schedule=st.sampled_from(["gpipe", "1f1b", "interleaved", "zero-bubble"]),
)  # fmt: skip
def test_whatever_is_asked_the_answer_is_a_report_or_a_refusal_whose_neighbours_pass(**arguments):
    try:
        report = validate_tp_pp_cp_plan(MODEL, **arguments)
    except ValueError as refusal:
        for change in suggestions(str(refusal)):
            validate_tp_pp_cp_plan(MODEL, **{**arguments, **change})
    else:
        world = arguments["world_size"] or report.world_size
        assert report.world_size == world == report.plan.dp * report.plan.ranks_per_replica


@pytest.mark.parametrize(("arguments", "message"), [
    ({"tp_size": 2.0}, r"tp_size=2\.0 must be an integer"),
    ({"pp_size": True}, "pp_size=True must be an integer"),
    ({"cp_size": "2"}, "cp_size='2' must be an integer"),
    ({"world_size": 4.0}, "world_size=4.0 must be an integer"),
    ({"activation_checkpointing": 1}, "activation_checkpointing=1 must be True or False"),
])  # fmt: skip
def test_a_wrong_type_is_refused_by_name(arguments, message):
    with pytest.raises(TypeError, match=message):
        validate_tp_pp_cp_plan(MODEL, **arguments)


@pytest.mark.parametrize(("arguments", "message"), [
    ({"tp_size": 0}, "tp_size=0 must be at least 1"),
    ({"world_size": 10**15}, "world_size=1000000000000000 must be at most"),
    ({"batch_size": 10**15}, "batch_size=1000000000000000 must be at most"),
    ({"cp_mode": "rings"}, "cp_mode='rings' must be one of 'ring', 'allgather'; did you mean 'ring'"),
    ({"pp_schedule": "1F1B"}, "pp_schedule='1F1B' must be one of .*did you mean '1f1b'"),
])  # fmt: skip
def test_a_value_out_of_range_is_refused_by_name(arguments, message):
    with pytest.raises(ValueError, match=message):
        validate_tp_pp_cp_plan(MODEL, **arguments)


@pytest.mark.parametrize(("axis", "lacking"), [("tp_size", "n_head"), ("pp_size", "blocks"), ("cp_size", "block")])
def test_a_module_without_what_an_axis_needs_is_refused(axis, lacking):
    with pytest.raises(TypeError, match=f"{axis}=2 needs a module with {lacking}, which Linear lacks; use {axis}=1"):
        validate_tp_pp_cp_plan(torch.nn.Linear(2, 2), **{axis: 2})


@pytest.mark.parametrize("wrong", [None, 8, "llama3-8b", CausalLM, object()])
def test_what_is_no_module_is_refused(wrong):
    with pytest.raises(TypeError, match="must be a torch module or a ModelShape"):
        validate_tp_pp_cp_plan(wrong)


def test_attributes_that_are_no_numbers_are_not_taken_for_widths():
    module = torch.nn.Linear(2, 2)
    module.block, module.vocab, module.n_head, module.blocks = torch.nn.Linear(2, 2), {"a": 0}, 8.5, 3
    assert validate_tp_pp_cp_plan(module, world_size=2).plan.dp == 2
    with pytest.raises(TypeError, match="tp_size=2 needs a module with n_head"):
        validate_tp_pp_cp_plan(module, 2)


@pytest.mark.parametrize("schedule", ["interleaved", "zero-bubble"])
@pytest.mark.parametrize("batch_size", [1, 5, 7, 10, 15])
def test_microbatches_that_are_chosen_make_whole_rounds(schedule, batch_size):
    report = validate_tp_pp_cp_plan(MODEL, pp_size=2, batch_size=batch_size, pp_schedule=schedule)
    chosen = {"pp_size": 2, "batch_size": batch_size, "pp_schedule": schedule}
    assert validate_tp_pp_cp_plan(MODEL, **chosen, microbatches=report.plan.microbatches).plan == report.plan


def test_a_module_without_widths_may_have_replicas():
    report = validate_tp_pp_cp_plan(torch.nn.Linear(2, 2), world_size=4)
    assert report.plan.dp == 4
    assert report.parameters == 6 * 4
    assert report.activations is None
    assert "activations per rank" in str(report)


@pytest.mark.parametrize("block", [47, 33, 1])
def test_without_context_parallelism_any_length_will_do(block):
    assert validate_tp_pp_cp_plan(MODEL, 2, block=block).plan.tp == 2


def test_an_uneven_part_of_a_sequence_under_tensor_parallelism_is_noted():
    assert "tp_size=2 does not divide the 47 tokens" in validate_tp_pp_cp_plan(MODEL, 2, block=47).notes[0]


def test_fewer_microbatches_than_stages_are_noted_and_run_as_gpipe():
    report = validate_tp_pp_cp_plan(MODEL, pp_size=4, batch_size=2)
    assert report.plan.microbatches == 2
    assert report.plan.pp_schedule == "gpipe"
    assert "microbatches=2 are fewer than pp_size=4" in report.notes[0]


def test_microbatches_are_chosen_to_keep_all_stages_busy():
    assert validate_tp_pp_cp_plan(MODEL, pp_size=3, batch_size=8).plan.microbatches == 4


class TestReport:
    report = validate_tp_pp_cp_plan(MODEL, 2, 3, 2, world_size=24, batch_size=6)

    def test_it_cannot_be_changed(self):
        with pytest.raises(dataclasses.FrozenInstanceError):
            self.report.parameters = 0

    def test_it_names_the_mesh_outermost_axis_first(self):
        assert list(self.report.mesh.items()) == [("pp", 3), ("dp", 2), ("cp", 2), ("tp", 2)]

    def test_it_says_what_each_pipeline_rank_holds(self):
        first, middle, last = self.report.holds
        assert first == "embedding, blocks 0-1"
        assert middle == "blocks 2-3"
        assert last.startswith("blocks 4-5, norm, head (a copy of the embedding's weight")

    def test_moments_are_twice_the_parameters(self):
        assert self.report.optimizer == 2 * self.report.parameters == 2 * self.report.gradients

    def test_the_bubble_is_what_1f1b_waits(self):
        assert self.report.bubble == pytest.approx(2 / (3 + 2))

    @pytest.mark.parametrize("word", [
        "mesh", "pipeline rank 2", "parameters per rank", "gradients per rank", "optimizer state per rank",
        "activations per rank", "sent per step along tp", "sent per step along pp", "sent per step along cp",
        "sent per step along dp", "pipeline bubble",
    ])  # fmt: skip
    def test_it_prints_as_a_table_with_a_row_for(self, word):
        assert [line for line in str(self.report).splitlines() if line.startswith(word)]

    def test_fsdp_shards_what_ddp_replicates(self):
        sharded = validate_tp_pp_cp_plan(MODEL, world_size=4, parallel="fsdp")
        replicated = validate_tp_pp_cp_plan(MODEL, world_size=4)
        assert replicated.parameters == 4 * sharded.parameters


def sample(*specs):
    return SimpleNamespace(specs=[SimpleNamespace(name=n, shape=shape, dtype=dtype) for n, shape, dtype in specs])


IDS = ("input_ids", (48,), "int64")


@pytest.mark.parametrize("specs", [
    [IDS],
    [IDS, ("labels", (48,), torch.int64)],
    [("tokens", [48], "int32"), ("target_log_probs", (48, 96), "float32"), ("weight", (), "float32")],
])  # fmt: skip
def test_samples_that_fit_are_counted(specs):
    assert validate_tp_pp_cp_plan(MODEL, cp_size=2, batch_size=3, sample=sample(*specs)).sample_bytes > 0


def test_a_rank_takes_its_part_of_the_sequence_of_every_row():
    report = validate_tp_pp_cp_plan(MODEL, cp_size=2, batch_size=3, sample=sample(IDS, ("weight", (), "float32")))
    assert report.sample_bytes == 3 * (48 * 8 // 2 + 4)


def test_a_teachers_batch_config_is_a_sample():
    config = BatchConfig([TensorSpec("input_ids", (24,), "int64"), TensorSpec("labels", (24,), "int64")])
    report = validate_tp_pp_cp_plan(MODEL, cp_size=2, batch_size=3, sample=config)
    assert report.sample_bytes == 3 * config.nbytes() // 2


def test_rows_are_as_long_as_the_samples():
    long = CausalLM(96, 64, 2, 8, 50)  # two context ranks could not share rows of 50
    assert validate_tp_pp_cp_plan(long, cp_size=2, sample=sample(IDS)).plan.cp == 2
    half = validate_tp_pp_cp_plan(MODEL, sample=sample(("input_ids", (24,), "int64")))
    assert half.activations == validate_tp_pp_cp_plan(MODEL, block=24).activations


@pytest.mark.parametrize("spec", [
    (None, (48,), "int64"), ("ids", "48", "int64"), ("ids", 48, "int64"), ("ids", (48.0,), "int64"),
    ("ids", (True,), "int64"), ("ids", (48,), None),
])  # fmt: skip
def test_a_spec_of_other_types_is_refused(spec):
    with pytest.raises(TypeError, match="sample"):
        validate_tp_pp_cp_plan(MODEL, sample=sample(spec))


@pytest.mark.parametrize(("specs", "arguments", "message"), [
    ([("ids", (-48,), "int64")], {}, "sample ids=-48 must be at least 0"),
    ([("x", (48, 4), "float32")], {}, "sample has no token ids"),
    ([("input_ids", (4, 48), "int64")], {}, "sample has no token ids"),
    ([("input_ids", (30,), "int64")], {"block": 48}, "has 30 tokens, and block=48; give block=30"),
    ([("input_ids", (64,), "int64")], {}, "has 64 tokens, more than the module's block=48"),
    ([("input_ids", (46,), "int64")], {"cp_size": 2}, "must divide into 4 parts of a sequence.* do: 44, 48"),
    ([("input_ids", (48,), "int8")], {"vocab": 200}, "cannot hold ids below vocab=200, only below 128; use int32"),
    ([("input_ids", (48,), "complex64")], {}, "has dtype complex64"),
    ([IDS, ("hidden", (4, 48), "float32")], {"cp_size": 2}, "hidden .* cannot be split along the sequence"),
    ([IDS, ("target_logits", (48, 95), "float32")], {}, r"no target: give \(48,\) int64, or \(48, 96\) float32"),
    ([IDS, ("labels", (48,), "float32")], {}, "labels .* is no target"),
])  # fmt: skip
def test_samples_that_do_not_fit_are_refused_with_what_would(specs, arguments, message):
    vocab = arguments.pop("vocab", None)
    module = MODEL if vocab is None else CausalLM(vocab, 64, 2, 8, 48)
    with pytest.raises(ValueError, match=message):
        validate_tp_pp_cp_plan(module, **arguments, sample=sample(*specs))


@pytest.mark.parametrize("wrong", [object(), SimpleNamespace(specs=[]), SimpleNamespace(specs=[object()])])
def test_a_sample_without_specs_is_refused(wrong):
    with pytest.raises(TypeError, match="sample"):
        validate_tp_pp_cp_plan(MODEL, sample=wrong)
