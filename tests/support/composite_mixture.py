"""A mixture over records of three kinds of field, and how far two fits of it are apart."""

from __future__ import annotations

import numpy as np

import mixle
from mixle.stats.categorical import CategoricalEstimator
from mixle.stats.composite import CompositeEstimator
from mixle.stats.gaussian import GaussianEstimator
from mixle.stats.mixture import MixtureEstimator
from mixle.stats.optional import OptionalEstimator
from mixle.stats.poisson import PoissonEstimator


def _record() -> CompositeEstimator:
    return CompositeEstimator([GaussianEstimator(), CategoricalEstimator(), OptionalEstimator(PoissonEstimator())])


ESTIMATOR = MixtureEstimator([_record(), _record()])


def records(n: int) -> list[tuple[float, str, int | None]]:
    """Return ``n`` records; the rarest category appears only near the end, so that shards see different ones."""
    rng = np.random.default_rng(1)
    rows = []
    for i in range(n):
        group = rng.random() < 0.4
        word = (
            "rare" if i == n - 1 else str(rng.choice(["a", "b", "c"], p=[0.7, 0.2, 0.1] if group else [0.1, 0.2, 0.7]))
        )
        count = None if rng.random() < 0.2 else int(rng.poisson(9 if group else 2))
        rows.append((float(rng.normal(1e3 if group else 1e3 + 4)), word, count))
    return rows


def fit(handle, iterations: int = 15):
    """Initialize and run EM."""
    model = mixle.seq_initialize(handle, ESTIMATOR, 11, 0.5)
    for _ in range(iterations):
        model = mixle.seq_estimate(handle, ESTIMATOR, model)
    return model


def numbers(plain) -> list[float]:
    """Return the numbers in a serialized model, in order."""
    if isinstance(plain, dict):
        return [x for value in plain.values() for x in numbers(value)]
    if isinstance(plain, list):
        return [x for value in plain for x in numbers(value)]
    return [float(plain)] if isinstance(plain, (int, float)) else []


def differences(a, b) -> list[float]:
    """Return the relative differences of two models' parameters; models of different structure are infinitely apart."""
    ours, theirs = (numbers(m.to_dict()) for m in (a, b))
    if len(ours) != len(theirs):
        return [float("inf")]
    return [abs(x - y) / max(1.0, abs(y)) for x, y in zip(ours, theirs, strict=True)]
