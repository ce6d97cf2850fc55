"""What nodes of a run read from the mailbox and write to it, each object checked as it is read."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Protocol, TypeVar

from mixle.diloco import compression, names
from mixle.diloco.algorithm import DiLoCo
from mixle.diloco.events import Kind
from mixle.diloco.existing_run import find_run_record, read_run_record, require_no_rounds
from mixle.diloco.mailbox import Mailbox, ObjectTooLarge
from mixle.diloco.parameters import Arrays
from mixle.diloco.quantization import NonFiniteError
from mixle.diloco.records import (
    RECORD_LIMIT,
    Claim,
    MalformedRecord,
    PayloadRef,
    RoundRecord,
    RunRecord,
    Snapshot,
    VoidRound,
)
from mixle.diloco.serialization import Schema, SchemaMismatch, TensorBytes, packed_nbytes
from mixle.diloco.tensor_codec import WireDType, decode, encode, payload_schema

__all__ = ["CorruptPayload", "Exchange", "Gather", "PayloadGone", "gather_on_threads", "read_run"]

Report = Callable[[Kind, int | None, dict[str, Any]], None]
T = TypeVar("T")


class Gather(Protocol):
    """Make calls, which may go on at one time, and return what they return, in their order."""

    def __call__(self, calls: Sequence[Callable[[], T]]) -> list[T]: ...


READS_AT_ONCE = 16
_PAGE = 100
_TOLD = 1000


def gather_on_threads(calls: Sequence[Callable[[], T]]) -> list[T]:
    """Make calls on up to :data:`READS_AT_ONCE` threads, for stores whose answers take longer than their bytes.

    Where no thread can be started, as while Python exits, they are made one after another.
    """
    if len(calls) < 2:
        return [call() for call in calls]
    with ThreadPoolExecutor(min(len(calls), READS_AT_ONCE), thread_name_prefix="diloco reader") as pool:
        try:
            begun = [pool.submit(call) for call in calls]
        except RuntimeError:
            begun = []
        if begun:
            return [each.result() for each in begun]
    return [call() for call in calls]


class CorruptPayload(RuntimeError):  # noqa: N818  (what it is)
    """A payload is gone, or is not what the record that names it promises."""


class PayloadGone(CorruptPayload):
    """A payload is not there, be it that it was swept."""


class Exchange:
    """One run in a mailbox.

    Args:
        mailbox: where it is.
        schema: the parameters of the model.
        fragments: the names in each fragment.
        codec: what this node writes payloads with; it reads all.
        report: told of what is passed over.
        gather: makes reads that do not wait for one another.
        buffers: names of the statistics among the parameters, which travel in float32 whatever the others do;
            :meth:`open_run` takes them from the run.

    Attributes:
        schemas: of the parameters in each fragment.
    """

    def __init__(
        self,
        mailbox: Mailbox,
        schema: Schema,
        fragments: Sequence[Sequence[str]],
        *,
        codec: compression.Codec,
        report: Report,
        gather: Gather = gather_on_threads,
        buffers: Iterable[str] = (),
    ) -> None:
        self.gather, self.buffers = gather, frozenset(buffers)
        self._mailbox, self._codec, self._report = mailbox, codec, report
        self.schemas = [schema.only(fragment) for fragment in fragments]
        self._schema = schema
        self._told: set[str] = set()

    # ---- the run

    def open_run(
        self,
        algorithm: DiLoCo,
        base: Sequence[Arrays],
        *,
        embeddings: Iterable[str] = (),
        buffers: Iterable[str] = (),
    ) -> RunRecord:
        """Return the record of the run in the mailbox; without one, make it, with ``base`` as first version.

        Raises:
            AlgorithmMismatch: the run has another algorithm.
            SchemaMismatch: the run has other parameters.
            MalformedRecord: ``run.json`` is not a run's record.
        """
        record = self._found_or_made(algorithm, base, embeddings, buffers)
        self.buffers = frozenset(record.buffers)
        return record

    def _found_or_made(
        self, algorithm: DiLoCo, base: Sequence[Arrays], embeddings: Iterable[str], buffers: Iterable[str]
    ) -> RunRecord:
        record = find_run_record(self._mailbox)
        if record is None:
            require_no_rounds(self._mailbox)
            refs = tuple(self.put_arrays(0, "base", f, arrays, "F32") for f, arrays in enumerate(base))
            made = RunRecord(
                algorithm.to_dict(),
                tuple((spec.name, spec.dtype, spec.shape) for spec in self._schema.parameters),
                tuple(schema.names for schema in self.schemas),
                refs,
                tuple(sorted(embeddings)),
                tuple(sorted(buffers)),
                f"{secrets.randbits(60):015x}",
            )
            if self._mailbox.put_if_absent(names.RUN, made.to_bytes()):
                return made
            record = read_run_record(self._mailbox)
        algorithm.require_same(DiLoCo.from_dict(record.algorithm), where="the run in the mailbox")
        require_same_parameters(record, self._schema)
        if record.fragments != tuple(schema.names for schema in self.schemas):
            raise MalformedRecord(f"{names.RUN} in the mailbox names other fragments than {algorithm.partition} gives")
        return record

    # ---- rounds

    def newest_round(self) -> RoundRecord | None:
        """Return the newest commit; one page of keys and, unless somebody left rubbish there, one record."""
        after = ""
        while True:
            keys = self._mailbox.list(names.ROUNDS, after, limit=_PAGE)
            for key in keys:
                round_ = names.round_of_record(key)
                if round_ is None:
                    self._pass_over(key, "no round's record")
                    continue
                record = self.round_record(round_)
                if isinstance(record, RoundRecord):
                    return record
            if len(keys) < _PAGE:
                return None
            after = keys[-1]

    def round_record(self, round_: int) -> RoundRecord | VoidRound | None:
        """Return the record of a round, None if it is not committed.

        What lies there may be none, or may have decayed. Nobody can commit the round any more, so it is void.
        """
        key, period = names.round_record(round_), len(self.schemas)
        data = self._get(key)
        if data is None:
            return None
        try:
            record = RoundRecord.from_bytes(data)
        except MalformedRecord as error:
            self._pass_over(key, str(error))
            return VoidRound(round_)
        back, rest = divmod(round_ - record.parent, period)
        if record.round != round_ or record.fragment != round_ % period or back < 1 or rest or record.parent < -period:
            self._pass_over(key, f"the record of round {record.round}, fragment {record.fragment}")
            return VoidRound(round_)
        return record

    def commit(self, record: RoundRecord) -> bool:
        """Write the record of a round, which commits it; False if another was first."""
        key = names.round_record(record.round)
        if self._mailbox.put_if_absent(key, record.to_bytes()):
            return True
        if self._get(key) is None:
            self._pass_over(key, "what lies there cannot be read and lets no round be committed any more; remove it")
        return False

    # ---- snapshots and claims

    def publish(self, snapshot: Snapshot) -> bool:
        """Write a snapshot's record; its payload is there. False if this learner has published the round before."""
        return self._mailbox.put_if_absent(names.snapshot(snapshot.round, snapshot.learner), snapshot.to_bytes())

    def published(self, round_: int) -> list[str]:
        """Return who has published a round."""
        learners = []
        for key in self._mailbox.list(names.snapshots_of(round_)):
            learner = names.learner_of_snapshot(key)
            if learner is None:
                self._pass_over(key, "no snapshot's record")
            else:
                learners.append(learner)
        return learners

    def snapshot(self, round_: int, learner: str) -> Snapshot | None:
        """Return what a learner published for a round; None, and a report, if it is not what it should be."""
        key = names.snapshot(round_, learner)
        snapshot: Snapshot | None = self._read(key, Snapshot)
        if snapshot is not None and (snapshot.round, snapshot.learner) != (round_, learner):
            self._pass_over(key, f"the snapshot of {snapshot.learner} for round {snapshot.round}")
            return None
        return snapshot

    def snapshots(self, round_: int, learners: Iterable[str]) -> dict[str, Snapshot | None]:
        """Return what each of these learners published for a round, as :meth:`snapshot` does."""
        each = sorted(learners)
        return dict(zip(each, self.gather([partial(self.snapshot, round_, learner) for learner in each]), strict=True))

    def newest_claim(self, round_: int) -> tuple[Claim | None, int]:
        """Return the last claim to a round, None if there is none, and the number of the next attempt."""
        attempts = {names.attempt_of_claim(key) for key in self._mailbox.list(names.claims_of(round_))} - {None}
        newest = None
        for attempt in sorted(attempts, key=lambda attempt: -(attempt or 0)):
            found: Claim | None = self._read(names.claim(round_, attempt or 0), Claim)
            if found is not None and (found.round, found.attempt) == (round_, attempt):
                newest = found
                break
        following = -1 if newest is None else newest.attempt
        while (following := following + 1) in attempts:  # not a claim, but its key is taken
            pass
        return newest, following

    def claim(self, claim: Claim) -> bool:
        """Announce an attempt to close a round; False if another node announced it."""
        return self._mailbox.put_if_absent(names.claim(claim.round, claim.attempt), claim.to_bytes())

    # ---- payloads

    def put_arrays(
        self, round_: int, kind: names.PayloadKind, fragment: int, arrays: Arrays, dtype: WireDType
    ) -> PayloadRef:
        """Write a payload of a fragment's arrays.

        Raises:
            NonFiniteError: one is not finite.
        """
        return self.put_payload(round_, kind, self.encoded(fragment, arrays, dtype))

    def encoded(self, fragment: int, arrays: Arrays, dtype: WireDType) -> bytes:
        """Return the bytes of a payload of a fragment's arrays, and raise as :meth:`put_arrays` does."""
        return self._codec.encode(encode(arrays, self.schemas[fragment], dtype, exact=self.buffers))

    def packed(self, tensors: Mapping[str, TensorBytes]) -> bytes:
        """Return the bytes of a payload of tensors that are encoded."""
        return self._codec.encode(tensors)

    def put_payload(self, round_: int, kind: names.PayloadKind, data: bytes) -> PayloadRef:
        """Write a payload's bytes; that they are there already is the same."""
        key = names.payload(round_, kind, hashlib.sha256(data).hexdigest(), self._codec.extension)
        self._mailbox.put_if_absent(key, data)
        return PayloadRef(key, len(data))

    def get_arrays(self, ref: PayloadRef, fragment: int, dtype: WireDType) -> Arrays:
        """Return a payload's arrays, float32.

        Raises:
            PayloadGone: it is not there.
            CorruptPayload: it is not the one whose digest its key has, or does not fit the fragment.
            NonFiniteError: an array is not finite.
        """
        schema = self.schemas[fragment]
        bound = packed_nbytes(payload_schema(schema, dtype, exact=self.buffers).parameters)
        try:
            data = self._mailbox.get(ref.key, limit=bound + bound // 256 + 4096)  # what does not compress grows
        except ObjectTooLarge as error:
            raise CorruptPayload(str(error)) from None
        if data is None:
            raise PayloadGone(f"{ref.key} is gone")
        if len(data) != ref.nbytes or hashlib.sha256(data).hexdigest() != ref.digest:
            raise CorruptPayload(f"{ref.key} does not have the sha256 in its name")
        try:
            return dict(decode(compression.decode(ref.key, data, max_bytes=bound), schema, dtype, exact=self.buffers))
        except NonFiniteError:
            raise
        except ValueError as error:
            raise CorruptPayload(f"{ref.key}: {error}") from None

    def own_arrays(self, data: bytes, fragment: int, dtype: WireDType) -> Arrays:
        """Return what readers of a payload that this node encoded will see."""
        key = f"own{self._codec.extension}"
        tensors = compression.decode(key, data, max_bytes=1 << 62)
        return dict(decode(tensors, self.schemas[fragment], dtype, exact=self.buffers))

    # ---- what is no longer needed

    def sweep(self, newest: int, keep: int) -> int:
        """Delete what no node needs once round ``newest`` is committed; return how many objects.

        Deltas go with their round; claims, snapshots and versions ``keep`` rounds later. Records of rounds and the base
        version stay.
        """
        doomed = []
        for prefix in (names.PAYLOADS, names.SNAPSHOTS, names.CLAIMS):
            for key in self._mailbox.list(prefix):
                round_, kind = names.round_of_object(key), names.kind_of_payload(key)
                if round_ is None:
                    self._pass_over(key, "nothing of a run")
                elif kind != "base" and round_ <= (newest if kind == "delta" else newest - keep):
                    doomed.append(key)
        self._mailbox.delete(doomed)
        return len(doomed)

    # ----

    def _read(self, key: str, kind: Any) -> Any:
        data = self._get(key)
        try:
            return None if data is None else kind.from_bytes(data)
        except MalformedRecord as error:
            self._pass_over(key, str(error))
            return None

    def _get(self, key: str) -> bytes | None:
        """Return the bytes of a record; of what is too large to be one, none."""
        try:
            return self._mailbox.get(key, limit=RECORD_LIMIT)
        except ObjectTooLarge:
            return b""

    def _pass_over(self, key: str, why: str) -> None:
        if key not in self._told and len(self._told) < _TOLD:
            self._told.add(key)
            self._report("foreign", None, {"key": key, "why": why})


def require_same_parameters(record: RunRecord, schema: Schema) -> None:
    """Check that a run trains these parameters.

    Raises:
        SchemaMismatch: names those that differ, and how.
    """
    theirs = {name: (dtype, shape) for name, dtype, shape in record.parameters}
    ours = {spec.name: (spec.dtype, spec.shape) for spec in schema.parameters}
    problems = {}
    for name in theirs.keys() | ours.keys():
        if theirs.get(name) != ours.get(name):
            problems[name] = f"is {_told(ours.get(name))} in this model and {_told(theirs.get(name))} in the run"
    if problems:
        raise SchemaMismatch(problems)


def read_run(mailbox: Mailbox, schema: Schema, *, report: Report) -> tuple[RunRecord, Exchange]:
    """Return the run in a mailbox, for who only reads it.

    Raises:
        ValueError: there is none.
        SchemaMismatch: it has other parameters.
    """
    record = read_run_record(mailbox)
    require_same_parameters(record, schema)
    codec, buffers = compression.Codec(), record.buffers
    return record, Exchange(mailbox, schema, record.fragments, codec=codec, report=report, buffers=buffers)


def _told(spec: tuple[str, tuple[int, ...]] | None) -> str:
    return "missing" if spec is None else f"{spec[0]} of shape {spec[1]}"
