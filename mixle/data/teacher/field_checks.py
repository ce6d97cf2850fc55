"""What a field of a message may hold: functions that return a value as it is to be used, or refuse it.

All but :func:`flag` make such a function.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from mixle.data.teacher.errors import ProtocolError

Check = Callable[[object], Any]


def _refuse(value: object, expected: str) -> ProtocolError:
    text = repr(value) if isinstance(value, (int, float, bool, type(None))) else type(value).__name__
    return ProtocolError(f"is {text[:60]}, not {expected}")


def integer(low: int, high: int) -> Check:
    """An integer within limits."""

    def check(value: object) -> int:
        if type(value) is not int or not low <= value <= high:
            raise _refuse(value, f"an integer from {low} to {high}")
        return value

    return check


def real(low: float, high: float) -> Check:
    """A number within limits, as a float."""

    def check(value: object) -> float:
        if type(value) not in (float, int) or not low <= value <= high:  # type: ignore[operator]
            raise _refuse(value, f"a number from {low:g} to {high:g}")
        return float(value)  # type: ignore[arg-type]

    return check


def flag(value: object) -> bool:
    """true or false."""
    if type(value) is not bool:
        raise _refuse(value, "true or false")
    return value


def octets(low: int, high: int | None = None) -> Check:
    """So many bytes; exactly ``low`` without ``high``."""
    high = low if high is None else high

    def check(value: object) -> bytes:
        if type(value) is not bytes or not low <= len(value) <= high:
            raise _refuse(value, f"{low} to {high} bytes")
        return value

    return check


def text(limit: int, pattern: re.Pattern[str] | None = None) -> Check:
    """A text of at most ``limit`` bytes, which ``pattern`` matches as a whole."""

    def check(value: object) -> str:
        if type(value) is not str or len(value.encode()) > limit or (pattern and not pattern.fullmatch(value)):
            raise _refuse(value, f"a text of at most {limit} bytes" + (f" like {pattern.pattern}" if pattern else ""))
        return value

    return check


def choice(*choices: str) -> Check:
    """One of these texts."""

    def check(value: object) -> str:
        if type(value) is not str or value not in choices:
            raise _refuse(value, f"one of {', '.join(choices)}")
        return value

    return check


def optional(inner: Check) -> Check:
    """Null, or what ``inner`` takes."""
    return lambda value: None if value is None else inner(value)


def row(kind: type, *checks: Check) -> Check:
    """A list of one item for each check, as the named tuple ``kind``."""
    count = len(checks)
    paired = tuple(enumerate(checks))
    make = kind._make  # type: ignore[attr-defined]

    def check(value: object) -> Any:
        if type(value) is not list or len(value) != count:
            raise _refuse(value, f"a list of {count}")
        return make([inner(value[i]) for i, inner in paired])

    return check


def rows(inner: Check, limit: int, *, at_least: int = 0) -> Check:
    """A list of so many that ``inner`` takes, as a tuple."""

    def check(value: object) -> tuple[Any, ...]:
        if type(value) is not list or not at_least <= len(value) <= limit:
            raise _refuse(value, f"a list of {at_least} to {limit}")
        return tuple([inner(one) for one in value])

    return check
