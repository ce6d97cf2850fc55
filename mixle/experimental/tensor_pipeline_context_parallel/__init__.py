"""Tensor, pipeline and context parallelism: plans that are checked against a module before anything runs."""

from mixle.experimental.tensor_pipeline_context_parallel.validation import validate_tp_pp_cp_plan

__all__ = ["validate_tp_pp_cp_plan"]
