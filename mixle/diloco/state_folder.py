"""What a node keeps on a disk of its own, so that one that was killed goes on where it last published.

The mailbox holds what sites share: the parameters. A site's inner optimizer and its place in its data are its own; a
folder holds them as they were at the last snapshot that was published. What is written there is found whole or not at
all, by one process at a time, and never executed.
"""

from __future__ import annotations

import os
import re
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mixle.diloco import state_tree
from mixle.diloco.clock import SYSTEM_CLOCK, Clock
from mixle.diloco.mailbox import require_id
from mixle.utils.exact import require_nonnegative_int
from mixle.utils.whole_file import locked, replace_file

__all__ = ["Kept", "Resumed", "StateFolder", "require_folder"]

PATIENCE_S = 10.0
"""Workers that a killed process has forked hold what it held until they notice; those of a DataLoader look each 5 s."""
_FILE = re.compile(r"rank(\d+)-(\d{15})\.npz")


@dataclass(frozen=True)
class Resumed:
    """What a session found of the process before it.

    Attributes:
        steps: what that had trained when it last published.
        samples: on how many, likewise.
        state: what its ``state()`` returned then.
    """

    steps: int
    samples: int
    state: Any


@dataclass(frozen=True)
class Kept:
    """A node's state at a snapshot.

    Attributes:
        run: the id of the run that it is of.
        learner_id: whose it is; empty on ranks other than 0.
        steps, samples: what it had trained.
        merged: steps of these, times fragments, that were in commits when this was saved.
        out: steps of its snapshots whose rounds it did not know to be committed, by round.
        state: what its ``state()`` returned.

    Raises:
        TypeError, ValueError: an argument that is not what it says above.
    """

    run: str
    learner_id: str
    steps: int
    samples: int
    merged: int
    out: dict[int, int]
    state: Any

    def __post_init__(self) -> None:
        if not isinstance(self.run, str) or not isinstance(self.out, dict):
            raise TypeError(f"run={self.run!r:.50} must be a string, and out={self.out!r:.50} a dict")
        if self.learner_id != "":
            require_id(self.learner_id, "learner_id")
        for name in ("steps", "samples", "merged"):
            require_nonnegative_int(getattr(self, name), name)
        for round_, steps in self.out.items():
            require_nonnegative_int(round_, "a round in out")
            require_nonnegative_int(steps, f"out[{round_}]")


class StateFolder:
    """Keep one rank's state in a folder that only its owner reads.

    Args:
        path: the folder; made if it is not there.
        rank: this rank of the site; each has files of its own, on a disk that they may share.
        clock: this process's time.

    Raises:
        TypeError, ValueError: ``path`` is no path, or there can be no folder to write to.
        BlockingIOError: another process has the rank's files, and keeps them for :data:`PATIENCE_S`.
    """

    def __init__(self, path: str | os.PathLike[str], *, rank: int = 0, clock: Clock = SYSTEM_CLOCK) -> None:
        self._folder, self._rank = require_folder(path), rank
        self._held = ExitStack()
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock(self._folder / f"rank{rank}.lock", clock)
        except BlockingIOError:
            raise BlockingIOError(
                f"state_dir={str(path)!r} is in use by another process, or by a session that is not closed; give each "
                "a folder of its own"
            ) from None
        except OSError as error:
            raise ValueError(
                f"state_dir={str(path)!r} must be a folder that this process can write to: {error.strerror}"
            ) from error

    def _lock(self, path: Path, clock: Clock) -> None:
        until = clock.monotonic() + PATIENCE_S
        while True:
            try:
                self._held.enter_context(locked(path, wait=False))
                return
            except BlockingIOError:
                if clock.monotonic() >= until:
                    raise
            clock.sleep(0.1)

    def newest(self, steps: int | None = None) -> Kept | None:
        """Return the newest state, or the one after so many steps; None if there is none.

        Raises:
            ValueError: the file is no such state.
        """
        found = self._files()
        if steps is not None:
            found = {each: path for each, path in found.items() if each == steps}
        if not found:
            return None
        told = max(found)
        path = found[told]
        try:
            kept = Kept(**state_tree.from_bytes(path.read_bytes()))
            if kept.steps != told:
                raise ValueError(f"it is of {kept.steps} steps")
            return kept
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path} is not the state of a node ({error}); remove it to begin anew") from error

    def save(self, kept: Kept, *, keep: int) -> None:
        """Write a state, and delete all but the ``keep`` newest."""
        name = f"rank{self._rank}-{kept.steps:015d}.npz"
        replace_file(self._folder / name, state_tree.to_bytes({**vars(kept)}))
        found = self._files()
        for steps in sorted(found)[:-keep]:
            found[steps].unlink(missing_ok=True)

    def close(self) -> None:
        """Let another process have the files."""
        self._held.close()

    def _files(self) -> dict[int, Path]:
        found = {}
        for path in self._folder.iterdir():
            name = _FILE.fullmatch(path.name)
            if name is not None and int(name[1]) == self._rank:
                found[int(name[2])] = path
        return found


def require_folder(path: object) -> Path:
    """Return the path of a ``state_dir``.

    Raises:
        TypeError, ValueError: it is none.
    """
    if not isinstance(path, str | os.PathLike) or not isinstance(os.fspath(path), str):
        raise TypeError(f"state_dir={path!r} must be the path of a folder, not {type(path).__name__}")
    if not os.fspath(path) or "\0" in os.fspath(path):
        raise ValueError(f"state_dir={path!r} must be the path of a folder, such as '/var/lib/site' or '.'")
    return Path(path)
