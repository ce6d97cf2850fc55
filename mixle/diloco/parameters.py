"""The parameters of a model as DiLoCo sees them: named float32 arrays that are read, moved and compared."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from mixle.diloco.alignment import Blend, Carry, Overwrite, align
from mixle.diloco.serialization import DType, ParameterSpec, Schema

__all__ = ["Arrays", "NumpyParameters", "Parameters", "Ranks", "SiteParameters"]

Arrays = dict[str, NDArray[np.float32]]


class Ranks(Protocol):
    """This rank's place among those that train one model (:class:`mixle.diloco.torch_ranks.TorchRanks`)."""

    rank: int
    world: int

    def broadcast(self, array: NDArray[Any]) -> None:
        """Overwrite a contiguous array with rank 0's."""
        ...


class Parameters(Protocol):
    """What an adapter of a framework provides. All methods are called on the thread that trains.

    Attributes:
        schema: the trainable parameters; what is frozen does not travel.
        embeddings: names of parameters of which a step moves few rows.
        buffers: names of those that are statistics, which no optimizer trains: sites average them, and a commit
            overwrites them.
    """

    schema: Schema
    embeddings: frozenset[str]
    buffers: frozenset[str]

    def require_in_place(self, names: Iterable[str]) -> None:
        """Check that the model still holds these parameters, and not others in their place; called once per fragment.

        Raises:
            RuntimeError: one was replaced, cast or reshaped, or another is trained beside them, so that what is trained
                is not what would be sent; names it.
        """
        ...

    def read(self, names: Iterable[str]) -> Arrays:
        """Return copies of the parameters as C-contiguous float32 arrays."""
        ...

    def align(self, committed: Arrays, reference: Arrays, how: Carry | Overwrite | Blend) -> None:
        """Bring the parameters that ``committed`` names to it, in place (see :func:`~mixle.diloco.alignment.align`)."""
        ...


class SiteParameters(Parameters, Protocol):
    """Parameters that every rank of a site has, the same on all, or a shard of; made with the site's ranks.

    ``align`` is called on rank 0, and brings the other ranks' parameters to its own, while they call :meth:`follow`.

    Attributes:
        is_sharded: ``read`` is a collective call.
    """

    is_sharded: bool

    def follow(self, names: Iterable[str]) -> None:
        """Take the part of the other ranks in rank 0's ``align`` of these names, in this order."""
        ...


def replaced(name: str, in_place: str) -> RuntimeError:
    """Return the error for a parameter that is another object than the one that the session joined with."""
    return RuntimeError(
        f"parameter {name!r} was replaced since the session joined, so what is trained is not what would be sent; "
        f"change it in place ({in_place}), or make the session after replacing it"
    )


def changed(name: str, spec: ParameterSpec, now: str) -> RuntimeError:
    """Return the error for a parameter that is not of the dtype and shape any more that the session joined with."""
    return RuntimeError(
        f"parameter {name!r} is {now} now, and the session joined with {spec.dtype} of shape {spec.shape}; convert the "
        "model before making the session"
    )


def _require_array(name: object, array: object) -> None:
    if not isinstance(name, str):
        raise TypeError(f"model has the key {name!r}, a {type(name).__name__}; give arrays by name")
    if type(array).__module__.partition(".")[0] == "torch":
        raise TypeError(
            f"model[{name!r}] is a torch {type(array).__name__}; give the module itself, not its state_dict() or its "
            "tensors"
        )
    if not isinstance(array, np.ndarray):
        raise TypeError(f"model[{name!r}] is a {type(array).__name__}; give a numpy array, float32 or float16")


def require_apart(places: Mapping[str, object]) -> None:
    """Check that no two tensors begin at the same place in memory, None being no place.

    Raises:
        ValueError: two do, so that each commit would move them twice; names both.
    """
    first: dict[object, str] = {}
    for name, place in places.items():
        if place is not None and first.setdefault(place, name) != name:
            raise ValueError(
                f"{first[place]!r} and {name!r} are the same memory, which each commit would move twice; share the one "
                "parameter, or copy it"
            )


class NumpyParameters:
    """Arrays that their owner trains in place: float32 or float16, writable.

    Args:
        arrays: by name; kept, not copied, and not replaced while this lives.
        embeddings: names of those of which a step moves few rows.
        buffers: names of those that are statistics, such as a running variance, which no optimizer trains.
        ranks: those of the site, each with the same arrays.

    Raises:
        TypeError: a value is no array, or of another dtype; names it.
        ValueError: an array is read-only or another's memory, or ``embeddings`` or ``buffers`` name one that is not
            there.
    """

    _DTYPES: Mapping[str, DType] = {"float32": "F32", "float16": "F16"}

    is_sharded = False

    def __init__(
        self,
        arrays: Mapping[str, NDArray[np.floating]],
        *,
        embeddings: Iterable[str] = (),
        buffers: Iterable[str] = (),
        ranks: Ranks | None = None,
    ) -> None:
        self._ranks = ranks
        specs = []
        for name, array in arrays.items():
            _require_array(name, array)
        for name, array in sorted(arrays.items()):
            dtype = self._DTYPES.get(str(array.dtype))
            if dtype is None:
                raise TypeError(f"{name} is {array.dtype}; DiLoCo trains float32 and float16 arrays")
            if not array.flags.writeable:
                raise ValueError(f"{name} is read-only; give arrays that can be trained in place")
            specs.append(ParameterSpec(name, dtype, array.shape))
        self.schema = Schema(tuple(specs))
        require_apart({name: array.ctypes.data if array.size else None for name, array in arrays.items()})
        self.embeddings, self.buffers = frozenset(embeddings), frozenset(buffers)
        for argument, named in (("embeddings", self.embeddings), ("buffers", self.buffers)):
            unknown = sorted(named - arrays.keys())
            if unknown:
                raise ValueError(f"{argument} names {unknown[0]!r}, which is not among the arrays: {', '.join(arrays)}")
        self._given, self._arrays = arrays, dict(arrays)

    def require_in_place(self, names: Iterable[str]) -> None:
        """Check that the mapping still holds the arrays that it held, as they were."""
        for name in names:
            array, spec = self._arrays[name], self.schema.spec(name)
            if self._given.get(name) is not array:
                raise replaced(name, "model[name][...] = value")
            if self._DTYPES.get(str(array.dtype)) != spec.dtype or array.shape != spec.shape:
                raise changed(name, spec, f"{array.dtype} of shape {array.shape}")

    def read(self, names: Iterable[str]) -> Arrays:
        """Return copies, float32."""
        return {name: np.array(self._arrays[name], dtype=np.float32, order="C") for name in names}

    def align(self, committed: Arrays, reference: Arrays, how: Carry | Overwrite | Blend) -> None:
        """Bring the arrays that ``committed`` names to it, in place, and the other ranks' to these."""
        for name, target in committed.items():
            align(self._arrays[name], target, reference[name], how)
            if self._ranks is not None:
                self._ranks.broadcast(self._arrays[name])

    def follow(self, names: Iterable[str]) -> None:
        """Take the part of the other ranks in rank 0's :meth:`align` of these names."""
        assert self._ranks is not None
        for name in names:
            self._ranks.broadcast(self._arrays[name])
