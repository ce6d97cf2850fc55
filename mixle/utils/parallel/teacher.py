"""The handle that trains on samples which a teacher makes while the student trains.

Every rank orders its own samples from the broker, as many ahead as it has slots. Before each optimizer step all ranks
agree on the newest model that any of them knows of, and take the step with samples of that one; whoever has older ones
drops them. Nobody waits for a rank that has failed: it says so where they agree.
"""

from __future__ import annotations

import importlib
import os
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from mixle.data.teacher.batch_ref import BatchRef
from mixle.data.teacher.errors import LeaderRefused
from mixle.data.teacher.keys import Keys
from mixle.data.teacher.specs import BatchConfig
from mixle.data.teacher.student import StudentClient
from mixle.models.distillation import DistillationEstimator, DistillationLeaf
from mixle.models.streaming_transformer_leaf import StreamingTransformerLeaf, StreamingTransformerLeafEstimator
from mixle.training import TrainingOptions, TrainingState
from mixle.training.distillation import Distillation
from mixle.training.taught_tokens import TaughtTokens
from mixle.training.teacher_batches import Share
from mixle.training.teacher_trainer import Follow, TeacherTrainer
from mixle.training.token_plan import TokenPlan
from mixle.training.wrap import Parallel, Precision, sharding_of
from mixle.utils.exact import require_exact_int, require_finite_float, require_nonnegative_int, require_positive_int
from mixle.utils.parallel.execution import PLAN_PACKAGE, ContextMode, Execution, PipelineSchedule, compared
from mixle.utils.parallel.planner import EncodedDataHandle

if TYPE_CHECKING:
    from torch import nn

__all__ = ["TeacherEncodedData"]

Leaf = DistillationLeaf | StreamingTransformerLeaf
Estimator = DistillationEstimator | StreamingTransformerLeafEstimator
YIELD_S = 0.001


class TeacherEncodedData(EncodedDataHandle):
    """Samples that a teacher makes on demand, on which the ranks of a torchrun job train a student in place.

    ``seq_estimate(handle, DistillationEstimator(module))`` trains the module for ``steps`` optimizer steps on its
    losses; with a :class:`StreamingTransformerLeafEstimator` it trains next tokens on the samples' ids. Passing the
    leaf that it returns goes on from there: with the same samples, k calls of n steps are one of k * n.

    Args:
        client_or_endpoint: the frontend's endpoint of the broker, None for this user's own on this host; or this
            rank's own :class:`~mixle.data.teacher.StudentClient`, which :meth:`close` leaves open.
        batch_config: what a sample is; a :class:`~mixle.data.teacher.BatchConfig` or the mapping of one.
        batch_size: samples per replica and batch.
        steps: optimizer steps per call, each of ``training.gradient_accumulation`` batches.
        control_endpoint, control_pub_endpoint: the broker's others; None for this user's own.
        init_process_group, backend, parallel, precision, activation_checkpointing: as for
            :class:`~mixle.utils.parallel.torch_neural.StreamingTokenEncodedData`.
        tp_size, pp_size, cp_size, cp_mode, microbatches, pp_schedule: as there. One rank of each data replica fetches,
            and its peers get what it has; a plan trains next tokens.
        training: what the loop does around the steps; it has no ``evaluation``.
        seed: any integer; fixes what the module draws, not what the teacher makes.
        slot_count: samples that this rank's shared memory holds; by default those of a step and two batches more, so
            that some are made while others are trained on.
        deadline_s: seconds that the broker, or a worker for the model, may be missing before every rank raises.
        max_retries: failed orders in a row after which every rank raises.
        keys: CURVE keys, or their directory; TCP needs them.
        insecure: accept TCP without keys.
        directory: of the broker's sockets, where endpoints are None; None is this user's own.
        model_id, model_cfg: the model to start with, set by rank 0; None leaves the one that is set.

    Raises:
        TypeError, ValueError: an argument that is not what it says above, before any process group exists.
        OSError: the slots do not fit into memory; says both sizes.
        PeerError: the other ranks do not come.
        TeacherError: the broker cannot be reached or refuses, where ``model_id`` is given.
    """

    def __init__(
        self,
        client_or_endpoint: StudentClient | str | None = None,
        *,
        batch_config: BatchConfig | Mapping[str, Any],
        batch_size: int,
        steps: int,
        control_endpoint: str | None = None,
        control_pub_endpoint: str | None = None,
        init_process_group: bool = True,
        backend: str | None = None,
        parallel: Parallel = "auto",
        precision: Precision = "fp32",
        activation_checkpointing: bool = False,
        tp_size: int = 1,
        pp_size: int = 1,
        cp_size: int = 1,
        cp_mode: ContextMode = "ring",
        microbatches: int | None = None,
        pp_schedule: PipelineSchedule = "1f1b",
        training: TrainingOptions | None = None,
        seed: int = 0,
        slot_count: int | None = None,
        deadline_s: float = 30.0,
        max_retries: int = 10,
        keys: Keys | str | os.PathLike[str] | None = None,
        insecure: bool = False,
        directory: str | os.PathLike[str] | None = None,
        model_id: str | None = None,
        model_cfg: Mapping[str, Any] | None = None,
    ) -> None:
        self._config = _as_config(batch_config)
        self._batch_size = require_positive_int(batch_size, "batch_size")
        self._steps = require_nonnegative_int(steps, "steps")
        self._execution = Execution(
            parallel=parallel,
            precision=precision,
            activation_checkpointing=activation_checkpointing,
            tp_size=tp_size,
            pp_size=pp_size,
            cp_size=cp_size,
            cp_mode=cp_mode,
            microbatches=microbatches,
            pp_schedule=pp_schedule,
            training=TrainingOptions() if training is None else training,
            init_process_group=init_process_group,
            backend=backend,
        )
        if self._execution.training.evaluation is not None:
            raise ValueError("evaluation needs data, and a teacher's samples are made to be trained on; use a callback")
        self._seed = require_exact_int(seed, "seed")
        self._deadline_s = require_finite_float(deadline_s, "deadline_s", exclusive_minimum=0.0)
        self._max_retries = require_nonnegative_int(max_retries, "max_retries")
        if model_id is None and model_cfg is not None:
            raise ValueError("model_cfg is given without the model_id that it is for")
        self._slot_count = self._require_slots(client_or_endpoint, slot_count)
        self._tokens = TaughtTokens.of(self._config) if self._execution.has_plan else None
        self._connection: dict[str, Any] = {
            "control_endpoint": control_endpoint,
            "control_pub_endpoint": control_pub_endpoint,
            "keys": keys,
            "insecure": insecure,
            "directory": directory,
        }
        self._owns_client = not isinstance(client_or_endpoint, StudentClient)
        if not isinstance(client_or_endpoint, StudentClient):
            self._make_client(client_or_endpoint, rank=0).close()  # checks the arguments; nothing is sent
        self._peers = self._execution.join()
        self.rank, self.world = self._peers.rank, self._peers.world
        self._client: StudentClient | None = None
        try:
            compared(self._peers, "agreeing on the samples", self._told())
            self._plan = self._make_plan()
            self._share = self._make_share()
            if self._share.asks:
                made = client_or_endpoint
                self._client = made if isinstance(made, StudentClient) else self._make_client(made, rank=self._replica)
            self._supply = None if self._client is None else _LockedClient(self._client)
            self._trainer = TeacherTrainer(
                self._supply,
                self._config,
                self._peers,
                self._execution.training,
                self._share,
                steps=self._steps,
                batch_size=self._batch_size,
                seed=self._seed,
                max_retries=self._max_retries,
                parallel=parallel,
                precision=precision,
                activation_checkpointing=activation_checkpointing,
                plan=self._plan,
                require_plan_fits=None if self._plan is None else self._require_plan_fits,
            )
            if model_id is not None:
                self._start_with(model_id, model_cfg)
        except BaseException:
            self._leave()
            raise

    # ---- the model

    def set_model(self, model_id: str, model_cfg: Mapping[str, Any] | None = None) -> int:
        """Switch the teacher's workers to a model and return its generation; all ranks train on it from one step on.

        For rank 0; before or between fits, in a callback, or in another thread while a fit runs.

        Raises:
            LeaderRefused: another rank calls, or another client leads.
            BrokerUnreachable: the broker did not answer within the deadline.
            TypeError, ValueError: ``model_id`` or ``model_cfg`` is none.
        """
        if self.rank != 0 or self._supply is None:
            raise LeaderRefused(f"rank {self.rank} does not lead; rank 0 calls set_model")
        return self._supply.set_model(model_id, model_cfg)

    @property
    def generation(self) -> int:
        """The newest generation that this rank knows of; 0 before the first model, and where another rank fetches."""
        return 0 if self._supply is None else self._supply.generation

    @property
    def schedule_receipt(self) -> dict[str, object]:
        """What was asked, served and dropped so far, over all ranks and the same on each; counts are samples.

        ``samples_asked`` were taken from the teacher; of these ``samples_served`` were trained on (by generation in
        ``samples_by_generation``) and ``samples_stale`` were dropped, as they were of an older model than another rank
        knew of. ``orders_retried`` failed and were placed again. ``first_step_of_generation`` is the optimizer step of
        this handle, the first being 1, with which all ranks began to train on each.
        """
        counted = asdict(self._trainer.deliveries)
        return {
            "world_size": self._share.replicas,
            "steps": self._steps,
            "batch_size": self._batch_size,
            "samples_asked": counted["fetched"],
            "samples_served": sum(counted["served"].values()),
            "samples_stale": counted["stale"],
            "orders_retried": counted["retried"],
            "samples_by_generation": counted["served"],
            "first_step_of_generation": counted["switches"],
            "policy": "one-generation-per-step-on-all-ranks",
        }

    # ---- the verbs

    def pysp_seq_estimate(self, estimator: Any, prev_estimate: Any) -> Any:
        """Train the estimator's module, in place, for ``steps`` more optimizer steps.

        Args:
            estimator: a :class:`DistillationEstimator` or a :class:`StreamingTransformerLeafEstimator`.
            prev_estimate: the leaf to go on from: its module and its optimizer's moments. Without one, training starts
                from the module as it is.
        """
        return self.train(_require_estimator(estimator), prev_estimate)

    def train(self, estimator: Estimator, prev_estimate: Leaf | None, follow: Follow | None = None) -> Leaf:
        """Train the estimator's module as ``seq_estimate`` does.

        Args:
            estimator, prev_estimate: as in :meth:`pysp_seq_estimate`.
            follow: given the engine that trains the module, returns what is called on every rank after every step with
                the step's targets, and may move the parameters.

        Raises:
            ValueError: names of tensors that the samples do not have, or a module that does not fit them.
            TeacherError: on the rank where the teacher failed; on the others a ``PeerError`` that names it.
        """
        if not isinstance(prev_estimate, (DistillationLeaf, StreamingTransformerLeaf, type(None))):
            raise TypeError(
                f"prev_estimate must be a DistillationLeaf, a StreamingTransformerLeaf or None, not "
                f"{type(prev_estimate).__name__}"
            )
        start: Estimator | Leaf = estimator if prev_estimate is None else prev_estimate
        state = start.state or TrainingState()
        self._trainer.fit(_task_of(estimator), start.module, estimator.device, state, estimator.options, follow)
        return _leaf(estimator, start.module, state)

    def pysp_seq_initialize(self, estimator: Any, rng: Any, p: float) -> Any:
        """Return the estimator's module as it is, rank 0's on every rank; a module brings its own initialization."""
        checked = _require_estimator(estimator)
        self._trainer.prepare(_task_of(checked), checked.module, checked.device)
        return _leaf(checked, checked.module, checked.state or TrainingState())

    def close(self) -> None:
        """Give the samples back, leave the broker unless the client was given, and leave the process group."""
        self._trainer.release()
        self._leave()

    # ---- construction

    @property
    def _replica(self) -> int:
        return self.rank if self._plan is None else self._plan.replica

    def _require_slots(self, client: object, slot_count: object) -> int:
        accumulation = self._execution.training.gradient_accumulation
        least = self._batch_size * accumulation
        if isinstance(client, StudentClient):
            if slot_count is not None:
                raise ValueError(f"slot_count={slot_count} is the client's, which was made with {client.slot_count}")
            if client.batch_config != self._config:
                raise ValueError("batch_config is not that of the client; give the same to both")
            slots = client.slot_count
        elif slot_count is None:
            slots = least + 2 * self._batch_size
        else:
            slots = require_positive_int(slot_count, "slot_count")
        if slots < least:
            raise ValueError(
                f"slot_count={slots} holds less than a step's samples, batch_size={self._batch_size} times "
                f"gradient_accumulation={accumulation}; have at least {least}, better {least + 2 * self._batch_size}"
            )
        return slots

    def _make_client(self, endpoint: str | None, *, rank: int) -> StudentClient:
        return StudentClient(
            rank, self._slot_count, self._config, endpoint, deadline_s=self._deadline_s, **self._connection
        )

    def _told(self) -> dict[str, str]:
        """Return what all ranks have to agree on."""
        told = {
            "batch_config": self._config.to_dict()["specs"],
            "batch_size": self._batch_size,
            "steps": self._steps,
            "seed": self._seed,
            "max_retries": self._max_retries,
        }
        return {name: repr(value) for name, value in told.items()} | self._execution.told()

    def _make_plan(self) -> TokenPlan | None:
        if self._tokens is None:
            return None
        return self._execution.plan(self._peers, batch_size=self._batch_size, block=self._tokens.length, targets="all")

    def _make_share(self) -> Share:
        if self._plan is None:
            return Share(self.rank, self.world, self.world)
        plan, group, source = self._plan, None, 0
        import torch.distributed as dist

        ranks_of = [[r for r in range(self.world) if plan.replica_of(r) == each] for each in range(plan.replicas)]
        for replica, ranks in enumerate(ranks_of):  # every rank takes part in making each group
            made = dist.new_group(ranks) if self.world > 1 else None
            if replica == plan.replica:
                group, source = made, ranks[0]
        return Share(self.rank, self.world, plan.replicas, plan.speaks_for_replica, source, group)

    def _require_plan_fits(self, module: nn.Module) -> None:
        """Check the plan against the module and the samples that the teacher will send."""
        if sharding_of(module) is None:
            importlib.import_module(PLAN_PACKAGE).validate_tp_pp_cp_plan(
                module,
                **self._execution.axes,
                world_size=self.world,
                batch_size=self._batch_size,
                sample=self._config,
            )

    def _start_with(self, model_id: str, model_cfg: Mapping[str, Any] | None) -> None:
        error = None
        if self.rank == 0:
            try:
                self.set_model(model_id, model_cfg)
            except Exception as caught:
                error = caught
        self._peers.agree("setting the model", error, deadline_s=self._deadline_s + self._peers.deadline_s)

    def _leave(self) -> None:
        if self._client is not None and self._owns_client:
            self._client.close()
        self._peers.close()


class _LockedClient:
    """A client that one thread asks for samples while another may switch the model."""

    def __init__(self, client: StudentClient) -> None:
        self._client, self._lock, self._waiting = client, threading.RLock(), 0

    @property
    def generation(self) -> int:
        return self._client.generation

    def request_batch(self, size: int, timeout_ms: float) -> BatchRef | None:
        while self._waiting:  # a lock is not fair, and this side comes back at once
            time.sleep(YIELD_S)
        with self._lock:
            return self._client.request_batch(size, timeout_ms)

    def set_model(self, model_id: str, model_cfg: Mapping[str, Any] | None) -> int:
        with self._announced(), self._lock:
            return self._client.set_model(model_id, model_cfg)

    @contextmanager
    def _announced(self) -> Iterator[None]:
        self._waiting += 1
        try:
            yield
        finally:
            self._waiting -= 1


def _as_config(value: object) -> BatchConfig:
    if isinstance(value, BatchConfig):
        return value
    if isinstance(value, Mapping):
        return BatchConfig.from_dict(value)
    raise TypeError(f"batch_config={value!r} must be a BatchConfig or a mapping of one, not {type(value).__name__}")


def _require_estimator(estimator: object) -> Estimator:
    if not isinstance(estimator, (DistillationEstimator, StreamingTransformerLeafEstimator)):
        raise TypeError(
            f"a teacher's samples train a DistillationEstimator or a StreamingTransformerLeafEstimator, not a "
            f"{type(estimator).__name__}"
        )
    return estimator


def _task_of(estimator: Estimator) -> Distillation | None:
    return estimator.task if isinstance(estimator, DistillationEstimator) else None


def _leaf(estimator: Estimator, module: nn.Module, state: TrainingState) -> Leaf:
    """Return the module as the estimator's kind of leaf."""
    if isinstance(estimator, DistillationEstimator):
        return DistillationLeaf(module, estimator.device, task=estimator.task, options=estimator.options, state=state)
    return StreamingTransformerLeaf(module, estimator.device, options=estimator.options, state=state)
