"""What a student knows of each of its slots: who may write there, and what may be handed out.

One row per slot, all columns arrays, no input or output: whoever owns it sends what :meth:`Orders.place` returns and
reports what it hears. The rule behind every line: a slot is ordered again only when nobody can still write into it, and
the broker has said its last word on the order before.

======== ================================== ==============================================================
state    meaning                            leaves it when
======== ================================== ==============================================================
FREE     may be ordered                     :meth:`~Orders.place`: ORDERED
ORDERED  the broker has the order           its header is complete: READY; :meth:`~Orders.ended`: FREE;
                                            superseded: DRAINING; its writer fell silent: LOST
LOST     a silent worker may still write    its header is complete: READY; ended, or the writer died: FREE
DRAINING of an older generation, and a      its header is complete, ended, or the writer died: FREE
         worker may still write
READY    complete, not handed out           :meth:`~Orders.take`: HELD; superseded: FREE
HELD     its reader has it                  :meth:`~Orders.release`: FREE
======== ================================== ==============================================================
"""

from __future__ import annotations

import re
import secrets
from collections import deque
from collections.abc import Hashable, Iterable, Iterator
from enum import IntEnum
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from mixle.data.teacher.messages import U64, Order
from mixle.utils.exact import require_positive_int

__all__ = ["Orders", "SlotState"]


class SlotState(IntEnum):
    """See the table at the top of the module."""

    FREE = 0
    ORDERED = 1
    LOST = 2
    DRAINING = 3
    READY = 4
    HELD = 5


FREE, ORDERED, LOST, DRAINING, READY, HELD = (int(state) for state in SlotState)


_ORDERED, _TO_DRAINING = np.uint8(ORDERED), np.uint8(DRAINING - ORDERED)
_FREE = re.compile(b"%c+" % FREE)
_TRUE = re.compile(b"\\x01+")
_OPEN = re.compile(b"[%c-%c]+" % (ORDERED, DRAINING))


class Orders:
    """Account for ``slot_count`` slots that are handed out in groups of ``size`` neighbours.

    Slots beyond the last whole group are never ordered.

    Raises:
        TypeError, ValueError: an argument is not a positive integer, or no group fits.
    """

    def __init__(self, slot_count: int, *, size: int = 1) -> None:
        slot_count = require_positive_int(slot_count, "slot_count")
        self.size = require_positive_int(size, "size")
        if self.size > slot_count:
            raise ValueError(
                f"size={self.size} does not fit slot_count={slot_count}; "
                f"have at least {self.size} slots, better {2 * self.size}"
            )
        self.usable = slot_count // self.size * self.size
        # Bytes that are also arrays: searching a few is many times faster than any array operation.
        self._states, self._settlements = bytearray(self.usable), bytearray(b"\x01" * self.usable)
        self.state: NDArray[np.uint8] = np.frombuffer(self._states, np.uint8)
        self.token: NDArray[np.uint64] = np.zeros(self.usable, np.uint64)
        self.generation: NDArray[np.uint64] = np.zeros(self.usable, np.uint64)
        self._order: NDArray[np.uint64] = np.zeros(self.usable, "<u8")  # the eight bytes of an order's id
        self._settled: NDArray[np.bool_] = np.frombuffer(self._settlements, np.bool_)
        self._writers: dict[int, Hashable] = {}
        self._ready: deque[int] = deque()
        self._runs: list[tuple[int, int, int, int]] | None = None
        self._next_token = secrets.randbits(64)

    @property
    def free(self) -> int:
        """The number of slots that could be ordered now."""
        if 0 not in self._settlements:
            return self._states.count(FREE)
        return sum(count for _, count in self._placeable())

    @property
    def unsettled(self) -> bool:
        """Whether free slots could be ordered but for the broker's last word on them."""
        return self.free != self._states.count(FREE)

    @property
    def outstanding(self) -> int:
        """The number of slots whose sample may still come."""
        return self._states.count(ORDERED) + self._states.count(LOST)

    @property
    def ready(self) -> int:
        """The number of groups that could be taken now."""
        return len(self._ready)

    @property
    def writers(self) -> set[Hashable]:
        """The silent writers that LOST and DRAINING slots wait for."""
        return set(self._writers.values())

    @property
    def stuck(self) -> bool:
        """Whether no group can be handed out or ordered until a silent writer ends or the reader releases one."""
        groups = self.state.reshape(-1, self.size)
        waits = np.zeros(self.usable, bool)
        waits[list(self._writers)] = True
        return bool(((groups == HELD).any(axis=1) | waits.reshape(groups.shape).any(axis=1)).all())

    @property
    def all_held(self) -> bool:
        """Whether the reader has everything."""
        return self._states.count(HELD) == self.usable

    def runs(self) -> list[tuple[int, int, int, int]]:
        """Return what may still be completed: (first, count, token, generation) of neighbours with tokens in turn."""
        if self._runs is None:
            self._runs = [
                (first, count, int(self.token[first]), int(self.generation[first]))
                for first, count in self._by_order(_OPEN.finditer(self._states))
            ]
        return self._runs

    def place(self, generation: int, *, directly: bool = False) -> list[Order]:
        """Order every free slot: one order for each run of neighbours; of those made ``directly`` no broker hears."""
        orders = []
        self._runs = None
        for first, count in self._placeable():
            token, self._next_token = self._next_token, (self._next_token + count) & U64
            slots = first if count == 1 else slice(first, first + count)  # an index takes a fraction of the time
            self.state[slots] = ORDERED
            self._settled[slots] = directly
            self.token[slots] = token if count == 1 else np.uint64(token) + np.arange(count, dtype=np.uint64)
            self.generation[slots] = generation
            self._order[slots] = token
            orders.append(Order(token.to_bytes(8, "little"), first, count, token, generation))
        return orders

    def land(self, slot: int) -> None:
        """Note one slot, as :meth:`landed` does."""
        state = self._states[slot]
        if state == DRAINING:
            self._states[slot] = FREE
        elif state in (ORDERED, LOST):
            self._states[slot] = READY
        else:
            return
        self._runs = None
        self._writers.pop(slot, None)
        first = slot - slot % self.size
        if self._states.count(READY, first, first + self.size) == self.size:
            self._ready.append(first)

    def landed(self, complete: NDArray[np.bool_], *, first: int = 0) -> None:
        """Note the slots from ``first`` on whose headers say that what they were ordered for is there."""
        count = len(complete)
        state = self.state[first : first + count]
        if complete.all() and self._states.count(ORDERED, first, first + count) == count:
            state[:] = READY
            groups: Iterable[int] = range(first // self.size, (first + count - 1) // self.size + 1)
        else:
            drained = complete & (state == DRAINING)
            arrived = complete & ((state == ORDERED) | (state == LOST))
            if not (drained.any() or arrived.any()):
                return
            state[drained] = FREE
            state[arrived] = READY
            if self._writers:
                self._forget_writers(np.flatnonzero(drained | arrived) + first)
            groups = sorted(set(((np.flatnonzero(arrived) + first) // self.size).tolist()))
        self._runs = None
        for group in groups:
            slot = group * self.size
            if self._states.count(READY, slot, slot + self.size) == self.size:
                self._ready.append(slot)

    def first_open(self, order_id: bytes, first: int, count: int) -> int | None:
        """Return the first slot of a range, as a message claims it, that is open and of this order; None if none is."""
        if self._order[first : first + count].tobytes() == order_id * count:
            found = _OPEN.search(self._states, first, first + count)
            return None if found is None else found.start()
        slots = self.of(order_id, first, count)
        return int(slots[0]) if len(slots) else None

    def settle(self, order_id: bytes, first: int, count: int) -> bool:
        """Take the broker's last word on slots that are all of one order and no longer open; False if they are not."""
        slots = slice(first, first + count)
        if self._order[slots].tobytes() != order_id * count or _OPEN.search(self._states, first, first + count):
            return False
        self._settled[slots] = True
        return True

    def of(self, order_id: bytes, first: int, count: int) -> NDArray[np.intp]:
        """Return which slots of a range, as a message claims it, are open and of this order."""
        if not 0 <= first < first + count <= self.usable:
            return np.zeros(0, np.intp)
        slots = slice(first, first + count)
        return np.flatnonzero(self._are_of(order_id, slots) & _is_open(self.state[slots])) + first

    def ended(self, order_id: bytes, first: int, count: int) -> int:
        """Take the broker's last word on slots of an order; return how many were waited for in vain."""
        if not 0 <= first < first + count <= self.usable:
            return 0
        slots = slice(first, first + count)
        mine = self._are_of(order_id, slots)
        self._settled[slots] |= mine
        mine &= _is_open(self.state[slots])
        if not mine.any():
            return 0
        still = np.flatnonzero(mine) + first
        awaited = int(np.count_nonzero(self.state[still] != DRAINING))
        self._free(still)
        return awaited

    def lost(self, order_id: bytes, first: int, count: int, *, writer: Hashable, dead: bool) -> int:
        """Note that ``writer`` will not finish these slots; unless it is dead it may still write. Return how many."""
        slots = self.of(order_id, first, count)
        if dead:
            self.ended(order_id, first, count)
        else:
            self.state[slots[self.state[slots] == ORDERED]] = LOST
            self._writers.update(dict.fromkeys(slots.tolist(), writer))
        return len(slots)

    def writer_died(self, writer: Hashable) -> None:
        """Free every slot that waits for ``writer``."""
        slots = np.array([slot for slot, who in self._writers.items() if who == writer], np.intp)
        self._free(slots)
        self._settled[slots] = True

    def withdraw(self, order: Order) -> None:
        """Free the slots of an order that was made directly, and that nobody will write any more."""
        self._free(self.of(*order[:3]))

    def supersede(self, generation: int) -> int:
        """Give up everything older than ``generation`` but what is held; return how many complete samples that were."""
        old = self.generation < generation
        stale = old & (self.state == READY)
        self.state[old & ((self.state == ORDERED) | (self.state == LOST))] = DRAINING
        self.state[stale] = FREE
        self._runs = None
        ready = [first for first in self._ready if self.state[first] == READY]
        self._ready.clear()
        self._ready.extend(ready)
        return int(np.count_nonzero(stale))

    def take(self) -> int | None:
        """Return the first slot of a complete group, now held; None if there is none."""
        if not self._ready:
            return None
        first = self._ready.popleft()
        self._set_group(first, HELD)
        return first

    def holds(self, first: int, token: int) -> bool:
        """Tell whether the reader has the group that starts at slot ``first`` and was ordered with ``token``."""
        return self._states[first] == HELD and int(self.token[first]) == token

    def release(self, first: int) -> None:
        """Free the held group that starts at slot ``first``.

        Raises:
            ValueError: no such group is held.
        """
        if not 0 <= first < self.usable or first % self.size or self._states[first] != HELD:
            raise ValueError(f"slot_id={first} is not held; release what was handed out, once")
        self._set_group(first, FREE)

    def unfinished(self) -> list[Order]:
        """Return what a broker that knows nothing must be told again: all that is open, but for a silent worker's."""
        told = (self.state == ORDERED) | (self.state == DRAINING)
        told[list(self._writers)] = False
        told &= ~self._settled
        self._settled[(self.state == FREE) | (self.state >= READY)] = True  # of these no broker has anything to say
        self._settled[list(self._writers)] = True  # nor need it of these, once they are complete
        orders = []
        for first, count in self._by_order(_TRUE.finditer(told.tobytes())):
            order_id = int(self._order[first]).to_bytes(8, "little")
            orders.append(Order(order_id, first, count, int(self.token[first]), int(self.generation[first])))
        return orders

    def _are_of(self, order_id: bytes, slots: slice) -> NDArray[np.bool_]:
        same: NDArray[np.bool_] = self._order[slots] == np.uint64(int.from_bytes(order_id, "little"))
        return same

    def _set_group(self, first: int, state: int) -> None:
        if self.size == 1:
            self._states[first] = state
        else:
            self.state[first : first + self.size] = state

    def _placeable(self) -> list[tuple[int, int]]:
        """Return (first, count) of the neighbours that may be ordered."""
        if FREE not in self._states:
            return []
        return [
            (match.start(), match.end() - match.start())
            for free in _FREE.finditer(self._states)
            for match in _TRUE.finditer(self._settlements, *free.span())
        ]

    def _by_order(self, matches: Iterable[re.Match[bytes]]) -> Iterator[tuple[int, int]]:
        """Yield (first, count) of neighbours, split between orders: within one, tokens are in turn."""
        for match in matches:
            first, count = match.start(), match.end() - match.start()
            ids = self._order[first : first + count]
            raw = ids.tobytes()
            if raw == raw[:8] * count:
                yield first, count
                continue
            edges = [0, *(np.flatnonzero(np.diff(ids)) + 1).tolist(), count]
            for start, stop in pairwise(edges):
                yield first + start, stop - start

    def _free(self, slots: NDArray[np.intp]) -> None:
        self._runs = None
        self.state[slots] = FREE
        self._forget_writers(slots)

    def _forget_writers(self, slots: NDArray[np.intp]) -> None:
        for slot in slots.tolist() if self._writers else ():
            self._writers.pop(slot, None)


def _is_open(state: NDArray[np.uint8]) -> NDArray[np.bool_]:
    """Tell which slots a writer may still complete; below ORDERED, the difference wraps."""
    is_open: NDArray[np.bool_] = (state - _ORDERED) <= _TO_DRAINING
    return is_open
