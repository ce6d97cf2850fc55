"""A DataLoader whose batches are all of the newest model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, IterableDataset, default_convert, get_worker_info

from mixle.data.teacher.batch_ref import BatchRef
from mixle.data.teacher.buffers import Buffers
from mixle.data.teacher.dataset import DistillIterableDataset, Tagged
from mixle.utils.exact import require_positive_int

__all__ = ["DistillDataLoader"]


class DistillDataLoader(DataLoader[Any]):
    """Load batches of a :class:`.DistillIterableDataset`; drop those of an older generation where it hands them out.

    Each sample's generation travels beside it, and neither the dataset's user nor ``collate_fn`` sees it. A batch that
    holds samples of two generations is dropped as well.

    Without a ``collate_fn`` a batch is copied once, from the slots where it lies into the memory that the trainer gets.

    Args:
        dataset: what to load from; its ``slot_count`` is at least ``batch_size``, better four times as much.
        dataloader_kwargs: as for ``torch.utils.data.DataLoader``.

    Attributes:
        dropped: batches not handed out so far.

    Raises:
        TypeError: ``dataset`` is no :class:`.DistillIterableDataset`.
        ValueError: its slots do not hold a batch.
    """

    def __init__(self, dataset: DistillIterableDataset, **dataloader_kwargs: Any) -> None:
        if not isinstance(dataset, DistillIterableDataset):
            raise TypeError(f"dataset={dataset!r} must be a DistillIterableDataset")
        batch_size, collate = dataloader_kwargs.get("batch_size", 1), dataloader_kwargs.pop("collate_fn", None)
        source: IterableDataset[Any] = _Samples(dataset)
        make: Any
        if batch_size is None:
            make = _CollateSample(collate or default_convert)
        elif collate is not None:
            make = _CollateBatch(collate)
        else:
            batch_size = require_positive_int(batch_size, "batch_size")
            if batch_size > dataset.slot_count:
                raise ValueError(
                    f"batch_size={batch_size} exceeds the dataset's slot_count={dataset.slot_count}; "
                    f"have slot_count={4 * batch_size}"
                )
            source, make = _Batches(dataset, batch_size), _CopyBatch()
        super().__init__(source, collate_fn=make, **dataloader_kwargs)
        self._source = dataset
        self.dropped = 0

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # as a DataLoader is used, if not as it is declared
        for oldest, newest, batch in super().__iter__():
            if oldest < self._source.note_generation(newest):
                self.dropped += 1
            else:
                yield batch


class _Samples(IterableDataset[Tagged]):
    """The samples of a dataset with their generations."""

    def __init__(self, source: DistillIterableDataset) -> None:
        super().__init__()
        self._source = source

    def __iter__(self) -> Iterator[Tagged]:
        return self._source.tagged()


class _Batches(IterableDataset["BatchRef | None"]):
    """The batches of a dataset where they lie, each followed by a None for every sample but the first.

    A DataLoader takes ``size`` items for a batch, and hands them to its ``collate_fn``.
    """

    def __init__(self, source: DistillIterableDataset, size: int) -> None:
        super().__init__()
        self._source, self._size = source, size

    def __iter__(self) -> Iterator[BatchRef | None]:
        rest = (None,) * (self._size - 1)
        for ref in self._source.lent(self._size):
            yield ref
            yield from rest


class _Batch(NamedTuple):
    oldest: int
    newest: int
    content: Any


class _CollateBatch:
    """Collate samples alone; a class, since it goes to other processes."""

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self._collate = collate

    def __call__(self, tagged: list[Tagged]) -> _Batch:
        generations = [one.generation for one in tagged]
        return _Batch(min(generations), max(generations), self._collate([one.sample for one in tagged]))


class _CollateSample:
    """Convert one sample, for a loader that makes no batches."""

    def __init__(self, convert: Callable[[Any], Any]) -> None:
        self._convert = convert

    def __call__(self, tagged: Tagged) -> _Batch:
        return _Batch(tagged.generation, tagged.generation, self._convert(tagged.sample))


class _CopyBatch:
    """Copy what :class:`_Batches` lent: in a DataLoader's worker into memory that it can pass on as it is."""

    def __init__(self) -> None:
        self._buffers = Buffers()

    def __call__(self, lent: list[BatchRef | None]) -> _Batch:
        ref = lent[0]
        assert ref is not None
        with ref:
            tensors = ref.tensors()
            if get_worker_info() is None:
                content = self._buffers.copy(tensors)
            else:
                content = {name: _shared(tensor) for name, tensor in tensors.items()}
            return _Batch(ref.generation, ref.generation, content)

    def __reduce__(self) -> tuple[type[_CopyBatch], tuple[()]]:
        return _CopyBatch, ()


def _shared(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.numel() == 0:
        return tensor.clone()
    storage = torch.UntypedStorage._new_shared(tensor.numel() * tensor.element_size())
    strides = torch.empty(tensor.shape, device="meta").stride()
    return torch.empty(0, dtype=tensor.dtype, device="cpu").set_(storage, 0, tensor.shape, strides).copy_(tensor)
