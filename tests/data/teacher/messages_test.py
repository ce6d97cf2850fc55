from __future__ import annotations

import random
from contextlib import suppress
from dataclasses import fields

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mixle.data.teacher import messages as m
from mixle.data.teacher.errors import ProtocolError, VersionMismatch
from mixle.data.teacher.run import ProcessIdentity

ME = ProcessIdentity("0" * 16, 5, 6)
MODEL = m.ModelState(3, "m", m.pack_cfg({"a": [1]}), b"s" * 16)
SEGMENT = "/mx01234567-5-abcdef"
ABOUT = {
    "version": 1,
    "run_id": "01234567",
    "broker_id": b"b" * 8,
    "model": MODEL,
    "heartbeat_s": 0.5,
    "timeout_s": 5.0,
}
INFO = m.SegmentInfo(0, "shm", SEGMENT, 8, 64, b"l", "tcp://h:1", b"k" * 40, ME)

EXAMPLES = [
    m.Ask(version=1),
    m.Run(**ABOUT),
    m.Hello(
        version=1,
        attempt=1,
        session=None,
        student_id="0" * 32,
        rank=0,
        identity=ME,
        medium="file",
        segment=SEGMENT,
        slot_count=8,
        packed_bytes=64,
        layout=b"l",
        data_endpoint="tcp://10.0.0.1:5",
        data_key=b"k" * 40,
        model=m.NO_MODEL,
    ),
    m.Ready(
        version=1,
        attempt=1,
        session=b"s" * 16,
        worker_id="w",
        identity=ME,
        slot_size=64,
        max_batch=None,
        patterns=("*", "a?"),
        prefetch=2,
        held=(m.HeldPiece(b"t" * 16, SEGMENT, 0, 3, 2**64 - 1),),
        model=MODEL,
        lane="1f2e-0123abcd",
    ),
    m.Welcome(**ABOUT, attempt=2, session=b"s" * 16),
    m.Beat(session=b"s" * 16),
    m.Pong(broker_id=b"b" * 8, model=MODEL),
    m.Who(),
    m.Error(kind="limit", message="no", request_id=None),
    m.Request(orders=(m.Order(b"o" * 8, 0, 8, 2**64 - 1, 3),), resent=True),
    m.Cancel(order_ids=(b"o" * 8,)),
    m.Complete(pieces=(m.Piece(b"o" * 8, 0, 8),), lane=None),
    m.Failed(order_id=b"o" * 8, first_slot=0, count=1, message="why", tries=3),
    m.Dropped(pieces=(m.Piece(b"o" * 8, 0, 8),), model=MODEL),
    m.Lost(pieces=(m.Piece(b"o" * 8, 0, 8),), worker=ME, dead=False),
    m.Work(model=None, pieces=(m.WorkPiece(b"t" * 16, 0, 0, 8, 1, 3),), segments=(INFO,)),
    m.Done(pieces=(m.DonePiece(b"t" * 16, 0, 8, m.FAILED, "why"),), seconds=0.5),
    m.Served(segments=(m.ServedSlots(0, 7),), seconds=0.5),
    m.Retire(segment_ids=(0, 1)),
    m.Bye(),
    m.Stop(),
    m.Stopping(),
    m.SetModel(
        request_id=b"r" * 8, student_id="0" * 32, session=b"s" * 16, rank=0, known=0, model_id="m", packed_cfg=None
    ),
    m.Model(request_id=b"r" * 8, model=MODEL),
    m.Stats(),
    m.StatsReply(stats=b"x"),
]


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda message: type(message).__name__)
def test_a_message_comes_back_as_it_was_sent(message):
    assert m.parse(*m.frames(message)) == message


def test_every_message_has_an_example():
    assert {type(message) for message in EXAMPLES} | {m.News} == set(m._KINDS)


def test_news_come_back_as_they_were_published():
    news = m.News(topic="MODEL", run_id="01234567", broker_id=b"b" * 8, model=MODEL)
    topic, body = m.frames(news)
    assert topic == b"MODEL" and m.parse_news(topic, body) == news
    with pytest.raises(ProtocolError):
        m.parse_news(b"OTHER", body)


JUNK = [
    None,
    -1,
    2**63,
    1.5,
    float("nan"),
    float("inf"),
    "x" * 5_000,
    b"\xff" * 5_000,
    [],
    [[]],
    {},
    {"a": 1},
    True,
    [0] * 9,
]


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda message: type(message).__name__)
def test_a_field_of_another_type_or_size_is_refused_by_name(message):
    command, body = m.frames(message)
    refused = 0
    for one in fields(message):
        for junk in JUNK:
            changed = {**msgpack.unpackb(body), one.name: junk}
            try:
                parsed = m.parse(command, msgpack.packb(changed))
            except ProtocolError as error:
                refused += 1
                assert one.name in str(error) or isinstance(error, VersionMismatch)
            else:  # then it is what the field may be
                assert m.parse(*m.frames(parsed)) == parsed
    assert refused >= 8 * len(fields(message))


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda message: type(message).__name__)
def test_missing_and_unknown_fields_are_refused(message):
    command, body = m.frames(message)
    values = msgpack.unpackb(body)
    with pytest.raises(ProtocolError, match="and no other"):
        m.parse(command, msgpack.packb({**values, "more": 1}))
    for name in values:
        with pytest.raises(ProtocolError):
            m.parse(command, msgpack.packb({k: v for k, v in values.items() if k != name}))
        with pytest.raises(ProtocolError, match=f"no field {name}"):
            m.parse(command, msgpack.packb({(k if k != name else "other"): v for k, v in values.items()}))


@given(
    command=st.binary(max_size=10) | st.sampled_from([kind.COMMAND for kind in map(type, EXAMPLES)]),
    body=st.binary(max_size=300),
)
@settings(max_examples=500, deadline=None)
def test_random_bytes_are_refused_and_nothing_else_happens(command, body):
    with suppress(ProtocolError):
        m.parse(command, body)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xc1",
        b"\x91" * 100_000,
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\x81\xa1a\xd9\x02\xff\xff",
        msgpack.packb([1]),
        msgpack.packb({1: 2}),
        msgpack.packb({"session": msgpack.ExtType(5, b"x")}),
        bytes(m.MAX_MESSAGE_BYTES + 1),
    ],
    ids=range(11),
)
def test_bodies_that_would_nest_lie_or_swell_are_refused(body):
    with pytest.raises(ProtocolError):
        m.parse(b"BEAT", body)


def test_slots_beyond_any_segment_are_refused():
    order = m.Order(b"o" * 8, m.MAX_SLOTS - 1, 2, 0, 0)
    with pytest.raises(ProtocolError, match="slots beyond"):
        m.parse(*m.frames(m.Request(orders=(order,), resent=False)))


def test_a_command_that_is_out_of_place_is_refused():
    with pytest.raises(ProtocolError, match="is no command here"):
        m.parse(*m.frames(m.Who()), {m.Beat})


@pytest.mark.parametrize(
    "name",
    ["/mx01234567-5-abcdef/../x", "../etc", "/mx01234567-5-abcde", "/mxG1234567-5-abcdef", "/mx01234567-5-abcdef\n"],
)
def test_a_name_that_is_no_segments_is_refused(name):
    hello = next(one for one in EXAMPLES if isinstance(one, m.Hello))
    command, body = m.frames(hello)
    with pytest.raises(ProtocolError, match=r"HELLO\.segment"):
        m.parse(command, msgpack.packb({**msgpack.unpackb(body), "segment": name}))


def test_another_version_is_named_even_if_its_fields_are_others():
    with pytest.raises(VersionMismatch, match="HELLO speaks version 2 of the protocol; this side speaks 1"):
        m.parse(b"HELLO", msgpack.packb({"version": 2, "new": 1}))


def test_a_configuration_comes_back_and_what_cannot_travel_is_refused():
    cfg = {"layer": 3, "names": ["a", "b"], "scale": 0.5, "deep": {"x": None, "y": b"z"}}
    assert m.unpack_cfg(m.pack_cfg(cfg)) == cfg
    assert m.pack_cfg(None) is None and m.unpack_cfg(None) is None
    for bad, error, message in [
        (3, TypeError, "must be a mapping or None, not int"),
        ({"a": object()}, TypeError, "what msgpack has not"),
        ({"a": 2**70}, TypeError, "what msgpack has not"),
        ({"a": "x" * 70_000}, ValueError, "the limit is 65536"),
        ({1: 2}, ValueError, "cannot be sent"),
    ]:
        with pytest.raises(error, match=message):
            m.pack_cfg(bad)


def test_a_model_id_is_kept_whole_or_refused_with_the_limit():
    assert m.require_model_id("ä" * 512) == "ä" * 512
    with pytest.raises(ValueError, match="1026 bytes in UTF-8; the limit is 1024"):
        m.require_model_id("ä" * 513)
    with pytest.raises(ValueError, match="cannot be written in UTF-8"):
        m.require_model_id("\ud800")
    with pytest.raises(TypeError, match="not int"):
        m.require_model_id(3)


def test_a_text_that_is_no_text_is_refused():
    dice = random.Random(0)
    for _ in range(200):
        body = b"\x81\xa6reason" + dice.randbytes(20)
        with pytest.raises(ProtocolError):
            m.parse(b"ERROR", body)


_EDGES = st.sampled_from([-1, 0, 1, 2, 3, m.MAX_SLOTS - 1, m.MAX_SLOTS, 2**32, 2**32 + 1, 2**62, 2**64 - 1])
_ITEM = st.one_of(
    _EDGES, st.sampled_from([bytes(8), bytes(16), bytes(7), "12345678", "late", None, True, 1.0, [], 2**62 + 1, 2**64])
)


@pytest.mark.parametrize("name", ["order", "piece", "work_piece", "done_piece"])
@given(data=st.data())
def test_a_quick_check_of_a_row_says_what_the_full_one_says(name, data):
    quick, full = getattr(m, f"_{name}"), getattr(m, f"_ANY_{name.upper()}")
    length = {"order": 5, "piece": 3, "work_piece": 6, "done_piece": 5}[name]
    key = bytes(8 if name in ("order", "piece") else 16)
    row = data.draw(
        st.one_of(
            st.lists(_ITEM, max_size=7),
            st.lists(_EDGES, min_size=length - 1, max_size=length - 1).map(lambda rest: [key, *rest]),
            st.just([key, 1, *[2] * (length - 2)]),
            st.just([key, 1, 2, 1, None][:length]),
        )
    )

    def said(check):
        try:
            return check(row)
        except ProtocolError as error:
            return str(error)

    assert said(quick) == said(full)
