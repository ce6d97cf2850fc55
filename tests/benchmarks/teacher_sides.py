"""What ``teacher.py`` measures: each side a process that delivers samples for as long as it is told, and says how many.

    python tests/benchmarks/teacher_sides.py SIDE BYTES WORKERS

A line on stdin is a number of seconds; the answer is one line of JSON: samples, seconds, and CPU seconds of each of the
side's processes. "latency" instead of a number measures single orders. Packages are imported by the side that needs
them, so that the Python of another package can run it.
"""

from __future__ import annotations

import atexit
import json
import mmap
import multiprocessing
import os
import pathlib
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

Take = Callable[[], int]
Side = tuple[Take, dict[str, int]]  # takes samples and returns how many; process ids by role

FORK = multiprocessing.get_context("fork")
IN_FLIGHT_BYTES = 16 << 20
RING_HEAD = mmap.PAGESIZE
LATENCIES = 300


def batch_of(size: int) -> int:
    """Samples of a batch; every side has room for four batches."""
    return max(4, min(256, IN_FLIGHT_BYTES // 4 // size))


def child(target: Callable[..., None], *args: Any) -> int:
    """Start a process that ends with this one, and return its id."""
    process = FORK.Process(target=profiled(target), args=args, daemon=True)
    process.start()
    assert process.pid is not None
    return process.pid


def profiled(target: Callable[..., None]) -> Callable[..., None]:
    """Have ``target`` leave a profile where ``TEACHER_PROFILE`` says, once it returns."""
    directory = os.environ.get("TEACHER_PROFILE")
    if directory is None:
        return target

    def run(*args: Any) -> None:
        import cProfile

        profile = cProfile.Profile(time.thread_time)
        try:
            profile.runcall(target, *args)
        finally:
            profile.dump_stats(f"{directory}/{target.__name__}")

    return run


# ---- ours


def endpoints() -> list[str]:
    directory = tempfile.mkdtemp(prefix="mx")
    os.environ["MIXLE_TEACHER_DIR"] = f"{directory}/run"
    return [f"ipc://{directory}/{name}" for name in ("f", "b", "c", "p")]


def broker(*at: str) -> None:
    from mixle.data.teacher.broker import Broker

    Broker(*at).run()


def worker(size: int, backend: str, pub: str, host: str | None = None) -> None:
    from mixle.data.teacher.worker import Worker

    ready = bytes(size)
    Worker(lambda model_id, model_cfg: ready, size, backend, pub, host_id=host, insecure=host is not None).run()


def teachers(size: int, workers: int, at: list[str], host: str | None = None) -> dict[str, int]:
    pids = {"student": os.getpid(), "broker": child(broker, *at)}
    return pids | {f"worker{i}": child(worker, size, at[1], at[3], host) for i in range(workers)}


def config(size: int) -> dict[str, Any]:
    return {"specs": [{"name": "x", "shape": (size // 4,), "dtype": "float32"}]}


def mixle_batches(size: int, workers: int) -> Side:
    """Batches, read where they lie."""
    at = endpoints()
    pids = teachers(size, workers, at)
    from mixle.data.teacher.student import StudentClient

    batch = batch_of(size)
    client = StudentClient(0, 4 * batch, config(size), at[0], at[2], at[3])
    atexit.register(client.close)

    def take() -> int:
        with client.request_batch(batch, 10_000) as ref:
            return len(ref.tensors()["x"])

    return take, pids


def mixle_samples(size: int, workers: int) -> Side:
    """Samples, read where they lie."""
    at = endpoints()
    pids = teachers(size, workers, at)
    from mixle.data.teacher.student import StudentClient

    client = StudentClient(0, 4 * batch_of(size), config(size), at[0], at[2], at[3])
    atexit.register(client.close)

    def take() -> int:
        with client.request_sample(10_000) as ref:
            return bool(ref.tensors())

    return take, pids


def mixle_network(size: int, workers: int) -> Side:
    """Batches over loopback TCP, as from another machine."""
    at = endpoints()
    import socket

    probes = [socket.create_server(("127.0.0.1", 0)) for _ in at]
    at = [f"tcp://127.0.0.1:{probe.getsockname()[1]}" for probe in probes]
    for probe in probes:
        probe.close()
    pids = {"student": os.getpid(), "broker": child(insecure_broker, *at)}
    pids |= {f"worker{i}": child(worker, size, at[1], at[3], "0123456789abcdef") for i in range(workers)}
    from mixle.data.teacher.student import StudentClient

    batch = batch_of(size)
    client = StudentClient(0, 4 * batch, config(size), at[0], at[2], at[3], insecure=True)
    atexit.register(client.close)

    def take() -> int:
        with client.request_batch(batch, 10_000) as ref:
            return len(ref.tensors()["x"])

    return take, pids


def insecure_broker(*at: str) -> None:
    from mixle.data.teacher.broker import Broker

    Broker(*at, insecure=True).run()


def mixle_dataset(size: int, workers: int) -> Side:
    """The dataset, whose samples are copies."""
    at = endpoints()
    pids = teachers(size, workers, at)
    from mixle.data.teacher.dataset import DistillIterableDataset
    from mixle.data.teacher.fence import shared_generation

    samples = iter(DistillIterableDataset(0, shared_generation(), 4 * batch_of(size), config(size), at[0]))
    return lambda: bool(next(samples)), pids


def mixle_loader(size: int, workers: int, *, processes: int = 0) -> Side:
    """The loader, with batches of 16, in the trainer's own process."""
    at = endpoints()
    pids = teachers(size, workers, at)
    from mixle.data.teacher.dataset import DistillIterableDataset
    from mixle.data.teacher.fence import shared_generation
    from mixle.data.teacher.loader import DistillDataLoader

    dataset = DistillIterableDataset(0, shared_generation(), 4 * batch_of(size), config(size), at[0])
    batches = iter(DistillDataLoader(dataset, batch_size=16, num_workers=processes))
    return lambda: len(next(batches)["x"]), pids


def mixle_loader_apart(size: int, workers: int) -> Side:
    """The loader, with batches of 16 from a process of its own."""
    return mixle_loader(size, workers, processes=1)


def mixle_order(size: int, workers: int) -> Side:
    """One order at a time: of a client with a single slot, which orders it when it is released."""
    at = endpoints()
    pids = teachers(size, workers, at)
    from mixle.data.teacher.student import StudentClient

    client = StudentClient(0, 1, config(size), at[0], at[2], at[3])
    atexit.register(client.close)
    held = client.request_sample(10_000)

    def take() -> int:
        nonlocal held
        held.release()
        held = client.request_sample(10_000)
        return bool(held.tensors())

    return take, pids


# ---- softs


def softs_broker(frontend: str, backend: str) -> None:
    from softs import Broker, EndpointConfig

    # It forgets who is idle while other sides have their turn.
    Broker(EndpointConfig(frontend, backend), supplier_timeout=3600.0, client_timeout=3600.0).start()
    while True:
        time.sleep(60)


def softs_worker(size: int, backend: str) -> None:
    from softs import ShmMedium, Supplier

    ready = bytes(size)
    Supplier(lambda product: ready, ["m"], backend, ShmMedium, size).start()
    while True:
        time.sleep(60)


def softs_teachers(size: int, workers: int) -> tuple[str, Any]:
    at = endpoints()
    child(softs_broker, at[0], at[1])
    for _ in range(workers):
        child(softs_worker, size, at[1])
    from softs import BatchConfig, TensorSpec

    return at[0], BatchConfig([TensorSpec("x", (size // 4,), "float32")])


def softs_client(size: int, workers: int, slots: int = 16) -> tuple[Any, Any]:
    frontend, spec = softs_teachers(size, workers)
    from softs import Client, ShmMedium

    client = Client(frontend, ShmMedium, size, slots, send_timeout_ms=60_000)
    atexit.register(client.close)
    client.hello()
    return client, spec


def softs_samples(size: int, workers: int) -> Side:
    """Its client with every slot ordered ahead."""
    client, spec = softs_client(size, workers)

    def take() -> int:
        while (slot := client.get_completed()) is None:
            while client.request_slot("m") is not None:  # all that are free; refused until its supplier is there
                pass
            client.poll_completions(100)
        spec.decode(client.medium.read(slot))
        client.release_slot(slot)
        client.request_slot("m")
        return 1

    return take, {}


def softs_order(size: int, workers: int) -> Side:
    """One order at a time."""
    client, spec = softs_client(size, workers)

    def take() -> int:
        while (slot := client.request_sample("m", 1000)) is None:
            pass
        spec.decode(client.medium.read(slot))
        client.release_slot(slot)
        return 1

    return take, {}


def softs_loader(size: int, workers: int) -> Side:
    """Its DataLoader, with batches of 16 from one process."""
    frontend, spec = softs_teachers(size, workers)
    from softs import ShmMedium, SoftDataLoader

    loader = SoftDataLoader("m", frontend, spec, ShmMedium, num_slots=16, batch_size=16, num_workers=1)
    batches = iter(loader)
    return lambda: len(next(batches)["x"]), {}


# ---- what there is without any of them


def ring(size: int, workers: int) -> Side:
    """A ring in shared memory, one for each writer, read where it lies; nothing else is promised."""
    slots = 4 * batch_of(size)
    memory = [mmap.mmap(-1, RING_HEAD + slots * size) for _ in range(workers)]
    for one in memory:
        child(ring_writer, one, slots, size)
    import torch

    flat = [torch.frombuffer(one, dtype=torch.float32, offset=RING_HEAD) for one in memory]
    rows = [one.view(slots, size // 4) for one in flat]
    heads = [memoryview(one).cast("Q") for one in memory]
    turn = 0

    def take() -> int:
        nonlocal turn
        turn = (turn + 1) % workers
        head = heads[turn]
        head[16] = time.monotonic_ns()
        tail = head[8]
        while (ready := head[0] - tail) == 0:
            os.sched_yield()
        for at in range(tail, tail + ready):
            rows[turn][at % slots]
            head[8] = at + 1
        return ready

    return take, {}


def ring_writer(memory: mmap.mmap, slots: int, size: int) -> None:
    head, payload, ready = memoryview(memory).cast("Q"), memoryview(memory)[RING_HEAD:], bytes(size)
    written = 0
    while True:
        while written - head[8] == slots:
            os.sched_yield()
            if time.monotonic_ns() - head[16] > 20_000_000:  # nobody reads just now
                time.sleep(0.001)
        start = written % slots * size
        payload[start : start + size] = ready
        written += 1
        head[0] = written


def inline_zmq(size: int, workers: int) -> Side:
    """ZeroMQ with the sample in the message."""
    at = endpoints()[0]
    for _ in range(workers):
        child(pusher, at, size)
    import torch
    import zmq

    socket = zmq.Context.instance().socket(zmq.PULL)
    socket.rcvhwm = 2 * batch_of(size)
    socket.bind(at)

    def take() -> int:
        return bool(len(torch.frombuffer(socket.recv(copy=False).buffer, dtype=torch.float32)))

    import warnings

    warnings.filterwarnings("ignore", "The given buffer is not writable")
    return take, {}


def pusher(at: str, size: int) -> None:
    import zmq

    socket = zmq.Context.instance().socket(zmq.PUSH)
    socket.sndhwm = 2 * batch_of(size)
    socket.connect(at)
    ready = bytes(size)
    while True:
        socket.send(ready, copy=size < 65536)


def dataloader(size: int, workers: int) -> Side:
    """torch's DataLoader over a dataset that makes the samples in its processes."""
    import torch
    from torch.utils.data import DataLoader, IterableDataset

    class Ready(IterableDataset):
        def __iter__(self) -> Iterator[Any]:
            ready = torch.zeros(size // 4)
            while True:
                yield ready

    batches = iter(DataLoader(Ready(), batch_size=16, num_workers=workers))
    return lambda: len(next(batches)), {}


def bare_zmq(size: int, workers: int) -> Side:
    """Two small ZeroMQ messages, as an order takes them by way of a broker, and a byte back through a pipe."""
    import zmq

    at, back = endpoints(), os.pipe()
    child(forwarder, at[0], at[1])
    child(answerer, at[1], back[1])
    socket = zmq.Context.instance().socket(zmq.DEALER)
    socket.connect(at[0])

    def take() -> int:
        socket.send_multipart([b"REQUEST", bytes(60)])
        return len(os.read(back[0], 1))

    return take, {}


def forwarder(frontend: str, backend: str) -> None:
    import zmq

    context = zmq.Context()
    source, target = context.socket(zmq.ROUTER), context.socket(zmq.ROUTER)
    target.bind(backend)
    worker = target.recv_multipart()[0]
    source.bind(frontend)
    while True:
        target.send_multipart([worker, *source.recv_multipart()[1:]])


def answerer(backend: str, back: int) -> None:
    import zmq

    socket = zmq.Context().socket(zmq.DEALER)
    socket.connect(backend)
    socket.send(b"READY")
    while socket.recv_multipart():
        os.write(back, b".")


def pipe(size: int, workers: int) -> Side:
    """A byte to another process and back."""
    there, back = os.pipe(), os.pipe()
    child(echo, there[0], back[1])

    def take() -> int:
        os.write(there[1], b".")
        return len(os.read(back[0], 1))

    return take, {}


def echo(source: int, target: int) -> None:
    while data := os.read(source, 1):
        os.write(target, data)


# ---- measuring


def cpu_seconds(pid: int) -> float:
    """CPU seconds that the threads of a process have had, from the scheduler's own clock."""
    tasks = pathlib.Path(f"/proc/{pid}/task")
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks.iterdir()) / 1e9


def measure(take: Take, pids: dict[str, int], seconds: float) -> dict[str, Any]:
    before = {role: cpu_seconds(pid) for role, pid in pids.items()}
    began = now = time.perf_counter()
    samples = 0
    while now - began < seconds:
        samples += take()
        now = time.perf_counter()
    cpu = {role: cpu_seconds(pid) - before[role] for role, pid in pids.items()}
    return {"samples": samples, "seconds": now - began, "cpu": cpu}


def measure_orders(take: Take, pause_s: float) -> dict[str, Any]:
    times = []
    for _ in range(LATENCIES):
        if pause_s:
            time.sleep(pause_s)
        began = time.perf_counter()
        take()
        times.append(time.perf_counter() - began)
    return {"p50": statistics.median(times), "p10": statistics.quantiles(times, n=10)[0]}


def main() -> None:
    for threads in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[threads] = "1"
    name, size, workers = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    take, pids = globals()[name](size, workers)
    while take() == 0:
        pass
    print(json.dumps({"ready": True}), flush=True)
    profile = None
    if "TEACHER_PROFILE" in os.environ:
        import cProfile

        profile = cProfile.Profile(time.thread_time)
    for line in sys.stdin:
        if profile is not None:
            measured = profile.runcall(measure, take, pids, float(line))
        else:
            *latency, number = line.split()
            measured = measure_orders(take, float(number)) if latency else measure(take, pids, float(number))
        print(json.dumps(measured), flush=True)
    if profile is not None:
        profile.dump_stats(f"{os.environ['TEACHER_PROFILE']}/student")
        for pid in (pid for role, pid in pids.items() if role != "student"):
            os.kill(pid, signal.SIGTERM)
        for process in multiprocessing.active_children():
            process.join(10)


if __name__ == "__main__":
    main()
