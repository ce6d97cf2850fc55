"""Where each parameter of a model lies under a plan: how to make it whole, and which part of it is a rank's own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from mixle.experimental.tensor_pipeline_context_parallel.collectives import gathered
from mixle.experimental.tensor_pipeline_context_parallel.mesh import PlanMesh
from mixle.experimental.tensor_pipeline_context_parallel.plan import Plan, split_blocks
from mixle.experimental.tensor_pipeline_context_parallel.tensor_parallel import split_dim


@dataclass(frozen=True)
class Layout:
    """The parts of a model's parameters, and of what has their shapes: moments, gradients.

    Attributes:
        shapes: of the whole parameters, by name.
        dtype: of all of them.
        blocks: how many the model has.
    """

    plan: Plan
    mesh: PlanMesh
    shapes: Mapping[str, torch.Size]
    dtype: torch.dtype
    blocks: int

    def owner(self, name: str) -> int:
        """Return the pipeline rank that has a parameter; the first, of tied embeddings."""
        if name.startswith(("embedding", "position_embedding")):
            return 0
        if not name.startswith("blocks."):
            return self.plan.pp - 1
        block = int(name.split(".")[1])
        parts = split_blocks(self.blocks, self.plan.stages)
        return next(stage for stage, part in enumerate(parts) if block in part) % self.plan.pp

    def whole(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return whole copies of all parameters' tensors on every rank, from the parts that each has; collective.

        Args:
            tensors: laid out as this rank's parameters of these names are; scalars are whole already.
        """
        return {name: self._whole(name, tensors.get(name)) for name in self.shapes}

    def _whole(self, name: str, part: Tensor | None) -> Tensor:
        group, owner, tensor = self.mesh.group("pp"), self.owner(name), None
        if group.rank() == owner:
            assert part is not None
            tensor = (part.full_tensor() if isinstance(part, DTensor) else part).detach()
            dim = split_dim(name)
            if dim is not None and tensor.ndim and self.plan.tp > 1:
                tensor = gathered(tensor, dim, self.mesh.group("tp"))
            else:
                tensor = tensor.clone()
        if self.plan.pp == 1:
            assert tensor is not None
            return tensor
        return self._from(owner, name, tensor)

    def _from(self, owner: int, name: str, tensor: Tensor | None) -> Tensor:
        """Bring a whole tensor, or a scalar that goes with it, to the other stages."""
        group, device = self.mesh.group("pp"), self.mesh.device
        is_scalar = torch.tensor([tensor is not None and tensor.ndim == 0], device=device)
        dist.broadcast(is_scalar, group=group, group_src=owner)
        if tensor is not None:
            sent = tensor.to(device).contiguous()
        elif is_scalar.item():
            sent = torch.empty((), device=device)
        else:
            sent = torch.empty(self.shapes[name], dtype=self.dtype, device=device)
        dist.broadcast(sent, group=group, group_src=owner)
        return sent

    def part(self, tensor: Tensor, parameter: nn.Parameter, name: str) -> Tensor:
        """Return this rank's part of a whole tensor, laid out as its parameter ``name``; collective under FSDP2.

        Raises:
            ValueError: it has not the shape of the whole parameter.
        """
        if tensor.shape != self.shapes[name]:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}, its parameter {tuple(self.shapes[name])}")
        dim = split_dim(name)
        if dim is not None:
            tensor = tensor.chunk(self.plan.tp, dim)[self.mesh.rank("tp")]
        tensor = tensor.detach().to(device=parameter.device, dtype=parameter.dtype, copy=True).contiguous()
        if isinstance(parameter, DTensor):
            tensor = distribute_tensor(tensor, parameter.device_mesh, parameter.placements)
        return tensor
