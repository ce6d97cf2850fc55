from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mixle.diloco.partition import ByBytes, Strided

names = st.text(alphabet="abc.012", min_size=1, max_size=8)
models = st.dictionaries(names, st.integers(0, 1000), min_size=1, max_size=20)


@given(models, st.data())
def test_by_bytes_puts_every_tensor_into_exactly_one_of_fragments_that_all_hold_some(sizes, data):
    fragments = ByBytes().split(sizes, data.draw(st.integers(1, len(sizes))))
    assert sorted(name for fragment in fragments for name in fragment) == sorted(sizes)
    assert all(fragments)
    assert all(list(fragment) == sorted(fragment) for fragment in fragments)


@given(models, st.data())
def test_strided_partitions_the_model_or_says_that_it_cannot(sizes, data):
    count = data.draw(st.integers(1, len(sizes)))
    try:
        fragments = Strided().split(sizes, count)
    except ValueError as error:
        assert f"fragments={count}" in str(error)
        return
    assert sorted(name for fragment in fragments for name in fragment) == sorted(sizes)
    assert len(fragments) == count
    assert all(fragments)


@given(models, st.data())
def test_the_order_of_the_tensors_does_not_matter(sizes, data):
    count = data.draw(st.integers(1, len(sizes)))
    shuffled = dict(data.draw(st.permutations(list(sizes.items()))))
    assert ByBytes().split(shuffled, count) == ByBytes().split(sizes, count)


def test_by_bytes_puts_the_largest_first_into_the_lightest():
    sizes = {"a": 7, "b": 6, "c": 5, "d": 4, "e": 2}
    assert ByBytes().split(sizes, 2) == (("a", "d", "e"), ("b", "c"))


def test_by_bytes_breaks_ties_of_size_by_name_and_ties_of_load_by_number():
    assert ByBytes().split({"z": 1, "x": 1, "y": 1}, 2) == (("x", "z"), ("y",))


@given(st.lists(st.integers(1, 1000), min_size=2, max_size=30), st.data())
def test_by_bytes_leaves_no_fragment_heavier_than_the_lightest_by_more_than_a_tensor(values, data):
    sizes = {f"t{index}": value for index, value in enumerate(values)}
    fragments = ByBytes().split(sizes, data.draw(st.integers(1, len(sizes))))
    loads = [sum(sizes[name] for name in fragment) for fragment in fragments]
    for load, fragment in zip(loads, fragments, strict=True):
        assert load - min(sizes[name] for name in fragment) <= min(loads)


def test_strided_deals_blocks_round_in_the_order_of_their_numbers():
    sizes = {f"blocks.{block}.{part}": 10 for block in range(11) for part in ("w", "b")} | {"embed": 7, "head": 3}
    fragments = Strided().split(sizes, 3)
    blocks = [sorted({int(name.split(".")[1]) for name in fragment if "." in name}) for fragment in fragments]
    assert blocks == [[0, 3, 6, 9], [1, 4, 7, 10], [2, 5, 8]]
    assert {"embed", "head"} <= set(fragments[2])


def test_a_block_is_never_cut():
    sizes = {"blocks.0.w": 1000, "blocks.0.b": 1, "blocks.1.w": 1000, "blocks.1.b": 1}
    assert Strided().split(sizes, 2) == (("blocks.0.b", "blocks.0.w"), ("blocks.1.b", "blocks.1.w"))


@pytest.mark.parametrize("partition", [ByBytes(), Strided()])
def test_more_fragments_than_tensors_are_refused_with_both_numbers(partition):
    with pytest.raises(ValueError, match="fragments=3 must be at most 2, the model's trainable tensors"):
        partition.split({"a": 1, "b": 1}, 3)


def test_strided_says_how_many_fragments_its_blocks_fill():
    sizes = {f"blocks.{block}.{part}": 1 for block in range(2) for part in ("w", "b")}
    with pytest.raises(ValueError, match=r"fragments=4 is too many for Strided\(\).* 2 blocks .*at most 2, or ByBytes"):
        Strided().split(sizes, 4)


@pytest.mark.parametrize(
    ("sizes", "fragments", "error", "message"),
    [
        ({"a": -1}, 1, ValueError, r"sizes\['a'\]=-1"),
        ({"a": 1.0}, 1, TypeError, r"sizes\['a'\]=1.0"),
        ({3: 1}, 1, TypeError, "sizes holds 3"),
        ({"a": 1}, 0, ValueError, "fragments=0"),
        ({"a": 1}, True, TypeError, "fragments=True"),
    ],
)
def test_what_is_no_model_is_refused_by_name(sizes, fragments, error, message):
    with pytest.raises(error, match=message):
        ByBytes().split(sizes, fragments)
