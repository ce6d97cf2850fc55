"""Two ranks meet, agree, fail and rejoin; each case's results go under its name."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from torchrun import error_of, report, wait_for_report

from mixle.utils.parallel.process_group import join

results: dict[str, object] = {}
first, second = join(deadline_s=20.0), join(deadline_s=20.0)
rank = first.rank

results["values"] = first.exchange("lengths", str(10 * rank))
results["verdict"] = error_of(first.agree, "checking", ValueError("id 9 is too large") if rank == 1 else None)
results["verdicts differ"] = error_of(first.agree, "checking", KeyError("a") if rank == 0 else TypeError("b"))
results["usable after a verdict"] = error_of(first.agree, "checking", None)

if rank == 0:
    results["alone"] = error_of(first.meet, "scoring", deadline_s=0.3)
    report(results)
wait_for_report(0)
results["together after that"] = error_of(first.meet, "scoring")

first.close()
first.close()
total = torch.ones(1)
dist.all_reduce(total)
results["sum after the first user left"] = float(total)
second.close()
results["group after the last left"] = dist.is_initialized()
results["meeting after the last left"] = error_of(second.meet, "scoring")

third = join(deadline_s=20.0)


def train_until_rank_1_fails() -> None:
    with third.guard("training"):
        dist.all_reduce(torch.ones(1))
        if rank == 1:
            raise ZeroDivisionError("step 3")
        dist.all_reduce(torch.ones(1))


started = time.monotonic()
results["failure"] = error_of(train_until_rank_1_fails)
results["prompt"] = time.monotonic() - started < 15.0
results["after the failure"] = error_of(third.meet, "scoring")

fourth = join(deadline_s=20.0, collective_timeout_s=2.0)
total = torch.ones(1)
dist.all_reduce(total)
results["sum after rejoining"] = float(total)


def train_while_rank_1_is_stuck() -> None:
    with fourth.guard("training"):
        dist.all_reduce(torch.ones(1))


if rank == 0:
    results["stuck"] = error_of(train_while_rank_1_is_stuck)
    report(results | {"done": True})
else:
    report(results)
wait_for_report(0, "done")
