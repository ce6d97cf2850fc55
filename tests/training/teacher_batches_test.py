"""How batches are fetched and agreed on, with a supply that the test scripts."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

from mixle.data.teacher.errors import GeneratorFailed, NoWorker
from mixle.training.teacher_batches import Deliveries, Share, TeacherBatches

CPU = torch.device("cpu")


class Rows(NamedTuple):
    inputs: torch.Tensor


class Identity:
    """Rows of numbers, of which those that are not zero count."""

    def batch(self, tensors, device):
        if (tensors["x"] < 0).any():
            raise ValueError("a negative number")
        return Rows(tensors["x"].to(device))

    def places(self, tensors):
        return int((tensors["x"] != 0).sum())


class Batch:
    def __init__(self, value: float, generation: int) -> None:
        self.value, self.generation, self.released = value, generation, False

    def tensors(self):
        assert not self.released
        return {"x": torch.full((2,), float(self.value))}

    def release(self):
        self.released = True


class Script:
    """Hand out batches, raise errors and learn of generations as the script says."""

    def __init__(self, *events: Batch | Exception | int) -> None:
        self.events, self.generation = list(events), 0

    def request_batch(self, size, timeout_ms):
        event = self.events.pop(0)
        if isinstance(event, int):
            self.generation = event
            return None
        if isinstance(event, Exception):
            raise event
        return event


def batches(script: Script, **options) -> TeacherBatches[Rows]:
    order = {"steps": 5, "accumulation": 1, "batch_size": 2, "seed": 0, "max_retries": 2, "deliveries": Deliveries()}
    return TeacherBatches(script, Identity(), Rows(torch.zeros(2)), Share(0, 1, 1), **{**order, **options})


def test_a_batch_is_handed_out_where_it_lies_and_released_when_the_next_step_begins():
    first, second = Batch(1, 0), Batch(2, 0)
    source = batches(Script(first, second))
    assert source.targets(0, range(0, 1)) == 2
    assert source.batch(0, 0).inputs.tolist() == [1, 1]
    assert not first.released
    source.targets(0, range(1, 2))
    assert first.released and not second.released
    source.release()
    assert second.released


def test_a_batch_that_grew_old_while_others_were_fetched_is_dropped():
    old, new = Batch(1, 0), [Batch(2, 3), Batch(3, 3)]
    deliveries = Deliveries()
    source = batches(Script(old, 3, *new), accumulation=2, deliveries=deliveries)
    source.targets(0, range(0, 2))
    assert old.released
    assert [source.batch(0, step).inputs[0].item() for step in (0, 1)] == [2, 3]
    assert deliveries == Deliveries(fetched=6, stale=2, steps=1, served={3: 4}, switches={3: 1})


def test_the_step_with_which_a_generation_began_is_counted_over_all_epochs():
    deliveries = Deliveries()
    source = batches(Script(*(Batch(1, 1) for _ in range(3)), 2, Batch(1, 2)), deliveries=deliveries)
    for epoch, step in ((0, 3), (0, 4), (1, 0), (1, 1)):
        source.targets(epoch, range(step, step + 1))
    assert deliveries.switches == {1: 1, 2: 4}


def test_orders_that_fail_are_placed_again_a_bounded_number_of_times():
    deliveries = Deliveries()
    failures = [GeneratorFailed(f"try {number}") for number in range(5)]
    source = batches(Script(*failures[:2], Batch(1, 0), *failures[2:]), deliveries=deliveries)
    source.targets(0, range(0, 1))
    assert source.batch(0, 0).inputs.tolist() == [1, 1]
    source.targets(0, range(1, 2))
    with pytest.raises(GeneratorFailed, match="try 4"):
        source.batch(0, 1)
    assert deliveries.retried == 4


def test_an_error_of_the_supply_is_raised_where_the_batch_is_asked_for():
    source = batches(Script(NoWorker("nobody serves this")))
    assert source.targets(0, range(0, 1)) > 0
    with pytest.raises(NoWorker, match="nobody serves this"):
        source.batch(0, 0)
    assert source.blank().inputs.tolist() == [0, 0]


def test_an_error_in_the_samples_is_raised_where_the_batch_is_asked_for():
    source = batches(Script(Batch(-1, 0)))
    source.targets(0, range(0, 1))
    with pytest.raises(ValueError, match="a negative number"):
        source.batch(0, 0)


def test_samples_of_which_nothing_counts_are_refused():
    source = batches(Script(Batch(0, 0)))
    source.targets(0, range(0, 1))
    with pytest.raises(ValueError, match="no place of the samples counts"):
        source.batch(0, 0)


def test_draws_differ_between_steps_and_ranks():
    seeds = {batches(Script()).random_seed(0, step) for step in range(10)}
    other = TeacherBatches(
        Script(), Identity(), Rows(torch.zeros(2)), Share(1, 1, 1),
        steps=5, accumulation=1, batch_size=2, seed=0, max_retries=2, deliveries=Deliveries(),
    )  # fmt: skip
    assert len(seeds | {other.random_seed(0, 0)}) == 11
