"""The table and the numbers that a run leaves behind."""

from __future__ import annotations

import io
import json
import lzma

import numpy as np
import pytest
from rich.console import Console

from mixle.lm.plot import plot_loss, smooth
from mixle.lm.report import Score, score_table, write_numbers, xz_score

SCORES = [Score("categorical", 255, 4.9, 0.1), Score("transformer", 800_000, 2.5, 60.0), Score("xz", None, 2.1, 0.2)]


def test_the_xz_score_is_what_an_xz_file_of_the_bytes_weighs():
    data = np.frombuffer(b"the quick brown fox " * 500, dtype=np.uint8)
    weight = len(lzma.compress(data.tobytes(), preset=9 | lzma.PRESET_EXTREME))
    assert xz_score(data).bits_per_byte == pytest.approx(8 * weight / len(data))


def test_the_table_shows_every_model_and_says_what_it_was_judged_on():
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(score_table(SCORES, heldout_bytes=150_000, fitted_on=2_850_000))
    text = console.export_text()
    for piece in ("150,000 held-out bytes", "2,850,000", "transformer", "800,000", "2.500", "60.0"):
        assert piece in text


def test_the_best_fitted_model_is_the_bold_one_though_xz_is_smaller():
    rows = score_table(SCORES, heldout_bytes=1, fitted_on=1).rows
    assert [row.style for row in rows] == [None, "bold", None]


def test_the_numbers_are_json(tmp_path):
    write_numbers(tmp_path / "results.json", SCORES, heldout_bytes=150_000)
    kept = json.loads((tmp_path / "results.json").read_text())
    assert kept["scores"][1] == {"model": "transformer", "parameters": 800_000, "bits_per_byte": 2.5, "seconds": 60.0}
    assert kept["heldout_bytes"] == 150_000


@pytest.mark.parametrize("steps", [1, 2, 300])
def test_the_plot_is_a_png_for_runs_of_any_length(tmp_path, steps):
    plot_loss(
        tmp_path / "loss.png",
        bytes_seen=[2048 * (step + 1) for step in range(steps)],
        training=[8 / (step + 1) for step in range(steps)],
        heldout=[(2048 * steps, 2.0)],
        others={"categorical": 4.9, "xz": 4.8},
    )
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_smoothing_keeps_a_constant_and_the_length():
    assert smooth(np.full(333, 2.5)) == pytest.approx(np.full(333, 2.5))
