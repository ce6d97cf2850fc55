import errno
import gc
import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

from mixle.data.teacher import segment as segment_module
from mixle.data.teacher.segment import Segment, parse_segment_name, unlink_segment

RUN = "0123abcd"
SHM = Path("/dev/shm")


@pytest.fixture(params=["shm", "file"])
def place(request, tmp_path):
    """Keyword arguments for a segment, and where its name appears."""
    if request.param == "shm":
        return {"run_id": RUN, "medium": "shm"}, SHM
    folder = tmp_path / "slots"
    folder.mkdir(mode=0o700)
    return {"run_id": RUN, "medium": "file", "directory": folder}, folder


def run_python(code, *arguments, **options):
    command = [sys.executable, "-W", "error", "-c", textwrap.dedent(code), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, **options)


# ---- names


def test_a_name_says_which_run_and_process_it_is_of_within_31_characters():
    with Segment.create(64, run_id=RUN) as made:
        assert made.name.startswith(f"/mx{RUN}-{os.getpid():x}-")
        assert len(made.name) <= 31
        assert parse_segment_name(made.name) == parse_segment_name(made.name[1:]) == (RUN, os.getpid())
    assert len(f"/mx{RUN}-{2**22:x}-123456") <= 31


@pytest.mark.parametrize(
    "name",
    [
        "",
        "/",
        "psm_1234",
        "/etc/passwd",
        "../mx0123abcd-1-123456",
        "/mx0123abcd-1-123456/..",
        "//mx0123abcd-1-123456",
        "/mx0123abcd-1-12345",
        "/mx0123abcd-0-123456",
        "/mx0123abcd-123456789-123456",
        "/mx0123ABCD-1-123456",
        "/mx0123abcd-1-123456\n",
        "/mx0123abcd-1-123456\0",
        "/mx0123abcd--1-123456",
        "/mx٠123abcd-1-123456",
        b"/mx0123abcd-1-123456",
        None,
        3,
    ],
)
def test_what_is_no_segment_is_refused_by_name(name):
    with pytest.raises(ValueError, match="is not the name of a segment"):
        parse_segment_name(name)
    with pytest.raises(ValueError, match="is not the name of a segment"):
        Segment.attach(name, run_id=RUN, size=64)
    with pytest.raises(ValueError, match="is not the name of a segment"):
        unlink_segment(name, medium="shm")


@pytest.mark.parametrize("run_id", ["", "0123abc", "0123ABCD", "../../ab", None, 12345678])
def test_a_run_id_that_is_none_is_refused(run_id):
    with pytest.raises(ValueError, match="must be 8 hexadecimal digits"):
        Segment.create(64, run_id=run_id)


# ---- making and attaching


def test_who_attaches_a_segment_shares_its_memory(place):
    where, folder = place
    with Segment.create(4096, **where) as made, Segment.attach(made.name, size=4096, **where) as attached:
        assert (made.owner, attached.owner) == (True, False)
        assert made.buffer == bytes(4096)
        attached.buffer[7] = 9
        assert made.buffer[7] == 9
        assert (folder / made.name[1:]).stat().st_mode & 0o777 == 0o600
    assert not (folder / made.name[1:]).exists()


def test_the_memory_is_reserved_when_it_is_made(place):
    where, folder = place
    with Segment.create(1 << 20, **where) as made:
        assert (folder / made.name[1:]).stat().st_blocks * 512 >= 1 << 20


def test_closing_by_one_who_attached_takes_nothing_from_the_others(place):
    where, folder = place
    with Segment.create(64, **where) as made:
        with Segment.attach(made.name, size=64, **where) as attached:
            attached.unlink()
        assert (folder / made.name[1:]).exists()


def test_more_than_there_is_room_for_is_refused_with_both_sizes_and_leaves_nothing(place):
    where, folder = place
    before = set(os.listdir(folder))
    room = os.statvfs(folder)
    size = room.f_blocks * room.f_frsize + (1 << 30)
    with pytest.raises(
        OSError, match=rf"{size} bytes of slots do not fit in {folder}, which has \d+ of \d+ bytes"
    ) as e:
        Segment.create(size, **where)
    assert e.value.errno in (errno.ENOSPC, errno.EFBIG)
    assert set(os.listdir(folder)) == before


@pytest.mark.parametrize("size", [0, -1, 1.5, True, "64"])
def test_a_size_that_is_none_is_refused(size):
    with pytest.raises((TypeError, ValueError), match="size"):
        Segment.create(size, run_id=RUN)


def test_a_segment_of_another_run_process_or_size_is_not_attached(place):
    where, _ = place
    with Segment.create(128, **where) as made:
        for change, message in (
            ({"run_id": "ffffffff"}, f"is a segment of run {RUN}, not of this run, ffffffff"),
            ({"size": 64}, "has 128 bytes, not the size=64"),
            ({"size": 256}, "has 128 bytes, not the size=256"),
            ({"pid": os.getpid() + 1}, f"is a segment of process {os.getpid()}, not of {os.getpid() + 1}"),
        ):
            with pytest.raises(ValueError, match=message):
                Segment.attach(made.name, **({"size": 128} | where | change))
        Segment.attach(made.name, size=128, pid=os.getpid(), **where).close()


def test_a_segment_that_is_gone_is_said_to_be(place):
    where, _ = place
    with pytest.raises(FileNotFoundError):
        Segment.attach(f"/mx{RUN}-1-123456", size=64, **where)
    assert not unlink_segment(f"/mx{RUN}-1-123456", medium=where["medium"], directory=where.get("directory"))


def plant(folder, make):
    name = f"mx{RUN}-{os.getpid():x}-{os.urandom(3).hex()}"
    make(folder / name)
    return name


def test_a_link_that_is_planted_under_a_good_name_is_not_followed(place, tmp_path):
    where, folder = place
    (tmp_path / "precious").write_bytes(bytes(64))
    name = plant(folder, lambda path: path.symlink_to(tmp_path / "precious"))
    try:
        with pytest.raises(PermissionError, match="symbolic link; it is not followed"):
            Segment.attach(name, size=64, **where)
    finally:
        (folder / name).unlink()
    assert (tmp_path / "precious").read_bytes() == bytes(64)


def test_a_file_that_others_may_open_is_not_attached(place):
    where, folder = place
    name = plant(folder, lambda path: path.write_bytes(bytes(64)))
    try:
        (folder / name).chmod(0o644)
        with pytest.raises(PermissionError, match="is not a plain file of this user alone"):
            Segment.attach(name, size=64, **where)
    finally:
        (folder / name).unlink()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make another user's file")
def test_a_file_of_another_user_is_not_attached(place):
    where, folder = place
    name = plant(folder, lambda path: path.write_bytes(bytes(64)))
    try:
        (folder / name).chmod(0o600)
        os.chown(folder / name, 12345, 12345)
        with pytest.raises(PermissionError, match="is not a plain file of this user alone"):
            Segment.attach(name, size=64, **where)
    finally:
        (folder / name).unlink()


def test_a_directory_that_is_not_private_or_real_is_refused(tmp_path):
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    with pytest.raises(PermissionError, match="must be this user's, with mode 0700"):
        Segment.create(64, run_id=RUN, medium="file", directory=shared)
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(PermissionError, match="is a link or no directory"):
        Segment.create(64, run_id=RUN, medium="file", directory=tmp_path / "link")
    with pytest.raises(ValueError, match="medium='file' needs directory="):
        Segment.create(64, run_id=RUN, medium="file")
    with pytest.raises(ValueError, match="is of no use to medium='shm'"):
        Segment.create(64, run_id=RUN, directory=tmp_path)
    with pytest.raises(ValueError, match="medium='sh' must be one of 'shm', 'file'"):
        Segment.create(64, run_id=RUN, medium="sh")


# ---- letting go


def test_memory_outlives_closing_while_arrays_over_it_do(place):
    where, folder = place
    made = Segment.create(4096, **where)
    array = np.frombuffer(made.buffer, "u1")
    made.close()
    made.close()
    made.unlink()
    made.unlink()
    assert not (folder / made.name[1:]).exists()
    with pytest.raises(ValueError, match="is closed"):
        _ = made.buffer
    array.fill(3)
    assert array.sum() == 3 * 4096


def test_memory_is_unmapped_with_the_last_array_over_it():
    made = Segment.create(1 << 20, run_id=RUN)
    name = made.name
    array = np.frombuffer(made.buffer, "u1")
    made.close()
    made.unlink()
    assert name in Path("/proc/self/maps").read_text()
    del array
    assert name not in Path("/proc/self/maps").read_text()


def test_descriptors_do_not_pile_up(place):
    where, _ = place
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        with Segment.create(64, **where) as made, Segment.attach(made.name, size=64, **where):
            pass
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_segment_that_is_dropped_leaves_nothing(place):
    where, folder = place
    made = Segment.create(64, **where)
    path = folder / made.name[1:]
    assert path.exists()
    del made
    gc.collect()
    assert not path.exists()


def test_a_process_that_ends_without_closing_leaves_nothing():
    done = run_python(
        f"""
        from mixle.data.teacher.segment import Segment
        made = Segment.create(64, run_id="{RUN}")
        view = made.buffer
        print(made.name)
        """
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert not (SHM / done.stdout.strip()[1:]).exists()


@pytest.mark.parametrize("end", ["pass", "os.kill(os.getpid(), 9)", "raise SystemExit(3)"])
def test_a_process_that_attached_takes_nothing_away_however_it_ends(end):
    with Segment.create(64, run_id=RUN) as made:
        done = run_python(
            f"""
            import os, sys
            from mixle.data.teacher.segment import Segment
            attached = Segment.attach(sys.argv[1], run_id="{RUN}", size=64)
            attached.buffer[0] = 1
            {end}
            """,
            made.name,
        )
        assert done.stderr == ""
        assert made.buffer[0] == 1
        assert (SHM / made.name[1:]).exists()
        Segment.attach(made.name, run_id=RUN, size=64).close()


def test_a_forked_child_takes_nothing_away():
    with Segment.create(64, run_id=RUN) as made:
        child = os.fork()
        if child == 0:
            try:
                made.close()
                made.unlink()
                segment_module.Segment.create(64, run_id=RUN).unlink()
            finally:
                os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert (SHM / made.name[1:]).exists()


def test_a_segment_made_in_a_child_of_multiprocessing_leaves_nothing():
    done = run_python(
        f"""
        import multiprocessing
        from mixle.data.teacher.segment import Segment
        kept = []
        def child():
            kept.append(Segment.create(64, run_id="{RUN}"))
            print(kept[0].name, flush=True)
        process = multiprocessing.get_context("fork").Process(target=child)
        process.start()
        process.join()
        """
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert not (SHM / done.stdout.strip()[1:]).exists()


def test_a_name_can_be_taken_away_for_a_process_that_was_killed(place):
    where, folder = place
    directory = where.get("directory")
    done = run_python(
        """
        import json, os, sys
        from mixle.data.teacher.segment import Segment
        made = Segment.create(64, **json.loads(sys.argv[1]))
        print(made.name, flush=True)
        os.kill(os.getpid(), 9)
        """,
        json.dumps(where, default=str),
    )
    assert done.returncode == -signal.SIGKILL
    name = done.stdout.strip()
    assert (folder / name[1:]).exists()
    assert unlink_segment(name, medium=where["medium"], directory=directory)
    assert not (folder / name[1:]).exists()


def in_a_dev_shm_of_one_mebibyte(code):
    shell = 'mount -t tmpfs -o size=1m none /dev/shm && exec "$@"'
    command = ["unshare", "--mount", "sh", "-c", shell, "sh", sys.executable, "-c", textwrap.dedent(code)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


@pytest.mark.skipif(
    subprocess.run(["sh", "-c", "unshare --mount true"], capture_output=True).returncode != 0,
    reason="may not make a mount namespace",
)
def test_a_dev_shm_that_others_have_filled_is_a_refusal_and_no_bus_error():
    done = in_a_dev_shm_of_one_mebibyte(
        """
        import os
        from mixle.data.teacher.mediums import SharedMemoryManager
        with SharedMemoryManager(10, 65536) as first:
            try:
                SharedMemoryManager(10, 65536)
            except OSError as refusal:
                print(refusal)
            for slot in range(10):
                first.segment.buffer[slot * 65536 : (slot + 1) * 65536] = bytes([1]) * 65536
            print(os.listdir("/dev/shm") == [first.buf_name])
        """
    )
    assert (done.returncode, done.stderr) == (0, "")
    message, alone = done.stdout.splitlines()
    assert "655360 bytes of slots do not fit in /dev/shm, which has 393216 of 1048576 bytes free" in message
    assert alone == "True"
