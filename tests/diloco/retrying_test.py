"""Retries: which write was whose when an answer was lost, and when to give up."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from faulty_mailbox import Faults, FaultyMailbox
from hypothesis import given
from hypothesis import strategies as st
from virtual_clock import VirtualClock

from mixle.diloco.mailbox import PermanentMailboxError, TransientMailboxError
from mixle.diloco.memory_mailbox import MemoryMailbox
from mixle.diloco.retrying import RetryingMailbox


def around(inner, *, deadline_s: float = 30.0, clock: VirtualClock | None = None) -> RetryingMailbox:
    return RetryingMailbox(inner, deadline_s=deadline_s, clock=clock or VirtualClock(), rng=random.Random(0))


class Scripted(MemoryMailbox):
    """Memory whose puts do, in turn, what the script says: "lost", "refused", or nothing special."""

    def __init__(self, *script: str, foreign: bytes = b"") -> None:
        super().__init__()
        self.script, self.foreign = list(script), foreign

    def put_if_absent(self, key: str, data: bytes) -> bool:
        step = self.script.pop(0) if self.script else ""
        if step == "overtaken":
            super().put_if_absent(key, self.foreign)
        if step in ("refused", "overtaken"):
            raise TransientMailboxError("refused")
        created = super().put_if_absent(key, data)
        if step == "lost":
            raise TransientMailboxError("no answer")
        if step == "swept":
            self.delete([key])
            raise TransientMailboxError("no answer")
        return created


def test_a_write_whose_answer_was_lost_is_known_by_its_bytes():
    mailbox = around(Scripted("lost"))
    assert mailbox.put_if_absent("a", b"mine")
    assert (mailbox.traffic.puts, mailbox.traffic.gets, mailbox.traffic.retries) == (2, 1, 1)


@pytest.mark.parametrize("foreign", [b"them", b"longer than mine", b""])
def test_a_write_that_another_overtook_is_not_this_calls(foreign):
    mailbox = around(Scripted("overtaken", foreign=foreign))
    assert not mailbox.put_if_absent("a", b"mine")
    assert mailbox.get("a") == foreign


def test_a_refused_write_is_written_again():
    assert around(Scripted("refused", "refused")).put_if_absent("a", b"1")


def test_a_write_that_someone_deleted_before_the_answer_is_written_again():
    mailbox = around(Scripted("swept"))
    assert mailbox.put_if_absent("a", b"1")
    assert mailbox.get("a") == b"1"


def test_the_pauses_grow_are_random_and_end_at_the_deadline():
    clock, asked = VirtualClock(), []

    class Down(MemoryMailbox):
        def get(self, key, *, limit=None):
            asked.append(clock.monotonic())
            raise TransientMailboxError("down")

    with pytest.raises(TransientMailboxError, match=r"get\('a'\) failed \d+ times in .* s \(deadline_s=30\): down"):
        around(Down(), clock=clock).get("a")
    pauses = [later - before for before, later in pairwise(asked)]
    assert asked[-1] <= 30
    assert len(set(pauses)) == len(pauses)
    assert all(pause <= min(2.0, 0.1 * 2**number) for number, pause in enumerate(pauses))
    assert max(pauses) > 1.0


def test_a_deadline_of_nothing_asks_once():
    inner = Scripted("refused")
    with pytest.raises(TransientMailboxError, match="failed 1 times"):
        around(inner, deadline_s=0.0).put_if_absent("a", b"1")
    assert inner.list("") == []


def test_what_will_not_change_is_not_asked_again():
    class Forbidden(MemoryMailbox):
        def list(self, prefix, after="", *, limit=None):
            raise PermanentMailboxError("forbidden")

    mailbox = around(Forbidden())
    with pytest.raises(PermanentMailboxError, match="forbidden"):
        mailbox.list("")
    assert mailbox.traffic.lists == 1


def test_a_mailbox_with_another_deadline_counts_into_the_same_traffic():
    mailbox = around(Scripted("refused"))
    hasty = mailbox.with_deadline(0.0)
    with pytest.raises(TransientMailboxError):
        hasty.put_if_absent("a", b"12")
    assert mailbox.put_if_absent("a", b"12")
    assert (mailbox.traffic, mailbox.traffic.bytes_up) == (hasty.traffic, 4)


@given(seed=st.integers(0, 2**32), rates=st.tuples(*[st.floats(0, 0.2)] * 4))
def test_of_many_writers_one_wins_each_key_under_all_faults(seed, rates):
    clock = VirtualClock()
    faulty = FaultyMailbox(Faults(*rates), seed=seed, clock=clock)
    writers = [RetryingMailbox(faulty, deadline_s=1e6, clock=clock, rng=random.Random(seed + me)) for me in range(3)]
    won = {
        (key, me): writer.put_if_absent(f"k/{key}", b"%d" % me)
        for key in range(8)
        for me, writer in sorted(enumerate(writers), key=lambda each: (key + each[0]) % 3)
    }
    faulty.settle()
    for key in range(8):
        (winner,) = (me for me in range(3) if won[key, me])
        assert faulty.inner.get(f"k/{key}") == b"%d" % winner


@given(seed=st.integers(0, 2**32))
def test_the_same_seed_gives_the_same_faults(seed):
    def run() -> tuple[object, ...]:
        clock = VirtualClock()
        faulty = FaultyMailbox(Faults(0.1, 0.1, 0.1, 0.1), seed=seed, clock=clock)
        mailbox = around(faulty, deadline_s=1e6, clock=clock)
        for key in range(20):
            mailbox.put_if_absent(f"k/{key}", b"1")
        mailbox.delete(["k/3"])
        return mailbox.list(""), mailbox.traffic, clock.monotonic(), faulty.injected

    assert run() == run()


@pytest.mark.parametrize(("outage_s", "warnings"), [(1.0, 0), (20.0, 1)])
def test_a_store_that_stays_away_is_said_so_once_and_soon(caplog, outage_s, warnings):
    clock = VirtualClock()

    class Away(MemoryMailbox):
        def get(self, key, *, limit=None):
            if clock.monotonic() < outage_s:
                raise TransientMailboxError("refused")
            return super().get(key, limit=limit)

    with caplog.at_level("WARNING"):
        assert around(Away(), clock=clock).get("a") is None
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == warnings
    for each in told:
        assert each.startswith("get('a') has failed for ") and each.endswith("s: refused")
        assert 2.0 <= float(each.split()[4]) <= 4.0


def test_a_call_that_is_tried_again_gives_up_sooner_once_there_is_hurry_and_nobody_elses_does():
    clock = VirtualClock()

    class Dead(MemoryMailbox):
        def get(self, key, *, limit=None):
            raise TransientMailboxError("no answer")

    mailbox = around(Dead(), deadline_s=1e6, clock=clock)
    other = mailbox.apart()
    clock.call_at(10.0, lambda: mailbox.hurry(5.0))
    clock.call_at(100.0, lambda: other.hurry(5.0))
    with pytest.raises(TransientMailboxError, match="deadline_s=5"):
        mailbox.get("a")
    assert 10.0 <= clock.monotonic() <= 12.0
    with pytest.raises(TransientMailboxError, match="deadline_s=5"):
        other.get("a")
    assert 100.0 <= clock.monotonic() <= 102.0
