"""Units that are claimed once across sites, taken over from the dead, and counted once."""

from __future__ import annotations

import random

import pytest
from faulty_mailbox import Faults, FaultyMailbox
from hypothesis import given, settings
from hypothesis import strategies as st
from virtual_clock import VirtualClock

from mixle.diloco.lease import Lease, Liveness
from mixle.diloco.mailbox import TransientMailboxError
from mixle.diloco.memory_mailbox import MemoryMailbox
from mixle.diloco.retrying import RetryingMailbox
from mixle.diloco.shared_queue import SharedQueue


class Node:
    """A process: its lease, what it knows of others, and its end of a queue."""

    def __init__(self, site: Site, learner_id: str, *, units: int, name: str = "epoch-1") -> None:
        self.site = site
        self.lease = Lease(site.mailbox, learner_id, clock=site.clock)
        self.lease.acquire()
        self.crash = site.clock.call_every(1.0, self.lease.renew)
        self.liveness = Liveness(site.mailbox, clock=site.clock)
        self.queue = SharedQueue(site.mailbox, name, units=units, lease=self.lease, liveness=self.liveness)

    def wait(self, seconds: float) -> None:
        for _ in range(int(seconds)):
            self.site.clock.sleep(1.0)
            self.liveness.observe()


class Site:
    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.store = MemoryMailbox()
        self.mailbox = RetryingMailbox(self.store, clock=self.clock)

    def node(self, learner_id: str, *, units: int = 6, **options) -> Node:
        return Node(self, learner_id, units=units, **options)


@pytest.fixture
def site() -> Site:
    return Site()


def claim_all(node: Node) -> list[int]:
    return list(iter(node.queue.claim, None))


def test_one_process_claims_every_unit_once(site):
    assert sorted(claim_all(site.node("a"))) == [0, 1, 2, 3, 4, 5]


def test_no_unit_is_claimed_by_two_living_processes(site):
    nodes = [site.node(each, units=20) for each in ("a", "b", "c")]
    claimed = [node.queue.claim() for _ in range(8) for node in nodes]
    got = [unit for unit in claimed if unit is not None]
    assert sorted(got) == list(range(20))


def test_processes_begin_at_places_of_their_own_so_that_they_seldom_meet(site):
    nodes = [site.node(f"node-{number}", units=10_000) for number in range(8)]
    before = site.mailbox.traffic.puts
    for node in nodes:
        node.queue.claim()
    assert site.mailbox.traffic.puts - before == 8


def test_a_completed_unit_is_recorded_once_and_not_given_again(site):
    node = site.node("a", units=2)
    first = node.queue.claim()
    assert node.queue.complete(first)
    assert node.queue.remaining() == 1
    assert claim_all(node) == [1 - first]


def test_nothing_remains_when_all_is_done(site):
    a, b = site.node("a"), site.node("b")
    for unit in claim_all(a):
        a.queue.complete(unit)
    assert b.queue.remaining() == 0
    assert b.queue.claim() is None


def test_a_unit_of_a_living_process_is_not_taken_over(site):
    site.node("a").queue.claim()
    b = site.node("b")
    assert len(claim_all(b)) == 5
    b.wait(20)
    assert b.queue.claim() is None


def test_a_crashed_processs_unit_is_taken_over_once_its_lease_is_dead(site):
    a = site.node("a")
    unit = a.queue.claim()
    b = site.node("b")
    rest = claim_all(b)
    a.crash()
    b.wait(3)
    assert b.queue.claim() is None
    b.wait(3)
    assert b.queue.claim() == unit
    assert unit not in rest
    assert b.queue.claim() is None


def test_a_dead_processs_unit_goes_to_one_of_many(site):
    a = site.node("a", units=1)
    a.queue.claim()
    others = [site.node(each, units=1) for each in ("b", "c", "d")]
    a.crash()
    for node in others:
        node.liveness.observe()
    site.clock.sleep(2.0)
    for _ in range(4):
        for node in others:
            node.liveness.observe()
        site.clock.sleep(1.0)
    assert sorted(node.queue.claim() is None for node in others) == [False, True, True]


def test_the_taker_may_die_too(site):
    a = site.node("a", units=1)
    a.queue.claim()
    a.crash()
    b = site.node("b", units=1)
    b.wait(6)
    assert b.queue.claim() == 0
    b.crash()
    c = site.node("c", units=1)
    c.wait(6)
    assert c.queue.claim() == 0


def test_a_unit_of_a_process_that_left_is_free_at_once(site):
    a = site.node("a", units=1)
    a.queue.claim()
    a.crash()
    a.lease.release()
    assert site.node("b", units=1).queue.claim() == 0


def test_a_restarted_process_takes_its_old_unit_up_again(site):
    a = site.node("a", units=1)
    a.queue.claim()
    a.crash()
    restarted = site.node("a", units=1)
    assert restarted.lease.epoch == 1
    assert restarted.queue.claim() == 0


def test_a_unit_finished_by_one_taken_for_dead_counts_once(site):
    a = site.node("a", units=1)
    a.queue.claim()
    a.crash()
    b = site.node("b", units=1)
    b.wait(6)
    b.queue.claim()
    assert a.queue.complete(0)
    assert not b.queue.complete(0)
    assert b.queue.remaining() == 0


def test_a_unit_that_is_not_claimed_here_is_not_completed(site):
    node = site.node("a")
    with pytest.raises(ValueError, match="unit=3 is not claimed by this process"):
        node.queue.complete(3)


@pytest.mark.parametrize("unit", [True, 0.0, "0", None])
def test_what_is_no_unit_is_not_completed(site, unit):
    node = site.node("a", units=1)
    assert node.queue.claim() == 0
    with pytest.raises(TypeError, match=f"unit={unit!r} must be an integer"):
        node.queue.complete(unit)
    assert node.queue.remaining() == 1


def test_another_number_of_units_is_refused(site):
    site.node("a", units=6)
    with pytest.raises(ValueError, match="units=7 is not the b'6' that another site gave the queue 'epoch-1'"):
        site.node("b", units=7)


def test_queues_of_other_names_are_apart(site):
    claim_all(site.node("a"))
    assert len(claim_all(site.node("b", name="epoch-2"))) == 6


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"units": 0}, ValueError, "units=0 must be at least 1"),
        ({"units": True}, TypeError, "units=True must be an integer"),
        ({"name": "a/b"}, ValueError, "name='a/b'"),
    ],
)
def test_bad_arguments_are_refused_by_name(site, options, error, message):
    with pytest.raises(error, match=message):
        site.node("a", **options)


def test_an_address_is_no_mailbox_and_is_refused_at_once(site):
    lease, liveness = Lease(site.mailbox, "a", clock=site.clock), Liveness(site.mailbox, clock=site.clock)
    lease.acquire()
    with pytest.raises(TypeError, match="mailbox='memory://x' must be a mailbox, such as open_mailbox"):
        SharedQueue("memory://x", "q", units=1, lease=lease, liveness=liveness)


def test_a_queue_needs_a_lease_that_is_held(site):
    lease = Lease(site.mailbox, "a", clock=site.clock)
    with pytest.raises(RuntimeError, match="is not held; acquire it first"):
        SharedQueue(site.mailbox, "q", units=1, lease=lease, liveness=Liveness(site.mailbox, clock=site.clock))


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[1, 2]", b'["a", true, "n"]', b"[" * 4000, b'[3, 1, "n"]', b"3", b"\xff"]
)
def test_a_claim_that_cannot_be_read_holds_nothing(site, body, caplog):
    node = site.node("a", units=1)
    site.store.put_if_absent("queues/epoch-1/claims/000000000000-000000", body)
    assert node.queue.claim() == 0
    assert "is no claim; its unit is free" in caplog.text


def test_strays_are_not_counted(site):
    node = site.node("a", units=2)
    for stray in ("done/x", "done/000000000009", "claims/000000000001", "claims/000000000009-000000"):
        site.store.put_if_absent(f"queues/epoch-1/{stray}", b"")
    assert node.queue.remaining() == 2
    assert sorted(claim_all(node)) == [0, 1]


def test_a_claim_that_was_written_after_it_failed_here_is_this_processs_own(site):
    node = site.node("a", units=1)

    class Late(MemoryMailbox):
        def put_if_absent(self, key, data):
            site.store.put_if_absent(key, data)
            raise TransientMailboxError("no answer")

    mailbox, node.queue._mailbox = node.queue._mailbox, Late()
    with pytest.raises(TransientMailboxError):
        node.queue.claim()
    node.queue._mailbox = mailbox
    assert node.queue.claim() == 0
    assert node.queue.complete(0)


@settings(max_examples=40)
@given(seed=st.integers(0, 2**32))
def test_under_faults_and_crashes_every_unit_is_recorded_once(seed):
    rng, site = random.Random(seed), Site()
    faulty = FaultyMailbox(Faults(0.03, 0.03, 0.03, 0.03, longest_delay_s=2.0), seed=seed, clock=site.clock)
    nodes = [site.node(f"n{number}", units=12) for number in range(4)]
    for node in nodes:
        node.queue._mailbox = RetryingMailbox(faulty, deadline_s=60.0, clock=VirtualClock(), rng=rng)
    faulty.inner = site.store
    alive, recorded = list(nodes), []
    for _ in range(2000):
        node = rng.choice(alive)
        unit = node.queue.claim()
        if unit is not None and len(alive) > 1 and rng.random() < 0.2:
            node.crash()
            alive.remove(node)
        elif unit is not None and node.queue.complete(unit):
            recorded.append(unit)
        site.clock.sleep(1.0)
        for each in alive:
            each.liveness.observe()
        if len(recorded) == 12:
            break
    assert sorted(recorded) == list(range(12))
    faulty.settle()
    assert nodes[0].queue.remaining() == 0
