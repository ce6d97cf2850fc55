"""What there is to schedule: parts of orders, tickets at workers, and who orders and makes samples.

Sets of slots are bits of an integer.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from mixle.data.teacher import messages
from mixle.data.teacher.globs import Globs
from mixle.data.teacher.messages import MAX_PIECES, U64, ModelState
from mixle.data.teacher.run import ProcessIdentity

PIECE_SECONDS = 0.002
PIECE_SLOTS = 256
LIVES = 10  # workers that may die with a part, or hand it back untouched, before it is given up


@dataclass(slots=True, eq=False)
class Part:
    """Neighbouring slots of one order."""

    order_id: bytes  # empty: a worker has it from an earlier broker, and its student has not asked for it yet
    first: int
    count: int
    token: int
    generation: int
    asked_at: float
    tries: int = 0
    lives: int = LIVES
    avoid: Worker | None = None
    cancelled: bool = False

    def sub(self, first: int, count: int) -> Part:
        """Return ``count`` slots of it from ``first`` on."""
        token = (self.token + first - self.first) & U64
        return Part(
            self.order_id,
            first,
            count,
            token,
            self.generation,
            self.asked_at,
            self.tries,
            self.lives,
            self.avoid,
            self.cancelled,
        )

    @property
    def bits(self) -> int:
        """Its slots."""
        return ((1 << self.count) - 1) << self.first


@dataclass(slots=True, eq=False)
class Ticket:
    """A part that one worker has; ``open`` are its slots that are not reported yet."""

    ticket: bytes
    worker: Worker
    student: Student | None  # None: gone, or not registered yet
    segment: str
    part: Part
    open: int
    sent_at: float
    lost: bool = False
    told_lost: bool = False  # since ever: its student orders again as soon as it sees the worker dead
    after: list[Part] = field(default_factory=list)  # what was ordered in the same slots with other tokens


@dataclass(slots=True, eq=False)
class Student:
    """A registered student, as far as scheduling goes."""

    segment: str
    slot_count: int
    packed_bytes: int
    info: messages.SegmentInfo
    queue: deque[Part] = field(default_factory=deque)
    occupied: int = 0  # slots with an order that has had no final word
    unasked: int = 0  # of these, what workers have and it did not ask for again: it saw them complete
    tickets: dict[bytes, Ticket] = field(default_factory=dict)
    served: int = 0
    queued: int = 0
    completed: int = 0
    failed: int = 0
    silent: bool = False
    maker: Worker | None = None  # of what it was last told is complete


@dataclass(slots=True, eq=False)
class Worker:
    """A registered worker, as far as scheduling goes.

    ``seconds`` is what one slot takes, None before the first; ``free_at`` when it will be through with what it has.
    """

    identity: ProcessIdentity
    slot_size: int
    max_batch: int | None
    globs: Globs
    prefetch: int
    seconds: float | None = None
    free_at: float = -math.inf
    tickets: dict[bytes, Ticket] = field(default_factory=dict)
    outstanding: int = 0
    told: dict[Student, int] = field(default_factory=dict)
    told_model: ModelState | None = None
    next_segment_id: int = 0
    lane: str | None = None
    turn: int = 0
    serves: bool = False
    silent: bool = False
    completed: int = 0
    failed: int = 0

    @property
    def target(self) -> int:
        """Slots that make a good piece for it."""
        if self.max_batch is not None:
            return min(self.max_batch, MAX_PIECES)
        if self.seconds is None:
            return 1
        return max(1, min(PIECE_SLOTS, int(PIECE_SECONDS / self.seconds)))

    def learn(self, seconds: float, slots: int) -> None:
        """Take note of what some slots took it."""
        if slots:
            spent = max(seconds / slots, 1e-7)
            self.seconds = spent if self.seconds is None else 0.7 * self.seconds + 0.3 * spent

    @property
    def has_room(self) -> bool:
        """Whether it should get another piece now."""
        return (
            self.serves
            and not self.silent
            and self.outstanding <= (self.prefetch - 1) * self.target
            and len(self.tickets) < MAX_PIECES
        )


@dataclass
class Counts:
    """What happened since the start, in slots."""

    ordered: int = 0
    completed: int = 0
    direct: int = 0
    failed: int = 0
    retried: int = 0
    requeued: int = 0
    stale: int = 0
    cancelled: int = 0
    lost: int = 0
    unknown_tickets: int = 0


def runs(bits: int) -> Iterator[tuple[int, int]]:
    """Yield (first, count) of each run of neighbouring ones."""
    at = 0
    while bits:
        skipped = (bits & -bits).bit_length() - 1
        bits >>= skipped
        at += skipped
        count = (~bits & (bits + 1)).bit_length() - 1
        yield at, count
        bits >>= count
        at += count
