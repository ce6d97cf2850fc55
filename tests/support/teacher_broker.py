"""A broker that does only what a test tells it to."""

from __future__ import annotations

import os
import secrets
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self, TypeVar

import zmq

from mixle.data.teacher import messages
from mixle.data.teacher.keys import Admission, Keys
from mixle.data.teacher.messages import NO_MODEL, Message, ModelState

RUN_ID = "0123abcd"
PATIENCE_S = 20.0
M = TypeVar("M", bound=Message)


class FakeBroker:
    """Bind a backend (or frontend) and a publisher; answer beats while waiting for what the test expects."""

    def __init__(
        self, endpoint: str, pub_endpoint: str, *, keys: Keys | None = None, heartbeat_s: float = 0.05
    ) -> None:
        self.endpoint, self.pub_endpoint, self.heartbeat_s = endpoint, pub_endpoint, heartbeat_s
        self.broker_id = secrets.token_bytes(8)
        self.model = NO_MODEL
        self.sessions: set[bytes] = set()
        self.beats = 0
        self._context = zmq.Context()
        self._admission = None if keys is None else Admission(self._context, keys)
        self._router, self._pub = self._context.socket(zmq.ROUTER), self._context.socket(zmq.PUB)
        for socket, address in ((self._router, endpoint), (self._pub, pub_endpoint)):
            socket.linger = 0
            if keys is not None:
                keys.secure_server(socket)
            socket.bind(address)
        self._poller = zmq.Poller()
        self._poller.register(self._router, zmq.POLLIN)
        if self._admission is not None:
            self._poller.register(self._admission.socket, zmq.POLLIN)

    def step(self, timeout_s: float = 0.05) -> tuple[bytes, Message] | None:
        """Return the next message that is no answered beat, with its sender; None if none comes in time."""
        ready = dict(self._poller.poll(timeout_s * 1000))
        if self._admission is not None:
            self._admission.handle()
        if self._router not in ready:
            return None
        sender, *frames = self._router.recv_multipart()
        message = messages.parse(*frames)
        if isinstance(message, messages.Beat):
            self.beats += 1
            known = message.session in self.sessions
            self.send(sender, messages.Pong(broker_id=self.broker_id, model=self.model) if known else messages.Who())
            return None
        return sender, message

    def expect(self, kind: type[M]) -> tuple[bytes, M]:
        """Return the next message, which must be of this kind, with its sender."""
        until = time.monotonic() + PATIENCE_S
        while time.monotonic() < until:
            if (got := self.step()) is not None:
                assert isinstance(got[1], kind), got[1]
                return got[0], got[1]
        raise AssertionError(f"no {kind.__name__} came within {PATIENCE_S} s")

    def pump_until(self, condition: Any) -> None:
        """Answer beats until the condition holds; any other message fails the test."""
        until = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < until, "the condition did not come true"
            got = self.step(0.01)
            assert got is None, got

    def admit(self, kind: type[M]) -> tuple[bytes, M]:
        """Expect a registration and welcome it."""
        sender, message = self.expect(kind)
        self.welcome(sender, message.attempt)
        return sender, message

    def welcome(self, sender: bytes, attempt: int) -> None:
        """Answer an attempt to register."""
        session = secrets.token_bytes(16)
        self.sessions.add(session)
        self.send(
            sender,
            messages.Welcome(
                version=messages.PROTOCOL_VERSION,
                attempt=attempt,
                run_id=RUN_ID,
                broker_id=self.broker_id,
                session=session,
                model=self.model,
                heartbeat_s=self.heartbeat_s,
                timeout_s=5.0,
            ),
        )

    def send(self, receiver: bytes, message: Message) -> None:
        self._router.send_multipart([receiver, *messages.frames(message)])

    def send_raw(self, receiver: bytes, *frames: bytes) -> None:
        self._router.send_multipart([receiver, *frames])

    def publish(self, topic: str, model: ModelState, *, run_id: str = RUN_ID) -> None:
        self._pub.send_multipart(
            messages.frames(messages.News(topic=topic, run_id=run_id, broker_id=self.broker_id, model=model))
        )

    def close(self) -> None:
        for socket in (self._router, self._pub):
            socket.close(linger=0)
        if self._admission is not None:
            self._admission.close()
        self._context.term()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


@contextmanager
def endpoints() -> Iterator[tuple[str, str]]:
    """Yield addresses of two sockets in a directory that is gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="mx") as directory:
        os.chmod(directory, 0o700)
        yield f"ipc://{directory}/a", f"ipc://{directory}/b"
