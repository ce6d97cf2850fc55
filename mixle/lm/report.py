"""What a run leaves behind: a table for the terminal and the same numbers as JSON."""

from __future__ import annotations

import dataclasses
import json
import lzma
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table


@dataclass(frozen=True)
class Score:
    """How one model did on the held-out bytes.

    Attributes:
        model: its name.
        parameters: free numbers in it; None for a compressor.
        bits_per_byte: on the held-out bytes.
        seconds: wall time to fit it, or to compress.
    """

    model: str
    parameters: int | None
    bits_per_byte: float
    seconds: float


def xz_score(heldout: np.ndarray) -> Score:
    """Compress the held-out bytes alone with LZMA at its strongest setting."""
    started = time.perf_counter()
    compressed = lzma.compress(heldout.tobytes(), preset=9 | lzma.PRESET_EXTREME)
    return Score("xz", None, 8 * len(compressed) / len(heldout), time.perf_counter() - started)


def score_table(scores: Sequence[Score], *, heldout_bytes: int, fitted_on: int) -> Table:
    """Return a table of the scores, the best fitted model in bold."""
    best = min((score for score in scores if score.parameters is not None), key=lambda score: score.bits_per_byte)
    table = Table(
        title=f"Judged on {heldout_bytes:,} held-out bytes",
        caption=f"Fitted on {fitted_on:,} other bytes;\nxz -9e compresses the held-out ones alone.",
        title_justify="left",
        caption_justify="left",
    )
    table.add_column("model")
    table.add_column("parameters", justify="right")
    table.add_column("bits per byte", justify="right")
    table.add_column("seconds", justify="right")
    for score in scores:
        parameters = "" if score.parameters is None else f"{score.parameters:,}"
        row = (score.model, parameters, f"{score.bits_per_byte:.3f}", f"{score.seconds:.1f}")
        table.add_row(*row, style="bold" if score is best else None)
    return table


def write_numbers(path: Path, scores: Sequence[Score], **more: Any) -> None:
    """Write the scores, and whatever else is worth keeping, as JSON."""
    path.write_text(json.dumps({"scores": [dataclasses.asdict(score) for score in scores], **more}, indent=2) + "\n")
