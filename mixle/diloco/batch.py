"""Share a global batch among the learners that live, by how fast each is."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from statistics import median_low

from mixle.utils.exact import require_finite_float, require_positive_int


def batch_sizes(global_batch_size: int, speeds: Mapping[str, float | None]) -> dict[str, int]:
    """Return the samples per step of each learner: in proportion to its speed, and at least 1.

    They sum to ``global_batch_size``, unless there are more learners than that, who then get 1 each. Remainders go to
    the largest fractions, ties by id: who knows the same speeds computes the same sizes.

    Args:
        global_batch_size: samples per step of all learners together.
        speeds: samples per second by learner; None where it is not measured yet, which counts as the median of those
            that are.

    Raises:
        TypeError, ValueError: ``global_batch_size`` is no positive integer, or a speed is not a positive finite number.
    """
    total = require_positive_int(global_batch_size, "global_batch_size")
    known = {
        learner: Fraction(require_finite_float(speed, f"speeds[{learner!r}]", exclusive_minimum=0.0))
        for learner, speed in speeds.items()
        if speed is not None
    }
    usual = median_low(known.values()) if known else Fraction(1)
    open_speeds = {learner: known.get(learner, usual) for learner in sorted(speeds)}
    if len(open_speeds) >= total:
        return dict.fromkeys(open_speeds, 1)
    # Whose proportion is less than one sample gets one; the others share what that leaves, which makes them slower too.
    sizes: dict[str, int] = {}
    while slow := [learner for learner, share in _proportional(total - len(sizes), open_speeds).items() if share < 1]:
        for learner in slow:
            sizes[learner] = 1
            del open_speeds[learner]
    exact = _proportional(total - len(sizes), open_speeds)
    sizes |= {learner: int(share) for learner, share in exact.items()}
    by_remainder = sorted(exact, key=lambda learner: (int(exact[learner]) - exact[learner], learner))
    for learner in by_remainder[: total - sum(sizes.values())]:
        sizes[learner] += 1
    return dict(sorted(sizes.items()))


def _proportional(total: int, speeds: Mapping[str, Fraction]) -> dict[str, Fraction]:
    whole = sum(speeds.values())
    return {learner: total * speed / whole for learner, speed in speeds.items()}
