"""Orders past the broker: when they are made, and that no slot is ever written by two."""

from __future__ import annotations

import errno
import multiprocessing
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
from raw_teacher_peers import RawWorker
from teacher_processes import until
from teacher_run import CONFIG, Run, sample, teacher_run

from mixle.data.teacher import lane, messages
from mixle.data.teacher.errors import GeneratorFailed
from mixle.data.teacher.lane import DirectOrder, Lane, StudentLane, remove_dead_lanes
from mixle.data.teacher.layout import SlotLayout
from mixle.data.teacher.messages import Order
from mixle.data.teacher.segment import Segment, SlotLocks
from mixle.data.teacher.slots import Slots
from mixle.data.teacher.stats_client import StatsClient
from mixle.data.teacher.student import StudentClient
from mixle.data.teacher.worker import Worker

pytestmark = pytest.mark.skipif(not lane.AVAILABLE, reason="needs Linux on x86-64")

FORK = multiprocessing.get_context("fork")
ORDER = Order(b"o" * 8, 1, 1, 2**64 - 1, 3)
LAYOUT = SlotLayout.of(CONFIG)


@pytest.fixture
def run() -> Iterator[Run]:
    with teacher_run() as run:
        yield run


@pytest.fixture
def segment(run: Run) -> Iterator[Segment]:
    with Segment.create(4096, run_id="0123abcd") as segment:
        yield segment


# ---- the two ends


def test_an_order_comes_as_it_was_made(segment):
    student, worker = StudentLane(segment), Lane()
    student.grant(worker.name)
    assert student.is_open and student.offer(ORDER) and not student.is_open
    assert worker.take() == DirectOrder(segment.name, 1, 2**64 - 1, 3)
    assert worker.take() is None
    student.leave()
    worker.close()


def test_a_datagram_that_is_no_order_is_none(segment):
    student, worker = StudentLane(segment), Lane()
    student.grant(worker.name)
    for said in (b"", b"x", b"\xff" * 200, b"\0" * 5_000):
        student._socket.send(said)
        assert worker.take() is None
    student._socket.send(b"\xff" * lane._WIRE.size)
    assert worker.take().segment.startswith("\ufffd")
    student.leave()
    worker.close()


def test_a_student_asks_nobody_who_does_not_listen(segment):
    student, worker = StudentLane(segment), Lane()
    student.grant("1-00000000")
    assert not student.is_open
    student.grant(worker.name)
    worker.close()
    assert not student.offer(ORDER) and not student.is_open and student.order is None
    student.leave()


def test_a_grant_that_comes_and_goes_keeps_its_connection(segment):
    student, worker, other = StudentLane(segment), Lane(), Lane()
    student.grant(worker.name)
    connection = student._socket
    student.grant(None)
    assert not student.is_open
    student.grant(worker.name)
    assert student.is_open and student._socket is connection
    student.grant(None)
    student.grant(other.name)
    assert student.is_open and student.offer(ORDER)
    assert other.take() is not None and worker.take() is None and connection.fileno() == -1
    student.leave()
    worker.close()
    other.close()


def test_a_student_that_finds_the_worker_behind_asks_through_the_broker(segment):
    student, worker = StudentLane(segment), Lane()
    student.grant(worker.name)
    made = 0
    while student.is_open and student.offer(ORDER):
        student.order = None
        made += 1
        assert made < 10_000
    assert made and not student.is_open
    student.leave()
    worker.close()


def test_a_student_asks_the_broker_anew_when_its_grant_is_old(segment, monkeypatch):
    student, worker = StudentLane(segment), Lane()
    student.grant(worker.name)
    assert student.is_open
    monkeypatch.setattr(lane, "GRANT_S", 0.0)
    assert not student.is_open
    monkeypatch.undo()
    student.grant(worker.name)
    assert student.is_open
    student.leave()
    worker.close()


def test_a_student_that_left_in_another_thread_meanwhile_asks_nobody(segment):
    student, worker = StudentLane(segment), Lane()
    student.grant(worker.name)
    assert student.is_open
    student.leave()
    assert not student.offer(ORDER)
    with student.held(0) as held:
        assert not held
    worker.close()


def test_a_student_that_may_open_no_more_files_asks_nobody(segment, monkeypatch):
    student = StudentLane(segment)

    def full() -> None:
        raise OSError(errno.EMFILE, "too many open files")

    monkeypatch.setattr(lane, "_datagrams", full)
    student.grant("1-00000000")
    assert not student.is_open
    student.leave()


def test_where_the_system_has_no_locks_all_orders_go_through_the_broker(run, monkeypatch):
    def hold(self: SlotLocks, slot: int) -> bool:
        raise OSError(errno.EINVAL, "no such locks")

    monkeypatch.setattr(SlotLocks, "hold", hold)
    run.start_broker()
    run.start_worker(counting([]))
    with StudentClient(0, 1, CONFIG, **run.client) as client:
        assert len(set(take(client, 30))) == 30
        assert figures(run, 30).direct == 0


def test_a_worker_that_gets_no_lock_leaves_the_order_to_the_broker(run, monkeypatch):
    locking = SlotLocks.hold

    def hold(self: SlotLocks, slot: int) -> bool:
        if threading.current_thread() is not threading.main_thread():  # the worker's
            raise OSError(errno.ENOLCK, "no room for a lock")
        return locking(self, slot)

    monkeypatch.setattr(SlotLocks, "hold", hold)
    run.start_broker()
    run.start_worker(counting([]))
    with StudentClient(0, 1, CONFIG, **run.client) as client:
        assert len(set(take(client, 30))) == 30
        assert figures(run, 30).direct == 0


def test_a_lock_excludes_every_other_holder_from_its_slot_alone(segment):
    one, other = segment.locks(), segment.locks()
    assert one.hold(3) and not other.hold(3) and other.hold(2)
    one.let_go(3)
    assert other.hold(3)
    other.close()
    assert one.hold(3) and one.hold(2)
    one.close()
    assert not one.hold(3)


def test_a_lock_is_free_when_its_holder_is_killed_and_not_when_a_fork_of_it_ends(segment):
    mine = segment.locks()
    assert mine.hold(0)
    fork = FORK.Process(target=time.sleep, args=(0,))
    fork.start()
    fork.join(10)
    other = segment.locks()
    assert not other.hold(0)

    held = FORK.Event()

    def hold_until_killed():
        locks = Segment.attach(segment.name, run_id="0123abcd", size=4096).locks()
        locks.hold(1)
        held.set()
        signal.pause()

    holder = FORK.Process(target=hold_until_killed, daemon=True)
    holder.start()
    assert held.wait(10) and not other.hold(1)
    holder.kill()
    holder.join(10)
    assert other.hold(1)
    mine.close()
    other.close()


def test_a_fork_that_closes_its_parents_locks_leaves_its_own(segment):
    parents = segment.locks()

    def fork() -> None:
        number = os.open(f"/dev/shm{segment.name}", os.O_RDWR)
        own = SlotLocks(os.dup2(number, parents._descriptor))  # as the system may number it, too
        parents.close()
        assert own.hold(0) and not segment.locks().hold(0)

    child = FORK.Process(target=fork)
    child.start()
    child.join(10)
    assert child.exitcode == 0
    assert parents.hold(0)
    parents.close()


def test_the_socket_of_a_dead_worker_is_removed_and_that_of_a_living_one_stays(run):
    living = Lane()
    dead = FORK.Process(target=lambda: (Lane(), os.kill(os.getpid(), signal.SIGKILL)), daemon=True)
    dead.start()
    dead.join(10)
    others = living._path.with_name("notes.txt")
    others.write_text("mine")
    (removed,) = remove_dead_lanes()
    assert f"/{dead.pid:x}-" in removed and living._path.exists() and others.exists()
    assert remove_dead_lanes() == []
    living.close()
    assert not living._path.exists()


def test_a_socket_that_a_living_process_has_not_bound_yet_stays(run):
    one = Lane()
    one._socket.close()
    assert remove_dead_lanes() == [] and one._path.exists()
    one.close()


# ---- a run


def take(client: StudentClient, count: int) -> list[float]:
    values = []
    for _ in range(count):
        with client.request_sample(10_000) as ref:
            values.append(ref.tensors()["y"].item())
    return values


def figures(run: Run, completed: int):
    """Return the broker's figures once it has heard of so many samples."""
    with StatsClient(run.frontend) as client:
        return until(lambda: (found := client.ask()).completed >= completed and found, "the count")


def take_until_direct(client: StudentClient, run: Run, direct: int) -> list[float]:
    """Take samples until so many came past the broker: on a busy machine an order now and then goes by it."""
    values: list[float] = []

    def enough() -> bool:
        values.extend(take(client, 20))
        return figures(run, len(values)).direct >= direct

    until(enough, f"{direct} direct orders", 60.0)
    return values


def counting(calls: list[int], seconds: float = 0.0):
    def generate(model_id, model_cfg):
        calls.append(len(calls))
        time.sleep(seconds)
        return sample(calls[-1])

    return generate


def test_who_takes_one_sample_at_a_time_orders_from_the_worker_itself(run):
    calls: list[int] = []
    run.start_broker()
    run.start_worker(counting(calls))
    with StudentClient(0, 1, CONFIG, **run.client) as client:
        values = take_until_direct(client, run, 30)
        assert len(set(values)) == len(values)
        found = figures(run, len(values))
    assert found.direct >= 30 and found.ordered == found.completed
    assert found.students[0].completed == found.workers[0].completed == found.completed


@pytest.mark.parametrize("max_batch, into_buffer", [(4, False), (None, True), (4, True)])
def test_every_kind_of_generator_takes_direct_orders(run, max_batch, into_buffer):
    made = iter(range(10_000))

    def fill(out, value):
        out["x"][...], out["y"][...] = value, value

    def batch(model_id, model_cfg, count, out=None):
        if out is not None:
            return fill(out, next(made))
        return [sample(next(made)) for _ in range(count)]

    def single(model_id, model_cfg, out):
        fill(out, next(made))

    run.start_broker()
    run.start_worker(batch if max_batch else single, max_batch=max_batch, into_buffer=into_buffer)
    with StudentClient(0, 1, CONFIG, **run.client) as client:
        values = take_until_direct(client, run, 30)
    assert len(set(values)) == len(values)


@pytest.mark.parametrize("seconds, options", [(0.004, {}), (0.0, {"medium": "file"})], ids=["slow", "file"])
def test_no_order_is_direct_where_little_is_won_or_memory_is_a_file(run, seconds, options):
    run.start_broker()
    run.start_worker(counting([], seconds))
    with StudentClient(0, 1, CONFIG, **run.client, **options) as client:
        take(client, 30)
        assert figures(run, 30).direct == 0


def test_a_student_with_many_slots_on_order_leaves_them_to_the_broker(run):
    run.start_broker()
    run.start_worker(counting([], 0.001))
    with StudentClient(0, 16, CONFIG, **run.client) as client:
        take(client, 200)
        found = figures(run, 200)
    assert found.direct <= 10


def test_a_generator_that_fails_at_a_direct_order_has_all_its_tries_at_the_broker(run):
    enough = threading.Event()

    def generate(model_id, model_cfg):
        if enough.is_set():
            raise ValueError("enough")
        return sample(1)

    run.start_broker()
    run.start_worker(generate)
    with StudentClient(0, 1, CONFIG, **run.client) as client:
        take_until_direct(client, run, 1)
        enough.set()
        with pytest.raises(GeneratorFailed, match=r"in 3 tries.*enough"):
            take(client, 3)


def test_two_students_of_one_worker_get_samples_of_their_own(run):
    run.start_broker()
    run.start_worker(counting([]))
    seen: list[list[float]] = [[], []]

    def read(rank: int) -> None:
        with StudentClient(rank, 1, CONFIG, **run.client) as client:
            seen[rank] = take(client, 150)
            if rank == 0:
                seen[rank] += take_until_direct(client, run, 1)

    readers = [threading.Thread(target=read, args=(rank,)) for rank in (0, 1)]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join(60)
    values = seen[0] + seen[1]
    assert len(set(values)) == len(values) >= 320


def test_a_switch_makes_direct_orders_of_the_new_model(run):
    run.start_broker()
    run.start_worker(lambda model_id, model_cfg: sample(-1 if model_cfg is None else model_cfg["number"]))
    with StudentClient(0, 1, CONFIG, **run.client) as client:
        for number in range(30):
            client.set_model("m", {"number": number})
            assert set(take(client, 10)) == {number}
        assert set(take_until_direct(client, run, 1)) == {29}


def test_a_worker_ignores_direct_orders_that_nobody_made(run):
    run.start_broker()
    worker = run.start_worker(counting([]))
    with StudentClient(0, 1, CONFIG, **run.client) as client:
        take(client, 5)
        held = client.request_sample(10_000)
        session = client._desk._sessions[0]
        before = bytes(session.segment.buffer)
        name, (token, generation) = session.segment.name, session.order_of(0)
        path = str(lane._lanes_directory(None) / worker._lane.name)
        absurd = [
            DirectOrder("/mx00000000-1-000000", 0, token, generation),
            DirectOrder("../../etc/passwd", 0, token, generation),
            DirectOrder(name, 1, token, generation),
            DirectOrder(name, 2**32 - 1, token, generation),
            DirectOrder(name, 0, token, generation),  # complete, and in the reader's hands
            DirectOrder(name, 0, token + 1 & 2**64 - 1, generation),
            DirectOrder(name, 0, token, generation + 1),
        ]
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as stranger:
            stranger.connect(path)
            for order in absurd:
                stranger.send(lane._WIRE.pack(order.segment.encode(), *order[1:]))
            stranger.send(b"garbage")
        with StudentClient(1, 1, CONFIG, **run.client) as other:
            take(other, 5)  # the worker is through with those
        assert bytes(session.segment.buffer) == before
        held.release()
        take(client, 5)


# ---- a worker that does what the test says


class Scripted:
    """A raw worker with a lane, and the student's slots as it maps them."""

    def __init__(self, run: Run) -> None:
        self.lane = Lane()
        self.peer = RawWorker(run.backend, slot_size=4096, register=False)
        self.peer.register(lane=self.lane.name)
        self.segment: Segment | None = None

    def attach(self) -> Slots:
        (info,) = self.peer.segments.values()
        self.segment = Segment.attach(
            info.name, run_id=self.peer.welcome.run_id, size=LAYOUT.segment_bytes(info.slot_count)
        )
        return Slots(self.segment.buffer, LAYOUT, info.slot_count)

    def fill(self, slots: Slots, piece: messages.WorkPiece, value: float) -> None:
        slots.write(piece.first_slot, piece.token, piece.generation, sample(value))
        self.peer.report([piece], seconds=1e-6)

    def close(self) -> None:
        if self.segment is not None:
            self.segment.close()
        self.peer.close()
        self.lane.close()


@pytest.fixture
def scripted(run, monkeypatch) -> Iterator[Scripted]:
    monkeypatch.setattr(lane, "GRANT_S", 60.0)  # a busy machine may take a second between two orders
    run.start_broker(timeout_s=3.0)
    scripted = Scripted(run)
    beating = threading.Event()

    def beat() -> None:
        with RawWorker(run.backend, register=False) as heart:
            while not beating.wait(0.1):
                heart.send(messages.Beat(session=scripted.peer.welcome.session))

    thread = threading.Thread(target=beat)
    thread.start()
    yield scripted
    beating.set()
    thread.join(10)
    scripted.close()


class Reader:
    """A client of one slot in a thread of its own, which takes samples one after another."""

    def __init__(self, run: Run, count: int) -> None:
        self.values: list[float] = []
        self.errors: list[BaseException] = []
        self.segments: list[str] = []
        self._thread = threading.Thread(target=self._read, args=(run, count))
        self._thread.start()

    def _read(self, run: Run, count: int) -> None:
        try:
            with StudentClient(0, 1, CONFIG, **run.client) as client:
                for _ in range(count):
                    self.values += take(client, 1)
                    self.segments.append(client._desk._sessions[0].segment.name)
        except BaseException as error:
            self.errors.append(error)

    def join(self) -> None:
        self._thread.join(30)
        assert not self._thread.is_alive() and not self.errors, self.errors


def direct_order(scripted: Scripted) -> DirectOrder:
    return until(scripted.lane.take, "a direct order")


def test_what_the_worker_does_not_begin_is_ordered_from_the_broker_with_another_token(run, scripted):
    reader = Reader(run, 2)
    (piece,) = scripted.peer.work().pieces
    slots = scripted.attach()
    scripted.fill(slots, piece, 1.0)
    late = direct_order(scripted)
    (piece,) = scripted.peer.work().pieces
    assert piece.first_slot == late.slot and piece.token != late.token
    assert not slots.is_awaited(late.slot, late.token, late.generation)
    scripted.fill(slots, piece, 2.0)
    reader.join()
    assert reader.values == [1, 2]


def test_a_slot_that_its_worker_has_begun_is_waited_for(run, scripted):
    reader = Reader(run, 2)
    (piece,) = scripted.peer.work().pieces
    slots = scripted.attach()
    locks = scripted.segment.locks()
    assert locks.hold(0)  # before the student can give it up
    scripted.fill(slots, piece, 1.0)
    order = direct_order(scripted)
    assert scripted.peer.receive(0.2) is None  # far longer than it waits for a worker to begin
    slots.write(order.slot, order.token, order.generation, sample(2.0))
    locks.close()
    reader.join()
    assert reader.values == [1, 2]


def test_a_slot_whose_worker_dies_at_it_is_ordered_anew(run, scripted):
    reader = Reader(run, 2)
    (piece,) = scripted.peer.work().pieces
    slots = scripted.attach()
    held = FORK.Event()

    def begin(name: str, run_id: str) -> None:
        locks = Segment.attach(name, run_id=run_id, size=LAYOUT.segment_bytes(1)).locks()
        locks.hold(0)
        held.set()
        signal.pause()

    dying = FORK.Process(target=begin, args=(scripted.segment.name, scripted.peer.welcome.run_id), daemon=True)
    dying.start()
    assert held.wait(10)
    scripted.fill(slots, piece, 1.0)
    order = direct_order(scripted)
    assert scripted.peer.receive(0.1) is None
    dying.kill()
    dying.join(10)
    (piece,) = scripted.peer.work().pieces
    assert piece.token != order.token
    scripted.fill(slots, piece, 2.0)
    reader.join()
    assert reader.values == [1, 2]


def test_a_worker_that_has_just_begun_an_old_order_does_not_cost_the_student_its_segment(run, scripted):
    with StudentClient(0, 1, CONFIG, **run.client) as client:
        values: list[float] = []
        reading = threading.Thread(target=lambda: values.extend(take(client, 2)))
        reading.start()
        (piece,) = scripted.peer.work().pieces
        slots = scripted.attach()
        locks = scripted.segment.locks()
        assert locks.hold(0)
        scripted.fill(slots, piece, 1.0)
        order = direct_order(scripted)
        session = client._desk._sessions[0]
        session._lane.offered_at -= 3600  # its reader was away, and so was the worker
        session._lane._busy_since = None
        until(lambda: session._lane._busy_since is not None, "a look at the lock")
        slots.write(order.slot, order.token, order.generation, sample(2.0))
        locks.close()
        reading.join(30)
        assert values == [1, 2] and not session.spent


def test_a_slot_whose_worker_hangs_at_it_is_given_up_with_its_segment(run, scripted):
    reader = Reader(run, 2)
    (piece,) = scripted.peer.work().pieces
    slots = scripted.attach()
    hanging = scripted.segment.locks()
    assert hanging.hold(0)
    scripted.fill(slots, piece, 1.0)
    first = direct_order(scripted).segment
    work = scripted.peer.work()
    (info,) = work.segments
    assert info.name != first
    with Segment.attach(info.name, run_id=scripted.peer.welcome.run_id, size=LAYOUT.segment_bytes(1)) as anew:
        scripted.fill(Slots(anew.buffer, LAYOUT, 1), work.pieces[0], 2.0)
        reader.join()
    hanging.close()
    assert reader.values == [1, 2] and reader.segments[0] != reader.segments[1]


def test_a_direct_order_of_a_model_that_is_replaced_is_taken_back(run, scripted):
    values: list[float] = []
    with StudentClient(0, 1, CONFIG, **run.client) as client:
        asking = threading.Thread(target=lambda: values.extend(take(client, 2)))
        asking.start()
        (piece,) = scripted.peer.work().pieces
        slots = scripted.attach()
        locks = scripted.segment.locks()
        assert locks.hold(0)
        scripted.fill(slots, piece, 1.0)
        old = direct_order(scripted)
        with StudentClient(0, 1, CONFIG, **run.client) as leader:
            leader.set_model("m", {"number": 5})
        locks.close()  # its worker had the slot, and found that the model is another
        work = scripted.peer.work()
        (piece,) = work.pieces
        assert piece.generation == old.generation + 1
        scripted.fill(slots, piece, 2.0)
        asking.join(30)
    assert values == [1, 2]


def test_a_restarted_broker_is_told_nothing_of_a_direct_order(run, monkeypatch):
    broker = run.start_broker()
    directly, entered, leave = threading.Event(), threading.Event(), threading.Event()
    calls: list[int] = []
    work_directly = Worker._work_directly

    def marked(self: Worker, lane: Lane) -> None:
        directly.set()
        work_directly(self, lane)
        directly.clear()

    monkeypatch.setattr(Worker, "_work_directly", marked)

    def generate(model_id, model_cfg):
        calls.append(len(calls))
        if directly.is_set() and not entered.is_set():
            entered.set()
            assert leave.wait(60)
        return sample(len(calls))

    run.start_worker(generate)
    values: list[float] = []

    def ask() -> None:
        while not entered.is_set():
            values.extend(take(client, 1))
        values.extend(take(client, 5))

    with StudentClient(0, 1, CONFIG, **run.client) as client:
        asking = threading.Thread(target=ask)
        asking.start()
        assert entered.wait(60)
        broker.stop()
        again = run.start_broker()
        until(lambda: again.stats.students_registered and again.stats.workers_registered, "a return")
        assert again.stats.ordered == 0
        leave.set()
        asking.join(30)
    assert len(values) > 5 and values == list(np.arange(1, len(values) + 1))
