"""What a node says of itself in its lease: its role, and how much of what it trained is in commits."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Literal, get_args

__all__ = ["NodeInfo", "Role"]

Role = Literal["both", "learner", "syncer", "either"]
_COUNTS = ("steps", "samples", "merged")
_LARGEST = 1 << 62


@dataclass(frozen=True)
class NodeInfo:
    """A node's own account.

    Attributes:
        role: None where it is not known.
        steps, samples: what it has trained.
        merged: steps whose work is in commits, times fragments.
    """

    role: Role | None = None
    steps: int = 0
    samples: int = 0
    merged: int = 0

    def to_bytes(self) -> bytes:
        return json.dumps(asdict(self), separators=(",", ":")).encode()

    @classmethod
    def parse(cls, data: bytes | None) -> NodeInfo:
        """Return what :meth:`to_bytes` made; of anything else, that nothing is known."""
        try:
            said = json.loads(data or b"")
            role, counts = said["role"], [said[name] for name in _COUNTS]
        except (ValueError, KeyError, TypeError, RecursionError):
            return cls()
        if role not in get_args(Role) or any(type(each) is not int or not 0 <= each <= _LARGEST for each in counts):
            return cls()
        return cls(role, *counts)
