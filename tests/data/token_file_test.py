from __future__ import annotations

import os
import pickle
import stat
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mixle.data.token_file import TokenFile

TOKENS = np.arange(1000, dtype=np.uint16) * 7 % 251


def header(magic=b"MIXLETOK", version=1, code=2, number=0, shards=0, count=0):
    """The header as the module's docstring lays it out, written out again byte by byte."""
    return (
        magic
        + version.to_bytes(2, "little")
        + code.to_bytes(2, "little")
        + number.to_bytes(2, "little")
        + shards.to_bytes(2, "little")
        + count.to_bytes(8, "little")
    )


# ---- the format


def test_a_file_is_the_documented_header_and_little_endian_tokens(tmp_path):
    TokenFile.write(tmp_path / "a.bin", np.array([1, 258, 65535]))
    expected = header(code=2, count=3) + bytes([1, 0, 2, 1, 255, 255])
    assert (tmp_path / "a.bin").read_bytes() == expected


def test_wider_ids_take_four_bytes_each(tmp_path):
    TokenFile.write(tmp_path / "a.bin", np.array([16_777_217]))
    assert (tmp_path / "a.bin").read_bytes() == header(code=4, count=1) + bytes([1, 0, 0, 1])


def test_a_file_written_by_hand_is_read(tmp_path):
    (tmp_path / "a.bin").write_bytes(
        header(code=4, count=2) + (70_000).to_bytes(4, "little") + (3).to_bytes(4, "little")
    )
    tokens = TokenFile(tmp_path / "a.bin")
    assert tokens.dtype == np.uint32
    assert tokens[:].tolist() == [70_000, 3]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "has 0 bytes, fewer than the 24"),
        (header()[:20], "has 20 bytes, fewer than the 24"),
        (header(magic=b"SOMETHIN", count=1) + bytes(2), r"TokenFile\.raw"),
        (header(version=2, count=1) + bytes(2), "version 2 of the format; this reads version 1"),
        (header(code=8, count=1) + bytes(8), "dtype code 8; known are 2, 4"),
        (header(number=9, count=1) + bytes(2), "has shard number 9 of 0"),
        (header(number=9, shards=9, count=1) + bytes(2), "has shard number 9 of 9"),
        (header(count=3) + bytes(5), "is truncated: 3 tokens of uint16 make 30 bytes, it has 29"),
        (header(count=3) + bytes(7), "is too long: 3 tokens of uint16 make 30 bytes, it has 31"),
        (header(count=2**63) + bytes(6), "is truncated: 9223372036854775808 tokens"),
        (header(count=0), "has no tokens"),
    ],
)
def test_a_file_that_is_no_whole_shard_is_refused_saying_why(tmp_path, content, message):
    path = tmp_path / "a.bin"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message) as refusal:
        TokenFile(path)
    assert str(path) in str(refusal.value)


def test_headerless_files_are_opened_with_their_dtype(tmp_path):
    TOKENS.tofile(tmp_path / "raw.bin")
    tokens = TokenFile.raw(tmp_path / "raw.bin", np.uint16)
    assert tokens.dtype == np.uint16
    np.testing.assert_array_equal(tokens[:], TOKENS)


@pytest.mark.parametrize(
    ("size", "dtype", "error", "message"),
    [
        (7, "uint16", ValueError, "has 7 bytes, which is no multiple of the 2 of a uint16"),
        (0, "uint16", ValueError, "has no tokens"),
        (8, "float32", TypeError, "dtype='float32' must be an integer type"),
        (8, "tokens", TypeError, "dtype='tokens' is not a NumPy dtype"),
    ],
)
def test_headerless_files_that_cannot_be_tokens_are_refused(tmp_path, size, dtype, error, message):
    (tmp_path / "raw.bin").write_bytes(bytes(size))
    with pytest.raises(error, match=message):
        TokenFile.raw(tmp_path / "raw.bin", dtype)


# ---- what a path may be


def test_a_directory_a_pattern_and_a_list_name_the_same_shards(tmp_path):
    TokenFile.write(tmp_path / "shards", TOKENS, shard_tokens=300)
    names = sorted(os.listdir(tmp_path / "shards"))
    assert names == ["00000000.bin", "00000001.bin", "00000002.bin", "00000003.bin"]
    (tmp_path / "shards" / "README").write_text("no shard")
    for path in (tmp_path / "shards", f"{tmp_path}/shards/0*.bin", [tmp_path / "shards" / name for name in names]):
        np.testing.assert_array_equal(TokenFile(path)[:], TOKENS)


def test_a_list_is_taken_in_its_own_order(tmp_path):
    TokenFile.write(tmp_path / "a.bin", [1, 2])
    TokenFile.write(tmp_path / "b.bin", [3])
    assert TokenFile([tmp_path / "b.bin", tmp_path / "a.bin"])[:].tolist() == [3, 1, 2]


def test_a_name_with_brackets_is_a_file_before_it_is_a_pattern(tmp_path):
    TokenFile.write(tmp_path / "a[0].bin", [5])
    assert TokenFile(tmp_path / "a[0].bin")[:].tolist() == [5]


@pytest.mark.parametrize("name", ["missing.bin", "missing*.bin", "."])
def test_a_path_without_shards_is_refused(tmp_path, name):
    with pytest.raises(FileNotFoundError):
        TokenFile(tmp_path / name)


def test_no_paths_at_all_are_refused():
    with pytest.raises(FileNotFoundError, match=r"path=\[\] names no token files"):
        TokenFile([])


def test_shards_of_different_dtypes_are_refused(tmp_path):
    TokenFile.write(tmp_path / "a.bin", [1], dtype=np.uint16)
    TokenFile.write(tmp_path / "b.bin", [1], dtype=np.uint32)
    with pytest.raises(ValueError, match=r"b\.bin holds uint32 and .*a\.bin uint16"):
        TokenFile(tmp_path)


# ---- a shard that is missing


def test_each_shard_says_which_it_is_and_of_how_many(tmp_path):
    TokenFile.write(tmp_path / "shards", [1, 2, 3], shard_tokens=2)
    first, second = sorted((tmp_path / "shards").iterdir())
    assert first.read_bytes() == header(number=0, shards=2, count=2) + bytes([1, 0, 2, 0])
    assert second.read_bytes() == header(number=1, shards=2, count=1) + bytes([3, 0])


@given(missing=st.sets(st.integers(0, 14), min_size=1, max_size=14), pattern=st.booleans())
@settings(max_examples=30, deadline=None)
def test_a_directory_or_pattern_that_lacks_shards_is_refused_by_the_first_missing(tmp_path_factory, missing, pattern):
    folder = tmp_path_factory.mktemp("gap") / "shards"
    TokenFile.write(folder, np.arange(100), shard_tokens=7)
    for number in missing:
        (folder / f"{number:08d}.bin").unlink()
    with pytest.raises(ValueError, match=rf"{min(missing):08d}\.bin, shard {min(missing)} of 0 to 14, is missing"):
        TokenFile(f"{folder}/*.bin" if pattern else folder)


def test_a_list_may_leave_shards_out_and_one_may_be_opened_alone(tmp_path):
    paths = TokenFile.write(tmp_path / "shards", np.arange(9), shard_tokens=3).paths
    assert TokenFile([paths[0], paths[2]])[:].tolist() == [0, 1, 2, 6, 7, 8]
    assert TokenFile(paths[1])[:].tolist() == [3, 4, 5]


def test_whole_sets_of_shards_and_files_that_stand_alone_may_lie_together(tmp_path):
    for name in "ab":
        TokenFile.write(tmp_path / name, np.arange(4), shard_tokens=2)
    TokenFile.write(tmp_path / "a" / "more.bin", [9])
    assert TokenFile(f"{tmp_path}/*/*.bin")[:].tolist() == [0, 1, 2, 3, 9, 0, 1, 2, 3]


def test_a_shard_of_another_set_does_not_stand_in_for_a_missing_one(tmp_path):
    for name, shard_tokens in (("a", 2), ("b", 3)):
        TokenFile.write(tmp_path / name, np.arange(6), shard_tokens=shard_tokens)
    os.replace(tmp_path / "b" / "00000001.bin", tmp_path / "a" / "00000001.bin")
    with pytest.raises(ValueError, match=r"shard 1 of 0 to 2, is missing"):
        TokenFile(tmp_path / "a")


def test_more_shards_than_can_be_numbered_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("mixle.data.token_file._MOST_SHARDS", 3)
    assert len(TokenFile.write(tmp_path / "three", np.arange(3), shard_tokens=1)) == 3
    with pytest.raises(ValueError, match="shard_tokens=1 makes more than 3 shards; give a larger one"):
        TokenFile.write(tmp_path / "four", np.arange(4), shard_tokens=1)
    assert os.listdir(tmp_path) == ["three"]


# ---- one array out of many shards


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    return TokenFile.write(tmp_path_factory.mktemp("tokens") / "shards", TOKENS, shard_tokens=130)


def test_shards_act_as_one_array(sharded):
    assert len(sharded) == 1000
    assert sharded.shape == (1000,)
    assert sharded.ndim == 1
    assert "1000 tokens, uint16" in repr(sharded)


@given(bounds=st.tuples(*[st.none() | st.integers(-1100, 1100)] * 2))
@settings(max_examples=200, deadline=None)
def test_slices_are_those_of_the_array(sharded, bounds):
    np.testing.assert_array_equal(sharded[slice(*bounds)], TOKENS[slice(*bounds)])


@given(starts=st.lists(st.integers(0, 1000 - 140), max_size=12), width=st.integers(1, 140))
@settings(max_examples=200, deadline=None)
def test_windows_are_slices_of_the_array_whatever_shards_they_cross(sharded, starts, width):
    windows = sharded.windows(np.array(starts, dtype=np.int64), width)
    assert windows.shape == (len(starts), width)
    assert windows.dtype == np.uint16
    for start, window in zip(starts, windows, strict=True):
        np.testing.assert_array_equal(window, TOKENS[start : start + width])


def test_a_slice_within_a_shard_is_a_read_only_view(sharded):
    view = sharded[10:20]
    assert view.base is not None
    with pytest.raises(ValueError, match="read-only"):
        view[0] = 1


@pytest.mark.parametrize("bounds", [(-1, 5), (5, 1001), (6, 5)])
def test_a_range_outside_the_array_is_refused(sharded, bounds):
    with pytest.raises(IndexError, match=r"are not within \[0, 1000\)"):
        sharded.slice(*bounds)


@pytest.mark.parametrize("starts", [[-1], [0, 991]])
def test_windows_outside_the_array_are_refused(sharded, starts):
    with pytest.raises(IndexError, match=r"windows of 10 tokens .* are not within \[0, 1000\)"):
        sharded.windows(np.array(starts), 10)


def test_what_would_copy_or_crawl_through_the_whole_array_is_refused(sharded):
    with pytest.raises(TypeError, match="take a slice of it"):
        np.asarray(sharded)
    with pytest.raises(TypeError, match="takes slices, not int"):
        sharded[3]
    with pytest.raises(ValueError, match="step 1, not 2"):
        sharded[::2]


def test_pickling_carries_the_paths_and_not_the_tokens(sharded):
    carried = pickle.dumps(sharded)
    assert len(carried) < 1000
    np.testing.assert_array_equal(pickle.loads(carried)[:], TOKENS)


def test_pickling_a_headerless_file_keeps_its_dtype(tmp_path):
    TOKENS.tofile(tmp_path / "raw.bin")
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(TokenFile.raw(tmp_path / "raw.bin", "<u2")))[:], TOKENS)


# ---- writing


@given(
    pieces=st.lists(st.lists(st.integers(0, 70_000), max_size=20), max_size=6).filter(any),
    shard_tokens=st.none() | st.integers(1, 50),
)
@settings(max_examples=100, deadline=None)
def test_an_iterator_of_arrays_is_written_piece_by_piece(tmp_path_factory, pieces, shard_tokens):
    path = tmp_path_factory.mktemp("written") / "tokens"
    everything = [token for piece in pieces for token in piece]
    stream = (np.array(piece, dtype=np.int64) for piece in pieces)
    written = TokenFile.write(path, stream, shard_tokens=shard_tokens)
    assert written.dtype == np.uint32
    assert written[:].tolist() == everything
    sizes = [len(TokenFile(shard)) for shard in written.paths]
    assert sizes == [
        min(shard_tokens or 10**9, len(everything) - at) for at in range(0, len(everything), shard_tokens or 10**9)
    ]


@pytest.mark.parametrize(
    "tokens",
    [[3, 65_535], (3, 65_535), range(3, 9), np.array([3, 4], np.uint8), np.array([3.0, 65_535.0]), [np.uint16(3)]],
)
def test_ids_up_to_65535_are_written_as_uint16(tmp_path, tokens):
    written = TokenFile.write(tmp_path / "a.bin", tokens)
    assert written.dtype == np.uint16
    np.testing.assert_array_equal(written[:], np.asarray(tokens))


def test_larger_ids_are_written_as_uint32(tmp_path):
    assert TokenFile.write(tmp_path / "a.bin", [3, 65_536]).dtype == np.uint32


def test_a_token_file_is_rewritten_in_other_shards(tmp_path, sharded):
    again = TokenFile.write(tmp_path / "whole.bin", sharded)
    assert len(again.paths) == 1
    np.testing.assert_array_equal(again[:], TOKENS)


@pytest.mark.parametrize(
    ("tokens", "dtype", "error", "message"),
    [
        ([1, 70_000], "uint16", ValueError, r"tokens\[1\]=70000 is not an integer that fits uint16"),
        ([1, 2**32], None, ValueError, r"tokens\[1\]=4294967296 is not an integer that fits uint32"),
        ([1, -2], None, ValueError, r"tokens\[1\]=-2 is not"),
        (np.array([1.0, 2.5]), None, ValueError, r"tokens\[1\]=2.5 is not"),
        (np.array([1.0, np.nan]), None, ValueError, r"tokens\[1\]=nan is not"),
        (iter([np.array([1, 2]), np.array([3, -4])]), None, ValueError, r"tokens\[3\]=-4 is not"),
        (np.array([[1, 2]]), None, ValueError, r"not of shape \(1, 2\)"),
        (np.array([True]), None, TypeError, "must be integers, not bool"),
        (["a"], None, TypeError, "must be integers, not <U1"),
        (np.ma.array([1, 2], mask=[True, False]), None, TypeError, r"tokens is a masked array.*tokens\.compressed"),
        (np.ma.array([1, 2]), "uint16", TypeError, "tokens is a masked array"),
        (iter([np.array([1]), np.ma.array([1])]), None, TypeError, "tokens is a masked array"),
        ("abc", None, TypeError, "not str"),
        (7, None, TypeError, "not int"),
        ([], None, ValueError, "no tokens to write"),
        (iter([]), None, ValueError, "no tokens to write"),
        ([1], "int64", TypeError, "dtype='int64' must be uint16 or uint32"),
        ([1], "words", TypeError, "dtype='words' is not"),
    ],
)
def test_what_cannot_be_tokens_is_refused_and_nothing_is_left(tmp_path, tokens, dtype, error, message):
    TokenFile.write(tmp_path / "a.bin", [9])
    with pytest.raises(error, match=message):
        TokenFile.write(tmp_path / "a.bin", tokens, dtype=dtype)
    assert os.listdir(tmp_path) == ["a.bin"]
    assert TokenFile(tmp_path / "a.bin")[:].tolist() == [9]


def test_shards_are_not_written_over_what_exists(tmp_path):
    with pytest.raises(FileExistsError, match="exists"):
        TokenFile.write(tmp_path, TOKENS, shard_tokens=10)
    with pytest.raises(ValueError, match="shard_tokens=0 must be at least 1"):
        TokenFile.write(tmp_path / "new", TOKENS, shard_tokens=0)
    assert os.listdir(tmp_path) == []


def test_a_writer_that_dies_midway_leaves_the_old_shards_and_no_new_ones(tmp_path):
    def dying():
        yield TOKENS
        raise RuntimeError("the tokenizer died")

    for shard_tokens in (None, 10):
        with pytest.raises(RuntimeError, match="the tokenizer died"):
            TokenFile.write(tmp_path / "tokens", dying(), shard_tokens=shard_tokens)
        assert os.listdir(tmp_path) == []


def test_files_get_the_permissions_that_files_get(tmp_path):
    (tmp_path / "plain").write_bytes(b"")
    TokenFile.write(tmp_path / "a.bin", [1])
    assert stat.S_IMODE((tmp_path / "a.bin").stat().st_mode) == stat.S_IMODE((tmp_path / "plain").stat().st_mode)


# ---- size


def sparse(path, size, writes):
    with open(path, "wb") as file:
        file.truncate(size)
        for offset, content in writes:
            file.seek(offset)
            file.write(content)


def test_a_headerless_billion_and_one_tokens_are_read_where_they_are_asked_for(tmp_path):
    count = 10**9 + 1
    place = 2**29 + 12_345
    sparse(tmp_path / "a.bin", 2 * count, [(2 * (count - 2), b"\x07\x00\x08\x00"), (2 * place, b"\x01\x00\x02\x00")])
    tokens = TokenFile.raw(tmp_path / "a.bin", np.uint16)
    assert len(tokens) == count
    assert tokens[count - 3 :].tolist() == [0, 7, 8]
    assert tokens.windows(np.array([place, count - 4]), 4).tolist() == [[1, 2, 0, 0], [0, 0, 7, 8]]


def test_offsets_beyond_two_to_the_31_tokens_are_right_over_shards(tmp_path):
    half = 2**30 + 5
    for name, last in (("a.bin", b"\x07\x00\x00\x00"), ("b.bin", b"\x08\x00\x00\x00"), ("c.bin", b"\x09\x00\x00\x00")):
        sparse(tmp_path / name, 24 + 4 * half, [(0, header(code=4, count=half)), (24 + 4 * (half - 1), last)])
    tokens = TokenFile(tmp_path)
    assert len(tokens) == 3 * half > 2**31
    assert tokens.windows(np.array([2 * half - 1, 3 * half - 2, half - 2]), 2).tolist() == [[8, 0], [0, 9], [0, 7]]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits address space as Linux does")
def test_windows_of_a_large_file_are_gathered_in_little_memory(tmp_path):
    count = 10**8
    sparse(tmp_path / "a.bin", 2 * count, [])
    program = (
        "import sys, numpy as np\n"
        "from mixle.data.token_file import TokenFile\n"
        "def anonymous():\n"
        "    lines = open('/proc/self/status').read().splitlines()\n"
        "    return next(int(line.split()[1]) for line in lines if line.startswith('RssAnon'))\n"
        "before = anonymous()\n"
        "tokens = TokenFile.raw(sys.argv[1], np.uint16)\n"
        "for first in range(0, len(tokens) - 200_000, 200_000):\n"
        "    tokens.windows(np.arange(first, first + 200_000, 50_000), 129)\n"
        "print(anonymous() - before)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, tmp_path / "a.bin"], capture_output=True, text=True, timeout=60, check=True
    )
    assert int(done.stdout) < 20_000
