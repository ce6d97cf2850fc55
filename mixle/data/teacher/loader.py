"""A DataLoader whose batches are all of the newest model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from torch.utils.data import DataLoader, IterableDataset, default_collate, default_convert

from mixle.data.teacher.dataset import DistillIterableDataset, Tagged

__all__ = ["DistillDataLoader"]


class DistillDataLoader(DataLoader[Any]):
    """Load batches of a :class:`.DistillIterableDataset`; drop those of an older generation where it hands them out.

    Each sample's generation travels beside it, and neither the dataset's user nor ``collate_fn`` sees it. A batch that
    holds samples of two generations is dropped as well.

    Args:
        dataset: what to load from.
        dataloader_kwargs: as for ``torch.utils.data.DataLoader``.

    Attributes:
        dropped: batches not handed out so far.

    Raises:
        TypeError: ``dataset`` is no :class:`.DistillIterableDataset`.
    """

    def __init__(self, dataset: DistillIterableDataset, **dataloader_kwargs: Any) -> None:
        if not isinstance(dataset, DistillIterableDataset):
            raise TypeError(f"dataset={dataset!r} must be a DistillIterableDataset")
        batched = dataloader_kwargs.get("batch_size", 1) is not None
        collate = dataloader_kwargs.pop("collate_fn", None) or (default_collate if batched else default_convert)
        tagging: Any = _CollateBatch(collate) if batched else _CollateSample(collate)
        super().__init__(
            _TaggedDataset(dataset),
            collate_fn=tagging,
            **dataloader_kwargs,
        )
        self.dropped = 0

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # as a DataLoader is used, if not as it is declared
        tagged = self.dataset
        assert isinstance(tagged, _TaggedDataset)
        source = tagged.source
        for oldest, newest, batch in super().__iter__():
            if oldest < source.note_generation(newest):
                self.dropped += 1
            else:
                yield batch


class _TaggedDataset(IterableDataset[Tagged]):
    """The samples of a dataset with their generations."""

    def __init__(self, source: DistillIterableDataset) -> None:
        super().__init__()
        self.source = source

    def __iter__(self) -> Iterator[Tagged]:
        return self.source.tagged()


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
