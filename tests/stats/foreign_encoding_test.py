"""Data that was encoded for one model is not read by another."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import numpy as np
import pytest

from mixle.stats import (
    BernoulliDistribution,
    CategoricalDistribution,
    CompositeDistribution,
    DiagonalGaussianDistribution,
    ExponentialDistribution,
    GaussianDistribution,
    IntegerCategoricalDistribution,
    MarkovChainDistribution,
    MixtureDistribution,
    MultivariateGaussianDistribution,
    MultivariateGaussianEstimator,
    OptionalDistribution,
    PoissonDistribution,
    SequenceDistribution,
)
from mixle.stats.sequence import seq_encode, seq_estimate, seq_initialize, seq_log_density

GAUSSIAN = GaussianDistribution(0.0, 1.0)
MODELS: dict[str, tuple[Any, Any]] = {
    "Gaussian": (GAUSSIAN, 1.0),
    "Exponential": (ExponentialDistribution(1.0), 1.0),
    "Poisson": (PoissonDistribution(1.0), 1),
    "Bernoulli": (BernoulliDistribution(0.5), 1),
    "Categorical": (CategoricalDistribution({1: 1.0}), 1),
    "IntegerCategorical": (IntegerCategoricalDistribution(1, [1.0]), 1),
    "MultivariateGaussian": (MultivariateGaussianDistribution([0.0, 0.0], np.eye(2)), [1.0, 2.0]),
    "DiagonalGaussian": (DiagonalGaussianDistribution([0.0, 0.0], [1.0, 1.0]), [1.0, 2.0]),
    "Composite": (CompositeDistribution([GAUSSIAN, GAUSSIAN]), (1.0, 2.0)),
    "Optional": (OptionalDistribution(GAUSSIAN, 0.5), 1.0),
    "Sequence": (SequenceDistribution(GAUSSIAN), [1.0, 2.0]),
    "MarkovChain": (MarkovChainDistribution({1: 1.0}, {1: {1: 1.0}}), [1, 1]),
    "Mixture": (MixtureDistribution([GAUSSIAN, GaussianDistribution(1.0, 1.0)], [0.5, 0.5]), 1.0),
}
PAIRS = list(permutations(MODELS, 2))
# A chain is encoded as a record of its transitions and its length.
WRITTEN = {"MarkovChain": "(MarkovChain|Composite)", "Composite": "(Gaussian|Composite)"}


def encoded(name: str) -> Any:
    model, x = MODELS[name]
    return seq_encode([x] * 3, model=model)


@pytest.mark.parametrize(("written", "read"), PAIRS)
def test_data_encoded_for_another_family_is_neither_scored_nor_fitted(written: str, read: str) -> None:
    model = MODELS[read][0]
    by = "Gaussian" if (written, read) == ("MarkovChain", "Composite") else read
    message = f"encoded for {WRITTEN.get(written, written)}, read by {by}: encode with"
    with pytest.raises(TypeError, match=message):
        seq_log_density(encoded(written), model)
    with pytest.raises(TypeError, match=message):
        seq_estimate(encoded(written), model.estimator(), model)
    with pytest.raises(TypeError, match=message):
        seq_initialize(encoded(written), model.estimator(), 0, 1.0)


@pytest.mark.parametrize("name", MODELS)
def test_data_encoded_for_an_equal_encoder_is_read_in_blocks_and_chunks(name: str) -> None:
    model, x = MODELS[name]
    chunks = seq_encode([x] * 3, estimator=model.estimator(), num_chunks=2)
    assert np.concatenate(seq_log_density(chunks, model)) == pytest.approx([model.log_density(x)] * 3)
    (chunk,) = seq_encode([x] * 3, model=model)
    assert model.seq_log_density(chunk[1].rows(1, 3)) == pytest.approx([model.log_density(x)] * 2)


@pytest.mark.parametrize("as_component", [False, True])
@pytest.mark.parametrize("family", ["MultivariateGaussian", "DiagonalGaussian"])
def test_vectors_are_read_by_a_model_of_as_many_axes(family: str, as_component: bool) -> None:
    narrow = MODELS[family][0]
    covar = np.eye(3) if family == "MultivariateGaussian" else np.ones(3)
    wide = type(narrow)(np.zeros(3), covar)
    if as_component:
        narrow, wide = (MixtureDistribution([m, m], [0.5, 0.5]) for m in (narrow, wide))
    data = seq_encode([[1.0, 2.0], [2.0, 1.0]], model=narrow)
    message = f"encoded with 2 axes, but are read by a {family} of 3"
    with pytest.raises(ValueError, match=message):
        seq_log_density(data, wide)
    with pytest.raises(ValueError, match=message):
        seq_estimate(data, wide.estimator(), wide)


def test_a_previous_estimate_of_other_axes_is_refused() -> None:
    data = seq_encode([[1.0, 2.0], [2.0, 1.0]], estimator=MultivariateGaussianEstimator())
    previous = MultivariateGaussianDistribution(np.zeros(3), np.eye(3))
    with pytest.raises(ValueError, match="encoded with 2 axes, but are read by a MultivariateGaussian of 3"):
        seq_estimate(data, MultivariateGaussianEstimator(), previous)


def test_records_are_read_by_a_model_of_as_many_fields() -> None:
    wide = CompositeDistribution([GAUSSIAN] * 3)
    with pytest.raises(ValueError, match="encoded in 2 parts, read by a Composite of 3"):
        seq_log_density(encoded("Composite"), wide)
    with pytest.raises(ValueError, match="previous estimate of a Composite of 2 fields has 3"):
        seq_estimate(encoded("Composite"), MODELS["Composite"][0].estimator(), wide)


def test_a_mixture_is_not_updated_from_a_previous_estimate_of_other_families() -> None:
    poissons = MixtureDistribution([PoissonDistribution(1.0), PoissonDistribution(2.0)], [0.5, 0.5])
    data = seq_encode([1, 2], model=poissons)
    with pytest.raises(TypeError, match="of other families than the estimators"):
        seq_estimate(data, MODELS["Mixture"][0].estimator(), poissons)
