from __future__ import annotations

import sys

import numpy as np
import torch

from mixle import seq_estimate
from mixle.models import CausalLM, StreamingTransformerLeafEstimator
from mixle.training import TrainingOptions
from mixle.utils.parallel.torch_neural import StreamingTokenEncodedData

tokens = np.fromfile(sys.argv[1], dtype=np.uint8)
with StreamingTokenEncodedData(
    tokens,
    block=128,
    batch_size=8,
    targets="all",
    sampling="global",
    training=TrainingOptions(max_grad_norm=1.0),
) as handle:
    module = CausalLM(vocab=256, d_model=64, n_layer=2, n_head=2, block=128)
    estimator = StreamingTransformerLeafEstimator(
        module, lr=6e-3, device="cuda" if torch.cuda.is_available() else "cpu", warmup_steps=20
    )
    leaf = seq_estimate(handle, estimator).unshard()
    if handle.rank == 0:
        leaf.save("model")
        print(f"{handle.world} ranks, {len(leaf.history)} steps, loss {leaf.history[-1].loss:.3f}")
