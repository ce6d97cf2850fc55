"""The ranks of a torch process group as the ranks of one site."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["TorchRanks"]


class TorchRanks:
    """This rank's place in a torch process group.

    Args:
        group: the group whose ranks train one model together; None is all ranks.

    Raises:
        RuntimeError: there is no process group.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        if not dist.is_initialized():
            raise RuntimeError("ranks need a torch process group; call torch.distributed.init_process_group first")
        self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)
        self._group = group
        self._first = 0 if group is None else dist.get_global_rank(group, 0)
        nccl_only = dist.get_backend(group) == "nccl"
        self._device = torch.device("cuda", torch.cuda.current_device()) if nccl_only else torch.device("cpu")

    def broadcast(self, array: NDArray[Any]) -> None:
        """Overwrite a contiguous array with rank 0's."""
        there = torch.from_numpy(array).to(self._device)
        self.broadcast_tensor(there)
        if self._device.type != "cpu":
            array[...] = there.cpu().numpy()

    def broadcast_tensor(self, tensor: Tensor) -> None:
        """Overwrite a tensor, on any device that the group serves, with rank 0's."""
        dist.broadcast(tensor.detach(), src=self._first, group=self._group)
