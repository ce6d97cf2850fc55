from __future__ import annotations

import mmap
import multiprocessing
import time

import numpy as np
import pytest

from mixle.data.teacher import doorbell
from mixle.data.teacher.layout import SlotLayout
from mixle.data.teacher.slots import Slots
from mixle.data.teacher.specs import BatchConfig

pytestmark = pytest.mark.skipif(not doorbell.AVAILABLE, reason="needs Linux on x86-64")

FORK = multiprocessing.get_context("fork")
LAYOUT = SlotLayout.of(BatchConfig([{"name": "x", "shape": (2,), "dtype": "float32"}]))
LONG_S = 60.0  # far longer than a test may take: who is not woken fails by its time limit


@pytest.fixture
def shared():
    memory = mmap.mmap(-1, LAYOUT.segment_bytes(4))
    slots = Slots(memoryview(memory), LAYOUT, 4)
    slots.initialize()
    return slots


def in_child(work):
    """Run ``work`` in a fork as soon as a slot is watched."""

    def wait_and_work(slots):
        while not slots._watches.any():
            time.sleep(0.001)
        time.sleep(0.02)
        work(slots)

    def start(slots):
        process = FORK.Process(target=wait_and_work, args=(slots,), daemon=True)
        process.start()
        return process

    return start


@pytest.mark.parametrize(
    "work",
    [
        lambda slots: slots.write(2, 7, 1, bytes(8)),
        lambda slots: slots.write_batch(1, 2, 6, 1, {"x": np.zeros((2, 2), np.float32)}),
    ],
    ids=["write", "write_batch"],
)
def test_the_writer_of_another_process_wakes_the_student(shared, work):
    shared.prepare(1, 2, 6, 1)
    child = in_child(work)(shared)
    assert shared.wait(2, 7, 1, LONG_S)
    child.join(10)
    assert child.exitcode == 0 and not shared._watches.any()


def test_a_slot_that_is_complete_is_not_waited_for(shared):
    shared.prepare(0, 1, 5, 1)
    shared.write(0, 5, 1, bytes(8))
    assert shared.wait(0, 5, 1, LONG_S)


def test_a_slot_that_nobody_writes_is_waited_for_as_long_as_asked(shared):
    shared.prepare(0, 1, 5, 1)
    began = time.monotonic()
    assert not shared.wait(0, 5, 1, 0.05)
    assert time.monotonic() - began >= 0.04


def test_nobody_sleeps_on_a_word_that_has_changed_already(shared):
    doorbell.sleep(shared._address + 32, 1, LONG_S)
