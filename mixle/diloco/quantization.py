"""Arrays in eight and four bits per element, with scales that are powers of two.

``F8_E4M3`` scales a tensor as a whole, ``F4`` (E2M1) each block of 32 elements, as the OCP Microscaling Formats (MX)
specification, version 1.0, lays it out. Rounding is to the nearest, ties to the even code, and is one look-up: the
upper 16 bits of a float32, the last of them set where a lower one is, round to either format as all 32 do (rounding to
odd first, which keeps ties and their neighbours apart).
"""

from __future__ import annotations

import math
from functools import cache
from typing import TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from mixle.diloco.serialization import F4_BLOCK, Quantized, TensorBytes, quantized_specs
from mixle.utils.exact import require_choice

Float32: TypeAlias = NDArray[np.float32]
Bytes: TypeAlias = NDArray[np.uint8]

_CHUNK = 2**15  # elements whose float32 and indices fit the L2 cache together
_E8M0_BIAS = 127
_LEAST_EXPONENT, _LARGEST_EXPONENT = -126, 127
_E4M3_HEADROOM, _E2M1_HEADROOM = 7, 2
_E4M3_OVERFLOW = 248 * 2.0**120  # half-way from 240 to 256 at the scale 2**120, and so rounded up to 2**128


class NonFiniteError(ValueError):
    """Values, or what they round to, are NaN or infinite."""


def quantize(values: Float32, dtype: Quantized, *, name: str = "values") -> tuple[TensorBytes, TensorBytes]:
    """Return the elements and the scales of ``values``, as :func:`~mixle.diloco.serialization.quantized_specs` says.

    The scale is ``2**k``. ``F8_E4M3``: ``k = floor(log2(max |x|)) - 7`` over the tensor, so that the largest element
    lands in [128, 256]. ``F4``: ``k = floor(log2(max |x|)) - 2`` over each 32 elements of the flattened, zero-padded
    tensor, in [4, 8), and what exceeds 6 becomes 6. Either ``k`` is clamped to [-126, 127], so that a scale is a normal
    float32, and is 0 where all elements are zero.

    Args:
        values: float32, of any shape.
        name: what errors call it.

    Raises:
        TypeError: ``values`` is not a float32 array.
        ValueError: an unknown ``dtype``.
        NonFiniteError: ``values`` holds NaN, infinity, or for ``F8_E4M3`` a number that rounds to 2**128.
    """
    require_choice(dtype, "dtype", get_args(Quantized))
    require_float32(values, name)
    elements, scales = quantized_specs(name, dtype, values.shape)
    flat = np.ascontiguousarray(values).reshape(-1)
    if dtype == "F8_E4M3":
        largest = _largest(flat)
        exponents = _exponents(largest, _E4M3_HEADROOM, name)
        if largest >= _E4M3_OVERFLOW:
            raise NonFiniteError(f"{name} holds {largest}, which rounds to 2**128; F8_E4M3 scaled holds less")
        codes = np.empty(flat.shape, np.uint8)
        _round(flat, np.broadcast_to(_power_of_two(-exponents), flat.shape), _e4m3_codes(), codes)
        scale_bytes = _power_of_two(exponents).astype("<f4").tobytes()
    else:
        blocks = np.zeros((*scales.shape, F4_BLOCK), np.float32)
        np.add(flat, 0.0, out=blocks.reshape(-1)[: flat.size])  # which makes -0.0 a zero without a sign
        exponents = _exponents(_largest(blocks), _E2M1_HEADROOM, name)
        nibbles = np.empty(blocks.shape, np.uint8)
        _round(blocks, _power_of_two(-exponents)[:, None], _e2m1_codes(), nibbles)
        pairs = nibbles.view("<u2")  # the low nibble of each byte is what counts
        codes = (pairs | pairs >> 4).astype(np.uint8)
        scale_bytes = (exponents + _E8M0_BIAS).astype(np.uint8).tobytes()
    return (
        TensorBytes(elements.dtype, elements.shape, codes.tobytes()),
        TensorBytes(scales.dtype, scales.shape, scale_bytes),
    )


def dequantize(elements: TensorBytes, scales: TensorBytes, shape: tuple[int, ...], *, name: str = "values") -> Float32:
    """Return the float32 array of ``shape`` that ``elements`` and ``scales`` stand for.

    Raises:
        ValueError: dtypes or shapes that :func:`quantize` does not give such an array, or an F32 scale that is no power
            of two.
        NonFiniteError: an element or a scale that is NaN, or a product beyond float32.
    """
    if elements.dtype != "F8_E4M3" and elements.dtype != "F4":
        raise ValueError(f"{name} is {elements.dtype}, which is not quantized: {', '.join(get_args(Quantized))} are")
    for tensor, spec in zip((elements, scales), quantized_specs(name, elements.dtype, shape), strict=True):
        if (tensor.dtype, tensor.shape) != (spec.dtype, spec.shape):
            raise ValueError(
                f"{spec.name} is {tensor.dtype} of shape {tensor.shape}; for {elements.dtype} of shape {shape} it is "
                f"{spec.dtype} of shape {spec.shape}"
            )
    codes = np.frombuffer(elements.data, np.uint8)
    if elements.dtype == "F8_E4M3":
        scale = np.frombuffer(scales.data, "<f4").astype(np.float32)
        if np.isfinite(scale).all() and (np.frexp(scale)[0] != 0.5).any():
            raise ValueError(f"{name} has the scale {scale[0]}, which is not a power of two")
        decoded = _e4m3_values().take(codes)
    else:
        scale = _e8m0_values().take(np.frombuffer(scales.data, np.uint8))[:, None]
        decoded = _e2m1_pairs().take(codes).view(np.float32).reshape(-1, F4_BLOCK)
    with np.errstate(over="ignore", invalid="ignore"):
        decoded *= scale
    values = decoded.reshape(-1)[: math.prod(shape)].reshape(shape)
    require_finite(values, name)
    return values


def require_float32(values: object, name: str) -> None:
    """Raise a ``TypeError`` unless ``values`` is a NumPy array or scalar of float32 in the machine's byte order."""
    if not isinstance(values, (np.ndarray, np.generic)):
        raise TypeError(f"{name} must be a float32 array, not {type(values).__name__}")
    if values.dtype != np.float32:
        raise TypeError(f"{name} must be a float32 array, not one of {values.dtype}")


def require_finite(values: Float32, name: str) -> None:
    """Raise a :class:`NonFiniteError` if any of ``values`` is NaN or infinite."""
    _check_finite(_largest(values.reshape(-1)), name)


def _largest(values: Float32) -> Float32:
    """Return the largest magnitude along the last axis (0 if it is empty), NaN if any is."""
    high = np.max(values, axis=-1, initial=0.0)
    low = np.min(values, axis=-1, initial=0.0)
    return np.asarray(np.maximum(high, -low))


def _check_finite(largest: Float32, name: str) -> None:
    if not np.isfinite(largest).all():
        raise NonFiniteError(f"{name} holds NaN or infinite values")


def _exponents(largest: Float32, headroom: int, name: str) -> NDArray[np.int32]:
    """Return ``k`` of each scale ``2**k``."""
    _check_finite(largest, name)
    exponents = np.frexp(largest)[1] - 1 - headroom
    return np.where(largest > 0, np.clip(exponents, _LEAST_EXPONENT, _LARGEST_EXPONENT), 0).astype(np.int32)


def _power_of_two(exponents: NDArray[np.int32]) -> Float32:
    return np.asarray(np.ldexp(np.float32(1), exponents), np.float32)


def _round(values: Float32, factors: Float32, codes: Bytes, out: Bytes) -> None:
    """Write to ``out`` the code of each value times its factor; work proceeds in parts that stay in the cache."""
    rows = max(1, _CHUNK // max(1, math.prod(values.shape[1:])))
    for start in range(0, len(values), rows):
        part = slice(start, start + rows)
        scaled = (values[part] * factors[part]).view(np.uint32)
        dropped = scaled & 0xFFFF
        dropped += 0xFFFF  # whose bit 16 is set if any was
        scaled |= dropped
        scaled >>= 16
        codes.take(scaled, out=out[part], mode="clip")


def _codes(magnitudes: Float32, sign: int) -> Bytes:
    """Return, for all upper 16 bits of a float32, the code of the nearest magnitude, the even one of two, and its sign.

    ``magnitudes`` are those of the codes 0, 1, 2 and so on.
    """
    with np.errstate(invalid="ignore"):
        numbers = (np.arange(2**16, dtype=np.uint32) << 16).view(np.float32)
        middles = (magnitudes[1:] + magnitudes[:-1]) / 2
        sizes = np.abs(numbers)
        nearest = np.searchsorted(middles, sizes)
        tie = sizes == np.append(middles, np.inf)[np.minimum(nearest, middles.size)]
    nearest += tie & (nearest % 2 == 1) & (nearest < middles.size)
    return (nearest | np.where(np.signbit(numbers), sign, 0)).astype(np.uint8)


@cache
def _e4m3_values() -> Float32:
    """Return what each E4M3 code stands for: bias 7, no infinities, NaN for the last of each sign."""
    code = np.arange(256)
    exponent, mantissa = code >> 3 & 15, code & 7
    size = np.where(exponent > 0, np.ldexp(8.0 + mantissa, exponent - 10), np.ldexp(1.0 * mantissa, -9))
    size[[0x7F, 0xFF]] = np.nan
    return np.where(code & 0x80, -size, size).astype(np.float32)


@cache
def _e4m3_codes() -> Bytes:
    return _codes(_e4m3_values()[:0x7F], 0x80)


@cache
def _e2m1_values() -> Float32:
    """Return what each E2M1 code stands for."""
    sizes = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    return np.concatenate([sizes, -sizes])


@cache
def _e2m1_codes() -> Bytes:
    return _codes(_e2m1_values()[:8], 8)


@cache
def _e2m1_pairs() -> NDArray[np.float64]:
    """Return, for each byte, its two float32 side by side, in the guise of one float64 so that they move as one."""
    byte = np.arange(256)
    pairs = np.stack([_e2m1_values()[byte & 15], _e2m1_values()[byte >> 4]], axis=1)
    return pairs.view(np.float64)[:, 0]


@cache
def _e8m0_values() -> Float32:
    """Return what each E8M0 byte stands for: powers of two, and NaN for the last."""
    return np.append(_power_of_two(np.arange(255, dtype=np.int32) - _E8M0_BIAS), np.float32(np.nan))
