from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
from teacher_broker import PATIENCE_S, RUN_ID, FakeBroker, endpoints
from teacher_processes import until

from mixle.data.teacher import messages
from mixle.data.teacher.errors import BrokerUnreachable, RequestRefused
from mixle.data.teacher.generation import Interrupted
from mixle.data.teacher.layout import SlotLayout
from mixle.data.teacher.messages import DONE, FAILED, MAX_PIECES, SKIPPED, ModelState, SegmentInfo, WorkPiece
from mixle.data.teacher.run import ProcessIdentity, process_identity
from mixle.data.teacher.segment import Segment
from mixle.data.teacher.slots import Slots
from mixle.data.teacher.specs import BatchConfig, TensorSpec
from mixle.data.teacher.worker import Worker

CONFIG = BatchConfig([TensorSpec("x", (3,), "float32")])
SIZE = CONFIG.nbytes()
MODEL = ModelState(1, "teacher", msgpack.packb({"layer": 3}), b"")


def sample(value: float) -> bytes:
    return np.full(3, value, "<f4").tobytes()


def constant(model_id: str, cfg: object) -> bytes:
    return sample(7)


@dataclass
class Student:
    """Slots in shared memory, and the words by which work in them is ordered."""

    slot_count: int = 8
    segment_id: int = 1
    token: int = field(default_factory=lambda: secrets.randbits(60))
    layout: SlotLayout = field(default_factory=lambda: SlotLayout.of(CONFIG))

    def __post_init__(self) -> None:
        self.segment = Segment.create(self.layout.segment_bytes(self.slot_count), run_id=RUN_ID)
        self.slots = Slots(self.segment.buffer, self.layout, self.slot_count)
        self.slots.initialize()

    def info(self, **changed: Any) -> SegmentInfo:
        info = SegmentInfo(
            self.segment_id,
            "shm",
            self.segment.name,
            self.slot_count,
            self.layout.packed_bytes,
            msgpack.packb(self.layout.to_wire()),
            None,
            None,
            process_identity(),
        )
        return info._replace(**changed)

    def piece(self, first: int, count: int, generation: int = 1) -> WorkPiece:
        token = self.token + first
        self.slots.prepare(first, count, token, generation)
        return WorkPiece(secrets.token_bytes(16), self.segment_id, first, count, token, generation)

    def is_complete(self, piece: WorkPiece) -> bool:
        return bool(self.slots.complete(*piece[2:]).all())

    def close(self) -> None:
        del self.slots
        self.segment.close()
        self.segment.unlink()


def work(*pieces: WorkPiece, infos: tuple[SegmentInfo, ...] = (), model: ModelState | None = MODEL) -> messages.Work:
    return messages.Work(model=model, pieces=pieces, segments=infos)


def outcomes(done: messages.Done) -> list[tuple[bytes, int, int, int]]:
    return [piece[:4] for piece in done.pieces]


@pytest.fixture
def addresses() -> Iterator[tuple[str, str]]:
    with endpoints() as pair:
        yield pair


@pytest.fixture
def student() -> Iterator[Student]:
    one = Student()
    yield one
    one.close()


@contextmanager
def serving(
    addresses: tuple[str, str], generator: Callable[..., Any] = constant, **options: Any
) -> Iterator[tuple[FakeBroker, bytes, Worker]]:
    """A worker that is registered with a broker: the broker, the worker's address there, and the worker."""
    options.setdefault("slot_size", 1_024)
    with FakeBroker(*addresses) as broker, Worker(generator, options.pop("slot_size"), *addresses, **options) as worker:
        sender, _ = broker.admit(messages.Ready)
        yield broker, sender, worker


def run_in_thread(function: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=function)
    thread.start()
    return thread


def test_a_failure_that_comes_again_and_again_is_logged_now_and_then_with_its_count(
    addresses: tuple[str, str], student: Student, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def failing(model_id: str, model_cfg: object) -> bytes:
        raise ValueError("no teacher today")

    def fail(slots: int) -> None:
        piece = student.piece(0, slots)
        broker.send(sender, work(piece, infos=(student.info(),)))
        broker.expect(messages.Done)

    with serving(addresses, failing) as (broker, sender, _):
        for _ in range(5):
            fail(2)
        monkeypatch.setattr("mixle.data.teacher.worker.SAME_FAILURE_S", 0.0)
        fail(1)
    said = [record.getMessage() for record in caplog.records if "failed" in record.getMessage()]
    counts = [int(text.partition(": ")[2].split()[0]) for text in said]
    assert len(said) == 2 and sum(counts) == 11 and all("no teacher today" in text for text in said)


def test_work_is_made_written_and_reported_in_one_message(addresses: tuple[str, str], student: Student) -> None:
    with serving(addresses) as (broker, sender, _):
        pieces = student.piece(0, 3), student.piece(5, 1)
        broker.send(sender, work(*pieces, infos=(student.info(),)))
        for piece in pieces:
            _, done = broker.expect(messages.Done)
            assert outcomes(done) == [(piece.ticket, piece.first_slot, piece.count, DONE)]
            assert student.is_complete(piece)
        assert student.slots.arrays(0, 3)["x"].tolist() == [[7.0] * 3] * 3
        assert student.slots.intact(0, 8).all()


def test_the_registration_says_what_the_worker_can_do(addresses: tuple[str, str]) -> None:
    with (
        FakeBroker(*addresses) as broker,
        Worker(lambda *args: None, 99, *addresses, worker_id="me", max_batch=4, patterns=["a*", "b"], prefetch=3),
    ):
        _, ready = broker.admit(messages.Ready)
        assert (ready.worker_id, ready.slot_size, ready.max_batch) == ("me", 99, 4)
        assert (ready.patterns, ready.prefetch) == (("a*", "b"), 3)
        assert (ready.identity, ready.held, ready.session) == (process_identity(), (), None)


def test_the_generator_gets_the_model_of_the_work_and_the_worker_names_it(
    addresses: tuple[str, str], student: Student
) -> None:
    seen: list[tuple[str, object]] = []

    def generator(model_id: str, cfg: object) -> bytes:
        seen.append((model_id, cfg))
        return sample(0)

    with serving(addresses, generator) as (broker, sender, worker):
        assert (worker.generation, worker.model_id) == (0, "")
        broker.send(sender, work(student.piece(0, 1), infos=(student.info(),)))
        broker.expect(messages.Done)
        assert (worker.generation, worker.model_id) == (1, "teacher")
        broker.send(sender, work(student.piece(1, 1), model=None))
        broker.expect(messages.Done)
    assert seen == [("teacher", {"layer": 3})] * 2


def test_waiting_pieces_of_two_students_are_made_in_one_call(addresses: tuple[str, str], student: Student) -> None:
    counts: list[int] = []

    def generator(model_id: str, cfg: object, count: int) -> list[bytes]:
        counts.append(count)
        return [sample(value) for value in range(count)]

    other = Student(segment_id=2)
    try:
        with serving(addresses, generator, max_batch=4) as (broker, sender, _):
            pieces = student.piece(0, 2), other.piece(1, 2), student.piece(4, 1)
            broker.send(sender, work(*pieces, infos=(student.info(), other.info())))
            _, done = broker.expect(messages.Done)
            assert [row.ticket for row in done.pieces] == [pieces[0].ticket, pieces[1].ticket]
            broker.expect(messages.Done)
        assert counts == [4, 1]
        assert other.slots.arrays(1, 2)["x"][:, 0].tolist() == [2.0, 3.0]
    finally:
        other.close()


def test_a_failing_generator_is_reported_with_its_words_and_the_worker_goes_on(
    addresses: tuple[str, str], student: Student
) -> None:
    results = iter([sample(1), b"too short", sample(2)])
    events: list[tuple[str, dict[str, Any]]] = []
    with serving(
        addresses, lambda model_id, cfg: next(results), on_event=lambda kind, details: events.append((kind, details))
    ) as (broker, sender, _):
        piece = student.piece(0, 3)
        broker.send(sender, work(piece, infos=(student.info(),)))
        _, done = broker.expect(messages.Done)
        assert [row.outcome for row in done.pieces] == [DONE, FAILED, DONE]
        assert "has 9 bytes" in str(done.pieces[1].message)
    assert "failed" in [kind for kind, _ in events]


def test_work_of_an_older_generation_is_given_back_unmade(addresses: tuple[str, str], student: Student) -> None:
    entered, go_on = threading.Event(), threading.Event()

    def generator(model_id: str, cfg: object) -> bytes:
        entered.set()
        assert go_on.wait(PATIENCE_S)
        return sample(1)

    with serving(addresses, generator) as (broker, sender, worker):
        first, second = student.piece(0, 3), student.piece(3, 2)
        broker.send(sender, work(first, second, infos=(student.info(),)))
        assert entered.wait(PATIENCE_S)
        broker.model = ModelState(2, "next", None, b"")
        broker.pump_until(lambda: worker.generation == 2)
        go_on.set()
        _, done = broker.expect(messages.Done)
        assert outcomes(done) == [(first.ticket, 0, 1, DONE), (first.ticket, 1, 2, SKIPPED)]
        _, done = broker.expect(messages.Done)
        assert outcomes(done) == [(second.ticket, 3, 2, SKIPPED)]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"name": "/mxffffffff-1-aaaaaa"}, "is a segment of run ffffffff, not of this run"),
        ({"owner": ProcessIdentity(process_identity().host, 1, 0)}, "is a segment of process"),
        ({"slot_count": 9}, "bytes, not the size="),
        ({"packed_bytes": 11}, "not 11"),
        ({"layout": b"\xc1"}, "is no msgpack"),
        ({"layout": msgpack.packb({"fields": [["x", "float32", [2**60]]], "stride": 64})}, "bytes"),
        ({"segment_id": 9}, "segment 1 was not announced"),
        ({"owner": ProcessIdentity("f" * 16, os.getpid(), 0)}, "is on another host and takes no samples"),
    ],
)
def test_a_segment_that_is_not_what_the_run_made_is_refused_with_a_message(
    change: dict[str, Any], words: str, addresses: tuple[str, str], student: Student
) -> None:
    with serving(addresses) as (broker, sender, _):
        before = bytes(student.segment.buffer)
        piece = WorkPiece(b"t" * 16, 1, 0, 1, 0, 1)
        broker.send(sender, work(piece, infos=(student.info(**change),)))
        _, done = broker.expect(messages.Done)
        assert outcomes(done) == [(piece.ticket, 0, 1, FAILED)]
        assert words in str(done.pieces[0].message)
        assert bytes(student.segment.buffer) == before


def test_more_pieces_than_a_registration_can_name_are_given_back_at_once(addresses: tuple[str, str]) -> None:
    student = Student(2 * MAX_PIECES)
    pieces = [student.piece(slot, 1) for slot in range(2 * MAX_PIECES)]
    told: list[tuple[bytes, int, int, int]] = []
    with serving(addresses) as (broker, sender, _):
        for start in (0, MAX_PIECES):
            infos = (student.info(),) if start == 0 else ()
            broker.send(sender, work(*pieces[start : start + MAX_PIECES], infos=infos))
        while len(told) < len(pieces):
            told += outcomes(broker.expect(messages.Done)[1])
    assert sorted(row[0] for row in told) == sorted(piece.ticket for piece in pieces)
    held = {row[0] for row in told if row[3] == DONE}
    assert MAX_PIECES <= len(held) < 2 * MAX_PIECES
    assert all(student.is_complete(piece) == (piece.ticket in held) for piece in pieces)
    student.close()


def test_slots_beyond_the_segment_are_refused(addresses: tuple[str, str], student: Student) -> None:
    with serving(addresses) as (broker, sender, _):
        piece = student.piece(7, 1)._replace(count=2)
        broker.send(sender, work(piece, infos=(student.info(),)))
        _, done = broker.expect(messages.Done)
        assert "slots 7 to 8 are beyond the 8" in str(done.pieces[0].message)


def test_samples_larger_than_the_worker_makes_are_refused(addresses: tuple[str, str], student: Student) -> None:
    with serving(addresses, slot_size=SIZE - 1) as (broker, sender, _):
        broker.send(sender, work(student.piece(0, 1), infos=(student.info(),)))
        _, done = broker.expect(messages.Done)
        assert f"a sample has {SIZE} bytes; this worker's slot_size={SIZE - 1}" in str(done.pieces[0].message)


def mapped(name: str) -> bool:
    return name.lstrip("/") in Path("/proc/self/maps").read_text()


def test_a_retired_segment_is_unmapped(addresses: tuple[str, str]) -> None:
    student = Student()
    piece = student.piece(0, 1)
    name = student.segment.name
    with serving(addresses) as (broker, sender, _):
        broker.send(sender, work(piece, infos=(student.info(),)))
        broker.expect(messages.Done)
        student.close()
        assert mapped(name)
        broker.send(sender, messages.Retire(segment_ids=(1,)))
        broker.pump_until(lambda: not mapped(name))


def test_the_segment_of_a_dead_student_is_unmapped_without_a_word(addresses: tuple[str, str]) -> None:
    script = textwrap.dedent(
        f"""
        import sys
        from mixle.data.teacher.segment import Segment
        from mixle.data.teacher.run import process_identity
        segment = Segment.create({SlotLayout.of(CONFIG).segment_bytes(8)}, run_id={RUN_ID!r})
        print(segment.name, process_identity().start, flush=True)
        sys.stdin.read()
        """
    )
    with serving(addresses) as (broker, sender, _):
        with subprocess.Popen(
            [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            name, start = process.stdout.readline().split()
            owner = ProcessIdentity(process_identity().host, process.pid, int(start))
            student = Student()
            info = student.info(name=name, owner=owner)
            student.close()
            # The slot is of no order, so that the worker maps it, and writes nothing.
            broker.send(sender, work(WorkPiece(b"t" * 16, 1, 0, 1, 5, 1), infos=(info,)))
            _, done = broker.expect(messages.Done)
            assert done.pieces[0].outcome == SKIPPED
            assert mapped(name)
            process.kill()
        broker.pump_until(lambda: not mapped(name))
        broker.send(sender, work(WorkPiece(b"u" * 16, 1, 0, 1, 5, 1)))  # the broker does not know it yet
        _, done = broker.expect(messages.Done)
        assert done.pieces[0].outcome == SKIPPED
    Path("/dev/shm", name.lstrip("/")).unlink(missing_ok=True)


def test_a_busy_worker_tells_a_new_broker_what_it_still_holds_and_reports_it_there(
    addresses: tuple[str, str], student: Student
) -> None:
    entered, go_on = threading.Event(), threading.Event()

    def generator(model_id: str, cfg: object) -> bytes:
        entered.set()
        assert go_on.wait(PATIENCE_S)
        return sample(1)

    try:
        broker = FakeBroker(*addresses)
        with Worker(generator, SIZE, *addresses) as worker:
            with broker:
                sender, _ = broker.admit(messages.Ready)
                pieces = student.piece(0, 2), student.piece(2, 1)
                broker.send(sender, work(*pieces, infos=(student.info(),)))
                assert entered.wait(PATIENCE_S)
            with FakeBroker(*addresses) as later:
                _, ready = later.admit(messages.Ready)
                assert ready.session is not None
                assert ready.model == MODEL
                assert [(held.ticket, held.segment, *held[2:]) for held in ready.held] == [
                    (piece.ticket, student.segment.name, piece.first_slot, piece.count, piece.token) for piece in pieces
                ]
                go_on.set()
                for piece in pieces:
                    _, done = later.expect(messages.Done)
                    assert outcomes(done) == [(piece.ticket, piece.first_slot, piece.count, DONE)]
                assert worker.generation == 1
    finally:
        go_on.set()


def test_a_worker_that_is_stopped_in_its_generator_finishes_the_sample_and_gives_the_rest_back(
    addresses: tuple[str, str], student: Student
) -> None:
    entered, go_on = threading.Event(), threading.Event()
    events: list[tuple[str, dict[str, Any]]] = []

    def generator(model_id: str, cfg: object) -> bytes:
        entered.set()
        assert go_on.wait(PATIENCE_S)
        return sample(1)

    with serving(addresses, generator, on_event=lambda kind, details: events.append((kind, details))) as (
        broker,
        sender,
        worker,
    ):
        first, second = student.piece(0, 3), student.piece(3, 2)
        broker.send(sender, work(first, second, infos=(student.info(),)))
        assert entered.wait(PATIENCE_S)
        stopping = run_in_thread(lambda: worker.stop(PATIENCE_S))
        go_on.set()
        _, done = broker.expect(messages.Done)
        assert outcomes(done)[-1][3] == SKIPPED
        _, done = broker.expect(messages.Done)
        assert outcomes(done) == [(second.ticket, 3, 2, SKIPPED)]
        broker.expect(messages.Bye)
        stopping.join()
    kinds = dict(events)
    assert kinds["finished"]["finished"] + kinds["finished"]["abandoned"] == 3
    assert kinds["stopped"] == {"given_back": 2}


def test_a_stop_that_the_generator_keeps_waiting_says_so_by_its_deadline(
    addresses: tuple[str, str], student: Student
) -> None:
    entered, go_on = threading.Event(), threading.Event()

    def generator(model_id: str, cfg: object) -> bytes:
        entered.set()
        assert go_on.wait(PATIENCE_S)
        return sample(1)

    with serving(addresses, generator) as (broker, sender, worker):
        broker.send(sender, work(student.piece(0, 1), infos=(student.info(),)))
        assert entered.wait(PATIENCE_S)
        with pytest.raises(TimeoutError, match=r"is in its generator for 0\.01 s yet"):
            worker.stop(0.01)
        go_on.set()


def test_the_broker_stops_a_worker(addresses: tuple[str, str]) -> None:
    with FakeBroker(*addresses) as broker:
        worker = Worker(constant, 64, *addresses)
        thread = run_in_thread(worker.run)
        sender, _ = broker.admit(messages.Ready)
        broker.send(sender, messages.Stop())
        broker.expect(messages.Bye)
        thread.join(PATIENCE_S)
        assert not thread.is_alive()


PROGRAM = """
import sys, time
from mixle.data.teacher.worker import Worker

def generator(model_id, cfg):
    print("entered", flush=True)
    until = time.monotonic() + float(sys.argv[3])
    while time.monotonic() < until:  # a signal just before a long sleep does not interrupt it
        time.sleep(0.01)
    return bytes(12)

Worker(generator, 64, sys.argv[1], sys.argv[2], on_event=lambda kind, details: print(kind, details, flush=True)).run()
print("returned", flush=True)
"""


@contextmanager
def worker_process(addresses: tuple[str, str], sleep_s: float) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *addresses, str(sleep_s)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def read_until(process: subprocess.Popen[str], word: str) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(word):
            return
    raise AssertionError(f"the process ended without a word of {word!r}")


@pytest.mark.parametrize("kind", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_the_sample_be_finished_and_the_process_exit_well(
    kind: signal.Signals, addresses: tuple[str, str], student: Student
) -> None:
    with FakeBroker(*addresses) as broker, worker_process(addresses, 0.3) as process:
        sender, _ = broker.admit(messages.Ready)
        piece = student.piece(0, 4)
        broker.send(sender, work(piece, infos=(student.info(),)))
        read_until(process, "entered")
        process.send_signal(kind)
        _, done = broker.expect(messages.Done)
        assert outcomes(done) == [(piece.ticket, 0, 1, DONE), (piece.ticket, 1, 3, SKIPPED)]
        broker.expect(messages.Bye)
        out, error = process.communicate(timeout=PATIENCE_S)
        assert (process.returncode, error) == (0, "")
        assert "finished {'finished': 1, 'abandoned': 3, 'stopping': True}" in out
        assert out.endswith("returned\n")


def test_a_second_signal_abandons_the_sample_and_the_process_exits_well(
    addresses: tuple[str, str], student: Student
) -> None:
    with FakeBroker(*addresses) as broker, worker_process(addresses, 3_600) as process:
        sender, _ = broker.admit(messages.Ready)
        piece = student.piece(0, 4)
        broker.send(sender, work(piece, infos=(student.info(),)))
        read_until(process, "entered")
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGINT)
        broker.expect(messages.Bye)
        out, error = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 0, error
        assert "abandoned {'slots': 4}" in out
        assert not student.is_complete(piece)


def test_a_second_signal_that_cuts_the_first_ones_handler_short_stops_the_worker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    worker = Worker(constant, 64)
    request_stop = worker._request_stop

    def interrupted() -> None:
        monkeypatch.setattr(worker, "_request_stop", request_stop)
        worker._on_signal(signal.SIGINT, None)

    monkeypatch.setattr(worker, "_request_stop", interrupted)
    worker._calling = True
    with pytest.raises(Interrupted):
        worker._on_signal(signal.SIGTERM, None)
    assert worker._demand.ended


def test_a_worker_that_is_stopped_before_a_broker_answers_ends_in_peace(addresses: tuple[str, str]) -> None:
    worker = Worker(constant, 64, *addresses)
    running = ThreadPoolExecutor(1).submit(worker.run)
    until(lambda: worker._peer is not None, "a connection")
    worker.stop()
    running.result(10)


def test_a_worker_that_finds_no_broker_says_so_by_the_deadline(addresses: tuple[str, str]) -> None:
    with pytest.raises(BrokerUnreachable, match="nothing listens there"):
        Worker(constant, 64, *addresses, deadline_s=0.05).run()


def test_a_worker_that_the_broker_refuses_raises_its_words(addresses: tuple[str, str]) -> None:
    errors: list[BaseException] = []

    def run() -> None:
        with pytest.raises(RequestRefused) as caught:
            Worker(constant, 64, *addresses).run()
        errors.append(caught.value)

    with FakeBroker(*addresses) as broker:
        thread = run_in_thread(run)
        sender, _ = broker.expect(messages.Ready)
        broker.send(sender, messages.Error(kind="refused", message="no room", request_id=None))
        thread.join(PATIENCE_S)
    assert "no room" in str(errors[0])


def test_a_worker_runs_once(addresses: tuple[str, str]) -> None:
    worker = Worker(constant, 64, *addresses)
    worker.stop()
    worker.run()
    with pytest.raises(RuntimeError, match="make a new one"):
        worker.run()


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"generator_fn": 3}, TypeError, "generator_fn=3 must be callable"),
        ({"slot_size": 1.5}, TypeError, r"slot_size=1\.5 must be an integer"),
        ({"slot_size": -1}, ValueError, "slot_size=-1 must be at least 1"),
        ({"slot_size": 0}, ValueError, "slot_size=0 must be at least 1"),
        ({"max_batch": 0}, ValueError, "max_batch=0 must be at least 1"),
        ({"into_buffer": 1}, TypeError, "into_buffer=1 must be True or False"),
        ({"patterns": "a*"}, TypeError, r"patterns='a\*' must be a sequence of globs"),
        ({"patterns": []}, ValueError, "patterns has 0 globs"),
        ({"patterns": [3]}, TypeError, "patterns holds 3"),
        ({"patterns": ["x" * 257]}, ValueError, "a glob has 1 to 256 bytes"),
        ({"worker_id": ""}, ValueError, "worker_id='' must have 1 to 128 bytes"),
        ({"prefetch": 0}, ValueError, "prefetch=0 must be at least 1"),
        ({"prefetch": 17}, ValueError, "prefetch=17 must be at most 16"),
        ({"host_id": "nope"}, ValueError, "host_id='nope' must be 16"),
        ({"keys": 5}, TypeError, "keys must be a directory, Keys or None"),
        ({"backend_endpoint": "tcp://127.0.0.1:5"}, ValueError, "is TCP, which needs keys"),
        ({"backend_endpoint": "ipc://relative"}, ValueError, "absolute path"),
        ({"deadline_s": 0}, ValueError, r"deadline_s=0\.0 must be above 0"),
        ({"on_event": 1}, TypeError, "on_event=1 must be callable or None"),
    ],
)
def test_bad_arguments_are_refused_before_anything_starts(
    options: dict[str, Any], error: type[Exception], words: str, addresses: tuple[str, str]
) -> None:
    good: dict[str, Any] = {
        "generator_fn": constant,
        "slot_size": 64,
        "backend_endpoint": addresses[0],
        "control_pub_endpoint": addresses[1],
    }
    with pytest.raises(error, match=words):
        Worker(**(good | options))
