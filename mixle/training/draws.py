"""The seeds of what a module draws while it is trained."""

from __future__ import annotations

import hashlib


def step_seed(seed: int, epoch: int, step: int, rank: int) -> int:
    """Return the seed, below 2**63, of a rank's draws at a schedule step; near ones have nothing in common."""
    words = f"mixle draws: seed={seed} epoch={epoch} step={step} replica={rank}"
    return int.from_bytes(hashlib.blake2b(words.encode(), digest_size=8).digest(), "little") >> 1
