"""What others cannot do: open the sockets, talk without the right keys, or make a worker write elsewhere."""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
import textwrap

import pytest
from raw_teacher_peers import RawStudent
from teacher_run import CONFIG, free_ports, sample, teacher_run

from mixle.data.teacher import messages
from mixle.data.teacher.broker import Broker
from mixle.data.teacher.errors import BrokerUnreachable
from mixle.data.teacher.keys import Keys
from mixle.data.teacher.student import StudentClient
from mixle.data.teacher.worker import Worker

NOBODY = 65_534


@pytest.fixture
def run():
    with teacher_run() as run:
        yield run


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_cannot_open_the_sockets(tmp_path):
    os.chmod(tmp_path, 0o755)
    directory = tmp_path / "run"
    directory.mkdir(mode=0o700)
    script = textwrap.dedent(
        """
        import os, socket, sys
        os.setgroups([]); os.setgid(65534); os.setuid(65534)
        for path in sys.argv[1:]:
            try:
                socket.socket(socket.AF_UNIX).connect(path)
            except PermissionError:
                print("refused")
        """
    )
    with Broker(directory=directory) as broker:
        paths = [endpoint.removeprefix("ipc://") for endpoint in broker.endpoints]
        for path in paths:
            with socket.socket(socket.AF_UNIX) as own:
                own.connect(path)
        for mode in (0o700, 0o755):  # the sockets are shut even where the directory is not
            os.chmod(directory, mode)
            answers = subprocess.run([sys.executable, "-c", script, *paths], capture_output=True, text=True, check=True)
            assert answers.stdout == "refused\n" * 4
        os.chmod(directory, 0o700)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_cannot_open_the_slots(run):
    run.start_broker()
    script = (
        f"import os; os.setgroups([]); os.setgid({NOBODY}); os.setuid({NOBODY})\n"
        "import sys; os.open(sys.argv[1], os.O_RDONLY)"
    )
    with StudentClient(0, 2, CONFIG, **run.client) as client:
        path = f"/dev/shm{client.hello()['buf_name']}"
        answer = subprocess.run([sys.executable, "-c", script, path], capture_output=True, text=True, check=False)
    assert answer.returncode == 1 and "PermissionError" in answer.stderr


def test_tcp_without_keys_is_refused_by_every_part(run):
    tcp = "tcp://127.0.0.1:5555"
    for make in (
        lambda: Broker(tcp),
        lambda: Worker(lambda model_id, cfg: b"", 64, tcp),
        lambda: StudentClient(0, 2, CONFIG, tcp),
        lambda: StudentClient(0, 2, CONFIG, run.frontend, tcp),
    ):
        with pytest.raises(ValueError, match=r"TCP, which needs keys|insecure=True"):
            make()


def test_a_wrong_key_gets_no_sample_and_the_right_one_does():
    keys = Keys.generate()
    ends = [f"tcp://127.0.0.1:{port}" for port in free_ports(4)]
    stranger = Keys(keys.server_public, *(lambda other: (other.client_public, other.client_secret))(Keys.generate()))
    with (
        Broker(*ends, keys=keys, heartbeat_s=0.05) as broker,
        Worker(lambda model_id, cfg: sample(3), 4096, ends[1], ends[3], keys=keys),
    ):
        with (
            StudentClient(0, 2, CONFIG, ends[0], ends[2], ends[3], keys=keys) as client,
            client.request_sample(60_000) as ref,
        ):
            assert ref.tensors()["y"].item() == 3
        for wrong in (stranger, Keys.generate()):
            with (
                StudentClient(0, 2, CONFIG, ends[0], ends[2], ends[3], keys=wrong, deadline_s=1.0) as client,
                pytest.raises(BrokerUnreachable),
            ):
                client.request_sample(60_000)
        assert broker.stats.keys_refused > 0 and broker.stats.students_registered == 0


def test_the_part_that_connects_needs_an_address(run):
    any_address = "tcp://*:5555"
    for make in (
        lambda: Worker(lambda model_id, cfg: b"", 64, any_address, insecure=True),
        lambda: StudentClient(0, 2, CONFIG, any_address, insecure=True),
        lambda: StudentClient(0, 2, CONFIG, run.frontend, any_address, insecure=True),
        lambda: StudentClient(0, 2, CONFIG, run.frontend, run.control, any_address, insecure=True),
    ):
        with pytest.raises(ValueError, match=r"\* is for the broker, which listens; give its address"):
            make()


@pytest.mark.parametrize(
    "segment",
    ["/../../etc/passwd", "/etc/passwd", "/mx0123abcd-1-12345/../x", "..", "/mx{run}-{pid}-..", "/mx{run}-{pid}-../x"],
)
def test_a_path_instead_of_a_segment_is_refused(run, segment):
    run.start_broker()
    with RawStudent(run.frontend, register=False) as student:
        name = segment.format(run=student.run.run_id, pid=f"{student.identity.pid:x}")
        body = messages.msgpack.unpackb(messages.frames(student.hello())[1], strict_map_key=False)
        own = student.segment
        packed = messages.msgpack.packb(_replaced(body, own, name))
        student.send_raw(messages.Hello.COMMAND, packed)
        assert student.expect(messages.Error).kind in ("protocol", "refused")


def test_a_segment_that_its_student_never_made_fails_the_order_and_nothing_is_written(run):
    run.start_broker(max_tries=1)
    run.start_worker(lambda model_id, cfg: sample(1))
    with RawStudent(run.frontend, packed_bytes=CONFIG.nbytes()) as student:
        student.order(0)
        failed = student.expect(messages.Failed)
        assert failed.message
    assert not os.path.exists(f"/dev/shm{student.segment}")


def test_a_segment_of_anothers_is_refused_and_stays_as_it_is(run):
    run.start_broker()
    with StudentClient(0, 2, CONFIG, **run.client) as victim:
        hello = victim.hello()
        with open(f"/dev/shm{hello['buf_name']}", "rb") as file:
            before = file.read()
        with RawStudent(run.frontend, register=False) as thief:
            thief.send(thief.hello(segment=hello["buf_name"], student_id=secrets.token_hex(16)))
            assert "another's" in thief.expect(messages.Error).message
        with open(f"/dev/shm{hello['buf_name']}", "rb") as file:
            assert file.read() == before


def _replaced(value, old, new):
    if isinstance(value, dict):
        return {key: _replaced(one, old, new) for key, one in value.items()}
    if isinstance(value, list):
        return [_replaced(one, old, new) for one in value]
    return new if value == old else value
