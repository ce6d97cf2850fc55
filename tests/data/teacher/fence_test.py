from __future__ import annotations

import multiprocessing
import os
import signal
import threading

import pytest

from mixle.data.teacher.fence import Fence, GenerationReader, shared_generation
from mixle.data.teacher.messages import ModelState


def model(generation):
    return ModelState(generation, f"m{generation}", None, b"")


def read(reader, pipe):
    pipe.send(reader.newest())


def test_the_generation_only_goes_forward():
    value = shared_generation()
    fence = Fence(GenerationReader(value), publishes=True)
    for generation in (1, 3, 2):
        fence.learn(model(generation))
    assert fence.generation == 3 and fence.model.model_id == "m3" and value.value == 3


def test_what_a_reader_has_seen_it_keeps():
    value = multiprocessing.Value("Q", 5)
    reader = GenerationReader(value)
    assert reader.newest() == 5
    value.value = 4
    assert reader.newest() == 5 and reader.note(7) == 7 and reader.newest() == 7


def test_a_reader_alone_writes_nothing():
    value = shared_generation()
    fence = Fence(GenerationReader(value), publishes=False)
    fence.learn(model(2))
    assert fence.generation == 2 and value.value == 0


@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.parametrize("make", [shared_generation, lambda: multiprocessing.Value("Q", 0)])
def test_another_process_sees_what_was_learnt_whatever_its_start_method(method, make):
    value = make()
    Fence(GenerationReader(value), publishes=True).learn(model(6))
    context = multiprocessing.get_context(method)
    ours, theirs = context.Pipe()
    process = context.Process(target=read, args=(GenerationReader(value), theirs))
    process.start()
    assert ours.poll(60) and ours.recv() == 6
    process.join()
    process.close()
    ours.close()
    theirs.close()


def test_a_process_that_dies_with_the_lock_stops_nobody():
    value = shared_generation()
    child = os.fork()
    if child == 0:
        value.get_lock().acquire()
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    value.value = 3
    assert value.value == 3


def test_learning_in_many_threads_ends_at_the_newest():
    value = shared_generation()
    fence = Fence(GenerationReader(value), publishes=True)
    threads = [
        threading.Thread(target=lambda start=start: [fence.learn(model(g)) for g in range(start, 400, 8)])
        for start in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert fence.generation == value.value == 399 and fence.model.generation == 399


def test_a_retired_value_says_so_until_it_is_used_again():
    reader = GenerationReader(shared_generation())
    reader.retire()
    assert reader.closed
    reader.reopen()
    assert not reader.closed


@pytest.mark.parametrize("value", [3, "1", None, True, multiprocessing.RawValue("d", 1.0)])
def test_what_shows_no_integer_is_refused(value):
    with pytest.raises(TypeError, match="generation_value="):
        GenerationReader(value)
