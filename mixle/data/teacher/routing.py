"""What the broker does with each message: who is registered, who lives, who leads, and what goes to whom. No sockets.

Time, random numbers and the watch over processes come in from outside, so that every interleaving can be played.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import logging
import math
import os
import secrets
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal

from mixle.data.teacher import messages
from mixle.data.teacher.errors import ProtocolError, VersionMismatch
from mixle.data.teacher.globs import Globs
from mixle.data.teacher.messages import MAX_GENERATION, PROTOCOL_VERSION, Message, ModelState, SegmentInfo
from mixle.data.teacher.run import ProcessIdentity, Run
from mixle.data.teacher.scheduling import Scheduler
from mixle.data.teacher.stats import BrokerStats, StudentStats, WorkerStats
from mixle.data.teacher.work import Student, Worker

logger = logging.getLogger(__name__)

Channel = Literal["frontend", "backend", "control"]
OnEvent = Callable[[str, dict[str, Any]], None]

MAX_PEERS = 4_096  # students, and workers
NOISE_LIMIT = 50  # answers to garbage and strangers for one connection in one heartbeat
FORGOTTEN_AFTER = 10  # timeouts of silence

_ACCEPTED: dict[Channel, frozenset[type[Message]]] = {
    "frontend": frozenset(
        {
            messages.Ask,
            messages.Hello,
            messages.Request,
            messages.Cancel,
            messages.Bye,
            messages.Stats,
            messages.Beat,
        }
    ),
    "backend": frozenset({messages.Ask, messages.Ready, messages.Done, messages.Served, messages.Bye, messages.Beat}),
    "control": frozenset({messages.Ask, messages.SetModel, messages.Stop}),
}


@dataclass(slots=True, eq=False)
class Peer:
    """A registered student or worker and the connection it speaks on."""

    channel: Channel
    connection: bytes  # empty: it broke, and a beat is answered with WHO
    session: bytes
    identity: ProcessIdentity
    name: str
    entry: Student | Worker
    heard_at: float
    rank: int = 0
    silent: bool = False
    last_switch: tuple[bytes, ModelState] | None = None
    counted: int = 0
    rate: float = 0.0

    def __str__(self) -> str:
        return f"{self.name} (process {self.identity.pid})"


class Routing:
    """Handle the messages of one run.

    Args:
        run: id and secret.
        scheduler: gives the work.
        host: this host's id.
        watch: begin to watch a process of this host; False if it does not exist.
        unwatch: end that.
        unlink: delete the segment (medium, name) of a dead student of this host.
        on_event: called with what happens and its details.
    """

    def __init__(
        self,
        run: Run,
        scheduler: Scheduler,
        *,
        host: str,
        now: float,
        heartbeat_s: float,
        timeout_s: float,
        watch: Callable[[ProcessIdentity], bool],
        unwatch: Callable[[ProcessIdentity], None],
        unlink: Callable[[messages.MediumName, str], None],
        on_event: OnEvent | None = None,
    ) -> None:
        self.run, self.scheduler = run, scheduler
        self.broker_id = secrets.token_bytes(8)
        self.stopping = False
        self.internal_errors = self.undeliverable = self.keys_refused = 0
        self._host, self._heartbeat_s, self._timeout_s = host, heartbeat_s, timeout_s
        self._watch, self._unwatch, self._unlink, self._on_event = watch, unwatch, unlink, on_event
        self._started = self._ticked = now
        self._connections: dict[tuple[Channel, bytes], Peer] = {}
        self._sessions: dict[bytes, Peer] = {}
        self._peers: dict[Student | Worker, Peer] = {}
        self._processes: dict[ProcessIdentity, dict[Peer, None]] = {}
        self._student_ids: dict[str, Peer] = {}
        self._leader: Peer | None = None
        self._out: list[tuple[Channel, bytes, Message]] = []
        self._news: list[messages.News] = []
        self._garbage: Counter[str] = Counter()
        self._strangers = 0
        self._noise: Counter[tuple[Channel, bytes]] = Counter()
        self._rate = 0.0
        self._counted = 0

    # What comes in.

    def handle(
        self, channel: Channel, connection: bytes, frames: list[bytes], now: float, address: str | None = None
    ) -> None:
        """Obey one message, or count and answer what is none; raises nothing.

        ``address`` is the IP address that it came from, if it came by TCP.
        """
        try:
            if len(frames) != 2:
                raise ProtocolError(f"a message has 2 frames, this one {len(frames)}")
            message = messages.parse(frames[0], frames[1], _ACCEPTED[channel])
        except ProtocolError as error:
            self._garbage[channel] += 1
            kind = "version" if isinstance(error, VersionMismatch) else "protocol"
            self._answer_noise(channel, connection, _error(kind, str(error)))
            return
        try:
            self._obey(channel, connection, message, now, address)
        except Exception:  # one peer's message must not end the service of all
            self.internal_errors += 1
            logger.exception("could not handle %s", type(message).__name__)

    def _obey(self, channel: Channel, connection: bytes, message: Message, now: float, address: str | None) -> None:
        peer = self._connections.get((channel, connection))
        match message:  # the most frequent first
            case messages.Request() if peer is not None and isinstance(peer.entry, Student):
                self._hear(peer, now)
                refusal = self.scheduler.request(peer.entry, message.orders, now, resent=message.resent)
                if refusal is not None:
                    self._answer_noise(channel, connection, _error("refused", refusal))
            case messages.Done() if peer is not None and isinstance(peer.entry, Worker):
                self._hear(peer, now)
                self.scheduler.report(peer.entry, message.pieces, message.seconds, now)
            case messages.Served() if peer is not None and isinstance(peer.entry, Worker):
                self._hear(peer, now)
                self.scheduler.served(peer.entry, message.segments, message.seconds)
            case messages.Beat():
                self._beat(channel, connection, message, now)
            case messages.Ask():
                self._answer(channel, connection, self._about_run())
            case messages.Stats():
                self._answer(channel, connection, messages.StatsReply(stats=self.stats(now).pack()))
            case messages.Hello():
                self._hello(connection, message, now, address)
            case messages.Ready():
                self._ready(connection, message, now)
            case messages.SetModel():
                self._set_model(connection, message)
            case messages.Stop():
                self._stop(connection)
            case _ if peer is None:
                self._strangers += 1
                self._answer_noise(channel, connection, messages.Who())
            case messages.Cancel() if isinstance(peer.entry, Student):
                self._hear(peer, now)
                self.scheduler.cancel(peer.entry, message.order_ids)
            case messages.Bye():
                self._remove(peer, now, died=False, why="left")

    def process_died(self, identity: ProcessIdentity, now: float) -> None:
        """Take note that a process of this host is gone."""
        for peer in list(self._processes.get(identity, ())):
            self._remove(peer, now, died=True, why="died")

    def undelivered(self, channel: Channel, connection: bytes, message: Message, now: float) -> None:
        """Take note that a message could not be sent; its receiver registers again if it lives."""
        self.undeliverable += 1
        peer = self._connections.get((channel, connection))
        if peer is None:
            return
        self._detach(peer)
        if isinstance(message, messages.Work) and isinstance(peer.entry, Worker):  # before they are reported lost
            self.scheduler.recall(peer.entry, [piece.ticket for piece in message.pieces], now)
        self._silence(peer, True)

    def tick(self, now: float) -> None:
        """Look after the silent, publish a heartbeat and count rates; to be called once a heartbeat."""
        elapsed = max(now - self._ticked, 1e-3)
        asleep = elapsed - self._heartbeat_s
        self._ticked = now
        self._noise.clear()
        for peer in list(self._sessions.values()):
            if asleep > self._heartbeat_s:
                peer.heard_at += asleep  # it was this process that slept
            silent_s = now - peer.heard_at
            if silent_s > FORGOTTEN_AFTER * self._timeout_s and self._may_forget(peer):
                self._remove(peer, now, died=False, why="was forgotten")
            elif silent_s > self._timeout_s and not peer.silent:
                self._silence(peer, True)
                self._event("silent", peer)
            done = peer.entry.completed - peer.counted
            peer.counted = peer.entry.completed
            peer.rate = _smoothed(peer.rate, done / elapsed)
        completed = self.scheduler.counts.completed
        self._rate = _smoothed(self._rate, (completed - self._counted) / elapsed)
        self._counted = completed
        self.scheduler.check_timeouts(now)
        self._publish("BEAT")

    # What goes out.

    def take(self, now: float) -> tuple[list[tuple[Channel, bytes, Message]], list[messages.News]]:
        """Return what is to be sent (channel, connection, message) and published since the last call."""
        self.scheduler.advance(now)
        out, self._out = self._out, []
        for target, message in self.scheduler.take(now):
            peer = self._peers.get(target)
            if peer is not None and peer.connection:
                out.append((peer.channel, peer.connection, message))
        news, self._news = self._news, []
        return out, news

    def stats(self, now: float) -> BrokerStats:
        """Return the figures."""
        scheduler = self.scheduler
        counts = asdict(scheduler.counts)
        counts["stale_dropped"] = counts.pop("stale")
        students, workers = [], []
        for entry, peer in self._peers.items():
            if isinstance(entry, Student):
                students.append(
                    StudentStats(
                        student=peer.name,
                        process=_process(peer),
                        rank=peer.rank,
                        slots=entry.slot_count,
                        queued=entry.queued,
                        working=sum(ticket.open.bit_count() for ticket in entry.tickets.values()),
                        completed=entry.completed,
                        failed=entry.failed,
                        silent=peer.silent,
                    )
                )
            else:
                workers.append(
                    WorkerStats(
                        worker=peer.name,
                        process=_process(peer),
                        state=_state(entry),
                        patterns=" ".join(entry.globs.patterns)[:256],
                        outstanding=entry.outstanding,
                        completed=entry.completed,
                        failed=entry.failed,
                        rate=round(peer.rate, 3),
                        seconds=entry.seconds,
                        slot_size=entry.slot_size,
                    )
                )
        latencies = sorted(scheduler.latencies)
        return BrokerStats(
            run_id=self.run.run_id,
            pid=os.getpid(),
            uptime_s=round(now - self._started, 3),
            generation=scheduler.model.generation,
            model_id=scheduler.model.model_id,
            leader="" if self._leader is None else str(self._leader),
            students_registered=len(students),
            workers_registered=len(workers),
            workers_serving=sum(entry.serves and not entry.silent for entry in scheduler.workers),
            queued=scheduler.queued,
            working=sum(entry.outstanding for entry in scheduler.workers),
            rate=round(self._rate, 3),
            latency_p50_s=_quantile(latencies, 0.50),
            latency_p99_s=_quantile(latencies, 0.99),
            garbage_frontend=self._garbage["frontend"],
            garbage_backend=self._garbage["backend"],
            garbage_control=self._garbage["control"],
            strangers=self._strangers,
            keys_refused=self.keys_refused,
            undeliverable=self.undeliverable,
            internal_errors=self.internal_errors,
            students=tuple(students),
            workers=tuple(workers),
            **counts,
        )

    # Registration.

    def _hello(self, connection: bytes, hello: messages.Hello, now: float, address: str | None) -> None:
        prefix = f"/mx{self.run.run_id}-{hello.identity.pid:x}-"
        if not hello.segment.startswith(prefix):
            refusal = f"segment={hello.segment!r} is not one of this run and process, which begin with {prefix}"
            self._answer_noise("frontend", connection, _error("refused", refusal))
            return
        elsewhere = _elsewhere(hello.data_endpoint, address)
        if elsewhere is not None:
            self._answer_noise("frontend", connection, _error("identity", elsewhere))
            return
        owner = next((p for p in self._student_ids.values() if _segment(p) == hello.segment), None)
        if owner is not None and (owner.name, owner.identity) != (hello.student_id, hello.identity):
            self._answer_noise("frontend", connection, _error("refused", f"segment={hello.segment!r} is another's"))
            return
        same = self._student_ids.get(hello.student_id)
        if same is not None and same.identity != hello.identity:
            self._answer_noise("frontend", connection, _error("refused", "student_id is another's"))
            return
        info = SegmentInfo(
            0,
            hello.medium,
            hello.segment,
            hello.slot_count,
            hello.packed_bytes,
            hello.layout,
            hello.data_endpoint,
            hello.data_key,
            hello.identity,
        )
        if same is not None and same.session == hello.session and _info(same) == info:
            self._rebind(same, connection, now)
            self.scheduler.restart_student(_student(same))
        else:
            if not self._admit("frontend", connection, hello.identity):
                return
            leads = same is not None and same is self._leader
            student = Student(hello.segment, hello.slot_count, hello.packed_bytes, info)
            peer = self._add("frontend", connection, hello.identity, hello.student_id, student, now)
            peer.rank = hello.rank
            if same is not None:
                peer.last_switch = same.last_switch
                if same.session in self._sessions:
                    self._remove(same, now, died=False, why="registered anew")
            if leads:
                self._leader = peer
            self._student_ids[hello.student_id] = peer
            self.scheduler.add_student(student, now)
        self._adopt(hello.model)
        self._welcome("frontend", connection, hello.attempt)

    def _ready(self, connection: bytes, ready: messages.Ready, now: float) -> None:
        known = self._sessions.get(ready.session or b"") or self._connections.get(("backend", connection))
        globs = Globs(ready.patterns)
        worker = Worker(ready.identity, ready.slot_size, ready.max_batch, globs, ready.prefetch, lane=ready.lane)
        if known is not None and _same_worker(known, ready):
            self._rebind(known, connection, now)
            entry = known.entry
            assert isinstance(entry, Worker)
            self.scheduler.restart_worker(entry, ready.held, now)
        else:
            if not self._admit("backend", connection, ready.identity):
                return
            self._add("backend", connection, ready.identity, ready.worker_id, worker, now)
            self.scheduler.add_worker(worker, ready.held, now)
        self._adopt(ready.model)
        self._welcome("backend", connection, ready.attempt)

    def _admit(self, channel: Channel, connection: bytes, identity: ProcessIdentity) -> bool:
        """Tell whether a peer may register; watches its process then."""
        present = self.scheduler.students if channel == "frontend" else self.scheduler.workers
        if len(present) >= MAX_PEERS:
            self._answer_noise(channel, connection, _error("limit", f"{MAX_PEERS} are registered already"))
            return False
        if identity.host == self._host and identity not in self._processes and not self._watch(identity):
            refusal = f"there is no process {identity.pid} that started at {identity.start} on this host"
            self._answer_noise(channel, connection, _error("identity", refusal))
            return False
        return True

    def _add(
        self,
        channel: Channel,
        connection: bytes,
        identity: ProcessIdentity,
        name: str,
        entry: Student | Worker,
        now: float,
    ) -> Peer:
        """Register a peer; another one on its connection is replaced."""
        before = self._connections.get((channel, connection))
        peer = Peer(channel, connection, secrets.token_bytes(16), identity, name, entry, now)
        self._connections[channel, connection] = peer
        self._sessions[peer.session] = peer
        self._peers[entry] = peer
        self._processes.setdefault(identity, {})[peer] = None
        if before is not None:
            self._remove(before, now, died=False, why="registered anew")
        self._event("registered", peer)
        return peer

    def _rebind(self, peer: Peer, connection: bytes, now: float) -> None:
        other = self._connections.get((peer.channel, connection))
        if other is not None and other is not peer:
            self._remove(other, now, died=False, why="registered as another")
        self._detach(peer)
        peer.connection = connection
        self._connections[peer.channel, connection] = peer
        self._hear(peer, now)

    def _detach(self, peer: Peer) -> None:
        """Take a peer off its connection."""
        if self._connections.get((peer.channel, peer.connection)) is peer:
            del self._connections[peer.channel, peer.connection]
        peer.connection = b""

    def _remove(self, peer: Peer, now: float, *, died: bool, why: str) -> None:
        self._detach(peer)
        del self._sessions[peer.session], self._peers[peer.entry]
        process = self._processes[peer.identity]
        del process[peer]
        if not process:
            del self._processes[peer.identity]
            if peer.identity.host == self._host:
                self._unwatch(peer.identity)
        if isinstance(peer.entry, Student):
            if self._student_ids.get(peer.name) is peer:
                del self._student_ids[peer.name]
            if self._leader is peer:
                self._leader = None
            self.scheduler.remove_student(peer.entry)
            if died:
                self._unlink(peer.entry.info.medium, peer.entry.segment)
        elif peer.silent and not died and why == "was forgotten":
            self.scheduler.abandon_worker(peer.entry)
        else:
            self.scheduler.remove_worker(peer.entry, now, died=died)
        self._event(why, peer)

    # Life.

    def _beat(self, channel: Channel, connection: bytes, beat: messages.Beat, now: float) -> None:
        peer = self._sessions.get(beat.session)
        if peer is None or peer.channel != channel or not peer.connection:
            self._strangers += 1
            self._answer_noise(channel, connection, messages.Who())
            return
        self._hear(peer, now)
        self._answer(channel, connection, messages.Pong(broker_id=self.broker_id, model=self.scheduler.model))

    def _may_forget(self, peer: Peer) -> bool:
        """Tell whether nothing is lost with a silent peer: if it lives, it registers again and says what it has."""
        return isinstance(peer.entry, Student) or not peer.entry.tickets or peer.identity.host != self._host

    def _hear(self, peer: Peer, now: float) -> None:
        peer.heard_at = now
        if peer.silent:
            self._silence(peer, False)
            self._event("returned", peer)

    def _silence(self, peer: Peer, silent: bool) -> None:
        peer.silent = silent
        if isinstance(peer.entry, Student):
            self.scheduler.silence_student(peer.entry, silent)
        else:
            self.scheduler.silence_worker(peer.entry, silent)

    # The model.

    def _set_model(self, connection: bytes, asked: messages.SetModel) -> None:
        def refuse(kind: str, message: str) -> None:
            self._answer_noise("control", connection, _error(kind, message, asked.request_id))

        peer = self._sessions.get(asked.session)
        if peer is None or peer.name != asked.student_id or not isinstance(peer.entry, Student):
            self._strangers += 1
            refuse("identity", "this student is not registered; say HELLO first")
        elif peer.rank != 0 or asked.rank != 0:
            refuse("leader", f"rank {max(peer.rank, asked.rank)} may not switch the model; rank 0 leads")
        elif self._leader is not None and self._leader is not peer:
            refuse("leader", f"process {self._leader.identity.pid} leads this run; stop it first, or start another run")
        elif max(self.scheduler.model.generation, asked.known) >= MAX_GENERATION:
            refuse("limit", f"generation {MAX_GENERATION} is the last")
        else:
            if self._leader is None:
                self._leader = peer
            if peer.last_switch is None or peer.last_switch[0] != asked.request_id:
                state = self._switch(asked.model_id, asked.packed_cfg, known=asked.known)
                peer.last_switch = asked.request_id, state
            _, state = peer.last_switch
            self._answer("control", connection, messages.Model(request_id=asked.request_id, model=state))

    def _switch(self, model_id: str, packed_cfg: bytes | None, *, known: int = 0) -> ModelState:
        generation = max(self.scheduler.model.generation, known) + 1
        state = ModelState(generation, model_id, packed_cfg, self._seal(generation, model_id, packed_cfg))
        self.scheduler.switch(state)
        self._publish("MODEL")
        logger.info("generation %d: model %r", generation, model_id)
        if self._on_event is not None:
            self._call("switched", {"generation": generation, "model_id": model_id})
        return state

    def _adopt(self, state: ModelState) -> None:
        """Take over what an earlier broker of this run said; two models of one generation are followed by another."""
        mine = self.scheduler.model
        if state.generation < max(mine.generation, 1) or state == mine:
            return
        if not hmac.compare_digest(state.seal, self._seal(*state[:3])):
            return
        if state.generation > mine.generation:
            self.scheduler.switch(state)
            self._publish("MODEL")
        elif state.generation < MAX_GENERATION:
            self._switch(mine.model_id, mine.packed_cfg)

    def _seal(self, generation: int, model_id: str, packed_cfg: bytes | None) -> bytes:
        said = messages.msgpack.packb([generation, model_id, packed_cfg])
        return hashlib.blake2b(said, key=self.run.secret, digest_size=16).digest()

    def _publish(self, topic: str) -> None:
        self._news.append(
            messages.News(topic=topic, run_id=self.run.run_id, broker_id=self.broker_id, model=self.scheduler.model)
        )

    def _stop(self, connection: bytes) -> None:
        for peer in self._peers.values():
            if isinstance(peer.entry, Worker):
                self._answer(peer.channel, peer.connection, messages.Stop())
        self._answer("control", connection, messages.Stopping())
        self._publish("STOP")
        self.stopping = True

    # Answers.

    def _about_run(self) -> messages.Run:
        return messages.Run(
            version=PROTOCOL_VERSION,
            run_id=self.run.run_id,
            broker_id=self.broker_id,
            model=self.scheduler.model,
            heartbeat_s=self._heartbeat_s,
            timeout_s=self._timeout_s,
        )

    def _welcome(self, channel: Channel, connection: bytes, attempt: int) -> None:
        welcome = messages.Welcome(
            version=PROTOCOL_VERSION,
            attempt=attempt,
            run_id=self.run.run_id,
            broker_id=self.broker_id,
            session=self._connections[channel, connection].session,
            model=self.scheduler.model,
            heartbeat_s=self._heartbeat_s,
            timeout_s=self._timeout_s,
        )
        self._answer(channel, connection, welcome)

    def _answer(self, channel: Channel, connection: bytes, message: Message) -> None:
        self._out.append((channel, connection, message))

    def _answer_noise(self, channel: Channel, connection: bytes, message: Message) -> None:
        """Answer what may be an attack: so many times in a heartbeat and no more."""
        key = (channel, connection)
        if len(self._noise) < MAX_PEERS or key in self._noise:
            self._noise[key] += 1
            if self._noise[key] <= NOISE_LIMIT:
                self._answer(channel, connection, message)

    def _event(self, what: str, peer: Peer) -> None:
        kind = "student" if isinstance(peer.entry, Student) else "worker"
        logger.info("%s %s %s", kind, peer, what)
        if self._on_event is not None:
            self._call(what, {"kind": kind, "name": peer.name, "process": peer.identity, "rank": peer.rank})

    def _call(self, what: str, details: dict[str, Any]) -> None:
        assert self._on_event is not None
        try:
            self._on_event(what, details)
        except Exception:  # a listener's fault is not the run's
            logger.exception("on_event failed")


def _error(kind: str, message: str, request_id: bytes | None = None) -> messages.Error:
    return messages.Error(kind=kind, message=message[:1_000], request_id=request_id)


def _elsewhere(data_endpoint: str | None, address: str | None) -> str | None:
    """Say what is wrong with where a student takes samples: workers are sent to its own address, and nowhere else."""
    if data_endpoint is None:
        return None
    host = data_endpoint.removeprefix("tcp://").rpartition(":")[0].strip("[]")
    try:
        if address is not None and _ip(host) == _ip(address):
            return None
    except ValueError:
        return f"data_endpoint={data_endpoint!r} must have an IP address"
    return (
        f"data_endpoint={data_endpoint!r} is not where this student's connection comes from, {address or 'this host'}; "
        "a student takes samples at the address by which the broker sees it, so no NAT may be between them"
    )


def _ip(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """Return an address, without a zone, an IPv4 one that is written as IPv6 as what it is."""
    address = ipaddress.ip_address(text.partition("%")[0])
    return getattr(address, "ipv4_mapped", None) or address


def _student(peer: Peer) -> Student:
    assert isinstance(peer.entry, Student)
    return peer.entry


def _info(peer: Peer) -> SegmentInfo:
    return _student(peer).info


def _segment(peer: Peer) -> str:
    return _student(peer).segment


def _same_worker(peer: Peer, ready: messages.Ready) -> bool:
    entry = peer.entry
    return (
        isinstance(entry, Worker)
        and (peer.name, peer.identity) == (ready.worker_id, ready.identity)
        and (entry.slot_size, entry.max_batch, entry.prefetch, entry.lane)
        == (ready.slot_size, ready.max_batch, ready.prefetch, ready.lane)
        and entry.globs.patterns == ready.patterns
    )


def _process(peer: Peer) -> str:
    return f"{peer.identity.host}/{peer.identity.pid}"


def _state(worker: Worker) -> str:
    if worker.silent:
        return "silent"
    if not worker.serves:
        return "other model"
    return "busy" if worker.outstanding else "idle"


def _smoothed(before: float, now: float) -> float:
    return 0.5 * before + 0.5 * now if math.isfinite(now) else before


def _quantile(ordered: list[float], share: float) -> float | None:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else None
