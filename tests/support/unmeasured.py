"""The environment of processes whose way to end on a signal is what a test is about."""

from __future__ import annotations

import os


def environment(**more: str) -> dict[str, str]:
    """Return this process's environment without what would measure the coverage of one that is started.

    Coverage handles SIGTERM from the start, where such a process must find the default to put its own handler in place.
    """
    return {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE_")} | more
