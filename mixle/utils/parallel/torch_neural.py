"""The handle that trains a module on a stream of tokens, one shard per rank, without gathering anything.

Every rank computes the same schedule from lengths alone, runs the same loop, and ends with the same model; the schedule
says what was trained, padded, excluded and skipped. What each rank's tokens hold is checked once, when the first fit
knows the vocabulary, and one verdict is reached for all ranks before any of them moves a parameter.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from mixle.data.schedule import Sampling, Schedule
from mixle.data.token_windows import validate_token_array
from mixle.data.window_spec import Boundary, Targets, WindowSpec
from mixle.models.streaming_transformer_leaf import StreamingTransformerLeaf, StreamingTransformerLeafEstimator
from mixle.training import TrainingOptions, TrainingState
from mixle.training.token_trainer import Follow, TokenTrainer
from mixle.training.wrap import Parallel, Precision
from mixle.utils.exact import require_exact_bool, require_positive_int
from mixle.utils.parallel.execution import ContextMode, Execution, PipelineSchedule, compared
from mixle.utils.parallel.planner import EncodedDataHandle
from mixle.utils.parallel.process_group import COLLECTIVE_TIMEOUT_S
from mixle.utils.parallel.token_statistics import TokenStatistics

if TYPE_CHECKING:
    from torch import nn

__all__ = ["StreamingTokenEncodedData"]


class StreamingTokenEncodedData(EncodedDataHandle):
    """A stream of tokens, sharded over the ranks of a torchrun job, on which estimators are fitted in place.

    ``seq_estimate(handle, StreamingTransformerLeafEstimator(module))`` trains the module for ``epochs`` epochs; passing
    the leaf that it returns goes on from there: k calls of one epoch are one call of k epochs, bit for bit.

    Args:
        token_ids: (n,) integers: an array, a ``numpy.memmap`` or a :class:`~mixle.data.token_file.TokenFile`; never
            copied as a whole.
        block: input tokens per window.
        batch_size: windows per replica and schedule step.
        epochs: passes over the data per call; 0 returns the module untrained.
        shuffle: permute the windows, anew in each epoch.
        shard_by_rank: every rank gives the same array, and trains its share; False: the array given is this rank's own.
        init_process_group: join torchrun's job; :meth:`close` leaves it.
        backend: of the process group; None is nccl for CUDA tensors and gloo for others.
        parallel: ``"ddp"`` replicates the module, ``"fsdp"`` shards it (FSDP2), ``"none"`` is for one process;
            ``"auto"`` is FSDP2 on CUDA and DDP on CPU, and nothing in one process.
        precision: ``"bf16"`` computes in bfloat16; parameters and gradient sums stay float32.
        activation_checkpointing: compute the activations of ``module.blocks`` again in the backward pass.
        tp_size, pp_size, cp_size: how many ranks share every layer (tensor axis), hold successive layers (pipeline)
            and share every sequence (context). Data replicas are what they leave of the ranks; ``batch_size`` is each
            replica's, and with ``shard_by_rank=False`` all ranks of one give the same array. A plan takes a
            :class:`~mixle.models.transformer.CausalLM` apart in place.
        targets: ``"last"`` trains the token after each window, ``"all"`` the token after each of its positions.
        stride: tokens between windows with ``targets="all"``; ``block`` by default, and at least that.
        boundary: ``"exclude"`` drops the targets whose context crosses from one shard to the next, ``"overlap"``
            splits the targets evenly and drops none. ``"exclude"`` by default; with ``sampling="global"`` there is no
            boundary, and giving one is refused.
        sampling: ``"sharded"``: each replica permutes the windows of its shard; ``"global"``: all share one
            permutation of all windows, so that runs of equal ``world * batch_size`` see the same batches.
        seed: any integer; fixes the order and, while training, what the module draws.
        cp_mode: how keys and values reach the ranks of a sequence: ``"ring"`` or ``"allgather"``; of no
            effect with ``cp_size=1``.
        microbatches: parts of a batch that pass a pipeline one after the other; by default at least ``pp_size``.
            With ``pp_size=1`` a batch is one part, and more are refused.
        pp_schedule: their order: ``"gpipe"``, ``"1f1b"``, ``"interleaved"`` or ``"zero-bubble"``; of no effect with
            ``pp_size=1``.
        training: what the loop does around the steps.

    Raises:
        TypeError, ValueError: an argument that is not what it says above, before any process group exists; or data too
            short for one window, with the numbers.
        PeerError: the other ranks do not come.
    """

    def __init__(
        self,
        token_ids: object,
        *,
        block: int,
        batch_size: int,
        epochs: int = 1,
        shuffle: bool = True,
        shard_by_rank: bool = True,
        init_process_group: bool = True,
        backend: str | None = None,
        parallel: Parallel = "auto",
        precision: Precision = "fp32",
        activation_checkpointing: bool = False,
        tp_size: int = 1,
        pp_size: int = 1,
        cp_size: int = 1,
        targets: Targets = "last",
        stride: int | None = None,
        boundary: Boundary | None = None,
        sampling: Sampling = "sharded",
        seed: int = 0,
        cp_mode: ContextMode = "ring",
        microbatches: int | None = None,
        pp_schedule: PipelineSchedule = "1f1b",
        training: TrainingOptions | None = None,
    ) -> None:
        self._tokens = validate_token_array(token_ids)
        self._split = require_exact_bool(shard_by_rank, "shard_by_rank")
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
        self._spec = WindowSpec(block, targets, stride)
        self._order: dict[str, Any] = {
            "batch_size": batch_size,
            "epochs": epochs,
            "shuffle": shuffle,
            "seed": seed,
            "sampling": sampling,
            "boundary": boundary,
        }
        self._check_as_one_process()
        evaluation = self._execution.training.evaluation
        heldout = None if evaluation is None else validate_token_array(evaluation.data, "evaluation.data")
        self._peers = self._execution.join()
        self.rank, self.world = self._peers.rank, self._peers.world
        try:
            lengths = self._agree()
            self._plan = self._execution.plan(
                self._peers,
                batch_size=require_positive_int(batch_size, "batch_size"),
                block=self._spec.block,
                targets=self._spec.targets,
            )
            self._replica = self.rank if self._plan is None else self._plan.replica
            self._schedule = self._make_schedule(lengths)
            self._trainer = TokenTrainer(
                self._tokens,
                self._schedule,
                self._peers,
                self._execution.training,
                heldout=heldout,
                parallel=self._execution.parallel,
                precision=self._execution.precision,
                activation_checkpointing=self._execution.activation_checkpointing,
                plan=self._plan,
            )
        except BaseException:
            self._peers.close()
            raise

    # ---- the schedule

    @property
    def steps_per_epoch(self) -> int:
        """Schedule steps per epoch, the same on every rank."""
        return self._schedule.steps_per_epoch

    @property
    def local_target_tokens(self) -> int:
        """Real targets that this rank trains in one epoch."""
        return self._schedule.local_target_tokens(self._replica)

    @property
    def masked_target_tokens(self) -> int:
        """Targets that this rank pads and masks, over all epochs of a call."""
        return self._schedule.masked_target_tokens(self._replica)

    @property
    def excluded_target_tokens(self) -> int:
        """Targets of the whole array that no shard has the context for, over all epochs of a call."""
        return self._schedule.excluded_target_tokens

    @property
    def schedule_receipt(self) -> dict[str, object]:
        """What one call trains, pads, excludes and skips, as seen by this rank."""
        return self._schedule.receipt(self._replica)

    def __len__(self) -> int:
        """Return the number of real targets in one epoch, of all ranks."""
        return self._schedule.real_targets_per_epoch

    # ---- the verbs

    def pysp_seq_estimate(self, estimator: Any, prev_estimate: Any) -> Any:
        """Train the estimator's module, in place, for ``epochs`` more epochs; or take one EM step of a classical model.

        Args:
            estimator: a :class:`StreamingTransformerLeafEstimator`, or one whose observations are tokens or a stream.
            prev_estimate: the leaf to go on from: its module, its optimizer's moments, its place in the data's order.
                Without one, training starts from the module as it is, at the start of the order.
        """
        if not isinstance(estimator, StreamingTransformerLeafEstimator):
            return self._statistics().estimate(estimator, prev_estimate)
        return self.train(estimator, prev_estimate)

    def train(
        self,
        estimator: StreamingTransformerLeafEstimator,
        prev_estimate: StreamingTransformerLeaf | None,
        follow: Follow | None = None,
    ) -> StreamingTransformerLeaf:
        """Train the estimator's module as ``seq_estimate`` does.

        Args:
            estimator, prev_estimate: as in :meth:`pysp_seq_estimate`.
            follow: given the engine that trains the module, returns what is called on every rank after every step with
                the step's targets, and may move the parameters.
        """
        if not isinstance(prev_estimate, (StreamingTransformerLeaf, type(None))):
            raise TypeError(
                f"prev_estimate must be a StreamingTransformerLeaf or None, not {type(prev_estimate).__name__}"
            )
        start = estimator if prev_estimate is None else prev_estimate
        state = start.state or TrainingState()
        self._trainer.fit(start.module, estimator.device, state, estimator.options, follow)
        return self._leaf(start.module, estimator, state)

    def pysp_seq_initialize(self, estimator: Any, rng: Any, p: float) -> Any:
        """Return the estimator's module as it is, rank 0's on every rank; or a first classical model.

        A module brings its own initialization: ``rng`` and ``p`` are for classical estimators.
        """
        if not isinstance(estimator, StreamingTransformerLeafEstimator):
            return self._statistics().initialize(estimator, rng, p)
        self._trainer.prepare(estimator.module, estimator.device)
        return self._leaf(estimator.module, estimator, estimator.state or TrainingState())

    def pysp_seq_log_density_sum(self, model: Any) -> tuple[float, float]:
        """Return how many targets an epoch has, and the sum of their log-densities in nats, over all ranks."""
        if not isinstance(model, StreamingTransformerLeaf):
            return self._statistics().log_density_sum(model)
        return self._trainer.log_density_sum(model.module, model.device)

    def pysp_seq_log_density(self, model: Any) -> list[np.ndarray]:
        """Return the log-densities of this rank's targets, as one array, in the order of the tokens."""
        if not isinstance(model, StreamingTransformerLeaf):
            return self._statistics().log_density(model)
        return [self._trainer.log_densities(model.module, model.device)]

    def close(self) -> None:
        """Leave the process group; the last handle to leave destroys it."""
        self._trainer.release()
        self._peers.close()

    # ---- construction

    def _check_as_one_process(self) -> None:
        """Refuse what no number of ranks makes right, before there is a process group to tear down."""
        n = len(self._tokens)
        own: dict[str, Any] = {"n_tokens": n} if self._split else {"lengths": (max(n, self._spec.shortest),)}
        Schedule(self._spec, **own, **self._order)

    def _agree(self) -> list[int]:
        """Compare every rank's arguments, and return how many tokens each has."""
        told = {**self._order, "block": self._spec.block, "targets": self._spec.targets, "stride": self._spec.stride}
        told["shard_by_rank"] = self._split
        arguments = {name: repr(value) for name, value in told.items()} | self._execution.told()
        lengths: list[int] = compared(self._peers, "sharding", arguments, len(self._tokens))
        for rank, length in enumerate(lengths):
            if self._split and length != lengths[0]:
                raise ValueError(
                    f"token_ids has {length} tokens on rank {rank} and {lengths[0]} on rank 0; give every rank the "
                    "same array, or shard_by_rank=False"
                )
        return lengths

    def _make_schedule(self, lengths: list[int]) -> Schedule:
        replicas = self.world if self._plan is None else self._plan.replicas
        own: dict[str, Any] = {"n_tokens": lengths[0]}
        if not self._split:
            by_replica: dict[int, int] = {}
            for rank, length in enumerate(lengths):
                replica = rank if self._plan is None else self._plan.replica_of(rank)
                if by_replica.setdefault(replica, length) != length:
                    raise ValueError(
                        f"token_ids has {length} tokens on rank {rank}, but {by_replica[replica]} on another rank of "
                        f"data replica {replica}; all ranks of a replica give the same array"
                    )
            own = {"lengths": tuple(by_replica[replica] for replica in range(replicas))}
        return Schedule(self._spec, replicas=replicas, **own, **self._order)

    def _leaf(
        self, module: nn.Module, estimator: StreamingTransformerLeafEstimator, state: TrainingState
    ) -> StreamingTransformerLeaf:
        vocab = self._trainer.vocabulary
        return StreamingTransformerLeaf(module, estimator.device, options=estimator.options, state=state, vocab=vocab)

    def _statistics(self) -> TokenStatistics:
        if self._plan is not None and not self._split:
            raise ValueError(
                "shard_by_rank=False gives all ranks of a replica the same tokens, which an estimator of statistics "
                "would count several times; leave tp_size, pp_size and cp_size at 1"
            )
        patient = self._peers.with_deadline(COLLECTIVE_TIMEOUT_S)
        return TokenStatistics(patient, self._tokens, shared=self._split)
