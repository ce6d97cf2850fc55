"""Distributions, estimators and combinators; numpy and scipy only."""
