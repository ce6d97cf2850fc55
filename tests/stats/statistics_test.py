"""Statistics as trees and as flat vectors."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest

from mixle.stats.frames import Centre, IntegerRange, Vocabulary
from mixle.stats.statistics import LeafStatistic, add_leaf_statistics, frames_of, layout, pack, reframe, unpack


class Pair(NamedTuple):
    left: object
    right: object


def tree(scale=1.0, frame=None):
    frame = Vocabulary("ab") if frame is None else frame
    leaf = LeafStatistic(frame, (scale * np.arange(1.0, 1.0 + len(frame)),))
    return Pair((leaf, 2.5 * scale), {"x": [np.full((2, 2), scale), "text", 7], "y": None})


def test_packing_takes_the_floats_in_order_and_unpacking_restores_the_tree():
    vector = pack(tree())
    assert vector.tolist() == [1.0, 2.0, 2.5, 1.0, 1.0, 1.0, 1.0]
    again = unpack(3 * vector, tree())
    assert layout(again) == layout(tree())
    assert isinstance(again, Pair)
    assert again.left[1] == 7.5
    assert again.right["x"][1:] == ["text", 7]
    np.testing.assert_array_equal(pack(again), pack(tree(3.0)))


def test_sums_without_axes_stay_arrays():
    leaf = LeafStatistic(None, (np.asarray(2.0), np.asarray(3.0)))
    assert all(isinstance(s, np.ndarray) for s in unpack(np.array([5.0, 6.0]), leaf).sums)


def test_a_vector_of_another_length_is_refused():
    with pytest.raises(ValueError, match="a vector of 8 sums does not fit a statistic of 7"):
        unpack(np.zeros(8), tree())


def test_nothing_packs_to_nothing():
    assert pack(()).shape == (0,)
    assert unpack(np.zeros(0), ()) == ()


def test_the_layout_tells_everything_but_the_values_of_sums():
    same = {layout(tree(s)) for s in (1.0, 2.0, -3.0)}
    assert len(same) == 1
    others = [
        tree(frame=Vocabulary("ac")),
        tree(frame=IntegerRange(0, 1)),
        Pair(tree().left, {"x": [np.ones((2, 2)), "text", 8], "y": None}),
        Pair(tree().left, {"x": [np.ones((4, 1)), "text", 7], "y": None}),
        Pair(tree().left, {"x": [np.ones((2, 2)), "text", 7], "z": None}),
        Pair([*tree().left], tree().right),
        Pair(tree().left, {"x": [np.ones((2, 2)), "text", 7], "y": np.arange(3)}),
        Pair(tree().left, {"x": [np.ones((2, 2)), "text", 7], "y": np.arange(1, 4)}),
    ]
    assert len({layout(t) for t in others} | same) == len(others) + 1


def test_statistics_add_in_the_join_of_their_frames():
    a = LeafStatistic(Vocabulary("ab"), (np.array([1.0, 2.0]),))
    b = LeafStatistic(Vocabulary("bc"), (np.array([10.0, 20.0]),))
    total = add_leaf_statistics(a, b)
    assert total.frame.categories == ("a", "b", "c")
    assert total.sums[0].tolist() == [1.0, 12.0, 20.0]
    nothing = LeafStatistic(None, ())
    assert add_leaf_statistics(a, nothing) is a
    assert add_leaf_statistics(nothing, a) is a
    unframed = LeafStatistic(None, (np.zeros(0),))
    assert add_leaf_statistics(unframed, a).sums[0].tolist() == [1.0, 2.0]


def test_the_frames_of_a_tree_are_listed_and_replaced_in_order():
    wide = Vocabulary("abc")
    assert frames_of(tree()) == [Vocabulary("ab")]
    moved = reframe(tree(), [wide])
    assert frames_of(moved) == [wide]
    assert moved.left[0].sums[0].tolist() == [1.0, 2.0, 0.0]
    assert moved.right["x"][0].tolist() == [[1.0, 1.0], [1.0, 1.0]]


def test_moments_of_sums_are_means_and_variances():
    x = np.array([[1.0, 2.0, 6.0], [0.0, 0.0, 3.0]])
    frame = Centre(np.array([1.0, -1.0]), 3, x.mean(axis=1), np.zeros(2))
    gap = x - frame.point[:, None]
    for s2 in (gap @ gap.T, np.square(gap).sum(axis=1)):
        mean, variance = frame.moments((np.asarray(3.0), gap.sum(axis=1), s2))
        np.testing.assert_allclose(mean, x.mean(axis=1))
        np.testing.assert_allclose(variance, x.var(axis=1))
    mean, variance = frame.moments((np.asarray(3.0), gap.sum(axis=1)))
    np.testing.assert_allclose(mean, x.mean(axis=1))
    assert variance.tolist() == [0.0, 0.0]
