"""What the monitors of sockets tell: whether a connection came about, and why not."""

from __future__ import annotations

import logging
import math
import struct
import time
from collections.abc import Iterator
from typing import Any

from mixle.utils.optional_import import optional_import

__all__ = ["Connection", "FailedHandshakes", "events"]

logger = logging.getLogger(__name__)

DRAINED = 128  # events of one monitor before others have their turn
WARN_S = 60.0


class Connection:
    """Follow whether a socket that connects has a server, and if not, why.

    Attributes:
        monitor: readable when there is something for :meth:`read`.
        connected: whether the handshake with a server is done.
    """

    def __init__(self, socket: Any) -> None:
        zmq = optional_import("zmq", extra="teacher")
        self.connected = False
        self._trouble = ""
        self._socket = socket
        self._succeeded, self._disconnected = zmq.EVENT_HANDSHAKE_SUCCEEDED, zmq.EVENT_DISCONNECTED
        self._unauthorized = zmq.EVENT_HANDSHAKE_FAILED_AUTH
        failed = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | self._unauthorized
        self.monitor = socket.get_monitor_socket(self._succeeded | self._disconnected | failed)

    def read(self) -> bool:
        """Take note of what has happened; return whether a connection came or went."""
        changed = False
        for event, value in events(self.monitor):
            if event == self._succeeded:
                self.connected, self._trouble, changed = True, "", True
            elif event == self._disconnected:
                if not self.connected and not self._trouble:
                    self._trouble = "it closed the connection before the handshake was done; are the keys its own?"
                self.connected, changed = False, True
            elif event == self._unauthorized:
                self._trouble = f"it refuses this client's key (ZAP status {value})"
            else:
                self._trouble = (
                    "the handshake failed; does one side use keys and the other not, or are these the keys of another "
                    "run?"
                )
        return changed

    def why_silent(self) -> str:
        """Say what is known of a server that did not answer."""
        if self.connected:
            return "something listens there, which is too slow or stopped, or no broker"
        return self._trouble or "nothing listens there; is the broker running, and is this its endpoint?"

    def close(self) -> None:
        """Stop following; before the socket is closed."""
        self._socket.disable_monitor()
        self.monitor.close(linger=0)


class FailedHandshakes:
    """Count the connections to CURVE servers that fail before anybody is asked for admission: other keys, or none.

    Attributes:
        count: so far.
        monitors: readable when there is something for :meth:`read`.
    """

    def __init__(self) -> None:
        self._zmq: Any = optional_import("zmq", extra="teacher")
        self.count = 0
        self._sockets: dict[Any, Any] = {}
        self._warned_at = -math.inf

    @property
    def monitors(self) -> tuple[Any, ...]:
        return tuple(self._sockets)

    def watch(self, context: Any, socket: Any) -> None:
        """Count those of ``socket``, from before it binds."""
        zmq = self._zmq
        address = f"inproc://handshakes-{id(socket)}"
        socket.monitor(address, zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL)
        monitor = context.socket(zmq.PAIR)
        # libzmq's own thread would wait for room, with a lock that closing needs.
        monitor.rcvhwm = 0
        monitor.connect(address)
        self._sockets[monitor] = socket

    def read(self, monitor: Any) -> None:
        """Count what has happened at one of the monitors, and warn of it once a minute."""
        before = self.count
        self.count += sum(1 for _ in events(monitor))
        now = time.monotonic()
        if self.count > before and now >= self._warned_at + WARN_S:
            self._warned_at = now
            logger.warning(
                "%d connections so far failed the handshake, the last one at %s: they use the keys of another run, or "
                "none",
                self.count,
                self._sockets[monitor].last_endpoint.decode().rstrip("\0"),
            )

    def forget(self, socket: Any) -> None:
        """Stop counting those of ``socket``; before it is closed."""
        [monitor] = [monitor for monitor, watched in self._sockets.items() if watched is socket]
        del self._sockets[monitor]
        socket.disable_monitor()
        monitor.close(linger=0)


def events(monitor: Any) -> Iterator[tuple[int, int]]:
    """Yield the events that wait, each with its value; at most ``DRAINED``."""
    zmq = optional_import("zmq", extra="teacher")
    for _ in range(DRAINED):
        try:
            described = monitor.recv_multipart(zmq.NOBLOCK)[0]
        except zmq.Again:
            return
        yield struct.unpack("=Hi", described)
