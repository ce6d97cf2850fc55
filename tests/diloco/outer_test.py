from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mixle.diloco.merge import norm
from mixle.diloco.outer import final_step, nesterov_step, publish


def draw(seed: int, shape: tuple[int, ...] = (3, 7)) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def test_two_outer_steps_by_hand():
    theta, momentum = np.array([1.0], np.float32), np.zeros(1, np.float32)
    nesterov_step(theta, momentum, np.array([2.0], np.float32), outer_lr=0.5, outer_momentum=0.5)
    # m = 2; theta = 1 - 0.5 * (2 + 0.5 * 2)
    assert (momentum[0], theta[0]) == (2.0, -0.5)
    nesterov_step(theta, momentum, np.array([1.0], np.float32), outer_lr=0.5, outer_momentum=0.5)
    # m = 0.5 * 2 + 1; theta = -0.5 - 0.5 * (1 + 0.5 * 2)
    assert (momentum[0], theta[0]) == (2.0, -1.5)


@given(st.floats(0.01, 2), st.floats(0, 0.99), st.integers(0, 100))
def test_the_outer_step_is_its_formula(outer_lr, outer_momentum, seed):
    theta, momentum, delta = draw(seed), draw(seed + 1), draw(seed + 2)
    exact_momentum = outer_momentum * momentum.astype(np.float64) + delta
    exact_theta = theta - outer_lr * (delta + outer_momentum * exact_momentum)
    nesterov_step(theta, momentum, delta, outer_lr=outer_lr, outer_momentum=outer_momentum)
    np.testing.assert_allclose(momentum, exact_momentum, atol=2e-6)
    np.testing.assert_allclose(theta, exact_theta, atol=5e-6)


def test_the_outer_step_is_that_of_torch_sgd_with_nesterov_momentum():
    torch = pytest.importorskip("torch")
    parameter = torch.nn.Parameter(torch.from_numpy(draw(0)))
    optimizer = torch.optim.SGD([parameter], lr=0.7, momentum=0.9, nesterov=True)
    theta, momentum = draw(0), np.zeros((3, 7), np.float32)
    for seed in range(1, 6):
        parameter.grad = torch.from_numpy(draw(seed))
        optimizer.step()
        nesterov_step(theta, momentum, draw(seed), outer_lr=0.7, outer_momentum=0.9)
    np.testing.assert_allclose(theta, parameter.detach().numpy(), rtol=1e-5, atol=1e-5)


def test_an_array_larger_than_a_block_is_stepped_to_its_end():
    theta, momentum, delta = (draw(seed, (100_003,)) for seed in range(3))
    expected = theta - np.float32(0.7) * (delta + np.float32(0.9) * (np.float32(0.9) * momentum + delta))
    nesterov_step(theta, momentum, delta, outer_lr=0.7, outer_momentum=0.9)
    np.testing.assert_array_equal(theta, expected)


def test_a_round_of_final_snapshots_applies_the_delta_whole():
    theta, delta = draw(0), draw(1)
    expected = theta - delta
    final_step(theta, delta)
    np.testing.assert_array_equal(theta, expected)


def test_a_step_that_overflows_shows_in_the_norm_of_the_result():
    theta, momentum, delta = (np.full(4, value, np.float32) for value in (0, 0, 3e38))
    nesterov_step(theta, momentum, delta, outer_lr=0.7, outer_momentum=0.9)
    assert not math.isfinite(norm({"w": theta}))


def coarse(array: np.ndarray) -> np.ndarray:
    return np.round(array * 4).astype(np.float32) / np.float32(4)


def test_a_published_update_is_the_quantized_way_to_the_master():
    published, master = np.array([1.0, 2.0], np.float32), np.array([1.3, 1.9], np.float32)
    update = publish(published, master, coarse)
    np.testing.assert_array_equal(update, [0.25, 0.0])
    np.testing.assert_array_equal(published, [1.25, 2.0])
    np.testing.assert_array_equal(master, np.array([1.3, 1.9], np.float32))


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=10))
def test_a_receiver_rebuilds_the_published_parameters_bit_for_bit_and_stays_within_a_rounding_of_the_master(seeds):
    published, received, master = draw(0), draw(0), draw(0)
    for seed in seeds:
        master += draw(seed)
        received += publish(published, master, coarse)
        np.testing.assert_array_equal(received, published)
    np.testing.assert_allclose(published, master, atol=0.1251)


def test_what_rounding_left_out_is_published_once_it_amounts_to_something():
    published, master = np.zeros(1, np.float32), np.zeros(1, np.float32)
    for _ in range(20):
        master += np.float32(0.05)
        publish(published, master, coarse)
    assert published[0] == 1.0


@pytest.mark.parametrize("bad", [np.zeros(4), np.zeros((2, 2), np.float32), np.zeros(8, np.float32)[::2]])
def test_arrays_that_cannot_be_stepped_in_place_are_refused_by_name(bad):
    good = np.zeros(4, np.float32)
    with pytest.raises(ValueError, match="momentum"):
        nesterov_step(good, bad, good, outer_lr=0.7, outer_momentum=0.9)
    with pytest.raises(ValueError, match="delta"):
        final_step(good, bad)
    with pytest.raises(ValueError, match="update"):
        publish(good, good, lambda _: bad)
