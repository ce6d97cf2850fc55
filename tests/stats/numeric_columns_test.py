"""Raw numbers as columns."""

from __future__ import annotations

import math

import numpy as np
import pytest

from mixle.stats.numeric_columns import (
    concatenated,
    finite_vector,
    integer_column,
    number_column,
    supported,
    vector_columns,
)


@pytest.mark.parametrize(
    "values", [[1, 2.5, np.float32(3)], (1, 2.5, 3), np.array([1.0, 2.5, 3.0]), np.array([1, 2.5, 3], dtype=object)]
)
def test_numbers_in_any_sequence_become_float64(values):
    column = number_column(values, "Gaussian")
    assert column.dtype == np.float64
    assert column.tolist() == [1.0, 2.5, 3.0]


def test_an_int_beyond_floats_is_infinite():
    assert number_column([10**400, -(10**400)], "Gaussian").tolist() == [math.inf, -math.inf]


def test_bools_are_numbers_only_where_they_are_asked_for():
    assert number_column([True, np.bool_(False), 1], "Bernoulli", bools=True).tolist() == [1.0, 0.0, 1.0]
    assert number_column(np.array([True, False]), "Bernoulli", bools=True).tolist() == [1.0, 0.0]
    for values in ([0.0, True], np.array([False, True])):
        with pytest.raises(TypeError, match="Gaussian takes real numbers, got bool"):
            number_column(values, "Gaussian")


def test_arrays_of_more_axes_are_refused():
    with pytest.raises(TypeError, match=r"got ndarray .* at index 0"):
        number_column(np.zeros((2, 2)), "Gaussian")


def test_integers_stay_exact():
    big = 2**62 + 1
    column, fits = integer_column([big, 2.0, 2.5, 10**30, math.inf], "IntegerCategorical")
    assert fits.tolist() == [True, True, False, False, False]
    assert column[:2].tolist() == [big, 2]
    column, fits = integer_column(np.array([2**64 - 1, 5], dtype=np.uint64), "IntegerCategorical")
    assert fits.tolist() == [False, True]
    assert integer_column(np.array([3, 4], dtype=np.int8), "IntegerCategorical")[0].tolist() == [3, 4]


@pytest.mark.parametrize("values", [[[1, 2], [3, 4.5]], [(1, 2), (3, 4.5)], np.array([[1, 2], [3, 4.5]])])
def test_vectors_become_contiguous_rows_per_axis(values):
    columns = vector_columns(values, "MultivariateGaussian", 2)
    assert columns.tolist() == [[1.0, 3.0], [2.0, 4.5]]
    assert columns.flags.c_contiguous


def test_no_vectors_have_the_axes_that_are_known():
    assert vector_columns([], "MultivariateGaussian", None).shape == (0, 0)
    assert vector_columns([], "MultivariateGaussian", 3).shape == (3, 0)


@pytest.mark.parametrize(
    ("values", "kind", "message"),
    [
        ([[1, 2], [3]], ValueError, r"vectors of 2 numbers, got 1 at index 1 \(\[3\]\)"),
        ([[1, 2], "ab"], TypeError, "got str"),
        ([[1, 2], 3.0], TypeError, r"got float \(3\.0\) at index 1"),
        ([[1, 2], [3, None]], TypeError, "got None at index 1"),
        ([[1, 2], [3, True]], TypeError, "got True at index 1"),
        ([[1, 2], [3, math.nan]], ValueError, r"NaN at index 1 \(\[3\.0, nan\]\)"),
        (np.zeros((2, 2, 2)), ValueError, r"shape \(2, 2, 2\)"),
        (np.zeros((2, 2), dtype=complex), TypeError, "real numbers"),
        ([[1, 2], [[3], [4]]], (TypeError, ValueError), "real numbers"),
    ],
)
def test_what_is_no_vector_is_refused_by_index(values, kind, message):
    with pytest.raises(kind, match=message):
        vector_columns(values, "MultivariateGaussian", 2)


def test_impossible_rows_get_a_stand_in_and_one_is_remembered():
    enc = supported(np.array([1.0, -1.0, 2.0]), np.array([True, False, True]), 0.5)
    assert enc.columns[0].tolist() == [1.0, 0.5, 2.0]
    assert enc.impossible.tolist() == [False, True, False]
    assert enc.example == "-1.0"
    assert supported(np.array([1.0]), np.array([True]), 0.5).impossible is None


@pytest.mark.parametrize(
    ("value", "kind", "message"),
    [
        ("ab", TypeError, "mu='ab' must be a vector of real numbers"),
        ([1.0, math.inf], ValueError, r"mu=\[1\.0, inf\] must be finite"),
        ([], ValueError, "mu must be a vector of 2 numbers"),
        ([1.0], ValueError, "mu must be a vector of 2 numbers"),
        ([[1.0, 2.0]], ValueError, r"got shape \(1, 2\)"),
    ],
)
def test_parameters_that_are_no_finite_vector_are_refused(value, kind, message):
    with pytest.raises(kind, match=message):
        finite_vector(value, "mu", 2)


def test_arrays_of_one_integer_type_are_joined_and_others_left_alone():
    big = 2**60 + 1
    assert concatenated([np.array([1, big]), np.array([3])], "iu").tolist() == [1, big, 3]
    for arrays in ([np.array([big]), np.array([1], dtype=np.uint64)], [np.array([1]), [2]], [np.array([0.5])], []):
        assert concatenated(arrays, "iu") is None


@pytest.mark.parametrize("values", [[[], []], np.zeros((2, 0))])
def test_vectors_without_numbers_are_refused(values):
    with pytest.raises(ValueError, match="vectors of at least one number, got an empty vector at index 0"):
        vector_columns(values, "x", None)
