from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mixle.data.teacher.errors import BrokerRunning
from mixle.data.teacher.run import (
    Endpoints,
    ProcessIdentity,
    forget_stopped_runs,
    held_run,
    host_id,
    is_alive,
    process_identity,
    require_endpoint,
    require_host_id,
    slots_directory,
    teacher_directory,
)


@pytest.fixture
def directory(tmp_path):
    path = tmp_path / "t"
    path.mkdir(mode=0o700)
    return path


def endpoints(directory):
    return Endpoints.of(directory=directory, keyed=False, insecure=False)


def test_the_directory_is_made_for_this_user_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("MIXLE_TEACHER_DIR", str(tmp_path / "a" / "b"))
    assert teacher_directory() == tmp_path / "a" / "b"
    assert slots_directory() == tmp_path / "a" / "b" / "slots"
    assert {(path.stat().st_mode & 0o777) for path in (teacher_directory(), slots_directory())} == {0o700}


def test_without_a_word_it_is_in_the_users_home(tmp_path, monkeypatch):
    monkeypatch.delenv("MIXLE_TEACHER_DIR", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert teacher_directory().parent == tmp_path / ".cache" / "mixle"


def test_a_directory_that_others_may_enter_is_refused(directory):
    directory.chmod(0o750)
    with pytest.raises(PermissionError, match="chmod 700"):
        teacher_directory(directory)


def test_a_link_and_a_file_are_refused(tmp_path, directory):
    (tmp_path / "link").symlink_to(directory)
    (tmp_path / "file").write_text("")
    for name in ("link", "file"):
        with pytest.raises(NotADirectoryError):
            teacher_directory(tmp_path / name)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
def test_another_users_directory_is_refused(directory):
    os.chown(directory, 12345, 12345)
    with pytest.raises(PermissionError, match="belongs to user 12345"):
        teacher_directory(directory)


def test_an_empty_name_is_refused(monkeypatch):
    with pytest.raises(ValueError, match="must name a directory"):
        teacher_directory("")
    monkeypatch.setenv("MIXLE_TEACHER_DIR", "")
    with pytest.raises(ValueError, match="MIXLE_TEACHER_DIR is empty"):
        teacher_directory()


def test_default_endpoints_are_four_sockets_in_the_directory(directory):
    assert list(endpoints(directory)) == [
        f"ipc://{directory}/{name}.sock" for name in ("frontend", "backend", "control", "control_pub")
    ]


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        (3, TypeError, "must be a string or None"),
        ("ipc://relative", ValueError, "absolute path"),
        ("ipc:///" + "x" * 107, ValueError, "108 bytes; a socket's may have 107"),
        ("udp://127.0.0.1:1", ValueError, "must be ipc:///absolute/path or tcp://host:port"),
        ("tcp://127.0.0.1", ValueError, "tcp://host:port"),
        ("tcp://127.0.0.1:70000", ValueError, "tcp://host:port"),
        ("tcp://127.0.0.1:7000", ValueError, "needs keys: make some with `mixle teacher keys`"),
    ],
)
def test_an_endpoint_that_cannot_be_used_is_refused_by_name(value, error, message):
    with pytest.raises(error, match=re.escape(message)) as refused:
        require_endpoint(value, "backend", keyed=False, insecure=False)
    assert "backend_endpoint" in str(refused.value)


def test_tcp_is_accepted_with_keys_or_on_the_callers_word():
    for given in ({"keyed": True, "insecure": False}, {"keyed": False, "insecure": True}):
        assert require_endpoint("tcp://[::1]:7000", "backend", **given) == "tcp://[::1]:7000"
    assert require_endpoint("ipc:///" + "x" * 106, "backend", keyed=False, insecure=False)


@pytest.mark.parametrize("value", ["tcp://*:7000", "tcp://127.0.0.1:*"])
def test_only_the_broker_leaves_its_address_to_the_system(value, directory):
    for given in ({"keyed": True, "insecure": False}, {"keyed": False, "insecure": False}):
        with pytest.raises(ValueError, match=re.escape(f"frontend_endpoint={value!r}: * is for the broker")):
            require_endpoint(value, "frontend", **given)
    assert Endpoints.of(value, directory=directory, keyed=True, insecure=False).frontend == value


def test_endpoints_must_differ(directory):
    with pytest.raises(ValueError, match="the four endpoints must differ"):
        Endpoints.of("ipc:///a", "ipc:///a", directory=directory, keyed=False, insecure=False)


def test_this_process_is_alive_and_a_later_one_of_its_pid_is_another():
    me = process_identity()
    assert is_alive(me) is True
    assert is_alive(me._replace(start=me.start + 1)) is False
    assert is_alive(me._replace(host="0" * 16)) is None


def test_a_dead_process_is_dead_even_before_it_is_reaped():
    child = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert is_alive(ProcessIdentity(host_id(), child.pid, 0)) is False
    child.wait()


def test_a_host_id_is_sixteen_digits_and_stays(directory):
    assert re.fullmatch("[0-9a-f]{16}", host_id()) and host_id() == host_id() == require_host_id(None)
    with pytest.raises(ValueError, match="16 lower-case"):
        require_host_id("ABC")
    with pytest.raises(TypeError, match="not int"):
        require_host_id(3)


def test_a_run_keeps_its_id_from_one_broker_to_the_next(directory):
    with held_run(endpoints(directory), directory) as first:
        assert not first.returning
    with held_run(endpoints(directory), directory) as second:
        assert second.returning and (second.run_id, second.secret) == (first.run_id, first.secret)
    (remembered,) = directory.glob("run-*.json")
    assert remembered.stat().st_mode & 0o777 == 0o600
    other = Endpoints.of(f"ipc://{directory}/other", directory=directory, keyed=False, insecure=False)
    with held_run(other, directory) as third:
        assert third.run_id != first.run_id


def test_a_damaged_file_of_a_run_is_replaced(directory):
    with held_run(endpoints(directory), directory):
        pass
    [path] = directory.glob("run-*.json")
    path.write_text("{")
    with held_run(endpoints(directory), directory) as run:
        assert not run.returning


def test_one_process_holds_an_endpoint_and_is_named_to_the_next(directory):
    mixed = Endpoints.of(f"ipc://{directory}/other", directory=directory, keyed=False, insecure=False)
    with held_run(endpoints(directory), directory):
        with (
            pytest.raises(BrokerRunning, match=f"process {os.getpid()}.*--directory") as refused,
            held_run(mixed, directory),
        ):
            pass
        assert refused.value.pid == os.getpid()
    with held_run(mixed, directory):
        pass
    assert not list(directory.glob("*.lock"))


def test_a_killed_holder_is_followed_at_once(directory):
    program = (
        "import os, sys\n"
        "from mixle.data.teacher.run import Endpoints, held_run\n"
        "endpoints = Endpoints.of(directory=sys.argv[1], keyed=False, insecure=False)\n"
        "with held_run(endpoints, sys.argv[1]):\n"
        "    os.kill(os.getpid(), 9)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    subprocess.run([sys.executable, "-c", program, str(directory)], env=environment, timeout=60)
    assert list(directory.glob("*.lock"))
    with held_run(endpoints(directory), directory) as run:
        assert run.returning


def test_stopped_runs_are_forgotten_and_running_ones_are_not(directory):
    with held_run(endpoints(directory), directory):
        assert forget_stopped_runs(directory) == []
    assert [path.suffix for path in forget_stopped_runs(directory)] == [".json"]
