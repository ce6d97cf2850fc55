"""The ranks of a job as one mesh of four axes: pipeline, data, context, tensor, the last the closest together.

Tensor ranks exchange most, so they are neighbours; pipeline stages exchange least, so they are farthest apart.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

AXES = ("pp", "dp", "cp", "tp")
_DATA = "dp_cp"
_known: WeakKeyDictionary[Any, dict[tuple[str, tuple[int, ...]], PlanMesh]] = WeakKeyDictionary()


@dataclass(frozen=True)
class PlanMesh:
    """This rank's place on the mesh. A collective call makes one; all ranks make the same.

    Attributes:
        device_mesh: with dimensions ``pp``, ``dp``, ``cp``, ``tp``.
        data: the mesh of the ranks that hold the same parameters: ``dp`` and ``cp``, one dimension.
    """

    device_mesh: DeviceMesh
    data: DeviceMesh

    @classmethod
    def of(cls, *, pp: int, dp: int, cp: int, tp: int, device_type: str) -> PlanMesh:
        """Return the mesh of these sizes over all ranks; making one makes process groups, so it is kept.

        Raises:
            ValueError: the sizes' product is not the number of ranks.
        """
        sizes, world = (pp, dp, cp, tp), dist.get_world_size()
        if pp * dp * cp * tp != world:
            raise ValueError(f"pp={pp} * dp={dp} * cp={cp} * tp={tp} must be the {world} ranks")
        meshes = _known.setdefault(dist.group.WORLD, {})
        if (device_type, sizes) not in meshes:
            mesh = init_device_mesh(device_type, sizes, mesh_dim_names=AXES)
            meshes[device_type, sizes] = cls(mesh, mesh["dp", "cp"]._flatten(_DATA))
        return meshes[device_type, sizes]

    @property
    def device(self) -> torch.device:
        """Where this rank's tensors are when they travel."""
        if self.device_mesh.device_type == "cuda":
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device(self.device_mesh.device_type)

    def size(self, axis: str) -> int:
        """Return how many ranks an axis has."""
        return self.device_mesh.size(AXES.index(axis))

    def rank(self, axis: str) -> int:
        """Return this rank's place on an axis."""
        return self.device_mesh.get_local_rank(axis)

    def group(self, axis: str) -> ProcessGroup:
        """Return the process group of the ranks that differ from this one on an axis only."""
        return self.device_mesh.get_group(axis)
