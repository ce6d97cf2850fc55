"""Find the adapter that shows a model's parameters to DiLoCo."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

from mixle.diloco.parameters import NumpyParameters, Parameters, Ranks, SiteParameters
from mixle.utils.exact import require_choice
from mixle.utils.optional_import import is_torch_module

__all__ = ["Backend", "parameters_of", "site_parameters_of"]

Backend = Literal["torch", "numpy"] | Callable[[Any], Parameters]


def parameters_of(model: Any, backend: Backend | None = None) -> Parameters:
    """Return the parameters of a torch module, a mapping of numpy arrays, or what is a ``Parameters`` already.

    Args:
        model: what is trained.
        backend: which of these it is; or a callable that returns its ``Parameters``. None finds out.

    Raises:
        TypeError: it is none of these, or has parameters that cannot be shared.
        ValueError: it has no trainable parameter, or ``backend`` is none of the above.
    """
    return _checked(_adapted(model, backend, None), ())


def site_parameters_of(model: Any, backend: Backend | None, ranks: Ranks) -> SiteParameters:
    """Return the parameters of a model that several ranks train, and raise what :func:`parameters_of` does."""
    found: Any = _checked(_adapted(model, backend, ranks), ("is_sharded", "follow"))
    return found


def _adapted(model: Any, backend: Backend | None, ranks: Ranks | None) -> Any:
    if callable(backend):
        return backend(model)
    if backend is not None:
        require_choice(backend, "backend", ("torch", "numpy"))
    is_module = is_torch_module(model)
    if backend == "torch" and not is_module:
        raise TypeError(f'backend="torch" needs a torch.nn.Module, not a {type(model).__name__}')
    if backend == "numpy" and not isinstance(model, Mapping):
        raise TypeError(f'backend="numpy" needs a mapping of names to numpy arrays, not a {type(model).__name__}')
    if is_module:
        from mixle.diloco.torch_parameters import TorchParameters
        from mixle.diloco.torch_ranks import TorchRanks

        if ranks is not None and not isinstance(ranks, TorchRanks):
            raise TypeError(f"ranks={ranks!r} must be a TorchRanks for a torch module")
        return TorchParameters(model, ranks=ranks)
    if isinstance(model, Mapping):
        return NumpyParameters(model, ranks=ranks)
    return model


def _checked(found: Any, more: tuple[str, ...]) -> Any:
    missing = [
        name
        for name in ("schema", "embeddings", "buffers", "require_in_place", "read", "align", *more)
        if not hasattr(found, name)
    ]
    if missing:
        raise TypeError(
            f"model is a {type(found).__name__}, without {', '.join(missing)}; give a torch.nn.Module, a mapping of "
            "names to numpy arrays, or an object with the members of mixle.diloco.parameters."
            f"{'SiteParameters' if more else 'Parameters'}"
        )
    if not found.schema.parameters:
        raise ValueError("model has no trainable parameter; there is nothing to train together")
    return found
