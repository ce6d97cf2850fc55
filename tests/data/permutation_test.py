from __future__ import annotations

from collections import Counter
from math import factorial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chi2

from mixle.data.permutation import Permutation


@given(n=st.integers(0, 100_000), seed=st.integers(-(2**70), 2**70), epoch=st.integers(0, 10**6))
@settings(max_examples=60, deadline=None)
def test_every_index_stands_at_exactly_one_position(n, seed, epoch):
    order = Permutation(n, seed, epoch).apply(np.arange(n))
    assert order.dtype == np.int64
    np.testing.assert_array_equal(np.sort(order), np.arange(n))


@pytest.mark.parametrize("n", range(40))
def test_every_index_stands_at_exactly_one_position_of_a_few(n):
    assert sorted(Permutation(n, 0).apply(np.arange(n)).tolist()) == list(range(n))


@given(n=st.integers(1, 2**62), data=st.data())
@settings(max_examples=200, deadline=None)
def test_inverse_finds_the_position_of_an_index_and_apply_the_index_at_a_position(n, data):
    places = np.array(data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=20)))
    permutation = Permutation(n, seed=11, epoch=2, replica=1)
    np.testing.assert_array_equal(permutation.inverse(permutation.apply(places)), places)
    np.testing.assert_array_equal(permutation.apply(permutation.inverse(places)), places)


@pytest.mark.parametrize("n", [2**40 - 1, 2**40, 2**40 + 1, (2**20 + 1) ** 2, 2**62])
def test_a_huge_range_is_permuted_where_it_is_asked_about(n):
    places = np.concatenate([np.arange(1000), np.arange(n - 1000, n)])
    order = Permutation(n, 5).apply(places)
    assert len(np.unique(order)) == 2000
    assert order.min() >= 0
    assert order.max() < n
    # 2000 draws leave none in the upper or lower tenth with probability 0.9**2000.
    assert order.min() < n // 10
    assert order.max() > n - n // 10


def chi_square_p_value(counts: np.ndarray) -> float:
    expected = counts.sum() / len(counts)
    return float(chi2.sf(((counts - expected) ** 2 / expected).sum(), len(counts) - 1))


def test_a_stretch_of_positions_is_spread_evenly_over_the_indices():
    n = 10**6 + 3
    order = Permutation(n, seed=1).apply(np.arange(20_000))
    assert chi_square_p_value(np.histogram(order, bins=100, range=(0, n))[0]) > 1e-3


def test_neighbouring_positions_are_evenly_apart():
    n = 10**6 + 3
    order = Permutation(n, seed=1).apply(np.arange(20_000))
    assert chi_square_p_value(np.histogram(np.diff(order) % n, bins=100, range=(0, n))[0]) > 1e-3


def test_over_the_epochs_a_position_sees_all_indices_equally_often():
    first = [int(Permutation(50, seed=1, epoch=epoch).apply(17)) for epoch in range(2500)]
    assert chi_square_p_value(np.bincount(first, minlength=50)) > 1e-3


@pytest.mark.parametrize("n", [2, 3, 4, 5])
def test_all_permutations_of_a_few_elements_are_equally_likely(n):
    orders = Counter(
        tuple(Permutation(n, seed=9, epoch=epoch).apply(np.arange(n))) for epoch in range(20 * factorial(n))
    )
    assert chi_square_p_value(np.array([*orders.values()] + [0] * (factorial(n) - len(orders)))) > 1e-3


def test_seeds_epochs_and_replicas_each_give_another_order():
    arguments = [(1, 0, None), (2, 0, None), (1, 1, None), (1, 0, 0), (1, 0, 1), (-1, 0, None), (1 + 2**64, 0, None)]
    orders = {tuple(Permutation(1000, *each).apply(np.arange(1000))) for each in arguments}
    assert len(orders) == len(arguments)


def test_equal_arguments_give_the_order_they_always_gave():
    assert Permutation(10, seed=0).apply(np.arange(10)).tolist() == [5, 7, 3, 0, 9, 6, 8, 4, 1, 2]
    assert Permutation(2**40, seed=123, epoch=4, replica=2).apply([0, 1, 2**40 - 1]).tolist() == [
        807257724764,
        274276472275,
        4608559623,
    ]


def test_indexing_is_applying_and_keeps_the_shape():
    permutation = Permutation(100, seed=3)
    grid = np.arange(6).reshape(2, 3)
    assert permutation[grid].shape == (2, 3)
    np.testing.assert_array_equal(permutation[grid], permutation.apply(grid))
    assert permutation[7].shape == ()
    assert len(permutation) == 100


@pytest.mark.parametrize("outside", [-1, 100])
def test_positions_and_indices_out_of_range_are_refused(outside):
    permutation = Permutation(100, seed=3)
    with pytest.raises(IndexError, match=rf"position {outside} is outside \[0, 100\)"):
        permutation.apply([3, outside])
    with pytest.raises(IndexError, match=rf"index {outside} is outside \[0, 100\)"):
        permutation.inverse([3, outside])


@pytest.mark.parametrize("positions", [[0.0], [True], ["a"]])
def test_positions_that_are_no_integers_are_refused(positions):
    with pytest.raises(TypeError, match="position must be an integer"):
        Permutation(100, seed=3).apply(positions)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"n": 2.0, "seed": 0}, TypeError, "n=2.0"),
        ({"n": -1, "seed": 0}, ValueError, "n=-1 must be at least 0"),
        ({"n": 2**62 + 1, "seed": 0}, ValueError, "must be at most"),
        ({"n": 2, "seed": "0"}, TypeError, "seed='0'"),
        ({"n": 2, "seed": 0, "epoch": -1}, ValueError, "epoch=-1"),
        ({"n": 2, "seed": 0, "replica": True}, TypeError, "replica=True"),
    ],
)
def test_arguments_are_exact_integers_in_range(arguments, error, message):
    with pytest.raises(error, match=message):
        Permutation(**arguments)
