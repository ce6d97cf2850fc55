"""Random numbers that belong to rows."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from mixle.stats.row_draws import RowDraws, draw_seed


@given(st.integers(0, 2**63 - 1), st.integers(0, 10**12), st.lists(st.integers(0, 40), max_size=4))
def test_draws_do_not_depend_on_how_the_rows_are_cut(seed, start, cuts):
    whole = RowDraws.for_rows(seed, start, 40).uniform(3)
    bounds = [0, *sorted(cuts), 40]
    parts = [RowDraws.for_rows(seed, start + a, b - a).uniform(3) for a, b in itertools.pairwise(bounds)]
    np.testing.assert_array_equal(np.concatenate(parts, axis=1), whole)
    np.testing.assert_array_equal(RowDraws.for_rows(seed, start, 40).rows(5, 9).uniform(3), whole[:, 5:9])


def test_draws_are_uniform_and_uncorrelated():
    draws = RowDraws.for_rows(1, 0, 20_000)
    u = np.concatenate([draws.uniform(2), draws.stream(0).uniform(1), draws.stream(1).uniform(1)])
    for row in u:
        assert stats.kstest(row, "uniform").pvalue > 1e-4
        assert stats.kstest(row[1:] - row[:-1] + 1, stats.triang(0.5, 0, 2).cdf).pvalue > 1e-4
    assert np.abs(np.corrcoef(u) - np.eye(4)).max() < 0.03
    assert u.min() >= 0 and u.max() < 1


def test_streams_and_seeds_differ():
    draws = RowDraws.for_rows(1, 0, 4)
    distinct = [draws, draws.stream(0), draws.stream(1), draws.stream(0).stream(0), RowDraws.for_rows(2, 0, 4)]
    assert len({tuple(d.uniform(1)[0]) for d in distinct}) == len(distinct)


def test_elements_of_ragged_rows_belong_to_their_rows():
    draws = RowDraws.for_rows(5, 0, 4)
    whole = draws.elements([2, 0, 3, 1]).uniform(1)[0]
    assert len(set(whole)) == 6
    np.testing.assert_array_equal(draws.rows(2, 4).elements([3, 1]).uniform(1)[0], whole[2:])


def test_selected_rows_keep_their_draws():
    draws = RowDraws.for_rows(5, 0, 6)
    mask = np.array([True, False, True, False, False, True])
    np.testing.assert_array_equal(draws.select(mask).uniform(2), draws.uniform(2)[:, mask])
    assert len(draws.select(mask)) == 3


def test_seeds_come_from_ints_and_generators():
    assert draw_seed(7) == 7
    assert draw_seed(np.int32(7)) == 7
    for make in (np.random.default_rng, np.random.RandomState):
        assert draw_seed(make(3)) == draw_seed(make(3))
        rng = make(3)
        assert draw_seed(rng) != draw_seed(rng)
    draws = RowDraws.for_rows(3, 0, 2)
    assert RowDraws.coerce(draws, 2) is draws
    assert len(RowDraws.coerce(3, 5)) == 5


@pytest.mark.parametrize("seed", [-1, 2**63])
def test_a_seed_out_of_range_is_refused(seed):
    with pytest.raises(ValueError, match=r"rng=-?\d+ must be a seed in \[0, 2\*\*63\)"):
        draw_seed(seed)


@pytest.mark.parametrize("seed", [None, True, 1.0, "1"])
def test_what_is_no_seed_is_refused(seed):
    with pytest.raises(TypeError, match="rng must be an int seed, a numpy Generator or a RandomState"):
        draw_seed(seed)
