"""A run of a model's layers: what one stage of a pipeline computes, for this rank's part of heads and sequence."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from mixle.experimental.tensor_pipeline_context_parallel.collectives import gather_along
from mixle.experimental.tensor_pipeline_context_parallel.context_parallel import own_positions
from mixle.experimental.tensor_pipeline_context_parallel.plan import CpMode
from mixle.experimental.tensor_pipeline_context_parallel.tensor_parallel import SEQUENCE, next_token_losses
from mixle.models.transformer import CausalLM


class Stage(nn.Module):
    """Some blocks of a :class:`CausalLM`, with its embeddings if they are the first, its norm and head if the last.

    Its parameters are the model's own, under the same names. A rank holds (B, t, D) of the hidden state: its tensor
    rank's part of its context rank's part of the sequence.

    Args:
        model: the whole, or what :func:`~.tensor_parallel.split_over` left of it.
        blocks: which of its blocks.
        tensor, context: the axes; None where there is one rank and no process group.
        autocast: run under bfloat16 autocast.
    """

    def __init__(
        self,
        model: CausalLM,
        blocks: range,
        *,
        tensor: ProcessGroup | None = None,
        context: ProcessGroup | None = None,
        mode: CpMode = "ring",
        autocast: bool = False,
    ) -> None:
        super().__init__()
        self.is_first, self.is_last = blocks.start == 0, blocks.stop == len(model.blocks)
        self.longest, self.width = model.block, model.d_model
        self.embedding = model.embedding if self.is_first else None
        self.position_embedding = model.position_embedding if self.is_first else None
        self.drop = model.drop
        self.blocks = nn.ModuleDict({str(i): model.blocks[i] for i in blocks})
        self.norm = model.norm if self.is_last else None
        self.head = model.head if self.is_last else None
        self._tensor, self._context, self._mode, self._autocast = tensor, context, mode, autocast

    def forward(self, x: Tensor, targets: Tensor | None = None, at: Tensor | None = None) -> Tensor:
        """Return the hidden state, or what the last stage makes of it.

        Args:
            x: (B, T) ids for the first stage, T tokens of this context rank; else the (B, t, D) hidden state.
            targets: (B, T) int64, or (B, 1) with ``at``; only the last stage reads them.
            at: (B,) int64, the one place of each row to which the head is applied.

        Returns:
            (B, t, D) before the last stage; there the (1,) sum of the losses if there are targets, else the
            (B, T, v) or (B, 1, v) logits of this tensor rank's part of the vocabulary.
        """
        with torch.autocast(x.device.type, torch.bfloat16, enabled=self._autocast):
            x = self._hidden(x)
            if self.norm is None or self.head is None:
                return x
            x = self.norm(x)
            if self._tensor is not None:
                x = gather_along(x, SEQUENCE, self._tensor)
            if at is not None:
                x = x[torch.arange(len(x), device=x.device), at][:, None]
            logits = self.head(x)
        if targets is None:
            return logits
        return self.losses(logits, targets).flatten().sum(0, keepdim=True)

    def losses(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the negative log-probability of each target, (B, K) float32; 0 where masked."""
        losses = next_token_losses(logits.flatten(0, 1).float(), targets.flatten(), self._tensor)
        return losses.view(targets.shape)

    def _hidden(self, x: Tensor) -> Tensor:
        tp = 1 if self._tensor is None else self._tensor.size()
        length = x.shape[1] if self.embedding is not None else x.shape[1] * tp
        positions = self._positions(length, x.device)
        if self.embedding is not None:
            x = self.embedding(x)
            if self.position_embedding is not None:
                own = positions if self._tensor is None else positions.chunk(tp)[self._tensor.rank()]
                x = x + self.position_embedding(own)
            x = self.drop(x)
        for block in self.blocks.values():
            x = block(x, positions)
        return x

    def _positions(self, length: int, device: torch.device) -> Tensor:
        """Return where this rank's tokens stand; those that pad a sequence to equal parts share the last place."""
        cp, rank = (1, 0) if self._context is None else (self._context.size(), self._context.rank())
        return own_positions(length * cp, cp, rank, self._mode).clamp(max=self.longest - 1).to(device)
