"""The handle that trains a module on one site's data, in step with other sites through a mailbox.

It wraps a training handle, which decides how the site's ranks train; after every optimizer step it counts, and now and
then moves the parameters to what the sites have agreed on (:mod:`mixle.diloco`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from mixle.diloco.algorithm import DiLoCo
from mixle.diloco.compression import Compression
from mixle.diloco.events import Callback, log_events
from mixle.diloco.mailbox import Mailbox
from mixle.diloco.node_info import Role
from mixle.diloco.session import Session
from mixle.diloco.site_options import SiteOptions
from mixle.diloco.torch_ranks import TorchRanks
from mixle.models.streaming_transformer_leaf import StreamingTransformerLeaf, StreamingTransformerLeafEstimator
from mixle.training import TrainingState
from mixle.training.engine import Engine
from mixle.training.optimizer import OptimizerState
from mixle.utils.exact import require_choice
from mixle.utils.parallel.planner import EncodedDataHandle

__all__ = ["DiLoCoEncodedData"]

Follow = Callable[[Engine[Any]], Callable[[int], None]]


class TrainingHandle(Protocol):
    """What is wrapped: :class:`~mixle.utils.parallel.torch_neural.StreamingTokenEncodedData` and its like."""

    rank: int
    world: int

    def train(
        self,
        estimator: StreamingTransformerLeafEstimator,
        prev_estimate: StreamingTransformerLeaf | None,
        follow: Follow | None = None,
    ) -> StreamingTransformerLeaf:
        """Train, and call what ``follow`` returns after every step."""
        ...


class DiLoCoEncodedData(EncodedDataHandle):
    """A training handle whose module is trained together with other sites'.

    ``seq_estimate(handle, estimator, prev)`` trains as the wrapped handle does, at this site's own pace. The first call
    joins the run, which moves the module to its newest commit; the session stays open between calls, and every call is
    about the same module. :meth:`leave` or :meth:`close` brings the last steps into commits.

    On several ranks, rank 0 speaks for the site: it alone reads and writes the mailbox, and the others are brought to
    what it computed, sharded (FSDP2) or not. Each site is one learner, however many ranks it has.

    Args:
        handle: trains on this site's data; closed with this one. Without a plan: tp_size, pp_size and cp_size are 1.
        algorithm, mailbox, learner_id, poll_interval, compression, lease_every, lease_timeout, callbacks: as in
            :class:`~mixle.diloco.session.Session`.
        role: ``"both"``, ``"learner"`` or ``"either"``.
        state_dir: a folder on a disk of each rank, or one that they share. The optimizer's moments and the place in the
            data's order are saved there at every snapshot that is published. A site that was killed and starts again
            goes on from there: it loses nothing but steps that it had not published. Its next call trains ``epochs``
            more epochs, of which the one that was interrupted is the first.

    Raises:
        TypeError, ValueError: an argument that is not what it says above; ``handle`` has a plan.
        ImportError: the codec needs a package that is not installed.
    """

    def __init__(
        self,
        handle: TrainingHandle,
        *,
        algorithm: DiLoCo,
        mailbox: str | os.PathLike[str] | Mailbox,
        learner_id: str | None = None,
        poll_interval: float = 1.0,
        compression: Compression = "off",
        lease_every: float = 1.0,
        lease_timeout: float = 4.0,
        callbacks: Sequence[Callback] = (log_events,),
        role: Role = "both",
        state_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        missing = [name for name in ("train", "rank", "world") if not hasattr(handle, name)]
        if missing:
            raise TypeError(
                f"handle is a {type(handle).__name__}, without {', '.join(missing)}; give one that trains modules, "
                "such as StreamingTokenEncodedData"
            )
        if getattr(handle, "_plan", None) is not None:
            raise ValueError(
                "handle has a plan, under which no rank has all parameters; give it tp_size=1, pp_size=1, cp_size=1"
            )
        if not isinstance(algorithm, DiLoCo):
            raise TypeError(f"algorithm={algorithm!r} must be a DiLoCo")
        require_choice(role, "role", ("both", "learner", "either"))
        self._handle: Any = handle
        self._algorithm = algorithm
        self._own = SiteOptions(
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
        self.rank, self.world = handle.rank, handle.world
        self._session: Session | None = None
        self._module: Any = None
        self._state = TrainingState()
        self._left = False

    @property
    def session(self) -> Session | None:
        """The session in the run; None before the first fit, and after :meth:`leave`."""
        return self._session

    def __len__(self) -> int:
        """Return what the wrapped handle counts."""
        return len(self._handle)

    # ---- the verbs

    def pysp_seq_estimate(self, estimator: Any, prev_estimate: Any) -> Any:
        """Train as the wrapped handle does, in step with the other sites.

        Args:
            estimator: a :class:`~mixle.models.streaming_transformer_leaf.StreamingTransformerLeafEstimator`.
            prev_estimate: the leaf to go on from.

        Raises:
            TypeError: the estimator trains no module: statistics of several sites are not summed.
            ValueError: another module than that of the first call.
            RuntimeError: the handle has left the run.
            SchemaMismatch, AlgorithmMismatch, IdInUse, MailboxError: as in
                :class:`~mixle.diloco.session.Session`; on ranks other than 0 a ``SiteError`` with their message.
        """
        if not isinstance(estimator, StreamingTransformerLeafEstimator):
            raise TypeError(
                f"estimator is a {type(estimator).__name__}, and sites train modules together: give a "
                "StreamingTransformerLeafEstimator, or fit on the wrapped handle for this site's data alone"
            )
        if not isinstance(prev_estimate, (StreamingTransformerLeaf, type(None))):
            raise TypeError(
                f"prev_estimate must be a StreamingTransformerLeaf or None, not {type(prev_estimate).__name__}"
            )
        if self._left:
            raise RuntimeError("this handle has left the run; make another to join again")
        start = estimator if prev_estimate is None else prev_estimate
        if self._session is not None and start.module is not self._module:
            raise ValueError("the session is about the module of the first call; make a handle for each module")
        self._state = state = start.state or TrainingState()
        leaf = StreamingTransformerLeaf(start.module, estimator.device, options=start.options, state=state)
        try:
            return self._handle.train(estimator, leaf, lambda engine: self._joined(engine.module).step)
        except BaseException:
            session, self._session = self._session, None
            if session is not None:
                session.abandon()
            raise

    def pysp_seq_initialize(self, estimator: Any, rng: Any, p: float) -> Any:
        """Return what the wrapped handle does: the module as it is here, before it joins the run."""
        return self._handle.pysp_seq_initialize(estimator, rng, p)

    def pysp_seq_log_density_sum(self, model: Any) -> tuple[float, float]:
        """Return the count and the sum of the log-densities of this site's data."""
        return self._handle.pysp_seq_log_density_sum(model)

    def pysp_seq_log_density(self, model: Any) -> list[np.ndarray]:
        """Return the log-densities of this rank's data."""
        return self._handle.pysp_seq_log_density(model)

    # ---- the end

    def leave(self) -> bool:
        """Bring this site's last steps into commits and leave the run; the module is then at the newest that it knows.

        Every rank calls it. The wrapped handle stays open, to score what was trained.

        Returns:
            Whether all steps are in commits.
        """
        self._left = True
        session, self._session = self._session, None
        return True if session is None else session.close()

    def close(self) -> None:
        """Leave the run as :meth:`leave` does, then close the wrapped handle."""
        try:
            self.leave()
        finally:
            self._handle.close()

    # ----

    def _joined(self, module: Any) -> Session:
        """Return the session about ``module``; the first time, join with it and take up where the folder says."""
        if self._session is None:
            session = Session(
                module,
                algorithm=self._algorithm,
                **vars(self._own),
                backend="torch",
                ranks=TorchRanks() if self.world > 1 else None,
                state=None if self._own.state_dir is None else lambda: _remembered(self._state),
            )
            self._session, self._module = session, module
            if session.resumed is not None:
                _go_on(self._state, session.resumed.state)
        return self._session


def _remembered(state: TrainingState) -> dict[str, Any]:
    """Return what of a training must outlive the process; a collective call where the moments are sharded."""
    optimizer = state.optimizer
    counts = {name: getattr(state, name) for name in _COUNTS}
    return {**counts, "kind": optimizer.kind, "moments": optimizer.dense()}


def _go_on(state: TrainingState, remembered: dict[str, Any]) -> None:
    for name in _COUNTS:
        setattr(state, name, remembered[name])
    state.optimizer = OptimizerState(remembered["kind"], remembered["moments"])


_COUNTS = ("step", "epoch", "epoch_step", "skipped", "revision")
