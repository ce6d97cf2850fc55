"""The broker: one thread between students, who ask for samples, and workers, who make them. It never sees a sample.

Four sockets, and the processes of this host, are polled together; what comes in goes through :class:`.routing.Routing`
at once, and what comes of it is sent before the next poll. Everything it knows its peers tell it again after a restart.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import threading
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from socket import socketpair
from types import FrameType, TracebackType
from typing import Any, Self

from mixle.data.teacher import messages, wire
from mixle.data.teacher.cleanup import tidy
from mixle.data.teacher.handshakes import FailedHandshakes
from mixle.data.teacher.keys import Admission, Keys, require_keys
from mixle.data.teacher.process_watch import ProcessWatch
from mixle.data.teacher.routing import Channel, OnEvent, Routing
from mixle.data.teacher.run import Endpoints, held_run, require_host_id, teacher_directory
from mixle.data.teacher.scheduling import Scheduler
from mixle.data.teacher.segment import unlink_segment
from mixle.data.teacher.stats import BrokerStats
from mixle.utils.exact import require_exact_bool, require_finite_float, require_positive_int
from mixle.utils.optional_import import optional_import

__all__ = ["Broker"]

logger = logging.getLogger(__name__)

DRAINED = 128  # messages of one socket before the others have their turn
SEND_QUEUE = 20_000  # messages that may wait for one peer
RECEIVE_QUEUE = 1_000
LINGER_S = 0.3
FOUND_S = 0.5  # peers look for a new broker ten times a second
_SUBSCRIPTIONS = {b"\1" + topic for topic in (b"", b"MODEL", b"BEAT", b"STOP")}
JOIN_S = 10.0


class Broker:
    """Route orders of students to workers.

    Args:
        frontend_endpoint: where students connect, ``ipc:///path`` or ``tcp://host:port``; None is a socket in the
            user's own directory.
        backend_endpoint: where workers connect.
        control_endpoint: where the leader switches models.
        control_pub_endpoint: where switches are published.
        keys: CURVE keys, a :class:`~mixle.data.teacher.keys.Keys` or the directory of some; every peer needs them then.
        insecure: allow TCP without keys.
        directory: the user's directory of runs; None is ``$MIXLE_TEACHER_DIR`` or one in ``~/.cache``.
        host_id: what this host is called, if not by its own id.
        heartbeat_s: seconds between the heartbeats of peers and broker.
        timeout_s: seconds of silence after which a peer gets nothing more until it is heard again.
        max_tries: how often a generator may fail with a sample.
        order_timeout_s: seconds that a worker may take for an order; None is for ever.
        on_event: called in the broker's thread with what happened (``"registered"``, ``"left"``, ``"died"``,
            ``"silent"``, ``"returned"``, ``"switched"``...) and its details.

    Raises:
        TypeError, ValueError: an argument is not what it says above.
        PermissionError: the directory is not this user's alone.
    """

    def __init__(
        self,
        frontend_endpoint: str | None = None,
        backend_endpoint: str | None = None,
        control_endpoint: str | None = None,
        control_pub_endpoint: str | None = None,
        *,
        keys: Keys | str | os.PathLike[str] | None = None,
        insecure: bool = False,
        directory: str | os.PathLike[str] | None = None,
        host_id: str | None = None,
        heartbeat_s: float = 0.5,
        timeout_s: float = 5.0,
        max_tries: int = 3,
        order_timeout_s: float | None = None,
        on_event: OnEvent | None = None,
    ) -> None:
        self._zmq = optional_import("zmq", extra="teacher")
        self._keys = require_keys(keys)
        if self._keys is not None:
            self._keys.require_server()
        self._host = require_host_id(host_id)
        self._heartbeat_s = require_finite_float(heartbeat_s, "heartbeat_s", minimum=0.01, maximum=600.0)
        self._timeout_s = require_finite_float(timeout_s, "timeout_s", minimum=2 * self._heartbeat_s, maximum=3_600.0)
        self._max_tries = require_positive_int(max_tries, "max_tries")
        self._order_timeout_s = order_timeout_s
        if order_timeout_s is not None:
            self._order_timeout_s = require_finite_float(order_timeout_s, "order_timeout_s", exclusive_minimum=0.0)
        if on_event is not None and not callable(on_event):
            raise TypeError(f"on_event={on_event!r} must be callable or None")
        self._on_event = on_event
        self._directory = teacher_directory(directory)
        self.endpoints = Endpoints.of(
            frontend_endpoint,
            backend_endpoint,
            control_endpoint,
            control_pub_endpoint,
            directory=self._directory,
            keyed=self._keys is not None,
            insecure=require_exact_bool(insecure, "insecure"),
        )
        self._lock = threading.Lock()
        self._service: _Service | None = None
        self._thread: threading.Thread | None = None
        self._final: BrokerStats | None = None

    def run(self) -> None:
        """Serve until :meth:`stop`, a STOP message, or in the main thread SIGTERM or Ctrl-C, which it takes.

        Raises:
            BrokerRunning: an endpoint has a broker already.
            RuntimeError: this broker runs already.
            OSError: an endpoint cannot be bound.
        """
        self._open()
        self._serve(handle_signals=threading.current_thread() is threading.main_thread())

    def start(self) -> Self:
        """Serve in a thread of its own, and return when the endpoints are bound; raises as :meth:`run`."""
        self._open()
        self._thread = threading.Thread(target=self._serve, name="mixle-teacher-broker", daemon=True)
        self._thread.start()
        return self

    def stop(self) -> None:
        """Stop serving, from any thread or a signal handler, and wait for the thread of :meth:`start`.

        Workers and students stay, and find the next broker on these endpoints.
        """
        service, thread = self._service, self._thread
        if service is not None:
            service.stop()
        if thread is not None and thread is not threading.current_thread():
            thread.join(JOIN_S)
            if thread.is_alive():
                raise RuntimeError(f"the broker's thread did not end within {JOIN_S:g} s")
            self._thread = None

    @property
    def running(self) -> bool:
        """Whether it serves now."""
        return self._service is not None

    @property
    def stats(self) -> BrokerStats:
        """The figures of now, or those of the end.

        Raises:
            RuntimeError: it has not been started.
        """
        service = self._service
        if service is not None:
            return service.stats()
        if self._final is None:
            raise RuntimeError("this broker has not been started; call start() or run()")
        return self._final

    def __enter__(self) -> Self:
        return self if self.running else self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _open(self) -> None:
        with self._lock:
            if self._service is not None:
                raise RuntimeError("this broker runs already; stop it first")
            self._service = _Service(
                self.endpoints,
                keys=self._keys,
                directory=self._directory,
                host=self._host,
                heartbeat_s=self._heartbeat_s,
                timeout_s=self._timeout_s,
                max_tries=self._max_tries,
                order_timeout_s=self._order_timeout_s,
                on_event=self._on_event,
            )
            self.endpoints = self._service.endpoints

    def _serve(self, *, handle_signals: bool = False) -> None:
        service = self._service
        assert service is not None

        def terminate(signum: int, frame: FrameType | None) -> None:
            service.stop()

        ours = {}
        if handle_signals:
            for kind in (signal.SIGTERM, signal.SIGINT):
                if signal.getsignal(kind) is not signal.SIG_IGN:  # as in what a script has put into the background
                    ours[kind] = signal.signal(kind, terminate)
        try:
            service.serve()
        finally:
            self._final = service.stats()
            self._service = None
            try:
                service.close()
            finally:  # until then a signal to hurry would leave the sockets behind
                for kind, before in ours.items():
                    signal.signal(kind, before)


class _Service:
    """The open sockets of a broker that serves."""

    def __init__(
        self,
        endpoints: Endpoints,
        *,
        keys: Keys | None,
        directory: Path,
        host: str,
        heartbeat_s: float,
        timeout_s: float,
        max_tries: int,
        order_timeout_s: float | None,
        on_event: OnEvent | None,
    ) -> None:
        self._zmq: Any = optional_import("zmq", extra="teacher")
        self._heartbeat_s = heartbeat_s
        self._directory = directory
        self._lock = threading.Lock()
        self._stopping = False
        self._admission: Admission | None = None
        self._handshakes = FailedHandshakes()
        self._sockets: dict[Channel, Any] = {}
        self._cleanup = ExitStack()
        with ExitStack() as stack:
            run = stack.enter_context(held_run(endpoints, directory))
            tidy(run.run_id, directory=directory)  # what died while there was no broker
            self._woken, self._waker = socketpair()
            for end in (self._woken, self._waker):
                stack.callback(end.close)
                end.setblocking(False)
            self._watch = ProcessWatch()
            stack.callback(self._watch.close)
            context = self._zmq.Context()
            stack.callback(context.term)
            if keys is not None:
                self._admission = Admission(context, keys)
                stack.callback(self._admission.close)
            bound = {}
            for name, kind in (("frontend", "ROUTER"), ("backend", "ROUTER"), ("control", "ROUTER")):
                socket, bound[name] = self._bind(context, kind, getattr(endpoints, name), keys, stack)
                self._sockets[name] = socket  # type: ignore[index]
            self._pub, bound["control_pub"] = self._bind(context, "XPUB", endpoints.control_pub, keys, stack)
            self.endpoints = Endpoints(**bound)
            now = time.monotonic()
            self._routing = Routing(
                run,
                Scheduler(
                    max_tries=max_tries,
                    order_timeout_s=order_timeout_s,
                    holding_until=now + max(2 * heartbeat_s, FOUND_S) if run.returning else -math.inf,
                ),
                host=host,
                now=now,
                heartbeat_s=heartbeat_s,
                timeout_s=timeout_s,
                watch=self._watch.watch,
                unwatch=self._watch.unwatch,
                unlink=self._unlink,
                on_event=on_event,
            )
            self._cleanup = stack.pop_all()
        self._run_id = run.run_id
        logger.info("run %s serves at %s", run.run_id, ", ".join(self.endpoints))

    def stats(self) -> BrokerStats:
        """Return the figures; from any thread."""
        with self._lock:
            unadmitted = 0 if self._admission is None else self._admission.refused
            self._routing.keys_refused = unadmitted + self._handshakes.count
            return self._routing.stats(time.monotonic())

    def stop(self) -> None:
        """End :meth:`serve` soon; from any thread or a signal handler."""
        self._stopping = True
        with suppress(OSError):  # it is awake already, or closed
            self._waker.send(b".")

    def serve(self) -> None:
        """Poll and route until stopped."""
        zmq = self._zmq
        channels: dict[Any, Channel] = {socket: channel for channel, socket in self._sockets.items()}
        poller = zmq.Poller()
        for source in (*channels, self._pub, self._woken.fileno(), self._watch.fd):
            if source is not None:
                poller.register(source, zmq.POLLIN)
        if self._admission is not None:
            poller.register(self._admission.socket, zmq.POLLIN)
        for monitor in self._handshakes.monitors:
            poller.register(monitor, zmq.POLLIN)
        tick_at = time.monotonic()
        while not self._stopping and not self._routing.stopping:
            wait_s = min(tick_at, self._routing.scheduler.next_due()) - time.monotonic()
            ready = poller.poll(max(0, math.ceil(wait_s * 1000)))
            with self._lock:
                now = time.monotonic()
                settled = bool(ready)
                for source, _ in ready:
                    channel = channels.get(source)
                    if channel is not None:
                        self._drain(channel, source)
                        self._flush()
                        continue
                    settled = False
                    if source is self._pub:
                        self._subscribe()
                    elif source == self._watch.fd:
                        self._bury(ask=False)
                    elif self._admission is not None and source is self._admission.socket:
                        self._admission.handle()
                    elif source in self._handshakes.monitors:
                        self._handshakes.read(source)
                if now >= tick_at:
                    tick_at = now + self._heartbeat_s
                    self._bury(ask=True)
                    self._routing.tick(now)
                    settled = False
                if not settled:
                    self._flush()

    def close(self) -> None:
        """Close the sockets and let go of the endpoints."""
        with self._lock:
            self._cleanup.close()
        logger.info("run %s serves no more", self._run_id)

    def _drain(self, channel: Channel, socket: Any) -> None:
        handle = self._routing.handle
        by_tcp = channel == "frontend" and self.endpoints.frontend.startswith("tcp://")
        for _ in range(DRAINED):
            try:
                frames, address = wire.receive_from(socket) if by_tcp else (wire.receive(socket), None)
            except self._zmq.Again:
                return
            handle(channel, frames[0], frames[1:], time.monotonic(), address)
            if not wire.has_message(socket):
                return

    def _subscribe(self) -> None:
        """Accept subscriptions to what is published, and no others: each would take memory."""
        for _ in range(DRAINED):
            try:
                asked = self._pub.recv_multipart(self._zmq.NOBLOCK)
            except self._zmq.Again:
                return
            if asked[0] in _SUBSCRIPTIONS and len(asked) == 1:
                self._pub.setsockopt(self._zmq.SUBSCRIBE, asked[0][1:])

    def _flush(self) -> None:
        """Send what is to be sent, and what comes of what could not be."""
        zmq = self._zmq
        again = True
        while again:
            again = False
            out, news = self._routing.take(time.monotonic())
            for one in news:
                self._pub.send_multipart(messages.frames(one), zmq.NOBLOCK)
            for channel, connection, message in out:
                try:
                    wire.send(self._sockets[channel], [connection, *messages.frames(message)])
                except (zmq.Again, zmq.ZMQError):
                    self._routing.undelivered(channel, connection, message, time.monotonic())
                    again = True

    def _bury(self, *, ask: bool) -> None:
        for identity in self._watch.dead(ask=ask):
            self._routing.process_died(identity, time.monotonic())
            self._watch.unwatch(identity)

    def _unlink(self, medium: messages.MediumName, name: str) -> None:
        """Delete the slots of a dead student; their name was checked when it registered."""
        with suppress(OSError):  # another user's, or no such directory: then it is not ours to delete
            unlink_segment(name, medium=medium, directory=None if medium == "shm" else self._directory / "slots")

    def _bind(self, context: Any, kind: str, endpoint: str, keys: Keys | None, stack: ExitStack) -> tuple[Any, str]:
        """Return a bound socket and its address."""
        zmq = self._zmq
        socket = context.socket(getattr(zmq, kind))
        stack.callback(socket.close, int(LINGER_S * 1000))
        socket.maxmsgsize = messages.MAX_MESSAGE_BYTES
        socket.sndhwm, socket.rcvhwm = SEND_QUEUE, RECEIVE_QUEUE
        socket.backlog = 1_024
        if kind == "ROUTER":
            socket.router_mandatory = 1
        else:
            socket.xpub_manual = 1
        if endpoint.startswith("tcp://"):
            socket.ipv6 = wire.is_ipv6(endpoint)
            socket.heartbeat_ivl, socket.heartbeat_timeout = 2_000, 10_000
        if keys is not None:
            keys.secure_server(socket)
            self._handshakes.watch(context, socket)
            stack.callback(self._handshakes.forget, socket)
        try:
            socket.bind(endpoint)
        except zmq.ZMQError as error:
            raise OSError(error.errno, f"cannot bind {endpoint}: {error.strerror}") from None
        if endpoint.startswith("ipc://"):
            path = Path(endpoint.removeprefix("ipc://"))
            path.chmod(0o600)
            stack.callback(path.unlink, missing_ok=True)
        return socket, socket.last_endpoint.decode().rstrip("\0")
