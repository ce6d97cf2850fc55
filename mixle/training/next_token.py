"""The objective of language models: the log-probability of each next token, from any module that gives logits.

Shapes: B rows, T tokens, K targets per row (1 or T), V vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mixle.training.modes import scoring_mode

Targets = Literal["last", "all"]
IGNORED = -100


class TokenTensors(NamedTuple):
    """Rows of token ids on the module's device.

    Attributes:
        inputs: (B, T) int64.
        targets: (B, K) int64, ``IGNORED`` where masked.
    """

    inputs: Tensor
    targets: Tensor


class NextToken:
    """Score next tokens with a module that maps (B, T) int64 ids to (B, V) or (B, T, V) logits.

    Args:
        module: if its ``forward`` takes ``last_only``, that spares it the logits that ``targets="last"`` does not ask.
        targets: ``"last"`` scores the token after each row, ``"all"`` the token after each position.
        autocast: run the module under bfloat16 autocast; losses are float32 in any case.
    """

    def __init__(self, module: nn.Module, targets: Targets, *, autocast: bool = False) -> None:
        self.targets = targets
        self._autocast = autocast
        takes_last_only = "last_only" in inspect.signature(module.forward).parameters
        self._options = {"last_only": True} if targets == "last" and takes_last_only else {}

    def logits(self, call: Callable[..., Tensor], inputs: Tensor) -> Tensor:
        """Return (B, K, V) logits, in the module's precision."""
        with torch.autocast(inputs.device.type, torch.bfloat16, enabled=self._autocast):
            logits = call(inputs, **self._options)
        if self.targets == "all":
            return logits
        return logits[:, -1:] if logits.ndim == 3 else logits[:, None]

    def loss_sum(self, call: Callable[..., Tensor], batch: TokenTensors) -> Tensor:
        """Return the sum of the real targets' negative log-probabilities, float32; 0 if there is none."""
        logits_NV = self.logits(call, batch.inputs).flatten(0, 1).float()
        return F.cross_entropy(logits_NV, batch.targets.flatten(), ignore_index=IGNORED, reduction="sum")

    def log_probabilities(self, call: Callable[..., Tensor], batch: TokenTensors) -> Tensor:
        """Return the log-probability of each target, (B, K) float32; 0 where masked."""
        logits_NV = self.logits(call, batch.inputs).flatten(0, 1).float()
        losses = F.cross_entropy(logits_NV, batch.targets.flatten(), ignore_index=IGNORED, reduction="none")
        return -losses.view(batch.targets.shape)

    def vocabulary(self, module: nn.Module, block: int, device: torch.device) -> int:
        """Return the number of token ids: ``module.vocab``, else the width of the logits.

        Runs the module once, in eval mode and without gradients, on one row of zeros; a collective call if it is
        sharded.

        Raises:
            TypeError, ValueError: what it returns is not logits of the right shape, or not as wide as ``module.vocab``.
        """
        with scoring_mode(module):
            logits = module(torch.zeros((1, block), dtype=torch.int64, device=device), **self._options)
        if not isinstance(logits, Tensor):
            raise TypeError(f"{type(module).__name__} returned a {type(logits).__name__}, not a tensor of logits")
        fits = logits.shape[:-1] in ([(1, block)] if self.targets == "all" else [(1, block), (1,)])
        if not fits:
            wanted = f"(1, {block}, V)" if self.targets == "all" else f"(1, V) or (1, {block}, V)"
            raise ValueError(
                f"{type(module).__name__} maps ids of shape (1, {block}) to {tuple(logits.shape)}; "
                f'targets="{self.targets}" needs {wanted}'
            )
        vocab = getattr(module, "vocab", logits.shape[-1])
        if vocab != logits.shape[-1]:
            raise ValueError(f"{type(module).__name__} has vocab={vocab} but returns {logits.shape[-1]} logits")
        return int(vocab)
