"""Torch modules and the leaves that make them distributions."""

from __future__ import annotations

from mixle.utils.optional_import import optional_import

optional_import("torch", extra="torch")  # before a submodule fails to import it with an error that names no extra

from mixle.models.distillation import (  # noqa: E402
    DistillationEstimator,
    DistillationLeaf,
    DistillationLoss,
    HiddenStates,
    SoftLabels,
)
from mixle.models.streaming_transformer_leaf import (  # noqa: E402
    StreamingTransformerLeaf,
    StreamingTransformerLeafEstimator,
    StreamingTransformerLeafSampler,
)
from mixle.models.transformer import CausalLM  # noqa: E402

__all__ = [
    "CausalLM",
    "DistillationEstimator",
    "DistillationLeaf",
    "DistillationLoss",
    "SoftLabels",
    "HiddenStates",
    "StreamingTransformerLeaf",
    "StreamingTransformerLeafEstimator",
    "StreamingTransformerLeafSampler",
]
