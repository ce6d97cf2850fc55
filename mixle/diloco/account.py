"""How much of what a learner trained has reached a commit, by its own events."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mixle.diloco.events import Kind
from mixle.diloco.records import RoundRecord, VoidRound

__all__ = ["Account"]


class Account:
    """Follow the snapshots of one learner from publication to commit.

    Args:
        fragments: of the run.

    Attributes:
        published: the newest round that a snapshot was published for, -1 if none.
        merged: steps whose work is in commits; a step counts once for each fragment, so the whole is steps times
            fragments.
    """

    def __init__(self, fragments: int) -> None:
        self._fragments = fragments
        self._out: dict[int, int] = {}
        self._left: dict[int, int] = {}
        self.published = -1
        self.merged = 0

    @property
    def out(self) -> dict[int, int]:
        """Steps of the snapshots whose rounds are not known to be committed, by round."""
        return self._left | self._out

    def resume(self, merged: int, out: dict[int, int]) -> None:
        """Go on from what an earlier process of the learner had merged, and had published."""
        self.merged, self._left = merged, dict(out)

    def settle(self, learner: str, newest: int, round_record: Callable[[int], RoundRecord | VoidRound | None]) -> None:
        """Count the earlier process's snapshots that the rounds up to ``newest`` took.

        Args:
            learner: the id of both.
            round_record: reads a round's record.
        """
        for round_ in [each for each in sorted(self._left) if each <= newest]:
            record = round_record(round_)
            if isinstance(record, RoundRecord) and any(each.learner == learner for each in record.contributions):
                self.merged += self._left[round_]
            del self._left[round_]

    def hear(self, kind: Kind, round_: int | None, detail: dict[str, Any]) -> None:
        """Take in one event of the learner's node."""
        if round_ is None:
            return
        if kind == "published":
            self.published = round_
            self._out[round_] = detail["steps"]
        elif kind == "applied":
            mine = [r for r in self._out if r <= round_ and r % self._fragments == round_ % self._fragments]
            if mine and detail["taken"]:
                self.merged += self._out[max(mine)]
            for each in mine:
                del self._out[each]
