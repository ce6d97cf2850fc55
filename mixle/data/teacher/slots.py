"""The slots of a segment as a student reads them and a worker writes them, without a copy where none is needed.

The student prepares a slot (its token and generation, empty) before it orders; the worker writes into it only while
that token and generation stand there, and says "complete" last. So what the header says is the truth about a slot,
whatever messages come late or twice. Polling the header without waiting for a message is for hosts that keep stores in
order (x86); elsewhere the message is the barrier.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from mixle.data.teacher import doorbell
from mixle.data.teacher.layout import (
    CANARY,
    CHECKSUM_AT,
    COMPLETE,
    EMPTY,
    GENERATION_AT,
    HEADER_BYTES,
    LENGTH_AT,
    STATUS_AT,
    TOKEN_AT,
    WATCHED_AT,
    WRITING,
    SlotLayout,
)
from mixle.data.teacher.messages import U64
from mixle.data.teacher.specs import Buffer, host_array, require_exact, require_names, tensor_of
from mixle.utils.optional_import import is_tensor

if TYPE_CHECKING:
    import torch

FEW = 12  # slots, up to which one after another is faster than an array operation for all
_HEADER = struct.Struct("<QQQII")
_LENGTH, _STATUS, _CHECKSUM, _WATCHED = LENGTH_AT // 8, STATUS_AT // 4, CHECKSUM_AT // 4, WATCHED_AT // 4
_CANARY_WORDS = np.frombuffer(CANARY, "<u8")


class SizeError(ValueError):
    """A sample that has not the bytes of a slot."""


class SlotReassigned(RuntimeError):  # noqa: N818  (what became of the slot, and no fault of the writer's)
    """The slot is of another order by now; nothing was written."""


class Slots:
    """Read and write the slots of a segment.

    A token counts up over the slots of an order: slot ``first + i`` has ``token + i``, modulo 2**64.

    Args:
        buffer: writable memory of at least ``slot_count * layout.stride`` bytes, aligned to 64.
        layout: of every slot.
        slot_count: how many there are.

    Raises:
        ValueError: ``buffer`` is too small or read-only.
    """

    def __init__(self, buffer: memoryview, layout: SlotLayout, slot_count: int) -> None:
        size = layout.segment_bytes(slot_count)
        if buffer.readonly or buffer.nbytes < size:
            kind = "is read-only" if buffer.readonly else f"has {buffer.nbytes} bytes"
            raise ValueError(f"slot_count={slot_count} slots of {layout.stride} bytes need {size}; the buffer {kind}")
        self.layout, self.slot_count = layout, slot_count
        self._memory = buffer.cast("B")[:size]
        self._words, self._states = self._memory.cast("Q"), self._memory.cast("I")
        self._stride, self._runs = layout.stride, layout.runs
        # Arrays over an array: one made over a memoryview keeps the memory's object, but does not keep it from closing.
        self._bytes = np.frombuffer(self._memory, np.uint8)
        self._address = self._bytes.ctypes.data
        self._tokens = self._column("<u8", TOKEN_AT)
        self._generations = self._column("<u8", GENERATION_AT)
        self._lengths = self._column("<u8", LENGTH_AT)
        self._statuses = self._column("<u4", STATUS_AT)
        self._checksums = self._column("<u4", CHECKSUM_AT)
        self._watches = self._column("<u4", WATCHED_AT)
        self._canary_at = HEADER_BYTES + layout.payload_bytes
        self._canaries = self._column("<u8", self._canary_at, (len(CANARY) // 8,))
        self._steps = np.arange(slot_count, dtype=np.uint64)
        self._specs = {spec.name: spec for spec in layout.config.specs}
        self._arrays = {
            field.name: self._column(self._specs[field.name].numpy_dtype, field.offset, field.shape)
            for field in layout.fields
        }
        self._tensors: dict[str, torch.Tensor] | None = None

    # ---- the student's side

    def initialize(self) -> None:
        """Make all slots empty and put their canaries; for who made the segment, once."""
        self.prepare(0, self.slot_count, 0, 0)
        self._canaries[...] = _CANARY_WORDS

    def prepare(self, first: int, count: int, token: int, generation: int) -> None:
        """Make slots empty and of an order, before it is sent."""
        if count <= FEW:
            for base in [self._base(slot) for slot in range(first, first + count)]:
                _HEADER.pack_into(self._memory, base, token, generation, 0, EMPTY, 0)
                token = token + 1 & U64
            return
        rows = self._rows(first, count)
        self._statuses[rows] = EMPTY
        self._tokens[rows] = self._steps[:count] + np.uint64(token)
        self._generations[rows] = generation
        self._lengths[rows] = 0
        self._checksums[rows] = 0

    def complete(self, first: int, count: int, token: int, generation: int) -> NDArray[np.bool_]:
        """Tell which slots have a whole sample of this order: (count,)."""
        rows = self._rows(first, count)
        if count == 1:
            return np.array([self.is_complete(first, token, generation)])
        done: NDArray[np.bool_] = self._statuses[rows] == COMPLETE
        if not done.any():
            return done
        done &= self._of_order(rows, count, token, generation)
        done &= self._lengths[rows] == self.layout.packed_bytes
        return done

    def is_complete(self, slot: int, token: int, generation: int) -> bool:
        """Tell :meth:`complete` of one slot, in a fraction of a microsecond."""
        base = self._base(slot)
        word = base >> 3
        return (
            self._states[(base >> 2) + _STATUS] == COMPLETE
            and self._words[word] == token
            and self._words[word + 1] == generation
            and self._words[word + _LENGTH] == self.layout.packed_bytes
        )

    def is_awaited(self, slot: int, token: int, generation: int) -> bool:
        """Tell whether a slot is of this order, and not complete."""
        base = self._base(slot)
        word = base >> 3
        return (
            self._words[word] == token
            and self._words[word + 1] == generation
            and self._states[(base >> 2) + _STATUS] != COMPLETE
        )

    def wait(self, slot: int, token: int, generation: int, timeout_s: float) -> bool:
        """Sleep until :meth:`is_complete`, or ``timeout_s``; tell whether it is. Only if ``doorbell.AVAILABLE``."""
        watched = (self._base(slot) >> 2) + _WATCHED
        self._states[watched] = 1
        if not self.is_complete(slot, token, generation):
            doorbell.sleep(self._address + 4 * watched, 1, timeout_s)
        self._states[watched] = 0
        return self.is_complete(slot, token, generation)

    def intact(self, first: int, count: int) -> NDArray[np.bool_]:
        """Tell behind which slots the canary is whole and, where there is a checksum, the sample agrees: (count,)."""
        rows = self._rows(first, count)
        if count <= FEW:
            return np.array([self.is_intact(slot) for slot in range(first, first + count)])
        same: NDArray[np.bool_] = self._canaries[rows] == _CANARY_WORDS
        whole: NDArray[np.bool_] = np.ones(count, bool)
        if not same.all():
            whole[:] = same.all(axis=1)
        if self._checksums[rows].any():
            for row in np.flatnonzero(self._checksums[rows]):
                whole[row] &= self._checksum(first + int(row)) == self._checksums[first + row]
        return whole

    def is_intact(self, slot: int) -> bool:
        """Tell :meth:`intact` of one slot, in a fraction of a microsecond where there is no checksum."""
        base = self._base(slot)
        if self._memory[base + self._canary_at : base + self.layout.stride] != CANARY:
            return False
        checksum = self._states[(base >> 2) + _CHECKSUM]
        return checksum == 0 or checksum == self._checksum(slot)

    def arrays(self, first: int, count: int) -> dict[str, NDArray[Any]]:
        """Return views of slots ``[first, first + count)``: name to an array (count, *shape), bfloat16 as uint16."""
        rows = self._rows(first, count)
        return {name: column[rows] for name, column in self._arrays.items()}

    def array(self, slot: int) -> dict[str, NDArray[Any]]:
        """Return views of one slot's sample: name to an array of its shape."""
        self._base(slot)
        return {name: column[slot, ...] for name, column in self._arrays.items()}

    def tensors(self, first: int, count: int) -> dict[str, torch.Tensor]:
        """Return :meth:`arrays` as torch tensors of the specs' dtypes over the same memory, which they keep mapped.

        Raises:
            ImportError: torch is not installed.
        """
        rows = self._rows(first, count)
        return {name: column[rows] for name, column in self._torch_columns().items()}

    def tensor(self, slot: int) -> dict[str, torch.Tensor]:
        """Return :meth:`array` as torch tensors of the specs' dtypes over the same memory, which they keep mapped."""
        self._base(slot)
        return {name: column[slot] for name, column in self._torch_columns().items()}

    # ---- the worker's side

    def write(
        self,
        slot: int,
        token: int,
        generation: int,
        sample: Buffer | Mapping[str, Any],
        *,
        checksum: bool = False,
    ) -> None:
        """Write one sample and say that it is complete.

        Args:
            slot, token, generation: as ordered.
            sample: the bytes that ``BatchConfig.encode`` gives, or for each name a tensor (on any device) or array of
                exactly the spec's shape and dtype.
            checksum: put the CRC-32, which the student then checks.

        Raises:
            SlotReassigned: the slot is not of this order.
            SizeError: bytes that are too many or too few.
            TypeError, ValueError: a sample that is neither, or a tensor that is not as its spec says.
        """
        base, words, states = self._base(slot), self._words, self._states
        word, status, size = base >> 3, (base >> 2) + _STATUS, self.layout.packed_bytes
        if words[word] != token or words[word + 1] != generation:
            self._refuse(slot, token, generation)
        if type(sample) is not bytes and isinstance(sample, Mapping):
            tensors = self._require_sample(sample, ())
            states[status] = WRITING
            for name, value in tensors.items():
                self._put(name, slot, value)
        else:
            data = sample if type(sample) is bytes else _bytes_of(sample)
            if len(data) != size:
                raise SizeError(f"the sample has {len(data)} bytes; {self._wanted()}")
            states[status] = WRITING
            for packed, offset, length in self._runs:
                start = base + offset
                piece = data if length == size else memoryview(data)[packed : packed + length]
                self._memory[start : start + length] = piece
        if checksum:
            states[(base >> 2) + _CHECKSUM] = self._checksum(slot)
        words[word + _LENGTH] = size
        states[status] = COMPLETE
        if states[(base >> 2) + _WATCHED]:
            self._ring(slot)

    def write_batch(
        self,
        first: int,
        count: int,
        token: int,
        generation: int,
        samples: Mapping[str, Any],
        *,
        checksum: bool = False,
    ) -> None:
        """Write ``count`` samples and say that they are complete; one copy for each name.

        Args:
            first, count, token, generation: as ordered.
            samples: for each name a tensor or array of exactly ``(count, *shape)`` and the spec's dtype.
            checksum: as for :meth:`write`.

        Raises:
            SlotReassigned: a slot is not of this order.
            TypeError, ValueError: samples that are not as the specs say.
        """
        rows = self._require_order(first, count, token, generation)
        if not isinstance(samples, Mapping):
            raise TypeError(f"samples must be a mapping of names to tensors, not {type(samples).__name__}")
        tensors = self._require_sample(samples, (count,))
        self._statuses[rows] = WRITING
        for name, value in tensors.items():
            self._put(name, rows, value)
        self.seal(first, count, token, generation, checksum=checksum)

    def writable(self, first: int, count: int, token: int, generation: int) -> dict[str, NDArray[Any]]:
        """Return :meth:`arrays` to be filled in place, before :meth:`seal`.

        Raises:
            SlotReassigned: a slot is not of this order.
        """
        self._statuses[self._require_order(first, count, token, generation)] = WRITING
        return self.arrays(first, count)

    def seal(self, first: int, count: int, token: int, generation: int, *, checksum: bool = False) -> None:
        """Say that slots, filled in place, are complete.

        Raises:
            SlotReassigned: a slot is not of this order; none is sealed.
        """
        rows = self._require_order(first, count, token, generation)
        if checksum:
            for slot in range(first, first + count):
                self._checksums[slot] = self._checksum(slot)
        self._lengths[rows] = self.layout.packed_bytes
        self._statuses[rows] = COMPLETE
        if self._watches[rows].any():
            for row in np.flatnonzero(self._watches[rows]):
                self._ring(first + int(row))

    # ---- private

    def _column(self, dtype: Any, offset: int, shape: tuple[int, ...] = ()) -> NDArray[Any]:
        """Return what lies at ``offset`` of every slot, (slot_count, *shape)."""
        inner = np.empty(shape, dtype).strides
        return np.ndarray((self.slot_count, *shape), dtype, self._bytes, offset, (self.layout.stride, *inner))

    def _base(self, slot: int) -> int:
        if not 0 <= slot < self.slot_count:
            raise IndexError(f"slot {slot} is not within [0, {self.slot_count})")
        return slot * self._stride

    def _rows(self, first: int, count: int) -> slice:
        if not (first >= 0 and 0 < count <= self.slot_count - first):
            raise IndexError(f"{count} slots from {first} are not within [0, {self.slot_count})")
        return slice(first, first + count)

    def _of_order(self, rows: slice, count: int, token: int, generation: int) -> NDArray[np.bool_]:
        same: NDArray[np.bool_] = self._tokens[rows] == self._steps[:count] + np.uint64(token)
        same &= self._generations[rows] == generation
        return same

    def _require_order(self, first: int, count: int, token: int, generation: int) -> slice:
        rows = self._rows(first, count)
        same = self._of_order(rows, count, token, generation)
        if not same.all():
            row = int(np.argmin(same))
            self._refuse(first + row, (token + row) % 2**64, generation)
        return rows

    def _refuse(self, slot: int, token: int, generation: int) -> None:
        raise SlotReassigned(
            f"slot {slot} is of order {self._tokens[slot]:#x} in generation {self._generations[slot]} by now, "
            f"not of {token:#x} in {generation}; nothing was written"
        )

    def _ring(self, slot: int) -> None:
        """Wake the student that sleeps until a slot is complete."""
        watched = (self._base(slot) >> 2) + _WATCHED
        self._states[watched] = 0  # a student about to sleep does not
        doorbell.ring(self._address + 4 * watched)

    def _require_sample(self, sample: Mapping[str, Any], batch: tuple[int, ...]) -> Mapping[str, Any]:
        """Return the tensors of a sample, checked; a mapping may make others each time that it is read."""
        tensors = sample if type(sample) is dict else dict(sample)
        require_names(self._specs, tensors)
        for name, value in tensors.items():
            require_exact(value, self._specs[name], (*batch, *self._specs[name].shape))
        return tensors

    def _put(self, name: str, rows: int | slice, value: Any) -> None:
        if is_tensor(value) and not value.is_cpu:
            self._torch_columns()[name][rows].copy_(value.detach())
        else:  # in host memory NumPy's copy is the C library's, which can pass the caches by
            self._arrays[name][rows] = host_array(value, self._specs[name])

    def _torch_columns(self) -> dict[str, torch.Tensor]:
        if self._tensors is None:
            import torch

            with torch.inference_mode(False):  # they outlive the mode that they are first used in
                self._tensors = {name: tensor_of(column, self._specs[name]) for name, column in self._arrays.items()}
        return self._tensors

    def _checksum(self, slot: int) -> int:
        """Return the CRC-32 of a slot's sample; 1 for 0, which stands for none."""
        base, checksum = self._base(slot), 0
        for _, offset, size in self.layout.runs:
            checksum = zlib.crc32(self._memory[base + offset : base + offset + size], checksum)
        return checksum or 1

    def _wanted(self) -> str:
        tensors = ", ".join(f"{f.name} {f.dtype}{list(f.shape)}" for f in self.layout.fields[:8])
        return f"a slot takes exactly {self.layout.packed_bytes} ({tensors})"


def _bytes_of(sample: Any) -> memoryview:
    try:
        return memoryview(sample).cast("B")
    except TypeError:
        raise TypeError(
            f"a sample must be bytes, contiguous memory or a mapping of names to tensors, not {type(sample).__name__}"
        ) from None
