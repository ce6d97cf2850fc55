from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from mixle.utils.exact import (
    require_choice,
    require_exact_bool,
    require_exact_int,
    require_finite_float,
    require_nonnegative_int,
    require_positive_int,
)


@pytest.mark.parametrize("value", [True, False, np.True_, np.False_])
def test_a_bool_is_returned_as_a_python_bool(value):
    assert require_exact_bool(value, "shuffle") is bool(value)


@pytest.mark.parametrize("value", [0, 1, "false", "", None, 1.0, [], np.array(True), np.int64(1)])
def test_what_is_merely_truthy_or_falsy_is_no_bool(value):
    with pytest.raises(TypeError, match=r"^shuffle=.* must be True or False"):
        require_exact_bool(value, "shuffle")


@pytest.mark.parametrize("value", [7, np.int8(7), np.uint64(7), np.array(7), np.array(7, dtype=np.uint8)])
def test_an_integer_of_any_make_is_returned_as_a_python_int(value):
    exact = require_exact_int(value, "block")
    assert type(exact) is int
    assert exact == 7


def test_a_zero_dimensional_integer_tensor_is_an_integer():
    torch = pytest.importorskip("torch")
    assert require_exact_int(torch.tensor(7), "block") == 7
    for no_integer in (torch.tensor(True), torch.tensor(7.0), torch.tensor([7])):
        with pytest.raises(TypeError, match="block="):
            require_exact_int(no_integer, "block")


@pytest.mark.parametrize(
    "value",
    [
        True,
        np.True_,
        np.array(True),
        7.0,
        1.9,
        np.float64(7),
        np.array(7.0),
        "7",
        b"7",
        None,
        7 + 0j,
        [7],
        np.array([7]),
    ],
)
def test_what_only_resembles_an_integer_is_refused_by_name_and_value(value):
    with pytest.raises(TypeError, match=r"^block=.* must be an integer, not "):
        require_exact_int(value, "block")


def test_an_integer_past_a_bound_is_refused_with_the_bound():
    with pytest.raises(ValueError, match=r"^tp_size=0 must be at least 1$"):
        require_exact_int(0, "tp_size", minimum=1)
    with pytest.raises(ValueError, match=r"^tp_size=9 must be at most 8$"):
        require_exact_int(9, "tp_size", maximum=8)


def test_bounds_themselves_are_accepted():
    assert require_exact_int(1, "n", minimum=1, maximum=1) == 1


def test_positive_begins_at_one_and_nonnegative_at_zero():
    assert require_positive_int(1, "n") == 1
    assert require_nonnegative_int(0, "n") == 0
    with pytest.raises(ValueError, match="n=0 must be at least 1"):
        require_positive_int(0, "n")
    with pytest.raises(ValueError, match="n=-1 must be at least 0"):
        require_nonnegative_int(-1, "n")


def test_integers_beyond_64_bits_stay_exact():
    assert require_exact_int(1 << 80, "seed") == 1 << 80


@pytest.mark.parametrize("value", [2, 2.0, np.float32(2), np.int64(2), np.array(2.0), Fraction(2)])
def test_a_real_number_of_any_make_is_returned_as_a_python_float(value):
    real = require_finite_float(value, "lr")
    assert type(real) is float
    assert real == 2.0


@pytest.mark.parametrize("value", [True, np.True_, "2", None, 2j, np.array([2.0]), np.array(2j), np.array("2"), [2.0]])
def test_what_is_no_real_number_is_refused_by_name_and_value(value):
    with pytest.raises(TypeError, match=r"^lr=.* must be a real number, not "):
        require_finite_float(value, "lr")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -np.inf, np.float32("nan"), 10**400])
def test_numbers_that_are_not_finite_are_refused(value):
    with pytest.raises(ValueError, match=r"^lr=.* must be finite$"):
        require_finite_float(value, "lr")


def test_a_number_past_a_bound_is_refused_with_the_bound():
    assert require_finite_float(0.0, "decay", minimum=0.0) == 0.0
    with pytest.raises(ValueError, match=r"^decay=-0\.5 must be at least 0\.0$"):
        require_finite_float(-0.5, "decay", minimum=0.0)
    with pytest.raises(ValueError, match=r"^lr=0\.0 must be above 0\.0$"):
        require_finite_float(0.0, "lr", exclusive_minimum=0.0)
    with pytest.raises(ValueError, match=r"^beta=1\.5 must be at most 1\.0$"):
        require_finite_float(1.5, "beta", maximum=1.0)


def test_a_choice_is_returned():
    assert require_choice("ddp", "parallel", ("auto", "ddp")) == "ddp"
    assert require_choice(None, "backend", (None, "gloo")) is None


def test_a_misspelt_choice_is_refused_with_all_of_them_and_the_likely_one():
    with pytest.raises(
        ValueError, match=r"^parallel='fdsp' must be one of 'auto', 'ddp', 'fsdp'; did you mean 'fsdp'\?$"
    ):
        require_choice("fdsp", "parallel", ("auto", "ddp", "fsdp"))


@pytest.mark.parametrize("value", ["int4", "", None, 3, ["fp32"], np.array(["fp32"])])
def test_anything_else_is_refused_with_all_choices_and_no_guess(value):
    with pytest.raises(ValueError, match=r"^precision=.* must be one of 'fp32', 'bf16'$"):
        require_choice(value, "precision", ("fp32", "bf16"))


def test_true_is_not_the_choice_one():
    with pytest.raises(ValueError, match="level=True"):
        require_choice(True, "level", (0, 1))


def test_what_is_too_long_for_a_message_is_cut():
    with pytest.raises(ValueError, match=r"^n=an integer of 16610 bits must be at most 5$"):
        require_exact_int(10**5000, "n", maximum=5)
    with pytest.raises(ValueError, match=r"^rate=an integer of 16610 bits must be finite$"):
        require_finite_float(-(10**5000), "rate")
    with pytest.raises(TypeError, match="must be an integer, not list") as caught:
        require_exact_int(list(range(10_000)), "n")
    assert len(str(caught.value)) < 520
