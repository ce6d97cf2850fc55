"""What the cost model needs to know of a transformer: its widths, from a module or from numbers."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, Literal

from mixle.utils.exact import require_choice, require_exact_bool, require_nonnegative_int, require_positive_int

Norm = Literal["rms", "layer"]


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """The widths of a decoder-only transformer with pre-norm blocks.

    Attributes:
        vocab: token ids.
        d_model: width of the residual stream.
        n_layer: blocks.
        n_head: query heads.
        n_kv_head: key and value heads; ``n_head`` by default.
        head_width: ``d_model / n_head`` by default.
        d_mlp: hidden width of the MLP; ``4 * d_model`` by default.
        gated: the MLP has a gate (three matrices), not two.
        tied: the head shares the embedding's weight.
        bias: linear layers, and layer norms, have one.
        norm: ``"rms"`` or ``"layer"``.
        learned_positions: rows of a learned position embedding, 0 for none.
    """

    vocab: int
    d_model: int
    n_layer: int
    n_head: int
    n_kv_head: int = 0
    head_width: int = 0
    d_mlp: int = 0
    gated: bool = False
    tied: bool = True
    bias: bool = False
    norm: Norm = "rms"
    learned_positions: int = 0
    name: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        for attribute in ("vocab", "d_model", "n_layer", "n_head"):
            object.__setattr__(self, attribute, require_positive_int(getattr(self, attribute), attribute))
        for attribute in ("n_kv_head", "head_width", "d_mlp", "learned_positions"):
            object.__setattr__(self, attribute, require_nonnegative_int(getattr(self, attribute), attribute))
        if self.head_width == 0 and self.d_model % self.n_head:
            raise ValueError(
                f"n_head={self.n_head} must divide d_model={self.d_model}; nearest that does: "
                f"{max(h for h in range(1, min(self.n_head, self.d_model + 1)) if self.d_model % h == 0)}, "
                "or give head_width"
            )
        defaults = {
            "n_kv_head": self.n_head,
            "head_width": self.d_model // self.n_head,
            "d_mlp": 4 * self.d_model,
        }
        for attribute, value in defaults.items():
            object.__setattr__(self, attribute, getattr(self, attribute) or value)
        if self.n_head % self.n_kv_head:
            fits = max(h for h in range(1, min(self.n_kv_head, self.n_head) + 1) if self.n_head % h == 0)
            raise ValueError(f"n_kv_head={self.n_kv_head} must divide n_head={self.n_head}; nearest that does: {fits}")
        for attribute in ("gated", "tied", "bias"):
            require_exact_bool(getattr(self, attribute), attribute)
        require_choice(self.norm, "norm", ("rms", "layer"))

    @classmethod
    def of(cls, module: Any) -> ModelShape:
        """Read the shape off a :class:`~mixle.models.CausalLM`, or a module with the same attributes.

        Raises:
            TypeError: the module lacks one; names it.
        """
        needed = ("vocab", "d_model", "n_layer", "n_head", "d_mlp")
        missing = [name for name in needed if getattr(module, name, None) is None]
        if missing:
            raise TypeError(
                f"{type(module).__name__} has no {', '.join(missing)}: give a module with {', '.join(needed)}, "
                "or a ModelShape"
            )
        numbers = {name: int(getattr(module, name)) for name in needed}
        return cls(
            **numbers,
            n_kv_head=int(getattr(module, "n_kv_head", numbers["n_head"])),
            gated=bool(getattr(module, "gated", False)),
            tied=bool(getattr(module, "tie_embeddings", True)),
            bias=bool(getattr(module, "bias", False)),
            norm=getattr(module, "norm_kind", "rms"),
            learned_positions=int(module.block) if getattr(module, "position", "") == "learned" else 0,
            name=type(module).__name__,
        )

    @property
    def q_width(self) -> int:
        """Width of all queries of a token."""
        return self.n_head * self.head_width

    @property
    def kv_width(self) -> int:
        """Width of all keys, or all values, of a token."""
        return self.n_kv_head * self.head_width

    @property
    def block_matrices(self) -> int:
        """Elements of one block's matrices, which tensor parallelism splits."""
        attention = 2 * self.d_model * (self.q_width + self.kv_width)
        return attention + (3 if self.gated else 2) * self.d_model * self.d_mlp

    @property
    def _norm(self) -> int:
        return self.d_model * (2 if self.norm == "layer" and self.bias else 1)

    def block_parameters(self, tp: int = 1) -> int:
        """Return the parameters of one block on one of ``tp`` ranks: norms and output biases are on each."""
        split = self.block_matrices
        whole = 2 * self._norm
        if self.bias:
            split += self.q_width + 2 * self.kv_width + self.d_mlp * (2 if self.gated else 1)
            whole += 2 * self.d_model
        return split // tp + whole

    def embedding_parameters(self, tp: int = 1) -> int:
        """Return the parameters of the embeddings on one of ``tp`` ranks."""
        return self.vocab * self.d_model // tp + self.learned_positions * self.d_model

    def head_parameters(self, tp: int = 1) -> int:
        """Return the parameters of the last norm and of a head of its own, on one of ``tp`` ranks."""
        return self.vocab * self.d_model // tp + self._norm

    @property
    def parameters(self) -> int:
        """Parameters in all, shared ones once."""
        shared = self.vocab * self.d_model if self.tied else 0
        own = self.embedding_parameters() + self.head_parameters() - shared
        return own + self.n_layer * self.block_parameters()

    def operations_per_token(self, seq_len: int) -> int:
        """Return the floating-point operations that training takes per token, without any that are computed again.

        Six per element of every matrix that a token is multiplied by, and ``12 n_layer q_width seq_len`` of attention
        (Chowdhery et al., arXiv 2204.02311, appendix B), which counts keys that a causal mask hides, as is usual.
        """
        matrices = self.n_layer * self.block_matrices + self.vocab * self.d_model
        return 6 * matrices + 12 * self.n_layer * self.q_width * seq_len


def _llama(name: str, vocab: int, widths: tuple[int, int, int, int, int]) -> ModelShape:
    n_layer, d_model, n_head, n_kv_head, d_mlp = widths
    return ModelShape(
        name=name,
        vocab=vocab,
        n_layer=n_layer,
        d_model=d_model,
        n_head=n_head,
        n_kv_head=n_kv_head,
        d_mlp=d_mlp,
        gated=True,
        tied=False,
    )


NAMED_SHAPES = {
    shape.name: shape
    for shape in (
        _llama("llama2-7b", 32_000, (32, 4096, 32, 32, 11_008)),
        _llama("llama2-13b", 32_000, (40, 5120, 40, 40, 13_824)),
        _llama("llama2-70b", 32_000, (80, 8192, 64, 8, 28_672)),
        _llama("llama3-8b", 128_256, (32, 4096, 32, 8, 14_336)),
        _llama("llama3-70b", 128_256, (80, 8192, 64, 8, 28_672)),
        _llama("llama3-405b", 128_256, (126, 16_384, 128, 8, 53_248)),
    )
}
"""Llama 2 (arXiv 2307.09288) and Llama 3 (arXiv 2407.21783, table 3)."""

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


def shape_of_size(size: str) -> ModelShape:
    """Return a shape by name (``"llama3-8b"``), or by parameters (``"8B"``).

    Parameters within 2 % of a Llama 3 shape's name it. Any other number gives a Llama-like shape that has about as
    many (to a fifth from 100M on): heads of width 128, 8 key and value heads where that divides, a gated MLP 3.5 times
    as wide as the model, ``d_model = 128 * n_layer``, and 32,000 token ids.

    Raises:
        ValueError: neither a known name nor a number of at least 1M, or one beyond the largest such shape.
    """
    if size.lower() in NAMED_SHAPES:
        return NAMED_SHAPES[size.lower()]
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMBT]?)", size.upper())
    parameters = float(match[1]) * _UNITS[match[2]] if match else 0.0
    if parameters < 1e6:
        raise ValueError(
            f"params={size!r} must be a number of at least 1M such as 8B, or one of {', '.join(NAMED_SHAPES)}"
        )
    near = [shape for shape in NAMED_SHAPES.values() if abs(shape.parameters / parameters - 1) < 0.02]
    if near:
        return near[-1]
    candidates = [_scaled(width, size) for width in range(128, 65_536, 128)]
    if parameters > candidates[-1].parameters:
        raise ValueError(
            f"params={size!r} must be at most {candidates[-1].parameters / 1e12:.1f}T; describe larger models by widths"
        )
    return min(candidates, key=lambda shape: abs(shape.parameters - parameters))


def _scaled(d_model: int, name: str) -> ModelShape:
    heads = d_model // 128
    small = d_model < 2048
    return ModelShape(
        name=name,
        vocab=32_000,
        n_layer=max(2, d_model // 128),
        d_model=d_model,
        n_head=heads,
        n_kv_head=8 if heads % 8 == 0 else heads,
        d_mlp=7 * d_model // 2,
        gated=True,
        tied=small,
    )
