"""Argument checks, and the data handles in :mod:`mixle.utils.parallel`."""
