"""The training thread's half of a learner: it counts steps, copies fragments that are due and moves to commits.

It does no I/O and no arithmetic beyond one pass to copy a fragment and two to align one. The other half
(:class:`mixle.diloco.node.Node`) runs on a thread of its own; between them lie two queues.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from mixle.diloco.algorithm import DiLoCo
from mixle.diloco.alignment import Adaptive, Blend, Carry, Overwrite
from mixle.diloco.clock import SYSTEM_CLOCK, Clock
from mixle.diloco.grace import RunningMedian
from mixle.diloco.parameters import Arrays, Parameters
from mixle.diloco.weights import Tally, Work

__all__ = ["Captured", "Landing", "Learner"]

logger = logging.getLogger(__name__)

WAIT_S = 0.5


@dataclass(frozen=True)
class Captured:
    """A fragment as it was when its round was due.

    Attributes:
        theta: its parameters; the delta is ``anchor - theta``.
        anchor: the commit that they started from, which is that of round ``version``.
        work: what was trained since; None where nothing was, and the learner leaves.
        totals: the learner's counts at that step.
        seconds_per_step: how fast it trains.
        final: it leaves.
    """

    round: int
    fragment: int
    theta: Arrays
    anchor: Arrays
    version: int
    work: Work | None
    totals: tuple[int, int]
    seconds_per_step: float
    final: bool


@dataclass(frozen=True)
class Landing:
    """A commit to move to.

    Attributes:
        round: which one; every round before it is committed, too.
        fragment: which fragment it is of.
        theta: its parameters; None where they cannot be read, and the model stays with the version before.
        taken: the newest round whose commit took this learner's snapshot of the fragment, of those that ``theta``
            continues; None if none did.
        cosine: how far the learners of the round agreed.
        broken: a round that refused this learner's snapshot because it is not finite; None if none did.
    """

    round: int
    fragment: int
    theta: Arrays | None
    taken: int | None
    cosine: float | None
    broken: int | None


class Learner:
    """One model in training; every method but :meth:`land` and :meth:`fail` is called on the thread that trains it.

    Args:
        parameters: of the model, already at the versions given.
        algorithm: of the run.
        fragments: the names in each fragment.
        anchors: each fragment's parameters at its newest commit.
        versions: the rounds of those commits; negative for the base.
        seen: the newest committed round.
        buffers: names of the statistics among the parameters, which a commit overwrites: what carrying on would add
            to another mean may leave their range.
        clock: this process's time.

    Attributes:
        captured: what is to be published, oldest first; the node takes from it.
        others: how many other learners have published each round; the node replaces it.
        seen: the newest committed round that the model is at.
    """

    def __init__(
        self,
        parameters: Parameters,
        algorithm: DiLoCo,
        fragments: Sequence[Sequence[str]],
        *,
        anchors: Sequence[Arrays],
        versions: Sequence[int],
        seen: int,
        buffers: frozenset[str] = frozenset(),
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._parameters, self._algorithm, self._schedule = parameters, algorithm, algorithm.schedule
        self._fragments = [tuple(names) for names in fragments]
        self._anchors, self._versions, self.seen = list(anchors), list(versions), seen
        self._buffers, self._clock = buffers, clock
        self.captured: deque[Captured] = deque()
        self.wake_node = threading.Event()
        self.others: dict[int, int] = {}
        self.tally = Tally(len(self._fragments))
        self._landed: deque[Landing] = deque()
        self._has_landed = threading.Event()
        self._failure: BaseException | None = None
        self._published = seen
        self._since = 0
        self._kept: dict[int, Captured] = {}
        self._open: set[int] = set()
        self._last: Carry | Overwrite = Carry()
        self._moving_to: int | None = None
        self._durations = RunningMedian(ready=1)
        self._resumed = clock.monotonic()

    # ---- what the node calls

    def land(self, landings: Sequence[Landing]) -> None:
        """Queue commits, in the order of their rounds; the next step moves the model to them."""
        self._landed.extend(landings)
        self._has_landed.set()

    def fail(self, error: BaseException) -> None:
        """Make every later call raise ``error``: the node has stopped."""
        self._failure = error
        self._has_landed.set()

    # ---- what the training thread calls

    def step(self, samples: object) -> None:
        """Count one optimizer step, move to commits that have landed, and copy the fragment that is due.

        Raises:
            TypeError, ValueError: ``samples`` is not a positive exact integer; nothing is counted.
            RuntimeError: the model holds another object in the place of a parameter that is to be copied or moved.
            BaseException: what stopped the node.
        """
        self.tally.add(samples)
        self._since += 1
        now = self._clock.monotonic()
        self._durations.add(max(now - self._resumed, 0.0))
        self.move()
        round_ = self._schedule.next_round(published=self._published, seen=self.seen)
        if round_ is not None and self._schedule.is_due(round_, steps=self._since, others=self.others.get(round_, 0)):
            self._capture(round_, final=False)
        while self._schedule.must_wait(self._age()):
            self.wait_for_commit()
        self._resumed = self._clock.monotonic()

    def move(self) -> None:
        """Move to the commits that have landed."""
        if self._failure is not None:
            raise self._failure
        while self._landed:
            self._align(self._landed[0])
            self._landed.popleft()

    def wait_for_commit(self, timeout_s: float = WAIT_S) -> None:
        """Wait until commits land, at most ``timeout_s`` seconds, and move to them."""
        self._clock.wait(self._has_landed, timeout_s)
        self._has_landed.clear()
        self.move()

    @property
    def published(self) -> int:
        """The last round that a fragment was copied for; before the first, the newest commit that was joined at."""
        return self._published

    @property
    def is_waiting_for_commits(self) -> bool:
        """Whether snapshots are out whose rounds have not landed."""
        return bool(self._open)

    @property
    def unmerged_steps(self) -> list[int]:
        """Steps of each fragment that no commit holds."""
        works = [self.tally.work(fragment) for fragment in range(len(self._fragments))]
        return [work.steps if work else 0 for work in works]

    def capture_rest(self) -> bool:
        """Copy every fragment once more, as the last of this learner; False if all its work is in commits."""
        if not any(self.unmerged_steps):
            return False
        first = max(self._published, self.seen) + 1
        for round_ in range(first, first + len(self._fragments)):
            self._capture(round_, final=True)
        return True

    def flush(self, timeout_s: float, *, poll_s: float = WAIT_S) -> None:
        """Bring what was trained into commits, as long as time lasts; :attr:`unmerged_steps` tells what is left.

        Raises:
            BaseException: what stopped the node.
        """
        deadline = self._clock.monotonic() + timeout_s
        self.move()
        pending = True
        while pending and self._clock.monotonic() < deadline:
            if self._open:
                self.wait_for_commit(poll_s)
            else:
                pending = self.capture_rest()

    # ----

    def _age(self) -> int | None:
        if not self._open:
            return None
        return self.tally.steps - min(self._kept[round_].totals[1] for round_ in self._open)

    def _capture(self, round_: int, *, final: bool) -> None:
        fragment = self._schedule.fragment(round_)
        self._parameters.require_in_place(self._fragments[fragment])
        captured = Captured(
            round_,
            fragment,
            self._parameters.read(self._fragments[fragment]),
            self._anchors[fragment],
            self._versions[fragment],
            self.tally.work(fragment),
            self.tally.now(),
            self._durations.value or 0.0,
            final,
        )
        self._kept[round_] = captured
        self._open.add(round_)
        self._published, self._since = round_, 0
        self.captured.append(captured)
        self.wake_node.set()

    def _align(self, landing: Landing) -> None:
        self.seen = max(self.seen, landing.round)
        self._open = {round_ for round_ in self._open if round_ > self.seen}
        if landing.broken in self._kept:
            self._return_to_anchors()
        if landing.theta is None:
            return  # whether a later version continues this round is not known yet, so its snapshot is kept
        if self._versions[landing.fragment] < landing.round:
            self._move_to(landing, landing.theta)
        for round_ in self._answered(landing):
            del self._kept[round_]

    def _answered(self, landing: Landing) -> set[int]:
        return {r for r, mine in self._kept.items() if r <= landing.round and mine.fragment == landing.fragment}

    def _move_to(self, landing: Landing, theta: Arrays) -> None:
        fragment = landing.fragment
        self._parameters.require_in_place(self._fragments[fragment])
        taken = None if landing.taken is None else self._kept.get(landing.taken)
        reference = self._anchors[fragment] if taken is None else taken.theta
        how = self._how(landing)
        if self._moving_to == landing.round:
            # Ctrl-C or an error came between the passes of the last attempt: what it has left is neither version.
            logger.warning(
                "the move to round %d was interrupted: its fragment goes on from the commit, without its last %d steps",
                landing.round,
                self.unmerged_steps[fragment],
            )
            how = Overwrite()
        self._moving_to = landing.round
        trained = {name: array for name, array in theta.items() if name not in self._buffers}
        statistics = {name: array for name, array in theta.items() if name in self._buffers}
        if trained:
            self._parameters.align(trained, reference, how)
        if statistics:
            self._parameters.align(statistics, statistics, Overwrite())
        if not isinstance(how, Carry):
            self.tally.begin(fragment, self.tally.now())
        elif taken is not None:
            self.tally.begin(fragment, taken.totals)
        self._anchors[fragment], self._versions[fragment] = theta, landing.round

    def _return_to_anchors(self) -> None:
        """Give up the parameters of this learner, which are broken: all of them, or one step would spread what is left.

        Its snapshots are forgotten with them, so that none is a reference to what the parameters no longer hold.
        """
        for fragment, anchor in enumerate(self._anchors):
            self._parameters.align(anchor, anchor, Overwrite())
            self.tally.begin(fragment, self.tally.now())
        self._kept.clear()
        self._open.clear()

    def _how(self, landing: Landing) -> Carry | Overwrite | Blend:
        alignment = self._algorithm.alignment
        if isinstance(alignment, Adaptive):
            self._last = alignment.choose(landing.cosine, self._last)
            return self._last
        return alignment
