"""Each mechanism in one process, in plain autograd: what the ranks would hold is a list, what they send is a sum."""

from __future__ import annotations

from mixle.experimental.tensor_pipeline_context_parallel.reference.pipeline import PipelineResult, pipeline_step
from mixle.experimental.tensor_pipeline_context_parallel.reference.sequence import AttentionReceipt, sharded_attention
from mixle.experimental.tensor_pipeline_context_parallel.reference.tensor import (
    column_parallel_linear,
    head_parallel_attention,
    parallel_mlp,
    row_parallel_linear,
    tensor_parallel_logits,
    vocabulary_parallel_losses,
)

__all__ = [
    "AttentionReceipt",
    "PipelineResult",
    "column_parallel_linear",
    "head_parallel_attention",
    "parallel_mlp",
    "pipeline_step",
    "row_parallel_linear",
    "sharded_attention",
    "tensor_parallel_logits",
    "vocabulary_parallel_losses",
]
