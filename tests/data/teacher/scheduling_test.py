from __future__ import annotations

import random
from collections import Counter
from itertools import count, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mixle.data.teacher import messages
from mixle.data.teacher.globs import Globs
from mixle.data.teacher.messages import (
    DONE,
    FAILED,
    MAX_PIECES,
    MAX_PREFETCH,
    NO_MODEL,
    SKIPPED,
    DonePiece,
    ModelState,
    Order,
)
from mixle.data.teacher.run import ProcessIdentity
from mixle.data.teacher.scheduling import AHEAD_S, BACK_OFF_S, Scheduler
from mixle.data.teacher.work import LIVES, PIECE_SLOTS, Student, Worker, runs

IDS = count(1)


def student(slot_count: int = 8, packed_bytes: int = 64) -> Student:
    name = f"/mx00000000-1-{next(IDS):06x}"
    info = messages.SegmentInfo(
        0, "shm", name, slot_count, packed_bytes, b"", None, None, ProcessIdentity("0" * 16, 1, 1)
    )
    return Student(name, slot_count, packed_bytes, info)


def worker(
    *, slot_size: int = 1024, max_batch: int | None = None, patterns: tuple[str, ...] = ("*",), prefetch: int = 2
) -> Worker:
    identity = ProcessIdentity("0" * 16, next(IDS), 1)
    return Worker(identity, slot_size, max_batch, Globs(patterns), prefetch)


def order(first: int, size: int = 1, *, generation: int = 0, token: int | None = None) -> Order:
    return Order(next(IDS).to_bytes(8, "big"), first, size, first if token is None else token, generation)


def model(generation: int, model_id: str = "m") -> ModelState:
    return ModelState(generation, model_id, None, b"")


def scheduler_with(*who: Student | Worker, **settings: float) -> Scheduler:
    scheduler = Scheduler(**settings)
    for one in who:
        if isinstance(one, Student):
            scheduler.add_student(one, 0.0)
        else:
            scheduler.add_worker(one, (), 0.0)
    return scheduler


def given_to(sent: list, whom: Worker) -> list[messages.WorkPiece]:
    return [
        piece for to, message in sent if to is whom and isinstance(message, messages.Work) for piece in message.pieces
    ]


def told(sent: list, whom: Student) -> list[messages.Message]:
    return [message for to, message in sent if to is whom]


def report(
    scheduler: Scheduler, who: Worker, pieces, outcome: int = DONE, message: str | None = None, now=0.0, seconds=1.0
):
    done = [DonePiece(piece.ticket, piece.first_slot, piece.count, outcome, message) for piece in pieces]
    return scheduler.report(who, done, seconds, now)


def slots_of(pieces) -> list[int]:
    return [slot for piece in pieces for slot in range(piece.first_slot, piece.first_slot + piece.count)]


def test_orders_of_one_student_are_given_out_in_their_order():
    asking, working = student(8), worker(prefetch=1)
    scheduler = scheduler_with(asking, working)
    scheduler.request(asking, [order(5), order(2, 2), order(7)], 0.0)
    seen = []
    while pieces := given_to(scheduler.take(0.0), working):
        seen += slots_of(pieces)
        report(scheduler, working, pieces)
    assert seen == [5, 2, 3, 7]


def test_a_completion_is_told_with_its_order_and_slots():
    asking, working = student(), worker()
    scheduler = scheduler_with(asking, working)
    mine = order(3)
    scheduler.request(asking, [mine], 0.0)
    report(scheduler, working, given_to(scheduler.take(0.0), working))
    [complete] = told(scheduler.take(0.0), asking)
    assert complete.pieces == ((mine.order_id, 3, 1),)


def test_two_students_get_equal_shares_whatever_they_have_queued():
    many, few, working = student(64), student(4), worker(prefetch=1)
    scheduler = scheduler_with(many, few, working)
    scheduler.request(many, [order(0, 64)], 0.0)
    scheduler.request(few, [order(0, 4)], 0.0)
    turns = []
    while pieces := given_to(scheduler.take(0.0), working):
        turns.append("few" if few in {ticket.student for ticket in working.tickets.values()} else "many")
        report(scheduler, working, pieces)
    assert sorted(turns[:8]) == ["few"] * 4 + ["many"] * 4
    assert all(first != second for first, second in pairwise(turns[:8]))


def test_a_student_that_was_idle_does_not_make_up_for_it():
    busy, late, working = student(64), student(64), worker(prefetch=1)
    scheduler = scheduler_with(busy, late, working)
    scheduler.request(busy, [order(0, 64)], 0.0)
    for _ in range(20):
        report(scheduler, working, given_to(scheduler.take(0.0), working))
    scheduler.request(late, [order(0, 64)], 0.0)
    before = busy.completed
    for _ in range(20):
        report(scheduler, working, given_to(scheduler.take(0.0), working))
    assert 9 <= busy.completed - before <= 11


def test_the_first_piece_is_one_slot_and_later_ones_take_two_milliseconds():
    asking, working = student(256), worker(prefetch=1)
    scheduler = scheduler_with(asking, working)
    scheduler.request(asking, [order(0, 256)], 0.0)
    sizes = []
    while pieces := given_to(scheduler.take(0.0), working):
        slots = len(slots_of(pieces))
        sizes.append(slots)
        report(scheduler, working, pieces, seconds=slots * 1e-4)
    assert sizes[:3] == [1, 20, 20]


def test_a_fast_worker_gets_at_most_a_full_piece():
    asking, fast, other = student(2048), worker(prefetch=1), worker(prefetch=1)
    scheduler = scheduler_with(asking, fast, other)
    fast.seconds = other.seconds = 1e-7
    scheduler.request(asking, [order(0, 1500)], 0.0)
    sent = scheduler.take(0.0)
    assert {len(slots_of(given_to(sent, one))) for one in (fast, other)} == {PIECE_SLOTS}


@pytest.mark.parametrize("seconds, shares", [(1e-5, (50, 50)), (1e-6, (100, 0)), (1e-2, (1, 1))])
def test_work_is_divided_as_long_as_each_part_is_worth_its_messages(seconds, shares):
    asking, one, other = student(2048), worker(prefetch=1), worker(prefetch=1)
    scheduler = scheduler_with(asking, one, other)
    one.seconds = other.seconds = seconds
    scheduler.request(asking, [order(0, 100)], 0.0)
    sent = scheduler.take(0.0)
    assert (len(slots_of(given_to(sent, one))), len(slots_of(given_to(sent, other)))) == shares


@pytest.mark.parametrize("prefetch", [1, 2, 5])
def test_a_slow_worker_has_no_more_than_its_prefetch_outstanding(prefetch):
    asking, working = student(64), worker(prefetch=prefetch)
    scheduler = scheduler_with(asking, working)
    scheduler.request(asking, [order(0, 64)], 0.0)
    assert len(slots_of(given_to(scheduler.take(0.0), working))) == prefetch


def test_what_is_too_little_for_all_busy_workers_goes_to_who_is_through_first_and_shortly_before():
    asking, early, late = student(64), worker(), worker()
    scheduler = scheduler_with(asking, early, late)
    early.seconds = late.seconds = 1.0
    scheduler.request(asking, [order(0)], 10.0)
    assert given_to(scheduler.take(10.0), early)
    scheduler.request(asking, [order(1)], 10.5)
    assert given_to(scheduler.take(10.5), late)
    scheduler.request(asking, [order(2)], 10.6)
    assert not scheduler.take(10.6)
    due = scheduler.next_due()
    assert due == pytest.approx(11.0 - AHEAD_S)
    assert not scheduler.take(due - 0.01) and scheduler.next_due() == due
    sent = scheduler.take(due)
    assert slots_of(given_to(sent, early)) == [2] and not given_to(sent, late)
    assert scheduler.next_due() > 1e9


def test_what_is_enough_for_all_busy_workers_is_given_ahead():
    asking, one, other = student(64), worker(), worker()
    scheduler = scheduler_with(asking, one, other)
    one.seconds = other.seconds = 1.0
    scheduler.request(asking, [order(0, 4)], 0.0)
    sent = scheduler.take(0.0)
    assert len(given_to(sent, one)) == len(given_to(sent, other)) == 2


def test_what_was_kept_for_a_busy_worker_goes_to_one_that_becomes_idle_sooner_than_expected():
    asking, one, other = student(64), worker(), worker()
    scheduler = scheduler_with(asking, one, other)
    one.seconds = other.seconds = 1.0
    scheduler.request(asking, [order(0), order(1)], 0.0)
    sent = scheduler.take(0.0)
    scheduler.request(asking, [order(2)], 0.1)
    assert not scheduler.take(0.1)
    report(scheduler, other, given_to(sent, other), now=0.2, seconds=0.2)
    assert slots_of(given_to(scheduler.take(0.2), other)) == [2]


def test_a_worker_has_no_more_pieces_than_its_registration_can_name():
    asking, working = student(4 * MAX_PIECES), worker(max_batch=MAX_PIECES, prefetch=MAX_PREFETCH)
    scheduler = scheduler_with(asking, working)
    scheduler.request(asking, [order(first) for first in range(4 * MAX_PIECES)], 0.0)
    pieces = given_to(scheduler.take(0.0), working)
    assert len(pieces) == MAX_PIECES
    report(scheduler, working, pieces[:3])
    assert len(given_to(scheduler.take(0.0), working)) == 3


def test_a_batching_worker_gets_slots_of_several_students_in_one_message():
    first, second, working = student(2), student(2), worker(max_batch=4, prefetch=1)
    scheduler = scheduler_with(first, second, working)
    scheduler.request(first, [order(0, 2)], 0.0)
    scheduler.request(second, [order(0, 2)], 0.0)
    [(_, work)] = scheduler.take(0.0)
    assert len(slots_of(work.pieces)) == 4 and len(work.segments) == 2


def test_idle_workers_are_given_work_before_busy_ones():
    asking, workers = student(32), [worker() for _ in range(20)]
    scheduler = scheduler_with(asking, *workers)
    scheduler.request(asking, [order(slot) for slot in range(20)], 0.0)
    sent = scheduler.take(0.0)
    assert [len(given_to(sent, one)) for one in workers] == [1] * 20


def test_a_worker_gets_only_samples_that_fit_and_models_that_it_serves():
    large, small = student(packed_bytes=2048), student(packed_bytes=64)
    working, other = worker(slot_size=1024, patterns=("a*",)), worker(patterns=("b",))
    scheduler = scheduler_with(large, small, working, other)
    scheduler.switch(model(1, "abc"))
    for one in (large, small):
        scheduler.request(one, [order(0, generation=1)], 0.0)
    sent = scheduler.take(0.0)
    assert {ticket.student for ticket in working.tickets.values()} == {small}
    assert not given_to(sent, other)
    assert scheduler.queued == 1


def test_a_segment_and_a_model_are_described_once_to_each_worker():
    asking, working = student(), worker()
    scheduler = scheduler_with(asking, working)
    seen = []
    for slot in range(3):
        scheduler.request(asking, [order(slot)], 0.0)
        [(_, work)] = scheduler.take(0.0)
        seen.append((len(work.segments), work.model))
        report(scheduler, working, work.pieces)
        scheduler.take(0.0)
    assert seen == [(1, NO_MODEL), (0, None), (0, None)]


def test_a_failed_slot_is_tried_again_later_and_elsewhere_and_given_up_with_the_last_message():
    asking, one, other = student(), worker(prefetch=1), worker(prefetch=1)
    scheduler = scheduler_with(asking, one, other, max_tries=3)
    mine = order(4)
    scheduler.request(asking, [mine], 0.0)
    now, by = 0.0, []
    for attempt in range(3):
        sent = scheduler.take(now)
        who = one if given_to(sent, one) else other
        by.append(who)
        report(scheduler, who, given_to(sent, who), FAILED, f"attempt {attempt}", now)
        assert not [to for to, message in scheduler.take(now) if isinstance(message, messages.Work)]
        now = max(now, scheduler.next_due()) if attempt < 2 else now
        assert attempt == 2 or now >= BACK_OFF_S
        scheduler.advance(now)
        if attempt == 2:
            break
    assert by[0] is not by[1] and by[1] is not by[2]
    assert scheduler.counts.failed == 1 and asking.occupied == 0


def test_a_slot_that_is_given_up_is_told_with_its_tries():
    asking, working = student(), worker()
    scheduler = scheduler_with(asking, working, max_tries=1)
    mine = order(4)
    scheduler.request(asking, [mine], 0.0)
    report(scheduler, working, given_to(scheduler.take(0.0), working), FAILED, "no such layer")
    [failed] = told(scheduler.take(0.0), asking)
    assert (failed.order_id, failed.first_slot, failed.count) == (mine.order_id, 4, 1)
    assert (failed.message, failed.tries) == ("no such layer", 1)


def test_a_lone_worker_is_tried_again_although_it_failed():
    asking, working = student(), worker()
    scheduler = scheduler_with(asking, working)
    scheduler.request(asking, [order(0)], 0.0)
    report(scheduler, working, given_to(scheduler.take(0.0), working), FAILED, "once")
    now = scheduler.next_due()
    scheduler.advance(now)
    assert given_to(scheduler.take(now), working)


def test_the_work_of_a_dead_worker_goes_to_another_and_the_student_hears_nothing():
    asking, dying, other = student(), worker(), worker()
    scheduler = scheduler_with(asking, dying)
    scheduler.request(asking, [order(0), order(1)], 0.0)
    lost = slots_of(given_to(scheduler.take(0.0), dying))
    scheduler.add_worker(other, (), 0.0)
    scheduler.remove_worker(dying, 0.0, died=True)
    sent = scheduler.take(0.0)
    assert sorted(slots_of(given_to(sent, other))) == sorted(lost)
    assert not told(sent, asking)


def test_a_slot_that_every_worker_dies_of_is_given_up():
    asking = student()
    scheduler = scheduler_with(asking)
    scheduler.request(asking, [order(0)], 0.0)
    deaths = 0
    while scheduler.queued:
        dying = worker()
        scheduler.add_worker(dying, (), 0.0)
        scheduler.take(0.0)
        scheduler.remove_worker(dying, 0.0, died=True)
        deaths += 1
    assert deaths == LIVES + 1
    assert isinstance(told(scheduler.take(0.0), asking)[0], messages.Failed)


def test_a_silent_workers_slots_are_lost_but_given_to_nobody_until_it_is_done():
    asking, silent, other = student(), worker(), worker()
    scheduler = scheduler_with(asking, silent)
    mine = order(0)
    scheduler.request(asking, [mine], 0.0)
    pieces = given_to(scheduler.take(0.0), silent)
    scheduler.add_worker(other, (), 0.0)
    scheduler.silence_worker(silent, True)
    sent = scheduler.take(0.0)
    assert told(sent, asking) == [messages.Lost(pieces=((mine.order_id, 0, 1),), worker=silent.identity, dead=False)]
    assert not given_to(sent, other)
    scheduler.silence_worker(silent, False)
    report(scheduler, silent, pieces)
    assert told(scheduler.take(0.0), asking) == [messages.Complete(pieces=((mine.order_id, 0, 1),), lane=None)]


def test_a_silent_worker_that_dies_gives_its_slots_back_for_good():
    asking, silent = student(), worker()
    scheduler = scheduler_with(asking, silent)
    mine = order(0)
    scheduler.request(asking, [mine], 0.0)
    scheduler.take(0.0)
    scheduler.silence_worker(silent, True)
    scheduler.take(0.0)
    scheduler.remove_worker(silent, 0.0, died=True)
    assert told(scheduler.take(0.0), asking) == [
        messages.Lost(pieces=((mine.order_id, 0, 1),), worker=silent.identity, dead=True)
    ]
    assert scheduler.request(asking, [order(0)], 0.0) is None


@pytest.mark.parametrize("end", ["died", FAILED, SKIPPED])
def test_what_was_reported_lost_and_is_not_made_after_all_is_left_to_its_student(end):
    asking, silent, other = student(), worker(), worker()
    scheduler = scheduler_with(asking, silent)
    mine = order(0)
    scheduler.request(asking, [mine], 0.0)
    pieces = given_to(scheduler.take(0.0), silent)
    scheduler.silence_worker(silent, True)
    scheduler.take(0.0)
    scheduler.silence_worker(silent, False)
    scheduler.add_worker(other, (), 0.0)
    if end == "died":
        scheduler.remove_worker(silent, 0.0, died=True)
    else:
        report(scheduler, silent, pieces, end)
    sent = scheduler.take(0.0)
    assert told(sent, asking) == [messages.Lost(pieces=((mine.order_id, 0, 1),), worker=silent.identity, dead=True)]
    assert not given_to(sent, other) and scheduler.queued == 0
    assert scheduler.request(asking, [order(0, token=99)], 0.0) is None


def test_what_waits_for_a_report_and_was_reported_lost_is_left_to_its_student():
    asking, silent, other = student(), worker(), worker()
    scheduler = scheduler_with(asking, silent)
    first, second = order(0), order(0, token=99)
    scheduler.request(asking, [first], 0.0)
    scheduler.take(0.0)
    scheduler.request(asking, [second], 0.0)  # it saw the first complete
    scheduler.silence_worker(silent, True)
    scheduler.take(0.0)
    scheduler.add_worker(other, (), 0.0)
    scheduler.remove_worker(silent, 0.0, died=True)
    sent = scheduler.take(0.0)
    assert told(sent, asking) == [messages.Lost(pieces=((second.order_id, 0, 1),), worker=silent.identity, dead=True)]
    assert not given_to(sent, other) and scheduler.queued == asking.occupied == 0


def test_a_student_that_knows_better_may_order_a_lost_slot_again():
    asking, silent = student(), worker()
    scheduler = scheduler_with(asking, silent)
    scheduler.request(asking, [order(0)], 0.0)
    late = given_to(scheduler.take(0.0), silent)
    scheduler.silence_worker(silent, True)
    scheduler.take(0.0)
    assert scheduler.request(asking, [order(0, token=99)], 0.0) is None
    assert report(scheduler, silent, late) == 1
    assert scheduler.queued == 1


def test_a_slot_is_in_one_order_at_a_time():
    asking = student()
    scheduler = scheduler_with(asking)
    assert scheduler.request(asking, [order(0, 4)], 0.0) is None
    assert "slots 3 to 5" in scheduler.request(asking, [order(3, 3)], 0.0)
    assert "there are 8" in scheduler.request(asking, [order(7, 2)], 0.0)
    assert scheduler.queued == 4


def test_an_order_of_a_slot_that_is_complete_but_not_reported_waits_for_the_report():
    asking, working = student(), worker(prefetch=1)
    scheduler = scheduler_with(asking, working)
    scheduler.request(asking, [order(0)], 0.0)
    pieces = given_to(scheduler.take(0.0), working)
    early = order(0, token=99)
    assert scheduler.request(asking, [early], 0.0) is None
    assert scheduler.take(0.0) == []
    report(scheduler, working, pieces)
    [(_, work)] = scheduler.take(0.0)
    assert work.pieces[0].token == 99
    report(scheduler, working, work.pieces)
    assert told(scheduler.take(0.0), asking) == [messages.Complete(pieces=((early.order_id, 0, 1),), lane=None)]


def test_a_switch_drops_what_is_queued_and_what_comes_of_the_older_generation():
    asking, working = student(), worker(prefetch=1)
    scheduler = scheduler_with(asking, working)
    orders = [order(0), order(1)]
    scheduler.request(asking, orders, 0.0)
    begun = given_to(scheduler.take(0.0), working)
    scheduler.switch(model(1))
    late = order(2)
    scheduler.request(asking, [late], 0.0)
    [dropped] = told(scheduler.take(0.0), asking)
    assert dropped.pieces == ((orders[1].order_id, 1, 1), (late.order_id, 2, 1)) and dropped.model == model(1)
    report(scheduler, working, begun, SKIPPED)
    [dropped] = told(scheduler.take(0.0), asking)
    assert dropped.pieces == ((orders[0].order_id, 0, 1),)
    assert scheduler.counts.stale == 3 and asking.occupied == 0
    assert scheduler.counts.requeued == 0  # nothing was lost


def test_an_order_of_a_generation_that_the_broker_has_not_heard_of_is_dropped_until_it_has():
    asking, working = student(), worker()
    scheduler = scheduler_with(asking, working)
    early = order(0, generation=7)
    assert scheduler.request(asking, [early], 0.0) is None
    [dropped] = told(scheduler.take(0.0), asking)
    assert dropped.pieces == ((early.order_id, 0, 1),) and asking.occupied == 0
    scheduler.switch(model(7))
    scheduler.request(asking, [order(0, generation=7)], 0.0)
    assert slots_of(given_to(scheduler.take(0.0), working)) == [0]


def test_a_cancelled_order_is_dropped_and_not_tried_again():
    asking, working = student(), worker(prefetch=1)
    scheduler = scheduler_with(asking, working)
    mine = order(0, 3)
    scheduler.request(asking, [mine], 0.0)
    begun = given_to(scheduler.take(0.0), working)
    scheduler.cancel(asking, [mine.order_id])
    [dropped] = told(scheduler.take(0.0), asking)
    assert dropped.pieces == ((mine.order_id, 1, 2),)
    report(scheduler, working, begun, FAILED, "too late")
    [dropped] = told(scheduler.take(0.0), asking)
    assert dropped.pieces == ((mine.order_id, 0, 1),)


def test_a_removed_students_work_is_closed_at_the_workers():
    asking, working = student(), worker(prefetch=1)
    scheduler = scheduler_with(asking, working)
    scheduler.request(asking, [order(0, 8)], 0.0)
    begun = given_to(scheduler.take(0.0), working)
    scheduler.remove_student(asking)
    assert scheduler.take(0.0) == [(working, messages.Retire(segment_ids=(0,)))]
    assert scheduler.queued == 0
    assert report(scheduler, working, begun) == 0
    assert scheduler.take(0.0) == []


def test_a_report_about_anothers_ticket_or_other_slots_changes_nothing():
    asking, working, liar = student(), worker(), worker()
    scheduler = scheduler_with(asking, working)
    scheduler.request(asking, [order(0)], 0.0)
    [piece] = given_to(scheduler.take(0.0), working)
    scheduler.add_worker(liar, (), 0.0)
    assert report(scheduler, liar, [piece]) == 1
    assert report(scheduler, working, [piece._replace(first_slot=1)]) == 1
    assert report(scheduler, working, [piece, piece]) == 1
    assert scheduler.counts.completed == 1


def test_parts_of_a_ticket_may_be_reported_in_any_order():
    asking, working = student(), worker(max_batch=8)
    scheduler = scheduler_with(asking, working)
    scheduler.request(asking, [order(0, 8)], 0.0)
    [piece] = given_to(scheduler.take(0.0), working)
    for first in (6, 0, 4, 2):
        assert report(scheduler, working, [piece._replace(first_slot=first, count=2)]) == 0
    assert asking.occupied == 0 and not working.tickets


def test_a_worker_that_takes_longer_than_asked_loses_its_slots():
    asking, working = student(), worker()
    scheduler = scheduler_with(asking, working, order_timeout_s=2.0)
    scheduler.request(asking, [order(0)], 0.0)
    scheduler.take(0.0)
    scheduler.check_timeouts(1.9)
    assert scheduler.take(1.9) == []
    scheduler.check_timeouts(2.1)
    assert isinstance(told(scheduler.take(2.1), asking)[0], messages.Lost)


def test_after_a_restart_what_a_worker_holds_is_tied_to_the_resent_order_whoever_comes_first():
    for worker_first in (True, False):
        asking, holder, other = student(), worker(), worker()
        scheduler = scheduler_with(asking, other, holding_until=1.0)
        held = messages.HeldPiece(b"t" * 16, asking.segment, 2, 3, 102)
        mine = order(0, 8, token=100)
        if worker_first:
            scheduler.add_worker(holder, [held], 0.0)
        assert scheduler.request(asking, [mine], 0.1, resent=True) is None
        if not worker_first:
            scheduler.add_worker(holder, [held], 0.2)
        assert scheduler.take(0.9) == []
        scheduler.advance(1.0)
        seen = []
        while pieces := given_to(sent := scheduler.take(1.0), other) + given_to(sent, holder):
            seen += slots_of(pieces)
            for who in (other, holder):
                report(scheduler, who, given_to(sent, who))
        assert sorted(seen) == [0, 1, 5, 6, 7]
        scheduler.report(holder, [DonePiece(b"t" * 16, 2, 3, DONE, None)], 1.0, 1.0)
        assert told(scheduler.take(1.0), asking) == [messages.Complete(pieces=((mine.order_id, 2, 3),), lane=None)]
        assert asking.occupied == 0


def test_a_resent_order_with_other_tokens_waits_for_the_one_that_still_writes():
    asking, holder = student(), worker()
    scheduler = scheduler_with(asking)
    scheduler.add_worker(holder, [messages.HeldPiece(b"t" * 16, asking.segment, 0, 2, 100)], 0.0)
    scheduler.request(asking, [order(0, 2, token=500)], 0.0, resent=True)
    assert scheduler.take(0.0) == []
    scheduler.report(holder, [DonePiece(b"t" * 16, 0, 2, DONE, None)], 1.0, 0.0)
    pieces = given_to(scheduler.take(0.0), holder)
    assert slots_of(pieces) == [0] or slots_of(pieces) == [0, 1]
    assert pieces[0].token == 500


def test_a_slot_that_its_student_saw_complete_is_free_for_the_next_order_when_its_worker_dies():
    asking, dying = student(), worker(max_batch=4)
    scheduler = scheduler_with(asking, dying)
    mine = order(0, 4)
    scheduler.request(asking, [mine], 0.0)
    scheduler.take(0.0)
    scheduler.restart_student(asking)
    scheduler.request(asking, [mine._replace(first_slot=2, count=2, token=mine.token + 2)], 0.0, resent=True)
    scheduler.remove_worker(dying, 0.0, died=True)
    assert scheduler.request(asking, [order(0, 2, token=900)], 0.0) is None
    assert scheduler.queued == 4


def test_what_is_held_back_is_not_dropped_at_a_switch_before_workers_could_say_that_they_write_it():
    asking, returning = student(), worker()
    scheduler = scheduler_with(asking, holding_until=1.0)
    writes, nobodys = order(0), order(1)
    scheduler.request(asking, [writes, nobodys], 0.0, resent=True)
    scheduler.switch(model(1))
    assert told(scheduler.take(0.5), asking) == []
    held = messages.HeldPiece(b"t" * 16, asking.segment, 0, 1, writes.token)
    scheduler.add_worker(returning, [held], 0.5)
    scheduler.advance(1.0)
    [dropped] = told(scheduler.take(1.0), asking)
    assert dropped.pieces == ((nobodys.order_id, 1, 1),)
    scheduler.report(returning, [DonePiece(held.ticket, 0, 1, SKIPPED, None)], 0.0, 1.0)
    [dropped] = told(scheduler.take(1.0), asking)
    assert dropped.pieces == ((writes.order_id, 0, 1),)


def test_a_lost_slot_gets_its_final_word_although_its_student_registered_again():
    asking, silent = student(), worker()
    scheduler = scheduler_with(asking, silent)
    mine = order(0)
    scheduler.request(asking, [mine], 0.0)
    [piece] = given_to(scheduler.take(0.0), silent)
    scheduler.silence_worker(silent, True)
    scheduler.restart_student(asking)
    scheduler.take(0.0)
    scheduler.silence_worker(silent, False)
    assert report(scheduler, silent, [piece]) == 0
    assert told(scheduler.take(0.0), asking) == [messages.Complete(pieces=((mine.order_id, 0, 1),), lane=None)]


def test_an_order_that_is_resent_twice_is_made_once():
    asking, working = student(), worker(prefetch=1)
    scheduler = scheduler_with(asking, working)
    mine = order(0, 4)
    scheduler.request(asking, [mine], 0.0)
    scheduler.take(0.0)
    for _ in range(2):
        assert scheduler.request(asking, [mine], 0.0, resent=True) is None
    assert scheduler.queued + working.outstanding == 4


def test_a_worker_that_registers_again_gets_anew_what_never_reached_it():
    asking, working = student(), worker()
    scheduler = scheduler_with(asking, working)
    scheduler.request(asking, [order(0), order(1)], 0.0)
    first, second = given_to(scheduler.take(0.0), working)
    held = messages.HeldPiece(first.ticket, asking.segment, first.first_slot, 1, first.token)
    scheduler.restart_worker(working, [held], 0.0)
    [(_, work)] = scheduler.take(0.0)
    assert [piece.first_slot for piece in work.pieces] == [second.first_slot]
    assert work.segments and work.model is not None


def test_nothing_is_passed_on_for_a_silent_student_until_it_returns():
    asking, working = student(), worker()
    scheduler = scheduler_with(asking, working)
    scheduler.silence_student(asking, True)
    scheduler.request(asking, [order(0)], 0.0)
    assert scheduler.take(0.0) == []
    scheduler.silence_student(asking, False)
    assert given_to(scheduler.take(0.0), working)


@given(bits=st.integers(0, 2**70))
def test_runs_are_the_ones_of_the_binary_form(bits):
    rebuilt = 0
    before = -1
    for first, size in runs(bits):
        assert first > before
        before = first + size
        rebuilt |= ((1 << size) - 1) << first
    assert rebuilt == bits


class Play:
    """Students, workers and a broker's scheduler in which anything happens; each step checks the promises."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self.now = 0.0
        self.scheduler = Scheduler(max_tries=2, random=lambda size: self.dice.randbytes(size))
        self.students: list[Student] = []
        self.workers: list[Worker] = []
        self.silent: set[Worker] = set()
        self.has: dict[Worker, dict[bytes, messages.WorkPiece]] = {}
        self.writers: dict[tuple[str, int], Worker] = {}
        self.segments: dict[tuple[Worker, int], str] = {}
        self.open: dict[Student, dict[int, Order]] = {}  # slot -> the order of it alone whose final word is due
        self.words: Counter[str] = Counter()

    def step(self) -> None:
        self.now += self.dice.random() * 0.1
        getattr(self, self.dice.choice(self.MOVES))()
        self.deliver()

    MOVES = (
        *("order",) * 6,
        *("work",) * 8,
        *("join_student", "join_worker", "kill_worker", "kill_student", "hush", "speak"),
        *("cancel", "switch", "wait", "rejoin_worker", "rejoin_student", "restart_broker", "order_early"),
    )

    def join_student(self) -> None:
        if len(self.students) < 4:
            one = student(self.dice.randint(1, 12))
            self.students.append(one)
            self.open[one] = {}
            self.scheduler.add_student(one, self.now)

    def join_worker(self) -> None:
        if len(self.workers) < 5:
            one = worker(max_batch=self.dice.choice([None, None, 3]), prefetch=self.dice.randint(1, 3))
            one.seconds = self.dice.choice([None, 1e-3, 1e-5])
            self.workers.append(one)
            self.has[one] = {}
            self.scheduler.add_worker(one, (), self.now)

    def order(self) -> None:
        if not self.students:
            return
        one = self.dice.choice(self.students)
        free = [slot for slot in range(one.slot_count) if slot not in self.open[one]]
        free = [slot for slot in free if self.writers.get((one.segment, slot)) not in self.silent]
        if not free:
            return
        first = self.dice.choice(free)
        size = 1
        while first + size in free and self.dice.random() < 0.7:
            size += 1
        generation = self.scheduler.model.generation - (self.dice.random() < 0.1)
        made = order(first, size, generation=max(0, generation), token=self.dice.getrandbits(64))
        assert self.scheduler.request(one, [made], self.now) is None
        for i in range(size):
            token = (made.token + i) % 2**64
            self.open[one][first + i] = Order(made.order_id, first + i, 1, token, made.generation)

    def order_early(self) -> None:
        """Order slots again that are complete in memory and not reported yet."""
        if not self.students:
            return
        one = self.dice.choice(self.students)
        early = [slot for slot in self.open[one] if (one.segment, slot) in self.writers]
        early = [slot for slot in early if self.writers[one.segment, slot] not in self.silent]
        if early:
            slot = self.dice.choice(early)
            made = order(slot, generation=self.scheduler.model.generation, token=self.dice.getrandbits(64))
            self.open[one][slot] = made
            assert self.scheduler.request(one, [made], self.now) is None

    def work(self) -> None:
        busy = [one for one in self.workers if self.has[one] and one not in self.silent]
        if not busy:
            return
        one = self.dice.choice(busy)
        piece = self.dice.choice(list(self.has[one].values()))
        outcome = self.dice.choice([DONE, DONE, DONE, FAILED, SKIPPED])
        size = self.dice.randint(1, piece.count)
        self.leave(one, piece.ticket, size)
        done = DonePiece(piece.ticket, piece.first_slot, size, outcome, "failed")
        assert self.scheduler.report(one, [done], self.dice.random() * 1e-3, self.now) == 0

    def leave(self, one: Worker, ticket: bytes, size: int) -> None:
        piece = self.has[one].pop(ticket)
        segment = self.segments[one, piece.segment_id]
        for slot in range(piece.first_slot, piece.first_slot + size):
            assert self.writers.pop((segment, slot)) is one
        if size < piece.count:
            self.has[one][ticket] = piece._replace(first_slot=piece.first_slot + size, count=piece.count - size)

    def kill_worker(self) -> None:
        if self.workers and self.dice.random() < 0.5:
            one = self.workers.pop(self.dice.randrange(len(self.workers)))
            for piece in list(self.has[one].values()):
                self.leave(one, piece.ticket, piece.count)
            self.silent.discard(one)
            self.scheduler.remove_worker(one, self.now, died=True)

    def kill_student(self) -> None:
        if self.students and self.dice.random() < 0.3:
            one = self.students.pop(self.dice.randrange(len(self.students)))
            del self.open[one]
            self.scheduler.remove_student(one)

    def hush(self) -> None:
        if self.workers:
            one = self.dice.choice(self.workers)
            self.silent.add(one)
            self.scheduler.silence_worker(one, True)

    def speak(self) -> None:
        if self.silent:
            one = self.dice.choice(sorted(self.silent, key=lambda one: one.identity))
            self.silent.discard(one)
            self.scheduler.silence_worker(one, False)

    def cancel(self) -> None:
        if self.students:
            one = self.dice.choice(self.students)
            ids = {made.order_id for made in self.open[one].values()}
            if ids:
                self.scheduler.cancel(one, [self.dice.choice(sorted(ids))])

    def switch(self) -> None:
        if self.dice.random() < 0.5:
            self.scheduler.switch(model(self.scheduler.model.generation + 1))

    def wait(self) -> None:
        if self.scheduler.next_due() < float("inf"):
            self.now = max(self.now, self.scheduler.next_due())

    def rejoin_worker(self) -> None:
        """Register again, some of what was sent having been lost on the way."""
        if not self.workers:
            return
        one = self.dice.choice(self.workers)
        for piece in list(self.has[one].values()):
            if self.dice.random() < 0.5:
                self.leave(one, piece.ticket, piece.count)
        held = [
            messages.HeldPiece(p.ticket, self.segments[one, p.segment_id], p.first_slot, p.count, p.token)
            for p in self.has[one].values()
        ]
        self.silent.discard(one)
        self.scheduler.restart_worker(one, held, self.now)

    def rejoin_student(self) -> None:
        """Register again and send again what is outstanding."""
        if self.students:
            one = self.dice.choice(self.students)
            self.scheduler.restart_student(one)
            self.resend(one)

    def resend(self, one: Student) -> None:
        for slot, made in list(self.open[one].items()):
            if (
                self.writers.get((one.segment, slot), None) in {*self.workers} - self.silent
                and self.dice.random() < 0.2
            ):
                del self.open[one][slot]  # it saw it complete
            elif self.dice.random() < 0.1:  # it may also have changed its mind
                self.open[one][slot] = made._replace(order_id=self.dice.randbytes(8), token=self.dice.getrandbits(64))
        assert self.scheduler.request(one, self.open[one].values(), self.now, resent=True) is None

    def restart_broker(self) -> None:
        """Lose all that the broker knew; everybody registers again, in any order."""
        if self.dice.random() < 0.5:
            return
        before = self.scheduler
        self.scheduler = Scheduler(
            max_tries=2, holding_until=self.now + 1.0, random=lambda size: self.dice.randbytes(size)
        )
        self.scheduler.switch(before.model)
        self.silent.clear()
        everybody = [*self.students, *self.workers]
        self.dice.shuffle(everybody)
        self.students, self.workers = [], []
        for old in everybody:
            if isinstance(old, Student):
                new = Student(old.segment, old.slot_count, old.packed_bytes, old.info)
                self.students.append(new)
                self.open[new] = self.open.pop(old)
                self.scheduler.add_student(new, self.now)
                self.resend(new)
            else:
                new = Worker(old.identity, old.slot_size, old.max_batch, old.globs, old.prefetch)
                self.workers.append(new)
                self.has[new] = self.has.pop(old)
                held = []
                for piece in self.has[new].values():
                    segment = self.segments[old, piece.segment_id]
                    self.segments[new, piece.segment_id] = segment
                    slots = range(piece.first_slot, piece.first_slot + piece.count)
                    self.writers |= {(segment, slot): new for slot in slots}
                    held.append(messages.HeldPiece(piece.ticket, segment, piece.first_slot, piece.count, piece.token))
                self.scheduler.add_worker(new, held, self.now)
                new.next_segment_id = 1_000 * len(self.segments)

    def deliver(self) -> None:
        self.scheduler.advance(self.now)
        for whom, message in self.scheduler.take(self.now):
            match message:
                case messages.Work():
                    assert whom not in self.silent
                    for info in message.segments:
                        self.segments[whom, info.segment_id] = info.name
                    for piece in message.pieces:
                        segment = self.segments[whom, piece.segment_id]
                        self.has[whom][piece.ticket] = piece
                        for slot in range(piece.first_slot, piece.first_slot + piece.count):
                            assert (segment, slot) not in self.writers, "two writers in one slot"
                            self.writers[segment, slot] = whom
                case messages.Complete() | messages.Dropped():
                    for order_id, first, size in message.pieces:
                        self.settle(whom, order_id, first, size)
                case messages.Failed():
                    self.settle(whom, message.order_id, message.first_slot, message.count)
                case messages.Lost(dead=True):
                    for order_id, first, size in message.pieces:
                        self.settle(whom, order_id, first, size)
                case messages.Lost():
                    for order_id, first, size in message.pieces:
                        assert all(self.open[whom][slot].order_id == order_id for slot in range(first, first + size))
            self.words[type(message).__name__] += 1

    def settle(self, whom: Student, order_id: bytes, first: int, size: int) -> None:
        for slot in range(first, first + size):
            assert self.open[whom].pop(slot).order_id == order_id, "a word about a slot that is not in this order"
            assert (whom.segment, slot) not in self.writers, "a final word while somebody writes"

    def finish(self) -> None:
        """Let everybody return and work; then every slot has had its final word."""
        for one in list(self.silent):
            self.silent.discard(one)
            self.scheduler.silence_worker(one, False)
        self.join_worker()
        for _ in range(2_000):
            self.deliver()
            if not any(self.open.values()) and not any(self.has.values()):
                break
            self.wait()
            for one in self.workers:
                for piece in list(self.has[one].values()):
                    self.leave(one, piece.ticket, piece.count)
                    report(self.scheduler, one, [piece], now=self.now, seconds=1e-4)
        assert not any(self.open.values()), "a slot without a final word"
        assert all(one.occupied == 0 and one.queued == 0 for one in self.students)
        assert self.scheduler.queued == 0


@given(seed=st.integers(0, 2**32))
@settings(max_examples=100, deadline=None)
def test_whatever_happens_no_slot_has_two_writers_and_each_gets_one_final_word(seed):
    play = Play(seed)
    for _ in range(300):
        play.step()
    play.finish()
    assert play.words["Work"] or not play.scheduler.counts.ordered


# ---- direct orders


def lane_after_a_sample(asking: Student, working: Worker, *, seconds: float = 1e-4) -> str | None:
    scheduler = scheduler_with(asking, working)
    scheduler.request(asking, [order(0)], 0.0)
    report(scheduler, working, given_to(scheduler.take(0.0), working), seconds=seconds)
    (complete,) = told(scheduler.take(0.0), asking)
    return complete.lane


def listening(**identity: str) -> Worker:
    one = worker()
    one.lane, one.identity = "1-00000000", one.identity._replace(**identity)
    return one


def test_a_student_may_ask_the_idle_worker_that_made_its_last_sample():
    assert lane_after_a_sample(student(), listening()) == "1-00000000"


@pytest.mark.parametrize("case", ["deaf", "slow", "another host", "a file", "the network"])
def test_a_student_may_not_ask_a_worker_that_is(case):
    asking, working = student(), listening(**({"host": "1" * 16} if case == "another host" else {}))
    if case == "deaf":
        working.lane = None
    if case == "a file":
        asking.info = asking.info._replace(medium="file")
    if case == "the network":
        asking.info = asking.info._replace(data_endpoint="tcp://127.0.0.1:1")
    assert lane_after_a_sample(asking, working, seconds=0.5 if case == "slow" else 1e-4) is None


def test_no_student_may_order_past_a_broker_that_limits_what_an_order_takes():
    asking, working = student(), listening()
    scheduler = scheduler_with(asking, working, order_timeout_s=60.0)
    scheduler.request(asking, [order(0)], 0.0)
    report(scheduler, working, given_to(scheduler.take(0.0), working), seconds=1e-4)
    assert told(scheduler.take(0.0), asking)[0].lane is None


def test_a_student_may_not_ask_a_worker_that_has_or_will_have_work_of_the_brokers():
    asking, other, working = student(), student(), listening()
    scheduler = scheduler_with(asking, other, working)
    scheduler.request(asking, [order(0)], 0.0)
    pieces = given_to(scheduler.take(0.0), working)
    scheduler.request(other, [order(0)], 0.0)
    given_to(scheduler.take(0.0), working)
    report(scheduler, working, pieces, seconds=1e-4)
    assert told(scheduler.take(0.0), asking)[0].lane is None


def test_what_a_worker_served_directly_is_counted_and_for_a_student_that_is_still_there():
    asking, working = student(), worker()
    scheduler = scheduler_with(asking, working)
    scheduler.request(asking, [order(0)], 0.0)
    report(scheduler, working, given_to(scheduler.take(0.0), working))
    scheduler.served(working, [messages.ServedSlots(0, 7), messages.ServedSlots(99, 1_000)], 0.7)
    assert scheduler.counts.direct == 1_007 and scheduler.counts.completed == scheduler.counts.ordered == 1_008
    assert asking.completed == 8 and working.completed == 1_008
