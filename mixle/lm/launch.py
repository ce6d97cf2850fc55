"""Run the job as several processes on this machine, under torchrun."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence


def run_under_torchrun(processes: int, arguments: Sequence[str]) -> int:
    """Run ``python -m mixle ARGUMENTS`` as ``processes`` ranks and return the exit status.

    Each rank is in a session of its own, so a Ctrl-C in the terminal reaches this process alone, which passes it on and
    waits for the ranks to save and leave.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    # The ranks report what went wrong and what to do; torchrun's own account of it would only bury that.
    logging.disable(logging.CRITICAL)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // processes)))
    local = ["--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", str(processes)]
    asked = parse_args([*local, "--module", "mixle"])
    asked.training_script_args = list(arguments)  # parsed with the rest, --nproc would be taken for one of torchrun's
    try:
        run(asked)
    except SignalException as error:
        return 128 + int(error.sigval)
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
    return 0
