"""What the processes of teacher_processes.py do: ``teacher_roles.py ROLE DIRECTORY OPTIONS``, options in JSON."""

from __future__ import annotations

import ctypes
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from teacher_processes import PATTERN, Processes, patterned, read


def up() -> None:
    print("up", flush=True)


def broker(run: Processes, **options: Any) -> None:
    from mixle.data.teacher.broker import Broker

    with Broker(run.frontend, run.backend, run.control, run.pub, **{"heartbeat_s": 0.05, **options}):
        up()
        signal.pause()


def worker(run: Processes, *, generator: str = "pattern", argument: Any = None, **options: Any) -> None:
    """Serve one of the generators below; it is up once it has registered."""
    from mixle.data.teacher.worker import Worker

    told = False

    def on_event(kind: str, details: dict[str, Any]) -> None:
        nonlocal told
        if kind == "registered" and not told:
            told = True
            up()

    function = GENERATORS[generator](run, argument)
    options = {"slot_size": PATTERN.nbytes(), **options}
    slot_size = options.pop("slot_size")
    Worker(function, slot_size, run.backend, run.pub, on_event=on_event, **options).run()


def workers(run: Processes, *, count: int, argument: Any) -> None:
    """Serve the pattern with several workers in threads; all have registered when it is up."""
    import threading

    from mixle.data.teacher.worker import Worker

    registered = threading.Semaphore(0)

    def on_event(kind: str, details: dict[str, Any]) -> None:
        if kind == "registered":
            registered.release()

    for _ in range(count):
        generate = _pattern(run, argument)
        Worker(generate, PATTERN.nbytes(), run.backend, run.pub, on_event=on_event).start()
    for _ in range(count):
        registered.acquire()
    up()
    signal.pause()


def sleepers(run: Processes, *, count: int, argument: Any, seconds: float) -> None:
    """Print how many samples a second so many threads make of the pattern, with nothing around them."""
    from concurrent.futures import ThreadPoolExecutor

    def make(generate: Callable[..., Any]) -> float:
        began, made = time.perf_counter(), 0
        while (elapsed := time.perf_counter() - began) < seconds:
            generate("m", None)
            made += 1
        return made / elapsed

    with ThreadPoolExecutor(count) as pool:
        print(sum(pool.map(make, [_pattern(run, argument) for _ in range(count)])))


def _pattern(run: Processes, seconds: Any) -> Callable[..., Any]:
    generate = patterned()

    def paced(model_id: str, model_cfg: Any) -> Any:
        if seconds:
            time.sleep(seconds)
        return generate(model_id, model_cfg)

    return paced


def _half(run: Processes, argument: Any) -> Callable[..., Any]:
    """Fill half of the slot, say so in the run's directory, and never return."""

    def fill(model_id: str, model_cfg: Any, out: Any) -> None:
        out["model"][...], out["number"][...] = 0, -1
        out["body"][: len(out["body"]) // 2] = -1
        (run.directory / "half-written").touch()
        signal.pause()

    return fill


def _raises(run: Processes, argument: Any) -> Callable[..., Any]:
    def fail(model_id: str, model_cfg: Any) -> Any:
        with (run.directory / "calls").open("a") as calls:
            calls.write(".")
        raise ZeroDivisionError("no teacher today")

    return fail


def _bytes(run: Processes, size: Any) -> Callable[..., Any]:
    return lambda model_id, model_cfg: b"\xee" * size


GENERATORS: dict[str, Callable[[Processes, Any], Callable[..., Any]]] = {
    "pattern": _pattern,
    "half": _half,
    "raises": _raises,
    "bytes": _bytes,
}


def student(run: Processes, *, rank: int = 0, slots: int = 8, size: int = 1, lead: bool = False, **limits: Any) -> None:
    """Take samples, and print of each: when, what was known of the model, what it is of, its number."""
    from mixle.data.teacher.student import StudentClient

    with StudentClient(rank, slots, PATTERN, **run.client) as client:
        client.hello()
        if lead:
            client.set_model("m", {"number": 1})
        up()
        _take(client, size=size, switches=0, **limits)


def leader(run: Processes, *, every_s: float, slots: int = 8, size: int = 4) -> None:
    """Take batches, and switch the model now and then; its number is the generation that it should have."""
    from mixle.data.teacher.student import StudentClient

    with StudentClient(0, slots, PATTERN, **run.client) as client:
        client.hello()
        up()
        _take(client, size=size, switches=every_s)


def _take(client: Any, *, size: int, switches: float, count: int | None = None) -> None:
    from mixle.data.teacher.errors import TeacherError

    due = time.monotonic() + switches
    while count is None or count > 0:
        if switches and time.monotonic() > due:
            due = time.monotonic() + switches
            began = time.monotonic()
            try:
                client.set_model("m", {"number": client.generation + 1})
            except TeacherError as error:
                print(f"# {error}", flush=True)
            if time.monotonic() - began > 1.0:
                print(f"# a switch took {time.monotonic() - began:.0f} s", flush=True)
        cfg = client.hello()["model_cfg"]
        known = 0 if cfg is None else cfg["number"]
        batch = client.request_batch(size, 200)
        if batch is not None:
            _tell(known, read(batch.tensors()))
            batch.release()
            count = None if count is None else count - size


def trainer(run: Processes, *, rank: int, workers: int = 2, slots: int = 8, size: int = 4) -> None:
    """Take batches from a DistillDataLoader, and begin another when one of its workers dies."""
    from mixle.data.teacher.dataset import DistillIterableDataset
    from mixle.data.teacher.loader import DistillDataLoader
    from mixle.data.teacher.student import StudentClient

    client = StudentClient(rank, 1, PATTERN, **run.client)
    dataset = DistillIterableDataset(rank, client.generation_value, slots, PATTERN, run.frontend)
    client.hello()
    up()
    said = (RuntimeError, OSError, EOFError)  # torch says it in one of several ways
    while True:
        try:
            while True:
                loader = DistillDataLoader(
                    dataset, batch_size=size, num_workers=workers, multiprocessing_context="fork"
                )
                try:
                    _train(client, iter(loader))
                except said as error:
                    _note(error)
        except said as error:  # its handler of SIGCHLD raises anywhere, also in the lines above
            _note(error)


def _note(error: BaseException) -> None:
    *_, last = ["", *str(error).splitlines()]
    print(f"# {type(error).__name__}: {last}", flush=True)


def _train(client: Any, batches: Iterator[Any]) -> None:
    while True:
        cfg = client.hello()["model_cfg"]
        known = 0 if cfg is None else cfg["number"]
        _tell(known, read(next(batches)))


def fenced(run: Processes, *, rank: int, switches: int, seed: int) -> None:
    """Take batches while rank 0 switches at random moments; end with an error if one is too old, or mixed."""
    import threading

    from mixle.data.teacher.dataset import DistillIterableDataset
    from mixle.data.teacher.loader import DistillDataLoader
    from mixle.data.teacher.student import StudentClient

    dice = random.Random(seed)
    batches = samples = 0
    knew: set[int] = set()
    with StudentClient(rank, 1, PATTERN, **run.client) as client:
        dataset = DistillIterableDataset(rank, client.generation_value, 8, PATTERN, run.frontend)
        loader = DistillDataLoader(dataset, batch_size=4, num_workers=2, multiprocessing_context="fork")
        client.start_sub_listener()

        def lead() -> None:
            while client.generation < switches:
                seen, until = batches, time.monotonic() + 2.0
                while dice.random() < 0.9 and batches == seen and time.monotonic() < until:
                    time.sleep(dice.random() * 0.01)
                expected = client.generation + 1
                assert client.set_model("m", {"number": expected}) == expected

        leader = threading.Thread(target=lead)
        for batch in (iterator := _known(client, iter(loader), knew)):
            batches, samples = batches + 1, samples + len(batch)
            if rank == 0 and not batches - 1:
                leader.start()
            if max(knew) >= switches:
                iterator.close()
                break
        if rank == 0:
            leader.join()
        print(f"{samples} samples in {batches} batches of {len(knew)} generations, {loader.dropped} batches dropped")


def _known(client: Any, batches: Iterator[Any], knew: set[int]) -> Iterator[Any]:
    """Yield what comes from a loader once it is known to be whole, of one model, and not too old."""
    while True:
        known = client.generation
        samples = read(next(batches))
        models = {model for model, _ in samples}
        assert len(models) == 1 and min(models) >= known, f"knew of model {known}, got {models}"
        knew |= models
        yield samples


def _tell(known: int, samples: list[tuple[int, int]]) -> None:
    now = time.monotonic()
    print("\n".join(f"{now:.4f} {known} {model} {number}" for model, number in samples), flush=True)


ROLES = {one.__name__: one for one in (broker, worker, workers, sleepers, student, leader, trainer, fenced)}

if __name__ == "__main__":
    name, directory, options = sys.argv[1:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # a test that is killed leaves no processes
    os.environ["MIXLE_TEACHER_DIR"] = str(Path(directory) / "run")
    ROLES[name](Processes(directory), **json.loads(options))
