"""Probability vectors."""

from __future__ import annotations

import numpy as np
import pytest

from mixle.stats.simplex import require_probabilities, weights_from_counts


def test_probabilities_are_normalized_and_copied():
    given = np.array([0.25, 0.75])
    p = require_probabilities(given, "w")
    assert p.tolist() == [0.25, 0.75]
    assert not np.shares_memory(p, given)
    assert require_probabilities([0.3, 0.7 + 1e-8], "w").sum() == pytest.approx(1.0, abs=1e-15)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([0.5, 0.6], r"w=\[0\.5, 0\.6\] must sum to 1, but sums to 1\.1"),
        ([-0.5, 1.5], "must hold finite probabilities of at least 0"),
        ([np.nan, 1.0], "must hold finite probabilities"),
        ([], r"vector of at least one probabilities, got shape \(0,\)"),
        ([[1.0]], r"got shape \(1, 1\)"),
    ],
)
def test_what_is_no_probability_vector_is_refused(values, message):
    with pytest.raises(ValueError, match=message):
        require_probabilities(values, "w")


def test_a_vector_of_another_length_or_of_no_numbers_is_refused():
    with pytest.raises(ValueError, match=r"w must be a vector of 3 probabilities, got shape \(2,\)"):
        require_probabilities([0.5, 0.5], "w", 3)
    with pytest.raises(TypeError, match="w='ab' must be a vector of probabilities"):
        require_probabilities("ab", "w")


def test_weights_follow_counts_and_pseudo_counts():
    counts, prior, previous = np.array([3.0, 1.0]), np.array([0.0, 1.0]), np.array([0.9, 0.1])
    assert weights_from_counts(counts, None, None).tolist() == [0.75, 0.25]
    assert weights_from_counts(counts, 4.0, None).tolist() == [5 / 8, 3 / 8]
    assert weights_from_counts(counts, 4.0, prior).tolist() == [3 / 8, 5 / 8]
    nothing = np.zeros(2)
    assert weights_from_counts(nothing, None, None).tolist() == [0.5, 0.5]
    assert weights_from_counts(nothing, None, None, previous).tolist() == [0.9, 0.1]
    assert weights_from_counts(nothing, 1.0, prior, previous).tolist() == [0.0, 1.0]
