"""Ask a broker for its figures or its end, from any process that may connect to it."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self, TypeVar

from mixle.data.teacher import messages, wire
from mixle.data.teacher.handshakes import Connection
from mixle.data.teacher.keys import Keys
from mixle.data.teacher.peer import unreachable
from mixle.data.teacher.stats import BrokerStats
from mixle.utils.optional_import import optional_import

M = TypeVar("M", bound=messages.Message)


class _Client:
    """Ask at one socket of a broker without being registered; not for several threads at once."""

    def __init__(self, endpoint: str, keys: Keys | None) -> None:
        self._zmq = optional_import("zmq", extra="teacher")
        self._endpoint = endpoint
        self._context = self._zmq.Context()
        self._socket = self._context.socket(self._zmq.DEALER)
        self._socket.linger = 0
        self._socket.ipv6 = wire.is_ipv6(endpoint)
        self._socket.maxmsgsize = messages.MAX_MESSAGE_BYTES
        if keys is not None:
            keys.secure_client(self._socket)
        self._connection = Connection(self._socket)
        self._socket.connect(endpoint)

    def exchange(self, question: messages.Message, answer: type[M], deadline_s: float) -> M:
        """Return the answer to a question.

        Raises:
            BrokerUnreachable: none came within ``deadline_s``; says why, as far as it can be known.
        """
        deadline = time.monotonic() + deadline_s
        while self._socket.poll(0):  # what came too late the last time
            self._socket.recv_multipart()
        self._connection.read()
        asked = False
        while (left := deadline - time.monotonic()) > 0:
            if not asked:
                try:
                    wire.send(self._socket, messages.frames(question))
                except self._zmq.Again:  # its handshake was refused already, and it may try again
                    self._socket.poll(left * 1000, self._zmq.POLLOUT)
                    continue
                asked = True
            if self._socket.poll(left * 1000):
                reply = messages.parse(*self._socket.recv_multipart())
                if isinstance(reply, answer):
                    return reply
        self._connection.read()
        raise unreachable(self._endpoint, deadline_s, self._connection.why_silent())

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()
        self._socket.close()
        self._context.term()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class StatsClient(_Client):
    """Ask the broker at ``frontend_endpoint``; not for several threads at once."""

    def __init__(self, frontend_endpoint: str, *, keys: Keys | None = None) -> None:
        super().__init__(frontend_endpoint, keys)

    def ask(self, deadline_s: float = 5.0) -> BrokerStats:
        """Return the figures of now.

        Raises:
            BrokerUnreachable: none came within ``deadline_s``; says why, as far as it can be known.
        """
        return BrokerStats.unpack(self.exchange(messages.Stats(), messages.StatsReply, deadline_s).stats)


def stop_run(control_endpoint: str, *, keys: Keys | None = None, deadline_s: float = 5.0) -> None:
    """End the broker at ``control_endpoint`` and its workers, which finish the samples that they are making.

    Raises:
        BrokerUnreachable: it does not answer within ``deadline_s``; says why, as far as it can be known.
    """
    with _Client(control_endpoint, keys) as client:
        client.exchange(messages.Stop(), messages.Stopping, deadline_s)
