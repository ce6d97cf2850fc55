"""What a session remembers on a disk of its node: copied with a snapshot, saved once that is published, found again.

Rank 0 decides what is saved and where a site goes on; the other ranks save theirs with its snapshots, and go on from
the one that it names. So each keeps a few: those of snapshots on the way, one that is published, and one to spare.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from mixle.diloco.account import Account
from mixle.diloco.clock import Clock
from mixle.diloco.exchange import Report
from mixle.diloco.existing_run import find_run_record
from mixle.diloco.mailbox import Mailbox
from mixle.diloco.state_folder import Kept, Resumed, StateFolder
from mixle.diloco.state_tree import frozen

__all__ = ["SiteState"]

logger = logging.getLogger(__name__)


class SiteState:
    """The states of one rank of a site.

    Args:
        path: the folder.
        state: returns what to remember beside the counts; None: nothing.
        lead: rounds that the site may be ahead of the commits.
        rank, clock: as in :class:`~mixle.diloco.state_folder.StateFolder`, whose errors are raised.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        state: Callable[[], Any] | None,
        *,
        lead: int,
        rank: int,
        clock: Clock,
    ) -> None:
        self._folder = StateFolder(path, rank=rank, clock=clock)
        self._state, self._keep, self._rank = state, lead + 2, rank
        self._copied: deque[tuple[int, Kept]] = deque()

    def close(self) -> None:
        """Let another process have the folder."""
        self._folder.close()

    # ---- rank 0

    def newest(self, learner_id: str | None, mailbox: Mailbox) -> Kept | None:
        """Return the newest state, None if there is none.

        Raises:
            ValueError: it is not this site's, or not of the run in ``mailbox``, or no state.
            MailboxError: the store does not answer.
        """
        kept = self._folder.newest()
        if kept is None:
            return None
        if learner_id is not None and learner_id != kept.learner_id:
            raise ValueError(
                f"state_dir holds the state of learner_id={kept.learner_id!r}, not of {learner_id!r}; give each "
                "site a folder of its own, or leave learner_id out to go on as that one"
            )
        run = find_run_record(mailbox)
        _require_run("state_dir", kept, None if run is None else run.id)
        return kept

    def copy(self, round_: int, *, run: str, learner_id: str, steps: int, samples: int) -> None:
        """Copy the state that belongs to the snapshot of a round; the other ranks :meth:`save` at the same time."""
        state = None if self._state is None else frozen(self._state())
        self._copied.append((round_, Kept(run, learner_id, steps, samples, 0, {}, state)))

    def save_published(self, account: Account, report: Report) -> None:
        """Save the newest of the copies whose snapshot ``account`` knows to be published; report it if that fails."""
        newest = None
        while self._copied and self._copied[0][0] <= account.published:
            _, newest = self._copied.popleft()
        if newest is None:
            return
        try:
            # The snapshot is published by now, so it is among those that are out, and so are those before it.
            self._folder.save(replace(newest, merged=account.merged, out=account.out), keep=self._keep)
        except OSError as error:
            report("store", None, {"error": _not_saved(newest.steps, error)})

    # ---- the others

    def save(self, *, run: str, steps: int) -> None:
        """Save this rank's state after so many steps of the site; log it if that fails."""
        state = None if self._state is None else self._state()
        try:
            self._folder.save(Kept(run, "", steps, 0, 0, {}, state), keep=self._keep)
        except OSError as error:
            logger.warning("rank %d: %s", self._rank, _not_saved(steps, error))

    def after(self, steps: int, *, run: str) -> Resumed:
        """Return the state after so many steps of the site, which rank 0 goes on from.

        Raises:
            ValueError: it is not there, or of another run.
        """
        kept = self._folder.newest(steps)
        if kept is None:
            raise ValueError(
                f"state_dir of rank {self._rank} lacks the state after {steps} steps that rank 0 goes on from; "
                "bring the folder along, or remove those of all ranks to begin anew"
            )
        _require_run(f"state_dir of rank {self._rank}", kept, run)
        return Resumed(kept.steps, kept.samples, kept.state)


def _not_saved(steps: int, error: OSError) -> str:
    return f"state_dir has not got the state after {steps} steps: {error}; the next is tried again"


def _require_run(where: str, kept: Kept, found: str | None) -> None:
    if found == kept.run:
        return
    there = "the mailbox holds no run" if found is None else f"the mailbox holds run {found}"
    raise ValueError(
        f"{where} holds the state of another run: it is of run {kept.run}, and {there}; give each run a folder of its "
        "own, or remove this one to begin anew"
    )
