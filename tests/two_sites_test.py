"""The program of "Train at two sites through a bucket" does what the page says, on a folder and on an S3 server."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from moto_server import BUCKET, moto_server

from mixle.models.streaming_transformer_leaf import StreamingTransformerLeaf

ROOT = Path(__file__).parents[1]
PROGRAM = ROOT / "docs" / "howto" / "site.py"
SITES = ("oslo", "lima")

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


@pytest.fixture(params=["folder", "bucket"])
def place(request, tmp_path):
    if request.param == "folder":
        yield f"file://{tmp_path}/run", {}
    else:
        with moto_server() as variables:
            yield f"s3://{BUCKET}/run", {**variables, "AWS_ALLOW_HTTP": "true"}


def test_two_sites_train_one_model(place, tmp_path):
    url, variables = place
    environment = {**os.environ, **variables, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    started = []
    for name in SITES:
        (tmp_path / f"{name}.txt").write_text("".join(f"{n} bottles of beer in {name}.\n" for n in range(500)))
        command = [sys.executable, str(PROGRAM), url, name, f"{name}.txt", "2"]
        started.append(
            subprocess.Popen(
                command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
        )
    try:
        outputs = [process.communicate(timeout=240)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    for name, process, output in zip(SITES, started, outputs, strict=True):
        assert process.returncode == 0, output
        assert f"{name}: joined" in output
        assert f"{name}: left" in output
        assert StreamingTransformerLeaf.load(tmp_path / f"model-{name}").state.step > 0
    status = subprocess.run(
        [sys.executable, "-m", "mixle", "diloco", "status", url, "--wait", "0"],
        env={**environment, "COLUMNS": "200", "TERM": "dumb", "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        timeout=60,
    ).stdout
    assert "steps whose work is in commits: 100.0%" in status
    assert all(name in status for name in SITES)
