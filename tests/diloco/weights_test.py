from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mixle.diloco.weights import Tally, Work, shares

works = st.builds(Work, st.integers(1, 10**15), st.integers(1, 10**9))


def test_a_weight_is_tokens_squared_over_steps():
    assert Work(30, 4).weight == 225
    assert Work(10, 3).weight == Fraction(100, 3)


@given(st.lists(works, min_size=1, max_size=8))
def test_shares_are_the_weights_over_their_sum_correctly_rounded(works):
    exact = [Fraction(work.tokens) ** 2 / work.steps for work in works]
    assert shares(works) == [float(weight / sum(exact)) for weight in exact]
    assert sum(shares(works)) == pytest.approx(1, rel=1e-15)


def test_shares_of_a_learner_twice_as_fast():
    # Same steps, double the tokens: four times the weight.
    assert shares([Work(100, 10), Work(200, 10)]) == [0.2, 0.8]


def test_no_work_has_no_shares():
    with pytest.raises(ValueError, match="works"):
        shares([])


@pytest.mark.parametrize("samples", [3, np.int64(3), np.uint8(3), np.array(3)])
def test_exact_integers_of_any_kind_are_counted(samples):
    tally = Tally(2)
    tally.add(samples)
    assert tally.work(0) == Work(3, 1)
    assert type(tally.tokens) is int


def test_a_zero_dimensional_integer_tensor_is_counted():
    torch = pytest.importorskip("torch")
    tally = Tally(1)
    tally.add(torch.tensor(3))
    assert tally.work(0) == Work(3, 1)


@pytest.mark.parametrize(
    ("samples", "error"),
    [(0, ValueError), (-1, ValueError), (2.0, TypeError), (True, TypeError), ("2", TypeError), (None, TypeError)],
)
def test_what_is_no_positive_integer_is_refused_and_nothing_is_counted(samples, error):
    tally = Tally(1)
    with pytest.raises(error, match="samples="):
        tally.add(samples)
    assert tally == Tally(1)


def test_a_fragment_without_a_step_has_no_work():
    tally = Tally(2)
    tally.add(5)
    tally.begin(1, tally.now())
    assert tally.work(1) is None
    assert tally.work(0) == Work(5, 1)


@given(st.lists(st.tuples(st.integers(1, 50), st.integers(0, 2), st.booleans()), max_size=30))
def test_work_is_counted_per_fragment_from_where_its_delta_began(events):
    tally, since, at_snapshot = Tally(3), [[], [], []], [(0, 0)] * 3
    snapshot_length = [0, 0, 0]
    for samples, fragment, lands in events:
        tally.add(samples)
        for steps in since:
            steps.append(samples)
        if lands:
            tally.begin(fragment, at_snapshot[fragment])
            del since[fragment][: snapshot_length[fragment]]
            snapshot_length[fragment] = 0
        else:
            at_snapshot[fragment] = tally.now()
            snapshot_length[fragment] = len(since[fragment])
    for fragment, steps in enumerate(since):
        assert tally.work(fragment) == (Work(sum(steps), len(steps)) if steps else None)


@pytest.mark.parametrize(("tokens", "steps"), [(0, 1), (1, 0), (-1, 1)])
def test_work_without_tokens_or_steps_is_refused(tokens, steps):
    with pytest.raises(ValueError, match=r"(tokens|steps)=(0|-1) must be at least 1"):
        Work(tokens, steps)
