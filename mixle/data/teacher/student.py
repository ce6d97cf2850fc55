"""The student's client: order samples from a broker, read them where they were written, and lead."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

from mixle.data.teacher import messages, wire
from mixle.data.teacher.batch_ref import BatchRef, SampleRef
from mixle.data.teacher.desk import Desk
from mixle.data.teacher.errors import BrokerUnreachable, LeaderRefused
from mixle.data.teacher.fence import Fence, GenerationReader, shared_generation
from mixle.data.teacher.keys import Keys
from mixle.data.teacher.messages import ModelState
from mixle.data.teacher.peer import refusal
from mixle.data.teacher.readers import retire_readers
from mixle.data.teacher.run import require_endpoint
from mixle.data.teacher.segment import SegmentMedium
from mixle.data.teacher.session import OnEvent
from mixle.data.teacher.specs import BatchConfig
from mixle.data.teacher.station import Station
from mixle.utils.exact import require_finite_float, require_positive_int
from mixle.utils.optional_import import optional_import

__all__ = ["StudentClient"]

RESEND_S = 1.0
REGISTRATIONS = 5
A_DAY_MS = 86_400_000


class StudentClient:
    """Order samples from a broker and read them in shared memory; for one thread of the process that first uses it.

    The broker is looked for at the first use. Every free slot is kept ordered, so ``slot_count`` is how far the
    teachers work ahead. All requests of a client are for samples, or all are for batches of one size.

    Args:
        student_rank: this rank; only rank 0 may :meth:`set_model`.
        slot_count: samples that the shared memory holds; for batches at least two of them, so that one can be made
            while the other is read.
        batch_config: what a sample is; a :class:`BatchConfig` or the mapping of one.
        frontend_endpoint, control_endpoint, control_pub_endpoint: the broker's; None for this user's own on this host.
        deadline_s: seconds that the broker, or a worker for the model, may be missing before an error says so.
        generation_value: the ``multiprocessing.Value`` of an integer that shows the generation; None for a new one.
            Only this client writes there.
        medium: ``"shm"``, or ``"file"`` for a mapped file in the run's directory.
        keys: CURVE keys, or their directory; TCP needs them.
        insecure: accept TCP without keys.
        host_id: 16 hexadecimal digits in place of this host's own; workers of another send over the network.
        directory: the user's directory of runs, as the broker has it; None is ``$MIXLE_TEACHER_DIR`` or one in
            ``~/.cache``.
        data_port: the TCP port where samples of workers on other hosts come in, or the (lowest, highest) of which one
            is taken; None for any that is free.
        on_event: called, in any thread, with what happened (registered, model, failed, lost, stopped) and its details.

    Raises:
        TypeError, ValueError: an argument that is not what it says above.
        OSError: the slots do not fit where they would lie; says both sizes.
    """

    def __init__(
        self,
        student_rank: int,
        slot_count: int,
        batch_config: BatchConfig | Mapping[str, Any],
        frontend_endpoint: str | None = None,
        control_endpoint: str | None = None,
        control_pub_endpoint: str | None = None,
        *,
        deadline_s: float = 30.0,
        generation_value: Any = None,
        medium: SegmentMedium = "shm",
        keys: Keys | str | os.PathLike[str] | None = None,
        insecure: bool = False,
        host_id: str | None = None,
        directory: str | os.PathLike[str] | None = None,
        data_port: int | tuple[int, int] | None = None,
        on_event: OnEvent | None = None,
    ) -> None:
        self._station = Station.of(
            student_rank,
            slot_count,
            batch_config,
            frontend_endpoint=frontend_endpoint,
            control_pub_endpoint=control_pub_endpoint,
            medium=medium,
            keys=keys,
            insecure=insecure,
            host_id=host_id,
            directory=directory,
            data_port=data_port,
        )
        self._control = require_endpoint(
            control_endpoint,
            "control",
            directory=self._station.runs_directory,
            keyed=self._station.keys is not None,
            insecure=insecure,
        )
        self._deadline_s = require_finite_float(deadline_s, "deadline_s", exclusive_minimum=0.0)
        if on_event is not None and not callable(on_event):
            raise TypeError(f"on_event={on_event!r} must be callable or None")
        self.generation_value = shared_generation() if generation_value is None else generation_value
        self._shared = GenerationReader(self.generation_value)
        self._shared.reopen()
        self._fence = Fence(self._shared, publishes=True)
        self._desk = Desk(self._station, self._fence, deadline_s=self._deadline_s, on_event=on_event)

    @property
    def batch_config(self) -> BatchConfig:
        """What a sample is."""
        return self._station.layout.config

    @property
    def slot_count(self) -> int:
        """The samples that the shared memory holds."""
        return self._station.slot_count

    @property
    def generation(self) -> int:
        """The newest generation that this process knows of; 0 before the first model."""
        return self._fence.generation

    def hello(self) -> dict[str, Any]:
        """Register with the broker, unless that is done, and return what it says of itself and the model.

        Raises:
            BrokerUnreachable: it did not answer within ``deadline_s``.
            TeacherError: it refused; says why.
        """
        session = self._desk.session(self._deadline_s)
        welcome, model = session.welcome, self._fence.model
        return {
            "version": welcome.version,
            "run_id": welcome.run_id,
            "generation": self.generation,
            "model_id": model.model_id,
            "model_cfg": model.model_cfg,
            "student_rank": self._station.rank,
            "slot_count": self._station.slot_count,
            "slot_stride": self._station.layout.stride,
            "buf_name": session.segment.name,
            "heartbeat_s": welcome.heartbeat_s,
            "timeout_s": welcome.timeout_s,
        }

    def start_sub_listener(self) -> None:
        """Follow the models that the broker publishes, as every client does from its first use on.

        Raises:
            BrokerUnreachable, TeacherError: as for :meth:`hello`.
        """
        self._desk.session(self._deadline_s)

    def set_model(self, model_id: str, model_cfg: Mapping[str, Any] | None = None) -> int:
        """Switch every worker to a model and return its generation; from then on no older sample is handed out here.

        Args:
            model_id: at most 1,024 bytes in UTF-8.
            model_cfg: what the generators need to know, at most 64 KiB of what msgpack has, so no numpy scalars.

        Raises:
            LeaderRefused: this is not rank 0, or another client leads.
            BrokerUnreachable: the broker did not answer within ``deadline_s``; whether it switched is not known.
            TypeError, ValueError: an argument that is not what it says above.
        """
        messages.require_model_id(model_id)
        packed = messages.pack_cfg(model_cfg)
        if self._station.rank != 0:
            raise LeaderRefused(f"student_rank={self._station.rank} does not lead; rank 0 calls set_model")
        model = self._switch(model_id, packed)
        self._fence.learn(model)
        return model.generation

    def request_sample(self, timeout_ms: float = 1000) -> SampleRef | None:
        """Return the next sample of the newest model, in its slot; None if none came within ``timeout_ms``.

        Raises:
            GeneratorFailed: an order failed; the next call orders anew.
            BrokerUnreachable, NoWorker: nothing came for ``deadline_s`` over all calls, and this is why.
            TeacherError: the broker refused, or every slot is held.
            RuntimeError: the client is closed, or this is a fork of the process that used it.
        """
        taken = self._desk.take(1, _seconds(timeout_ms))
        if taken is None:
            return None
        session, first = taken
        return SampleRef(session.slots, first, *session.order_of(first), session.give_back)

    def request_batch(self, size: int, timeout_ms: float = 1000) -> BatchRef | None:
        """Return ``size`` samples of the newest model in neighbouring slots; None if they did not come in time.

        Raises:
            ValueError: ``size`` exceeds ``slot_count``, or is not that of the calls before.
            TeacherError, RuntimeError: as for :meth:`request_sample`.
        """
        if type(size) is not int or size < 1:  # once for each batch
            size = require_positive_int(size, "size")
        if size > self._station.slot_count:
            raise ValueError(
                f"size={size} exceeds slot_count={self._station.slot_count}; have at least {2 * size} slots"
            )
        taken = self._desk.take(size, _seconds(timeout_ms))
        if taken is None:
            return None
        session, first = taken
        return BatchRef(session.slots, first, size, *session.order_of(first), session.give_back)

    def release_slot(self, slot_id: int) -> None:
        """Give a slot back, as :meth:`SampleRef.release` does.

        Raises:
            ValueError: it is not held.
        """
        self._desk.release(slot_id)

    def close(self) -> None:
        """Leave the broker, and retire the slots of the datasets that share ``generation_value``. Idempotent.

        Samples that are held stay readable.
        """
        if self._desk.close():
            self._shared.retire()
            retire_readers(self._shared)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        station = self._station
        return f"StudentClient(student_rank={station.rank}, slot_count={station.slot_count}, at {station.frontend})"

    def _switch(self, model_id: str, packed: bytes | None) -> ModelState:
        """Have the broker switch; the same request is sent again until it is answered, and done once."""
        request_id = secrets.token_bytes(8)
        until = time.monotonic() + self._deadline_s
        unknown = 0
        while (left := until - time.monotonic()) > 0:
            session = self._desk.session(left)
            session.hear(0.0)
            request = messages.SetModel(
                request_id=request_id,
                student_id=self._station.student_id,
                session=session.welcome.session,
                rank=self._station.rank,
                known=self.generation,
                model_id=model_id,
                packed_cfg=packed,
            )
            match self._ask_control(request, min(left, RESEND_S)):
                case messages.Model(model=model):
                    return model
                case messages.Error(kind="identity") if unknown < REGISTRATIONS:
                    # A new broker does not know the session yet, which registers anew by itself.
                    unknown += session.peer.registered
                    session.hear(min(left, session.welcome.heartbeat_s))
                case messages.Error() as error:
                    raise refusal(error, self._control)
        hint = ""
        if self._control.startswith("ipc://") and self._station.frontend.startswith("tcp://"):
            hint = f" (control_endpoint is a socket of this host, and the broker is at {self._station.frontend})"
        raise BrokerUnreachable(
            f"the broker did not answer at {self._control}{hint} within {self._deadline_s:g} s; "
            f"it may or may not have switched to model {model_id!r}"
        )

    def _ask_control(self, request: messages.SetModel, timeout_s: float) -> messages.Message | None:
        """Send a request to the broker's control and return its answer; None if none comes in time."""
        zmq = optional_import("zmq", extra="teacher")
        with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
            socket.linger = 0
            socket.ipv6 = wire.is_ipv6(self._control)
            socket.maxmsgsize = messages.MAX_MESSAGE_BYTES
            if self._station.keys is not None:
                self._station.keys.secure_client(socket)
            socket.connect(self._control)
            socket.send_multipart(messages.frames(request))
            until = time.monotonic() + timeout_s
            while socket.poll(max(until - time.monotonic(), 0.0) * 1000):
                frames = socket.recv_multipart()
                answer = messages.parse(frames[0], frames[1], (messages.Model, messages.Error))
                if getattr(answer, "request_id", None) in (None, request.request_id):
                    return answer
        return None


def _seconds(timeout_ms: object) -> float:
    if type(timeout_ms) is int and 0 <= timeout_ms <= A_DAY_MS:  # once for each sample
        return timeout_ms / 1000
    return require_finite_float(timeout_ms, "timeout_ms", minimum=0.0) / 1000
