"""Sites of a run in one process, and waiting for what their threads do."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable
from typing import Any

import numpy as np

from mixle.diloco import DiLoCo, Event, Session

QUICK = {"poll_interval": 0.01, "lease_every": 0.1, "lease_timeout": 1.0}


def fresh_url() -> str:
    """The address of a mailbox in memory that nobody else has."""
    return f"memory://{uuid.uuid4().hex}"


def zeros() -> dict[str, np.ndarray]:
    return {"bias": np.zeros(3, np.float32), "weight": np.zeros((4, 3), np.float32)}


def descend(arrays: dict[str, np.ndarray], target: float, rate: float = 0.1) -> None:
    """One step towards ``target`` everywhere."""
    for array in arrays.values():
        array -= np.float32(rate) * (array - np.float32(target))


def open_session(model: Any, algorithm: DiLoCo, url: str, **options: Any) -> Session:
    return Session(model, algorithm=algorithm, mailbox=url, **{**QUICK, "callbacks": (), **options})


class Heard:
    """A callback that remembers."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def __call__(self, event: Event) -> None:
        self.events.append(event)

    def of(self, kind: str) -> list[Event]:
        return [event for event in self.events if event.kind == kind]


def wait_until(condition: Callable[[], object], *, deadline_s: float = 30.0) -> None:
    until = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < until, f"not within {deadline_s:g} s"
        time.sleep(0.005)


def at_once(*functions: Callable[[], Any], deadline_s: float = 60.0) -> list[Any]:
    """Call functions on threads of their own, and return what they return; raise what the first of them raises."""
    results: list[Any] = [None] * len(functions)
    errors: list[BaseException] = []

    def call(i: int) -> None:
        try:
            results[i] = functions[i]()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=call, args=(i,), daemon=True) for i in range(len(functions))]
    for thread in threads:
        thread.start()
    until = time.monotonic() + deadline_s
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))
        assert errors or not thread.is_alive(), f"a site was not done within {deadline_s:g} s"
    if errors:
        raise errors[0]
    return results
