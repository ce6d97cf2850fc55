"""The students' slots that a worker may write into, and when it lets go of them."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable
from typing import Any, Protocol

from mixle.data.teacher.generation import Demand, Outcome, Target
from mixle.data.teacher.keys import Keys
from mixle.data.teacher.lane import DirectOrder
from mixle.data.teacher.layout import SlotLayout
from mixle.data.teacher.messages import SegmentInfo, WorkPiece
from mixle.data.teacher.network import Sender
from mixle.data.teacher.run import is_alive, slots_directory
from mixle.data.teacher.segment import Segment, SlotLocks
from mixle.data.teacher.slots import Slots
from mixle.data.teacher.specs import MOST_TENSORS
from mixle.utils.optional_import import optional_import

__all__ = ["Attachments"]

MOST_MAPS = 128
MOST_SEGMENTS = 4096


class Place(Protocol):
    """Where the samples of one student go."""

    info: SegmentInfo

    def target(self, piece: WorkPiece) -> Target:
        """Return slots to fill for a piece."""

    def deliver(self, piece: WorkPiece, outcomes: list[Outcome], demand: Demand) -> list[Outcome]:
        """Bring what was made to the student; return what became of the student's slots."""

    def close(self) -> None:
        """Let go of the student's slots."""


class Attachments:
    """Know the segments that the broker has told of, and map those that are in use.

    Args:
        run_id: segments of other runs are refused.
        host: this worker's host id; students of other hosts are reached by network.
        directory: the teacher's directory, for files of slots; None for the default one.
        slot_size: the largest sample that the generator makes, in bytes.
        context: of ZeroMQ.
        keys: for the network.
        insecure: the network may go without keys.
        checksum: samples that go over the network get a CRC-32.
        attend: called while a student on another host takes its time; may let go of it.
    """

    def __init__(
        self,
        run_id: str,
        *,
        host: str,
        directory: str | os.PathLike[str] | None = None,
        slot_size: int,
        context: Any,
        keys: Keys | None,
        insecure: bool,
        checksum: bool,
        attend: Callable[[], None],
    ) -> None:
        self.run_id = run_id
        self._host, self._directory, self._slot_size = host, directory, slot_size
        self._connection: dict[str, Any] = {
            "context": context,
            "keys": keys,
            "insecure": insecure,
            "checksum": checksum,
            "attend": attend,
        }
        self._told: dict[int, SegmentInfo] = {}
        self._ownerless: set[int] = set()
        self._places: OrderedDict[str, Place] = OrderedDict()

    @property
    def open_names(self) -> list[str]:
        """The names of the segments that are mapped or connected now."""
        return list(self._places)

    def learn(self, infos: Iterable[SegmentInfo]) -> None:
        """Note segments that work may name.

        Raises:
            ValueError: there would be more than 4,096 of them.
        """
        for info in infos:
            if len(self._told) >= MOST_SEGMENTS and info.segment_id not in self._told:
                raise ValueError(f"segment {info.name} is one more than the {MOST_SEGMENTS} that a worker keeps")
            self._told[info.segment_id] = info
            self._ownerless.discard(info.segment_id)

    def is_ownerless(self, segment_id: int) -> bool:
        """Whether the process of a segment was found dead before the broker told of it."""
        return segment_id in self._ownerless

    def info(self, segment_id: int) -> SegmentInfo:
        """Return what was told of a segment.

        Raises:
            ValueError: nothing was.
        """
        try:
            return self._told[segment_id]
        except KeyError:
            raise ValueError(f"segment {segment_id} was not announced to this worker") from None

    def place(self, info: SegmentInfo) -> Place:
        """Return where the samples for a segment go, mapped or connected now if it was not.

        Raises:
            ValueError: it is of another run or process, has another size than was said, or takes larger samples than
                this worker makes.
            OSError: it is gone, another user's, or not to be mapped.
        """
        known = self._places.get(info.name)
        if known is not None and known.info[1:] == info[1:]:
            self._places.move_to_end(info.name)
            return known
        layout = _layout(info)
        if layout.packed_bytes > self._slot_size:
            raise ValueError(f"a sample has {layout.packed_bytes} bytes; this worker's slot_size={self._slot_size}")
        self._close([info.name])
        while len(self._places) >= MOST_MAPS:
            self._close([next(iter(self._places))])
        if info.owner.host == self._host:
            place: Place = Mapped(info, layout, self.run_id, self._directory)
        else:
            place = Sender(info, layout, **self._connection)
        self._places[info.name] = place
        return place

    def mapped(self, name: str) -> Mapped | None:
        """Return the slots of a segment of this host that work has come for; None if none is mapped by that name."""
        place = self._places.get(name)
        return place if isinstance(place, Mapped) else None

    def told_id(self, name: str) -> int | None:
        """Return the number by which the broker told of a segment; None if it has not."""
        return next((one for one, info in self._told.items() if info.name == name), None)

    def retire(self, segment_ids: Iterable[int]) -> list[str]:
        """Let go of segments; return their names."""
        segment_ids = tuple(segment_ids)
        self._ownerless.difference_update(segment_ids)
        names = [info.name for one in segment_ids if (info := self._told.pop(one, None)) is not None]
        self._close(names)
        return names

    def forget(self, *, keep: Collection[str]) -> None:
        """Forget what was told, and let go of all but the names to ``keep``: a new broker counts anew."""
        self._told.clear()
        self._ownerless.clear()
        self._close([name for name in self._places if name not in keep])

    def sweep(self) -> list[str]:
        """Let go of the segments of processes that have died; return their names."""
        dead = [name for name, place in self._places.items() if is_alive(place.info.owner, self._host) is False]
        for segment_id in [one for one, info in self._told.items() if info.name in dead]:
            del self._told[segment_id]
            self._ownerless.add(segment_id)
        self._close(dead)
        return dead

    def close(self) -> None:
        """Let go of everything."""
        self._close(list(self._places))

    def _close(self, names: Iterable[str]) -> None:
        for name in names:
            place = self._places.pop(name, None)
            if place is not None:
                place.close()


class Mapped:
    """A student's slots in this host's memory: what is written there is delivered."""

    def __init__(
        self, info: SegmentInfo, layout: SlotLayout, run_id: str, directory: str | os.PathLike[str] | None
    ) -> None:
        self.info = info
        self._segment = Segment.attach(
            info.name,
            run_id=run_id,
            size=layout.segment_bytes(info.slot_count),
            medium="file" if info.medium == "file" else "shm",
            directory=slots_directory(directory) if info.medium == "file" else None,
            pid=info.owner.pid,
        )
        self._slots: Slots | None = Slots(self._segment.buffer, layout, info.slot_count)
        self._locks: SlotLocks | None = None

    def target(self, piece: WorkPiece) -> Target:
        assert self._slots is not None
        if piece.first_slot + piece.count > self.info.slot_count:
            raise ValueError(
                f"slots {piece.first_slot} to {piece.first_slot + piece.count - 1} are beyond the "
                f"{self.info.slot_count} of segment {self.info.name}"
            )
        return Target(self._slots, piece.first_slot, piece.count, piece.token, piece.generation)

    def deliver(self, piece: WorkPiece, outcomes: list[Outcome], demand: Demand) -> list[Outcome]:
        return outcomes

    def claim(self, order: DirectOrder) -> Target | None:
        """Take the lock of an order's slot, until :meth:`let_go`; None if its student has it, or has taken it back."""
        slots, (_, slot, token, generation) = self._slots, order
        if slots is None or slot >= self.info.slot_count or self.info.medium != "shm":
            return None
        try:
            if self._locks is None:
                self._locks = self._segment.locks()
            if not self._locks.hold(slot):
                return None
        except OSError:  # its student has taken the name away, or there is no room for a lock
            return None
        if slots.is_awaited(slot, token, generation):
            return Target(slots, slot, 1, token, generation)
        self._locks.let_go(slot)
        return None

    def let_go(self, slot: int) -> None:
        """Let the student, or another worker, have a slot that was claimed."""
        assert self._locks is not None
        self._locks.let_go(slot)

    def close(self) -> None:
        self._slots = None
        if self._locks is not None:
            self._locks.close()
        self._segment.close()


def _layout(info: SegmentInfo) -> SlotLayout:
    msgpack = optional_import("msgpack", extra="teacher")
    try:
        wire = msgpack.unpackb(info.layout, raw=False, max_array_len=MOST_TENSORS, max_map_len=16, max_ext_len=0)
    except Exception as error:  # whatever an unpacker makes of hostile bytes
        raise ValueError(f"the layout of segment {info.name} is no msgpack: {type(error).__name__}") from None
    layout = SlotLayout.from_wire(wire)
    if layout.packed_bytes != info.packed_bytes:
        raise ValueError(f"a sample in segment {info.name} has {layout.packed_bytes} bytes, not {info.packed_bytes}")
    return layout
