"""One registration of a student: a segment of slots, the connection to the broker, and what is ordered there.

The truth about a slot is its header. Messages say where to look, and when nobody will write into a slot any more; where
the host keeps stores in order (x86), a student that waits looks at the header before a message has told it to.
"""

from __future__ import annotations

import logging
import os
import platform
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from types import TracebackType
from typing import Any

from mixle.data.teacher import doorbell, messages
from mixle.data.teacher.cleanup import tidy
from mixle.data.teacher.errors import GeneratorFailed, TeacherError
from mixle.data.teacher.fence import Fence
from mixle.data.teacher.lane import AVAILABLE, StudentLane
from mixle.data.teacher.messages import MAX_PIECES, Order, Piece
from mixle.data.teacher.network import Receiver, own_address
from mixle.data.teacher.orders import Orders
from mixle.data.teacher.peer import Peer, ask, refusal
from mixle.data.teacher.run import ProcessIdentity, is_alive, process_identity
from mixle.data.teacher.segment import Segment
from mixle.data.teacher.slots import FEW, Slots
from mixle.data.teacher.station import Station

__all__ = ["OnEvent", "Session"]

logger = logging.getLogger(__name__)

WATCH_S = 0.002
GATHER_S = 0.002
DIRECT_S = 0.02
ORDER_S = 0.001  # that a free slot waits at most for others to be ordered with
TICK_S = 0.1
BEHIND_S = 0.05
TRIES = 3  # to have one slot filled over the network
STORES_IN_ORDER = platform.machine().lower() in ("x86_64", "amd64", "i386", "i686")

OnEvent = Callable[[str, dict[str, Any]], None]


class Session:
    """Order samples, and say which slots hold one; for one thread.

    Args:
        station: who registers.
        fence: what is known of the model; shared by the sessions of a client.
        deadline_s: seconds that the broker has to answer.
        on_event: called with what happens.

    Raises:
        BrokerUnreachable: it did not answer.
        TeacherError: it refused.
        OSError: the slots do not fit.
    """

    def __init__(self, station: Station, fence: Fence, *, deadline_s: float, on_event: OnEvent) -> None:
        until = time.monotonic() + deadline_s
        self.station, self.fence = station, fence
        self.stale = self.served = 0
        self.failures: deque[TeacherError] = deque()
        self.spent = False
        self._on_event = on_event
        self._orders: Orders | None = None
        self._generation = 0
        self._released = 0
        self._placed_at = 0.0
        self._hold_until = 0.0
        self._stats: bytes | None = None
        self._receiver: Receiver | None = None
        self._lane: StudentLane | None = None
        self._owed: deque[tuple[float, Piece]] = deque()
        self._missed: Counter[int] = Counter()
        self._pid = os.getpid()
        self.run = ask(station.frontend, keys=station.keys, deadline_s=deadline_s)
        fence.learn(self.run.model)
        tidy(self.run.run_id, directory=station.runs_directory)
        size = station.layout.segment_bytes(station.slot_count)
        self.segment = Segment.create(size, run_id=self.run.run_id, medium=station.medium, directory=station.directory)
        try:
            self.slots = Slots(self.segment.buffer, station.layout, station.slot_count)
            self.slots.initialize()
            self._receiver = self._listening()
            self._lane = self._asking()
            registration = _Registration(station, self.segment.name, self._receiver)
            self.peer = registration.peer = Peer(
                station.frontend,
                registration,
                control_pub_endpoint=station.control_pub,
                keys=station.keys,
                model=fence.model,
                on_model=_Note(fence, on_event),
            )
            try:
                self.welcome = self.peer.start(max(until - time.monotonic(), 0.0))
            except BaseException:
                self.peer.close()
                raise
        except BaseException:
            if self._receiver is not None:
                self._receiver.close()
            if self._lane is not None:
                self._lane.leave()
            self.segment.unlink()
            raise
        on_event("registered", {"run_id": self.run.run_id, "segment": self.segment.name})

    @property
    def size(self) -> int | None:
        """The slots of a group; None before the first was asked for."""
        return None if self._orders is None else self._orders.size

    @property
    def all_held(self) -> bool:
        """Whether nothing can come before the reader releases a slot."""
        return self._orders is not None and self._orders.all_held

    def next_group(self, size: int, until: float) -> int | None:
        """Return the first slot of a complete group of the newest model, now held; None at ``until`` or when spent.

        Raises:
            TeacherError: an order failed (a ``GeneratorFailed``), or the broker refuses.
        """
        if self._orders is None:
            self._orders = Orders(self.station.slot_count, size=size)
        first = self._take()
        if first is None and (direct := self._direct) is not None:
            first = self._await_direct(direct, until)
        if first is None:
            self._peek()
            self.hear(0.0)
            first = self._take()
        watched = False
        while first is None:
            if self.failures:
                raise self.failures.popleft()
            if self.spent:
                return None
            if self._lane is not None and self._direct is not None:
                self._recall(self._lane, self._direct)
            self._place(at_least=self._orders.usable // 4)
            left = until - time.monotonic()
            if left <= 0:
                return None
            if not watched:
                watched = True
                if not self._orders.unsettled or not self.hear(min(left, WATCH_S)):
                    self._watch(min(left, WATCH_S))
            elif self._direct is not None:
                self._watch(min(left, DIRECT_S))  # no message will tell of it
                self.hear(0.0)
            elif not self.hear(min(left, GATHER_S)) and (first := self._woken()) is None:
                self._place()
                if not self.hear(min(left, TICK_S)):
                    self._look()
                    self._bury()
            first = self._take() if first is None else first
        return first

    def order_of(self, first: int) -> tuple[int, int]:
        """Return the token and the generation of a held slot."""
        assert self._orders is not None
        return int(self._orders.token[first]), int(self._orders.generation[first])

    def give_back(self, first: int, token: int) -> None:
        """Take back a group, unless that was done and it is of another order by now."""
        if self._orders is not None and self._orders.holds(first, token):
            self.release(first)

    def release(self, first: int) -> None:
        """Take a held group back, and order it anew when that is worth a message.

        Raises:
            ValueError: no such group is held.
        """
        if self._orders is None:
            raise ValueError(f"slot_id={first} is not held; release what was handed out, once")
        self._orders.release(first)
        self._released += self._orders.size
        if not self.spent and (self._released * 4 >= self._orders.usable or self._is_due()):
            with self.whole():
                directly = self._lane is not None and self._lane.is_open
                if not directly:
                    self.hear(0.0)  # of slots that may be ordered then
                self._place()
                if directly:
                    self.hear(0.0)

    def whole(self) -> _Whole:
        """Give the session up if the block is interrupted: it may not know any more what is ordered where."""
        return _Whole(self)

    def statistics(self, deadline_s: float) -> bytes | None:
        """Return the broker's figures as it packed them; None if it does not answer within ``deadline_s``."""
        until = time.monotonic() + deadline_s
        self._stats = None
        asked = False
        while self._stats is None and (left := until - time.monotonic()) > 0:
            asked = asked or self.peer.send(messages.Stats())
            self.hear(min(left, TICK_S))
        return self._stats

    def close(self) -> None:
        """Leave the broker and take the segment's name away; from any thread. What is held stays readable."""
        if os.getpid() != self._pid:
            return
        self.spent = True
        try:
            if self._receiver is not None:
                self._receiver.close()
            if self._lane is not None:
                self._lane.leave()
            self.peer.close(messages.Bye())
        finally:  # a signal's handler may raise in the middle of it
            self.segment.unlink()
            self.segment.close()

    # ---- private

    @property
    def _direct(self) -> Order | None:
        """What was ordered from a worker itself, and is not known to be made or taken back."""
        return None if self._lane is None else self._lane.order

    def _take(self) -> int | None:
        orders = self._orders
        assert orders is not None
        self._follow()
        first = orders.take()
        if first is None:
            return None
        whole = self.slots.is_intact(first) if orders.size == 1 else bool(self.slots.intact(first, orders.size).all())
        if whole:
            if self._lane is not None and self._direct is not None and self._direct.first_slot == first:
                self._lane.order = None
            self.served += orders.size
            for slot in range(first, first + orders.size) if self._missed else ():
                del self._missed[slot]
            return first
        self.spent = True  # whoever wrote past a slot may have hit others too
        raise GeneratorFailed(f"slot {first} is damaged: something wrote beyond its sample; its segment is given up")

    def _woken(self) -> int | None:
        """Take what the receiver's thread has brought, of which no message need follow."""
        if self._receiver is None:
            return None
        self._look()
        return self._take()

    def _follow(self) -> None:
        """Give up what is older than the newest model."""
        generation = self.fence.generation
        if generation != self._generation:
            self._generation = generation
            if self._lane is not None:
                self._lane.grant(None)
            if self._orders is not None:
                self.stale += self._orders.supersede(generation)

    def _place(self, *, at_least: int = 1) -> None:
        """Order every slot that is free, if they are so many or nothing else is ordered."""
        orders = self._orders
        assert orders is not None
        self._follow()
        if self.peer.welcome is not self.welcome or time.monotonic() < self._hold_until:
            return  # registered anew: what is outstanding goes first
        free = orders.free
        if not free or (free < at_least and orders.outstanding and not self._is_due()):
            return
        self._released = 0
        self._placed_at = time.monotonic()
        if self._lane is not None and self._lane.is_open and free == 1 and not orders.outstanding:
            (order,) = self._placed(directly=True)
            if self._lane.offer(order):
                return
            orders.withdraw(order)
        self._send(self._placed(), resent=False)

    def _is_due(self) -> bool:
        """Whether what is free has waited long enough for more, of a reader that waits for the teachers."""
        assert self._orders is not None
        return not self._orders.ready and time.monotonic() - self._placed_at > ORDER_S

    def _placed(self, *, directly: bool = False) -> list[Order]:
        assert self._orders is not None
        orders = self._orders.place(self._generation, directly=directly)
        with nullcontext() if self._receiver is None else self._receiver.lock:
            for order in orders:
                self.slots.prepare(order.first_slot, order.count, order.token, order.generation)
        return orders

    def _listening(self) -> Receiver | None:
        """Return what takes samples of workers on other hosts, if the broker is where other hosts can reach it."""
        station = self.station
        if not station.frontend.startswith("tcp://"):
            return None
        return Receiver(
            self.slots,
            self.segment.buffer,
            own_address(station.frontend),
            keys=station.keys,
            insecure=station.keys is None,
            ports=station.data_ports,
            on_arrival=self._wake,
        )

    def _asking(self) -> StudentLane | None:
        """Return what orders directly; None where that cannot be."""
        if not AVAILABLE or self.station.medium != "shm" or self._receiver is not None:
            return None
        try:
            return StudentLane(self.segment, self.station.runs_directory)
        except OSError as error:
            logger.info("all orders go through the broker: %s", error)
            return None

    def _wake(self) -> None:
        if (peer := getattr(self, "peer", None)) is not None:
            peer.wake()

    def _send(self, orders: list[Order], *, resent: bool) -> None:
        for start in range(0, len(orders), MAX_PIECES):
            # What cannot be sent now is sent with all else at the next registration.
            self.peer.send(messages.Request(orders=tuple(orders[start : start + MAX_PIECES]), resent=resent))

    def _watch(self, seconds: float) -> None:
        """Sleep until one header changes, for a moment: it does sooner than a message can tell."""
        assert self._orders is not None
        runs = self._orders.runs()
        if not doorbell.AVAILABLE or not runs or self._receiver is not None:
            return  # a receiver's thread would not ring
        if self.slots.wait(*self._ahead(runs[0]), seconds):
            self._peek()

    def _await_direct(self, order: Order, until: float) -> int | None:
        """Sleep until what was ordered directly is there, for a moment."""
        seconds = min(until - time.monotonic(), WATCH_S)
        if seconds > 0 and self.slots.wait(order.first_slot, order.token, order.generation, seconds):
            assert self._orders is not None
            self._orders.land(order.first_slot)
        return self._take()

    def _recall(self, lane: StudentLane, order: Order) -> None:
        """Take a direct order back, to make it through the broker, if its worker has not begun to make it."""
        orders = self._orders
        assert orders is not None
        waited_s = time.monotonic() - lane.offered_at
        if orders.first_open(*order[:3]) is None:
            lane.order = None
        elif waited_s > WATCH_S or order.generation < self._generation:
            with lane.held(order.first_slot) as held:
                if held:
                    self._look()
                    if orders.first_open(*order[:3]) is not None:
                        self.slots.prepare(order.first_slot, 1, 0, 0)  # what that worker was asked for is void
                        orders.withdraw(order)
                    lane.order = None
                    lane.grant(None)
                elif lane.busy_s > self.welcome.timeout_s:  # not counted from the order: its reader was away meanwhile
                    self._on_event("lost", {"worker": None, "slots": 1, "dead": False})
                    self.spent = True

    def _look(self) -> None:
        """Look at the header of every slot that may be complete."""
        if self._orders is not None and STORES_IN_ORDER:
            self._land(self._orders, self._orders.runs())

    def _peek(self) -> None:
        """Look where a group would be complete if slots are filled in order; of others a message tells."""
        if self._orders is not None and STORES_IN_ORDER:
            is_complete = self.slots.is_complete
            self._land(self._orders, [run for run in self._orders.runs() if is_complete(*self._ahead(run))])

    def _land(self, orders: Orders, runs: list[tuple[int, int, int, int]]) -> None:
        for run in runs:
            self._land_run(orders, *run)

    def _land_run(self, orders: Orders, first: int, count: int, token: int, generation: int) -> None:
        if count > FEW:
            orders.landed(self.slots.complete(first, count, token, generation), first=first)
            return
        for slot in range(first, first + count):
            if self.slots.is_complete(slot, token, generation):
                orders.land(slot)
            token = token + 1 & messages.U64

    def _ahead(self, run: tuple[int, int, int, int]) -> tuple[int, int, int]:
        """Return slot, token and generation of what is last for the first group of a run."""
        assert self._orders is not None
        first, count, token, generation = run
        ahead = min(count, self._orders.size - first % self._orders.size) - 1
        return first + ahead, (token + ahead) & messages.U64, generation

    def hear(self, timeout_s: float) -> bool:
        """Attend to the next message, and to all that came with it; tell whether there was one."""
        message = self.peer.receive(timeout_s)
        if message is None:
            if self._owed:
                self._collect_owed()
            return False
        while message is not None:
            self._attend(message)
            message = self.peer.receive(0.0)
        if self._owed:
            self._collect_owed()
        return True

    def _attend(self, message: messages.Message) -> None:
        match message:
            case messages.Complete(pieces=pieces, lane=lane):
                if self._lane is not None:
                    self._lane.grant(lane)
                for piece in pieces:
                    if self._receiver is not None and self._look_at(piece):
                        self._owed.append((time.monotonic() + self.welcome.timeout_s, piece))
                    else:
                        self._collect(piece)
            case messages.Failed(order_id=order_id, first_slot=first, count=count, message=reason, tries=tries):
                if self._end(Piece(order_id, first, count)):
                    self._fail(reason, tries=tries)
            case messages.Dropped(pieces=pieces, model=model):
                self.peer.tell(model)
                self.fence.learn(model)
                self._follow()
                if sum(self._end(piece) for piece in pieces):
                    self._hold_until = time.monotonic() + BEHIND_S  # the broker does not know our model yet
            case messages.Lost(pieces=pieces, worker=worker, dead=dead):
                self._lose(pieces, worker, dead=dead)
            case messages.Welcome() as welcome:
                self._begin_anew(welcome)
            case messages.StatsReply(stats=stats):
                self._stats = stats
            case messages.Stop():
                self._on_event("stopped", {"run_id": self.run.run_id})
            case messages.Error() as error:
                self.spent = True
                self.failures.append(refusal(error, self.station.frontend))
            case _:
                logger.warning("dropped a %s that makes no sense to a student", type(message).__name__)

    def _collect(self, piece: Piece) -> None:
        """Have what a worker said it had written."""
        if self._end(piece):
            self._fail(f"a worker said that {_slots(piece)} is complete, but no such sample came", tries=1)

    def _collect_owed(self) -> None:
        """Have what arrived over the network before or after the word of it, or did not in time."""
        now = time.monotonic()
        for _ in range(len(self._owed)):
            due, piece = self._owed.popleft()
            if not self._look_at(piece):
                self._collect(piece)
            elif now > due:
                self._miss(piece)
            else:
                self._owed.append((due, piece))

    def _miss(self, piece: Piece) -> None:
        """Have ordered anew what was lost on its way, as when its worker died; give up when that goes on."""
        assert self._orders is not None
        slots = self._orders.of(*piece).tolist()
        if not self._end(piece):
            return
        self._missed.update(slots)
        tries = max(self._missed[slot] for slot in slots)
        if tries < TRIES:
            logger.warning("a worker sent %s, which did not come; it is ordered again", _slots(piece))
            return
        for slot in slots:
            del self._missed[slot]
        self._fail(f"workers said that they had sent {_slots(piece)}, and no such sample came", tries=tries)

    def _look_at(self, piece: Piece) -> bool:
        """Take what is complete of a piece; tell whether anything of it was still open."""
        orders, (order_id, first, count) = self._orders, piece
        if orders is None or (one := orders.first_open(order_id, first, count)) is None:
            return False
        # Others of the piece may have been ordered anew since; what is of one order has tokens in turn.
        token = (int(orders.token[one]) - (one - first)) & messages.U64
        self._land_run(orders, first, count, token, int(orders.generation[one]))
        return True

    def _end(self, piece: Piece) -> int:
        """Take what is complete of slots that nobody writes any more; return how many were waited for in vain."""
        self._look_at(piece)
        return 0 if self._orders is None or self._orders.settle(*piece) else self._orders.ended(*piece)

    def _fail(self, reason: str, *, tries: int) -> None:
        model = self.fence.model
        unset = "; no model was set, which set_model on rank 0's client does" if model.generation == 0 else ""
        text = f"model {model.model_id!r} gave no sample in {tries} tries: {reason}{unset}"
        self.failures.append(GeneratorFailed(text))
        self._on_event("failed", {"message": reason, "tries": tries})

    def _lose(self, pieces: Iterable[Piece], worker: ProcessIdentity, *, dead: bool) -> None:
        if self._orders is None:
            return
        # A worker on another host writes through our receiver, which lets no late token pass.
        harmless = dead or worker.host != self.station.host
        slots = sum(self._orders.lost(*piece, writer=worker, dead=harmless) for piece in pieces)
        self._on_event("lost", {"worker": worker, "slots": slots, "dead": dead})

    def _bury(self) -> None:
        """Free the slots of silent workers that are dead by now; give up a segment of which nothing else is left."""
        orders = self._orders
        if orders is None or not orders.writers:
            return
        for writer in orders.writers:
            if is_alive(writer, self.station.host) is False:  # type: ignore[arg-type]
                orders.writer_died(writer)
        self.spent = orders.stuck

    def _begin_anew(self, welcome: messages.Welcome) -> None:
        """Tell a broker that knows nothing what is outstanding."""
        self.welcome = welcome
        self.fence.learn(welcome.model)
        if self._lane is not None:
            self._lane.grant(None)  # a new broker may not know yet what workers have
        if welcome.run_id != self.run.run_id:
            self.spent = True  # no worker of that run will attach a segment of this one
            return
        self._on_event("registered", {"run_id": welcome.run_id, "segment": self.segment.name})
        self._owed.clear()  # what the broker before said had been sent is asked for again
        if self._orders is not None:
            self._look()
            self._send(self._orders.unfinished(), resent=True)


class _Whole:
    """See :meth:`Session.whole`; a class, since it is entered twice for every sample."""

    __slots__ = ("_session",)

    def __init__(self, session: Session) -> None:
        self._session = session

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None and not issubclass(kind, TeacherError):
            self._session.spent = True


class _Registration:
    """Make the HELLO of a session, in whichever thread asks; ``peer`` is set once there is one."""

    def __init__(self, station: Station, segment: str, receiver: Receiver | None) -> None:
        self.peer: Peer | None = None
        self._endpoint = None if receiver is None else receiver.endpoint
        self._key = None if receiver is None else receiver.public_key
        self._station, self._segment = station, segment
        self._layout = messages.msgpack.packb(station.layout.to_wire())
        self._identity = process_identity(station.host)

    def __call__(self, attempt: int) -> messages.Hello:
        station, peer = self._station, self.peer
        return messages.Hello(
            version=messages.PROTOCOL_VERSION,
            attempt=attempt,
            session=peer.welcome.session if peer is not None and peer.welcome is not None else None,
            student_id=station.student_id,
            rank=station.rank,
            identity=self._identity,
            medium=station.medium,
            segment=self._segment,
            slot_count=station.slot_count,
            packed_bytes=station.layout.packed_bytes,
            layout=self._layout,
            data_endpoint=self._endpoint,
            data_key=self._key,
            model=peer.model if peer is not None else messages.NO_MODEL,
        )


class _Note:
    """Pass on what a connection hears of the model, in any thread, without keeping the session alive."""

    def __init__(self, fence: Fence, on_event: OnEvent) -> None:
        self._fence, self._on_event = fence, on_event

    def __call__(self, model: messages.ModelState) -> None:
        self._fence.learn(model)
        self._on_event("model", {"generation": model.generation, "model_id": model.model_id})


def _slots(piece: Piece) -> str:
    first, count = piece.first_slot, piece.count
    return f"slot {first}" if count == 1 else f"slots {first} to {first + count - 1}"
