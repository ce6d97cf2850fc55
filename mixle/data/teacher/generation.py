"""Call a generator and put what it makes into slots.

A generator is called in one of four ways; ``cfg`` is a dict or None:

=========  ===========  ===========================  =======================================================
max_batch  into_buffer  call                         result
=========  ===========  ===========================  =======================================================
None       False        ``fn(id, cfg)``              one sample: bytes, or a mapping of tensors
n          False        ``fn(id, cfg, count)``       ``count`` samples, or a mapping of ``(count, *shape)``
None       True         ``fn(id, cfg, out)``         None; it fills ``out``, a mapping of arrays ``shape``
n          True         ``fn(id, cfg, count, out)``  None; it fills ``out``, arrays ``(count, *shape)``
=========  ===========  ===========================  =======================================================

Whatever goes wrong in it fails the slots that it was called for, never the worker.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from mixle.data.teacher.messages import DONE, FAILED, SKIPPED, U64
from mixle.data.teacher.slots import SlotReassigned, Slots

__all__ = ["Demand", "Generator", "Interrupted", "Outcome", "Target"]

logger = logging.getLogger(__name__)

MOST_WORDS = 1000
_HOUSE = str(Path(__file__).parent)
NOTHING = 1 << 63

GeneratorFunction: TypeAlias = Callable[..., Any]


class Interrupted(BaseException):
    """A second signal came: leave the generator where it is."""


class Demand:
    """What is still wanted of a worker; another thread may change it while a generator runs.

    Attributes:
        newest: the newest generation that is heard of; work of older ones is void.
    """

    def __init__(self) -> None:
        self.newest = 0
        self._ended = False

    @property
    def ended(self) -> bool:
        """Whether nothing more shall be made."""
        return self._ended

    def raise_to(self, generation: int) -> None:
        """Make work of older generations void; one thread at a time."""
        self.newest = max(self.newest, generation)
        if self._ended:  # by a signal or a thread between the reading and the writing
            self.newest = NOTHING

    def restart(self, generation: int) -> None:
        """Begin anew with another run, whose generations are others."""
        self.newest = generation
        if self._ended:
            self.newest = NOTHING

    def end(self) -> None:
        """Make all work void; from any thread or signal handler."""
        self._ended = True
        self.newest = NOTHING


class Target(NamedTuple):
    """Neighbouring slots to fill; the token of slot ``first + i`` is ``token + i`` modulo 2**64."""

    slots: Slots
    first: int
    count: int  # type: ignore[assignment]  # and not tuple's method
    token: int
    generation: int


class Outcome(NamedTuple):
    """What became of neighbouring slots: DONE, FAILED with a message, or SKIPPED: nothing was written."""

    first: int
    count: int  # type: ignore[assignment]  # and not tuple's method
    outcome: int
    message: str | None


@dataclass(frozen=True)
class Generator:
    """Hold a generator function, and how it is called (see the table above).

    Args:
        function: makes samples.
        max_batch: the most samples of one call; None for a function that makes one.
        into_buffer: the function fills arrays that it is given.
        checksum: put a CRC-32 of each sample beside it.
    """

    function: GeneratorFunction
    max_batch: int | None = None
    into_buffer: bool = False
    checksum: bool = False

    @property
    def joins(self) -> bool:
        """Whether one call can fill slots that are not neighbours."""
        return self.max_batch is not None and not self.into_buffer

    def fill(
        self, targets: Sequence[Target], model_id: str, model_cfg: dict[str, Any] | None, demand: Demand
    ) -> list[list[Outcome]]:
        """Fill the slots of each target, and tell for each what became of its slots, all of them and in order.

        Args:
            targets: one, or several of one generation if this generator :attr:`joins`; at most ``max_batch`` slots.
            model_id, model_cfg: what the function is called with.
            demand: looked at before each call; slots of an older generation are skipped.
        """
        # Who made a slot may have had no broker to tell it to; a reader may be at it by now.
        if any(map(_has_complete, targets)):
            return self._fill_open(targets, model_id, model_cfg, demand)
        if self.joins:
            return self._fill_joined(targets, model_id, model_cfg, demand)
        fill = self._fill_in_place if self.into_buffer else self._fill_one_by_one
        return [fill(target, model_id, model_cfg, demand) for target in targets]

    def _fill_open(
        self, targets: Sequence[Target], model_id: str, model_cfg: dict[str, Any] | None, demand: Demand
    ) -> list[list[Outcome]]:
        """Fill what is not complete already."""
        results = []
        for slots, first, count, token, generation in targets:
            complete = slots.complete(first, count, token, generation).tolist()
            outcomes = []
            for row, done in enumerate(complete):
                slot, slot_token = first + row, token + row & U64
                if done:
                    outcomes.append(Outcome(slot, 1, DONE, None))
                else:
                    one = Target(slots, slot, 1, slot_token, generation)
                    outcomes += self.fill([one], model_id, model_cfg, demand)[0]
            results.append(outcomes)
        return results

    def _fill_one_by_one(
        self, target: Target, model_id: str, model_cfg: dict[str, Any] | None, demand: Demand
    ) -> list[Outcome]:
        slots, first, count, token, generation = target
        function, write, checksum = self.function, slots.write, self.checksum
        record = _Record(first)
        end = first + count
        for slot in range(first, end):
            if demand.newest > generation:
                record.reach(slot)
                record.add(end, SKIPPED, None)
                break
            try:
                write(slot, token, generation, function(model_id, model_cfg), checksum=checksum)
            except SlotReassigned as error:
                record.reach(slot)
                record.add(slot + 1, SKIPPED, str(error))
            except Interrupted:
                raise
            except BaseException as error:
                record.reach(slot)
                record.add(slot + 1, FAILED, _words(error))
            token = token + 1 & U64
        record.reach(end)
        return record.outcomes

    def _fill_in_place(
        self, target: Target, model_id: str, model_cfg: dict[str, Any] | None, demand: Demand
    ) -> list[Outcome]:
        slots, first, count, token, generation = target
        record = _Record(first)
        end, step = first + count, self.max_batch or 1
        for start in range(first, end, step):
            if demand.newest > generation:
                record.reach(start)
                record.add(end, SKIPPED, None)
                break
            size = min(step, end - start)
            try:
                out = slots.writable(start, size, token, generation)
                if self.max_batch is None:
                    returned = self.function(model_id, model_cfg, {name: rows[0, ...] for name, rows in out.items()})
                else:
                    returned = self.function(model_id, model_cfg, size, out)
                if returned is not None:
                    raise TypeError(
                        f"with into_buffer=True the generator fills what it is given and returns None, "
                        f"not {type(returned).__name__}"
                    )
                slots.seal(start, size, token, generation, checksum=self.checksum)
            except SlotReassigned as error:
                record.reach(start)
                record.add(start + size, SKIPPED, str(error))
            except Interrupted:
                raise
            except BaseException as error:
                record.reach(start)
                record.add(start + size, FAILED, _words(error))
            token = token + size & U64
        record.reach(end)
        return record.outcomes

    def _fill_joined(
        self, targets: Sequence[Target], model_id: str, model_cfg: dict[str, Any] | None, demand: Demand
    ) -> list[list[Outcome]]:
        if demand.newest > targets[0].generation:
            return [[Outcome(target.first, target.count, SKIPPED, None)] for target in targets]
        total = sum(target.count for target in targets)
        try:
            samples = self.function(model_id, model_cfg, total)
            _require_batch(samples, total)
        except Interrupted:
            raise
        except BaseException as error:
            return [[Outcome(target.first, target.count, FAILED, _words(error))] for target in targets]
        outcomes, start = [], 0
        for target in targets:
            put = self._put_rows if isinstance(samples, Mapping) else self._put_each
            outcomes.append(put(target, samples, start))
            start += target.count
        return outcomes

    def _put_rows(self, target: Target, samples: Mapping[str, Any], start: int) -> list[Outcome]:
        """Write rows ``[start, start + count)`` of tensors that hold a batch."""
        slots, first, count, token, generation = target
        try:
            rows = {name: value[start : start + count] for name, value in samples.items()}
            slots.write_batch(first, count, token, generation, rows, checksum=self.checksum)
        except SlotReassigned as error:
            return [Outcome(first, count, SKIPPED, str(error))]
        except Interrupted:
            raise
        except BaseException as error:
            return [Outcome(first, count, FAILED, _words(error))]
        return [Outcome(first, count, DONE, None)]

    def _put_each(self, target: Target, samples: Sequence[Any], start: int) -> list[Outcome]:
        """Write samples ``[start, start + count)`` of a sequence."""
        made = iter(samples[start : start + target.count])
        one_by_one = Generator(lambda model_id, model_cfg: next(made), checksum=self.checksum)
        return one_by_one._fill_one_by_one(target, "", None, Demand())


class _Record:
    """Outcomes of slots in order, neighbours of the same outcome as one."""

    def __init__(self, first: int) -> None:
        self.outcomes: list[Outcome] = []
        self._at = first

    def reach(self, end: int) -> None:
        """Note that the slots up to ``end`` are done."""
        if end > self._at:
            self.add(end, DONE, None)

    def add(self, end: int, outcome: int, message: str | None) -> None:
        """Note what became of the slots up to ``end``."""
        count = end - self._at
        last = self.outcomes[-1] if self.outcomes else None
        if last is not None and last[2:] == (outcome, message):
            self.outcomes[-1] = last._replace(count=last.count + count)
        else:
            self.outcomes.append(Outcome(self._at, count, outcome, message))
        self._at = end


def _has_complete(target: Target) -> bool:
    """Tell whether some slots are complete already."""
    slots, first, count, token, generation = target
    if count == 1:
        return slots.is_complete(first, token, generation)
    return bool(slots.complete(first, count, token, generation).any())


def _require_batch(samples: object, count: int) -> None:
    if isinstance(samples, Mapping):
        for name, value in samples.items():
            shape = getattr(value, "shape", None)
            if not shape or shape[0] != count:
                found = f"shape {tuple(shape)}" if shape is not None else type(value).__name__
                raise ValueError(f"{count} samples were asked for: tensor {name!r} must be ({count}, ...), not {found}")
    elif isinstance(samples, Sequence) and not isinstance(samples, (str, bytes, bytearray, memoryview)):
        if len(samples) != count:
            raise ValueError(f"{count} samples were asked for, and the generator returned {len(samples)}")
    else:
        raise TypeError(
            f"with max_batch= the generator returns a sequence of {count} samples or a mapping of tensors "
            f"({count}, ...), not {type(samples).__name__}"
        )


def _words(error: BaseException) -> str:
    """Return the type and message of what went wrong and where, short enough for a message."""
    logger.debug("a generator failed", exc_info=error)
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if "site-packages" not in frame.filename and not frame.filename.startswith(_HOUSE)]
    where = f" ({own[-1].filename}, line {own[-1].lineno}, in {own[-1].name})" if own else ""
    text = f"{type(error).__name__}: {error}{where}"
    text = text if len(text) <= MOST_WORDS else f"{text[: MOST_WORDS - 3]}..."
    return text.encode(errors="replace").decode()
