from __future__ import annotations

import subprocess
import sys
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mixle.diloco.compression import Codec, codec_of, decode
from mixle.diloco.serialization import TensorBytes, nbytes, pack

zstandard = pytest.importorskip("zstandard")

SHAPES = {"F32": (3, 4), "F16": (5,), "BF16": (2, 3), "F8_E4M3": (7,), "F8_E8M0": (3,), "F4": (64,)}
codecs = pytest.mark.parametrize("compression", ["off", "zstd"])


def tensors(seed=0):
    rng = np.random.default_rng(seed)
    return {dtype: TensorBytes(dtype, shape, rng.bytes(nbytes(dtype, shape))) for dtype, shape in SHAPES.items()}


def smooth():
    """A tensor as training makes them: the exponents close together, the mantissas anything."""
    return {"w": TensorBytes("F32", (50_000,), np.random.default_rng(0).standard_normal(50_000, np.float32).tobytes())}


@codecs
def test_what_is_encoded_is_decoded(compression):
    codec = Codec(compression)
    assert decode("a" + codec.extension, codec.encode(tensors()), max_bytes=10_000) == tensors()


@codecs
def test_empty_tensors_and_payloads_pass_through(compression):
    codec = Codec(compression)
    for payload in ({}, {"w": TensorBytes("F32", (0, 3), b""), "v": TensorBytes("F4", (0,), b"")}):
        assert decode("a" + codec.extension, codec.encode(payload), max_bytes=10_000) == payload


@codecs
def test_equal_content_gives_equal_objects(compression):
    shuffled = dict(reversed(tensors().items()))
    assert Codec(compression).encode(shuffled) == Codec(compression).encode(tensors())


def test_off_is_plain_safetensors():
    assert Codec().encode(tensors()) == pack(tensors())


def test_zstd_holds_the_bytes_of_all_elements_place_by_place():
    values = TensorBytes("F32", (2,), b"\x01\x02\x03\x04\x11\x12\x13\x14")
    halves = TensorBytes("BF16", (3,), b"\x01\x02\x11\x12\x21\x22")
    nibbles = TensorBytes("F4", (4,), b"\x01\x02")
    stored = zstandard.ZstdDecompressor().decompress(Codec("zstd").encode({"w": values, "h": halves, "q": nibbles}))
    assert stored == pack(
        {
            "w": TensorBytes("F32", (2,), b"\x01\x11\x02\x12\x03\x13\x04\x14"),
            "h": TensorBytes("BF16", (3,), b"\x01\x11\x21\x02\x12\x22"),
            "q": nibbles,
        }
    )


def test_shuffling_makes_floats_smaller_than_zstandard_alone():
    plain = zstandard.ZstdCompressor(level=3).compress(pack(smooth()))
    assert len(Codec("zstd").encode(smooth())) < 0.95 * len(plain)


@pytest.mark.parametrize(("key", "compression"), [("r/theta.safetensors", "off"), ("r/theta.safetensors.zst", "zstd")])
def test_the_extension_of_a_key_names_its_codec(key, compression):
    assert codec_of(key) == Codec(compression)
    assert key.endswith(codec_of(key).extension)


@pytest.mark.parametrize("key", ["", "theta", "theta.zst", "theta.safetensors.gz", "theta.safetensors/x"])
def test_a_key_without_a_codec_is_refused(key):
    with pytest.raises(ValueError, match=r"must end in one of \.safetensors, \.safetensors\.zst"):
        codec_of(key)
    with pytest.raises(ValueError, match="must end in one of"):
        decode(key, b"", max_bytes=1)


@pytest.mark.parametrize("compression", ["zstd ", "ZSTD", "gzip", None, True])
def test_an_unknown_codec_is_refused(compression):
    with pytest.raises(ValueError, match="must be one of 'off', 'zstd'"):
        Codec(compression)


def test_a_missing_zstandard_is_an_import_error_at_construction(monkeypatch):
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(ImportError, match=r"pip install 'mixle\[diloco\]'"):
        Codec("zstd")
    with pytest.raises(ImportError, match=r"pip install 'mixle\[diloco\]'"):
        decode("a.safetensors.zst", b"", max_bytes=1)
    assert decode("a.safetensors", Codec("off").encode(tensors()), max_bytes=10_000) == tensors()


def test_the_library_needs_neither_torch_nor_an_extra_to_be_imported():
    program = (
        "import sys, mixle.diloco.compression, mixle.diloco.tensor_codec;"
        "print(sorted({'torch', 'zstandard', 'safetensors', 'obstore', 'scipy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr


# ---- what others wrote


@codecs
def test_a_payload_of_exactly_the_size_due_is_read_and_a_larger_one_refused(compression):
    codec = Codec(compression)
    size = len(pack(tensors()))
    assert decode("a" + codec.extension, codec.encode(tensors()), max_bytes=size) == tensors()
    with pytest.raises(ValueError, match=f"{size} bytes; at most {size - 1} are due"):
        decode("a" + codec.extension, codec.encode(tensors()), max_bytes=size - 1)


def test_memory_is_not_taken_for_a_bomb():
    bomb = zstandard.ZstdCompressor(level=3).compress(bytes(200_000_000))
    assert len(bomb) < 100_000
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="becomes 200000000 bytes; at most 1000 are due"):
            decode("a.safetensors.zst", bomb, max_bytes=1000)
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


def test_a_frame_that_does_not_say_its_size_is_refused():
    frame = zstandard.ZstdCompressor(write_content_size=False).compress(pack(tensors()))
    with pytest.raises(ValueError, match="does not say how large"):
        decode("a.safetensors.zst", frame, max_bytes=10_000)


def lying_frame(announced):
    """A frame of one byte of content whose header announces something else (RFC 8878, section 3.1.1)."""
    magic, descriptor, raw_block_of_one = b"\x28\xb5\x2f\xfd", b"\xa0", b"\x09\0\0"
    return magic + descriptor + announced.to_bytes(4, "little") + raw_block_of_one + b"x"


def test_a_frame_that_holds_less_or_more_than_it_announces_is_refused():
    assert zstandard.ZstdDecompressor().decompress(lying_frame(1)) == b"x"
    for announced in (0, 2, 500):
        with pytest.raises(ValueError):
            decode("a.safetensors.zst", lying_frame(announced), max_bytes=1000)


@pytest.mark.parametrize(
    "blob",
    [
        b"",
        b"\x28\xb5\x2f\xfd",
        pack(tensors()),
        Codec("zstd").encode(tensors())[:-1],
        Codec("zstd").encode(tensors()) + b"x",
        Codec("zstd").encode(tensors()) * 2,
        b"\x50\x2a\x4d\x18\x04\0\0\0abcd",
        zstandard.ZstdCompressor().compress(b"no safetensors"),
        zstandard.ZstdCompressor().compress(b""),
    ],
)
def test_what_is_not_one_whole_frame_of_a_payload_is_refused(blob):
    with pytest.raises(ValueError):
        decode("a.safetensors.zst", blob, max_bytes=10_000)


@given(st.data())
def test_a_compressed_payload_with_changed_bytes_is_refused_or_of_the_size_due(data):
    blob = bytearray(Codec("zstd").encode(tensors()))
    for _ in range(data.draw(st.integers(1, 3))):
        blob[data.draw(st.integers(0, len(blob) - 1))] = data.draw(st.integers(0, 255))
    try:
        found = decode("a.safetensors.zst", bytes(blob), max_bytes=10_000)
    except ValueError:
        return
    assert len(pack(found)) <= 10_000


def test_a_bound_that_is_no_size_is_refused():
    with pytest.raises(ValueError, match="max_bytes=-1"):
        decode("a.safetensors", b"", max_bytes=-1)
    with pytest.raises(TypeError, match=r"max_bytes=1\.0"):
        decode("a.safetensors", b"", max_bytes=1.0)
