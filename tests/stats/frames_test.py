"""Frames: joining them, carrying sums over, and their JSON form."""

from __future__ import annotations

import functools
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mixle.stats.frames import (
    Centre,
    FrameMemo,
    IntegerRange,
    Vocabulary,
    frame_from_json,
    frame_to_json,
    join_frames,
)
from mixle.stats.transitions import TransitionFrame

ROWS = np.random.default_rng(0).normal(5.0, 3.0, (2, 30))
FRAMES = {
    "vocabulary": [Vocabulary(c) for c in (["a", None], [3, "a"], [("t", b"x"), True], [])],
    "integer range": [IntegerRange(a, b) for a, b in ((0, 3), (-5, -2), (7, 7), (1, 2))],
    "centre": [Centre.of(ROWS[:, a:b]) for a, b in ((0, 4), (4, 5), (5, 20), (20, 30))],
    "transitions": [
        TransitionFrame(Vocabulary("ab"), np.array([1, 2])),
        TransitionFrame(Vocabulary("bc"), np.array([0, 3])),
        TransitionFrame(Vocabulary([]), np.array([], dtype=np.int64)),
        TransitionFrame(Vocabulary([2, "a", "b"]), np.array([5])),
    ],
}
KINDS = pytest.mark.parametrize("frames", FRAMES.values(), ids=FRAMES)


def same(a, b):
    """Content is equal up to the rounding of joined moments."""
    if isinstance(a, Centre):
        assert a.point.tolist() == b.point.tolist()
        np.testing.assert_allclose([a.count, *a.mean, *a.m2], [b.count, *b.mean, *b.m2], rtol=1e-12)
    else:
        assert a == b
    return True


@KINDS
def test_joining_is_commutative_and_associative(frames):
    a, b, c, _ = frames
    assert same(join_frames(a, b), join_frames(b, a))
    assert same(join_frames(join_frames(a, b), c), join_frames(a, join_frames(b, c)))
    assert join_frames(a, a) is a


@KINDS
def test_json_keeps_a_frame_and_its_digest(frames):
    for frame in frames:
        again = frame_from_json(json.loads(json.dumps(frame_to_json(frame))))
        assert again == frame
        assert hash(again) == hash(frame)
        assert again.digest == frame.digest


@KINDS
def test_a_frame_is_equal_to_frames_of_the_same_content_only(frames):
    assert all((a == b) == (a is b) for a in frames for b in frames)
    assert frames[0] != "frame"


def test_no_frame_is_the_frame_of_no_data():
    frame = Vocabulary("a")
    assert join_frames(None, frame) is frame
    assert join_frames(frame, None) is frame
    assert join_frames(None, None) is None
    assert frame_from_json(frame_to_json(None)) is None


def test_frames_of_different_kinds_are_refused():
    with pytest.raises(ValueError, match="different kinds cannot be combined: Vocabulary and IntegerRange"):
        join_frames(Vocabulary("a"), IntegerRange(0, 1))


@pytest.mark.parametrize("plain", [3, ["Vocabulary"], ["Nothing", []], {"Vocabulary": []}])
def test_what_is_no_frame_is_refused(plain):
    with pytest.raises(ValueError, match="not an encoded frame"):
        frame_from_json(plain)


def test_a_vocabulary_is_ordered_and_without_duplicates():
    frame = Vocabulary(["b", None, 2, "b", 2.0, "a"])
    assert frame.categories == (None, 2, "a", "b")
    assert frame.index == {None: 0, 2: 1, "a": 2, "b": 3}
    assert frame.positions_in(frame).tolist() == [0, 1, 2, 3]
    assert frame.positions_in(Vocabulary(["a", "z"])).tolist() == [-1, -1, 0, -1]


def test_counts_move_to_their_categories():
    small = Vocabulary("ac")
    large = small.join(Vocabulary("bd"))
    assert small.rebase((np.array([1.0, 2.0]),), large)[0].tolist() == [1.0, 0.0, 2.0, 0.0]
    assert small.recode((np.array([1, 0, 1]),), large)[0].tolist() == [2, 0, 2]
    assert large.adopt((np.zeros(0),))[0].tolist() == [0.0] * 4
    low, wide = IntegerRange(2, 3), IntegerRange(0, 4)
    assert low.rebase((np.array([1.0, 2.0]),), wide)[0].tolist() == [0.0, 0.0, 1.0, 2.0, 0.0]
    assert wide.adopt((np.zeros(0),))[0].tolist() == [0.0] * 5


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.tuples(st.floats(-1e3, 1e3), st.floats(-1e3, 1e3), st.floats(0, 5)), min_size=1, max_size=12),
    st.lists(st.floats(-1e3, 1e3), min_size=4, max_size=4),
)
def test_moments_about_one_point_become_those_about_another(rows, points):
    x, w = np.array(rows).T[:2], np.array(rows).T[2]

    def sums(point, full):
        gap = x - point[:, None]
        return w.sum(), gap @ w, (gap * w) @ gap.T if full else np.square(gap) @ w

    one, other = (Centre(p, 1.0, p, np.zeros(2)) for p in (np.array(points[:2]), np.array(points[2:])))
    for full in (True, False):
        for moved, expected in zip(one.rebase(sums(one.point, full), other), sums(other.point, full), strict=True):
            np.testing.assert_allclose(moved, expected, rtol=1e-9, atol=1e-6)
    np.testing.assert_allclose(one.rebase(sums(one.point, False)[:2], other)[1], sums(other.point, False)[1], atol=1e-6)


def test_joined_moments_are_those_of_all_rows():
    joined = functools.reduce(join_frames, FRAMES["centre"])
    np.testing.assert_allclose(joined.mean, ROWS.mean(axis=1), rtol=1e-12)
    np.testing.assert_allclose(joined.variance, ROWS.var(axis=1), rtol=1e-12)
    assert joined.count == 30


def test_a_centre_stays_in_the_bulk_of_the_data():
    x = np.concatenate([np.random.default_rng(0).normal(3.0, 1.0, 5000), [1e12]])
    assert abs(Centre.of(x).point - 3.0) < 0.2
    shards = [Centre.of(part) for part in (x[:100], x[100:5000], x[5000:])]
    assert abs(functools.reduce(join_frames, shards).point - 3.0) < 0.2


def test_a_centre_of_no_rows_is_none_and_empty_shards_adopt_zeros():
    assert Centre.of(np.zeros((2, 0))) is None
    frame = Centre.of(ROWS)
    full = frame.adopt((np.zeros(()), np.zeros(0), np.zeros((0, 0))))
    assert [s.shape for s in full] == [(), (2,), (2, 2)]
    diagonal = frame.adopt((np.zeros(()), np.zeros(0), np.zeros(0)))
    assert [s.shape for s in diagonal] == [(), (2,), (2,)]
    assert frame.adopt_columns((np.zeros((0, 0)),))[0].shape == (2, 0)


def test_a_memo_holds_the_value_of_the_last_frame():
    calls = []
    memo, a, b = FrameMemo(), Vocabulary("a"), Vocabulary("b")
    for frame in (a, a, b, a):
        assert memo.get(frame, lambda f: calls.append(f) or f.categories) == frame.categories
    assert calls == [a, b, a]
