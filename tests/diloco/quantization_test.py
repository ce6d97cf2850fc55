from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from mixle.diloco.quantization import NonFiniteError, dequantize, quantize, require_finite
from mixle.diloco.serialization import TensorBytes

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]

# Above, E4M3 rounds to 2**128, beyond float32.
E4M3_LIMIT = float(np.nextafter(np.float32(31 * 2.0**123), np.float32(0)))

finite = arrays(
    np.float32, array_shapes(min_dims=0, min_side=0, max_side=9), elements=st.floats(-E4M3_LIMIT, E4M3_LIMIT, width=32)
)
dtypes = pytest.mark.parametrize("dtype", ["F8_E4M3", "F4"])


def exponent_of(largest, headroom):
    """The issue's formula in exact arithmetic: frexp gives largest = m * 2**e with m in [0.5, 1)."""
    return min(max(math.frexp(largest)[1] - 1 - headroom, -126), 127) if largest else 0


def nearest_e2m1(value, exponent):
    """The code by a search of the whole table, in exact arithmetic: a float times a power of two is one in float64."""
    size = min(abs(float(value)) / 2.0**exponent, 6.0)
    distance = [abs(size - candidate) for candidate in E2M1]
    best = min(distance)
    tied = [code for code in range(8) if distance[code] == best]
    code = tied[0] if len(tied) == 1 else next(code for code in tied if code % 2 == 0)
    return code | (8 if value < 0 else 0)


def brute_force_f4(values):
    flat = values.reshape(-1)
    padded = np.concatenate([flat, np.zeros(-len(flat) % 32, np.float32)])
    nibbles, scales = [], []
    for block in padded.reshape(-1, 32):
        exponent = exponent_of(float(np.abs(block).max()), 2)
        scales.append(exponent + 127)
        nibbles += [nearest_e2m1(value, exponent) for value in block]
    return bytes(low | high << 4 for low, high in zip(nibbles[::2], nibbles[1::2], strict=True)), bytes(scales)


# ---- E4M3, against torch's own conversion


def torch_e4m3(values):
    torch = pytest.importorskip("torch")
    exponent = exponent_of(float(np.abs(values).max(initial=0)), 7)
    scaled = torch.from_numpy(np.asarray(values.astype(np.float64) / 2.0**exponent))
    # Float64 holds the quotient exactly; what float32 does not hold is far below half the least E4M3 number.
    return scaled.to(torch.float32).to(torch.float8_e4m3fn), 2.0**exponent


def bytes_of(codes):
    return codes.flatten().view(pytest.importorskip("torch").uint8).numpy().tobytes()


@given(finite)
def test_e4m3_codes_are_those_of_torch_at_the_documented_scale(values):
    elements, scale = quantize(values, "F8_E4M3")
    codes, factor = torch_e4m3(values)
    assert (elements.dtype, elements.shape) == ("F8_E4M3", values.shape)
    assert elements.data == bytes_of(codes)
    assert scale == TensorBytes("F32", (), np.array(factor, "<f4").tobytes())


@given(finite)
def test_e4m3_decodes_to_what_torch_decodes_it_to(values):
    codes, factor = torch_e4m3(values)
    expected = codes.double().numpy() * factor
    np.testing.assert_array_equal(dequantize(*quantize(values, "F8_E4M3"), values.shape), expected)


def test_floats_around_every_cut_to_16_bits_are_rounded_as_torch_rounds_them():
    torch = pytest.importorskip("torch")
    lower = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
    numbers = (np.arange(2**16, dtype=np.uint32)[:, None] << 16 | lower).view(np.float32).reshape(-1)
    values = numbers[np.abs(numbers) < 256]  # NaN is not; the scale of the others is one
    elements, scale = quantize(values, "F8_E4M3")
    assert scale == one()
    assert elements.data == bytes_of(torch.from_numpy(values).to(torch.float8_e4m3fn))


def test_every_e4m3_code_stands_for_the_number_that_torch_says():
    torch = pytest.importorskip("torch")
    codes = np.array([code for code in range(256) if code & 0x7F != 0x7F], np.uint8)
    decoded = dequantize(TensorBytes("F8_E4M3", (254,), codes.tobytes()), one(), (254,))
    expected = torch.from_numpy(codes).view(torch.float8_e4m3fn).float().numpy()
    np.testing.assert_array_equal(decoded, expected)
    np.testing.assert_array_equal(np.signbit(decoded), np.signbit(expected))


def test_every_e4m3_number_is_its_own_quantization():
    codes = np.array([code for code in range(256) if code & 0x7F < 0x78], np.uint8)  # below 256, where the scale is one
    elements = TensorBytes("F8_E4M3", (240,), codes.tobytes())
    assert quantize(dequantize(elements, one(), (240,)), "F8_E4M3") == (elements, one())


@pytest.mark.parametrize(
    ("largest", "exponent"),
    [(1.0, -7), (128.0, 0), (255.0, 0), (256.0, 1), (E4M3_LIMIT, 120), (1e-45, -126), (0.0, 0)],
)
def test_the_e4m3_scale_is_a_power_of_two_set_by_the_largest(largest, exponent):
    _, scale = quantize(np.array([0.0, -largest], np.float32), "F8_E4M3")
    assert np.frombuffer(scale.data, "<f4")[0] == 2.0**exponent


def test_what_e4m3_would_round_beyond_float32_is_refused():
    values = np.array([np.nextafter(np.float32(E4M3_LIMIT), np.float32(np.inf))])
    with pytest.raises(NonFiniteError, match=r"rounds to 2\*\*128"):
        quantize(-values, "F8_E4M3")
    quantize(-values, "F4")


def one():
    return TensorBytes("F32", (), np.float32(1).tobytes())


# ---- F4, against a search of the table


@settings(max_examples=200)
@given(finite)
def test_f4_is_what_a_search_of_the_table_gives(values):
    elements, scales = quantize(values, "F4")
    expected, expected_scales = brute_force_f4(values)
    assert (elements.data, scales.data) == (expected, expected_scales)
    assert elements.shape == (2 * len(expected),)
    assert scales.shape == (len(expected_scales),)


@given(arrays(np.float32, 64, elements=st.integers(-128, 128).map(lambda n: n / 16)))
def test_f4_rounds_ties_to_the_even_code(values):
    assert tuple(tensor.data for tensor in quantize(values, "F4")) == brute_force_f4(values)


def test_the_lower_nibble_comes_first_and_the_sign_is_its_highest_bit():
    values = np.zeros(32, np.float32)
    values[:4] = 4.0, -6.0, -0.5, 1.0
    elements, scales = quantize(values, "F4")
    assert elements.data == bytes([0xF6, 0x29]) + bytes(14)
    assert scales.data == bytes([127])


def test_what_exceeds_six_becomes_six():
    values = np.array([7.9, -7.9], np.float32)
    np.testing.assert_array_equal(dequantize(*quantize(values, "F4"), (2,)), [6.0, -6.0])


def test_each_block_has_its_own_scale_and_a_block_of_zeros_has_one():
    values = np.zeros((3, 32), np.float32)
    values[0, 5], values[2, 7] = 2.0**20, -(2.0**-20)
    elements, scales = quantize(values, "F4")
    assert scales.data == bytes([127 + 18, 127, 127 - 22])
    np.testing.assert_array_equal(dequantize(elements, scales, (3, 32)), values)


def test_a_zero_has_no_sign_in_f4_while_what_rounds_to_zero_has():
    values = np.array([-0.0, -1e-30, 1.0, 0.0], np.float32)
    assert quantize(values, "F4")[0].data[:2] == bytes([0x80, 0x06])


def test_padding_is_zeros_that_decoding_leaves_out():
    values = np.arange(33, dtype=np.float32).reshape(3, 11)
    elements, scales = quantize(values, "F4")
    assert elements.shape == (64,)
    assert elements.data[17:] == bytes(15)
    assert dequantize(elements, scales, (3, 11)).shape == (3, 11)


def test_every_f4_code_and_scale_stands_for_the_number_that_torch_says():
    torch = pytest.importorskip("torch")
    codes = np.tile(np.arange(16, dtype=np.uint8), 2)
    data = (codes[::2] | codes[1::2] << 4).tobytes() * 253
    scales = np.arange(253, dtype=np.uint8)  # six times a larger one is beyond float32
    decoded = dequantize(
        TensorBytes("F4", (253 * 32,), data), TensorBytes("F8_E8M0", (253,), scales.tobytes()), (253, 32)
    )
    factors = torch.from_numpy(scales).view(torch.float8_e8m0fnu).double().numpy()
    numbers = np.array([*E2M1, *(-size for size in E2M1)])
    np.testing.assert_array_equal(decoded, numbers[codes] * factors[:, None])


# ---- both


@dtypes
@given(values=finite)
def test_the_error_is_at_most_half_a_step_of_the_format(dtype, values):
    decoded = dequantize(*quantize(values, dtype), values.shape).astype(np.float64)
    largest = float(np.abs(values).max(initial=0))
    exact = values.astype(np.float64)
    if dtype == "F8_E4M3":
        bound = np.maximum(np.abs(exact) / 16, 2.0 ** (exponent_of(largest, 7) - 10))
    else:
        bound = np.maximum(largest / 4, 2.0 ** (exponent_of(largest, 2) - 2))  # what is below 8 becomes 6
    assert (np.abs(decoded - exact) <= bound).all()


@given(finite)
def test_quantizing_to_f4_twice_changes_nothing_more(values):
    once = dequantize(*quantize(values, "F4"), values.shape)
    np.testing.assert_array_equal(dequantize(*quantize(once, "F4"), values.shape), once)


@dtypes
def test_work_in_parts_gives_what_one_element_at_a_time_gives(dtype):
    rng = np.random.default_rng(0)
    values = (rng.standard_normal(100_003) * 2.0 ** rng.integers(-12, 3, 100_003)).astype(np.float32)
    elements, scales = quantize(values, dtype)
    if dtype == "F4":
        assert (elements.data, scales.data) == brute_force_f4(values)
    else:
        assert elements.data == bytes_of(torch_e4m3(values)[0])


@dtypes
def test_the_memory_order_of_an_array_does_not_matter(dtype):
    values = np.arange(96, dtype=np.float32).reshape(8, 12)
    assert quantize(values.T, dtype) == quantize(np.ascontiguousarray(values.T), dtype)
    assert quantize(values[::2, ::3], dtype) == quantize(values[::2, ::3].copy(), dtype)


@dtypes
def test_the_array_is_left_as_it_is_and_may_be_read_only(dtype):
    values = np.array([1.5, -0.0, 3.0], np.float32)
    before = values.tobytes()
    values.setflags(write=False)
    quantize(values, dtype)
    assert values.tobytes() == before


@dtypes
@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_refused_by_name(dtype, bad):
    values = np.ones(100, np.float32)
    values[71] = bad
    with pytest.raises(NonFiniteError, match=r"^weight holds NaN or infinite values"):
        quantize(values, dtype, name="weight")
    assert issubclass(NonFiniteError, ValueError)


@dtypes
@pytest.mark.parametrize(
    "values", [np.zeros(3), np.zeros(3, np.float16), np.zeros(3, int), np.zeros(3, ">f4"), [0.0], None]
)
def test_only_float32_is_quantized(dtype, values):
    with pytest.raises(TypeError, match="weight must be a float32 array"):
        quantize(values, dtype, name="weight")


def test_an_unknown_format_is_refused():
    with pytest.raises(ValueError, match="dtype='F8_E5M2' must be one of"):
        quantize(np.zeros(3, np.float32), "F8_E5M2")


# ---- decoding what others wrote

CODES = TensorBytes("F8_E4M3", (2,), b"\x38\x38")
BLOCK = TensorBytes("F4", (32,), b"\x77" * 16)


@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_an_e4m3_nan_is_refused(code):
    with pytest.raises(NonFiniteError, match="weight holds"):
        dequantize(TensorBytes("F8_E4M3", (2,), bytes([0x38, code])), one(), (2,), name="weight")


@pytest.mark.parametrize("scale", [np.nan, np.inf, -np.inf])
def test_an_e4m3_scale_that_is_not_finite_is_refused(scale):
    with pytest.raises(NonFiniteError):
        dequantize(CODES, TensorBytes("F32", (), np.float32(scale).tobytes()), (2,))


@pytest.mark.parametrize("scale", [3.0, 0.0, -1.0, 1.0000001])
def test_an_e4m3_scale_that_is_no_power_of_two_is_refused(scale):
    with pytest.raises(ValueError, match="not a power of two"):
        dequantize(CODES, TensorBytes("F32", (), np.float32(scale).tobytes()), (2,))


def test_an_e8m0_nan_and_a_product_beyond_float32_are_refused():
    for scale in (255, 254):
        with pytest.raises(NonFiniteError):
            dequantize(BLOCK, TensorBytes("F8_E8M0", (1,), bytes([scale])), (32,))


@pytest.mark.parametrize(
    ("elements", "scales", "shape", "message"),
    [
        (TensorBytes("F32", (), bytes(4)), one(), (), "which is not quantized"),
        (CODES, one(), (3,), r"w is F8_E4M3 of shape \(2,\); .* it is F8_E4M3 of shape \(3,\)"),
        (CODES, TensorBytes("F32", (1,), bytes(4)), (2,), r"w\.scale is F32 of shape \(1,\)"),
        (CODES, TensorBytes("F8_E8M0", (1,), b"\x7f"), (2,), r"w\.scale is F8_E8M0"),
        (BLOCK, TensorBytes("F8_E8M0", (2,), b"\x7f\x7f"), (32,), r"w\.scale is F8_E8M0 of shape \(2,\)"),
        (BLOCK, TensorBytes("F8_E8M0", (1,), b"\x7f"), (33,), r"w is F4 of shape \(32,\)"),
    ],
)
def test_tensors_that_do_not_belong_to_the_array_are_refused(elements, scales, shape, message):
    with pytest.raises(ValueError, match=message):
        dequantize(elements, scales, shape, name="w")


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_arrays_are_checked_for_finite_numbers_in_any_shape(bad):
    require_finite(np.zeros((2, 3), np.float32), "w")
    require_finite(np.zeros((0, 3), np.float32), "w")
    require_finite(np.array(1.0, np.float32), "w")
    with pytest.raises(NonFiniteError, match=r"^w holds NaN or infinite"):
        require_finite(np.array([[0.0, bad]], np.float32), "w")
