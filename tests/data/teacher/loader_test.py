from __future__ import annotations

import itertools
import sys
import threading

import pytest
import torch
from teacher_run import CONFIG, sample, teacher_run

from mixle.data.teacher.buffers import Buffers
from mixle.data.teacher.dataset import DistillIterableDataset
from mixle.data.teacher.loader import DistillDataLoader
from mixle.data.teacher.student import StudentClient


@pytest.fixture
def run():
    with teacher_run() as run:
        run.start_broker()
        run.start_worker(lambda model_id, model_cfg: sample(0 if model_cfg is None else model_cfg["number"]))
        with StudentClient(0, 2, CONFIG, **run.client) as client:
            run.leader = client
            run.dataset = DistillIterableDataset(0, client.generation_value, 8, CONFIG, run.frontend)
            yield run


@pytest.mark.parametrize("workers", [0, 2])
def test_no_batch_of_an_older_model_is_handed_out_after_the_switch(run, workers):
    options = {"num_workers": workers, "multiprocessing_context": "fork"} if workers else {}
    loader = DistillDataLoader(run.dataset, batch_size=4, **options)
    batches = iter(loader)
    next(batches)
    for number in range(1, 25):
        run.leader.set_model("m", {"number": number})
        for _ in range(number % 3):
            assert next(batches)["y"].tolist() == [number] * 4
    batches.close()
    assert loader.dropped > 0 if workers else loader.dropped >= 0


def test_a_collate_function_sees_samples_and_no_generation(run):
    seen = []

    def collate(samples):
        seen.extend(samples)
        return [one["y"].item() for one in samples]

    batch = next(iter(DistillDataLoader(run.dataset, batch_size=3, collate_fn=collate)))
    assert batch == [0, 0, 0]
    assert all(type(one) is dict and one.keys() == {"x", "y"} for one in seen)


def test_without_a_batch_size_samples_come_one_by_one(run):
    run.leader.set_model("m", {"number": 2})
    loader = DistillDataLoader(run.dataset, batch_size=None)
    for one in itertools.islice(loader, 3):
        assert one["y"].shape == () and one["y"].item() == 2
        assert isinstance(one["x"], torch.Tensor) and one["x"].shape == (3,)


@pytest.mark.parametrize("workers", [0, 1])
def test_batches_that_are_kept_stay_as_they_were(run, workers):
    loader = DistillDataLoader(run.dataset, batch_size=2, num_workers=workers)
    kept = []
    for number in range(1, 8):
        run.leader.set_model("m", {"number": number})
        batch = next(iter(loader))
        kept.append(batch["y"] if number % 2 else batch["y"][:1])  # a view keeps its batch as well
    for number, labels in enumerate(kept, start=1):
        assert set(labels.tolist()) == {number}


def test_the_memory_of_a_batch_that_is_dropped_is_used_again(run):
    batches = iter(DistillDataLoader(run.dataset, batch_size=2))
    addresses = [next(batches)["x"].data_ptr() for _ in range(10)]
    assert len(set(addresses)) <= 2
    batches.close()


def test_threads_never_get_the_same_memory():
    buffers, wrong = Buffers(), []
    barrier = threading.Barrier(3)

    def copy(number):
        barrier.wait()
        for _ in range(2_000):
            copied = buffers.copy({"x": torch.full((4,), number)})["x"]
            if copied.tolist() != [number] * 4:
                wrong.append(number)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=copy, args=(number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert wrong == []


def on_meta(worker):
    torch.set_default_device("meta")


def test_a_default_device_does_not_change_where_batches_are(run):
    loader = DistillDataLoader(run.dataset, batch_size=2, num_workers=1, worker_init_fn=on_meta)
    assert next(iter(loader))["x"].device.type == "cpu"


def test_a_batch_that_the_slots_do_not_hold_is_refused_with_the_count_that_would(run):
    with pytest.raises(ValueError, match="batch_size=9 exceeds the dataset's slot_count=8; have slot_count=36"):
        DistillDataLoader(run.dataset, batch_size=9)
    with pytest.raises(TypeError, match="batch_size"):
        DistillDataLoader(run.dataset, batch_size=2.0)


def test_leaving_early_leaves_no_memory(run):
    run.leader.hello()
    before = run.segments()
    for _ in DistillDataLoader(run.dataset, batch_size=2):
        break
    assert run.segments() == before


@pytest.mark.parametrize("dataset", [None, [1, 2], range(3)])
def test_another_dataset_is_refused(dataset):
    with pytest.raises(TypeError, match="must be a DistillIterableDataset"):
        DistillDataLoader(dataset)
