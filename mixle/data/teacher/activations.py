"""What goes into and comes out of the named modules of a model while it runs: the raw material of distillation."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple, Self

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from mixle.utils.exact import require_exact_bool


class ModuleInputs(NamedTuple):
    """What a module was called with."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Activations:
    """What one forward pass of a model put into and got out of the modules asked for.

    Attributes:
        outputs: name of a module to what it returned.
        inputs: name of a module to what it was called with.
        result: what the model returned; None where it was stopped before.

    With ``every_call`` the values are tuples, of one element per call of the module.
    """

    outputs: dict[str, Any] = dataclasses.field(default_factory=dict)
    inputs: dict[str, Any] = dataclasses.field(default_factory=dict)
    result: Any = None


class ModelActivations:
    """Capture inputs and outputs of named submodules of a model.

    The model has hooks only within :meth:`run` or a ``with`` block, and costs nothing more at any other time::

        capture = ModelActivations(teacher, outputs=["blocks.3"])
        hidden = capture.run(tokens).outputs["blocks.3"]  # the blocks after it do not run

        with ModelActivations(teacher, outputs=["blocks.3"]) as capture:
            logits = teacher(tokens)  # the whole of it
        hidden = capture.latest.outputs["blocks.3"]

    Args:
        model: any module; calls of it from one thread at a time.
        outputs, inputs: names as in ``model.named_modules()``; ``""`` is the model itself.
        copy: True takes detached copies of the tensors, which later in-place operations leave alone, and :meth:`run`
            records no graph. False takes the tensors themselves, with their graph.
        device: where the tensors are moved; None leaves them.
        stop: :meth:`run` ends the forward pass once all that is asked for has been captured.
        every_call: capture every call of a module that runs several times in a pass, which then runs to its end; False
            captures the first call.

    Raises:
        TypeError: ``model`` is not a module, or a name is not a string.
        ValueError: no module of the model has such a name; nothing is asked for.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        outputs: Iterable[str] = (),
        inputs: Iterable[str] = (),
        copy: bool = True,
        device: torch.device | str | None = None,
        stop: bool = True,
        every_call: bool = False,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"model={model!r} must be a torch module, not {type(model).__name__}")
        self._model = model
        self._modules = dict(model.named_modules(remove_duplicate=False))
        self._outputs = self._names(outputs, "outputs")
        self._inputs = self._names(inputs, "inputs")
        if not self._outputs and not self._inputs:
            raise ValueError("nothing is asked for; name modules in outputs= or inputs=")
        self._copy = require_exact_bool(copy, "copy")
        self._device = None if device is None else torch.device(device)
        self._every_call = require_exact_bool(every_call, "every_call")
        self._stop = require_exact_bool(stop, "stop") and not self._every_call
        self._handles: list[RemovableHandle] = []
        self._stopping: _Stop | None = None
        self.latest = Activations()

    def run(self, *args: Any, **kwargs: Any) -> Activations:
        """Call the model and return what was captured; the arguments are the model's.

        Raises:
            RuntimeError: a module asked for did not run.
        """
        stop = self._stopping = _Stop()
        result = None
        try:
            with self._hooked(), torch.set_grad_enabled(torch.is_grad_enabled() and not self._copy):
                result = self._model(*args, **kwargs)
        except _Stop as stopped:
            if stopped is not stop:
                raise
        finally:
            self._stopping = None
            del stop  # its traceback has this frame, and the frame it: the pass's tensors would wait for the collector
        missing = self._missing()
        if missing:
            raise RuntimeError(f"the forward pass did not run {', '.join(missing)}; ask for modules that it runs")
        self.latest = dataclasses.replace(self.latest, result=result)
        return self.latest

    def __enter__(self) -> Self:
        if self._handles:
            raise RuntimeError("this ModelActivations captures already; make another one to nest them")
        self._attach()
        return self

    def __exit__(self, *exception: object) -> None:
        while self._handles:
            self._handles.pop().remove()

    @contextmanager
    def _hooked(self) -> Iterator[None]:
        if self._handles:  # within a with block
            yield
        else:
            with self:
                yield

    def _attach(self) -> None:
        self._handles.append(self._model.register_forward_pre_hook(self._begin, prepend=True))
        for name in self._inputs:
            self._handles.append(
                self._modules[name].register_forward_pre_hook(self._input_hook(name), with_kwargs=True)
            )
        for name in self._outputs:
            self._handles.append(self._modules[name].register_forward_hook(self._output_hook(name)))

    def _begin(self, module: nn.Module, args: Any) -> None:
        self.latest = Activations()

    def _input_hook(self, name: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._take(self.latest.inputs, name, lambda: ModuleInputs(self._own(args, name), self._own(kwargs, name)))

        return hook

    def _output_hook(self, name: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            self._take(self.latest.outputs, name, lambda: self._own(output, name))

        return hook

    def _take(self, captured: dict[str, Any], name: str, value: Any) -> None:
        if self._every_call:
            captured[name] = (*captured.get(name, ()), value())
        elif name not in captured:
            captured[name] = value()
            if self._stopping is not None and self._stop and not self._missing():
                raise self._stopping

    def _missing(self) -> list[str]:
        """Return what was asked for and not captured yet, as ``outputs['name']``."""
        return [f"outputs[{name!r}]" for name in self._outputs if name not in self.latest.outputs] + [
            f"inputs[{name!r}]" for name in self._inputs if name not in self.latest.inputs
        ]

    def _own(self, value: Any, name: str) -> Any:
        """Return ``value`` with its tensors copied and moved as asked."""
        if isinstance(value, torch.Tensor):
            tensor = value.detach() if self._copy else value
            return tensor.to(self._device or tensor.device, copy=self._copy)
        if isinstance(value, (type(None), bool, int, float, complex, str, bytes, torch.device, torch.dtype)):
            return value
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*(self._own(part, name) for part in value))
        if isinstance(value, (tuple, list)):
            return type(value)(self._own(part, name) for part in value)
        if isinstance(value, Mapping):
            return {key: self._own(part, name) for key, part in value.items()}
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            parts = {f.name: self._own(getattr(value, f.name), name) for f in dataclasses.fields(value) if f.init}
            return dataclasses.replace(value, **parts)
        if not self._copy and self._device is None:
            return value
        raise TypeError(f"module {name!r} has a {type(value).__name__} there, which is not copied; give copy=False")

    def _names(self, names: Iterable[str], argument: str) -> tuple[str, ...]:
        if isinstance(names, str):
            raise TypeError(f"{argument}={names!r} must be a sequence of names: [{names!r}]")
        checked = tuple(dict.fromkeys(names))
        for name in checked:
            if not isinstance(name, str):
                raise TypeError(f"{argument} has {name!r}, which is not the name of a module")
            if name not in self._modules:
                near = difflib.get_close_matches(name, self._modules, n=3, cutoff=0.5)
                hint = f"; near it are {', '.join(map(repr, near))}" if near else ""
                raise ValueError(f"{argument} names {name!r}, which no module of the model is{hint}")
        return checked


class _Stop(BaseException):
    """End a forward pass whose captures are complete; no ``except Exception`` in the model shall catch it."""
