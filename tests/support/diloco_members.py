"""Members of a run without threads, which a test moves by hand on a virtual clock."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from virtual_clock import VirtualClock

from mixle.diloco import names
from mixle.diloco.algorithm import DiLoCo
from mixle.diloco.compression import Codec
from mixle.diloco.mailbox import Mailbox
from mixle.diloco.member import join
from mixle.diloco.memory_mailbox import MemoryMailbox
from mixle.diloco.parameters import NumpyParameters
from mixle.diloco.peers import Role
from mixle.diloco.records import RoundRecord
from mixle.diloco.retrying import RetryingMailbox

SHAPES = {"a": (4,), "b": (3, 2), "c": (5,)}


class Hooked:
    """A mailbox that calls ``before`` and ``after`` with the name of each operation and its key."""

    def __init__(self, inner: Mailbox) -> None:
        self._inner = inner
        self.before: Callable[[str, str], Any] = lambda operation, key: None
        self.after: Callable[[str, str], Any] = lambda operation, key: None

    def put_if_absent(self, key: str, data: bytes) -> bool:
        return self._around("put", key, lambda: self._inner.put_if_absent(key, data))

    def get(self, key: str, *, limit: int | None = None) -> bytes | None:
        return self._around("get", key, lambda: self._inner.get(key, limit=limit))

    def list(self, prefix: str, after: str = "", *, limit: int | None = None) -> list[str]:
        return self._around("list", prefix, lambda: self._inner.list(prefix, after, limit=limit))

    def delete(self, keys: Iterable[str]) -> None:
        return self._around("delete", "", lambda: self._inner.delete(keys))

    def clock(self) -> float:
        return self._inner.clock()

    def _around(self, operation: str, key: str, act: Callable[[], Any]) -> Any:
        self.before(operation, key)
        result = act()
        self.after(operation, key)
        return result


class Hand:
    """One member: ``train`` takes steps that add ``push`` to every parameter, ``tick`` lets its node work."""

    def __init__(
        self,
        store: Mailbox,
        name: str,
        algorithm: DiLoCo,
        *,
        clock: VirtualClock,
        role: Role = "both",
        push: float = 1.0,
        deadline_s: float = 0.0,
    ) -> None:
        self.name, self.push = name, push
        self.arrays = {each: np.zeros(shape, np.float32) for each, shape in SHAPES.items()}
        self.events: list[tuple[str, int | None, dict[str, Any]]] = []
        self.hooks = Hooked(store)
        self.mailbox = RetryingMailbox(self.hooks, deadline_s=deadline_s, clock=clock)
        self.member = join(
            NumpyParameters(self.arrays),
            algorithm,
            mailbox=self.mailbox,
            name=name,
            role=role,
            codec=Codec(),
            lease_every=1.0,
            lease_timeout=4.0,
            clock=clock,
            report=lambda kind, round_, detail: self.events.append((kind, round_, detail)),
            keep=lambda keeper: None,
        )

    @property
    def node(self) -> Any:
        return self.member.node

    @property
    def learner(self) -> Any:
        return self.member.learner

    def train(self, steps: int, *, samples: int = 2) -> None:
        for _ in range(steps):
            for array in self.arrays.values():
                array += np.float32(self.push)
            self.learner.step(samples)

    def tick(self) -> None:
        self.node.tick()

    def renew(self) -> None:
        self.member.keeper.tick()

    def told(self, kind: str) -> list[tuple[int | None, dict[str, Any]]]:
        return [(round_, detail) for each, round_, detail in self.events if each == kind]


def record_of(store: MemoryMailbox, round_: int) -> RoundRecord:
    data = store.get(names.round_record(round_))
    assert data is not None, f"round {round_} is not committed"
    return RoundRecord.from_bytes(data)


def flip_bit(store: MemoryMailbox, key: str, *, byte: int = -1) -> None:
    """Flip one bit of an object, as a failing disk does."""
    data = bytearray(store._objects[key])
    data[byte] ^= 1
    store._objects[key] = bytes(data)
