"""The newest version of each fragment that a node holds, and where older ones can be read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mixle.diloco.exchange import CorruptPayload, Exchange, Report
from mixle.diloco.parameters import Arrays
from mixle.diloco.quantization import NonFiniteError
from mixle.diloco.records import RoundRecord, RunRecord
from mixle.diloco.theta import digest_of, rebuilt
from mixle.diloco.wire import Wire

__all__ = ["Version", "Versions"]


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

    def held(self, fragment: int) -> Version | None:
        """Return what this node holds in memory of a fragment."""
        return self._held[fragment]

    def hold(self, fragment: int, version: Version) -> None:
        self._held[fragment] = version

    def newest(self, fragment: int, newest_round: int) -> Version:
        """Return the newest version of a fragment that can be read, and hold it.

        Raises:
            CorruptPayload: none can, not even the base.
        """
        period = len(self._held)
        round_ = newest_round - (newest_round - fragment) % period
        held = self._held[fragment]
        while round_ >= 0:
            if held is not None and held.round >= round_:
                return held
            record = self._exchange.round_record(round_)
            version = None if record is None else self.read(record)
            if version is not None:
                self._held[fragment] = version
                return version
            round_ -= period
        if held is None:
            held = Version(
                fragment - period, self._exchange.get_arrays(self._run.base[fragment], fragment, "F32"), None
            )
            self._held[fragment] = held
        return held

    def read(self, record: RoundRecord) -> Version | None:
        """Return the version that a record commits; None, and a report, if it cannot be read.

        The quantized update is read in place of the parameters where this node holds what it changes.
        """
        held = self._held[record.fragment]
        try:
            if record.update is not None and held is not None and held.round == record.parent:
                assert self._wire.commit is not None
                update = self._exchange.get_arrays(record.update, record.fragment, self._wire.commit)
                theta = rebuilt(held.theta, update)
                if digest_of(theta) == record.theta_digest:
                    return Version(record.round, theta, record)
                self._report("corrupt", record.round, {"what": "the update does not give theta's digest"})
            theta = self._exchange.get_arrays(record.theta, record.fragment, self._wire.theta)
            if digest_of(theta) != record.theta_digest:
                raise CorruptPayload(f"{record.theta.key} does not have the digest of its record")
            return Version(record.round, theta, record)
        except (CorruptPayload, NonFiniteError) as error:
            self._report("corrupt", record.round, {"what": str(error), "fallback": record.parent})
            return None

    def load_all(self, newest_round: int) -> Sequence[Version]:
        """Return the newest readable version of every fragment."""
        return [self.newest(fragment, newest_round) for fragment in range(len(self._held))]
