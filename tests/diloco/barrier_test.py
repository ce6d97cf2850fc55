"""A barrier through the mailbox."""

from __future__ import annotations

import pytest
from virtual_clock import VirtualClock

from mixle.diloco.barrier import Barrier, BarrierTimeout
from mixle.diloco.memory_mailbox import MemoryMailbox
from mixle.diloco.retrying import RetryingMailbox


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


@pytest.fixture
def barrier(clock):
    mailbox = RetryingMailbox(MemoryMailbox(), clock=clock)

    def make(learner_id: str, name: str = "epoch-1", parties=("a", "b", "c"), **options) -> Barrier:
        return Barrier(mailbox, name, learner_id=learner_id, parties=parties, clock=clock, **options)

    return make


def arrive(barrier: Barrier) -> None:
    with pytest.raises(BarrierTimeout):
        barrier.wait(deadline_s=0.0)


def test_all_pass_when_the_last_has_come(barrier, clock):
    clock.call_at(5.0, lambda: arrive(barrier("b")))
    clock.call_at(7.5, lambda: barrier("c").wait(deadline_s=0.0))
    barrier("a").wait(deadline_s=20.0)
    assert clock.monotonic() == 8.0


def test_at_the_deadline_the_error_names_who_is_missing(barrier, clock):
    arrive(barrier("b"))
    with pytest.raises(
        BarrierTimeout, match=r"a, c did not come to the barrier 'epoch-1' within 3\.5 s \(1 of 3 did\)"
    ) as late:
        barrier("b").wait(deadline_s=3.5)
    assert late.value.missing == ("a", "c")
    assert clock.monotonic() == 3.5


def test_a_party_that_gave_up_has_arrived_all_the_same(barrier):
    arrive(barrier("a"))
    arrive(barrier("b"))
    barrier("c").wait(deadline_s=0.0)


def test_a_restarted_party_passes_a_barrier_that_it_has_passed(barrier, clock):
    arrive(barrier("a"))
    arrive(barrier("b"))
    barrier("c").wait(deadline_s=0.0)
    barrier("c").wait(deadline_s=0.0)
    assert clock.monotonic() == 0.0


def test_barriers_of_other_names_and_strangers_do_not_count(barrier):
    arrive(barrier("a", name="epoch-2"))
    arrive(barrier("stranger", parties=("stranger", "a")))
    with pytest.raises(BarrierTimeout, match=r"a, b did not come"):
        barrier("c").wait(deadline_s=1.0)


def test_one_party_passes_alone(barrier):
    barrier("a", parties=["a"]).wait(deadline_s=0.0)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"learner_id": "z"}, ValueError, "learner_id='z' must be one of parties: a, b, c"),
        ({"learner_id": "a", "parties": "abc"}, TypeError, "parties='abc' must be a collection of ids"),
        ({"learner_id": "a", "parties": ["a", "b/c"]}, ValueError, "parties='b/c'"),
        ({"learner_id": "a", "name": "x y"}, ValueError, "name='x y'"),
        ({"learner_id": "a", "parties": None}, TypeError, "parties=None must be a collection of ids, not a NoneType"),
        ({"learner_id": "a", "poll_interval": 0}, ValueError, r"poll_interval=0\.0 must be above 0"),
    ],
)
def test_bad_arguments_are_refused_by_name(barrier, options, error, message):
    with pytest.raises(error, match=message):
        barrier(**options)


def test_an_address_is_no_mailbox_and_is_refused_before_anybody_waits():
    with pytest.raises(TypeError, match="mailbox='memory://x' must be a mailbox, such as open_mailbox"):
        Barrier("memory://x", "epoch-1", learner_id="a", parties=["a"])


def test_a_deadline_that_is_no_time_is_refused_before_arriving(barrier):
    with pytest.raises(ValueError, match=r"deadline_s=-1\.0 must be at least"):
        barrier("a").wait(deadline_s=-1)
    with pytest.raises(BarrierTimeout, match="a, b did not come"):
        barrier("c").wait(deadline_s=0.0)
