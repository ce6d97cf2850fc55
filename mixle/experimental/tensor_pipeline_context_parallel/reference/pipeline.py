"""A model cut into stages, through which microbatches pass one after the other, forward and back."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from mixle.experimental.tensor_pipeline_context_parallel.plan import split_blocks
from mixle.experimental.tensor_pipeline_context_parallel.stage import Stage
from mixle.models.transformer import CausalLM


class PipelineResult(NamedTuple):
    """What a pipeline makes of one batch.

    Attributes:
        loss_sum: over all real targets.
        gradients: of ``loss_sum``, by parameter of the dense model.
        sent: elements that crossed from one stage to the next, forward and back.
        tied: how tied embeddings were dealt with, None if there are none.
    """

    loss_sum: Tensor
    gradients: dict[str, Tensor]
    sent: int
    tied: str | None


def pipeline_step(model: CausalLM, ids: Tensor, targets: Tensor, *, stages: int, microbatches: int) -> PipelineResult:
    """Run a batch through ``stages`` stages in ``microbatches`` parts.

    Stages meet only in what one hands to the next: its output, and in return that output's gradient. Microbatches need
    not be equally large, nor have equally many real targets: sums are taken, and no mean.

    Args:
        ids: (B, T) int64.
        targets: (B, T) int64, ``IGNORED`` where masked.
    """
    parts = [Stage(model, blocks) for blocks in split_blocks(len(model.blocks), stages)]
    # A stage on another rank has a copy of its own of tied embeddings; here a view of the same values.
    copied = model.tie_embeddings and stages > 1
    if copied:
        parts[-1].head = torch.nn.Linear(model.d_model, model.vocab, bias=False, device="meta")
        parts[-1].head.weight = torch.nn.Parameter(model.embedding.weight.detach())
    found: dict[str, Tensor] = {}
    loss_sum, sent = torch.zeros(()), 0
    for some_ids, some_targets in zip(ids.tensor_split(microbatches), targets.tensor_split(microbatches), strict=True):
        inputs, outputs = [some_ids], []
        for part in parts:
            outputs.append(part(inputs[-1], some_targets))
            inputs.append(outputs[-1].detach().requires_grad_())
        loss_sum = loss_sum + outputs[-1].detach().sum()
        grad = torch.ones_like(outputs[-1])
        for part, own_input, output in zip(reversed(parts), reversed(inputs[:-1]), reversed(outputs), strict=True):
            _add_gradients(found, part, own_input, output, grad)
            if own_input.grad is not None:
                grad = own_input.grad
                sent += 2 * grad.numel()
    if copied:
        found["embedding.weight"] = found["embedding.weight"] + found.pop("head.weight")
    tied = None
    if model.tie_embeddings:
        tied = "two copies, gradients added" if copied else "one parameter in one stage"
    return PipelineResult(loss_sum, found, sent, tied)


def _add_gradients(found: dict[str, Tensor], part: Stage, own_input: Tensor, output: Tensor, grad: Tensor) -> None:
    parameters = dict(part.named_parameters())
    wanted = [*parameters.values(), *([own_input] if own_input.requires_grad else [])]
    gradients = torch.autograd.grad(output, wanted, grad)
    for name, gradient in zip(parameters, gradients, strict=False):
        found[name] = found[name] + gradient if name in found else gradient
    if own_input.requires_grad:
        own_input.grad = gradients[-1]
