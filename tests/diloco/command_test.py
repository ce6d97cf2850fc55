"""`mixle diloco`: what it prints of a run, what it draws, what it deletes."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from diloco_sites import descend, open_session, wait_until, zeros
from matplotlib import pyplot
from rich.console import Console
from typer.testing import CliRunner

from mixle.cli import build_app
from mixle.diloco import DiLoCo, align, command, open_mailbox
from mixle.diloco.survey import survey

WIDE = {"COLUMNS": "200", "TERM": "dumb", "NO_COLOR": "1"}
ALGORITHM = DiLoCo(5, 2, overlap_steps=0)


def invoke(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(build_app(), ["diloco", *arguments], env=WIDE)
    return result.exit_code, " ".join(result.output.split())


def train(url: str, name: str, steps: int = 30) -> None:
    model = zeros()
    with open_session(model, ALGORITHM, url, learner_id=name) as session:
        for _ in range(steps):
            descend(model, 1.0)
            session.step(4)


@pytest.fixture(scope="module")
def url(tmp_path_factory) -> str:
    address = f"file://{tmp_path_factory.mktemp('run')}"
    train(address, "oslo")
    train(address, "lima", steps=13)
    return address


def test_status_tells_the_run_its_nodes_and_its_rounds(url):
    code, output = invoke("status", url, "--wait", "0")
    assert code == 0, output
    assert "2 tensors of 15 parameters; 21 rounds committed, 10 of each fragment" in output
    assert "sync_every 5, fragments 2" in output
    assert "steps whose work is in commits: 100.0%" in output
    assert "oslo │ left │ both │ 30 │ 120 │ 100.0%" in output
    assert "lima │ left │ both │ 13 │ 52 │ 100.0%" in output
    assert "quorum s" in output and "grace s" in output
    assert output.count("lima") > 2
    assert "21 rounds, 1 run.json" in output


def test_a_pipe_gets_every_column_whole_however_narrow_the_terminal(url):
    result = CliRunner().invoke(build_app(), ["diloco", "status", url, "--wait", "0"], env={**WIDE, "COLUMNS": "40"})
    assert "quorum s ┃ grace s ┃ cos ┃ refused ┃   MB ┃ closer" in result.output
    assert "…" not in result.output and "no room" not in result.output


@pytest.mark.parametrize("width", [80, 60])
def test_a_narrow_terminal_gets_fewer_columns_named_below_and_every_number_whole(url, width, monkeypatch):
    file = io.StringIO()
    terminal = Console(file=file, width=width, height=25, force_terminal=True, color_system=None)
    monkeypatch.setattr(command, "Console", lambda **_: terminal)
    code, output = invoke("status", url, "--wait", "0")
    assert code == 0, output
    shown = file.getvalue()
    assert "…" not in shown
    assert all(name in shown for name in ("quorum s", "grace s", "closer"))
    assert "no room for: samples, MB" in shown
    assert max(map(len, shown.splitlines())) <= width


def test_a_long_name_folds_and_stays_whole():
    name = "a" * 40 + "b" * 23
    table = command._table("t", ("round", "MB", "closer"), [("7", "1.25", name)], width=60, first_to_go=("MB",))
    file = io.StringIO()
    Console(file=file, width=60).print(table)
    shown = file.getvalue()
    assert "1.25" in shown and "no room" not in shown
    assert shown.count("a") == 40
    assert max(map(len, shown.splitlines())) <= 60


def test_who_is_alive_is_told_from_who_gives_no_sign_of_life(tmp_path):
    address = f"file://{tmp_path}"
    train(address, "gone")
    with open_session(zeros(), ALGORITHM, address, learner_id="here") as session:
        session.step(4)
        store = open_mailbox(address)
        store.put_if_absent("leases/killed/00000000-000000000007", b"")
        wait_until(lambda: store.get(store.list("leases/here/")[-1]))
        seen = survey(store, last=1, wait_s=0.5)
    assert {node.name: node.state for node in seen.nodes} == {"gone": "left", "here": "alive", "killed": "silent"}


def test_strays_are_named_and_passed_over(tmp_path):
    train(f"file://{tmp_path}", "a")
    (tmp_path / "rounds" / "notes.txt").write_text("x")
    code, output = invoke("status", f"file://{tmp_path}", "--wait", "0")
    assert code == 0
    assert "passed over: rounds/notes.txt" in output


def test_plot_writes_an_image(url, tmp_path):
    image = tmp_path / "run.png"
    code, output = invoke("plot", url, "--out", str(image))
    assert code == 0, output
    assert image.read_bytes().startswith(b"\x89PNG")
    assert "21 of 21 rounds" in output


@pytest.mark.parametrize("command", [["status"], ["gc"], ["plot", "--out", "/tmp/x.png"]])
def test_who_looks_where_nothing_is_makes_no_folder(tmp_path, command):
    name, *options = command
    code, output = invoke(name, f"file://{tmp_path}/mistyped", *options)
    assert code == 2 and "mistyped' is a folder that is not there, so there is no run in it" in output
    with pytest.raises(ValueError, match="is a folder that is not there"):
        align(zeros(), mailbox=tmp_path / "mistyped")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("out", ["run", "nowhere/run.png"])
def test_an_image_that_cannot_be_written_where_it_is_said_is_refused(url, tmp_path, out):
    code, output = invoke("plot", url, "--out", str(tmp_path / out))
    assert code == 2 and "must be a file in a folder that is there, and end in .png" in output
    assert list(tmp_path.iterdir()) == []


def test_the_plot_names_its_run_counts_in_integers_and_keeps_its_legends_off_the_data(url, tmp_path, monkeypatch):
    monkeypatch.setattr(pyplot, "close", lambda figure: None)
    assert invoke("plot", url, "--out", str(tmp_path / "run.png"))[0] == 0
    figure = pyplot.gcf()
    monkeypatch.undo()
    assert figure.get_suptitle() == url
    snapshots, waits, cosines, norms = figure.axes
    assert [axes.get_ylabel() for axes in figure.axes] == [
        "snapshots",
        "waited, s",
        "mean cosine of the deltas",
        "norm of the delta",
    ]
    for ticks in (snapshots.get_yticks(), cosines.get_xticks(), norms.get_xticks()):
        assert np.array_equal(ticks, np.round(ticks))
    for axes in (snapshots, waits, norms):
        assert not axes.get_legend().get_window_extent().overlaps(axes.get_window_extent())
    pyplot.close(figure)


def test_gc_deletes_what_is_left_over_and_nothing_that_is_needed(tmp_path):
    address = f"file://{tmp_path}"
    train(address, "a", steps=60)
    store = open_mailbox(address)
    late = f"payloads/0000000001/delta-{'0' * 64}.safetensors"
    store.put_if_absent(late, b"late")
    before = zeros()
    align(before, mailbox=address)
    keys = store.list("")
    code, output = invoke("gc", address, "--dry-run")
    assert code == 0
    assert output.startswith("would delete: ") and "delta" in output
    assert store.list("") == keys
    assert invoke("gc", address) == (0, output.replace("would delete", "deleted"))
    assert late not in store.list("")
    after = zeros()
    align(after, mailbox=address)
    assert all(np.array_equal(before[name], after[name]) for name in before)
    assert invoke("gc", address)[1] == "deleted: nothing"


@pytest.mark.parametrize("command", [["status"], ["gc"], ["plot", "--out", "x.png"]])
def test_a_place_without_a_run_is_an_error_in_one_line(command, tmp_path):
    code, output = invoke(command[0], f"file://{tmp_path}", *command[1:])
    assert code == 2
    assert output == "mixle: there is no run in the mailbox: no site has joined under this prefix yet"
    assert not Path("x.png").exists()


def test_an_address_that_is_none_is_an_error_in_one_line():
    code, output = invoke("status", "ftp://somewhere")
    assert code == 2
    assert output.startswith("mixle: ")


def test_a_run_without_rounds_has_nothing_to_draw(tmp_path):
    open_session(zeros(), ALGORITHM, f"file://{tmp_path}").close()
    code, output = invoke("plot", f"file://{tmp_path}", "--out", str(tmp_path / "x.png"))
    assert code == 2
    assert "no committed round yet" in output
