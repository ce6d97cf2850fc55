from __future__ import annotations

import errno
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from contextlib import ExitStack
from pathlib import Path

import pytest
from raw_teacher_peers import RawStudent, RawWorker
from teacher_processes import until
from typer.testing import CliRunner
from unmeasured import environment

from mixle.cli import build_app
from mixle.data.teacher import messages
from mixle.data.teacher.broker import Broker
from mixle.data.teacher.command import import_function
from mixle.data.teacher.errors import BrokerUnreachable
from mixle.data.teacher.keys import Keys
from mixle.data.teacher.metrics_server import metrics_server
from mixle.data.teacher.stats_client import StatsClient
from mixle.data.teacher.streaming_stores import SMALLEST_BYTES, restart_with_streaming_stores, streaming_stores
from mixle.data.teacher.worker import Worker

ROOT = Path(__file__).parents[3]
MIXLE = """
import runpy, signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # where the tests run in the background it is ignored
runpy.run_module("mixle", run_name="__main__")
"""
REFUSED = ["teacher", "worker", "--generator", "none", "--slot-size", str(SMALLEST_BYTES)]
WIDE = {"COLUMNS": "200", "TERM": "dumb", "NO_COLOR": "1"}


def mixle(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(build_app(), ["teacher", *map(str, arguments)], env=WIDE)
    return result.exit_code, result.output


@pytest.fixture
def directory(tmp_path):
    path = tmp_path / "t"
    path.mkdir(mode=0o700)
    return path


@pytest.fixture
def busy(directory):
    """A broker with a student and a worker that has made one sample and has another."""
    with (
        Broker(directory=directory, timeout_s=600.0) as broker,
        RawStudent(broker.endpoints.frontend) as student,
        RawWorker(broker.endpoints.backend, worker_id='the "fast" one', prefetch=1) as worker,
    ):
        student.order(0)
        worker.report(worker.work().pieces)
        student.expect(messages.Complete)
        student.order(0, 3)
        worker.work()
        yield broker


def test_the_table_shows_workers_students_and_counts(busy, directory):
    status, text = mixle("stats", "--once", "--directory", directory)
    assert status == 0
    assert re.search(r"queued / at workers +\S +1 / 2", text)
    assert re.search(r"the \"fast\" one +\S +\d+ +\S +busy +\S +\* +\S +2 +\S +1 +\S +0", text)
    assert re.search(r"students: 1", text)


def test_the_same_figures_are_printed_for_prometheus(busy, directory):
    status, text = mixle("stats", "--prometheus", "--directory", directory)
    assert status == 0
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    labels = f'{{run_id="{busy.stats.run_id}"}}'
    assert float(values[f"mixle_teacher_queued{labels}"]) == 1
    assert float(values[f"mixle_teacher_completed_total{labels}"]) == 1
    assert any('worker="the \\"fast\\" one"' in name for name in values)


def test_the_figures_are_served_over_http_on_request(busy):
    with StatsClient(busy.endpoints.frontend) as client, metrics_server(("127.0.0.1", 0), client.ask) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        url = f"http://127.0.0.1:{server.server_port}"
        try:
            with urllib.request.urlopen(f"{url}/metrics", timeout=20) as answer:
                assert b"mixle_teacher_completed_total" in answer.read()
            with pytest.raises(urllib.error.HTTPError) as missing:
                urllib.request.urlopen(f"{url}/other", timeout=20)
            missing.value.close()
            assert missing.value.code == 404
        finally:
            server.shutdown()
            thread.join()


def test_an_address_that_is_served_already_is_named(busy, directory):
    with metrics_server(("127.0.0.1", 0), lambda: busy.stats) as server:
        status, text = mixle("stats", "--serve", f"127.0.0.1:{server.server_port}", "--directory", directory)
    assert status == 2 and f"cannot serve at 127.0.0.1:{server.server_port}: Address already in use" in text


def test_a_second_broker_is_told_how_to_have_a_run_of_its_own(directory):
    with Broker(directory=directory):
        status, text = mixle("broker", "--directory", directory)
    assert status == 2 and f"process {os.getpid()}" in text and "--directory" in text


def test_statistics_without_the_keys_of_the_run_say_so(directory):
    keys = Keys.generate()
    with Broker(directory=directory, keys=keys) as broker:
        for wrong in (None, Keys.generate()):
            with (
                StatsClient(broker.endpoints.frontend, keys=wrong) as client,
                pytest.raises(BrokerUnreachable, match=r"the handshake failed.* keys of another run\?"),
            ):
                client.ask(1.0)


def test_without_a_broker_the_endpoint_is_named_by_the_deadline(directory):
    status, text = mixle("stats", "--once", "--directory", directory, "--deadline", "0.1")
    assert status == 2
    assert "frontend.sock within 0.1 s: nothing listens there" in text
    assert "keys" not in text and "Traceback" not in text
    with StatsClient(f"ipc://{directory}/frontend.sock") as client, pytest.raises(BrokerUnreachable):
        client.ask(0.05)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("stats", "--serve", "0.0.0.0:9000"), "must be 127.0.0.1:PORT"),
        (("stats", "--once", "--prometheus"), "give one of"),
        (("stats", "--once", "--frontend", "tcp://127.0.0.1:1"), "needs keys"),
        (("stats", "--once", "--frontend", "tcp://*:1", "--insecure"), "* is for the broker"),
        (("broker", "--frontend", "udp://x"), "must be ipc:///absolute/path or tcp://host:port"),
        (("broker", "--keys", "/nowhere"), "make some with `mixle teacher keys /nowhere`"),
        (("worker", "--generator", "nowhere", "--slot-size", "4"), "must be package.module:function"),
        (("worker", "--generator", "no.such.module:f", "--slot-size", "4"), "No module named 'no'"),
        (("worker", "--generator", "os:nothing", "--slot-size", "4"), "must name a function"),
    ],
)
def test_bad_options_are_refused_in_one_line(directory, arguments, message):
    status, text = mixle(*arguments, "--directory", directory)
    assert status == 2
    assert message in text and "Traceback" not in text


def test_keys_are_made_once_and_readable_by_their_owner_only(tmp_path):
    status, text = mixle("keys", tmp_path / "keys")
    assert status == 0 and "server.json is for the broker alone" in text
    assert Keys.load(tmp_path / "keys").server_secret is not None
    status, text = mixle("keys", tmp_path / "keys")
    assert status == 2 and "exists" in text


def test_clean_removes_what_stopped_brokers_and_dead_students_left(directory, tmp_path):
    with Broker(directory=directory):
        assert mixle("clean", "--directory", directory)[0] == 0
        assert len(list(directory.glob("run-*.json"))) == 1
    status, text = mixle("clean", "--directory", directory)
    assert status == 0 and "run-" in text
    assert not list(directory.glob("run-*.json"))


def test_a_function_is_found_in_the_working_directory(tmp_path, monkeypatch):
    (tmp_path / "my_teacher.py").write_text(
        "class Teacher:\n    @staticmethod\n    def make(model_id, cfg):\n        return b''\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert import_function("my_teacher:Teacher.make")("", None) == b""


def test_a_command_that_is_refused_leaves_the_signals_as_they_were(directory):
    kinds = (signal.SIGTERM, signal.SIGINT)
    before = [signal.getsignal(kind) for kind in kinds]
    for arguments in (["worker", "--generator", "no.such:thing", "--slot-size", 1], ["broker", "--heartbeat-s", -1]):
        status, _ = mixle(*arguments, "--directory", directory)
        assert status == 2
    assert [signal.getsignal(kind) for kind in kinds] == before


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("role", ["broker", "worker"])
def test_a_second_signal_at_any_moment_of_the_end_neither_changes_the_status_nor_leaves_a_socket(
    role, number, directory, tmp_path
):
    (tmp_path / "teachers.py").write_text("def generate(model_id, model_cfg):\n    return b''\n")
    options = {"broker": [], "worker": ["--generator", "teachers:generate", "--slot-size", "64"]}
    command = [sys.executable, "-c", MIXLE, "teacher", role, *options[role], "--directory", str(directory)]
    for gap in (0.0, 0.002, 0.01, 0.05, 0.2):
        with ExitStack() as stack:
            broker = stack.enter_context(Broker(directory=directory)) if role == "worker" else None
            process = stack.enter_context(
                subprocess.Popen(
                    command,
                    env=environment(PYTHONPATH=str(ROOT)),
                    cwd=tmp_path,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
            )
            stack.callback(process.kill)
            if broker is None:
                with StatsClient(f"ipc://{directory}/frontend.sock") as client:
                    client.ask(60.0)
            else:
                until(lambda broker=broker: broker.stats.workers_registered, "a worker")
            process.send_signal(number)
            time.sleep(gap)
            process.send_signal(number)
            out, _ = process.communicate(timeout=60)
            assert process.returncode == 0 and "Traceback" not in out and "ignored" not in out, (gap, out)
    assert not list(directory.glob("*.sock")) and not list(directory.glob("lanes/*"))


def test_a_run_is_stopped_with_its_workers(directory):
    with Broker(directory=directory) as broker:
        worker = Worker(lambda model_id, cfg: b"", 64, directory=directory)
        working = threading.Thread(target=worker.run)
        working.start()
        until(lambda: broker.stats.workers_registered, "a worker")
        status, text = mixle("stop", "--directory", directory)
        assert status == 0 and "the broker ends" in text
        working.join(30)
        until(lambda: not broker.running, "its end")
        assert not working.is_alive()


def test_who_stops_a_run_that_is_not_there_hears_it(directory):
    status, text = mixle("stop", "--directory", directory, "--deadline", 0.1)
    assert status == 2 and "control.sock within 0.1 s: nothing listens there" in text


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_broker_runs_from_the_command_line_until_it_is_stopped(number, directory):
    command = [sys.executable, "-c", MIXLE, "teacher", "broker", "--directory", str(directory)]
    process = subprocess.Popen(
        command, env=environment(PYTHONPATH=str(ROOT)), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        with StatsClient(f"ipc://{directory}/frontend.sock") as client:
            assert client.ask(60.0).pid == process.pid
        process.send_signal(number)
        out, _ = process.communicate(timeout=30)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 0 and "serves no more" in out and "Traceback" not in out


@pytest.mark.parametrize("given", [None, "glibc.malloc.check=0"])
@pytest.mark.skipif(streaming_stores() is None, reason="needs glibc on x86-64")
def test_a_worker_copies_large_samples_past_the_caches(given, directory, tmp_path):
    (tmp_path / "teachers.py").write_text("def generate(model_id, model_cfg):\n    return b''\n")
    variables = environment(PYTHONPATH=str(ROOT))
    variables.pop("GLIBC_TUNABLES", None)
    if given is not None:
        variables["GLIBC_TUNABLES"] = given
    arguments = ["--generator", "teachers:generate", "--slot-size", str(SMALLEST_BYTES), "--worker-id", "w"]
    command = [sys.executable, "-m", "mixle", "teacher", "worker", *arguments, "--directory", str(directory)]
    with Broker(directory=directory) as broker, subprocess.Popen(command, env=variables, cwd=tmp_path) as process:
        until(lambda: broker.stats.workers_registered, "a worker")
        found = Path(f"/proc/{process.pid}/environ").read_text().replace("\0", ":")  # where glibc has split it
        process.terminate()
    assert process.returncode == 0
    assert f"GLIBC_TUNABLES={streaming_stores(given or '')}:" in found


@pytest.mark.parametrize(
    "command",
    [
        ["-c", f"import sys, mixle.cli; print('once'); sys.argv[1:] = {REFUSED}; mixle.cli.main()"],
        ["launch.py", *REFUSED],
        ["-m", "mixle", *REFUSED[:-1], str(SMALLEST_BYTES - 1)],
    ],
    ids=["other arguments", "other program", "small samples"],
)
def test_a_program_that_calls_the_command_is_not_started_again_nor_one_of_small_samples(command, tmp_path):
    (tmp_path / "launch.py").write_text("import mixle.cli; print('once'); mixle.cli.main()")
    (tmp_path / "sitecustomize.py").write_text("import sys; '-m' in sys.orig_argv and print('once', flush=True)")
    variables = environment(PYTHONPATH=f"{tmp_path}:{ROOT}")
    variables.pop("GLIBC_TUNABLES", None)
    ended = subprocess.run(
        [sys.executable, *command], env=variables, cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert ended.stdout.count("once") == 1
    assert ended.returncode == 2 and "must be package.module:function" in ended.stderr


@pytest.mark.skipif(streaming_stores() is None, reason="needs glibc on x86-64")
def test_a_process_that_may_not_have_the_variable_is_started_again_once(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(
        "import os; os.environ.pop('GLIBC_TUNABLES', None); print('once', flush=True)"
    )
    variables = environment(PYTHONPATH=f"{tmp_path}:{ROOT}")
    command = [sys.executable, "-m", "mixle", *REFUSED]
    ended = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=60)
    assert ended.stdout.count("once") == 2
    assert ended.returncode == 2 and "must be package.module:function" in ended.stderr


@pytest.mark.skipif(streaming_stores() is None, reason="needs glibc on x86-64")
def test_where_the_system_does_not_start_it_again_it_goes_on_as_it_is(monkeypatch):
    asked: list[list[str]] = []

    def refuse(program, arguments, variables):
        asked.append(arguments)
        raise OSError(errno.E2BIG, "Argument list too long")

    command = [sys.executable, "-m", "mixle", "teacher", "worker"]
    monkeypatch.setattr(os, "execve", refuse)
    monkeypatch.setattr(sys, "argv", ["mixle", "teacher", "worker"])
    monkeypatch.setattr(sys, "orig_argv", command)
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    restart_with_streaming_stores()
    assert asked == [command]


def test_a_limit_that_is_set_stays():
    assert streaming_stores("a=1:glibc.cpu.x86_non_temporal_threshold=0x8000") is None


def test_figures_that_go_into_a_pipe_come_again_and_again(busy, directory):
    command = [sys.executable, "-c", MIXLE, "teacher", "stats", "--interval", "0.05", "--directory", directory]
    process = subprocess.Popen(command, env=environment(PYTHONPATH=str(ROOT)), stdout=subprocess.PIPE, text=True)
    try:
        tables = (line for line in process.stdout if "broker process" in line)
        assert next(tables) and next(tables)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=30)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 0


def test_a_server_of_figures_ends_with_ctrl_c_and_says_so(busy, directory):
    command = [sys.executable, "-c", MIXLE, "teacher", "stats", "--serve", "127.0.0.1:0", "--directory", directory]
    process = subprocess.Popen(
        command, env=environment(PYTHONPATH=str(ROOT)), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        assert process.stdout.readline().startswith("http://127.0.0.1:")
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=30)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 0 and "serves no more" in out and "Traceback" not in out
