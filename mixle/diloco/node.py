"""The protocol's half of a node: it publishes what its learner captured, follows commits, and closes rounds.

:meth:`Node.tick` does what there is to do and returns; whoever calls it decides when. It knows time only through its
clock and other nodes only through the mailbox, so that a simulation runs this very code. An operation on the mailbox
may fail or be the process's last at any point: what was begun is done again, or taken up by another node. So everything
that a step has to read is read before anything here changes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from mixle.diloco.algorithm import DiLoCo
from mixle.diloco.clock import Clock
from mixle.diloco.closer import Closer
from mixle.diloco.exchange import CorruptPayload, Exchange, Report
from mixle.diloco.grace import GraceClock
from mixle.diloco.learner import Captured, Landing, Learner
from mixle.diloco.names import LAST_ATTEMPT
from mixle.diloco.parameters import Arrays
from mixle.diloco.quantization import NonFiniteError
from mixle.diloco.records import Claim, RoundRecord, Snapshot, VoidRound
from mixle.diloco.tensor_codec import encode_with_feedback
from mixle.diloco.versions import KEPT_TURNS, Version, Versions
from mixle.diloco.wire import Wire

__all__ = ["LivingNodes", "Node"]

CLAIM_PATIENCE_S = 60.0
LEAVING_GRACE_S = 3.0


class LivingNodes(Protocol):
    """Who takes part (:class:`mixle.diloco.peers.Peers`)."""

    def is_gone(self, node: str) -> bool: ...

    def learners(self) -> frozenset[str]: ...


@dataclass
class _Own:
    """A snapshot that this node published.

    Attributes:
        digest: of its payload, None where that is not finite.
        delta: as readers of the payload see it.
        dropped: the payload of what rounding took from it, None where it took nothing.
    """

    round: int
    digest: str | None
    delta: Arrays
    dropped: bytes | None


@dataclass
class _OpenRound:
    """What this node has seen of a round that is not committed."""

    round: int
    arrived: dict[str, float] = field(default_factory=dict)
    snapshots: dict[str, Snapshot | None] = field(default_factory=dict)
    claimed: bool = False
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
        at: the rounds of the versions that the learner is at, by fragment; negative for the base.
        learner: the training half; None for a node that only closes rounds.
        closes: tells whether it closes rounds now.
        embeddings: names that :class:`~mixle.diloco.merge.Rda` merges by the mean.
        peers: who takes part.
        clock: this process's time.
        report: told of what happens.

    Attributes:
        newest: the newest round that this node knows to be committed.
        speeds: samples per second of the learners whose work it has seen in commits.
    """

    def __init__(
        self,
        name: str,
        exchange: Exchange,
        algorithm: DiLoCo,
        versions: Versions,
        *,
        newest: int,
        at: Sequence[int],
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
        self._learner, self._closes = learner, closes
        self._closer = Closer(name, exchange, algorithm, versions, embeddings=embeddings, report=report)
        self._peers, self._clock, self._report = peers, clock, report
        self.speeds: dict[str, float | None] = {}
        self._at = list(at)
        self._own: dict[int, _Own] = {}
        self._residuals: list[bytes | None] = [None] * algorithm.fragments
        self._encoded: tuple[Captured, bytes | None, _Own] | None = None
        self._rounds: dict[int, _OpenRound] = {}
        self._grace = GraceClock()
        self._leaving_since: float | None = None

    def tick(self) -> None:
        """Do what there is to do: publish, follow commits, close the next round.

        Raises:
            MailboxError: the store failed; the next call goes on where this one stopped.
            CorruptPayload: a fragment has no version that can be read.
        """
        self._publish()
        self._follow()
        while (self._closes() or self._has_claimed()) and self._close_next():
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
        own.digest = None if ref is None else ref.digest
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
        fragment, residual = captured.fragment, self._residuals[captured.fragment]
        with np.errstate(over="ignore", invalid="ignore"):  # what is not finite is found below
            delta = {name: captured.anchor[name] - theta for name, theta in captured.theta.items()}
        try:
            if self._wire.delta == "F32":
                return self._exchange.encoded(fragment, delta, "F32"), _Own(captured.round, None, delta, None)
            dropped = {} if residual is None else self._exchange.own_arrays(residual, fragment, self._wire.residual)
            schema, exact = self._exchange.schemas[fragment], self._exchange.buffers
            tensors, sent, dropped = encode_with_feedback(delta, dropped, schema, self._wire.delta, exact=exact)
        except NonFiniteError:
            return None, _Own(captured.round, None, {}, None)
        kept = self._exchange.encoded(fragment, dropped, self._wire.residual)
        return self._exchange.packed(tensors), _Own(captured.round, None, sent, kept)

    # ---- follow

    def _follow(self) -> None:
        """Move on to every commit that is there, and tell the learner."""
        followed = 0
        while (record := self._exchange.round_record(self.newest + 1)) is not None:
            if followed == self._algorithm.fragments and self._jump():
                followed = 0
            else:
                self._advance(record)
                followed += 1

    def _advance(self, record: RoundRecord | VoidRound) -> None:
        """Take a commit in."""
        version = None
        if isinstance(record, VoidRound):
            self._report("corrupt", record.round, {"what": "its record cannot be read; it counts for nothing"})
        elif self._learner is not None:
            try:
                version = self._versions.read(record)
            except CorruptPayload as error:
                if self._jump():
                    return
                self._report("corrupt", record.round, {"what": str(error), "fallback": record.parent})
        self._land([(record, version)])

    def _jump(self) -> bool:
        """Take in the newest commit of every fragment, however many lie between; False if they are not far ahead."""
        newest = self._exchange.newest_round()
        if newest is None or newest.round < self.newest + self._algorithm.fragments:
            return False
        commits: list[tuple[RoundRecord | VoidRound, Version | None]] = [(newest, None)]
        if self._learner is not None:
            for fragment, at in enumerate(self._at):
                version = self._versions.newest(fragment, newest.round)
                if version.record is not None and version.round > at:
                    commits.append((version.record, version))
        if commits[1:] and max(record.round for record, _ in commits[1:]) == newest.round:
            del commits[0]
        self._land(sorted(commits, key=lambda commit: commit[0].round))
        return True

    def _land(self, commits: Sequence[tuple[RoundRecord | VoidRound, Version | None]]) -> None:
        """Move on to commits, in the order of their rounds; a version is None where this node has not got it."""
        landings = [self._landing(record, version) for record, version in commits]
        for (record, version), landing in zip(commits, landings, strict=True):
            if isinstance(record, RoundRecord):
                self._measure(record)
            if version is not None:
                self._versions.hold(landing.fragment, version)
                self._at[landing.fragment] = version.round
                for own in self._mine(landing.fragment, landing.round):
                    del self._own[own.round]
                    if own.round == landing.taken:
                        self._residuals[landing.fragment] = own.dropped
            if self._learner is not None:
                contributors = len(record.contributions) if isinstance(record, RoundRecord) else 0
                told = {"fragment": landing.fragment, "taken": landing.taken is not None, "learners": contributors}
                self._report("applied", landing.round, told)
        self.newest = max(self.newest, commits[-1][0].round)
        self._rounds = {r: seen for r, seen in self._rounds.items() if r > self.newest}
        if self._learner is not None:
            self._learner.land(landings)

    def _landing(self, record: RoundRecord | VoidRound, version: Version | None) -> Landing:
        """Return what a commit is to the learner."""
        fragment, taken, broken = self._schedule.fragment(record.round), None, None
        for own in self._mine(fragment, record.round):
            told = record if own.round == record.round else self._exchange.round_record(own.round)
            if not isinstance(told, RoundRecord):
                continue
            held = any((each.learner, each.digest) == (self.name, own.digest) for each in told.contributions)
            if held and version is not None and self._continues(version.round, own.round):
                taken = own.round
            for rejection in told.rejections:
                if rejection.learner == self.name:
                    self._report("rejected", own.round, {"learner": self.name, "reason": rejection.reason})
                    if own.digest is None or rejection.reason.startswith("overflow"):
                        broken = own.round
        theta = None if version is None else version.theta
        cosine = record.cosine if isinstance(record, RoundRecord) else None
        return Landing(record.round, fragment, theta, taken, cosine, broken)

    def _mine(self, fragment: int, newest: int) -> list[_Own]:
        """Return the own snapshots of a fragment up to a round, oldest first."""
        rounds = [r for r in sorted(self._own) if r <= newest and self._schedule.fragment(r) == fragment]
        return [self._own[round_] for round_ in rounds]

    def _continues(self, version: int, round_: int) -> bool:
        """Tell whether a version is a round's, or continues it, as the parent of the fragment's next commit says."""
        for later in range(round_ + self._algorithm.fragments, version + 1, self._algorithm.fragments):
            record = self._exchange.round_record(later)
            if isinstance(record, RoundRecord):
                return record.parent == round_
        return version == round_

    def _measure(self, record: RoundRecord) -> None:
        """Learn from a commit how fast learners and rounds are."""
        seen = self._rounds.get(record.round)
        if seen is not None and seen.quorum_at is not None:
            self._grace.sync.add(max(self._clock.monotonic() - seen.quorum_at, 0.0))
        for each in record.contributions:
            if each.seconds_per_step > 0:
                self._grace.step.add(each.seconds_per_step)
                speed = each.tokens / each.steps / each.seconds_per_step
                if math.isfinite(speed):
                    self.speeds[each.learner] = speed

    def _count_others(self) -> None:
        """Tell the learner how many others have published the rounds ahead, where it follows them."""
        learner = self._learner
        if learner is None or not self._schedule.follow:
            return
        ahead = range(self.newest + 1, self.newest + 1 + self._schedule.lead)
        learner.others = {r: len(set(self._exchange.published(r)) - {self.name}) for r in ahead}

    # ---- close

    def _close_next(self) -> bool:
        """Close the next round if it is time and nobody else does; tell whether it is committed.

        Who has published is told by the keys; only the node that claims the round reads more.
        """
        round_ = self.newest + 1
        seen = self._rounds.setdefault(round_, _OpenRound(round_))
        self._look(seen)
        if not self._is_closable(seen) or not self._claim(seen):
            return False
        seen.claimed = True
        self._look(seen)
        seen.snapshots |= self._exchange.snapshots(round_, seen.arrived.keys() - seen.snapshots.keys())
        if not self._is_closable(seen) or not self._has_gathered(seen):
            return False
        arrivals = sorted(seen.arrived.values())
        quorum_at = arrivals[-1] if seen.quorum_at is None else seen.quorum_at
        waited_s = (quorum_at - arrivals[0], max(self._clock.monotonic() - quorum_at, 0.0))
        deltas = {own.digest: own.delta for own in self._own.values() if own.digest is not None}
        made = self._closer.make(round_, seen.snapshots, deltas, waited_s=waited_s)
        if not self._exchange.commit(made.record):
            self._follow()
            return self.newest >= round_
        self._closer.committed(made)
        told = {"learners": len(made.record.contributions), "waited": f"{waited_s[0]:.1f} + {waited_s[1]:.1f} s"}
        self._report("committed", round_, told)
        self._land([(made.record, made.version)])
        if round_ % self._algorithm.fragments == 0:
            self._exchange.sweep(round_, KEPT_TURNS * self._algorithm.fragments)
        return True

    def _has_claimed(self) -> bool:
        """Tell whether others wait for this node to close the next round, be that its role or no longer."""
        seen = self._rounds.get(self.newest + 1)
        return seen is not None and seen.claimed

    def _look(self, seen: _OpenRound) -> None:
        for learner in self._exchange.published(seen.round):
            seen.arrived.setdefault(learner, self._clock.monotonic())

    def _is_closable(self, seen: _OpenRound) -> bool:
        """Tell whether a round has its quorum and its grace window is over, or every living learner has reported."""
        if not seen.arrived:
            return False
        everyone = self._peers.learners() <= seen.arrived.keys()
        unusable = {learner for learner, found in seen.snapshots.items() if found is None or found.payload is None}
        arrivals = sorted(at for learner, at in seen.arrived.items() if learner not in unusable)
        quorum = self._algorithm.quorum_size
        if len(arrivals) < quorum:
            return everyone
        if seen.quorum_at is None:
            self._grace.quorum.add(arrivals[quorum - 1] - arrivals[0])
        seen.quorum_at = arrivals[quorum - 1]
        return everyone or self._clock.monotonic() >= seen.quorum_at + self._grace_seconds(seen.round)

    def _has_gathered(self, seen: _OpenRound) -> bool:
        """Tell whether a round that may be closed has waited long enough for those who leave together.

        Last snapshots alone are added whole, so learners that leave at one time must be in one round: their sum would
        be a step as many times too long as there are learners.
        """
        work = [each for each in seen.snapshots.values() if each is not None and each.payload and each.steps]
        if self._algorithm.grace_seconds is not None or not work or not all(each.final for each in work):
            self._leaving_since = None
            return True
        now = self._clock.monotonic()
        if self._leaving_since is None:
            self._leaving_since = now
        everyone = self._peers.learners() <= seen.arrived.keys()
        return everyone or now >= self._leaving_since + LEAVING_GRACE_S

    def _grace_seconds(self, round_: int) -> float:
        fixed = self._algorithm.grace_seconds
        if fixed is not None:
            return fixed
        return self._grace.grace(gap=self._schedule.gap(round_), allowance=self._schedule.allowance(round_))

    def _claim(self, seen: _OpenRound) -> bool:
        """Tell whether closing this round is this node's to do; a claim outlives neither its node nor its patience."""
        newest, attempt = self._exchange.newest_claim(seen.round)
        if newest is not None and newest.node == self.name:
            return True
        if newest is not None:
            now = self._clock.monotonic()
            if newest.attempt != seen.claim_attempt:
                seen.claim_attempt, seen.claim_since = newest.attempt, now
            patience = CLAIM_PATIENCE_S + 10 * (self._grace.sync.value or 0.0)
            if not self._peers.is_gone(newest.node) and now - seen.claim_since < patience:
                return False
            self._report("takeover", seen.round, {"from": newest.node})
        return attempt > LAST_ATTEMPT or self._exchange.claim(Claim(seen.round, attempt, self.name))
