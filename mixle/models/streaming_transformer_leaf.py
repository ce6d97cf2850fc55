"""A torch module over tokens as a distribution: the conditional density of the next token given its context.

Training moves the module in place, whichever way it runs: a training handle takes many optimizer steps per
``seq_estimate``; nested in a mixture, or behind a handle for statistics, each M-step is one.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from mixle.models import leaf_files
from mixle.models.next_token_sampling import StreamingTransformerLeafSampler, draw, next_probabilities
from mixle.models.next_token_statistics import (
    NextTokenEncoding,
    NextTokenStatistic,
    StreamingTransformerLeafAccumulatorFactory,
    StreamingTransformerLeafDataEncoder,
    as_context,
    move_along,
)
from mixle.stats.contract import ParameterEstimator, ProbabilityDistribution
from mixle.training.modes import scoring_mode
from mixle.training.next_token import NextToken
from mixle.training.optimizer import Kind, LearningRateSchedule, OptimizerOptions
from mixle.training.state import StepRecord, TrainingState
from mixle.training.wrap import named_parameters, resolve_device, sharding_of, unsharded
from mixle.utils.exact import require_finite_float, require_nonnegative_int, require_positive_int

__all__ = [
    "StreamingTransformerLeaf",
    "StreamingTransformerLeafEstimator",
    "StreamingTransformerLeafSampler",
]


class StreamingTransformerLeaf(ProbabilityDistribution):
    """The distribution of ``next_id`` given ``context`` that a module defines; observations are such pairs.

    Of a context longer than ``module.block`` the module sees the last ``block`` ids. An id outside the vocabulary makes
    an observation impossible.

    Where the module is sharded, every method that runs it is a collective call with the same arguments on all ranks;
    called on some only, it raises at the handle's deadline and names who is missing.

    Args:
        module: maps (B, T) int64 ids to (B, V) or (B, T, V) logits.
        device: where it runs.
        options: how it is optimized when training goes on.
        state: how far its training has come.
        vocab: number of token ids, where the module does not say.
    """

    def __init__(
        self,
        module: nn.Module,
        device: str | torch.device = "cpu",
        *,
        options: OptimizerOptions | None = None,
        state: TrainingState | None = None,
        vocab: int | None = None,
    ) -> None:
        self.module = require_module(module)
        self.device = resolve_device(device)
        if sharding_of(module) is None:
            module.to(self.device)
        self.options = OptimizerOptions() if options is None else options
        self.state = TrainingState() if state is None else state
        self._steps = len(self.state.history)
        self._vocab: int | None = getattr(module, "vocab", vocab)

    # A module is equal to itself only: comparing weights is the caller's decision, and may be a collective call.
    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def __repr__(self) -> str:
        steps = f"{self.state.step} optimizer steps"
        return f"StreamingTransformerLeaf({type(self.module).__name__} on {self.device}, {steps})"

    # ---- the distribution

    @property
    def history(self) -> Sequence[StepRecord]:
        """A record per optimizer step until this leaf was returned; each is its loss, in nats, as a number."""
        return self.state.history[: self._steps]

    @property
    def revision(self) -> int:
        """Counts the changes of the module by training."""
        return self.state.revision

    @property
    def block(self) -> int | None:
        """The longest context that the module takes, None if it does not say."""
        return getattr(self.module, "block", None)

    def vocabulary(self) -> int:
        """Return the number of token ids: ``module.vocab``, else the width of its logits."""
        if self._vocab is None:
            self._vocab = self._objective().vocabulary(self.module, self.block or 1, self.device)
        return self._vocab

    def seq_log_density(self, enc: NextTokenEncoding) -> NDArray[np.float64]:
        self._meet("log_density")
        out = np.full(len(enc), -np.inf)
        objective = self._objective()
        rows = np.flatnonzero(enc.within(self.vocabulary()))
        with scoring_mode(self.module):
            for some, batch in enc.batches(rows, self.block, self.device):
                out[some] = objective.log_probabilities(self.module, batch)[:, 0].double().cpu().numpy()
        return out

    def predict(self, context: object) -> NDArray[np.float64]:
        """Return the probabilities of every next id after ``context``, (V,).

        Raises:
            TypeError, ValueError: ``context`` is not a 1-D array of at least one id of the vocabulary.
        """
        self._meet("predict")
        ids = self._require_ids(context, "context")
        with scoring_mode(self.module):
            return self._next_probabilities(ids, 1.0, None)

    def generate(
        self,
        prompt_ids: object,
        max_new_tokens: int,
        *,
        temperature: float = 1.0,
        top_k: int | None = None,
        seed: int | None = None,
    ) -> NDArray[np.int64]:
        """Return the prompt continued by ``max_new_tokens`` drawn tokens, int64.

        Args:
            prompt_ids: (t,) ids, at least one.
            temperature: divides the logits; 0 takes the likeliest token every time.
            top_k: draw only among the ``k`` likeliest.
            seed: fixes the draws.

        Raises:
            TypeError, ValueError: an argument that is not what it says above.
        """
        count = require_nonnegative_int(max_new_tokens, "max_new_tokens")
        heat = require_finite_float(temperature, "temperature", minimum=0.0)
        keep = None if top_k is None else require_positive_int(top_k, "top_k")
        rng = np.random.default_rng(self._shared_seed(seed))
        ids = self._require_ids(prompt_ids, "prompt_ids")
        out = np.concatenate((ids, np.zeros(count, np.int64)))
        with scoring_mode(self.module):
            for at in range(len(ids), len(out)):
                out[at] = draw(self._next_probabilities(out[:at], heat, keep), rng)
        return out

    def sampler(
        self, seed: int | np.random.Generator | None = None, *, context: object = None
    ) -> StreamingTransformerLeafSampler:
        """Return a sampler of ``(context, next_id)``.

        Args:
            context: the context of every draw. Without one, each draw has ``block`` ids that the module made up itself,
                from a first one drawn uniformly: the leaf models tokens given contexts, not contexts.

        Raises:
            ValueError: neither ``context`` nor ``module.block`` says how long contexts are.
        """
        return StreamingTransformerLeafSampler(self, seed, context)

    def estimator(self, pseudo_count: float | None = None) -> StreamingTransformerLeafEstimator:
        """Return an estimator that goes on from here: the module, how it is optimized, and the optimizer's state.

        Raises:
            ValueError: ``pseudo_count`` is given; a gradient has no prior statistic.
        """
        if pseudo_count is not None:
            raise ValueError(f"pseudo_count={pseudo_count!r} has no meaning for a gradient; use weight_decay")
        return StreamingTransformerLeafEstimator._of(self.module, self.device, self.options, self.state)

    def dist_to_encoder(self) -> StreamingTransformerLeafDataEncoder:
        return StreamingTransformerLeafDataEncoder()

    # ---- sharded and dense

    @property
    def is_sharded(self) -> bool:
        """Whether each rank holds a shard of the parameters."""
        return sharding_of(self.module) is not None

    def unshard(self) -> StreamingTransformerLeaf:
        """Return a leaf with the whole module, and the whole state of its training, on every rank; itself if dense."""
        if not self.is_sharded:
            return self
        self._meet("unshard")
        return StreamingTransformerLeaf(
            unsharded(self.module), self.device, options=self.options, state=self.state.dense()
        )

    def __getstate__(self) -> dict[str, Any]:
        return vars(self.unshard()).copy()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the dense module and the state of its training into the directory ``path``; a crash leaves the old one.

        ``leaf.json`` says what is there; tensors are in safetensors files that carry their own hash in their names.
        Other files in the directory are left alone.
        """
        if not self.is_sharded:
            leaf_files.write(path, self)
            return
        ranks = sharding_of(self.module).ranks  # type: ignore[union-attr]
        dense, error = self.unshard(), None
        if ranks.rank == 0:
            try:
                leaf_files.write(path, dense)
            except Exception as caught:
                error = caught
        ranks.agree("save", error)

    @classmethod
    def load(
        cls, path: str | os.PathLike[str], *, module: nn.Module | None = None, device: str | torch.device = "cpu"
    ) -> StreamingTransformerLeaf:
        """Read what :meth:`save` wrote.

        Args:
            module: a module of the same parameters, overwritten in place; needed unless the saved one's class has a
                ``config`` and a ``from_config`` and is imported.

        Raises:
            ValueError: anything in the directory that :meth:`save` cannot have written, or that does not fit
                ``module``; names it. Nothing is changed.
        """
        found, options, state = leaf_files.read(path, module)
        return cls(found, device, options=options, state=state)

    def parameters_to_dict(self) -> dict[str, Any]:
        """Return the module, its settings and its revision, not the moments of its optimizer; see :meth:`save`."""
        return leaf_files.to_dict(self.unshard())

    @classmethod
    def parameters_from_dict(cls, payload: dict[str, Any]) -> StreamingTransformerLeaf:
        module, options, state = leaf_files.from_dict(payload)
        return cls(module, options=options, state=state)

    def trainable_parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters that training moves, by name."""
        return {name: p for name, p in named_parameters(self.module).items() if p.requires_grad}

    # ---- helpers

    def _objective(self) -> NextToken:
        return NextToken(self.module, "last")

    def _next_probabilities(self, ids: NDArray[np.int64], temperature: float, top_k: int | None) -> NDArray[np.float64]:
        seen = ids if self.block is None else ids[-self.block :]
        logits = self._objective().logits(self.module, torch.from_numpy(seen[None].copy()).to(self.device))
        return next_probabilities(logits[0, 0].double().cpu().numpy(), temperature, top_k)

    def _require_ids(self, context: object, name: str) -> NDArray[np.int64]:
        ids = as_context(context, name)
        bad = np.flatnonzero((ids < 0) | (ids >= self.vocabulary()))
        if len(bad):
            raise ValueError(f"{name}[{bad[0]}]={ids[bad[0]]} must be in [0, {self.vocabulary()}), the vocabulary")
        return ids

    def _meet(self, what: str) -> None:
        """Wait for the other ranks if they hold shards of this module."""
        sharding = sharding_of(self.module)
        if sharding is not None:
            sharding.ranks.meet(f"{what} on a sharded leaf")

    def _shared_seed(self, seed: int | None) -> int:
        """Return the seed, drawn by rank 0 for all that hold shards if there is none."""
        fresh = int(np.random.SeedSequence().generate_state(1)[0])
        own = fresh if seed is None else require_nonnegative_int(seed, "seed")
        sharding = sharding_of(self.module)
        return own if sharding is None else int(sharding.ranks.exchange("generate on a sharded leaf", str(own))[0])


class StreamingTransformerLeafEstimator(ParameterEstimator):
    """A module and how it is optimized; what a training handle or an M-step moves, in place.

    Args:
        module: maps (B, T) int64 ids to (B, V) or (B, T, V) logits; its ``vocab``, ``block`` and ``blocks`` are used
            where it has them.
        lr: peak learning rate.
        device: where it runs; ``"cuda"`` is this rank's GPU under torchrun.
        optimizer, betas, weight_decay, momentum, warmup_steps, schedule, total_steps, min_lr: see
            :class:`~mixle.training.OptimizerOptions`.

    Raises:
        TypeError, ValueError: an argument that is not what it says above.
    """

    trains_in_place = True

    def __init__(
        self,
        module: nn.Module,
        lr: float = 3e-3,
        device: str | torch.device = "cpu",
        *,
        optimizer: Kind = "adamw",
        betas: tuple[float, float] | None = None,
        weight_decay: float | None = None,
        momentum: float | None = None,
        warmup_steps: int = 0,
        schedule: LearningRateSchedule = "constant",
        total_steps: int | None = None,
        min_lr: float = 0.0,
    ) -> None:
        options = OptimizerOptions(
            lr, optimizer, betas, weight_decay, momentum, warmup_steps, schedule, total_steps, min_lr
        )
        self._settle(require_module(module), resolve_device(device), options, None)

    @classmethod
    def _of(
        cls, module: nn.Module, device: torch.device, options: OptimizerOptions, state: TrainingState
    ) -> StreamingTransformerLeafEstimator:
        estimator = cls.__new__(cls)
        estimator._settle(module, device, options, state)
        return estimator

    def _settle(
        self, module: nn.Module, device: torch.device, options: OptimizerOptions, state: TrainingState | None
    ) -> None:
        self.module, self.device, self.options, self.state = module, device, options, state

    @property
    def lr(self) -> float:
        """The peak learning rate."""
        return self.options.lr

    def leaf(self, state: TrainingState | None = None) -> StreamingTransformerLeaf:
        """Return the module as a distribution, as it is now; ``state`` instead of the estimator's own."""
        return StreamingTransformerLeaf(self.module, self.device, options=self.options, state=state or self.state)

    def accumulator_factory(self) -> StreamingTransformerLeafAccumulatorFactory:
        return StreamingTransformerLeafAccumulatorFactory(self.leaf())

    def estimate(
        self, nobs: float | None, suff_stat: NextTokenStatistic, previous: ProbabilityDistribution | None = None
    ) -> StreamingTransformerLeaf:
        """Take one optimizer step along the mean gradient and return the module as a leaf.

        The optimizer's moments stay with the estimator; the module is ``previous``'s where it is given. A statistic of
        weight zero leaves it as it is.

        Raises:
            ValueError: the gradients were not taken at the module's present revision.
        """
        before = previous if isinstance(previous, StreamingTransformerLeaf) else self.leaf()
        if self.state is None:
            self.state = before.state
        stat = NextTokenStatistic(*suff_stat)
        if stat.revision is not None and stat.revision != before.revision:
            raise ValueError(
                f"the gradients were taken at revision {stat.revision} of the module, which is now at {before.revision}"
            )
        if stat.weight > 0:
            move_along(before, self.options, self.state, stat)
        return StreamingTransformerLeaf(before.module, before.device, options=self.options, state=self.state)


def require_module(module: object) -> nn.Module:
    """Return ``module`` if it is one of torch's."""
    if not isinstance(module, nn.Module):
        raise TypeError(f"module must be a torch.nn.Module, not {type(module).__name__}")
    return module
