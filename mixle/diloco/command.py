"""The `mixle diloco` subcommands: look at a run in a bucket, draw it, clean up after it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from mixle.diloco.mailbox import MailboxError
from mixle.diloco.object_store import open_mailbox
from mixle.diloco.records import RoundRecord
from mixle.diloco.survey import Survey, collect_garbage, survey
from mixle.utils.exact import require_finite_float
from mixle.utils.optional_import import optional_import

__all__ = ["diloco"]

diloco = typer.Typer(no_args_is_help=True, help="Training across sites that share nothing but a bucket.")

Url = Annotated[
    str, typer.Argument(metavar="URL", help="Where the run is: s3://bucket/prefix, gs://..., az://..., file:///...")
]
Wait = Annotated[
    float, typer.Option(help="Seconds between two looks: who gives no sign of life meanwhile counts as silent.")
]

WAIT_S = 2.5
_SHOWN = ("sync_every", "fragments", "in_flight", "quorum_size", "outer_lr", "outer_momentum")
_SHOWN_IF_SET = ("overlap_steps", "grace_seconds", "delta_dtype", "commit_dtype", "global_batch_size")


@diloco.command()
def status(
    url: Url,
    last: Annotated[int, typer.Option(help="Rounds to list.", min=1)] = 10,
    wait: Wait = WAIT_S,
) -> None:
    """Print a run: its nodes, its newest rounds, what they waited for, and what they sent."""
    with _told():
        seen = survey(open_mailbox(url), last=last, wait_s=require_finite_float(wait, "wait", minimum=0.0))
    console = Console(highlight=False)
    console.print(_headline(seen))
    console.print(_nodes(seen))
    if seen.rounds:
        console.print(_rounds(seen))
    console.print("objects: " + ", ".join(f"{count:,} {kind}" for kind, count in sorted(seen.objects.items())))
    for each in seen.foreign:
        console.print(f"passed over: {each}", markup=False)


@diloco.command()
def plot(
    url: Url,
    out: Annotated[Path, typer.Option(help="The image to write; its suffix says which kind, e.g. .png.")],
    last: Annotated[int, typer.Option(help="Rounds to draw.", min=1)] = 1000,
) -> None:
    """Draw a run: learners, waiting, agreement and work of each round."""
    with _told():
        seen = survey(open_mailbox(url), last=last, wait_s=0.0)
        if not seen.rounds:
            raise ValueError("the run has no committed round yet; there is nothing to draw")
        _draw(seen, out)
    typer.echo(f"{out}: {len(seen.rounds)} of {seen.committed} rounds")


@diloco.command()
def gc(
    url: Url,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Delete nothing, only count.")] = False,
) -> None:
    """Delete what no node of a run needs any more; the records of its rounds and its newest parameters stay."""
    with _told():
        counted = collect_garbage(open_mailbox(url), dry_run=dry_run)
    told = ", ".join(f"{count} {kind}" for kind, count in sorted(counted.items())) or "nothing"
    typer.echo(f"{'would delete' if dry_run else 'deleted'}: {told}")


@contextmanager
def _told() -> Iterator[None]:
    """Turn errors that a user can mend into one line on stderr and status 2."""
    try:
        yield
    except (MailboxError, ValueError, TypeError, OSError) as error:
        typer.echo(f"mixle: {error}", err=True)
        raise typer.Exit(2) from None


def _headline(seen: Survey) -> str:
    algorithm = seen.algorithm
    shown = [*_SHOWN, *(name for name in _SHOWN_IF_SET if getattr(algorithm, name) is not None)]
    settings = ", ".join(f"{name} {getattr(algorithm, name)}" for name in shown)
    elements = sum(math.prod(shape) for _, _, shape in seen.run.parameters)
    share = seen.merged_share
    return (
        f"{len(seen.run.parameters)} tensors of {elements:,} parameters; {seen.committed:,} rounds committed, "
        f"{seen.committed // algorithm.fragments:,} of each fragment\n{settings}\n"
        f"steps whose work is in commits: {'-' if share is None else f'{share:.1%}'}"
    )


def _nodes(seen: Survey) -> Table:
    table = Table(title="nodes", title_justify="left")
    for name in ("node", "state", "role"):
        table.add_column(name)
    for name in ("steps", "samples", "in commits", "samples/s"):
        table.add_column(name, justify="right")
    for node in seen.nodes:
        info, speed = node.info, "-" if node.speed is None else f"{node.speed:,.0f}"
        whole = info.steps * seen.algorithm.fragments
        merged = f"{info.merged / whole:.1%}" if whole else "-"
        table.add_row(node.name, node.state, info.role or "?", f"{info.steps:,}", f"{info.samples:,}", merged, speed)
    return table


def _rounds(seen: Survey) -> Table:
    table = Table(title="newest rounds", title_justify="left")
    columns = ("round", "part", "sites", "steps", "samples", "quorum s", "grace s", "cos", "refused", "MB")
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("closer")
    for record in seen.rounds[::-1]:
        quorum_s, grace_s = record.waited_s
        table.add_row(
            str(record.round),
            str(record.fragment),
            str(len(record.contributions)),
            f"{record.steps:,}",
            f"{record.tokens:,}",
            f"{quorum_s:.1f}",
            f"{grace_s:.1f}",
            "-" if record.cosine is None else f"{record.cosine:.2f}",
            str(len(record.rejections)),
            f"{_written(record) / 1e6:.2f}",
            record.closer,
        )
    return table


def _written(record: RoundRecord) -> int:
    """Bytes that the closer of a round wrote."""
    refs = (record.theta, record.master, record.momentum, record.update)
    return sum(ref.nbytes for ref in refs if ref is not None)


def _draw(seen: Survey, out: Path) -> None:
    matplotlib = optional_import("matplotlib", extra="cli")
    matplotlib.use("Agg")
    from matplotlib import pyplot

    rounds = [record.round for record in seen.rounds]
    figure, ((learners, waits), (cosines, work)) = pyplot.subplots(2, 2, figsize=(10, 6), sharex=True)
    learners.step(rounds, [len(r.contributions) for r in seen.rounds], where="mid", label="accepted")
    learners.step(rounds, [len(r.rejections) for r in seen.rounds], where="mid", label="refused")
    learners.set_ylabel("snapshots")
    learners.legend()
    waits.stackplot(rounds, *zip(*(r.waited_s for r in seen.rounds), strict=True), labels=["quorum", "grace"])
    waits.set_ylabel("waited, s")
    waits.legend()
    agreed = [record for record in seen.rounds if record.cosine is not None]
    cosines.plot([r.round for r in agreed], [r.cosine for r in agreed], ".")
    cosines.set_ylabel("mean cosine of deltas")
    for name in sorted({c.learner for record in seen.rounds for c in record.contributions}):
        mine = [(record.round, c.norm) for record in seen.rounds for c in record.contributions if c.learner == name]
        work.plot(*zip(*mine, strict=True), ".", label=name, markersize=4)
    work.set_ylabel("norm of delta")
    work.legend(fontsize="small")
    for axes in (cosines, work):
        axes.set_xlabel("round")
    figure.tight_layout()
    figure.savefig(out)
    pyplot.close(figure)
