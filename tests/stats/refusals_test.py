"""What cannot be meant is refused by the name of the argument."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from mixle import seq_encode, seq_estimate
from mixle.stats import (
    CategoricalEstimator,
    CompositeEstimator,
    GaussianDistribution,
    GaussianEstimator,
    IntegerCategoricalDistribution,
    IntegerCategoricalEstimator,
    MarkovChainDistribution,
    MarkovChainEstimator,
    MixtureEstimator,
    MultivariateGaussianEstimator,
    OptionalEstimator,
    SequenceEstimator,
)

GAUSSIAN = GaussianEstimator()


@pytest.mark.parametrize("label", ["name", "keys"])
@pytest.mark.parametrize(
    "make",
    [
        GaussianEstimator,
        lambda **label: GaussianDistribution(0.0, 1.0, **label),
        lambda **label: OptionalEstimator(GAUSSIAN, **label),
        MarkovChainEstimator,
        lambda **label: MarkovChainDistribution({"a": 1.0}, {}, **label),
    ],
)
def test_a_label_is_a_str(make: Callable[..., Any], label: str) -> None:
    with pytest.raises(TypeError, match=rf"{label}=\['a'\] must be a name, a str, or None, not list"):
        make(**{label: ["a"]})


@pytest.mark.parametrize(("keys", "message"), [((["a"], None), r"keys\[0\]=\['a'\]"), ((None, 3), r"keys\[1\]=3")])
def test_the_keys_of_a_mixture_are_strs(keys: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message + " must be a name"):
        MixtureEstimator([GAUSSIAN], keys=keys)


@pytest.mark.parametrize("x", [{0: 1.0, 1: 2.0}, {1.0, 2.0}, frozenset({1.0, 2.0}), {"a": 1.0, "b": 2.0}.values()])
@pytest.mark.parametrize(
    ("estimator", "message"),
    [
        (CompositeEstimator([GAUSSIAN, GAUSSIAN]), "a Composite takes tuples of 2 fields, got"),
        (SequenceEstimator(GAUSSIAN), "a Sequence takes lists, tuples or arrays, got"),
        (MultivariateGaussianEstimator(), "MultivariateGaussian takes vectors, got"),
    ],
)
def test_what_has_no_elements_by_position_is_no_record(estimator: Any, message: str, x: Any) -> None:
    with pytest.raises(TypeError, match=message + f" {type(x).__name__} .* at index 0"):
        seq_encode([x], estimator=estimator)


def test_integers_too_far_apart_to_count_are_refused_however_far() -> None:
    estimator = IntegerCategoricalEstimator()
    data = seq_encode([-(2**63), 2**63 - 1], estimator=estimator)
    with pytest.raises(ValueError, match=f"{2**64} are more than {2**24}; use Categorical"):
        seq_estimate(data, estimator)


@pytest.mark.parametrize("min_val", [-(2**63) - 1, 2**63 - 1])
def test_the_range_of_an_integer_categorical_fits_64_bits(min_val: int) -> None:
    with pytest.raises(ValueError, match=f"min_val={min_val} must be at"):
        IntegerCategoricalDistribution(min_val, [0.5, 0.5])
    assert IntegerCategoricalDistribution(2**63 - 2, [0.25, 0.75]).density(2**63 - 1) == 0.75


def test_a_categorical_of_which_nothing_was_seen_asks_for_its_levels() -> None:
    estimator = SequenceEstimator(CategoricalEstimator())
    with pytest.raises(ValueError, match="has no categories; give levels, and pseudo_count"):
        seq_estimate(seq_encode([[], []], estimator=estimator), estimator)
