"""Loops over the dispatch: optimize, best_of."""
