"""Who makes which sample: queues, fairness, pieces, tickets and what becomes of them. Pure: no sockets, no clock.

The owner calls in what happened, then :meth:`Scheduler.take` for what is to be sent. Sets of slots are bits of an
integer. One rule is behind every line: a slot that somebody may still write into is given to nobody else.

=============================== ==================================================================================
a part of an order is           until
=============================== ==================================================================================
queued at the student           a worker has room: it becomes a ticket. Model switched, cancelled: DROPPED
held back (resent, restart)     a worker says that it has it: its ticket; the time is over: queued
delayed (to be tried again)     the time is over: queued
a ticket at a worker            DONE: COMPLETE; FAILED: delayed, or FAILED at the last try; SKIPPED: queued;
                                worker dead: queued; worker silent: LOST (not final), and still a ticket
=============================== ==================================================================================

Whatever belongs to an older generation is DROPPED where it would be queued.
"""

from __future__ import annotations

import heapq
import math
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count as counter
from typing import NamedTuple

from mixle.data.teacher import messages
from mixle.data.teacher.messages import DONE, FAILED, MAX_PIECES, NO_MODEL, U64, ModelState, Order, Piece
from mixle.data.teacher.work import LIVES, PIECE_SECONDS, Counts, Part, Student, Ticket, Worker, runs

AHEAD_S = 0.004  # that a worker gets its next piece before it needs it
SHARE_SECONDS = 0.0005  # of work that are worth the messages of a piece of their own
BACK_OFF_S = 0.05
SCANNED = 16
TICKETS_DRAWN = 64


class _Delayed(NamedTuple):
    due: float
    turn: int
    student: Student
    part: Part


class Scheduler:
    """Share workers between students; see the table at the top of the module.

    Args:
        max_tries: how often a generator may fail with a slot.
        order_timeout_s: a worker that takes longer is treated as silent about that ticket; None waits for ever.
        holding_until: resent orders are held back until then, for workers to say what they still have.
        random: makes the tickets.
    """

    def __init__(
        self,
        *,
        max_tries: int = 3,
        order_timeout_s: float | None = None,
        holding_until: float = -math.inf,
        random: Callable[[int], bytes] = os.urandom,
    ) -> None:
        self.model = NO_MODEL
        self.students: dict[Student, None] = {}
        self.workers: dict[Worker, None] = {}
        self.counts = Counts()
        self.latencies: deque[float] = deque(maxlen=4096)
        self._max_tries, self._order_timeout_s = max_tries, order_timeout_s
        self._holding_until = holding_until
        self._random = random
        self._unused = b""
        self._turns = counter(1)
        self._waiting: dict[Student, None] = {}
        self._roomy: dict[Worker, None] = {}
        self._delayed: list[_Delayed] = []
        self._held_back: list[tuple[Student, Part]] = []
        self._queued = 0
        self._short_at = math.inf  # when a worker may be given what was kept for others
        self._virtual = 0
        self._serving = 0
        self._out: list[tuple[Student | Worker, messages.Message]] = []
        self._complete: dict[Student, list[Piece]] = {}
        self._dropped: dict[Student, list[Piece]] = {}

    # Who takes part.

    def add_student(self, student: Student, now: float) -> None:
        """Let a student ask; what workers still have of its segment is tied to it."""
        student.served = self._virtual
        self.students[student] = None
        for worker in self.workers:
            for ticket in worker.tickets.values():
                if ticket.student is None and ticket.segment == student.segment:
                    self._tie(ticket, student, now)

    def restart_student(self, student: Student) -> None:
        """Forget what it ordered and no worker has; it will send it again."""
        for part in self._withdraw(student, lambda part: True):
            student.occupied &= ~part.bits
        for ticket in student.tickets.values():
            ticket.after.clear()
            if not ticket.lost:  # of what was lost its student waits for a word, and does not ask again
                student.unasked |= ticket.open

    def remove_student(self, student: Student) -> None:
        """Drop its orders and have workers close its segment."""
        self.restart_student(student)
        del self.students[student]
        for ticket in student.tickets.values():
            ticket.student = None
        student.tickets.clear()
        self._complete.pop(student, None)
        self._dropped.pop(student, None)
        for worker in self.workers:
            segment_id = worker.told.pop(student, None)
            if segment_id is not None:
                self._out.append((worker, messages.Retire(segment_ids=(segment_id,))))

    def silence_student(self, student: Student, silent: bool) -> None:
        """Pass nothing on for a student that does not beat, until it does again."""
        student.silent = silent
        self._note_waiting(student)

    def add_worker(self, worker: Worker, held: Iterable[messages.HeldPiece], now: float) -> None:
        """Let a worker work; ``held`` is what it may still write for an earlier broker."""
        self.workers[worker] = None
        worker.serves = worker.globs.match(self.model.model_id)
        self._serving += worker.serves
        for piece in held:
            self._adopt(worker, piece, now)
        self._note_room(worker)

    def restart_worker(self, worker: Worker, held: Sequence[messages.HeldPiece], now: float) -> None:
        """Take note of a worker that registered again: what it does not hold never reached it."""
        ids = {piece.ticket for piece in held}
        for ticket in [ticket for ticket in worker.tickets.values() if ticket.ticket not in ids]:
            self._give_back(ticket, ticket.open, now, lives=0)
        worker.told.clear()
        worker.told_model = None
        for piece in held:
            if piece.ticket not in worker.tickets:
                self._adopt(worker, piece, now)
        self.silence_worker(worker, False)

    def recall(self, worker: Worker, tickets: Iterable[bytes], now: float) -> None:
        """Take back tickets that never reached their worker."""
        for name in tickets:
            ticket = worker.tickets.get(name)
            if ticket is not None:
                self._give_back(ticket, ticket.open, now, lives=0)
        self._note_room(worker)

    def remove_worker(self, worker: Worker, now: float, *, died: bool) -> None:
        """Give what it had to others: it has left, or died, and writes no more."""
        self._forget_worker(worker)
        for ticket in list(worker.tickets.values()):
            self._give_back(ticket, ticket.open, now, lives=int(died))

    def abandon_worker(self, worker: Worker) -> None:
        """Forget a worker that has been silent for long, on a machine where nobody can see whether it lives."""
        self._forget_worker(worker)
        for ticket in list(worker.tickets.values()):
            self._close(ticket, ticket.open)

    def silence_worker(self, worker: Worker, silent: bool) -> None:
        """Give nothing more to a worker that does not beat, and tell the students; or welcome it back."""
        worker.silent = silent
        for ticket in worker.tickets.values():
            if silent:
                self._lose(ticket)
            else:
                ticket.lost = False
        self._note_room(worker)

    # What they say.

    def request(self, student: Student, orders: Iterable[Order], now: float, *, resent: bool = False) -> str | None:
        """Queue orders; return what is wrong with the first that was refused, if any was.

        An order of slots that a worker has, as the broker knows, waits until that worker has reported them: their
        student saw them complete, and has used them, already. Slots that were reported lost are given out at once.
        Orders of a generation that this broker has not heard of yet are dropped.
        """
        refusal = None
        again = 0
        for order in orders:
            order_id, first, count, token, generation = order
            if first + count > student.slot_count:
                refusal = refusal or f"slots {first} to {first + count - 1} of an order: there are {student.slot_count}"
                continue
            if generation > self.model.generation:  # an earlier broker switched, and nobody has said so yet
                self._dropped.setdefault(student, []).append(Piece(order_id, first, count))
                continue
            part = Part(order_id, first, count, token, generation, now)
            if resent:
                student.unasked &= ~part.bits
            taken = student.occupied & part.bits
            self.counts.ordered += count
            if not taken:
                student.occupied |= part.bits
                self._queue_new(student, part, now, resent)
            elif resent:
                self._queue_again(student, part, now)
                again |= part.bits
            elif taken & ~self._slots_at_workers(student):
                refusal = refusal or f"slots {first} to {first + count - 1} of an order: some are in another order"
            else:  # their headers may say more than has been reported yet
                for ticket in list(student.tickets.values()):
                    if ticket.lost and ticket.open & taken:
                        self._close(ticket, ticket.open & taken)
                self._queue_again(student, part, now)
        if again:
            for ticket in student.tickets.values():
                if ticket.lost and ticket.open & again:
                    self._tell_lost(ticket)
        return refusal

    def cancel(self, student: Student, order_ids: Iterable[bytes]) -> None:
        """Drop what no worker has of these orders; what workers have is not tried again."""
        ids = set(order_ids)
        for part in self._withdraw(student, lambda part: part.order_id in ids):
            self.counts.cancelled += part.count
            self._drop(student, part)
        for ticket in student.tickets.values():
            ticket.part.cancelled = ticket.part.cancelled or ticket.part.order_id in ids

    def report(self, worker: Worker, pieces: Iterable[messages.DonePiece], seconds: float, now: float) -> int:
        """Settle what a worker says of its tickets; return how many pieces were not of any ticket it has."""
        unknown = slots = 0
        for ticket_id, first, count, outcome, message in pieces:
            ticket = worker.tickets.get(ticket_id)
            bits = ((1 << count) - 1) << first
            if ticket is None or bits & ~ticket.open:
                unknown += 1
                continue
            slots += count
            student, part = ticket.student, ticket.part
            if outcome != DONE:
                self._not_done(ticket, bits, message, now) if outcome == FAILED else self._give_back(
                    ticket, bits, now, lives=1, avoid=worker
                )
                continue
            worker.completed += count
            self.counts.completed += count
            wanted = self._close_unwanted(ticket, bits)
            if student is not None and wanted:
                student.completed += count
                student.maker = worker
                self.latencies.append(now - part.asked_at)
                told = self._complete.setdefault(student, [])
                if wanted == bits:
                    told.append(Piece(part.order_id, first, count))
                else:
                    told += [Piece(part.order_id, *run) for run in runs(wanted)]
                self._close(ticket, wanted)
        self.counts.unknown_tickets += unknown
        worker.learn(seconds, slots)
        worker.free_at = now + worker.outstanding * (worker.seconds or 0.0)
        self._note_room(worker)
        return unknown

    def served(self, worker: Worker, segments: Iterable[messages.ServedSlots], seconds: float) -> None:
        """Count what students ordered from a worker directly."""
        students = {segment_id: student for student, segment_id in worker.told.items()}
        slots = 0
        for segment_id, count in segments:
            slots += count
            if (student := students.get(segment_id)) is not None:  # else it has left
                student.completed += count
        worker.completed += slots
        self.counts.ordered += slots
        self.counts.completed += slots
        self.counts.direct += slots
        worker.learn(seconds, slots)

    def switch(self, model: ModelState) -> None:
        """Serve another model from now on; what is queued of the one before is dropped."""
        self.model = model
        for student in self.students:
            # Of what is held back a worker may yet say that it writes it.
            for part in self._withdraw(student, lambda part: part.generation < model.generation, held_back=False):
                self.counts.stale += part.count
                self._drop(student, part)
        self._serving = 0
        for worker in self.workers:
            worker.serves = worker.globs.match(model.model_id)
            self._serving += worker.serves
            self._note_room(worker)

    # What follows.

    def next_due(self) -> float:
        """Return when :meth:`advance` has something to do."""
        due = min(self._delayed[0].due if self._delayed else math.inf, self._short_at)
        return min(due, self._holding_until) if self._held_back else due

    def advance(self, now: float) -> None:
        """Queue what was waiting for its time."""
        while self._delayed and self._delayed[0].due <= now:
            _, _, student, part = heapq.heappop(self._delayed)
            self._queue(student, part, in_front=True)
        if self._held_back and self._holding_until <= now:
            held_back, self._held_back = self._held_back, []
            for student, part in held_back:
                self._queue(student, part)

    def check_timeouts(self, now: float) -> None:
        """Tell students of tickets that take longer than ``order_timeout_s``."""
        if self._order_timeout_s is None:
            return
        for worker in self.workers:
            for ticket in worker.tickets.values():
                if now - ticket.sent_at > self._order_timeout_s:
                    self._lose(ticket)

    def take(self, now: float) -> list[tuple[Student | Worker, messages.Message]]:
        """Give work to whoever has room, and return what is to be sent to whom since the last call."""
        self._short_at = math.inf
        if self._queued and self._roomy:
            self._assign(now)
        out, self._out = self._out, []
        if self._complete:
            for student, pieces in self._complete.items():
                lane = self._lane(student)
                for some in _split(pieces):
                    out.append((student, messages.Complete(pieces=some, lane=lane)))
            self._complete = {}
        if self._dropped:
            for student, pieces in self._dropped.items():
                for some in _split(pieces):
                    out.append((student, messages.Dropped(pieces=some, model=self.model)))
            self._dropped = {}
        return out

    def _lane(self, student: Student) -> str | None:
        """Return where a student may order directly: at who made its last sample, if that is idle and fast.

        With a slow one nothing is won, and what the broker gives it meanwhile would wait. Where orders have a limit of
        time, the broker must see them all.
        """
        worker, info = student.maker, student.info
        if worker is None or worker.tickets or student.occupied or self._queued or self._order_timeout_s is not None:
            return None
        if (worker.seconds or math.inf) > PIECE_SECONDS:
            return None
        near = info.owner.host == worker.identity.host and info.medium == "shm" and info.data_endpoint is None
        return worker.lane if near and worker.serves and not worker.silent and worker in self.workers else None

    @property
    def queued(self) -> int:
        """Slots that wait for a worker."""
        return self._queued + sum(one.part.count for one in self._delayed) + sum(p.count for _, p in self._held_back)

    # The rest is how.

    def _queue_new(self, student: Student, part: Part, now: float, resent: bool) -> None:
        if resent and now < self._holding_until:
            self._held_back.append((student, part))
        else:
            self._queue(student, part)

    def _queue_again(self, student: Student, part: Part, now: float) -> None:
        """Queue of a resent order what nobody has: the rest is tied to the tickets that have it, or waits for them."""
        for ticket in list(student.tickets.values()):
            self._match(ticket, part)
        free = part.bits & ~student.occupied
        student.occupied |= free
        for run in runs(free):
            self._queue_new(student, part.sub(*run), now, True)

    def _match(self, ticket: Ticket, part: Part) -> None:
        """Recognise in a ticket the slots of ``part`` that it has; with other tokens than its own they wait for it."""
        shared = ticket.open & part.bits
        if not shared:
            return
        has = ticket.part
        if has.order_id in (b"", part.order_id) and (has.token - has.first - part.token + part.first) & U64 == 0:
            has.order_id, has.generation = part.order_id, part.generation
        else:
            waiting = [one.sub(*run) for one in ticket.after for run in runs(one.bits & ~shared)]
            ticket.after = [*waiting, *(part.sub(*run) for run in runs(shared))]

    def _queue(self, student: Student, part: Part, *, in_front: bool = False) -> None:
        if part.generation < self.model.generation or part.cancelled:
            if part.cancelled:
                self.counts.cancelled += part.count
            else:
                self.counts.stale += part.count
            self._drop(student, part)
            return
        if not student.queue:
            student.served = max(student.served, self._virtual)
        if in_front:
            student.queue.appendleft(part)
        else:
            student.queue.append(part)
        student.queued += part.count
        if not student.silent:
            self._queued += part.count
            self._waiting[student] = None

    def _note_waiting(self, student: Student) -> None:
        """Recount a student whose queue or silence changed as a whole."""
        if student in self._waiting:
            del self._waiting[student]
        if student.queue and not student.silent:
            self._waiting[student] = None
        self._queued = sum(one.queued for one in self._waiting)

    def _withdraw(self, student: Student, which: Callable[[Part], bool], *, held_back: bool = True) -> list[Part]:
        """Take what ``which`` chooses out of the queue, the delayed and, if so said, the held back."""
        withdrawn = [part for part in student.queue if which(part)]
        if withdrawn:
            student.queue = deque(part for part in student.queue if not which(part))
            student.queued = sum(part.count for part in student.queue)
            self._note_waiting(student)
        delayed = [one for one in self._delayed if one.student is student and which(one.part)]
        if delayed:
            self._delayed = [one for one in self._delayed if one.student is not student or not which(one.part)]
            heapq.heapify(self._delayed)
            withdrawn += [one.part for one in delayed]
        held = [part for whose, part in self._held_back if held_back and whose is student and which(part)]
        if held:
            self._held_back = [(whose, p) for whose, p in self._held_back if whose is not student or not which(p)]
            withdrawn += held
        return withdrawn

    def _drop(self, student: Student, part: Part) -> None:
        student.occupied &= ~part.bits
        if part.order_id:
            self._dropped.setdefault(student, []).append(Piece(part.order_id, part.first, part.count))

    def _close(self, ticket: Ticket, bits: int) -> None:
        """Nobody writes into ``bits`` of a ticket any more, and their order is settled."""
        student = ticket.student
        self._shrink(ticket, bits)
        if student is None:
            return
        student.occupied &= ~bits
        student.unasked &= ~bits
        if not ticket.after:
            return
        waiting, ticket.after = ticket.after, []
        for part in waiting:
            free = part.bits & bits
            if ticket.told_lost:
                self._end_lost(ticket, part.order_id, free)
                free = 0
            for run in runs(free):
                student.occupied |= ((1 << run[1]) - 1) << run[0]
                self._queue(student, part.sub(*run))
            ticket.after += [part.sub(*run) for run in runs(part.bits & ~bits)]

    def _close_unwanted(self, ticket: Ticket, bits: int) -> int:
        """Close, without a word, what nobody waits for any more of ``bits`` of a ticket; return the rest."""
        if ticket.student is None or not ticket.part.order_id:
            unwanted = bits
        else:
            unwanted = ticket.student.unasked & bits
            for part in ticket.after:
                unwanted |= part.bits & bits
        if unwanted:
            self._close(ticket, unwanted)
        return bits & ~unwanted

    def _shrink(self, ticket: Ticket, bits: int) -> None:
        ticket.open &= ~bits
        ticket.worker.outstanding -= bits.bit_count()
        if not ticket.open:
            del ticket.worker.tickets[ticket.ticket]
            if ticket.student is not None:
                ticket.student.tickets.pop(ticket.ticket, None)

    def _take_back(self, ticket: Ticket, bits: int) -> int:
        """Take from a ticket what its worker will not write; return what is to be given to another."""
        bits = self._close_unwanted(ticket, bits)
        if ticket.student is None or not bits:
            return 0
        if ticket.told_lost:
            self._end_lost(ticket, ticket.part.order_id, bits)
            self._close(ticket, bits)
            return 0
        self._shrink(ticket, bits)
        return bits

    def _give_back(self, ticket: Ticket, bits: int, now: float, *, lives: int, avoid: Worker | None = None) -> None:
        """Queue again what a worker will not write; ``lives`` is what this costs it."""
        student, part = ticket.student, ticket.part
        bits = self._take_back(ticket, bits)
        if student is None or not bits:
            return
        left = part.lives - lives
        for first, count in runs(bits):
            again = part.sub(first, count)
            again.lives, again.avoid = left, avoid
            void = part.cancelled or part.generation < self.model.generation
            if left < 0:
                self._give_up(student, again, f"{LIVES} workers died or left with it, or would not take it")
                continue
            if not void:
                self.counts.requeued += count
            if avoid is not None and not void:
                self._delay(student, again, now + BACK_OFF_S * (1 << (LIVES - left - 1)) / 8)
            else:
                self._queue(student, again, in_front=True)

    def _not_done(self, ticket: Ticket, bits: int, message: str | None, now: float) -> None:
        ticket.worker.failed += bits.bit_count()
        student, part = ticket.student, ticket.part
        bits = self._take_back(ticket, bits)
        if student is None or not bits:
            return
        for first, count in runs(bits):
            again = part.sub(first, count)
            again.tries, again.avoid = part.tries + 1, ticket.worker
            if again.tries >= self._max_tries and part.generation == self.model.generation and not part.cancelled:
                self._give_up(student, again, message or "the generator failed")
            elif part.generation < self.model.generation or part.cancelled:
                self._queue(student, again)
            else:
                self.counts.retried += count
                self._delay(student, again, now + BACK_OFF_S * (1 << part.tries))

    def _give_up(self, student: Student, part: Part, message: str) -> None:
        self.counts.failed += part.count
        student.failed += part.count
        student.occupied &= ~part.bits
        failed = messages.Failed(
            order_id=part.order_id,
            first_slot=part.first,
            count=part.count,
            message=message,
            tries=max(1, part.tries),
        )
        self._out.append((student, failed))

    def _delay(self, student: Student, part: Part, due: float) -> None:
        heapq.heappush(self._delayed, _Delayed(due, next(self._turns), student, part))

    def _lose(self, ticket: Ticket) -> None:
        if not ticket.lost:
            ticket.lost = ticket.told_lost = True
            self.counts.lost += ticket.open.bit_count()
            self._tell_lost(ticket)

    def _tell_lost(self, ticket: Ticket) -> None:
        student = ticket.student
        if student is None:
            return
        pieces = []
        own = ticket.open & ~student.unasked if ticket.part.order_id else 0
        for part in ticket.after:
            own &= ~part.bits
            pieces.append(Piece(part.order_id, part.first, part.count))
        pieces += [Piece(ticket.part.order_id, *run) for run in runs(own)]
        for some in _split(pieces):
            lost = messages.Lost(pieces=some, worker=ticket.worker.identity, dead=False)
            self._out.append((student, lost))

    def _end_lost(self, ticket: Ticket, order_id: bytes, bits: int) -> None:
        """Say the last word on what was reported lost: nobody else gets it, for its student may order it any moment."""
        assert ticket.student is not None
        for some in _split([Piece(order_id, *run) for run in runs(bits)]):
            lost = messages.Lost(pieces=some, worker=ticket.worker.identity, dead=True)
            self._out.append((ticket.student, lost))

    def _slots_at_workers(self, student: Student) -> int:
        slots = 0
        for ticket in student.tickets.values():
            slots |= ticket.open
        return slots

    def _adopt(self, worker: Worker, piece: messages.HeldPiece, now: float) -> None:
        """Take up what a worker has of an earlier broker, unless another worker has those slots by now."""
        if piece.ticket in worker.tickets:
            return
        part = Part(b"", piece.first_slot, piece.count, piece.token, self.model.generation, now)
        ticket = Ticket(piece.ticket, worker, None, piece.segment, part, part.bits, now)
        worker.tickets[piece.ticket] = ticket
        worker.outstanding += part.count
        for student in self.students:
            if student.segment == piece.segment:
                self._tie(ticket, student, now)

    def _tie(self, ticket: Ticket, student: Student, now: float) -> None:
        """Give a ticket its student; orders in its slots that nobody has yet are its own, or wait for it."""
        bits = ticket.open
        if bits >> student.slot_count or any(other.open & bits for other in student.tickets.values()):
            return
        ticket.student = student
        student.tickets[ticket.ticket] = ticket
        wanted = self._withdraw(student, lambda part: bool(part.bits & bits))
        student.occupied |= bits
        student.unasked |= bits
        for part in wanted:
            student.unasked &= ~part.bits
            self._match(ticket, part)
            for run in runs(part.bits & ~bits):
                self._queue_new(student, part.sub(*run), now, True)

    def _forget_worker(self, worker: Worker) -> None:
        del self.workers[worker]
        self._serving -= worker.serves
        self._roomy.pop(worker, None)

    def _note_room(self, worker: Worker) -> None:
        if worker in self.workers and worker.has_room:
            self._roomy[worker] = None
        else:
            self._roomy.pop(worker, None)

    def _assign(self, now: float) -> None:
        """Give pieces to workers that have room, the least loaded first, until either runs out.

        What is not enough for all of them is not given to one that is busy for long: another may be through before it.
        """
        candidates = list(self._roomy)
        if self._queued < len(candidates):
            busy = [worker for worker in candidates if worker.outstanding and worker.free_at > now + AHEAD_S]
            if busy:
                candidates = [worker for worker in candidates if worker not in busy]
                self._short_at = min(worker.free_at for worker in busy) - AHEAD_S
        while candidates and self._queued:
            worker = min(candidates, key=_load) if len(candidates) > 1 else candidates[0]
            given = self._give(worker, now)
            self._note_room(worker)
            if not given or worker not in self._roomy:
                candidates.remove(worker)
        if not self._queued:
            self._short_at = math.inf

    def _give(self, worker: Worker, now: float) -> bool:
        """Send a worker one piece of work, of as many students as it takes; return whether there was any for it."""
        size = min(worker.target, -(-self._queued // self._sharing(worker)))
        students = [student for student in self._waiting if student.packed_bytes <= worker.slot_size]
        pieces: list[messages.WorkPiece] = []
        segments: list[messages.SegmentInfo] = []
        while size > 0 and students and len(worker.tickets) < MAX_PIECES:
            student = min(students, key=_served) if len(students) > 1 else students[0]
            part = self._pop(student, worker, size)
            if part is None:
                students.remove(student)
                continue
            if not student.queue:
                students.remove(student)
            size -= part.count
            self._virtual = student.served
            student.served += part.count
            segment_id = worker.told.get(student)
            if segment_id is None:
                segment_id = worker.told[student] = worker.next_segment_id
                worker.next_segment_id += 1
                segments.append(student.info._replace(segment_id=segment_id))
            name = self._new_ticket()
            ticket = Ticket(name, worker, student, student.segment, part, part.bits, now)
            worker.tickets[name] = student.tickets[name] = ticket
            worker.outstanding += part.count
            pieces.append(messages.WorkPiece(name, segment_id, part.first, part.count, part.token, part.generation))
        if not pieces:
            return False
        worker.turn = next(self._turns)
        worker.free_at = max(worker.free_at, now) + sum(one.count for one in pieces) * (worker.seconds or 0.0)
        model = None if worker.told_model is self.model else self.model
        worker.told_model = self.model
        self._out.append((worker, messages.Work(model=model, pieces=tuple(pieces), segments=tuple(segments))))
        return True

    def _sharing(self, worker: Worker) -> int:
        """Return between how many workers what is queued should be divided, as far as ``worker`` can tell."""
        if worker.seconds is None:
            return max(1, self._serving)
        return max(1, min(self._serving, int(self._queued * worker.seconds / SHARE_SECONDS)))

    def _new_ticket(self) -> bytes:
        """Return 16 bytes that nobody can guess; the system is asked for many at a time."""
        if not self._unused:
            self._unused = self._random(16 * TICKETS_DRAWN)
        name, self._unused = self._unused[:16], self._unused[16:]
        return name

    def _pop(self, student: Student, worker: Worker, size: int) -> Part | None:
        """Take up to ``size`` slots of a student's next part that ``worker`` should try."""
        queue = student.queue
        at = 0
        if queue[0].avoid is worker and self._serving > 1:
            for at in range(min(SCANNED, len(queue))):
                if queue[at].avoid is not worker:
                    break
            else:
                return None
        part = queue[at]
        if part.count > size:
            queue[at] = part.sub(part.first + size, part.count - size)
            part = part.sub(part.first, size)
        elif at:
            del queue[at]
        else:
            queue.popleft()
        student.queued -= part.count
        self._queued -= part.count
        if not queue:
            del self._waiting[student]
        return part


def _split(pieces: list[Piece]) -> Iterator[tuple[Piece, ...]]:
    for start in range(0, len(pieces), MAX_PIECES):
        yield tuple(pieces[start : start + MAX_PIECES])


def _load(worker: Worker) -> tuple[float, int, int]:
    return worker.outstanding * (worker.seconds or 0.0), worker.outstanding, worker.turn


def _served(student: Student) -> int:
    return student.served
