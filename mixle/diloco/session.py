"""A model that trains together with others through a mailbox: what a user holds."""

from __future__ import annotations

import atexit
import os
import secrets
import signal
import socket
import threading
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

from mixle.diloco.adapters import parameters_of
from mixle.diloco.algorithm import DiLoCo
from mixle.diloco.alignment import Overwrite
from mixle.diloco.batch import batch_sizes
from mixle.diloco.clock import SYSTEM_CLOCK, Clock
from mixle.diloco.compression import Codec, Compression
from mixle.diloco.events import Callback, Event, Kind, log_events
from mixle.diloco.exchange import read_run
from mixle.diloco.learner import Learner
from mixle.diloco.lease import LeaseKeeper
from mixle.diloco.mailbox import Mailbox, MailboxError, TransientMailboxError, require_id
from mixle.diloco.member import join
from mixle.diloco.object_store import open_mailbox
from mixle.diloco.parameters import Parameters
from mixle.diloco.peers import Role
from mixle.diloco.versions import Versions
from mixle.diloco.wire import Wire
from mixle.utils.exact import require_choice, require_finite_float

__all__ = ["Session", "align"]

FLUSH_S = 60.0
HASTY_FLUSH_S = 5.0
STOP_S = 30.0
B = TypeVar("B")


class Session:
    """Train ``model`` together with the other sites of a run.

    Constructing it joins: the run is made if the mailbox has none, and the model moves to the newest commit. Then call
    :meth:`step` after every optimizer step, or let :meth:`run` do it, and :meth:`close` at the end; or use it as a
    context manager.

    Args:
        model: a torch module, a mapping of names to numpy arrays, or a
            :class:`~mixle.diloco.parameters.Parameters`; moved in place.
        algorithm: of the run; the same at every site.
        mailbox: a URL (:func:`~mixle.diloco.object_store.open_mailbox`) or a mailbox.
        learner_id: this site's id, unique among the living; drawn if None.
        poll_interval: seconds between looks at the mailbox.
        compression: of what this site writes: ``"off"`` or ``"zstd"``.
        lease_every, lease_timeout: seconds between signs of life, and without one until a site counts as gone.
        callbacks: called with each :class:`~mixle.diloco.events.Event`, on the session's thread.
        role: ``"both"`` trains and closes rounds, ``"learner"`` only trains, ``"syncer"`` only closes them, and
            ``"either"`` trains and closes them while no syncer lives.
        clock: this process's time.

    Raises:
        TypeError, ValueError: an argument that is not what it says above; a model without trainable parameters.
        AlgorithmMismatch, SchemaMismatch: the run in the mailbox is another.
        IdInUse: a living process has the id.
        ImportError: the codec or the store needs a package that is not installed.
        MailboxError: the store does not answer.
    """

    def __init__(
        self,
        model: Any,
        *,
        algorithm: DiLoCo,
        mailbox: str | Mailbox,
        learner_id: str | None = None,
        poll_interval: float = 1.0,
        compression: Compression = "off",
        lease_every: float = 1.0,
        lease_timeout: float = 4.0,
        callbacks: Sequence[Callback] = (log_events,),
        role: Role = "both",
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        if not isinstance(algorithm, DiLoCo):
            raise TypeError(f"algorithm={algorithm!r} must be a DiLoCo")
        self.algorithm = algorithm
        self.learner_id = _fresh_id() if learner_id is None else require_id(learner_id, "learner_id")
        self._poll = require_finite_float(poll_interval, "poll_interval", exclusive_minimum=0.0)
        self.role: Role = require_choice(role, "role", ("both", "learner", "syncer", "either"))
        codec = Codec(compression)
        self._callbacks, self._clock = tuple(callbacks), clock
        self._parameters: Parameters = parameters_of(model)
        store = open_mailbox(mailbox, clock=clock) if isinstance(mailbox, str) else mailbox
        member = join(
            self._parameters,
            algorithm,
            mailbox=store,
            name=self.learner_id,
            role=self.role,
            codec=codec,
            lease_every=lease_every,
            lease_timeout=lease_timeout,
            clock=clock,
            report=self._report,
            keep=LeaseKeeper.start,
        )
        self._lease, self._liveness, self._keeper = member.lease, member.liveness, member.keeper
        self._learner, self._node = member.learner, member.node
        self._wake = threading.Event() if self._learner is None else self._learner.wake_node
        self._stopping, self._closed = threading.Event(), False
        self._thread = threading.Thread(target=self._work, name=f"diloco {self.learner_id}", daemon=True)
        self._thread.start()
        self._previous_handler = _raise_on_sigterm()
        atexit.register(self._close_at_exit)
        self._report("joined", self._node.newest, {"role": role, "parameters": len(self._parameters.schema.parameters)})

    # ---- training

    def step(self, samples: int = 1) -> None:
        """Count one optimizer step on ``samples`` samples, after it was taken; moves the model when a commit is there.

        Does no I/O. The steps on which a fragment is due copy it, those on which a commit has landed move it; with
        ``overlap_steps`` it waits where the algorithm says so.

        Raises:
            TypeError, ValueError: ``samples`` is not a positive exact integer.
            RuntimeError: the session is closed, or only closes rounds.
            MailboxError, IdInUse: why the session stopped.
        """
        self._training().step(samples)

    def run(
        self, train_step: Callable[[B], Any], batches: Iterable[B], *, samples: Callable[[B], int] | None = None
    ) -> None:
        """Call ``train_step`` on every batch, and :meth:`step` with its number of samples after each.

        Args:
            train_step: takes one optimizer step.
            samples: tells how many samples a batch has; its length by default.
        """
        count: Callable[[Any], int] = len if samples is None else samples
        for batch in batches:
            train_step(batch)
            self.step(count(batch))

    @property
    def rounds_seen(self) -> int:
        """How many rounds are committed that this session's model is at."""
        return (self._node.newest if self._learner is None else self._learner.seen) + 1

    @property
    def batch_size(self) -> int | None:
        """Samples per step for this site, by its speed among the living; None without ``global_batch_size``."""
        total = self.algorithm.global_batch_size
        if total is None:
            return None
        speeds = dict.fromkeys(self._liveness.alive | {self.learner_id}) | self._node.speeds
        living = self._liveness.alive | {self.learner_id}
        return batch_sizes(total, {node: speeds[node] for node in living})[self.learner_id]

    # ---- the end

    def close(self, *, flush_s: float = FLUSH_S) -> bool:
        """Leave the run; with ``flush_on_close``, after this site's last steps are in a commit.

        Args:
            flush_s: how long that may take, in seconds.

        Returns:
            Whether every step of this site that could be is in a commit; if not, an ``unflushed`` event says how many
            are lost.
        """
        if self._closed:
            return True
        self._closed = True
        flushed = True
        try:
            if self._learner is not None:
                flushed = self._flush(self._learner, flush_s if self.algorithm.flush_on_close else 0.0)
        finally:
            self._stop()
        return flushed

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(flush_s=FLUSH_S if kind is None else HASTY_FLUSH_S)

    def _flush(self, learner: Learner, flush_s: float) -> bool:
        """Bring what this site trained into commits, as long as time lasts."""
        try:
            learner.flush(flush_s, poll_s=min(self._poll, 0.5))
        except (MailboxError, RuntimeError) as error:
            self._report("store", None, {"error": str(error)})
        lost = max(learner.unmerged_steps)
        if lost:
            self._report("unflushed", None, {"steps": lost, "of": learner.tally.steps})
        return not lost

    def _stop(self) -> None:
        atexit.unregister(self._close_at_exit)
        _restore(self._previous_handler)
        self._stopping.set()
        self._wake.set()
        self._thread.join(STOP_S)
        self._keeper.stop()
        if self._lease.held and self._keeper.error is None:
            try:
                self._lease.release()
            except MailboxError as error:
                self._report("store", None, {"error": str(error)})
        self._report("left", self._node.newest, {})

    def _close_at_exit(self) -> None:
        self.close(flush_s=HASTY_FLUSH_S)

    # ---- the session's thread

    def _work(self) -> None:
        try:
            while not self._stopping.is_set():
                if self._keeper.error is not None:
                    raise self._keeper.error
                self._wake.clear()
                try:
                    self._node.tick()
                except TransientMailboxError as error:
                    self._report("store", None, {"error": str(error)})
                self._clock.wait(self._wake, self._poll)
        except BaseException as error:
            self._report("store", None, {"error": f"the session stops: {error}"})
            if self._learner is not None:
                self._learner.fail(error)

    def _report(self, kind: Kind, round_: int | None, detail: dict[str, Any]) -> None:
        event = Event(kind, self.learner_id, round_, detail)
        for callback in self._callbacks:
            callback(event)

    def _training(self) -> Learner:
        if self._closed:
            raise RuntimeError("the session is closed; make another to go on")
        if self._learner is None:
            raise RuntimeError('role="syncer" closes rounds and does not train; use role="both"')
        return self._learner


def align(model: Any, *, mailbox: str | Mailbox) -> int:
    """Move ``model`` to the newest version in ``mailbox``, for evaluation, and return its round; -1 if there is none.

    Raises:
        ValueError: there is no run in the mailbox.
        SchemaMismatch: the run has other parameters.
        CorruptPayload: a fragment has no version that can be read.
    """
    store = open_mailbox(mailbox) if isinstance(mailbox, str) else mailbox
    parameters = parameters_of(model)

    def report(kind: Kind, round_: int | None, detail: dict[str, Any]) -> None:
        log_events(Event(kind, "align", round_, detail))

    record, exchange = read_run(store, parameters.schema, report=report)
    versions = Versions(exchange, record, Wire.of(DiLoCo.from_dict(record.algorithm)), report)
    round_, held = versions.load_all()
    for version in held:
        parameters.align(version.theta, version.theta, Overwrite())
    return round_


def _fresh_id() -> str:
    host = "".join(c for c in socket.gethostname() if c.isascii() and (c.isalnum() or c == "-"))[:30].strip("-")
    return f"{host or 'site'}-{os.getpid()}-{secrets.token_hex(3)}"


def _raise_on_sigterm() -> Any:
    """Make SIGTERM end the process by an exception, so that sessions are closed; only where nobody else handles it.

    Returns:
        What handled it, to be restored; None if nothing was changed.
    """
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        return None

    def leave(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    return signal.signal(signal.SIGTERM, leave)


def _restore(handler: Any) -> None:
    if handler is not None and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, handler)
