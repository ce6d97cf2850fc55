"""Kill something every two seconds, and check what the students get: ``soak.py --seconds 300``.

Three workers, a leader that takes batches and switches the model, a follower that takes samples, and a trainer with a
DistillDataLoader of two workers; with ``--direct`` a leader and two students that take one sample at a time, from
teachers so fast that most orders do not go through the broker. One of these, the broker or a loader worker dies by
SIGKILL every ``--every`` seconds and comes again. Every sample must be whole, new, and not older than what its reader
knew; nothing may stay in /dev/shm.

Printed: how long each fault kept each student waiting that outlived it, and was not still starting when it struck,
counted from when the broker is up again if it was the broker. Samples that come later than ``--within`` seconds after a
fault are a failure.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import threading
import time
from collections import Counter, defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3] / "support"))

from teacher_processes import Processes, teacher_processes, until

from mixle.data.teacher.stats_client import StatsClient

WORKERS = 3
SECONDS_A_SAMPLE, SECONDS_A_DIRECT_SAMPLE = 0.004, 0.0003
SWITCH_S = 1.7


class Ledger:
    """Read what the students print, and check it."""

    def __init__(self) -> None:
        self.faults: list[str] = []
        self.arrivals: dict[str, list[float]] = defaultdict(list)
        self.newest = 0
        self.notes: Counter[tuple[str, str]] = Counter()
        self._seen: set[int] = set()
        self._lock = threading.Lock()

    def follow(self, name: str, process: subprocess.Popen[str]) -> None:
        threading.Thread(target=self._follow, args=(name, process), daemon=True).start()

    def _follow(self, name: str, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            line, mark, note = line.partition("#")  # the trainer's notes may come in the middle of a line
            if mark:
                self.notes[name, note.strip()] += 1
            if mark or line == "up\n":
                continue
            words = line.split()
            if len(words) != 4 or not line.endswith("\n"):
                if process.poll() is None and line.endswith("\n"):
                    self.faults.append(f"{name} said {line!r}")
                continue  # cut off by its death
            at, known, model, number = float(words[0]), *map(int, words[1:])
            with self._lock:
                if model < known:
                    self.faults.append(f"{name} got a sample of model {model} when it knew of {known}")
                if number in self._seen:
                    self.faults.append(f"{name} got sample {number} a second time")
                self._seen.add(number)
                self.newest = max(self.newest, model)
                self.arrivals[name].append(at)
        if process.wait() not in (0, -9):
            self.faults.append(f"{name} ended with {process.returncode}")

    @property
    def count(self) -> int:
        return len(self._seen)

    def gap(self, name: str, since: float, before: float) -> float | None:
        """Return how long after ``since`` the next sample came, plus any longer wait until ``before``."""
        with self._lock:
            times = [at for at in self.arrivals[name] if since <= at <= before]
        waits = [later - earlier for earlier, later in zip([since, *times], times, strict=False)]
        return max(waits, default=None)


class Soak:
    """The run, what lives in it, and what was done to it."""

    def __init__(self, run: Processes, seed: int, *, direct: bool) -> None:
        self.run, self.ledger, self.dice, self.direct = run, Ledger(), random.Random(seed), direct
        self.broker = run.start("broker", heartbeat_s=0.1)
        self.workers = [self._worker() for _ in range(WORKERS)]
        self.students: dict[str, subprocess.Popen[str]] = {}
        for name in ("leader", "student", "another" if direct else "trainer"):
            self._start(name)
        self.done: list[tuple[float, str, float, str | None]] = []  # struck at, what, all is back since, whom

    def _worker(self) -> subprocess.Popen[str]:
        return self.run.start("worker", argument=SECONDS_A_DIRECT_SAMPLE if self.direct else SECONDS_A_SAMPLE)

    def _start(self, name: str) -> None:
        single = {"slots": 1, "size": 1} if self.direct else {}
        if name == "leader":
            process = self.run.start("leader", ready=False, every_s=SWITCH_S, **single)
        elif name != "trainer":
            process = self.run.start("student", ready=False, rank=1, **single)
        else:
            process = self.run.start("trainer", ready=False, rank=2)
        self.students[name] = process
        self.ledger.follow(name, process)

    def _reap(self, process: subprocess.Popen[str]) -> None:
        process.kill()
        process.wait()
        self.run.started.remove(process)

    def strike(self) -> None:
        """Kill one thing, start it again, and note from when on all others should be served as before."""
        what = self.dice.choice(["worker", "worker", "workers", "broker", "broker", "student", "loader worker"])
        victim = None
        struck = began = time.monotonic()
        if what == "worker":
            at = self.dice.randrange(WORKERS)
            self.run.kill(self.workers[at])
            self.workers[at] = self._worker()
        elif what == "workers":
            for process in self.workers:
                self.run.kill(process)
            self.workers = [self._worker() for _ in range(WORKERS)]
            began = time.monotonic()
        elif what == "broker":
            self.run.kill(self.broker)
            self.broker = self.run.start("broker", heartbeat_s=0.1)
            began = time.monotonic()
        elif what == "student":
            victim = self.dice.choice(list(self.students))
            self._reap(self.students[victim])
            self._start(victim)
        elif not self.direct:
            victim = "trainer"
            children = Path(f"/proc/{self.students['trainer'].pid}/task").glob("*/children")
            pids = [int(pid) for path in children for pid in path.read_text().split()]
            if not pids:
                return
            subprocess.run(["kill", "-9", str(self.dice.choice(pids))], check=False)
        self.done.append((struck, what, began, victim))

    def close(self) -> None:
        for process in [*self.students.values(), *self.workers]:
            self._reap(process)


def waits(soak: Soak, until_s: float) -> list[tuple[float, str, str]]:
    """Return (seconds, fault, student) for every student that outlived a fault, and had samples before it."""
    ends = [struck for struck, *_ in soak.done[1:]] + [until_s]
    found = []
    died = dict.fromkeys(soak.students, 0.0)
    for (struck, what, began, victim), end in zip(soak.done, ends, strict=True):
        if victim is not None:
            died[victim] = struck
        for name in soak.students:
            if name != victim and soak.ledger.gap(name, died[name], struck) is not None:
                gap = soak.ledger.gap(name, began, end)
                found.append((end - began if gap is None else gap, what, name))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--every", type=float, default=2.0)
    parser.add_argument("--within", type=float, default=None, help="fail if a student waited longer than this")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--direct", action="store_true", help="one slot a student, and fast teachers")
    options = parser.parse_args()
    with teacher_processes() as run:
        soak = Soak(run, options.seed, direct=options.direct)
        ledger = soak.ledger
        until(lambda: all(ledger.arrivals[name] for name in soak.students), "samples for all students")
        began = time.monotonic()
        while time.monotonic() < began + options.seconds:
            soak.strike()
            time.sleep(options.every)  # from when all is back
        ended = time.monotonic()
        before = {name: len(ledger.arrivals[name]) for name in soak.students}
        until(
            lambda: ledger.faults or all(len(ledger.arrivals[name]) > before[name] for name in before),
            "samples for all at the end",
        )
        with StatsClient(run.frontend) as client:
            figures = client.ask()
        soak.close()
        run.kill(soak.broker)
        soak.broker = run.start("broker", heartbeat_s=0.1)  # the next process of the run clears up
        until(lambda: not run.segments(), "the clearing up of /dev/shm", 20.0)
        found = sorted(waits(soak, ended))
    print(f"{ledger.count} samples in {ended - began:.0f} s, {len(soak.done)} faults, model {ledger.newest} at the end")
    print(f"since the broker's last start {figures.direct} of {figures.completed} were ordered directly")
    for what in sorted({what for _, what, _ in found}):
        seconds = [one for one, kind, _ in found if kind == what]
        median, most, tenth = (seconds[int(share * (len(seconds) - 1))] for share in (0.5, 1.0, 0.9))
        print(f"{what:>14}: {len(seconds):3} waits, median {median:.2f} s, 90 % {tenth:.2f} s, most {most:.2f} s")
    for wait, what, name in [one for one in found if one[0] > (options.within or 2.0)]:
        print(f"{name} waited {wait:.2f} s after the death of: {what}")
        if options.within is not None:
            ledger.faults.append(f"{name} waited {wait:.2f} s for its next sample")
    for (name, note), count in ledger.notes.items():
        print(f"{name} noted {count} times: {note}")
    print("\n".join(ledger.faults[:20]) or "no stale, duplicate or torn sample; nothing left in /dev/shm")
    return 1 if ledger.faults else 0


if __name__ == "__main__":
    raise SystemExit(main())
