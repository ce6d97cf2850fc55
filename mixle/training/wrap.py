"""Make a module trainable by data-parallel ranks: every rank starts from rank 0's parameters, replicated or sharded."""

from __future__ import annotations

import copy
import hashlib
import inspect
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper, checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from mixle.training.ranks import Ranks

Parallel = Literal["auto", "ddp", "fsdp", "none"]
Precision = Literal["fp32", "bf16"]
Wrapping = Literal["plain", "ddp", "fsdp"]

_SHARDING = "_mixle_sharding"
_CHECKPOINT_PREFIX = "_checkpoint_wrapped_module."


@dataclass(frozen=True)
class Sharding:
    """How a module was sharded; stays with the module.

    Attributes:
        blueprint: the module before, its parameters without storage.
        ranks: those that hold a shard each.
        settings: what a handle that goes on with the module must have asked for too, by name.
        whole: returns the module's whole parameters by name; a collective call.
    """

    blueprint: nn.Module
    ranks: Ranks
    settings: Mapping[str, object]
    whole: Callable[[nn.Module], dict[str, Tensor]]


def sharding_of(module: nn.Module) -> Sharding | None:
    """Return how :func:`wrap` sharded ``module``, None if it did not."""
    return module.__dict__.get(_SHARDING)


def mark_sharded(module: nn.Module, sharding: Sharding) -> None:
    """Leave on ``module`` how it was sharded."""
    module.__dict__[_SHARDING] = sharding


def resolve_device(device: object) -> torch.device:
    """Return the device of this rank: plain ``"cuda"`` is ``cuda:LOCAL_RANK``.

    Raises:
        TypeError, ValueError: not a device, one that this machine lacks, or one GPU named for several local ranks.
    """
    try:
        resolved = torch.device(device)  # type: ignore[call-overload]
    except TypeError:
        raise TypeError(f"device={device!r} must be a string or a torch.device") from None
    except RuntimeError as error:
        raise ValueError(f"device={device!r} is not a device of torch: {str(error).splitlines()[0]}") from None
    if resolved.type != "cuda":
        return resolved
    if not torch.cuda.is_available():
        raise ValueError(f'device={str(device)!r} needs CUDA, which torch does not see here; device="cpu" works')
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if resolved.index is None:
        return torch.device("cuda", int(os.environ["LOCAL_RANK"]) if local_ranks > 1 else torch.cuda.current_device())
    if local_ranks > 1:
        raise ValueError(f'device={str(device)!r} puts all {local_ranks} local ranks on one GPU; give device="cuda"')
    return resolved


def resolve_wrapping(parallel: Parallel, world: int, device_type: str) -> Wrapping:
    """Return what ``parallel`` stands for on these ranks and this device.

    Raises:
        ValueError: ``"none"`` on several ranks, which would train apart.
    """
    if parallel == "auto":
        if world == 1:
            return "plain"
        return "fsdp" if device_type == "cuda" else "ddp"
    if parallel == "none":
        if world > 1:
            raise ValueError(
                f'parallel="none" on {world} ranks would train {world} models apart; use "auto", "ddp" or "fsdp"'
            )
        return "plain"
    return parallel


def named_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters under the names that they have in ``state_dict()``, tied ones once."""
    return {name.replace(_CHECKPOINT_PREFIX, ""): p for name, p in module.named_parameters()}


def named_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Return the buffers, likewise."""
    return {name.replace(_CHECKPOINT_PREFIX, ""): buffer for name, buffer in module.named_buffers()}


def wrap(
    module: nn.Module,
    *,
    wrapping: Wrapping,
    ranks: Ranks,
    device: torch.device,
    precision: Precision,
    activation_checkpointing: bool,
) -> Callable[..., Tensor]:
    """Prepare ``module`` in place and return what to call in a training step: it, or a DDP wrapper of it.

    A module that was sharded before is taken as it is. Replicas look at which parameters each forward pass used, unless
    the module's class itself has ``uses_all_parameters = True``.

    Raises:
        ValueError: no parameter to train, no ``blocks`` to checkpoint, modules that differ between ranks, or a module
            that was sharded otherwise.
    """
    settings = {"parallel": wrapping, "precision": precision, "activation_checkpointing": activation_checkpointing}
    if sharding_of(module) is not None or isinstance(module, FSDPModule):
        require_same_sharding(module, settings)
        return module
    trainable = [p for p in module.parameters() if p.requires_grad]
    error = None if trainable else ValueError(f"{type(module).__name__} has no parameter that requires a gradient")
    ranks.agree("checking the module", error)
    module.to(device)
    checkpoint_activations(module, activation_checkpointing)
    if ranks.world > 1:
        start_from_rank_0(module, ranks)
    if wrapping == "ddp":
        return replicate(module, device, conditional=vars(type(module)).get("uses_all_parameters") is not True)
    if wrapping == "fsdp":
        _shard(module, ranks, device, precision, settings)
    return module


def blocks_of(module: nn.Module) -> nn.ModuleList | None:
    """Return the module's ``blocks``, the units of sharding and of activation checkpointing, if it has them."""
    blocks = getattr(module, "blocks", None)
    return blocks if isinstance(blocks, nn.ModuleList) else None


def require_same_sharding(module: nn.Module, settings: Mapping[str, object]) -> None:
    """Refuse a module that was sharded otherwise; wait for the other ranks that hold shards of it.

    Raises:
        ValueError: another setting, or the module was sharded by something else.
    """
    sharding = sharding_of(module)
    if sharding is None:
        raise ValueError(f"{type(module).__name__} is sharded already, and not by mixle; give the dense module")
    sharding.ranks.meet("fitting a sharded module")
    for name in sorted(sharding.settings.keys() | settings.keys()):
        asked, there = settings.get(name), sharding.settings.get(name)
        if asked != there:
            raise ValueError(
                f"{name}={asked!r} does not fit a module that is sharded with {name}={there!r}; "
                "fit the module of leaf.unshard() instead"
            )


def refuse_replaced_parameters(module: nn.Module) -> None:
    """Refuse parameters that came into a sharded module since: FSDP2 would put the old ones back without a word.

    Raises:
        ValueError: names one.
    """
    if not isinstance(module, FSDPModule):
        return
    for name, p in named_parameters(module).items():
        if not isinstance(p, DTensor):
            raise ValueError(
                f"{name} of a sharded module was replaced by a parameter that is not sharded; replace it in the "
                "module of leaf.unshard() and fit that"
            )


def refuse_planned(module: nn.Module) -> None:
    """Refuse a module whose ranks share rows, where each rank brings rows of its own.

    Raises:
        ValueError: names the plan that took it apart.
    """
    sharding = sharding_of(module)
    if sharding is not None and "plan" in sharding.settings:
        raise ValueError(
            f"the {type(module).__name__} is sharded under the plan {sharding.settings['plan']}, and the handle has "
            "none; give that of leaf.unshard() instead"
        )


def checkpoint_activations(module: nn.Module, wanted: bool) -> None:
    """Give every block one checkpoint wrapper, or none."""
    blocks = blocks_of(module)
    if blocks is None:
        if wanted:
            raise ValueError(
                f"activation_checkpointing=True needs a module with an nn.ModuleList named blocks, which "
                f"{type(module).__name__} lacks"
            )
        return
    for i, block in enumerate(blocks):
        if wanted and not isinstance(block, CheckpointWrapper):
            blocks[i] = checkpoint_wrapper(block)
        elif not wanted and isinstance(block, CheckpointWrapper):
            blocks[i] = block._checkpoint_wrapped_module


def start_from_rank_0(module: nn.Module, ranks: Ranks) -> None:
    """Overwrite parameters and buffers with rank 0's, after checking that they have the same names and shapes."""
    tensors: dict[str, Tensor] = {**named_parameters(module), **named_buffers(module)}
    described = "\n".join(f"{name} {tuple(t.shape)} {t.dtype}" for name, t in tensors.items())
    digests = ranks.exchange("comparing the module", hashlib.sha256(described.encode()).hexdigest())
    others = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
    if others:
        raise ValueError(f"the modules of ranks {', '.join(map(str, others))} differ from rank 0's in names or shapes")
    for tensor in tensors.values():
        dist.broadcast(tensor.detach(), src=0)


def replicate(
    module: nn.Module, device: torch.device, group: dist.ProcessGroup | None = None, *, conditional: bool = False
) -> DistributedDataParallel:
    """Return a DDP wrapper over a group's ranks, all by default, which have the same parameters already.

    Args:
        conditional: a forward pass may leave parameters out; one that all ranks leave out has no gradient.
    """
    takes = inspect.signature(DistributedDataParallel.__init__).parameters
    in_forward = "forward_sync_buffers" if "forward_sync_buffers" in takes else "broadcast_buffers"  # before torch 2.13
    flags: dict[str, Any] = {in_forward: False, "init_sync": False, "gradient_as_bucket_view": True}
    flags["find_unused_parameters"] = conditional
    ids = [device.index] if device.type == "cuda" else None
    return DistributedDataParallel(module, device_ids=ids, process_group=group, **flags)


def _shard(
    module: nn.Module, ranks: Ranks, device: torch.device, precision: Precision, settings: Mapping[str, object]
) -> None:
    sharding = Sharding(blueprint_of(module), ranks, settings, _whole_parameters)
    mesh = init_device_mesh(device.type, (ranks.world,))
    policy = MixedPrecisionPolicy()
    if precision == "bf16":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in blocks_of(module) or ():
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(module, mesh=mesh, mp_policy=policy)
    mark_sharded(module, sharding)


def _whole_parameters(module: nn.Module) -> dict[str, Tensor]:
    return {name: p.full_tensor() for name, p in named_parameters(module).items() if isinstance(p, DTensor)}


def blueprint_of(module: nn.Module) -> nn.Module:
    """Copy a module without the storage of its parameters."""
    hollow = {id(p): nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad) for p in module.parameters()}
    return copy.deepcopy(module, hollow)


def unsharded(module: nn.Module) -> nn.Module:
    """Return a dense module equal to a sharded one; a collective call."""
    sharding = sharding_of(module)
    assert sharding is not None
    dense = copy.deepcopy(sharding.blueprint)
    whole = sharding.whole(module)
    hollow = named_parameters(dense)
    real = {id(hollow[name]): nn.Parameter(whole[name].detach(), p.requires_grad) for name, p in hollow.items()}
    for part in dense.modules():
        for name, p in part._parameters.items():
            if p is not None:
                part._parameters[name] = real[id(p)]
    for old, new in zip(module.buffers(), dense.buffers(), strict=True):
        new.copy_(old)
    dense.train(module.training)
    return dense
