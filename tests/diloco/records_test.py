"""Records of nodes: what is written is read back, and what is anything else is refused, whatever it is."""

from __future__ import annotations

import json
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mixle.diloco import names
from mixle.diloco.records import (
    COUNT_LIMIT,
    Claim,
    Contribution,
    MalformedRecord,
    PayloadRef,
    Rejection,
    RoundRecord,
    RunRecord,
    Snapshot,
    sealed,
)

DIGEST = "0123456789abcdef" * 4
REF = PayloadRef(names.payload(4, "theta", DIGEST, ".safetensors"), 1234)
DELTA = PayloadRef(names.payload(4, "delta", DIGEST, ".safetensors.zst"), 99)
SNAPSHOT = Snapshot(4, "n0", DELTA, 2, 10, 80, 0.25, False)
CLAIM = Claim(4, 1, "n0")
CONTRIBUTION = Contribution("n0", DIGEST, 10, 80, 0.25, 1.0, 3.5, 1.0, False)
ROUND = RoundRecord(
    4, 0, 2, "n1", REF, None, REF, None, DIGEST, (CONTRIBUTION,), (Rejection("n2", "stale: why"),), -0.5, (1.5, 0.25)
)
RUN = RunRecord(
    {"sync_every": 4},
    (("a", "F32", (3,)), ("b", "F32", (2, 2))),
    (("a",), ("b",)),
    (REF, REF),
    embeddings=("b",),
    buffers=("a",),
    id="0123456789abcde",
)
RECORDS = [SNAPSHOT, CLAIM, ROUND, RUN]
NUMBERS = st.integers() | st.floats() | st.sampled_from([10**400, -1, COUNT_LIMIT + 1, 1e308])
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: type(record).__name__)
def test_a_record_is_read_back_as_it_was_written(record):
    assert type(record).from_bytes(record.to_bytes()) == record


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: type(record).__name__)
def test_one_flipped_bit_anywhere_in_a_record_is_found(record):
    data = record.to_bytes()
    for index in range(len(data)):
        for bit in range(8):
            flipped = bytearray(data)
            flipped[index] ^= 1 << bit
            with pytest.raises(MalformedRecord):
                type(record).from_bytes(bytes(flipped))


@given(data=st.binary(max_size=200))
def test_bytes_that_are_no_record_are_refused(data):
    for kind in (Snapshot, Claim, RoundRecord, RunRecord):
        with pytest.raises(MalformedRecord):
            kind.from_bytes(data)


@given(record=st.sampled_from(RECORDS), data=st.data())
def test_a_sealed_record_with_any_other_value_in_a_field_is_read_or_refused_and_nothing_else(record, data):
    fields = {name: value for name, value in json.loads(record.to_bytes()).items() if name not in ("format", "sha256")}
    name = data.draw(st.sampled_from(sorted(fields)))
    fields[name] = data.draw(VALUES)
    try:
        read = type(record).from_bytes(sealed(fields))
    except MalformedRecord:
        return
    assert type(record).from_bytes(read.to_bytes()) == read


@given(data=st.data())
def test_a_contribution_with_any_other_value_in_a_field_is_read_or_refused_and_nothing_else(data):
    fields = {name: value for name, value in json.loads(ROUND.to_bytes()).items() if name not in ("format", "sha256")}
    name = data.draw(st.sampled_from(sorted(fields["contributions"][0])))
    fields["contributions"][0][name] = data.draw(VALUES)
    try:
        RoundRecord.from_bytes(sealed(fields))
    except MalformedRecord:
        return


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"steps": 3, "tokens": 0}, "steps=3 with tokens=0"),
        ({"steps": 0, "tokens": 3}, "steps=0 with tokens=3"),
        ({"steps": True}, "steps is not an integer"),
        ({"seconds_per_step": float("nan")}, "seconds_per_step is not a finite number"),
        ({"seconds_per_step": 10**400}, "seconds_per_step is not a finite number"),
        ({"learner": "a/b"}, "learner='a/b' must be"),
        ({"payload": {"key": "payloads/x", "nbytes": 3}}, "is not one of a payload"),
        ({"more": 1}, "does not have the fields"),
    ],
)
def test_the_error_says_which_field_is_wrong(changes, told):
    fields = {
        name: value for name, value in json.loads(SNAPSHOT.to_bytes()).items() if name not in ("format", "sha256")
    }
    with pytest.raises(MalformedRecord, match=told):
        Snapshot.from_bytes(sealed(fields | changes))


def test_a_deeply_nested_text_is_refused():
    with pytest.raises(MalformedRecord):
        Claim.from_bytes(b"[" * 100_000)


def test_a_text_that_can_be_read_and_not_be_written_again_is_refused():
    """How deep that is depends on the stack, so every depth around its limit is tried."""
    limit = sys.getrecursionlimit()
    for depth in range(1, limit + 50):
        for opening, closing in (("[", "]"), ('{"a":', "}")):
            with pytest.raises(MalformedRecord):
                Snapshot.from_bytes(f'{{"format":1,"x":{opening * depth}1{closing * depth}}}'.encode())


def test_a_reason_that_a_stranger_wrote_into_a_round_is_printable():
    assert Rejection.parse({"learner": "n0", "reason": "stale: \x1b[2J\n"}).reason == "stale: ?[2J?"


def test_the_reason_of_a_rejection_is_printable_and_short_whatever_a_stranger_wrote():
    reason = Rejection.of("n0", "corrupt: \x1b[2J" + "\ud800" + "x" * 1000).reason
    assert reason.isprintable() and len(reason) == 400


@given(round_=st.integers(0, 10**10 - 1))
def test_keys_of_rounds_count_down_and_are_read_back(round_):
    key = names.round_record(round_)
    assert names.round_of_record(key) == round_
    assert round_ == 0 or key < names.round_record(round_ - 1)


@pytest.mark.parametrize(
    "key", ["snapshots/0000000001/a/b.json", "snapshots/0000000001/x..json", "snapshots/1/a.json", "snapshots/a.json"]
)
def test_keys_that_are_no_snapshots_are_told_apart(key):
    assert names.learner_of_snapshot(key) is None


def test_a_round_belongs_to_every_object_that_is_swept_with_it():
    keys = [names.claim(7, 3), names.snapshot(7, "n0"), names.payload(7, "update", DIGEST, ".safetensors")]
    assert [names.round_of_object(key) for key in keys] == [7, 7, 7]
    assert names.round_of_object(names.round_record(7)) is None
