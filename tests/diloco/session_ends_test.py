"""How a session ends: before it began, interrupted, in a forked child, from a callback, with the store, with Python."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from diloco_members import Hooked
from diloco_sites import Heard, at_once, descend, fresh_url, open_session, wait_until, zeros
from unmeasured import environment

from mixle.diloco import DiLoCo, Session, TransientMailboxError, align, open_mailbox, state_folder
from mixle.diloco import session as session_module
from mixle.diloco.exchange import gather_on_threads
from mixle.diloco.mailbox import Mailbox
from mixle.diloco.memory_mailbox import MemoryMailbox
from mixle.diloco.retrying import RetryingMailbox

ROOT = Path(__file__).parents[2]
BARRIER = DiLoCo(5, 1, overlap_steps=0)


def run_program(program: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        env=environment(PYTHONPATH=str(ROOT)),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def states(store: Mailbox, name: str) -> list[str]:
    """What the lease of a node ends in: "released" or its number."""
    return [key.rpartition("-")[2] for key in store.list(f"leases/{name}/")]


# ---- it never began


@pytest.mark.parametrize("part", ["payloads/", "run.json", "leases/a/00000000-00000000000"])
def test_who_fails_to_join_releases_the_id_and_leaves_no_thread(part):
    store, before = MemoryMailbox(), threading.active_count()
    hooked = Hooked(store)

    def fail(operation: str, key: str) -> None:
        if (operation == "get" and key.startswith(part)) or ((operation, part) == ("put", "payloads/") and part in key):
            raise TransientMailboxError("injected")

    hooked.before = fail
    with pytest.raises(TransientMailboxError, match="injected"):
        open_session(zeros(), DiLoCo(5, 1, global_batch_size=8), hooked, learner_id="a")
    assert threading.active_count() == before
    assert states(store, "a") == ["released"]


def test_what_kept_it_from_joining_is_raised_though_the_lease_cannot_be_released_either():
    store, heard = MemoryMailbox(), Heard()
    hooked, failed = Hooked(store), []

    def fail(operation: str, key: str) -> None:
        if failed or key == "run.json":
            failed.append(key)
            raise TransientMailboxError("first" if len(failed) == 1 else "then")

    hooked.before = fail
    with pytest.raises(TransientMailboxError, match="first"):
        open_session(zeros(), BARRIER, hooked, lease_every=1e6, lease_timeout=3e6, callbacks=(heard,))
    assert "the lease is not released, and runs out: then" in heard.of("store")[0].detail["error"]


def test_one_model_is_in_one_session_at_a_time():
    url, model = fresh_url(), zeros()
    with (
        open_session(model, BARRIER, url, learner_id="a"),
        pytest.raises(RuntimeError, match=r"model is in training by a session .* close\(\) that one first"),
    ):
        open_session(model, BARRIER, url, learner_id="b")
    open_session(model, BARRIER, url, learner_id="b").close()
    assert open_mailbox(url).list("leases/") == ["leases/a/00000000-released", "leases/b/00000000-released"]


# ---- it ends where it should not


def test_a_forked_child_neither_trains_nor_ends_its_parents_session(tmp_path):
    program = """
import os, sys, numpy as np
from mixle.diloco import DiLoCo, Session
with Session({"w": np.zeros(3, np.float32)}, algorithm=DiLoCo(5, 1), mailbox=sys.argv[1], learner_id="a") as session:
    if os.fork() == 0:
        for call in (session.step, session.close):
            try:
                call()
            except RuntimeError as error:
                print(error, flush=True)
        session.abandon()
        sys.exit()
    os.wait()
    print(sorted(os.listdir(sys.argv[2]))[0], flush=True)
    session.step()
"""
    told = run_program(program, f"file://{tmp_path}", str(tmp_path / "leases" / "a"))
    assert told.count("from which this one") == 2
    assert "00000000-000000000000" in told.splitlines()


def test_a_callback_does_not_close_the_session_that_it_would_wait_for():
    said: list[str] = []
    sessions: list[Session] = []

    def close(event) -> None:
        if sessions and event.kind == "committed":
            try:
                sessions[0].close()
            except RuntimeError as error:
                said.append(str(error))

    session = open_session(zeros(), BARRIER, fresh_url(), callbacks=(close,))
    sessions.append(session)
    for _ in range(5):
        session.step()
    assert session.close()
    assert "close() in a callback would wait for itself" in said[0]


def test_who_interrupts_closing_hears_what_is_lost_and_the_lease_is_released(monkeypatch):
    store, heard = MemoryMailbox(), Heard()
    session = open_session(zeros(), DiLoCo(50, 1), store, learner_id="a", callbacks=(heard,))
    for _ in range(3):
        session.step()

    def interrupted(timeout_s: float, *, poll_s: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(session._learner, "flush", interrupted)
    with pytest.raises(KeyboardInterrupt):
        session.close()
    assert [event.detail for event in heard.of("unflushed")] == [{"steps": 3, "of": 3}]
    assert states(store, "a") == ["released"]
    assert session.close() is False


@pytest.mark.parametrize("delay", range(5))
def test_one_thread_closes_while_another_trains_and_every_step_is_in_a_commit(delay):
    session, taken = open_session(zeros(), DiLoCo(5, 2), fresh_url(), learner_id="a"), 0

    def train() -> None:
        nonlocal taken
        while True:
            try:
                session.step()
            except RuntimeError as error:
                assert "the session is closed" in str(error)
                return
            taken += 1

    def close() -> bool:
        wait_until(lambda: taken > 3 * delay)
        return session.close()

    _, flushed = at_once(train, close)
    assert flushed and session._account.merged == 2 * taken  # of two fragments


def test_a_thread_that_stays_in_a_step_is_waited_for_so_long_and_keeps_no_lease_at_exit(monkeypatch):
    monkeypatch.setattr(session_module, "HASTY_FLUSH_S", 0.05)
    store = MemoryMailbox()
    session = open_session(zeros(), DiLoCo(50, 1), store, learner_id="a")
    inside, go_on = threading.Event(), threading.Event()

    def hang(samples: int) -> None:
        inside.set()
        assert go_on.wait(60)

    monkeypatch.setattr(session._learner, "step", hang)
    training = threading.Thread(target=session.step)
    training.start()
    assert inside.wait(10)
    with pytest.raises(RuntimeError, match=r"another thread is in step\(\), and stayed there for flush_s=0\.05"):
        session.close(flush_s=0.05)
    assert states(store, "a") != ["released"]
    session.abandon()
    assert states(store, "a") == ["released"]
    go_on.set()
    training.join()


@pytest.fixture
def default_sigterm():
    """The handler that a session replaces by its own; coverage's stands there when the tests are measured."""
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGTERM, before)


def test_a_second_sigterm_does_not_keep_the_lease_that_the_first_releases(default_sigterm):
    hooked = Hooked(MemoryMailbox())
    session = open_session(zeros(), DiLoCo(50, 1), hooked, learner_id="a")
    seen: list[str] = []

    def hurry(operation: str, key: str) -> None:
        if key.endswith("-released"):
            signal.raise_signal(signal.SIGTERM)
            seen.append(key)

    hooked.before = hurry
    with pytest.raises(SystemExit) as ended, session:
        session.step()
        signal.raise_signal(signal.SIGTERM)
    assert ended.value.code == 128 + signal.SIGTERM
    assert len(seen) == 1 and states(hooked, "a") == ["released"]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


# ---- it ends with the store


def test_leaving_does_not_wait_for_a_store_that_is_gone(monkeypatch):
    monkeypatch.setattr(session_module, "LEAVING_S", 0.1)
    hooked, gone = Hooked(MemoryMailbox()), threading.Event()

    def fail(operation: str, key: str) -> None:
        if gone.is_set():
            raise TransientMailboxError("no answer")

    hooked.before = fail
    mailbox, heard = RetryingMailbox(hooked, deadline_s=1e6), Heard()
    session = open_session(zeros(), DiLoCo(2, 1), mailbox, callbacks=(heard,))
    gone.set()
    for _ in range(4):
        session.step()
    (flushed,) = at_once(lambda: session.close(flush_s=0.0))
    assert not flushed
    assert heard.of("unflushed")
    gone.clear()
    assert mailbox.list("rounds/") == []  # with the patience that its owner gave it


def test_a_state_that_a_full_disk_has_no_room_for_is_told_and_the_next_is_saved(tmp_path, monkeypatch):
    heard, model, full = Heard(), zeros(), threading.Event()
    write = state_folder.replace_file

    def replace_file(path: Path, data: bytes) -> None:
        if full.is_set():
            raise OSError(28, os.strerror(28))
        write(path, data)

    monkeypatch.setattr(state_folder, "replace_file", replace_file)
    with open_session(model, BARRIER, fresh_url(), state_dir=tmp_path, callbacks=(heard,)) as session:
        full.set()
        for _ in range(5):
            descend(model, 1.0)
            session.step()
        wait_until(lambda: heard.of("store"))
        full.clear()
        for _ in range(5):
            descend(model, 1.0)
            session.step()
    assert "state_dir has not got the state after 5 steps: " in heard.of("store")[0].detail["error"]
    assert [path.name for path in tmp_path.glob("*.npz")] == ["rank0-000000000000010.npz"]


def test_what_was_published_is_saved_though_the_store_fails_right_after(tmp_path):
    """Who is killed then goes on behind what is published, and trains no batch twice."""
    hooked, published = Hooked(MemoryMailbox()), threading.Event()

    def fail(operation: str, key: str) -> None:
        if operation == "put" and key.startswith("snapshots/"):
            published.set()
        elif published.is_set() and not key.startswith("leases/"):
            raise TransientMailboxError("no answer")

    hooked.before = fail
    session = open_session(zeros(), DiLoCo(5, 1), hooked, state_dir=tmp_path, state=dict)
    for _ in range(5):
        session.step()
    wait_until(lambda: list(tmp_path.glob("*.npz")))
    assert [path.name for path in tmp_path.glob("*.npz")] == ["rank0-000000000000005.npz"]
    session.close(flush_s=0.0)


# ---- it ends with Python


def test_reads_that_could_go_on_at_one_time_are_made_in_turn_where_no_thread_starts(monkeypatch):
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", start)
    assert gather_on_threads([lambda: 1, lambda: 2, lambda: 3]) == [1, 2, 3]


def test_a_session_that_nobody_closed_closes_a_round_of_several_as_python_exits(tmp_path):
    program = """
import sys, time, numpy as np
from mixle.diloco import DiLoCo, Session
def session(name, role):
    return Session({"w": np.zeros(3, np.float32)}, algorithm=DiLoCo(4, 1, quorum_size=3, follow=0), mailbox=sys.argv[1],
                   learner_id=name, role=role, poll_interval=0.02, callbacks=(heard.append,))
heard = []
learner, closer = session("n1", "learner"), session("n0", "both")  # the last one that was made is closed first
for _ in range(4):
    learner.step()
until = time.monotonic() + 60
while not any(event.kind == "published" for event in heard):
    assert time.monotonic() < until
    time.sleep(0.01)
for _ in range(3):
    closer.step()
"""
    assert run_program(program, f"file://{tmp_path}") == ""
    model = {"w": np.ones(3, np.float32)}
    assert align(model, mailbox=f"file://{tmp_path}") >= 0
    from mixle.diloco.records import RoundRecord

    store = open_mailbox(f"file://{tmp_path}")
    merged = [RoundRecord.from_bytes(store.get(key)).steps for key in store.list("rounds/")]
    assert sum(merged) == 7


def test_an_interrupted_move_brings_nothing_into_the_run_that_no_site_has_trained():
    """Ctrl-C between the two passes of a move leaves parameters near zero, of which a last snapshot would be made."""
    url, model = fresh_url(), {"w": np.full(3, 100.0, np.float32)}
    from mixle.diloco import NumpyParameters

    class Interrupted(NumpyParameters):
        is_next = False

        def align(self, committed, reference, how):
            if self.is_next:
                self.is_next = False
                for name in committed:
                    self._arrays[name] -= reference[name]
                raise KeyboardInterrupt
            super().align(committed, reference, how)

    parameters = Interrupted(model)
    with (
        pytest.raises(KeyboardInterrupt),
        Session(
            parameters, algorithm=DiLoCo(2, 1, outer_lr=1.0, outer_momentum=0.0), mailbox=url, poll_interval=0.01
        ) as session,
    ):
        for step in range(10_000):
            parameters.is_next = step > 10
            model["w"] += 0.001
            session.step()
    found = {"w": np.zeros(3, np.float32)}
    align(found, mailbox=url)
    assert 100.0 < found["w"][0] < 110.0
