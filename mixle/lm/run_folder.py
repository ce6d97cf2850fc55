"""The folder of a run: what is in it, when it may be replaced, and when the run in it can go on."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mixle.lm.corpus import Corpus
from mixle.lm.settings import Settings


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

    def require_free(self) -> None:
        """Refuse a place that holds anything but an earlier run."""
        if self.path.exists() and not self.path.is_dir():
            raise ValueError(f"--out {self.path} is a file; name a folder")
        if self.path.exists() and any(self.path.iterdir()) and not self.description.is_file():
            raise ValueError(f"--out {self.path} holds files that are not of an earlier run; name another folder")

    def make(self) -> None:
        """Make the folder now, not after minutes of training."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"--out {self.path} cannot be made ({error.strerror}); name another folder") from None

    def describe(self, settings: Settings, corpus: Corpus, *, complete: bool) -> None:
        """Write what it takes to go on."""
        described = {"settings": dataclasses.asdict(settings), "text_sha256": _sha256(corpus), "complete": complete}
        self.description.write_text(json.dumps(described, indent=2) + "\n")

    def unfinished_settings(self) -> Settings:
        """Return the settings of the run in this folder; refuse one that there is nothing to do for."""
        if not self.description.is_file():
            raise ValueError(f"--resume {self.path} is not the folder of a run: it has no {self.description.name}")
        described = self._described()
        if described["complete"]:
            raise ValueError(f"--resume {self.path}: that run is complete; start a new one, with more --epochs perhaps")
        values = described["settings"]
        return Settings(**{**values, "files": tuple(values["files"])})

    def require_same_text(self, corpus: Corpus) -> None:
        """Refuse to go on with another text than the run began with."""
        if self._described()["text_sha256"] != _sha256(corpus):
            raise ValueError(
                f"--resume {self.path}: the text is not what the run began with (files, or the Python whose library it "
                "is, have changed); start a new run"
            )

    def _described(self) -> dict[str, Any]:
        described: dict[str, Any] = json.loads(self.description.read_text())
        return described


def _sha256(corpus: Corpus) -> str:
    return hashlib.sha256(corpus.train.tobytes() + corpus.heldout.tobytes()).hexdigest()
