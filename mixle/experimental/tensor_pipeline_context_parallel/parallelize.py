"""Turn a model into this rank's part of it, in place, as ``fully_shard`` does: same object, same parameter names."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from mixle.experimental.tensor_pipeline_context_parallel.context_parallel import attention_over
from mixle.experimental.tensor_pipeline_context_parallel.layout import Layout
from mixle.experimental.tensor_pipeline_context_parallel.mesh import PlanMesh
from mixle.experimental.tensor_pipeline_context_parallel.parts import Parts
from mixle.experimental.tensor_pipeline_context_parallel.plan import Plan, split_blocks
from mixle.experimental.tensor_pipeline_context_parallel.stage import Stage
from mixle.experimental.tensor_pipeline_context_parallel.tensor_parallel import split_over
from mixle.models.transformer import CausalLM
from mixle.training.wrap import Precision, named_parameters

_PARTS = "_mixle_parts"


class PlannedCausalLM(CausalLM):
    """A :class:`CausalLM` of which this rank holds a part. Calling it is a collective call."""

    def forward(self, ids: Tensor, positions: Tensor | None = None, *, last_only: bool = False) -> Tensor:
        """Return whole logits on every rank, as the dense model does, but without gradients.

        Raises:
            ValueError: positions, which the plan deals out; and as the dense model.
        """
        if positions is not None:
            raise ValueError("positions are dealt out by the plan; give ids only")
        self._check_ids(ids)
        with torch.no_grad():
            return parts_of(self).logits(ids, last_only=last_only)

    def _tie(self) -> None:
        """Tied embeddings are kept equal by training: their two places may be on two ranks."""


def parts_of(module: nn.Module) -> Parts:
    """Return what this rank has of a module that :func:`parallelize` took apart.

    Raises:
        TypeError: it is another module.
    """
    if not isinstance(module, PlannedCausalLM):
        raise TypeError(f"{type(module).__name__} has not been parallelized")
    parts: Parts = module.__dict__[_PARTS]
    return parts


def parallelize(model: CausalLM, plan: Plan, mesh: PlanMesh, *, fsdp: bool, precision: Precision) -> Parts:
    """Leave in ``model`` this rank's part under ``plan``, in place; all ranks' models are equal before.

    Args:
        fsdp: share the parameters out over the data and context axes (FSDP2); replicate them otherwise.

    Raises:
        ValueError: dropout of attention weights with ``cp_mode="ring"``.
    """
    if plan.cp > 1:
        blocks: list[Any] = list(model.blocks)
        for block in blocks:
            block.attention.attend = attention_over(mesh.group("cp"), plan.cp_mode, model.dropout)
    shapes = {name: p.shape for name, p in named_parameters(model).items()}
    dtype = model.norm.weight.dtype
    layout = Layout(plan, mesh, shapes, dtype, len(model.blocks))
    split_over(model, mesh.group("tp"))
    stages = _stages(model, plan, mesh, autocast=precision == "bf16" and not fsdp)
    if fsdp:
        dtype = torch.bfloat16 if precision == "bf16" else dtype
        for stage in stages:
            _share_out(stage, mesh, precision, in_pipeline=plan.pp > 1)
    parts = Parts(plan, mesh, stages, layout, fsdp, dtype, model.tie_embeddings)
    _keep_only(model, stages)
    model.__class__ = PlannedCausalLM
    model.__dict__[_PARTS] = parts
    return parts


def _stages(model: CausalLM, plan: Plan, mesh: PlanMesh, *, autocast: bool) -> tuple[Stage, ...]:
    blocks = split_blocks(len(model.blocks), plan.stages)
    return tuple(
        Stage(
            model,
            blocks[index],
            tensor=mesh.group("tp") if plan.tp > 1 else None,
            context=mesh.group("cp") if plan.cp > 1 else None,
            mode=plan.cp_mode,
            autocast=autocast,
        )
        for index in plan.stages_of(mesh.rank("pp"))
    )


def _share_out(stage: Stage, mesh: PlanMesh, precision: Precision, *, in_pipeline: bool) -> None:
    policy = MixedPrecisionPolicy()
    if precision == "bf16":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    # In a pipeline a stage stays gathered from its first microbatch to its last: gathering it for each would cost more
    # than it saves, and a backward pass that is split in two finds its parameters only if they are there.
    for part in (*stage.blocks.values(), stage):
        fully_shard(part, mesh=mesh.data, mp_policy=policy, reshard_after_forward=not in_pipeline)


def _keep_only(model: CausalLM, stages: tuple[Stage, ...]) -> None:
    kept = {index: block for stage in stages for index, block in stage.blocks.items()}
    model.blocks = nn.ModuleDict(kept)  # type: ignore[assignment]
    for name in ("embedding", "position_embedding", "norm", "head"):
        owned = [part for stage in stages if (part := getattr(stage, name)) is not None]
        setattr(model, name, owned[0] if owned else None)
