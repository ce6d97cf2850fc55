"""`mixle plan`: a table for what can work, one line that names the option for what cannot."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from mixle.cli import build_app

STEP = ["--gpus", "8", "--batch-size", "2", "--seq-len", "8192"]
WIDTHS = ["--layers", "4", "--d-model", "512", "--heads", "8", "--vocab", "1000"]


def invoke(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(build_app(), ["plan", *arguments], env={"COLUMNS": "200", "TERM": "dumb"})
    return result.exit_code, result.output


def test_a_size_gets_a_table():
    code, output = invoke("--params", "8B", "--hardware", "h100", *STEP)
    assert code == 0
    assert output.startswith("llama3-8b: 8.03B parameters on 8 x h100, 2 rows per replica of 8192 tokens, bf16")
    assert "dp=8 " in output


def test_a_name_on_more_accelerators_gets_a_table():
    code, output = invoke("--params", "llama3-70b", "--gpus", "64", "--global-batch-size", "128", "--seq-len", "8192")
    assert code == 0
    assert "128 rows of 8192 tokens" in output


def test_a_model_is_given_by_its_widths():
    code, output = invoke(*WIDTHS, "--kv-heads", "2", "--d-mlp", "1024", "--gated", "--tied", *STEP)
    assert code == 0
    assert (
        "model: 9.43M parameters" in output
    )  # 1000 * 512 + 4 * (2 * 512 * (512 + 128) + 3 * 512 * 1024 + 2 * 512) + 512


def test_the_table_is_as_long_as_asked():
    _, output = invoke("--params", "8B", *STEP, "--rows", "2", "--near-misses", "0")
    lines = output.splitlines()
    assert len(lines) == 7
    assert lines[-2].startswith("and ")
    assert lines[-1].startswith("= within 10% of the fastest")


def test_no_plan_that_fits_is_a_failure_that_says_what_would_do():
    code, output = invoke("--params", "405B", "--gpus", "8", "--batch-size", "1", "--seq-len", "8192")
    assert code == 1
    assert "No plan fits into 78.0 GiB per rank. 128 ranks are enough. On 8, 809.2 GiB per rank are enough" in output


def test_a_limit_excludes_what_needs_more():
    code, output = invoke("--params", "8B", *STEP, "--memory-gib", "30")
    assert code == 0
    assert "of 30.0 GiB" in output


@pytest.mark.parametrize(("arguments", "message"), [
    (STEP, "give --params, or also --layers, --d-model, --heads, --vocab"),
    ([*STEP, "--layers", "4"], "give --params, or also --d-model, --heads, --vocab"),
    ([*STEP, "--params", "8B", "--layers", "4"], "--params 8B names the model; leave out --layers"),
    ([*STEP, "--params", "huge"], "params='huge' must be a number of at least 1M such as 8B"),
    ([*STEP, "--params", "8B", "--hardware", "h10"], "did you mean 'h100'"),
    ([*STEP, "--params", "8B", "--global-batch-size", "4"], "give one of batch_size"),
    ([*STEP, "--params", "8B", "--precision", "int4"], "--precision"),
    (["--params", "8B", "--batch-size", "2", "--seq-len", "8192"], "--gpus"),
    (["--params", "8B", "--batch-size", "2", "--seq-len", "8192", "--gpus", "0"], "--gpus"),
    ([*STEP, "--params", "8B", "--batch-size", "0"], "--batch-size"),
    ([*STEP, "--params", "8B", "--seq-len", "-1"], "--seq-len"),
    ([*STEP, "--params", "8B", "--memory-gib", "nan"], "memory-gib=nan must be finite"),
    ([*STEP, "--params", "8B", "--memory-gib", "inf"], "memory-gib=inf must be finite"),
    ([*STEP, "--params", "8B", "--memory-gib", "-1"], "memory-gib=-1.0 must be above 0"),
    ([*STEP, *WIDTHS, "--kv-heads", "0"], "--kv-heads"),
    ([*STEP, *WIDTHS, "--kv-heads", "3"], "n_kv_head=3 must divide n_head=8"),
])  # fmt: skip
def test_what_cannot_work_is_refused_by_name(arguments, message):
    code, output = invoke(*arguments)
    assert code == 2
    assert message in " ".join(output.replace("│", " ").split())
