"""Check what the dicts hold that distributions are restored from."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from mixle.stats.policy import Repair

__all__ = ["list_field", "require_known_fields", "restored_repairs"]


def require_known_fields(payload: dict[str, Any], kind: type[Any], fields: Iterable[str]) -> None:
    """Check that a payload has no fields but ``fields``.

    Raises:
        ValueError: it has others, which would be ignored.
    """
    known = list(fields)
    unknown = [field for field in payload if field not in known]
    if unknown:
        raise ValueError(f"payload of a {kind.__name__} has the fields {unknown!r:.80}; it may only have {known}")


def list_field(payload: dict[str, Any], field: str, kind: type[Any]) -> list[Any]:
    """Return a field that must be a list.

    Raises:
        KeyError: the payload lacks it.
        TypeError: it is no list.
    """
    value = payload[field]
    if not isinstance(value, list):
        raise TypeError(f"payload of a {kind.__name__}: {field}={value!r:.60} must be a list")
    return value


def restored_repairs(payload: dict[str, Any], kind: type[Any]) -> tuple[Repair, ...]:
    """Return the repairs of a payload; none if it has no such field.

    Raises:
        TypeError: it is not a list of lists of three strings.
    """
    if "repairs" not in payload:
        return ()
    plain = list_field(payload, "repairs", kind)
    for i, repair in enumerate(plain):
        if not (isinstance(repair, list) and len(repair) == 3 and all(isinstance(text, str) for text in repair)):
            raise TypeError(
                f"payload of a {kind.__name__}: repairs[{i}]={repair!r:.60} must be a list of three strings, "
                "[parameter, reason, where]"
            )
    return tuple(Repair(*repair) for repair in plain)
