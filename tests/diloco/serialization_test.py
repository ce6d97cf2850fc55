from __future__ import annotations

import hashlib
import json
import math
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mixle.diloco.serialization import (
    ParameterSpec,
    Schema,
    SchemaMismatch,
    TensorBytes,
    nbytes,
    pack,
    packed_nbytes,
    quantized_specs,
    scale_name,
    unpack,
    validate,
)

BITS = {"F32": 32, "F16": 16, "BF16": 16, "F8_E4M3": 8, "F8_E8M0": 8, "F4": 4}
TORCH_NAMES = {
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E8M0": "float8_e8m0fnu",
    "F4": "float4_e2m1fn_x2",
}


def tensor(dtype="F32", shape=(2,), fill=b"\x01"):
    return TensorBytes(dtype, shape, fill * nbytes(dtype, shape))


def container(header, data=b""):
    """A payload with any header at all."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def entry(dtype="F32", shape=(2,), offsets=(0, 8), **more):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets), **more}


@st.composite
def shapes(draw, dtype):
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    return (*shape, 2 * draw(st.integers(0, 3))) if dtype == "F4" else tuple(shape)


@st.composite
def tensor_bytes(draw):
    dtype = draw(st.sampled_from(sorted(BITS)))
    shape = draw(shapes(dtype))
    size = math.prod(shape) * BITS[dtype] // 8
    return TensorBytes(dtype, shape, draw(st.binary(min_size=size, max_size=size)))


names = st.text(max_size=6).filter(lambda name: name != "__metadata__")
payloads = st.dictionaries(names, tensor_bytes(), max_size=5)


# ---- sizes, tensors, specifications


@pytest.mark.parametrize(("dtype", "bits"), BITS.items())
def test_a_tensor_takes_the_bits_of_its_dtype_for_each_element(dtype, bits):
    assert nbytes(dtype, (3, 4)) == 12 * bits // 8
    assert nbytes(dtype, (3, 0)) == 0


def test_a_scalar_has_one_element():
    assert nbytes("F32", ()) == 4


@pytest.mark.parametrize("shape", [(), (3,), (2, 1)])
def test_f4_needs_an_even_last_axis(shape):
    with pytest.raises(ValueError, match="must end in an even axis"):
        nbytes("F4", shape)
    with pytest.raises(ValueError, match="must end in an even axis"):
        TensorBytes("F4", shape, b"\0")
    with pytest.raises(ValueError, match="must end in an even axis"):
        ParameterSpec("w", "F4", shape)


@pytest.mark.parametrize("size", [7, 9])
def test_a_tensor_refuses_more_or_fewer_bytes_than_it_takes(size):
    with pytest.raises(ValueError, match=rf"data holds {size} bytes; F32 of shape \(2,\) takes 8 bytes"):
        TensorBytes("F32", (2,), bytes(size))


def test_a_tensor_refuses_data_that_could_change_under_it():
    with pytest.raises(TypeError, match="data must be bytes, not bytearray"):
        TensorBytes("F32", (2,), bytearray(8))


@pytest.mark.parametrize("dtype", ["f32", "F64", "I8", "", None, 32])
def test_an_unknown_dtype_is_refused_by_name(dtype):
    with pytest.raises(ValueError, match="must be one of 'F32'"):
        nbytes(dtype, (2,))


@pytest.mark.parametrize(
    ("shape", "error"),
    [
        (2, TypeError),
        ("12", TypeError),
        ((2.0,), TypeError),
        ((True,), TypeError),
        ((-1,), ValueError),
        ((2**63,), ValueError),
        ((1,) * 65, ValueError),
    ],
)
def test_a_shape_that_no_array_has_is_refused(shape, error):
    with pytest.raises(error, match="shape"):
        ParameterSpec("w", "F32", shape)


def test_shapes_of_any_make_are_kept_as_tuples_of_ints():
    spec = ParameterSpec("w", "F32", [np.int64(2), 3])
    assert spec == ParameterSpec("w", "F32", (2, 3))
    assert [type(size) for size in spec.shape] == [int, int]


@pytest.mark.parametrize(
    ("name", "error"), [(1, TypeError), (b"w", TypeError), ("__metadata__", ValueError), ("\ud800", ValueError)]
)
def test_a_name_that_a_payload_cannot_carry_is_refused(name, error):
    with pytest.raises(error):
        ParameterSpec(name, "F32", (2,))


# ---- schemas


def schema(*specs):
    return Schema(tuple(ParameterSpec(*spec) for spec in specs))


def test_the_digest_is_the_sha256_of_the_documented_json():
    text = '[["bias","BF16",[]],["weight","F32",[2,3]]]'
    assert schema(("bias", "BF16", ()), ("weight", "F32", (2, 3))).digest() == hashlib.sha256(text.encode()).hexdigest()


def test_a_schema_knows_names_specifications_and_bytes():
    both = schema(("a", "F16", (3,)), ("b", "F32", (2, 2)))
    assert both.names == ("a", "b")
    assert both.spec("b") == ParameterSpec("b", "F32", (2, 2))
    assert (both.nbytes("a"), both.nbytes("b")) == (6, 16)
    assert both.only(["b"]) == schema(("b", "F32", (2, 2)))


def test_an_unknown_name_is_a_key_error_that_says_so():
    for ask in (schema().spec, schema().nbytes, lambda name: schema().only([name])):
        with pytest.raises(KeyError, match="no parameter 'w'"):
            ask("w")


@pytest.mark.parametrize("order", [("b", "a"), ("a", "a")])
def test_a_schema_is_sorted_by_name_and_unique(order):
    with pytest.raises(ValueError, match="sorted by name and unique"):
        schema(*((name, "F32", ()) for name in order))


def test_a_schema_holds_specifications_only():
    with pytest.raises(TypeError, match="not a ParameterSpec"):
        Schema((("a", "F32", ()),))


@pytest.mark.parametrize("dtype", ["F32", "F8_E4M3", "F4"])
def test_a_parameter_named_like_the_scale_of_another_is_refused(dtype):
    with pytest.raises(ValueError, match=r"'w\.scale' is named like the scale of 'w'"):
        schema(("w", dtype, (32,)), ("w.scale", "F16", (1,)))


@pytest.mark.parametrize("dtype", ["F8_E4M3", "F4"])
def test_the_scale_of_a_quantized_tensor_belongs_to_its_schema(dtype):
    specs = quantized_specs("w", dtype, (5, 7))
    assert Schema(specs).parameters == specs


def test_e4m3_keeps_the_shape_and_has_one_scale():
    assert quantized_specs("w", "F8_E4M3", (5, 7)) == (
        ParameterSpec("w", "F8_E4M3", (5, 7)),
        ParameterSpec("w.scale", "F32", ()),
    )


@pytest.mark.parametrize(("shape", "blocks"), [((5, 7), 2), ((32,), 1), ((), 1), ((0, 3), 0), ((33,), 2)])
def test_f4_is_flattened_and_padded_to_whole_blocks_with_a_scale_each(shape, blocks):
    assert quantized_specs("w", "F4", shape) == (
        ParameterSpec("w", "F4", (32 * blocks,)),
        ParameterSpec("w.scale", "F8_E8M0", (blocks,)),
    )


def test_only_quantized_dtypes_have_scales():
    with pytest.raises(ValueError, match="dtype='F32' must be one of 'F8_E4M3', 'F4'"):
        quantized_specs("w", "F32", (2,))


def test_scales_travel_under_the_name_with_a_suffix():
    assert scale_name("block.weight") == "block.weight.scale"


# ---- validation

PAIR = schema(("a", "F32", (2,)), ("b", "F16", (3,)))


def test_tensors_as_the_schema_says_are_valid():
    validate(PAIR, {"b": tensor("F16", (3,)), "a": tensor()}, ["a", "b"])
    validate(PAIR, {"a": tensor()}, iter(["a"]))


@pytest.mark.parametrize(
    ("tensors", "asked", "offending", "message"),
    [
        ({"a": tensor()}, ["a", "b"], ("b",), "'b' is missing"),
        ({"a": tensor(), "b": tensor("F16", (3,))}, ["a"], ("b",), "'b' is one tensor too many"),
        ({"c": tensor()}, ["c"], ("c",), "'c' is not in the schema"),
        ({"a": tensor("BF16")}, ["a"], ("a",), r"'a' is BF16 of shape \(2,\), not F32 of shape \(2,\)"),
        ({"a": tensor(shape=(2, 1))}, ["a"], ("a",), r"'a' is F32 of shape \(2, 1\), not F32 of shape \(2,\)"),
        ({"z": tensor()}, ["b", "a"], ("a", "b", "z"), "'a' is missing; 'b' is missing; 'z' is one"),
    ],
)
def test_a_mismatch_names_every_offending_tensor_and_why(tensors, asked, offending, message):
    with pytest.raises(SchemaMismatch, match=message) as caught:
        validate(PAIR, tensors, asked)
    assert caught.value.names == offending
    assert isinstance(caught.value, ValueError)


# ---- what pack writes


def test_a_payload_is_the_documented_bytes():
    header = (
        b'{"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},'
        b'"a":{"dtype":"F8_E8M0","shape":[3],"data_offsets":[4,7]},'
        b'"q":{"dtype":"F4","shape":[2,2],"data_offsets":[7,9]}}   '
    )
    assert len(header) % 8 == 0
    tensors = {
        "q": TensorBytes("F4", (2, 2), b"\x21\x43"),
        "w": TensorBytes("F32", (1,), b"\0\0\x80\x3f"),
        "a": TensorBytes("F8_E8M0", (3,), b"\x7f\x80\x81"),
    }
    assert pack(tensors) == len(header).to_bytes(8, "little") + header + b"\0\0\x80\x3f\x7f\x80\x81\x21\x43"


@given(payloads)
def test_the_safetensors_package_writes_the_same_bytes(tensors):
    safetensors = pytest.importorskip("safetensors", minversion="0.8")
    buffers = {name: np.frombuffer(value.data or b"\0", np.uint8) for name, value in tensors.items()}
    specs = {}
    for name, value in tensors.items():
        # The package takes the shape of F4 in pairs of elements, and writes it in elements.
        shape = (*value.shape[:-1], value.shape[-1] // 2) if value.dtype == "F4" else value.shape
        pointer = buffers[name].ctypes.data
        specs[name] = safetensors.TensorSpec(
            dtype=TORCH_NAMES[value.dtype], shape=list(shape), data_ptr=pointer, data_len=len(value.data)
        )
    assert pack(tensors) == safetensors.serialize(specs)


@given(payloads)
def test_the_safetensors_package_reads_what_is_packed(tensors):
    safetensors = pytest.importorskip("safetensors", minversion="0.8")
    read = {
        name: TensorBytes(found["dtype"], tuple(found["shape"]), bytes(found["data"]))
        for name, found in safetensors.deserialize(pack(tensors))
    }
    assert read == tensors


@given(payloads, st.randoms())
def test_equal_content_gives_equal_bytes_in_whatever_order_it_is_given(tensors, random):
    shuffled = list(tensors.items())
    random.shuffle(shuffled)
    assert pack(dict(shuffled)) == pack(tensors)


@given(payloads)
def test_the_size_of_a_payload_is_known_beforehand(tensors):
    specs = [ParameterSpec(name, value.dtype, value.shape) for name, value in tensors.items()]
    assert packed_nbytes(specs) == len(pack(tensors))


def test_a_header_that_no_reader_would_take_is_not_written():
    with pytest.raises(ValueError, match="at most 16777216 fit"):
        pack({"w" * 2**24: tensor()})


# ---- what unpack takes


@given(payloads)
def test_what_is_packed_is_unpacked(tensors):
    assert unpack(pack(tensors)) == tensors
    assert unpack(memoryview(bytearray(pack(tensors)))) == tensors


def test_metadata_that_another_program_wrote_is_passed_over():
    blob = container({"__metadata__": {"format": "pt"}, "w": entry()}, bytes(8))
    assert unpack(blob) == {"w": TensorBytes("F32", (2,), bytes(8))}


def test_a_header_with_spaces_and_other_orders_is_read():
    text = b'{ "w" : { "data_offsets" : [0, 8], "shape" : [2], "dtype" : "F32" } }'
    assert unpack(container(text, bytes(8))) == {"w": TensorBytes("F32", (2,), bytes(8))}


@pytest.mark.parametrize(
    ("blob", "message"),
    [
        (b"", "holds 0 bytes, fewer than the 8"),
        (b"\x01\0\0\0\0\0\0", "holds 7 bytes, fewer than the 8"),
        (b"\x09\0\0\0\0\0\0\0{}      ", "claims 9 bytes and overruns"),
        (b"\xff" * 8, "overruns"),
        (container(b"\xff\xfe"), "utf-8"),
        (container(b"{"), "line 1"),
        (container(b"[" * 100_000), "nested too deeply"),
        (container(b"[]"), "must be an object"),
        (container(b'{"w":{"dtype":"F32","dtype":"F32","shape":[],"data_offsets":[0,4]}}', bytes(4)), "name twice"),
        (container(b'{"w":1,"w":1}'), "name twice"),
        (container({"w": 1}), "not what safetensors has"),
        (container({"w": entry(more=1)}, bytes(8)), "not what safetensors has"),
        (container({"w": {"dtype": "F32", "shape": [2]}}, bytes(8)), "not what safetensors has"),
        (container({"w": entry(offsets=(0, 8, 8))}, bytes(8)), "not what safetensors has"),
        (container({"w": entry(offsets=(0.0, 8))}, bytes(8)), "not what safetensors has"),
        (container({"w": entry(offsets=(False, 8))}, bytes(8)), "not what safetensors has"),
        (container({"w": entry(shape=(1,), offsets=(-4, 0))}, bytes(8)), "not what safetensors has"),
        (container({"w": entry(dtype=None)}, bytes(8)), "not what safetensors has"),
        (container({"w": entry(dtype="F64", shape=(1,))}, bytes(8)), "dtype='F64' must be one of"),
        (container({"w": entry(shape=(2.0,))}, bytes(8)), r"shape\[0\]=2.0 must be an integer"),
        (container({"w": entry(shape=(-2, -1))}, bytes(8)), r"shape\[0\]=-2 must be at least 0"),
        (container({"w": entry(shape=(1,) * 65)}, bytes(4)), "at most 64"),
        (container({"w": entry(dtype="F4", shape=(3,))}, bytes(2)), "even axis"),
        (container({"\ud800": entry()}, bytes(8)), "surrogates"),
        (container({"w": entry()}, bytes(7)), "outside the payload's 7 bytes"),
        (container({"w": entry(offsets=(8, 0))}, bytes(8)), "outside"),
        (container({"w": entry(offsets=(0, 2**70))}, bytes(8)), "outside"),
        (container({"w": entry(offsets=(0, 4))}, bytes(4)), "is not the 8 bytes that F32"),
        (container({"w": entry(shape=(2**40,) * 60)}, bytes(8)), "bytes that F32 of shape"),
        (container({"v": entry(), "w": entry(offsets=(4, 12))}, bytes(12)), "overlaps"),
        (container({"v": entry(), "w": entry()}, bytes(8)), "overlaps"),
        (container({"w": entry(offsets=(4, 12))}, bytes(12)), "leaves a gap"),
        (container({"w": entry()}, bytes(9)), "the tensors end at 8, 1 bytes before"),
        (container({}, bytes(1)), "the tensors end at 0, 1 bytes before"),
        (container(b" " * (2**24 + 1)), "at most 16777216 are read"),
        (container(b'{"w":' + b"9" * 5000 + b"}"), "digits"),
    ],
)
def test_a_payload_that_is_not_whole_and_sound_is_refused(blob, message):
    with pytest.raises(ValueError, match=message):
        unpack(blob)


def test_what_is_no_buffer_is_a_type_error():
    with pytest.raises(TypeError):
        unpack("{}")


def refused_or_sound(blob):
    """Unpack, check what comes of it against the blob alone, and return whether anything did."""
    try:
        tensors = unpack(blob)
    except ValueError:
        return False
    assert sum(len(value.data) for value in tensors.values()) == len(blob) - 8 - int.from_bytes(blob[:8], "little")
    return True


@given(st.binary(max_size=200))
def test_noise_is_refused(blob):
    refused_or_sound(blob)


@given(payloads, st.data())
def test_a_payload_with_changed_bytes_is_refused_or_sound(tensors, data):
    blob = bytearray(pack(tensors))
    for _ in range(data.draw(st.integers(1, 4))):
        blob[data.draw(st.integers(0, len(blob) - 1))] = data.draw(st.integers(0, 255))
    refused_or_sound(bytes(blob))


@given(payloads, st.data())
def test_a_payload_that_is_cut_short_is_refused(tensors, data):
    blob = pack(tensors)
    assert not refused_or_sound(blob[: data.draw(st.integers(0, len(blob) - 1))])


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4) | st.sampled_from(sorted(BITS)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


@given(
    st.dictionaries(
        st.text(max_size=3),
        st.fixed_dictionaries(
            {
                "dtype": st.sampled_from([*BITS, "F64"]) | json_values,
                "shape": st.lists(st.integers(-1, 3) | st.just(2**62), max_size=3) | json_values,
                "data_offsets": st.lists(st.integers(-1, 40) | st.just(2**65), min_size=2, max_size=2) | json_values,
            }
        )
        | json_values,
        max_size=3,
    ),
    st.binary(max_size=40),
)
def test_a_header_of_the_wrong_make_is_refused_or_sound(header, data):
    refused_or_sound(container(header, data))


@pytest.mark.parametrize(
    "blob",
    [
        (2**62).to_bytes(8, "little") + b"{}",
        container({"w": entry(shape=(2**40,), offsets=(0, 2**42))}, bytes(8)),
        container({"w": entry(shape=(2**63 - 1,) * 64, offsets=(0, 8))}, bytes(8)),
        container({str(i): entry(offsets=(0, 100_000), shape=(25_000,)) for i in range(100)}, bytes(100_000)),
    ],
)
def test_memory_is_not_taken_for_what_a_header_merely_claims(blob):
    tracemalloc.start()
    try:
        with pytest.raises(ValueError):
            unpack(blob)
        assert tracemalloc.get_traced_memory()[1] < 2_000_000
    finally:
        tracemalloc.stop()
