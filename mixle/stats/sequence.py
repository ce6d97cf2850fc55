"""The dispatch: five verbs over encoded data, wherever it lives.

``enc_data`` is the list that :func:`seq_encode` returns, or any object with the method that a verb asks for
(``pysp_seq_estimate``, ``pysp_seq_initialize``, ``pysp_seq_log_density_sum``, ``pysp_seq_log_density``). The verbs ask
what an object can do, never what it is. The steps that handles share, :func:`accumulate`,
:func:`accumulate_initialization` and :func:`finish`, are here too.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from mixle.stats.contract import DataEncoder, ParameterEstimator, ProbabilityDistribution, StatisticAccumulator, m_step
from mixle.stats.encoding import encoding_frames, join_all, reframe_encoding
from mixle.stats.row_draws import RowDraws, draw_seed
from mixle.utils.exact import require_positive_int
from mixle.utils.vector import validate_initialization_probability

__all__ = [
    "EncodedChunks",
    "accumulate",
    "accumulate_initialization",
    "finish",
    "initialization_weights",
    "resolve_encoder",
    "seq_encode",
    "seq_estimate",
    "seq_initialize",
    "seq_log_density",
    "seq_log_density_sum",
]

EncodedChunks = list[tuple[int, Any]]

_UNDRAWN = 1e-3


def resolve_encoder(
    encoder: DataEncoder | None = None,
    estimator: ParameterEstimator | None = None,
    model: ProbabilityDistribution | None = None,
) -> DataEncoder:
    """Return the encoder that is given, or the one that an estimator or a model reads.

    Raises:
        ValueError: none of the three is given, or more than one.
    """
    given = [name for name, x in (("encoder", encoder), ("estimator", estimator), ("model", model)) if x is not None]
    if len(given) != 1:
        raise ValueError(
            f"give exactly one of encoder, estimator and model to say how to encode; got {given or 'none'}"
        )
    if encoder is not None:
        return encoder
    if model is not None:
        return model.dist_to_encoder()
    assert estimator is not None
    return estimator.accumulator_factory().make().acc_to_encoder()


def seq_encode(
    data: Sequence[Any],
    encoder: DataEncoder | None = None,
    estimator: ParameterEstimator | None = None,
    model: ProbabilityDistribution | None = None,
    num_chunks: int = 1,
) -> EncodedChunks:
    """Encode observations once, in contiguous chunks that share one frame.

    Args:
        data: observations, in any sequence.
        encoder, estimator, model: exactly one of them, to say how to encode.
        num_chunks: how many chunks; of nearly equal sizes.

    Returns:
        A list of ``(n, enc)``, one per chunk that has rows (at least one).

    Raises:
        TypeError, ValueError: an observation is refused by the encoder, which names its index and value.
    """
    encode = resolve_encoder(encoder, estimator, model)
    chunks = require_positive_int(num_chunks, "num_chunks")
    n = len(data)
    bounds = [n * i // chunks for i in range(chunks + 1)]
    spans = [(a, b) for a, b in pairwise(bounds) if b > a] or [(0, 0)]
    encoded = [(b - a, encode.seq_encode(data[a:b])) for a, b in spans]
    frames = join_all([encoding_frames(enc) for _, enc in encoded])
    return [(count, reframe_encoding(enc, frames)) for count, enc in encoded]


def accumulate(
    chunks: EncodedChunks, estimator: ParameterEstimator, previous: ProbabilityDistribution | None
) -> tuple[float, StatisticAccumulator]:
    """Run the E-step over chunks; return the number of observations and the accumulator."""
    accumulator = estimator.accumulator_factory().make()
    for count, enc in chunks:
        accumulator.seq_update(enc, np.ones(count), previous)
    return float(sum(count for count, _ in chunks)), accumulator


def initialization_weights(draws: RowDraws, p: float) -> np.ndarray:
    """Return the weights of rows in a first model: one for a random share ``p`` of them, a thousandth for the others.

    A category that only rows without weight hold would have probability zero, which EM never takes back.
    """
    return np.where(draws.uniform(1)[0] < p, 1.0, _UNDRAWN)


def accumulate_initialization(
    chunks: EncodedChunks, estimator: ParameterEstimator, seed: int, p: float, first_row: int = 0
) -> tuple[float, StatisticAccumulator]:
    """Gather the statistic of a first model; return the total weight and the accumulator.

    The rows have :func:`initialization_weights`; each global row is drawn by its own number. ``first_row`` is the
    global index of the first row of ``chunks``.
    """
    accumulator = estimator.accumulator_factory().make()
    nobs = 0.0
    for count, enc in chunks:
        draws = RowDraws.for_rows(seed, first_row, count)
        weights = initialization_weights(draws, p)
        accumulator.seq_initialize(enc, weights, draws.stream(0))
        nobs += float(weights.sum())
        first_row += count
    return nobs, accumulator


def finish(
    estimator: ParameterEstimator,
    nobs: float,
    accumulator: StatisticAccumulator,
    previous: ProbabilityDistribution | None,
) -> Any:
    """Tie the parts that share keys, then run the M-step.

    Raises:
        ValueError: there is no observation.
    """
    if not nobs > 0:
        raise ValueError("the data is empty: there is no observation to estimate from")
    tied: dict[Hashable, Any] = {}
    accumulator.key_merge(tied)
    accumulator.key_replace(tied)
    return m_step(estimator, nobs, accumulator.value(), previous)


def _verb(enc_data: Any, method: str) -> Any:
    """Return a handle's method for a verb, or None for the list that seq_encode returns."""
    if hasattr(enc_data, method):
        return getattr(enc_data, method)
    if isinstance(enc_data, list) and all(isinstance(c, tuple) and len(c) == 2 for c in enc_data):
        return None
    raise TypeError(
        f"{type(enc_data).__name__} has no {method}: enc_data must be the list that seq_encode returns, "
        f"or a handle that offers {method}"
    )


def seq_initialize(enc_data: Any, estimator: ParameterEstimator, rng: Any, p: float = 0.1) -> Any:
    """Return a first model, from a random share of the observations.

    Args:
        enc_data: encoded data, or a handle.
        rng: an int seed, a NumPy ``Generator`` or a ``RandomState`` (one draw is taken).
        p: the probability with which each observation counts in full, ``0 < p <= 1``; the others count a little.
    """
    share = validate_initialization_probability(p)
    handle = _verb(enc_data, "pysp_seq_initialize")
    if handle is not None:
        return handle(estimator, rng, share)
    return finish(estimator, *accumulate_initialization(enc_data, estimator, draw_seed(rng), share), None)


def seq_estimate(enc_data: Any, estimator: ParameterEstimator, prev_estimate: Any = None) -> Any:
    """Fit: one EM step for statistics, the epochs of a training handle for gradients.

    Args:
        enc_data: encoded data, or a handle.
        prev_estimate: the current model, which latent families and continued training need.
    """
    handle = _verb(enc_data, "pysp_seq_estimate")
    if handle is not None:
        return handle(estimator, prev_estimate)
    return finish(estimator, *accumulate(enc_data, estimator, prev_estimate), prev_estimate)


def seq_log_density(enc_data: Any, model: ProbabilityDistribution) -> list[np.ndarray]:
    """Return the log-densities of the observations, one ``(n,)`` array per chunk."""
    handle = _verb(enc_data, "pysp_seq_log_density")
    if handle is not None:
        return handle(model)
    return [model.seq_log_density(enc) for _, enc in enc_data]


def seq_log_density_sum(enc_data: Any, model: ProbabilityDistribution) -> tuple[float, float]:
    """Return the number of observations and the sum of their log-densities, over all shards."""
    handle = _verb(enc_data, "pysp_seq_log_density_sum")
    if handle is not None:
        return handle(model)
    total = sum(float(np.sum(model.seq_log_density(enc))) for _, enc in enc_data)
    return float(sum(count for count, _ in enc_data)), total
