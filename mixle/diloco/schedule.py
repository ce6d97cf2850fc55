"""Say when each fragment of the model travels: arithmetic on round and step numbers.

Round r carries fragment r mod P, so that P rounds carry the model once in every H steps. Rounds are numbered from 0;
"-1" stands for none yet.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Schedule:
    """The rounds of an algorithm, as one learner keeps them.

    Built by :attr:`mixle.diloco.algorithm.DiLoCo.schedule`, which checks the numbers and says what they mean.
    """

    sync_every: int
    fragments: int
    in_flight: int = 2
    overlap_steps: int | None = None
    follow: int = 0

    @property
    def lead(self) -> int:
        """Rounds that a learner may be ahead of the last commit it applied: ``in_flight``, and at most ``fragments``.

        A second snapshot of a fragment taken from the same anchor would hold the first one's work again, and two rounds
        would apply it twice; so a fragment waits until the round of its last snapshot is known. It follows that the
        deltas of one round all start from the same commit, that of the round ``fragments`` before.
        """
        return min(self.in_flight, self.fragments)

    def fragment(self, round_: int) -> int:
        """Return the fragment that the round carries: r mod P."""
        return round_ % self.fragments

    def due(self, round_: int) -> int:
        """Return the step of the run at which the round is due: (r div P) * H + floor(((r mod P) + 1) * H / P)."""
        turn, position = divmod(round_, self.fragments)
        return turn * self.sync_every + (position + 1) * self.sync_every // self.fragments

    def gap(self, round_: int) -> int:
        """Return the steps between the round before and this one, at least 1."""
        return self.due(round_) - self.due(round_ - 1)

    def next_round(self, *, published: int, seen: int) -> int | None:
        """Return the round that a learner publishes next, or None while :attr:`lead` rounds are unanswered.

        Args:
            published: the last round that this learner published, -1 if none.
            seen: the newest committed round that it has applied, -1 if none.
        """
        round_ = max(published, seen) + 1
        return round_ if round_ <= seen + self.lead else None

    def is_due(self, round_: int, *, steps: int, others: int) -> bool:
        """Tell whether a learner publishes its :meth:`next_round` now.

        It does when its steps reach the gap, or at once when ``follow`` others have published that round; but never
        before its first step, which is what a snapshot is weighted by.

        Args:
            round_: what :meth:`next_round` returned.
            steps: this learner's steps since its last publication, or since it joined.
            others: how many other learners are known to have published the round.
        """
        if steps < 1:
            return False
        return steps >= self.gap(round_) or 0 < self.follow <= others

    def must_wait(self, age: int | None) -> bool:
        """Tell whether the next step must wait for a commit.

        Args:
            age: the learner's steps since the oldest of its snapshots whose round it has not applied yet; None if there
                is none.
        """
        return self.overlap_steps is not None and age is not None and age >= self.overlap_steps

    def allowance(self, round_: int) -> int:
        """Return A, the steps that learners can take before they miss the round's commit: min(lead * gap, overlap)."""
        window = self.lead * self.gap(round_)
        return window if self.overlap_steps is None else min(window, self.overlap_steps)
