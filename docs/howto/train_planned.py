from __future__ import annotations

import os
import sys

import numpy as np

from mixle import seq_estimate
from mixle.experimental.tensor_pipeline_context_parallel import propose_plans
from mixle.models import CausalLM, StreamingTransformerLeafEstimator
from mixle.training import TrainingOptions
from mixle.utils.parallel.torch_neural import StreamingTokenEncodedData

tokens = np.fromfile(sys.argv[1], dtype=np.uint8)
module = CausalLM(vocab=256, d_model=64, n_layer=4, n_head=4, block=128)
world = int(os.environ["WORLD_SIZE"])
plans = propose_plans(module, world, hardware="cpu", global_batch_size=16, seq_len=128, precision="fp32")
chosen = plans.ties[0]
with StreamingTokenEncodedData(
    tokens,
    targets="all",
    training=TrainingOptions(gradient_accumulation=chosen.accumulation, max_grad_norm=1.0),
    **chosen.handle_arguments(),
) as handle:
    leaf = seq_estimate(handle, StreamingTransformerLeafEstimator(module, lr=3e-3))
    leaf.save("model")  # every rank calls it, rank 0 writes
    if handle.rank == 0:
        print(plans)
        print(f"trained under {chosen.plan}: {len(leaf.history)} steps, loss {leaf.history[-1].loss:.3f}")
