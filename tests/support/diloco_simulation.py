"""Whole runs of mixle.diloco on a virtual clock, with faults drawn from a seed, and what must hold of every one.

    python tests/support/diloco_simulation.py --seeds 0:5000

The code under test is that of :mod:`mixle.diloco`, from the learner down to the retries; only the store, time and the
threads are the simulation's. Training adds the same vector at every step, so that a delta says how many steps it holds.
"""

from __future__ import annotations

import argparse
import logging
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise
from multiprocessing import get_context
from typing import Any

import numpy as np
from faulty_mailbox import Faults, FaultyMailbox
from virtual_processes import Killed, Process, World

from mixle.diloco import names
from mixle.diloco.algorithm import DiLoCo
from mixle.diloco.alignment import Adaptive, Blend, Carry, Overwrite
from mixle.diloco.compression import Codec, decode
from mixle.diloco.exchange import READS_AT_ONCE
from mixle.diloco.lease import IdInUse, LeaseKeeper
from mixle.diloco.mailbox import Traffic, TransientMailboxError
from mixle.diloco.member import Member, join
from mixle.diloco.memory_mailbox import MemoryMailbox
from mixle.diloco.merge import Rda, WeightedMean
from mixle.diloco.node import LEAVING_GRACE_S
from mixle.diloco.parameters import NumpyParameters
from mixle.diloco.partition import ByBytes
from mixle.diloco.peers import Role
from mixle.diloco.records import Claim, RoundRecord, RunRecord, Snapshot, sealed
from mixle.diloco.retrying import RetryingMailbox
from mixle.diloco.tensor_codec import decode as decode_tensors
from mixle.diloco.theta import digest_of
from mixle.diloco.versions import KEPT_TURNS
from mixle.diloco.wire import Wire

SHAPES = {"a": (3,), "b": (5,), "c": (2, 2), "d": (1,)}
LEASE_EVERY_S, LEASE_TIMEOUT_S = 1.0, 4.0
KINDS = ("calm", "store", "crash", "pause", "harsh", "strays", "flips", "all", "brisk")


class Violated(AssertionError):  # noqa: N818  (what happened)
    """A run broke what every run must keep."""


@dataclass(frozen=True)
class Plan:
    """One node: when it comes, how fast and how long it trains, and at which operation what befalls it."""

    name: str
    role: Role
    joins_at: float
    step_s: float
    steps: int
    crash_at: int | None = None
    returns_after: float | None = None
    returns_as: str = ""
    pauses: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Scenario:
    seed: int
    kind: str
    algorithm: DiLoCo
    plans: tuple[Plan, ...]
    poll_s: float
    faults: Faults
    slow_share: float
    slow_s: float
    strays: tuple[float, ...] = ()
    flips: tuple[float, ...] = ()
    quick_s: float = 0.01
    patience_s: float = 10.0


def scenario(seed: int) -> Scenario:
    """Return the scenario of a seed; kinds go round."""
    rng = random.Random(f"scenario {seed}")
    kind = KINDS[seed % len(KINDS)]
    brisk = kind == "brisk"
    sites = rng.randint(1, 4)
    fragments = rng.randint(1, 3)
    sync_every = rng.randint(max(fragments, 2), 8)
    algorithm = DiLoCo(
        sync_every,
        fragments,
        in_flight=rng.randint(1, 4),
        overlap_steps=rng.choice([None, None, 0, 1, rng.randint(1, 8)]),
        alignment=rng.choice([Carry(), Carry(), Carry(), Overwrite(), Blend(0.5), Adaptive()]),
        follow=rng.choice([None, None, 0, 1]),
        quorum_size=rng.choice([1, 1, rng.randint(1, sites)]),
        grace_seconds=rng.choice([None, 0.0, 0.5]),
        merge=rng.choice([Rda(), WeightedMean()]),
        partition=ByBytes(),
        **rng.choice([{}, {}, {}, _WIRES[seed % len(_WIRES)]]),
    )
    has_syncer = sites > 1 and not brisk and rng.random() < 0.3
    crashes = kind in ("crash", "harsh", "all")
    pauses = kind in ("pause", "harsh", "all")
    turns = rng.randint(2, 6)
    plans = []
    for index in range(sites):
        role: Role = "both"
        if has_syncer:
            role = "syncer" if index == 0 else rng.choice(["both", "learner", "either"])
        crash_at = rng.randint(1, 250) if crashes and rng.random() < 0.7 else None
        if brisk and index == 1 and sites > 2:
            crash_at = rng.randint(60, 250)
        fate = rng.random()
        returns = None if fate < 0.25 and role != "syncer" else rng.uniform(0.0, 15.0)
        plans.append(
            Plan(
                f"n{index}",
                role,
                joins_at=0.0 if index == 0 or brisk else rng.uniform(0.0, 4.0),
                step_s=rng.uniform(0.05, 0.3),
                steps=sync_every * turns + rng.randint(0, sync_every),
                crash_at=crash_at,
                returns_after=None if brisk else returns,
                returns_as=f"n{index}" if fate < 0.75 else f"m{index}",
                pauses=tuple(
                    (rng.randint(1, 300), rng.choice([rng.uniform(0.1, 3.0), rng.uniform(3.0, 20.0)]))
                    for _ in range(rng.randint(0, 3) if pauses else 0)
                ),
            )
        )
    rough = kind in ("store", "harsh", "all")
    faults = Faults(
        refused=rough * rng.uniform(0.0, 0.1),
        lost=rough * rng.uniform(0.0, 0.1),
        delayed=rough * rng.uniform(0.0, 0.05),
        repeated=rough * rng.uniform(0.0, 0.05),
    )
    times = [rng.uniform(0.0, 30.0) for _ in range(rng.randint(1, 8))]
    return Scenario(
        seed,
        kind,
        algorithm,
        tuple(plans),
        poll_s=rng.choice([0.1, 0.5, 1.0]),
        faults=faults,
        slow_share=0.0 if kind in ("calm", "brisk") else rng.uniform(0.0, 0.1),
        slow_s=rng.uniform(0.1, 3.0),
        strays=tuple(times) if kind in ("strays", "all") else (),
        flips=tuple(times[:3]) if kind in ("flips", "all") else (),
        patience_s=rng.choice([0.0, 0.0, 0.3, 10.0]),
    )


_WIRES: list[dict[str, Any]] = [
    {"delta_dtype": "BF16"},
    {"delta_dtype": "F4", "residual_dtype": "BF16"},
    {"delta_dtype": "F8_E4M3", "commit_dtype": "F4"},
    {"commit_dtype": "BF16", "momentum_dtype": "BF16"},
    {"master_dtype": "BF16"},
    {"delta_dtype": "F4", "commit_dtype": "F4", "master_dtype": "BF16", "momentum_dtype": "F8_E4M3"},
]


class Ledger(MemoryMailbox):
    """The store, which remembers every object that it ever had, when rounds were committed, and how full it was."""

    def __init__(self, world: World) -> None:
        super().__init__(now=lambda: world.now)
        self._world = world
        self.history: dict[str, bytes] = {}
        self.commits: list[tuple[float, int]] = []
        self.flipped: set[str] = set()

    def put_if_absent(self, key: str, data: bytes) -> bool:
        done = super().put_if_absent(key, data)
        if done:
            once = key.startswith((names.ROUNDS, names.PAYLOADS, names.RUN))
            if self.history.setdefault(key, data) != data and once:
                raise Violated(f"{key} was written twice, differently")
            round_ = names.round_of_record(key)
            if round_ is not None and data[:1] == b"{":
                self.commits.append((self._world.now, round_))
        return done

    def delete(self, keys: Any) -> None:
        each = list(keys)
        for key in each:
            if key.startswith((names.ROUNDS, names.RUN)):
                raise Violated(f"{key} was deleted")
        super().delete(each)

    def flip(self, key: str, rng: random.Random) -> None:
        data = bytearray(self._objects[key])
        if not data:
            return
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        self._objects[key] = bytes(data)
        self.flipped.add(key)

    def present(self) -> list[str]:
        return list(self._keys)


class Gate:
    """The way of one process to the store: each operation takes its time, and some are the process's last."""

    def __init__(self, site: Site, inner: FaultyMailbox) -> None:
        self._site, self._inner = site, inner
        self._rng = random.Random(f"gate {site.run.scenario.seed} {site.process.name} {site.life}")

    def put_if_absent(self, key: str, data: bytes) -> bool:
        return self._through(lambda: self._inner.put_if_absent(key, data))

    def get(self, key: str, *, limit: int | None = None) -> bytes | None:
        return self._through(lambda: self._inner.get(key, limit=limit))

    def list(self, prefix: str, after: str = "", *, limit: int | None = None) -> list[str]:
        return self._through(lambda: self._inner.list(prefix, after, limit=limit))

    def delete(self, keys: Any) -> None:
        each = list(keys)
        return self._through(lambda: self._inner.delete(each))

    def clock(self) -> float:
        return self._through(self._inner.clock)

    def _through(self, act: Any) -> Any:
        site, plan = self._site, self._site.run.scenario
        slow = self._rng.random() < plan.slow_share
        site.process.world.elapse(self._rng.expovariate(1.0 / (plan.slow_s if slow else plan.quick_s)))
        site.operations += 1
        last = site.life == 0 and site.operations == site.plan.crash_at
        if last and self._rng.random() < 0.5:
            site.crash()
            raise Killed
        for at, seconds in site.plan.pauses:
            if site.operations == at and site.life == 0:
                site.run.disturbed.append(site.process.world.now)
                site.process.pause(seconds)
        try:
            return act()
        finally:
            if last:
                site.crash()
                raise Killed


class Site:
    """One process: what :class:`mixle.diloco.session.Session` does with a member, on virtual threads."""

    def __init__(self, run: Run, plan: Plan, *, name: str, life: int) -> None:
        self.run, self.plan, self.life = run, plan, life
        self.process = Process(run.world, name)
        self.operations = 0
        self.trained = 0
        self.born = run.world.now
        self.done_at: float | None = None
        self.left = False
        self.member: Member | None = None
        self.traffic: Callable[[], Traffic] | None = None
        rng = random.Random(f"model {name}")
        self.arrays = {each: np.zeros(shape, np.float32) for each, shape in SHAPES.items()}
        self.push = {
            each: np.float32(0.01 + rng.random()) * np.ones(shape, np.float32) for each, shape in SHAPES.items()
        }
        self.events: Counter[str] = Counter()
        self._stopping, self._node_done, self._wake = threading.Event(), threading.Event(), threading.Event()
        self.process.spawn(self._main)

    def crash(self) -> None:
        if self.left or self.process.dead:
            return
        self.run.disturbed.append(self.run.world.now)
        self.run.crashed = True
        self.process.kill()
        self.done_at = self.run.world.now
        if self.plan.returns_after is not None:
            after = self.run.world.now + self.plan.returns_after
            self.run.world.call_at(after, lambda: self.run.start(self.plan, self.plan.returns_as, life=self.life + 1))

    def _main(self) -> None:
        run, scenario = self.run, self.run.scenario
        gate = Gate(self, run.store)
        rng = random.Random(f"retries {scenario.seed} {self.process.name} {self.life}")
        mailbox = RetryingMailbox(gate, deadline_s=scenario.patience_s, clock=self.process, rng=rng)
        self.traffic = lambda: mailbox.traffic
        member = self._join(mailbox)
        self.member = member
        if member.learner is not None:
            self._wake = member.learner.wake_node
        self.process.spawn(self._work)
        if member.learner is None:
            while run.learners_left():
                self.process.sleep(0.5)
        else:
            for _ in range(self.plan.steps):
                self.process.sleep(self.plan.step_s * rng.uniform(0.8, 1.2))
                run.train(self)
                self.trained += 1
                member.learner.step(3)
            self.done_at = run.world.now
            member.learner.flush(600.0, poll_s=min(scenario.poll_s, 0.5))
        self._stopping.set()
        self._wake.set()
        while not self.process.wait(self._node_done, 600.0):
            pass
        member.keeper.stop()
        try:
            member.lease.release()
        except TransientMailboxError:
            self.events["unreleased"] += 1
        self.left = True

    def _join(self, mailbox: RetryingMailbox) -> Member:
        while True:
            try:
                return join(
                    NumpyParameters(self.arrays),
                    self.run.scenario.algorithm,
                    mailbox=mailbox,
                    name=self.process.name,
                    role=self.plan.role,
                    codec=Codec(),
                    lease_every=LEASE_EVERY_S,
                    lease_timeout=LEASE_TIMEOUT_S,
                    clock=self.process,
                    report=self._report,
                    keep=self._keep,
                    gather=self._gather,
                )
            except (IdInUse, TransientMailboxError) as error:
                if isinstance(error, IdInUse) and not self.run.may_lose_ids():
                    raise
                self.process.sleep(1.0)

    def _keep(self, keeper: LeaseKeeper) -> None:
        done, stop = threading.Event(), keeper.stop

        def renew() -> None:
            try:
                keeper._run()
            finally:
                done.set()

        def stop_and_wait() -> None:
            stop()
            while not self.process.wait(done, 600.0):
                pass

        keeper.stop = stop_and_wait  # type: ignore[method-assign]
        self.process.spawn(renew)

    def _gather(self, calls: Any) -> list[Any]:
        """Make calls on threads of this process, at most as many at a time as the library would."""
        results: list[Any] = [None] * len(calls)
        errors: list[BaseException] = []
        left, done = list(enumerate(calls))[::-1], threading.Event()
        readers = min(len(calls), READS_AT_ONCE)
        working = [readers]

        def read() -> None:
            while left and not errors:
                index, call = left.pop()
                try:
                    results[index] = call()
                except Exception as error:
                    errors.append(error)
            working[0] -= 1
            if not working[0]:
                done.set()

        for _ in range(readers):
            self.process.spawn(read)
        while calls and not self.process.wait(done, 600.0):
            pass
        if errors:
            raise errors[0]
        return results

    def _work(self) -> None:
        member, learner = self.member, self.member.learner
        try:
            while not self._stopping.is_set():
                if member.keeper.error is not None:
                    raise member.keeper.error
                self._wake.clear()
                try:
                    member.node.tick()
                except TransientMailboxError:
                    self.events["store"] += 1
                self.process.wait(self._wake, self.run.scenario.poll_s)
        except Exception as error:
            if learner is None:
                raise
            learner.fail(error)
        finally:
            self._node_done.set()

    def _report(self, kind: str, round_: int | None, detail: dict[str, Any]) -> None:
        self.events[kind] += 1
        if kind == "rejected":
            self.run.reasons[str(detail["reason"]).partition(":")[0]] += 1


@dataclass
class Run:
    """One simulated run and what came of it."""

    scenario: Scenario
    world: World = field(init=False)
    sites: list[Site] = field(default_factory=list)
    crashed: bool = False
    disturbed: list[float] = field(default_factory=list)
    reasons: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.world = World(self.scenario.seed)
        self.ledger = Ledger(self.world)
        self.wire = Wire.of(self.scenario.algorithm)
        clock = Process(self.world, "store")
        self.store = FaultyMailbox(self.scenario.faults, seed=self.scenario.seed, inner=self.ledger, clock=clock)
        self._rng = random.Random(f"faults {self.scenario.seed}")
        for plan in self.scenario.plans:
            self.world.call_at(plan.joins_at, lambda plan=plan: self.start(plan, plan.name, life=0))
        for at in self.scenario.strays:
            self.world.call_at(at, self._stray)
        for at in self.scenario.flips:
            self.world.call_at(at, self._flip)

    def start(self, plan: Plan, name: str, *, life: int) -> None:
        self.sites.append(Site(self, plan, name=name, life=life))

    def train(self, site: Site) -> None:
        for name, array in site.arrays.items():
            array += site.push[name]

    def learners_left(self) -> bool:
        started = {site.plan.name for site in self.sites if site.left or site.process.dead}
        return any(plan.role != "syncer" and plan.name not in started for plan in self.scenario.plans) or any(
            site.process.dead
            and site.plan.returns_after is not None
            and site.life == 0
            and site.plan.role != "syncer"
            and not any(
                other.plan is site.plan and other.life == 1 and (other.left or other.process.dead)
                for other in self.sites
            )
            for site in self.sites
        )

    def go(self) -> Run:
        finished = self.world.run(until=3000.0)
        for _, error in self.world.failures:
            if not (isinstance(error, IdInUse) and self.may_lose_ids()):
                raise error
        if not finished:
            newest = max((round_ for _, round_ in self.ledger.commits), default=-1)
            raise Violated(f"stalled for ever after round {newest}")
        return self

    def may_lose_ids(self) -> bool:
        """Tell whether a process may have been silent, or not have heard that an id is its own."""
        return bool(self.disturbed) or self.scenario.slow_share > 0 or self.scenario.faults.refused > 0

    # ---- trouble

    def _newest(self) -> int:
        return max((round_ for _, round_ in self.ledger.commits), default=-1)

    def _stray(self) -> None:
        newest, rng = self._newest(), self._rng
        key, data = rng.choice(
            [
                ("rounds/abc", b"{}"),
                ("rounds/0000000005.json", b"{}"),
                (names.round_record(newest + rng.randint(1, 3)), b"garbage"),
                (names.round_record(newest + rng.randint(1, 3)), b'{"format":1}'),
                (names.claim(newest + rng.randint(1, 3), rng.choice([0, 1, 5, 9999])), b"[]"),
                (names.claim(newest + 1, 0), Claim(newest + 1, 0, "ghost").to_bytes()),
                (f"claims/{newest + 1:010d}/zero.json", b"0"),
                (names.snapshot(newest + rng.randint(1, 3), "ghost"), b"\xff\xfe"),
                (names.snapshot(newest + rng.randint(1, 3), "n0"), b"{}"),
                (f"snapshots/{newest + 1:010d}/x..json", b"{}"),
                (names.snapshot(newest + 1, "ghost"), self._ghost(newest + 1, steps=5, tokens=0)),
                (names.snapshot(newest + 1, "ghost"), self._ghost(newest + 1, steps=5, tokens=7)),
                (names.snapshot(newest + 1, "ghost"), self._ghost(newest + 1, steps=5, tokens=7, speed=10**400)),
                ("leases/zz", b""),
                ("leases/ghost/00000000-000000000001", b"nonce\nwhat"),
                ("payloads/stray", b""),
                ("somewhere/else", b""),
            ]
        )
        self.ledger.put_if_absent(key, data)

    def _ghost(self, round_: int, *, steps: int, tokens: int, speed: float = 0.1) -> bytes:
        key = names.payload(round_, "delta", "0" * 64, ".safetensors")
        snapshot = {"round": round_, "learner": "ghost", "payload": {"key": key, "nbytes": 10}, "final": False}
        snapshot |= {"anchor": round_ - self.scenario.algorithm.fragments, "steps": steps, "tokens": tokens}
        return sealed({**snapshot, "seconds_per_step": speed})

    def _flip(self) -> None:
        newest, rng = self._newest(), self._rng
        keys = [
            key
            for key in self.ledger.present()
            if key.startswith((names.PAYLOADS, names.SNAPSHOTS, names.CLAIMS)) or names.round_of_record(key) == newest
        ]
        keys = [key for key in keys if "/base-" not in key]
        if keys:
            recent = [key for key in keys if (names.round_of_object(key) or newest) >= newest]
            self.ledger.flip(rng.choice(recent or keys), rng)


# ---- what must hold


class Facts:
    """What the history of a run says, read without the code that wrote it as far as formats allow."""

    def __init__(self, run: Run) -> None:
        self.run, self.algorithm, self.history = run, run.scenario.algorithm, run.ledger.history
        self.records: dict[int, RoundRecord] = {}
        self.void: set[int] = set()
        for key, data in self.history.items():
            round_ = names.round_of_record(key)
            if round_ is not None:
                try:
                    self.records[round_] = RoundRecord.from_bytes(data)
                except ValueError:
                    self.void.add(round_)
        self.run_record = RunRecord.from_bytes(self.history[names.RUN]) if names.RUN in self.history else None
        self.deltas = {}
        for key, data in self.history.items():
            if key.startswith(names.SNAPSHOTS):
                try:
                    snapshot = Snapshot.from_bytes(data)
                except ValueError:
                    continue
                if snapshot.payload is not None:
                    self.deltas[snapshot.round, snapshot.learner] = snapshot

    def arrays(self, ref: Any, fragment: int, dtype: Any) -> dict[str, np.ndarray]:
        from mixle.diloco.serialization import ParameterSpec, Schema

        schema = Schema(tuple(ParameterSpec(n, "F32", SHAPES[n]) for n in sorted(self.run_record.fragments[fragment])))
        tensors = decode(ref.key, self.history[ref.key], max_bytes=1 << 30)
        return decode_tensors(tensors, schema, dtype)

    def chain(self, fragment: int) -> Iterator[RoundRecord]:
        """Yield the commits that the newest version of a fragment continues, itself first."""
        round_: int = max((r for r, record in self.records.items() if record.fragment == fragment), default=-1)
        while round_ in self.records:
            yield self.records[round_]
            round_ = self.records[round_].parent

    def theta(self, fragment: int, round_: int) -> dict[str, np.ndarray]:
        if round_ < 0:
            return self.arrays(self.run_record.base[fragment], fragment, "F32")
        return self.arrays(self.records[round_].theta, fragment, self.run.wire.theta)


def check(run: Run) -> Facts:
    """Raise :class:`Violated` if the run broke what every run must keep."""
    facts = Facts(run)
    scenario, algorithm = run.scenario, run.scenario.algorithm
    period = algorithm.fragments
    _check_chain(facts)
    for round_, record in sorted(facts.records.items()):
        _require(record.round == round_ and record.fragment == round_ % period, f"round {round_}: wrong record")
        _require(
            digest_of(facts.theta(record.fragment, round_)) == record.theta_digest, f"round {round_}: digest of theta"
        )
        _check_step(facts, record)
        _check_contributions(facts, record)
    for site in run.sites:
        if site.left and site.member is not None and site.member.learner is not None:
            _check_learner(facts, site)
    _check_work(facts)
    _check_size(facts)
    if scenario.kind == "brisk":
        _check_stalls(facts)
    return facts


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise Violated(what)


def _check_chain(facts: Facts) -> None:
    run, period = facts.run, facts.algorithm.fragments
    committed = facts.records.keys() | facts.void
    commits = [round_ for _, round_ in run.ledger.commits if round_ in facts.records]
    _require(len(commits) == len(set(commits)), "a round was committed twice")
    newest = max(facts.records, default=-1)
    _require(committed >= set(range(newest + 1)), "a round was left out")
    for round_, record in facts.records.items():
        before = round_ - period
        while before in facts.void:
            before -= period
        fresh = max(before, record.fragment - period)
        _require(
            record.parent == fresh or (bool(run.scenario.flips) and record.parent < fresh),
            f"round {round_} continues {record.parent}, not {fresh}",
        )


def _check_step(facts: Facts, record: RoundRecord) -> None:
    """Take the outer step again, from what the record names, in float64."""
    wire, algorithm, fragment = facts.run.wire, facts.algorithm, record.fragment
    if wire.master != "F32" or wire.momentum != "F32" or facts.run.scenario.flips:
        return
    parent = facts.records.get(record.parent)
    theta = facts.theta(fragment, record.parent)
    master = theta
    momentum = {name: np.zeros(array.shape) for name, array in theta.items()}
    if parent is not None and parent.master is not None:
        master = facts.arrays(parent.master, fragment, "F32")
    if parent is not None and parent.momentum is not None:
        momentum = facts.arrays(parent.momentum, fragment, "F32")
    expected_theta = {name: array.astype(float) for name, array in master.items()}
    expected_momentum = {name: array.astype(float) for name, array in momentum.items()}
    if record.contributions:
        deltas, weights = [], []
        for each in record.contributions:
            snapshot = facts.deltas[record.round, each.learner]
            _require(snapshot.payload.digest == each.digest, f"round {record.round}: not the delta of its snapshot")
            deltas.append(facts.arrays(snapshot.payload, fragment, wire.delta))
            weights.append(each.tokens**2 / each.steps)
        total = sum(weights)
        beta, eta = algorithm.outer_momentum, algorithm.outer_lr
        for name in theta:
            scaled = [
                d[name].astype(float) * each.clipped for d, each in zip(deltas, record.contributions, strict=True)
            ]
            mean = sum(w / total * d for w, d in zip(weights, scaled, strict=True))
            if isinstance(algorithm.merge, Rda) and len(deltas) > 1:
                radius = sum(w / total * np.linalg.norm(d) for w, d in zip(weights, scaled, strict=True))
                units = [d[name] / n if (n := np.linalg.norm(d[name])) else d[name] for d in deltas]
                unit = sum(w / total * u for w, u in zip(weights, units, strict=True))
                if np.linalg.norm(unit) > 1e-6:
                    mean = radius * unit / np.linalg.norm(unit)
            if all(each.final for each in record.contributions):
                expected_theta[name] -= mean
            else:
                expected_momentum[name] = beta * expected_momentum[name] + mean
                expected_theta[name] -= eta * (mean + beta * expected_momentum[name])
    actual = (
        facts.theta(fragment, record.round) if record.master is None else facts.arrays(record.master, fragment, "F32")
    )
    for name, array in actual.items():
        _require(np.allclose(array, expected_theta[name], rtol=1e-4, atol=1e-4), f"round {record.round}: outer step")
    if record.momentum is not None:
        for name, array in facts.arrays(record.momentum, fragment, "F32").items():
            _require(
                np.allclose(array, expected_momentum[name], rtol=1e-4, atol=1e-4), f"round {record.round}: momentum"
            )


def _check_contributions(facts: Facts, record: RoundRecord) -> None:
    """A delta holds exactly the steps that it is weighted by, none twice and none left out."""
    if isinstance(facts.algorithm.alignment, Blend) or facts.run.wire.delta != "F32":
        return
    pushes = {site.process.name: site.push for site in facts.run.sites}
    for each in record.contributions:
        snapshot = facts.deltas[record.round, each.learner]
        for name, array in facts.arrays(snapshot.payload, record.fragment, "F32").items():
            steps = -array / pushes[each.learner][name]
            _require(
                np.allclose(steps, each.steps, rtol=1e-3, atol=1e-3),
                f"round {record.round}: the delta of {each.learner} on {name} holds {steps.ravel()[0]:.3f} steps, "
                f"not {each.steps}",
            )


def _check_learner(facts: Facts, site: Site) -> None:
    learner = site.member.learner
    if not isinstance(facts.algorithm.alignment, Blend):
        _require(not any(learner.unmerged_steps), f"{site.process.name} left with {learner.unmerged_steps} unmerged")
    for fragment, round_ in enumerate(learner._versions):
        for name, array in facts.theta(fragment, round_).items():
            same = np.array_equal(site.arrays[name], array)
            if isinstance(facts.algorithm.alignment, Blend):
                continue
            _require(
                same, f"{site.process.name} is not at round {round_}: {name} is off by {site.arrays[name] - array}"
            )


def _check_work(facts: Facts) -> None:
    run = facts.run
    if not isinstance(facts.algorithm.alignment, Carry):
        return
    learners = [site for site in run.sites if site.plan.role != "syncer"]
    trained = sum(site.trained for site in learners)
    survived = sum(site.trained for site in learners if site.left)
    for fragment in range(facts.algorithm.fragments):
        merged = sum(record.steps for record in facts.chain(fragment))
        if any(names.round_of_record(key) is not None for key in run.ledger.flipped):
            continue  # whose record is lost may offer its work again, though the round is continued
        if run.scenario.flips:
            _require(merged <= trained, f"fragment {fragment}: {merged} steps merged of {trained}")
        elif run.crashed or run.world.failures:
            _require(survived <= merged <= trained, f"fragment {fragment}: {merged} merged of {survived} to {trained}")
        else:
            _require(merged == trained, f"fragment {fragment}: {merged} steps merged of {trained}")


def _check_size(facts: Facts) -> None:
    """What is swept stays within some turns of the newest round."""
    newest, period = max(facts.records, default=0), facts.algorithm.fragments
    old = [
        key
        for key in facts.run.ledger.present()
        if (round_ := names.round_of_object(key)) is not None
        and round_ < newest - (KEPT_TURNS + 4) * period
        and names.kind_of_payload(key) != "base"
    ]
    if facts.run.scenario.kind in (
        "calm",
        "strays",
        "flips",
        "brisk",
    ):  # else one may write late, and nobody sweep after
        _require(not old, f"left behind: {old[:3]}")


def _check_stalls(facts: Facts) -> None:
    """No gap between commits is longer than a lease and a round, while somebody trains all through it."""
    run, algorithm = facts.run, facts.algorithm
    gap = max(algorithm.schedule.gap(round_) for round_ in range(algorithm.fragments, 2 * algorithm.fragments))
    slowest = max(plan.step_s for plan in run.scenario.plans) * 1.2
    a_round = gap * slowest + 2 * run.scenario.poll_s + 1.0
    a_round += gap * slowest + LEAVING_GRACE_S if algorithm.grace_seconds is None else algorithm.grace_seconds
    for before, after in stalls(run):
        allowed = a_round
        if any(before - 2 * LEASE_TIMEOUT_S <= at <= after for at in run.disturbed):
            allowed += LEASE_TIMEOUT_S + 2 * LEASE_EVERY_S
        _require(after - before <= allowed, f"nothing was committed from {before:.1f} to {after:.1f} s ({allowed:.1f})")


def stalls(run: Run) -> Iterator[tuple[float, float]]:
    """Yield the times of commits that follow one another while one learner trained all the time between."""
    for (before, _), (after, _) in pairwise(sorted(run.ledger.commits)):
        if any(site.born <= before and (site.done_at or 0.0) >= after for site in run.sites):
            yield before, after


def simulate(seed: int) -> Facts:
    """Run the scenario of a seed and check it; an error names the seed and the kind."""
    logging.disable(logging.CRITICAL)
    try:
        return check(Run(scenario(seed)).go())
    except BaseException as error:
        error.add_note(f"seed {seed}, {KINDS[seed % len(KINDS)]}: {scenario(seed)}")
        raise
    finally:
        logging.disable(logging.NOTSET)


def outcome(seed: int) -> tuple[int, str | None]:
    """Return the rounds of a run, and what was wrong with it."""
    try:
        return len(simulate(seed).records), None
    except Exception as error:
        return 0, f"seed {seed} ({KINDS[seed % len(KINDS)]}): {type(error).__name__}: {error}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", default="0:1000", help="FIRST:LAST, the last not included")
    parser.add_argument("--kind", choices=KINDS)
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    arguments = parser.parse_args()
    began = time.perf_counter()
    first, last = (int(each) for each in arguments.seeds.split(":"))
    seeds = [seed for seed in range(first, last) if arguments.kind in (None, KINDS[seed % len(KINDS)])]
    failed, rounds = [], 0
    with ProcessPoolExecutor(arguments.jobs, mp_context=get_context("spawn")) as pool:
        for seed, (made, wrong) in zip(seeds, pool.map(outcome, seeds), strict=True):
            rounds += made
            if wrong is not None:
                failed.append(seed)
                print(wrong, flush=True)
    seconds = time.perf_counter() - began
    print(f"{len(seeds)} runs, {rounds} rounds, {len(failed)} failed: {failed[:50]}; {seconds:.0f} s")
    raise SystemExit(bool(failed))


if __name__ == "__main__":
    main()
