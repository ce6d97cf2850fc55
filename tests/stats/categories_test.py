"""Categories: what they may be, their order, their JSON form, and their codes."""

from __future__ import annotations

import json
import math
from enum import Enum, IntEnum
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mixle.stats.categories import category_from_json, category_to_json, ordered_categories, plain_category
from mixle.stats.category_codes import category_codes, distinct_integers

scalars = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=5), st.binary(max_size=5)
)
categories = st.recursive(scalars, lambda inner: st.lists(inner, max_size=3).map(tuple), max_leaves=5)


@given(categories)
def test_json_keeps_a_category_and_its_type(category):
    again = category_from_json(json.loads(json.dumps(category_to_json(category))))
    assert again == category
    assert repr(again) == repr(category)


@given(st.lists(categories, max_size=12), st.randoms())
def test_the_order_of_categories_does_not_depend_on_the_order_of_the_data(values, random):
    ordered = ordered_categories(values)
    shuffled = values[:]
    random.shuffle(shuffled)
    assert repr(ordered_categories(shuffled)) == repr(ordered)
    assert set(ordered) == set(values)
    assert len(ordered) == len(set(values))


@given(st.lists(categories, max_size=20))
def test_codes_point_at_the_categories(values):
    vocabulary, codes = category_codes(values, "Categorical")
    assert [vocabulary.categories[i] for i in codes] == values
    assert vocabulary.categories == ordered_categories(values)


@given(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=30), st.integers(1, 8))
def test_arrays_of_integers_get_the_codes_of_their_numbers(values, width):
    for array in (np.array(values, dtype=np.int64), np.array([v % 2**width for v in values], dtype=np.uint8)):
        from_array, from_list = category_codes(array, "Categorical"), category_codes(array.tolist(), "Categorical")
        assert from_array[0] == from_list[0]
        assert from_array[1].tolist() == from_list[1].tolist()


def test_integers_far_apart_are_told_apart_without_a_table():
    distinct, codes = distinct_integers(np.array([10**15, -5, 10**15, 0]))
    assert distinct.tolist() == [-5, 0, 10**15]
    assert codes.tolist() == [2, 0, 2, 1]


@pytest.mark.parametrize(
    ("array", "expected"),
    [
        (np.array([2**64 - 1, 3], dtype=np.uint64), (3, 2**64 - 1)),
        (np.array(["b", "a"]), ("a", "b")),
        (np.array([0.5, -1.0]), (-1.0, 0.5)),
        (np.array([True, False]), (False, True)),
        (np.array([b"x", b"y"]), (b"x", b"y")),
        (np.array([None, "a"], dtype=object), (None, "a")),
    ],
    ids=["uint64", "str", "float", "bool", "bytes", "object"],
)
def test_other_arrays_are_read_value_by_value(array, expected):
    assert category_codes(array, "Categorical")[0].categories == expected


def test_numpy_scalars_are_the_numbers_and_strings_that_they_hold():
    values = [np.int64(1), np.float32(0.5), np.str_("a"), np.bool_(True), np.bytes_(b"b")]
    assert [repr(plain_category(v)) for v in values] == ["1", "0.5", "'a'", "True", "b'b'"]


def test_spellings_of_one_number_become_one_whatever_their_order():
    for values in ([1.0, True, 1], [True, 1, 1.0], [1, 1.0, True]):
        assert repr(ordered_categories(values)) == "(1,)"
    assert repr(ordered_categories([(1.0, "a"), (True, "a"), (1, "a")])) == "((1, 'a'),)"


@pytest.mark.parametrize(
    "value", [[1], {1: 2}, {1}, object(), 1j, np.longdouble(1), np.datetime64("2020-01-01"), (1, [2])]
)
def test_what_is_no_category_is_refused_by_index(value):
    with pytest.raises(TypeError, match="Categorical, index 1: a category must be None, bool, int"):
        category_codes(["a", value], "Categorical")


@pytest.mark.parametrize("value", [math.nan, np.float64("nan"), (1, math.nan)])
def test_nan_is_refused_by_index(value):
    with pytest.raises(ValueError, match="index 1: NaN cannot be a category"):
        category_codes([0.5, value], "Categorical")


@pytest.mark.parametrize("plain", [{"bytes": 3}, {"tuple": "a"}, {"float": "nan"}, {"tuple": [], "x": 1}, {}])
def test_what_is_no_encoded_category_is_refused(plain):
    with pytest.raises(ValueError, match="not an encoded category"):
        category_from_json(plain)


Colour = Enum("Colour", {"RED": "red"}, type=str)


class Level(IntEnum):
    HIGH = 3


class Code(bytes):
    def __repr__(self):
        return "a code"


class Length(float):
    def __repr__(self):
        return "a length"


class Pair(NamedTuple):
    colour: str
    level: int


@pytest.mark.parametrize(
    ("value", "held"),
    [
        (Colour.RED, "red"),
        (Level.HIGH, 3),
        (Code(b"x"), b"x"),
        (Length(2.5), 2.5),
        (Pair(Colour.RED, Level.HIGH), ("red", 3)),
    ],
)
def test_a_value_of_a_derived_class_is_the_category_that_it_holds(value, held):
    assert plain_category(value) == held and type(plain_category(value)) is type(held)
    vocabulary, codes = category_codes([value, held], "x")
    assert vocabulary.categories == (held,) and codes.tolist() == [0, 0]


@pytest.mark.parametrize("zeros", [[-0.0, 0.0], [0.0, -0.0], [(-0.0,), (0.0,)], np.array([-0.0, 0.0])])
def test_zero_is_one_category_without_a_sign(zeros):
    vocabulary, codes = category_codes(zeros, "x")
    assert repr(vocabulary.categories) in ("(0.0,)", "((0.0,),)") and codes.tolist() == [0, 0]
