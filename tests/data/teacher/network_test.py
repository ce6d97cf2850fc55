from __future__ import annotations

import logging
import os
import secrets
import shutil
import socket as net
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
import zmq
from unmeasured import environment

from mixle.data.teacher.generation import Demand, Generator, Outcome
from mixle.data.teacher.keys import Keys
from mixle.data.teacher.layout import SlotLayout
from mixle.data.teacher.messages import DONE, FAILED, SKIPPED, SegmentInfo, WorkPiece
from mixle.data.teacher.network import HEAD, MAGIC, Receiver, Sender, own_address
from mixle.data.teacher.run import ProcessIdentity
from mixle.data.teacher.slots import Slots
from mixle.data.teacher.specs import BatchConfig, TensorSpec

PATIENCE_S = 20.0
CONFIG = BatchConfig([TensorSpec("x", (5,), "float32"), TensorSpec("y", (), "uint8")])
LAYOUT = SlotLayout.of(CONFIG)
COUNT = 6


@pytest.fixture
def context() -> Iterator[zmq.Context[Any]]:
    one = zmq.Context()
    yield one
    one.term()


class Student:
    """Slots in private memory with a receiver on the loopback interface."""

    def __init__(self, layout: SlotLayout = LAYOUT, slot_count: int = COUNT, *, keys: Keys | None = None) -> None:
        self.layout, self.slot_count = layout, slot_count
        self.memory = memoryview(bytearray(layout.segment_bytes(slot_count)))
        self.slots = Slots(self.memory, layout, slot_count)
        self.slots.initialize()
        self.arrival = threading.Event()
        self.receiver = Receiver(
            self.slots, self.memory, "127.0.0.1", keys=keys, insecure=keys is None, on_arrival=self.arrival.set
        )

    def __enter__(self) -> Student:
        return self

    def __exit__(self, *exception: object) -> None:
        self.receiver.close()

    @property
    def info(self) -> SegmentInfo:
        return SegmentInfo(
            1,
            "shm",
            "/mx0123abcd-1-aaaaaa",
            self.slot_count,
            self.layout.packed_bytes,
            msgpack.packb(self.layout.to_wire()),
            self.receiver.endpoint,
            self.receiver.public_key,
            ProcessIdentity("0" * 16, 1, 1),
        )

    def piece(self, first: int, count: int, *, token: int | None = None, generation: int = 3) -> WorkPiece:
        token = secrets.randbits(64) if token is None else token
        with self.receiver.lock:
            self.slots.prepare(first, count, token, generation)
        return WorkPiece(b"t" * 16, 1, first, count, token, generation)

    def is_complete(self, piece: WorkPiece) -> bool:
        return bool(self.slots.complete(*piece[2:]).all())


def sender_of(info: SegmentInfo, context: zmq.Context[Any], **options: Any) -> Sender:
    keys = options.pop("keys", None)
    layout = options.pop("layout", LAYOUT)
    defaults = {"insecure": keys is None, "checksum": False, "attend": lambda: None}
    return Sender(info, layout, context=context, keys=keys, **{**defaults, **options})


@contextmanager
def sender_to(student: Student, context: zmq.Context[Any], **options: Any) -> Iterator[Sender]:
    sender = sender_of(student.info, context, layout=student.layout, **options)
    try:
        yield sender
    finally:
        sender.close()


def make(sender: Sender, piece: WorkPiece, *, values: Callable[[], int]) -> list[Outcome]:
    """Fill a piece as a worker does."""

    def generator(model_id: str, cfg: object) -> dict[str, np.ndarray]:
        value = values()
        return {"x": np.full(5, value, np.float32), "y": np.array(value, np.uint8)}

    target = sender.target(piece)
    (outcomes,) = Generator(generator).fill([target], "", None, Demand())
    shift = piece.first_slot - target.first
    return sender.deliver(piece, [outcome._replace(first=outcome.first + shift) for outcome in outcomes], Demand())


def wait_until(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < until, "the condition did not come true"
        time.sleep(0.002)


@pytest.mark.parametrize("keyed", [False, True])
@pytest.mark.parametrize("checksum", [False, True])
def test_samples_arrive_in_the_slots_that_they_were_ordered_for(
    keyed: bool, checksum: bool, context: zmq.Context[Any]
) -> None:
    keys = Keys.generate() if keyed else None
    numbers = iter(range(100))
    with Student(keys=keys) as student, sender_to(student, context, keys=keys, checksum=checksum) as sender:
        piece = student.piece(1, 4, token=2**64 - 2)
        assert make(sender, piece, values=lambda: next(numbers)) == [Outcome(1, 4, DONE, None)]
        wait_until(lambda: student.is_complete(piece))
        assert student.slots.arrays(1, 4)["x"][:, 4].tolist() == [0.0, 1.0, 2.0, 3.0]
        assert student.slots.arrays(1, 4)["y"].tolist() == [0, 1, 2, 3]
        assert student.slots.intact(0, COUNT).all()
        assert not student.slots.arrays(0, 1)["x"].any() and not student.slots.arrays(5, 1)["x"].any()
        assert student.arrival.wait(PATIENCE_S)
        assert student.receiver.arrived == 4


def test_samples_larger_than_a_message_arrive_one_by_one(context: zmq.Context[Any]) -> None:
    layout = SlotLayout.of(BatchConfig([TensorSpec("x", (600_000,), "uint8")]))
    numbers = iter(range(1, 100))
    with Student(layout) as student, sender_to(student, context) as sender:
        piece = student.piece(0, COUNT)
        target = sender.target(piece)
        generator = Generator(lambda model_id, cfg: bytes([next(numbers)]) * 600_000)
        (outcomes,) = generator.fill([target], "", None, Demand())
        assert sender.deliver(piece, outcomes, Demand()) == [Outcome(0, COUNT, DONE, None)]
        wait_until(lambda: student.is_complete(piece))
        assert student.slots.arrays(0, COUNT)["x"][:, -1].tolist() == [1, 2, 3, 4, 5, 6]


def test_only_what_was_made_is_sent(context: zmq.Context[Any]) -> None:
    results = iter([bytes(21), b"short", bytes(21)])
    with Student() as student, sender_to(student, context) as sender:
        piece = student.piece(0, 3)
        (made,) = Generator(lambda model_id, cfg: next(results)).fill([sender.target(piece)], "", None, Demand())
        assert [outcome.outcome for outcome in sender.deliver(piece, made, Demand())] == [DONE, FAILED, DONE]
        wait_until(lambda: student.receiver.arrived == 2)
        assert student.slots.complete(*piece[2:]).tolist() == [True, False, True]


def test_two_pieces_that_are_made_in_one_call_do_not_share_memory(context: zmq.Context[Any]) -> None:
    numbers = iter(range(10))
    with Student() as student, sender_to(student, context) as sender:
        one, other = student.piece(0, 2), student.piece(4, 1)._replace(ticket=b"u" * 16)
        generator = Generator(lambda model_id, cfg, count: [bytes([next(numbers)]) * 21 for _ in range(count)], 8)
        made = generator.fill([sender.target(one), sender.target(other)], "", None, Demand())
        assert sender.deliver(one, made[0], Demand()) == [Outcome(0, 2, DONE, None)]
        assert sender.deliver(other, [made[1][0]._replace(first=4)], Demand()) == [Outcome(4, 1, DONE, None)]
        wait_until(lambda: student.is_complete(one) and student.is_complete(other))
        assert [int(student.slots.array(slot)["y"]) for slot in (0, 1, 4)] == [0, 1, 2]


def test_skipped_slots_are_reported_as_they_are(context: zmq.Context[Any]) -> None:
    with Student() as student, sender_to(student, context) as sender:
        piece, outcomes = student.piece(0, 2), [Outcome(0, 2, SKIPPED, None)]
        sender.target(piece)
        assert sender.deliver(piece, outcomes, Demand()) == outcomes


@pytest.mark.parametrize("again", ["another token", "another generation"])
def test_a_late_sample_cannot_touch_a_slot_that_was_ordered_anew(again: str, context: zmq.Context[Any]) -> None:
    with Student() as student, sender_to(student, context) as sender:
        old = student.piece(2, 1)
        student.piece(
            2, 1, **({"token": old.token ^ 1} if again == "another token" else {"token": old.token, "generation": 4})
        )
        before = bytes(student.memory)
        make(sender, old, values=lambda: 9)
        wait_until(lambda: student.receiver.dropped == 1)
        assert bytes(student.memory) == before


def test_a_sample_that_comes_twice_does_not_change_under_its_reader(context: zmq.Context[Any]) -> None:
    with Student() as student, sender_to(student, context) as sender:
        piece = student.piece(0, 1)
        make(sender, piece, values=lambda: 1)
        wait_until(lambda: student.is_complete(piece))
        make(sender, piece, values=lambda: 2)
        wait_until(lambda: student.receiver.dropped == 1)
        assert student.slots.array(0)["y"] == 1


def head(
    token: int = 0, generation: int = 3, first: int = 0, count: int = 1, magic: bytes = MAGIC, flag: int = 0
) -> bytes:
    return HEAD.pack(magic, token, generation, first, count, flag)


PAYLOAD = bytes(LAYOUT.payload_bytes)


@pytest.mark.parametrize(
    "frames",
    [
        [b""],
        [head()],
        [head(), PAYLOAD, b""],
        [head()[:-1], PAYLOAD],
        [head(magic=b"mixle-n2"), PAYLOAD],
        [head(flag=2), PAYLOAD],
        [head(), PAYLOAD[:-1]],
        [head(), PAYLOAD + b"x"],
        [head(), b""],
        [head(count=0), b""],
        [head(count=2), PAYLOAD],
        [head(count=2**63), PAYLOAD],
        [head(first=2**63), PAYLOAD],
        [head(first=COUNT), PAYLOAD],
        [head(first=COUNT - 1, count=2), 2 * PAYLOAD],
        [head(token=1), PAYLOAD],
        [secrets.token_bytes(HEAD.size), secrets.token_bytes(len(PAYLOAD))],
    ],
)
def test_what_is_no_ordered_sample_is_dropped_and_the_next_one_taken(
    frames: list[bytes], context: zmq.Context[Any]
) -> None:
    with Student() as student, sender_to(student, context) as sender:
        piece = student.piece(0, 1, token=0)
        stranger = context.socket(zmq.PUSH)
        stranger.connect(student.receiver.endpoint)
        stranger.send_multipart(frames)
        wait_until(lambda: student.receiver.dropped == 1)
        stranger.close()
        assert not student.is_complete(piece)
        make(sender, piece, values=lambda: 1)
        wait_until(lambda: student.is_complete(piece))


def received_exactly(raw: net.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        part = raw.recv(count - len(data))
        assert part, "closed"
        data += part
    return data


def test_an_announced_size_beyond_a_message_ends_the_connection_before_a_byte_of_it_is_read() -> None:
    with Student() as student:
        host, port = student.receiver.endpoint.removeprefix("tcp://").split(":")
        with net.create_connection((host, int(port)), timeout=PATIENCE_S) as raw:
            raw.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32))
            assert received_exactly(raw, 64)[:1] == b"\xff"
            ready = b"\x05READY\x0bSocket-Type\x00\x00\x00\x04PUSH"
            raw.sendall(b"\x04" + bytes([len(ready)]) + ready)
            answer = received_exactly(raw, 2)
            assert received_exactly(raw, answer[1])[:6] == b"\x05READY"
            raw.sendall(b"\x02" + struct.pack(">Q", 4 << 30))  # a long frame of 4 GiB
            assert raw.recv(1) == b""


@pytest.mark.parametrize("wrong", ["client", "server", "none"])
def test_a_stranger_to_the_keys_gets_nothing_in(
    wrong: str, context: zmq.Context[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mixle.data.teacher.network.SEND_DEADLINE_S", 0.3)
    keys, others = Keys.generate(), Keys.generate()
    with Student(keys=keys) as student:
        info = student.info
        if wrong == "server":
            info = info._replace(data_key=others.server_public.encode())
        used = {"client": others, "server": keys, "none": None}[wrong]
        sender = sender_of(info, context, keys=used)
        piece = student.piece(0, 1)
        (outcome,) = make(sender, piece, values=lambda: 1)
        sender.close()
        assert outcome.outcome == FAILED
        assert "took nothing for 0.3 s" in str(outcome.message)
        assert not student.is_complete(piece)


def test_what_was_made_for_a_student_that_is_gone_has_failed(
    context: zmq.Context[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mixle.data.teacher.network.SEND_DEADLINE_S", 0.2)
    with Student() as student:
        piece = student.piece(0, COUNT)
        student.receiver.close()
        with sender_to(student, context) as sender:
            results = iter([b"short" if i % 2 else bytes(21) for i in range(COUNT)])
            (made,) = Generator(lambda model_id, cfg: next(results)).fill([sender.target(piece)], "", None, Demand())
            assert [outcome.outcome for outcome in sender.deliver(piece, made, Demand())] == [FAILED] * COUNT


@pytest.mark.parametrize("reached", [True, False])
def test_a_student_where_nothing_listens_is_given_up_before_the_deadline(
    reached: bool, context: zmq.Context[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mixle.data.teacher.network.SEND_DEADLINE_S", 60.0)
    with Student() as student:
        if not reached:
            student.receiver.close()
        with sender_to(student, context) as sender:
            if reached:
                assert make(sender, student.piece(0, 1), values=lambda: 1)[0].outcome == DONE
                student.receiver.close()
            outcome = Outcome(0, 0, DONE, None)
            while outcome.outcome == DONE:  # what was sent before the end of the connection was noticed
                (outcome,) = make(sender, student.piece(1, COUNT - 1), values=lambda: 1)
            assert outcome.outcome == FAILED and "nothing listens there" in str(outcome.message)


def test_a_student_that_leaves_while_it_is_waited_for_gets_nothing_more(context: zmq.Context[Any]) -> None:
    with Student() as student:
        student.receiver.close()
        sender = sender_of(student.info, context, attend=lambda: sender.close())
        pieces = [student.piece(0, 2), student.piece(2, 2)]
        outcomes = [make(sender, piece, values=lambda: 1)[0].outcome for piece in pieces]
    assert outcomes == [SKIPPED] * 2


def test_a_sample_that_cannot_be_sent_is_given_up_once_it_is_not_wanted(context: zmq.Context[Any]) -> None:
    with Student() as student, sender_to(student, context) as sender:
        piece, demand = student.piece(0, 1), Demand()
        student.receiver.close()
        (made,) = Generator(lambda model_id, cfg: bytes(21)).fill([sender.target(piece)], "", None, Demand())
        demand.end()
        assert sender.deliver(piece, made, demand) == [Outcome(0, 1, SKIPPED, None)]


def test_the_network_without_keys_is_refused_unless_it_is_asked_for(context: zmq.Context[Any]) -> None:
    with Student() as student:
        with pytest.raises(ValueError, match=r"needs keys.*or insecure=True"):
            Receiver(student.slots, student.memory, "127.0.0.1", keys=None)
        with pytest.raises(ValueError, match=r"needs keys.*or insecure=True"):
            sender_of(student.info, context, insecure=False)


def test_a_student_without_a_receiver_or_keys_is_refused_by_name(context: zmq.Context[Any]) -> None:
    with Student() as student:
        info = student.info
        with pytest.raises(ValueError, match="takes no samples over the network"):
            sender_of(info._replace(data_endpoint=None), context)
        with pytest.raises(ValueError, match=r"has no keys, and this worker has"):
            sender_of(info, context, keys=Keys.generate())


def test_an_address_that_is_not_this_hosts_is_refused_and_leaves_nothing_open(context: zmq.Context[Any]) -> None:
    with Student() as student, pytest.raises(zmq.ZMQError):
        Receiver(student.slots, student.memory, "203.0.113.7", keys=None, insecure=True)


def test_the_interface_is_the_one_that_leads_to_the_broker() -> None:
    assert own_address("tcp://127.0.0.1:5555") == "127.0.0.1"


def test_dropped_messages_are_logged(context: zmq.Context[Any], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), Student() as student:
        stranger = context.socket(zmq.PUSH)
        stranger.connect(student.receiver.endpoint)
        stranger.send_multipart([b"nonsense"])
        wait_until(lambda: student.receiver.dropped == 1)
        stranger.close()
    assert "dropped what came over the network" in caplog.text


# ---- three hosts: network namespaces of this machine, joined by a bridge at the broker's


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=PATIENCE_S)


@pytest.fixture
def hosts() -> Iterator[dict[str, str]]:
    """Names of the network namespaces of a broker (10.99.0.1), a student (.2) and a worker (.3)."""
    if not hasattr(os, "geteuid") or os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and the ip command")
    tag = secrets.token_hex(2)
    names = {role: f"mx{tag}{role[0]}" for role in ("broker", "student", "worker")}
    try:
        try:
            for name in names.values():
                ip("netns", "add", name)
            ip("-n", names["broker"], "link", "add", "br0", "type", "bridge")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces are not permitted here: {error.stderr.strip()}")
        ip("-n", names["broker"], "addr", "add", "10.99.0.1/24", "dev", "br0")
        ip("-n", names["broker"], "link", "set", "br0", "up")
        for number, role in ((2, "student"), (3, "worker")):
            port = f"v{tag}{role[0]}"
            ip("-n", names["broker"], "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", names[role])
            ip("-n", names["broker"], "link", "set", port, "master", "br0")
            ip("-n", names["broker"], "link", "set", port, "up")
            ip("-n", names[role], "addr", "add", f"10.99.0.{number}/24", "dev", "eth0")
            ip("-n", names[role], "link", "set", "eth0", "up")
        yield names
    finally:
        for name in names.values():
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True, timeout=PATIENCE_S)


ROLES = """
import os
import sys
import numpy as np
from mixle.data.teacher.broker import Broker
from mixle.data.teacher.specs import BatchConfig, TensorSpec
from mixle.data.teacher.student import StudentClient
from mixle.data.teacher.worker import Worker

role, keys = sys.argv[1:]
frontend, backend, control, pub = (f"tcp://10.99.0.1:{port}" for port in (7001, 7002, 7003, 7004))
config = BatchConfig([TensorSpec("x", (300_000,), "int32"), TensorSpec("layer", (), "int64")])
made = os.getpid() << 8  # no two workers make the same

def generator(model_id, cfg):
    global made
    made += 1
    return {"x": np.full(300_000, made, np.int32), "layer": np.array(cfg["layer"], np.int64)}

if role == "broker":
    Broker(frontend, backend, control, pub, keys=keys).run()
elif role == "worker":
    Worker(generator, config.nbytes(), backend, pub, keys=keys).run()
else:
    with StudentClient(0, 8, config, frontend, control, pub, keys=keys) as client:
        seen = set()
        for layer in (1, 2):
            client.set_model("teacher", {"layer": layer})
            for step in range(10):
                batch = client.request_batch(4, timeout_ms=20_000)
                x, layers = batch.tensors()["x"], batch.tensors()["layer"]
                assert (x == x[:, :1]).all(), "torn"
                assert layers.tolist() == [layer] * 4, layers
                seen.update(x[:, 0].tolist())
                batch.release()
                if layer == 1 and step == 2:
                    print("begun", flush=True)
                    sys.stdin.readline()
        print(len(seen), flush=True)
"""


@contextmanager
def running(hosts: dict[str, str], directory: Path, *roles: str) -> Iterator[list[subprocess.Popen[str]]]:
    """One process for each role, on its host; all dead at the end."""
    keys = directory / "keys"
    Keys.generate().save(keys)
    processes: list[subprocess.Popen[str]] = []
    try:
        for role in roles:
            processes.append(
                subprocess.Popen(
                    ["ip", "netns", "exec", hosts[role], sys.executable, "-c", ROLES, role, str(keys)],
                    env=environment(MIXLE_TEACHER_DIR=str(directory / role)),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()


@pytest.mark.distributed
def test_a_worker_on_another_host_serves_a_student_past_the_broker(hosts: dict[str, str], tmp_path: Path) -> None:
    with running(hosts, tmp_path, "broker", "worker", "student") as (broker, worker, student):
        out, error = student.communicate("go\n", timeout=3 * PATIENCE_S)
        # Samples of 1.2 MB are larger than any message that the broker takes.
        assert (student.returncode, out.split()) == (0, ["begun", "80"]), error
        for process in (worker, broker):
            process.terminate()
            _, error = process.communicate(timeout=PATIENCE_S)
            assert process.returncode == 0, error


@pytest.mark.distributed
@pytest.mark.slow
def test_the_work_of_a_worker_that_dies_on_another_host_is_made_by_the_other(
    hosts: dict[str, str], tmp_path: Path
) -> None:
    with running(hosts, tmp_path, "broker", "worker", "worker", "student") as (_, one, _, student):
        assert student.stdout is not None
        assert student.stdout.readline() == "begun\n"
        one.kill()
        out, error = student.communicate("go\n", timeout=3 * PATIENCE_S)
        assert (student.returncode, out.split()) == (0, ["80"]), error
