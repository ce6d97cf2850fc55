"""In which dtype each payload of an algorithm travels, and what error feedback keeps is stored."""

from __future__ import annotations

from dataclasses import dataclass

from mixle.diloco.algorithm import DiLoCo
from mixle.diloco.tensor_codec import WireDType

__all__ = ["Wire"]


@dataclass(frozen=True)
class Wire:
    """The dtypes of a run; ``commit`` is None where a round publishes its parameters alone.

    Without a quantized update the published parameters are the outer optimizer's own, and travel in their dtype. With
    one they are float32, so that adding the update to them is exact, and the optimizer's own travel beside them.
    """

    delta: WireDType
    theta: WireDType
    master: WireDType
    momentum: WireDType
    residual: WireDType
    commit: WireDType | None

    @classmethod
    def of(cls, algorithm: DiLoCo) -> Wire:
        master: WireDType = algorithm.master_dtype or "F32"
        return cls(
            delta=algorithm.delta_dtype or "F32",
            theta=master if algorithm.commit_dtype is None else "F32",
            master=master,
            momentum=algorithm.momentum_dtype or "F32",
            residual=algorithm.residual_dtype or "F32",
            commit=algorithm.commit_dtype,
        )
