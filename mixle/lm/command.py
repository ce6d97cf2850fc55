"""The `mixle lm` subcommand: options in, settings checked, the job run here or under torchrun."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Annotated

import typer

from mixle.lm.corpus import Corpus, read_corpus, standard_library_files
from mixle.lm.interrupt import Interrupt
from mixle.lm.job import Job
from mixle.lm.launch import run_under_torchrun
from mixle.lm.run_folder import RunFolder
from mixle.lm.settings import Device, Execution, Parallel, Precision, Settings, option
from mixle.utils.optional_import import optional_import

DEFAULTS = Settings()
RUNNING, MODEL, TEXT = "Where and how it runs", "The model and its training", "The text"


def lm(
    context: typer.Context,
    files: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="FILES",
            help="Text files, read as bytes. Default: the standard library of the Python that runs this.",
        ),
    ] = None,
    max_bytes: Annotated[
        int, typer.Option(help="Read at most this many bytes in all, files in seeded order.", rich_help_panel=TEXT)
    ] = DEFAULTS.max_bytes,
    heldout: Annotated[
        float, typer.Option(help="Fraction of the bytes held out to judge by; whole files.", rich_help_panel=TEXT)
    ] = DEFAULTS.heldout,
    epochs: Annotated[
        int, typer.Option(help="Passes over the training bytes.", rich_help_panel=MODEL)
    ] = DEFAULTS.epochs,
    d_model: Annotated[int, typer.Option(help="Width of the transformer.", rich_help_panel=MODEL)] = DEFAULTS.d_model,
    layers: Annotated[int, typer.Option(help="Transformer blocks.", rich_help_panel=MODEL)] = DEFAULTS.layers,
    heads: Annotated[int, typer.Option(help="Attention heads per block.", rich_help_panel=MODEL)] = DEFAULTS.heads,
    block: Annotated[int, typer.Option(help="Bytes of context.", rich_help_panel=MODEL)] = DEFAULTS.block,
    batch_size: Annotated[
        int,
        typer.Option(
            help="Windows of --block bytes per step, all processes together: --nproc changes results by rounding only.",
            rich_help_panel=MODEL,
        ),
    ] = DEFAULTS.batch_size,
    lr: Annotated[
        float,
        typer.Option(help="Peak learning rate, after a warm-up and before a cosine decay.", rich_help_panel=MODEL),
    ] = DEFAULTS.lr,
    seed: Annotated[
        int, typer.Option(help="Fixes split, initial parameters, data order, sample.", rich_help_panel=MODEL)
    ] = DEFAULTS.seed,
    nproc: Annotated[
        int | None,
        typer.Option(
            help="Processes on this machine, started under torchrun.", show_default="1", rich_help_panel=RUNNING
        ),
    ] = None,
    device: Annotated[
        Device, typer.Option(help="auto takes CUDA where there is one.", rich_help_panel=RUNNING)
    ] = "auto",
    parallel: Annotated[
        Parallel,
        typer.Option(
            help="auto is FSDP2 on CUDA, DDP on CPU, none in one process.",
            rich_help_panel=RUNNING,
        ),
    ] = "auto",
    precision: Annotated[Precision, typer.Option(help="Of forward and backward.", rich_help_panel=RUNNING)] = "fp32",
    out: Annotated[
        Path, typer.Option(help="Folder of the model, the plot and the numbers; an older run there is replaced.")
    ] = Path("mixle-lm"),
    resume: Annotated[
        Path | None, typer.Option(help="Go on with the interrupted run in this folder, on its text and settings.")
    ] = None,
) -> None:
    """Train a byte-level language model on text and compare it, on held-out bytes, with simpler models and xz.

    A categorical, a Markov chain and a transformer are fitted by the same call on the same data handle.
    It ends with a table of bits per byte, a sample of generated text, a plot of the loss and the saved model.

    [bold]mixle lm[/]                       the standard library, one process

    [bold]mixle lm --nproc 2[/]             the same on two processes

    [bold]mixle lm book.txt --epochs 5[/]   your own text

    Ctrl-C saves the model as it is and says how to go on.
    """
    with ExitStack() as kept:
        with Interrupt() as interrupt:
            with _refusals(context):
                if resume is None:
                    settings = Settings(
                        files=tuple(os.path.abspath(name) for name in files or ()),
                        max_bytes=max_bytes,
                        heldout=heldout,
                        epochs=epochs,
                        d_model=d_model,
                        layers=layers,
                        heads=heads,
                        block=block,
                        batch_size=batch_size,
                        lr=lr,
                        seed=seed,
                    )
                    folder = RunFolder(out)
                    folder.require_free()
                else:
                    _refuse_settings(context)
                    folder = RunFolder(resume)
                    settings = folder.unfinished_settings()
                rank, processes = _place(nproc)
                settings.per_process(processes)
                if parallel == "none" and processes > 1:
                    raise ValueError(
                        f"--parallel none is for one process, not the {processes} of --nproc; leave it out"
                    )
                corpus = _read(settings)
                execution = Execution(_device(device, processes), parallel, precision)
                folder.make()
                kept.enter_context(folder.held(rank))
                if resume is not None:
                    folder.require_same_text(corpus)
            if rank is not None:
                job = Job(settings, execution, corpus, folder, resume is not None, rank, processes, interrupt)
                raise typer.Exit(job.run())
        if interrupt.signal is not None:
            raise typer.Exit(128 + interrupt.signal)
        raise typer.Exit(run_under_torchrun(processes, sys.argv[1:]))


@contextmanager
def _refusals(context: typer.Context) -> Iterator[None]:
    """Report a refused value as a usage error, and a missing extra by its name."""
    try:
        yield
    except ValueError as error:
        raise typer.BadParameter(str(error), ctx=context) from None
    except ImportError as error:
        sys.exit(f"mixle: {error}")


def _refuse_settings(context: typer.Context) -> None:
    """Refuse options beside --resume that are settings of the run."""
    own = {field.name for field in fields(Settings)} | {"out"}
    given = [name for name in context.params if name in own and _is_given(context, name)]
    if given:
        spelled = ", ".join("FILES" if name == "files" else option(name) for name in given)
        raise ValueError(f"--resume goes on with the settings of the run; leave out {spelled}")


def _is_given(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _place(nproc: int | None) -> tuple[int | None, int]:
    """Return this process's rank, None if it is to start the ranks, and the number of processes."""
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        world = int(os.environ["WORLD_SIZE"])
        if nproc not in (None, world):
            raise ValueError(f"--nproc {nproc} is not the {world} processes that torchrun started; leave it out")
        return int(os.environ["RANK"]), world
    processes = 1 if nproc is None else nproc
    if processes < 1:
        raise ValueError(f"--nproc {nproc} must be at least 1")
    return (0 if processes == 1 else None), processes


def _read(settings: Settings) -> Corpus:
    files = [Path(name) for name in settings.files] or standard_library_files()
    corpus = read_corpus(files, max_bytes=settings.max_bytes, heldout_fraction=settings.heldout, seed=settings.seed)
    settings.require_enough(training_bytes=len(corpus.train), heldout_bytes=len(corpus.heldout))
    return corpus


def _device(device: Device, processes: int) -> Device:
    cuda = optional_import("torch", extra="torch").cuda
    if device == "cuda" and not cuda.is_available():
        raise ValueError("--device cuda needs a GPU that torch can use, and there is none; leave it out")
    chosen: Device = ("cuda" if cuda.is_available() else "cpu") if device == "auto" else device
    if chosen == "cuda" and processes > cuda.device_count():
        raise ValueError(
            f"--nproc {processes} exceeds the {cuda.device_count()} GPUs here; give at most that many, or --device cpu"
        )
    return chosen
