"""What a data handle is, the handle for this process, and building handles by name.

A handle says where encoded data lives and how an estimation step runs over it. The dispatch in
:mod:`mixle.stats.sequence` calls its ``pysp_`` methods; a handle need not derive from anything to have them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, NoReturn, Self

import numpy as np

from mixle.stats.contract import DataEncoder, ParameterEstimator, ProbabilityDistribution
from mixle.stats.sequence import (
    resolve_encoder,
    seq_encode,
    seq_estimate,
    seq_initialize,
    seq_log_density,
    seq_log_density_sum,
)

__all__ = ["EncodedDataHandle", "HandleFactory", "LocalEncodedData", "encoded_data", "register_encoded_data_backend"]

ENTRY_POINT_GROUP = "mixle.encoded_data"


class EncodedDataHandle:
    """The base of most handles: the four verbs, and a context manager that closes what the handle holds.

    A subclass overrides the verbs that it offers; the others raise a ``TypeError`` that names handle and verb.
    """

    def pysp_seq_estimate(self, estimator: Any, prev_estimate: Any) -> Any:
        """Run one estimation over the data and return the model."""
        self._lacks("pysp_seq_estimate")

    def pysp_seq_initialize(self, estimator: Any, rng: Any, p: float) -> Any:
        """Return a first model from a random share ``p`` of the rows."""
        self._lacks("pysp_seq_initialize")

    def pysp_seq_log_density_sum(self, model: Any) -> tuple[float, float]:
        """Return the number of observations and the sum of their log-densities, over all shards."""
        self._lacks("pysp_seq_log_density_sum")

    def pysp_seq_log_density(self, model: Any) -> list[np.ndarray]:
        """Return the log-densities of the observations held here, one array per chunk."""
        self._lacks("pysp_seq_log_density")

    def __len__(self) -> int:
        """Return the global number of observations."""
        raise TypeError(f"{type(self).__name__} does not know its number of observations")

    def __bool__(self) -> bool:
        return True

    def close(self) -> None:
        """Release what the handle holds; closing twice is allowed."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _lacks(self, verb: str) -> NoReturn:
        raise TypeError(f"{type(self).__name__} does not offer {verb}")


class LocalEncodedData(EncodedDataHandle):
    """Encoded data in this process; ``seq_estimate`` is one vectorised EM step.

    Args:
        data: observations, in any sequence.
        encoder, estimator, model: exactly one of them, to say how to encode.
        num_chunks: in how many chunks to hold the encoding.
    """

    def __init__(
        self,
        data: Sequence[Any],
        *,
        encoder: DataEncoder | None = None,
        estimator: ParameterEstimator | None = None,
        model: ProbabilityDistribution | None = None,
        num_chunks: int = 1,
    ) -> None:
        self.chunks = seq_encode(data, encoder, estimator, model, num_chunks)

    def pysp_seq_estimate(self, estimator: Any, prev_estimate: Any) -> Any:
        return seq_estimate(self.chunks, estimator, prev_estimate)

    def pysp_seq_initialize(self, estimator: Any, rng: Any, p: float) -> Any:
        return seq_initialize(self.chunks, estimator, rng, p)

    def pysp_seq_log_density_sum(self, model: Any) -> tuple[float, float]:
        return seq_log_density_sum(self.chunks, model)

    def pysp_seq_log_density(self, model: Any) -> list[np.ndarray]:
        return seq_log_density(self.chunks, model)

    def __len__(self) -> int:
        return sum(count for count, _ in self.chunks)


HandleFactory = Callable[..., EncodedDataHandle]


def _multiprocessing(data: Any, **options: Any) -> EncodedDataHandle:
    from mixle.utils.parallel.multiprocessing import MultiprocessingEncodedData

    return MultiprocessingEncodedData(data, **options)


def _torchrun(data: Any, **options: Any) -> EncodedDataHandle:
    from mixle.utils.parallel.torchrun import TorchRunEncodedData

    return TorchRunEncodedData(data, **options)


_factories: dict[str, HandleFactory] = {
    "local": LocalEncodedData,
    "multiprocessing": _multiprocessing,
    "torchrun": _torchrun,
}


def register_encoded_data_backend(name: str, factory: HandleFactory, *, replace: bool = False) -> None:
    """Make ``encoded_data(..., backend=name)`` call ``factory(data, encoder=..., **options)``.

    A package does the same without code by an entry point in the group ``mixle.encoded_data``.

    Raises:
        TypeError: ``name`` is no string or ``factory`` not callable.
        ValueError: the name is taken and ``replace`` is false.
    """
    if not isinstance(name, str) or not name:
        raise TypeError(f"name={name!r} must be a non-empty string")
    if not callable(factory):
        raise TypeError(f"factory={factory!r} must be callable")
    if name in _factories and not replace:
        raise ValueError(f"name={name!r} is registered already; pass replace=True to take it over")
    _factories[name] = factory


def encoded_data(
    data: Any,
    *,
    encoder: DataEncoder | None = None,
    estimator: ParameterEstimator | None = None,
    model: ProbabilityDistribution | None = None,
    backend: str = "local",
    **options: Any,
) -> EncodedDataHandle:
    """Encode ``data`` behind a handle that is chosen by name.

    Args:
        data: observations.
        encoder, estimator, model: exactly one of them, to say how to encode.
        backend: ``"local"``, ``"multiprocessing"``, ``"torchrun"``, or a name that was registered.
        options: what the handle's constructor takes.

    Raises:
        ValueError: no backend has that name; lists those there are.
    """
    factory = _factories.get(backend)
    if factory is None:
        # Costs a third of mixle's import time, and few ever need it.
        from importlib.metadata import entry_points

        found = {point.name: point for point in entry_points(group=ENTRY_POINT_GROUP)}
        if backend not in found:
            names = ", ".join(sorted({*_factories, *found}))
            raise ValueError(f"backend={backend!r} is not known; there are: {names}")
        factory = found[backend].load()
    return factory(data, encoder=resolve_encoder(encoder, estimator, model), **options)
