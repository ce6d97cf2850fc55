"""What a worker and a student share: a connection to the broker that keeps itself registered.

The owner sends and receives on one socket. A thread beside it beats on a socket of its own, so that an owner that
computes for minutes is not taken for dead, and listens for newer models. It also sees connections come and go, and
registers anew at each new one, even while the owner is busy (a lock hands it the owner's socket for that): a restarted
broker must know who may still write where before it gives those slots to another.

Whatever a broker sent before a registration is void. So messages of the old connection are thrown away before the
registration is sent, and after it everything that comes before the WELCOME.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from types import ModuleType, TracebackType
from typing import Any, Self

from mixle.data.teacher import messages, wire
from mixle.data.teacher.errors import (
    BrokerUnreachable,
    LeaderRefused,
    ProtocolError,
    RequestRefused,
    TeacherError,
    VersionMismatch,
)
from mixle.data.teacher.handshakes import Connection
from mixle.data.teacher.keys import Keys
from mixle.data.teacher.messages import NO_MODEL, ModelState
from mixle.utils.optional_import import optional_import

__all__ = ["Peer", "ask", "refusal", "unreachable"]

logger = logging.getLogger(__name__)

RETRY_S = 0.02
LINGER_S = 0.2
JOIN_S = 5.0


class Peer:
    """A registered connection to the broker; one thread at a time uses it, any may call ``wake`` and ``close``.

    Attributes:
        welcome: the answer to the last registration, None before the first.
        model: the newest that the broker has told of.
        registrations: how many were tried so far; one more than before means that a registration knows nothing of what
            was done since.
        protocol_errors: messages that were dropped since they were none.

    Args:
        endpoint: the broker's frontend or backend.
        registration: makes the HELLO or READY of the attempt that it is given, as things are at that moment; called in
            the owner's thread or, while that is busy, in the heartbeat's.
        control_pub_endpoint: where the broker publishes models; without it they come with the heartbeat's answers.
        keys: CURVE keys, for a broker that wants them.
        model: the newest model that is known already.
        on_model: called with each newer one in turn, in whichever thread it came; must not call this peer.
    """

    def __init__(
        self,
        endpoint: str,
        registration: Callable[[int], messages.Message],
        *,
        control_pub_endpoint: str | None = None,
        keys: Keys | None = None,
        model: ModelState = NO_MODEL,
        on_model: Callable[[ModelState], None] | None = None,
    ) -> None:
        self._zmq: ModuleType = optional_import("zmq", extra="teacher")
        self.endpoint = endpoint
        self.model = model
        self.welcome: messages.Welcome | None = None
        self._run_id: str | None = None
        self.protocol_errors = 0
        self.registrations = 0
        self._registration, self._on_model = registration, on_model
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._model_lock = threading.Lock()
        self._inbox: deque[messages.Message] = deque()
        self._due = self._awaiting = self._closed = False
        self._beside: int | None = None
        self._seen_at = self._welcomed_at = float("-inf")
        self._alarm, self._beat_alarm = _Alarm(), _Alarm()
        zmq = self._zmq
        self.context = zmq.Context()
        self._socket = self._dealer(keys)
        self._connection = Connection(self._socket)
        self._beats = self._dealer(keys)
        self._news: Any = None
        if control_pub_endpoint is not None:
            self._news = self._socket_of(zmq.SUB, keys, control_pub_endpoint)
            self._news.subscribe(b"")
            self._news.connect(control_pub_endpoint)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._alarm.fd, zmq.POLLIN)
        self._socket.connect(endpoint)
        self._beats.connect(endpoint)
        self._thread = threading.Thread(target=self._attend, name="mixle-teacher-heartbeat", daemon=True)
        self._thread.start()

    def start(self, deadline_s: float) -> messages.Welcome:
        """Wait until the broker has answered the first registration.

        Raises:
            BrokerUnreachable: it did not within ``deadline_s``; says why, as far as it can be known.
            TeacherError: it refused.
        """
        deadline = time.monotonic() + deadline_s
        while (left := deadline - time.monotonic()) > 0:
            match self.receive(left):
                case messages.Welcome() as welcome:
                    return welcome
                case messages.Error() as error:
                    raise refusal(error, self.endpoint)
        raise self.unreachable(deadline_s)

    @property
    def registered(self) -> bool:
        """Whether the broker that is connected now has answered the registration."""
        return self.welcome is not None and self._connection.connected and not self._due and not self._awaiting

    @property
    def silent_s(self) -> float:
        """Seconds since the broker last gave a sign of life."""
        return time.monotonic() - self._seen_at

    def unreachable(self, deadline_s: float) -> BrokerUnreachable:
        """Return the error that says what is known about a broker that did not answer within ``deadline_s``."""
        return unreachable(self.endpoint, deadline_s, self._connection.why_silent())

    def receive(self, timeout_s: float) -> messages.Message | None:
        """Return the next message, or None when ``timeout_s`` have passed, or at once when woken.

        A Welcome says that the broker knows nothing of what was before, but what the registration told it: send again
        whatever is outstanding.
        """
        self._check_usable()
        deadline = time.monotonic() + timeout_s if timeout_s > 0 else 0.0
        while True:
            with self._lock:
                message = self._next()
                if message is not None or timeout_s <= 0:
                    return message
                left = deadline - time.monotonic()
                if left <= 0:
                    return None
                ready = dict(self._poller.poll(left * 1000))
                woken = self._alarm.fd in ready
                if woken:
                    self._alarm.clear()
            if self._beside in ready or (woken and not self._due and not self._inbox):
                return None

    def attend_also(self, fd: int) -> None:
        """Make a :meth:`receive` that waits return None when there is something to read at ``fd``, too."""
        self._beside = fd
        self._poller.register(fd, self._zmq.POLLIN)

    def send(self, message: messages.Message) -> bool:
        """Send it and return True; False if this peer is not registered now: it is due again after the next Welcome."""
        self._check_usable()
        with self._lock:
            return self.registered and self._put(self._socket, message)

    def tell(self, model: ModelState) -> None:
        """Take note of a model; none that is older than the newest known."""
        with self._model_lock:
            if model.generation <= self.model.generation:
                return
            self.model = model
            try:
                if self._on_model is not None:
                    self._on_model(model)
            except Exception:
                logger.exception("on_model failed at generation %d", model.generation)

    def wake(self) -> None:
        """Make a ``receive`` that waits return None; from any thread, or from a signal handler."""
        if os.getpid() == self._pid:
            self._alarm.ring()

    def close(self, farewell: messages.Message | None = None) -> None:
        """Say ``farewell`` if registered or about to be, and close all within a bounded time. Twice is harmless."""
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        self._alarm.ring()
        self._beat_alarm.ring()
        if threading.current_thread() is not self._thread:
            self._thread.join(JOIN_S)
        with self._lock:
            # Said also while the answer to a registration is awaited: whoever stays registered is given work.
            if farewell is not None and (self.registered or (self._registering and not self._due)):
                self._put(self._socket, farewell)
            self._connection.close()
            self._beats.close(linger=0)
            if self._news is not None:
                self._news.close(linger=0)
            self._socket.close(linger=int(LINGER_S * 1000) if self._connection.connected else 0)
            self.context.term()
            self._alarm.close()
            self._beat_alarm.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def check_process(self) -> None:
        """Raise a ``RuntimeError`` in a fork of the process that made this connection."""
        if os.getpid() != self._pid:
            raise RuntimeError(
                f"this connection to the broker belongs to process {self._pid}, and sockets do not survive a fork into "
                f"{os.getpid()}; make a new one in the child, or start it with multiprocessing's 'spawn'"
            )

    def _check_usable(self) -> None:
        self.check_process()
        if self._closed:
            raise RuntimeError(f"the connection to the broker at {self.endpoint} is closed; make a new one")

    def _socket_of(self, kind: int, keys: Keys | None, endpoint: str) -> Any:
        socket = self.context.socket(kind)
        socket.ipv6 = wire.is_ipv6(endpoint)
        socket.linger = 0
        socket.reconnect_ivl = 100
        socket.maxmsgsize = messages.MAX_MESSAGE_BYTES
        if keys is not None:
            keys.secure_client(socket)
        return socket

    def _dealer(self, keys: Keys | None) -> Any:
        """Return a socket that queues nothing for a broker that is not there: it would reach the next one, void."""
        socket = self._socket_of(self._zmq.DEALER, keys, self.endpoint)
        socket.immediate = 1
        socket.sndhwm = 0
        return socket

    def _put(self, socket: Any, message: messages.Message) -> bool:
        try:
            wire.send(socket, messages.frames(message))
        except self._zmq.Again:
            return False
        return True

    def _parse(self, frames: list[bytes]) -> messages.Message | None:
        try:
            if len(frames) != 2:
                raise ProtocolError(f"a message has 2 frames, this one {len(frames)}")
            return messages.parse(frames[0], frames[1])
        except ProtocolError as error:
            self.protocol_errors += 1
            logger.warning("dropped a message from %s: %s", self.endpoint, error)
            return None

    def _next(self) -> messages.Message | None:
        """Return the next message for the owner; registers first if that is due. The lock is held."""
        if self._due and self._connection.connected:
            self._register()
        if self._inbox:
            return self._inbox.popleft()
        while wire.has_message(self._socket):
            match self._parse(wire.receive(self._socket)):
                case messages.Welcome(attempt=self.registrations) as welcome:
                    self._accept(welcome)
                    return welcome
                case messages.Welcome():
                    continue  # of what was sent before it another registration made void
                case messages.Error() | messages.Run() as answer if self._awaiting:
                    self._awaiting = False
                    self.welcome = None
                    return answer
                case message if message is None or self._awaiting:
                    continue
                case messages.Who():
                    self._register()
                case message:
                    return message
        return None

    def _register(self) -> None:
        """Throw away what the old connection brought, and send the registration. The lock is held."""
        self._inbox.clear()
        try:
            while True:
                self._socket.recv_multipart(self._zmq.NOBLOCK)
        except self._zmq.Again:
            pass
        # A poll, unlike a send that does not block, takes note of a connection that has just come about.
        if not self._socket.poll(0, self._zmq.POLLOUT):
            return
        self.registrations += 1
        if self._put(self._socket, self._registration(self.registrations)):
            self._due, self._awaiting = False, True

    def _accept(self, welcome: messages.Welcome) -> None:
        if self._run_id not in (None, welcome.run_id):
            with self._model_lock:
                self.model = NO_MODEL  # another run counts its generations anew
        self._run_id = welcome.run_id
        self.welcome = welcome
        self._awaiting = False
        self._welcomed_at = self._seen_at = time.monotonic()
        self.tell(welcome.model)

    def _attend(self) -> None:
        """Beat, hear of newer models, and register at each new connection, until closed."""
        zmq = self._zmq
        poller = zmq.Poller()
        for source in (self._beats, self._connection.monitor, self._news, self._beat_alarm.fd):
            if source is not None:
                poller.register(source, zmq.POLLIN)
        beat_at = time.monotonic()
        while not self._closed:
            now = time.monotonic()
            if now >= beat_at:
                beat_at = now + self._beat()
            wait_s = max(0.0, beat_at - now)
            ready = dict(poller.poll(1000 * (min(wait_s, RETRY_S) if self._registering else wait_s)))
            if self._connection.monitor in ready and self._connection.read():
                self._due = True
            if self._beats in ready:
                self._see_answer()
            if self._news in ready:
                self._see_news()
            if self._registering:
                self._register_for_owner()

    @property
    def _registering(self) -> bool:
        return self._connection.connected and (self._due or self._awaiting)

    def _register_for_owner(self) -> None:
        if not self._lock.acquire(blocking=False):
            if self._due:
                self._alarm.ring()
            return
        try:
            if not self._closed and (message := self._next()) is not None:
                self._inbox.append(message)
        finally:
            self._lock.release()

    def _beat(self) -> float:
        """Send one beat if there is a session to keep alive; return the seconds until the next."""
        if self.welcome is None:
            return RETRY_S
        if self.registered:
            self._put(self._beats, messages.Beat(session=self.welcome.session))
        return self.welcome.heartbeat_s

    def _see_answer(self) -> None:
        while True:
            try:
                frames = self._beats.recv_multipart(self._zmq.NOBLOCK)
            except self._zmq.Again:
                return
            welcome = self.welcome
            match self._parse(frames):
                case messages.Pong() as pong:
                    self._seen_at = time.monotonic()
                    self.tell(pong.model)
                    forgotten = welcome is not None and pong.broker_id != welcome.broker_id
                case messages.Who():
                    forgotten = True
                case _:
                    forgotten = False
            # Answers to beats of an earlier session may still be under way.
            settled = welcome is not None and time.monotonic() - self._welcomed_at > 2 * welcome.heartbeat_s
            if forgotten and settled and self.registered:
                self._due = True

    def _see_news(self) -> None:
        while True:
            try:
                frames = self._news.recv_multipart(self._zmq.NOBLOCK)
            except self._zmq.Again:
                return
            try:
                news = messages.parse_news(frames[0], frames[1]) if len(frames) == 2 else None
            except ProtocolError:
                news = None
            if news is None:
                self.protocol_errors += 1
            elif self.welcome is not None and news.run_id == self.welcome.run_id:
                self.tell(news.model)
                if news.topic == "STOP":
                    self._inbox.append(messages.Stop())
                    self._alarm.ring()


def ask(endpoint: str, *, keys: Keys | None = None, deadline_s: float) -> messages.Run:
    """Return what the broker at a frontend or backend says of its run, as one must know before one can register.

    Raises:
        BrokerUnreachable: none answered within ``deadline_s``; says why, as far as it can be known.
        TeacherError: it refused.
    """
    deadline = time.monotonic() + deadline_s
    with Peer(endpoint, lambda attempt: messages.Ask(version=messages.PROTOCOL_VERSION), keys=keys) as peer:
        while (left := deadline - time.monotonic()) > 0:
            match peer.receive(left):
                case messages.Run() as run:
                    return run
                case messages.Error() as error:
                    raise refusal(error, endpoint)
        raise peer.unreachable(deadline_s)


def unreachable(endpoint: str, within_s: float, why: str) -> BrokerUnreachable:
    """Return the error of a broker at ``endpoint`` that did not answer, with what is known of it."""
    return BrokerUnreachable(f"no broker answered at {endpoint} within {float(f'{within_s:.3g}'):g} s: {why}", why)


def refusal(error: messages.Error, endpoint: str) -> TeacherError:
    """Return the exception that an ERROR of the broker at ``endpoint`` stands for."""
    kinds: dict[str, type[TeacherError]] = {
        "version": VersionMismatch,
        "leader": LeaderRefused,
        "protocol": ProtocolError,
    }
    return kinds.get(error.kind, RequestRefused)(f"the broker at {endpoint} refused: {error.message}")


class _Alarm:
    """A file descriptor that becomes readable when rung, from any thread or signal handler."""

    def __init__(self) -> None:
        self.fd, self._write_fd = os.pipe()
        os.set_blocking(self.fd, False)
        os.set_blocking(self._write_fd, False)
        self._closed = False
        # Or another thread would write to a number that is another file by then; a handler may come within close().
        self._lock = threading.RLock()

    def ring(self) -> None:
        with self._lock:
            if self._closed:
                return
            try:
                os.write(self._write_fd, b"!")
            except BlockingIOError:
                return

    def clear(self) -> None:
        try:
            os.read(self.fd, 4096)
        except BlockingIOError:
            return

    def close(self) -> None:
        with self._lock:
            self._closed = True
            os.close(self.fd)
            os.close(self._write_fd)
