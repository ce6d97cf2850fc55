"""A broker's figures on the terminal."""

from __future__ import annotations

import time
from collections.abc import Callable

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table

from mixle.data.teacher.stats import BrokerStats


def print_table(figures: BrokerStats) -> None:
    """Print the figures once."""
    Console().print(table(figures))


def watch(ask: Callable[[], BrokerStats], interval: float) -> None:
    """Show the figures that ``ask`` returns, anew every ``interval`` seconds, until Ctrl-C."""
    console = Console()
    try:
        if not console.is_terminal:  # a file or a pipe, where nothing can be drawn over
            while True:
                console.print(table(ask()))
                time.sleep(interval)
        with Live(table(ask()), console=console, auto_refresh=False) as live:
            while True:
                time.sleep(interval)
                live.update(table(ask()), refresh=True)
    except KeyboardInterrupt:
        return


def table(figures: BrokerStats) -> Group:
    """Return the figures as tables."""
    summary = Table(title=f"run {figures.run_id}, broker process {figures.pid}", show_header=False)
    for label, value in (
        ("up", f"{figures.uptime_s:,.0f} s"),
        ("model", f"{figures.model_id!r}, generation {figures.generation}"),
        ("leader", figures.leader or "none"),
        ("queued / at workers", f"{figures.queued:,} / {figures.working:,}"),
        ("completed", f"{figures.completed:,} ({figures.rate:,.1f} per second), {figures.direct:,} of them directly"),
        ("latency p50 / p99", f"{_milliseconds(figures.latency_p50_s)} / {_milliseconds(figures.latency_p99_s)}"),
        ("failed / retried", f"{figures.failed:,} / {figures.retried:,}"),
        ("slots given to another worker", f"{figures.requeued:,}"),
        ("stale dropped / cancelled / lost", f"{figures.stale_dropped:,} / {figures.cancelled:,} / {figures.lost:,}"),
        (
            "garbage / strangers / keys refused",
            f"{figures.garbage:,} / {figures.strangers:,} / {figures.keys_refused:,}",
        ),
    ):
        summary.add_row(label, value)
    processes = [one.process for one in figures.workers] + [one.process for one in figures.students]
    hosts = ("host",) if len({process.partition("/")[0] for process in processes}) > 1 else ()
    workers = _headed(
        f"workers: {figures.workers_registered}, serving this model: {figures.workers_serving}",
        ("worker", "process", *hosts, "state", "models", "has", "completed", "failed", "per second"),
    )
    for row in figures.workers:
        counts = (f"{row.outstanding:,}", f"{row.completed:,}", f"{row.failed:,}", f"{row.rate:,.1f}")
        workers.add_row(row.worker, *_process(row.process, hosts), row.state, row.patterns, *counts)
    students = _headed(
        f"students: {figures.students_registered}",
        ("student", "process", *hosts, "rank", "slots", "queued", "at workers", "completed", "failed", "state"),
    )
    for one in figures.students:
        numbers = (one.rank, one.slots, one.queued, one.working, one.completed, one.failed)
        state = "silent" if one.silent else "alive"
        process = _process(one.process, hosts)
        students.add_row(one.student[:8], *process, *(f"{number:,}" for number in numbers), state)
    return Group(summary, workers, students)


def _headed(title: str, headings: tuple[str, ...]) -> Table:
    headed = Table(title=title)
    for heading in headings:
        headed.add_column(heading, no_wrap=heading == "process")
    return headed


def _process(shown: str, hosts: tuple[str, ...]) -> tuple[str, ...]:
    """Return the process's number, which is what one needs, and its host's name if there are several."""
    host, _, number = shown.partition("/")
    return (number, host[:8]) if hosts else (number,)


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1e3 * seconds:,.2f} ms"
