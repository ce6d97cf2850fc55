from __future__ import annotations

from collections.abc import Callable, Iterator

import msgpack
import pytest

from mixle.data.teacher import attachments as attachments_module
from mixle.data.teacher.attachments import Attachments
from mixle.data.teacher.layout import SlotLayout
from mixle.data.teacher.messages import SegmentInfo, WorkPiece
from mixle.data.teacher.run import host_id, process_identity
from mixle.data.teacher.segment import Segment
from mixle.data.teacher.slots import Slots
from mixle.data.teacher.specs import BatchConfig, TensorSpec

RUN_ID = "0123abcd"
LAYOUT = SlotLayout.of(BatchConfig([TensorSpec("x", (3,), "uint8")]))


@pytest.fixture
def attachments() -> Iterator[Attachments]:
    one = Attachments(
        RUN_ID,
        host=host_id(),
        slot_size=64,
        context=None,
        keys=None,
        insecure=False,
        checksum=False,
        attend=lambda: None,
    )
    yield one
    one.close()


@pytest.fixture
def announce(attachments: Attachments) -> Iterator[Callable[[int], SegmentInfo]]:
    """Make a segment and tell of it under the given id."""
    segments: list[Segment] = []

    def make(segment_id: int) -> SegmentInfo:
        segment = Segment.create(LAYOUT.segment_bytes(2), run_id=RUN_ID)
        segments.append(segment)
        wire = msgpack.packb(LAYOUT.to_wire())
        info = SegmentInfo(
            segment_id, "shm", segment.name, 2, LAYOUT.packed_bytes, wire, None, None, process_identity()
        )
        attachments.learn([info])
        return info

    yield make
    for segment in segments:
        segment.close()
        segment.unlink()


def test_a_segment_is_mapped_once_and_written_where_the_student_reads(
    attachments: Attachments, announce: Callable[[int], SegmentInfo]
) -> None:
    info = announce(1)
    place = attachments.place(attachments.info(1))
    assert attachments.place(info) is place
    with Segment.attach(info.name, run_id=RUN_ID, size=LAYOUT.segment_bytes(2)) as segment:
        slots = Slots(segment.buffer, LAYOUT, 2)
        slots.prepare(1, 1, 5, 1)
        target = place.target(WorkPiece(b"t" * 16, 1, 1, 1, 5, 1))
        target.slots.write(target.first, 5, 1, b"abc")
        assert bytes(slots.array(1)["x"]) == b"abc"
        del slots


def test_maps_are_bounded_and_the_one_used_longest_ago_goes_first(
    attachments: Attachments, announce: Callable[[int], SegmentInfo], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attachments_module, "MOST_MAPS", 2)
    infos = [announce(segment_id) for segment_id in range(3)]
    for index in (0, 1, 0, 2):
        attachments.place(infos[index])
    assert attachments.open_names == [infos[0].name, infos[2].name]
    attachments.place(infos[1])
    assert attachments.open_names == [infos[2].name, infos[1].name]


def test_what_is_known_of_segments_is_bounded(
    attachments: Attachments, announce: Callable[[int], SegmentInfo], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attachments_module, "MOST_SEGMENTS", 2)
    announce(1)
    announce(2)
    with pytest.raises(ValueError, match="is one more than the 2 that a worker keeps"):
        announce(3)


def test_a_retired_segment_is_forgotten_and_retiring_an_unknown_one_is_harmless(
    attachments: Attachments, announce: Callable[[int], SegmentInfo]
) -> None:
    info = announce(1)
    attachments.place(info)
    assert attachments.retire([1, 99]) == [info.name]
    assert attachments.open_names == []
    with pytest.raises(ValueError, match="segment 1 was not announced"):
        attachments.info(1)


def test_forgetting_keeps_the_maps_that_are_still_worked_on(
    attachments: Attachments, announce: Callable[[int], SegmentInfo]
) -> None:
    kept, dropped = announce(1), announce(2)
    attachments.place(kept)
    attachments.place(dropped)
    attachments.forget(keep=[kept.name])
    assert attachments.open_names == [kept.name]
    with pytest.raises(ValueError, match="segment 1 was not announced"):
        attachments.info(1)


def test_the_segments_of_living_students_outlive_a_sweep(
    attachments: Attachments, announce: Callable[[int], SegmentInfo]
) -> None:
    attachments.place(announce(1))
    assert attachments.sweep() == []
    assert len(attachments.open_names) == 1


def test_a_segment_of_this_name_that_is_described_anew_is_mapped_anew(
    attachments: Attachments, announce: Callable[[int], SegmentInfo]
) -> None:
    info = announce(1)
    place = attachments.place(info)
    other = info._replace(segment_id=7)
    assert attachments.place(other) is place
    with pytest.raises(ValueError, match="bytes, not the size="):
        attachments.place(info._replace(slot_count=1))
