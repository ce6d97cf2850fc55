"""The program of the language-model tutorial runs under torchrun as the tutorial says."""

from __future__ import annotations

from pathlib import Path

import pytest
from torchrun import launch

from mixle.models.streaming_transformer_leaf import StreamingTransformerLeaf

PROGRAM = Path(__file__).parents[1] / "docs" / "tutorials" / "train.py"


@pytest.mark.distributed
def test_the_program_trains_on_two_ranks_and_saves_one_model(tmp_path, monkeypatch):
    text = tmp_path / "text.txt"
    text.write_text("".join(f"{n} bottles of beer on the wall, {n} bottles of beer.\n" for n in range(500)))
    monkeypatch.chdir(tmp_path)
    output = launch(PROGRAM, str(text), ranks=2).output
    assert "2 ranks, 14 steps" in output
    assert StreamingTransformerLeaf.load(tmp_path / "model").state.step == 14
