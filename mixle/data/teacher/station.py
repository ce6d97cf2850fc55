"""Who a student is: its rank, its slots and where its broker is, checked before anything is started."""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Self

from mixle.data.teacher.keys import Keys, require_keys
from mixle.data.teacher.layout import SlotLayout
from mixle.data.teacher.messages import MAX_SLOTS
from mixle.data.teacher.run import require_endpoint, require_host_id, slots_directory, teacher_directory
from mixle.data.teacher.segment import SEGMENT_MEDIUMS, SHM_DIRECTORY, SegmentMedium
from mixle.data.teacher.specs import BatchConfig
from mixle.utils.exact import require_choice, require_exact_int

__all__ = ["Station"]


@dataclass(frozen=True)
class Station:
    """What a student registers; made with :meth:`of`."""

    rank: int
    slot_count: int
    layout: SlotLayout
    frontend: str
    control_pub: str | None
    medium: SegmentMedium
    keys: Keys | None
    host: str
    runs_directory: str | None = None
    data_ports: tuple[int, int] | None = None
    student_id: str = field(default_factory=lambda: secrets.token_hex(16))

    @classmethod
    def of(
        cls,
        student_rank: object,
        slot_count: object,
        batch_config: object,
        *,
        frontend_endpoint: str | None,
        control_pub_endpoint: str | None,
        medium: object,
        keys: Keys | str | os.PathLike[str] | None,
        insecure: bool,
        host_id: str | None,
        directory: str | os.PathLike[str] | None = None,
        data_port: int | tuple[int, int] | None = None,
    ) -> Self:
        """Return the station of a client's arguments; an empty ``control_pub_endpoint`` stands for none.

        Raises:
            TypeError, ValueError: an argument that is not what :class:`.StudentClient` says.
            OSError: the slots do not fit where they would lie.
        """
        checked = require_keys(keys)
        runs = None if directory is None else str(teacher_directory(directory))

        def endpoint(value: str | None, name: str) -> str:
            return require_endpoint(value, name, directory=runs, keyed=checked is not None, insecure=insecure)

        frontend = endpoint(frontend_endpoint, "frontend")
        station = cls(
            rank=require_exact_int(student_rank, "student_rank", minimum=0, maximum=2**31 - 1),
            slot_count=require_exact_int(slot_count, "slot_count", minimum=1, maximum=MAX_SLOTS),
            layout=SlotLayout.of(_as_config(batch_config)),
            frontend=frontend,
            control_pub=None if control_pub_endpoint == "" else endpoint(control_pub_endpoint, "control_pub"),
            medium=require_choice(medium, "medium", SEGMENT_MEDIUMS),
            keys=checked,
            host=require_host_id(host_id),
            runs_directory=runs,
            data_ports=_require_ports(data_port, frontend),
        )
        station.require_room()
        return station

    @property
    def directory(self) -> str | None:
        """Where a file of slots lies; None for shared memory."""
        return str(slots_directory(self.runs_directory)) if self.medium == "file" else None

    def require_room(self) -> None:
        """Raise an ``OSError`` with both sizes if the slots do not fit where they would lie."""
        size, place = self.layout.segment_bytes(self.slot_count), self.directory or str(SHM_DIRECTORY)
        if not os.path.isdir(place):
            return
        room = os.statvfs(place)
        if size > room.f_bavail * room.f_frsize:
            raise OSError(
                errno.ENOSPC,
                f"slot_count={self.slot_count} slots of {self.layout.stride} bytes need {size} bytes; {place} has "
                f"{room.f_bavail * room.f_frsize} of {room.f_blocks * room.f_frsize} free; ask for fewer slots",
            )


def _require_ports(value: object, frontend: str) -> tuple[int, int] | None:
    """Return the first and the last port that a receiver may have."""
    if value is None:
        return None
    ends = value if isinstance(value, (tuple, list)) else (value, value)
    if len(ends) != 2:
        raise ValueError(f"data_port={value!r} must be a port, (lowest, highest) or None")
    low, high = (require_exact_int(end, "data_port", minimum=1, maximum=65_535) for end in ends)
    if low > high:
        raise ValueError(f"data_port={value!r} must be (lowest, highest); this range is empty")
    if not frontend.startswith("tcp://"):
        raise ValueError(f"data_port={value!r} is where samples come in over the network; {frontend} is on this host")
    return low, high


def _as_config(value: object) -> BatchConfig:
    if isinstance(value, Mapping):
        return BatchConfig.from_dict(value)
    if not isinstance(value, BatchConfig):
        raise TypeError(f"batch_config={value!r} must be a BatchConfig or a mapping of one, not {type(value).__name__}")
    return value
