"""The progress line."""

from __future__ import annotations

import io
import sys

import pytest

from mixle.training.progress import Progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


def shown_by(monkeypatch, stream, shown, rank):
    monkeypatch.setattr(sys, "stderr", stream)
    with Progress(2, shown, rank) as progress:
        for _ in range(2):
            progress.advance(6.0, 0.5, 64)
    return stream.getvalue()


def test_the_last_step_is_always_shown(monkeypatch):
    line = shown_by(monkeypatch, io.StringIO(), True, 0)
    assert "step 2/2  loss 3.0000" in line
    assert line.endswith("\n")


@pytest.mark.parametrize(
    ("stream", "shown", "rank", "visible"),
    [
        (Terminal, None, 0, True),
        (io.StringIO, None, 0, False),
        (Terminal, False, 0, False),
        (Terminal, True, 1, False),
    ],
)
def test_it_shows_on_rank_0_if_stderr_is_a_terminal_unless_told_otherwise(monkeypatch, stream, shown, rank, visible):
    assert bool(shown_by(monkeypatch, stream(), shown, rank)) is visible
