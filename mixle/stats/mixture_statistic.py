"""The statistic of a mixture, and the scale of the data that its components share."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Any, NamedTuple

import numpy as np

from mixle.stats.frames import Centre, Frame
from mixle.stats.policy import MIN_MASS
from mixle.stats.statistics import LeafStatistic, add_leaf_statistics, reframe

__all__ = ["MixtureStatistic", "tell_whole"]


class MixtureStatistic(NamedTuple):
    """The statistic of a mixture.

    Attributes:
        counts: ``(k,)`` total responsibility of each component.
        components: the components' own statistics.
        impossible: the weight of the rows that no component can produce; they are in no other statistic.
    """

    counts: np.ndarray
    components: tuple[Any, ...]
    impossible: float


def tell_whole(components: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the components' statistics with frames that know the moments of the data that the components share.

    Where the components are alike, leaves at the same place share their data between them: it is added up. Elsewhere
    the encoded data stands for it. A mixture within a mixture leaves what the outer one told.
    """
    leaves = [item for component in components for item in _leaves(component, ())]
    pooled: dict[Hashable, LeafStatistic] = {}
    if len({_skeleton(component) for component in components}) == 1:
        for place, leaf in ((place, leaf) for place, leaf in leaves if isinstance(leaf.frame, Centre)):
            pooled[place] = add_leaf_statistics(pooled[place], leaf) if place in pooled else leaf
    frames = [_told(leaf.frame, pooled.get(place)) for place, leaf in leaves]
    return tuple(reframe(components, frames))


def _told(frame: Frame | None, pooled: LeafStatistic | None) -> Frame | None:
    if not isinstance(frame, Centre) or frame.whole is not None:
        return frame
    if pooled is not None and isinstance(pooled.frame, Centre) and pooled.sums[0] > MIN_MASS:
        return frame.share_of(pooled.frame.moments(pooled.sums))
    return frame.share_of((frame.mean, frame.variance))


def _leaves(node: Any, place: tuple[Hashable, ...]) -> Iterator[tuple[Hashable, LeafStatistic]]:
    """Yield the leaves of a statistic with their places, which are the same for all components of a mixture."""
    if isinstance(node, LeafStatistic):
        yield place, node
    elif isinstance(node, MixtureStatistic):
        for component in node.components:
            yield from _leaves(component, (*place, "component"))
    elif isinstance(node, (tuple, list)):
        for i, child in enumerate(node):
            yield from _leaves(child, (*place, i))
    elif isinstance(node, dict):
        for key, child in node.items():
            yield from _leaves(child, (*place, key))


def _skeleton(node: Any) -> Hashable:
    """Return what two statistics have in common if their leaves at the same places can be added."""
    if isinstance(node, LeafStatistic):
        return type(node.frame), tuple(np.shape(s) for s in node.sums) if isinstance(node.frame, Centre) else ()
    if isinstance(node, MixtureStatistic):
        inner = {_skeleton(component) for component in node.components}
        return inner.pop() if len(inner) == 1 else object()
    if isinstance(node, (tuple, list)):
        return tuple(_skeleton(child) for child in node)
    if isinstance(node, dict):
        return tuple((key, _skeleton(child)) for key, child in node.items())
    return None
