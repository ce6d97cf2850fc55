"""Train a byte-level language model at one of several sites: python site.py URL NAME TEXT [EPOCHS]"""

from __future__ import annotations

import logging
import sys

import numpy as np
import torch

from mixle import seq_estimate
from mixle.diloco import DiLoCo
from mixle.models.streaming_transformer_leaf import StreamingTransformerLeafEstimator
from mixle.models.transformer import CausalLM
from mixle.utils.parallel.diloco import DiLoCoEncodedData
from mixle.utils.parallel.torch_neural import StreamingTokenEncodedData

url, name, text, *rest = sys.argv[1:]
logging.basicConfig(level=logging.INFO, format="%(message)s")
torch.manual_seed(0)
module = CausalLM(vocab=256, d_model=32, n_layer=2, n_head=2, block=32)
tokens = np.fromfile(text, dtype=np.uint8)

handle = DiLoCoEncodedData(
    StreamingTokenEncodedData(tokens, block=32, batch_size=8, targets="all"),
    algorithm=DiLoCo(sync_every=20, fragments=4),
    mailbox=url,
    learner_id=name,
    state_dir=f"state-{name}",
    poll_interval=0.2,
)
leaf = None
for _ in range(int(rest[0]) if rest else 1):
    leaf = seq_estimate(handle, StreamingTransformerLeafEstimator(module), leaf)
if handle.rank == 0:  # under torchrun a site is several processes
    print(f"{name}: {leaf.state.step} steps, {handle.session.rounds_seen} rounds, loss {leaf.history[-1]:.3f}")
handle.leave()
leaf.save(f"model-{name}")
handle.close()
