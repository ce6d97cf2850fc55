"""A leaf on disk and in JSON: a description in JSON, tensors in safetensors, nothing pickled.

A saved leaf is a directory with ``leaf.json`` and the safetensors files that it names. Their names hold the SHA-256 of
their bytes, and ``leaf.json`` is replaced last, in one move: a reader finds the old leaf or the new one, whole. Writers
take turns by a lock on ``.lock``, and each removes what the one before left.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
import math
import os
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from mixle.training.optimizer import SLOTS, Moments, OptimizerOptions, OptimizerState
from mixle.training.state import StepRecord, TrainingState
from mixle.training.wrap import named_buffers, named_parameters
from mixle.utils.exact import require_exact_bool, require_finite_float, require_nonnegative_int
from mixle.utils.optional_import import optional_import
from mixle.utils.whole_file import locked, replace_file

if TYPE_CHECKING:
    from mixle.models.streaming_transformer_leaf import StreamingTransformerLeaf

DESCRIPTION = "leaf.json"
FORMAT = "mixle leaf, version 1"
LOCK = ".lock"
TENSOR_FILE = re.compile(r"(module|moments)-[0-9a-f]{64}\.safetensors")
WRITTEN = rf"{TENSOR_FILE.pattern}|{re.escape(DESCRIPTION)}"
LEFT_OVER = re.compile(rf"{TENSOR_FILE.pattern}|\.({WRITTEN})\.[0-9a-f]{{16}}\.partial")
READS = 10
NOT_FINITE = ("nan", "inf", "-inf")
LARGEST_FREE_SIZE = 2**24
PARTS_PER_TENSOR = 32
COUNTERS = ("step", "epoch", "epoch_step", "skipped", "revision")


def write(path: str | os.PathLike[str], leaf: StreamingTransformerLeaf) -> None:
    """Write a dense leaf into the directory ``path``, over the one that is there."""
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    moments = {
        f"{name}/{slot}": value for name, slots in leaf.state.optimizer.dense().items() for slot, value in slots.items()
    }
    described = _describe(leaf)
    parts = {"module": _serialized(_state_of(leaf.module))}
    if moments:
        parts["moments"] = _serialized(moments)
    names = {part: f"{part}-{hashlib.sha256(data).hexdigest()}.safetensors" for part, data in parts.items()}
    described["files"] = names
    with locked(folder / LOCK):
        for part, data in parts.items():
            replace_file(folder / names[part], data)
        replace_file(folder / DESCRIPTION, json.dumps(described, indent=1, allow_nan=False).encode())
        # Under the lock nothing is being written, so all else that a save can have left is of the leaf before, or of a
        # save that was cut short.
        for entry in folder.iterdir():
            if LEFT_OVER.fullmatch(entry.name) and entry.name not in names.values():
                entry.unlink(missing_ok=True)


def read(path: str | os.PathLike[str], module: nn.Module | None) -> tuple[nn.Module, OptimizerOptions, TrainingState]:
    """Return what :func:`write` wrote, the parameters in ``module`` if it is given.

    Raises:
        FileNotFoundError: no leaf is there, or a file that it names is gone.
        ValueError: what is there cannot have been written by :func:`write`, or does not fit ``module``.
    """
    folder = Path(path)
    described, tensors = _read_whole(folder)
    return _restore(described, tensors["module"], tensors.get("moments", {}), module, str(folder))


def _read_whole(folder: Path) -> tuple[dict[str, Any], dict[str, dict[str, Tensor]]]:
    """Return a description and its tensors, of one leaf even while others are saved over it."""
    for _ in range(READS):
        if not (folder / DESCRIPTION).is_file():
            raise FileNotFoundError(f"{folder} holds no saved leaf: there is no {DESCRIPTION} in it")
        data = (folder / DESCRIPTION).read_bytes()
        described = _parse(data, f"{folder / DESCRIPTION}")
        files = described.get("files")
        if not isinstance(files, dict) or "module" not in files or not files.keys() <= {"module", "moments"}:
            raise ValueError(f"{folder / DESCRIPTION} names files {files!r:.80}, not those of a module and its moments")
        try:
            return described, {part: _read_tensors(folder, part, name) for part, name in files.items()}
        except FileNotFoundError:
            if (folder / DESCRIPTION).read_bytes() == data:
                raise
    raise FileNotFoundError(f"{folder} was saved over {READS} times while it was read; load it when that is done")


def to_dict(leaf: StreamingTransformerLeaf) -> dict[str, Any]:
    """Return a dense leaf without its optimizer's moments, as JSON can carry it.

    Raises:
        TypeError: the module has no ``config`` and ``from_config`` to be built again from.
    """
    described = _describe(leaf)
    if described["config"] is None:
        raise TypeError(
            f"{type(leaf.module).__name__} has no config and from_config to build it again from; use leaf.save(path)"
        )
    described["weights"] = base64.b64encode(_serialized(_state_of(leaf.module))).decode()
    return described


def from_dict(payload: dict[str, Any]) -> tuple[nn.Module, OptimizerOptions, TrainingState]:
    """Return what :func:`to_dict` put in."""
    tensors = _parsed_tensors(base64.b64decode(payload["weights"], validate=True), "weights")
    return _restore(payload, tensors, {}, None, "payload")


def _describe(leaf: StreamingTransformerLeaf) -> dict[str, Any]:
    module, state = leaf.module, leaf.state
    rebuildable = hasattr(module, "config") and hasattr(type(module), "from_config")
    return {
        "format": FORMAT,
        "class": f"{type(module).__module__}:{type(module).__qualname__}",
        "config": module.config if rebuildable else None,
        "optimizer": dataclasses.asdict(leaf.options),
        "training": {name: getattr(state, name) for name in COUNTERS},
        "history": [{key: _to_json(value) for key, value in record.to_dict().items()} for record in leaf.history],
    }


def _restore(
    described: dict[str, Any],
    tensors: dict[str, Tensor],
    moments: dict[str, Tensor],
    module: nn.Module | None,
    where: str,
) -> tuple[nn.Module, OptimizerOptions, TrainingState]:
    """Build everything that is described, and only then overwrite the module."""
    try:
        given = described["optimizer"]
        betas = given["betas"]
        options = OptimizerOptions(**{**given, "betas": betas if betas is None else tuple(betas)})
        state = TrainingState()
        for name in COUNTERS:
            setattr(state, name, require_nonnegative_int(described["training"][name], name))
        state.history.extend(map(_record, described["history"]))
        kind, config = described["class"], described["config"]
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"{where} is not a leaf's description: {type(error).__name__}: {error}") from error
    found = _rebuild(kind, config, tensors, where) if module is None else module
    own = _require_fit(found, tensors, where)
    if moments:
        kind = options.optimizer
        state.optimizer = OptimizerState(kind, _moments(moments, kind, named_parameters(found), where))
    with torch.no_grad():
        for name, tensor in tensors.items():
            own[name].copy_(tensor)
    return found, options, state


def _rebuild(name: str, config: dict[str, Any] | None, tensors: dict[str, Tensor], where: str) -> nn.Module:
    """Build the module that a description names; only a class that is imported already can be named."""
    import mixle.models.transformer  # noqa: F401  (so that its class can)

    place, _, kind = name.partition(":") if isinstance(name, str) else ("", "", "")
    found: Any = getattr(sys.modules.get(place), kind, None)
    is_module = isinstance(found, type) and issubclass(found, nn.Module) and hasattr(found, "from_config")
    if config is None or not is_module:
        raise ValueError(f"a {name} cannot be built from the description; import its class, or pass module=")
    try:
        _require_sizes(config, sum(tensor.numel() for tensor in tensors.values()))
        with torch.device("meta"), _at_most(len(tensors)):  # a false config is found out before it takes time or memory
            trial: nn.Module = found.from_config(config)
    except (KeyError, TypeError, AttributeError, ValueError, RuntimeError, OverflowError) as error:
        raise ValueError(f"{where} does not build a {name} with its config: {type(error).__name__}: {error}") from error
    _require_fit(trial, tensors, where)
    built: nn.Module = found.from_config(config)
    return built


def _require_sizes(config: object, elements: int) -> None:
    """Refuse a size that no module of so many elements has; some, such as a longest sequence, need not be in any."""
    if isinstance(config, int) and abs(config) > max(elements, LARGEST_FREE_SIZE):
        raise ValueError(f"{config} is too large for the {elements} elements that are saved")
    if isinstance(config, (dict, list)):
        for value in config.values() if isinstance(config, dict) else config:
            _require_sizes(value, elements)


@contextmanager
def _at_most(tensors: int) -> Iterator[None]:
    """Stop the building of a module in this thread once it has far more parts than ``tensors`` tensors can fill.

    Tied parameters are made before they are tied, and modules without parameters count too: hence the margin.
    """
    thread, made, limit = threading.get_ident(), 0, PARTS_PER_TENSOR * (tensors + 16)

    def count(*_: object) -> None:
        nonlocal made
        made += threading.get_ident() == thread
        if made > limit and threading.get_ident() == thread:
            raise ValueError(f"it has more than {limit} parameters and modules, for {tensors} tensors that are saved")

    hooks = [register_module_parameter_registration_hook(count), register_module_module_registration_hook(count)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _state_of(module: nn.Module) -> dict[str, Tensor]:
    """Return the parameters, tied ones once, and the buffers that are part of the model, by name."""
    saved = module.state_dict().keys()
    buffers = {name: buffer for name, buffer in named_buffers(module).items() if name in saved}
    return {**named_parameters(module), **buffers}


def _require_fit(module: nn.Module, tensors: dict[str, Tensor], where: str) -> dict[str, Tensor]:
    """Return what the tensors are to overwrite, after checking that all fit."""
    own = _state_of(module)
    odd = sorted(own.keys() ^ tensors.keys())
    if odd:
        side = f"{where} lacks" if odd[0] in own else f"{type(module).__name__} has no"
        raise ValueError(f"{where} does not fit {type(module).__name__}: {side} {odd[0]!r}")
    for name, tensor in tensors.items():
        if tensor.shape != own[name].shape or tensor.dtype != own[name].dtype:
            raise ValueError(
                f"{where} has {name!r} of shape {tuple(tensor.shape)} and {tensor.dtype}, "
                f"{type(module).__name__} of {tuple(own[name].shape)} and {own[name].dtype}"
            )
    return own


def _moments(tensors: dict[str, Tensor], kind: str, parameters: dict[str, nn.Parameter], where: str) -> Moments:
    moments: Moments = {}
    for key, tensor in tensors.items():
        name, _, slot = key.rpartition("/")
        if name not in parameters or slot not in SLOTS[kind]:
            raise ValueError(f"{where} has a moment {key!r}, which no parameter of the module has under {kind!r}")
        shape = () if slot == "step" else tuple(parameters[name].shape)
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{where} has the moment {key!r} of shape {tuple(tensor.shape)}, not {shape}")
        moments.setdefault(name, {})[slot] = tensor
    return moments


# ---- files


def _safetensors() -> Any:
    return optional_import("safetensors.torch", extra="torch")


def _serialized(tensors: dict[str, Tensor]) -> bytes:
    data = _safetensors().save({name: t.detach().cpu().contiguous() for name, t in tensors.items()})
    assert isinstance(data, bytes)
    return data


def _read_tensors(folder: Path, part: str, name: object) -> dict[str, Tensor]:
    if not isinstance(name, str) or not TENSOR_FILE.fullmatch(name) or not name.startswith(part):
        raise ValueError(f"{folder / DESCRIPTION} names {name!r:.80} as its {part} file, which no leaf is written to")
    try:
        data = (folder / name).read_bytes()
    except FileNotFoundError:
        raise FileNotFoundError(f"{folder} is incomplete: {name} is gone") from None
    if hashlib.sha256(data).hexdigest() not in name:
        raise ValueError(f"{folder / name} is damaged: its bytes have another hash than its name")
    return _parsed_tensors(data, str(folder / name))


def _parsed_tensors(data: bytes, where: str) -> dict[str, Tensor]:
    error_type: type[Exception] = optional_import("safetensors", extra="torch").SafetensorError
    try:
        tensors: dict[str, Tensor] = _safetensors().load(data)
    except error_type as error:
        raise ValueError(f"{where} is not in safetensors format: {error}") from error
    return tensors


def _parse(data: bytes, where: str) -> dict[str, Any]:
    try:
        described = json.loads(data)
    except ValueError as error:
        raise ValueError(f"{where} is not JSON: {error}") from error
    if not isinstance(described, dict) or described.get("format") != FORMAT:
        raise ValueError(f"{where} is not the description of a {FORMAT}")
    return described


def _to_json(value: Any) -> Any:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _record(described: dict[str, Any]) -> StepRecord:
    """Return a record of the history, after checking that a step can have been so."""
    record = dict(described)
    for name in ("loss", "grad_norm", "evaluation"):
        if record[name] in NOT_FINITE:
            record[name] = float(record[name])
        elif record[name] is not None or name != "evaluation":
            record[name] = require_finite_float(record[name], f"history {name}")
    for name in ("step", "epoch", "targets"):
        require_nonnegative_int(record[name], f"history {name}")
    require_finite_float(record["learning_rate"], "history learning_rate", minimum=0.0)
    if record["seconds"] is not None:
        require_finite_float(record["seconds"], "history seconds", minimum=0.0)
    require_exact_bool(record["skipped"], "history skipped")
    return StepRecord(**record)
