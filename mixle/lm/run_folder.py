"""The folder of a run: what is in it, when it may be replaced, and when the run in it can go on."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mixle.lm.corpus import Corpus
from mixle.lm.settings import Settings
from mixle.utils.exact import require_exact_bool, require_exact_int, require_finite_float
from mixle.utils.whole_file import locked, replace_file

STARTED_IN = "MIXLE_LM_STARTED_IN"
"""Names the folder to the ranks whose starter holds its lock."""

_KEYS = ("settings", "text_sha256", "complete", "replaces_model")
_SHA256 = re.compile("[0-9a-f]{64}")


@dataclass(frozen=True)
class RunFolder:
    """Paths in the folder of a run."""

    path: Path

    @property
    def description(self) -> Path:
        """The settings, and a hash of the text."""
        return self.path / "run.json"

    @property
    def model(self) -> Path:
        """The folder that the leaf is saved in."""
        return self.path / "model"

    @property
    def plot(self) -> Path:
        return self.path / "loss.png"

    @property
    def numbers(self) -> Path:
        return self.path / "results.json"

    @property
    def sample(self) -> Path:
        return self.path / "sample.txt"

    @property
    def lock(self) -> Path:
        """Locked by the run in this folder."""
        return self.path / ".lock"

    @property
    def ranks_lock(self) -> Path:
        """Locked by each rank that the holder of ``lock`` has started."""
        return self.path / ".ranks.lock"

    def require_free(self) -> None:
        """Refuse a place that holds anything but an earlier run."""
        if self.path.exists() and not self.path.is_dir():
            raise ValueError(f"--out {self.path} is a file; name a folder")
        if self.description.is_file():
            self._described()
        elif self.path.exists() and any(path not in (self.lock, self.ranks_lock) for path in self.path.iterdir()):
            raise ValueError(f"--out {self.path} holds files that are not of an earlier run; name another folder")

    @contextmanager
    def held(self, rank: int | None) -> Iterator[None]:
        """Keep other runs out of the folder, for as long as this process or a rank that it starts is alive.

        Args:
            rank: of this process, None if it is to start the ranks.

        Raises:
            ValueError: another run is in the folder.
        """
        with ExitStack() as locks:
            try:
                self._lock(locks, rank)
            except BlockingIOError:
                raise ValueError(
                    f"{self.path}: another run is in this folder; wait for it to end, or name another with --out"
                ) from None
            yield

    def _lock(self, locks: ExitStack, rank: int | None) -> None:
        place = str(self.path.absolute())
        if os.environ.get(STARTED_IN) == place:
            locks.enter_context(locked(self.ranks_lock, shared=True, wait=False))
        elif not rank:  # the others were started beside a rank 0 that takes it
            locks.enter_context(locked(self.lock, wait=False))
            with locked(self.ranks_lock, wait=False):
                pass  # no rank has outlived the process that started it
            if rank is None:
                os.environ[STARTED_IN] = place
                locks.callback(os.environ.pop, STARTED_IN)

    def make(self) -> None:
        """Make the folder now, not after minutes of training."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"--out {self.path} cannot be made ({error.strerror}); name another folder") from None

    def replaced(self, resume: str) -> str:
        """Return what a new run here replaces, in words; nothing if there is no run.

        Args:
            resume: the command that would go on with it.
        """
        if not self.description.is_file():
            return ""
        if self._described()["complete"]:
            return f"Replacing the finished run in {self.path} as soon as this one has a model to save."
        return f"Replacing the unfinished run in {self.path}; to go on with it instead: {resume}"

    def clear_reports(self) -> None:
        """Remove an earlier run's plot, numbers and sample, which another model is about to be saved beside."""
        for report in (self.plot, self.numbers, self.sample):
            report.unlink(missing_ok=True)

    def announce(self, settings: Settings, corpus: Corpus) -> None:
        """Describe a new run before its model is there, so that an earlier one is never taken for it."""
        self._write(settings, corpus, complete=False, replaces=self._model_sha256())

    def describe(self, settings: Settings, corpus: Corpus, *, complete: bool) -> None:
        """Write what it takes to go on with the model that is there."""
        self._write(settings, corpus, complete=complete, replaces=None)

    def unfinished_settings(self) -> Settings:
        """Return the settings of the run in this folder; refuse one that there is nothing to do for."""
        if not self.description.is_file():
            raise ValueError(f"--resume {self.path} is not the folder of a run: it has no {self.description.name}")
        described = self._described()
        if described["complete"]:
            raise ValueError(f"--resume {self.path}: that run is complete; start a new one, with more --epochs perhaps")
        if described["replaces_model"] == self._model_sha256():
            raise ValueError(f"--resume {self.path}: that run ended before it had saved a model; start a new one")
        values = described["settings"]
        return Settings(**{**values, "files": tuple(values["files"])})

    def require_same_text(self, corpus: Corpus) -> None:
        """Refuse to go on with another text than the run began with."""
        if self._described()["text_sha256"] != _sha256(corpus):
            raise ValueError(
                f"--resume {self.path}: the text is not what the run began with (files, or the Python whose library it "
                "is, have changed); start a new run"
            )

    def _write(self, settings: Settings, corpus: Corpus, *, complete: bool, replaces: str | None) -> None:
        described = {
            "settings": dataclasses.asdict(settings),
            "text_sha256": _sha256(corpus),
            "complete": complete,
            "replaces_model": replaces,
        }
        replace_file(self.description, (json.dumps(described, indent=2) + "\n").encode())

    def _described(self) -> dict[str, Any]:
        """Return what ``_write`` wrote, after checking that it can have."""
        try:
            described = json.loads(self.description.read_bytes())
            if not isinstance(described, dict):
                raise TypeError(f"it is a {type(described).__name__}, not an object")
            if described.keys() != set(_KEYS):
                raise ValueError(f"its keys are {', '.join(described)}, not {', '.join(_KEYS)}")
            _check_settings(described["settings"])
            require_exact_bool(described["complete"], "complete")
            for name in ("text_sha256", "replaces_model"):
                value = described[name]
                if (value is not None or name == "text_sha256") and not _is_sha256(value):
                    raise ValueError(f"{name}={value!r:.80} is no SHA-256")
        except (OSError, TypeError, ValueError, RecursionError) as error:
            raise ValueError(
                f"{self.description} is damaged, or of another program ({error}); the model, if there is one, is in "
                f"{self.model}: keep that, and start a new run in another folder with --out"
            ) from None
        found: dict[str, Any] = described
        return found

    def _model_sha256(self) -> str:
        """Return the hash of the description of the model that is there, of nothing if there is none."""
        description = self.model / "leaf.json"
        return hashlib.sha256(description.read_bytes() if description.is_file() else b"").hexdigest()


def _is_sha256(value: object) -> bool:
    return isinstance(value, str) and _SHA256.fullmatch(value) is not None


def _check_settings(values: object) -> None:
    """Refuse values that are not of the types that a run's settings have."""
    if not isinstance(values, dict):
        raise TypeError(f"settings is a {type(values).__name__}, not an object")
    names = {field.name for field in dataclasses.fields(Settings)}
    if values.keys() != names:
        raise ValueError(f"settings has keys {', '.join(values)}, not {', '.join(sorted(names))}")
    for name, value in values.items():
        if name == "files":
            if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
                raise TypeError(f"files={value!r:.80} must be a list of paths")
        elif name in ("heldout", "lr"):
            require_finite_float(value, name)
        else:
            require_exact_int(value, name)


def _sha256(corpus: Corpus) -> str:
    return hashlib.sha256(corpus.train.tobytes() + corpus.heldout.tobytes()).hexdigest()
