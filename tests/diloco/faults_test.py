"""What goes wrong in the field, each with what must come of it; sessions with their threads, on real time."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from diloco_members import Hand, Hooked, flip_bit, record_of
from faulty_mailbox import Faults, FaultyMailbox
from unmeasured import environment
from virtual_clock import VirtualClock

from mixle.diloco import names
from mixle.diloco.algorithm import DiLoCo
from mixle.diloco.file_mailbox import FileMailbox
from mixle.diloco.lease import IdInUse, Lease, Liveness
from mixle.diloco.mailbox import PermanentMailboxError, TransientMailboxError
from mixle.diloco.memory_mailbox import MemoryMailbox
from mixle.diloco.records import Claim, Contribution, PayloadRef, RoundRecord, RunRecord
from mixle.diloco.retrying import RetryingMailbox
from mixle.diloco.session import Session, align
from mixle.diloco.shared_queue import SharedQueue

PROGRAMS = Path(__file__).parent / "programs"
DEADLINE_S = 60.0


@pytest.fixture
def clock():
    return VirtualClock()


@pytest.fixture
def store(clock):
    return MemoryMailbox(now=clock.monotonic)


def arrays():
    return {"a": np.zeros(4, np.float32), "b": np.zeros((3, 2), np.float32)}


def session(store, *, algorithm=None, model=None, **more):
    options = {"poll_interval": 0.02, "lease_every": 0.1, "lease_timeout": 1.0, "callbacks": ()} | more
    return Session(
        arrays() if model is None else model,
        algorithm=DiLoCo(4, 2) if algorithm is None else algorithm,
        mailbox=store,
        **options,
    )


def rounds(store):
    """Return every commit, by round."""
    found = [names.round_of_record(key) for key in store.list(names.ROUNDS)]
    return {round_: record_of(store, round_) for round_ in sorted(r for r in found if r is not None)}


@pytest.mark.parametrize("part", ["delta-", "snapshots/", "claims/", "theta-", "rounds/"])
@pytest.mark.parametrize("done", [False, True])
def test_a_barrier_round_commits_though_a_write_of_it_fails(part, done):
    store, failed = MemoryMailbox(), threading.Event()
    hooked = Hooked(store)

    def fail(operation, key):
        if operation == "put" and part in key and not failed.is_set():
            failed.set()
            raise TransientMailboxError("injected")

    setattr(hooked, "after" if done else "before", fail)
    mailbox = RetryingMailbox(hooked, deadline_s=0.0)
    with session(mailbox, algorithm=DiLoCo(2, 1, overlap_steps=0)) as joined:
        for _ in range(4):
            joined.step(1)  # each second one waits for its round
    assert failed.is_set()
    assert [record.steps for record in rounds(store).values()] == [2, 2]


def test_a_learner_that_publishes_nan_is_recorded_as_rejected_and_global_parameters_stay_finite():
    store, told = MemoryMailbox(), []
    algorithm = DiLoCo(2, 1, overlap_steps=0)
    model = arrays()
    with session(store, algorithm=algorithm, model=model, learner_id="broken", callbacks=[told.append]) as joined:
        joined.step(1)
        model["a"][0] = np.nan
        joined.step(1)
        assert np.all(np.isfinite(model["a"]))
        for _ in range(2):
            model["a"] += 1.0
            joined.step(1)
    first, second = rounds(store).values()
    assert [(each.learner, each.reason.partition(":")[0]) for each in first.rejections] == [("broken", "nonfinite")]
    assert [(each.learner, each.steps) for each in second.contributions] == [("broken", 2)]
    assert [event.round for event in told if event.kind == "rejected"] == [0]
    model = arrays()
    align(model, mailbox=store)
    assert np.all(model["a"] > 0)


def test_a_delta_a_million_times_the_others_is_clipped_to_ten_times_their_median(store, clock):
    members = [Hand(store, f"n{i}", DiLoCo(4, 1), clock=clock, push=push) for i, push in enumerate((1.0, 1.1, 1e6))]
    for each in members:
        each.renew()
        each.train(4)
        each.node._publish()
    members[0].renew()
    members[0].tick()
    contributions = {each.learner: each for each in record_of(store, 0).contributions}
    runaway = contributions["n2"]
    assert runaway.norm * runaway.clipped == pytest.approx(10 * contributions["n1"].norm)
    assert contributions["n0"].clipped == contributions["n1"].clipped == 1.0
    assert members[0].told("clipped") == [(0, {"learner": "n2", "factor": runaway.clipped})]


@pytest.mark.parametrize(
    ("samples", "error"),
    [
        (1.0, TypeError),
        (True, TypeError),
        ("3", TypeError),
        (np.float32(2), TypeError),
        (0, ValueError),
        (-2, ValueError),
    ],
)
def test_samples_that_are_no_positive_integer_are_refused_where_they_are_given_and_poison_nothing(samples, error):
    store = MemoryMailbox()
    with session(store, algorithm=DiLoCo(2, 1)) as joined:
        joined.step(3)
        with pytest.raises(error, match="samples"):
            joined.step(samples)
        joined.step(3)
    assert [(record.steps, record.tokens) for record in rounds(store).values()] == [(2, 6)]


def test_samples_are_exact_integers_of_any_kind():
    torch = pytest.importorskip("torch")
    store = MemoryMailbox()
    with session(store, algorithm=DiLoCo(4, 1)) as joined:
        for samples in (3, np.int32(3), np.array(3), torch.tensor(3)):
            joined.step(samples)
    assert [(record.steps, record.tokens) for record in rounds(store).values()] == [(4, 12)]


def test_steps_short_of_a_round_are_flushed_when_the_session_closes():
    store, model = MemoryMailbox(), arrays()
    with session(store, algorithm=DiLoCo(50, 2), model=model) as joined:
        for _ in range(20):
            for array in model.values():
                array += 1.0
            joined.step(1)
    merged = [sum(record.steps for record in rounds(store).values() if record.fragment == f) for f in (0, 1)]
    assert merged == [20, 20]
    fresh = arrays()
    align(fresh, mailbox=store)
    assert all(np.array_equal(fresh[name], model[name]) and np.all(array == 20.0) for name, array in fresh.items())


def test_work_that_is_not_flushed_is_told():
    store, told = MemoryMailbox(), []
    algorithm = DiLoCo(50, 2, flush_on_close=False)
    joined = session(store, algorithm=algorithm, callbacks=[told.append])
    for _ in range(20):
        joined.step(1)
    assert joined.close() is False
    assert [event.detail["steps"] for event in told if event.kind == "unflushed"] == [20]


@pytest.mark.slow
def test_every_step_of_two_learners_is_in_a_commit_with_the_defaults():
    store, trained = MemoryMailbox(), 150

    def train(name):
        model = arrays()
        with session(store, algorithm=DiLoCo(20, 2), model=model, learner_id=name) as joined:
            for _ in range(trained):
                model["a"] += 0.5
                joined.step(2)
                time.sleep(0.001)

    threads = [threading.Thread(target=train, args=(f"n{i}",)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    for fragment in (0, 1):
        assert sum(r.steps for r in rounds(store).values() if r.fragment == fragment) == 2 * trained


STRAYS = {
    "rounds/readme": b"x",
    "rounds/0000000001.json": b"{}",
    names.round_record(2): b"not a record",
    names.claim(0, 0): b"[]",
    names.claim(1, 9999): b"\x00",
    names.claim(1, 0): Claim(7, 0, "ghost").to_bytes(),
    "claims/0000000000/first.json": b"",
    names.snapshot(0, "ghost"): b"\xff",
    names.snapshot(1, "ghost"): b'{"format":1}',
    "snapshots/0000000000/a b.json": b"{}",
    "snapshots/9999999999/ghost.json": b"{}",
    "payloads/0000000000/thing": b"",
    "payloads/0000000000/delta-abc.safetensors": b"",
    "leases/ghost": b"",
    "leases/ghost/00000000-000000000007": b"nonce\nnonsense",
    "leases/n1/marker": b"",
    "elsewhere/thing": b"",
    "..": b"",
}


def test_stray_objects_and_malformed_records_anywhere_under_the_prefix_stop_nobody():
    store, told = MemoryMailbox(), []
    for key, data in STRAYS.items():
        store.put_if_absent(key, data)
    algorithm = DiLoCo(2, 1, overlap_steps=0)
    with session(store, algorithm=algorithm, callbacks=[told.append], learner_id="n0") as joined:
        for _ in range(12):
            joined.step(1)
        assert joined.rounds_seen >= 6
    merged = [record_of(store, round_) for round_ in range(joined.rounds_seen) if round_ != 2]
    assert sum(record.steps for record in merged) == 12
    assert {"foreign", "corrupt"} <= {event.kind for event in told}


def trained(store, *, algorithm, steps=8):
    with session(store, algorithm=algorithm) as joined:
        for _ in range(steps):
            joined.step(1)


def test_the_rounds_of_a_run_whose_record_is_lost_are_not_taken_for_those_of_a_new_one():
    store = MemoryMailbox()
    trained(store, algorithm=DiLoCo(2, 2, overlap_steps=0))
    store.delete([names.RUN])
    before = store.list("payloads/")
    with pytest.raises(ValueError, match=r"run\.json is gone from the mailbox, which holds rounds/.*bring it back"):
        session(store, algorithm=DiLoCo(2, 1))
    assert (store.get(names.RUN), store.list("payloads/")) == (None, before)
    store.delete(store.list(""))
    trained(store, algorithm=DiLoCo(2, 1, overlap_steps=0))


@pytest.mark.parametrize("data", [b"", b"{}", b"\xff", b"[" * 10_000, RunRecord({}, (), ((),), (), (), (), "0" * 15)])
def test_a_run_that_cannot_be_read_is_called_by_its_key(data):
    store = MemoryMailbox()
    store.put_if_absent(names.RUN, data.to_bytes() if isinstance(data, RunRecord) else data)
    for use in (session, lambda mailbox: align(arrays(), mailbox=mailbox)):
        with pytest.raises(ValueError, match=r"run\.json in the mailbox is not the record of a run: "):
            use(store)


def test_a_run_that_is_cut_otherwise_is_refused():
    store, algorithm = MemoryMailbox(), DiLoCo(4, 2)
    trained(store, algorithm=algorithm)
    record = RunRecord.from_bytes(store.get(names.RUN))
    store.delete(store.list(""))
    store.put_if_absent(names.RUN, replace(record, fragments=record.fragments[::-1]).to_bytes())
    with pytest.raises(ValueError, match=r"run\.json in the mailbox names other fragments than ByBytes\(\) gives"):
        session(store, algorithm=algorithm)


def test_a_site_whose_run_was_deleted_does_not_write_into_the_next_one():
    store, algorithm = MemoryMailbox(), DiLoCo(2, 1, overlap_steps=0)
    left_behind = session(store, algorithm=algorithm, learner_id="left-behind")
    for _ in range(8):
        left_behind.step(1)
    store.delete(store.list(""))
    with pytest.raises(PermanentMailboxError, match="somebody deleted what is under the prefix"):
        until = time.monotonic() + DEADLINE_S
        while time.monotonic() < until:
            left_behind.step(1)
    assert not left_behind.close(flush_s=0.0)


def test_what_cannot_be_read_where_a_record_belongs_is_told_and_training_goes_on_once_it_is_removed(tmp_path, clock):
    stray = tmp_path / names.round_record(0)
    stray.mkdir(parents=True)
    member = Hand(FileMailbox(tmp_path), "n0", DiLoCo(4, 1, grace_seconds=0.0), clock=clock)
    member.train(4)
    for _ in range(3):
        member.tick()
    (told,) = [detail for _, detail in member.told("foreign")]
    assert told["key"] == names.round_record(0) and "lets no round be committed any more; remove it" in told["why"]
    stray.rmdir()
    member.tick()
    assert member.node.newest == 0


@pytest.mark.parametrize("name", ["", "a/b", "../x", ".hidden", "a b", "x" * 64, "é"])
def test_ids_that_no_key_can_hold_are_refused_before_anything_is_written(name):
    store = MemoryMailbox()
    with pytest.raises(ValueError, match="learner_id"):
        session(store, learner_id=name)
    assert store.list("") == []


def test_who_finds_a_flipped_bit_in_the_newest_theta_falls_back_to_the_version_before_and_says_so(store, clock):
    algorithm = DiLoCo(4, 2, grace_seconds=0.0)
    closer, follower = (Hand(store, name, algorithm, clock=clock, push=p) for name, p in (("n0", 1.0), ("n1", 2.0)))
    for _ in range(4):
        closer.train(2)
        closer.tick()
        follower.tick()
    closer.train(2)
    closer.tick()
    flip_bit(store, record_of(store, 4).theta.key)
    follower.tick()
    joiner = Hand(store, "n2", algorithm, clock=clock)
    for each in (follower, joiner):
        assert [(r, detail["fallback"]) for r, detail in each.told("corrupt")] == [(4, 2)]
    model = {name: np.zeros_like(array) for name, array in joiner.arrays.items()}
    assert align(model, mailbox=RetryingMailbox(store, clock=clock)) == 4
    older = closer.node._exchange.get_arrays(record_of(store, 2).theta, 0, "F32")
    for name, array in older.items():
        assert np.array_equal(joiner.arrays[name], array) and np.array_equal(model[name], array)
    joiner.train(4)
    closer.train(4)
    closer.tick()
    joiner.tick()
    closer.tick()
    assert joiner.node.newest >= 5


@pytest.mark.slow
def test_joining_a_run_of_ten_thousand_rounds_takes_requests_in_proportion_to_the_fragments(store, clock):
    fragments, newest = 3, 10_000
    algorithm = DiLoCo(6, fragments, grace_seconds=0.0)
    first = Hand(store, "n0", algorithm, clock=clock)
    for _ in range(fragments):
        first.train(2)
        first.tick()
    models = [record_of(store, fragment) for fragment in range(fragments)]
    for round_ in range(fragments, newest + 1):
        fragment = round_ % fragments
        model = models[fragment]
        old = model.theta
        theta = PayloadRef(names.payload(round_, "theta", old.digest, ".safetensors"), old.nbytes)
        if round_ > newest - fragments:
            store.put_if_absent(theta.key, store.get(old.key))
        record = RoundRecord(
            round_, fragment, round_ - fragments, "n0", theta, None, None, None, model.theta_digest,
            (Contribution("n0", "0" * 64, 2, 4, 0.1, 1.0, 1.0, 1.0, False),), (), None, (0.0, 0.0),
        )  # fmt: skip
        store.put_if_absent(names.round_record(round_), record.to_bytes())
    joiner = Hand(store, "n1", algorithm, clock=clock)
    joiner.tick()
    traffic = joiner.mailbox.traffic
    assert joiner.learner.seen == newest
    assert traffic.puts + traffic.gets + traffic.lists + traffic.deletes <= 25 + 4 * fragments
    returned = first.mailbox.traffic
    first.tick()
    first.learner.move()
    assert first.learner.seen == newest
    assert first.mailbox.traffic.gets - returned.gets <= 10 + 6 * fragments


@pytest.mark.slow
def test_the_size_of_the_store_stays_bounded_over_five_hundred_rounds_with_faults(clock):
    faults = Faults(refused=0.03, lost=0.03, delayed=0.03, repeated=0.03, longest_delay_s=20.0)
    store = FaultyMailbox(faults, seed=1, clock=clock)
    algorithm = DiLoCo(4, 2, grace_seconds=0.0)
    members = [Hand(store, f"n{i}", algorithm, clock=clock, push=1e-3, deadline_s=5.0) for i in range(2)]
    most = 0
    while members[0].node.newest < 500:
        clock.sleep(0.5)
        for each in members:
            each.train(1)
            try:
                each.renew()
                each.tick()
            except TransientMailboxError:
                continue
        kept = [key for key in store.inner.list("") if not key.startswith(names.ROUNDS)]
        most = max(most, len(kept))
    # Per round: two deltas, two snapshots, a claim, theta and momentum; versions stay for two turns and the one begun,
    # and what failed sweeps and late writes have left may double it.
    assert most <= 2 * 7 * 3 * algorithm.fragments
    assert len([key for key in store.inner.list("") if not key.startswith(names.ROUNDS)]) <= most


def test_a_second_process_under_an_id_is_refused_and_the_first_goes_on():
    store = MemoryMailbox()
    with session(store, learner_id="n0", algorithm=DiLoCo(2, 1)) as first:
        with pytest.raises(IdInUse, match="'n0' is in use"):
            session(store, learner_id="n0", algorithm=DiLoCo(2, 1))
        first.step(1)
        first.step(1)
    assert [record.steps for record in rounds(store).values()] == [2]


def test_the_queue_unit_of_a_crashed_node_is_taken_up_by_another(store, clock):
    crashed = Lease(store, "crashed", clock=clock)
    crashed.acquire()
    queue = SharedQueue(store, "data", units=1, lease=crashed, liveness=Liveness(store, clock=clock))
    assert queue.claim() == 0
    with Lease(store, "other", clock=clock) as lease:
        liveness = Liveness(store, clock=clock)
        other = SharedQueue(store, "data", units=1, lease=lease, liveness=liveness)
        assert other.claim() is None
        for _ in range(6):
            clock.sleep(1.0)
            liveness.observe()
        assert other.claim() == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_that_ends_the_process_releases_the_lease_and_flushes_the_work(tmp_path, number):
    program = PROGRAMS / "wait_to_be_stopped.py"
    command = [sys.executable, str(program), f"file://{tmp_path}"]
    with subprocess.Popen(
        command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        try:
            assert process.stdout.readline() == "joined\n"
            time.sleep(0.2)
            process.send_signal(number)
            process.wait(DEADLINE_S)
        finally:
            process.kill()
    assert process.returncode != 0
    assert [path.name for path in (tmp_path / "leases" / "n0").iterdir()] == ["00000000-released"]
    model = {"w": np.zeros(4, np.float32)}
    align(model, mailbox=f"file://{tmp_path}")
    assert np.all(model["w"] >= 1.0)


def test_a_session_works_inside_a_running_event_loop(tmp_path):
    async def notebook():
        with session(f"file://{tmp_path}", algorithm=DiLoCo(2, 1, overlap_steps=0)) as joined:
            for _ in range(4):
                joined.step(1)
            return joined.rounds_seen

    assert asyncio.run(notebook()) == 2


@pytest.mark.parametrize("dtype", ["float64", "int64", "bool"])
def test_parameters_of_another_dtype_are_refused_by_name_before_anything_is_written(dtype):
    store = MemoryMailbox()
    with pytest.raises(TypeError, match=rf"layer\.weight.*{dtype}"):
        session(store, model={"layer.weight": np.zeros(3, dtype), "other": np.zeros(3, np.float32)})
    assert store.list("") == []


def test_frozen_parameters_are_not_shipped():
    torch = pytest.importorskip("torch")
    store = MemoryMailbox()
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 2))
    model[0].requires_grad_(False)
    frozen = model[0].weight.clone()
    with session(store, model=model, algorithm=DiLoCo(2, 1, overlap_steps=0)) as joined:
        for _ in range(2):
            joined.step(1)
    run = store.get(names.RUN).decode()
    assert '"1.weight"' in run and '"0.weight"' not in run
    assert torch.equal(model[0].weight, frozen)


def test_a_missing_codec_is_an_import_error_before_anything_is_written(monkeypatch):
    monkeypatch.setitem(sys.modules, "zstandard", None)
    store = MemoryMailbox()
    with pytest.raises(ImportError, match="zstandard"):
        session(store, compression="zstd")
    assert store.list("") == []


def test_sessions_of_one_process_share_a_run_and_leave_no_thread_behind():
    store = MemoryMailbox()
    before = threading.active_count()
    with ExitStack() as stack:
        joined = [stack.enter_context(session(store, algorithm=DiLoCo(2, 1), learner_id=f"n{i}")) for i in range(3)]
        for each in joined:
            each.step(1)
            each.step(1)
    assert threading.active_count() == before
    assert sum(record.steps for record in rounds(store).values()) == 6
