"""A payload that no model wrote is refused by its type and field."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mixle.stats import (
    CategoricalDistribution,
    CompositeDistribution,
    GaussianDistribution,
    MarkovChainDistribution,
    MixtureDistribution,
    MultivariateGaussianDistribution,
    OptionalDistribution,
    PoissonDistribution,
    SequenceDistribution,
)
from mixle.stats.contract import ProbabilityDistribution

GAUSSIAN = GaussianDistribution(0.0, 1.0, name="x", keys="k")
MODELS = [
    GAUSSIAN,
    PoissonDistribution(1.0),
    CategoricalDistribution({"a": 0.25, "b": 0.75}),
    MultivariateGaussianDistribution([0.0, 0.0], np.eye(2)),
    CompositeDistribution([GAUSSIAN], name="x"),
    MixtureDistribution([GAUSSIAN, GAUSSIAN], [0.5, 0.5]),
    MarkovChainDistribution({"a": 1.0}, {"a": {"a": 1.0}}, keys="k"),
    OptionalDistribution(GAUSSIAN, 0.5, missing_value=float("nan")),
    SequenceDistribution(GAUSSIAN),
    SequenceDistribution(GAUSSIAN).len_dist,
]


@pytest.mark.parametrize("model", MODELS, ids=lambda model: type(model).__name__)
def test_a_field_that_would_be_ignored_is_refused(model: ProbabilityDistribution) -> None:
    payload = model.to_dict()
    assert ProbabilityDistribution.from_dict(payload) == model
    with pytest.raises(ValueError, match=rf"payload of a {type(model).__name__} has the fields \['sigma'\]"):
        ProbabilityDistribution.from_dict({**payload, "sigma": 1.0})


@pytest.mark.parametrize(
    ("model", "field", "value", "kind", "message"),
    [
        (MODELS[5], "components", None, TypeError, "MixtureDistribution: components=None must be a list"),
        (MODELS[4], "dists", "ab", TypeError, "CompositeDistribution: dists='ab' must be a list"),
        (MODELS[2], "pmap", {"a": 1.0}, TypeError, "CategoricalDistribution: pmap={'a': 1.0} must be a list"),
        (MODELS[2], "pmap", ["ab"], TypeError, r"pmap\[0\]='ab' must be \[category, probability\]"),
        (MODELS[2], "pmap", [[1, 0.5], [1.0, 0.5]], ValueError, r"pmap\[1\] gives the category 1.0 again"),
        *(
            (MODELS[i], "repairs", [1], TypeError, r"Distribution: repairs\[0\]=1 must be a list of three strings")
            for i in (0, 5, 6)
        ),
        (MODELS[0], "repairs", None, TypeError, "GaussianDistribution: repairs=None must be a list"),
        (MODELS[6], "chain", None, TypeError, "chain=None must be a dict of states"),
    ],
)
def test_a_field_of_the_wrong_kind_is_refused_by_name(
    model: ProbabilityDistribution, field: str, value: Any, kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        ProbabilityDistribution.from_dict({**model.to_dict(), field: value})
