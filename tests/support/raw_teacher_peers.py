"""Students and workers that speak the protocol word by word, for tests of the broker."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable
from typing import Any

import zmq

from mixle.data.teacher import messages
from mixle.data.teacher.run import ProcessIdentity, process_identity

DEADLINE_S = 20.0


class RawPeer:
    """A DEALER that sends messages and waits, with a deadline, for the one that is expected."""

    def __init__(self, endpoint: str, keys: Any = None, kind: int = zmq.DEALER) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(kind)
        self.socket.linger = 200
        if keys is not None:
            keys.secure_client(self.socket)
        self.socket.connect(endpoint)
        self.welcome: messages.Welcome | None = None

    def send(self, message: messages.Message) -> None:
        self.socket.send_multipart(messages.frames(message))

    def send_raw(self, *frames: bytes) -> None:
        self.socket.send_multipart(list(frames))

    def receive(self, timeout_s: float = DEADLINE_S) -> messages.Message | None:
        if not self.socket.poll(int(timeout_s * 1000)):
            return None
        return messages.parse(*self.socket.recv_multipart())

    def expect(self, kind: type[messages.Message], timeout_s: float = DEADLINE_S) -> Any:
        """Return the next message of a kind; others before it are dropped."""
        deadline = time.monotonic() + timeout_s
        seen = []
        while (left := deadline - time.monotonic()) > 0:
            message = self.receive(left)
            if isinstance(message, kind):
                return message
            seen.append(message)
        raise AssertionError(f"no {kind.__name__} within {timeout_s} s, only {seen}")

    def ask(self, message: messages.Message, kind: type[messages.Message]) -> Any:
        self.send(message)
        return self.expect(kind)

    def beat(self) -> Any:
        assert self.welcome is not None
        return self.ask(messages.Beat(session=self.welcome.session), messages.Pong)

    def close(self) -> None:
        self.socket.close()
        self.context.term()

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class RawStudent(RawPeer):
    """A student whose slots exist in name only."""

    def __init__(
        self,
        endpoint: str,
        slot_count: int = 8,
        *,
        rank: int = 0,
        packed_bytes: int = 64,
        identity: ProcessIdentity | None = None,
        keys: Any = None,
        register: bool = True,
    ) -> None:
        super().__init__(endpoint, keys)
        self.identity = identity or process_identity()
        self.student_id = secrets.token_hex(16)
        self.slot_count, self.rank, self.packed_bytes = slot_count, rank, packed_bytes
        self.model = messages.NO_MODEL
        self.token = secrets.randbits(60)
        self.run = self.ask(messages.Ask(version=messages.PROTOCOL_VERSION), messages.Run)
        self.segment = f"/mx{self.run.run_id}-{self.identity.pid:x}-{secrets.token_hex(3)}"
        if register:
            self.register()

    def hello(self, **changes: Any) -> messages.Hello:
        values: dict[str, Any] = {
            "version": messages.PROTOCOL_VERSION,
            "attempt": 1,
            "session": self.welcome.session if self.welcome else None,
            "student_id": self.student_id,
            "rank": self.rank,
            "identity": self.identity,
            "medium": "shm",
            "segment": self.segment,
            "slot_count": self.slot_count,
            "packed_bytes": self.packed_bytes,
            "layout": b"layout",
            "data_endpoint": None,
            "data_key": None,
            "model": self.model,
        }
        return messages.Hello(**{**values, **changes})

    def register(self, **changes: Any) -> messages.Welcome:
        self.welcome = self.ask(self.hello(**changes), messages.Welcome)
        assert self.welcome is not None
        self.model = self.welcome.model
        return self.welcome

    def order(
        self, first: int, count: int = 1, *, generation: int | None = None, resent: bool = False
    ) -> messages.Order:
        generation = self.model.generation if generation is None else generation
        order = messages.Order(os.urandom(8), first, count, self.token, generation)
        self.token += count
        self.send(messages.Request(orders=(order,), resent=resent))
        return order

    def set_model(self, endpoint: str, model_id: str, cfg: Any = None, **changes: Any) -> messages.Message:
        assert self.welcome is not None
        values: dict[str, Any] = {
            "request_id": os.urandom(8),
            "student_id": self.student_id,
            "session": self.welcome.session,
            "rank": self.rank,
            "known": self.model.generation,
            "model_id": model_id,
            "packed_cfg": messages.pack_cfg(cfg),
        }
        with RawPeer(endpoint) as control:
            control.send(messages.SetModel(**{**values, **changes}))
            answer = control.receive()
        if isinstance(answer, messages.Model):
            self.model = answer.model
        assert answer is not None
        return answer


class RawWorker(RawPeer):
    """A worker that does what the test says."""

    def __init__(
        self,
        endpoint: str,
        *,
        worker_id: str = "worker",
        slot_size: int = 1024,
        max_batch: int | None = None,
        patterns: tuple[str, ...] = ("*",),
        prefetch: int = 2,
        identity: ProcessIdentity | None = None,
        keys: Any = None,
        register: bool = True,
    ) -> None:
        super().__init__(endpoint, keys)
        self.identity = identity or process_identity()
        self.worker_id, self.slot_size, self.max_batch = worker_id, slot_size, max_batch
        self.patterns, self.prefetch = patterns, prefetch
        self.segments: dict[int, messages.SegmentInfo] = {}
        self.model = messages.NO_MODEL
        if register:
            self.register()

    def register(self, held: tuple[messages.HeldPiece, ...] = (), **changes: Any) -> messages.Welcome:
        values: dict[str, Any] = {
            "version": messages.PROTOCOL_VERSION,
            "attempt": 1,
            "session": self.welcome.session if self.welcome else None,
            "worker_id": self.worker_id,
            "identity": self.identity,
            "slot_size": self.slot_size,
            "max_batch": self.max_batch,
            "patterns": self.patterns,
            "prefetch": self.prefetch,
            "held": held,
            "model": self.model,
            "lane": None,
        }
        self.welcome = self.ask(messages.Ready(**{**values, **changes}), messages.Welcome)
        assert self.welcome is not None
        return self.welcome

    def work(self, timeout_s: float = DEADLINE_S) -> messages.Work:
        work: messages.Work = self.expect(messages.Work, timeout_s)
        self.segments |= {one.segment_id: one for one in work.segments}
        self.model = work.model or self.model
        return work

    def report(
        self,
        pieces: Any,
        outcome: int = messages.DONE,
        message: str | None = None,
        seconds: float = 1e-3,
    ) -> None:
        done = tuple(messages.DonePiece(one.ticket, one.first_slot, one.count, outcome, message) for one in pieces)
        self.send(messages.Done(pieces=done, seconds=seconds))


def until(condition: Callable[[], bool], what: str, deadline_s: float = DEADLINE_S) -> None:
    """Wait for a condition; fail by name at the deadline."""
    deadline = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come about within {deadline_s} s"
        time.sleep(0.002)
