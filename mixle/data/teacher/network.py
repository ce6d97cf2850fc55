"""Samples from workers on other machines: worker to student over TCP, never through the broker.

A student that can be reached binds one receiver; the broker tells workers its address and, with keys, its public key.
A worker makes samples in slots of its own and sends runs of them. One message is two frames:

=======  =====  =====================================================================
frame    bytes  content (little-endian)
=======  =====  =====================================================================
head     48     magic ``mixle-n1``; token, generation, first slot, count, uint64 each;
                CRC-32 wanted, uint32 (0 or 1); zeros
samples  ...    ``count`` slots without header and canary, back to back
=======  =====  =====================================================================

The token, 64 random bits that only the student, the broker and this worker know, is what lets a payload in: it must
stand in the header of the slot, with the generation, and the slot must not be complete. So a late writer cannot touch
a slot that has been ordered anew; whoever orders holds :attr:`Receiver.lock` for that. The socket refuses a
frame that is larger than a slot before it reads it.
"""

from __future__ import annotations

import errno
import logging
import os
import socket as net
import struct
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from mixle.data.teacher.generation import Demand, Outcome, Target
from mixle.data.teacher.handshakes import events
from mixle.data.teacher.keys import Admission, Keys
from mixle.data.teacher.layout import HEADER_BYTES, SlotLayout
from mixle.data.teacher.messages import DONE, FAILED, SKIPPED, U64, SegmentInfo, WorkPiece
from mixle.data.teacher.slots import SlotReassigned, Slots
from mixle.data.teacher.wire import is_ipv6
from mixle.utils.optional_import import optional_import

__all__ = ["Receiver", "Sender", "own_address"]

logger = logging.getLogger(__name__)

MAGIC = b"mixle-n1"
HEAD = struct.Struct("<8sQQQQI4x")
RUN_BYTES = 1 << 20  # of one message, unless a slot is larger
SEND_DEADLINE_S = 5.0
GONE_S = 0.5  # without a connection, and nothing that listens
LOOK_MS = 50  # between looks whether a sample is still wanted
CURVE_BYTES = 64  # at most, around an encrypted frame
IN_FLIGHT = 8  # messages on either side of the wire
JOIN_S = 5.0


def own_address(endpoint: str) -> str:
    """Return the IP address of the interface by which this host reaches a ``tcp://`` endpoint.

    Raises:
        OSError: there is none.
    """
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    family = net.AF_INET6 if host.startswith("[") else net.AF_INET  # as ZeroMQ connects there
    family, kind, protocol, _, address = net.getaddrinfo(host.strip("[]"), int(port), family, net.SOCK_DGRAM)[0]
    with net.socket(family, kind, protocol) as probe:
        probe.connect(address)  # sends nothing; the system chooses the interface
        return str(probe.getsockname()[0])


class Receiver:
    """Take samples that come over the network into a student's slots; a thread of its own does it until closed.

    Args:
        slots, memory: the student's, initialized, and the memory that they lie in.
        address: the IP address to listen on.
        keys: only holders of the client key are let in.
        insecure: there may be no keys.
        ports: the first and the last TCP port to try; None for any.
        on_arrival: called in the receiver's thread after slots became complete.

    Attributes:
        lock: hold it to prepare slots.
        endpoint, public_key: what HELLO says as ``data_endpoint`` and ``data_key``.
        arrived, dropped: slots that were taken, and messages that were refused.

    Raises:
        ValueError: no keys, and ``insecure`` is not True.
        OSError: it cannot listen there; names the ports.
    """

    def __init__(
        self,
        slots: Slots,
        memory: memoryview,
        address: str,
        *,
        keys: Keys | None,
        insecure: bool = False,
        ports: tuple[int, int] | None = None,
        on_arrival: Callable[[], None] | None = None,
    ) -> None:
        _require_security(keys, insecure, f"a receiver on {address}")
        zmq = optional_import("zmq", extra="teacher")
        self.lock = threading.Lock()
        self.arrived = self.dropped = 0
        self._zmq, self._on_arrival = zmq, on_arrival
        self._slots: Slots | None = slots
        self._payloads: NDArray[np.uint8] | None = _payloads(memory, slots)
        self._payload_bytes = slots.layout.payload_bytes
        self._pid = os.getpid()
        self._context = zmq.Context()
        self._admission = None if keys is None else Admission(self._context, keys)
        self._socket = self._context.socket(zmq.PULL)
        self._wake = self._context.socket(zmq.PAIR)
        self._woken = self._context.socket(zmq.PAIR)
        for one in (self._socket, self._wake, self._woken):
            one.linger = 0
        self._wake.bind("inproc://wake")
        self._woken.connect("inproc://wake")
        self._socket.rcvhwm = IN_FLIGHT
        self._socket.maxmsgsize = max(HEAD.size, _run_slots(slots.layout) * self._payload_bytes) + CURVE_BYTES
        self._socket.ipv6 = ":" in address
        self.public_key = None if keys is None else keys.secure_receiver(self._socket)
        try:
            self.endpoint = self._bind(f"tcp://[{address}]" if ":" in address else f"tcp://{address}", ports)
        except BaseException:
            self._close_sockets()
            raise
        self._closed = False
        self._thread = threading.Thread(target=self._receive, name="mixle-teacher-receiver", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening, within a bounded time. Closing twice is harmless."""
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        self._wake.send(b"")
        self._thread.join(JOIN_S)
        self._slots = self._payloads = None
        self._close_sockets()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _bind(self, interface: str, ports: tuple[int, int] | None) -> str:
        """Listen on the first of the ports that is free; return the endpoint."""
        if ports is None:
            return f"{interface}:{self._socket.bind_to_random_port(interface)}"
        low, high = ports
        for port in range(low, high + 1):
            try:
                self._socket.bind(f"{interface}:{port}")
            except self._zmq.ZMQError as error:
                if error.errno != errno.EADDRINUSE:
                    raise OSError(error.errno, f"data_port={port} cannot be had at {interface}: {error}") from None
            else:
                return f"{interface}:{port}"
        taken = f"data_port={low} is" if low == high else f"data_port={ports}: all of these are"
        raise OSError(errno.EADDRINUSE, f"{taken} in use at {interface}; give another, or a wider (lowest, highest)")

    def _close_sockets(self) -> None:
        for one in (self._socket, self._wake, self._woken):
            one.close(linger=0)
        if self._admission is not None:
            self._admission.close()
        self._context.term()

    def _receive(self) -> None:
        zmq = self._zmq
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._woken, zmq.POLLIN)
        if self._admission is not None:
            poller.register(self._admission.socket, zmq.POLLIN)
        while not self._closed:
            ready = dict(poller.poll())
            if self._admission is not None and self._admission.socket in ready:
                self._admission.handle()
            if self._socket in ready:
                frames = self._socket.recv_multipart(copy=False)
                try:
                    self.arrived += self._take(frames)
                except (ValueError, IndexError, SlotReassigned) as error:
                    self.dropped += 1
                    logger.warning("dropped what came over the network: %s", error)
                else:
                    if self._on_arrival is not None:
                        self._on_arrival()

    def _take(self, frames: list[Any]) -> int:
        """Write the samples of one message into their slots; return how many."""
        if len(frames) != 2 or len(frames[0].buffer) != HEAD.size:
            raise ValueError(f"{len(frames)} frames that are no samples")
        magic, token, generation, first, count, checksum = HEAD.unpack(frames[0].buffer)
        if magic != MAGIC or checksum > 1:
            raise ValueError("a head that is none")
        samples = frames[1].buffer
        slots, payloads = self._slots, self._payloads
        assert slots is not None and payloads is not None
        if not 0 < count <= slots.slot_count or samples.nbytes != count * self._payload_bytes:
            raise ValueError(f"{samples.nbytes} bytes for {count} slots of {self._payload_bytes}")
        with self.lock:
            if slots.complete(first, count, token, generation).any():
                raise ValueError(f"slots {first} to {first + count - 1}, of which some are complete already")
            slots.writable(first, count, token, generation)
            payloads[first : first + count] = np.frombuffer(samples, np.uint8).reshape(count, self._payload_bytes)
            slots.seal(first, count, token, generation, checksum=bool(checksum))
        return int(count)


class Sender:
    """Make samples in memory of this worker, and send them to a student on another host.

    Args:
        info: what the broker told of the student's slots.
        layout: of its slots.
        context: of ZeroMQ; the sender is closed before it.
        keys: the client's.
        insecure: there may be no keys.
        checksum: the student shall put a CRC-32 beside each sample.
        attend: called while the student takes its time; may close this.

    Raises:
        ValueError: the student has no receiver, or there are no keys, and ``insecure`` is not True.
    """

    def __init__(
        self,
        info: SegmentInfo,
        layout: SlotLayout,
        *,
        context: Any,
        keys: Keys | None,
        insecure: bool,
        checksum: bool,
        attend: Callable[[], None],
    ) -> None:
        if info.data_endpoint is None:
            raise ValueError(
                f"the student of segment {info.name} is on another host and takes no samples over the network; "
                "let it reach the broker by TCP"
            )
        _require_security(keys, insecure, f"a student at {info.data_endpoint}")
        if keys is not None and info.data_key is None:
            raise ValueError(f"the student at {info.data_endpoint} has no keys, and this worker has; give it keys=")
        self.info = info
        self._layout, self._checksum, self._attend = layout, checksum, attend
        self._free: _Scratch | None = None
        self._used: dict[bytes, _Scratch] = {}
        self._zmq = optional_import("zmq", extra="teacher")
        self._socket = context.socket(self._zmq.PUSH)
        self._socket.linger = 0
        self._socket.sndhwm = IN_FLIGHT
        self._socket.immediate = 1
        self._patience_s = SEND_DEADLINE_S
        self._socket.ipv6 = is_ipv6(info.data_endpoint)
        if keys is not None:
            keys.secure_client(self._socket, info.data_key)
        zmq = self._zmq
        self._monitor = self._socket.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CONNECT_RETRIED
        )
        self._broken_at: float | None = None
        self._closed = False
        self._socket.connect(info.data_endpoint)

    def target(self, piece: WorkPiece) -> Target:
        """Return empty slots of this worker to fill for a piece; they are used again once it is delivered."""
        if piece.first_slot + piece.count > self.info.slot_count:
            raise ValueError(f"slot {piece.first_slot + piece.count - 1} is beyond {self.info.slot_count}")
        scratch, self._free = self._free, None
        if scratch is None or scratch.slots.slot_count < piece.count:
            scratch = _Scratch.of(self._layout, piece.count)
        self._used[piece.ticket] = scratch
        scratch.slots.prepare(0, piece.count, piece.token, piece.generation)
        return Target(scratch.slots, 0, piece.count, piece.token, piece.generation)

    def deliver(self, piece: WorkPiece, outcomes: list[Outcome], demand: Demand) -> list[Outcome]:
        """Send what was made and is still wanted; what cannot be sent within the deadline has failed."""
        scratch = self._used.pop(piece.ticket)
        delivered = []
        for outcome in outcomes:
            if outcome.outcome == DONE:
                outcome = self._send(scratch.payloads, piece, outcome, demand)
            delivered.append(outcome)
        self._free = scratch
        return delivered

    def close(self) -> None:
        """Drop the connection; what is under way is lost."""
        self._closed = True
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=0)

    def _send(self, payloads: NDArray[np.uint8], piece: WorkPiece, outcome: Outcome, demand: Demand) -> Outcome:
        rows = _run_slots(self._layout)
        for start in range(outcome.first, outcome.first + outcome.count, rows):
            size = min(rows, outcome.first + outcome.count - start)
            shift = start - piece.first_slot
            head = HEAD.pack(MAGIC, piece.token + shift & U64, piece.generation, start, size, self._checksum)
            # A copy, since the scratch is filled again while this is under way.
            frames = [head, payloads[shift : shift + size].copy()]
            until = time.monotonic() + self._patience_s
            while self._closed or not self._put(frames):
                if self._closed or demand.newest > piece.generation:
                    return outcome._replace(outcome=SKIPPED)
                message = self._given_up(until)
                if message is not None:
                    self._patience_s = 0.0  # one deadline is enough until it takes something again
                    return outcome._replace(outcome=FAILED, message=message)
                self._socket.poll(LOOK_MS, self._zmq.POLLOUT)
                self._attend()
            self._patience_s = SEND_DEADLINE_S
        return outcome

    def _given_up(self, until: float) -> str | None:
        """Say why a student that takes nothing is not waited for any longer; None while it is."""
        now = time.monotonic()
        for event, _ in events(self._monitor):
            self._broken_at = None if event == self._zmq.EVENT_HANDSHAKE_SUCCEEDED else self._broken_at or now
        if now >= until:
            return f"the student at {self.info.data_endpoint} took nothing for {SEND_DEADLINE_S:g} s"
        if self._broken_at is not None and now >= self._broken_at + GONE_S:
            return f"the student at {self.info.data_endpoint} is gone: nothing listens there"
        return None

    def _put(self, frames: list[Any]) -> bool:
        try:
            self._socket.send_multipart(frames, self._zmq.NOBLOCK, copy=False)
        except self._zmq.Again:
            return False
        return True


class _Scratch(NamedTuple):
    """Slots in a worker's own memory."""

    slots: Slots
    payloads: NDArray[np.uint8]

    @classmethod
    def of(cls, layout: SlotLayout, slot_count: int) -> _Scratch:
        memory = memoryview(bytearray(layout.segment_bytes(slot_count)))
        slots = Slots(memory, layout, slot_count)
        return cls(slots, _payloads(memory, slots))


def _payloads(memory: memoryview, slots: Slots) -> NDArray[np.uint8]:
    """Return what lies between header and canary of every slot: (slot_count, payload bytes)."""
    layout = slots.layout
    whole = np.frombuffer(memory, np.uint8, slots.slot_count * layout.stride).reshape(slots.slot_count, layout.stride)
    return whole[:, HEADER_BYTES : HEADER_BYTES + layout.payload_bytes]


def _run_slots(layout: SlotLayout) -> int:
    """Return how many slots go into one message."""
    return max(1, RUN_BYTES // max(1, layout.payload_bytes))


def _require_security(keys: Keys | None, insecure: bool, what: str) -> None:
    if keys is None and not insecure:
        raise ValueError(f"{what} needs keys: make some with `mixle teacher keys` and give keys=, or insecure=True")
