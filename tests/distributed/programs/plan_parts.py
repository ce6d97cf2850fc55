"""Context- and tensor-parallel parts on 4 ranks, each against the dense form, and the largest tensor they make."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torchrun import report

from mixle.experimental.tensor_pipeline_context_parallel.context_parallel import attention_over, own_positions
from mixle.experimental.tensor_pipeline_context_parallel.engine import PlanEngine
from mixle.experimental.tensor_pipeline_context_parallel.mesh import PlanMesh
from mixle.experimental.tensor_pipeline_context_parallel.parallelize import parallelize
from mixle.experimental.tensor_pipeline_context_parallel.plan import Plan
from mixle.experimental.tensor_pipeline_context_parallel.tensor_parallel import next_token_losses
from mixle.models.transformer import CausalLM
from mixle.training.next_token import IGNORED, TokenTensors

B, H, T, K = 2, 3, 32, 8


class Largest(TorchDispatchMode):
    """Remember how many elements the largest tensor has that any operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self.elements = max(self.elements, leaf.numel())
        return out


def largest_difference(pairs) -> float:
    return max(float((a - b).detach().abs().max()) for a, b in pairs)


def attention_case(group, mode: str, dtype: torch.dtype, documents: bool) -> tuple[float, int]:
    torch.manual_seed(0)
    q, k, v, cotangent = (torch.randn(B, H, T, K, dtype=dtype) for _ in range(4))
    ids = torch.randint(0, 3, (B, T)).sort(1).values
    mask = torch.ones(T, T, dtype=torch.bool).tril()
    if documents:
        mask = (mask & (ids[:, :, None] == ids[:, None]))[:, None]
    dense = [x.double().clone().requires_grad_() for x in (q, k, v)]
    expected = F.scaled_dot_product_attention(*dense, attn_mask=mask)
    expected.backward(cotangent.double())
    own = own_positions(T, group.size(), group.rank(), mode)
    local = [x[:, :, own].clone().requires_grad_() for x in (q, k, v)]
    with Largest() as largest:
        found = attention_over(group, mode)(*local, documents=ids[:, own] if documents else None)
        found.backward(cotangent[:, :, own])
    pairs = [(found, expected[:, :, own]), *((a.grad, b.grad[:, :, own]) for a, b in zip(local, dense, strict=True))]
    return largest_difference(pairs), largest.elements


def largest_in_a_step(plan: Plan, vocab: int, length: int) -> int:
    """The largest tensor of a training step, optimizer aside, on any rank."""
    torch.manual_seed(0)
    model = CausalLM(vocab, 16, 2, 4, length, d_mlp=16)
    mesh = PlanMesh.of(pp=plan.pp, dp=plan.dp, cp=plan.cp, tp=plan.tp, device_type="cpu")
    parallelize(model, plan, mesh, fsdp=False, precision="fp32")
    engine = PlanEngine(model, batch_size=B, block=length)
    ids = torch.randint(0, vocab, (B, length))
    with Largest() as largest:
        engine.forward_backward(TokenTensors(ids, ids), 1.0, last=True)
    return largest.elements


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
groups = {}
for size in (1, 2, 4):
    made = [dist.new_group(list(range(first, first + size))) for first in range(0, world, size)]
    groups[size] = made[rank // size]

attention = {}
for size, group in groups.items():
    for mode in ("ring", "allgather"):
        for dtype in (torch.float32, torch.float64):
            for documents in (False, True):
                name = f"cp={size} {mode} {str(dtype)[6:]}{' documents' if documents else ''}"
                attention[name] = attention_case(group, mode, dtype, documents)

losses = {}
torch.manual_seed(1)
logits, targets = 20 * torch.randn(10, 8), torch.randint(0, 8, (10,))
targets[3] = IGNORED
dense = logits.clone().requires_grad_()
weights = torch.rand(10)
expected = F.cross_entropy(dense, targets, reduction="none")
expected.backward(weights)
for size, group in groups.items():
    own = logits.chunk(size, 1)[group.rank()].clone().requires_grad_()
    found = next_token_losses(own, targets, group)
    found.backward(weights)
    losses[f"tp={size}"] = largest_difference([(found, expected), (own.grad, dense.grad.chunk(size, 1)[group.rank()])])

largest = {
    "tp=4 logits": [largest_in_a_step(Plan(tp=4), 512, 32), B * 32 * 512],
    "tp=2 pp=2 logits": [largest_in_a_step(Plan(tp=2, pp=2, microbatches=2), 512, 32), B * 32 * 512],
    "tp=2 cp=2 logits": [largest_in_a_step(Plan(tp=2, cp=2), 512, 32), B * 32 * 512],
    "cp=4 keys and values": [largest_in_a_step(Plan(cp=4), 16, 256), B * 256 * 16],
}
report({"attention": attention, "losses": losses, "largest": largest})
dist.destroy_process_group()
