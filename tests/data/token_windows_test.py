from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mixle.data.token_file import TokenFile
from mixle.data.token_windows import gather, pad_batch, validate_token_array
from mixle.data.window_spec import Shard, WindowSpec

TOKENS = np.arange(100, 160)


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """The same tokens as every kind of array that training takes."""
    folder = tmp_path_factory.mktemp("tokens")
    TOKENS.astype(np.uint8).tofile(folder / "tokens.raw")
    return {
        "array": TOKENS,
        "uint8": TOKENS.astype(np.uint8),
        "float": TOKENS.astype(np.float32),
        "strided": np.repeat(TOKENS, 2)[::2],
        "memmap": np.memmap(folder / "tokens.raw", dtype=np.uint8, mode="r"),
        "shards": TokenFile.write(folder / "shards", TOKENS, shard_tokens=11),
        "one shard": TokenFile.write(folder / "tokens.bin", TOKENS),
    }


@given(
    kind=st.sampled_from(["array", "uint8", "float", "strided", "memmap", "shards", "one shard"]),
    block=st.integers(1, 12),
    targets=st.sampled_from(["last", "all"]),
    extra=st.integers(0, 5),
    edges=st.tuples(st.integers(0, 60), st.integers(0, 60)).map(sorted),
    data=st.data(),
)
@settings(max_examples=400, deadline=None)
def test_windows_are_cut_out_of_the_shard_whatever_holds_the_tokens(sources, kind, block, targets, extra, edges, data):
    spec = WindowSpec(block, targets, block + extra if targets == "all" else None)
    shard = Shard(*edges)
    mine = TOKENS[shard.start : shard.stop].tolist()
    count = spec.window_count(len(shard))
    indices = data.draw(st.lists(st.integers(0, count - 1), max_size=8)) if count else []
    batch = gather(sources[kind], shard, spec, np.array(indices, dtype=np.int64))
    assert [part.dtype for part in batch] == [np.int64, np.int64, np.bool_]
    assert batch.inputs.shape == (len(indices), block)
    assert batch.targets.shape == batch.mask.shape == (len(indices), spec.targets_per_window)
    for row, index in enumerate(indices):
        start = index * spec.hop
        if targets == "last":
            assert batch.inputs[row].tolist() == mine[start : start + block]
            assert batch.targets[row].tolist() == [mine[start + block]]
            assert batch.mask[row].tolist() == [True]
        else:
            trained = mine[start + 1 : start + block + 1]
            rest = block - len(trained)
            assert batch.inputs[row].tolist() == mine[start : start + len(trained)] + [0] * rest
            assert batch.targets[row].tolist() == trained + [0] * rest
            assert batch.mask[row].tolist() == [True] * len(trained) + [False] * rest


def test_ids_that_floats_of_32_bits_cannot_hold_arrive_exact():
    tokens = np.array([16_777_216, 16_777_217, 16_777_218], dtype=np.uint32)
    batch = gather(tokens, Shard(0, 3), WindowSpec(2), np.array([0]))
    assert batch.inputs.tolist() == [[16_777_216, 16_777_217]]
    assert batch.targets.tolist() == [[16_777_218]]


@pytest.mark.parametrize("index", [-1, 8])
def test_a_window_that_the_shard_has_not_is_refused(index):
    with pytest.raises(IndexError, match=r"window indices must be in \[0, 8\)"):
        gather(TOKENS, Shard(10, 22), WindowSpec(4), np.array([0, index]))


def test_padding_adds_masked_rows_of_zeros():
    batch = pad_batch(gather(TOKENS, Shard(0, 60), WindowSpec(3, "all"), np.array([0, 1])), 4)
    assert batch.inputs.tolist() == [[100, 101, 102], [103, 104, 105], [0, 0, 0], [0, 0, 0]]
    assert batch.targets.tolist() == [[101, 102, 103], [104, 105, 106], [0, 0, 0], [0, 0, 0]]
    assert batch.mask.tolist() == [[True] * 3, [True] * 3, [False] * 3, [False] * 3]
    assert [part.dtype for part in batch] == [np.int64, np.int64, np.bool_]


def test_a_batch_without_rows_is_padded_to_one_that_trains_nothing():
    batch = pad_batch(gather(TOKENS, Shard(0, 60), WindowSpec(3), np.array([], dtype=np.int64)), 2)
    assert batch.inputs.shape == (2, 3)
    assert not batch.mask.any()


def test_a_full_batch_is_padded_with_nothing_and_a_larger_one_refused():
    batch = gather(TOKENS, Shard(0, 60), WindowSpec(3), np.array([0, 1]))
    assert pad_batch(batch, 2) is batch
    with pytest.raises(ValueError, match="batch_size=1 is less than the 2 rows"):
        pad_batch(batch, 1)


def test_arrays_memmaps_and_token_files_are_taken_without_a_copy(sources):
    for kind in ("array", "uint8", "strided", "memmap"):
        assert np.shares_memory(validate_token_array(sources[kind]), sources[kind])
    assert validate_token_array(sources["shards"]) is sources["shards"]


def test_lists_and_tensors_are_taken_too():
    torch = pytest.importorskip("torch")
    tensor = torch.arange(5)
    taken = validate_token_array(tensor)
    tensor[0] = 9
    assert taken.tolist() == [9, 1, 2, 3, 4]
    assert validate_token_array([1, 2]).tolist() == [1, 2]


@pytest.mark.parametrize(
    ("ids", "error", "message"),
    [
        (np.zeros((3, 2), np.int64), ValueError, r"ids must be 1-D, not of shape \(3, 2\)"),
        (np.array(3), ValueError, r"ids must be 1-D, not of shape \(\)"),
        (np.array([True, False]), TypeError, "ids must be a 1-D array of integers, not of dtype bool"),
        (np.array(["a"]), TypeError, "not of dtype <U1"),
        (np.array([1, None]), TypeError, "not of dtype object"),
        (np.array([1j]), TypeError, "not of dtype complex128"),
        (np.ma.array([1, 2], mask=[True, False]), TypeError, r"ids is a masked array, .* give ids\.compressed\(\)"),
        ("text", TypeError, r"not str; for the bytes of a text: numpy\.frombuffer"),
        (b"text", TypeError, "not bytes"),
        (None, TypeError, "not of dtype object"),
        ({1, 2}, TypeError, "not of dtype object"),
    ],
)
def test_what_is_no_array_of_tokens_is_refused_by_name(ids, error, message):
    with pytest.raises(error, match=message):
        validate_token_array(ids, "ids")
