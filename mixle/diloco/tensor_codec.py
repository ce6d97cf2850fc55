"""Named float32 arrays as the tensors of a payload, and back.

What rounding drops need not be lost: :func:`encode_with_feedback` returns it, to be added to what is sent next (error
feedback, arXiv 1901.09847, algorithm 2).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Literal, get_args

import numpy as np

from mixle.diloco.quantization import Float32, NonFiniteError, dequantize, quantize, require_finite, require_float32
from mixle.diloco.serialization import (
    DType,
    ParameterSpec,
    Quantized,
    Schema,
    SchemaMismatch,
    TensorBytes,
    quantized_specs,
    scale_name,
    validate,
)
from mixle.utils.exact import require_choice

WireDType = Literal["F32", "F16", "BF16", "F8_E4M3", "F4"]


def payload_schema(parameters: Schema, dtype: WireDType | None = None, *, exact: Collection[str] = ()) -> Schema:
    """Return the schema of the payload that carries arrays of these names and shapes, scales included.

    Args:
        parameters: ``F32``, ``F16`` or ``BF16``.
        dtype: how all of them travel; None leaves each its own.
        exact: names of those that travel in ``F32`` whatever ``dtype`` is.

    Raises:
        ValueError: an unknown ``dtype``, or a parameter of another dtype than those above.
    """
    if dtype is not None:
        require_choice(dtype, "dtype", get_args(WireDType))
    specs: list[ParameterSpec] = []
    for spec in parameters.parameters:
        require_choice(spec.dtype, f"dtype of {spec.name}", get_args(DType))
        if spec.name in exact:
            specs.append(ParameterSpec(spec.name, "F32", spec.shape))
        elif dtype == "F8_E4M3" or dtype == "F4":
            specs += quantized_specs(spec.name, dtype, spec.shape)
        else:
            specs.append(ParameterSpec(spec.name, dtype or spec.dtype, spec.shape))
    return Schema(tuple(sorted(specs, key=lambda spec: spec.name)))


def encode(
    arrays: Mapping[str, Float32],
    parameters: Schema,
    dtype: WireDType | None = None,
    *,
    exact: Collection[str] = (),
) -> dict[str, TensorBytes]:
    """Return the tensors that carry ``arrays``, rounded to the nearest, ties to even.

    Args:
        arrays: float32, of the names and shapes in ``parameters``.
        parameters, dtype, exact: as in :func:`payload_schema`.

    Raises:
        TypeError: an array that is not float32.
        SchemaMismatch: names arrays that are missing, too many, or of another shape.
        NonFiniteError: an array holds NaN or infinity, or a number beyond what its dtype holds.
        ValueError: as :func:`payload_schema`.
    """
    payload = payload_schema(parameters, dtype, exact=exact)
    _check(arrays, parameters)
    tensors: dict[str, TensorBytes] = {}
    for spec in parameters.parameters:
        due = payload.spec(spec.name)
        if due.dtype == "F8_E4M3" or due.dtype == "F4":
            elements, scales = quantize(arrays[spec.name], due.dtype, name=spec.name)
            tensors |= {spec.name: elements, scale_name(spec.name): scales}
        else:
            tensors[spec.name] = TensorBytes(due.dtype, due.shape, _rounded(arrays[spec.name], due))
    return tensors


def decode(
    tensors: Mapping[str, TensorBytes],
    parameters: Schema,
    dtype: WireDType | None = None,
    *,
    exact: Collection[str] = (),
) -> dict[str, Float32]:
    """Return the float32 arrays that the tensors of a payload carry, each in memory of its own.

    Args:
        tensors: those of ``payload_schema(parameters, dtype, exact=exact)``.
        parameters, dtype, exact: as in :func:`payload_schema`.

    Raises:
        SchemaMismatch: names tensors that are missing, too many, or of another dtype or shape.
        NonFiniteError: an array holds NaN or infinity.
        ValueError: a scale of ``F8_E4M3`` that is no power of two; or as :func:`payload_schema`.
    """
    payload = payload_schema(parameters, dtype, exact=exact)
    validate(payload, tensors, payload.names)
    arrays: dict[str, Float32] = {}
    for spec in parameters.parameters:
        tensor = tensors[spec.name]
        if tensor.dtype in get_args(Quantized):
            arrays[spec.name] = dequantize(tensor, tensors[scale_name(spec.name)], spec.shape, name=spec.name)
        else:
            arrays[spec.name] = _widened(tensor)
            require_finite(arrays[spec.name], spec.name)
    return arrays


def encode_with_feedback(
    arrays: Mapping[str, Float32],
    dropped: Mapping[str, Float32],
    parameters: Schema,
    dtype: WireDType | None = None,
    *,
    exact: Collection[str] = (),
) -> tuple[dict[str, TensorBytes], dict[str, Float32], dict[str, Float32]]:
    """Encode ``arrays`` plus what rounding dropped before, and return what it drops now.

    Args:
        arrays: as in :func:`encode`; left as they are.
        dropped: what the call before returned, or nothing at first.
        parameters, dtype, exact: as in :func:`payload_schema`.

    Returns:
        The tensors; by name the float32 arrays that :func:`decode` makes of them; and what these lack of the sum.

    Raises:
        TypeError, ValueError: as :func:`encode`, of ``arrays`` and of ``dropped`` if there is any.
    """
    _check(arrays, parameters)
    if dropped:
        _check(dropped, parameters)
        with np.errstate(over="ignore", invalid="ignore"):  # encode() refuses what comes of it
            arrays = {name: np.asarray(array + dropped[name]) for name, array in arrays.items()}
    tensors = encode(arrays, parameters, dtype, exact=exact)
    sent = decode(tensors, parameters, dtype, exact=exact)
    return tensors, sent, {name: np.asarray(array - sent[name]) for name, array in arrays.items()}


def _check(arrays: Mapping[str, Float32], parameters: Schema) -> None:
    """Check that the arrays are float32 and have the names and shapes of ``parameters``."""
    problems = dict.fromkeys(arrays.keys() - set(parameters.names), "is one array too many")
    for spec in parameters.parameters:
        if spec.name not in arrays:
            problems[spec.name] = "is missing"
            continue
        require_float32(arrays[spec.name], spec.name)
        if arrays[spec.name].shape != spec.shape:
            problems[spec.name] = f"has shape {arrays[spec.name].shape}, not {spec.shape}"
    if problems:
        raise SchemaMismatch(problems)


def _rounded(array: Float32, due: ParameterSpec) -> bytes:
    """Return the bytes of a finite array in ``F32``, ``F16`` or ``BF16``."""
    require_finite(array, due.name)
    if due.dtype == "F32":
        return array.astype("<f4").tobytes()
    if due.dtype == "F16":
        with np.errstate(over="ignore"):
            halves = array.astype("<f2").view("<u2")
        infinity = 0x7C00
    else:
        bits = np.ascontiguousarray(array).reshape(-1).view(np.uint32)
        halves = ((bits + (bits >> 16 & 1) + 0x7FFF) >> 16).astype("<u2")
        infinity = 0x7F80
    if (halves & 0x7FFF == infinity).any():
        raise NonFiniteError(f"{due.name} holds numbers beyond what {due.dtype} holds")
    return halves.tobytes()


def _widened(tensor: TensorBytes) -> Float32:
    """Return the float32 array of a tensor in ``F32``, ``F16`` or ``BF16``."""
    if tensor.dtype == "BF16":
        wide = (np.frombuffer(tensor.data, "<u2").astype(np.uint32) << 16).view(np.float32)
    else:
        wide = np.frombuffer(tensor.data, "<f4" if tensor.dtype == "F32" else "<f2").astype(np.float32)
    return wide.reshape(tensor.shape)
