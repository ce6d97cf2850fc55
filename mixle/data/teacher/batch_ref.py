"""What a student is handed: samples that still lie in its slots, until it releases them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Self

from mixle.data.teacher.slots import Slots

if TYPE_CHECKING:
    import torch

__all__ = ["BatchRef", "SampleRef"]


class _Ref:
    """Samples in slots that nobody writes until :meth:`release`; leaving a ``with`` block releases them."""

    __slots__ = ("_first", "_release", "_slots", "_token", "generation")

    def __init__(
        self, slots: Slots, first: int, token: int, generation: int, release: Callable[[int, int], None]
    ) -> None:
        self._slots: Slots | None = slots
        self._first, self._token, self._release = first, token, release
        self.generation = generation

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the samples without a copy; they change once the slots are released and filled anew.

        Raises:
            RuntimeError: they are released.
        """
        raise NotImplementedError

    def copy(self, out: Mapping[str, torch.Tensor] | None = None) -> dict[str, torch.Tensor]:
        """Return the samples in memory of their own.

        Args:
            out: tensors of the same names, shapes and dtypes (on any device) to copy into, and to return.

        Raises:
            RuntimeError: they are released.
            ValueError: ``out`` has other names, shapes or dtypes.
        """
        tensors = self.tensors()
        if out is None:
            return {name: tensor.clone() for name, tensor in tensors.items()}
        if out.keys() != tensors.keys():
            raise ValueError(f"out has the names {sorted(out)}; the samples have {sorted(tensors)}")
        for name, tensor in tensors.items():
            target = out[name]
            if target.shape != tensor.shape or target.dtype != tensor.dtype:
                raise ValueError(
                    f"out[{name!r}] is {target.dtype} of shape {tuple(target.shape)}; "
                    f"the samples are {tensor.dtype} of {tuple(tensor.shape)}"
                )
            target.copy_(tensor)
        return dict(out)

    def release(self) -> None:
        """Give the slots back; they are ordered anew. Releasing twice, in whichever way, is harmless."""
        slots, self._slots = self._slots, None
        if slots is not None:
            self._release(self._first, self._token)

    def _held(self) -> Slots:
        if self._slots is None:
            raise RuntimeError(f"slot {self._first} was released; take tensors() before, or a copy()")
        return self._slots

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class SampleRef(_Ref):
    """One sample in its slot; ``slot_id`` and ``generation`` say which and of what model.

    The slot is held until ``release()``, or the end of a ``with`` block, also when the reference is dropped.
    """

    __slots__ = ()

    @property
    def slot_id(self) -> int:
        """The slot, as :meth:`.StudentClient.release_slot` takes it."""
        return self._first

    def tensors(self) -> dict[str, torch.Tensor]:
        return self._held().tensor(self._first)

    def __repr__(self) -> str:
        return f"SampleRef(slot_id={self._first}, generation={self.generation})"


class BatchRef(_Ref):
    """Samples in ``size`` neighbouring slots, all of one ``generation``; tensors are ``(size, *shape)``.

    The slots are held until ``release()``, or the end of a ``with`` block, also when the reference is dropped.
    """

    __slots__ = ("size",)

    def __init__(
        self, slots: Slots, first: int, size: int, token: int, generation: int, release: Callable[[int, int], None]
    ) -> None:
        super().__init__(slots, first, token, generation, release)
        self.size = size

    @property
    def first_slot(self) -> int:
        """The first of the slots."""
        return self._first

    def tensors(self) -> dict[str, torch.Tensor]:
        return self._held().tensors(self._first, self.size)

    def __len__(self) -> int:
        return self.size

    def __repr__(self) -> str:
        return f"BatchRef(size={self.size}, generation={self.generation})"
