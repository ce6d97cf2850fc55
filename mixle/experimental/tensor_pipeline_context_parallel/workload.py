"""What a step trains and in which arithmetic, as opposed to where it runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mixle.utils.exact import require_choice, require_exact_bool, require_positive_int

Precision = Literal["fp32", "bf16", "fp8"]
Recompute = Literal["none", "selective", "full"]

PRECISIONS: tuple[Precision, ...] = ("fp32", "bf16", "fp8")
RECOMPUTES: tuple[Recompute, ...] = ("none", "selective", "full")


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One optimizer step of one data replica. Parameters, gradients and AdamW's moments are float32 in any case.

    Attributes:
        batch_size: rows.
        seq_len: tokens of a row.
        precision: of matrix products; ``"fp8"`` keeps activations in bfloat16.
        recompute: ``"full"`` keeps each block's input and computes the block again in the backward pass;
            ``"selective"`` also keeps attention's output and every second matrix product's; ``"none"`` keeps all that
            backward needs.
        fsdp: data replicas shard parameters, gradients and moments, else they each hold all (DDP).
        compiled: elementwise operations are fused.
        fused_loss: the loss is one kernel, which makes no float32 copies of the logits.
        async_tp: tensor-parallel collectives are cut up and overlapped with the products beside them.
    """

    batch_size: int
    seq_len: int
    precision: Precision = "bf16"
    recompute: Recompute = "none"
    fsdp: bool = True
    compiled: bool = False
    fused_loss: bool = False
    async_tp: bool = False

    def __post_init__(self) -> None:
        for name in ("batch_size", "seq_len"):
            object.__setattr__(self, name, require_positive_int(getattr(self, name), name))
        require_choice(self.precision, "precision", PRECISIONS)
        require_choice(self.recompute, "recompute", RECOMPUTES)
        for name in ("fsdp", "compiled", "fused_loss", "async_tp"):
            require_exact_bool(getattr(self, name), name)

    @property
    def activation_bytes(self) -> int:
        """Bytes of an element of the residual stream."""
        return 4 if self.precision == "fp32" else 2
