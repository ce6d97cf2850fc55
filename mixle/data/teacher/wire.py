"""Send and receive the frames of small messages: as ``send_multipart`` and ``recv_multipart``, at half their cost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mixle.utils.optional_import import optional_import

# libzmq's own numbers, as plain integers: pyzmq's enumerations cost more to combine than a frame to send.
POLLIN, NOBLOCK, SNDMORE, EVENTS = 1, 1, 2, 15


def send(socket: Any, frames: Sequence[bytes]) -> None:
    """Send a message at once.

    Raises:
        zmq.Again: there is no room for it now.
    """
    *first, last = frames
    for frame in first:
        socket.send(frame, NOBLOCK | SNDMORE)
    socket.send(last, NOBLOCK)


def receive(socket: Any) -> list[bytes]:
    """Return the frames of a message that is there.

    Raises:
        zmq.Again: there is none.
    """
    return _receive(socket)[0]


def receive_from(socket: Any) -> tuple[list[bytes], str | None]:
    """Return the frames of a message that came by TCP, and its IP address unless the sender was gone at once.

    Raises:
        zmq.Again: there is none.
    """
    frames, last = _receive(socket)
    try:
        return frames, last.get("Peer-Address")
    except optional_import("zmq", extra="teacher").ZMQError:
        return frames, None


def _receive(socket: Any) -> tuple[list[bytes], Any]:
    frame = socket.recv(NOBLOCK, False)
    frames = [frame.bytes]
    while frame.more:
        frame = socket.recv(NOBLOCK, False)
        frames.append(frame.bytes)
    return frames, frame


def has_message(socket: Any) -> bool:
    """Tell whether a message is there, at a fraction of the cost of the exception that says there is none."""
    return bool(socket.get(EVENTS) & POLLIN)


def is_ipv6(endpoint: str) -> bool:
    """Tell whether a socket for this address must be told that it may use IPv6."""
    return endpoint.startswith("tcp://[")
