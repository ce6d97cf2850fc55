"""What a mailbox tells of the run in it, to somebody who takes no part."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

from mixle.diloco import names
from mixle.diloco.algorithm import DiLoCo
from mixle.diloco.clock import SYSTEM_CLOCK, Clock
from mixle.diloco.compression import Codec
from mixle.diloco.events import Kind
from mixle.diloco.exchange import Exchange
from mixle.diloco.existing_run import read_run_record, schema_of
from mixle.diloco.lease import LEASES, LeaseTable, read_info
from mixle.diloco.mailbox import Mailbox
from mixle.diloco.node_info import NodeInfo
from mixle.diloco.records import RoundRecord, RunRecord
from mixle.diloco.versions import KEPT_TURNS

__all__ = ["NodeSeen", "Survey", "collect_garbage", "survey"]

_AT_ONCE = 8
_USED_FREELY = ("leases", "queues", "barriers")
NodeState = Literal["alive", "silent", "left"]


@dataclass(frozen=True)
class NodeSeen:
    """A node as its lease shows it; ``speed`` in samples per second, None where no round says."""

    name: str
    state: NodeState
    info: NodeInfo
    speed: float | None


@dataclass(frozen=True)
class Survey:
    """A run in a mailbox.

    Attributes:
        run: what its nodes have in common.
        algorithm: of the run.
        committed: how many rounds.
        rounds: the newest of them, oldest first; without those whose record cannot be read.
        nodes: everybody who has a lease, or has left one behind.
        objects: how many there are of each kind.
        foreign: keys under the prefix that are nothing of a run, and records that cannot be read.
    """

    run: RunRecord
    algorithm: DiLoCo
    committed: int
    rounds: tuple[RoundRecord, ...]
    nodes: tuple[NodeSeen, ...]
    objects: Counter[str]
    foreign: tuple[str, ...]

    @property
    def merged_share(self) -> float | None:
        """The share of all nodes' steps whose work is in commits; None before the first step.

        Nodes that were killed count as they last said; what they trained after that nobody knows.
        """
        steps = sum(node.info.steps for node in self.nodes)
        merged = sum(node.info.merged for node in self.nodes)
        return merged / (steps * self.algorithm.fragments) if steps else None


def survey(mailbox: Mailbox, *, last: int, wait_s: float, clock: Clock = SYSTEM_CLOCK) -> Survey:
    """Look at the run in a mailbox.

    Args:
        last: how many rounds to read.
        wait_s: between two looks at the leases: who has not renewed his meanwhile counts as silent.

    Raises:
        ValueError: there is no run.
        MalformedRecord: ``run.json`` is something else.
        MailboxError: the store does not answer.
    """
    run = read_run_record(mailbox)
    foreign: list[str] = []
    exchange = _exchange(mailbox, run, foreign)
    first_look = _leases(mailbox)
    newest = exchange.newest_round()
    committed = 0 if newest is None else newest.round + 1
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        found = list(pool.map(exchange.round_record, range(max(0, committed - last), committed)))
    rounds = tuple(record for record in found if isinstance(record, RoundRecord))
    clock.sleep(wait_s)
    speeds = {
        c.learner: c.tokens / c.steps / c.seconds_per_step
        for record in rounds
        for c in record.contributions
        if c.seconds_per_step > 0
    }
    nodes = []
    for name, (at, released) in sorted(_leases(mailbox).items()):
        state: NodeState = "left" if released else "silent" if first_look.get(name) == (at, released) else "alive"
        nodes.append(NodeSeen(name, state, NodeInfo.parse(read_info(mailbox, name)), speeds.get(name)))
    objects: Counter[str] = Counter()
    for key in mailbox.list(""):
        kind = _kind(key)
        objects[kind or "foreign"] += 1
        if kind is None:
            foreign.append(f"{key}: nothing of a run")
    algorithm = DiLoCo.from_dict(run.algorithm)
    return Survey(run, algorithm, committed, rounds, tuple(nodes), objects, tuple(sorted(set(foreign))))


def collect_garbage(mailbox: Mailbox, *, dry_run: bool) -> Counter[str]:
    """Delete what no node of the run needs any more, as nodes do now and then; return how many objects of each kind.

    Args:
        dry_run: delete nothing, only count.

    Raises:
        ValueError: there is no run.
        MailboxError: the store does not answer.
    """
    run = read_run_record(mailbox)
    recorder = _Recorder(mailbox, dry_run=dry_run)
    exchange = _exchange(recorder, run, [])
    newest = exchange.newest_round()
    if newest is not None:
        exchange.sweep(newest.round, KEPT_TURNS * len(run.fragments))
    return Counter(_kind(key) or "foreign" for key in recorder.deleted)


class _Recorder:
    """A mailbox that remembers what is deleted, and does it unless it is a dry run."""

    def __init__(self, mailbox: Mailbox, *, dry_run: bool) -> None:
        self._mailbox, self._dry_run = mailbox, dry_run
        self.put_if_absent, self.get = mailbox.put_if_absent, mailbox.get
        self.list, self.clock = mailbox.list, mailbox.clock
        self.deleted: set[str] = set()

    def delete(self, keys: Iterable[str]) -> None:
        doomed = list(keys)
        self.deleted.update(doomed)
        if not self._dry_run:
            self._mailbox.delete(doomed)


def _exchange(mailbox: Mailbox, run: RunRecord, foreign: list[str]) -> Exchange:
    def report(kind: Kind, round_: int | None, detail: dict[str, Any]) -> None:
        foreign.append(f"{detail['key']}: {detail['why']}")

    return Exchange(mailbox, schema_of(run), run.fragments, codec=Codec(), report=report, buffers=run.buffers)


def _kind(key: str) -> str | None:
    """Return what a key is of: a kind of payload, or a folder; None for what is nothing of a run."""
    folder = key.partition("/")[0]
    if folder in _USED_FREELY or key == names.RUN:
        return folder
    if names.round_of_object(key) is not None:
        return names.kind_of_payload(key) or folder
    return folder if names.round_of_record(key) is not None else None


def _leases(mailbox: Mailbox) -> dict[str, tuple[tuple[int, float], bool]]:
    """Return each node's newest lease, and whether it is released."""
    table = LeaseTable(1.0)
    table.record(mailbox.list(LEASES), asked_at=0.0, answered_at=0.0)
    found = {}
    for name in table.ids():
        at = table.newest(name)
        assert at is not None
        found[name] = (at, table.state(name) == "released")
    return found
