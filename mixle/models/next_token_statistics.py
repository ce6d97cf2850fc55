"""Next-token observations as a statistic: the weighted gradient of their loss, at one revision of the module.

An observation is ``(context, next_id)``. Gradients of one revision add up like any sufficient statistic, so that a
transformer nests in a mixture and folds across processes; an M-step is one optimizer step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray

from mixle.stats.contract import AccumulatorFactory, DataEncoder, ProbabilityDistribution, StatisticAccumulator
from mixle.stats.encoding import Encoding, LeafEncoding
from mixle.training.modes import scoring_mode
from mixle.training.next_token import NextToken, TokenTensors
from mixle.training.optimizer import OptimizerOptions
from mixle.training.state import StepRecord, TrainingState
from mixle.training.wrap import named_parameters
from mixle.utils.exact import require_nonnegative_int

if TYPE_CHECKING:
    from mixle.models.streaming_transformer_leaf import StreamingTransformerLeaf

# Tokens of one forward pass: enough to keep the matrix products busy, few enough for their activations to stay small.
TOKENS_PER_PASS = 1 << 14


class NextTokenEncoding(Encoding):
    """Contexts of any length end to end, and the token after each.

    Args:
        ids: all contexts' ids, int64.
        edges: (n + 1,) int64; context i is ``ids[edges[i] : edges[i + 1]]``.
        next_ids: (n,) int64.
    """

    def __init__(self, ids: NDArray[np.int64], edges: NDArray[np.int64], next_ids: NDArray[np.int64]) -> None:
        self.ids, self.edges, self.next_ids = ids, edges, next_ids

    def __len__(self) -> int:
        return len(self.next_ids)

    def rows(self, start: int, stop: int) -> NextTokenEncoding:
        return NextTokenEncoding(self.ids, self.edges[start : stop + 1], self.next_ids[start:stop])

    def map_leaves(self, change: Callable[[LeafEncoding], LeafEncoding]) -> NextTokenEncoding:
        return self

    @property
    def nbytes(self) -> int:
        return 8 * int(self.edges[-1] - self.edges[0]) + self.edges.nbytes + self.next_ids.nbytes

    def impossible_rows(self) -> None:
        """Return None: which ids are possible is known to the module, not to the encoding."""
        return None

    def within(self, vocab: int) -> NDArray[np.bool_]:
        """Tell for each row whether all its ids are in ``[0, vocab)``, (n,)."""
        ids = self.ids[self.edges[0] : self.edges[-1]]
        bad_before = np.concatenate(([0], np.cumsum((ids < 0) | (ids >= vocab))))[self.edges - self.edges[0]]
        return (np.diff(bad_before) == 0) & (self.next_ids >= 0) & (self.next_ids < vocab)

    def batches(
        self, rows: NDArray[np.intp], block: int | None, device: torch.device
    ) -> Iterator[tuple[NDArray[np.intp], TokenTensors]]:
        """Yield ``rows`` in batches of equally long contexts, of which the module sees the last ``block`` ids."""
        lengths = np.diff(self.edges)[rows]
        seen = lengths if block is None else np.minimum(lengths, block)
        for length in np.unique(seen):
            alike = rows[seen == length]
            per_pass = max(1, TOKENS_PER_PASS // int(length))
            for first in range(0, len(alike), per_pass):
                some = alike[first : first + per_pass]
                contexts = self.ids[(self.edges[some + 1] - length)[:, None] + np.arange(length)]
                targets = torch.from_numpy(self.next_ids[some][:, None])
                yield some, TokenTensors(torch.from_numpy(contexts).to(device), targets.to(device))


class StreamingTransformerLeafDataEncoder(DataEncoder):
    """Encodes ``(context, next_id)`` pairs; contexts are 1-D, of at least one id, each of its own length."""

    def seq_encode(self, xs: Sequence[Any]) -> NextTokenEncoding:
        contexts, next_ids = [], []
        for index, x in enumerate(xs):
            if not isinstance(x, (tuple, list)) or len(x) != 2:
                raise TypeError(f"observation {index} must be a pair (context, next_id), got {x!r:.80}")
            contexts.append(as_context(x[0], f"the context of observation {index}"))
            next_ids.append(require_nonnegative_int(x[1], f"next_id of observation {index}"))
        edges = np.concatenate(([0], np.cumsum([len(c) for c in contexts]))).astype(np.int64)
        ids = np.concatenate(contexts) if contexts else np.zeros(0, np.int64)
        return NextTokenEncoding(ids, edges, np.array(next_ids, dtype=np.int64))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StreamingTransformerLeafDataEncoder)

    __hash__ = DataEncoder.__hash__


def as_context(context: object, name: str) -> NDArray[np.int64]:
    """Return a context as (t,) int64.

    Raises:
        TypeError, ValueError: not a 1-D array of integers, or an empty one; names it.
    """
    array = np.asarray(context)
    if array.dtype.kind not in "iu":
        raise TypeError(f"{name} must be a 1-D array of integers, got {context!r:.80}")
    if array.ndim != 1 or not array.size:
        raise ValueError(f"{name} must be 1-D with at least one id, not of shape {array.shape}")
    return array.astype(np.int64)


class NextTokenStatistic(NamedTuple):
    """Sums over weighted observations; every part is additive.

    Attributes:
        weight: of the observations.
        loss: weighted negative log-likelihood, in nats.
        pins: the number of updates, and the sums of their revision and of its square: whole numbers, which prove by
            Cauchy and Schwarz whether all revisions were the same.
        gradients: of ``loss``, by parameter name, in the parameters' own precision.
    """

    weight: float
    loss: float
    pins: NDArray[np.float64]
    gradients: dict[str, NDArray[Any]]

    @property
    def revision(self) -> int | None:
        """The revision of the module at which all gradients were taken, None without any.

        Raises:
            ValueError: they were taken at different revisions.
        """
        updates, total, squares = self.pins
        if updates == 0:
            return None
        if total * total != updates * squares:
            raise ValueError("gradients were taken at different revisions of the module and do not add up")
        return int(total / updates)


class StreamingTransformerLeafAccumulator(StatisticAccumulator):
    """Gathers the weighted gradient of a leaf's loss.

    The module runs in eval mode, so that the statistic is a function of the data alone.
    """

    def __init__(self, leaf: StreamingTransformerLeaf) -> None:
        self._leaf = leaf
        gradients = {name: _as_array(torch.zeros_like(p)) for name, p in leaf.trainable_parameters().items()}
        self._statistic = NextTokenStatistic(0.0, 0.0, np.zeros(3), gradients)

    def seq_update(
        self, enc: NextTokenEncoding, weights: NDArray[np.float64], estimate: ProbabilityDistribution | None
    ) -> None:
        leaf: StreamingTransformerLeaf = self._leaf if estimate is None else estimate  # type: ignore[assignment]
        held = self._statistic.revision
        if held is not None and held != leaf.revision:
            raise ValueError(
                f"the module has moved from revision {held} to {leaf.revision} since the accumulator's first update"
            )
        loss, gradients = weighted_gradient(leaf, enc, weights)
        pins = float(leaf.revision) ** np.arange(3.0)
        self.combine(NextTokenStatistic(float(weights.sum()), loss, pins, gradients))

    def combine(self, suff_stat: NextTokenStatistic) -> Self:
        held, other = self._statistic, suff_stat
        if held.gradients.keys() != other.gradients.keys():
            odd = sorted(held.gradients.keys() ^ other.gradients.keys())
            raise ValueError(f"gradients of different modules do not add up; only one of them has {odd[0]}")
        gradients = {name: held.gradients[name] + other.gradients[name] for name in held.gradients}
        self._statistic = NextTokenStatistic(
            held.weight + other.weight, held.loss + other.loss, held.pins + other.pins, gradients
        )
        return self

    def value(self) -> NextTokenStatistic:
        return self._statistic

    def from_value(self, value: NextTokenStatistic) -> Self:
        self._statistic = NextTokenStatistic(*value)
        return self

    def acc_to_encoder(self) -> StreamingTransformerLeafDataEncoder:
        return StreamingTransformerLeafDataEncoder()


class StreamingTransformerLeafAccumulatorFactory(AccumulatorFactory):
    """Makes empty accumulators; as large as the module, at which the gradients of an initialization are taken."""

    def __init__(self, leaf: StreamingTransformerLeaf) -> None:
        self._leaf = leaf

    def make(self) -> StreamingTransformerLeafAccumulator:
        return StreamingTransformerLeafAccumulator(self._leaf)


def weighted_gradient(
    leaf: StreamingTransformerLeaf, enc: NextTokenEncoding, weights: NDArray[np.float64]
) -> tuple[float, dict[str, NDArray[Any]]]:
    """Return the weighted negative log-likelihood of encoded observations, and its gradient by parameter name.

    Raises:
        ValueError: an observation of positive weight is impossible, or the module is sharded.
    """
    if leaf.is_sharded:
        raise ValueError("a sharded leaf has no whole gradient to sum; use leaf.unshard()")
    vocab = leaf.vocabulary()
    lost = np.flatnonzero(~enc.within(vocab) & (weights > 0))
    if len(lost):
        raise ValueError(
            f"{len(lost)} observations have ids outside the vocabulary of {vocab}, the first in row {lost[0]} of its "
            f"chunk, whose next_id is {enc.next_ids[lost[0]]}"
        )
    parameters = leaf.trainable_parameters()
    sums = [torch.zeros_like(p) for p in parameters.values()]
    loss, objective = 0.0, NextToken(leaf.module, "last")
    with scoring_mode(leaf.module), torch.enable_grad():
        for some, batch in enc.batches(np.flatnonzero(weights > 0), leaf.block, leaf.device):
            log_probabilities = objective.log_probabilities(leaf.module, batch)[:, 0]
            total = -(torch.from_numpy(weights[some]).to(log_probabilities) * log_probabilities).sum()
            loss += float(total.detach())
            found = torch.autograd.grad(total, list(parameters.values()), allow_unused=True)
            for held, gradient in zip(sums, found, strict=True):
                if gradient is not None:
                    held += gradient
    return loss, dict(zip(parameters, map(_as_array, sums), strict=True))


def move_along(
    leaf: StreamingTransformerLeaf, options: OptimizerOptions, state: TrainingState, statistic: NextTokenStatistic
) -> None:
    """Take one optimizer step on the leaf's module along the mean gradient, and move ``state`` on."""
    parameters = leaf.trainable_parameters()
    frozen = named_parameters(leaf.module).keys() - parameters.keys()
    optimizer = state.optimizer.bind(options, parameters, frozen=frozen)
    rate = options.learning_rate(state.step)
    squares = 0.0
    for name, p in parameters.items():
        mean = statistic.gradients[name] / statistic.weight
        squares += float(np.vdot(mean, mean))
        p.grad = torch.from_numpy(np.ascontiguousarray(mean)).to(p)
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.step()
    optimizer.zero_grad()
    state.step += 1
    state.revision = leaf.revision + 1
    record = StepRecord(
        statistic.loss / statistic.weight,
        step=state.step,
        epoch=state.epoch,
        learning_rate=rate,
        grad_norm=squares**0.5,
        targets=round(statistic.weight),
        seconds=None,
    )
    state.history.append(record)


def _as_array(tensor: torch.Tensor) -> NDArray[Any]:
    """Return a NumPy copy; of 16-bit floats in float32, since NumPy has no bfloat16."""
    narrow = tensor.dtype in (torch.bfloat16, torch.float16)
    return (tensor.float() if narrow else tensor).cpu().numpy()
