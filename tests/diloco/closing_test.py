"""What a round makes of its fragment, computed beside it in float64."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mixle.diloco import names
from mixle.diloco.algorithm import DiLoCo
from mixle.diloco.closing import Offer, close
from mixle.diloco.merge import Rda, WeightedMean
from mixle.diloco.records import PayloadRef, Snapshot

MEAN = DiLoCo(4, 1, merge=WeightedMean(), outer_lr=0.7, outer_momentum=0.9)


def offer(learner, delta, *, steps=2, tokens=4, final=False):
    ref = PayloadRef(names.payload(0, "delta", "0" * 64, ".safetensors"), 1)
    snapshot = Snapshot(0, learner, ref, -1, steps, tokens, 0.5, final)
    return Offer(snapshot, {"w": np.asarray(delta, np.float32)})


def closed(offers, algorithm=MEAN, *, theta=(1.0, 2.0), momentum=(0.5, -0.5), quantize=None, master=None):
    start = {"w": np.asarray(theta, np.float32)}
    return close(
        algorithm,
        offers,
        theta=start,
        master=start if master is None else {"w": np.asarray(master, np.float32)},
        momentum={"w": np.asarray(momentum, np.float32)},
        embeddings=frozenset(),
        quantize=quantize,
    )


def test_deltas_weigh_tokens_squared_over_steps_and_the_outer_step_is_nesterovs():
    made = closed([offer("b", [1.0, 0.0], steps=1, tokens=4), offer("a", [0.0, 1.0], steps=4, tokens=4)])
    delta = np.array([16.0, 4.0]) / 20.0
    momentum = 0.9 * np.array([0.5, -0.5]) + delta
    np.testing.assert_allclose(made.momentum["w"], momentum, rtol=1e-6)
    np.testing.assert_allclose(made.theta["w"], [1.0, 2.0] - 0.7 * (delta + 0.9 * momentum), rtol=1e-6)
    assert [(each.learner, each.weight) for each in made.contributions] == [("a", 0.2), ("b", 0.8)]
    assert made.cosine == pytest.approx(0.0)


def test_final_snapshots_alone_are_added_whole_and_leave_the_momentum():
    made = closed([offer("a", [1.0, -1.0], final=True)])
    np.testing.assert_array_equal(made.theta["w"], np.float32([0.0, 3.0]))
    np.testing.assert_array_equal(made.momentum["w"], np.float32([0.5, -0.5]))


def test_a_final_snapshot_among_others_is_merged_as_they_are():
    both = [offer("a", [1.0, 1.0], final=True), offer("b", [1.0, 1.0])]
    np.testing.assert_array_equal(closed(both).theta["w"], closed([offer("b", [1.0, 1.0])]).theta["w"])


def test_a_learner_with_nothing_to_add_counts_for_nothing():
    idle = Offer(Snapshot(0, "idle", None, -1, 0, 0, 0.0, True), {"w": np.float32([9.0, 9.0])})
    made = closed([idle, offer("a", [1.0, 1.0])])
    assert [each.learner for each in made.contributions] == ["a"]
    np.testing.assert_array_equal(made.theta["w"], closed([offer("a", [1.0, 1.0])]).theta["w"])


def test_a_round_without_any_work_changes_nothing():
    made = closed([])
    np.testing.assert_array_equal(made.theta["w"], np.float32([1.0, 2.0]))
    np.testing.assert_array_equal(made.momentum["w"], np.float32([0.5, -0.5]))
    assert made.contributions == () and made.cosine is None


def test_a_step_that_overflows_is_not_taken_and_its_snapshots_are_refused():
    made = closed([offer("a", [3e38, 0.0]), offer("b", [3e38, 0.0])], momentum=(3e38, 0.0))
    np.testing.assert_array_equal(made.theta["w"], np.float32([1.0, 2.0]))
    assert [each.reason.partition(":")[0] for each in made.rejections] == ["overflow", "overflow"]
    assert made.contributions == ()


def test_a_runaway_is_clipped_and_its_contribution_says_by_how_much():
    made = closed([offer("a", [3.0, 4.0]), offer("b", [3.0, 4.0]), offer("c", [3e6, 4e6])])
    factors = {each.learner: each.clipped for each in made.contributions}
    assert factors == {"a": 1.0, "b": 1.0, "c": pytest.approx(50.0 / 5e6)}


def test_what_rounding_an_update_leaves_out_stays_in_the_master():
    def halves(update):
        return {name: np.round(array * 2).astype(np.float32) / 2 for name, array in update.items()}

    made = closed([offer("a", [1.0, -0.3])], quantize=halves, momentum=(0.0, 0.0))
    exact = closed([offer("a", [1.0, -0.3])], momentum=(0.0, 0.0))
    np.testing.assert_array_equal(made.master["w"], exact.theta["w"])
    np.testing.assert_array_equal(made.theta["w"], np.float32([1.0, 2.0]) + made.update["w"])
    after = closed([], quantize=halves, theta=made.theta["w"], master=made.master["w"] + np.float32(0.5))
    assert np.abs(after.theta["w"] - after.master["w"]).max() <= 0.25


def test_the_arguments_are_left_alone():
    theta, delta = np.float32([1.0, 2.0]), np.float32([1.0, 1.0])
    before = theta.copy(), delta.copy()
    close(
        MEAN,
        [Offer(offer("a", delta).snapshot, {"w": delta})],
        theta={"w": theta},
        master={"w": theta},
        momentum={"w": np.zeros(2, np.float32)},
        embeddings=frozenset(),
        quantize=None,
    )
    np.testing.assert_array_equal(theta, before[0])
    np.testing.assert_array_equal(delta, before[1])


# ---- buffers


def close_buffers(algorithm, held, *, master=None, quantize=None, start=1e3):
    """Close a round of sites that hold these variances, beside a weight that they move far apart."""
    theta = {"var": np.full(3, start, np.float32), "w": np.zeros(2, np.float32)}
    offers = []
    for index, values in enumerate(held):
        delta = {"var": theta["var"] - np.float32(values), "w": np.float32([1.0, 10.0**index])}
        offers.append(Offer(offer(f"n{index}", 0).snapshot, delta))
    return close(
        algorithm,
        offers,
        theta=theta,
        master=theta if master is None else master,
        momentum={name: np.zeros_like(array) for name, array in theta.items()},
        embeddings=frozenset(),
        quantize=quantize,
        buffers=frozenset({"var"}),
    )


@pytest.mark.parametrize("algorithm", [MEAN, DiLoCo(4, 1, merge=Rda(), outer_lr=1.5)], ids=["mean", "rda"])
def test_buffers_become_the_mean_of_what_the_sites_hold_whatever_the_outer_optimizer_is(algorithm):
    made = close_buffers(algorithm, [[0.0, 1.0, 4.0], [1.0, 1.0, 1.0], [2.0, 1.0, 1.0]])
    np.testing.assert_allclose(made.theta["var"], [1.0, 1.0, 2.0], rtol=1e-4)
    assert not made.momentum["var"].any() and made.momentum["w"].all()


@given(
    st.lists(st.lists(st.floats(0.0, 2.0**40, width=32), min_size=3, max_size=3), min_size=1, max_size=4),
    st.floats(0.0, 2.0**40, width=32),
)
def test_no_variance_that_sites_average_is_ever_negative(held, start):
    made = close_buffers(MEAN, held, start=start)
    assert (made.theta["var"] >= 0).all()
    ends = np.stack([np.float32(start) - (np.float32(start) - np.float32(values)) for values in held])
    assert (made.theta["var"] >= ends.min(0)).all() and (made.theta["var"] <= ends.max(0)).all()


def test_clipping_and_cosines_are_those_of_the_weights():
    held = [[1e6] * 3, [1.0] * 3]
    made = close_buffers(MEAN, held)
    assert [each.clipped for each in made.contributions] == [1.0, 1.0]
    assert [each.norm for each in made.contributions] == pytest.approx([2**0.5, 101**0.5])
    assert made.cosine == pytest.approx(11 / (2 * 101) ** 0.5, rel=1e-5)
