from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mixle.diloco.merge import CLIP_MULTIPLE, Rda, WeightedMean, clip_factors, mean_cosine, merge_deltas, norm


def random_deltas(seed: int, learners: int) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(seed)
    shapes = {"embed": (5, 3), "w": (4, 2, 2), "bias": (3,), "long": (35_001,), "scalar": ()}
    return [
        {
            name: np.asarray(rng.normal(size=shape) * 10 ** rng.uniform(-6, 3), dtype=np.float32)
            for name, shape in shapes.items()
        }
        for _ in range(learners)
    ]


def random_shares(seed: int, learners: int) -> list[float]:
    return list(np.random.default_rng(seed + 1).dirichlet(np.ones(learners)))


def brute_mean(deltas, shares, name):
    return sum(share * delta[name].astype(np.longdouble) for share, delta in zip(shares, deltas, strict=True))


def brute_rda(deltas, shares, name):
    tensors = [delta[name].astype(np.longdouble) for delta in deltas]
    lengths = [np.sqrt((tensor**2).sum()) for tensor in tensors]
    radius = sum(share * length for share, length in zip(shares, lengths, strict=True))
    direction = sum(share * t / length for share, t, length in zip(shares, tensors, lengths, strict=True))
    return radius * direction / np.sqrt((direction**2).sum())


@given(st.integers(0, 50), st.integers(2, 5))
def test_the_weighted_mean_is_that_of_extended_precision(seed, learners):
    deltas, shares = random_deltas(seed, learners), random_shares(seed, learners)
    merged = merge_deltas(WeightedMean(), deltas, shares)
    for name, tensor in merged.items():
        assert tensor.dtype == np.float32
        expected = brute_mean(deltas, shares, name)
        np.testing.assert_allclose(tensor, expected, rtol=1e-6, atol=1e-7 * float(np.abs(expected).max()))


@given(st.integers(0, 50), st.integers(2, 5))
def test_radial_directional_averaging_is_its_formula_and_embeddings_take_the_mean(seed, learners):
    deltas, shares = random_deltas(seed, learners), random_shares(seed, learners)
    merged = merge_deltas(Rda(), deltas, shares, embeddings={"embed"})
    for name, tensor in merged.items():
        rule = brute_mean if name == "embed" else brute_rda
        if name == "scalar" and len({np.sign(delta[name]).item() for delta in deltas}) > 1:
            continue  # directions of numbers may cancel; that has its own test
        expected = rule(deltas, shares, name)
        np.testing.assert_allclose(tensor, expected, rtol=2e-6, atol=1e-6 * float(np.abs(expected).max()))


def test_radial_directional_averaging_by_hand():
    deltas = [{"w": np.array([3.0, 0.0], np.float32)}, {"w": np.array([0.0, 1.0], np.float32)}]
    merged = merge_deltas(Rda(), deltas, [0.5, 0.5])
    np.testing.assert_allclose(merged["w"], [2 / math.sqrt(2)] * 2, rtol=1e-6)


def test_orthogonal_deltas_keep_their_length_where_the_mean_shrinks_them():
    deltas = [{"w": np.eye(4, dtype=np.float32)[learner]} for learner in range(4)]
    assert norm(merge_deltas(Rda(), deltas, [0.25] * 4)) == pytest.approx(1.0)
    assert norm(merge_deltas(WeightedMean(), deltas, [0.25] * 4)) == pytest.approx(0.5)


def test_directions_that_cancel_give_the_weighted_mean():
    deltas = [{"w": np.array([3.0, 0.0], np.float32)}, {"w": np.array([-1.0, 0.0], np.float32)}]
    np.testing.assert_array_equal(merge_deltas(Rda(), deltas, [0.5, 0.5])["w"], [1.0, 0.0])


def test_a_learner_that_did_not_move_shortens_the_step_and_does_not_turn_it():
    deltas = [{"w": np.array([4.0, 3.0], np.float32)}, {"w": np.zeros(2, np.float32)}]
    np.testing.assert_allclose(merge_deltas(Rda(), deltas, [0.5, 0.5])["w"], [2.0, 1.5], rtol=1e-6)


@pytest.mark.parametrize("how", [Rda(), WeightedMean()])
def test_no_movement_merges_to_none(how):
    deltas = [{"w": np.zeros(3, np.float32)}] * 2
    np.testing.assert_array_equal(merge_deltas(how, deltas, [0.5, 0.5])["w"], np.zeros(3))


@pytest.mark.parametrize("how", [Rda(), WeightedMean()])
def test_one_delta_merges_to_a_copy_of_itself(how):
    (delta,) = random_deltas(3, 1)
    merged = merge_deltas(how, [delta], [1.0])
    for name, tensor in merged.items():
        np.testing.assert_array_equal(tensor, delta[name])
        assert not np.shares_memory(tensor, delta[name])


@given(st.integers(0, 30), st.permutations(range(4)))
def test_the_order_of_the_learners_hardly_matters(seed, order):
    deltas, shares = random_deltas(seed, 4), random_shares(seed, 4)
    there = merge_deltas(WeightedMean(), deltas, shares)
    back = merge_deltas(WeightedMean(), [deltas[i] for i in order], [shares[i] for i in order])
    for name, tensor in there.items():
        np.testing.assert_allclose(tensor, back[name], rtol=2e-7, atol=1e-14 * float(np.abs(tensor).max()))


@pytest.mark.parametrize("how", [Rda(), WeightedMean()])
def test_a_factor_scales_a_delta_before_it_is_merged(how):
    deltas, shares = random_deltas(7, 3), [0.2, 0.3, 0.5]
    cut = [deltas[0], {name: tensor / np.float32(4) for name, tensor in deltas[1].items()}, deltas[2]]
    scaled, expected = merge_deltas(how, deltas, shares, factors=[1, 0.25, 1]), merge_deltas(how, cut, shares)
    for name, tensor in scaled.items():
        np.testing.assert_allclose(tensor, expected[name], rtol=1e-5, atol=1e-9)


def test_deltas_of_different_models_are_refused():
    with pytest.raises(ValueError, match=r"deltas\[1\] must have the names and shapes of deltas\[0\]"):
        merge_deltas(Rda(), [{"w": np.zeros(2, np.float32)}, {"w": np.zeros(3, np.float32)}], [0.5, 0.5])
    with pytest.raises(ValueError, match="deltas must hold at least one"):
        merge_deltas(Rda(), [], [])


@given(st.integers(0, 50))
def test_the_norm_is_that_of_all_tensors_as_one_vector(seed):
    (delta,) = random_deltas(seed, 1)
    flat = np.concatenate([tensor.astype(np.longdouble).ravel() for tensor in delta.values()])
    assert norm(delta) == pytest.approx(float(np.sqrt((flat**2).sum())), rel=1e-12)


@given(st.sampled_from([math.nan, math.inf, -math.inf]), st.integers(0, 99_999))
def test_one_element_that_is_not_finite_shows_in_the_norm(bad, position):
    tensor = np.ones(100_000, np.float32)
    tensor[position] = bad
    assert not math.isfinite(norm({"a": np.ones(3, np.float32), "w": tensor}))


def test_the_largest_finite_numbers_have_a_finite_norm():
    assert math.isfinite(norm({"w": np.full(1000, np.finfo(np.float32).max)}))


def test_a_delta_a_million_times_the_others_is_cut_to_the_multiple_of_the_median():
    norms = [1.0, 2.0, 1e6, 3.0, 1.5]
    factors = clip_factors(norms, [50] * 5)
    assert factors[2] * norms[2] == pytest.approx(CLIP_MULTIPLE * 2.0)
    assert [factor for index, factor in enumerate(factors) if index != 2] == [1.0] * 4


def test_of_two_deltas_the_shorter_one_is_the_measure():
    assert clip_factors([1e6, 1.0], [10, 10]) == [CLIP_MULTIPLE / 1e6, 1.0]


def test_a_single_delta_is_not_cut_whatever_its_length():
    assert clip_factors([1e30], [1]) == [1.0]


def test_a_learner_that_trained_for_longer_is_no_runaway():
    assert clip_factors([1.0, 90.0], [1, 100]) == [1.0, 1.0]
    assert clip_factors([1.0, 90.0], [100, 1]) == [1.0, CLIP_MULTIPLE / 90.0]


def test_learners_that_did_not_move_are_no_measure():
    assert clip_factors([0.0, 0.0, 5.0], [1, 1, 1]) == [1.0, 1.0, 1.0]
    assert clip_factors([0.0, 0.0], [1, 1]) == [1.0, 1.0]


@given(st.lists(st.floats(1e-3, 1e3), min_size=3, max_size=9), st.floats(1e6, 1e12), st.data())
def test_fewer_than_half_of_the_learners_cannot_move_the_limit_beyond_the_others(honest, huge, data):
    liars = data.draw(st.integers(0, len(honest) - 1))
    norms = honest + [huge] * liars
    factors = clip_factors(norms, [7] * len(norms))
    assert max(norm * factor for norm, factor in zip(norms, factors, strict=True)) <= 1.001 * CLIP_MULTIPLE * max(
        honest
    )


@given(st.integers(0, 30), st.integers(2, 5))
def test_the_mean_cosine_is_that_of_all_pairs(seed, learners):
    deltas = random_deltas(seed, learners)
    flat = [np.concatenate([tensor.astype(np.float64).ravel() for tensor in delta.values()]) for delta in deltas]
    units = [vector / np.linalg.norm(vector) for vector in flat]
    pairs = [units[i] @ units[j] for i in range(learners) for j in range(i)]
    assert mean_cosine(deltas) == pytest.approx(np.mean(pairs), abs=1e-9)


def test_deltas_that_agree_have_cosine_one_and_opposite_ones_minus_one():
    delta = {"w": np.array([1.0, 2.0], np.float32)}
    assert mean_cosine([delta, {"w": 3 * delta["w"]}]) == pytest.approx(1.0)
    assert mean_cosine([delta, {"w": -delta["w"]}]) == pytest.approx(-1.0)


def test_there_is_no_cosine_with_a_delta_that_has_no_direction():
    delta = {"w": np.array([1.0, 2.0], np.float32)}
    assert mean_cosine([delta, {"w": np.zeros(2, np.float32)}]) is None
