"""The protocol's half of a node: it publishes what its learner captured, follows commits, and closes rounds.

:meth:`Node.tick` does what there is to do and returns; whoever calls it decides when. It knows time only through its
clock and other nodes only through the mailbox, so that a simulation runs this very code. An operation on the mailbox
may fail or be the process's last at any point: what was begun is done again, or taken up by another node.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from mixle.diloco.algorithm import DiLoCo
from mixle.diloco.clock import Clock
from mixle.diloco.closing import Closed, Offer, close
from mixle.diloco.exchange import CorruptPayload, Exchange, Report
from mixle.diloco.grace import GraceClock
from mixle.diloco.learner import Captured, Landing, Learner
from mixle.diloco.parameters import Arrays
from mixle.diloco.quantization import NonFiniteError
from mixle.diloco.records import Claim, PayloadRef, Rejection, RoundRecord, Snapshot
from mixle.diloco.serialization import ParameterSpec, Schema, TensorBytes
from mixle.diloco.tensor_codec import WireDType, decode, encode
from mixle.diloco.theta import digest_of
from mixle.diloco.versions import Version, Versions
from mixle.diloco.wire import Wire

__all__ = ["LivingNodes", "Node"]

CLAIM_PATIENCE_S = 60.0
SWEEP_KEEPS_TURNS = 2


class LivingNodes(Protocol):
    """Who takes part (:class:`mixle.diloco.peers.Peers`)."""

    def is_alive(self, node: str) -> bool: ...

    def learners(self) -> frozenset[str]: ...


@dataclass
class _Own:
    """A snapshot that this node published."""

    digest: str
    delta: Arrays
    dropped: Arrays


@dataclass
class _OpenRound:
    """What this node has seen of a round that is not committed."""

    round: int
    snapshots: dict[str, Snapshot | None] = field(default_factory=dict)
    arrived: dict[str, float] = field(default_factory=dict)
    claim_attempt: int | None = None
    claim_since: float = 0.0
    quorum_at: float | None = None


class Node:
    """One member of a run.

    Args:
        name: its id.
        exchange: the run in the mailbox.
        algorithm: of the run.
        versions: the fragments as they are there.
        newest: the newest committed round, -1 if there is none.
        learner: the training half; None for a node that only closes rounds.
        closes: tells whether it closes rounds now.
        embeddings: names that :class:`~mixle.diloco.merge.Rda` merges by the mean.
        peers: who takes part.
        clock: this process's time.
        report: told of what happens.

    Attributes:
        newest: the newest round that this node knows to be committed.
        speeds: samples per second of the learners whose snapshots it has read.
    """

    def __init__(
        self,
        name: str,
        exchange: Exchange,
        algorithm: DiLoCo,
        versions: Versions,
        *,
        newest: int,
        learner: Learner | None,
        closes: Callable[[], bool],
        embeddings: frozenset[str],
        peers: LivingNodes,
        clock: Clock,
        report: Report,
    ) -> None:
        self.name, self.newest = name, newest
        self._exchange, self._algorithm, self._versions = exchange, algorithm, versions
        self._schedule, self._wire = algorithm.schedule, Wire.of(algorithm)
        self._learner, self._closes, self._embeddings = learner, closes, embeddings
        self._peers, self._clock, self._report = peers, clock, report
        self.speeds: dict[str, float | None] = {}
        self._own: dict[int, _Own] = {}
        self._residuals: list[Arrays] = [{} for _ in range(algorithm.fragments)]
        self._encoded: tuple[Captured, bytes | None, _Own] | None = None
        self._rounds: dict[int, _OpenRound] = {}
        self._grace = GraceClock()
        self._masters: dict[int, tuple[Arrays, Arrays]] = {}

    def tick(self) -> None:
        """Do what there is to do: publish, follow commits, close the next round.

        Raises:
            MailboxError: the store failed; the next call goes on where this one stopped.
        """
        self._publish()
        self._follow()
        while self._closes() and self._close_next():
            self._follow()
        self._count_others()

    # ---- publish

    def _publish(self) -> None:
        learner = self._learner
        while learner is not None and learner.captured:
            captured = learner.captured[0]
            if captured.round > self.newest:
                self._publish_one(captured)
            learner.captured.popleft()

    def _publish_one(self, captured: Captured) -> None:
        """Write a snapshot's payload, then its record; the delta is computed once, however often that is tried."""
        if self._encoded is None or self._encoded[0] is not captured:
            self._encoded = (captured, *self._encode(captured))
        _, data, own = self._encoded
        ref = None if data is None else self._exchange.put_payload(captured.round, "delta", data)
        own.digest = "" if ref is None else ref.digest
        self._own[captured.round] = own
        work = captured.work
        snapshot = Snapshot(
            captured.round,
            self.name,
            ref,
            captured.version,
            work.steps if work else 0,
            work.tokens if work else 0,
            captured.seconds_per_step,
            captured.final,
        )
        if self._exchange.publish(snapshot):
            told = {"steps": snapshot.steps, "bytes": ref.nbytes if ref else 0, "final": captured.final}
            self._report("published", captured.round, told)
        self._encoded = None

    def _encode(self, captured: Captured) -> tuple[bytes | None, _Own]:
        delta = {name: captured.anchor[name] - theta for name, theta in captured.theta.items()}
        for name, dropped in self._residuals[captured.fragment].items():
            delta[name] = delta[name] + dropped
        try:
            data = self._exchange.encoded(captured.fragment, delta, self._wire.delta)
        except NonFiniteError:
            return None, _Own("", {}, {})
        if self._wire.delta == "F32":
            return data, _Own("", delta, {})
        sent = self._exchange.own_arrays(data, captured.fragment, self._wire.delta)
        return data, _Own("", sent, {name: array - sent[name] for name, array in delta.items()})

    # ---- follow

    def _follow(self) -> None:
        """Move on to every commit that is there, and tell the learner."""
        followed = 0
        while (record := self._exchange.round_record(self.newest + 1)) is not None:
            if followed == self._algorithm.fragments:
                newest = self._exchange.newest_round()
                if newest is not None and newest.round > record.round:
                    self._jump(newest.round)
                    followed = 0
                    continue
            self._advance(record)
            followed += 1

    def _advance(self, record: RoundRecord, version: Version | None = None) -> None:
        """Take a commit in; ``version`` is what it committed, where this node has it."""
        if version is None and self._learner is not None:
            version = self._versions.read(record)
        if version is not None:
            self._versions.hold(record.fragment, version)
        self.newest = record.round
        open_round = self._rounds.pop(record.round, None)
        if open_round is not None and open_round.quorum_at is not None:
            self._grace.sync.add(max(self._clock.monotonic() - open_round.quorum_at, 0.0))
        self._land([(record, version)])

    def _jump(self, newest: int) -> None:
        """Take in the newest commit of every fragment, however many lie between."""
        landings = []
        for fragment in range(self._algorithm.fragments):
            held = self._versions.held(fragment)
            version = self._versions.newest(fragment, newest)
            if version.record is not None and (held is None or version.round > held.round):
                landings.append((version.record, version))
        self.newest = newest
        self._rounds = {r: seen for r, seen in self._rounds.items() if r > newest}
        self._land(sorted(landings, key=lambda landing: landing[0].round))

    def _land(self, commits: Sequence[tuple[RoundRecord, Version | None]]) -> None:
        if self._learner is None:
            return
        landings = []
        for record, version in commits:
            taken, overwrite = self._settle(record)
            theta = None if version is None else version.theta
            landings.append(Landing(record.round, record.fragment, theta, taken, record.cosine, overwrite))
            told = {"fragment": record.fragment, "taken": taken is not None, "learners": len(record.contributions)}
            self._report("applied", record.round, told)
        self._learner.land(landings)

    def _settle(self, record: RoundRecord) -> tuple[int | None, bool]:
        """Return which own snapshot is in a commit, and whether it said that this learner is broken; forget it."""
        taken, overwrite = None, False
        mine = [r for r in sorted(self._own) if r <= record.round and self._schedule.fragment(r) == record.fragment]
        for round_ in mine:
            own = self._own.pop(round_)
            told = record if round_ == record.round else self._exchange.round_record(round_)
            if told is None:
                continue
            if any(each.learner == self.name and each.digest == own.digest for each in told.contributions):
                taken = round_
                self._residuals[record.fragment] = own.dropped
            for rejection in told.rejections:
                if rejection.learner == self.name:
                    overwrite = rejection.reason.startswith("nonfinite")
                    self._report("rejected", round_, {"learner": self.name, "reason": rejection.reason})
        return taken, overwrite

    def _count_others(self) -> None:
        """Tell the learner how many others have published the rounds ahead, where it follows them."""
        learner = self._learner
        if learner is None or not self._schedule.follow:
            return
        ahead = range(self.newest + 1, self.newest + 1 + self._schedule.lead)
        learner.others = {r: len(set(self._exchange.published(r)) - {self.name}) for r in ahead}

    # ---- close

    def _close_next(self) -> bool:
        """Close the next round if it is time and nobody else does; tell whether it is committed."""
        round_ = self.newest + 1
        seen = self._look(round_)
        if not seen.snapshots or not self._is_closable(seen) or not self._claim(seen):
            return False
        self._look(round_)
        record, version = self._make(seen)
        if self._exchange.commit(record):
            waited = f"{record.waited_s[0]:.1f} + {record.waited_s[1]:.1f} s"
            self._report("committed", round_, {"learners": len(record.contributions), "waited": waited})
            self._advance(record, version)
            if round_ % self._algorithm.fragments == 0:
                self._exchange.sweep(round_, SWEEP_KEEPS_TURNS * self._algorithm.fragments)
        else:
            self._masters.pop(record.fragment, None)
        return True

    def _look(self, round_: int) -> _OpenRound:
        """Read what has been published for a round since the last look."""
        seen = self._rounds.setdefault(round_, _OpenRound(round_))
        for learner in self._exchange.published(round_):
            if learner in seen.snapshots:
                continue
            snapshot = self._exchange.snapshot(round_, learner)
            seen.snapshots[learner] = snapshot
            seen.arrived[learner] = self._clock.monotonic()
            if snapshot is not None and snapshot.steps and snapshot.seconds_per_step > 0:
                self._grace.step.add(snapshot.seconds_per_step)
                self.speeds[learner] = snapshot.tokens / snapshot.steps / snapshot.seconds_per_step
        return seen

    def _is_closable(self, seen: _OpenRound) -> bool:
        """Tell whether a round has its quorum and its grace window is over, or every living learner has reported."""
        everyone = self._peers.learners() <= seen.snapshots.keys()
        arrivals = sorted(
            at for learner, at in seen.arrived.items() if (s := seen.snapshots[learner]) is not None and s.payload
        )
        quorum = self._algorithm.quorum_size
        if len(arrivals) < quorum:
            return everyone
        if seen.quorum_at is None:
            seen.quorum_at = arrivals[quorum - 1]
            self._grace.quorum.add(seen.quorum_at - arrivals[0])
        return everyone or self._clock.monotonic() >= seen.quorum_at + self._grace_seconds(seen.round)

    def _grace_seconds(self, round_: int) -> float:
        fixed = self._algorithm.grace_seconds
        if fixed is not None:
            return fixed
        return self._grace.grace(gap=self._schedule.gap(round_), allowance=self._schedule.allowance(round_))

    def _claim(self, seen: _OpenRound) -> bool:
        """Tell whether closing this round is this node's to do; a claim outlives neither its node nor its patience."""
        found = self._exchange.newest_claim(seen.round)
        now = self._clock.monotonic()
        attempt = 0
        if found is not None:
            attempt, claim = found
            if claim is not None and claim.node == self.name:
                return True
            if attempt != seen.claim_attempt:
                seen.claim_attempt, seen.claim_since = attempt, now
            patience = CLAIM_PATIENCE_S + 10 * (self._grace.sync.value or 0.0)
            if claim is not None and self._peers.is_alive(claim.node) and now - seen.claim_since < patience:
                return False
            owner = "nobody" if claim is None else claim.node
            self._report("takeover", seen.round, {"from": owner})
            attempt += 1
        return self._exchange.claim(Claim(seen.round, attempt, self.name))

    def _make(self, seen: _OpenRound) -> tuple[RoundRecord, Version]:
        """Merge what a round has, write its payloads, and return its record and the version that it would commit."""
        fragment = self._schedule.fragment(seen.round)
        parent = self._versions.newest(fragment, seen.round - 1)
        master, momentum = self._optimizer_state(parent, fragment)
        offers, rejections = self._offers(seen, fragment, parent.round)
        rounding = None if self._wire.commit is None else _Rounding(self._wire)
        closed = close(
            self._algorithm,
            offers,
            theta=parent.theta,
            master=master,
            momentum=momentum,
            embeddings=self._embeddings,
            quantize=rounding,
        )
        for each in closed.contributions:
            if each.clipped < 1.0:
                self._report("clipped", seen.round, {"learner": each.learner, "factor": each.clipped})
        arrivals = sorted(seen.arrived.values())
        quorum_at = arrivals[-1] if seen.quorum_at is None else seen.quorum_at
        put = self._exchange.put_payload
        theta = self._exchange.encoded(fragment, closed.theta, self._wire.theta)
        published = self._as_read(theta, closed.theta, fragment, self._wire.theta)
        record = RoundRecord(
            seen.round,
            fragment,
            parent.round,
            self.name,
            put(seen.round, "theta", theta),
            self._put_master(seen.round, closed),
            self._put_momentum(seen.round, closed),
            None if rounding is None else put(seen.round, "update", rounding.payload(self._exchange)),
            digest_of(published),
            closed.contributions,
            tuple(rejections) + closed.rejections,
            closed.cosine,
            (quorum_at - arrivals[0], max(self._clock.monotonic() - quorum_at, 0.0)),
        )
        self._masters[fragment] = (closed.master if rounding else published, closed.momentum)
        return record, Version(seen.round, published, record)

    def _as_read(self, data: bytes, arrays: Arrays, fragment: int, dtype: WireDType) -> Arrays:
        return arrays if dtype == "F32" else self._exchange.own_arrays(data, fragment, dtype)

    def _put_master(self, round_: int, closed: Closed) -> PayloadRef | None:
        if closed.update is None:
            return None
        return self._exchange.put_arrays(
            round_, "master", self._schedule.fragment(round_), closed.master, self._wire.master
        )

    def _put_momentum(self, round_: int, closed: Closed) -> PayloadRef | None:
        if not any(np.any(array) for array in closed.momentum.values()):
            return None
        return self._exchange.put_arrays(
            round_, "momentum", self._schedule.fragment(round_), closed.momentum, self._wire.momentum
        )

    def _optimizer_state(self, parent: Version, fragment: int) -> tuple[Arrays, Arrays]:
        """Return the outer optimizer's parameters and momentum at a version; zero momentum if that is lost."""
        record = parent.record
        zeros = {name: np.zeros_like(array) for name, array in parent.theta.items()}
        if record is None:
            return parent.theta, zeros
        if record.closer == self.name and fragment in self._masters:
            return self._masters[fragment]
        master, momentum = parent.theta, zeros
        try:
            if record.master is not None:
                master = self._exchange.get_arrays(record.master, fragment, self._wire.master)
            if record.momentum is not None:
                momentum = self._exchange.get_arrays(record.momentum, fragment, self._wire.momentum)
        except (CorruptPayload, NonFiniteError) as error:
            self._report("corrupt", record.round, {"what": str(error), "fallback": "none"})
        return master, momentum

    def _offers(self, seen: _OpenRound, fragment: int, parent: int) -> tuple[list[Offer], list[Rejection]]:
        """Return the snapshots of a round that can be merged, with their deltas, and why the others cannot."""
        offers, rejections = [], []
        for learner, snapshot in sorted(seen.snapshots.items()):
            try:
                offers.append(self._offer(learner, snapshot, fragment, parent))
            except _Unfit as reason:
                rejections.append(Rejection(learner, str(reason)))
                self._report("rejected", seen.round, {"learner": learner, "reason": str(reason)})
        return offers, rejections

    def _offer(self, learner: str, snapshot: Snapshot | None, fragment: int, parent: int) -> Offer:
        if snapshot is None:
            raise _Unfit("malformed: the record is not a snapshot's")
        if snapshot.payload is None:
            raise _Unfit("nonfinite: its parameters hold NaN or infinity")
        if snapshot.anchor != parent:
            raise _Unfit(f"stale: it starts from round {snapshot.anchor}, not {parent}")
        own = self._own.get(snapshot.round)
        if learner == self.name and own is not None and own.digest == snapshot.payload.digest:
            return Offer(snapshot, own.delta)
        try:
            return Offer(snapshot, self._exchange.get_arrays(snapshot.payload, fragment, self._wire.delta))
        except NonFiniteError as error:
            raise _Unfit(f"nonfinite: {error}"[:300]) from None
        except (CorruptPayload, ValueError) as error:
            raise _Unfit(f"corrupt: {error}"[:300]) from None


class _Unfit(Exception):  # noqa: N818  (a verdict)
    """A snapshot cannot be merged; the message says why."""


class _Rounding:
    """Round updates to the run's format, and keep them as they will be sent."""

    def __init__(self, wire: Wire) -> None:
        assert wire.commit is not None
        self._dtype = wire.commit
        self._tensors: dict[str, TensorBytes] = {}

    def __call__(self, update: Arrays) -> Arrays:
        schema = Schema(tuple(ParameterSpec(name, "F32", array.shape) for name, array in sorted(update.items())))
        tensors = encode(update, schema, self._dtype)
        self._tensors.update(tensors)
        return dict(decode(tensors, schema, self._dtype))

    def payload(self, exchange: Exchange) -> bytes:
        """Return the payload of everything that was rounded."""
        return exchange.packed(self._tensors)
