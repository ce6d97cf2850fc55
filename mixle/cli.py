"""The `mixle` command: each subcommand is one job, defined beside the code that does it."""

from __future__ import annotations

import sys

from mixle.utils.optional_import import optional_import


def main() -> None:
    """Run the command line on ``sys.argv`` and exit with its status."""
    try:
        typer = optional_import("typer", extra="cli")
        optional_import("rich", extra="cli")
    except ImportError as error:
        sys.exit(f"mixle: {error}")
    from mixle.lm.command import lm

    app = typer.Typer(
        no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich"
    )

    @app.callback()
    def root() -> None:
        """Statistical modelling in one verb: the estimator says what is fitted, the data handle says where and how."""

    app.command("lm")(lm)
    app()
