"""Run a program on several ranks under the real torchrun, with a hard timeout, and collect what each rank reports.

Importing torch costs seconds per process, so one launch should run many cases: a program calls :func:`report` with
named results, and the tests share one launch through a module-scoped fixture.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]


class Launched(NamedTuple):
    """What the ranks reported, in rank order (None where a rank reported nothing), and how torchrun ended."""

    reports: list[Any]
    exit_code: int
    output: str


def launch(program: Path, *arguments: str, ranks: int, timeout_s: float = 120.0, check: bool = True) -> Launched:
    """Run ``program`` on ``ranks`` processes.

    Raises:
        AssertionError: it outlived ``timeout_s`` or, with ``check``, a rank failed; the message holds the output.
    """
    with tempfile.TemporaryDirectory() as folder:
        paths = [str(ROOT), str(ROOT / "tests" / "support"), os.environ.get("PYTHONPATH", "")]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        environment |= {"OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1", "MIXLE_TEST_REPORTS": folder}
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
        command += ["--nproc-per-node", str(ranks), str(program), *arguments]
        process = subprocess.Popen(
            command,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            ranks_alive = descendants(process.pid)
            for each in ranks_alive:  # faulthandler says where each of them was
                os.kill(each, signal.SIGABRT)
            time.sleep(1.0)
            for each in [process.pid, *descendants(process.pid), *ranks_alive]:
                with suppress(ProcessLookupError):
                    os.kill(each, signal.SIGKILL)
            output, _ = process.communicate()
            raise AssertionError(f"{program.name} on {ranks} ranks outlived {timeout_s:g} s:\n{output}") from None
        files = [Path(folder) / f"{rank}.json" for rank in range(ranks)]
        reports = [json.loads(file.read_text()) if file.exists() else None for file in files]
        if check and process.returncode != 0:
            raise AssertionError(f"{program.name} on {ranks} ranks exited with {process.returncode}:\n{output}")
        return Launched(reports, process.returncode, output)


def descendants(pid: int) -> list[int]:
    """Return the processes that ``pid`` started, and those that they did."""
    found, parents = [], {pid}
    for each in sorted(int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()):
        with suppress(OSError):
            if int(Path(f"/proc/{each}/stat").read_text().rpartition(")")[2].split()[1]) in parents:
                parents.add(each)
                found.append(each)
    return found


def report(results: Any) -> None:
    """Report this rank's results, JSON types, to the test that launched it; a later report replaces an earlier one."""
    path = Path(os.environ["MIXLE_TEST_REPORTS"], f"{os.environ['RANK']}.json")
    path.with_suffix(".tmp").write_text(json.dumps(results))
    path.with_suffix(".tmp").rename(path)


def wait_for_report(rank: int, key: str | None = None, *, deadline_s: float = 60.0) -> None:
    """Wait until ``rank`` has reported, with ``key`` in its results if one is given."""
    path, until = Path(os.environ["MIXLE_TEST_REPORTS"], f"{rank}.json"), time.monotonic() + deadline_s
    while not path.exists() or (key is not None and key not in json.loads(path.read_text())):
        assert time.monotonic() < until, f"rank {rank} reported nothing within {deadline_s:g} s"
        time.sleep(0.02)


def error_of(call: Any, *arguments: Any, **options: Any) -> str:
    """Return ``"TypeName: message"`` of what ``call`` raises, "" if nothing."""
    try:
        call(*arguments, **options)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""
