from __future__ import annotations

import os
import random
import resource
import secrets
import signal
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import zmq
from raw_teacher_peers import RawPeer, RawStudent, RawWorker, until
from teacher_fuzz import fuzz
from unmeasured import environment

from mixle.data.teacher import messages
from mixle.data.teacher.broker import Broker
from mixle.data.teacher.errors import BrokerRunning
from mixle.data.teacher.keys import Keys
from mixle.data.teacher.run import ProcessIdentity, host_id, process_identity, start_ticks
from mixle.data.teacher.stats import BrokerStats

ROOT = Path(__file__).parents[3]

SLEEPER = "import sys; print('up', flush=True); sys.stdin.read()"

SERVER = """
import sys
from mixle.data.teacher.broker import Broker
broker = Broker(directory=sys.argv[1], heartbeat_s=0.05, timeout_s=1.0)
print("up", flush=True)
broker.run()
print("clean", flush=True)
"""


@pytest.fixture
def directory(tmp_path):
    path = tmp_path / "t"
    path.mkdir(mode=0o700)
    return path


@pytest.fixture
def broker(directory):
    with Broker(directory=directory, heartbeat_s=0.05, timeout_s=1.0) as broker:
        yield broker


@pytest.fixture
def peers():
    """Make raw peers that are closed at the end."""
    made = []

    def make(kind, *arguments, **options):
        made.append(kind(*arguments, **options))
        return made[-1]

    yield make
    for peer in made:
        peer.close()


@pytest.fixture
def processes():
    """Start processes that are killed at the end, and reaped."""
    started = []

    def start(program, *arguments):
        process = subprocess.Popen(
            [sys.executable, "-c", program, *arguments],
            env=environment(PYTHONPATH=str(ROOT)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        assert process.stdout is not None and process.stdout.readline() == "up\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def identity_of(process: subprocess.Popen[str]) -> ProcessIdentity:
    return ProcessIdentity(host_id(), process.pid, start_ticks(process.pid) or 0)


def test_an_order_becomes_work_and_its_report_a_completion(broker, peers):
    student = peers(RawStudent, broker.endpoints.frontend)
    worker = peers(RawWorker, broker.endpoints.backend)
    order = student.order(3)
    [piece] = worker.work().pieces
    assert (piece.first_slot, piece.count, piece.token, piece.generation) == (3, 1, order.token, 0)
    info = worker.segments[piece.segment_id]
    assert (info.name, info.layout, info.owner) == (student.segment, b"layout", student.identity)
    worker.report([piece])
    assert student.expect(messages.Complete).pieces == ((order.order_id, 3, 1),)


def test_peers_learn_the_run_and_the_heartbeat_when_they_register(broker, peers):
    student = peers(RawStudent, broker.endpoints.frontend)
    assert student.welcome.run_id == broker.stats.run_id == student.run.run_id
    assert (student.welcome.heartbeat_s, student.welcome.timeout_s) == (0.05, 1.0)
    assert student.beat().broker_id == student.welcome.broker_id


def test_the_leader_switches_the_model_and_everybody_hears_of_it(broker, peers):
    leader = peers(RawStudent, broker.endpoints.frontend)
    other = peers(RawStudent, broker.endpoints.frontend, rank=1)
    news = zmq.Context.instance().socket(zmq.SUB)
    news.subscribe(b"MODEL")
    news.connect(broker.endpoints.control_pub)
    try:
        answers = [leader.set_model(broker.endpoints.control, f"model-{i}", {"layer": i}).model for i in range(3)]
        assert [(one.generation, one.model_id, one.model_cfg) for one in answers] == [
            (i + 1, f"model-{i}", {"layer": i}) for i in range(3)
        ]
        assert other.beat().model == answers[-1]

        # A subscription takes effect at some later switch.
        def switched_and_heard():
            leader.set_model(broker.endpoints.control, "again")
            return news.poll(10) != 0

        until(switched_and_heard, "news of a switch")
        heard = messages.parse_news(*news.recv_multipart())
        assert (heard.topic, heard.run_id, heard.broker_id) == ("MODEL", leader.run.run_id, leader.run.broker_id)
        assert heard.model in answers or heard.model.model_id == "again"
    finally:
        news.close(0)


def test_a_switch_that_is_asked_for_twice_happens_once(broker, peers):
    leader = peers(RawStudent, broker.endpoints.frontend)
    first = leader.set_model(broker.endpoints.control, "m", request_id=b"12345678")
    assert leader.set_model(broker.endpoints.control, "m", request_id=b"12345678") == first


def test_only_rank_zero_leads_and_a_second_leader_is_refused_by_name_while_the_first_lives(broker, peers, processes):
    other_process = processes(SLEEPER)
    leader = peers(RawStudent, broker.endpoints.frontend, identity=identity_of(other_process))
    second = peers(RawStudent, broker.endpoints.frontend)
    wrong_rank = peers(RawStudent, broker.endpoints.frontend, rank=1)
    assert isinstance(leader.set_model(broker.endpoints.control, "a"), messages.Model)
    refused = second.set_model(broker.endpoints.control, "b")
    assert refused.kind == "leader" and str(other_process.pid) in refused.message
    assert wrong_rank.set_model(broker.endpoints.control, "c").kind == "leader"
    assert wrong_rank.set_model(broker.endpoints.control, "c", rank=0).kind == "leader"
    other_process.kill()
    until(lambda: broker.stats.leader == "", "the leader's end")
    assert second.set_model(broker.endpoints.control, "b").model.generation == 2


def test_the_model_cannot_be_switched_with_another_students_name(broker, peers):
    leader = peers(RawStudent, broker.endpoints.frontend)
    assert leader.set_model(broker.endpoints.control, "m", session=secrets.token_bytes(16)).kind == "identity"
    assert leader.set_model(broker.endpoints.control, "m", student_id="0" * 32).kind == "identity"
    assert broker.stats.generation == 0


def test_a_killed_workers_order_is_given_to_another_at_once(broker, peers, processes):
    process = processes(SLEEPER)
    doomed = peers(RawWorker, broker.endpoints.backend, identity=identity_of(process))
    student = peers(RawStudent, broker.endpoints.frontend)
    student.order(0)
    [piece] = doomed.work().pieces
    other = peers(RawWorker, broker.endpoints.backend)
    process.kill()
    [again] = other.work().pieces
    assert (again.first_slot, again.token) == (piece.first_slot, piece.token)
    assert again.ticket != piece.ticket
    doomed.report([piece])
    other.report([again])
    assert student.expect(messages.Complete)
    until(lambda: broker.stats.strangers == 1, "the dead worker's report")
    assert broker.stats.completed == 1


def test_a_killed_students_orders_are_dropped_its_segment_deleted_and_the_workers_told(broker, peers, processes):
    process = processes(SLEEPER)
    student = peers(RawStudent, broker.endpoints.frontend, identity=identity_of(process))
    shm = Path("/dev/shm") / student.segment[1:]
    shm.write_bytes(b"x")
    worker = peers(RawWorker, broker.endpoints.backend, prefetch=1)
    student.order(0, 8)
    work = worker.work()
    process.kill()
    assert worker.expect(messages.Retire).segment_ids == (work.pieces[0].segment_id,)
    until(lambda: not shm.exists(), "the end of the segment")
    worker.report(work.pieces)
    until(lambda: broker.stats.completed == 1, "the last report")
    assert broker.stats.queued == 0 and broker.stats.students_registered == 0
    assert worker.receive(0.1) is None


def test_a_worker_that_does_not_beat_is_lost_and_welcome_again(broker, peers):
    student = peers(RawStudent, broker.endpoints.frontend)
    worker = peers(RawWorker, broker.endpoints.backend)
    order = student.order(0)
    work = worker.work()
    lost = None
    while not isinstance(lost, messages.Lost):
        student.send(messages.Beat(session=student.welcome.session))
        lost = student.receive(0.05)
    assert (lost.pieces, lost.worker, lost.dead) == (((order.order_id, 0, 1),), worker.identity, False)
    worker.report(work.pieces)
    assert student.expect(messages.Complete).pieces == lost.pieces
    assert [row.state for row in broker.stats.workers] == ["idle"]


def test_an_unknown_connection_is_asked_who_it_is(broker, peers):
    stranger = peers(RawPeer, broker.endpoints.frontend)
    order = messages.Order(b"12345678", 0, 1, 0, 0)
    assert stranger.ask(messages.Request(orders=(order,), resent=False), messages.Who)
    assert stranger.ask(messages.Beat(session=b"0" * 16), messages.Who)
    done = messages.DonePiece(b"0" * 16, 0, 1, messages.DONE, None)
    worker = peers(RawPeer, broker.endpoints.backend)
    assert worker.ask(messages.Done(pieces=(done,), seconds=0.1), messages.Who)


def test_another_version_is_refused_by_both_numbers(broker, peers):
    student = peers(RawStudent, broker.endpoints.frontend, register=False)
    student.send(student.hello(version=7))
    refused = student.expect(messages.Error)
    assert refused.kind == "version" and "version 7" in refused.message and "speaks 1" in refused.message


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"segment": "/mx00000000-1-000000"}, "is not one of this run and process"),
        ({"identity": ProcessIdentity(host_id(), 2**22 + 5, 5)}, "is not one of this run and process"),
    ],
)
def test_a_foreign_segment_is_refused(broker, peers, changes, message):
    student = peers(RawStudent, broker.endpoints.frontend, register=False)
    student.send(student.hello(**changes))
    refused = student.expect(messages.Error)
    assert refused.kind == "refused" and message in refused.message


@pytest.mark.parametrize("host", ["127.0.0.2", "10.9.8.7", "[::1]", "localhost", "256.1.1.1", "169.254.169.254"])
def test_workers_are_sent_to_no_address_but_the_students_own(directory, peers, host):
    with Broker("tcp://127.0.0.1:*", directory=directory, insecure=True) as broker:
        student = peers(RawStudent, broker.endpoints.frontend, register=False)
        refused = student.ask(student.hello(data_endpoint=f"tcp://{host}:5"), messages.Error)
        assert refused.kind == "identity" and f"data_endpoint='tcp://{host}:5'" in refused.message
        assert student.register(data_endpoint="tcp://127.0.0.1:5").run_id == student.run.run_id


def test_a_student_of_this_host_names_no_address_on_the_network(broker, peers):
    student = peers(RawStudent, broker.endpoints.frontend, register=False)
    refused = student.ask(student.hello(data_endpoint="tcp://127.0.0.1:5"), messages.Error)
    assert refused.kind == "identity" and "no NAT may be between them" in refused.message


def test_a_process_that_is_not_there_is_refused(broker, peers):
    identity = process_identity()._replace(start=1)
    student = peers(RawStudent, broker.endpoints.frontend, identity=identity, register=False)
    student.send(student.hello())
    assert student.expect(messages.Error).kind == "identity"


def test_anothers_segment_is_refused_while_that_one_is_registered(broker, peers):
    owner = peers(RawStudent, broker.endpoints.frontend)
    thief = peers(RawStudent, broker.endpoints.frontend, register=False)
    thief.send(thief.hello(segment=owner.segment))
    assert "another's" in thief.expect(messages.Error).message


def test_a_restarted_broker_has_the_same_run_and_takes_over_the_model_and_the_work(directory, peers, processes):
    options = {"directory": directory, "heartbeat_s": 0.05, "timeout_s": 1.0}
    with Broker(**options) as first:
        student = peers(RawStudent, first.endpoints.frontend)
        worker = peers(RawWorker, first.endpoints.backend, prefetch=1)
        student.set_model(first.endpoints.control, "m", {"a": 1})
        order = student.order(0, 2)
        [piece] = worker.work().pieces
        before = student.model
    with Broker(**options) as second:
        assert second.stats.run_id == student.run.run_id and second.stats.generation == 0
        welcome = student.register()
        assert welcome.model == before and welcome.broker_id != student.run.broker_id
        again = order._replace(generation=1)
        student.send(messages.Request(orders=(again,), resent=True))
        held = messages.HeldPiece(piece.ticket, student.segment, piece.first_slot, piece.count, piece.token)
        worker.register(held=(held,))
        worker.report([piece])
        assert student.expect(messages.Complete).pieces == ((order.order_id, 0, 1),)
        [rest] = worker.work().pieces
        assert (rest.first_slot, rest.count, rest.token) == (1, 1, order.token + 1)


def test_a_model_that_no_broker_of_the_run_named_is_not_taken_over(broker, peers):
    peers(RawStudent, broker.endpoints.frontend, register=False).register(
        model=messages.ModelState(10**9, "evil", None, b"0" * 16)
    )
    assert broker.stats.generation == 0


def test_a_second_broker_is_refused_by_the_pid_of_the_first_and_a_killed_one_is_replaced_at_once(
    directory, peers, processes
):
    process = processes(SERVER, str(directory))
    peers(RawStudent, f"ipc://{directory}/frontend.sock")
    with pytest.raises(BrokerRunning, match=f"process {process.pid}") as refused:
        Broker(directory=directory).start()
    assert refused.value.pid == process.pid
    process.kill()
    process.wait()
    with Broker(directory=directory) as broker:
        peers(RawStudent, broker.endpoints.frontend)


def test_sigterm_ends_a_broker_cleanly(directory, peers, processes):
    process = processes(SERVER, str(directory))
    peers(RawStudent, f"ipc://{directory}/frontend.sock")
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=20)
    assert (process.returncode, out) == (0, "clean\n")
    assert not list(directory.glob("*.sock*"))


def test_stop_on_the_control_socket_stops_workers_and_broker(directory, peers):
    broker = Broker(directory=directory).start()
    try:
        worker = peers(RawWorker, broker.endpoints.backend)
        control = peers(RawPeer, broker.endpoints.control)
        assert control.ask(messages.Stop(), messages.Stopping)
        assert worker.expect(messages.Stop)
        until(lambda: not broker.running, "the broker's end")
    finally:
        broker.stop()


def test_a_broker_can_be_stopped_and_started_again(directory, peers):
    broker = Broker(directory=directory)
    for _ in range(3):
        broker.start()
        peers(RawStudent, broker.endpoints.frontend)
        with pytest.raises(RuntimeError, match="runs already"):
            broker.start()
        broker.stop()
        broker.stop()
    assert broker.stats.students_registered == 1


def test_its_sockets_and_directory_are_this_users_alone(broker, directory):
    for name in ("frontend", "backend", "control", "control_pub"):
        path = Path(getattr(broker.endpoints, name).removeprefix("ipc://"))
        assert path.parent == directory
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700


def test_tcp_without_keys_is_refused_and_allowed_when_called_insecure(directory, peers):
    with pytest.raises(ValueError, match="TCP, which needs keys"):
        Broker("tcp://127.0.0.1:*", directory=directory)
    with Broker("tcp://127.0.0.1:*", directory=directory, insecure=True) as broker:
        assert broker.endpoints.frontend.rpartition(":")[2].isdigit()
        peers(RawStudent, broker.endpoints.frontend)


def test_only_holders_of_the_right_keys_get_an_answer(directory, peers):
    keys = Keys.generate()
    with Broker("tcp://127.0.0.1:*", "tcp://127.0.0.1:*", directory=directory, keys=keys) as broker:
        peers(RawStudent, broker.endpoints.frontend, keys=keys)
        stranger = Keys(keys.server_public, *(lambda k: (k.client_public, k.client_secret))(Keys.generate()))
        for wrong in (stranger, Keys.generate(), None):
            other = peers(RawPeer, broker.endpoints.frontend, keys=wrong)
            other.send(messages.Ask(version=1))
            assert other.receive(0.3) is None
        assert broker.stats.keys_refused >= 1


@pytest.mark.parametrize("wrong", ["server", "none", "client"])
@pytest.mark.parametrize("at", ["frontend", "backend", "control", "control_pub"])
def test_every_attempt_with_wrong_keys_is_counted(wrong, at, directory, peers):
    keys, others = Keys.generate(), Keys.generate()
    used = {
        "client": Keys(keys.server_public, others.client_public, others.client_secret),
        "server": Keys(others.server_public, keys.client_public, keys.client_secret),
        "none": None,
    }[wrong]
    with Broker(directory=directory, keys=keys) as broker:
        peers(RawStudent, broker.endpoints.frontend, keys=keys)
        assert broker.stats.keys_refused == 0
        peers(RawPeer, getattr(broker.endpoints, at), used, zmq.SUB if at == "control_pub" else zmq.DEALER)
        until(lambda: broker.stats.keys_refused > 0, "a count of the refused")
        assert broker.stats.students_registered == 1


def test_failed_handshakes_are_warned_of_once_a_minute(directory, peers, caplog):
    with caplog.at_level("WARNING"), Broker(directory=directory, keys=Keys.generate()) as broker:
        peers(RawPeer, broker.endpoints.frontend, keys=Keys.generate())
        until(lambda: broker.stats.keys_refused > 2, "a count of the refused")
    [warning] = caplog.messages
    assert f"failed the handshake, the last one at {broker.endpoints.frontend}" in warning


def test_a_broker_without_keys_counts_no_refused_ones(broker, peers):
    peers(RawPeer, broker.endpoints.frontend, keys=Keys.generate())
    peers(RawStudent, broker.endpoints.frontend)
    assert broker.stats.keys_refused == 0


def test_an_occupied_port_is_named(directory):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        endpoint = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(OSError, match=endpoint):
            Broker(endpoint, directory=directory, insecure=True).start()
    with Broker(directory=directory):
        pass


def test_a_listener_hears_what_happens_and_its_faults_do_no_harm(directory, peers):
    heard = []

    def listen(what, details):
        heard.append((what, details["kind"]))
        raise RuntimeError("a listener's fault")

    with Broker(directory=directory, on_event=listen) as broker:
        student = peers(RawStudent, broker.endpoints.frontend)
        student.send(messages.Bye())
        until(lambda: len(heard) == 2, "both events")
    assert heard == [("registered", "student"), ("left", "student")]


def test_no_message_ends_the_broker_or_the_service_of_honest_peers(broker, peers):
    student = peers(RawStudent, broker.endpoints.frontend)
    worker = peers(RawWorker, broker.endpoints.backend)
    fuzz(broker.endpoints, 5_000, seed=1)
    for honest in (student, worker):
        honest.beat()
    order = student.order(0)
    worker.report(worker.work().pieces)
    assert student.expect(messages.Complete).pieces == ((order.order_id, 0, 1),)
    stats = broker.stats
    assert stats.internal_errors == 0 and stats.garbage > 1_000 and stats.generation == 0


@pytest.mark.parametrize("seed", range(4))
def test_raw_bytes_on_the_wire_do_no_harm(broker, peers, seed):
    dice = random.Random(seed)
    for endpoint in broker.endpoints:
        with socket.socket(socket.AF_UNIX) as raw:
            raw.connect(endpoint.removeprefix("ipc://"))
            greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(48)
            try:
                raw.sendall((greeting if dice.random() < 0.5 else b"") + dice.randbytes(20_000))
            except (BrokenPipeError, ConnectionResetError):
                continue  # hung up on, as it should be
    peers(RawStudent, broker.endpoints.frontend)


MANY = """
import os, resource, secrets, sys
import zmq
from mixle.data.teacher import messages
from mixle.data.teacher.broker import Broker
from mixle.data.teacher.process_watch import ProcessWatch
broker = Broker(directory=sys.argv[1], timeout_s=600.0)
print("up", flush=True)
broker.run()
"""


def test_a_broker_of_many_peers_and_orders_stays_small(directory, peers, processes):
    process = processes(MANY, str(directory))
    frontend, backend = f"ipc://{directory}/frontend.sock", f"ipc://{directory}/backend.sock"
    students = [peers(RawStudent, frontend, 200) for _ in range(64)]
    for _ in range(64):
        peers(RawWorker, backend, patterns=("another",))
    for student in students:
        orders = tuple(messages.Order(os.urandom(8), slot, 1, slot, 0) for slot in range(160))
        student.send(messages.Request(orders=orders, resent=False))
    with RawPeer(frontend) as witness:
        until(
            lambda: BrokerStats.unpack(witness.ask(messages.Stats(), messages.StatsReply).stats).queued == 64 * 160,
            "all orders",
        )
    pages = int(Path(f"/proc/{process.pid}/statm").read_text().split()[1])
    assert pages * resource.getpagesize() < 60 * 2**20
    assert "torch" not in Path(f"/proc/{process.pid}/maps").read_text()
