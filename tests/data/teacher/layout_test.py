import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mixle.data.teacher.layout import ALIGNMENT, CANARY, HEADER_BYTES, SlotLayout
from mixle.data.teacher.specs import BatchConfig, TensorSpec

DTYPES = ["float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool"]
PAIR = BatchConfig([TensorSpec("x", (3, 5), "float32"), TensorSpec("y", (2,), "int64")])

configs = st.lists(
    st.tuples(st.lists(st.integers(0, 40), max_size=3), st.sampled_from(DTYPES)), min_size=1, max_size=8
).map(lambda rows: BatchConfig([TensorSpec(f"t{i}", tuple(shape), dtype) for i, (shape, dtype) in enumerate(rows)]))


def test_a_slot_is_a_header_aligned_tensors_and_a_canary():
    layout = SlotLayout.of(PAIR)
    assert [(f.offset, f.nbytes, f.packed_offset) for f in layout.fields] == [(64, 60, 0), (128, 16, 60)]
    assert (layout.packed_bytes, layout.payload_bytes, layout.stride) == (76, 128, 256)
    assert layout.runs == ((0, 64, 60), (60, 128, 16))


def test_neighbours_without_padding_are_copied_in_one_piece():
    config = BatchConfig(
        [TensorSpec("a", (16,), "float32"), TensorSpec("b", (3,), "int8"), TensorSpec("c", (), "bool")]
    )
    assert SlotLayout.of(config).runs == ((0, 64, 67), (67, 192, 1))


@given(config=configs)
@settings(max_examples=200, deadline=None)
def test_tensors_are_aligned_and_apart_and_runs_carry_every_byte_to_its_place(config):
    layout = SlotLayout.of(config)
    end = HEADER_BYTES
    for field in layout.fields:
        assert field.offset % ALIGNMENT == 0
        assert field.offset >= end
        end = field.offset + field.nbytes
    assert end <= HEADER_BYTES + layout.payload_bytes
    assert layout.stride == HEADER_BYTES + layout.payload_bytes + len(CANARY)
    assert layout.stride % ALIGNMENT == 0
    place = {packed + i: offset + i for packed, offset, size in layout.runs for i in range(size)}
    wanted = {f.packed_offset + i: f.offset + i for f in layout.fields for i in range(f.nbytes)}
    assert place == wanted
    assert len(place) == layout.packed_bytes == config.nbytes()


@given(config=configs)
@settings(max_examples=50, deadline=None)
def test_a_layout_comes_back_from_msgpack_as_it_went(config):
    import msgpack

    layout = SlotLayout.of(config)
    assert SlotLayout.from_wire(msgpack.unpackb(msgpack.packb(layout.to_wire()))) == layout


GOOD = SlotLayout.of(PAIR).to_wire()


@pytest.mark.parametrize(
    "wire",
    [
        None,
        3,
        [],
        {},
        {"fields": GOOD["fields"]},
        GOOD | {"more": 1},
        GOOD | {"stride": 255},
        GOOD | {"stride": -256},
        GOOD | {"stride": 256.0},
        GOOD | {"stride": True},
        GOOD | {"fields": []},
        GOOD | {"fields": "xy"},
        GOOD | {"fields": [["x", "bool", [1]]] * 2000},
        GOOD | {"fields": [["x", "float32", [3, 5]], ["x", "int64", [2]]]},
        GOOD | {"fields": [["x", "float32"]]},
        GOOD | {"fields": [["x", "float32", 3]]},
        GOOD | {"fields": [["x", "float32", [2**62, 2**62]]]},
        GOOD | {"fields": [["x", "float32", [-1]]]},
        GOOD | {"fields": [["x", "float32", [[1]]]]},
        GOOD | {"fields": [["x", ["float32"], [1]]]},
        GOOD | {"fields": [[b"x", "float32", [1]]]},
        GOOD | {"fields": [["x", "float32", [0] * 1000]]},
    ],
)
def test_a_layout_that_no_peer_of_ours_would_send_is_a_short_value_error(wire):
    with pytest.raises(ValueError, match=r"layout|specs") as refusal:
        SlotLayout.from_wire(wire)
    assert len(str(refusal.value)) < 400


json_like = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=20,
)


@given(fields=json_like, stride=json_like)
@settings(max_examples=300, deadline=None)
def test_whatever_a_peer_sends_is_a_layout_or_a_value_error(fields, stride):
    for wire in (fields, {"fields": fields, "stride": stride}, {"fields": [["x", "bool", fields]], "stride": stride}):
        with pytest.raises(ValueError, match=r"\w"):
            SlotLayout.from_wire(wire)


def test_more_slots_than_can_be_addressed_are_refused():
    with pytest.raises(ValueError, match="slot_count=1099511627776 slots of 256 bytes are more than"):
        SlotLayout.of(PAIR).segment_bytes(2**40)
    assert SlotLayout.of(PAIR).segment_bytes(3) == 768
