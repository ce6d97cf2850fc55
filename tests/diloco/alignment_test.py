from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from mixle.diloco.alignment import Adaptive, Blend, Carry, Overwrite, align

# Multiples of 1/16 of this size are added and subtracted exactly in float32.
exact = arrays(np.float32, st.just((3, 2)), elements=st.integers(-(2**15), 2**15).map(lambda n: np.float32(n / 16)))
anything = arrays(np.float32, st.just((3, 2)), elements=st.floats(-1e6, 1e6, width=32))


@given(anything, anything, anything)
def test_overwriting_takes_the_commit_as_it_is(theta, committed, reference):
    align(theta, committed, reference, Overwrite())
    np.testing.assert_array_equal(theta, committed)


@given(exact, exact, exact)
def test_carrying_adds_the_steps_since_the_reference_to_the_commit(theta, committed, reference):
    expected = committed + (theta - reference)
    align(theta, committed, reference, Carry())
    np.testing.assert_array_equal(theta, expected)


@given(anything, anything)
def test_carrying_no_step_ends_on_the_commit_bit_for_bit(reference, committed):
    theta = reference.copy()
    align(theta, committed, reference, Carry())
    np.testing.assert_array_equal(theta, committed)


@given(anything, anything, st.floats(0, 1))
def test_blending_mixes_the_two(theta, committed, mixing):
    expected = mixing * theta.astype(np.float64) + (1 - mixing) * committed.astype(np.float64)
    align(theta, committed, committed, Blend(mixing))
    np.testing.assert_allclose(theta, expected, rtol=1e-6, atol=0.5)


@pytest.mark.parametrize("how", [Carry(), Overwrite(), Blend(0.5)])
def test_aligning_works_in_place_and_leaves_the_rest_alone(how):
    theta, committed, reference = (np.full(4, value, np.float32) for value in (3, 5, 2))
    view = theta[1:3]
    align(view, committed[1:3], reference[1:3], how)
    changed = {Carry(): 6, Overwrite(): 5, Blend(0.5): 4}[how]
    np.testing.assert_array_equal(theta, [3, changed, changed, 3])
    np.testing.assert_array_equal([committed[0], reference[0]], [5, 2])


@pytest.mark.parametrize(("how", "expected"), [(Carry(), 6), (Overwrite(), 5), (Blend(0.5), 4)])
def test_single_numbers_are_aligned_in_place_too(how, expected):
    theta = np.array(3, np.float32)
    align(theta, np.array(5, np.float32), np.array(2, np.float32), how)
    assert theta == expected


@pytest.mark.parametrize(("how", "expected"), [(Carry(), 6), (Overwrite(), 5), (Blend(0.5), 4)])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_tensors_are_aligned_in_place_in_their_own_dtype(how, expected, dtype):
    torch = pytest.importorskip("torch")
    theta, committed, reference = (torch.full((2,), value, dtype=getattr(torch, dtype)) for value in (3.0, 5.0, 2.0))
    alias = theta.view(2)
    align(theta, committed, reference, how)
    assert alias.tolist() == [expected, expected]
    assert alias.dtype == getattr(torch, dtype)


def test_adaptive_alignment_must_have_chosen_first():
    with pytest.raises(TypeError, match=r"how=Adaptive\(.*\) must be Carry\(\), Overwrite\(\) or Blend\(mixing\)"):
        align(np.zeros(1), np.zeros(1), np.zeros(1), Adaptive())


@pytest.mark.parametrize(
    ("agreement", "last", "chosen"),
    [
        (0.6, Overwrite(), Carry()),
        (1.0, Carry(), Carry()),
        (0.39, Carry(), Overwrite()),
        (-1.0, Overwrite(), Overwrite()),
        (0.4, Carry(), Carry()),
        (0.4, Overwrite(), Overwrite()),
        (0.59, Overwrite(), Overwrite()),
        (None, Overwrite(), Overwrite()),
        (None, Carry(), Carry()),
    ],
)
def test_adaptive_alignment_changes_only_beyond_its_thresholds(agreement, last, chosen):
    assert Adaptive().choose(agreement, last) == chosen


@given(st.lists(st.floats(0.4, 0.6, exclude_max=True), min_size=1))
def test_agreement_between_the_thresholds_never_changes_the_choice(agreements):
    for start in (Carry(), Overwrite()):
        choice = start
        for agreement in agreements:
            choice = Adaptive().choose(agreement, choice)
        assert choice == start


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Blend(1.5), ValueError, "mixing=1.5 must be at most 1"),
        (lambda: Blend(True), TypeError, "mixing=True must be a real number"),
        (lambda: Adaptive(carry_from=2.0), ValueError, "carry_from=2.0 must be at most 1"),
        (lambda: Adaptive(0.3, 0.5), ValueError, "overwrite_below=0.5 must be at most carry_from=0.3"),
    ],
)
def test_an_alignment_checks_its_numbers(make, error, message):
    with pytest.raises(error, match=message):
        make()
