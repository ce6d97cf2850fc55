"""Batches that a teacher makes while they are trained on; all ranks take each step with samples of one generation.

Before each optimizer step every rank that asks fetches its batches, and one small collective shows all ranks how far
each has come, of which generation its batches are, and what is the newest that it knows of. Who is behind drops what it
has and fetches again, and nobody goes on before all have the newest: so all switch at the same step, however word of
the switch has travelled. Who fails, or waits long, says so in the same collective.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from mixle.data.teacher.errors import GeneratorFailed
from mixle.training.draws import step_seed

B = TypeVar("B", bound=tuple[Tensor | None, ...])
B_co = TypeVar("B_co", bound=tuple[Tensor | None, ...], covariant=True)

PATIENCE_S = 10.0  # between two words to the other ranks; below the timeout of any collective
POLL_MS = 100.0


class Samples(Protocol):
    """A batch that lies where it was made."""

    generation: int

    def tensors(self) -> dict[str, Tensor]:
        """Return the samples, (B, *shape), without a copy."""

    def release(self) -> None:
        """Give their memory back."""


class SampleSupply(Protocol):
    """Where a rank's samples come from."""

    @property
    def generation(self) -> int:
        """The newest generation that is known here."""

    def request_batch(self, size: int, timeout_ms: float) -> Samples | None:
        """Return the next batch; None if there is none in time."""


class Task(Protocol[B_co]):
    """What samples are to a module."""

    def batch(self, tensors: Mapping[str, Tensor], device: torch.device) -> B_co:
        """Return samples on the device."""

    def places(self, tensors: Mapping[str, Tensor]) -> int:
        """Return how many targets they have."""


@dataclass(frozen=True)
class Share:
    """Which ranks work on the same samples, and what that means here.

    Attributes:
        rank, world: of all.
        replicas: how many have samples of their own.
        asks: whether this rank fetches its replica's.
        source: the rank that does.
        group: the ranks of this replica; None where each rank is one.
    """

    rank: int
    world: int
    replicas: int
    asks: bool = True
    source: int = 0
    group: dist.ProcessGroup | None = None


@dataclass
class Deliveries:
    """What was delivered so far, over all ranks and the same on each; counts are samples.

    Attributes:
        fetched: taken from the teacher.
        stale: of these, dropped because another rank knew of a newer model.
        retried: fetches that a failed order made necessary again.
        steps: optimizer steps that all ranks were ready for.
        served: trained on in them, by generation.
        switches: the step, counted from 1, with which each generation began.
    """

    fetched: int = 0
    stale: int = 0
    retried: int = 0
    steps: int = 0
    served: dict[int, int] = field(default_factory=dict)
    switches: dict[int, int] = field(default_factory=dict)


class _Word(NamedTuple):
    """What a rank tells before a step; the last three are counts since its last word."""

    ready: int
    failed: int
    known: int
    generation: int
    targets: int
    fetched: int = 0
    stale: int = 0
    retried: int = 0


class TeacherBatches(Generic[B]):
    """Fetch and agree on the batches of each optimizer step; a :class:`~mixle.training.loop.BatchSource`.

    Args:
        supply: where this rank's samples come from; not used by one that does not ask.
        task: what they are to the module.
        blank: a batch of zeros on the module's device.
        share: who works on what.
        steps: optimizer steps of an epoch.
        accumulation: batches of an optimizer step.
        batch_size: samples of a batch.
        seed: of what the module draws.
        max_retries: failed orders in a row after which a rank gives up.
        deliveries: where to count.
    """

    def __init__(
        self,
        supply: SampleSupply | None,
        task: Task[B],
        blank: B,
        share: Share,
        *,
        steps: int,
        accumulation: int,
        batch_size: int,
        seed: int,
        max_retries: int,
        deliveries: Deliveries,
    ) -> None:
        self._supply, self._task, self._blank, self._share = supply, task, blank, share
        self._batch_size, self._seed = batch_size, seed
        self._max_retries, self._deliveries = max_retries, deliveries
        self.steps_per_epoch = steps * accumulation
        self._device = next(t.device for t in blank if t is not None)
        self._word_device = _device_of_words(self._device)
        self._held: list[Samples] = []
        self._ready: list[B] = []
        self._first = 0
        self._newest = 0
        self._counts = [0, 0, 0]
        self._failure: Exception | None = None

    def targets(self, epoch: int, steps: range) -> int:
        """Fetch the batches of an optimizer step, in step with all ranks, and return their targets together."""
        self.release()
        self._first = steps.start
        targets, generation = self._agree(len(steps))
        if generation is not None:
            self._ready = self._dealt(len(steps))
            deliveries, samples = self._deliveries, len(steps) * self._batch_size * self._share.replicas
            deliveries.steps += 1
            deliveries.served[generation] = deliveries.served.get(generation, 0) + samples
            deliveries.switches.setdefault(generation, deliveries.steps)
        return targets

    def batch(self, epoch: int, step: int) -> B:
        """Return a batch of the present optimizer step; what failed on this rank is raised here."""
        if self._failure is not None:
            raise self._failure
        return self._ready[step - self._first] if self._ready else self._blank

    def blank(self) -> B:
        """Return a batch of zeros."""
        return self._blank

    def random_seed(self, epoch: int, step: int) -> int:
        """Return a seed of this rank and step, below 2**63."""
        return step_seed(self._seed, epoch, step, self._share.rank)

    def release(self) -> None:
        """Give the present step's samples back."""
        self._ready.clear()
        while self._held:
            self._held.pop().release()

    # ---- fetching

    def _agree(self, count: int) -> tuple[int, int | None]:
        """Return a step's targets and generation once all ranks are ready; no generation if one failed."""
        while True:
            words = self._exchange(self._word(count))
            self._newest = max(self._newest, *(word.known for word in words))
            self._deliveries.fetched += sum(word.fetched for word in words)
            self._deliveries.stale += sum(word.stale for word in words)
            self._deliveries.retried += sum(word.retried for word in words)
            targets = sum(word.targets for word in words)
            if any(word.failed for word in words):
                return 1, None
            if all(word.ready and word.generation in (self._newest, -1) for word in words):
                if not targets:  # every rank raises: none has anything to train on
                    self._failure = ValueError("no place of the samples counts on any rank; their mask leaves none")
                    return 1, None
                return targets, self._newest

    def _word(self, count: int) -> _Word:
        """Fetch what is missing for so many batches, for as long as patience lasts."""
        if not self._share.asks:
            return _Word(1, 0, self._newest, -1, 0)
        assert self._supply is not None
        targets = 0
        try:
            ready = self._fetch(count, self._supply)
            if ready:
                targets = sum(self._task.places(samples.tensors()) for samples in self._held)
        except Exception as error:
            self._failure, ready = error, False
        generations = [samples.generation for samples in self._held] or [0]
        known, generation = max(self._newest, self._supply.generation, *generations), min(generations)
        counts, self._counts = self._counts, [0, 0, 0]
        return _Word(ready, self._failure is not None, known, generation, targets, *counts)

    def _fetch(self, count: int, supply: SampleSupply) -> bool:
        until, failures = time.monotonic() + PATIENCE_S, 0
        while True:
            self._drop_stale(supply)
            if len(self._held) == count:
                return True
            left_ms = (until - time.monotonic()) * 1000
            if left_ms <= 0:
                return False
            try:
                samples = supply.request_batch(self._batch_size, min(left_ms, POLL_MS))
            except GeneratorFailed:
                failures += 1
                if failures > self._max_retries:
                    raise
                self._counts[2] += 1
                continue
            if samples is not None:
                failures = 0
                self._counts[0] += self._batch_size
                self._held.append(samples)

    def _drop_stale(self, supply: SampleSupply) -> None:
        """Give back what is older than the newest generation that any rank has told of."""
        self._newest = max(self._newest, supply.generation)
        kept = []
        for samples in self._held:
            if samples.generation >= self._newest:
                kept.append(samples)
            else:
                samples.release()
                self._counts[1] += self._batch_size
        self._held = kept

    def _exchange(self, word: _Word) -> Sequence[_Word]:
        if self._share.world == 1:
            return [word]
        everyone = torch.zeros((self._share.world, len(word)), dtype=torch.int64)
        everyone[self._share.rank] = torch.tensor(word)
        everyone = everyone.to(self._word_device)
        dist.all_reduce(everyone)
        return [_Word(*row) for row in everyone.tolist()]

    def _dealt(self, count: int) -> list[B]:
        """Return this rank's batches: what it fetched, or what the one that fetches for its replica did."""
        share = self._share
        batches: list[B] = []
        try:
            for samples in self._held:
                batches.append(self._task.batch(samples.tensors(), self._device))
        except Exception as error:
            self._failure = error
            batches = [self._blank] * count
        if share.group is None:
            return batches
        if not share.asks:
            batches = [self._blank] * count
        dealt: list[B] = []
        for batch in batches:
            parts = [None if part is None else part.clone(memory_format=torch.contiguous_format) for part in batch]
            for part in parts:
                if part is not None:
                    dist.broadcast(part, src=share.source, group=share.group)
            dealt.append(type(batch)(*parts))  # type: ignore[arg-type]  # a named tuple of the same fields
        return dealt


def _device_of_words(device: torch.device) -> torch.device:
    """Return where a word is put for the collective: on the host if the process group works there."""
    if dist.is_initialized() and "cpu:" not in dist.get_backend_config():
        return device
    return torch.device("cpu")
