"""A pool of worker processes, each holding its own encoded shard.

Rows go to the workers once, when the handle is built; after that only estimators, models and statistics travel, over
pipes that belong to this process. Every command is answered by every worker before the next is sent, so an error in one
leaves the pool usable.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, Literal

import numpy as np

from mixle.stats.contract import DataEncoder, ParameterEstimator, ProbabilityDistribution
from mixle.stats.encoding import encoding_frames, join_all, reframe_encoding
from mixle.stats.row_draws import draw_seed
from mixle.stats.sequence import (
    EncodedChunks,
    accumulate,
    accumulate_initialization,
    finish,
    resolve_encoder,
    seq_log_density,
    seq_log_density_sum,
)
from mixle.utils.exact import require_choice, require_finite_float, require_positive_int
from mixle.utils.parallel.planner import EncodedDataHandle

__all__ = ["MultiprocessingEncodedData"]

_THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


class _Shard:
    """What one worker holds, and the commands that run on it."""

    def __init__(self) -> None:
        self.chunks: EncodedChunks = []
        self.first_row = 0

    def encode(self, encoder: DataEncoder, rows: Sequence[Any], first_row: int) -> Any:
        self.first_row = first_row
        enc = encoder.seq_encode(rows)
        self.chunks = [(len(rows), enc)]
        return encoding_frames(enc)

    def reframe(self, frames: Any) -> None:
        self.chunks = [(count, reframe_encoding(enc, frames)) for count, enc in self.chunks]

    def estimate(self, estimator: ParameterEstimator, previous: ProbabilityDistribution | None) -> tuple[float, Any]:
        nobs, accumulator = accumulate(self.chunks, estimator, previous)
        return nobs, accumulator.value()

    def initialize(self, estimator: ParameterEstimator, seed: int, p: float) -> tuple[float, Any]:
        nobs, accumulator = accumulate_initialization(self.chunks, estimator, seed, p, self.first_row)
        return nobs, accumulator.value()

    def log_density(self, model: ProbabilityDistribution) -> list[np.ndarray]:
        return seq_log_density(self.chunks, model)

    def log_density_sum(self, model: ProbabilityDistribution) -> tuple[float, float]:
        return seq_log_density_sum(self.chunks, model)


def _work(pipe: Connection) -> None:
    """Answer commands until the pipe closes: the parent ends, or closes the handle."""
    # Ctrl-C reaches the whole foreground group; the parent decides what becomes of the pool.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    shard = _Shard()
    while True:
        try:
            command, arguments = pipe.recv()
        except EOFError:
            return
        try:
            answer: Any = (True, getattr(shard, command)(*arguments))
        except Exception as error:
            answer = (False, error)
        try:
            pipe.send(answer)
        except (AttributeError, TypeError, ValueError) as error:
            pipe.send(
                (False, RuntimeError(f"the answer to {command} cannot be sent: {error}; it was {answer[1]!r:.200}"))
            )


@contextmanager
def _threads_per_worker(count: int) -> Iterator[None]:
    """Let spawned workers share the cores instead of each claiming all of them."""
    threads = str(max(1, (os.cpu_count() or 1) // count))
    missing = [name for name in _THREAD_VARIABLES if name not in os.environ]
    os.environ.update(dict.fromkeys(missing, threads))
    try:
        yield
    finally:
        for name in missing:
            os.environ.pop(name, None)


class MultiprocessingEncodedData(EncodedDataHandle):
    """Rows split evenly over worker processes, encoded once and kept there.

    ``seq_estimate`` maps the E-step over the workers, adds up their statistics and runs the M-step here. Workers are
    spawned, so a script needs the usual ``if __name__ == "__main__":`` guard.

    Args:
        data: observations, in any sequence that can be sliced; they must be picklable.
        encoder, estimator, model: exactly one of them, to say how to encode.
        num_workers: how many processes; the number of cores if None. More workers than rows is allowed.
        start_method: how processes start; ``"fork"`` is fast but unsafe once threads run.
        deadline_s: how long a command may take, in seconds.

    Raises:
        TypeError, ValueError: a row is refused by the encoder, or an argument is wrong; no process is left behind.
        RuntimeError: a worker died or missed the deadline; the message names it.
    """

    def __init__(
        self,
        data: Sequence[Any],
        *,
        encoder: DataEncoder | None = None,
        estimator: ParameterEstimator | None = None,
        model: ProbabilityDistribution | None = None,
        num_workers: int | None = None,
        start_method: Literal["spawn", "forkserver", "fork"] = "spawn",
        deadline_s: float = 3600.0,
    ) -> None:
        encode = resolve_encoder(encoder, estimator, model)
        workers = require_positive_int((os.cpu_count() or 1) if num_workers is None else num_workers, "num_workers")
        method = require_choice(start_method, "start_method", multiprocessing.get_all_start_methods())
        self.deadline_s = require_finite_float(deadline_s, "deadline_s", exclusive_minimum=0.0)
        self.num_workers = workers
        self._n = len(data)
        self._pipes: list[Connection] = []
        self._processes: list[BaseProcess] = []
        bounds = [self._n * i // workers for i in range(workers + 1)]
        try:
            self._start(method)
            spans = itertools.pairwise(bounds)
            frames = join_all(self._ask("encode", [(encode, data[a:b], a) for a, b in spans]))
            self._ask("reframe", [(frames,)] * workers)
        except BaseException:
            self.close()
            raise

    def _start(self, method: str) -> None:
        context: Any = multiprocessing.get_context(method)
        with _threads_per_worker(self.num_workers):
            for i in range(self.num_workers):
                here, there = context.Pipe()
                process = context.Process(target=_work, args=(there,), name=f"mixle-worker-{i}", daemon=True)
                process.start()
                there.close()
                self._pipes.append(here)
                self._processes.append(process)

    def _ask(self, command: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Send one command to every worker and return the answers in worker order."""
        if not self._pipes:
            raise RuntimeError("this MultiprocessingEncodedData is closed; build a new one")
        try:
            for i, (pipe, sent) in enumerate(zip(self._pipes, arguments, strict=True)):
                try:
                    pipe.send((command, sent))
                except OSError as error:
                    raise self._lost(i, command) from error
            answers = self._answers(command)
        except BaseException:
            # Answers that are still on their way would be taken for those of the next command.
            self.close()
            raise
        errors = [answer for done, answer in answers if not done]
        if errors:
            raise errors[0]
        return [answer for _, answer in answers]

    def _answers(self, command: str) -> list[tuple[bool, Any]]:
        due = time.monotonic() + self.deadline_s
        answers: dict[int, tuple[bool, Any]] = {}
        while len(answers) < self.num_workers:
            open_pipes = {pipe: i for i, pipe in enumerate(self._pipes) if i not in answers}
            ready = wait(list(open_pipes), timeout=max(0.0, due - time.monotonic()))
            if not ready:
                late = ", ".join(str(i) for i in open_pipes.values())
                raise RuntimeError(f"workers {late} did not answer {command} within deadline_s={self.deadline_s:g}")
            for pipe in ready:
                i = open_pipes[pipe]  # type: ignore[index]
                try:
                    answers[i] = self._pipes[i].recv()
                except (EOFError, OSError) as error:
                    raise self._lost(i, command) from error
        return [answers[i] for i in range(self.num_workers)]

    def _lost(self, i: int, command: str) -> RuntimeError:
        process = self._processes[i]
        process.join(timeout=5.0)
        hint = ""
        if command == "encode" and process.exitcode == 1:
            hint = '; if this is a script, put its body under `if __name__ == "__main__":`, since workers import it'
        return RuntimeError(
            f"worker {i} (pid {process.pid}) ended with exit code {process.exitcode} during {command}{hint}"
        )

    def _fold(self, command: str, estimator: ParameterEstimator, *arguments: Any) -> tuple[float, Any]:
        answers = self._ask(command, [(estimator, *arguments)] * self.num_workers)
        accumulator = estimator.accumulator_factory().make()
        for _, value in answers:
            accumulator.combine(value)
        return sum(nobs for nobs, _ in answers), accumulator

    def pysp_seq_estimate(self, estimator: Any, prev_estimate: Any) -> Any:
        return finish(estimator, *self._fold("estimate", estimator, prev_estimate), prev_estimate)

    def pysp_seq_initialize(self, estimator: Any, rng: Any, p: float) -> Any:
        seed = draw_seed(rng)
        return finish(estimator, *self._fold("initialize", estimator, seed, p), None)

    def pysp_seq_log_density_sum(self, model: Any) -> tuple[float, float]:
        parts = self._ask("log_density_sum", [(model,)] * self.num_workers)
        return sum(n for n, _ in parts), sum(total for _, total in parts)

    def pysp_seq_log_density(self, model: Any) -> list[np.ndarray]:
        """Return the log-densities of all rows in order, one array per worker."""
        return [chunk for part in self._ask("log_density", [(model,)] * self.num_workers) for chunk in part]

    def __len__(self) -> int:
        return self._n

    def close(self) -> None:
        """End the workers; closing twice is allowed."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(timeout=2.0)
            if process.is_alive():
                process.kill()
                process.join()
        self._pipes, self._processes = [], []

    def __del__(self) -> None:
        if getattr(self, "_pipes", None):
            self.close()
