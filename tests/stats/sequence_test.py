"""The dispatch over encoded lists and over handles."""

from __future__ import annotations

import numpy as np
import pytest

from mixle import seq_encode, seq_estimate, seq_initialize, seq_log_density, seq_log_density_sum
from mixle.stats import CategoricalEstimator, GaussianDistribution, GaussianEstimator
from mixle.stats.encoding import encoding_frames

DATA = [1.0, 2.0, 6.0, 7.0, 9.0]


class Handle:
    """Answers every verb with what it was asked."""

    def pysp_seq_estimate(self, estimator, prev_estimate):
        return ("estimate", estimator, prev_estimate)

    def pysp_seq_initialize(self, estimator, rng, p):
        return ("initialize", estimator, rng, p)

    def pysp_seq_log_density(self, model):
        return ("log_density", model)

    def pysp_seq_log_density_sum(self, model):
        return ("log_density_sum", model)


def test_handles_are_asked_for_the_verb():
    handle = Handle()
    assert seq_estimate(handle, "e", "m") == ("estimate", "e", "m")
    assert seq_initialize(handle, "e", 3, 0.5) == ("initialize", "e", 3, 0.5)
    assert seq_log_density(handle, "m") == ("log_density", "m")
    assert seq_log_density_sum(handle, "m") == ("log_density_sum", "m")


@pytest.mark.parametrize(
    ("call", "verb"),
    [
        (lambda h: seq_estimate(h, GaussianEstimator()), "pysp_seq_estimate"),
        (lambda h: seq_initialize(h, GaussianEstimator(), 0), "pysp_seq_initialize"),
        (lambda h: seq_log_density(h, GaussianDistribution(0, 1)), "pysp_seq_log_density"),
        (lambda h: seq_log_density_sum(h, GaussianDistribution(0, 1)), "pysp_seq_log_density_sum"),
    ],
)
def test_what_offers_no_verb_is_named_with_the_verb(call, verb):
    for thing in (object(), [1, 2], 3):
        with pytest.raises(TypeError, match=f"{type(thing).__name__} has no {verb}:"):
            call(thing)


def test_data_is_encoded_in_nearly_equal_chunks_of_one_frame():
    chunks = seq_encode(["a", "b", "c", "a", "d"], estimator=CategoricalEstimator(), num_chunks=2)
    assert [n for n, _ in chunks] == [2, 3]
    assert len({encoding_frames(enc)[0] for _, enc in chunks}) == 1
    assert [n for n, _ in seq_encode(DATA, estimator=GaussianEstimator(), num_chunks=9)] == [1] * 5
    assert [n for n, _ in seq_encode([], estimator=GaussianEstimator(), num_chunks=3)] == [0]


def test_one_way_to_encode_is_given():
    model = GaussianDistribution(0, 1)
    for how in ({"model": model}, {"estimator": GaussianEstimator()}, {"encoder": model.dist_to_encoder()}):
        assert seq_encode(DATA, **how)[0][0] == 5
    with pytest.raises(ValueError, match=r"exactly one of encoder, estimator and model .* got none"):
        seq_encode(DATA)
    with pytest.raises(ValueError, match=r"got \['estimator', 'model'\]"):
        seq_encode(DATA, estimator=GaussianEstimator(), model=model)
    with pytest.raises(ValueError, match="num_chunks=0 must be at least 1"):
        seq_encode(DATA, model=model, num_chunks=0)


def test_scores_come_by_chunk_and_in_total():
    model = GaussianDistribution(3.0, 4.0)
    chunks = seq_encode(DATA, model=model, num_chunks=2)
    parts = seq_log_density(chunks, model)
    assert [len(p) for p in parts] == [2, 3]
    np.testing.assert_allclose(np.concatenate(parts), [model.log_density(x) for x in DATA])
    count, total = seq_log_density_sum(chunks, model)
    assert (count, total) == (5.0, pytest.approx(np.concatenate(parts).sum()))


def test_initialization_takes_a_share_of_the_rows_and_at_least_one():
    chunks = seq_encode(DATA, estimator=GaussianEstimator())
    everything = seq_initialize(chunks, GaussianEstimator(), 0, 1.0)
    assert everything.mu == pytest.approx(np.mean(DATA))
    for seed in range(20):
        assert min(DATA) <= seq_initialize(chunks, GaussianEstimator(), seed, 1e-9).mu <= max(DATA)


@pytest.mark.parametrize("rng", [5, np.random.default_rng(5), np.random.RandomState(5)])
def test_initialization_is_reproducible_from_seeds_and_generators(rng):
    chunks = seq_encode(DATA, estimator=GaussianEstimator())
    make = {int: lambda: 5, np.random.Generator: lambda: np.random.default_rng(5)}.get(
        type(rng), lambda: np.random.RandomState(5)
    )
    assert (
        seq_initialize(chunks, GaussianEstimator(), rng, 0.4).mu
        == seq_initialize(chunks, GaussianEstimator(), make(), 0.4).mu
    )


@pytest.mark.parametrize("p", [0.0, 1.5, True, "0.1"])
def test_a_share_that_is_no_probability_is_refused(p):
    with pytest.raises((TypeError, ValueError), match="p="):
        seq_initialize(seq_encode(DATA, estimator=GaussianEstimator()), GaussianEstimator(), 0, p)
