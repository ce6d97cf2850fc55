"""A plan as the training handle sees it: who works on which replica's rows, and what trains and scores a module."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mixle.experimental.tensor_pipeline_context_parallel.engine import PlanEngine
from mixle.experimental.tensor_pipeline_context_parallel.mesh import AXES, PlanMesh
from mixle.experimental.tensor_pipeline_context_parallel.parallelize import (
    PlannedCausalLM,
    parallelize,
    parts_of,
)
from mixle.experimental.tensor_pipeline_context_parallel.plan import CpMode, Plan, PpSchedule
from mixle.experimental.tensor_pipeline_context_parallel.plan_rules import Request, refusal, resolve
from mixle.experimental.tensor_pipeline_context_parallel.validation import require_trainable, validate_tp_pp_cp_plan
from mixle.models.transformer import CausalLM
from mixle.training.next_token import NextToken, Targets, TokenTensors
from mixle.training.ranks import Ranks
from mixle.training.wrap import (
    Parallel,
    Precision,
    Sharding,
    blueprint_of,
    checkpoint_activations,
    mark_sharded,
    require_same_sharding,
    resolve_wrapping,
    sharding_of,
    start_from_rank_0,
)


@dataclass(frozen=True, kw_only=True)
class PlanExecution:
    """Train and score modules under a plan; made for one handle, whose ranks the plan covers.

    Attributes:
        plan: how many ranks share what.
        batch_size: rows of one replica in a step.
        block: tokens of a row.
        targets: ``"last"`` or ``"all"``.
        parallel, precision, activation_checkpointing: as the handle takes them.
    """

    plan: Plan
    ranks: Ranks
    batch_size: int
    block: int
    targets: Targets
    parallel: Parallel
    precision: Precision
    activation_checkpointing: bool

    @classmethod
    def of(
        cls,
        ranks: Ranks,
        *,
        tp_size: int,
        pp_size: int,
        cp_size: int,
        cp_mode: CpMode,
        microbatches: int | None,
        pp_schedule: PpSchedule,
        batch_size: int,
        block: int,
        **how: Any,
    ) -> PlanExecution:
        """Check what can be checked without a module, and settle the rest of the plan.

        In one process any plan is made, so that it can be checked against modules; fitting one under it is refused.

        Raises:
            ValueError: sizes that do not fit the ranks, the batch or the row; gives the nearest that do.
        """
        request = Request(
            tp_size=tp_size,
            pp_size=pp_size,
            cp_size=cp_size,
            world_size=ranks.world if ranks.world > 1 else None,
            batch_size=batch_size,
            microbatches=microbatches,
            block=block,
            cp_mode=cp_mode,
            pp_schedule=pp_schedule,
            n_head=None,
            n_kv_head=None,
            d_mlp=None,
            vocab=None,
            blocks=None,
            longest=None,
            dropout=None,
        )
        refused = refusal(request)
        if refused is not None:
            raise ValueError(refused)
        plan, _ = resolve(request)
        resolve_wrapping(how["parallel"], plan.dp * plan.cp, "cpu")
        return cls(plan=plan, ranks=ranks, batch_size=batch_size, block=block, **how)

    @property
    def replica(self) -> int:
        """Which data replica this rank works for."""
        return self.replica_of(self.ranks.rank)

    def replica_of(self, rank: int) -> int:
        """Return which data replica a rank works for; ranks are numbered along tp first, then cp, dp, pp."""
        return rank // (self.plan.tp * self.plan.cp) % self.plan.dp

    @property
    def replicas(self) -> int:
        """How many data replicas there are."""
        return self.plan.dp

    @property
    def speaks_for_replica(self) -> bool:
        """Whether this rank is the first of its replica: what all of a replica know is counted once."""
        place = self.ranks.rank
        inner = self.plan.tp * self.plan.cp
        return place % inner == 0 and place < inner * self.plan.dp

    def objective(self, module: nn.Module) -> NextToken:
        """Return what scores ``module`` under the plan."""
        return PlannedNextToken(self, module)

    def engine(self, module: nn.Module, device: torch.device) -> PlanEngine:
        """Take ``module`` apart in place, unless it was before, and return what trains it; a collective call.

        Raises:
            ValueError: it was taken apart in another way.
        """
        fsdp = resolve_wrapping(self.parallel, self.plan.dp * self.plan.cp, device.type) == "fsdp"
        settings: dict[str, object] = {
            "plan": str(self.plan),
            "parallel": "fsdp" if fsdp else "ddp",
            "precision": self.precision,
            "activation_checkpointing": self.activation_checkpointing,
        }
        if sharding_of(module) is not None:
            require_same_sharding(module, settings)
        else:
            self._take_apart(module, device, fsdp, settings)
        return PlanEngine(module, batch_size=self.batch_size, block=self.block)

    def _take_apart(self, module: nn.Module, device: torch.device, fsdp: bool, settings: dict[str, object]) -> None:
        assert isinstance(module, CausalLM)
        plan, blueprint = self.plan, blueprint_of(module)
        module.to(device)
        checkpoint_activations(module, self.activation_checkpointing)
        if self.ranks.world > 1:
            start_from_rank_0(module, self.ranks)
        mesh = PlanMesh.of(pp=plan.pp, dp=plan.dp, cp=plan.cp, tp=plan.tp, device_type=device.type)
        parallelize(module, plan, mesh, fsdp=fsdp, precision=self.precision)
        mark_sharded(module, Sharding(blueprint, self.ranks, settings, whole_parameters))

    def _check_parts(self, module: nn.Module) -> None:
        """Refuse a module whose parts lie elsewhere: ranks that share it would be given different rows."""
        there = parts_of(module).plan if isinstance(module, PlannedCausalLM) else None
        if there is None or any(getattr(there, axis) != getattr(self.plan, axis) for axis in AXES):
            raise ValueError(
                f"the {type(module).__name__} is sharded in another way than under the plan {self.plan}; give that of "
                "leaf.unshard() instead"
            )

    def check(self, module: nn.Module) -> None:
        """Check the plan against a module.

        Raises:
            TypeError: a module that cannot be taken apart.
            ValueError: the plan does not fit it; gives the nearest that does.
        """
        plan = self.plan
        if sharding_of(module) is not None:
            require_trainable(module)
            self._check_parts(module)
            return
        validate_tp_pp_cp_plan(
            module,
            plan.tp,
            plan.pp,
            plan.cp,
            world_size=self.ranks.world,
            batch_size=self.batch_size,
            microbatches=plan.microbatches if plan.pp > 1 else None,
            block=self.block,
            cp_mode=plan.cp_mode,
            pp_schedule=plan.pp_schedule,
        )


class PlannedNextToken(NextToken):
    """Score next tokens with a module that lies on several ranks, every call being collective, or with a dense one."""

    def __init__(self, execution: PlanExecution, module: nn.Module) -> None:
        autocast = execution.precision == "bf16" and sharding_of(module) is None
        super().__init__(module, execution.targets, autocast=autocast)
        self._execution = execution

    def vocabulary(self, module: nn.Module, block: int, device: torch.device) -> int:
        """Check the plan against the module, and return its number of token ids."""
        self._execution.check(module)
        return int(module.vocab)  # type: ignore[arg-type]

    def log_probabilities(self, call: Any, batch: TokenTensors) -> Tensor:
        """Return the log-probability of each target, (B, K) float32, on every rank; 0 where masked."""
        if sharding_of(call) is None:
            return super().log_probabilities(call, batch)
        return parts_of(call).log_probabilities(batch.inputs, batch.targets)


def whole_parameters(module: nn.Module) -> dict[str, Tensor]:
    """Return the whole parameters of a module that was taken apart, on every rank; a collective call."""
    parts = parts_of(module)
    return parts.layout.whole(parts.parameters())
