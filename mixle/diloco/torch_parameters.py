"""The trainable parameters of a torch module, as DiLoCo sees them.

On several ranks, rank 0 speaks for the site: it alone reads and writes the mailbox, and the others are brought to what
it computed. Their parameters are the same (DDP) or shards of one whole (FSDP2), so there is one delta to send, and one
process whose death or late answer the protocol must reckon with; the price is the whole fragment on rank 0's host.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from mixle.diloco.alignment import Blend, Carry, Overwrite, align
from mixle.diloco.parameters import Arrays, changed, replaced, require_apart
from mixle.diloco.serialization import DType, ParameterSpec, Schema
from mixle.diloco.torch_ranks import TorchRanks

__all__ = ["TorchParameters"]

_DTYPES: dict[torch.dtype, DType] = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
_CHECKPOINT_PREFIX = "_checkpoint_wrapped_module."


class TorchParameters:
    """The parameters of a module that require a gradient; those that do not stay where they are.

    Shared parameters travel once. Running means and variances of normalization layers are ``buffers``: sites average
    them, and a commit overwrites a site's own. Integer buffers (``num_batches_tracked``) stay each site's own. Other
    floating-point buffers in the state dict are refused, since nothing says what merging them means.

    Args:
        module: on any device, whole or sharded by FSDP2; moved in place, and not replaced while this lives.
        ranks: those that train it together; every rank makes one of these.

    Raises:
        TypeError: a trainable parameter is not float32, float16 or bfloat16; names it.
        ValueError: a buffer cannot be merged, two parameters are the same memory, or one is sharded and no ranks are
            given; names it.
    """

    def __init__(self, module: nn.Module, *, ranks: TorchRanks | None = None) -> None:
        self._ranks = ranks
        self._tensors: dict[str, Tensor] = {}
        self._module, self._places = module, dict[str, tuple[str, str]]()
        for name, parameter in module.named_parameters():
            if parameter.requires_grad:
                self._tensors[name.replace(_CHECKPOINT_PREFIX, "")] = parameter
        statistics = {n.replace(_CHECKPOINT_PREFIX, ""): buffer for n, buffer in _running_statistics(module).items()}
        self._tensors |= statistics
        self.buffers = frozenset(statistics)
        for prefix, part in module.named_modules():
            for own in (*part._parameters, *part._buffers):
                name = (f"{prefix}.{own}" if prefix else own).replace(_CHECKPOINT_PREFIX, "")
                if name in self._tensors:
                    self._places[name] = (prefix, own)
        sharded = [name for name, tensor in self._tensors.items() if isinstance(tensor, DTensor)]
        self.is_sharded = bool(sharded)
        if sharded and ranks is None:
            raise ValueError(f"{sharded[0]} is sharded over ranks; give the session ranks=TorchRanks() on each of them")
        specs = []
        for name, tensor in sorted(self._tensors.items()):
            dtype = _DTYPES.get(tensor.dtype)
            if dtype is None:
                raise TypeError(
                    f"{name} is {tensor.dtype}; DiLoCo trains float32, float16 and bfloat16 parameters: convert it, or "
                    "freeze it with requires_grad_(False)"
                )
            specs.append(ParameterSpec(name, dtype, tuple(tensor.shape)))
        self.schema = Schema(tuple(specs))
        require_apart({name: _place(tensor) for name, tensor in self._tensors.items()})
        rows = {id(p) for part in module.modules() if isinstance(part, _EMBEDDINGS) for p in part.parameters()}
        self.embeddings = frozenset(name for name, tensor in self._tensors.items() if id(tensor) in rows)

    def require_in_place(self, names: Iterable[str]) -> None:
        """Check that the module still holds the tensors that it held, as they were, and trains no others."""
        for name in names:
            tensor, found = self._tensors[name], self._found(*self._places[name])
            # Between a forward and a backward pass FSDP2 shows the gathered parameter in the place of its shard.
            gathered = isinstance(tensor, DTensor) and (
                not isinstance(found, DTensor) or found.device_mesh != tensor.device_mesh
            )
            if found is not tensor and not (gathered and found is not None):
                raise replaced(name, "tensor.copy_(value)")
            spec = self.schema.spec(name)
            if _DTYPES.get(tensor.dtype) != spec.dtype or tuple(tensor.shape) != spec.shape:
                raise changed(name, spec, f"{tensor.dtype} of shape {tuple(tensor.shape)}")
        self._require_no_others()

    def _require_no_others(self) -> None:
        for name, parameter in self._module.named_parameters():
            if parameter.requires_grad and name.replace(_CHECKPOINT_PREFIX, "") not in self._tensors:
                raise RuntimeError(
                    f"parameter {name!r} is trained since the session joined, which shares only those that were then, "
                    "so sites would go apart in it: freeze it, or make the session after unfreezing or adding it"
                )

    def _found(self, prefix: str, own: str) -> Tensor | None:
        """Return what the module holds now in a place, None if nothing."""
        try:
            return getattr(self._module.get_submodule(prefix), own, None)
        except AttributeError:
            return None

    @torch.no_grad()
    def read(self, names: Iterable[str]) -> Arrays:
        """Return copies, float32, in host memory; a collective call where they are sharded."""
        return {name: _copied(self._tensors[name]) for name in names}

    @torch.no_grad()
    def align(self, committed: Arrays, reference: Arrays, how: Carry | Overwrite | Blend) -> None:
        """Bring the parameters that ``committed`` names to it, in place, and the other ranks' to these."""
        for name, target in committed.items():
            tensor = self._tensors[name]
            whole = _whole(tensor)
            start = target if isinstance(how, Overwrite) else reference[name]
            align(whole, _like(target, whole), _like(start, whole), how)
            self._share(tensor, whole)

    @torch.no_grad()
    def follow(self, names: Iterable[str]) -> None:
        """Take the part of the other ranks in rank 0's :meth:`align` of these names."""
        for name in names:
            tensor = self._tensors[name]
            self._share(tensor, _whole(tensor))

    def _share(self, tensor: Tensor, whole: Tensor) -> None:
        """Give every rank rank 0's ``whole``, or its shard of it."""
        if isinstance(tensor, DTensor):
            shard = distribute_tensor(whole, tensor.device_mesh, tensor.placements)
            tensor.to_local().copy_(shard.to_local())
        elif self._ranks is not None:
            self._ranks.broadcast_tensor(tensor)


def _place(tensor: Tensor) -> tuple[torch.device, int] | None:
    if isinstance(tensor, DTensor) or not tensor.numel() or tensor.is_meta:
        return None
    return tensor.device, tensor.data_ptr()


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _copied(tensor: Tensor) -> np.ndarray:
    return _whole(tensor.detach()).to("cpu", torch.float32, copy=True).contiguous().numpy()


def _like(array: np.ndarray, tensor: Tensor) -> Tensor:
    return torch.from_numpy(array).to(tensor.device)


def _running_statistics(module: nn.Module) -> dict[str, Tensor]:
    """Return the running means and variances of normalization layers by name; refuse other buffers of the model."""
    statistics = {}
    kept = module.state_dict().keys()
    for prefix, part in module.named_modules():
        for name, buffer in part.named_buffers(recurse=False):
            path = f"{prefix}.{name}" if prefix else name
            if path not in kept or not buffer.is_floating_point():
                continue
            if not isinstance(part, nn.modules.batchnorm._NormBase):
                raise ValueError(
                    f"buffer {path} of a {type(part).__name__} is part of the model, and nothing says how sites would "
                    "merge it; make it a parameter, or register it with persistent=False"
                )
            statistics[path] = buffer
    return statistics
