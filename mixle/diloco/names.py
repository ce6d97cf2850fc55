"""Where everything of a run lies under the bucket's prefix.

Every object is written once. Rounds are numbered downwards in their keys, so that the first page of a listing holds the
newest: a node that joins after ten thousand rounds reads one page, not ten thousand keys.

=========================================  ==========================  =================================================
key                                        written by                  what it is
=========================================  ==========================  =================================================
``run.json``                               the first node              the algorithm, the parameters, the base version
``rounds/<10^10 - 1 - r>.json``            whoever closes round r      the commit point of round r, kept for ever
``claims/<r>/<attempt>.json``              who wants to close round r  spares double work, decides nothing
``snapshots/<r>/<learner>.json``           a learner                   what it publishes for round r
``payloads/<r>/<kind>-<sha256>.<codec>``   as named by a record        tensors, written before the record that names it
=========================================  ==========================  =================================================
"""

from __future__ import annotations

import re
from typing import Literal

from mixle.diloco.mailbox import require_id

__all__ = ["RUN", "PayloadKind"]

PayloadKind = Literal["base", "delta", "theta", "master", "momentum", "update"]

RUN = "run.json"
ROUNDS = "rounds/"
CLAIMS = "claims/"
SNAPSHOTS = "snapshots/"
PAYLOADS = "payloads/"

LAST_ATTEMPT = 9999

_LAST = 10**10 - 1
_ROUND = re.compile(r"rounds/(\d{10})\.json")
_CLAIM = re.compile(r"claims/(\d{10})/(\d{4})\.json")
_SNAPSHOT = re.compile(r"snapshots/(\d{10})/([^/]+)\.json")
_PAYLOAD = re.compile(
    r"payloads/(\d{10})/(base|delta|theta|master|momentum|update)-([0-9a-f]{64})\.(safetensors|safetensors\.zst)"
)


def round_record(round_number: int) -> str:
    return f"{ROUNDS}{_LAST - round_number:010d}.json"


def round_of_record(key: str) -> int | None:
    """Return which round a key is the record of, None if it is no such key."""
    found = _ROUND.fullmatch(key)
    return _LAST - int(found[1]) if found else None


def claims_of(round_number: int) -> str:
    return f"{CLAIMS}{round_number:010d}/"


def claim(round_number: int, attempt: int) -> str:
    return f"{claims_of(round_number)}{attempt:04d}.json"


def attempt_of_claim(key: str) -> int | None:
    found = _CLAIM.fullmatch(key)
    return int(found[2]) if found else None


def snapshots_of(round_number: int) -> str:
    return f"{SNAPSHOTS}{round_number:010d}/"


def snapshot(round_number: int, learner: str) -> str:
    return f"{snapshots_of(round_number)}{learner}.json"


def learner_of_snapshot(key: str) -> str | None:
    """Return whose snapshot a key is, None if it is no such key."""
    found = _SNAPSHOT.fullmatch(key)
    try:
        return require_id(found[2], "learner") if found else None
    except ValueError:
        return None


def payload(round_number: int, kind: PayloadKind, digest: str, extension: str) -> str:
    """Return the key of a payload; ``round_number`` orders its collection, base versions lie under round 0."""
    return f"{PAYLOADS}{round_number:010d}/{kind}-{digest}{extension}"


def digest_of_payload(key: str) -> str | None:
    """Return the sha256 that a payload's key promises, None if it is no such key."""
    found = _PAYLOAD.fullmatch(key)
    return found[3] if found else None


def kind_of_payload(key: str) -> PayloadKind | None:
    found = _PAYLOAD.fullmatch(key)
    return found[2] if found else None  # type: ignore[return-value]


def round_of_object(key: str) -> int | None:
    """Return to which round a claim, snapshot or payload belongs, None for anything else."""
    for pattern in (_CLAIM, _SNAPSHOT, _PAYLOAD):
        found = pattern.fullmatch(key)
        if found:
            return int(found[1])
    return None
