"""A broker's figures over HTTP, for Prometheus to scrape."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from mixle.data.teacher.errors import TeacherError
from mixle.data.teacher.stats import BrokerStats

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


@contextmanager
def metrics_server(address: tuple[str, int], ask: Callable[[], BrokerStats]) -> Iterator[ThreadingHTTPServer]:
    """Yield an HTTP server of ``/metrics`` that asks anew for each request; the caller runs it.

    Raises:
        OSError: it cannot listen there; names the address.
    """
    one_at_a_time = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path != "/metrics":
                self.send_error(404)
                return
            try:
                with one_at_a_time:
                    body = ask().prometheus().encode()
            except TeacherError as error:
                self.send_error(503, str(error))
                return
            self.send_response(200)
            self.send_header("Content-Type", CONTENT_TYPE)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Keep the terminal clear."""

    try:
        server = ThreadingHTTPServer(address, Handler)
    except OSError as error:
        raise OSError(error.errno, f"cannot serve at {address[0]}:{address[1]}: {error.strerror}") from None
    try:
        yield server
    finally:
        server.server_close()
