"""Show what the teacher's processes log."""

from __future__ import annotations

import logging

from mixle.utils.exact import require_choice

_LEVELS = ("CRITICAL", "ERROR", "WARNING", "INFO", "DEBUG")
_FORMAT = "%(asctime)s %(process)d %(name)s %(levelname)s: %(message)s"


def setup_logging(level: str | int = "INFO") -> None:
    """Log mixle's messages from ``level`` on, to stderr unless the program has handlers of its own.

    Args:
        level: a name of :mod:`logging`'s levels, in either case, or one of their numbers.

    Raises:
        TypeError, ValueError: ``level`` is neither.
    """
    if isinstance(level, str):
        name = require_choice(level.upper(), "level", _LEVELS)
        level = getattr(logging, name)
    elif isinstance(level, bool) or not isinstance(level, int):
        raise TypeError(f"level={level!r} must be the name or number of a logging level, not {type(level).__name__}")
    logger = logging.getLogger("mixle")
    if not logger.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter(_FORMAT))
        logger.addHandler(handler)
    logger.setLevel(level)
