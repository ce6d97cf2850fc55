"""Categories: what they may be, when two are one, how they are ordered, and how JSON carries them.

A category is None, a bool, an int, a float, a str, bytes, or a tuple of categories: what JSON and other machines carry
exactly. Categories that Python calls equal are one, as in a dict: ``1``, ``1.0`` and ``True`` are the same category,
``1`` and ``"1"`` are not. Where several spellings of one category are seen, an int stands for it before a bool, and a
bool before a float, so that the result does not depend on the order of the data; ``0.0`` stands for ``-0.0``.

A value of a class derived from one of these types, such as a member of an ``IntEnum`` or a named tuple, is the category
that it holds, whatever ``str`` prints for it.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable
from typing import Any

import numpy as np

__all__ = ["Category", "category_from_json", "category_to_json", "ordered_categories", "plain_category"]

Category = None | bool | int | float | str | bytes | tuple["Category", ...]

_PLAIN = frozenset({type(None), bool, int, str, bytes})


def plain_category(value: Any) -> Category:
    """Return ``value`` as a category of plain Python types; NumPy scalars and derived classes as what they hold.

    Raises:
        TypeError: its type is not one that a category may have.
        ValueError: it is, or holds, NaN, which is not equal to itself.
    """
    kind = type(value)
    if kind in _PLAIN:
        return value
    if isinstance(value, np.generic) and not isinstance(value.item(), np.generic):
        return plain_category(value.item())
    if kind is float:
        if value != value:
            raise ValueError("NaN cannot be a category: it is not equal to itself; use None for a missing value")
        # Adding it makes a positive zero of a negative one.
        return value + 0.0
    if kind is tuple:
        return tuple(plain_category(v) for v in value)
    # The classes' own methods may print or convert a value as something else than it holds.
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, bytes):
        return bytes.__getitem__(value, slice(None))
    if isinstance(value, float):
        return plain_category(float.__float__(value))
    if isinstance(value, tuple):
        return plain_category(tuple.__getitem__(value, slice(None)))
    raise TypeError(
        "a category must be None, bool, int, float, str, bytes or a tuple of these, "
        f"got {kind.__name__} ({value!r:.60})"
    )


def _order(category: Any) -> tuple[Any, ...]:
    if category is None:
        return (0,)
    if isinstance(category, (bool, int, float)):
        return (1, category)
    if isinstance(category, str):
        return (2, category)
    if isinstance(category, bytes):
        return (3, category)
    return (4, tuple(_order(c) for c in category))


def _spelling(category: Any) -> tuple[Any, ...]:
    if isinstance(category, tuple):
        return tuple(_spelling(c) for c in category)
    return (0 if type(category) is int else 1 if type(category) is bool else 2,)


def ordered_categories(categories: Iterable[Any]) -> tuple[Category, ...]:
    """Return the distinct categories in canonical order: None, numbers, strings, bytes, tuples.

    Raises:
        TypeError, ValueError: as :func:`plain_category`.
    """
    chosen: dict[Category, Category] = {}
    for value in categories:
        category = plain_category(value)
        held = chosen.setdefault(category, category)
        if held is not category and type(held) is not str and _spelling(category) < _spelling(held):
            chosen[category] = category
    return tuple(sorted(chosen.values(), key=_order))


def category_to_json(category: Category) -> Any:
    """Return a category in JSON types; what JSON has no form for is tagged."""
    if isinstance(category, bytes):
        return {"bytes": base64.b64encode(category).decode("ascii")}
    if isinstance(category, tuple):
        return {"tuple": [category_to_json(c) for c in category]}
    if isinstance(category, float) and category in (float("inf"), float("-inf")):
        return {"float": repr(category)}
    return category


def category_from_json(plain: Any) -> Category:
    """Return the category that :func:`category_to_json` encoded.

    Raises:
        ValueError: ``plain`` is no such value.
    """
    if isinstance(plain, dict):
        match plain:
            case {"bytes": str(text)} if len(plain) == 1:
                return base64.b64decode(text, validate=True)
            case {"tuple": list(items)} if len(plain) == 1:
                return tuple(category_from_json(c) for c in items)
            case {"float": "inf" | "-inf" as text} if len(plain) == 1:
                return float(text)
        raise ValueError(f"not an encoded category: {plain!r:.80}")
    return plain_category(plain)
