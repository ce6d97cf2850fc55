"""A real S3 server on loopback, for as long as a test module needs it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

BUCKET = "bucket"


@contextmanager
def moto_server(*, deadline_s: float = 60.0) -> Iterator[dict[str, str]]:
    """Start moto's server with a bucket in it; gives the environment in which ``s3://bucket/...`` is there."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    server = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        until = time.monotonic() + deadline_s
        while not request(f"{url}/{BUCKET}", "PUT"):
            assert server.poll() is None, f"moto's server exited with {server.returncode}"
            assert time.monotonic() < until, f"moto's server did not answer within {deadline_s:g} s"
            time.sleep(0.05)
        yield {
            "AWS_ENDPOINT_URL": url,
            "AWS_ACCESS_KEY_ID": "any",
            "AWS_SECRET_ACCESS_KEY": "any",
            "AWS_REGION": "us-east-1",
        }
    finally:
        server.kill()
        server.wait()


def request(url: str, method: str, data: bytes = b"") -> bool:
    """Send a request past every client; tell whether it was answered with success."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(urllib.request.Request(url, data=data, method=method), timeout=10):
            return True
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False


@contextmanager
def environment(variables: dict[str, str]) -> Iterator[None]:
    """Set environment variables for the block."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
