from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from mixle.data.teacher.orders import Orders, SlotState


def placed(slot_count=4, size=1, generation=1):
    orders = Orders(slot_count, size=size)
    (order,) = orders.place(generation)
    return orders, order


def land(orders, order, *slots):
    """Complete slots of an order, and hear the broker say so."""
    complete = np.zeros(orders.usable, bool)
    complete[list(slots)] = True
    orders.landed(complete)
    for slot in slots:
        orders.ended(order.order_id, slot, 1)


def states(orders):
    return [SlotState(state).name for state in orders.state]


# ---- ordering


def test_neighbouring_free_slots_make_one_order():
    orders, order = placed(slot_count=6)
    assert order[1:3] == (0, 6) and order.generation == 1 and len(order.order_id) == 8
    assert orders.outstanding == 6 and orders.free == 0


def test_separate_free_slots_make_an_order_each_with_tokens_of_their_own():
    orders, first = placed(slot_count=5)
    land(orders, first, 0, 3, 4)
    for _ in range(3):
        orders.release(orders.take())
    again = orders.place(1)
    assert [(order.first_slot, order.count) for order in again] == [(0, 1), (3, 2)]
    tokens = [(first.token + i) % 2**64 for i in range(5)]
    tokens += [(order.token + i) % 2**64 for order in again for i in range(order.count)]
    assert len(set(tokens)) == 8
    assert len({first.order_id, *(order.order_id for order in again)}) == 3


def test_tokens_wrap_at_64_bits():
    orders = Orders(4)
    orders._next_token = 2**64 - 2
    (order,) = orders.place(1)
    assert order.token == 2**64 - 2
    assert orders.token.tolist() == [2**64 - 2, 2**64 - 1, 0, 1]


def test_slots_beyond_the_last_whole_group_are_not_ordered():
    _, order = placed(slot_count=7, size=3)
    assert (order.first_slot, order.count) == (0, 6)


@pytest.mark.parametrize(
    ("slot_count", "size", "error"), [(0, 1, ValueError), (4, 0, ValueError), (True, 1, TypeError)]
)
def test_a_count_that_is_not_a_positive_integer_is_refused(slot_count, size, error):
    with pytest.raises(error, match=r"slot_count|size"):
        Orders(slot_count, size=size)


def test_a_group_that_does_not_fit_is_refused_with_the_count_that_would():
    with pytest.raises(ValueError, match="size=8 does not fit slot_count=6; have at least 8 slots, better 16"):
        Orders(6, size=8)


# ---- handing out


def test_a_group_is_taken_only_when_all_of_it_is_there():
    orders, _ = placed(slot_count=4, size=2)
    orders.landed(np.array([True, False, False, False]))
    assert orders.take() is None
    orders.landed(np.array([True, True, True]), first=1)
    assert orders.take() == 0
    assert orders.take() == 2
    assert orders.take() is None


def test_what_is_held_is_not_ordered_again_before_its_release():
    orders, order = placed(slot_count=4, size=2)
    land(orders, order, 0, 1, 2, 3)
    first = orders.take()
    assert orders.place(1) == []
    orders.release(first)
    assert [(order.first_slot, order.count) for order in orders.place(1)] == [(first, 2)]


@pytest.mark.parametrize("slot", [0, 1, 2, -1, 99])
def test_a_slot_that_is_not_held_is_not_released(slot):
    orders, _ = placed(slot_count=4, size=2)
    with pytest.raises(ValueError, match=f"slot_id={slot} is not held"):
        orders.release(slot)


def test_a_slot_is_not_ordered_again_before_the_broker_has_said_its_last_word():
    orders, order = placed(slot_count=2)
    orders.landed(np.array([True, True]))
    orders.release(orders.take())
    assert orders.place(1) == [] and orders.free == 0
    orders.ended(order.order_id, 0, 2)
    assert [(again.first_slot, again.count) for again in orders.place(1)] == [(0, 1)]


def test_a_new_broker_has_nothing_to_say_of_what_is_complete():
    orders, _ = placed(slot_count=2)
    orders.landed(np.array([True, True]))
    orders.release(orders.take())
    assert orders.unfinished() == []
    assert [(again.first_slot, again.count) for again in orders.place(1)] == [(0, 1)]


# ---- failures


def test_no_broker_has_anything_to_say_of_what_was_ordered_directly():
    orders = Orders(1)
    (order,) = orders.place(1, directly=True)
    assert orders.unfinished() == []
    orders.land(0)
    orders.release(orders.take())
    assert orders.free == 1 and not orders.unsettled
    (again,) = orders.place(1)
    assert again.token == (order.token + 1) % 2**64 and orders.unfinished() == [again]


def test_a_direct_order_that_nobody_will_fill_is_withdrawn_and_its_slot_ordered_anew():
    orders = Orders(3)
    (order,) = orders.place(1, directly=True)
    orders.supersede(2)
    orders.withdraw(order)
    assert orders.free == 3 and orders.outstanding == 0
    (again,) = orders.place(2)
    orders.withdraw(order)  # of the new order it says nothing
    assert orders.outstanding == 3 and again.order_id != order.order_id


def test_a_slot_that_lands_alone_completes_its_group_and_counts_once():
    orders, _ = placed(slot_count=4, size=2)
    orders.land(3)
    assert orders.take() is None
    orders.land(2)
    orders.land(2)
    assert orders.take() == 2 and orders.take() is None
    assert states(orders) == ["ORDERED", "ORDERED", "HELD", "HELD"]


def test_free_slots_that_wait_for_the_brokers_last_word_are_told_from_those_that_do_not():
    orders, order = placed(slot_count=2)
    assert not orders.unsettled
    orders.land(0)
    orders.release(orders.take())
    assert orders.unsettled and orders.free == 0
    orders.ended(order.order_id, 0, 1)
    assert not orders.unsettled and orders.free == 1


def test_a_failed_piece_is_ordered_anew_alone():
    orders, order = placed()
    assert orders.ended(order.order_id, 1, 2) == 2
    assert [(again.first_slot, again.count) for again in orders.place(1)] == [(1, 2)]


@pytest.mark.parametrize("claim", [(0, 0), (-1, 2), (3, 2), (0, 2**63)])
def test_a_message_about_slots_that_are_not_of_the_order_changes_nothing(claim):
    orders, order = placed()
    assert orders.ended(order.order_id, *claim) == 0
    assert orders.lost(order.order_id, *claim, writer="w", dead=True) == 0
    assert orders.outstanding == 4


def test_a_message_about_an_order_of_before_changes_nothing():
    orders, before = placed()
    orders.ended(before.order_id, 0, 4)
    orders.place(1)
    assert orders.ended(before.order_id, 0, 4) == 0
    assert orders.outstanding == 4


def test_a_message_about_slots_that_are_complete_changes_nothing():
    orders, order = placed()
    orders.landed(np.ones(4, bool))
    assert orders.ended(order.order_id, 0, 4) == 0
    assert orders.ready == 4


def test_the_slots_of_a_dead_worker_are_free_at_once():
    orders, order = placed()
    assert orders.lost(order.order_id, 1, 1, writer="w", dead=True) == 1
    assert orders.free == 1


def test_the_slots_of_a_silent_worker_are_not_ordered_until_it_is_dead():
    orders, order = placed()
    orders.lost(order.order_id, 1, 2, writer="w", dead=False)
    assert orders.place(1) == [] and orders.writers == {"w"}
    orders.writer_died("another")
    assert orders.place(1) == []
    orders.writer_died("w")
    assert [(again.first_slot, again.count) for again in orders.place(1)] == [(1, 2)]
    assert orders.writers == set()


def test_a_silent_worker_that_finishes_after_all_has_made_a_good_sample():
    orders, order = placed()
    orders.lost(order.order_id, 1, 1, writer="w", dead=False)
    orders.landed(np.array([True]), first=1)
    assert orders.take() == 1
    assert orders.writers == set()


def test_a_student_is_stuck_when_every_group_has_a_silent_writer_or_a_reader():
    orders, order = placed(slot_count=6, size=2)
    orders.lost(order.order_id, 1, 1, writer="w", dead=False)
    orders.lost(order.order_id, 4, 2, writer="w", dead=False)
    assert not orders.stuck
    orders.landed(np.array([True, True]), first=2)
    first = orders.take()
    assert orders.stuck
    orders.release(first)
    assert not orders.stuck


def test_runs_are_split_where_tokens_do_not_follow_each_other():
    orders, order = placed(slot_count=6)
    land(orders, order, 0, 3)
    assert orders.runs() == [(1, 2, order.token + 1, 1), (4, 2, order.token + 4, 1)]
    orders.release(orders.take())
    (again,) = orders.place(2)
    assert orders.runs() == [(0, 1, again.token, 2), (1, 2, order.token + 1, 1), (4, 2, order.token + 4, 1)]


# ---- the fence


def test_a_newer_generation_cancels_what_is_ordered_and_frees_what_is_complete():
    orders, _ = placed()
    orders.landed(np.array([True, True, False, False]))
    held = orders.take()
    assert orders.supersede(2) == 1
    assert orders.take() is None
    assert states(orders) == ["HELD", "FREE", "DRAINING", "DRAINING"]
    orders.release(held)


def test_a_cancelled_slot_is_ordered_only_when_its_writer_is_done():
    orders, order = placed()
    orders.supersede(2)
    assert orders.place(2) == []
    land(orders, order, 3)
    assert orders.take() is None
    assert [(again.first_slot, again.generation) for again in orders.place(2)] == [(3, 2)]
    orders.ended(order.order_id, 0, 4)
    assert [(again.first_slot, again.count) for again in orders.place(2)] == [(0, 3)]


def test_a_generation_that_is_known_already_cancels_nothing():
    orders, _ = placed(generation=2)
    orders.landed(np.array([True, False, False, False]))
    assert orders.supersede(2) == orders.supersede(1) == 0
    assert orders.ready == 1 and orders.outstanding == 3


def test_a_failure_of_a_cancelled_order_is_nobodys_loss():
    orders, order = placed()
    orders.supersede(2)
    assert orders.ended(order.order_id, 0, 4) == 0
    assert orders.free == 4


# ---- a broker that knows nothing


def test_what_has_not_come_is_told_again_under_the_same_ids_and_tokens():
    orders, order = placed(slot_count=6)
    land(orders, order, 2)
    orders.release(orders.take())
    (filler,) = orders.place(1)
    assert orders.unfinished() == [
        (order.order_id, 0, 2, order.token, 1),
        filler,
        (order.order_id, 3, 3, (order.token + 3) % 2**64, 1),
    ]


def test_what_is_cancelled_is_told_again_too_so_that_the_broker_says_when_nobody_writes_there():
    orders, order = placed(slot_count=3)
    orders.supersede(2)
    assert orders.unfinished() == [order]
    assert orders.place(2) == []


def test_the_slots_of_a_silent_worker_are_neither_told_again_nor_freed_for_a_new_broker():
    orders, order = placed(slot_count=3)
    orders.lost(order.order_id, 0, 1, writer="w", dead=False)
    orders.supersede(2)
    orders.lost(order.order_id, 1, 1, writer="w", dead=False)
    assert [(again.first_slot, again.count) for again in orders.unfinished()] == [(2, 1)]
    assert orders.place(2) == []


def test_what_a_silent_worker_completes_after_all_is_ordered_anew_although_no_broker_speaks_of_it():
    orders, order = placed(slot_count=1)
    orders.lost(order.order_id, 0, 1, writer="w", dead=False)
    assert orders.unfinished() == []
    orders.land(0)
    orders.release(orders.take())
    assert orders.free == 1 and not orders.unsettled


# ---- every interleaving


class Student(RuleBasedStateMachine):
    """Orders beside a model of who can still write where."""

    @initialize(size=st.integers(1, 3), groups=st.integers(1, 3))
    def begin(self, size, groups):
        self.orders = Orders(size * groups, size=size)
        self.generation = 1
        self.writing: dict[int, tuple] = {}  # slot: (order id, token, generation, writer)
        self.complete: dict[int, tuple] = {}  # slot: (token, generation), as in its header
        self.held: list[int] = []
        self.tokens: set[int] = set()
        self.unsaid: list[tuple[bytes, int]] = []  # complete, and the broker has not said so yet

    def some(self, data):
        return data.draw(st.sampled_from(list(self.writing)))

    @rule()
    def order(self):
        for order in self.orders.place(self.generation):
            for i in range(order.count):
                slot, token = order.first_slot + i, (order.token + i) % 2**64
                assert slot not in self.writing, "a slot got a second writer"
                assert not any(first <= slot < first + self.orders.size for first in self.held)
                assert token not in self.tokens
                self.tokens.add(token)
                self.writing[slot] = (order.order_id, token, order.generation, None)
                self.complete.pop(slot, None)

    @precondition(lambda self: self.writing)
    @rule(data=st.data())
    def worker_finishes(self, data):
        slot = self.some(data)
        order_id, token, generation, _ = self.writing.pop(slot)
        self.complete[slot] = (token, generation)
        self.unsaid.append((order_id, slot))

    @precondition(lambda self: self.unsaid)
    @rule(data=st.data())
    def broker_says_complete(self, data):
        order_id, slot = self.unsaid.pop(data.draw(st.integers(0, len(self.unsaid) - 1)))
        self.scan()
        self.orders.ended(order_id, slot, 1)

    @rule()
    def scan(self):
        for first, count, token, generation in self.orders.runs():
            wanted = [((token + i) % 2**64, generation) for i in range(count)]
            there = [self.complete.get(first + i) == wanted[i] for i in range(count)]
            self.orders.landed(np.array(there), first=first)

    @precondition(lambda self: self.writing)
    @rule(data=st.data())
    def broker_gives_up(self, data):
        slot = self.some(data)
        self.orders.ended(self.writing.pop(slot)[0], slot, 1)

    @precondition(lambda self: self.writing)
    @rule(data=st.data(), dead=st.booleans(), writer=st.sampled_from("ab"))
    def worker_is_lost(self, data, dead, writer):
        slot = self.some(data)
        order_id, token, generation, _ = self.writing.pop(slot)
        if not dead:
            self.writing[slot] = (order_id, token, generation, writer)
        self.orders.lost(order_id, slot, 1, writer=writer, dead=dead)

    @rule(writer=st.sampled_from("ab"))
    def silent_worker_dies(self, writer):
        self.writing = {slot: work for slot, work in self.writing.items() if work[3] != writer}
        self.orders.writer_died(writer)

    @rule()
    def switch(self):
        self.generation += 1
        self.orders.supersede(self.generation)

    @precondition(lambda self: self.writing)
    @rule(data=st.data())
    def broker_settles(self, data):
        order_id = self.writing[self.some(data)][0]
        self.writing = {slot: work for slot, work in self.writing.items() if work[0] != order_id}
        self.orders.ended(order_id, 0, self.orders.usable)

    @rule()
    def take(self):
        first = self.orders.take()
        if first is not None:
            slots = range(first, first + self.orders.size)
            assert all(slot not in self.writing for slot in slots)
            assert {self.complete[slot][1] for slot in slots} == {self.generation}
            assert all(self.complete[slot][0] == int(self.orders.token[slot]) for slot in slots)
            self.held.append(first)

    @precondition(lambda self: self.held)
    @rule()
    def release(self):
        self.orders.release(self.held.pop(0))

    @rule()
    def broker_restarts(self):
        self.unsaid.clear()
        self.scan()
        told = {order.first_slot + i for order in self.orders.unfinished() for i in range(order.count)}
        assert told >= {slot for slot, work in self.writing.items() if work[3] is None}

    @invariant()
    def only_open_slots_have_writers(self):
        if hasattr(self, "orders"):
            runs = self.orders.runs()
            open_slots = {first + i for first, count, _, _ in runs for i in range(count)}
            assert len(open_slots) == sum(count for _, count, _, _ in runs)
            assert {slot for slot, work in self.writing.items() if work[3] is not None} <= open_slots


Student.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
test_no_interleaving_gives_a_slot_two_writers_or_serves_what_is_old = Student.TestCase
