import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from raw_teacher_peers import until
from teacher_run import CONFIG, sample, teacher_run

from mixle.data.teacher import cleanup
from mixle.data.teacher.cleanup import clean, tidy
from mixle.data.teacher.mediums import FileMedium, SharedMemoryManager
from mixle.data.teacher.student import StudentClient

RUN = f"{os.getpid():08x}"  # of this test process, so that tests that run beside it do not meet its segments
SHM = Path("/dev/shm")


@pytest.fixture(autouse=True)
def directory(tmp_path, monkeypatch):
    monkeypatch.setenv("MIXLE_TEACHER_DIR", str(tmp_path / "teacher"))
    yield
    assert not [name for name in os.listdir(SHM) if RUN in name]


MAKE_BOTH = f"""
import json, os, sys, time
from mixle.data.teacher.mediums import FileMedium, SharedMemoryManager
from mixle.data.teacher.run import slots_directory
media = [SharedMemoryManager(2, 64, run_id="{RUN}"), FileMedium(2, 64, run_id="{RUN}")]
paths = ["/dev/shm/" + media[0].buf_name, str(slots_directory() / media[1].buf_name)]
"""


def left_by_a_killed_process(before_death="", run_id=RUN):
    code = (
        MAKE_BOTH.replace(RUN, run_id)
        + textwrap.dedent(before_death)
        + "print(json.dumps(paths), flush=True)\nos.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (-signal.SIGKILL, "")
    return json.loads(done.stdout)


def test_what_a_killed_process_left_is_removed_and_named():
    paths = left_by_a_killed_process()
    assert all(os.path.exists(path) for path in paths)
    assert clean(RUN) == paths
    assert not any(os.path.exists(path) for path in paths)
    assert clean(RUN) == []


def test_what_a_living_process_holds_stays():
    with SharedMemoryManager(2, 64, run_id=RUN) as shm, FileMedium(2, 64, run_id=RUN) as file:
        assert clean(RUN) == []
        SharedMemoryManager.attach(shm.buf_name, 2, 64).close()
        FileMedium.attach(file.buf_name, 2, 64).close()
        assert clean(RUN) == []


def test_what_a_dead_process_left_is_removed_though_its_forked_child_lives():
    paths = left_by_a_killed_process(
        """
        child = os.fork()
        if child == 0:
            os.close(1), os.close(2)
            time.sleep(60)
            os._exit(0)
        paths.append(child)
        """
    )
    child = paths.pop()
    try:
        assert clean(RUN) == paths
    finally:
        os.kill(child, signal.SIGKILL)


def test_other_runs_and_other_files_stay():
    paths = left_by_a_killed_process()
    beside = Path(paths[1]).with_name("notes.txt")
    beside.write_text("mine")
    assert clean("ffffffff") == []
    assert clean(RUN) == paths
    assert beside.exists()


def test_a_number_that_another_process_has_by_now_does_not_keep_a_segment(monkeypatch):
    path = SHM / f"mx{RUN}-{os.getpid():x}-abcdef"
    path.write_bytes(bytes(64))
    assert clean(RUN) == []  # its maker, this process, may be about to lock it
    monkeypatch.setattr(cleanup.time, "time", lambda: path.stat().st_ctime + 11)
    assert clean(RUN) == [str(path)]


def test_a_link_under_a_segments_name_is_not_followed(tmp_path):
    link = SHM / f"mx{RUN}-1-abcdef"
    link.symlink_to(tmp_path / "precious")
    try:
        assert clean(RUN) == []
    finally:
        link.unlink()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make another user's file")
def test_what_another_user_left_stays():
    path = SHM / f"mx{RUN}-3fffff-abcdef"
    path.write_bytes(bytes(64))
    try:
        os.chown(path, 12345, 12345)
        assert clean(RUN) == []
    finally:
        path.unlink()


def test_a_run_that_is_none_is_refused():
    with pytest.raises(ValueError, match=r"run_id='\.\.' must be 8 hexadecimal digits"):
        clean("..")


def start_broker(run):
    run.start_broker()


def start_worker(run):
    run.start_worker(lambda model_id, model_cfg: sample(1))


def start_student(run):
    with StudentClient(0, 1, CONFIG, **run.client) as client:
        client.hello()


@pytest.mark.parametrize("start", [start_broker, start_worker, start_student])
def test_the_next_process_of_a_run_removes_what_all_of_its_processes_left(start):
    with teacher_run() as run:
        with run.start_broker() as broker:
            run_id = broker.stats.run_id
            paths = left_by_a_killed_process(run_id=run_id) if start is start_broker else []
        if start is not start_broker:
            run.start_broker()
            paths = left_by_a_killed_process(run_id=run_id)
        assert all(os.path.exists(path) for path in paths)
        start(run)
        until(lambda: not any(os.path.exists(path) for path in paths), "the removal")


def test_what_cannot_be_cleaned_is_logged_and_keeps_nobody_from_starting(tmp_path, caplog):
    open_to_all = tmp_path / "open"
    open_to_all.mkdir(mode=0o755)
    with caplog.at_level("WARNING"):
        tidy(RUN, directory=open_to_all)
    assert "others must not enter it" in caplog.text
