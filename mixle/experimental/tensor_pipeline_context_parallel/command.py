"""The `mixle plan` subcommand: a model, a number of accelerators and a batch in, plans ranked by predicted time out."""

from __future__ import annotations

from typing import Annotated

import typer

from mixle.experimental.tensor_pipeline_context_parallel.hardware import GIB, HARDWARE
from mixle.experimental.tensor_pipeline_context_parallel.model_shape import NAMED_SHAPES, ModelShape, shape_of_size
from mixle.experimental.tensor_pipeline_context_parallel.propose import propose_plans
from mixle.experimental.tensor_pipeline_context_parallel.workload import Precision, Recompute
from mixle.utils.exact import require_finite_float

MODEL, STEP, TABLE = "The model", "The step", "The table"


def plan(
    context: typer.Context,
    gpus: Annotated[int, typer.Option(help="Accelerators.", min=1)],
    seq_len: Annotated[int, typer.Option(help="Tokens of a row.", rich_help_panel=STEP, min=1)],
    params: Annotated[
        str | None,
        typer.Option(help=f"A size such as 8B or 1.3B, or one of {', '.join(NAMED_SHAPES)}.", rich_help_panel=MODEL),
    ] = None,
    layers: Annotated[int | None, typer.Option(help="Blocks.", rich_help_panel=MODEL, min=1)] = None,
    d_model: Annotated[int | None, typer.Option(help="Width of the stream.", rich_help_panel=MODEL, min=1)] = None,
    heads: Annotated[int | None, typer.Option(help="Query heads.", rich_help_panel=MODEL, min=1)] = None,
    kv_heads: Annotated[
        int | None,
        typer.Option(help="Key and value heads. Default: as many as query heads.", rich_help_panel=MODEL, min=1),
    ] = None,
    d_mlp: Annotated[
        int | None,
        typer.Option(help="Hidden width of the MLP. Default: 4 times the model's.", rich_help_panel=MODEL, min=1),
    ] = None,
    vocab: Annotated[int | None, typer.Option(help="Token ids.", rich_help_panel=MODEL, min=1)] = None,
    gated: Annotated[bool, typer.Option("--gated", help="The MLP has a gate.", rich_help_panel=MODEL)] = False,
    tied: Annotated[
        bool, typer.Option("--tied", help="The head shares the embedding's weight.", rich_help_panel=MODEL)
    ] = False,
    hardware: Annotated[str, typer.Option(help=f"One of {', '.join(HARDWARE)}.")] = "h100",
    batch_size: Annotated[
        int | None,
        typer.Option(help="Rows of each data replica in a step; ranks by time per token.", rich_help_panel=STEP, min=1),
    ] = None,
    global_batch_size: Annotated[
        int | None,
        typer.Option(
            help="Rows of all replicas, in place of --batch-size; ranks by time.", rich_help_panel=STEP, min=1
        ),
    ] = None,
    precision: Annotated[Precision, typer.Option(help="Of matrix products.", rich_help_panel=STEP)] = "bf16",
    recompute: Annotated[
        Recompute | None,
        typer.Option(
            help="In the backward pass. Default: the faster of none and full that fits.", rich_help_panel=STEP
        ),
    ] = None,
    compiled: Annotated[
        bool, typer.Option("--compiled", help="Elementwise operations are fused.", rich_help_panel=STEP)
    ] = False,
    memory_gib: Annotated[
        float | None, typer.Option(help="Limit per rank. Default: the accelerator's memory less 2 GiB.")
    ] = None,
    rows: Annotated[int, typer.Option(help="Plans to print.", rich_help_panel=TABLE, min=1)] = 10,
    near_misses: Annotated[
        int, typer.Option(help="Plans that nearly work to print.", rich_help_panel=TABLE, min=0)
    ] = 5,
) -> None:
    """Rank the ways to split a model over accelerators by predicted time under the memory limit.

    Every mesh of data, tensor, pipeline and context parallelism is tried, with the schedule and recomputation that make
    it fastest. The predictions are within 25 % of published runs of Llama models, so that plans within 10 % of the
    fastest count as ties: they are marked, the simplest first. Exits with status 1 if no plan fits.

    [bold]mixle plan --params 8B --gpus 8 --batch-size 2 --seq-len 8192[/]

    [bold]mixle plan --params llama3-405b --gpus 512 --hardware h100 --global-batch-size 256 --seq-len 8192[/]

    [bold]mixle plan --layers 24 --d-model 2048 --heads 16 --vocab 50304 --gpus 16 --batch-size 8 --seq-len 2048[/]
    """
    widths = {"layers": layers, "d-model": d_model, "heads": heads, "vocab": vocab}
    more = {"kv-heads": kv_heads, "d-mlp": d_mlp, "gated": gated or None, "tied": tied or None}
    try:
        given = [f"--{name}" for name, value in {**widths, **more}.items() if value is not None]
        if params is not None and given:
            raise ValueError(f"--params {params} names the model; leave out {', '.join(given)}")
        missing = [f"--{name}" for name, value in widths.items() if value is None]
        if params is None and missing:
            raise ValueError(f"give --params, or also {', '.join(missing)}")
        shape = (
            shape_of_size(params)
            if params is not None
            else ModelShape(
                vocab=vocab or 0,
                d_model=d_model or 0,
                n_layer=layers or 0,
                n_head=heads or 0,
                n_kv_head=kv_heads or 0,
                d_mlp=d_mlp or 0,
                gated=gated,
                tied=tied,
            )
        )
        proposals = propose_plans(
            shape,
            gpus,
            hardware=hardware,
            batch_size=batch_size,
            global_batch_size=global_batch_size,
            seq_len=seq_len,
            precision=precision,
            compiled=compiled,
            recompute=recompute,
            memory_limit=None if memory_gib is None else _bytes(memory_gib),
        )
    except ValueError as error:
        raise typer.BadParameter(str(error), ctx=context) from None
    typer.echo(proposals.table(rows=rows, near_misses=near_misses))
    if not proposals:
        raise typer.Exit(1)


def _bytes(gib: float) -> int:
    return max(1, round(require_finite_float(gib, "memory-gib", exclusive_minimum=0.0) * GIB))
