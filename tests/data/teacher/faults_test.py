"""What students see when something dies or goes wrong: real processes, ended by SIGKILL."""

from __future__ import annotations

import itertools
import mmap
import multiprocessing
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from teacher_processes import PATTERN, ROOT, WORDS, read, teacher_processes, until
from torch.utils.data import DataLoader

from mixle.data.teacher.dataset import DistillIterableDataset
from mixle.data.teacher.errors import GeneratorFailed, LeaderRefused, NoWorker
from mixle.data.teacher.layout import SlotLayout
from mixle.data.teacher.student import StudentClient

CANARY_BYTES = 64


@pytest.fixture
def run():
    with teacher_processes() as run:
        yield run


def take(client, count):
    """Return (model, number) of so many samples."""
    seen = []
    while len(seen) < count:
        with client.request_sample(60_000) as ref:
            seen += read(ref.tensors())
    return seen


def maps(process):
    """Return the segments that a process has mapped."""
    return set(re.findall(r"/dev/shm/(mx\S+)", Path(f"/proc/{process.pid}/maps").read_text()))


def test_the_sample_that_a_worker_died_writing_is_made_whole_by_another(run):
    run.start("broker")
    dying = run.start("worker", generator="half", into_buffer=True)
    with StudentClient(0, 1, PATTERN, **run.client) as client:
        client.hello()
        assert client.request_sample(0) is None
        until((run.directory / "half-written").exists, "half a sample")
        run.start("worker")
        run.kill(dying)
        assert len(set(take(client, 3))) == 3


def test_a_broker_that_is_away_for_three_seconds_costs_no_sample_and_repeats_none(run):
    broker = run.start("broker")
    run.start("worker")
    with StudentClient(0, 4, PATTERN, **run.client) as client:
        client.set_model("m", {"number": 1})
        seen = take(client, 10)
        run.kill(broker)
        until_back = time.monotonic() + 3.0
        while (left := until_back - time.monotonic()) > 0:
            if (ref := client.request_sample(1000 * left)) is not None:
                seen += read(ref.tensors())
                ref.release()
        run.start("broker")
        seen += take(client, 20)
        assert client.generation == 1 and {model for model, _ in seen} == {1}
        assert len(set(seen)) == len(seen)
        assert client.set_model("m", {"number": 2}) == 2
        assert take(client, 1)[0][0] == 2


def test_a_killed_students_memory_is_gone_and_its_worker_serves_on(run):
    run.start("broker")
    worker = run.start("worker")
    dying = run.start("student", rank=1, slots=16)
    until(lambda: maps(worker), "work for the first student")
    with StudentClient(0, 2, PATTERN, **run.client) as client:
        take(client, 2)
        mine = client.hello()["buf_name"].removeprefix("/")
        assert len(run.segments()) == 2
        run.kill(dying)
        until(lambda: run.segments() == {mine}, "the end of the dead student's memory")
        until(lambda: maps(worker) == {mine}, "the end of the worker's map of it")
        take(client, 5)


def test_what_a_student_left_that_died_without_a_broker_is_cleared_up_by_the_next(run):
    broker = run.start("broker")
    run.start("worker")
    dying = run.start("student")
    run.kill(broker)
    run.kill(dying)
    assert len(run.segments()) == 1
    run.start("broker")
    assert run.segments() == set()


def test_students_that_crash_in_turn_leave_no_map_at_the_worker(run):
    run.start("broker")
    worker = run.start("worker")
    for _ in range(3):
        dying = run.start("student", slots=4)
        until(lambda: maps(worker), "work for the student")
        run.kill(dying)
        until(lambda: not maps(worker) and not run.segments(), "the end of its memory")


# In a process of its own: torch raises wherever its handler of SIGCHLD finds the main thread, and leaves pipes open.
TRAINER = """
import multiprocessing, os, signal, sys
from torch.utils.data import DataLoader
from mixle.data.teacher.dataset import DistillIterableDataset
from teacher_processes import PATTERN
dataset = DistillIterableDataset(0, multiprocessing.Value("Q", 0), 4, PATTERN, sys.argv[1])
batches = iter(DataLoader(dataset, batch_size=2, num_workers=2, multiprocessing_context="fork"))
next(batches)
print("trains", flush=True)
os.kill(multiprocessing.active_children()[0].pid, signal.SIGKILL)
for _ in batches:
    pass
"""


def test_a_killed_loader_worker_is_reported_to_the_trainer_and_leaves_nothing(run):
    run.start("broker")
    run.start("worker")
    path = os.pathsep.join((str(ROOT), str(ROOT / "tests" / "support")))
    ended = subprocess.run(
        [sys.executable, "-c", TRAINER, run.frontend],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (ended.returncode, ended.stdout) == (1, "trains\n"), ended.stderr
    assert "Error" in ended.stderr  # torch raises it at no certain place, and not always with a traceback
    dataset = DistillIterableDataset(0, multiprocessing.Value("Q", 0), 4, PATTERN, run.frontend)
    until(lambda: not run.segments(), "the end of both workers' memory")
    again = DataLoader(dataset, batch_size=2, num_workers=2, multiprocessing_context="fork")
    assert [len(read(batch)) for batch in itertools.islice(again, 4)] == [2] * 4


def test_new_workers_take_up_what_was_ordered_when_all_were_killed(run):
    run.start("broker")
    workers = [run.start("worker", argument=0.01) for _ in range(3)]
    with StudentClient(0, 8, PATTERN, **run.client) as client:
        seen = take(client, 4)
        for worker in workers:
            run.kill(worker)
        while (ref := client.request_sample(200)) is not None:
            seen += read(ref.tensors())
            ref.release()
        run.start("worker")
        seen += take(client, 16)
        assert len(set(seen)) == len(seen)


def test_a_generator_that_always_raises_is_called_a_bounded_number_of_times(run):
    run.start("broker", max_tries=2)
    run.start("worker", generator="raises")
    with StudentClient(0, 1, PATTERN, **run.client) as client:
        for _ in range(3):
            with pytest.raises(GeneratorFailed, match=r"in 2 tries.*: .*no teacher today"):
                client.request_sample(60_000)
    assert (run.directory / "calls").stat().st_size <= 8


@pytest.mark.parametrize("size", [0, PATTERN.nbytes() - 1, PATTERN.nbytes() + 1, 4 * PATTERN.nbytes()])
def test_bytes_that_are_too_many_or_too_few_fail_the_order_and_leave_every_canary(run, size):
    run.start("broker", max_tries=1)
    run.start("worker", generator="bytes", argument=size, slot_size=2**20)
    layout = SlotLayout.of(PATTERN)
    with StudentClient(0, 4, PATTERN, **run.client) as client:
        name = client.hello()["buf_name"]
        ends = [(slot + 1) * layout.stride - CANARY_BYTES for slot in range(4)]
        with open(f"/dev/shm{name}", "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as memory:
            canaries = {memory[end : end + CANARY_BYTES] for end in ends}
            for _ in range(8):
                with pytest.raises(GeneratorFailed, match=str(PATTERN.nbytes())):
                    client.request_sample(60_000)
            assert {memory[end : end + CANARY_BYTES] for end in ends} == canaries and len(canaries) == 1
            assert b"\xee" * 16 not in memory[:]


def test_a_model_that_nobody_serves_is_named_and_hinders_no_other(run):
    run.start("broker")
    run.start("worker", patterns=["good*"], worker_id="w1")
    with StudentClient(0, 20, PATTERN, deadline_s=1.0, **run.client) as client:
        client.set_model("nobody", {"number": 1})
        with pytest.raises(NoWorker, match=r"model 'nobody' \(generation 1\).*w1 .*good\*"):
            client.request_sample(60_000)
        client.set_model("good one", {"number": 2})
        assert {model for model, _ in take(client, 40)} == {2}


def test_a_second_leader_is_refused_until_the_first_has_died(run):
    run.start("broker")
    run.start("worker")
    first = run.start("student", lead=True)
    with StudentClient(0, 2, PATTERN, **run.client) as second:
        with pytest.raises(LeaderRefused, match=f"process {first.pid} leads"):
            second.set_model("mine", {"number": 2})
        run.kill(first)

        def leads():
            try:
                return second.set_model("mine", {"number": 2})
            except LeaderRefused:
                return None

        assert until(leads, "the lead") == 2
        assert take(second, 2)[0][0] == 2


def test_a_torn_sample_would_be_noticed():
    sample = {"model": 1, "number": 5, "body": list(range(WORDS))}
    with pytest.raises(AssertionError, match="torn"):
        read(sample)
