"""The `mixle` command: each subcommand is one job, defined beside the code that does it."""

from __future__ import annotations

import importlib
import importlib.util
import signal
import sys
from typing import TYPE_CHECKING

from mixle.utils.optional_import import optional_import

if TYPE_CHECKING:
    import typer

PLAN_COMMAND = "mixle.experimental.tensor_pipeline_context_parallel.command"  # by name: what is experimental may change
TEACHER_MODULES = ("zmq", "msgpack")


def build_app() -> typer.Typer:
    """Return the command line.

    Raises:
        ImportError: the ``cli`` extra is not installed.
    """
    for module in ("typer", "rich", "matplotlib"):
        if importlib.util.find_spec(module) is None:  # matplotlib takes 18 MB, and only a plot needs it
            optional_import(module, extra="cli")
    import typer

    from mixle.diloco.command import diloco
    from mixle.lm.command import lm

    app = typer.Typer(
        no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich"
    )

    @app.callback()
    def root() -> None:
        """Statistical modelling in one verb: the estimator says what is fitted, the data handle says where and how."""

    app.command("lm")(lm)
    app.command("plan")(importlib.import_module(PLAN_COMMAND).plan)
    app.add_typer(diloco, name="diloco")
    if all(importlib.util.find_spec(module) for module in TEACHER_MODULES):
        from mixle.data.teacher.command import teacher

        app.add_typer(teacher, name="teacher")
    else:
        app.command("teacher", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(_no_teacher)
    return app


def _no_teacher() -> None:
    """Make samples on demand for students that train (its extra is not installed)."""
    for module in TEACHER_MODULES:
        optional_import(module, extra="teacher")


def main() -> None:
    """Run the command line on ``sys.argv`` and exit with its status."""
    try:
        build_app()()
    except ImportError as error:
        sys.exit(f"mixle: {error}")
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
