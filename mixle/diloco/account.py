"""How much of what a learner trained has reached a commit, by its own events."""

from __future__ import annotations

from typing import Any

from mixle.diloco.events import Kind

__all__ = ["Account"]


class Account:
    """Follow the snapshots of one learner from publication to commit.

    Args:
        fragments: of the run.
        merged: what an earlier process of the learner had merged.

    Attributes:
        published: the newest round that a snapshot was published for, -1 if none.
        merged: steps whose work is in commits; a step counts once for each fragment, so the whole is steps times
            fragments.
    """

    def __init__(self, fragments: int, merged: int = 0) -> None:
        self._fragments = fragments
        self._out: dict[int, int] = {}
        self.published = -1
        self.merged = merged

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
