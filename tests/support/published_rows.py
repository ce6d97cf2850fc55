"""Published measurements of training throughput and memory, each with its source.

Tokens per second are per accelerator, memory is the most that any rank reserved. A row that calibrates was looked at
when the constants of the model were chosen; the others were not.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from mixle.experimental.tensor_pipeline_context_parallel.hardware import GIB, HARDWARE, Hardware
from mixle.experimental.tensor_pipeline_context_parallel.model_shape import NAMED_SHAPES, ModelShape
from mixle.experimental.tensor_pipeline_context_parallel.plan import Plan
from mixle.experimental.tensor_pipeline_context_parallel.workload import Workload

POWER_LIMITED = 0.8
"""What 500 W leave of the rate of products at 700 W. The source of the rows says only that the peak lies between those
of the SXM and the NVL card, 989 and 835 TFLOP/s; this is the one number that was fitted to its machine."""

_H100 = HARDWARE["h100"]
H100_500W = replace(
    _H100,
    name="h100-500W",
    memory=96 * GIB,
    bandwidth=2.4e12,
    matmul={precision: rate * POWER_LIMITED for precision, rate in _H100.matmul.items()},
)


@dataclass(frozen=True, kw_only=True)
class Row:
    source: str
    model: str
    plan: Plan
    workload: Workload
    hardware: Hardware
    tokens_per_second: float
    memory_gib: float | None = None
    calibrates: bool = False

    @property
    def shape(self) -> ModelShape:
        return NAMED_SHAPES[self.model]

    def __str__(self) -> str:
        w = self.workload
        extras = [w.precision, w.recompute, "compile" if w.compiled else "eager"]
        extras += ["async tp"] if w.async_tp else []
        return f"{self.model} {self.plan} {w.batch_size}x{w.seq_len} {', '.join(extras)} ({self.source})"


TITAN = "torchtitan 2024-12"
"""github.com/pytorch/torchtitan benchmarks/llama3_h100_202412_torchtitan.md. The sequence length of tables 1, 3, 4 and
5 is not printed there; 8192 is Llama 3.1's training length."""
TITAN_A100 = "torchtitan A100"
"""github.com/pytorch/torchtitan docs/performance.md, "selective op" where it says selective; 64 A100 80GB."""
TITAN_H200 = "torchtitan 2025-06"
"""github.com/pytorch/torchtitan benchmarks/llama3_8b_h200_2025-06_torchtitan.md; loss compiled (pull request 1033)."""
NEMO = "NeMo 24.07"
"""github.com/NVIDIA/NeMo docs/source/performance/performance_summary.md: DGX-H100, FP8."""
MEGATRON = "Megatron-LM 0.12"
"""github.com/NVIDIA/Megatron-LM examples/llama/README.md: H100, FP8."""
LLAMA = "Llama 3"
"""arXiv 2407.21783, table 4, as quoted in glennklockwood.com/garden/llama-3.1: 430 and 400 TFLOP/s per GPU, turned into
tokens by 6 operations per parameter and token and those of full, not causal, attention."""


def _titan(model: str, plan: Plan, rows: int, seq: int, recompute: str, measured: tuple[float, float], **more) -> Row:
    calibrates = more.pop("calibrates", False)
    options = {"precision": "fp8", "compiled": True, "async_tp": False, **more}
    workload = Workload(batch_size=rows, seq_len=seq, recompute=recompute, **options)
    return Row(
        source=TITAN,
        model=model,
        plan=plan,
        workload=workload,
        hardware=H100_500W,
        tokens_per_second=measured[0],
        memory_gib=measured[1],
        calibrates=calibrates,
    )


_EAGER = {"precision": "bf16", "compiled": False}
_BF16 = {"precision": "bf16"}
_405B = {"tp": 8, "pp": 8, "microbatches": 8}

TITAN_ROWS = [
    _titan("llama3-8b", Plan(dp=8), 2, 8192, "selective", (5762, 82.4), calibrates=True, **_EAGER),
    _titan("llama3-8b", Plan(dp=8), 2, 8192, "selective", (6667, 77.0), calibrates=True, **_BF16),
    _titan("llama3-8b", Plan(dp=8), 2, 8192, "selective", (8532, 76.8), calibrates=True),
    _titan("llama3-8b", Plan(dp=8), 1, 32_768, "full", (3890, 83.9), calibrates=True),
    _titan("llama3-8b", Plan(dp=4, cp=2), 1, 65_536, "full", (2540, 84.2), calibrates=True),
    _titan("llama3-8b", Plan(dp=2, cp=4), 1, 131_072, "full", (1071, 84.0), calibrates=True),
    _titan("llama3-8b", Plan(cp=8), 1, 262_144, "full", (548, 84.5), calibrates=True),
    _titan("llama3-8b", Plan(dp=128), 2, 8192, "selective", (5605, 67.0), **_EAGER),
    _titan("llama3-8b", Plan(dp=128), 2, 8192, "selective", (6514, 62.0), **_BF16),
    _titan("llama3-8b", Plan(dp=128), 2, 8192, "selective", (8380, 61.8)),
    _titan("llama3-70b", Plan(dp=32, tp=8), 16, 8192, "full", (829, 71.9), calibrates=True),
    _titan("llama3-70b", Plan(dp=32, tp=8), 16, 8192, "full", (876, 67.6), calibrates=True, async_tp=True),
    _titan("llama3-405b", Plan(dp=8, **_405B), 32, 8192, "full", (100, 82.5), calibrates=True, async_tp=True),
    _titan(
        "llama3-405b",
        Plan(dp=8, pp_schedule="interleaved", **_405B),
        32,
        8192,
        "full",
        (128, 72.7),
        async_tp=True,
    ),
    _titan("llama3-405b", Plan(dp=8, **_405B), 8, 32_768, "full", (76, 75.3), async_tp=True),
    _titan("llama3-405b", Plan(dp=4, cp=2, **_405B), 8, 65_536, "full", (47, 75.9), async_tp=True),
    _titan("llama3-405b", Plan(dp=2, cp=4, **_405B), 8, 131_072, "full", (31, 77.1), async_tp=True),
    _titan("llama3-405b", Plan(cp=8, **_405B), 8, 262_144, "full", (16, 84.9), async_tp=True),
]


def _a100(model: str, rows: int, seq: int, recompute: str, tokens_per_second: float) -> Row:
    return Row(
        source=TITAN_A100,
        model=model,
        plan=Plan(dp=64),
        workload=Workload(batch_size=rows, seq_len=seq, recompute=recompute),
        hardware=HARDWARE["a100"],
        tokens_per_second=tokens_per_second,
        calibrates=model == "llama3-8b",
    )


A100_ROWS = [
    _a100("llama3-8b", 1, 8192, "selective", 2973),
    _a100("llama3-70b", 1, 8192, "full", 331),
    _a100("llama2-13b", 2, 4096, "none", 2162),
    _a100("llama2-13b", 2, 4096, "selective", 1904),
    _a100("llama2-70b", 1, 4096, "selective", 355),
    _a100("llama2-70b", 2, 4096, "full", 353),
]

H200_ROWS = [
    Row(
        source=TITAN_H200,
        model="llama3-8b",
        plan=Plan(dp=dp),
        workload=Workload(
            batch_size=2, seq_len=8192, precision="fp8", recompute="selective", compiled=True, fused_loss=True
        ),
        hardware=HARDWARE["h200"],
        tokens_per_second=tokens_per_second,
        memory_gib=memory_gib,
    )
    for dp, tokens_per_second, memory_gib in ((32, 10_938, 47.96), (64, 10_753, 46.97))
]


def _nvidia(source: str, model: str, plan: Plan, rows: int, seq: int, tokens_per_second: float) -> Row:
    """Fused kernels, FP8, a replicated model (its optimizer sharded), nothing computed again."""
    workload = Workload(
        batch_size=rows,
        seq_len=seq,
        precision="fp8",
        recompute="none",
        fsdp=False,
        compiled=True,
        fused_loss=True,
        async_tp=True,
    )
    return Row(
        source=source,
        model=model,
        plan=plan,
        workload=workload,
        hardware=_H100,
        tokens_per_second=tokens_per_second,
    )


def _looped(dp: int, tp: int, pp: int, cp: int, stages_per_rank: int, microbatches: int) -> Plan:
    return Plan(
        dp=dp,
        tp=tp,
        pp=pp,
        cp=cp,
        microbatches=microbatches,
        pp_schedule="interleaved",
        stages_per_rank=stages_per_rank,
    )


NVIDIA_ROWS = [
    _nvidia(NEMO, "llama2-7b", Plan(dp=8), 16, 4096, 16_847),
    _nvidia(NEMO, "llama2-13b", _looped(4, 1, 4, 1, 10, 32), 32, 4096, 8646),
    _nvidia(NEMO, "llama2-70b", _looped(4, 4, 4, 1, 20, 32), 32, 4096, 1707),
    _nvidia(NEMO, "llama3-8b", Plan(dp=4, cp=2), 32, 8192, 12_036),
    _nvidia(NEMO, "llama3-70b", _looped(2, 4, 4, 2, 5, 64), 64, 8192, 1533),
    _nvidia(MEGATRON, "llama3-8b", Plan(dp=4, cp=2), 32, 8192, 13_812),
    _nvidia(MEGATRON, "llama3-70b", _looped(2, 4, 8, 1, 5, 64), 64, 8192, 1621),
    _nvidia(MEGATRON, "llama3-405b", _looped(8, 8, 8, 2, 8, 64), 64, 8192, 315),
]


def _llama3(dp: int, rows: int, teraflops: float) -> Row:
    shape = NAMED_SHAPES["llama3-405b"]
    per_token = 6 * shape.parameters + 12 * shape.n_layer * shape.q_width * 8192
    return Row(
        source=LLAMA,
        model="llama3-405b",
        plan=_looped(dp, 8, 16, 1, 8, rows),
        workload=Workload(
            batch_size=rows, seq_len=8192, recompute="none", compiled=True, fused_loss=True, async_tp=True
        ),
        hardware=_H100,
        tokens_per_second=teraflops * 1e12 / per_token,
    )


LLAMA_ROWS = [_llama3(64, 32, 430), _llama3(128, 16, 400)]

ROWS = [*TITAN_ROWS, *A100_ROWS, *H200_ROWS, *NVIDIA_ROWS, *LLAMA_ROWS]
