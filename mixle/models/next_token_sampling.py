"""Draw tokens from logits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from mixle.models.next_token_statistics import as_context
from mixle.stats.contract import Sampler
from mixle.utils.exact import require_nonnegative_int

if TYPE_CHECKING:
    from mixle.models.streaming_transformer_leaf import StreamingTransformerLeaf


def next_probabilities(logits: NDArray[np.float64], temperature: float, top_k: int | None) -> NDArray[np.float64]:
    """Return the probabilities to draw the next token with, (V,).

    Args:
        logits: (V,).
        temperature: divides them; at 0 the likeliest token has it all.
        top_k: how many tokens have a share, None for all.
    """
    if temperature == 0:
        return (np.arange(len(logits)) == logits.argmax()).astype(np.float64)
    if top_k is not None and top_k < len(logits):
        logits = np.where(logits >= np.partition(logits, -top_k)[-top_k], logits, -np.inf)
    odds: NDArray[np.float64] = np.exp((logits - logits.max()) / temperature)
    return odds / odds.sum()


def draw(probabilities: NDArray[np.float64], rng: np.random.Generator) -> int:
    """Return an index drawn with ``probabilities``."""
    edges = np.cumsum(probabilities)
    return min(int(np.searchsorted(edges, rng.random() * edges[-1], side="right")), len(edges) - 1)


class StreamingTransformerLeafSampler(Sampler):
    """Draws ``(context, next_id)`` pairs; see ``StreamingTransformerLeaf.sampler``."""

    def __init__(self, leaf: StreamingTransformerLeaf, seed: int | np.random.Generator | None, context: object) -> None:
        if context is None and leaf.block is None:
            raise ValueError(f"{type(leaf.module).__name__} has no block to say how long contexts are; give a context")
        self._leaf, self._rng = leaf, np.random.default_rng(seed)
        self._context = None if context is None else as_context(context, "context")

    def sample(self, size: int | None = None) -> Any:
        if size is None:
            return self._one()
        return [self._one() for _ in range(require_nonnegative_int(size, "size"))]

    def _one(self) -> tuple[NDArray[np.int64], int]:
        context, new = self._context, 1
        if context is None:
            context, new = self._rng.integers(self._leaf.vocabulary(), size=1), self._leaf.block or 1
        drawn = self._leaf.generate(context, new, seed=int(self._rng.integers(1 << 62)))
        return drawn[:-1], int(drawn[-1])
