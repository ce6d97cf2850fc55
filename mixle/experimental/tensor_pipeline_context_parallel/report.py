"""What a plan means for a module: who holds what, in how many bytes, and what is sent; prints as a table."""

from __future__ import annotations

from dataclasses import dataclass

from mixle.experimental.tensor_pipeline_context_parallel.memory import RankMemory
from mixle.experimental.tensor_pipeline_context_parallel.plan import Plan
from mixle.experimental.tensor_pipeline_context_parallel.traffic import Traffic

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_MESH_AXES = ("pp", "dp", "cp", "tp")


@dataclass(frozen=True, kw_only=True)
class PlanReport:
    """A plan that fits, and what it costs. Bytes are those of one rank in one step, counted, not measured.

    Attributes:
        plan: as it will run, microbatches chosen.
        parameters: bytes on the rank that has most of them; likewise below.
        gradients: theirs.
        optimizer: AdamW's moments.
        activations: what the forward pass keeps, of all microbatches in flight; None if the module does not tell its
            widths.
        peak: the most that a rank holds at once, moments that pass included; None likewise.
        holds: for each pipeline rank, what it holds.
        by_rank: for each pipeline rank, its memory in parts; empty likewise.
        wire: bytes that the busiest rank sends along each axis; None likewise.
        bubble: the part of a step that a pipeline rank waits.
        sample_bytes: bytes of the teacher's samples that a rank takes in a step; None without samples.
        notes: what runs, but not as well as it could.
    """

    plan: Plan
    parameters: int
    gradients: int
    optimizer: int
    holds: tuple[str, ...]
    activations: int | None = None
    peak: int | None = None
    by_rank: tuple[RankMemory, ...] = ()
    wire: Traffic | None = None
    bubble: float = 0.0
    sample_bytes: int | None = None
    notes: tuple[str, ...] = ()

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return self.plan.world_size

    @property
    def mesh(self) -> dict[str, int]:
        """The mesh's axes and their sizes, outermost first."""
        return {axis: getattr(self.plan, axis) for axis in _MESH_AXES}

    def __str__(self) -> str:
        """Return the report as a table."""
        rows = [
            ("mesh", " x ".join(f"{axis} {size}" for axis, size in self.mesh.items())),
            ("ranks", str(self.world_size)),
            *((f"pipeline rank {rank}", held) for rank, held in enumerate(self.holds)),
            ("parameters per rank", readable(self.parameters)),
            ("gradients per rank", readable(self.gradients)),
            ("optimizer state per rank", readable(self.optimizer)),
            ("activations per rank", _readable_or_unknown(self.activations)),
            ("peak per rank", _readable_or_unknown(self.peak)),
        ]
        if self.wire is not None:
            rows += [
                (f"sent per step along {axis}", readable(sent.bytes))
                for axis in _MESH_AXES
                if (sent := getattr(self.wire, axis)).bytes
            ]
        if self.plan.pp > 1:
            rows += [
                ("schedule", f"{self.plan.pp_schedule}, {self.plan.microbatches} microbatches"),
                ("pipeline bubble", f"{self.bubble:.1%} of a step"),
            ]
        if self.sample_bytes is not None:
            rows.append(("samples per step and rank", readable(self.sample_bytes)))
        rows += [("note", note) for note in self.notes]
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


def readable(count: float) -> str:
    """Return a number of bytes in the unit that leaves one to four digits before the point."""
    for unit in _UNITS[:-1]:
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} {_UNITS[-1]}"


def _readable_or_unknown(count: int | None) -> str:
    return "unknown: the module does not tell its widths" if count is None else readable(count)
