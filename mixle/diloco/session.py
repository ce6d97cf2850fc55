"""A model that trains together with others through a mailbox: what a user holds."""

from __future__ import annotations

import atexit
import logging
import os
import secrets
import socket
import threading
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

from mixle.diloco.account import Account
from mixle.diloco.adapters import Backend, parameters_of, site_parameters_of
from mixle.diloco.algorithm import DiLoCo
from mixle.diloco.alignment import Overwrite
from mixle.diloco.announcer import Announcer
from mixle.diloco.batch import batch_sizes
from mixle.diloco.clock import SYSTEM_CLOCK, Clock
from mixle.diloco.compression import Codec, Compression
from mixle.diloco.events import Callback, Event, Kind, log_events
from mixle.diloco.exchange import read_run
from mixle.diloco.learner import Learner
from mixle.diloco.lease import IdInUse, LeaseKeeper, read_nonce
from mixle.diloco.mailbox import Mailbox
from mixle.diloco.member import Member, join
from mixle.diloco.node_info import NodeInfo, Role
from mixle.diloco.node_thread import NodeThread
from mixle.diloco.object_store import open_existing, open_mailbox
from mixle.diloco.parameters import Parameters, Ranks
from mixle.diloco.protocols import require_clock, require_ranks
from mixle.diloco.ranks import PatientClock, Site
from mixle.diloco.retrying import RetryingMailbox
from mixle.diloco.samples import samples_in
from mixle.diloco.site_options import MailboxLike, SiteOptions, require_mailbox_like
from mixle.diloco.site_state import SiteState
from mixle.diloco.state_folder import Resumed
from mixle.diloco.termination import deferred_sigterm, release_sigterm, take_sigterm
from mixle.diloco.versions import Versions
from mixle.diloco.weights import Tally, require_samples
from mixle.diloco.wire import Wire
from mixle.utils.exact import require_finite_float

__all__ = ["Session", "align"]

logger = logging.getLogger(__name__)

FLUSH_S = 60.0
HASTY_FLUSH_S = 5.0
B = TypeVar("B")
LEAVING_S = 5.0
"""How long a store that does not answer is asked again once the flush is over."""
_open_here: set[Session] = set()
"""Every session that is not closed; a fork inherits those of its parent."""


class Session:
    """Train ``model`` together with the other sites of a run.

    Constructing it joins: the run is made if the mailbox has none, and the model moves to the newest commit. Then call
    :meth:`step` after every optimizer step, or let :meth:`run` do it, and :meth:`close` at the end; or use it as a
    context manager. A session that is not closed is closed when Python exits, on SIGTERM too where nobody else handles
    it and the session is made on the main thread; of one that is killed, the others know after ``lease_timeout``.

    Args:
        model: a torch module, a mapping of names to numpy arrays, or a
            :class:`~mixle.diloco.parameters.Parameters`; moved in place. A syncer needs none: None takes the
            parameters from the run, which must be there.
        algorithm: of the run; the same at every site.
        mailbox: a URL or a folder's path (:func:`~mixle.diloco.object_store.open_mailbox`), or a mailbox.
        learner_id: this site's id, unique among the living; if None, that in ``state_dir``, or else drawn.
        poll_interval: seconds between looks at the mailbox.
        backend: which of the above the model is: ``"torch"``, ``"numpy"``, or a callable that returns its
            ``Parameters``; None finds out.
        compression: of what this site writes: ``"off"`` or ``"zstd"``.
        lease_every, lease_timeout: seconds between signs of life, and without one until a site counts as gone.
        callbacks: called with each :class:`~mixle.diloco.events.Event`, on the thread where it happens, which is mostly
            the session's own; one that raises is logged and called again at the next event.
        role: ``"both"`` trains and closes rounds, ``"learner"`` only trains, ``"syncer"`` only closes them, and
            ``"either"`` trains and closes them while no syncer lives.
        ranks: the ranks of this site that train one model together, e.g.
            :class:`~mixle.diloco.torch_ranks.TorchRanks`. Each makes a session and makes the same calls with the same
            arguments; rank 0 speaks for the site: its id, its samples and its state of the run are the site's.
        state_dir: a folder on a disk of this node. At every snapshot that is published, what ``state`` returns is
            saved there, and ``resumed`` gives it to the process that goes on after this one, killed or not.
        state: returns what a site must remember beside the parameters: the inner optimizer's state, the place in its
            data. Dicts, lists, tuples, arrays, tensors and plain values.
        clock: this process's time.

    Attributes:
        algorithm, role: as given.
        learner_id: this site's id; on ranks other than 0, None unless it was given.
        resumed: what ``state_dir`` held; None if nothing.

    Raises:
        TypeError, ValueError: an argument that is not what it says above; a model without trainable parameters; a
            ``state_dir`` of another run or another id.
        RuntimeError: another session of this process has the model and is not closed.
        AlgorithmMismatch, SchemaMismatch: the run in the mailbox is another.
        IdInUse: a living process has the id.
        BlockingIOError: a living process has the ``state_dir``.
        ImportError: the codec or the store needs a package that is not installed.
        MailboxError: the store does not answer.
        SiteError: on ranks other than 0, that rank 0 failed.
    """

    def __init__(
        self,
        model: Any,
        *,
        algorithm: DiLoCo,
        mailbox: MailboxLike,
        learner_id: str | None = None,
        poll_interval: float = 1.0,
        backend: Backend | None = None,
        compression: Compression = "off",
        lease_every: float = 1.0,
        lease_timeout: float = 4.0,
        callbacks: Sequence[Callback] = (log_events,),
        role: Role = "both",
        ranks: Ranks | None = None,
        state_dir: str | os.PathLike[str] | None = None,
        state: Callable[[], Any] | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        if not isinstance(algorithm, DiLoCo):
            raise TypeError(f"algorithm={algorithm!r} must be a DiLoCo")
        own = self._own = SiteOptions(
            mailbox=mailbox,
            learner_id=learner_id,
            poll_interval=poll_interval,
            compression=compression,
            lease_every=lease_every,
            lease_timeout=lease_timeout,
            callbacks=callbacks,
            role=role,
            state_dir=state_dir,
        )
        self.algorithm, self.role, self.learner_id = algorithm, own.role, own.learner_id
        self._clock: Clock = require_clock(clock)
        self._model, self._pid = model, os.getpid()
        _refuse_contradictions(model, role=self.role, ranks=ranks, state_dir=state_dir, state=state)
        self._require_free_model()
        self._rank = 0 if ranks is None else ranks.rank
        self._site: Site | None = None
        parameters: Parameters | None
        if ranks is not None and ranks.world > 1:
            self._site = Site(site_parameters_of(model, backend, ranks), ranks)
            parameters = self._site
        else:
            parameters = None if model is None else parameters_of(model, backend)
        self._member: Member | None = None
        self._learner: Learner | None = None
        self._thread: NodeThread | None = None
        self._store: Mailbox | None = None
        self._handles_sigterm = False
        self._turn = threading.RLock()
        self._closed, self._flushed = False, True
        self._rounds_seen, self._batch_size = 0, algorithm.global_batch_size
        self._account, self._announcer = Account(algorithm.fragments), Announcer(own.callbacks)
        lead = algorithm.schedule.lead
        self._remembered = (
            None if state_dir is None else SiteState(state_dir, state, lead=lead, rank=self._rank, clock=self._clock)
        )
        self.resumed: Resumed | None = None
        try:
            self._together(lambda: self._begin(parameters), self._told_at_start, self._heed_start)
        except BaseException:
            self._closed = True
            self._go()
            raise
        _open_here.add(self)
        self._handles_sigterm = self._rank == 0 and take_sigterm()
        atexit.register(self.abandon)

    def _begin(self, parameters: Parameters | None) -> None:
        """Join the run, on rank 0."""
        store = self._store = _opened(self._own.mailbox, self._clock)
        kept = None if self._remembered is None else self._remembered.newest(self.learner_id, store)
        if self.learner_id is None:
            self.learner_id = _fresh_id() if kept is None else kept.learner_id
        try:
            member = join(
                parameters,
                self.algorithm,
                mailbox=store,
                name=self.learner_id,
                role=self.role,
                codec=Codec(self._own.compression),
                lease_every=self._own.lease_every,
                lease_timeout=self._own.lease_timeout,
                clock=self._clock,
                report=self._report,
                keep=LeaseKeeper.start,
                training_clock=None if self._site is None else PatientClock(self._clock, self._site),
            )
        except IdInUse:
            if read_nonce(store, self.learner_id) not in {each._nonce for each in _others_here()}:
                raise
            raise IdInUse(
                f"learner_id={self.learner_id!r} is in use: a session of this process that is not closed holds it; "
                "close() that one first"
            ) from None
        self._member, self._learner, self._run_id = member, member.learner, member.run.id
        if kept is not None:
            self.resumed = Resumed(kept.steps, kept.samples, kept.state)
            self._account.resume(kept.merged, kept.out)
            if member.learner is not None:
                member.learner.tally = Tally(self.algorithm.fragments, kept.samples, kept.steps)
        self._note()
        self._report("joined", member.node.newest, {"role": self.role, "parameters": len(member.run.parameters)})
        self._thread = NodeThread(
            member,
            poll_interval=self._own.poll_interval,
            clock=self._clock,
            report=self._report,
            after_tick=self._after_tick,
        )

    # ---- training

    def step(self, samples: int = 1) -> None:
        """Count one optimizer step on ``samples`` samples, after it was taken; moves the model when a commit is there.

        Does no I/O. The steps on which a fragment is due copy it, those on which a commit has landed move it; with
        ``overlap_steps`` it waits where the algorithm says so. With ``ranks`` it is one small broadcast, and
        ``samples`` are those of the whole site.

        Raises:
            TypeError, ValueError: ``samples`` is not a positive exact integer.
            RuntimeError: the session is closed, only closes rounds, or is of the process that this one was forked from;
                or a parameter was replaced, cast, or unfrozen since the session joined.
            MailboxError, IdInUse: why the session stopped.
            SiteError: on ranks other than 0, that rank 0 failed.
        """
        self._require_own_process()
        with self._turn:  # another thread may close it, or train the same model
            self._step(samples)

    def _step(self, samples: int) -> None:
        if self._closed:
            raise RuntimeError("the session is closed; make another to go on")
        if self.role == "syncer":
            raise RuntimeError('role="syncer" closes rounds and does not train; use role="both"')
        if self._rank and self._site is not None:
            # Checked only after the ranks have met, since one that stays away would leave the others waiting.
            self._heed(self._site.follow())
            require_samples(samples)
            return
        learner = self._learner
        assert learner is not None
        before = learner.published
        if self._site is None:
            learner.step(samples)
        else:
            with self._site.speaking(lambda: self._told(before)):
                learner.step(samples)
        if learner.published != before:
            self._remember(learner)

    def run(
        self, train_step: Callable[[B], Any], batches: Iterable[B], *, samples: Callable[[B], int] | None = None
    ) -> None:
        """Call ``train_step`` on every batch, and :meth:`step` with its number of samples after each.

        Args:
            train_step: takes one optimizer step.
            samples: tells how many samples a batch has, with ``ranks`` that of the whole site. By default the first
                dimension of the batch, or of the arrays and tensors in it, or the length of a list without any.

        Raises:
            TypeError, ValueError: the number of samples is not to be seen, or not what :meth:`step` takes; before
                ``train_step`` is called. Otherwise as :meth:`step`.
        """
        if not callable(train_step):
            raise TypeError(f"train_step={train_step!r:.200} must be a callable that takes a batch")
        if samples is not None and not callable(samples):
            raise TypeError(f"samples={samples!r:.200} must be a callable that tells how many samples a batch has")
        count: Callable[[Any], int] = samples_in if samples is None else samples
        for batch in batches:
            counted = require_samples(count(batch))
            train_step(batch)
            self.step(counted)

    def serve(self) -> None:
        """Close rounds until the process is interrupted, then close the session; for ``role="syncer"``.

        Raises:
            RuntimeError: the session is closed, or trains.
            MailboxError, IdInUse: why the session stopped.
        """
        if self._closed or self.role != "syncer":
            raise RuntimeError('serve() is for an open session with role="syncer"; others call step()')
        assert self._thread is not None
        try:
            while not self._thread.join(self._own.poll_interval):
                pass
        finally:
            self.close()
        if self._thread.error is not None:
            raise self._thread.error

    @property
    def rounds_seen(self) -> int:
        """How many rounds are committed that this session's model is at."""
        if self._learner is not None:
            return self._learner.seen + 1
        return self._rounds_seen if self._member is None else self._member.node.newest + 1

    @property
    def batch_size(self) -> int | None:
        """Samples per step for this site, by its speed among the living learners; it changes as they come and go.

        None without ``global_batch_size``.
        """
        return self._batch_size

    # ---- the end

    def close(self, *, flush_s: float = FLUSH_S) -> bool:
        """Leave the run; with ``flush_on_close``, after this site's last steps are in a commit.

        Args:
            flush_s: how long that may take, in seconds.

        Returns:
            Whether every step of this site that could be is in a commit; if not, an ``unflushed`` event says how many
            are lost.

        Raises:
            RuntimeError: a callback calls it, or a process that was forked from the session's; or another thread is in
                :meth:`step` and stays there for ``flush_s``.
        """
        if self._closed:
            return self._flushed
        limit = require_finite_float(flush_s, "flush_s", minimum=0.0)
        self._require_own_process()
        if self._announcer.is_announcing_here():
            raise RuntimeError("close() in a callback would wait for itself; let the training loop read a flag instead")
        if not self._turn.acquire(timeout=min(limit, threading.TIMEOUT_MAX)):
            raise RuntimeError(
                f"another thread is in step(), and stayed there for flush_s={limit:g}; close() after it has returned"
            )
        try:
            return self._close(limit)
        finally:
            self._turn.release()

    def _close(self, limit: float) -> bool:
        if self._closed:
            return self._flushed
        self._closed, self._flushed = True, False
        try:
            self._together(lambda: self._flush(limit), self._told_at_end, self._heed_end)
            if self._flushed and self._learner is not None:
                self._remember(self._learner)
        finally:
            self._go()
        return self._flushed

    def __enter__(self) -> Self:
        if self._closed:
            raise RuntimeError("the session is closed; make another to go on")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None and os.getpid() == self._pid:
            self.close()
        else:
            self.abandon()

    def abandon(self) -> None:
        """Leave without waiting for long, as after an error; on several ranks, without waiting for the others.

        Those may be elsewhere, so what they have not published is lost, which an ``unflushed`` event says.
        """
        if os.getpid() != self._pid:
            return  # a forked child has the session's memory, and neither its threads nor its lease
        if self._site is None and self._turn.acquire(timeout=HASTY_FLUSH_S):
            try:
                self.close(flush_s=HASTY_FLUSH_S)
            finally:
                self._turn.release()
            return
        if self._closed:
            return
        self._closed = True
        self._flushed = self._all_is_merged()
        self._go()

    def _flush(self, flush_s: float) -> None:
        """Bring what this site trained into commits, as long as time lasts."""
        learner = self._learner
        self._flushed = learner is None
        if learner is not None:
            try:
                learner.flush(
                    flush_s if self.algorithm.flush_on_close else 0.0, poll_s=min(self._own.poll_interval, 0.5)
                )
            except Exception as error:  # what stopped the session was raised by step(), and leaving goes on
                self._report("store", None, {"error": f"{type(error).__name__}: {error}"})
            finally:
                self._flushed = self._all_is_merged()

    def _all_is_merged(self) -> bool:
        """Tell whether commits hold every step; if not, say loudly how many are lost."""
        learner = self._learner
        lost = 0 if learner is None else max(learner.unmerged_steps)
        if learner is not None and lost:
            self._report("unflushed", None, {"steps": lost, "of": learner.tally.steps})
        return not lost

    def _go(self) -> None:
        """Undo what the constructor did; a signal to hurry must not keep the lease, and this takes ``LEAVING_S``."""
        atexit.unregister(self.abandon)
        try:
            with deferred_sigterm():
                self._leave()
        finally:
            if self._handles_sigterm:
                release_sigterm()

    def _leave(self) -> None:
        try:
            if isinstance(self._store, RetryingMailbox):
                self._store.hurry(LEAVING_S)
            if self._thread is not None:
                self._thread.stop()
            if self._member is not None:
                self._member.leave(self._info().to_bytes(), self._report)
                self._save_published()
                self._report("left", self._member.node.newest, {})
        finally:
            _open_here.discard(self)
            if self._remembered is not None:
                self._remembered.close()

    def _require_own_process(self) -> None:
        if os.getpid() != self._pid:
            raise RuntimeError(
                f"the session is process {self._pid}'s, from which this one, {os.getpid()}, was forked; make a session "
                "in the process that trains"
            )

    def _require_free_model(self) -> None:
        """Check that no other session moves the model: what one of them trains the other would send again."""
        if self._model is not None and any(each._model is self._model for each in _others_here()):
            raise RuntimeError(
                "model is in training by a session of this process that is not closed; close() that one first"
            )

    @property
    def _nonce(self) -> bytes | None:
        return None if self._member is None else self._member.lease.nonce

    # ---- what rank 0 does

    def _remember(self, learner: Learner) -> None:
        """Copy the state that belongs to a snapshot; it is saved once that is published."""
        if self._remembered is not None:
            assert self.learner_id is not None and self._thread is not None
            steps, samples = learner.tally.steps, learner.tally.tokens
            self._remembered.copy(
                learner.published, run=self._run_id, learner_id=self.learner_id, steps=steps, samples=samples
            )
            self._thread.wake()

    def _after_tick(self) -> None:
        """Do what is left to do on the node's thread."""
        member = self._member
        assert member is not None and self.learner_id is not None
        self._save_published()
        self._account.settle(self.learner_id, member.node.newest, member.exchange.round_record)
        self._note()

    def _save_published(self) -> None:
        if self._remembered is not None:
            self._remembered.save_published(self._account, self._report)

    def _note(self) -> None:
        """Work out what others and the user ask for at any time."""
        member, total = self._member, self.algorithm.global_batch_size
        assert member is not None and self.learner_id is not None
        member.keeper.info = self._info().to_bytes()
        if total is not None and self._learner is not None:
            speeds: dict[str, float | None] = dict.fromkeys(member.peers.learners() | {self.learner_id})
            speeds |= {learner: speed for learner, speed in member.node.speeds.items() if learner in speeds}
            self._batch_size = batch_sizes(total, speeds)[self.learner_id]

    def _info(self) -> NodeInfo:
        if self._learner is None:
            return NodeInfo(self.role)
        tally = self._learner.tally
        return NodeInfo(self.role, tally.steps, tally.tokens, self._account.merged)

    def _report(self, kind: Kind, round_: int | None, detail: dict[str, Any]) -> None:
        self._account.hear(kind, round_, detail)
        if kind == "published":
            # Closing rounds may take the node's thread long, and who is killed meanwhile would train all this again.
            self._save_published()
        self._announcer.announce(Event(kind, self.learner_id or "", round_, detail))

    # ---- what the other ranks do

    def _together(
        self, act: Callable[[], None], answer: Callable[[], Sequence[int]], heed: Callable[[tuple[int, ...]], None]
    ) -> None:
        """Let rank 0 act and the others follow, or act alone."""
        if self._site is None:
            act()
        elif self._rank:
            heed(self._site.follow())
        else:
            with self._site.speaking(answer):
                act()

    def _told_at_start(self) -> tuple[int, int]:
        return -1 if self.resumed is None else self.resumed.steps, int(self._run_id, 16)

    def _told(self, before: int) -> tuple[int, int, int]:
        assert self._learner is not None
        captured = self._learner.tally.steps if self._learner.published != before else 0
        return self.rounds_seen, self._batch_size or 0, captured

    def _told_at_end(self) -> tuple[int, int, int]:
        assert self._learner is not None
        return self._flushed, self.rounds_seen, self._learner.tally.steps if self._flushed else 0

    def _heed(self, told: tuple[int, ...]) -> None:
        """Take over what rank 0 knows after a step; save this rank's state with a snapshot."""
        self._rounds_seen, batch_size, captured = told
        if self.algorithm.global_batch_size is not None:
            self._batch_size = batch_size
        self._save_after(captured)

    def _save_after(self, steps: int) -> None:
        if steps and self._remembered is not None:
            self._remembered.save(run=self._run_id, steps=steps)

    def _heed_start(self, told: tuple[int, ...]) -> None:
        """Go on from where rank 0 does."""
        steps, self._run_id = told[0], f"{told[1]:015x}"
        if self._remembered is not None and steps >= 0:
            self.resumed = self._remembered.after(steps, run=self._run_id)

    def _heed_end(self, told: tuple[int, ...]) -> None:
        self._flushed, self._rounds_seen = bool(told[0]), told[1]
        self._save_after(told[2])


def align(model: Any, *, mailbox: MailboxLike, backend: Backend | None = None, ranks: Ranks | None = None) -> int:
    """Move ``model`` to the newest version in ``mailbox``, for evaluation, and return its round; -1 if there is none.

    Args:
        model, mailbox, backend: as in :class:`Session`.
        ranks: those that have the model together; all of them call this.

    Raises:
        ValueError: there is no run in the mailbox.
        SchemaMismatch: the run has other parameters.
        CorruptPayload: a fragment has no version that can be read.
        SiteError: on ranks other than 0, that rank 0 failed.
    """
    if ranks is None or require_ranks(ranks).world == 1:
        return _align(parameters_of(model, backend), mailbox)
    site = Site(site_parameters_of(model, backend, ranks), ranks)
    if ranks.rank:
        return site.follow()[0]
    round_ = -1
    with site.speaking(lambda: (round_,)):
        round_ = _align(site, mailbox)
    return round_


def _align(parameters: Parameters, mailbox: MailboxLike) -> int:
    store = open_existing(mailbox) if isinstance(mailbox, str | os.PathLike) else _opened(mailbox, SYSTEM_CLOCK)

    def report(kind: Kind, round_: int | None, detail: dict[str, Any]) -> None:
        log_events(Event(kind, "align", round_, detail))

    record, exchange = read_run(store, parameters.schema, report=report)
    versions = Versions(exchange, record, Wire.of(DiLoCo.from_dict(record.algorithm)), report)
    newest, held = versions.load_all()
    for version in held:
        parameters.align(version.theta, version.theta, Overwrite())
    return newest


def _others_here() -> list[Session]:
    return [each for each in list(_open_here) if each._pid == os.getpid()]


def _opened(mailbox: MailboxLike, clock: Clock) -> Mailbox:
    if isinstance(mailbox, str | os.PathLike):
        return open_mailbox(mailbox, clock=clock)
    if isinstance(mailbox, RetryingMailbox):
        return mailbox.apart()
    found: Mailbox = require_mailbox_like(mailbox)
    return found


def _refuse_contradictions(
    model: object,
    *,
    role: Role,
    ranks: Ranks | None,
    state_dir: object,
    state: object,
) -> None:
    if ranks is not None:
        require_ranks(ranks)
    if model is None and role != "syncer":
        raise TypeError(f'model=None has nothing to train for role={role!r}; only role="syncer" needs no model')
    if role == "syncer" and ranks is not None and ranks.world > 1:
        raise ValueError(f'role="syncer" is one process, not {ranks.world} ranks; leave ranks out')
    if role == "syncer" and state_dir is not None:
        raise ValueError('role="syncer" has nothing to remember; leave state_dir out')
    if state is not None and not callable(state):
        raise TypeError(f"state={state!r} must be a callable that returns what to remember")
    if state is not None and state_dir is None:
        raise ValueError("state= needs a state_dir to be saved in")


def _fresh_id() -> str:
    host = "".join(c for c in socket.gethostname() if c.isascii() and (c.isalnum() or c == "-"))[:30].strip("-")
    return f"{host or 'site'}-{os.getpid()}-{secrets.token_hex(3)}"
