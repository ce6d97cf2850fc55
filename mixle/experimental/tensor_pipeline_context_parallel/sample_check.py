"""Whether a teacher's samples can be trained on under a plan: which tensor is what, and whether it can be split."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from mixle.utils.exact import require_nonnegative_int

_INTEGERS = {"int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1}
_FLOATS = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}
_BYTES = {**_INTEGERS, **_FLOATS, "bool": 1}
_LARGEST = {"int8": 2**7, "uint8": 2**8, "int16": 2**15}
_INPUT_NAMES = ("input_ids", "ids", "inputs", "input", "tokens", "token_ids")
_TARGET_WORDS = ("target", "label")


@dataclass(frozen=True)
class _Spec:
    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * _BYTES[self.dtype]

    def __str__(self) -> str:
        return f"{self.name} {self.shape} {self.dtype}"


def check_sample(
    sample: Any, *, length: int | None, longest: int | None, vocab: int | None, parts: int
) -> tuple[int, int, int]:
    """Check the tensors of one sample against a model and the parts that sequences are split into.

    A sample has token ids: an integer tensor of one axis, named ``input_ids``, ``ids``, ``inputs``, ``tokens`` or the
    like, else the first there is. Where sequences are split, every tensor with an axis has the sequence first. Targets,
    named with "target" or "label", are one integer per token or one number per token and vocabulary entry; without any,
    each next id is one.

    Args:
        sample: has ``specs``, each with ``name``, ``shape`` and ``dtype``; no batch axis.
        length: tokens that a step trains on per row; None takes the sample's.
        longest: tokens that the module takes; None if not known, likewise the next.
        vocab: token ids.
        parts: that a sequence is split into; 1 if it is not.

    Returns:
        Its tokens, and the bytes of its tensors along the sequence and of the others.

    Raises:
        TypeError: no specs.
        ValueError: a tensor that the plan cannot use; names it, its shape and dtype, and what would do.
    """
    specs = _read(sample)
    ids = _ids(specs)
    tokens = ids.shape[0]
    if length is not None and tokens != length:
        raise ValueError(
            f"sample {ids} has {tokens} tokens, and block={length}; give block={tokens}, or shape ({length},)"
        )
    if longest is not None and tokens > longest:
        raise ValueError(
            f"sample {ids} has {tokens} tokens, more than the module's block={longest}; cut it to {longest}"
        )
    if tokens % parts:
        fits = [size for size in (tokens - tokens % parts, tokens - tokens % parts + parts) if size]
        raise ValueError(
            f"sample {ids} must divide into {parts} parts of a sequence; lengths nearest that do: "
            f"{', '.join(map(str, fits))}"
        )
    largest = _LARGEST.get(ids.dtype)
    if largest is not None and vocab is not None and vocab > largest:
        raise ValueError(f"sample {ids} cannot hold ids below vocab={vocab}, only below {largest}; use int32")
    for spec in specs:
        if any(word in spec.name.lower() for word in _TARGET_WORDS):
            _check_targets(spec, tokens, vocab)
        elif parts > 1 and spec.shape and spec.shape[0] != tokens:
            raise ValueError(
                f"sample {spec} cannot be split along the sequence: its first axis is {spec.shape[0]}, not the "
                f"{tokens} tokens of {ids.name}; put the sequence first, or use cp_size=1"
            )
    along = sum(spec.nbytes for spec in specs if spec.shape and spec.shape[0] == tokens)
    return tokens, along, sum(spec.nbytes for spec in specs) - along


def _read(sample: Any) -> list[_Spec]:
    specs = getattr(sample, "specs", None)
    if not isinstance(specs, (list, tuple)) or not specs:
        raise TypeError(f"sample={sample!r} must have specs, a list of tensors' names, shapes and dtypes")
    read = []
    for spec in specs:
        name, sizes, kind = (getattr(spec, fact, None) for fact in ("name", "shape", "dtype"))
        if not isinstance(name, str) or not isinstance(sizes, (list, tuple)) or kind is None:
            raise TypeError(f"sample has {spec!r}, which lacks one of name, shape (a tuple of integers) and dtype")
        shape = tuple(require_nonnegative_int(size, f"sample {name}") for size in sizes)
        dtype = str(kind).removeprefix("torch.")
        if dtype not in _BYTES:
            raise ValueError(f"sample {name} has dtype {dtype}, not one of {', '.join(_BYTES)}")
        read.append(_Spec(name, shape, dtype))
    return read


def _ids(specs: list[_Spec]) -> _Spec:
    named = [spec for spec in specs if spec.name.lower() in _INPUT_NAMES]
    rows = [spec for spec in named or specs if spec.dtype in _INTEGERS and len(spec.shape) == 1]
    rows = [spec for spec in rows if spec.shape[0] > 0]
    if not rows:
        listed = "; ".join(map(str, named or specs))
        raise ValueError(
            f"sample has no token ids, an integer tensor of one axis, among: {listed}; add input_ids (T,) int64"
        )
    return rows[0]


def _check_targets(spec: _Spec, tokens: int, vocab: int | None) -> None:
    hard = spec.dtype in _INTEGERS and spec.shape == (tokens,)
    soft = (
        spec.dtype in _FLOATS
        and len(spec.shape) == 2
        and spec.shape[0] == tokens
        and (vocab is None or spec.shape[1] == vocab)
    )
    if not hard and not soft:
        width = "V" if vocab is None else vocab
        raise ValueError(
            f"sample {spec} is no target: give ({tokens},) int64, or ({tokens}, {width}) float32 log-probabilities"
        )
