"""Bring a learner's parameters to a commit: what becomes of the steps it took since its snapshot.

The operations use in-place operators only (``[...] =``, ``-=``, ``+=``, ``*=``), so they serve NumPy arrays and tensors
alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mixle.utils.exact import require_finite_float


@dataclass(frozen=True)
class Carry:
    """Theta + theta - theta_at_snapshot: the steps since the snapshot go on from the commit, and none is lost."""


@dataclass(frozen=True)
class Overwrite:
    """Theta: the steps since the snapshot are dropped."""


@dataclass(frozen=True)
class Blend:
    """mixing * theta + (1 - mixing) * Theta, as Streaming DiLoCo does (arXiv 2501.18512).

    Args:
        mixing: the share of the learner's own parameters, in [0, 1].

    Raises:
        TypeError, ValueError: it is not.
    """

    mixing: float

    def __post_init__(self) -> None:
        mixing = require_finite_float(self.mixing, "mixing", minimum=0.0, maximum=1.0)
        object.__setattr__(self, "mixing", mixing)


@dataclass(frozen=True)
class Adaptive:
    """Carry while the learners' deltas agree, overwrite while they do not.

    Agreement is the mean cosine between the deltas of a round (:func:`mixle.diloco.merge.mean_cosine`). Between the two
    thresholds the last choice stands, so that noise does not flip it.

    Args:
        carry_from: the agreement from which on to carry.
        overwrite_below: the agreement below which to overwrite, at most ``carry_from``.

    Raises:
        TypeError, ValueError: they are not cosines in that order.
    """

    carry_from: float = 0.6
    overwrite_below: float = 0.4

    def __post_init__(self) -> None:
        carry_from = require_finite_float(self.carry_from, "carry_from", minimum=-1.0, maximum=1.0)
        overwrite_below = require_finite_float(self.overwrite_below, "overwrite_below", minimum=-1.0, maximum=1.0)
        if overwrite_below > carry_from:
            raise ValueError(f"overwrite_below={overwrite_below} must be at most carry_from={carry_from}")
        object.__setattr__(self, "carry_from", carry_from)
        object.__setattr__(self, "overwrite_below", overwrite_below)

    def choose(self, agreement: float | None, last: Carry | Overwrite) -> Carry | Overwrite:
        """Return what to do at a round's commit.

        Args:
            agreement: of the round; None if a single learner made it.
            last: what was chosen at the commit before; ``Carry()`` at the first.
        """
        if agreement is None:
            return last
        if agreement >= self.carry_from:
            return Carry()
        return Overwrite() if agreement < self.overwrite_below else last


Alignment = Carry | Overwrite | Blend | Adaptive


def align(theta: Any, committed: Any, reference: Any, how: Carry | Overwrite | Blend) -> None:
    """Bring one tensor of a learner to a commit, in place and in at most two passes over it.

    A learner whose own parameters are not finite must overwrite, whatever the algorithm says: carrying keeps the NaN.

    Args:
        theta: the learner's tensor, changed.
        committed: the round's tensor.
        reference: the point up to which the learner's steps are in the commit: its parameters at the snapshot if the
            round took it, or those of the last commit it applied if the round did not. Only ``Carry`` reads it.
        how: what to do; for ``Adaptive``, what :meth:`Adaptive.choose` returned.
    """
    match how:
        case Overwrite():
            theta[...] = committed
        case Blend(mixing):
            theta *= mixing
            theta += committed * (1.0 - mixing)
        case Carry():
            # The difference of neighbours is exact, so that a learner that took no step ends on the commit itself.
            theta -= reference
            theta += committed
        case _:
            raise TypeError(f"how={how!r} must be Carry(), Overwrite() or Blend(mixing)")
