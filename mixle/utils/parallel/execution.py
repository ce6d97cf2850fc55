"""How a training handle's ranks work together: its arguments, checked once, and what is made of them."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from mixle.training.options import TrainingOptions
from mixle.training.token_plan import TokenPlan
from mixle.training.wrap import Parallel, Precision
from mixle.utils.exact import require_choice, require_exact_bool, require_positive_int
from mixle.utils.parallel.process_group import COLLECTIVE_TIMEOUT_S, Peers, join, require_backend

__all__ = ["ContextMode", "Execution", "PipelineSchedule", "compared"]

ContextMode = Literal["ring", "allgather"]
PipelineSchedule = Literal["gpipe", "1f1b", "interleaved", "zero-bubble"]
PLAN_PACKAGE = "mixle.experimental.tensor_pipeline_context_parallel"


@dataclass(frozen=True, kw_only=True)
class Execution:
    """Where and how training runs; the arguments are those of the handles, which say what they mean.

    Raises:
        TypeError, ValueError: an argument that is not what it should be.
    """

    parallel: Parallel
    precision: Precision
    activation_checkpointing: bool
    tp_size: int
    pp_size: int
    cp_size: int
    cp_mode: ContextMode
    microbatches: int | None
    pp_schedule: PipelineSchedule
    training: TrainingOptions = field(default_factory=TrainingOptions)
    init_process_group: bool = True
    backend: str | None = None

    def __post_init__(self) -> None:
        require_choice(self.parallel, "parallel", ("auto", "ddp", "fsdp", "none"))
        require_choice(self.precision, "precision", ("fp32", "bf16"))
        require_exact_bool(self.activation_checkpointing, "activation_checkpointing")
        for axis in ("tp_size", "pp_size", "cp_size"):
            object.__setattr__(self, axis, require_positive_int(getattr(self, axis), axis))
        require_choice(self.cp_mode, "cp_mode", ("ring", "allgather"))
        if self.microbatches is not None:
            object.__setattr__(self, "microbatches", require_positive_int(self.microbatches, "microbatches"))
        require_choice(self.pp_schedule, "pp_schedule", ("gpipe", "1f1b", "interleaved", "zero-bubble"))
        if self.pp_size == 1 and self.microbatches not in (None, 1):
            raise ValueError(f"microbatches={self.microbatches} needs a pipeline: pp_size above 1, or leave it out")
        if not isinstance(self.training, TrainingOptions):
            raise TypeError(f"training={self.training!r} must be a TrainingOptions or None")
        require_exact_bool(self.init_process_group, "init_process_group")

    @property
    def axes(self) -> dict[str, Any]:
        """The arguments that make a plan."""
        names = ("tp_size", "pp_size", "cp_size", "cp_mode", "microbatches", "pp_schedule")
        return {name: getattr(self, name) for name in names}

    @property
    def has_plan(self) -> bool:
        """Whether ranks share a module in another way than as replicas or their shards."""
        return any(size > 1 for size in (self.tp_size, self.pp_size, self.cp_size))

    def join(self) -> Peers:
        """Join the process group; raises as :func:`~mixle.utils.parallel.process_group.join` does."""
        return join(
            init_process_group=self.init_process_group,
            backend=require_backend(self.backend),
            alone=self.parallel in ("ddp", "fsdp"),
            deadline_s=self.training.deadline_s,
        )

    def told(self) -> dict[str, str]:
        """Return what decides how a rank trains and which collective calls it makes, by name, to be compared."""
        options, evaluation = self.training, self.training.evaluation
        told: dict[str, object] = {"parallel": self.parallel, "precision": self.precision, **self.axes}
        told["activation_checkpointing"] = self.activation_checkpointing
        for name in ("gradient_accumulation", "max_grad_norm", "nonfinite", "deadline_s"):
            told[name] = getattr(options, name)
        heldout = "None" if evaluation is None else f"{evaluation!r} of {len(evaluation.data)} tokens"  # type: ignore[arg-type]
        callbacks = "(...)" if options.callbacks else "()"  # how many there are is each rank's own affair
        return {name: repr(value) for name, value in told.items()} | {"evaluation": heldout, "callbacks": callbacks}

    def plan(self, peers: Peers, *, batch_size: int, block: int, targets: Literal["last", "all"]) -> TokenPlan | None:
        """Return how the ranks share a module, None if each has all of it.

        Raises:
            ValueError: sizes that do not fit the ranks, the batch or the row; gives the nearest that do.
        """
        if not self.has_plan:
            return None
        made: TokenPlan = importlib.import_module(f"{PLAN_PACKAGE}.execution").PlanExecution.of(
            peers,
            **self.axes,
            batch_size=batch_size,
            block=block,
            targets=targets,
            parallel=self.parallel,
            precision=self.precision,
            activation_checkpointing=self.activation_checkpointing,
        )
        return made


def compared(peers: Peers, what: str, told: Mapping[str, str], own: Any = None) -> list[Any]:
    """Compare every rank's arguments with rank 0's, and return what each has of its ``own``, as JSON carries it.

    Raises:
        ValueError: an argument differs; names it, both values and the ranks.
        PeerError: a rank does not come.
    """
    mine = json.dumps([own, dict(told)])
    everyone = [json.loads(text) for text in peers.exchange(what, mine, deadline_s=COLLECTIVE_TIMEOUT_S)]
    for rank, (_, arguments) in enumerate(everyone):
        for name, value in arguments.items():
            if value != everyone[0][1][name]:
                raise ValueError(f"{name}={value} on rank {rank}, but {everyone[0][1][name]} on rank 0")
    return [each for each, _ in everyone]
