"""A run's folder is written to, and gone on with, only where that loses and mixes nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from mixle.lm.corpus import Corpus
from mixle.lm.job import resume_command
from mixle.lm.run_folder import STARTED_IN, RunFolder
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


# ---- what a new run replaces


def test_a_new_run_says_what_it_replaces_and_how_to_go_on_with_it_instead(interrupted, tmp_path):
    assert RunFolder(tmp_path / "new").replaced("mixle lm --resume x") == ""
    assert "unfinished run" in interrupted.replaced("mixle lm --resume x")
    assert interrupted.replaced("mixle lm --resume x").endswith("to go on with it instead: mixle lm --resume x")
    interrupted.describe(Settings(), corpus(b"text"), complete=True)
    assert "finished run" in interrupted.replaced("mixle lm --resume x")
    assert "--resume" not in interrupted.replaced("mixle lm --resume x")


def test_an_earlier_runs_reports_are_cleared_and_nothing_else(interrupted):
    for report in (interrupted.plot, interrupted.numbers, interrupted.sample):
        report.write_text("of an earlier run")
    (interrupted.path / "notes.txt").write_text("mine")
    interrupted.clear_reports()
    interrupted.clear_reports()
    assert sorted(path.name for path in interrupted.path.iterdir()) == ["notes.txt", "run.json"]


@pytest.mark.parametrize(("processes", "ending"), [(1, "lm --resume 'a folder'"), (2, "--nproc 2 --resume 'a folder'")])
def test_the_command_to_go_on_can_be_pasted_into_a_shell(processes, ending):
    assert resume_command(Path("a folder"), processes).endswith(ending)


def test_a_run_that_ends_before_its_model_is_saved_does_not_go_on_with_an_earlier_runs(interrupted):
    interrupted.model.mkdir()
    (interrupted.model / "leaf.json").write_text("the earlier model")
    interrupted.announce(Settings(epochs=9), corpus(b"text"))
    with pytest.raises(ValueError, match="ended before it had saved a model; start a new one"):
        interrupted.unfinished_settings()
    (interrupted.model / "leaf.json").write_text("the model of the new run")
    assert interrupted.unfinished_settings().epochs == 9


def test_a_first_run_that_ends_before_its_model_is_saved_does_not_go_on(tmp_path):
    RunFolder(tmp_path).announce(Settings(), corpus(b"text"))
    with pytest.raises(ValueError, match="ended before it had saved a model"):
        RunFolder(tmp_path).unfinished_settings()


# ---- a damaged description


def changed(**changes):
    return lambda described: json.dumps({**described, **changes})


def with_setting(**changes):
    return lambda described: json.dumps({**described, "settings": {**described["settings"], **changes}})


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda _: "", "Expecting value"),
        (lambda _: "\udcff", "codec can't decode"),
        (lambda _: "[" * 100_000, "recursion"),
        (lambda _: "null", "it is a NoneType, not an object"),
        (lambda _: "{}", "its keys are"),
        (changed(extra=1), "its keys are"),
        (changed(settings=None), "settings is a NoneType"),
        (changed(settings={}), "settings has keys"),
        (changed(complete=0), "complete=0 must be True or False"),
        (changed(complete="false"), "complete='false' must be True or False"),
        (changed(text_sha256=None), "text_sha256=None is no SHA-256"),
        (changed(replaces_model="x"), "replaces_model='x' is no SHA-256"),
        (with_setting(epochs="3"), "epochs='3' must be an integer"),
        (with_setting(epochs=True), "epochs=True must be an integer"),
        (with_setting(lr="fast"), "lr='fast' must be a real number"),
        (with_setting(lr=float("nan")), "lr=nan must be finite"),
        (with_setting(files="abc"), "files='abc' must be a list"),
        (with_setting(files=[1]), r"files=\[1\] must be a list"),
    ],
)
def test_a_damaged_description_is_refused_by_its_path_saying_what_to_do(interrupted, damage, reason):
    content = damage(json.loads(interrupted.description.read_text()))
    interrupted.description.write_text(content, errors="surrogateescape")
    for use in (interrupted.unfinished_settings, interrupted.require_free, lambda: interrupted.replaced("")):
        with pytest.raises(ValueError, match=rf"run\.json is damaged, .*{reason}.*start a new run .*--out"):
            use()


def test_the_settings_of_a_description_are_those_a_run_can_have(interrupted):
    described = json.loads(interrupted.description.read_text())
    interrupted.description.write_text(with_setting(heads=3)(described))
    with pytest.raises(ValueError, match="--heads 3 must divide"):
        interrupted.unfinished_settings()


def test_a_description_that_cannot_be_written_leaves_the_old_one(interrupted, monkeypatch):
    def fail(*arguments):
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        interrupted.describe(Settings(epochs=9), corpus(b"text"), complete=False)
    assert interrupted.unfinished_settings().epochs == 3
    assert [path.name for path in interrupted.path.iterdir()] == ["run.json"]


# ---- one run at a time


def enter(folder, rank):
    with folder.held(rank):
        pass


@pytest.mark.parametrize("first", [None, 0])
@pytest.mark.parametrize("second", [None, 0])
def test_a_second_run_in_a_folder_is_refused_until_the_first_has_ended(tmp_path, monkeypatch, first, second):
    with RunFolder(tmp_path).held(first):
        monkeypatch.delenv(STARTED_IN, raising=False)
        with pytest.raises(ValueError, match=rf"{tmp_path}: another run is in this folder; .*--out"):
            enter(RunFolder(tmp_path), second)
        monkeypatch.undo()
    enter(RunFolder(tmp_path), second)


def test_the_ranks_of_a_run_share_its_folder(tmp_path):
    with RunFolder(tmp_path).held(None), RunFolder(tmp_path).held(0), RunFolder(tmp_path).held(1):
        assert os.environ[STARTED_IN] == str(tmp_path)
    assert STARTED_IN not in os.environ


def test_ranks_of_another_starter_leave_the_lock_to_the_first(tmp_path):
    with RunFolder(tmp_path).held(0), RunFolder(tmp_path).held(1):
        pass


def test_a_rank_that_outlives_its_starter_keeps_other_runs_out(tmp_path, monkeypatch):
    monkeypatch.setenv(STARTED_IN, str(tmp_path))
    with RunFolder(tmp_path).held(1):
        monkeypatch.delenv(STARTED_IN)
        with pytest.raises(ValueError, match="another run is in this folder"):
            enter(RunFolder(tmp_path), None)


def test_a_killed_run_leaves_the_folder_free(tmp_path):
    program = (
        "import sys\nfrom pathlib import Path\nfrom mixle.lm.run_folder import RunFolder\n"
        "with RunFolder(Path(sys.argv[1])).held(0):\n    print('held', flush=True)\n    sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline() == "held\n"
            with pytest.raises(ValueError, match="another run is in this folder"):
                enter(RunFolder(tmp_path), 0)
        finally:
            process.kill()
            process.wait(timeout=60)
    RunFolder(tmp_path).require_free()
    enter(RunFolder(tmp_path), 0)
