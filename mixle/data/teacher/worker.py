"""Make samples as a broker asks for them, straight into the memory of the students that want them.

One thread does everything in turn: it takes work from the broker, calls the generator, writes, and reports each piece
in one message. The heartbeat, and word of newer models, come by the thread of :mod:`mixle.data.teacher.peer`: before
each sample one comparison says whether it is still wanted.
"""

from __future__ import annotations

import logging
import os
import platform
import secrets
import signal
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import count as counter
from types import FrameType, TracebackType
from typing import Any, NamedTuple, Self, TypeAlias

from mixle.data.teacher import messages
from mixle.data.teacher.attachments import Attachments, Place
from mixle.data.teacher.cleanup import tidy
from mixle.data.teacher.generation import Demand, Generator, GeneratorFunction, Interrupted, Target
from mixle.data.teacher.keys import Keys, require_keys
from mixle.data.teacher.lane import AVAILABLE, Lane
from mixle.data.teacher.messages import (
    DONE,
    FAILED,
    MAX_PIECES,
    NO_MODEL,
    SKIPPED,
    DonePiece,
    HeldPiece,
    ModelState,
    ServedSlots,
    WorkPiece,
)
from mixle.data.teacher.peer import Peer, refusal
from mixle.data.teacher.run import process_identity, require_endpoint, require_host_id, teacher_directory
from mixle.utils.exact import require_exact_bool, require_exact_int, require_finite_float

__all__ = ["Worker"]

logger = logging.getLogger(__name__)

IDLE_S = 1.0
SWEEP_S = 1.0
SAME_FAILURE_S = 10.0
MOST_ROWS = 48  # of one DONE, whose messages may have up to 4,000 bytes each

OnEvent: TypeAlias = Callable[[str, dict[str, Any]], None]


class Task(NamedTuple):
    """A piece of work that waits, and where its samples go."""

    piece: WorkPiece
    info: messages.SegmentInfo
    model: ModelState


class Worker:
    """Serve a generator to the students of a broker.

    Args:
        generator_fn: called with the model's id and its configuration (a dict or None); returns one sample: the bytes
            that ``BatchConfig.encode`` gives, or a mapping of names to tensors or arrays of exactly the specs' shapes
            and dtypes, which are copied straight into the slot.
        slot_size: bytes of the largest sample that it makes; students whose samples are larger are refused.
        backend_endpoint, control_pub_endpoint: the broker's; None is the socket in this user's own directory.
        worker_id: a name for logs and statistics.
        max_batch: the generator takes a third argument, ``count`` of at most this, and returns a sequence of that many
            samples or a mapping of ``(count, *shape)``.
        into_buffer: the generator takes a last argument ``out``, a mapping of names to arrays over the slots'
            memory, ``shape`` or with ``max_batch`` ``(count, *shape)``, fills it and returns None. Arrays of bfloat16
            are uint16.
        patterns: globs of the model ids that it can make.
        prefetch: pieces of work that the broker may send ahead, at most 16.
        keys: CURVE keys, or the directory that has them.
        insecure: allow TCP without keys.
        host_id: 16 hexadecimal digits; workers and students with the same share memory. None asks the system.
        directory: the user's directory of runs, as the broker has it; None is ``$MIXLE_TEACHER_DIR`` or one in
            ``~/.cache``.
        checksum: put a CRC-32 beside each sample, which the student checks.
        on_event: called with a kind and its details: registered, model, failed, refused, abandoned, finished, stopped,
            broker_silent.
        deadline_s: how long to wait for the broker at first. One that goes away later is waited for.

    Raises:
        TypeError, ValueError: an argument that is not what it says above.
    """

    def __init__(
        self,
        generator_fn: GeneratorFunction,
        slot_size: int,
        backend_endpoint: str | None = None,
        control_pub_endpoint: str | None = None,
        worker_id: str | None = None,
        *,
        max_batch: int | None = None,
        into_buffer: bool = False,
        patterns: Sequence[str] = ("*",),
        prefetch: int = 2,
        keys: object = None,
        insecure: bool = False,
        host_id: str | None = None,
        directory: str | os.PathLike[str] | None = None,
        checksum: bool = False,
        on_event: OnEvent | None = None,
        deadline_s: float = 30.0,
    ) -> None:
        if not callable(generator_fn):
            raise TypeError(f"generator_fn={generator_fn!r} must be callable")
        if on_event is not None and not callable(on_event):
            raise TypeError(f"on_event={on_event!r} must be callable or None")
        if max_batch is not None:
            max_batch = require_exact_int(max_batch, "max_batch", minimum=1, maximum=messages.MAX_SLOTS)
        self._generator = Generator(
            generator_fn,
            max_batch=max_batch,
            into_buffer=require_exact_bool(into_buffer, "into_buffer"),
            checksum=require_exact_bool(checksum, "checksum"),
        )
        self.slot_size = require_exact_int(slot_size, "slot_size", minimum=1, maximum=messages.MAX_SAMPLE_BYTES)
        self.worker_id = _require_worker_id(worker_id)
        self.patterns = _require_patterns(patterns)
        self.prefetch = require_exact_int(prefetch, "prefetch", minimum=1, maximum=messages.MAX_PREFETCH)
        self._keys: Keys | None = require_keys(keys)
        self._insecure = require_exact_bool(insecure, "insecure")
        self._directory = None if directory is None else teacher_directory(directory)

        def endpoint(value: str | None, name: str) -> str:
            return require_endpoint(
                value, name, directory=self._directory, keyed=self._keys is not None, insecure=self._insecure
            )

        self.backend_endpoint = endpoint(backend_endpoint, "backend")
        self.control_pub_endpoint = endpoint(control_pub_endpoint, "control_pub")
        self._host = require_host_id(host_id)
        self._on_event = on_event
        self._deadline_s = require_finite_float(deadline_s, "deadline_s", exclusive_minimum=0.0)

        self._demand = Demand()
        self._model = NO_MODEL
        self._peer: Peer | None = None
        self._attachments: Attachments | None = None
        self._lane: Lane | None = None
        self._direct: Counter[str] = Counter()
        self._direct_s = 0.0
        self._failing = ("", 0.0, 0)  # why the last slot failed, when that was logged, and how many since
        self._queue: deque[Task] = deque()
        self._held: dict[bytes, HeldPiece] = {}
        self._unsent: list[messages.Done] = []
        self._told_model: ModelState | None = None
        self._unpacked: tuple[bytes | None, dict[str, Any] | None] = (None, None)
        self._registration_count = 0
        self._swept_at = 0.0
        self._calling = False
        self._signals_seen = counter()
        self._thread: threading.Thread | None = None
        self._runner: int | None = None
        self._running = threading.Lock()
        self._ended = threading.Event()

    @property
    def generation(self) -> int:
        """The newest generation that this worker has heard of."""
        return self._model.generation

    @property
    def model_id(self) -> str:
        """The model of :attr:`generation`."""
        return self._model.model_id

    def run(self) -> None:
        """Work until stopped, by :meth:`stop`, by the broker or, in the main thread, by SIGTERM or Ctrl-C.

        A first signal lets the sample under way be finished, a second abandons it; both return normally.

        Raises:
            BrokerUnreachable: no broker answered within ``deadline_s``.
            TeacherError: the broker refused this worker.
            RuntimeError: it runs or ran already.
        """
        if not self._running.acquire(blocking=False):
            raise RuntimeError(f"worker {self.worker_id} runs or has run already; make a new one")
        self._runner = threading.get_ident()
        try:
            with self._signals():
                self._run()
        finally:
            self._ended.set()

    def start(self) -> None:
        """Work in a thread of its own, until :meth:`stop`."""
        if self._thread is not None:
            raise RuntimeError(f"worker {self.worker_id} was started already; make a new one")
        self._thread = threading.Thread(target=self._run_logged, name=f"mixle-teacher-{self.worker_id}", daemon=True)
        self._thread.start()

    def stop(self, timeout_s: float = 30.0) -> None:
        """Finish the sample that is being made, give the rest back to the broker, and end. Stopping twice is harmless.

        Raises:
            TimeoutError: the generator did not return within ``timeout_s``; it ends as soon as it does.
        """
        self._request_stop()
        if threading.get_ident() != self._runner and (self._running.locked() or self._thread is not None):
            if not self._ended.wait(timeout_s):
                raise TimeoutError(
                    f"worker {self.worker_id} is in its generator for {timeout_s:g} s yet, and ends when that returns"
                )
            if self._thread is not None:
                self._thread.join()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    # ---- life

    def _run_logged(self) -> None:
        try:
            self.run()
        except Exception:
            logger.exception("worker %s ended", self.worker_id)

    def _run(self) -> None:
        if self._demand.ended:
            return
        with ExitStack() as stack:
            self._lane = self._listening()
            if self._lane is not None:
                stack.callback(self._lane.close)
            self._be_a_peer()

    def _be_a_peer(self) -> None:
        with Peer(
            self.backend_endpoint,
            self._registration,
            control_pub_endpoint=self.control_pub_endpoint,
            keys=self._keys,
            on_model=self._hear_of,
        ) as peer:
            self._peer = peer
            try:
                self._begin(peer)
                if self._lane is not None:
                    peer.attend_also(self._lane.fd)
                self._serve(peer)
                self._give_back(peer)
            finally:
                if self._attachments is not None:
                    self._attachments.close()
                peer.close(messages.Bye())

    def _listening(self) -> Lane | None:
        """Return where students of this host may order directly; None where that cannot be."""
        try:
            return Lane(self._directory) if AVAILABLE else None
        except OSError as error:
            logger.info("worker %s takes no direct orders: %s", self.worker_id, error)
            return None

    def _begin(self, peer: Peer) -> None:
        deadline = time.monotonic() + self._deadline_s
        while not self._demand.ended and self._attachments is None:
            left = deadline - time.monotonic()
            if left <= 0:
                raise peer.unreachable(self._deadline_s)
            match peer.receive(left):
                case messages.Welcome() as welcome:
                    self._be_welcome(peer, welcome)
                case messages.Error() as error:
                    raise refusal(error, self.backend_endpoint)

    def _serve(self, peer: Peer) -> None:
        warned = False
        while not self._demand.ended:
            message = peer.receive(0 if self._queue else IDLE_S)
            while message is not None:
                self._handle(peer, message)
                message = peer.receive(0)
            if self._queue:
                self._work(peer)
            elif self._lane is not None:
                self._work_directly(self._lane)
            if time.monotonic() - self._swept_at > SWEEP_S:
                self._sweep()
                silent = peer.welcome is not None and peer.silent_s > peer.welcome.timeout_s
                if silent and not warned:
                    logger.warning("worker %s: %s; waiting for it", self.worker_id, peer.unreachable(peer.silent_s))
                    self._tell("broker_silent", seconds=peer.silent_s)
                elif warned and not silent:
                    logger.info("worker %s: the broker answers again", self.worker_id)
                warned = silent

    def _attend(self) -> None:
        """Do what the broker says, while a student on another host takes its time."""
        peer = self._peer
        while peer is not None and (message := peer.receive(0)) is not None:
            self._handle(peer, message)

    def _give_back(self, peer: Peer) -> None:
        given_back = sum(task.piece.count for task in self._queue)
        back = f"; {_slots(given_back)} that it has not begun goes back to the broker" if given_back else ""
        for task in self._queue:
            self._report(peer, [_row(task.piece, SKIPPED)], 0.0)
        self._queue.clear()
        self._tell_served(peer)
        logger.info("worker %s stops%s", self.worker_id, back)
        self._tell("stopped", given_back=given_back)

    def _request_stop(self) -> None:
        self._demand.end()
        if self._peer is not None:
            self._peer.wake()

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """Stop at SIGTERM and Ctrl-C, where Python delivers them: in the main thread."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        kinds = (signal.SIGTERM, signal.SIGINT)
        before = [signal.signal(kind, self._on_signal) for kind in kinds]
        try:
            yield
        finally:
            for kind, handler in zip(kinds, before, strict=True):
                signal.signal(kind, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        earlier = next(self._signals_seen)  # counted in one step: the handler of another signal may run within this one
        ended = self._demand.ended
        self._request_stop()  # in each: a second signal may cut the handler of the first short
        if (earlier or ended) and self._calling:
            self._calling = False
            raise Interrupted

    # ---- what the broker says

    def _registration(self, attempt: int) -> messages.Ready:
        """Return READY as things are now; may be called in the heartbeat's thread."""
        peer = self._peer
        welcome = None if peer is None else peer.welcome
        return messages.Ready(
            version=messages.PROTOCOL_VERSION,
            attempt=attempt,
            session=None if welcome is None else welcome.session,
            worker_id=self.worker_id,
            identity=process_identity(self._host),
            slot_size=self.slot_size,
            max_batch=self._generator.max_batch,
            patterns=self.patterns,
            prefetch=self.prefetch,
            held=tuple(self._held.copy().values()),
            model=self._model,
            lane=None if self._lane is None else self._lane.name,
        )

    def _hear_of(self, model: ModelState) -> None:
        """Take note of a newer model; in whichever thread it comes."""
        self._model = model
        self._demand.raise_to(model.generation)
        logger.info("worker %s: generation %d, model %r", self.worker_id, model.generation, model.model_id)
        self._tell("model", generation=model.generation, model_id=model.model_id)

    def _handle(self, peer: Peer, message: messages.Message) -> None:
        match message:
            case messages.Work():
                self._take(peer, message)
            case messages.Retire(segment_ids=segment_ids):
                assert self._attachments is not None
                self._tell_served(peer)  # while it is known by which number
                self._drop(peer, self._attachments.retire(segment_ids))
            case messages.Welcome() as welcome:
                self._be_welcome(peer, welcome)
            case messages.Stop():
                self._request_stop()
            case messages.Error(message=text):
                logger.warning("worker %s: the broker answered: %s", self.worker_id, text)
                if peer.welcome is None:
                    raise refusal(message, self.backend_endpoint)
            case _:
                logger.warning("worker %s: %s is nothing for a worker", self.worker_id, type(message).__name__)

    def _be_welcome(self, peer: Peer, welcome: messages.Welcome) -> None:
        logger.info("worker %s is registered with run %s", self.worker_id, welcome.run_id)
        self._tell("registered", run_id=welcome.run_id)
        self._told_model = None
        self._registration_count = peer.registrations
        if self._attachments is None or self._attachments.run_id != welcome.run_id:
            if self._attachments is not None:
                self._attachments.close()
                self._model = peer.model
                self._demand.restart(peer.model.generation)
            tidy(welcome.run_id, directory=self._directory)
            self._attachments = Attachments(
                welcome.run_id,
                host=self._host,
                directory=self._directory,
                slot_size=self.slot_size,
                context=peer.context,
                keys=self._keys,
                insecure=self._insecure,
                checksum=self._generator.checksum,
                attend=self._attend,
            )
        self._attachments.forget(keep={held.segment for held in self._held.values()})
        unsent, self._unsent = self._unsent, []
        for done in unsent:
            self._send(peer, done)

    def _take(self, peer: Peer, work: messages.Work) -> None:
        assert self._attachments is not None
        if work.model is not None:
            self._told_model = work.model
            peer.tell(work.model)
        model = self._told_model
        taken = []
        try:
            self._attachments.learn(work.segments)
        except ValueError as error:
            self._report(peer, [_row(piece, FAILED, str(error)) for piece in work.pieces], 0.0)
            return
        for piece in work.pieces:
            full = len(self._held) >= messages.MAX_PIECES  # a registration names no more, and others would get the rest
            if full or self._attachments.is_ownerless(piece.segment_id):
                self._report(peer, [_row(piece, SKIPPED)], 0.0)
                continue
            try:
                info = self._attachments.info(piece.segment_id)
                if model is None or piece.generation != model.generation:
                    raise ValueError(f"work of generation {piece.generation} came without its model")
            except ValueError as error:
                self._report(peer, [_row(piece, FAILED, str(error))], 0.0)
                continue
            self._held[piece.ticket] = HeldPiece(piece.ticket, info.name, piece.first_slot, piece.count, piece.token)
            taken.append(Task(piece, info, model))
        if peer.registrations != self._registration_count:
            # One that was sent meanwhile may not have named these, and others may get them.
            for task in taken:
                self._report(peer, [_row(task.piece, SKIPPED)], 0.0)
        else:
            self._queue.extend(taken)

    def _drop(self, peer: Peer, names: list[str]) -> None:
        """Give up what waits for segments that are gone."""
        gone = [task for task in self._queue if task.info.name in names]
        if gone:
            self._queue = deque(task for task in self._queue if task.info.name not in names)
            for task in gone:
                self._report(peer, [_row(task.piece, SKIPPED)], 0.0)

    def _sweep(self) -> None:
        assert self._attachments is not None and self._peer is not None
        self._swept_at = time.monotonic()
        self._drop(self._peer, self._attachments.sweep())
        self._tell_served(self._peer)

    # ---- work

    def _work(self, peer: Peer) -> None:
        """Make what waits at the head of the queue: one piece, or as many as go into one call."""
        tasks, targets, places = self._next_call(peer)
        if not tasks:
            return
        model = tasks[0].model
        began = time.perf_counter()
        try:
            self._calling = True
            results = self._generator.fill(targets, model.model_id, self._cfg(model), self._demand)
        except Interrupted:
            logger.warning("worker %s was interrupted; its sample is abandoned", self.worker_id)
            self._tell("abandoned", slots=sum(task.piece.count for task in tasks))
            return
        finally:
            self._calling = False
        rows: list[DonePiece] = []
        for task, target, place, outcomes in zip(tasks, targets, places, results, strict=True):
            piece = task.piece
            shift = piece.first_slot - target.first
            moved = [outcome._replace(first=outcome.first + shift) for outcome in outcomes] if shift else outcomes
            rows += [DonePiece(piece.ticket, *outcome) for outcome in place.deliver(piece, moved, self._demand)]
        if self._demand.newest > model.generation:
            self._tell_of_the_end(rows)
        self._report(peer, rows, time.perf_counter() - began)

    def _work_directly(self, lane: Lane) -> None:
        """Make the slot that a student asked for, unless the broker would give it to another by now."""
        order = lane.take()
        model, attachments = self._told_model, self._attachments
        if order is None or model is None or attachments is None:
            return
        place = attachments.mapped(order.segment)
        if place is None or not order.generation == model.generation >= self._demand.newest:
            return
        target = place.claim(order)
        if target is None:
            return
        began = time.perf_counter()
        try:
            self._calling = True
            results = self._generator.fill([target], model.model_id, self._cfg(model), self._demand)
        except Interrupted:
            logger.warning("worker %s was interrupted; its sample is abandoned", self.worker_id)
            self._tell("abandoned", slots=1)
            return
        finally:
            self._calling = False
            place.let_go(order.slot)
        if results[0][0].outcome == DONE:  # of what failed the student's order by way of the broker will tell
            self._direct[order.segment] += 1
            self._direct_s += time.perf_counter() - began

    def _tell_served(self, peer: Peer) -> None:
        """Report what was ordered directly."""
        if self._attachments is None:  # it is stopped before a broker has welcomed it
            return
        direct, self._direct = self._direct, Counter()
        told = [(self._attachments.told_id(name), count) for name, count in direct.items()]
        rows = [ServedSlots(one, count) for one, count in told if one is not None]
        if rows:
            peer.send(messages.Served(segments=tuple(rows[:MAX_PIECES]), seconds=self._direct_s))
        self._direct_s = 0.0

    def _next_call(self, peer: Peer) -> tuple[list[Task], list[Target], list[Place]]:
        assert self._attachments is not None
        tasks: list[Task] = []
        targets: list[Target] = []
        places: list[Place] = []
        room = 0
        while self._queue:
            task = self._queue[0]
            if tasks and (task.piece.count > room or task.piece.generation != tasks[0].piece.generation):
                break
            self._queue.popleft()
            try:
                place = self._attachments.place(task.info)
                target = place.target(task.piece)
            except (ValueError, OSError) as error:
                logger.warning("worker %s refuses work: %s", self.worker_id, error)
                self._tell("refused", message=str(error))
                self._report(peer, [_row(task.piece, FAILED, str(error))], 0.0)
                continue
            tasks.append(task)
            targets.append(target)
            places.append(place)
            room = (self._generator.max_batch or 0) - sum(target.count for target in targets)
            if not self._generator.joins or room <= 0:
                break
        return tasks, targets, places

    def _cfg(self, model: ModelState) -> dict[str, Any] | None:
        packed, unpacked = self._unpacked
        if packed is not model.packed_cfg:
            unpacked = model.model_cfg
            self._unpacked = (model.packed_cfg, unpacked)
        return unpacked

    def _tell_of_the_end(self, rows: list[DonePiece]) -> None:
        """Say what became of work that was overtaken by a newer model or a stop."""
        skipped = sum(row.count for row in rows if row.outcome == SKIPPED)
        finished = sum(row.count for row in rows) - skipped
        kind = "finished" if finished else "abandoned"
        why = "told to stop" if self._demand.ended else "a newer model came"
        logger.info(
            "worker %s: %s; of what it had begun %s was finished, %d abandoned",
            self.worker_id,
            why,
            _slots(finished),
            skipped,
        )
        self._tell(kind, finished=finished, abandoned=skipped, stopping=self._demand.ended)

    def _report(self, peer: Peer, rows: list[DonePiece], seconds: float) -> None:
        for row in rows:
            if row.outcome == FAILED:
                self._warn_of_failure(row)
                self._tell("failed", slots=row.count, message=row.message)
            self._held.pop(row.ticket, None)
        for start in range(0, len(rows), MOST_ROWS):
            self._send(peer, messages.Done(pieces=tuple(rows[start : start + MOST_ROWS]), seconds=seconds))
            seconds = 0.0

    def _warn_of_failure(self, row: DonePiece) -> None:
        """Log a failure; what fails again in the same way only once in so many seconds, with how often it did."""
        now, reason = time.monotonic(), row.message or ""
        before, since, count = self._failing
        count = row.count if before != reason else count + row.count
        if before != reason or now - since >= SAME_FAILURE_S:
            logger.warning("worker %s: %s failed: %s", self.worker_id, _slots(count), reason)
            self._failing = (reason, now, 0)
        else:
            self._failing = (reason, since, count)

    def _send(self, peer: Peer, done: messages.Done) -> None:
        if not peer.send(done):
            self._unsent.append(done)

    def _tell(self, kind: str, **details: Any) -> None:
        if self._on_event is None:
            return
        try:
            self._on_event(kind, details)
        except Exception:
            logger.exception("worker %s: on_event failed at %r", self.worker_id, kind)


def _slots(count: int) -> str:
    return "1 slot" if count == 1 else f"{count} slots"


def _row(piece: WorkPiece, outcome: int, message: str | None = None) -> DonePiece:
    return DonePiece(piece.ticket, piece.first_slot, piece.count, outcome, message)


def _require_worker_id(worker_id: object) -> str:
    if worker_id is None:
        return f"{platform.node()[:80] or 'host'}-{secrets.token_hex(4)}"
    if not isinstance(worker_id, str):
        raise TypeError(f"worker_id={worker_id!r} must be a string or None, not {type(worker_id).__name__}")
    if not 0 < len(worker_id.encode()) <= 128:
        raise ValueError(f"worker_id={worker_id[:40]!r} must have 1 to 128 bytes")
    return worker_id


def _require_patterns(patterns: object) -> tuple[str, ...]:
    if isinstance(patterns, (str, bytes)) or not isinstance(patterns, Sequence):
        raise TypeError(f"patterns={patterns!r} must be a sequence of globs, such as ('teacher-*',)")
    if not 0 < len(patterns) <= messages.MAX_PATTERNS:
        raise ValueError(f"patterns has {len(patterns)} globs; a worker has 1 to {messages.MAX_PATTERNS}")
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise TypeError(f"patterns holds {pattern!r}, which is no string")
        if not 0 < len(pattern.encode()) <= messages.MAX_PATTERN_BYTES:
            raise ValueError(f"patterns holds {pattern[:40]!r}; a glob has 1 to {messages.MAX_PATTERN_BYTES} bytes")
    return tuple(patterns)
