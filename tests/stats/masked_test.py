"""Masks are not ignored."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mixle import seq_encode
from mixle.stats import (
    BernoulliEstimator,
    CategoricalEstimator,
    DiagonalGaussianEstimator,
    ExponentialEstimator,
    GaussianEstimator,
    IntegerCategoricalEstimator,
    MarkovChainEstimator,
    MultivariateGaussianEstimator,
    OptionalEstimator,
    PoissonEstimator,
    SequenceEstimator,
)

VALUES = np.ma.array([1, 999, 1], mask=[False, True, False])
VECTORS = np.ma.array([[1.0, 2.0], [999.0, 1.0]], mask=[[False, False], [True, False]])


@pytest.mark.parametrize(
    ("data", "estimator"),
    [
        *((VALUES, e()) for e in (IntegerCategoricalEstimator, CategoricalEstimator, PoissonEstimator)),
        *((VALUES * 1.0, e()) for e in (BernoulliEstimator, ExponentialEstimator, GaussianEstimator)),
        (VALUES * 1.0, OptionalEstimator(GaussianEstimator(), missing_value=float("nan"))),
        *(
            (x, e())
            for x in (VECTORS, list(VECTORS))
            for e in (MultivariateGaussianEstimator, DiagonalGaussianEstimator)
        ),
        ([VALUES], MarkovChainEstimator()),
        ([VALUES, VALUES], SequenceEstimator(GaussianEstimator())),
    ],
)
def test_a_masked_array_is_refused_with_what_to_give_instead(data: Any, estimator: Any) -> None:
    with pytest.raises(TypeError, match=r"does not read masks, got a masked array; give its tolist\(\).*Optional"):
        seq_encode(data, estimator=estimator)


def test_what_to_give_instead_of_a_masked_array_leaves_out_what_is_masked() -> None:
    (chunk,) = seq_encode(VALUES.tolist(), estimator=OptionalEstimator(GaussianEstimator()))
    assert chunk[1].present.tolist() == [True, False, True]
