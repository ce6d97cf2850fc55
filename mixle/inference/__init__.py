"""Loops over the dispatch: :func:`optimize` runs EM to convergence, :func:`best_of` restarts it."""

from mixle.inference.history import FitHistory, Iteration
from mixle.inference.optimize import best_of, optimize

__all__ = ["FitHistory", "Iteration", "best_of", "optimize"]
