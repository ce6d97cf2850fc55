from __future__ import annotations

import gc
import itertools
import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest
import torch
from teacher_run import CONFIG, sample, teacher_run
from torch.utils.data import DataLoader

from mixle.data.teacher.dataset import DistillIterableDataset
from mixle.data.teacher.errors import BrokerUnreachable, GeneratorFailed
from mixle.data.teacher.student import StudentClient

PATIENCE_S = 60


@pytest.fixture
def run():
    with teacher_run() as run:
        yield run


def counting():
    numbers = itertools.count()
    return lambda model_id, model_cfg: sample(next(numbers))


def await_segments(run, expected):
    deadline = time.monotonic() + PATIENCE_S
    while run.segments() != expected:
        assert time.monotonic() < deadline, run.segments() - expected
        time.sleep(0.01)


def test_samples_own_their_memory(run):
    run.start_broker()
    run.start_worker(counting())
    dataset = DistillIterableDataset(0, multiprocessing.Value("Q", 0), 2, CONFIG, run.frontend)
    samples = list(itertools.islice(dataset, 12))
    assert sorted(one["y"].item() for one in samples) == sorted({one["y"].item() for one in samples})
    assert all(torch.equal(one["x"], one["y"].float().expand(3)) for one in samples)


def test_an_iterator_that_is_dropped_leaves_neither_memory_nor_thread(run):
    before = run.segments()
    run.start_broker()
    run.start_worker(counting())
    next(iter(DistillIterableDataset(0, multiprocessing.Value("Q", 0), 2, CONFIG, run.frontend)))
    running = set(threading.enumerate())
    for _ in DistillIterableDataset(0, multiprocessing.Value("Q", 0), 2, CONFIG, run.frontend):
        assert len(run.segments() - before) == 1
        break
    gc.collect()
    assert run.segments() == before and set(threading.enumerate()) <= running


@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.parametrize("workers", [1, 2])
def test_each_loader_worker_has_slots_of_its_own_and_leaves_none(run, method, workers):
    before = run.segments()
    run.start_broker()
    run.start_worker(counting())
    with StudentClient(0, 2, CONFIG, **run.client) as client:
        dataset = DistillIterableDataset(0, client.generation_value, 4, CONFIG, run.frontend)
        loader = DataLoader(dataset, batch_size=4, num_workers=workers, multiprocessing_context=method)
        seen = []
        for number, batch in enumerate(loader):
            assert batch["x"].shape == (4, 3)
            seen += batch["y"].tolist()
            if number == 5:
                assert len(run.segments() - before) == workers
                break
        del loader
        await_segments(run, before)
    assert len(set(seen)) == 24


def test_persistent_workers_serve_one_epoch_after_another(run):
    before = run.segments()
    run.start_broker()
    run.start_worker(counting())
    dataset = DistillIterableDataset(0, multiprocessing.Value("Q", 0), 4, CONFIG, run.frontend)
    loader = DataLoader(dataset, batch_size=2, num_workers=1, persistent_workers=True, multiprocessing_context="fork")
    seen = []
    for _ in range(3):
        for batch in itertools.islice(loader, 3):
            seen += batch["y"].tolist()
    assert len(set(seen)) == 18
    del loader
    await_segments(run, before)


def test_failed_orders_are_retried_as_often_as_asked_and_then_raised(run):
    calls = itertools.count()

    def broken(model_id, model_cfg):
        next(calls)
        raise ZeroDivisionError("no teacher today")

    run.start_broker(max_tries=1)
    run.start_worker(broken)
    dataset = DistillIterableDataset(0, multiprocessing.Value("Q", 0), 1, CONFIG, run.frontend, 3, 0.0)
    with pytest.raises(GeneratorFailed, match="no teacher today"):
        next(iter(dataset))
    assert next(calls) == 4


def test_a_sample_ends_the_count_of_failures(run):
    answers = itertools.cycle([b"", b"", CONFIG.encode(**sample(4))])
    run.start_broker(max_tries=1)
    run.start_worker(lambda model_id, model_cfg: next(answers))
    dataset = DistillIterableDataset(0, multiprocessing.Value("Q", 0), 1, CONFIG, run.frontend, 2, 0.0)
    assert [one["y"].item() for one in itertools.islice(dataset, 5)] == [4] * 5


def test_a_missing_broker_is_named_by_the_deadline(run):
    dataset = DistillIterableDataset(0, multiprocessing.Value("Q", 0), 1, CONFIG, run.frontend, deadline_s=0.2)
    with pytest.raises(BrokerUnreachable, match=run.frontend):
        next(iter(dataset))


def test_a_switch_that_this_rank_knows_of_reaches_a_dataset_without_a_message(run):
    run.start_broker()
    run.start_worker(lambda model_id, model_cfg: sample(0 if model_cfg is None else model_cfg["number"]))
    with StudentClient(0, 2, CONFIG, **run.client) as client:
        samples = iter(DistillIterableDataset(0, client.generation_value, 8, CONFIG, run.frontend))
        for number in range(1, 20):
            next(samples)
            client.set_model("m", {"number": number})
            assert next(samples)["y"].item() == number
        samples.close()


def test_closing_the_client_retires_the_datasets_that_share_its_generation(run):
    before = run.segments()
    run.start_broker()
    run.start_worker(counting())
    with StudentClient(0, 2, CONFIG, **run.client) as client:
        samples = iter(DistillIterableDataset(0, client.generation_value, 2, CONFIG, run.frontend))
        next(samples)
    assert run.segments() == before
    with pytest.raises(RuntimeError, match="retired: the client that its generation_value belongs to was closed"):
        next(samples)


def test_closing_the_client_retires_the_slots_in_loader_workers(run):
    before = run.segments()
    run.start_broker()
    run.start_worker(counting())
    with StudentClient(0, 2, CONFIG, **run.client) as client:
        dataset = DistillIterableDataset(0, client.generation_value, 2, CONFIG, run.frontend)
        batches = iter(DataLoader(dataset, batch_size=2, num_workers=1, multiprocessing_context="fork"))
        next(batches)
        assert len(run.segments() - before) == 1
    await_segments(run, before)


def test_loader_workers_end_with_a_killed_trainer_though_the_broker_is_dead(run):
    before = run.segments()
    broker = run.start_broker()
    run.start_worker(counting())
    trainer = subprocess.Popen(
        [sys.executable, "-c", TRAINER, run.frontend],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    )
    try:
        workers = [int(pid) for pid in trainer.stdout.readline().split()]
        assert len(workers) == 2
        broker.stop()
    finally:
        trainer.send_signal(signal.SIGKILL)
        trainer.wait()
        trainer.stdout.close()
    deadline = time.monotonic() + PATIENCE_S
    while any(os.path.exists(f"/proc/{pid}/exe") for pid in workers):
        assert time.monotonic() < deadline, "a loader worker outlived its trainer"
        time.sleep(0.01)
    await_segments(run, before)


TRAINER = textwrap.dedent(
    """
    import multiprocessing, sys
    from torch.utils.data import DataLoader
    from teacher_run import CONFIG
    from mixle.data.teacher.dataset import DistillIterableDataset

    dataset = DistillIterableDataset(0, multiprocessing.Value("Q", 0), 2, CONFIG, sys.argv[1])
    loader = DataLoader(dataset, batch_size=2, num_workers=2, multiprocessing_context="fork")
    for number, batch in enumerate(loader):
        if number == 4:
            print(*(child.pid for child in multiprocessing.active_children()), flush=True)
    """
)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"generation_value": "1"}, TypeError, "generation_value='1'"),
        ({"generation_value": True}, TypeError, "generation_value=True"),
        ({"slot_count": 0}, ValueError, "slot_count=0"),
        ({"max_retries": -1}, ValueError, "max_retries=-1"),
        ({"retry_delay": -0.1}, ValueError, "retry_delay=-0.1"),
        ({"deadline_s": 0.0}, ValueError, "deadline_s=0.0"),
        ({"on_event": 1}, TypeError, "on_event=1"),
    ],
)
def test_an_argument_that_cannot_be_meant_is_refused_by_name(change, error, message):
    arguments = {
        "student_rank": 0,
        "generation_value": multiprocessing.Value("Q", 0),
        "slot_count": 2,
        "batch_config": CONFIG,
        **change,
    }
    with pytest.raises(error, match=message):
        DistillIterableDataset(**arguments)
