"""A barrier through the mailbox: everyone writes that it has arrived, and waits until everyone has."""

from __future__ import annotations

from collections.abc import Collection

from mixle.diloco.clock import SYSTEM_CLOCK, Clock
from mixle.diloco.mailbox import Mailbox, require_id
from mixle.diloco.protocols import require_clock, require_mailbox
from mixle.utils.exact import require_finite_float


class BarrierTimeout(TimeoutError):  # noqa: N818  (a timeout, as queue.Empty is no error)
    """Not everyone came in time; ``missing`` are those who did not."""

    def __init__(self, message: str, missing: tuple[str, ...]) -> None:
        super().__init__(message)
        self.missing = missing


class Barrier:
    """Let the named parties pass together, once: ``barriers/<name>/<id>`` is written when one arrives, and stays.

    A process that was restarted passes a barrier that it had arrived at. Name each meeting: ``"epoch-3"``.

    Args:
        mailbox: what the parties share.
        name: the meeting's.
        learner_id: this process's, one of ``parties``.
        parties: the ids of all that must come, the same everywhere.
        poll_interval: seconds between looks.
        clock: this process's own.

    Raises:
        TypeError, ValueError: an argument that is not what it says above.
    """

    def __init__(
        self,
        mailbox: Mailbox,
        name: str,
        *,
        learner_id: str,
        parties: Collection[str],
        poll_interval: float = 1.0,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self.name = require_id(name, "name")
        if isinstance(parties, str) or not isinstance(parties, Collection):
            raise TypeError(f"parties={parties!r:.200} must be a collection of ids, not a {type(parties).__name__}")
        self.parties = frozenset(require_id(each, "parties") for each in parties)
        if require_id(learner_id, "learner_id") not in self.parties:
            raise ValueError(f"learner_id={learner_id!r} must be one of parties: {', '.join(sorted(self.parties))}")
        self._poll_interval = require_finite_float(poll_interval, "poll_interval", exclusive_minimum=0.0)
        self._mailbox, self._clock = require_mailbox(mailbox), require_clock(clock)
        self._learner_id = learner_id
        self._folder = f"barriers/{name}/"

    def wait(self, *, deadline_s: float) -> None:
        """Arrive, and return when all parties have.

        Raises:
            BarrierTimeout: some had not within ``deadline_s`` seconds; it names them. This process stays arrived.
            MailboxError: the store did not answer.
        """
        require_finite_float(deadline_s, "deadline_s", minimum=0.0)
        until = self._clock.monotonic() + deadline_s
        self._mailbox.put_if_absent(self._folder + self._learner_id, b"")
        while missing := self.parties.difference(self._arrived()):
            left = until - self._clock.monotonic()
            if left <= 0:
                names = tuple(sorted(missing))
                raise BarrierTimeout(
                    f"{', '.join(names)} did not come to the barrier {self.name!r} within {deadline_s:g} s "
                    f"({len(self.parties) - len(names)} of {len(self.parties)} did)",
                    names,
                )
            self._clock.sleep(min(left, self._poll_interval))

    def _arrived(self) -> list[str]:
        return [key.removeprefix(self._folder) for key in self._mailbox.list(self._folder)]
