from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mixle.data.teacher.generation import Demand, Generator, Outcome, Target
from mixle.data.teacher.layout import SlotLayout
from mixle.data.teacher.messages import DONE, FAILED, SKIPPED
from mixle.data.teacher.slots import Slots
from mixle.data.teacher.specs import BatchConfig, TensorSpec

CONFIG = BatchConfig([TensorSpec("x", (3,), "float32"), TensorSpec("label", (), "int64")])
LAYOUT = SlotLayout.of(CONFIG)
COUNT = 8
TOKEN = 2**64 - 3  # wraps within the segment
GENERATION = 5


def new_slots(count: int = COUNT) -> Slots:
    slots = Slots(memoryview(bytearray(LAYOUT.segment_bytes(count))), LAYOUT, count)
    slots.initialize()
    slots.prepare(0, count, TOKEN, GENERATION)
    return slots


def target(slots: Slots, first: int = 0, count: int = COUNT) -> Target:
    return Target(slots, first, count, (TOKEN + first) % 2**64, GENERATION)


def sample(value: int) -> dict[str, np.ndarray]:
    return {"x": np.full(3, value, np.float32), "label": np.array(value, np.int64)}


def encoded(value: int) -> bytes:
    return np.full(3, value, "<f4").tobytes() + np.array(value, "<i8").tobytes()


def counting() -> Callable[[], int]:
    numbers = iter(range(1_000))
    return lambda: next(numbers)


def fill(generator: Generator, *targets: Target, demand: Demand | None = None) -> list[list[Outcome]]:
    return generator.fill(targets, "model", {"k": 1}, demand or Demand())


def single(form: str, at: Callable[[], int]) -> Generator:
    def in_place(model_id: str, cfg: dict[str, Any], out: dict[str, np.ndarray]) -> None:
        for name, value in sample(at()).items():
            out[name][...] = value

    return {
        "bytes": Generator(lambda model_id, cfg: encoded(at())),
        "bytearray": Generator(lambda model_id, cfg: bytearray(encoded(at()))),
        "arrays": Generator(lambda model_id, cfg: sample(at())),
        "buffer": Generator(in_place, into_buffer=True),
    }[form]


def batched(form: str, at: Callable[[], int], *, max_batch: int) -> Generator:
    def stacked(count: int) -> dict[str, np.ndarray]:
        samples = [sample(at()) for _ in range(count)]
        return {name: np.stack([one[name] for one in samples]) for name in ("x", "label")}

    def in_place(model_id: str, cfg: dict[str, Any], count: int, out: dict[str, np.ndarray]) -> None:
        for name, value in stacked(count).items():
            out[name][...] = value

    return {
        "list": Generator(lambda model_id, cfg, count: [encoded(at()) for _ in range(count)], max_batch),
        "stacked": Generator(lambda model_id, cfg, count: stacked(count), max_batch),
        "buffer": Generator(in_place, max_batch, into_buffer=True),
    }[form]


@pytest.mark.parametrize("form", ["bytes", "bytearray", "arrays", "buffer"])
def test_samples_made_one_by_one_fill_the_slots_in_order(form: str) -> None:
    slots = new_slots()
    assert fill(single(form, counting()), target(slots)) == [[Outcome(0, COUNT, DONE, None)]]
    assert slots.complete(0, COUNT, TOKEN, GENERATION).all()
    assert slots.intact(0, COUNT).all()
    np.testing.assert_array_equal(slots.arrays(0, COUNT)["label"], np.arange(COUNT))
    np.testing.assert_array_equal(slots.arrays(0, COUNT)["x"][:, 2], np.arange(COUNT))


@pytest.mark.parametrize("form", ["list", "stacked", "buffer"])
@pytest.mark.parametrize("max_batch", [COUNT, 100])
def test_samples_made_in_one_call_fill_the_slots_in_order(form: str, max_batch: int) -> None:
    slots = new_slots()
    assert fill(batched(form, counting(), max_batch=max_batch), target(slots)) == [[Outcome(0, COUNT, DONE, None)]]
    assert slots.complete(0, COUNT, TOKEN, GENERATION).all()
    np.testing.assert_array_equal(slots.arrays(0, COUNT)["label"], np.arange(COUNT))


@pytest.mark.parametrize("form", ["list", "stacked"])
def test_one_call_fills_slots_of_several_students(form: str) -> None:
    one, other = new_slots(), new_slots()
    results = fill(batched(form, counting(), max_batch=COUNT), target(one, 2, 3), target(other, 0, 1))
    assert results == [[Outcome(2, 3, DONE, None)], [Outcome(0, 1, DONE, None)]]
    assert one.arrays(2, 3)["label"].tolist() == [0, 1, 2]
    assert other.arrays(0, 1)["label"].tolist() == [3]
    assert not one.complete(0, COUNT, TOKEN, GENERATION)[[0, 1, 5, 6, 7]].any()


def test_the_model_and_its_configuration_reach_the_generator() -> None:
    seen: list[tuple[str, dict[str, Any]]] = []

    def function(model_id: str, cfg: dict[str, Any]) -> bytes:
        seen.append((model_id, cfg))
        return encoded(0)

    fill(Generator(function), target(new_slots(), 0, 2))
    assert seen == [("model", {"k": 1})] * 2


@pytest.mark.parametrize("size", [0, CONFIG.nbytes() - 1, CONFIG.nbytes() + 1, 10 * LAYOUT.stride])
def test_a_sample_of_the_wrong_size_fails_its_slot_alone_and_touches_no_other(size: int) -> None:
    slots = new_slots()
    sizes = iter([CONFIG.nbytes(), size, CONFIG.nbytes()])
    (outcomes,) = fill(Generator(lambda model_id, cfg: b"\xff" * next(sizes)), target(slots, 0, 3))
    assert [outcome[:3] for outcome in outcomes] == [(0, 1, DONE), (1, 1, FAILED), (2, 1, DONE)]
    assert f"has {size} bytes" in str(outcomes[1].message)
    assert f"exactly {CONFIG.nbytes()}" in str(outcomes[1].message)
    assert slots.complete(0, 3, TOKEN, GENERATION).tolist() == [True, False, True]
    assert slots.intact(0, COUNT).all()
    assert not slots.arrays(3, 5)["x"].any()


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"x": np.zeros(4, np.float32)}, r"'x' has shape (4,); its spec says (3,)"),
        ({"x": np.zeros(3, np.float64)}, "'x' has dtype float64; its spec says float32"),
        ({"y": np.zeros(3, np.float32)}, "has ['y'], which no spec names"),
        ({"x": [1.0, 2.0, 3.0]}, "'x' must be a torch tensor or a NumPy array, not list"),
    ],
)
def test_a_tensor_of_the_wrong_shape_or_dtype_fails_its_slot_and_says_why(wrong: dict[str, Any], words: str) -> None:
    slots = new_slots()
    (outcomes,) = fill(Generator(lambda model_id, cfg: sample(1) | wrong), target(slots, 0, 1))
    assert outcomes[0].outcome == FAILED
    assert words in str(outcomes[0].message)
    assert not slots.complete(0, 1, TOKEN, GENERATION).any()


def test_what_is_no_sample_fails_its_slot() -> None:
    (outcomes,) = fill(Generator(lambda model_id, cfg: None), target(new_slots(), 0, 1))
    assert outcomes[0].outcome == FAILED
    assert "not NoneType" in str(outcomes[0].message)


def test_a_generator_that_raises_fails_the_slot_with_the_type_the_message_and_the_place() -> None:
    at = counting()
    line = sys._getframe().f_lineno + 6
    where = f" ({__file__}, line {line}, in function)"

    def function(model_id: str, cfg: object) -> bytes:
        value = at()
        if value in (1, 2, 4):
            raise RuntimeError("out of memory" if value < 4 else "other")
        return encoded(value)

    (outcomes,) = fill(Generator(function), target(new_slots(), 0, 6))
    assert outcomes == [
        Outcome(0, 1, DONE, None),
        Outcome(1, 2, FAILED, f"RuntimeError: out of memory{where}"),
        Outcome(3, 1, DONE, None),
        Outcome(4, 1, FAILED, f"RuntimeError: other{where}"),
        Outcome(5, 1, DONE, None),
    ]


@pytest.mark.parametrize("error", [SystemExit("enough"), KeyboardInterrupt(), asyncio.CancelledError()])
@pytest.mark.parametrize("options", [{}, {"max_batch": 4}, {"into_buffer": True}])
def test_whatever_a_generator_raises_fails_its_slots_and_nothing_else(error: BaseException, options: Any) -> None:
    def function(*arguments: object) -> bytes:
        raise error

    (outcomes,) = fill(Generator(function, **options), target(new_slots(), 0, 2))
    assert [outcome.outcome for outcome in outcomes] == [FAILED] * len(outcomes)
    assert sum(outcome.count for outcome in outcomes) == 2 and type(error).__name__ in str(outcomes[0].message)


def test_a_long_message_or_one_that_is_no_text_can_be_sent() -> None:
    def function(model_id: str, cfg: object) -> bytes:
        raise ValueError("\udc80" + "€" * 5_000)

    (outcomes,) = fill(Generator(function), target(new_slots(), 0, 1))
    assert len(str(outcomes[0].message).encode()) <= 4_000


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        ([b"", b""], "3 samples were asked for, and the generator returned 2"),
        ({"x": np.zeros((2, 3), np.float32)}, "tensor 'x' must be (3, ...), not shape (2, 3)"),
        ({"x": 1.0}, "not float"),
        (b"\0" * 3 * CONFIG.nbytes(), "not bytes"),
        (None, "not NoneType"),
    ],
)
def test_a_batch_that_is_none_fails_all_its_slots(returned: object, words: str) -> None:
    slots = new_slots()
    (outcomes,) = fill(Generator(lambda model_id, cfg, count: returned, 8), target(slots, 0, 3))
    assert [outcome[:3] for outcome in outcomes] == [(0, 3, FAILED)]
    assert words in str(outcomes[0].message)
    assert not slots.complete(0, 3, TOKEN, GENERATION).any()


def test_one_bad_sample_of_a_sequence_fails_alone() -> None:
    slots = new_slots()
    samples = [encoded(0), b"short", encoded(2)]
    (outcomes,) = fill(Generator(lambda model_id, cfg, count: samples, 8), target(slots, 0, 3))
    assert [outcome[:3] for outcome in outcomes] == [(0, 1, DONE), (1, 1, FAILED), (2, 1, DONE)]


def test_a_generator_that_fills_buffers_must_return_nothing() -> None:
    slots = new_slots()
    generator = Generator(lambda model_id, cfg, out: encoded(1), into_buffer=True)
    (outcomes,) = fill(generator, target(slots, 0, 1))
    assert "returns None, not bytes" in str(outcomes[0].message)
    assert not slots.complete(0, 1, TOKEN, GENERATION).any()


@pytest.mark.parametrize("form", ["bytes", "buffer"])
@given(after=st.integers(0, COUNT))
def test_a_newer_generation_ends_the_piece_before_the_next_sample(form: str, after: int) -> None:
    slots, demand, at = new_slots(), Demand(), counting()

    def switching() -> int:
        value = at()
        if value + 1 == after:
            demand.raise_to(GENERATION + 1)
        return value

    if after == 0:
        demand.raise_to(GENERATION + 1)
    (outcomes,) = fill(single(form, switching), target(slots), demand=demand)
    expected = [Outcome(0, after, DONE, None), Outcome(after, COUNT - after, SKIPPED, None)]
    assert outcomes == [outcome for outcome in expected if outcome.count]
    assert slots.complete(0, COUNT, TOKEN, GENERATION).sum() == after


def test_no_batch_is_made_for_an_older_generation() -> None:
    def function(model_id: str, cfg: object, count: int) -> list[bytes]:
        raise AssertionError("called")

    demand = Demand()
    demand.raise_to(GENERATION + 1)
    assert fill(Generator(function, 8), target(new_slots(), 1, 2), demand=demand) == [[Outcome(1, 2, SKIPPED, None)]]


def test_an_ended_demand_stays_ended() -> None:
    demand = Demand()
    demand.raise_to(3)
    assert (demand.newest, demand.ended) == (3, False)
    demand.end()
    demand.raise_to(7)
    assert demand.ended
    assert demand.newest > 2**62


@pytest.mark.parametrize("form", ["bytes", "buffer", "list", "stacked"])
def test_a_slot_that_was_ordered_anew_is_not_written(form: str) -> None:
    slots = new_slots()
    old = target(slots, 0, 1)
    slots.prepare(0, 1, 77, GENERATION)
    at = counting()
    generator = single(form, at) if form in ("bytes", "buffer") else batched(form, at, max_batch=4)
    (outcomes,) = fill(generator, old)
    assert outcomes[0].outcome == SKIPPED
    assert not slots.complete(0, 1, 77, GENERATION).any()
    assert not slots.array(0)["x"].any()


@pytest.mark.parametrize("form", ["bytes", "buffer", "list", "stacked"])
def test_a_slot_that_is_complete_already_is_left_as_its_reader_sees_it(form: str) -> None:
    slots = new_slots()
    slots.write(1, (TOKEN + 1) % 2**64, GENERATION, encoded(99))
    at = counting()
    generator = single(form, at) if form in ("bytes", "buffer") else batched(form, at, max_batch=4)
    (outcomes,) = fill(generator, target(slots, 0, 3))
    assert [(outcome.first, outcome.outcome) for outcome in outcomes] == [(0, DONE), (1, DONE), (2, DONE)]
    assert slots.arrays(0, 3)["label"].tolist() == [0, 99, 1]


def test_a_checksum_is_put_beside_each_sample_where_it_is_wanted() -> None:
    slots = new_slots()
    fill(Generator(lambda model_id, cfg: encoded(4), checksum=True), target(slots, 0, 2))
    assert slots.intact(0, 2).all()
    slots.array(1)["x"][0] = 5
    assert slots.intact(0, 2).tolist() == [True, False]
