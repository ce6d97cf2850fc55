from __future__ import annotations

import numpy as np
import pytest

from mixle.utils.vector import validate_initialization_probability


@pytest.mark.parametrize("p", [1e-300, 0.1, 1, 1.0, np.float32(0.5), np.int64(1)])
def test_a_probability_above_zero_is_returned_as_a_float(p):
    probability = validate_initialization_probability(p)
    assert type(probability) is float
    assert probability == p


@pytest.mark.parametrize("p", [0, 0.0, -0.1, 1.0000001, 2, float("nan"), float("inf"), -float("inf")])
def test_a_number_that_is_no_such_probability_is_refused_with_its_value(p):
    with pytest.raises(ValueError, match=r"^p=.* must be in \(0, 1\]$"):
        validate_initialization_probability(p)


@pytest.mark.parametrize("p", [True, np.True_, "0.1", None, 0.1 + 0j, [0.1], np.array([0.1])])
def test_what_is_no_number_is_refused_with_its_value(p):
    with pytest.raises(TypeError, match=r"^p=.* must be a real number in \(0, 1\]"):
        validate_initialization_probability(p)
