"""A run's folder is written to, and gone on with, only where that loses and mixes nothing."""

from __future__ import annotations

import numpy as np
import pytest

from mixle.lm.corpus import Corpus
from mixle.lm.run_folder import RunFolder
from mixle.lm.settings import Settings


def corpus(text: bytes) -> Corpus:
    return Corpus(np.frombuffer(text, np.uint8), np.frombuffer(b"held out", np.uint8), "a text")


@pytest.fixture
def interrupted(tmp_path) -> RunFolder:
    folder = RunFolder(tmp_path)
    folder.describe(Settings(lr=0.01, epochs=3), corpus(b"text"), complete=False)
    return folder


def test_a_new_or_empty_folder_is_free(tmp_path):
    RunFolder(tmp_path).require_free()
    RunFolder(tmp_path / "new").require_free()


def test_the_folder_of_an_earlier_run_is_free(interrupted):
    interrupted.require_free()


def test_a_file_is_not_free(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"--out .*file is a file; name a folder"):
        RunFolder(tmp_path / "file").require_free()


def test_a_folder_that_cannot_be_made_is_refused_at_once(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"--out .*file/run cannot be made .*name another folder"):
        RunFolder(tmp_path / "file" / "run").make()


def test_an_interrupted_run_goes_on_with_its_own_settings(interrupted):
    assert interrupted.unfinished_settings() == Settings(lr=0.01, epochs=3)


def test_a_complete_run_does_not_go_on(interrupted):
    interrupted.describe(Settings(), corpus(b"text"), complete=True)
    with pytest.raises(ValueError, match="that run is complete"):
        interrupted.unfinished_settings()


def test_a_run_goes_on_with_the_text_it_began_with_and_no_other(interrupted):
    interrupted.require_same_text(corpus(b"text"))
    with pytest.raises(ValueError, match="the text is not what the run began with"):
        interrupted.require_same_text(corpus(b"test"))
