from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mixle.data.stream_token_source import stream_token_source
from mixle.data.token_file import TokenFile


@given(
    length=st.integers(2, 60),
    block=st.integers(1, 12),
    batch_size=st.integers(1, 9),
    epochs=st.integers(0, 3),
    shuffle=st.booleans(),
    seed=st.integers(0, 99),
)
@settings(max_examples=200, deadline=None)
def test_every_window_comes_once_per_epoch_with_the_token_after_it(length, block, batch_size, epochs, shuffle, seed):
    block = min(block, length - 1)
    tokens = np.arange(1000, 1000 + length)
    seen = []
    for inputs, targets in stream_token_source(tokens, block, batch_size, epochs=epochs, shuffle=shuffle, seed=seed):
        assert inputs.dtype == targets.dtype == np.int64
        assert inputs.shape == (len(targets), block)
        assert 1 <= len(targets) <= batch_size
        np.testing.assert_array_equal(inputs, targets[:, None] - np.arange(block, 0, -1))
        seen += targets.tolist()
    per_epoch = length - block
    assert len(seen) == per_epoch * epochs
    for epoch in range(epochs):
        mine = seen[epoch * per_epoch : (epoch + 1) * per_epoch]
        assert sorted(mine) == list(range(1000 + block, 1000 + length))
        assert shuffle or mine == sorted(mine)


def drawn(**options):
    return [int(target) for _, targets in stream_token_source(np.arange(200), 3, 16, **options) for target in targets]


def test_a_seed_fixes_the_order_and_epochs_differ():
    twice = drawn(epochs=2, seed=5)
    assert twice == drawn(epochs=2, seed=5)
    assert twice != drawn(epochs=2, seed=6)
    assert twice[:197] != twice[197:]


def test_token_files_are_read_like_arrays(tmp_path):
    tokens = TokenFile.write(tmp_path / "shards", np.arange(100), shard_tokens=9)
    from_file = list(stream_token_source(tokens, 4, 8, seed=1))
    from_array = list(stream_token_source(np.arange(100), 4, 8, seed=1))
    for (inputs, targets), (expected_inputs, expected_targets) in zip(from_file, from_array, strict=True):
        np.testing.assert_array_equal(inputs, expected_inputs)
        np.testing.assert_array_equal(targets, expected_targets)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (([], 4, 2), ValueError, "token_ids is empty: 0 tokens, and block=4 needs 5"),
        ((np.arange(4), 4, 2), ValueError, "4 tokens are too short for one window: block=4 .* needs 5"),
        ((np.zeros((4, 4), int), 4, 2), ValueError, r"token_ids must be 1-D, not of shape \(4, 4\)"),
        ((np.array([1, 2, -3, 4]), 2, 2), ValueError, r"token_ids\[2\]=-3 is not"),
        ((np.array([1.0, 2.5, 3.0, 4.0]), 2, 2), ValueError, r"token_ids\[1\]=2\.5 is not"),
        (("tokens", 4, 2), TypeError, "token_ids must be a 1-D array of integers, not str"),
        ((np.arange(9), True, 2), TypeError, "block=True must be an integer"),
        ((np.arange(9), 0, 2), ValueError, "block=0 must be at least 1"),
        ((np.arange(9), 4, 2.0), TypeError, r"batch_size=2\.0 must be an integer"),
        ((np.arange(9), 4, -1), ValueError, "batch_size=-1 must be at least 1"),
    ],
)
def test_bad_arguments_are_refused_at_the_call(arguments, error, message):
    with pytest.raises(error, match=message):
        stream_token_source(*arguments)


@pytest.mark.parametrize(
    ("option", "error"), [({"epochs": 1.0}, TypeError), ({"epochs": -1}, ValueError), ({"shuffle": 1}, TypeError)]
)
def test_bad_options_are_refused_at_the_call_by_name(option, error):
    (name,) = option
    with pytest.raises(error, match=f"{name}="):
        stream_token_source(np.arange(9), 4, 2, **option)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads anonymous memory from /proc")
@pytest.mark.parametrize("shuffle", [True, False])
def test_a_memmap_of_48_megabytes_stays_on_the_disk(tmp_path, shuffle):
    np.random.default_rng(0).integers(0, 256, 48_000_000, dtype=np.uint8).tofile(tmp_path / "tokens.bin")
    program = (
        "import sys, numpy as np\n"
        "from mixle.data.stream_token_source import stream_token_source\n"
        "def anonymous():\n"
        "    lines = open('/proc/self/status').read().splitlines()\n"
        "    return next(int(line.split()[1]) for line in lines if line.startswith('RssAnon'))\n"
        "before = anonymous()\n"
        "tokens = np.memmap(sys.argv[1], dtype=np.uint8, mode='r')\n"
        "batches = stream_token_source(tokens, 128, 64, shuffle=sys.argv[2] == 'True')\n"
        "for _, batch in zip(range(500), batches):\n"
        "    pass\n"
        "print(anonymous() - before)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, tmp_path / "tokens.bin", str(shuffle)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert int(done.stdout) < 20_000
