"""The newest version of each fragment that a node holds, and where older ones can be read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mixle.diloco.exchange import CorruptPayload, Exchange, PayloadGone, Report
from mixle.diloco.parameters import Arrays
from mixle.diloco.quantization import NonFiniteError
from mixle.diloco.records import PayloadRef, RoundRecord, RunRecord
from mixle.diloco.tensor_codec import WireDType
from mixle.diloco.theta import digest_of, rebuilt
from mixle.diloco.wire import Wire

__all__ = ["KEPT_TURNS", "Version", "Versions"]

KEPT_TURNS = 2
"""Turns of the fragments whose versions stay in the store beside the newest."""


@dataclass(frozen=True)
class Version:
    """A fragment after a round, or before any (``round`` negative, no record)."""

    round: int
    theta: Arrays
    record: RoundRecord | None


class Versions:
    """Read each fragment's newest version, falling back on the one before where it cannot be read."""

    def __init__(self, exchange: Exchange, run: RunRecord, wire: Wire, report: Report) -> None:
        self._exchange, self._run, self._wire, self._report = exchange, run, wire, report
        self._held: list[Version | None] = [None] * len(run.base)

    def hold(self, fragment: int, version: Version) -> None:
        """Keep a version in memory, in place of the one that is there."""
        self._held[fragment] = version

    def newest(self, fragment: int, newest_round: int) -> Version:
        """Return the newest version of a fragment that can be read, and hold it; of what cannot, report it.

        Raises:
            CorruptPayload: none can, not even the base. After ``KEPT_TURNS`` turns the base no longer counts: training
                that goes on from where it began would be lost without a word.
        """
        period = len(self._held)
        newest = newest_round - (newest_round - fragment) % period
        held = self._held[fragment]
        why = "it was never written"
        for round_ in range(newest, max(-1, newest - (KEPT_TURNS + 1) * period), -period):
            if held is not None and held.round >= round_:
                return held
            record = self._exchange.round_record(round_)
            if not isinstance(record, RoundRecord):
                continue
            try:
                version = self.read(record)
            except CorruptPayload as error:
                why = str(error)
                self._report("corrupt", round_, {"what": why, "fallback": record.parent})
                continue
            self._held[fragment] = version
            return version
        if held is None and newest >= (KEPT_TURNS + 1) * period:
            raise CorruptPayload(f"no version of fragment {fragment} can be read, the newest of round {newest}: {why}")
        if held is None:
            base = self._exchange.get_arrays(self._run.base[fragment], fragment, "F32")
            held = self._held[fragment] = Version(fragment - period, base, None)
        return held

    def read(self, record: RoundRecord) -> Version:
        """Return the version that a record commits.

        The quantized update is read in place of the parameters where this node holds what it changes.

        Raises:
            PayloadGone: it is not there, as after a sweep.
            CorruptPayload: it is not what the record says.
        """
        if record.update is not None and self._wire.commit is not None:
            theta = self._rebuilt(record, record.update, self._wire.commit)
            if theta is not None:
                return Version(record.round, theta, record)
        try:
            theta = self._exchange.get_arrays(record.theta, record.fragment, self._wire.theta)
        except NonFiniteError as error:
            raise CorruptPayload(f"{record.theta.key}: {error}") from None
        if digest_of(theta) != record.theta_digest:
            raise CorruptPayload(f"{record.theta.key} does not have the digest of its record")
        return Version(record.round, theta, record)

    def load_all(self) -> tuple[int, Sequence[Version]]:
        """Return the newest committed round, -1 if there is none, and the newest readable version of each fragment.

        Raises:
            CorruptPayload: a fragment has none.
        """
        while True:
            found = self._exchange.newest_round()
            newest = -1 if found is None else found.round
            try:
                return newest, [self.newest(fragment, newest) for fragment in range(len(self._held))]
            except CorruptPayload:
                found = self._exchange.newest_round()
                if found is None or found.round == newest:
                    raise  # else a sweep may have been faster than this reader

    def _rebuilt(self, record: RoundRecord, update: PayloadRef, dtype: WireDType) -> Arrays | None:
        """Return the parameters that an update gives, None if it cannot be used."""
        held = self._held[record.fragment]
        if held is None or held.round != record.parent:
            return None
        try:
            theta = rebuilt(held.theta, self._exchange.get_arrays(update, record.fragment, dtype))
        except PayloadGone:
            return None
        except (CorruptPayload, NonFiniteError) as error:
            self._report("corrupt", record.round, {"what": str(error), "fallback": record.theta.key})
            return None
        if digest_of(theta) == record.theta_digest:
            return theta
        self._report("corrupt", record.round, {"what": "the update does not give theta's digest"})
        return None
