"""What becomes of messages that could not be sent."""

from __future__ import annotations

import math

from mixle.data.teacher import messages
from mixle.data.teacher.messages import NO_MODEL, Order
from mixle.data.teacher.routing import Routing
from mixle.data.teacher.run import ProcessIdentity, Run
from mixle.data.teacher.scheduling import Scheduler

HOST = "0" * 16
STUDENT, WORKER = ProcessIdentity(HOST, 1, 1), ProcessIdentity(HOST, 2, 1)


def routing() -> Routing:
    return Routing(
        Run("0123abcd", b"secret", False),
        Scheduler(holding_until=-math.inf),
        host=HOST,
        now=0.0,
        heartbeat_s=1.0,
        timeout_s=5.0,
        watch=lambda identity: True,
        unwatch=lambda identity: None,
        unlink=lambda medium, name: None,
    )


def hello() -> messages.Hello:
    return messages.Hello(
        version=messages.PROTOCOL_VERSION,
        attempt=1,
        session=None,
        student_id="a" * 32,
        rank=0,
        identity=STUDENT,
        medium="shm",
        segment="/mx0123abcd-1-00000a",
        slot_count=1,
        packed_bytes=64,
        layout=b"layout",
        data_endpoint=None,
        data_key=None,
        model=NO_MODEL,
    )


def ready(worker_id: str) -> messages.Ready:
    return messages.Ready(
        version=messages.PROTOCOL_VERSION,
        attempt=1,
        session=None,
        worker_id=worker_id,
        identity=WORKER,
        slot_size=64,
        max_batch=None,
        patterns=("*",),
        prefetch=1,
        held=(),
        model=NO_MODEL,
        lane=None,
    )


def test_work_that_does_not_reach_a_worker_is_given_to_another_and_no_student_hears_of_it():
    one = routing()
    one.handle("frontend", b"s", messages.frames(hello()), 0.0)
    for worker_id in ("first", "second"):
        one.handle("backend", worker_id.encode(), messages.frames(ready(worker_id)), 0.0)
    one.take(0.0)
    asked = messages.Request(orders=(Order(b"o" * 8, 0, 1, 7, 0),), resent=False)
    one.handle("frontend", b"s", messages.frames(asked), 0.0)
    ((channel, gone, work),) = one.take(0.0)[0]
    one.undelivered(channel, gone, work, 0.0)
    ((channel, other, again),) = one.take(0.0)[0]
    assert (channel, gone != other) == ("backend", True)
    assert again.pieces[0]._replace(ticket=b"") == work.pieces[0]._replace(ticket=b"")
