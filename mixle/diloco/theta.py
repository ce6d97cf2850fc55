"""The digest of a fragment's parameters, and how a reader rebuilds them from an update."""

from __future__ import annotations

import hashlib

from mixle.diloco.parameters import Arrays

__all__ = ["digest_of", "rebuilt"]


def digest_of(theta: Arrays) -> str:
    """Return the sha256, in hexadecimal, over the float32 bytes of the arrays in the order of their names."""
    digest = hashlib.sha256()
    for name in sorted(theta):
        digest.update(theta[name].astype("<f4", copy=False).tobytes())
    return digest.hexdigest()


def rebuilt(theta: Arrays, update: Arrays) -> Arrays:
    """Return ``theta + update``, in new float32 arrays: what the closer of the round did, bit for bit."""
    return {name: array + update[name] for name, array in theta.items()}
