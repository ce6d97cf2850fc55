from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mixle.data.window_spec import Shard, WindowSpec, shard_tokens


def windows_of(length: int, block: int, targets: str, stride: int | None) -> list[list[int]]:
    """List the targets of every window of ``length`` tokens, one token at a time."""
    windows = []
    for start in range(0, length, 1 if targets == "last" else stride or block):
        if targets == "last":
            trained = [start + block] if start + block < length else []
        else:
            trained = [start + i + 1 for i in range(block) if start + i + 1 < length]
        if trained:
            windows.append(trained)
    return windows


geometries = st.one_of(
    st.tuples(st.integers(1, 12), st.just("last"), st.none() | st.just(1)),
    st.integers(1, 12).flatmap(
        lambda block: st.tuples(st.just(block), st.just("all"), st.none() | st.integers(block, block + 9))
    ),
)


@given(geometry=geometries, length=st.integers(0, 120))
@settings(max_examples=500, deadline=None)
def test_counts_are_those_of_windows_listed_one_by_one(geometry, length):
    spec = WindowSpec(*geometry)
    windows = windows_of(length, *geometry)
    assert spec.window_count(length) == len(windows)
    assert spec.target_count(length) == sum(map(len, windows))
    assert spec.targets_in_windows(np.arange(len(windows)), length).tolist() == [len(window) for window in windows]
    assert (spec.window_count(length) > 0) == (length >= spec.shortest)


@given(
    geometry=geometries,
    length=st.integers(0, 120),
    replicas=st.integers(1, 7),
    boundary=st.sampled_from(["exclude", "overlap"]),
)
@settings(max_examples=500, deadline=None)
def test_shards_have_the_targets_that_their_boundary_rule_gives_them(geometry, length, replicas, boundary):
    spec = WindowSpec(*geometry)
    block, _, stride = geometry
    whole = windows_of(length, *geometry)
    units = whole if (stride or 0) > block else [[target] for window in whole for target in window]
    for replica in range(replicas):
        shard = shard_tokens(length, replicas, replica, spec, boundary=boundary)
        trained = [shard.start + target for window in windows_of(len(shard), *geometry) for target in window]
        low, high = replica * length // replicas, (replica + 1) * length // replicas
        if boundary == "exclude":
            assert (shard.start, shard.stop) == (low, high)
        else:
            mine = units[replica * len(units) // replicas : (replica + 1) * len(units) // replicas]
            assert trained == [target for unit in mine for target in unit]
        assert 0 <= shard.start <= shard.stop <= length


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"block": 0}, ValueError, "block=0 must be at least 1"),
        ({"block": 8.0}, TypeError, r"block=8\.0 must be an integer"),
        ({"block": True}, TypeError, "block=True must be an integer"),
        ({"block": 8, "targets": "al"}, ValueError, "targets='al' must be one of 'last', 'all'; did you mean 'all'"),
        ({"block": 8, "targets": "all", "stride": 7}, ValueError, "stride=7 must be at least block=8"),
        ({"block": 8, "targets": "all", "stride": 0}, ValueError, "stride=0 must be at least 1"),
        ({"block": 8, "targets": "all", "stride": "8"}, TypeError, "stride='8' must be an integer"),
        ({"block": 8, "targets": "last", "stride": 8}, ValueError, 'stride=8 needs targets="all"'),
    ],
)
def test_geometries_that_make_no_sense_are_refused_with_their_numbers(arguments, error, message):
    with pytest.raises(error, match=message):
        WindowSpec(**arguments)


def test_the_usual_stride_is_the_same_geometry_as_the_one_left_out():
    assert WindowSpec(8, "all") == WindowSpec(8, "all", 8)
    assert WindowSpec(8) == WindowSpec(8, "last", 1)
    assert WindowSpec(8, "all").targets_per_window == 8
    assert WindowSpec(8).targets_per_window == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((-1, 2, 0), "n_tokens=-1"),
        ((10, 0, 0), "replicas=0"),
        ((10, 2, 2), "replica=2 must be at most 1"),
        ((10, 2, -1), "replica=-1 must be at least 0"),
    ],
)
def test_shards_of_impossible_replicas_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        shard_tokens(*arguments, WindowSpec(4))


def test_an_unknown_boundary_is_refused():
    with pytest.raises(ValueError, match="boundary='include' must be one of 'exclude', 'overlap'"):
        shard_tokens(10, 2, 0, WindowSpec(4), boundary="include")


def test_a_shard_does_not_end_before_it_starts():
    with pytest.raises(ValueError, match="stop=3 must be at least 4"):
        Shard(4, 3)
