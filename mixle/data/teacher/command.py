"""The `mixle teacher` subcommands: run a broker or a worker, watch and stop a run, make keys, clean up."""

from __future__ import annotations

import atexit
import importlib
import os
import resource
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any

import typer

from mixle.data.teacher.broker import Broker
from mixle.data.teacher.cleanup import clean as clean_segments
from mixle.data.teacher.errors import TeacherError
from mixle.data.teacher.keys import Keys, require_keys
from mixle.data.teacher.log_setup import setup_logging
from mixle.data.teacher.run import DIRECTORY_VARIABLE, forget_stopped_runs, require_endpoint
from mixle.data.teacher.stats_client import StatsClient, stop_run
from mixle.data.teacher.streaming_stores import SMALLEST_BYTES, restart_with_streaming_stores

LOOPBACK = ("127.0.0.1", "localhost", "[::1]")

teacher = typer.Typer(
    no_args_is_help=True, help="Samples on demand: a broker between students that train and workers that make samples."
)

Directory = Annotated[
    Path | None, typer.Option(help=f"This user's directory of runs. Default: ${DIRECTORY_VARIABLE}, or in ~/.cache.")
]
KeyDirectory = Annotated[
    Path | None, typer.Option("--keys", help="Directory of CURVE keys, as `mixle teacher keys` makes it.")
]
Insecure = Annotated[bool, typer.Option("--insecure", help="Allow TCP without keys.")]
Frontend = Annotated[str | None, typer.Option(help="Where students connect: ipc:///path or tcp://host:port.")]
Backend = Annotated[str | None, typer.Option(help="Where workers connect.")]
ControlPub = Annotated[str | None, typer.Option(help="Where switches of the model are published.")]


@contextmanager
def _told() -> Iterator[None]:
    """Turn errors that a user can mend into one line on stderr and status 2."""
    try:
        yield
    except (TeacherError, ValueError, TypeError, OSError) as error:
        typer.echo(f"mixle: {error}", err=True)
        raise typer.Exit(2) from None


@teacher.command()
def broker(
    frontend: Frontend = None,
    backend: Backend = None,
    control: Annotated[str | None, typer.Option(help="Where the leader switches the model.")] = None,
    control_pub: ControlPub = None,
    keys: KeyDirectory = None,
    insecure: Insecure = False,
    directory: Directory = None,
    heartbeat_s: Annotated[float, typer.Option(help="Seconds between heartbeats.")] = 0.5,
    timeout_s: Annotated[float, typer.Option(help="Seconds of silence before a peer gets nothing more.")] = 5.0,
    max_tries: Annotated[int, typer.Option(help="How often a generator may fail with a sample.")] = 3,
    log_level: Annotated[str, typer.Option(help="DEBUG, INFO, WARNING or ERROR.")] = "INFO",
) -> None:
    """Run a broker until Ctrl-C or SIGTERM. Workers and students find the next one on the same endpoints."""
    with _told(), _unspoilt_status():
        setup_logging(log_level)
        _raise_descriptor_limit()
        served = Broker(
            frontend,
            backend,
            control,
            control_pub,
            keys=keys,
            insecure=insecure,
            directory=directory,
            heartbeat_s=heartbeat_s,
            timeout_s=timeout_s,
            max_tries=max_tries,
        )
        served.run()


@teacher.command()
def worker(
    generator: Annotated[str, typer.Option(help="package.module:function, called with (model_id, model_cfg).")],
    slot_size: Annotated[int, typer.Option(help="Bytes of the largest sample it makes.")],
    backend: Backend = None,
    control_pub: ControlPub = None,
    worker_id: Annotated[str | None, typer.Option(help="What it is called in the statistics.")] = None,
    max_batch: Annotated[int | None, typer.Option(help="Call the function with a count of up to this many.")] = None,
    into_buffer: Annotated[bool, typer.Option("--into-buffer", help="Give the function buffers to fill.")] = False,
    pattern: Annotated[list[str] | None, typer.Option(help="Serve model ids like this (* and ?); repeat.")] = None,
    keys: KeyDirectory = None,
    insecure: Insecure = False,
    directory: Directory = None,
    log_level: Annotated[str, typer.Option(help="DEBUG, INFO, WARNING or ERROR.")] = "INFO",
) -> None:
    """Run a worker until Ctrl-C or SIGTERM, which let the sample under way be finished."""
    if slot_size >= SMALLEST_BYTES:  # before anything is loaded that would be loaded again
        restart_with_streaming_stores()
    from mixle.data.teacher.worker import Worker  # here: no other command needs what it imports

    with _told(), _unspoilt_status():
        setup_logging(log_level)
        Worker(
            import_function(generator),
            slot_size,
            backend,
            control_pub,
            worker_id,
            max_batch=max_batch,
            into_buffer=into_buffer,
            patterns=tuple(pattern or ("*",)),
            keys=keys,
            insecure=insecure,
            directory=directory,
        ).run()


@teacher.command()
def stats(
    frontend: Frontend = None,
    keys: KeyDirectory = None,
    insecure: Insecure = False,
    directory: Directory = None,
    once: Annotated[bool, typer.Option("--once", help="Print the table once and end.")] = False,
    prometheus: Annotated[bool, typer.Option("--prometheus", help="Print Prometheus's text format once.")] = False,
    serve: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Serve Prometheus's text at /metrics, on loopback only.")
    ] = None,
    interval: Annotated[float, typer.Option(help="Seconds between refreshes.", min=0.05)] = 1.0,
    deadline: Annotated[float, typer.Option(help="Seconds to wait for the broker.", min=0.01)] = 5.0,
) -> None:
    """Watch a run: queues, workers, rates, latencies, what was dropped and tried again."""
    from mixle.data.teacher.metrics_server import metrics_server  # here, as the broker must stay small
    from mixle.data.teacher.stats_table import print_table, watch

    with _told():
        if once + prometheus + (serve is not None) > 1:
            raise ValueError("give one of --once, --prometheus and --serve")
        address = None if serve is None else _loopback_address(serve)
        key = require_keys(keys)
        endpoint = require_endpoint(frontend, "frontend", directory=directory, keyed=key is not None, insecure=insecure)
        with StatsClient(endpoint, keys=key) as client:
            if prometheus:
                typer.echo(client.ask(deadline).prometheus(), nl=False)
            elif once:
                print_table(client.ask(deadline))
            elif address is not None:
                with metrics_server(address, lambda: client.ask(deadline)) as server, suppress(KeyboardInterrupt):
                    typer.echo(f"http://{address[0]}:{server.server_port}/metrics")
                    server.serve_forever()
                typer.echo("serves no more", err=True)
            else:
                watch(lambda: client.ask(deadline), interval)
                typer.echo("watches no more; the run goes on", err=True)


@teacher.command()
def stop(
    control: Annotated[str | None, typer.Option(help="Where the leader switches the model.")] = None,
    keys: KeyDirectory = None,
    insecure: Insecure = False,
    directory: Directory = None,
    deadline: Annotated[float, typer.Option(help="Seconds to wait for the broker.", min=0.01)] = 5.0,
) -> None:
    """End a run's broker and its workers, which finish the samples that they are making."""
    with _told():
        key = require_keys(keys)
        endpoint = require_endpoint(control, "control", directory=directory, keyed=key is not None, insecure=insecure)
        stop_run(endpoint, keys=key, deadline_s=deadline)
        typer.echo("the broker ends, and its workers once they have finished their samples", err=True)


@teacher.command("keys")
def make_keys(directory: Annotated[Path, typer.Argument(help="A directory that has none yet.")]) -> None:
    """Make the CURVE keys of a run: the broker gets the directory, workers and students only client.json."""
    with _told():
        Keys.generate().save(directory)
        typer.echo(f"wrote client.json and server.json to {directory}; server.json is for the broker alone")


@teacher.command()
def clean(
    run_id: Annotated[str | None, typer.Option(help="Only what this run left (8 hexadecimal digits).")] = None,
    directory: Directory = None,
) -> None:
    """Remove what dead processes of this user left in shared memory and on disk."""
    with _told():
        removed = [str(path) for path in clean_segments(run_id, directory=directory)]
        if run_id is None:
            removed += [str(path) for path in forget_stopped_runs(directory)]
        for path in removed:
            typer.echo(path)
        typer.echo(f"removed {len(removed)}", err=True)


def import_function(name: str) -> Callable[..., Any]:
    """Return the function that ``package.module:function`` names; modules in the working directory count.

    Raises:
        ValueError: it names none.
    """
    module_name, _, function_name = name.partition(":")
    if not module_name or not function_name:
        raise ValueError(f"--generator={name!r} must be package.module:function")
    with suppress(FileNotFoundError):  # the working directory may be gone
        if os.getcwd() not in sys.path:
            sys.path.insert(0, os.getcwd())
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise ValueError(f"--generator={name!r}: {error}") from error
    for part in function_name.split("."):
        found = getattr(found, part, None)
    if not callable(found):
        raise ValueError(f"--generator={name!r} must name a function; {module_name} has no such one")
    return found


def _loopback_address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if host not in LOOPBACK or not port.isdigit() or int(port) > 65_535:
        raise ValueError(f"--serve={text!r} must be 127.0.0.1:PORT; others may reach it through a proxy of yours")
    return "127.0.0.1" if host == "localhost" else host.strip("[]"), int(port)


@contextmanager
def _unspoilt_status() -> Iterator[None]:
    """Let a signal before a broker or worker runs, and one that follows the signal that ended it, end with status 0."""
    heeded = [kind for kind in (signal.SIGTERM, signal.SIGINT) if signal.getsignal(kind) is not signal.SIG_IGN]
    before = [signal.getsignal(kind) for kind in heeded]

    def ignore() -> None:
        for kind in heeded:
            signal.signal(kind, signal.SIG_IGN)

    atexit.register(ignore)  # called last, when nothing is left that could hang
    for kind in heeded:
        signal.signal(kind, lambda number, frame: os._exit(0))
    try:
        yield
    except BaseException:  # it has not run, and the process may have other things to do
        atexit.unregister(ignore)
        for kind, handler in zip(heeded, before, strict=True):
            signal.signal(kind, handler)
        raise


def _raise_descriptor_limit() -> None:
    """Let the broker have as many connections as the system allows it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
