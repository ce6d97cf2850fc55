"""Where the parts of a slot lie: a header, the tensors of one sample each aligned to 64 bytes, and a canary.

======================  ==========================================================================
offset                  content (little-endian)
======================  ==========================================================================
0                       token, uint64: which order the slot is of
8                       generation, uint64: of the model that the sample is wanted from
16                      length, uint64: bytes of the sample, back to back; 0 until it is complete
24                      status, uint32: 0 empty, 1 writing, 2 complete
28                      CRC-32 of the sample, uint32; 0 for none
32                      watched, uint32: 1 while the student sleeps on this word until the slot is complete
36                      zeros
64                      the tensors, in the order of the config, each from a multiple of 64
64 + ``payload_bytes``  the canary: 64 bytes that no writer may change
======================  ==========================================================================

Slot i of a segment begins at i * ``stride``, so tensor t of slots i, i + 1, ... is one strided array.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mixle.data.teacher.specs import MOST_BYTES, MOST_TENSORS, BatchConfig, TensorSpec

ALIGNMENT = 64
HEADER_BYTES = 64
CANARY = bytes.fromhex("c0ffee5a") * 16
TOKEN_AT, GENERATION_AT, LENGTH_AT, STATUS_AT, CHECKSUM_AT, WATCHED_AT = 0, 8, 16, 24, 28, 32
EMPTY, WRITING, COMPLETE = range(3)


@dataclass(frozen=True)
class Field:
    """Say where one tensor lies.

    Attributes:
        name, dtype, shape: as in its :class:`TensorSpec`.
        offset: bytes from the beginning of the slot, a multiple of 64.
        nbytes: bytes of the tensor.
        packed_offset: bytes from the beginning of an encoded sample.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    packed_offset: int


@dataclass(frozen=True)
class SlotLayout:
    """Say where the parts of a slot lie; made with :meth:`of` or :meth:`from_wire`.

    Attributes:
        config: what it holds.
        fields: where each tensor lies, in the order of the config.
        runs: (packed offset, slot offset, bytes) of the pieces that an encoded sample is copied in: neighbours that
            need no padding between them are one piece.
        packed_bytes: bytes of an encoded sample.
        payload_bytes: bytes of the tensors with their padding.
        stride: bytes from one slot to the next.
    """

    config: BatchConfig
    fields: tuple[Field, ...]
    runs: tuple[tuple[int, int, int], ...]
    packed_bytes: int
    payload_bytes: int
    stride: int

    @classmethod
    def of(cls, config: BatchConfig) -> SlotLayout:
        """Return the layout of a slot that holds one sample of ``config``."""
        fields: list[Field] = []
        runs: list[tuple[int, int, int]] = []
        offset, packed = HEADER_BYTES, 0
        for spec in config.specs:
            fields.append(Field(spec.name, spec.dtype, spec.shape, offset, spec.nbytes, packed))
            if runs and sum(runs[-1][1:]) == offset:
                runs[-1] = (*runs[-1][:2], runs[-1][2] + spec.nbytes)
            elif spec.nbytes:
                runs.append((packed, offset, spec.nbytes))
            packed += spec.nbytes
            offset += -(-spec.nbytes // ALIGNMENT) * ALIGNMENT
        return cls(config, tuple(fields), tuple(runs), packed, offset - HEADER_BYTES, offset + len(CANARY))

    def to_wire(self) -> dict[str, Any]:
        """Return what a peer needs to know of the layout, in types that msgpack has."""
        return {"fields": [[f.name, f.dtype, list(f.shape)] for f in self.fields], "stride": self.stride}

    @classmethod
    def from_wire(cls, wire: object) -> SlotLayout:
        """Return the layout that a peer means; offsets are worked out here, none is taken from the peer.

        Raises:
            ValueError: whatever :meth:`to_wire` would not have said.
        """
        if not isinstance(wire, dict) or wire.keys() != {"fields", "stride"}:
            raise ValueError(f"layout must be a map of 'fields' and 'stride', not {_short(wire)}")
        rows = wire["fields"]
        if not isinstance(rows, list) or not 0 < len(rows) <= MOST_TENSORS:
            raise ValueError(f"layout: fields must be a list of 1 to {MOST_TENSORS}, not {_short(rows)}")
        specs = []
        for row in rows:
            if not isinstance(row, list) or len(row) != 3 or not isinstance(row[2], list):
                raise ValueError(f"layout: a field must be [name, dtype, [sizes]], not {_short(row)}")
            try:
                specs.append(TensorSpec(row[0], tuple(row[2]), row[1]))
            except (TypeError, ValueError) as error:
                raise ValueError(f"layout: {str(error)[:200]}") from error
        layout = cls.of(BatchConfig(specs))
        if type(wire["stride"]) is not int or wire["stride"] != layout.stride:
            raise ValueError(f"layout: stride={_short(wire['stride'])} is not the {layout.stride} of its fields")
        return layout

    def segment_bytes(self, slot_count: int) -> int:
        """Return the bytes of ``slot_count`` slots.

        Raises:
            ValueError: they are more than 2**40.
        """
        size = self.stride * slot_count
        if size > MOST_BYTES:
            raise ValueError(f"slot_count={slot_count} slots of {self.stride} bytes are more than {MOST_BYTES} bytes")
        return size


def _short(value: object) -> str:
    text = repr(value) if isinstance(value, (int, float, str, bytes, type(None))) else type(value).__name__
    return text if len(text) <= 80 else f"{text[:77]}..."
