"""The command line: its help, its refusals, and the whole language-model job on real processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mixle.cli import SUBCOMMANDS, build_app

ROOT = Path(__file__).parents[1]
SMALL = ["--d-model", "16", "--layers", "1", "--heads", "2", "--block", "32", "--batch-size", "4"]
WIDE = {"COLUMNS": "200", "TERM": "dumb", "NO_COLOR": "1"}


def mixle(*arguments: str, **options: object) -> subprocess.Popen[str]:
    environment = {**os.environ, **WIDE, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "mixle", *arguments]
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options
    )


def finished(process: subprocess.Popen[str], timeout_s: float = 240.0) -> str:
    """Wait for the end and return what was printed."""
    try:
        return process.communicate(timeout=timeout_s)[0]
    except subprocess.TimeoutExpired:
        process.kill()
        raise


def invoke(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(build_app(), arguments, env=WIDE)
    return result.exit_code, " ".join(result.output.split())


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> str:
    """A text that a tiny model learns a little of."""
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(
        "".join(f"{number} bottles of beer on the wall, {number} bottles of beer.\n" for number in range(900))
    )
    return str(path)


def test_help_names_the_job():
    code, output = invoke("--help")
    assert code == 0
    assert "lm" in output and "language model" in output


@pytest.mark.parametrize("name", SUBCOMMANDS)
def test_a_subcommand_alone_is_the_same_as_among_all(name):
    alone, among = (CliRunner().invoke(build_app(only), [name, "--help"], env=WIDE).output for only in (name, None))
    assert alone == among and "Usage" in alone


def test_help_of_the_job_explains_every_option():
    code, output = invoke("lm", "--help")
    assert code == 0
    for option in ("--nproc", "--epochs", "--max-bytes", "--d-model", "--layers", "--heads", "--block", "--batch-size"):
        assert option in output
    for option in ("--lr", "--out", "--seed", "--parallel", "--precision", "--device", "--resume", "--heldout"):
        assert option in output


def test_without_the_cli_extra_the_command_names_it():
    program = "import sys; sys.modules['typer'] = None; sys.argv = ['mixle']; from mixle.cli import main; main()"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "pip install 'mixle[cli]'" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--heads", "3"], "--heads 3 must divide --d-model 64 into an even width per head; nearest that do: 2, 4"),
        (["--d-model", "0"], "--d-model 0 must be at least 1"),
        (["--lr", "-1"], "--lr -1.0 must be positive"),
        (["--heldout", "1.5"], "--heldout 1.5 must lie between 0 and 1"),
        (["--nproc", "0"], "--nproc 0 must be at least 1"),
        (["--nproc", "3", "--batch-size", "8"], "--batch-size 8 must be divisible by the 3 processes of --nproc"),
        (["--nproc", "2", "--parallel", "none"], "--parallel none is for one process, not the 2"),
        (["--precision", "fp16"], "'--precision'"),
        (["--epochs", "one"], "'--epochs'"),
        (["no-such-file.txt"], "no-such-file.txt is not there; give text files"),
        (["--resume", "no-such-run"], "--resume no-such-run is not the folder of a run"),
        (["--resume", "run", "--lr", "0.1", "--out", "x"], "leave out --lr, --out"),
        (["--max-bytes", "500"], "too few for --block"),
    ],
)
def test_a_bad_argument_is_refused_by_name_before_anything_starts(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, output = invoke("lm", *arguments)
    assert code == 2
    assert message in output.replace("│ ", "")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_with_other_files_is_not_written_to(tmp_path, text):
    (tmp_path / "thesis.tex").write_text("ten years of work")
    code, output = invoke("lm", text, "--out", str(tmp_path))
    assert code == 2
    assert "holds files that are not of an earlier run" in output


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory, text) -> tuple[Path, str]:
    """A run on two processes, from start to end."""
    out = tmp_path_factory.mktemp("runs") / "whole"
    process = mixle("lm", text, "--nproc", "2", "--out", str(out), "--epochs", "2", *SMALL)
    output = finished(process)
    assert process.returncode == 0, output
    return out, output


@pytest.mark.distributed
@pytest.mark.slow
def test_a_run_ends_with_a_table_of_all_four(whole_run):
    _, output = whole_run
    table = output[output.index("Judged on") :]
    assert [name for name in ("categorical", "Markov chain", "transformer", "xz") if name not in table] == []


@pytest.mark.distributed
@pytest.mark.slow
def test_only_the_first_process_prints(whole_run):
    _, output = whole_run
    assert output.count("Judged on") == 1
    assert output.count("categorical:") == 1


@pytest.mark.distributed
@pytest.mark.slow
def test_a_run_leaves_numbers_a_plot_a_sample_and_a_model(whole_run):
    out, _ = whole_run
    numbers = json.loads((out / "results.json").read_text())
    bits = {score["model"]: score["bits_per_byte"] for score in numbers["scores"]}
    assert 0 < bits["transformer"] < bits["categorical"] < 8
    assert numbers["training_bits_per_byte"][0] == pytest.approx(8, abs=0.4)
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert len((out / "sample.txt").read_text()) > 100
    assert (out / "model" / "leaf.json").is_file()


@pytest.mark.distributed
@pytest.mark.slow
def test_an_interrupted_run_that_goes_on_ends_with_the_model_of_one_that_was_not(whole_run, tmp_path, text):
    out = tmp_path / "interrupted"
    process = mixle("lm", text, "--nproc", "2", "--out", str(out), "--epochs", "2", *SMALL)
    for line in process.stdout:
        if line.startswith("Markov chain"):
            break
    process.send_signal(signal.SIGINT)
    output = finished(process)
    assert process.returncode == 130, output
    assert f"mixle lm --nproc 2 --resume {out}" in output
    assert "Traceback" not in output
    assert not [path for path in Path("/proc").glob("[0-9]*/cmdline") if str(out).encode() in path.read_bytes()]
    assert not (out / "results.json").exists()

    process = mixle("lm", "--resume", str(out), "--nproc", "2")
    output = finished(process)
    assert process.returncode == 0, output
    files = [json.loads((folder / "model" / "leaf.json").read_text())["files"] for folder in (out, whole_run[0])]
    assert files[0] == files[1]


@pytest.mark.distributed
@pytest.mark.slow
def test_a_finished_run_has_nothing_to_resume(whole_run):
    code, output = invoke("lm", "--resume", str(whole_run[0]))
    assert code == 2
    assert "is complete" in output
