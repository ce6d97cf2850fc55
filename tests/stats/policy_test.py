"""The numerical policy: floors, and how repairs are reported."""

from __future__ import annotations

import numpy as np
import pytest

from mixle.stats.policy import (
    MIN_MEAN_RATIO,
    MIN_VARIANCE_RATIO,
    Repair,
    data_scale,
    floor_covariance,
    floor_mean,
    floor_variance,
    optional_floor,
    within,
)


def test_a_repair_says_where_what_and_why():
    repair = Repair("sigma2", "too small")
    assert str(repair) == "sigma2: too small"
    (inner,) = within("dists[0]", [repair])
    (outer,) = within("components[1]", [inner])
    assert str(outer) == "components[1].dists[0].sigma2: too small"


def test_the_scale_of_data_is_its_variance_or_its_magnitude():
    scale = data_scale(np.array([5.0, 5.0, 0.0, 1e9]), np.array([4.0, 0.0, 0.0, 1e-11]))
    assert scale.tolist() == [4.0, 25.0, 1.0, 1e18]


def test_variances_below_the_floor_are_raised_and_named():
    variance, repairs = floor_variance(np.array([1.0, 1e-9, np.nan]), np.ones(3), None, "covar")
    assert variance.tolist() == [1.0, MIN_VARIANCE_RATIO, MIN_VARIANCE_RATIO]
    assert str(repairs[0]) == "covar: variance below the floor on axes [1, 2]; raised to 1e-06"
    assert floor_variance(np.array([1.0]), np.ones(1), None, "covar")[1] == ()
    assert floor_variance(np.array(0.1), np.array(1.0), 0.5, "s")[0] == 0.5


def test_eigenvalues_are_floored_in_the_units_of_each_axis():
    scale = np.array([1e-4, 1e6])
    singular = np.outer(np.sqrt(scale), np.sqrt(scale))
    repaired, repairs = floor_covariance(singular, scale, None, "covar")
    unit = np.sqrt(scale)
    values = np.linalg.eigvalsh(repaired / np.outer(unit, unit))
    np.testing.assert_allclose(values, [MIN_VARIANCE_RATIO, 2.0], rtol=1e-6)
    assert str(repairs[0]) == "covar: 1 of 2 eigenvalues below the floor; raised to 1e-06 of the data's scale"
    assert (repaired == repaired.T).all()


def test_an_absolute_floor_is_in_the_units_of_the_data():
    repaired, repairs = floor_covariance(np.diag([1.0, 1e-3]), np.array([1.0, 1e-3]), 0.01, "covar")
    np.testing.assert_allclose(repaired, np.diag([1.0, 0.01]), atol=1e-15)
    assert repairs[0].reason.endswith("raised to 0.01")
    untouched = np.diag([1.0, 0.5])
    assert floor_covariance(untouched, np.ones(2), 0.01, "covar") == (untouched, ())


def test_means_are_floored_relative_to_the_whole():
    assert floor_mean(0.0, 5.0, None, "beta")[0] == 5.0 * MIN_MEAN_RATIO
    assert floor_mean(0.0, 0.0, None, "beta")[0] == MIN_MEAN_RATIO
    assert floor_mean(0.1, 5.0, 0.5, "beta")[0] == 0.5
    assert floor_mean(2.0, 5.0, None, "beta") == (2.0, ())


def test_a_floor_that_a_user_gives_is_checked():
    assert optional_floor(None, "min_variance") is None
    assert optional_floor(2, "min_variance") == 2.0
    with pytest.raises(ValueError, match=r"min_variance=0\.0 must be above 0"):
        optional_floor(0.0, "min_variance")
    with pytest.raises(TypeError, match="min_variance=True"):
        optional_floor(True, "min_variance")
