"""The text a byte-level model is trained on, and the part of it that is held out."""

from __future__ import annotations

import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

NOT_THE_LIBRARY = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test"})


@dataclass(frozen=True)
class Corpus:
    """Bytes to train on and bytes to be judged on, both 1-D uint8."""

    train: np.ndarray
    heldout: np.ndarray
    description: str


def standard_library_files() -> list[Path]:
    """List the sources of the running Python's standard library, sorted, without its tests and installed packages."""
    root = Path(sysconfig.get_paths()["stdlib"])
    return [path for path in sorted(root.rglob("*.py")) if not NOT_THE_LIBRARY & set(path.relative_to(root).parts)]


def read_corpus(files: Sequence[Path], *, max_bytes: int, heldout_fraction: float, seed: int) -> Corpus:
    """Read ``files`` in an order drawn from ``seed``, up to ``max_bytes`` in all, and hold out the end.

    The text is cut where a file begins if that leaves between half and twice ``heldout_fraction`` of it held out, so
    that no file is on both sides; with one file, or very unequal ones, it is cut inside a file.
    """
    pieces: list[bytes] = []
    room = max_bytes
    for index in np.random.default_rng(seed).permutation(len(files)):
        if room <= 0:
            break
        pieces.append(files[index].read_bytes()[:room])
        room -= len(pieces[-1])
    text = np.frombuffer(b"".join(pieces), dtype=np.uint8)
    cut, inside = _cut([len(piece) for piece in pieces], heldout_fraction)
    files_read = f"{len(pieces)} file{'s' * (len(pieces) != 1)}"
    where = "cut inside a file" if inside else "whole files"
    description = f"{len(text):,} bytes of {files_read}; the last {len(text) - cut:,} are held out ({where})"
    return Corpus(train=text[:cut], heldout=text[cut:], description=description)


def _cut(lengths: Sequence[int], heldout_fraction: float) -> tuple[int, bool]:
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    total = int(starts[-1])
    wanted = heldout_fraction * total
    nearest = int(starts[np.argmin(np.abs(total - starts - wanted))])
    if wanted / 2 <= total - nearest <= wanted * 2:
        return nearest, False
    return total - round(wanted), True
