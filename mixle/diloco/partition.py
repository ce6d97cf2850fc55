"""Cut a model into fragments: who of the tensors travels together.

Every site derives the same fragments from the names and sizes alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from mixle.utils.exact import require_nonnegative_int, require_positive_int

Fragments = tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class ByBytes:
    """Even out the bytes: the largest tensor first, each into the lightest fragment.

    Equal sizes go by name, equally light fragments by number.
    """

    def split(self, sizes: Mapping[str, int], fragments: int) -> Fragments:
        """Return the names of each fragment, sorted; every name is in exactly one, and no fragment is empty.

        Args:
            sizes: bytes of each tensor by name.
            fragments: how many.

        Raises:
            ValueError: there are fewer tensors than fragments, or a size is negative.
            TypeError: a name is not a string, or a size is no integer.
        """
        _require_tensors(sizes, fragments)
        bins: list[list[str]] = [[] for _ in range(fragments)]
        return _filled(_pack(sizes, sizes, bins))


@dataclass(frozen=True)
class Strided:
    """Deal the model's blocks round, so that each fragment spans its whole depth; the rest evens out the bytes.

    A block is what shares a name up to its first all-digit part (``blocks.3`` of ``blocks.3.attention.weight``); blocks
    are dealt in the order of their numbers. Source: Streaming DiLoCo (arXiv 2501.18512).
    """

    def split(self, sizes: Mapping[str, int], fragments: int) -> Fragments:
        """Return the names of each fragment, as :meth:`ByBytes.split` does, and raise what it does.

        Raises:
            ValueError: blocks and other tensors are too few to fill the fragments, too.
        """
        _require_tensors(sizes, fragments)
        block_of = {name: _block(name) for name in sizes}
        blocks = sorted({block for block in block_of.values() if block is not None})
        turn = {block: index % fragments for index, block in enumerate(blocks)}
        bins: list[list[str]] = [[] for _ in range(fragments)]
        rest = []
        for name, block in block_of.items():
            if block is None:
                rest.append(name)
            else:
                bins[turn[block]].append(name)
        packed = _pack(sizes, rest, bins)
        empty = sum(not names for names in packed)
        if empty:
            raise ValueError(
                f"fragments={fragments} is too many for Strided(), which cannot cut the {len(blocks)} blocks of this "
                f"model: at most {fragments - empty}, or ByBytes()"
            )
        return _filled(packed)


def _require_tensors(sizes: Mapping[str, int], fragments: int) -> None:
    require_positive_int(fragments, "fragments")
    for name, size in sizes.items():
        if not isinstance(name, str):
            raise TypeError(f"sizes holds {name!r}, which must be the name of a tensor, a string")
        require_nonnegative_int(size, f"sizes[{name!r}]")
    if fragments > len(sizes):
        raise ValueError(f"fragments={fragments} must be at most {len(sizes)}, the model's trainable tensors")


def _pack(sizes: Mapping[str, int], names: Iterable[str], bins: list[list[str]]) -> list[list[str]]:
    """Put ``names`` into ``bins``; an empty bin is lighter than one that holds tensors of no bytes."""
    loads = [(sum(sizes[name] for name in names), len(names), index) for index, names in enumerate(bins)]
    for name in sorted(names, key=lambda name: (-sizes[name], name)):
        load, count, index = min(loads)
        bins[index].append(name)
        loads[index] = (load + sizes[name], count + 1, index)
    return bins


def _filled(bins: list[list[str]]) -> Fragments:
    return tuple(tuple(sorted(names)) for names in bins)


def _block(name: str) -> tuple[str, int] | None:
    parts = name.split(".")
    for index, part in enumerate(parts):
        if part.isascii() and part.isdigit():
            return ".".join(parts[:index]), int(part)
    return None
