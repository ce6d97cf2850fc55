"""Processes on a virtual clock, of which exactly one thread runs at a time, in an order that a seed decides.

A thread gives up the turn where it sleeps, waits, or is about to touch the store (:meth:`World.elapse`); whose turn is
next follows from virtual time, and of equal times from the seed. So the same seed gives the same run, and any two
operations of different threads come in either order under some seed.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
import threading
from collections.abc import Callable


class Killed(BaseException):
    """The process ends here; nothing of it runs any more."""


class Process:
    """What dies and stops together; it has a clock of its own, which is wrong by a constant and runs a little off."""

    def __init__(self, world: World, name: str) -> None:
        self.world, self.name = world, name
        self.dead = False
        self.paused_until = 0.0
        self.tasks: list[_Task] = []
        self._offset, self._rate = world.rng.uniform(0.0, 1e6), world.rng.uniform(0.999, 1.001)

    def spawn(self, target: Callable[[], object]) -> None:
        task = _Task(self, target)
        self.tasks.append(task)
        self.world.wake(task, self.world.now)

    def kill(self) -> None:
        """End every thread at the point where it waits for its turn."""
        self.dead = True
        for task in self.tasks:
            if not task.done:
                self.world.wake(task, self.world.now)

    def pause(self, seconds: float) -> None:
        self.paused_until = max(self.paused_until, self.world.now + seconds)

    # ---- mixle.diloco.clock.Clock

    def monotonic(self) -> float:
        return self._offset + self.world.now * self._rate

    def sleep(self, seconds: float) -> None:
        self.world.elapse(max(seconds, 0.0) / self._rate)

    def wait(self, event: threading.Event, timeout: float) -> bool:
        if not event.is_set():
            self.world.elapse(max(timeout, 0.0) / self._rate, event)
        return event.is_set()


class _Task:
    def __init__(self, process: Process, target: Callable[[], object]) -> None:
        self.process, self.target = process, target
        self.gate = threading.Lock()
        self.gate.acquire()
        self.event: threading.Event | None = None
        self.due = 0
        self.done = False
        self.thread: threading.Thread | None = None


class World:
    """Run processes until nothing is left to do.

    Attributes:
        now: virtual seconds.
        failures: what threads ended with that is no :class:`Killed`.
        rng: decides the order of what happens at one time, and whatever else is to follow from the seed.
    """

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.now = 0.0
        self.failures: list[tuple[str, BaseException]] = []
        self._queue: list[tuple[float, float, int, int, _Task | None, Callable[[], object] | None]] = []
        self._order = itertools.count()
        self._main = threading.Lock()
        self._main.acquire()
        self._running: _Task | None = None
        self._stopped = False
        self._until = 0.0

    def call_at(self, at: float, call: Callable[[], object]) -> None:
        """Have ``call`` called, which must not wait."""
        heapq.heappush(self._queue, (at, self.rng.random(), next(self._order), 0, None, call))

    def wake(self, task: _Task, at: float) -> None:
        task.due += 1
        heapq.heappush(self._queue, (at, self.rng.random(), next(self._order), task.due, task, None))

    def elapse(self, seconds: float, event: threading.Event | None = None) -> None:
        """Let ``seconds`` go by for the running thread, or fewer if ``event`` is set."""
        task = self._running
        assert task is not None and task.thread is threading.current_thread()
        if task.process.dead:
            raise Killed
        task.event = event
        self.wake(task, self.now + seconds)
        for other in task.process.tasks:
            if other is not task and other.event is not None and other.event.is_set():
                self._signal(other)
        following = self._next()
        if following is not task:
            self._resume(following)
            task.gate.acquire()
        task.event = None
        if task.process.dead:
            raise Killed

    def run(self, until: float) -> bool:
        """Run until nothing is left to do, or until a virtual time; tell whether nothing is left."""
        self._until = until
        self._resume(self._next())
        self._main.acquire()
        finished, self._until = not self._stopped, math.inf
        self._queue = [entry for entry in self._queue if entry[4] is not None]
        heapq.heapify(self._queue)
        while self._queue:  # threads are left: end them
            for entry in self._queue:
                entry[4].process.dead = True
            self._resume(self._next())
            self._main.acquire()
        return finished

    def _signal(self, task: _Task) -> None:
        task.event = None
        self.wake(task, self.now)

    def _next(self) -> _Task | None:
        while self._queue:
            if self._queue[0][0] > self._until:
                self._stopped = True
                return None
            at, _, _, due, task, call = heapq.heappop(self._queue)
            if task is None:
                self.now = max(self.now, at)
                assert call is not None
                call()
            elif not task.done and due == task.due:
                self.now = max(self.now, at)
                if task.process.paused_until <= self.now or task.process.dead:
                    return task
                self.wake(task, task.process.paused_until)
        return None

    def _resume(self, task: _Task | None) -> None:
        self._running = task
        if task is None:
            self._main.release()
        elif task.thread is None:
            task.thread = threading.Thread(target=self._run, args=(task,), name=task.process.name, daemon=True)
            task.thread.start()
        else:
            task.gate.release()

    def _run(self, task: _Task) -> None:
        try:
            if not task.process.dead:
                task.target()
        except Killed:
            pass
        except BaseException as error:
            self.failures.append((task.process.name, error))
        task.done = True
        for other in task.process.tasks:
            if other.event is not None and other.event.is_set():
                self._signal(other)
        self._resume(self._next())
