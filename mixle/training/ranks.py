"""What training asks of the ranks that it runs on; the handle brings the object that answers."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

# Ranks read data from different disks and write checkpoints at their own pace before they meet to train.
PREPARATION_S = 600.0


class Ranks(Protocol):
    """This rank's place among its peers. Every method that waits has a deadline and names who is missing."""

    rank: int
    world: int

    def meet(self, what: str) -> None:
        """Wait until every rank is here."""

    def agree(self, what: str, error: Exception | None, *, deadline_s: float | None = None) -> None:
        """Raise on every rank if any rank has an ``error``."""

    def exchange(self, what: str, value: str, *, deadline_s: float | None = None) -> list[str]:
        """Return every rank's ``value``, in rank order."""

    def guard(self, what: str) -> AbstractContextManager[None]:
        """Run a stretch of collectives; if any rank fails in it, all raise."""
