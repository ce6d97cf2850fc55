"""Messages that no honest peer of a broker would send; run it to send 100,000 and to see that memory stays flat.

PYTHONPATH=. python tests/support/teacher_fuzz.py [COUNT]
"""

from __future__ import annotations

import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import zmq
from raw_teacher_peers import RawPeer

from mixle.data.teacher import messages
from mixle.data.teacher.run import Endpoints, ProcessIdentity, host_id, process_identity
from mixle.data.teacher.stats import BrokerStats


def absurdities(dice: random.Random) -> list[bytes]:
    """Return one message: random bytes, a well-formed one with one field changed, or one that makes no sense."""
    pack = messages.msgpack.packb
    commands = [*messages._BY_COMMAND, b"", b"\0", b"NEWS", dice.randbytes(5)]
    junk = [None, -1, 2**64 - 1, 1.5, float("nan"), "x" * 300, b"\xff" * 40, [], [[]], {}, {"a": [1]}, True, [None] * 9]
    match dice.randrange(4):
        case 0:
            return [dice.randbytes(dice.randrange(64)) for _ in range(dice.randrange(1, 5))]
        case 1:
            return [dice.choice(commands), dice.randbytes(dice.randrange(200))]
        case 2:
            return [dice.choice(commands), pack(dice.choice(junk))]
        case _:
            command, fields = dice.choice(list(messages._FIELDS.items()))
            return [command.COMMAND, pack({name: dice.choice(junk) for name in fields})]


def valid_but_absurd(dice: random.Random, run_id: str) -> messages.Message:
    """Return a message that parses and that no honest peer would send."""
    identity = process_identity() if dice.random() < 0.5 else ProcessIdentity(host_id(), dice.randrange(1, 2**22), 7)
    model = messages.ModelState(dice.randrange(2**62), "evil", dice.randbytes(9), dice.randbytes(16))
    order = messages.Order(
        dice.randbytes(8), dice.randrange(65_000), dice.randrange(1, 500), dice.getrandbits(64), dice.randrange(3)
    )
    done = messages.DonePiece(dice.randbytes(16), dice.randrange(9), 1, dice.randrange(3), "m" * dice.randrange(99))
    segment = f"/mx{run_id}-{identity.pid:x}-{dice.randrange(2**24):06x}"
    held = tuple(messages.HeldPiece(dice.randbytes(16), segment, i, 3, dice.getrandbits(64)) for i in range(3))
    hello = messages.Hello(
        version=1,
        attempt=dice.choice([0, 2**62]),
        session=None,
        student_id=dice.randbytes(16).hex(),
        rank=dice.randrange(3),
        identity=identity,
        medium="shm",
        segment=segment,
        slot_count=dice.choice([1, 65_536]),
        packed_bytes=dice.randrange(2**40),
        layout=dice.randbytes(30),
        data_endpoint=dice.choice([None, "tcp://256.256.256.256:1"]),
        data_key=None,
        model=model,
    )
    ready = messages.Ready(
        version=1,
        attempt=dice.choice([0, 2**62]),
        session=None,
        worker_id="evil",
        identity=identity,
        slot_size=0,
        max_batch=dice.choice([None, 65_536]),
        patterns=("(a+)+$", "*" * 200, "*a" * 100),
        prefetch=16,
        held=held,
        model=model,
        lane=dice.choice([None, "1-00000000"]),
    )
    set_model = messages.SetModel(
        request_id=dice.randbytes(8),
        student_id="0" * 32,
        session=dice.randbytes(16),
        rank=0,
        known=dice.choice([0, 1, messages.MAX_GENERATION]),
        model_id="evil",
        packed_cfg=dice.randbytes(20),
    )
    return dice.choice(
        [
            hello,
            ready,
            set_model,
            messages.Request(orders=(order,) * dice.randrange(1, 9), resent=dice.random() < 0.5),
            messages.Cancel(order_ids=(dice.randbytes(8),)),
            messages.Done(pieces=(done,) * 3, seconds=dice.random() * 1e9),
            messages.Served(
                segments=(messages.ServedSlots(dice.randrange(9), 2**31),) * dice.randrange(1, 9),
                seconds=dice.random() * 1e9,
            ),
            messages.Beat(session=dice.randbytes(16)),
            messages.Bye(),
            messages.Stats(),
            messages.Ask(version=1),
        ]
    )


def fuzz(endpoints: Endpoints, count: int, seed: int) -> None:
    """Send ``count`` messages, none of which makes sense, to the four sockets, from several connections each."""
    dice = random.Random(seed)
    with RawPeer(endpoints.frontend) as witness:
        run_id = witness.ask(messages.Ask(version=1), messages.Run).run_id
    peers = [RawPeer(endpoint) for endpoint in tuple(endpoints)[:3] for _ in range(3)]
    peers.append(RawPeer(endpoints.control_pub, kind=zmq.XSUB))
    try:
        for i in range(count):
            peer = dice.choice(peers)
            frames = messages.frames(valid_but_absurd(dice, run_id)) if dice.random() < 0.5 else absurdities(dice)
            if frames[0] == messages.Stop.COMMAND:
                continue  # it would be obeyed
            if peer is peers[-1] and dice.random() < 0.5:
                frames = [b"\1" + dice.randbytes(60)]
            peer.socket.send_multipart(frames)
            if i % 200 == 199:
                for one in peers:
                    while one.socket.poll(0):
                        one.socket.recv_multipart()
            if i % 1_000 == 999:
                with RawPeer(endpoints.frontend) as witness:
                    assert witness.ask(messages.Ask(version=1), messages.Run)
    finally:
        for peer in peers:
            peer.close()


def main(count: int) -> None:
    """Fuzz a broker in a process of its own, and print its memory and figures after each tenth."""
    with tempfile.TemporaryDirectory() as directory:
        os.chmod(directory, 0o700)
        endpoints = Endpoints.of(directory=directory, keyed=False, insecure=False)
        command = [sys.executable, "-m", "mixle", "teacher", "broker", "--directory", directory, "--log-level", "ERROR"]
        broker = subprocess.Popen(command)
        try:
            for tenth in range(10):
                began = time.perf_counter()
                fuzz(endpoints, count // 10, seed=tenth)
                pages = int(Path(f"/proc/{broker.pid}/statm").read_text().split()[1])
                with RawPeer(endpoints.frontend) as witness:
                    stats = BrokerStats.unpack(witness.ask(messages.Stats(), messages.StatsReply).stats)
                print(
                    f"{(tenth + 1) * count // 10:>8} sent, {time.perf_counter() - began:5.1f} s, "
                    f"{pages * resource.getpagesize() / 2**20:6.1f} MiB, garbage {stats.garbage}, strangers "
                    f"{stats.strangers}, students {stats.students_registered}, internal errors {stats.internal_errors}"
                )
            assert broker.poll() is None
        finally:
            broker.terminate()
            broker.wait()


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 100_000)
