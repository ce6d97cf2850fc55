"""What an optimization did, iteration by iteration."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["FitHistory", "Iteration"]


@dataclass(frozen=True)
class Iteration:
    """One model of an optimization; the first is the one it started from.

    Attributes:
        log_density: mean log-density of the data under it, in nats per observation.
        validation: the same for the validation data, None without any.
        seconds: wall time from the start of the optimization.
    """

    log_density: float
    validation: float | None
    seconds: float


@dataclass(repr=False)
class FitHistory:
    """The course of one optimization.

    Attributes:
        iterations: the starting model, then one entry per EM step.
        converged: whether the last gain was below ``delta``.
        best: the index in ``iterations`` of the model that was returned.
        trials: the courses of all restarts, for :func:`~mixle.inference.best_of`; else empty.
    """

    iterations: list[Iteration] = field(default_factory=list)
    converged: bool = False
    best: int = 0
    trials: list[FitHistory] = field(default_factory=list)

    def __repr__(self) -> str:
        if not self.iterations:
            return "FitHistory(no iterations)"
        first, last = self.iterations[0].log_density, self.iterations[self.best].log_density
        how = "converged" if self.converged else "not converged"
        trials = f", best of {len(self.trials)} trials" if self.trials else ""
        steps, seconds = len(self.iterations) - 1, self.iterations[-1].seconds
        return f"FitHistory({steps} iterations, {how}, log-density {first:.6g} -> {last:.6g}, {seconds:.2f} s{trials})"

    @property
    def log_density(self) -> list[float]:
        """The mean log-density per iteration."""
        return [i.log_density for i in self.iterations]

    @property
    def score(self) -> float:
        """What the returned model is judged by, its validation log-density if there is one, else its log-density."""
        chosen = self.iterations[self.best]
        return chosen.log_density if chosen.validation is None else chosen.validation
