"""Whether a plan fits a module: whole heads, even shards, no empty stage."""

from __future__ import annotations

from typing import Any

from mixle.utils.exact import require_positive_int

__all__ = ["validate_tp_pp_cp_plan"]


def validate_tp_pp_cp_plan(module: Any, tp_size: int = 1, pp_size: int = 1, cp_size: int = 1) -> None:
    """Check the sizes of the tensor, pipeline and context axes against a module.

    Args:
        module: has ``n_head``, ``d_mlp`` and ``vocab`` where ``tp_size > 1``, ``blocks`` where ``pp_size > 1``, and
            ``block`` where ``cp_size > 1``.
        tp_size: ranks that share every layer; divides heads, the MLP's width and the vocabulary.
        pp_size: stages; at most as many as there are blocks.
        cp_size: ranks that share every sequence; ``2 * cp_size`` divides ``block``, so that each rank gets an early and
            a late part of it and all have the same causal work.

    Raises:
        TypeError: a size is no exact integer, or the module lacks what an axis needs; names it.
        ValueError: a size does not fit; gives the numbers and the nearest sizes that do.
    """
    tp, pp, cp = (
        require_positive_int(size, name)
        for size, name in ((tp_size, "tp_size"), (pp_size, "pp_size"), (cp_size, "cp_size"))
    )
    if tp > 1:
        for attribute in ("n_head", "d_mlp", "vocab"):
            _require_divisor("tp_size", tp, attribute, int(_needed(module, attribute, "tp_size")))
    if pp > 1:
        blocks = len(_needed(module, "blocks", "pp_size"))
        if pp > blocks:
            raise ValueError(
                f"pp_size={pp} needs at least as many blocks, and the module has {blocks}; largest: {blocks}"
            )
    if cp > 1:
        length = int(_needed(module, "block", "cp_size"))
        if length % (2 * cp):
            fitting = [size for size in _divisors(length // 2) if length % 2 == 0] or [1]
            raise ValueError(
                f"cp_size={cp} splits each sequence into {2 * cp} parts, which must divide block={length}; nearest "
                f"that do: {_nearest(cp, fitting)}"
            )


def _needed(module: Any, attribute: str, axis: str) -> Any:
    value = getattr(module, attribute, None)
    if value is None:
        raise TypeError(f"{axis} needs a module with {attribute}, which {type(module).__name__} lacks; use {axis}=1")
    return value


def _require_divisor(name: str, size: int, attribute: str, total: int) -> None:
    if total % size:
        raise ValueError(
            f"{name}={size} must divide {attribute}={total}; nearest that do: {_nearest(size, _divisors(total))}"
        )


def _divisors(total: int) -> list[int]:
    return [d for d in range(1, total + 1) if total % d == 0]


def _nearest(size: int, fitting: list[int]) -> str:
    below = max((d for d in fitting if d < size), default=None)
    above = min((d for d in fitting if d > size), default=None)
    return ", ".join(str(d) for d in (below, above) if d is not None)
