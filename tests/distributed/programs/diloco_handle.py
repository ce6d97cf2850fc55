"""One site of a run: a torchrun job that trains on its share of the tokens, meets the other site, and reports.

Arguments: the mailbox, the site's name (a or b), how its ranks train (ddp or fsdp), what happens, and a folder for its
state. What happens: ``train``; ``killed``, in the middle, all its processes; ``until-b``, train until site b has come a
second time.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys

import numpy as np
import torch
import torch.distributed as dist
from torchrun import descendants, report

from mixle import seq_estimate
from mixle.diloco import Barrier, DiLoCo, align, open_mailbox
from mixle.diloco.torch_ranks import TorchRanks
from mixle.models.streaming_transformer_leaf import StreamingTransformerLeafEstimator
from mixle.models.transformer import CausalLM
from mixle.training import TrainingOptions
from mixle.utils.parallel.diloco import DiLoCoEncodedData
from mixle.utils.parallel.torch_neural import StreamingTokenEncodedData

VOCAB, BLOCK = 11, 8
KILLED_AT_STEP = 17
url, site, wrapping, what, folder = sys.argv[1:]
tokens = np.array_split(np.random.default_rng(0).integers(0, VOCAB, 1600), 2)["ab".index(site)]
torch.manual_seed(ord(site))  # the run's parameters are those of whoever comes first
module = CausalLM(VOCAB, 8, 2, 2, BLOCK)


def kill_site(record) -> None:
    if what == "killed" and record.step == KILLED_AT_STEP and dist.get_rank() == 0:
        for each in [os.getppid(), *(pid for pid in descendants(os.getppid()) if pid != os.getpid())]:
            os.kill(each, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)


def digest() -> str:
    whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for _, p in sorted(module.named_parameters())]
    return hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in whole)).hexdigest()


def go_on() -> bool:
    """Whether site b has not come back yet, as rank 0 sees it."""
    answer = [what == "until-b" and not open_mailbox(url).list("barriers/back/")]
    dist.broadcast_object_list(answer)
    return answer[0]


inner = StreamingTokenEncodedData(
    tokens,
    block=BLOCK,
    batch_size=2,
    targets="all",
    epochs=1,
    parallel=wrapping,
    training=TrainingOptions(callbacks=(kill_site,), progress=False, deadline_s=60.0),
)
handle = DiLoCoEncodedData(
    inner,
    algorithm=DiLoCo(6, 2),
    mailbox=url,
    learner_id=f"site-{site}",
    poll_interval=0.05,
    lease_every=0.2,
    lease_timeout=2.0,
    state_dir=folder,
)
leaf = seq_estimate(handle, StreamingTransformerLeafEstimator(module))
resumed = handle.session.resumed
while go_on():
    leaf = seq_estimate(handle, StreamingTransformerLeafEstimator(module), leaf)
if site == "b" and dist.get_rank() == 0:
    open_mailbox(url).put_if_absent("barriers/back/b", b"")
flushed = handle.leave()
after_leaving = digest()
if dist.get_rank() == 0:
    meeting = Barrier(open_mailbox(url), "left", learner_id=f"site-{site}", parties=["site-a", "site-b"])
    meeting.wait(deadline_s=120.0)
dist.barrier()
newest = align(module, mailbox=url, ranks=TorchRanks())
report(
    {
        "flushed": flushed,
        "after leaving": after_leaving,
        "newest": newest,
        "theta": digest(),
        "steps": leaf.state.step,
        "resumed": None if resumed is None else [resumed.steps, resumed.state["step"]],
    }
)
handle.close()
