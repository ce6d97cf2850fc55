"""Where samples travel through: memory that the student owns and reads, and workers of the same host write.

With a batch config the slots are laid out for it (:mod:`mixle.data.teacher.layout`), and a slot reads as its tensors.
Without one a slot is ``slot_stride`` plain bytes.
"""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Protocol, Self, runtime_checkable

import numpy as np

from mixle.data.teacher.layout import SlotLayout
from mixle.data.teacher.run import slots_directory
from mixle.data.teacher.segment import Segment, SegmentMedium, parse_segment_name
from mixle.data.teacher.slots import Slots
from mixle.data.teacher.specs import BatchConfig
from mixle.utils.exact import require_exact_bool, require_exact_int, require_positive_int
from mixle.utils.optional_import import optional_import

if TYPE_CHECKING:
    import torch


@runtime_checkable
class Medium(Protocol):
    """What holds the slots that a student reads."""

    @property
    def buf_name(self) -> str:
        """The name by which others on this host attach it."""

    @property
    def slot_count(self) -> int:
        """How many slots there are."""

    @property
    def slot_stride(self) -> int:
        """Bytes from one slot to the next."""

    def read_slot_tensors(self, slot_id: int) -> dict[str, torch.Tensor]:
        """Return the tensors of one slot."""

    def close(self) -> None:
        """Let go of the memory."""

    def unlink(self) -> None:
        """Take its name away."""


class MediumBase:
    """Slots in one segment of memory; a context manager that closes it, and unlinks it where it made it.

    Args:
        slot_count: slots.
        slot_stride: bytes from one slot to the next; None for that of ``batch_config``.
        read_only: True makes a segment and owns it: the student's side, which only reads samples. False attaches the
            segment ``name`` of another process: the worker's side, which writes them.
        run_id: 8 hexadecimal digits; None draws them, or takes those of ``name``.
        batch_config: what a slot holds.
        name: the segment to attach, with ``read_only=False`` only.
        directory: the teacher's directory, for files; None for the default one.
        pid: the process that must have made the segment ``name``.

    Raises:
        TypeError, ValueError: an argument that is not what it says above.
        OSError: there is no room for the slots.
        PermissionError: the segment ``name`` is not a plain one of this user alone.
        FileNotFoundError: it is gone.
    """

    medium: ClassVar[SegmentMedium]

    def __init__(
        self,
        slot_count: int,
        slot_stride: int | None = None,
        read_only: bool = True,
        run_id: str | None = None,
        *,
        batch_config: BatchConfig | None = None,
        name: str | None = None,
        directory: str | Path | None = None,
        pid: int | None = None,
    ) -> None:
        slot_count = require_positive_int(slot_count, "slot_count")
        if batch_config is not None and not isinstance(batch_config, BatchConfig):
            raise TypeError(f"batch_config={batch_config!r} must be a BatchConfig or None")
        self.batch_config = batch_config
        self.layout = None if batch_config is None else SlotLayout.of(batch_config)
        self._stride = _stride(slot_stride, self.layout)
        self._count = slot_count
        size = self._stride * slot_count
        where = slots_directory(directory) if self.medium == "file" else None
        if require_exact_bool(read_only, "read_only"):
            if name is not None or pid is not None:
                raise ValueError(f"name={name!r} is for read_only=False, which attaches it; read_only=True makes one")
            run_id = secrets.token_hex(4) if run_id is None else run_id
            self.segment = Segment.create(size, run_id=run_id, medium=self.medium, directory=where)
        else:
            if name is None:
                raise ValueError("read_only=False attaches a segment that is there; give its name=, or use attach()")
            run_id = parse_segment_name(name).run_id if run_id is None else run_id
            self.segment = Segment.attach(name, run_id=run_id, size=size, medium=self.medium, directory=where, pid=pid)
        self.run_id = run_id
        self._slots = None if self.layout is None else Slots(self.segment.buffer, self.layout, slot_count)
        if self._slots is not None and self.segment.owner:
            self._slots.initialize()

    @classmethod
    def attach(
        cls,
        name: str,
        slot_count: int,
        slot_stride: int | None = None,
        *,
        run_id: str | None = None,
        batch_config: BatchConfig | None = None,
        directory: str | Path | None = None,
        pid: int | None = None,
    ) -> Self:
        """Attach the segment ``name`` to write into it; arguments and errors as for the class."""
        return cls(
            slot_count,
            slot_stride,
            False,
            run_id,
            batch_config=batch_config,
            name=name,
            directory=directory,
            pid=pid,
        )

    @property
    def buf_name(self) -> str:
        """The segment's name, without the leading slash."""
        return self.segment.name[1:]

    @property
    def slot_count(self) -> int:
        """How many slots there are."""
        return self._count

    @property
    def slot_stride(self) -> int:
        """Bytes from one slot to the next."""
        return self._stride

    @property
    def slots(self) -> Slots:
        """The slots as their layout has them.

        Raises:
            ValueError: there is no batch config, or the medium is closed.
        """
        if self.layout is None:
            raise ValueError(f"{self.buf_name} has plain bytes in its slots; give batch_config=")
        if self._slots is None:
            raise ValueError(f"{self.buf_name} is closed")
        return self._slots

    def read_slot_tensors(self, slot_id: int) -> dict[str, torch.Tensor]:
        """Return what is in a slot: tensors over the shared memory, without a copy, which stays mapped while they live.

        They change when the slot is written again; clone what you keep. Without a batch config this is one tensor,
        ``"bytes"``, (slot_stride,) uint8.

        Raises:
            TypeError, ValueError: ``slot_id`` is not the number of a slot, or the medium is closed.
            ImportError: torch is not installed.
        """
        slot_id = require_exact_int(slot_id, "slot_id", minimum=0, maximum=self._count - 1)
        if self.layout is not None:
            return self.slots.tensor(slot_id)
        torch = optional_import("torch", extra="torch")
        plain = np.frombuffer(self.segment.buffer, np.uint8, self._stride, slot_id * self._stride)
        return {"bytes": torch.from_numpy(plain)}

    def close(self) -> None:
        """Let go of the memory; tensors over it stay valid. Idempotent."""
        self._slots = None
        self.segment.close()

    def unlink(self) -> None:
        """Take the name away, if this object made the segment. Idempotent."""
        self.segment.unlink()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
        self.unlink()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.buf_name}, {self._count} slots of {self._stride} bytes)"


class SharedMemoryManager(MediumBase):
    """Slots in POSIX shared memory; arguments and errors as for :class:`MediumBase`."""

    medium = "shm"


class FileMedium(MediumBase):
    """Slots in a mapped file of the run's directory; arguments and errors as for :class:`MediumBase`.

    For more slots than ``/dev/shm`` holds, and where containers share a directory but no shared memory.
    """

    medium = "file"


def _stride(given: int | None, layout: SlotLayout | None) -> int:
    if given is None:
        if layout is None:
            raise ValueError("slot_stride=None needs batch_config=, which says how large a slot is")
        return layout.stride
    stride = require_positive_int(given, "slot_stride")
    if layout is not None and stride != layout.stride:
        raise ValueError(f"slot_stride={stride} is not the {layout.stride} that a slot of this batch_config takes")
    return stride
