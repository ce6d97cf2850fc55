"""What one sample is: named tensors of fixed shape and dtype, and the bytes they travel as.

The bytes of a sample are its tensors in the order of the specs, C-contiguous, little-endian, back to back without
padding. NumPy has no bfloat16: an array of it is one of uint16 with the same bits.
"""

from __future__ import annotations

import difflib
import math
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from mixle.utils.exact import require_choice, require_nonnegative_int
from mixle.utils.optional_import import is_tensor, optional_import

if TYPE_CHECKING:
    import torch

Buffer: TypeAlias = "bytes | bytearray | memoryview"

NUMPY_DTYPES: Mapping[str, np.dtype[Any]] = MappingProxyType(
    {
        "float64": np.dtype("<f8"),
        "float32": np.dtype("<f4"),
        "float16": np.dtype("<f2"),
        "bfloat16": np.dtype("<u2"),
        "int64": np.dtype("<i8"),
        "int32": np.dtype("<i4"),
        "int16": np.dtype("<i2"),
        "int8": np.dtype("i1"),
        "uint8": np.dtype("u1"),
        "bool": np.dtype("?"),
    }
)
MOST_TENSORS = 1024
MOST_NAME_BYTES = 256
MOST_DIMENSIONS = 32
MOST_BYTES = 1 << 40


@dataclass(frozen=True)
class TensorSpec:
    """Describe one tensor of a sample.

    Args:
        name: at most 256 bytes in UTF-8.
        shape: sizes of a sample's dimensions, without the batch; ``()`` is a scalar and ``(0,)`` is empty.
        dtype: float64, float32, float16, bfloat16, int64, int32, int16, int8, uint8 or bool.

    Raises:
        TypeError, ValueError: an argument that is not what it says above.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise TypeError(f"name={self.name!r} must be a string, not {type(self.name).__name__}")
        if not 0 < len(self.name.encode()) <= MOST_NAME_BYTES:
            raise ValueError(f"name={self.name[:40]!r} must have 1 to {MOST_NAME_BYTES} bytes")
        sizes: Any = self.shape
        if isinstance(sizes, (str, bytes)) or not isinstance(sizes, Iterable):
            raise TypeError(f"shape={sizes!r} of tensor {self.name!r} must be a sequence of integers")
        shape = tuple(require_nonnegative_int(size, f"shape of tensor {self.name!r}: size") for size in sizes)
        if len(shape) > MOST_DIMENSIONS:
            raise ValueError(f"tensor {self.name!r} has {len(shape)} dimensions, more than {MOST_DIMENSIONS}")
        object.__setattr__(self, "shape", shape)
        require_choice(self.dtype, f"dtype of tensor {self.name!r}", tuple(NUMPY_DTYPES))
        if self.nbytes > MOST_BYTES:
            raise ValueError(f"tensor {self.name!r} of shape {shape} has {self.nbytes} bytes, more than {MOST_BYTES}")

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) * self.numpy_dtype.itemsize

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        """The NumPy dtype of the same bits; uint16 for bfloat16."""
        return NUMPY_DTYPES[self.dtype]

    @property
    def torch_dtype(self) -> torch.dtype:
        """The torch dtype.

        Raises:
            ImportError: torch is not installed.
        """
        dtype: torch.dtype = getattr(optional_import("torch", extra="torch"), self.dtype)
        return dtype


@dataclass(frozen=True, init=False)
class BatchConfig:
    """Describe a sample: its tensors, in the order of their bytes.

    Args:
        specs: :class:`TensorSpec` objects or mappings with their three fields (of a YAML file or an OmegaConf list);
            keys that begin with an underscore are left out, as Hydra's ``_target_`` is.

    Raises:
        TypeError, ValueError: no specs, one that is none, two of one name, more than 1024 of them.
    """

    specs: tuple[TensorSpec, ...]
    _by_name: dict[str, TensorSpec] = field(init=False, repr=False, compare=False)

    def __init__(self, specs: Iterable[TensorSpec | Mapping[str, Any]]) -> None:
        if isinstance(specs, (str, bytes, Mapping)) or not isinstance(specs, Iterable):
            raise TypeError(f"specs={specs!r} must be a sequence of TensorSpec or of mappings")
        checked = tuple(_as_spec(spec, index) for index, spec in enumerate(specs))
        if not 0 < len(checked) <= MOST_TENSORS:
            raise ValueError(f"specs has {len(checked)} tensors; a sample has 1 to {MOST_TENSORS}")
        by_name = {spec.name: spec for spec in checked}
        if len(by_name) < len(checked):
            names = [spec.name for spec in checked]
            twice = sorted({name for name in names if names.count(name) > 1})
            raise ValueError(f"specs names {', '.join(map(repr, twice))} more than once; give each tensor its own name")
        object.__setattr__(self, "specs", checked)
        object.__setattr__(self, "_by_name", by_name)
        if self.nbytes() > MOST_BYTES:
            raise ValueError(f"a sample has {self.nbytes()} bytes, more than {MOST_BYTES}")

    @property
    def tensor_names(self) -> list[str]:
        """The names, in the order of the bytes."""
        return list(self._by_name)

    def nbytes(self) -> int:
        """Return the bytes of an encoded sample."""
        return sum(spec.nbytes for spec in self.specs)

    def get_spec(self, name: str) -> TensorSpec:
        """Return the spec of a tensor.

        Raises:
            KeyError: no tensor has this name.
        """
        try:
            return self._by_name[name]
        except (KeyError, TypeError):
            near = difflib.get_close_matches(name, self._by_name, n=1) if isinstance(name, str) else []
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise KeyError(f"no tensor is named {name!r}; there are {self.tensor_names}{hint}") from None

    def encode(self, **tensors: torch.Tensor | NDArray[Any]) -> bytes:
        """Return the bytes of a sample; nothing is cast, tensors that require grad are detached.

        Args:
            tensors: for each name a tensor (on any device) or array of exactly the spec's shape and dtype.

        Raises:
            TypeError: a value that is neither a tensor nor an array.
            ValueError: a tensor that is missing, not of the specs, or of another shape or dtype.
        """
        require_names(self._by_name, tensors)
        return b"".join(np.ascontiguousarray(exact_array(tensors[spec.name], spec)).data for spec in self.specs)

    def decode(self, data: Buffer) -> dict[str, torch.Tensor]:
        """Return the tensors of an encoded sample, in memory of their own.

        Raises:
            TypeError: ``data`` is not bytes-like.
            ValueError: ``data`` has not :meth:`nbytes` bytes.
        """
        view = self._view(data)
        tensors, offset = {}, 0
        for spec in self.specs:
            tensors[spec.name] = _decode(view, offset, spec)
            offset += spec.nbytes
        return tensors

    def decode_single(self, data: Buffer, name: str) -> torch.Tensor:
        """Return one tensor of an encoded sample, in memory of its own.

        Raises:
            KeyError: no tensor has this name.
            TypeError, ValueError: as for :meth:`decode`.
        """
        spec = self.get_spec(name)
        before = self.specs[: self.specs.index(spec)]
        return _decode(self._view(data), sum(other.nbytes for other in before), spec)

    def to_dict(self) -> dict[str, list[dict[str, Any]]]:
        """Return plain lists, strings and integers that :meth:`from_dict` takes."""
        return {"specs": [{"name": s.name, "shape": list(s.shape), "dtype": s.dtype} for s in self.specs]}

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> BatchConfig:
        """Return the config of a mapping whose ``specs`` are its tensors.

        Raises:
            TypeError, ValueError: a mapping that is not what :meth:`to_dict` returns.
        """
        if not isinstance(config, Mapping):
            raise TypeError(f"config={config!r} must be a mapping with the key 'specs', not {type(config).__name__}")
        _require_keys(config, {"specs"}, "config")
        return cls(config["specs"])

    @classmethod
    def from_yaml(cls, path: str | Path) -> BatchConfig:
        """Return the config of a YAML file with what :meth:`to_dict` returns.

        Raises:
            OSError: the file cannot be read.
            ValueError: it is not YAML, or not of a config.
        """
        yaml = optional_import("yaml", extra="teacher")
        try:
            return cls.from_dict(yaml.safe_load(Path(path).read_text(encoding="utf-8")))
        except (TypeError, ValueError, yaml.YAMLError) as error:
            raise ValueError(f"{path} is not a batch config: {error}") from error

    def _view(self, data: Buffer) -> memoryview:
        try:
            view = memoryview(data).cast("B")
        except TypeError:
            raise TypeError(f"data must be contiguous and bytes-like, not {type(data).__name__}") from None
        if view.nbytes != self.nbytes():
            raise ValueError(f"data has {view.nbytes} bytes; a sample of {self.tensor_names} has {self.nbytes()}")
        return view


def require_names(specs: Mapping[str, object], given: Mapping[str, object]) -> None:
    """Raise a ``ValueError`` that says which of ``specs`` are missing in ``given``, and which it has beside them."""
    if given.keys() == specs.keys():
        return
    missing = [name for name in specs if name not in given]
    unknown = [name for name in given if name not in specs]
    parts = [f"lacks {missing}"] * bool(missing) + [f"has {unknown}, which no spec names"] * bool(unknown)
    raise ValueError(f"the sample {' and '.join(parts)}; its tensors are {list(specs)}")


def require_exact(value: Any, spec: TensorSpec, shape: tuple[int, ...]) -> None:
    """Check that ``value`` is a tensor or array of exactly ``shape`` and the spec's dtype.

    Raises:
        TypeError: it is neither, or a masked array.
        ValueError: its shape or dtype is another, or it is a tensor without memory to read; names the tensor, what was
            given and what was expected.
    """
    given: Any
    wanted: Any
    if is_tensor(value):
        _require_memory(value, spec.name)
        given, wanted = value.dtype, getattr(sys.modules["torch"], spec.dtype)
    elif isinstance(value, np.ma.MaskedArray):
        raise TypeError(f"tensor {spec.name!r} is a masked array, whose mask would be lost; give its .filled(value)")
    elif isinstance(value, (np.ndarray, np.generic)):
        given, wanted = value.dtype, spec.numpy_dtype
    else:
        raise TypeError(f"tensor {spec.name!r} must be a torch tensor or a NumPy array, not {type(value).__name__}")
    if value.shape != shape:
        raise ValueError(f"tensor {spec.name!r} has shape {tuple(value.shape)}; its spec says {shape}")
    if given != wanted and str(given) != spec.dtype:  # bfloat16 arrays of other packages are known by their name
        name = str(given).removeprefix("torch.")
        raise ValueError(f"tensor {spec.name!r} has dtype {name}; its spec says {spec.dtype}, and nothing is cast")


def exact_array(value: Any, spec: TensorSpec) -> NDArray[Any]:
    """Return the array of a sample's tensor or array, bfloat16 as uint16; no copy of what lies in host memory."""
    require_exact(value, spec, spec.shape)
    return host_array(value, spec)


def host_array(value: Any, spec: TensorSpec) -> NDArray[Any]:
    """Return what :func:`require_exact` has passed as an array; no copy of what lies in host memory.

    Raises:
        ValueError: a tensor that only looks like one cannot be read; names it.
    """
    if not is_tensor(value):
        return np.asarray(value).view(spec.numpy_dtype)
    try:
        if spec.dtype == "bfloat16":
            torch = sys.modules["torch"]
            value = value.detach().resolve_neg().view(torch.uint16)
        array: NDArray[Any] = value.numpy(force=True)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"tensor {spec.name!r} cannot be read: {error}") from error
    return array


def _require_memory(tensor: Any, name: str) -> None:
    """Check that a tensor has all the memory that it shows: NumPy would show other memory for what a tensor has not."""
    if tensor.is_nested or str(tensor.layout) != "torch.strided":
        raise ValueError(f"tensor {name!r} is sparse or nested; give a dense one")
    if tensor.is_meta:
        raise ValueError(f"tensor {name!r} is on the meta device, which holds no numbers")
    try:
        steps = zip(tensor.shape, tensor.stride(), strict=True)
        last = tensor.storage_offset() + sum((size - 1) * step for size, step in steps)
        there = tensor.untyped_storage().nbytes()
        held = not tensor.numel() or (tensor.data_ptr() != 0 and (last + 1) * tensor.element_size() <= there)
    except RuntimeError as error:
        raise ValueError(f"tensor {name!r} cannot be read: {error}") from error
    if not held:
        raise ValueError(f"tensor {name!r} has no memory, or less than it shows: was its storage freed?")


def tensor_of(array: NDArray[Any], spec: TensorSpec) -> torch.Tensor:
    """Return the torch tensor over a writable ``array`` of the spec's NumPy dtype, without a copy.

    Raises:
        ImportError: torch is not installed.
    """
    tensor: torch.Tensor = optional_import("torch", extra="torch").from_numpy(array)
    return tensor.view(spec.torch_dtype) if spec.dtype == "bfloat16" else tensor


def _decode(view: memoryview, offset: int, spec: TensorSpec) -> torch.Tensor:
    # A copy, since the tensor shall own its memory and the bytes need not be aligned to the dtype.
    array: NDArray[Any] = np.ndarray(spec.shape, spec.numpy_dtype, view, offset).copy()
    return tensor_of(array, spec)


def _as_spec(spec: object, index: int) -> TensorSpec:
    if isinstance(spec, TensorSpec):
        return spec
    if not isinstance(spec, Mapping):
        raise TypeError(f"specs[{index}]={spec!r} must be a TensorSpec or a mapping, not {type(spec).__name__}")
    fields = {key: value for key, value in spec.items() if not str(key).startswith("_")}
    _require_keys(fields, {"name", "shape", "dtype"}, f"specs[{index}]")
    return TensorSpec(**fields)


def _require_keys(given: Mapping[str, object], keys: set[str], what: str) -> None:
    names = {key for key in given if not str(key).startswith("_")}
    if names != keys:
        raise ValueError(f"{what} has the keys {sorted(map(str, names))}; it takes {sorted(keys)}")
