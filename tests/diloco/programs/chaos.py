"""Real processes that are killed, stopped and lied to while they train one model, on files and on an S3 server.

    python tests/diloco/programs/chaos.py --seeds 20        # each seed on both stores
    python tests/diloco/programs/chaos.py --recovery 5      # seconds until the commit after a closer was killed

Four nodes train a linear regression until 60 rounds are committed and each has trained for ten turns since the trouble
was over. Checked of each seed: no commit is lost or changes, rounds follow one another, every step of a node that left
is in a commit, the final loss is within 2 % of the run without faults, and no gap between commits is longer than a
lease's timeout and a round.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import multiprocessing
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2] / "support"))

from diloco_members import Hooked
from faulty_mailbox import Faults, FaultyMailbox
from moto_server import BUCKET, environment, moto_server

from mixle.diloco import names
from mixle.diloco.algorithm import DiLoCo
from mixle.diloco.mailbox import Mailbox
from mixle.diloco.object_store import open_mailbox
from mixle.diloco.records import RoundRecord
from mixle.diloco.retrying import RetryingMailbox
from mixle.diloco.session import Session, align

NODES, ROUNDS, FRAGMENTS = 4, 60, 2
STEPS_AFTER = 80
PACES = {"file": (0.02, 0.1), "s3": (0.1, 0.5)}  # seconds of a step and between looks
LEASE_EVERY_S, LEASE_TIMEOUT_S = 1.0, 4.0
NOISE, BATCH, LEARNING_RATE = 0.5, 256, 0.05
SHAPES = {"a": (3,), "b": (5,), "c": (2, 2), "d": (1,)}
WEIGHTS = {name: np.random.default_rng(index).normal(size=shape) for index, (name, shape) in enumerate(SHAPES.items())}
# The bound on the overlap keeps deltas fresh where other programs leave the nodes little of the machine.
ALGORITHM = DiLoCo(8, FRAGMENTS, outer_momentum=0.5, overlap_steps=8)
FAULTS = Faults(refused=0.04, lost=0.04, delayed=0.02, repeated=0.02, longest_delay_s=3.0)
DEADLINE_S = 300.0
fork = multiprocessing.get_context("fork")  # a start costs milliseconds, and nothing here has threads when it forks


class Broken(AssertionError):  # noqa: N818  (what happened)
    """A run broke what every run must keep."""


# ---- a node


def node(folder: Path, address: str, name: str, seed: int, *, faulty: bool) -> None:
    """Train until enough rounds are committed, leave, and write down what was trained."""
    logging.disable(logging.CRITICAL)
    raw = open_mailbox(address)._inner
    store: Mailbox = FaultyMailbox(FAULTS, seed=seed, inner=raw) if faulty else raw
    rng = np.random.default_rng([seed, os.getpid()])
    step_s, poll_s = PACES[address.partition("://")[0]]
    arrays = {each: np.zeros(shape, np.float32) for each, shape in SHAPES.items()}
    trained = 0
    session = Session(
        arrays,
        algorithm=ALGORITHM,
        mailbox=RetryingMailbox(store, deadline_s=30.0),
        learner_id=name,
        poll_interval=poll_s,
        lease_every=LEASE_EVERY_S,
        lease_timeout=LEASE_TIMEOUT_S,
        callbacks=(),
    )
    rest = STEPS_AFTER
    while rest > 0 or session.rounds_seen < ROUNDS:
        rest -= (folder / "calm").exists()
        descend(arrays, rng)
        trained += 1
        session.step(BATCH)
        time.sleep(step_s)
    flushed = session.close(flush_s=120.0)
    (folder / f"left-{os.getpid()}.json").write_text(json.dumps({"name": name, "trained": trained, "flushed": flushed}))


def descend(arrays: dict[str, np.ndarray], rng: np.random.Generator) -> None:
    """Take one step of SGD on the regression, in place."""
    missing = np.concatenate([(WEIGHTS[name] - array).ravel() for name, array in arrays.items()])
    x = rng.normal(size=(BATCH, missing.size))
    rest = -x.T @ (x @ missing + NOISE * rng.normal(size=BATCH)) / BATCH
    for array in arrays.values():
        part, rest = np.split(rest, [array.size])
        array -= (LEARNING_RATE * part.reshape(array.shape)).astype(np.float32)


def loss(address: str) -> float:
    """Return the expected squared error of the newest version."""
    arrays = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
    align(arrays, mailbox=address)
    return NOISE**2 + sum(float(np.sum((arrays[name] - weight) ** 2)) for name, weight in WEIGHTS.items())


# ---- who watches


def watch(folder: Path, address: str) -> None:
    """Write down when each commit is first seen, until told to stop; end with what is wrong, if a commit changes."""
    logging.disable(logging.CRITICAL)
    mailbox = open_mailbox(address)
    seen: dict[str, tuple[float, str]] = {}
    while not (folder / "stop").exists():
        keys = mailbox.list(names.ROUNDS)
        now = time.monotonic()
        if not seen.keys() <= set(keys):
            (folder / "wrong").write_text(f"a commit is gone: {sorted(seen.keys() - set(keys))}")
            return
        for key in set(keys) - seen.keys():
            seen[key] = now, hashlib.sha256(mailbox.get(key) or b"").hexdigest()
        time.sleep(0.05)
    for key, (_, digest) in seen.items():
        if hashlib.sha256(mailbox.get(key) or b"").hexdigest() != digest:
            (folder / "wrong").write_text(f"{key} has changed")
    times = {names.round_of_record(key): at for key, (at, _) in seen.items()}
    (folder / "commits.json").write_text(json.dumps(sorted((at, round_) for round_, at in times.items())))


# ---- a run


class Nodes:
    """The processes of a run, by slot; a slot's process may be followed by another, under its id or a new one."""

    def __init__(self, folder: Path, address: str, seed: int, *, faulty: bool) -> None:
        self._arguments, self._faulty, self._seed = (folder, address), faulty, seed
        self.started = 0
        self.names = [f"n{slot}" for slot in range(NODES)]
        self.processes = [self.start(slot) for slot in range(NODES)]

    def start(self, slot: int) -> Any:
        self.started += 1
        arguments = (*self._arguments, self.names[slot], 1000 * self._seed + self.started)
        process = fork.Process(target=node, args=arguments, kwargs={"faulty": self._faulty})
        process.start()
        return process

    def signal(self, slot: int, number: int) -> bool:
        if not self.processes[slot].is_alive():
            return False
        with suppress(ProcessLookupError):
            os.kill(self.processes[slot].pid, number)
        return True


def run(folder: Path, address: str, seed: int, *, faulty: bool) -> dict[str, Any]:
    """Let four nodes train, with trouble, and return what came of it; raises :class:`Broken`."""
    rng = random.Random(seed)
    watcher = fork.Process(target=watch, args=(folder, address))
    watcher.start()
    nodes = Nodes(folder, address, seed, faulty=faulty)
    disturbed, due = [], []
    try:
        limit = time.monotonic() + DEADLINE_S
        trouble = time.monotonic() + rng.uniform(1.0, 3.0)
        left = 5 if faulty else 0
        while any(process.is_alive() for process in nodes.processes) or due:
            now = time.monotonic()
            if now > limit:
                raise Broken(f"not done within {DEADLINE_S:g} s")
            if not left and not due:
                (folder / "calm").touch()
            if left and now >= trouble:
                left, trouble = left - 1, now + rng.uniform(1.0, 4.0)
                slot, kind = rng.randrange(NODES), rng.choice(["kill", "kill as new", "stop"])
                number = signal.SIGSTOP if kind == "stop" else signal.SIGKILL
                if not any(each[1] == slot for each in due) and nodes.signal(slot, number):
                    disturbed.append(now)
                    due.append((now + rng.uniform(0.2, 7.0), slot, kind))
            for each in [each for each in due if each[0] <= now]:
                _, slot, kind = each
                due.remove(each)
                if kind == "stop":
                    nodes.signal(slot, signal.SIGCONT)
                else:
                    nodes.processes[slot].join()
                    nodes.names[slot] += "x" if kind == "kill as new" else ""
                    nodes.processes[slot] = nodes.start(slot)
            time.sleep(0.02)
    finally:
        for slot, process in enumerate(nodes.processes):
            nodes.signal(slot, signal.SIGKILL)
            process.join()
        (folder / "stop").touch()
        watcher.join()
    return result(folder, address, [each.exitcode for each in nodes.processes], disturbed)


def result(folder: Path, address: str, exit_codes: list[int], disturbed: list[float]) -> dict[str, Any]:
    if (folder / "wrong").exists():
        raise Broken((folder / "wrong").read_text())
    mailbox = open_mailbox(address)
    commits = json.loads((folder / "commits.json").read_text())
    records = {}
    for _, round_ in commits:
        records[round_] = RoundRecord.from_bytes(mailbox.get(names.round_record(round_)) or b"")
    if sorted(records) != list(range(len(records))) or len(records) < ROUNDS:
        raise Broken(f"{len(records)} rounds are committed, the newest is {max(records)}")
    for round_, record in records.items():
        if record.parent != round_ - FRAGMENTS:
            raise Broken(f"round {round_} continues {record.parent}")
    left = [json.loads(path.read_text()) for path in folder.glob("left-*.json")]
    # A process that was stopped for longer than its lease may find that another has its id, and ends with that.
    if any(exit_codes) and not disturbed:
        raise Broken(f"exit codes {exit_codes}")
    if not all(each["flushed"] for each in left):
        raise Broken(f"work was not flushed: {left}")
    for fragment in range(FRAGMENTS):
        merged = sum(record.steps for record in records.values() if record.fragment == fragment)
        if merged < sum(each["trained"] for each in left):
            raise Broken(f"{merged} steps are merged of fragment {fragment}, of {left}")
    times = [at for at, _ in commits]
    gaps = [after - before for before, after in pairwise(times)]
    return {"loss": loss(address), "gaps": gaps, "rounds": len(records), "disturbed": len(disturbed), "left": len(left)}


# ---- recovery from a killed closer, with the defaults


def doomed(folder: Path, address: str, name: str) -> None:
    """Train with the default settings; of all processes, the first to claim a round from the fifth on is killed."""
    logging.disable(logging.CRITICAL)
    hooked = Hooked(open_mailbox(address)._inner)

    def killed(operation: str, key: str) -> None:
        if operation == "put" and key.startswith(names.CLAIMS) and key > names.claims_of(4):
            now = str(time.monotonic())
            with suppress(FileExistsError), open(folder / "killed", "x") as file:
                file.write(now)
                file.flush()
                os.kill(os.getpid(), signal.SIGKILL)

    hooked.after = killed
    arrays = {each: np.zeros(shape, np.float32) for each, shape in SHAPES.items()}
    mailbox = RetryingMailbox(hooked)
    with Session(arrays, algorithm=DiLoCo(20, 2), mailbox=mailbox, learner_id=name, callbacks=()) as session:
        while session.rounds_seen < 9:
            arrays["a"] += 0.01
            session.step(1)
            time.sleep(0.05)
        os._exit(0)


def recovery(address: str) -> tuple[float, float]:
    """Return the seconds from the kill of a closer to the next commit, and those between commits before it."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        watcher = fork.Process(target=watch, args=(folder, address))
        watcher.start()
        processes = [fork.Process(target=doomed, args=(folder, address, f"n{i}")) for i in range(3)]
        for process in processes:
            process.start()
        for process in processes:
            process.join(DEADLINE_S)
            process.kill()
        (folder / "stop").touch()
        watcher.join()
        killed = float((folder / "killed").read_text())
        times = [at for at, _ in json.loads((folder / "commits.json").read_text())]
    before = [after - at for at, after in pairwise([at for at in times if at <= killed])]
    return next(at for at in times if at > killed) - killed, statistics.median(before)


# ---- the command


def one(folder: str, address: str, seed: int, faulty: bool, results: Any) -> None:
    try:
        results.send(run(Path(folder), address, seed, faulty=faulty))
    except Exception as error:
        results.send(f"{type(error).__name__}: {error}")


def isolated(address: str, seed: int, *, faulty: bool) -> dict[str, Any]:
    """Run in a process of its own, since object stores have threads, and who forks must not."""
    ours, theirs = fork.Pipe(duplex=False)
    with tempfile.TemporaryDirectory() as folder:
        child = fork.Process(target=one, args=(folder, address, seed, faulty, theirs))
        child.start()
        found: dict[str, Any] | str = ours.recv()
        child.join()
    if isinstance(found, str):
        raise Broken(f"seed {seed} on {address}: {found}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=0)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--recovery", type=int, default=0)
    parser.add_argument("--stores", nargs="+", choices=("file", "s3"), default=("file", "s3"))
    arguments = parser.parse_args()
    with ExitStack() as stack:
        places = {}
        if "file" in arguments.stores:
            places["file"] = f"file://{stack.enter_context(tempfile.TemporaryDirectory())}"
        if "s3" in arguments.stores:
            stack.enter_context(environment(stack.enter_context(moto_server())))
            places["s3"] = f"s3://{BUCKET}"
        failed = 0
        for store, place in places.items():
            times = [recovery_in_a_process(f"{place}/recovery{index}") for index in range(arguments.recovery)]
            for index, (seconds, usual) in enumerate(times):
                print(f"{store} recovery {index}: {seconds:.1f} s from SIGKILL of the closer to the next commit, "
                      f"{usual:.1f} s between commits before", flush=True)  # fmt: skip
            if not arguments.seeds:
                continue
            calm = isolated(f"{place}/calm", 0, faulty=False)
            print(f"{store} without faults: loss {calm['loss']:.4f}, {calm['rounds']} rounds, longest gap "
                  f"{max(calm['gaps']):.1f} s, usual {statistics.median(calm['gaps']):.2f} s", flush=True)  # fmt: skip
            allowed = LEASE_TIMEOUT_S + 2 * LEASE_EVERY_S + 3 * max(calm["gaps"]) + 2.0
            for seed in range(arguments.first, arguments.first + arguments.seeds):
                try:
                    rough = isolated(f"{place}/seed{seed}", seed, faulty=True)
                    longest = max(rough["gaps"])
                    good = rough["loss"] <= 1.02 * calm["loss"] and longest <= allowed
                    failed += not good
                    print(f"{store} seed {seed}: {'ok' if good else 'FAILED'}; loss {rough['loss'] / calm['loss']:.4f} "
                          f"of calm, {rough['rounds']} rounds, {rough['disturbed']} kills and stops, "
                          f"longest gap {longest:.1f} s (allowed {allowed:.1f})", flush=True)  # fmt: skip
                except Broken as error:
                    failed += 1
                    print(f"{store} seed {seed}: FAILED; {error}", flush=True)
        print(f"{failed} failed" if failed else "all as it must be")
    raise SystemExit(bool(failed))


def recovery_in_a_process(address: str) -> tuple[float, float]:
    ours, theirs = fork.Pipe(duplex=False)
    child = fork.Process(target=lambda: theirs.send(recovery(address)))
    child.start()
    found: tuple[float, float] = ours.recv()
    child.join()
    return found


if __name__ == "__main__":
    main()
