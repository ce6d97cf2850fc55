"""Count the work behind a delta, in exact integers, and weigh deltas by it.

A delta weighs tokens^2 / steps: tokens processed times tokens per step (Decoupled DiLoCo, arXiv 2604.21428).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction

from mixle.utils.exact import require_exact_int, require_positive_int

MOST_SAMPLES = 1 << 40
"""Of one step; the sums over any training fit the records that others read."""


@dataclass(frozen=True)
class Work:
    """What a delta was trained on: ``tokens`` (or samples) in ``steps`` optimizer steps, both at least 1.

    Raises:
        TypeError, ValueError: one of them is no exact integer, or below 1.
    """

    tokens: int
    steps: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "tokens", require_positive_int(self.tokens, "tokens"))
        object.__setattr__(self, "steps", require_positive_int(self.steps, "steps"))

    @property
    def weight(self) -> Fraction:
        """tokens^2 / steps, exactly."""
        return Fraction(self.tokens**2, self.steps)


def shares(works: Sequence[Work]) -> list[float]:
    """Return the weight of each divided by the sum of all, each rounded once.

    Raises:
        ValueError: ``works`` is empty.
    """
    if not works:
        raise ValueError("works must hold at least one delta's work")
    weights = [work.weight for work in works]
    total = sum(weights)
    return [float(weight / total) for weight in weights]


def require_samples(value: object) -> int:
    """Return the samples of one step as an int.

    Raises:
        TypeError: a bool, a float, or anything else that is no integer.
        ValueError: it is below 1 or above :data:`MOST_SAMPLES`.
    """
    return require_exact_int(value, "samples", minimum=1, maximum=MOST_SAMPLES)


@dataclass
class Tally:
    """A learner's count of what each fragment of its model was trained on since the fragment's delta began.

    A step trains all fragments, but their deltas begin at different steps. Plain integers, so that it is saved as it
    is.

    Attributes:
        tokens, steps: of this learner's whole training.
        began: per fragment, the totals at which its delta began.
    """

    fragments: int
    tokens: int = 0
    steps: int = 0
    began: list[tuple[int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        require_positive_int(self.fragments, "fragments")
        if not self.began:
            self.began = [(self.tokens, self.steps)] * self.fragments

    def add(self, samples: object) -> None:
        """Count one optimizer step on ``samples`` samples: a positive exact integer of any kind.

        Raises:
            TypeError, ValueError: as :func:`require_samples`; nothing is counted.
        """
        if type(samples) is int and 0 < samples <= MOST_SAMPLES:  # nearly always, and every training step comes here
            self.tokens += samples
        else:
            self.tokens += require_samples(samples)
        self.steps += 1

    def now(self) -> tuple[int, int]:
        """Return the totals, to be kept with a snapshot and given to :meth:`begin` when its round has landed."""
        return self.tokens, self.steps

    def work(self, fragment: int) -> Work | None:
        """Return the work in the fragment's delta, or None if there is no step in it."""
        tokens, steps = self.began[fragment]
        return Work(self.tokens - tokens, self.steps - steps) if self.steps > steps else None

    def begin(self, fragment: int, totals: tuple[int, int]) -> None:
        """Begin the fragment's delta at ``totals``.

        After a round that took this learner's snapshot these are the totals at the snapshot where the steps since are
        carried on, and the present ones where they are overwritten. After a round without it, carrying begins nothing.
        """
        self.began[fragment] = totals
