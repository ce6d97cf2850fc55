"""Payloads as objects: plain safetensors, or compressed with zstandard, as the extension of the key says.

Every reader reads every codec. Before zstandard the bytes of each tensor are shuffled: the first byte of every element,
then the second, and so on, since the sign and exponent bytes of floats repeat where the mantissas do not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Literal, get_args

import numpy as np

from mixle.diloco.serialization import TensorBytes, nbytes, pack, unpack
from mixle.utils.exact import require_choice, require_exact_int
from mixle.utils.optional_import import optional_import

Compression = Literal["off", "zstd"]

EXTENSIONS: Mapping[Compression, str] = {"off": ".safetensors", "zstd": ".safetensors.zst"}
_LEVEL = 3


@dataclass(frozen=True)
class Codec:
    """Write payloads in one codec.

    Raises:
        ValueError: ``compression`` is neither ``"off"`` nor ``"zstd"``.
        ImportError: ``"zstd"``, and zstandard is not installed.
    """

    compression: Compression = "off"

    def __post_init__(self) -> None:
        require_choice(self.compression, "compression", get_args(Compression))
        if self.compression == "zstd":
            _zstandard()

    @property
    def extension(self) -> str:
        """How the keys of its payloads end."""
        return EXTENSIONS[self.compression]

    def encode(self, tensors: Mapping[str, TensorBytes]) -> bytes:
        """Return the object that holds ``tensors``; equal content gives equal bytes under one version of zstandard.

        Raises:
            TypeError, ValueError: as :func:`~mixle.diloco.serialization.pack`.
        """
        if self.compression == "off":
            return pack(tensors)
        shuffled = pack({name: _shuffled(tensor) for name, tensor in tensors.items()})
        compressed: bytes = _zstandard().ZstdCompressor(level=_LEVEL).compress(shuffled)
        return compressed


def codec_of(key: str) -> Codec:
    """Return the codec that a payload's key names by its extension.

    Raises:
        ValueError: it names none.
        ImportError: it names zstandard, which is not installed.
    """
    for compression, extension in EXTENSIONS.items():
        if key.endswith(extension):
            return Codec(compression)
    raise ValueError(f"key={key!r} must end in one of {', '.join(EXTENSIONS.values())}")


def decode(key: str, blob: bytes, *, max_bytes: int) -> dict[str, TensorBytes]:
    """Return the tensors that the object under ``key`` holds.

    Args:
        key: names the codec by its extension.
        blob: the object, which may be anything.
        max_bytes: refuse a payload that is, or says that it becomes, larger than this; nothing is allocated for it.
            :func:`~mixle.diloco.serialization.packed_nbytes` says what is due.

    Raises:
        ValueError: an extension without a codec, a payload that is too large, or one that is not what it should be.
        ImportError: the object is compressed with zstandard, which is not installed.
    """
    require_exact_int(max_bytes, "max_bytes", minimum=0)
    codec = codec_of(key)
    if codec.compression == "off":
        if len(blob) > max_bytes:
            raise ValueError(f"the payload has {len(blob)} bytes; at most {max_bytes} are due")
        return unpack(blob)
    return {name: _unshuffled(tensor) for name, tensor in unpack(_decompressed(blob, max_bytes)).items()}


def _decompressed(blob: bytes, max_bytes: int) -> bytes:
    zstandard = _zstandard()
    try:
        announced = zstandard.frame_content_size(blob)
        if announced < 0:
            raise ValueError("the compressed payload does not say how large it is")
        if announced > max_bytes:
            raise ValueError(f"the compressed payload becomes {announced} bytes; at most {max_bytes} are due")
        payload: bytes = zstandard.ZstdDecompressor().decompress(blob, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise ValueError(f"the payload is not one whole zstandard frame: {error}") from None
    return payload


def _shuffled(tensor: TensorBytes) -> TensorBytes:
    """Return the tensor with the first bytes of all elements first, then the second ones, and so on."""
    by_element = np.frombuffer(tensor.data, np.uint8).reshape(-1, _element_size(tensor))
    return TensorBytes(tensor.dtype, tensor.shape, by_element.T.tobytes())


def _unshuffled(tensor: TensorBytes) -> TensorBytes:
    by_place = np.frombuffer(tensor.data, np.uint8).reshape(_element_size(tensor), -1)
    by_element = np.empty(by_place.shape[::-1], np.uint8)
    for place, column in enumerate(by_place):  # which NumPy does several times as fast as it copies the transpose
        by_element[:, place] = column
    return TensorBytes(tensor.dtype, tensor.shape, by_element.tobytes())


def _element_size(tensor: TensorBytes) -> int:
    """Return bytes per element; 1 where a byte holds two."""
    return nbytes(tensor.dtype, (2,)) // 2 or 1


def _zstandard() -> ModuleType:
    return optional_import("zstandard", extra="diloco")
