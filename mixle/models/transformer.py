"""A decoder-only transformer that knows nothing of how it is trained or split.

Pre-norm blocks, scaled dot-product attention, rotary or learned positions, tied embeddings. What a parallel plan takes
hold of is apart: ``embedding``, ``blocks``, ``norm`` and ``head`` are attributes of the model; queries, keys and values
have a projection each, whose rows are whole heads; ``attention.attend`` is a parameterless module that may be replaced;
and positions are passed down explicitly, so that a part of a sequence can have those it has in the whole.

Shapes: B batch, T time, D model width, H heads, K head width, V vocabulary, M width of the MLP.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mixle.utils.exact import require_choice, require_exact_bool, require_finite_float, require_positive_int

Position = Literal["rotary", "learned"]
Norm = Literal["rms", "layer"]

_INIT_STD = 0.02
_NORM_EPS = 1e-5
_ROTARY_BASE = 10_000.0


class CausalLM(nn.Module):
    """Predict each next token from those before it.

    Args:
        vocab: number of token ids.
        d_model: width of the residual stream.
        n_layer: number of blocks.
        n_head: attention heads; divides ``d_model``.
        block: the longest sequence that it takes.
        d_mlp: width of the hidden layer of each MLP; ``4 * d_model`` by default.
        dropout: of embeddings, attention weights and both residual branches, while training.
        position: ``"rotary"`` (Su et al., arXiv 2104.09864) or ``"learned"``.
        tie_embeddings: the head shares its weight with the embedding.
        bias: linear layers, and layer norms, have one.
        norm: ``"rms"`` (arXiv 1910.07467) or ``"layer"``.

    Raises:
        TypeError, ValueError: an argument that is not what it says above, a ``d_model`` that ``n_head`` does not
            divide, or heads of odd width with rotary positions.
    """

    uses_all_parameters = True  # in every forward pass, so that replicas need not look for those without a gradient

    def __init__(
        self,
        vocab: int,
        d_model: int,
        n_layer: int,
        n_head: int,
        block: int,
        *,
        d_mlp: int | None = None,
        dropout: float = 0.0,
        position: Position = "rotary",
        tie_embeddings: bool = True,
        bias: bool = False,
        norm: Norm = "rms",
    ) -> None:
        super().__init__()
        self.vocab = require_positive_int(vocab, "vocab")
        self.d_model = require_positive_int(d_model, "d_model")
        self.n_layer = require_positive_int(n_layer, "n_layer")
        self.n_head = require_positive_int(n_head, "n_head")
        self.block = require_positive_int(block, "block")
        self.d_mlp = 4 * self.d_model if d_mlp is None else require_positive_int(d_mlp, "d_mlp")
        self.dropout = require_finite_float(dropout, "dropout", minimum=0.0)
        if self.dropout >= 1:
            raise ValueError(f"dropout={self.dropout} must be below 1")
        self.position: Position = require_choice(position, "position", ("rotary", "learned"))
        self.tie_embeddings = require_exact_bool(tie_embeddings, "tie_embeddings")
        self.bias = require_exact_bool(bias, "bias")
        self.norm_kind: Norm = require_choice(norm, "norm", ("rms", "layer"))
        self._check_heads()

        self.embedding = nn.Embedding(self.vocab, self.d_model)
        self.position_embedding = nn.Embedding(self.block, self.d_model) if position == "learned" else None
        self.drop = nn.Dropout(self.dropout)
        self.blocks = nn.ModuleList(
            Block(
                self.d_model,
                self.n_head,
                self.d_mlp,
                dropout=self.dropout,
                rotary=position == "rotary",
                bias=self.bias,
                norm=self.norm_kind,
            )
            for _ in range(self.n_layer)
        )
        self.norm = _make_norm(self.norm_kind, self.d_model, self.bias)
        self.head = nn.Linear(self.d_model, self.vocab, bias=False)
        self.init_weights()

    def _check_heads(self) -> None:
        if self.d_model % self.n_head:
            divisors = [heads for heads in range(1, self.d_model + 1) if self.d_model % heads == 0]
            below = max(heads for heads in divisors if heads < self.n_head)
            above = min((heads for heads in divisors if heads > self.n_head), default=below)
            raise ValueError(
                f"n_head={self.n_head} must divide d_model={self.d_model}; nearest that do: "
                f"{', '.join(map(str, sorted({below, above})))}"
            )
        width = self.d_model // self.n_head
        if self.position == "rotary" and width % 2:
            raise ValueError(
                f'position="rotary" needs heads of even width, and d_model={self.d_model} / n_head={self.n_head} is '
                f'{width}; choose others or position="learned"'
            )

    @torch.no_grad()
    def init_weights(self) -> None:
        """Initialize every parameter in place; after ``to_empty`` on a model that was built on the meta device.

        Matrices are normal with standard deviation 0.02, those that write to the residual stream divided by
        ``sqrt(2 * n_layer)`` (Radford et al. 2019, section 2.3). With tied embeddings the stream at each position still
        holds that position's own embedding, whose logit would be ``0.02 * d_model``: where that is much for the
        vocabulary, the gain of the last norm starts below 1, so that a fresh model prefers no token.
        """
        for name, module in self.named_modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                residual = name.endswith((".attention.o", ".mlp.down"))
                nn.init.normal_(module.weight, std=_INIT_STD / math.sqrt(2 * self.n_layer) if residual else _INIT_STD)
            if isinstance(module, (nn.RMSNorm, nn.LayerNorm)):
                nn.init.ones_(module.weight)
            if isinstance(module, (nn.Linear, nn.LayerNorm)) and module.bias is not None:
                nn.init.zeros_(module.bias)
        largest_logit = max(0.5, math.log(self.vocab) - 2)
        nn.init.constant_(self.norm.weight, min(1.0, largest_logit / (_INIT_STD * self.d_model)))
        self._tie()

    def _tie(self) -> None:
        if self.tie_embeddings:
            self.head.weight = self.embedding.weight

    def _apply(self, fn: Any, recurse: bool = True) -> CausalLM:
        super()._apply(fn, recurse)
        # Moving off the meta device replaces parameters one by one, and would leave the head with one of its own.
        self._tie()
        return self

    @property
    def config(self) -> dict[str, Any]:
        """Every constructor argument, as JSON can carry them."""
        return {
            "vocab": self.vocab,
            "d_model": self.d_model,
            "n_layer": self.n_layer,
            "n_head": self.n_head,
            "block": self.block,
            "d_mlp": self.d_mlp,
            "dropout": self.dropout,
            "position": self.position,
            "tie_embeddings": self.tie_embeddings,
            "bias": self.bias,
            "norm": self.norm_kind,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> CausalLM:
        """Build a freshly initialized model from what :attr:`config` gives."""
        return cls(**config)

    def forward(self, ids: Tensor, positions: Tensor | None = None, *, last_only: bool = False) -> Tensor:
        """Return logits of the token after each position.

        Args:
            ids: (B, T) int64, T at most ``block``.
            positions: (T,) or (B, T) int64, where in the whole sequence the ids stand; 0 to T - 1 by default. They
                place the ids; which of them attends to which is up to their order, or to what replaces
                ``attention.attend``.
            last_only: apply the head to the last position only.

        Returns:
            (B, T, V), or (B, V) with ``last_only``.

        Raises:
            TypeError: ids that are not int64.
            ValueError: ids that are not (B, T), or T is 0 or larger than ``block``.
        """
        self._check_ids(ids)
        if positions is None:
            positions = torch.arange(ids.shape[1], device=ids.device)
        x_BTD = self.embedding(ids)
        if self.position_embedding is not None:
            x_BTD = x_BTD + self.position_embedding(positions)
        x_BTD = self.drop(x_BTD)
        for block in self.blocks:
            x_BTD = block(x_BTD, positions)
        if last_only:
            x_BTD = x_BTD[:, -1]
        return self.head(self.norm(x_BTD))

    def _check_ids(self, ids: Tensor) -> None:
        if ids.dtype != torch.int64:
            raise TypeError(f"ids must be int64, not {ids.dtype}")
        if ids.ndim != 2:
            raise ValueError(f"ids must be (batch, time), not of shape {tuple(ids.shape)}")
        if not 1 <= ids.shape[1] <= self.block:
            raise ValueError(f"ids have {ids.shape[1]} tokens; the model takes 1 to block={self.block}")


class Block(nn.Module):
    """One layer: attention and an MLP, each on the normed residual stream and added to it."""

    def __init__(
        self, d_model: int, n_head: int, d_mlp: int, *, dropout: float, rotary: bool, bias: bool, norm: Norm
    ) -> None:
        super().__init__()
        self.attention_norm = _make_norm(norm, d_model, bias)
        self.attention = SelfAttention(d_model, n_head, dropout=dropout, rotary=rotary, bias=bias)
        self.mlp_norm = _make_norm(norm, d_model, bias)
        self.mlp = MLP(d_model, d_mlp, bias=bias)
        self.drop = nn.Dropout(dropout)

    def forward(self, x_BTD: Tensor, positions: Tensor) -> Tensor:
        x_BTD = x_BTD + self.drop(self.attention(self.attention_norm(x_BTD), positions))
        return x_BTD + self.drop(self.mlp(self.mlp_norm(x_BTD)))


class SelfAttention(nn.Module):
    """Project to heads, turn queries and keys by their positions, attend, project back.

    The number of heads is read off the projections' outputs: a rank that holds some rows has some heads.
    """

    def __init__(self, d_model: int, n_head: int, *, dropout: float, rotary: bool, bias: bool) -> None:
        super().__init__()
        self.head_width = d_model // n_head
        self.rotary = rotary
        self.q = nn.Linear(d_model, d_model, bias=bias)
        self.k = nn.Linear(d_model, d_model, bias=bias)
        self.v = nn.Linear(d_model, d_model, bias=bias)
        self.o = nn.Linear(d_model, d_model, bias=bias)
        self.attend: nn.Module = CausalAttention(dropout)

    def forward(self, x_BTD: Tensor, positions: Tensor) -> Tensor:
        q_BHTK, k_BHTK, v_BHTK = (self._heads(project(x_BTD)) for project in (self.q, self.k, self.v))
        if self.rotary:
            cos, sin = rotary_angles(positions, self.head_width)
            q_BHTK, k_BHTK = rotate(q_BHTK, cos, sin), rotate(k_BHTK, cos, sin)
        y_BHTK = self.attend(q_BHTK, k_BHTK, v_BHTK)
        return self.o(y_BHTK.transpose(1, 2).flatten(2))

    def _heads(self, x_BTD: Tensor) -> Tensor:
        return x_BTD.unflatten(-1, (-1, self.head_width)).transpose(1, 2)


class CausalAttention(nn.Module):
    """Attend to the same and earlier places: (B, H, T, K) queries, keys and values to (B, H, T, K)."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout

    def forward(self, q_BHTK: Tensor, k_BHTK: Tensor, v_BHTK: Tensor) -> Tensor:
        dropout = self.dropout if self.training else 0.0
        return F.scaled_dot_product_attention(q_BHTK, k_BHTK, v_BHTK, dropout_p=dropout, is_causal=True)


class MLP(nn.Module):
    """Two linear layers with a GELU between them."""

    def __init__(self, d_model: int, d_mlp: int, *, bias: bool) -> None:
        super().__init__()
        self.up = nn.Linear(d_model, d_mlp, bias=bias)
        self.down = nn.Linear(d_mlp, d_model, bias=bias)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x_BTD)))


def rotary_angles(positions: Tensor, head_width: int) -> tuple[Tensor, Tensor]:
    """Return cosines and sines of the rotary angles (arXiv 2104.09864, equation 15) in float32.

    They are computed where they are used, from integer positions: no table has to follow the model to another device
    or dtype, or through a wrapper that casts what it passes on.

    Args:
        positions: (T,) or (B, T) int64.
        head_width: K, even.

    Returns:
        Two tensors (T, K / 2) or (B, 1, T, K / 2).
    """
    exponents = torch.arange(0, head_width, 2, device=positions.device, dtype=torch.float32) / head_width
    angles = positions[..., None].float() * _ROTARY_BASE**-exponents
    angles = angles if positions.ndim == 1 else angles[:, None]
    return angles.cos(), angles.sin()


def rotate(x_BHTK: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn component i of each head with component i + K / 2 by the i-th angle."""
    first, second = x_BHTK.float().chunk(2, dim=-1) if x_BHTK.dtype != torch.float64 else x_BHTK.chunk(2, dim=-1)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return turned.to(x_BHTK.dtype)


def _make_norm(norm: Norm, d_model: int, bias: bool) -> nn.RMSNorm | nn.LayerNorm:
    if norm == "rms":
        return nn.RMSNorm(d_model, eps=_NORM_EPS)
    return nn.LayerNorm(d_model, eps=_NORM_EPS, bias=bias)
