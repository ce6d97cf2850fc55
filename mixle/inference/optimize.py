"""EM to convergence, with restarts: loops over the dispatch that know nothing of where the data lives."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np

from mixle.inference.history import FitHistory, Iteration
from mixle.inference.progress import ProgressLine
from mixle.stats.contract import ParameterEstimator, ProbabilityDistribution
from mixle.stats.sequence import seq_encode, seq_estimate, seq_initialize, seq_log_density_sum
from mixle.utils.exact import require_exact_bool, require_finite_float, require_nonnegative_int, require_positive_int
from mixle.utils.vector import validate_initialization_probability

__all__ = ["best_of", "optimize"]


def optimize(
    data: Sequence[Any] | None = None,
    estimator: ParameterEstimator | None = None,
    *,
    max_its: int = 100,
    delta: float | None = 1e-6,
    init_estimator: ParameterEstimator | None = None,
    prev_estimate: ProbabilityDistribution | None = None,
    rng: Any = None,
    init_p: float = 0.1,
    vdata: Sequence[Any] | None = None,
    enc_data: Any = None,
    progress: bool = True,
) -> Any:
    """Fit until the mean log-density gains less than ``delta`` in an iteration.

    Args:
        data: observations; or give ``enc_data``.
        estimator: what to fit.
        max_its: the largest number of iterations.
        delta: the least gain, in nats per observation, that is worth another iteration; None runs all ``max_its``.
        init_estimator: the estimator of the starting model, if not ``estimator``; it must encode alike.
        prev_estimate: the model to start from, instead of a random one.
        rng: an int seed, a NumPy ``Generator`` or ``RandomState`` for the starting model; fresh entropy if None.
        init_p: the share of observations that the starting model is made from.
        vdata: validation observations: convergence is judged, and the returned model chosen, by their log-density. Of
            an estimator that trains in place, the last model is returned: the earlier ones are gone.
        enc_data: encoded data or a handle, instead of ``data``.
        progress: show a progress line where stderr is a terminal.

    Returns:
        The model; its attribute ``fit_history`` is the :class:`~mixle.inference.history.FitHistory`.

    Raises:
        TypeError, ValueError: an argument is wrong, or the data is refused.
        FloatingPointError: the log-density became NaN.
    """
    estimator = _require_estimator(estimator)
    steps = require_nonnegative_int(max_its, "max_its")
    gain_wanted = None if delta is None else require_finite_float(delta, "delta", minimum=0.0)
    shown = require_exact_bool(progress, "progress")
    share = validate_initialization_probability(init_p)
    enc = _encoded(data, enc_data, estimator)
    validation = None if vdata is None else _require_rows(seq_encode(vdata, estimator=estimator))
    started = time.perf_counter()
    model = prev_estimate
    if model is None:
        model = seq_initialize(enc, init_estimator or estimator, np.random.default_rng() if rng is None else rng, share)

    history = FitHistory([_score(enc, validation, model, started, 0)])
    best: Any = model
    line = ProgressLine(steps, "EM", shown=shown)
    try:
        for step in range(1, steps + 1):
            model = seq_estimate(enc, estimator, model)
            history.iterations.append(_score(enc, validation, model, started, step))
            gain = _criterion(history, -1) - _criterion(history, -2)
            keeps = validation is None or getattr(estimator, "trains_in_place", False)
            if keeps or _criterion(history, -1) > _criterion(history, history.best):
                best, history.best = model, step
            line.update(step, f"log-density {history.iterations[-1].log_density:.6f} ({gain:+.2g})")
            # A start that violates a tie or a prior may score higher than the first model that keeps it.
            if gain_wanted is not None and (gain < gain_wanted if step > 1 else 0 <= gain < gain_wanted):
                history.converged = True
                break
    finally:
        line.close()
    best.fit_history = history
    if history.iterations[history.best].log_density == -math.inf:
        warnings.warn(
            "the fit ended with observations that are impossible under the model, so its log-density is -inf; start "
            "from another model, or give the estimators a pseudo_count",
            RuntimeWarning,
            stacklevel=2,
        )
    return best


def best_of(
    data: Sequence[Any] | None = None,
    estimator: ParameterEstimator | None = None,
    *,
    trials: int = 10,
    max_its: int = 100,
    delta: float | None = 1e-6,
    init_estimator: ParameterEstimator | None = None,
    rng: Any = None,
    init_p: float = 0.1,
    vdata: Sequence[Any] | None = None,
    enc_data: Any = None,
    progress: bool = True,
) -> Any:
    """Run :func:`optimize` from ``trials`` random starts and return the model with the highest log-density.

    With ``vdata``, the highest log-density of the validation data. The arguments are those of :func:`optimize`; the
    model's ``fit_history.trials`` holds the course of every trial.

    Raises:
        TypeError: the estimator trains in place, so that every trial would go on from the last. Otherwise as
            :func:`optimize`.
    """
    estimator = _require_estimator(estimator)
    if getattr(estimator, "trains_in_place", False):
        raise TypeError(f"estimator={type(estimator).__name__} trains in place and cannot be restarted; use optimize")
    count = require_positive_int(trials, "trials")
    enc = _encoded(data, enc_data, estimator)
    generator = rng if isinstance(rng, (np.random.Generator, np.random.RandomState)) else np.random.default_rng(rng)
    models = [
        optimize(
            None,
            estimator,
            max_its=max_its,
            delta=delta,
            init_estimator=init_estimator,
            rng=generator,
            init_p=init_p,
            vdata=vdata,
            enc_data=enc,
            progress=progress,
        )
        for _ in range(count)
    ]
    best = max(models, key=lambda model: model.fit_history.score)
    best.fit_history.trials = [model.fit_history for model in models]
    return best


def _require_estimator(estimator: ParameterEstimator | None) -> ParameterEstimator:
    if estimator is None or isinstance(estimator, type) or not hasattr(estimator, "accumulator_factory"):
        raise TypeError(f"estimator={estimator!r:.60} must be an estimator, such as GaussianEstimator()")
    return estimator


def _require_rows(chunks: Any) -> Any:
    if not any(count for count, _ in chunks):
        raise ValueError("vdata is empty: give at least one observation, or leave it out")
    return chunks


def _encoded(data: Sequence[Any] | None, enc_data: Any, estimator: ParameterEstimator) -> Any:
    if (data is None) == (enc_data is None):
        raise ValueError("give either data or enc_data" + ("" if data is None else ", not both"))
    return seq_encode(data, estimator=estimator) if data is not None else enc_data


def _score(enc: Any, validation: Any, model: Any, started: float, step: int) -> Iteration:
    count, total = seq_log_density_sum(enc, model)
    if not count > 0:
        raise ValueError("the data is empty: there is no observation to estimate from")
    held_out = None
    if validation is not None:
        held_count, held_total = seq_log_density_sum(validation, model)
        held_out = held_total / held_count
    mean = total / count
    if math.isnan(mean) or (held_out is not None and math.isnan(held_out)):
        raise FloatingPointError(f"the log-density is NaN at iteration {step} ({count:g} observations)")
    return Iteration(mean, held_out, time.perf_counter() - started)


def _criterion(history: FitHistory, index: int) -> float:
    iteration = history.iterations[index]
    value = iteration.log_density if iteration.validation is None else iteration.validation
    # Two impossible models are no better than one another: -inf - -inf would be NaN, and never below delta.
    return max(value, -1e300)
