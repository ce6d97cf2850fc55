"""The datasets of this process that read under a client's generation, to be retired with it."""

from __future__ import annotations

import weakref

from mixle.data.teacher.desk import Desk
from mixle.data.teacher.fence import GenerationReader

RETIRED = "retired: the client that its generation_value belongs to was closed"

_desks: weakref.WeakKeyDictionary[Desk, GenerationReader] = weakref.WeakKeyDictionary()


def add_reader(desk: Desk, shared: GenerationReader) -> None:
    """Retire ``desk`` when the client of ``shared`` is closed."""
    _desks[desk] = shared


def retire_readers(shared: GenerationReader) -> None:
    """Close the desks that share a generation with a client that was closed."""
    for desk, other in list(_desks.items()):
        if other.shares(shared):
            desk.close(RETIRED)
