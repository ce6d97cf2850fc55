"""Tensor, pipeline and context parallelism: plans that are checked, costed and proposed before anything runs."""

from mixle.experimental.tensor_pipeline_context_parallel.hardware import HARDWARE, Hardware
from mixle.experimental.tensor_pipeline_context_parallel.memory import RankMemory
from mixle.experimental.tensor_pipeline_context_parallel.model_shape import NAMED_SHAPES, ModelShape, shape_of_size
from mixle.experimental.tensor_pipeline_context_parallel.plan import Plan
from mixle.experimental.tensor_pipeline_context_parallel.proposals import Exclusion, Proposal, Proposals
from mixle.experimental.tensor_pipeline_context_parallel.propose import propose_plans
from mixle.experimental.tensor_pipeline_context_parallel.report import PlanReport
from mixle.experimental.tensor_pipeline_context_parallel.step_time import StepTime
from mixle.experimental.tensor_pipeline_context_parallel.traffic import AxisTraffic, Traffic
from mixle.experimental.tensor_pipeline_context_parallel.validation import validate_tp_pp_cp_plan
from mixle.experimental.tensor_pipeline_context_parallel.workload import Workload

__all__ = [
    "validate_tp_pp_cp_plan",
    "PlanReport",
    "propose_plans",
    "Proposals",
    "Proposal",
    "Exclusion",
    "Plan",
    "Workload",
    "ModelShape",
    "NAMED_SHAPES",
    "shape_of_size",
    "Hardware",
    "HARDWARE",
    "RankMemory",
    "StepTime",
    "Traffic",
    "AxisTraffic",
]
