"""The `mixle diloco` subcommands: look at a run in a bucket, draw it, clean up after it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from mixle.diloco.mailbox import MailboxError
from mixle.diloco.object_store import open_existing
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
PIPED_WIDTH = 400
"""Characters to a line where nobody looks: what reads a pipe can cut for itself."""

_SHOWN = ("sync_every", "fragments", "in_flight", "quorum_size", "outer_lr", "outer_momentum")
_TEXT = ("node", "state", "role", "closer")
_NAME_WIDTH = 24
_SHOWN_IF_SET = ("overlap_steps", "grace_seconds", "delta_dtype", "commit_dtype", "global_batch_size")


@diloco.command()
def status(
    url: Url,
    last: Annotated[int, typer.Option(help="Rounds to list.", min=1)] = 10,
    wait: Wait = WAIT_S,
) -> None:
    """Print a run: its nodes, its newest rounds, what they waited for, and what they sent."""
    with _told():
        seen = survey(open_existing(url), last=last, wait_s=require_finite_float(wait, "wait", minimum=0.0))
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = PIPED_WIDTH
    console.print(_headline(seen))
    console.print(_nodes(seen, console.width))
    if seen.rounds:
        console.print(_rounds(seen, console.width))
    console.print("objects: " + ", ".join(f"{count:,} {kind}" for kind, count in sorted(seen.objects.items())))
    for each in seen.foreign:
        console.print(f"passed over: {each}", markup=False)


@diloco.command()
def plot(
    url: Url,
    out: Annotated[Path, typer.Option(help="The image to write; its suffix says which kind, e.g. .png.")],
    last: Annotated[int, typer.Option(help="Rounds to draw.", min=1)] = 1000,
) -> None:
    """Draw a run, round by round, in four panels.

    - snapshots: how many were accepted, how many refused

    - waited: seconds for the quorum and in the grace window

    - mean cosine of the deltas, from -1 to 1

    - norm of the delta of each learner
    """
    with _told():
        if not out.suffix or not out.parent.is_dir():
            raise ValueError(f"--out {out} must be a file in a folder that is there, and end in .png, .svg or the like")
        seen = survey(open_existing(url), last=last, wait_s=0.0)
        if not seen.rounds:
            raise ValueError("the run has no committed round yet; there is nothing to draw")
        _draw(seen, out, title=url)
    typer.echo(f"{out}: {len(seen.rounds)} of {seen.committed} rounds")


@diloco.command()
def gc(
    url: Url,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Delete nothing, only count.")] = False,
) -> None:
    """Delete what no node of a run needs any more; the records of its rounds and its newest parameters stay."""
    with _told():
        counted = collect_garbage(open_existing(url), dry_run=dry_run)
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


def _nodes(seen: Survey, width: int) -> Table:
    columns = ("node", "state", "role", "steps", "samples", "in commits", "samples/s")
    rows = []
    for node in seen.nodes:
        info, speed = node.info, "-" if node.speed is None else f"{node.speed:,.0f}"
        whole = info.steps * seen.algorithm.fragments
        merged = f"{info.merged / whole:.1%}" if whole else "-"
        rows.append((node.name, node.state, info.role or "?", f"{info.steps:,}", f"{info.samples:,}", merged, speed))
    return _table("nodes", columns, rows, width=width, first_to_go=("samples", "role", "samples/s", "steps"))


def _rounds(seen: Survey, width: int) -> Table:
    columns = ("round", "part", "sites", "steps", "samples", "quorum s", "grace s", "cos", "refused", "MB", "closer")
    rows = []
    for record in seen.rounds[::-1]:
        quorum_s, grace_s = record.waited_s
        rows.append(
            (
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
        )
    first_to_go = ("samples", "MB", "part", "steps", "refused", "cos")
    return _table("newest rounds", columns, rows, width=width, first_to_go=first_to_go)


def _table(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], *, width: int, first_to_go: Sequence[str]
) -> Table:
    """Lay out rows without cutting a number or a header: columns that find no room are named below, names fold."""
    needed = {name: max(map(len, (name, *cells))) for name, *cells in zip(columns, *rows, strict=True)}
    needed |= {name: min(needed[name], _NAME_WIDTH) for name in _TEXT if name in needed}
    shown, left_out = list(columns), []
    for name in first_to_go:
        if sum(needed[each] + 3 for each in shown) + 1 <= width:
            break
        shown.remove(name)
        left_out.append(name)
    caption = f"no room for: {', '.join(left_out)}" if left_out else None
    table = Table(title=title, title_justify="left", caption=caption, caption_justify="left")
    for name in shown:
        if name in _TEXT:
            table.add_column(name, overflow="fold")
        else:
            table.add_column(name, justify="right", no_wrap=True, min_width=needed[name])
    for row in rows:
        table.add_row(*(cell for name, cell in zip(columns, row, strict=True) if name in shown))
    return table


def _written(record: RoundRecord) -> int:
    """Bytes that the closer of a round wrote."""
    refs = (record.theta, record.master, record.momentum, record.update)
    return sum(ref.nbytes for ref in refs if ref is not None)


def _draw(seen: Survey, out: Path, *, title: str) -> None:
    matplotlib = optional_import("matplotlib", extra="cli")
    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import MaxNLocator

    rounds = [record.round for record in seen.rounds]
    figure, panels = pyplot.subplots(2, 2, figsize=(10, 7), sharex=True, layout="constrained")
    (snapshots, waits), (cosines, norms) = panels
    figure.suptitle(title, parse_math=False)
    snapshots.step(rounds, [len(r.contributions) for r in seen.rounds], where="mid", label="accepted")
    snapshots.step(rounds, [len(r.rejections) for r in seen.rounds], where="mid", label="refused")
    snapshots.set_ylabel("snapshots")
    snapshots.yaxis.set_major_locator(MaxNLocator(integer=True))
    waits.stackplot(rounds, *zip(*(r.waited_s for r in seen.rounds), strict=True), labels=["quorum", "grace"])
    waits.set_ylabel("waited, s")
    agreed = [record for record in seen.rounds if record.cosine is not None]
    cosines.plot([r.round for r in agreed], [r.cosine for r in agreed], ".")
    cosines.set_ylabel("mean cosine of the deltas")
    for name in sorted({c.learner for record in seen.rounds for c in record.contributions}):
        mine = [(record.round, c.norm) for record in seen.rounds for c in record.contributions if c.learner == name]
        norms.plot(*zip(*mine, strict=True), ".", label=name, markersize=4)
    norms.set_ylabel("norm of the delta")
    for axes in (snapshots, waits, norms):
        if axes.get_legend_handles_labels()[1]:
            axes.legend(loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=4, fontsize="small", frameon=False)
    for axes in (cosines, norms):
        axes.set_xlabel("round")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    figure.savefig(out)
    pyplot.close(figure)
