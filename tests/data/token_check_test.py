from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mixle.data.token_check import BadToken, find_bad_token
from mixle.data.token_file import TokenFile


@given(
    ids=st.lists(st.integers(-2, 12), min_size=1, max_size=40),
    vocab=st.none() | st.integers(1, 12),
    bounds=st.tuples(st.integers(0, 40), st.integers(0, 40)),
    chunk=st.integers(1, 7),
)
@settings(max_examples=300, deadline=None)
def test_the_first_bad_id_is_found_whatever_the_chunks(ids, vocab, bounds, chunk):
    start, stop = bounds[0], min(bounds[1], len(ids))
    bad = [(at, ids[at]) for at in range(start, stop) if ids[at] < 0 or (vocab is not None and ids[at] >= vocab)]
    expected = BadToken(*bad[0]) if bad else None
    assert find_bad_token(np.array(ids, dtype=np.int16), start, stop, vocab, chunk=chunk) == expected
    assert find_bad_token(np.array(ids, dtype=np.float64), start, stop, vocab, chunk=chunk) == expected


@pytest.mark.parametrize("bad", [0.5, float("inf"), float("-inf"), -1.0, 7.0])
def test_floats_must_be_whole_and_finite(bad):
    assert find_bad_token(np.array([0.0, 6.0, bad, bad]), 0, 4, 7) == (2, bad)


def test_a_nan_is_bad_wherever_it_stands_in_the_chunk():
    for place in range(3):
        ids = np.array([1.0, 2.0, 3.0])
        ids[place] = np.nan
        found = find_bad_token(ids, 0, 3, 7)
        assert found is not None
        assert found.position == place
        assert np.isnan(found.value)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.uint32, np.uint64, np.int64])
def test_an_id_as_large_as_the_vocabulary_is_bad_in_every_dtype(dtype):
    ids = np.array([3, 99, 100, 4], dtype=dtype)
    assert find_bad_token(ids, 0, 4, 101) is None
    assert find_bad_token(ids, 0, 4, 100) == (2, 100)


def test_ids_beyond_float_precision_are_compared_exactly():
    vocab = 2**53 + 1
    assert find_bad_token(np.array([2**53], dtype=np.uint64), 0, 1, vocab) is None
    assert find_bad_token(np.array([2**53 + 1], dtype=np.uint64), 0, 1, vocab) == (0, vocab)


def test_a_dtype_without_bad_values_is_not_read():
    class Unreadable(np.ndarray):
        def __getitem__(self, item):
            raise AssertionError("read")

    ids = np.zeros(10, dtype=np.uint8).view(Unreadable)
    assert find_bad_token(ids, 0, 10, 256) is None
    assert find_bad_token(ids, 0, 10, None) is None
    with pytest.raises(AssertionError, match="read"):
        find_bad_token(ids, 0, 10, 255)


def test_token_files_are_checked_like_arrays(tmp_path):
    tokens = TokenFile.write(tmp_path / "shards", np.arange(50), shard_tokens=7)
    assert find_bad_token(tokens, 0, 50, 50) is None
    assert find_bad_token(tokens, 3, 50, 40) == (40, 40)
