"""Make what a round commits: read its deltas, merge them, take the outer step and write the payloads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np

from mixle.diloco.algorithm import DiLoCo
from mixle.diloco.closing import Offer, close
from mixle.diloco.exchange import CorruptPayload, Exchange, Report
from mixle.diloco.parameters import Arrays
from mixle.diloco.quantization import NonFiniteError
from mixle.diloco.records import PayloadRef, Rejection, RoundRecord, Snapshot
from mixle.diloco.serialization import ParameterSpec, Schema, TensorBytes
from mixle.diloco.tensor_codec import WireDType, decode, encode
from mixle.diloco.theta import digest_of
from mixle.diloco.versions import Version, Versions
from mixle.diloco.wire import Wire

__all__ = ["Closer", "Made"]


@dataclass(frozen=True)
class Made:
    """A round's commit, ready to be written, and the version and optimizer state that hold once it is."""

    record: RoundRecord
    version: Version
    master: Arrays
    momentum: Arrays


class Closer:
    """The part of a node that makes commits; it holds the outer optimizer's state of those that it made.

    Args:
        name: of the node.
        exchange: the run in the mailbox.
        algorithm: of the run.
        versions: the fragments as they are there.
        embeddings: names that :class:`~mixle.diloco.merge.Rda` merges by the mean.
        report: told of what happens.
    """

    def __init__(
        self,
        name: str,
        exchange: Exchange,
        algorithm: DiLoCo,
        versions: Versions,
        *,
        embeddings: frozenset[str],
        report: Report,
    ) -> None:
        self._name, self._exchange, self._algorithm = name, exchange, algorithm
        self._schedule, self._wire = algorithm.schedule, Wire.of(algorithm)
        self._versions, self._embeddings, self._report = versions, embeddings, report
        self._states: dict[int, Made] = {}

    def make(
        self,
        round_: int,
        snapshots: Mapping[str, Snapshot | None],
        own: Mapping[str, Arrays],
        *,
        waited_s: tuple[float, float],
    ) -> Made:
        """Write the payloads of a round's commit, and return the rest.

        Args:
            snapshots: what was published for the round by learner; None where that is no snapshot.
            own: deltas that need not be read, by the sha256 of their payload.
            waited_s: for the record.

        Raises:
            MailboxError: the store failed; nothing is committed.
            CorruptPayload: the fragment has no version that can be read.
        """
        fragment = self._schedule.fragment(round_)
        parent = self._versions.newest(fragment, round_ - 1)
        offers, rejections = self._offers(snapshots, own, fragment, parent.round)
        master, momentum = self._optimizer_state(parent, fragment)
        try:
            return self._written(round_, parent, master, momentum, offers, rejections, waited_s)
        except NonFiniteError as error:
            rejections += [Rejection.of(offer.snapshot.learner, f"overflow: {error}") for offer in offers]
            return self._written(round_, parent, master, momentum, [], rejections, waited_s)

    def committed(self, made: Made) -> None:
        """Keep the state of a commit that landed, and tell what it refused."""
        self._states[made.record.fragment] = made
        for each in made.record.contributions:
            if each.clipped < 1.0:
                self._report("clipped", made.record.round, {"learner": each.learner, "factor": each.clipped})
        for rejection in made.record.rejections:
            if rejection.learner != self._name:
                told = {"learner": rejection.learner, "reason": rejection.reason}
                self._report("rejected", made.record.round, told)

    def _written(
        self,
        round_: int,
        parent: Version,
        master: Arrays,
        momentum: Arrays,
        offers: list[Offer],
        rejections: list[Rejection],
        waited_s: tuple[float, float],
    ) -> Made:
        fragment, put = self._schedule.fragment(round_), self._exchange.put_payload
        buffers = self._exchange.buffers
        rounding = None if self._wire.commit is None else _Rounding(self._wire.commit, buffers)
        closed = close(
            self._algorithm,
            offers,
            theta=parent.theta,
            master=master,
            momentum=momentum,
            embeddings=self._embeddings,
            buffers=buffers,
            quantize=rounding,
        )
        theta, new_theta = self._sent(fragment, closed.theta, self._wire.theta)
        new_master = new_theta
        master_data = momentum_data = None
        if rounding is not None:
            master_data, new_master = self._sent(fragment, closed.master, self._wire.master)
        new_momentum = closed.momentum
        if any(np.any(array) for array in closed.momentum.values()):
            momentum_data, new_momentum = self._sent(fragment, closed.momentum, self._wire.momentum)
        record = RoundRecord(
            round_,
            fragment,
            parent.round,
            self._name,
            put(round_, "theta", theta),
            None if master_data is None else put(round_, "master", master_data),
            None if momentum_data is None else put(round_, "momentum", momentum_data),
            None if rounding is None else self._put_update(round_, rounding),
            digest_of(new_theta),
            closed.contributions,
            tuple(rejections) + closed.rejections,
            closed.cosine,
            waited_s,
        )
        return Made(record, Version(round_, new_theta, record), new_master, new_momentum)

    def _sent(self, fragment: int, arrays: Arrays, dtype: WireDType) -> tuple[bytes, Arrays]:
        """Return a payload, and its arrays as whoever reads it has them."""
        data = self._exchange.encoded(fragment, arrays, dtype)
        return data, arrays if dtype == "F32" else self._exchange.own_arrays(data, fragment, dtype)

    def _put_update(self, round_: int, rounding: _Rounding) -> PayloadRef:
        return self._exchange.put_payload(round_, "update", self._exchange.packed(rounding.tensors))

    def _optimizer_state(self, parent: Version, fragment: int) -> tuple[Arrays, Arrays]:
        """Return the outer optimizer's parameters and momentum at a version; zero momentum if that is lost."""
        record, state = parent.record, self._states.get(fragment)
        momentum = {name: np.zeros_like(array) for name, array in parent.theta.items()}
        if record is None:
            return parent.theta, momentum
        if state is not None and state.record == record:
            return state.master, state.momentum
        master = parent.theta
        try:
            if record.master is not None:
                master = self._exchange.get_arrays(record.master, fragment, self._wire.master)
            if record.momentum is not None:
                momentum = self._exchange.get_arrays(record.momentum, fragment, self._wire.momentum)
        except (CorruptPayload, NonFiniteError) as error:
            self._report("corrupt", record.round, {"what": str(error), "fallback": "none"})
        return master, momentum

    def _offers(
        self, snapshots: Mapping[str, Snapshot | None], own: Mapping[str, Arrays], fragment: int, parent: int
    ) -> tuple[list[Offer], list[Rejection]]:
        """Return the snapshots of a round that can be merged, with their deltas, and why the others cannot."""
        learners = sorted(snapshots)
        reads = [partial(self._offer, learner, snapshots[learner], own, fragment, parent) for learner in learners]
        offers: list[Offer] = []
        rejections: list[Rejection] = []
        for found in self._exchange.gather(reads):
            if isinstance(found, Offer):
                offers.append(found)
            else:
                rejections.append(found)
        return offers, rejections

    def _offer(
        self, learner: str, snapshot: Snapshot | None, own: Mapping[str, Arrays], fragment: int, parent: int
    ) -> Offer | Rejection:
        if snapshot is None:
            return Rejection.of(learner, "malformed: the record is not a snapshot's")
        if snapshot.payload is None:
            return Rejection.of(learner, "nonfinite: its parameters hold NaN or infinity")
        if snapshot.anchor != parent:
            return Rejection.of(learner, f"stale: it starts from round {snapshot.anchor}, not {parent}")
        try:
            delta = own.get(snapshot.payload.digest)
            if delta is None:
                delta = self._exchange.get_arrays(snapshot.payload, fragment, self._wire.delta)
            return Offer(snapshot, delta)
        except NonFiniteError as error:
            return Rejection.of(learner, f"nonfinite: {error}")
        except CorruptPayload as error:
            return Rejection.of(learner, f"corrupt: {error}")


class _Rounding:
    """Round updates to the run's format, and keep them as they will be sent."""

    def __init__(self, dtype: WireDType, exact: frozenset[str]) -> None:
        self._dtype, self._exact = dtype, exact
        self.tensors: dict[str, TensorBytes] = {}

    def __call__(self, update: Arrays) -> Arrays:
        schema = Schema(tuple(ParameterSpec(name, "F32", array.shape) for name, array in sorted(update.items())))
        tensors = encode(update, schema, self._dtype, exact=self._exact)
        self.tensors.update(tensors)
        return dict(decode(tensors, schema, self._dtype, exact=self._exact))
