"""The thread on which a node does its work, for as long as the session lasts."""

from __future__ import annotations

import threading
from collections.abc import Callable

from mixle.diloco.clock import Clock
from mixle.diloco.exchange import Report
from mixle.diloco.mailbox import TransientMailboxError
from mixle.diloco.member import Member

__all__ = ["NodeThread"]

STOP_S = 30.0


class NodeThread:
    """Call a member's node whenever there may be something to do.

    Args:
        member: its keeper runs already.
        poll_interval: seconds between looks at the mailbox.
        clock: this process's time.
        report: told of what goes wrong.
        after_tick: called on the thread after each time that the node was called, whatever came of it.

    Attributes:
        error: why the thread has ended, None if nothing went wrong.
    """

    def __init__(
        self,
        member: Member,
        *,
        poll_interval: float,
        clock: Clock,
        report: Report,
        after_tick: Callable[[], None],
    ) -> None:
        self._member, self._poll, self._clock, self._report = member, poll_interval, clock, report
        self._after_tick = after_tick
        self.error: BaseException | None = None
        self._stopping = threading.Event()
        self._wake = threading.Event() if member.learner is None else member.learner.wake_node
        name = f"diloco {member.lease.learner_id}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Let the node look now."""
        self._wake.set()

    def join(self, timeout_s: float) -> bool:
        """Wait for the thread to end, at most ``timeout_s`` seconds; tell whether it has."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def stop(self) -> None:
        """End the thread; one that hangs in the store is left behind after :data:`STOP_S` seconds."""
        self._stopping.set()
        self.wake()
        self.join(STOP_S)

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                if self._member.keeper.error is not None:
                    raise self._member.keeper.error
                self._wake.clear()
                try:
                    try:
                        self._member.node.tick()
                    finally:
                        self._after_tick()
                except TransientMailboxError as error:
                    self._report("store", None, {"error": str(error)})
                self._clock.wait(self._wake, self._poll)
        except BaseException as error:
            self.error = error
            if self._member.learner is not None:
                self._member.learner.fail(error)
            self._report("stopped", None, {"error": f"{type(error).__name__}: {error}"})
