from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays as numpy_arrays

from mixle.diloco.quantization import NonFiniteError, dequantize, quantize
from mixle.diloco.serialization import ParameterSpec, Schema, SchemaMismatch, TensorBytes, pack, packed_nbytes, validate
from mixle.diloco.tensor_codec import decode, encode, encode_with_feedback, payload_schema

DTYPES = ["F32", "F16", "BF16", "F8_E4M3", "F4"]
MIXED = Schema(
    (ParameterSpec("bias", "F32", (3,)), ParameterSpec("gain", "BF16", ()), ParameterSpec("w", "F16", (4, 9)))
)
dtypes = pytest.mark.parametrize("dtype", [None, *DTYPES])


def values(seed=0):
    rng = np.random.default_rng(seed)
    return {spec.name: np.asarray(rng.standard_normal(spec.shape), np.float32) for spec in MIXED.parameters}


def single(dtype, shape):
    return Schema((ParameterSpec("w", dtype, shape),))


# ---- what a payload holds


def test_parameters_travel_in_their_own_dtypes_unless_told_otherwise():
    assert payload_schema(MIXED) == MIXED
    assert payload_schema(MIXED, "BF16").parameters == tuple(
        ParameterSpec(spec.name, "BF16", spec.shape) for spec in MIXED.parameters
    )


def test_quantized_parameters_bring_their_scales_sorted_among_them():
    schema = Schema((ParameterSpec("w", "F32", (40,)), ParameterSpec("w.bias", "F32", (2,))))
    assert payload_schema(schema, "F4").parameters == (
        ParameterSpec("w", "F4", (64,)),
        ParameterSpec("w.bias", "F4", (32,)),
        ParameterSpec("w.bias.scale", "F8_E8M0", (1,)),
        ParameterSpec("w.scale", "F8_E8M0", (2,)),
    )


def test_parameters_are_floats_of_full_width():
    with pytest.raises(ValueError, match="dtype of w='F8_E4M3' must be one of 'F32', 'F16', 'BF16'"):
        payload_schema(single("F8_E4M3", (2,)), "F32")
    with pytest.raises(ValueError, match="dtype='F64' must be one of"):
        payload_schema(MIXED, "F64")


@dtypes
def test_the_tensors_are_those_of_the_payload_schema(dtype):
    tensors = encode(values(), MIXED, dtype)
    schema = payload_schema(MIXED, dtype)
    validate(schema, tensors, schema.names)
    assert len(pack(tensors)) == packed_nbytes(schema.parameters)


# ---- rounding


@given(numpy_arrays(np.float32, st.integers(0, 20), elements=st.floats(-(2.0**15), 2.0**15, width=32)))
def test_full_width_floats_are_rounded_as_torch_rounds_them(array):
    torch = pytest.importorskip("torch")
    for dtype, name in (("F32", torch.float32), ("F16", torch.float16), ("BF16", torch.bfloat16)):
        schema = single(dtype, array.shape)
        expected = torch.from_numpy(array).to(name)
        tensors = encode({"w": array}, schema)
        assert tensors["w"].data == bytes(expected.untyped_storage())
        np.testing.assert_array_equal(decode(tensors, schema)["w"], expected.float().numpy())


@pytest.mark.parametrize("dtype", ["F8_E4M3", "F4"])
def test_quantized_arrays_are_those_of_the_quantizer(dtype):
    tensors = encode(values(), MIXED, dtype)
    decoded = decode(tensors, MIXED, dtype)
    for name, array in values().items():
        assert (tensors[name], tensors[f"{name}.scale"]) == quantize(array, dtype)
        np.testing.assert_array_equal(decoded[name], dequantize(*quantize(array, dtype), array.shape))


@dtypes
def test_decoded_arrays_have_the_shapes_of_the_parameters_and_may_be_written(dtype):
    decoded = decode(encode(values(), MIXED, dtype), MIXED, dtype)
    for spec in MIXED.parameters:
        assert decoded[spec.name].shape == spec.shape
        assert decoded[spec.name].dtype == np.float32
        decoded[spec.name][...] = 0


@dtypes
def test_the_memory_order_of_an_array_does_not_matter(dtype):
    turned = values() | {"w": np.asfortranarray(values()["w"])}
    assert encode(turned, MIXED, dtype) == encode(values(), MIXED, dtype)


# ---- refusals


@dtypes
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_neither_encoded_nor_decoded(dtype, bad):
    arrays = values()
    arrays["bias"][1] = bad
    with pytest.raises(NonFiniteError, match=r"^bias holds NaN or infinite"):
        encode(arrays, MIXED, dtype)


@pytest.mark.parametrize(("dtype", "nan"), [("F32", b"\0\0\xc0\x7f"), ("F16", b"\0\x7e"), ("BF16", b"\xc0\x7f")])
def test_a_nan_in_a_payload_is_refused_by_name(dtype, nan):
    with pytest.raises(NonFiniteError, match=r"^w holds NaN or infinite"):
        decode({"w": TensorBytes(dtype, (1,), nan)}, single(dtype, (1,)))


@pytest.mark.parametrize(("dtype", "number"), [("F16", 65520.0), ("BF16", 3.4e38)])
def test_a_number_that_would_round_to_infinity_is_refused(dtype, number):
    with pytest.raises(NonFiniteError, match=f"w holds numbers beyond what {dtype} holds"):
        encode({"w": np.array([-number], np.float32)}, single(dtype, (1,)))


@pytest.mark.parametrize(
    ("change", "offending"),
    [
        ({"extra": np.zeros(2, np.float32)}, ("extra",)),
        ({"bias": np.zeros((3, 1), np.float32)}, ("bias",)),
        ({"gain": None}, ("gain",)),
    ],
)
def test_arrays_that_are_not_those_of_the_parameters_are_named(change, offending):
    arrays = {name: array for name, array in (values() | change).items() if array is not None}
    for act in (lambda: encode(arrays, MIXED), lambda: encode_with_feedback(arrays, {}, MIXED)):
        with pytest.raises(SchemaMismatch) as caught:
            act()
        assert caught.value.names == offending


def test_only_float32_is_encoded():
    with pytest.raises(TypeError, match="bias must be a float32 array, not one of float64"):
        encode(values() | {"bias": np.zeros(3)}, MIXED)


def test_tensors_that_are_not_those_of_the_parameters_are_named():
    tensors = encode(values(), MIXED, "F4")
    with pytest.raises(SchemaMismatch) as caught:
        decode(tensors, MIXED, "F8_E4M3")
    assert set(caught.value.names) == set(tensors)
    del tensors["w.scale"]
    with pytest.raises(SchemaMismatch, match=r"'w\.scale' is missing"):
        decode(tensors, MIXED, "F4")


# ---- error feedback


@dtypes
def test_what_is_sent_and_what_is_dropped_add_up(dtype):
    tensors, sent, dropped = encode_with_feedback(values(), {}, MIXED, dtype)
    for name, array in decode(tensors, MIXED, dtype).items():
        np.testing.assert_array_equal(sent[name], array)
    for name, array in values().items():
        np.testing.assert_allclose(sent[name].astype(np.float64) + dropped[name], array, rtol=1e-7, atol=0)


@dtypes
def test_over_many_rounds_nothing_but_the_last_rounding_is_lost(dtype):
    total = {name: np.zeros(array.shape) for name, array in values().items()}
    arrived = {name: np.zeros(array.shape) for name, array in values().items()}
    dropped: dict[str, np.ndarray] = {}
    for seed in range(40):
        _, sent, dropped = encode_with_feedback(values(seed), dropped, MIXED, dtype)
        for name, array in values(seed).items():
            total[name] += array
            arrived[name] += sent[name]
    for name in total:
        np.testing.assert_allclose(arrived[name] + dropped[name], total[name], rtol=0, atol=1e-5)


def test_without_feedback_the_same_small_part_is_lost_each_round():
    arrays = {"w": np.array([1.0, 0.06], np.float32)}
    schema = single("F32", (2,))
    plain = decode(encode(arrays, schema, "F4"), schema, "F4")["w"]
    assert plain[1] == 0
    arrived, dropped = np.zeros(2), {}
    for _ in range(50):
        _, sent, dropped = encode_with_feedback(arrays, dropped, schema, "F4")
        arrived += sent["w"]
    np.testing.assert_allclose(arrived, [50, 3], atol=0.2)


def test_nothing_is_dropped_in_full_width():
    _, _, dropped = encode_with_feedback(values(), {}, MIXED, "F32")
    assert all((array == 0).all() for array in dropped.values())


def test_the_scalars_that_arithmetic_on_arrays_without_axes_gives_are_taken():
    array = np.array(0.3, np.float32)
    schema = single("F32", ())
    assert encode({"w": array * 1}, schema, "F4") == encode({"w": array}, schema, "F4")
    assert encode_with_feedback({"w": array * 1}, {}, schema, "F4")[2]["w"].shape == ()


def test_the_arrays_given_are_left_as_they_are():
    arrays, dropped = values(), values(1)
    encode_with_feedback(arrays, dropped, MIXED, "F4")
    for given_, before in ((arrays, values()), (dropped, values(1))):
        for name in before:
            np.testing.assert_array_equal(given_[name], before[name])


def test_what_was_dropped_must_be_of_the_same_parameters():
    with pytest.raises(SchemaMismatch):
        encode_with_feedback(values(), {"bias": np.zeros(3, np.float32)}, MIXED, "F4")


def test_a_sum_beyond_float32_is_refused():
    large = {"w": np.array([3e38], np.float32)}
    with pytest.raises(NonFiniteError):
        encode_with_feedback(large, large, single("F32", (1,)), "F4")


@pytest.mark.parametrize("dtype", ["F16", "BF16", "F8_E4M3", "F4"])
def test_what_is_to_be_exact_travels_in_float32_beside_what_is_rounded(dtype):
    exact = {MIXED.names[0]}
    arrays = {name: array * np.float32(1 / 3) for name, array in values().items()}
    tensors, sent, dropped = encode_with_feedback(arrays, {}, MIXED, dtype, exact=exact)
    found = decode(tensors, MIXED, dtype, exact=exact)
    np.testing.assert_array_equal(found[MIXED.names[0]], arrays[MIXED.names[0]])
    assert not dropped[MIXED.names[0]].any() and dropped[MIXED.names[1]].any()
    np.testing.assert_array_equal(sent[MIXED.names[1]], found[MIXED.names[1]])
