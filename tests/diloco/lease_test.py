"""Leases: who is held alive by whom, and one process per id."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from faulty_mailbox import Faults, FaultyMailbox
from hypothesis import given, settings
from hypothesis import strategies as st
from virtual_clock import VirtualClock

from mixle.diloco.clock import SystemClock
from mixle.diloco.lease import IdInUse, Lease, LeaseKeeper, LeaseTable, Liveness, read_info
from mixle.diloco.mailbox import PermanentMailboxError, TransientMailboxError
from mixle.diloco.memory_mailbox import MemoryMailbox
from mixle.diloco.object_store import open_mailbox
from mixle.diloco.retrying import RetryingMailbox


class Site:
    """A store and time, shared by the nodes of one test."""

    def __init__(self, mailbox=None) -> None:
        self.clock = VirtualClock()
        self.store = MemoryMailbox()
        self.mailbox = mailbox or RetryingMailbox(self.store, clock=self.clock)

    def lease(self, learner_id: str = "a", **options) -> Lease:
        return Lease(self.mailbox, learner_id, clock=self.clock, **options)

    def liveness(self) -> Liveness:
        return Liveness(self.mailbox, lease_timeout=4.0, clock=self.clock)

    def running(self, learner_id: str = "a"):
        """Hold a lease that renews itself every second; gives it and what stops the renewals, as a crash does."""
        lease = self.lease(learner_id)
        lease.acquire()
        return lease, self.clock.call_every(1.0, lease.renew)

    def watch(self, liveness: Liveness, seconds: float) -> None:
        until = self.clock.monotonic() + seconds
        while self.clock.monotonic() < until:
            self.clock.sleep(1.0)
            liveness.observe()


@pytest.fixture
def site() -> Site:
    return Site()


def test_a_node_that_renews_is_alive(site):
    site.running()
    liveness = site.liveness()
    site.watch(liveness, 20.0)
    assert liveness.alive == {"a"}
    assert liveness.states == {"a": "alive"}


def test_a_node_that_stops_renewing_falls_silent_after_the_timeout(site):
    _, crash = site.running()
    liveness = site.liveness()
    site.watch(liveness, 5.0)
    crash()
    site.watch(liveness, 3.0)
    assert liveness.alive == {"a"}
    site.watch(liveness, 2.0)
    assert liveness.states == {"a": "silent"}


def test_a_silent_node_that_renews_again_is_alive(site):
    lease, crash = site.running()
    liveness = site.liveness()
    liveness.observe()
    crash()
    site.watch(liveness, 6.0)
    assert liveness.alive == frozenset()
    lease.renew()
    liveness.observe()
    assert liveness.alive == {"a"}


def test_a_released_node_is_not_alive_at_once(site):
    lease, crash = site.running()
    liveness = site.liveness()
    liveness.observe()
    crash()
    lease.release()
    liveness.observe()
    assert liveness.states == {"a": "released"}
    assert not lease.held


def test_an_observer_that_was_stopped_with_the_others_does_not_bury_them(site):
    lease, crash = site.running()
    liveness = site.liveness()
    site.watch(liveness, 2.0)
    crash()
    site.clock.sleep(60.0)
    liveness.observe()
    assert liveness.alive == {"a"}
    lease.renew()
    site.watch(liveness, 1.0)
    assert liveness.alive == {"a"}


def test_a_list_that_takes_long_does_not_count_as_silence():
    table = LeaseTable(4.0)
    key = ["leases/a/00000000-000000000001"]
    table.record(key, asked_at=0.0, answered_at=3.0)
    table.record(key, asked_at=4.0, answered_at=5.0)
    table.record(key, asked_at=6.0, answered_at=9.0)
    assert table.state("a") == "alive"
    table.record(key, asked_at=7.0, answered_at=9.0)
    assert table.state("a") == "silent"


def test_an_answer_that_comes_late_does_not_take_knowledge_back():
    table = LeaseTable(4.0)
    table.record(["leases/a/00000000-000000000002"], asked_at=5.0, answered_at=6.0)
    table.record(["leases/a/00000000-000000000001"], asked_at=4.0, answered_at=7.0)
    assert table.newest("a") == (0, 2.0)


def test_a_later_epoch_is_newer_than_any_sequence_and_a_release_newer_than_its_epoch():
    table = LeaseTable(4.0)
    keys = ["leases/a/00000000-999999999999", "leases/a/00000001-000000000000", "leases/b/00000000-released",
            "leases/b/00000000-000000000005"]  # fmt: skip
    table.record(keys, asked_at=0.0, answered_at=0.0)
    assert (table.newest("a"), table.state("a"), table.state("b")) == ((1, 0.0), "alive", "released")


def test_an_id_without_a_lease_is_unknown(site):
    liveness = site.liveness()
    liveness.observe()
    assert liveness.epoch("a") is None
    assert not liveness.may_live("a", 0)


def test_an_id_whose_objects_were_removed_is_forgotten(site):
    lease, crash = site.running()
    liveness = site.liveness()
    liveness.observe()
    crash()
    site.mailbox.delete(site.mailbox.list("leases/"))
    liveness.observe()
    assert liveness.states == {}
    assert lease.held


@pytest.mark.parametrize(
    "stray", ["leases/a", "leases/a/1", "leases/a/b/c", "leases/a/00000000-x", "leases/a/00000000-000000000001.json"]
)
def test_a_stray_object_is_reported_once_and_ignored(site, stray, caplog):
    site.running("node")
    site.store.put_if_absent(stray, b"?")
    liveness = site.liveness()
    site.watch(liveness, 3.0)
    assert liveness.alive == {"node"}
    assert liveness.strays == (stray,)
    assert caplog.text.count(stray) == 1


def test_a_node_keeps_two_objects_and_a_released_one_keeps_one(site):
    lease, crash = site.running()
    site.clock.sleep(200.0)
    assert len(site.store.list("leases/")) == 2
    crash()
    lease.release()
    assert site.store.list("leases/") == ["leases/a/00000000-released"]


def test_what_delayed_writes_left_is_swept(site):
    lease, _ = site.running()
    site.clock.sleep(10.0)
    site.store.put_if_absent("leases/a/00000000-000000000003", b"late")
    site.clock.sleep(lease.lease_every * 64)
    assert "leases/a/00000000-000000000003" not in site.store.list("leases/")


def test_a_node_says_something_of_itself(site):
    lease = site.lease()
    assert read_info(site.mailbox, "a") is None
    lease.acquire()
    assert read_info(site.mailbox, "a") == b""
    lease.renew(b"round 3\nstep 7")
    assert read_info(site.mailbox, "a") == b"round 3\nstep 7"
    lease.release(b"step 9")
    assert read_info(site.mailbox, "a") == b"step 9"


def test_a_second_process_under_one_id_is_refused_while_the_first_renews(site):
    first, _ = site.running()
    second = site.lease()
    with pytest.raises(IdInUse, match="learner_id='a' is in use: another process renews its lease"):
        second.acquire()
    assert not second.held
    assert site.clock.monotonic() <= 2.0
    first.renew()


def test_a_living_process_that_renews_more_seldom_keeps_its_id(site):
    slow = site.lease(lease_every=10.0, lease_timeout=40.0)
    slow.acquire()
    crash = site.clock.call_every(10.0, slow.renew)
    with pytest.raises(IdInUse, match="'a' is in use: another process renews its lease"):
        site.lease().acquire()
    crash()
    before, lease = site.clock.monotonic(), site.lease()
    lease.acquire()
    assert 30.0 <= site.clock.monotonic() - before <= 45.0


@pytest.mark.parametrize("told", [b"", b"x", b"nan", b"-1", b"1e400", b"\xff", b"9" * 5000])
def test_whatever_a_stranger_wrote_of_a_timeout_an_id_is_free_within_an_hour(site, told):
    site.store.put_if_absent("leases/a/00000000-000000000000", b"nonce\n" + told)
    site.lease(lease_every=2.0).acquire()
    assert site.clock.monotonic() <= 3700.0


def test_another_id_is_not_refused(site):
    site.running("a")
    site.lease("b").acquire()
    assert site.clock.monotonic() == 0.0


def test_a_crashed_nodes_id_is_free_after_the_timeout(site):
    _, crash = site.running()
    site.clock.sleep(3.0)
    crash()
    restarted = site.lease()
    started = site.clock.monotonic()
    restarted.acquire()
    assert 4.0 <= site.clock.monotonic() - started <= 5.0
    assert restarted.epoch == 1


def test_a_released_id_is_free_at_once(site):
    with site.lease() as first:
        first.renew()
    with site.lease() as second:
        assert (second.epoch, site.clock.monotonic()) == (1, 0.0)


def test_a_process_that_was_stopped_too_long_finds_its_id_taken(site):
    old, stop = site.running()
    liveness = site.liveness()
    liveness.observe()
    old.check(liveness)
    stop()
    new = site.lease()
    new.acquire()
    old.renew()
    liveness.observe()
    with pytest.raises(IdInUse, match="was taken over by another process, since this one had not renewed"):
        old.check(liveness)
    new.check(liveness)


def test_a_takeover_is_seen_even_when_the_new_process_has_left(site):
    old, stop = site.running()
    stop()
    with site.lease():
        pass
    liveness = site.liveness()
    liveness.observe()
    with pytest.raises(IdInUse):
        old.check(liveness)


class Lagging(MemoryMailbox):
    """A store whose lists lack what was written less than half a second ago."""

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__()
        self._clock, self._written = clock, {}

    def put_if_absent(self, key, data):
        self._written.setdefault(key, self._clock.monotonic())
        return super().put_if_absent(key, data)

    def list(self, prefix, after="", *, limit=None):
        found = super().list(prefix, after)
        return [key for key in found if self._written[key] <= self._clock.monotonic() - 0.5][:limit]


def test_an_id_is_taken_and_kept_on_a_store_whose_lists_lag():
    site = Site()
    site.mailbox = Lagging(site.clock)
    lease, liveness = site.lease(), site.liveness()
    lease.acquire()
    assert (lease.epoch, site.clock.monotonic()) == (0, 0.0)
    keeper = LeaseKeeper(lease, liveness, clock=site.clock)
    keeper.tick()  # before the list shows the first object
    site.clock.sleep(1.0)
    keeper.tick()
    assert liveness.alive == {"a"}


def test_a_process_whose_lease_somebody_deleted_goes_on_no_longer(site):
    lease, liveness = site.lease(), site.liveness()
    lease.acquire()
    keeper = LeaseKeeper(lease, liveness, clock=site.clock)
    keeper.tick()
    site.store.delete(site.store.list(""))
    with pytest.raises(PermanentMailboxError, match=r"leases/a/0.* is gone: somebody deleted what is under the prefix"):
        keeper.tick()


def test_of_two_that_restart_at_once_one_gets_the_id(site):
    _, crash = site.running()
    crash()
    outcomes = []

    class Meanwhile(MemoryMailbox):
        """The other process takes the id between this one's list and its write."""

        def list(self, prefix, after="", *, limit=None):
            return site.store.list(prefix, after, limit=limit)

        def get(self, key, *, limit=None):
            return site.store.get(key, limit=limit)

        def delete(self, keys):
            site.store.delete(keys)

        def put_if_absent(self, key, data):
            if not outcomes:
                other, _ = site.running()
                outcomes.append(other.epoch)
            return site.store.put_if_absent(key, data)

    with pytest.raises(IdInUse):
        Lease(RetryingMailbox(Meanwhile(), clock=site.clock), "a", clock=site.clock).acquire()
    assert outcomes == [1]


def test_an_epoch_that_came_and_went_meanwhile_is_not_taken(site):
    class Meanwhile(MemoryMailbox):
        done = False

        def put_if_absent(self, key, data):
            if not self.done:
                self.done = True
                for each in ("leases/a/00000000-released", "leases/a/00000001-released"):
                    super().put_if_absent(each, b"other")
            return super().put_if_absent(key, data)

    lease = Lease(Meanwhile(), "a", clock=site.clock)
    lease.acquire()
    assert lease.epoch == 2


def test_what_is_not_held_is_neither_renewed_nor_released(site):
    lease = site.lease()
    for call in (lease.renew, lease.release, lambda: lease.epoch):
        with pytest.raises(RuntimeError, match="the lease of 'a' is not held; acquire it first"):
            call()


def test_a_held_lease_is_not_acquired_again(site):
    with site.lease() as lease, pytest.raises(RuntimeError, match="is held already"):
        lease.acquire()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"learner_id": "a/b"}, "learner_id='a/b'"),
        ({"lease_every": 0}, r"lease_every=0\.0 must be above"),
        ({"lease_timeout": float("nan")}, "lease_timeout=nan must be finite"),
        ({"lease_every": 3, "lease_timeout": 4}, "lease_timeout=4 must be at least twice lease_every=3"),
    ],
)
def test_bad_arguments_are_refused_by_name(site, options, message):
    with pytest.raises(ValueError, match=message):
        site.lease(**options)


def test_a_keepers_tick_renews_looks_and_checks(site):
    lease = site.lease()
    lease.acquire()
    liveness = site.liveness()
    keeper = LeaseKeeper(lease, liveness, clock=site.clock)
    keeper.info = b"hello"
    keeper.tick()
    assert liveness.alive == {"a"}
    assert read_info(site.mailbox, "a") == b"hello"


def test_a_keeper_goes_on_after_an_outage_and_stops_at_a_refusal(site, caplog):
    errors: list[Exception] = [TransientMailboxError("down"), PermanentMailboxError("forbidden")]

    class Failing(MemoryMailbox):
        def list(self, prefix, after="", *, limit=None):
            if prefix == "leases/" and errors:
                raise errors.pop(0)
            return super().list(prefix, after, limit=limit)

    store = Failing()
    lease = Lease(store, "a", clock=site.clock)
    lease.acquire()
    keeper = LeaseKeeper(lease, Liveness(store, clock=site.clock), clock=site.clock)
    keeper.tick()
    assert "the lease of a is late: down" in caplog.text
    assert keeper.error is None
    with pytest.raises(PermanentMailboxError):
        keeper.tick()
    assert isinstance(keeper.error, PermanentMailboxError)


def test_a_store_too_slow_for_the_leases_is_said_once(site, caplog):
    class Slow(MemoryMailbox):
        def list(self, prefix, after="", *, limit=None):
            site.clock.sleep(3.0)
            return super().list(prefix, after, limit=limit)

    site.mailbox = Slow()
    lease = site.lease()
    lease.acquire()
    keeper = LeaseKeeper(lease, site.liveness(), clock=site.clock)
    for _ in range(3):
        keeper.tick()
    (told,) = [record.getMessage() for record in caplog.records]
    assert "took 3.0 s for a sign of life of a, which others miss after lease_timeout=4 s" in told


def test_a_keepers_thread_renews_until_it_is_stopped():
    renewed = threading.Event()

    class Noted(MemoryMailbox):
        def put_if_absent(self, key, data):
            if key.endswith("3"):
                renewed.set()
            return super().put_if_absent(key, data)

    store = Noted()
    lease = Lease(store, "a", lease_every=0.001)
    lease.acquire()
    keeper = LeaseKeeper(lease, Liveness(store))
    keeper.start()
    assert renewed.wait(30.0)
    keeper.stop()
    assert keeper.error is None


def test_a_keepers_thread_that_ends_by_any_error_keeps_it(caplog):
    class Broken(MemoryMailbox):
        def list(self, prefix, after="", *, limit=None):
            raise ZeroDivisionError("a fault of the store's code")

    mailbox = Broken()
    keeper = LeaseKeeper(Lease(mailbox, "a"), Liveness(mailbox))
    keeper._lease._epoch = 0
    keeper.start()
    keeper._thread.join(30.0)
    assert isinstance(keeper.error, ZeroDivisionError)


def test_a_keepers_thread_ends_when_the_id_was_taken(caplog):
    store, clock = MemoryMailbox(), SystemClock()
    lease = Lease(store, "a", lease_every=0.001)
    lease.acquire()
    store.put_if_absent("leases/a/00000007-000000000000", b"other")
    keeper = LeaseKeeper(lease, Liveness(store, clock=clock), clock=clock)
    keeper.start()
    keeper._thread.join(30.0)
    assert isinstance(keeper.error, IdInUse)
    assert "the lease of a is not renewed any more" in caplog.text
    keeper.stop()


@settings(max_examples=40)
@given(seed=st.integers(0, 2**32), crash_at=st.floats(0.0, 30.0))
def test_under_faults_a_living_node_stays_alive_and_a_dead_one_falls_silent(seed, crash_at):
    site = Site()
    faulty = FaultyMailbox(
        Faults(refused=0.05, lost=0.05, delayed=0.05, repeated=0.05, longest_delay_s=2.0), seed=seed, clock=site.clock
    )
    site.mailbox = RetryingMailbox(faulty, deadline_s=1.0, clock=SideClock(site.clock))
    lease = site.lease()
    acquire(lease)
    renewing = True

    def renew() -> None:
        try:
            lease.renew()
        except TransientMailboxError:
            return

    crash = site.clock.call_every(1.0, renew)
    liveness = site.liveness()
    while site.clock.monotonic() < crash_at + 20.0:
        if renewing and site.clock.monotonic() >= crash_at:
            crash()
            renewing = False
        site.clock.sleep(0.5)
        try:
            liveness.observe()
        except TransientMailboxError:
            continue
        assert liveness.states["a"] == "alive" or not renewing
    assert liveness.states["a"] == "silent"


HOLDER = """
import sys, threading
from mixle.diloco.lease import Lease, LeaseKeeper, Liveness
from mixle.diloco.object_store import open_mailbox
mailbox = open_mailbox(sys.argv[1])
lease = Lease(mailbox, "a", lease_every=0.1, lease_timeout=2.0)
lease.acquire()
LeaseKeeper(lease, Liveness(mailbox, lease_timeout=2.0)).start()
print("held", flush=True)
threading.Event().wait()
"""


def test_a_real_process_keeps_its_id_until_it_is_killed(tmp_path):
    url = f"file://{tmp_path}/box"
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, url],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    with holder:
        try:
            assert holder.stdout.readline() == "held\n"
            lease = Lease(open_mailbox(url), "a", lease_every=0.1, lease_timeout=2.0)
            with pytest.raises(IdInUse):
                lease.acquire()
        finally:
            holder.send_signal(signal.SIGKILL)
    lease.acquire()
    assert lease.epoch == 1


class SideClock:
    """Pauses between retries, which take no time from the nodes that share one clock."""

    def __init__(self, clock: VirtualClock) -> None:
        self._start, self._clock, self._slept = 0.0, clock, 0.0

    def monotonic(self) -> float:
        return self._clock.monotonic() + self._slept

    def sleep(self, seconds: float) -> None:
        self._slept += seconds

    def wait(self, event: threading.Event, timeout: float) -> bool:
        self._slept += timeout
        return event.is_set()


def acquire(lease: Lease) -> None:
    while not lease.held:
        try:
            lease.acquire()
        except TransientMailboxError:
            continue
