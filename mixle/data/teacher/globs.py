"""Patterns of model ids: ``*`` is any text, ``?`` any one character, and everything else is itself.

Between two stars the leftmost match is always as good as any other, so that no pattern can make matching blow up.
"""

from __future__ import annotations

import re
from collections.abc import Sequence


class Globs:
    """Match model ids against any of ``patterns``."""

    def __init__(self, patterns: Sequence[str]) -> None:
        self.patterns = tuple(patterns)
        self._compiled = [[_part(part) for part in pattern.split("*")] for pattern in self.patterns]

    def match(self, model_id: str) -> bool:
        """Tell whether one of the patterns is the whole of ``model_id``."""
        return any(_matches(parts, model_id) for parts in self._compiled)


def _part(text: str) -> tuple[re.Pattern[str], int]:
    return re.compile("".join("." if letter == "?" else re.escape(letter) for letter in text), re.DOTALL), len(text)


def _matches(parts: list[tuple[re.Pattern[str], int]], model_id: str) -> bool:
    (head, _), (tail, tail_length) = parts[0], parts[-1]
    if len(parts) == 1:
        return head.fullmatch(model_id) is not None
    found = head.match(model_id)
    if found is None:
        return False
    at, end = found.end(), len(model_id) - tail_length
    for middle, _ in parts[1:-1]:
        found = middle.search(model_id, at, max(end, 0))
        if found is None:
            return False
        at = found.end()
    return at <= end and tail.match(model_id, end) is not None
