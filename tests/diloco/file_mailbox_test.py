"""A folder as a mailbox: private, atomic, durable, and not disturbed by what else lies in it."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from mixle.diloco.file_mailbox import FileMailbox
from mixle.diloco.mailbox import PermanentMailboxError, TransientMailboxError
from mixle.diloco.object_store import open_mailbox

ROOT = Path(__file__).parents[2]


@pytest.fixture
def root(tmp_path) -> Path:
    return tmp_path / "a" / "box"


def files(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())


def test_the_folder_and_what_is_in_it_are_private(root):
    FileMailbox(root).put_if_absent("r/a", b"1")
    assert [stat.S_IMODE(path.stat().st_mode) for path in (root, root / "r", root / "r/a")] == [0o700, 0o700, 0o600]


def test_a_folder_that_everyone_can_write_to_is_warned_of(root, caplog):
    root.mkdir(parents=True)
    root.chmod(0o777)
    FileMailbox(root)
    assert "make it private: chmod 700" in caplog.text


def test_an_object_is_a_plain_file_and_nothing_else_stays(root):
    FileMailbox(root).put_if_absent("r/a", b"12")
    assert files(root) == ["r/a"]
    assert (root / "r/a").read_bytes() == b"12"


def test_an_object_is_on_the_disk_before_it_has_its_name_and_its_name_before_the_call_returns(root, monkeypatch):
    mailbox, done = FileMailbox(root), []
    sync, link = os.fsync, os.link

    def noted_sync(descriptor: int) -> None:
        done.append(("sync", os.readlink(f"/proc/self/fd/{descriptor}")))
        sync(descriptor)

    def noted_link(source, target, **options) -> None:
        done.append(("link", str(target)))
        link(source, target, **options)

    monkeypatch.setattr(os, "fsync", noted_sync)
    monkeypatch.setattr(os, "link", noted_link)
    mailbox.put_if_absent("r/a", b"1")
    *folders, (data, partial), linked, name = done
    assert folders == [("sync", str(root))]
    assert data == "sync" and Path(partial).parent == root / ".partial"
    assert (linked, name) == (("link", str(root / "r/a")), ("sync", str(root / "r")))


def test_a_folder_that_becomes_empty_goes(root):
    mailbox = FileMailbox(root)
    mailbox.put_if_absent("r/1/a", b"")
    mailbox.put_if_absent("r/2/b", b"")
    mailbox.delete(["r/1/a"])
    assert not (root / "r/1").exists()
    mailbox.delete(["r/2/b"])
    assert root.exists() and not (root / "r").exists()


def test_strays_are_neither_listed_nor_read_and_are_reported_once(root, caplog):
    mailbox = open_mailbox(f"file://{root}")
    mailbox.put_if_absent("r/a", b"1")
    (root / "r/new\nline").write_text("")
    (root / "r/a#1").write_text("")
    (root / "r/.hidden").write_text("")
    (root / ".DS_Store").write_text("")
    (root / "r/link").symlink_to("/etc/passwd")
    (root / "r/folder-link").symlink_to("/etc")
    os.mkfifo(root / "r/pipe")
    assert mailbox.list("") == mailbox.list("r/") == ["r/a"]
    assert mailbox.get("r/link") is mailbox.get("r/pipe") is None
    assert set(mailbox.strays) == {"r/new\nline", "r/a#1"}
    assert caplog.text.count("is ignored") == 2


def test_a_name_that_is_no_text_is_left_out(root):
    mailbox = open_mailbox(f"file://{root}")
    mailbox.put_if_absent("r/a", b"1")
    (root / os.fsdecode(b"r/\xff")).write_text("")
    assert mailbox.list("") == ["r/a"]


def test_a_link_is_not_written_through(root, tmp_path):
    mailbox = FileMailbox(root)
    (root / "a").symlink_to(tmp_path / "elsewhere")
    assert not mailbox.put_if_absent("a", b"1")
    assert not (tmp_path / "elsewhere").exists()


def test_a_file_where_a_folder_belongs_is_an_error_that_says_so(root):
    mailbox = FileMailbox(root)
    mailbox.put_if_absent("a", b"1")
    with pytest.raises(PermanentMailboxError, match=r"writing .*a/b: a file is where a folder belongs"):
        mailbox.put_if_absent("a/b", b"1")
    assert mailbox.get("a/b") is None


def test_a_root_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(PermanentMailboxError, match=r"opening .*file"):
        open_mailbox(f"file://{tmp_path}/file")


@pytest.mark.parametrize(
    ("number", "kind"), [(5, TransientMailboxError), (28, TransientMailboxError), (30, PermanentMailboxError)]
)
def test_an_error_of_the_disk_says_whether_to_try_again(root, monkeypatch, number, kind):
    mailbox = FileMailbox(root)

    def fail(descriptor: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(kind, match=os.strerror(number)):
        mailbox.put_if_absent("a", b"1")
    assert files(root) == []


def test_a_file_system_without_hard_links_is_refused_by_name(root, monkeypatch):
    mailbox = FileMailbox(root)

    def refuse(*paths: object, **options: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    with pytest.raises(PermanentMailboxError, match="has no hard links"):
        mailbox.put_if_absent("a", b"1")


KILLED_WHILE_WRITING = """
import os, signal, sys
from pathlib import Path
from mixle.diloco.file_mailbox import FileMailbox
mailbox = FileMailbox(Path(sys.argv[1]))
os.fsync = lambda descriptor: os.kill(os.getpid(), signal.SIGKILL)
mailbox.put_if_absent("big", bytes(64 << 20))
"""


def test_a_writer_killed_half_way_leaves_no_object_and_its_rest_is_removed(root):
    FileMailbox(root)
    killed = subprocess.run(
        [sys.executable, "-c", KILLED_WHILE_WRITING, root], env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=60
    )
    assert killed.returncode == -signal.SIGKILL
    (partial,) = files(root)
    assert partial.startswith(".partial/")
    reopened = FileMailbox(root)
    assert files(root) == []
    assert reopened.list("") == [] and reopened.get("big") is None
    assert reopened.put_if_absent("big", b"whole")


def test_a_partial_file_that_is_being_written_is_not_removed(root):
    mailbox = FileMailbox(root)
    with mailbox._partial(b"1") as partial:
        FileMailbox(root)
        assert partial.exists()
    assert not partial.exists()


def test_a_partial_file_removed_before_it_was_locked_is_written_again(root, monkeypatch):
    mailbox, link = FileMailbox(root), os.link

    def swept_once(source, target, **options) -> None:
        monkeypatch.setattr(os, "link", link)
        Path(source).unlink()
        link(source, target, **options)

    monkeypatch.setattr(os, "link", swept_once)
    assert mailbox.put_if_absent("a", b"1")
    assert mailbox.get("a") == b"1"
