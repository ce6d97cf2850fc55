"""Train under plans of two ranks, in children of the launched processes; rank 1's is killed in the middle of each."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

from torchrun import report, wait_for_report

RANK, PLANS = os.environ["RANK"], ("tp_size", "pp_size", "cp_size")


def train(plan: str) -> None:
    """Train in this process; say how it ended."""
    import numpy as np
    import torch

    from mixle import seq_estimate
    from mixle.models.streaming_transformer_leaf import StreamingTransformerLeafEstimator
    from mixle.models.transformer import CausalLM
    from mixle.training import TrainingOptions
    from mixle.utils.parallel.torch_neural import StreamingTokenEncodedData

    torch.manual_seed(0)
    module, died = CausalLM(24, 16, 2, 2, 16), [0.0]

    def die(record: object) -> None:
        if record.step == 2:
            died[0] = time.monotonic()
            if RANK == "1":
                os.kill(os.getpid(), signal.SIGKILL)

    options = TrainingOptions(callbacks=(die,))
    handle = StreamingTokenEncodedData(
        np.arange(2000) % 24, block=16, batch_size=4, targets="all", training=options, **{plan: 2}
    )
    try:
        seq_estimate(handle, StreamingTransformerLeafEstimator(module))
    except Exception as error:
        print(f"{time.monotonic() - died[0]:.1f} {type(error).__name__}: {error}")


if sys.argv[1:]:
    train(sys.argv[1])
else:
    # torchrun ends the others as soon as one of its own processes dies: what they say for themselves would be lost.
    results = {}
    port = int(os.environ["MASTER_PORT"])
    for place, name in enumerate(PLANS):
        environment = {**os.environ, "MASTER_PORT": str(port + 1 + place), "TORCHELASTIC_USE_AGENT_STORE": "False"}
        child = [sys.executable, __file__, name]
        ended = subprocess.run(child, env=environment, stdout=subprocess.PIPE, text=True, timeout=60, check=False)
        results[name] = [ended.returncode, ended.stdout]
        report(results)
        wait_for_report(1 - int(RANK), name)
