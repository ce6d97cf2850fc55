"""The job on one rank: fit three models through one handle, judge them, leave a model, a plot and the numbers."""

from __future__ import annotations

import math
import os
import shlex
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.panel import Panel
from rich.text import Text

from mixle.lm.corpus import Corpus
from mixle.lm.interrupt import Interrupt
from mixle.lm.plot import plot_loss
from mixle.lm.report import Score, score_table, write_numbers, xz_score
from mixle.lm.run_folder import RunFolder
from mixle.lm.settings import Execution, Settings
from mixle.stats.categorical import CategoricalEstimator
from mixle.stats.markov_chain import MarkovChainEstimator
from mixle.stats.sequence import seq_estimate, seq_log_density_sum

if TYPE_CHECKING:
    from mixle.models.streaming_transformer_leaf import StreamingTransformerLeaf, StreamingTransformerLeafEstimator
    from mixle.training import StepRecord, TrainingOptions
    from mixle.utils.parallel.torch_neural import StreamingTokenEncodedData

VOCAB = 256
PSEUDO_COUNT = 1.0
WARMUP_SHARE = 0.05
EVALUATIONS, EVALUATION_BYTES, PIECE = 10, 20_480, 1_024
PROMPT_BYTES, SAMPLE_BYTES, SAMPLE_TEMPERATURE = 64, 400, 0.7


@dataclass(frozen=True)
class Job:
    """One run, as one of its processes sees it.

    Attributes:
        settings: the model, its training and the text.
        execution: where and how it runs.
        corpus: the text.
        folder: where the results go.
        resume: go on with the model in ``folder``.
        rank: of this process.
        processes: how many there are.
        interrupt: asks to stop.
    """

    settings: Settings
    execution: Execution
    corpus: Corpus
    folder: RunFolder
    resume: bool
    rank: int
    processes: int
    interrupt: Interrupt

    def run(self) -> int:
        """Run and return the exit status: 0, or 128 plus the number of the signal that stopped it."""
        console = Console(quiet=self.rank != 0, highlight=False)
        if not self.resume and (replaced := self.folder.replaced(resume_command(self.folder.path, self.processes))):
            console.print(replaced)
        console.print(self.corpus.description)
        earlier = self._load() if self.resume else None
        with self._training_tokens(earlier) as tokens, self._tokens(self.corpus.heldout) as heldout:
            scores = []
            for name, parameters, estimator in self._simple_models():
                model, seconds = _timed(tokens, estimator)
                scores.append(self._score(name, parameters, model, seconds, heldout, console))
            total_steps = tokens.steps_per_epoch * self.settings.epochs
            estimator = self._new_estimator(total_steps) if earlier is None else earlier.estimator()
            if earlier is not None and earlier.state.step == total_steps:  # all that the run had left was its report
                leaf = earlier
            else:
                leaf, _ = _timed(tokens, estimator, earlier)
            leaf = leaf.unshard()
            complete = leaf.state.step == total_steps
            if self.rank == 0:
                self._save(leaf, complete=complete)
            if not complete:
                console.print(f"Stopped after step {leaf.state.step:,} of {total_steps:,}; the model is saved.")
                console.print(f"Go on with: {resume_command(self.folder.path, self.processes)}", style="bold")
                return 128 + (self.interrupt.signal or 0)
            parameters = sum(parameter.numel() for parameter in leaf.module.parameters())
            seconds = sum(record.seconds for record in leaf.history if record.seconds is not None)
            scores.append(self._score("transformer", parameters, leaf, seconds, heldout, console))
        if self.rank == 0:
            self._report(leaf, [*scores, xz_score(self.corpus.heldout)], console)
        return 0

    def _simple_models(self) -> list[tuple[str, int, Any]]:
        levels = range(VOCAB)
        return [
            ("categorical", VOCAB - 1, CategoricalEstimator(pseudo_count=PSEUDO_COUNT, levels=levels)),
            ("Markov chain", VOCAB * VOCAB - 1, MarkovChainEstimator(pseudo_count=PSEUDO_COUNT, levels=levels)),
        ]

    def _new_estimator(self, total_steps: int) -> StreamingTransformerLeafEstimator:
        import torch

        from mixle.models.streaming_transformer_leaf import StreamingTransformerLeafEstimator
        from mixle.models.transformer import CausalLM

        wanted = self.settings
        torch.manual_seed(wanted.seed)
        return StreamingTransformerLeafEstimator(
            CausalLM(VOCAB, wanted.d_model, wanted.layers, wanted.heads, wanted.block),
            lr=wanted.lr,
            device=self.execution.device,
            warmup_steps=math.floor(WARMUP_SHARE * total_steps),
            schedule="cosine",
            total_steps=total_steps,
            min_lr=wanted.lr / 10,
        )

    def _load(self) -> StreamingTransformerLeaf:
        from mixle.models.streaming_transformer_leaf import StreamingTransformerLeaf

        return StreamingTransformerLeaf.load(self.folder.model, device=self.execution.device)

    def _training_tokens(self, earlier: StreamingTransformerLeaf | None) -> StreamingTokenEncodedData:
        from mixle.training import Evaluation, StopTraining, TrainingOptions

        console = Console(quiet=self.rank != 0 or sys.stderr.isatty(), highlight=False)

        def report_and_stop_if_asked(record: StepRecord) -> None:
            # Where there is no terminal for the progress line, a log still shows that the run is alive.
            if record.evaluation is not None:
                held_out = record.evaluation / math.log(2)
                console.print(f"transformer: {held_out:.3f} bits per byte on a held-out sample at step {record.step:,}")
            if self.interrupt.signal is not None:
                raise StopTraining

        settings = self.settings
        epochs = max(1, settings.epochs - (0 if earlier is None else earlier.state.epoch))
        steps = settings.epochs * math.ceil(len(self.corpus.train) / (settings.block * settings.batch_size))
        evaluation = Evaluation(evenly(self.corpus.heldout), every=max(1, steps // EVALUATIONS))
        options = TrainingOptions(max_grad_norm=1.0, evaluation=evaluation, callbacks=[report_and_stop_if_asked])
        return self._tokens(self.corpus.train, epochs=epochs, training=options)

    def _tokens(
        self, ids: np.ndarray, *, epochs: int = 1, training: TrainingOptions | None = None
    ) -> StreamingTokenEncodedData:
        from mixle.utils.parallel.torch_neural import StreamingTokenEncodedData

        return StreamingTokenEncodedData(
            ids,
            block=self.settings.block,
            batch_size=self.settings.per_process(self.processes),
            epochs=epochs,
            parallel=self.execution.parallel,
            precision=self.execution.precision,
            targets="all",
            sampling="global",
            seed=self.settings.seed,
            training=training,
        )

    def _score(
        self,
        name: str,
        parameters: int,
        model: Any,
        seconds: float,
        heldout: StreamingTokenEncodedData,
        console: Console,
    ) -> Score:
        count, total = seq_log_density_sum(heldout, model)
        score = Score(name, parameters, -total / count / math.log(2), seconds)
        console.print(f"{name}: {score.bits_per_byte:.3f} bits per byte after {seconds:.1f} s")
        return score

    def _save(self, leaf: StreamingTransformerLeaf, *, complete: bool) -> None:
        self.folder.clear_reports()
        if not self.resume:
            self.folder.announce(self.settings, self.corpus)
        leaf.save(self.folder.model)
        self.folder.describe(self.settings, self.corpus, complete=complete)

    def _report(self, leaf: StreamingTransformerLeaf, scores: list[Score], console: Console) -> None:
        bytes_seen = np.cumsum([record.targets for record in leaf.history]).tolist()
        training = [record.loss / math.log(2) for record in leaf.history]
        evaluations = [
            (seen, record.evaluation / math.log(2))
            for seen, record in zip(bytes_seen, leaf.history, strict=True)
            if record.evaluation is not None
        ]
        others = {score.model: score.bits_per_byte for score in scores if score.model != "transformer"}
        plot_loss(self.folder.plot, bytes_seen=bytes_seen, training=training, heldout=evaluations, others=others)
        write_numbers(
            self.folder.numbers,
            scores,
            training_bytes=len(self.corpus.train),
            heldout_bytes=len(self.corpus.heldout),
            processes=self.processes,
            bytes_seen=bytes_seen,
            training_bits_per_byte=training,
            heldout_bits_per_byte=evaluations,
        )
        prompt = self.corpus.heldout[:PROMPT_BYTES]
        text = leaf.generate(prompt, SAMPLE_BYTES, temperature=SAMPLE_TEMPERATURE, seed=self.settings.seed)
        written = bytes(text.astype(np.uint8)).decode("utf-8", errors="replace")
        self.folder.sample.write_text(written)
        shown = Text(printable(written))
        shown.stylize("dim", 0, len(printable(bytes(prompt).decode("utf-8", errors="replace"))))
        console.print(Panel(shown, title="generated, after a held-out beginning in grey", title_align="left"))
        console.print(score_table(scores, heldout_bytes=len(self.corpus.heldout), fitted_on=len(self.corpus.train)))
        console.print(f"Model, plot, numbers and sample: {self.folder.path}/")


def resume_command(folder: Path, processes: int) -> str:
    """Return what to type to go on with the run in ``folder`` on as many processes."""
    program = ["mixle"] if shutil.which("mixle") else [os.path.relpath(sys.executable), "-m", "mixle"]
    how_many = ["--nproc", str(processes)] if processes > 1 else []
    return shlex.join([*program, "lm", *how_many, "--resume", str(folder)])


def _timed(tokens: StreamingTokenEncodedData, estimator: Any, earlier: Any = None) -> tuple[Any, float]:
    started = time.perf_counter()
    return seq_estimate(tokens, estimator, earlier), time.perf_counter() - started


def evenly(ids: np.ndarray) -> np.ndarray:
    """Return at most ``EVALUATION_BYTES``, in pieces spread evenly over ``ids``, to score often at little cost."""
    if len(ids) <= EVALUATION_BYTES:
        return ids
    starts = np.linspace(0, len(ids) - PIECE, EVALUATION_BYTES // PIECE).astype(np.int64)
    return ids[(starts[:, None] + np.arange(PIECE)).ravel()]


def printable(text: str) -> str:
    """Return ``text`` with what would move a terminal's cursor replaced."""
    return "".join(c if c == "\n" or c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text.expandtabs(4))
