"""Tensors as bytes: what a payload holds, how it is laid out, and a reader that trusts nothing.

A payload is safetensors: a header length (uint64, little-endian), a JSON header padded with spaces to a multiple of
eight bytes, then the tensors, little-endian and C-contiguous, in the order and without gaps. Equal content gives equal
bytes, those that the ``safetensors`` package writes: tensors by the order of :data:`PayloadDType`, then by name. In the
header, as in :class:`TensorBytes`, the shape of an ``F4`` tensor counts elements, of which a byte holds two.
"""

from __future__ import annotations

import hashlib
import json
import math
import reprlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal, get_args

from mixle.utils.exact import require_choice, require_exact_int

DType = Literal["F32", "F16", "BF16"]
Quantized = Literal["F8_E4M3", "F4"]
PayloadDType = Literal["F32", "BF16", "F16", "F8_E8M0", "F8_E4M3", "F4"]

F4_BLOCK = 32
LONGEST_HEADER = 2**24

_BITS: Mapping[PayloadDType, int] = {"F32": 32, "BF16": 16, "F16": 16, "F8_E8M0": 8, "F8_E4M3": 8, "F4": 4}
_LAYOUT = {dtype: place for place, dtype in enumerate(get_args(PayloadDType))}
_METADATA = "__metadata__"
_MOST_AXES = 64
_LARGEST_SIZE = 2**63 - 1


def nbytes(dtype: PayloadDType, shape: tuple[int, ...]) -> int:
    """Return the bytes that a tensor takes in a payload.

    Raises:
        TypeError: ``shape`` is not a tuple or list of integers.
        ValueError: an unknown ``dtype``, a negative or impossible size, or an odd last axis of ``F4``.
    """
    require_choice(dtype, "dtype", _BITS)
    sizes = _exact_shape(shape)
    if dtype == "F4" and (not sizes or sizes[-1] % 2):
        raise ValueError(f"shape={sizes} must end in an even axis for F4, which holds two elements in a byte")
    return math.prod(sizes) * _BITS[dtype] // 8


@dataclass(frozen=True)
class TensorBytes:
    """One tensor of a payload, little-endian and C-contiguous.

    Args:
        dtype: how its elements are written.
        shape: elements along each axis; the last one is even for ``F4``, which packs two per byte, low nibble first.
        data: its ``nbytes(dtype, shape)`` bytes.

    Raises:
        TypeError, ValueError: ``dtype`` and ``shape`` as in :func:`nbytes`; ``data`` is not bytes, or not that many.
    """

    dtype: PayloadDType
    shape: tuple[int, ...]
    data: bytes = field(repr=False)

    def __post_init__(self) -> None:
        expected = nbytes(self.dtype, self.shape)
        object.__setattr__(self, "shape", _exact_shape(self.shape))
        if not isinstance(self.data, bytes):
            raise TypeError(f"data must be bytes, not {type(self.data).__name__}")
        if len(self.data) != expected:
            raise ValueError(
                f"data holds {len(self.data)} bytes; {self.dtype} of shape {self.shape} takes {expected} bytes"
            )


@dataclass(frozen=True)
class ParameterSpec:
    """Name, dtype and shape of one tensor.

    Raises:
        TypeError: ``name`` is not a string, or ``shape`` not integers.
        ValueError: a name that UTF-8 cannot write or the container reserves, or a dtype or shape that :func:`nbytes`
            refuses.
    """

    name: str
    dtype: PayloadDType
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise TypeError(f"name={self.name!r} must be a string, not {type(self.name).__name__}")
        if self.name == _METADATA:
            raise ValueError(f"name={self.name!r} is what safetensors calls its metadata; choose another")
        self.name.encode()
        nbytes(self.dtype, self.shape)
        object.__setattr__(self, "shape", _exact_shape(self.shape))


@dataclass(frozen=True)
class Schema:
    """What a payload holds, sorted by name: the parameters of a model, or those and their scales once quantized.

    Raises:
        TypeError: a member that is not a :class:`ParameterSpec`.
        ValueError: not sorted by name, a name twice, or a parameter named like another's scale.
    """

    parameters: tuple[ParameterSpec, ...]
    _by_name: Mapping[str, ParameterSpec] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "parameters", tuple(self.parameters))
        for spec in self.parameters:
            if not isinstance(spec, ParameterSpec):
                raise TypeError(f"parameters holds {spec!r}, which is not a ParameterSpec")
        for before, after in pairwise(self.parameters):
            if before.name >= after.name:
                raise ValueError(
                    f"parameters must be sorted by name and unique, but {after.name!r} follows {before.name!r}"
                )
        object.__setattr__(self, "_by_name", {spec.name: spec for spec in self.parameters})
        for spec in self.parameters:
            scale = self._by_name.get(scale_name(spec.name))
            if scale is not None and scale != _scale_spec(spec):
                raise ValueError(f"parameter {scale.name!r} is named like the scale of {spec.name!r}; rename one")

    @property
    def names(self) -> tuple[str, ...]:
        """All names, sorted."""
        return tuple(self._by_name)

    def spec(self, name: str) -> ParameterSpec:
        """Return the tensor's specification, or raise a ``KeyError`` that says the schema has none of that name."""
        try:
            return self._by_name[name]
        except KeyError:
            raise KeyError(f"the schema has no parameter {name!r}") from None

    def only(self, names: Iterable[str]) -> Schema:
        """Return the schema of these tensors alone, or raise a ``KeyError`` as :meth:`spec` does."""
        return Schema(tuple(self.spec(name) for name in sorted(set(names))))

    def nbytes(self, name: str) -> int:
        """Return the bytes that the tensor takes, or raise a ``KeyError`` as :meth:`spec` does."""
        spec = self.spec(name)
        return nbytes(spec.dtype, spec.shape)

    def digest(self) -> str:
        """Return the SHA-256, in hexadecimal, of the compact JSON ``[[name, dtype, [shape...]], ...]``."""
        entries = [[spec.name, spec.dtype, spec.shape] for spec in self.parameters]
        return hashlib.sha256(json.dumps(entries, separators=(",", ":")).encode()).hexdigest()


class SchemaMismatch(ValueError):  # noqa: N818  (the name that users of the protocol know)
    """Tensors are not what a schema says; ``names`` are those of the tensors, sorted."""

    def __init__(self, problems: Mapping[str, str]) -> None:
        self.names = tuple(sorted(problems))
        super().__init__("; ".join(f"{name!r} {problems[name]}" for name in self.names))


def scale_name(name: str) -> str:
    """Return the name under which the scales of a quantized tensor travel."""
    return f"{name}.scale"


def quantized_specs(name: str, dtype: Quantized, shape: tuple[int, ...]) -> tuple[ParameterSpec, ParameterSpec]:
    """Return what a tensor of ``shape`` becomes when quantized: its elements and its scales.

    ``F8_E4M3`` keeps the shape and has one ``F32`` scale. ``F4`` is flattened and padded to a multiple of 32, with one
    ``F8_E8M0`` scale for each 32 elements (OCP Microscaling Formats, version 1.0).

    Raises:
        TypeError, ValueError: as :class:`ParameterSpec`, and for a ``dtype`` that is not quantized.
    """
    require_choice(dtype, "dtype", get_args(Quantized))
    if dtype == "F8_E4M3":
        return ParameterSpec(name, dtype, shape), ParameterSpec(scale_name(name), "F32", ())
    blocks = -(-math.prod(_exact_shape(shape)) // F4_BLOCK)
    elements = ParameterSpec(name, dtype, (blocks * F4_BLOCK,))
    return elements, ParameterSpec(scale_name(name), "F8_E8M0", (blocks,))


def validate(schema: Schema, tensors: Mapping[str, TensorBytes], names: Iterable[str]) -> None:
    """Check that ``tensors`` are those of ``schema`` called ``names``: all of them, no others, as it says.

    Raises:
        SchemaMismatch: names every tensor that is missing, not asked for, unknown to the schema, or of another dtype or
            shape, and says which.
    """
    asked = set(names)
    specs = {spec.name: spec for spec in schema.parameters}
    problems: dict[str, str] = {}
    for name in asked | set(tensors):
        spec, tensor = specs.get(name), tensors.get(name)
        if name not in asked:
            problems[name] = "is one tensor too many"
        elif spec is None:
            problems[name] = "is not in the schema"
        elif tensor is None:
            problems[name] = "is missing"
        elif (tensor.dtype, tensor.shape) != (spec.dtype, spec.shape):
            problems[name] = f"is {tensor.dtype} of shape {tensor.shape}, not {spec.dtype} of shape {spec.shape}"
    if problems:
        raise SchemaMismatch(problems)


def packed_nbytes(parameters: Iterable[ParameterSpec]) -> int:
    """Return the bytes of the payload that :func:`pack` makes of such tensors."""
    specs = list(parameters)
    return len(_header(specs)) + sum(nbytes(spec.dtype, spec.shape) for spec in specs)


def pack(tensors: Mapping[str, TensorBytes]) -> bytes:
    """Return the payload that holds ``tensors``; equal content gives equal bytes.

    Raises:
        TypeError, ValueError: a name that :class:`ParameterSpec` refuses, or a header of more than 16 MiB.
    """
    specs = [ParameterSpec(name, tensor.dtype, tensor.shape) for name, tensor in tensors.items()]
    return b"".join([_header(specs), *(tensors[spec.name].data for spec in sorted(specs, key=_place))])


def unpack(blob: bytes) -> dict[str, TensorBytes]:
    """Return the tensors of a payload, in the order of their bytes; metadata is passed over.

    Nothing is allocated for a size that the header claims before the blob is seen to hold it.

    Raises:
        TypeError: ``blob`` is not bytes or another buffer.
        ValueError: the header overruns the blob, is not what safetensors prescribes, or has an unknown dtype; or the
            tensors lie outside the blob, overlap, or leave bytes between or behind them.
    """
    view = memoryview(blob).cast("B")
    if len(view) < 8:
        raise ValueError(f"the payload holds {len(view)} bytes, fewer than the 8 of its header's length")
    length = int.from_bytes(view[:8], "little")
    if length > len(view) - 8:
        raise ValueError(f"the header claims {length} bytes and overruns the payload of {len(view)} bytes")
    if length > LONGEST_HEADER:
        raise ValueError(f"the header has {length} bytes; at most {LONGEST_HEADER} are read")
    entries = _parsed_header(bytes(view[8 : 8 + length]))
    data = view[8 + length :]
    tensors: dict[str, TensorBytes] = {}
    end = 0
    for spec, (start, stop) in sorted(entries, key=lambda entry: entry[1]):
        name = reprlib.repr(spec.name)
        if not start <= stop <= len(data):
            raise ValueError(f"tensor {name} at {start}:{stop} lies outside the payload's {len(data)} bytes of tensors")
        if start != end:
            how = "overlaps the tensor before it" if start < end else "leaves a gap before it"
            raise ValueError(f"tensor {name} at {start}:{stop} {how}, which ends at {end}")
        if stop - start != nbytes(spec.dtype, spec.shape):
            raise ValueError(
                f"tensor {name} at {start}:{stop} is not the {nbytes(spec.dtype, spec.shape)} bytes that "
                f"{spec.dtype} of shape {spec.shape} takes"
            )
        tensors[spec.name] = TensorBytes(spec.dtype, spec.shape, bytes(data[start:stop]))
        end = stop
    if end != len(data):
        raise ValueError(f"the tensors end at {end}, {len(data) - end} bytes before the payload does")
    return tensors


def _exact_shape(shape: object) -> tuple[int, ...]:
    """Return the shape as a tuple of ints, each of which an array can have."""
    if not isinstance(shape, (tuple, list)):
        raise TypeError(f"shape={shape!r} must be a tuple of integers, not {type(shape).__name__}")
    if len(shape) > _MOST_AXES:
        raise ValueError(f"shape has {len(shape)} axes; at most {_MOST_AXES} are possible")
    return tuple(
        require_exact_int(size, f"shape[{axis}]", minimum=0, maximum=_LARGEST_SIZE) for axis, size in enumerate(shape)
    )


def _scale_spec(spec: ParameterSpec) -> ParameterSpec | None:
    """Return what the scale of a quantized tensor has to be; None for one that has no scale."""
    if spec.dtype == "F8_E4M3" or spec.dtype == "F4":
        return quantized_specs(spec.name, spec.dtype, spec.shape)[1]
    return None


def _place(spec: ParameterSpec) -> tuple[int, str]:
    """Return the key that sorts tensors as they lie in a payload."""
    return _LAYOUT[spec.dtype], spec.name


def _header(specs: Iterable[ParameterSpec]) -> bytes:
    """Return the header of a payload with its length before it."""
    entries: dict[str, object] = {}
    end = 0
    for spec in sorted(specs, key=_place):
        start, end = end, end + nbytes(spec.dtype, spec.shape)
        entries[spec.name] = {"dtype": spec.dtype, "shape": spec.shape, "data_offsets": (start, end)}
    text = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > LONGEST_HEADER:
        raise ValueError(f"the header of {len(entries)} tensors takes {len(text)} bytes; at most {LONGEST_HEADER} fit")
    return len(text).to_bytes(8, "little") + text


def _parsed_header(text: bytes) -> list[tuple[ParameterSpec, tuple[int, int]]]:
    """Return each tensor and where its bytes begin and end, from a header of unknown origin."""
    try:
        header = json.loads(text.decode(), object_pairs_hook=_unique)
    except RecursionError:
        raise ValueError("the header is nested too deeply") from None
    if not isinstance(header, dict):
        raise ValueError(f"the header must be an object, not {reprlib.repr(header)}")
    return [_parsed_entry(name, entry) for name, entry in header.items() if name != _METADATA]


def _parsed_entry(name: str, entry: object) -> tuple[ParameterSpec, tuple[int, int]]:
    """Return one tensor of a header, checked by itself."""
    match entry:
        case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [int(start), int(stop)], **rest} if not rest:
            try:
                spec = ParameterSpec(name, dtype, tuple(shape))  # type: ignore[arg-type]
            except (TypeError, ValueError) as error:
                raise ValueError(f"tensor {reprlib.repr(name)} of the header: {str(error)[:200]}") from None
            if start >= 0 and not isinstance(start, bool) and not isinstance(stop, bool):
                return spec, (start, stop)
    raise ValueError(f"tensor {reprlib.repr(name)} of the header is {reprlib.repr(entry)}, not what safetensors has")


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Return the members of a JSON object, each of which may be there once."""
    members = dict(pairs)
    if len(members) != len(pairs):
        raise ValueError("the header has a name twice")
    return members
