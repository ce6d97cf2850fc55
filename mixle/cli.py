"""The `mixle` command: each subcommand is one job, defined beside the code that does it."""

from __future__ import annotations

import importlib
import importlib.util
import signal
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from mixle.utils.optional_import import optional_import

if TYPE_CHECKING:
    import typer

PLAN_COMMAND = "mixle.experimental.tensor_pipeline_context_parallel.command"  # by name: what is experimental may change
TEACHER_MODULES = ("zmq", "msgpack")


def build_app(only: str | None = None) -> typer.Typer:
    """Return the command line.

    Args:
        only: the subcommand that will be called, so that nothing is loaded for the others; None for all.

    Raises:
        ImportError: the ``cli`` extra is not installed.
    """
    for module in ("typer", "rich", "matplotlib"):
        if importlib.util.find_spec(module) is None:  # matplotlib takes 18 MB, and only a plot needs it
            optional_import(module, extra="cli")
    import typer

    app = typer.Typer(
        no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich"
    )

    @app.callback()
    def root() -> None:
        """Statistical modelling in one verb: the estimator says what is fitted, the data handle says where and how."""

    for name, add in SUBCOMMANDS.items():
        if only in (None, name):
            add(app)
    return app


def _add_lm(app: typer.Typer) -> None:
    from mixle.lm.command import lm

    app.command("lm")(lm)


def _add_plan(app: typer.Typer) -> None:
    app.command("plan")(importlib.import_module(PLAN_COMMAND).plan)


def _add_diloco(app: typer.Typer) -> None:
    from mixle.diloco.command import diloco

    app.add_typer(diloco, name="diloco")


def _add_teacher(app: typer.Typer) -> None:
    if all(importlib.util.find_spec(module) for module in TEACHER_MODULES):
        from mixle.data.teacher.command import teacher

        app.add_typer(teacher, name="teacher")
    else:
        app.command("teacher", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(_no_teacher)


def _no_teacher() -> None:
    """Make samples on demand for students that train (its extra is not installed)."""
    for module in TEACHER_MODULES:
        optional_import(module, extra="teacher")


SUBCOMMANDS: dict[str, Callable[[typer.Typer], None]] = {
    "lm": _add_lm,
    "plan": _add_plan,
    "diloco": _add_diloco,
    "teacher": _add_teacher,
}


def main() -> None:
    """Run the command line on ``sys.argv`` and exit with its status."""
    try:
        build_app(sys.argv[1] if sys.argv[1:2] and sys.argv[1] in SUBCOMMANDS else None)()
    except ImportError as error:
        sys.exit(f"mixle: {error}")
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
