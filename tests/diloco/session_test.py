"""What a user holds: joining, training, leaving, and what becomes of it when something goes wrong."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from diloco_sites import Heard, at_once, descend, fresh_url, open_session, wait_until, zeros
from unmeasured import environment
from virtual_clock import VirtualClock

from mixle.diloco import (
    AlgorithmMismatch,
    Carry,
    DiLoCo,
    IdInUse,
    Overwrite,
    Rda,
    Session,
    WeightedMean,
    align,
    open_mailbox,
    state_folder,
    state_tree,
)
from mixle.diloco.node_info import NodeInfo
from mixle.diloco.records import RoundRecord
from mixle.diloco.state_folder import StateFolder

ROOT = Path(__file__).parents[2]
BARRIER = DiLoCo(5, 1, overlap_steps=0)
SHARED = np.zeros(3, np.float32)


def equal(a, b) -> bool:
    return all(np.array_equal(a[name], b[name]) for name in a)


def records(url: str) -> list[RoundRecord]:
    store = open_mailbox(url)
    return [RoundRecord.from_bytes(store.get(key)) for key in store.list("rounds/")]


# ---- training


def test_with_an_outer_step_of_one_a_single_site_trains_as_it_would_alone():
    url, model, alone = fresh_url(), zeros(), zeros()
    algorithm = DiLoCo(5, 2, outer_lr=1.0, outer_momentum=0.0, overlap_steps=0)
    with open_session(model, algorithm, url) as session:
        for _ in range(23):
            descend(model, 1.0)
            session.step(4)
    for _ in range(23):
        descend(alone, 1.0)
    for name in alone:
        np.testing.assert_allclose(model[name], alone[name], rtol=1e-6)


def test_the_outer_step_is_nesterovs():
    url, model = fresh_url(), zeros()
    with open_session(model, DiLoCo(5, 1, overlap_steps=0, outer_lr=0.7, outer_momentum=0.9), url) as session:
        theta, momentum = 0.0, 0.0
        for _ in range(3):
            for _ in range(5):
                descend(model, 1.0)
                session.step()
            delta = theta - (1.0 - (1.0 - theta) * 0.9**5)
            momentum = 0.9 * momentum + delta
            theta -= 0.7 * (delta + 0.9 * momentum)
            np.testing.assert_allclose(model["bias"], theta, rtol=1e-5)


def test_two_sites_that_want_apart_meet_between():
    url, met = fresh_url(), threading.Barrier(2, timeout=30)
    algorithm = DiLoCo(6, 2, overlap_steps=0, quorum_size=2, follow=0, global_batch_size=2)

    def site(target: float):
        model = zeros()
        with open_session(model, algorithm, url) as session:
            wait_until(lambda: session.batch_size == 1)  # each knows of the other
            met.wait()
            for _ in range(60):
                descend(model, target)
                session.step(2)
            met.wait()
            assert session.rounds_seen == 20

    at_once(lambda: site(0.0), lambda: site(1.0))
    model = zeros()
    assert align(model, mailbox=url) >= 20
    assert 0.4 < model["weight"].mean() < 0.6
    assert all(len(record.contributions) == 2 for record in records(url)[-20:])


def pull(arrays: dict[str, np.ndarray], site: int, step: int) -> None:
    """One step of a site's own towards a target that no other has, with noise."""
    rng = np.random.default_rng((site, step))
    for name in sorted(arrays):
        target = 1.0 + site + rng.standard_normal(arrays[name].shape)
        arrays[name] -= (0.05 * (arrays[name] - target)).astype(arrays[name].dtype)


def merged(deltas: list[np.ndarray], merge: Rda | WeightedMean) -> np.ndarray:
    if merge == WeightedMean():
        return np.mean(deltas, axis=0)
    norms = [np.linalg.norm(delta) for delta in deltas]
    direction = np.sum([delta / length for delta, length in zip(deltas, norms, strict=True)], axis=0)
    return np.mean(norms) * direction / np.linalg.norm(direction)


@pytest.mark.parametrize("merge", [WeightedMean(), Rda()], ids=["mean", "rda"])
def test_sites_in_step_end_where_a_loop_that_trains_them_in_turn_and_merges_them_ends(merge):
    """The loop is DiLoCo as its paper writes it, in float64; what is left at the end is added whole."""
    url, turns, met = fresh_url(), 8, threading.Barrier(4, timeout=30)
    algorithm = DiLoCo(6, 2, overlap_steps=0, quorum_size=4, follow=0, global_batch_size=4, merge=merge)

    def site(index: int) -> None:
        model = zeros()
        with open_session(model, algorithm, url, learner_id=f"site-{index}") as session:
            wait_until(lambda: session.batch_size == 1)  # each knows of the others
            met.wait()
            for step in range(6 * turns):
                pull(model, index, step)
                session.step(2)

    at_once(*[lambda index=index: site(index) for index in range(4)])
    found = zeros()
    assert align(found, mailbox=url) == 2 * turns + 1

    models = [{name: array.astype(np.float64) for name, array in zeros().items()} for _ in range(4)]
    anchor = {name: array.copy() for name, array in models[0].items()}
    momentum = {name: np.zeros_like(array) for name, array in anchor.items()}
    for step in range(6 * turns):
        for index, model in enumerate(models):
            pull(model, index, step)
        if (step + 1) % 3 == 0:
            name = "weight" if (step + 1) % 6 == 3 else "bias"  # a fragment each, the larger one first
            delta = merged([anchor[name] - model[name] for model in models], merge)
            momentum[name] = 0.9 * momentum[name] + delta
            anchor[name] = anchor[name] - 0.7 * (delta + 0.9 * momentum[name])
            for model in models:
                model[name] = anchor[name].copy()
    anchor["weight"] -= merged([anchor["weight"] - model["weight"] for model in models], merge)
    for name, array in anchor.items():
        np.testing.assert_allclose(found[name], array, rtol=1e-4)


def test_a_site_that_joins_later_starts_at_the_newest_commit():
    url, first, second = fresh_url(), zeros(), {name: array + 7 for name, array in zeros().items()}
    with open_session(first, BARRIER, url) as session:
        for _ in range(10):
            descend(first, 1.0)
            session.step()
        with open_session(second, BARRIER, url) as other:
            assert equal(first, second)
            assert other.rounds_seen == 2


def test_run_counts_the_length_of_each_batch():
    url, seen = fresh_url(), []
    with open_session(zeros(), BARRIER, url) as session:
        session.run(seen.append, [[1, 2], [3], [4, 5, 6], [7], [8]])
    assert seen == [[1, 2], [3], [4, 5, 6], [7], [8]]
    assert records(url)[-1].tokens == 8


def test_steps_that_lead_nowhere_near_a_round_are_flushed_on_closing():
    url, model, heard = fresh_url(), zeros(), Heard()
    session = open_session(model, DiLoCo(50, 2), url, callbacks=(heard,))
    for _ in range(20):
        descend(model, 1.0)
        session.step(2)
    assert session.close()
    committed = zeros()
    align(committed, mailbox=url)
    assert equal(model, committed)
    assert model["bias"].mean() == pytest.approx(1 - 0.9**20, rel=1e-5)
    assert not heard.of("unflushed")


def test_without_a_flush_closing_says_loudly_how_many_steps_are_lost():
    heard = Heard()
    session = open_session(zeros(), DiLoCo(50, 1, flush_on_close=False), fresh_url(), callbacks=(heard,))
    for _ in range(20):
        session.step()
    assert not session.close()
    assert [event.detail for event in heard.of("unflushed")] == [{"steps": 20, "of": 20}]


@pytest.mark.parametrize("alignment", [Carry(), Overwrite()])
def test_a_leaving_site_says_how_much_of_its_work_is_in_commits(alignment):
    url, model = fresh_url(), zeros()
    with open_session(model, DiLoCo(10, 2, alignment=alignment), url, learner_id="a") as session:
        for _ in range(40):
            descend(model, 1.0)
            session.step(3)
    store = open_mailbox(url)
    said = NodeInfo.parse(store.get(store.list("leases/")[0]).partition(b"\n")[2])
    assert (said.steps, said.samples) == (40, 120)
    if isinstance(alignment, Carry):
        assert said.merged == 80


# ---- arguments


@pytest.mark.parametrize("samples", [2.0, 0, -1, True, "3", None, np.float32(2)])
def test_samples_that_are_no_positive_integer_are_refused_and_not_counted(samples):
    url = fresh_url()
    with open_session(zeros(), BARRIER, url) as session:
        with pytest.raises((TypeError, ValueError), match="samples"):
            session.step(samples)
        for _ in range(5):
            session.step(np.int64(3))
    assert [record.tokens for record in records(url)] == [15]


def test_another_algorithm_is_refused_by_the_name_of_the_argument():
    url = fresh_url()
    with (
        open_session(zeros(), BARRIER, url),
        pytest.raises(AlgorithmMismatch, match=r"outer_lr=0\.1 here, 0.7 there"),
    ):
        open_session(zeros(), DiLoCo(5, 1, overlap_steps=0, outer_lr=0.1), url)


@pytest.mark.parametrize(
    ("options", "error", "told"),
    [
        ({"algorithm": "diloco"}, TypeError, "algorithm='diloco' must be a DiLoCo"),
        ({"poll_interval": 0}, ValueError, "poll_interval=0.0 must be above"),
        ({"role": "closer"}, ValueError, "role='closer' must be one of"),
        ({"learner_id": "a/b"}, ValueError, "learner_id='a/b' must be"),
        ({"compression": "gzip"}, ValueError, "compression='gzip'"),
        ({"callbacks": print}, TypeError, "callbacks=.* must be a sequence of callables"),
        ({"backend": "jax"}, ValueError, "backend='jax' must be one of 'torch', 'numpy'"),
        ({"model": None}, TypeError, "model=None has nothing to train"),
        ({"model": 3}, TypeError, "model is a int"),
        ({"model": {}}, ValueError, "no trainable parameter"),
        ({"model": {"a": np.zeros(2)}}, TypeError, "a is float64"),
        ({"model": {"a": [1.0, 2.0]}}, TypeError, r"model\['a'\] is a list; give a numpy array"),
        ({"model": {1: np.zeros(2, np.float32)}}, TypeError, "model has the key 1, a int"),
        ({"mailbox": 3}, TypeError, "mailbox=3 must be a URL such as .*; a int has no put_if_absent"),
        ({"state": dict}, ValueError, "state= needs a state_dir"),
        ({"lease_timeout": 0.1, "lease_every": 0.1}, ValueError, "must be at least twice"),
        ({"callbacks": ""}, TypeError, "callbacks='' must be a sequence of callables"),
        ({"ranks": 3}, TypeError, "ranks=3 must be None or this rank's place.*; a int has no rank, world, broadcast"),
        ({"clock": 3}, TypeError, "clock=3 must be .*; a int has no monotonic"),
        ({"state_dir": 3}, TypeError, "state_dir=3 must be the path of a folder, not int"),
        ({"state_dir": ""}, ValueError, "state_dir='' must be the path of a folder"),
        ({"state_dir": "a\0b"}, ValueError, "state_dir='a.*b' must be the path of a folder"),
        ({"state_dir": __file__}, ValueError, "state_dir=.*_test.py' must be a folder that this process can write to"),
        ({"state_dir": f"{__file__}/state"}, ValueError, "state_dir=.* must be a folder .*: Not a directory"),
        ({"mailbox": "file:///run%00"}, ValueError, "mailbox='file:///run%00' must be file:// and an absolute folder"),
        ({"model": {"a": SHARED, "b": SHARED[:2]}}, ValueError, "'a' and 'b' are the same memory"),
    ],
)
def test_what_cannot_be_meant_is_refused_before_anything_is_written(options, error, told):
    url = fresh_url()
    arguments = {"model": zeros(), "algorithm": BARRIER, "mailbox": url, **options}
    with pytest.raises(error, match=told):
        Session(arguments.pop("model"), **arguments)
    assert open_mailbox(url).list("") == []


def test_run_refuses_what_it_cannot_call_before_it_takes_a_batch():
    batches = iter([[1]])
    with open_session(zeros(), BARRIER, fresh_url()) as session:
        with pytest.raises(TypeError, match=r"train_step=.* must be a callable that takes a batch"):
            session.run(batches, print)
        with pytest.raises(TypeError, match="samples=1 must be a callable"):
            session.run(print, batches, samples=1)
    assert list(batches) == [[1]]


def test_samples_that_no_record_could_hold_are_refused_before_the_step_is_taken():
    steps = []
    with open_session(zeros(), BARRIER, fresh_url()) as session:
        with pytest.raises(ValueError, match="samples=1000000000000000000000 must be at most 1099511627776"):
            session.run(steps.append, [[0]], samples=lambda batch: 10**21)
        with pytest.raises(ValueError, match="samples="):
            session.step(10**21)
    assert steps == []


def test_intervals_beyond_what_threads_can_wait_are_waited_for_like_any_long_ones():
    with open_session(zeros(), BARRIER, fresh_url(), poll_interval=1e300, lease_every=1e300, lease_timeout=3e300) as s:
        for _ in range(10):
            s.step()  # every fifth waits for its commit
        assert s.rounds_seen == 2
        assert s._member.keeper._thread.is_alive()


def test_a_callable_backend_returns_the_parameters():
    from mixle.diloco import NumpyParameters

    model = zeros()
    with open_session([model], BARRIER, fresh_url(), backend=lambda models: NumpyParameters(models[0])) as session:
        for _ in range(5):
            descend(model, 1.0)
            session.step()
        assert session.rounds_seen == 1


# ---- ids, roles, batch sizes


def test_a_second_process_under_one_id_is_refused(tmp_path):
    url = f"file://{tmp_path}"
    other = start("hold", url)
    try:
        assert other.stdout.readline() == b"ready\n", other.stderr.read().decode()
        with pytest.raises(IdInUse, match="learner_id='a' is in use: another process renews its lease"):
            Session({"w": np.zeros(3, np.float32)}, algorithm=DiLoCo(5, 1), mailbox=url, learner_id="a")
    finally:
        other.kill()
        other.communicate()


def test_a_session_of_this_process_that_still_has_the_id_is_told_from_another_process():
    url = fresh_url()
    with (
        open_session(zeros(), BARRIER, url, learner_id="a"),
        pytest.raises(IdInUse, match="learner_id='a' is in use: a session of this process that is not closed holds it"),
    ):
        open_session(zeros(), BARRIER, url, learner_id="a")
    open_session(zeros(), BARRIER, url, learner_id="a").close()


def test_the_path_of_a_folder_is_a_mailbox(tmp_path):
    open_session(zeros(), BARRIER, tmp_path / "my run").close()
    assert align(zeros(), mailbox=tmp_path / "my run") == -1
    assert "run.json" in open_mailbox(f"file://{tmp_path}/my%20run").list("")


def test_a_syncer_closes_rounds_without_a_model():
    url, model = fresh_url(), zeros()
    with open_session(model, BARRIER, url, role="learner", learner_id="a") as learner:
        syncer = open_session(None, BARRIER, url, role="syncer", learner_id="s")
        for _ in range(10):
            descend(model, 1.0)
            learner.step()
        with pytest.raises(RuntimeError, match="closes rounds and does not train"):
            syncer.step()
        learner.close()
        syncer.close()
    assert {record.closer for record in records(url)} == {"s"}


def test_a_syncer_without_a_run_is_told_that_a_learner_comes_first():
    with pytest.raises(ValueError, match="there is no run in the mailbox"):
        open_session(None, BARRIER, fresh_url(), role="syncer")


def test_the_global_batch_is_shared_by_the_living_learners():
    url, algorithm = fresh_url(), DiLoCo(5, 1, global_batch_size=10)
    with open_session(zeros(), algorithm, url, learner_id="a") as first:
        assert first.batch_size == 10
        with (
            open_session(zeros(), algorithm, url, learner_id="b") as second,
            open_session(None, algorithm, url, role="syncer"),
        ):
            wait_until(lambda: (first.batch_size, second.batch_size) == (5, 5))
        wait_until(lambda: first.batch_size == 10)


def test_without_a_global_batch_each_site_has_its_own():
    with open_session(zeros(), BARRIER, fresh_url()) as session:
        assert session.batch_size is None


# ---- what goes wrong


def test_a_callback_that_raises_is_logged_and_training_goes_on(caplog):
    def broken(event):
        raise RuntimeError("no")

    heard, model = Heard(), zeros()
    with (
        caplog.at_level(logging.ERROR),
        open_session(model, BARRIER, fresh_url(), callbacks=(broken, heard)) as session,
    ):
        for _ in range(5):
            session.step()
        assert session.rounds_seen == 1
    assert heard.of("committed")
    assert "a callback failed at the event" in caplog.text


def test_why_the_node_stopped_is_raised_by_the_next_step_and_closing_still_leaves():
    url, heard = fresh_url(), Heard()
    session = open_session(zeros(), DiLoCo(1, 1), url, callbacks=(heard,), learner_id="a")
    thief = open_mailbox(url)
    thief.put_if_absent("leases/a/00000009-000000000000", b"x")
    with pytest.raises(IdInUse, match="taken over by another process"):
        for _ in range(100_000):
            session.step()
    assert heard.of("stopped")
    assert not session.close()


def test_a_closed_session_takes_no_steps():
    session = open_session(zeros(), BARRIER, fresh_url())
    assert session.close()
    with pytest.raises(RuntimeError, match="the session is closed"):
        session.step()
    assert session.close()


def test_a_closed_session_is_not_entered():
    session = open_session(zeros(), BARRIER, fresh_url())
    session.close()
    with pytest.raises(RuntimeError, match="the session is closed"), session:
        pass


def test_everything_works_inside_a_running_event_loop():
    url, model = fresh_url(), zeros()

    async def notebook():
        with open_session(model, BARRIER, url) as session:
            for _ in range(12):
                descend(model, 1.0)
                session.step()
                await asyncio.sleep(0)
        return align(zeros(), mailbox=url)

    assert asyncio.run(notebook()) == 2


SITE = """
import signal, sys, numpy as np
from mixle.diloco import DiLoCo, Session
signal.signal(signal.SIGINT, signal.default_int_handler)  # where the tests run in the background it is ignored
model = {"w": np.zeros(3, np.float32)}
how, url = sys.argv[1:]
def main():
    if how == "serve":
        Session(model, algorithm=DiLoCo(5, 1), mailbox=url, poll_interval=0.05).close()
        syncer = Session(None, algorithm=DiLoCo(5, 1), mailbox=url, poll_interval=0.05, learner_id="a", role="syncer")
        print("ready", flush=True)
        syncer.serve()
    session = Session(model, algorithm=DiLoCo(5, 1), mailbox=url, poll_interval=0.05, learner_id="a")
    print("ready", flush=True)
    while how == "train":
        session.step()
    if how == "hold":
        sys.stdin.read()
main()
"""


def start(*arguments: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", SITE, *arguments],
        env=environment(PYTHONPATH=str(ROOT)),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


@pytest.mark.parametrize(
    ("how", "number", "code"),
    [
        ("train", signal.SIGTERM, 128 + signal.SIGTERM),
        ("train", signal.SIGINT, -signal.SIGINT),
        ("serve", signal.SIGTERM, 128 + signal.SIGTERM),
        ("return", None, 0),
    ],
)
def test_a_process_that_ends_in_any_way_but_by_force_releases_its_lease(how, number, code, tmp_path):
    url = f"file://{tmp_path}"
    process = start(how, url)
    try:
        assert process.stdout.readline() == b"ready\n", process.stderr.read().decode()
        if number is not None:
            process.send_signal(number)
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == code, errors.decode()
    assert [key.endswith("-released") for key in open_mailbox(url).list("leases/a/")] == [True]


# ---- what a node remembers


KILLED = """
import os, signal, sys, time, numpy as np
from pathlib import Path
from mixle.diloco import DiLoCo, Session
url, folder = sys.argv[1:]
model, position = {"w": np.zeros(3, np.float32)}, 0
session = Session(model, algorithm=DiLoCo(10, 1, overlap_steps=0), mailbox=url, poll_interval=0.05, lease_every=0.2,
                  lease_timeout=1.0, state_dir=folder, state=lambda: {"position": position, "moment": model["w"] * 2})
for position in range(1, 38):
    model["w"] += 1
    session.step(3)
until = time.monotonic() + 30
while not list(Path(folder).glob("rank0-*30.npz")):
    assert time.monotonic() < until
    time.sleep(0.01)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_node_goes_on_under_its_id_from_where_it_last_published(tmp_path):
    url, folder = f"file://{tmp_path}/mailbox", tmp_path / "state"
    done = subprocess.run(
        [sys.executable, "-c", KILLED, url, str(folder)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        timeout=120,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()
    model = {"w": np.zeros(3, np.float32)}
    session = open_session(
        model, DiLoCo(10, 1, overlap_steps=0), url, state_dir=folder, state=dict, lease_every=0.2, lease_timeout=1.0
    )
    with session:
        assert session.resumed.steps == session.resumed.state["position"] == 30
        assert session.resumed.samples == 90
        assert session.resumed.state["moment"].shape == (3,)
        assert session.rounds_seen == 3
        assert session.learner_id == records(url)[0].closer
        for _ in range(10):
            session.step(3)
        wait_until(lambda: session._account.merged == 40)  # all steps that it counts, whichever process trained them
    assert [kept.name for kept in sorted(folder.glob("*.npz"))][-1] == "rank0-000000000000040.npz"


def test_the_folder_is_its_owners_alone_and_holds_few_files(tmp_path):
    with open_session(zeros(), DiLoCo(1, 1, overlap_steps=0), fresh_url(), state_dir=tmp_path / "state") as session:
        for _ in range(9):
            session.step()
    assert (tmp_path / "state").stat().st_mode & 0o77 == 0
    assert len(list((tmp_path / "state").glob("*.npz"))) <= 3


def test_the_state_of_another_run_is_refused(tmp_path):
    with open_session(zeros(), BARRIER, fresh_url(), state_dir=tmp_path) as session:
        for _ in range(5):
            session.step()
    url = fresh_url()
    with pytest.raises(ValueError, match="the mailbox holds no run; give each run a folder of its own"):
        open_session(zeros(), BARRIER, url, state_dir=tmp_path)
    assert open_mailbox(url).list("") == []
    open_session(zeros(), BARRIER, url).close()  # from the same parameters, by the same algorithm
    before = open_mailbox(url).list("")
    with pytest.raises(ValueError, match=r"state of another run: it is of run [0-9a-f]{15}, and the mailbox holds run"):
        open_session(zeros(), BARRIER, url, state_dir=tmp_path)
    assert open_mailbox(url).list("") == before


def test_the_state_of_another_site_is_refused(tmp_path):
    url = fresh_url()
    with open_session(zeros(), BARRIER, url, state_dir=tmp_path, learner_id="a") as session:
        for _ in range(5):
            session.step()
    with pytest.raises(ValueError, match="holds the state of learner_id='a', not of 'b'; give each site"):
        open_session(zeros(), BARRIER, url, state_dir=tmp_path, learner_id="b")
    with open_session(zeros(), BARRIER, url, state_dir=tmp_path, learner_id="a") as session:
        assert session.resumed.steps == 5


@pytest.mark.parametrize(
    "changes",
    [
        {"steps": 3},
        {"steps": 5.0},
        {"samples": "x"},
        {"samples": -1},
        {"merged": None},
        {"merged": True},
        {"out": [1]},
        {"out": {"a": 1}},
        {"out": {1: -1}},
        {"run": 3},
        {"learner_id": "a/b"},
        {"other": 1},
    ],
)
def test_a_state_with_anything_wrong_in_it_is_refused_by_its_file_before_anything_is_written(tmp_path, changes):
    url = fresh_url()
    with open_session(zeros(), BARRIER, url, state_dir=tmp_path) as session:
        for _ in range(5):
            session.step()
    (file,) = tmp_path.glob("*.npz")
    file.write_bytes(state_tree.to_bytes({**state_tree.from_bytes(file.read_bytes()), **changes}))
    before = open_mailbox(url).list("")
    with pytest.raises(ValueError, match=r"rank0-000000000000005\.npz is not the state of a node .*; remove it"):
        open_session(zeros(), BARRIER, url, state_dir=tmp_path)
    assert open_mailbox(url).list("") == before


def test_two_processes_do_not_share_a_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(state_folder, "PATIENCE_S", 0.0)
    with (
        open_session(zeros(), BARRIER, fresh_url(), state_dir=tmp_path),
        pytest.raises(BlockingIOError, match="is in use by another process"),
    ):
        open_session(zeros(), BARRIER, fresh_url(), state_dir=tmp_path)


def test_a_folder_that_a_killed_processs_worker_still_holds_is_waited_for(tmp_path):
    clock, held = VirtualClock(), StateFolder(tmp_path)
    clock.call_at(5.0, held.close)
    StateFolder(tmp_path, clock=clock).close()
    assert 5.0 <= clock.monotonic() < 6.0
