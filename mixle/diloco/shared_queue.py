"""Units of data that sites claim from one list, each done once.

========================================  ===================================  ======================================
key under ``queues/<name>/``              written by                           what it says
========================================  ===================================  ======================================
``size``                                  the first process                    how many units there are
``claims/<unit>-<attempt>``               whoever wants the unit               learner, epoch and a nonce of the winner
``done/<unit>``                           whoever completes it first           the same
========================================  ===================================  ======================================

A claim stands while the process that made it may live (:meth:`~mixle.diloco.lease.Liveness.may_live`); the next attempt
replaces it. A claim only spares double work: ``done`` is written if absent, so each unit is counted once.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import secrets
from dataclasses import dataclass

from mixle.diloco.lease import Lease, Liveness
from mixle.diloco.mailbox import Mailbox, require_id
from mixle.diloco.protocols import require_mailbox
from mixle.utils.exact import require_exact_int

logger = logging.getLogger(__name__)

_CLAIM = re.compile(r"claims/(\d{12})-(\d{6})")
_DONE = re.compile(r"done/(\d{12})")
_MOST_UNITS = 10**12
_RACES_BETWEEN_LISTS = 3
_CLAIM_LIMIT = 4096


@dataclass(frozen=True)
class _Owner:
    learner_id: str
    epoch: int


class SharedQueue:
    """Claim units ``0 .. units-1`` so that no two living processes work on one; not thread-safe.

    Args:
        mailbox: what the sites share.
        name: the queue's; a second pass over the data is another queue.
        units: how many there are, the same at every site.
        lease: held by this process; its claims end with it.
        liveness: who is alive.

    Raises:
        TypeError, ValueError: an argument that is not what it says above, or ``units`` is not what another site gave.
    """

    def __init__(self, mailbox: Mailbox, name: str, *, units: int, lease: Lease, liveness: Liveness) -> None:
        self.name = require_id(name, "name")
        self.units = require_exact_int(units, "units", minimum=1, maximum=_MOST_UNITS)
        self._mailbox = require_mailbox(mailbox)
        self._folder = f"queues/{name}/"
        self._me = _Owner(lease.learner_id, lease.epoch)
        self._liveness = liveness
        self._done: set[int] = set()
        self._attempts: dict[int, int] = {}
        self._owners: dict[tuple[int, int], _Owner | None] = {}
        self._mine: set[int] = set()
        self._start = int.from_bytes(hashlib.sha256(lease.learner_id.encode()).digest()[:8], "big") % self.units
        self._passed = 0
        self._agree_on_size()
        self._refresh()

    def claim(self) -> int | None:
        """Return a unit that is now this process's, in no particular order; None if none is free just now.

        None does not mean that all is done: a living process may yet die. See :meth:`remaining`.

        Raises:
            MailboxError: the store did not answer.
        """
        unit = self._claim_free()
        return self._take_over() if unit is None else unit

    def complete(self, unit: int) -> bool:
        """Record that a unit is done; False if another process had recorded it, having taken this one for dead.

        Raises:
            TypeError, ValueError: this process has not claimed ``unit``.
            MailboxError: the store did not answer.
        """
        if require_exact_int(unit, "unit") not in self._mine:
            raise ValueError(f"unit={unit!r} is not claimed by this process; claim() gives what is")
        recorded = self._mailbox.put_if_absent(f"{self._folder}done/{unit:012d}", self._signature())
        self._mine.remove(unit)
        self._done.add(unit)
        return recorded

    def remaining(self) -> int:
        """Return how many units are not done, as the store says now."""
        self._refresh()
        return self.units - len(self._done)

    def _claim_free(self) -> int | None:
        """Claim a unit that nobody is known to have claimed; each process looks from a place of its own."""
        races_lost = 0
        while self._passed < self.units:
            unit = (self._start + self._passed) % self.units
            if unit not in self._attempts and unit not in self._done:
                if self._claimed(unit, 0):
                    return unit
                races_lost += 1
                if races_lost % _RACES_BETWEEN_LISTS == 0:
                    self._refresh()
            self._passed += 1
        return None

    def _take_over(self) -> int | None:
        self._refresh()
        waiting = sorted(self._attempts.keys() - self._done - self._mine)
        owners = {unit: self._owner(unit) for unit in waiting}
        self._liveness.observe()  # after the claims were read: whoever made one had a lease by then
        for unit, owner in owners.items():
            if owner == self._me:  # of a claim that failed here and was written after all
                self._mine.add(unit)
                return unit
            abandoned = owner is None or not self._liveness.may_live(owner.learner_id, owner.epoch)
            if abandoned and self._claimed(unit, self._attempts[unit] + 1):
                return unit
        return None

    def _claimed(self, unit: int, attempt: int) -> bool:
        """Try to make one claim; either way, somebody has made it then."""
        won = self._mailbox.put_if_absent(self._claim_key(unit, attempt), self._signature())
        self._attempts[unit] = max(attempt, self._attempts.get(unit, 0))
        if won:
            self._owners[unit, attempt] = self._me
            self._mine.add(unit)
        return won

    def _owner(self, unit: int) -> _Owner | None:
        """Return who made the newest claim of a unit, None if it says nothing that can be read."""
        at = (unit, self._attempts[unit])
        if at not in self._owners:
            key = self._claim_key(*at)
            owner = _parse(self._mailbox.get(key, limit=_CLAIM_LIMIT))
            if owner is None:
                logger.warning("%s is no claim; its unit is free for the next attempt", key)
            self._owners[at] = owner
        return self._owners[at]

    def _refresh(self) -> None:
        for key in self._mailbox.list(f"{self._folder}done/"):
            done = _DONE.fullmatch(key.removeprefix(self._folder))
            if done is not None and int(done[1]) < self.units:
                self._done.add(int(done[1]))
        for key in self._mailbox.list(f"{self._folder}claims/"):
            claim = _CLAIM.fullmatch(key.removeprefix(self._folder))
            if claim is not None and int(claim[1]) < self.units:
                unit = int(claim[1])
                self._attempts[unit] = max(int(claim[2]), self._attempts.get(unit, 0))

    def _agree_on_size(self) -> None:
        self._mailbox.put_if_absent(f"{self._folder}size", str(self.units).encode())
        size = self._mailbox.get(f"{self._folder}size", limit=_CLAIM_LIMIT)
        if size != str(self.units).encode():
            raise ValueError(f"units={self.units} is not the {size!r} that another site gave the queue {self.name!r}")

    def _claim_key(self, unit: int, attempt: int) -> str:
        return f"{self._folder}claims/{unit:012d}-{attempt:06d}"

    def _signature(self) -> bytes:
        return json.dumps([self._me.learner_id, self._me.epoch, secrets.token_hex(16)]).encode()


def _parse(data: bytes | None) -> _Owner | None:
    try:
        learner_id, epoch, _ = json.loads(data or b"")
    except (ValueError, TypeError, RecursionError):
        return None
    if not isinstance(learner_id, str) or not isinstance(epoch, int) or isinstance(epoch, bool):
        return None
    return _Owner(learner_id, epoch)
