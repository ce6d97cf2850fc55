"""Several ranks of one site: rank 0 speaks for it, and the others do with the model what rank 0 does, when it does it.

Commits land on rank 0 at a time of their own, but every rank must move its model at the same step. So each call of a
session is a conversation: rank 0 announces what it does to the parameters, the others join in, until it says that the
call is over, or why it failed. A call in which nothing happens is one broadcast of a few bytes.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from mixle.diloco.alignment import Blend, Carry, Overwrite
from mixle.diloco.clock import Clock
from mixle.diloco.parameters import Arrays, Ranks, SiteParameters

__all__ = ["PatientClock", "Site", "SiteError"]

logger = logging.getLogger(__name__)

_NOTHING, _READ, _ALIGN, _DONE, _FAILED = range(5)
_NUMBERS = 4
_LONGEST_MESSAGE = 2000


class SiteError(RuntimeError):
    """Rank 0, which speaks for the site, failed; the message is its error's."""


class Site:
    """The parameters of all ranks of a site as one; on rank 0 a :class:`~mixle.diloco.parameters.Parameters`.

    Args:
        parameters: this rank's.
        ranks: its place.
    """

    def __init__(self, parameters: SiteParameters, ranks: Ranks) -> None:
        self.schema, self.embeddings, self.buffers = parameters.schema, parameters.embeddings, parameters.buffers
        self._parameters, self._ranks = parameters, ranks
        self._names = parameters.schema.names
        self._places = {name: place for place, name in enumerate(self._names)}

    # ---- rank 0

    @contextmanager
    def speaking(self, answer: Callable[[], Sequence[int]]) -> Iterator[None]:
        """Let the other ranks join in what the block does to the parameters, then tell them ``answer()``.

        What the block raises is raised on every rank.
        """
        try:
            yield
            numbers = answer()
        except BaseException as error:
            self._tell_failure(error)
            raise
        self._tell(_DONE, *numbers)

    def require_in_place(self, names: Iterable[str]) -> None:
        """Check that this rank's model still holds these parameters."""
        self._parameters.require_in_place(names)

    def read(self, names: Iterable[str]) -> Arrays:
        """Return the whole parameters, on rank 0."""
        asked = list(names)
        if self._parameters.is_sharded:
            self._tell_names(_READ, asked)
        return self._parameters.read(asked)

    def align(self, committed: Arrays, reference: Arrays, how: Carry | Overwrite | Blend) -> None:
        """Bring the parameters of every rank to a commit."""
        self._tell_names(_ALIGN, list(committed))
        self._parameters.align(committed, reference, how)

    def keep_waiting(self) -> None:
        """Let the other ranks' broadcast return and begin anew, so that no deadline of theirs runs out."""
        self._tell(_NOTHING)

    # ---- the others

    def follow(self) -> tuple[int, ...]:
        """Join in what rank 0 does until it is done, and return what it answers.

        Raises:
            SiteError: it failed.
        """
        while True:
            command, *numbers = self._hear(_NUMBERS)
            if command == _READ:
                self._parameters.read(self._hear_names(numbers[0]))
            elif command == _ALIGN:
                self._parameters.follow(self._hear_names(numbers[0]))
            elif command == _DONE:
                return tuple(numbers)
            elif command == _FAILED:
                told = bytes(self._hear(numbers[0])).decode(errors="replace")
                raise SiteError(f"rank 0, which speaks for the site, failed: {told}")

    # ----

    def _tell(self, command: int, *numbers: int) -> None:
        self._ranks.broadcast(np.array([command, *numbers, *[0] * (_NUMBERS - 1 - len(numbers))], np.int64))

    def _tell_names(self, command: int, names: Sequence[str]) -> None:
        self._tell(command, len(names))
        self._ranks.broadcast(np.array([self._places[name] for name in names], np.int64))

    def _tell_failure(self, error: BaseException) -> None:
        message = f"{type(error).__name__}: {error}".encode()[:_LONGEST_MESSAGE]
        try:
            self._tell(_FAILED, len(message))
            self._ranks.broadcast(np.array(list(message), np.int64))
        except Exception:  # the ranks may be what failed; the error that led here is the one to raise
            logger.exception("the other ranks of the site could not be told of the failure of rank 0")

    def _hear(self, count: int) -> list[int]:
        heard = np.empty(count, np.int64)
        self._ranks.broadcast(heard)
        return heard.tolist()

    def _hear_names(self, count: int) -> list[str]:
        return [self._names[place] for place in self._hear(count)]


class PatientClock:
    """A clock whose waits keep the other ranks of a site from running into their deadlines."""

    def __init__(self, clock: Clock, site: Site) -> None:
        self._clock, self._site = clock, site
        self.monotonic, self.sleep = clock.monotonic, clock.sleep

    def wait(self, event: threading.Event, timeout: float) -> bool:
        """Wait for ``event``, at most ``timeout`` seconds."""
        happened = self._clock.wait(event, timeout)
        self._site.keep_waiting()
        return happened
