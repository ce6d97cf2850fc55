"""Accelerators by their published peaks, what share of them large matrix products reach, and how they are linked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from mixle.experimental.tensor_pipeline_context_parallel.workload import PRECISIONS, Precision
from mixle.utils.exact import require_choice, require_finite_float, require_positive_int

GIB = 2**30
FEWEST_TOKENS = 512
"""Of a row, on one context rank of a GPU: with fewer, attention's kernels are far from the rate that is assumed."""


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """One accelerator and its links. Rates are per second and, on links, per direction.

    Attributes:
        name: as on the command line.
        memory: bytes.
        bandwidth: of that memory, bytes.
        matmul: floating-point operations that large matrix products reach, by precision; a precision that is missing is
            one that the accelerator lacks.
        link: bytes between accelerators of a node.
        network: bytes between nodes, for each accelerator.
        per_node: accelerators of a node.
        link_latency: seconds of the smallest collective in a node.
        network_latency: the same between nodes.
        peak: floating-point operations as published, by precision, which model FLOP utilization is a share of; empty if
            that is not meant to be told.
        fewest_tokens: of a row, that context parallelism leaves each rank.
    """

    name: str
    memory: int
    bandwidth: float
    matmul: Mapping[Precision, float]
    link: float
    network: float
    per_node: int = 8
    link_latency: float = 10e-6
    network_latency: float = 25e-6
    peak: Mapping[Precision, float] = field(default_factory=lambda: MappingProxyType({}))
    fewest_tokens: int = FEWEST_TOKENS

    def __post_init__(self) -> None:
        for name in ("memory", "per_node", "fewest_tokens"):
            require_positive_int(getattr(self, name), name)
        for name in ("bandwidth", "link", "network"):
            require_finite_float(getattr(self, name), name, exclusive_minimum=0.0)
        for name in ("link_latency", "network_latency"):
            require_finite_float(getattr(self, name), name, minimum=0.0)
        for rates in ("matmul", "peak"):
            for precision, rate in getattr(self, rates).items():
                require_choice(precision, f"precision in {rates}", PRECISIONS)
                require_finite_float(rate, f"{rates}[{precision!r}]", exclusive_minimum=0.0)


def _gpu(
    name: str,
    *,
    gib: int,
    bandwidth: float,
    link: float,
    network: float,
    fp32: tuple[float, float],
    bf16: tuple[float, float],
    fp8: tuple[float, float] | None = None,
) -> Hardware:
    """Take units as data sheets print them: TB/s, GB/s per direction, and TFLOP/s, with the share that is reached."""
    given: dict[Precision, tuple[float, float]] = {"fp32": fp32, "bf16": bf16}
    if fp8 is not None:
        given["fp8"] = fp8
    return Hardware(
        name=name,
        memory=gib * GIB,
        bandwidth=bandwidth * 1e12,
        matmul=MappingProxyType({name: share * peak * 1e12 for name, (peak, share) in given.items()}),
        peak=MappingProxyType({name: peak * 1e12 for name, (peak, _) in given.items()}),
        link=link * 1e9,
        network=network * 1e9,
    )


HARDWARE: Mapping[str, Hardware] = MappingProxyType(
    {
        device.name: device
        for device in (
            _gpu("a100", gib=80, bandwidth=2.039, link=300, network=25, fp32=(19.5, 1), bf16=(312, 0.869)),
            _gpu(
                "h100",
                gib=80,
                bandwidth=3.35,
                link=450,
                network=50,
                fp32=(67, 1),
                bf16=(989, 0.803),
                fp8=(1979, 0.709),
            ),
            _gpu(
                "h200",
                gib=141,
                bandwidth=4.8,
                link=450,
                network=50,
                fp32=(67, 1),
                bf16=(989, 0.803),
                fp8=(1979, 0.734),
            ),
            _gpu(
                "b200",
                gib=180,
                bandwidth=8.0,
                link=900,
                network=50,
                fp32=(75, 1),
                bf16=(2250, 0.776),
                fp8=(4500, 0.763),
            ),
            Hardware(
                name="cpu",
                memory=256 * GIB,
                bandwidth=307e9,
                matmul=MappingProxyType({"fp32": 0.7 * 7.2e12, "bf16": 0.3 * 229e12}),
                link=5e9,
                network=1.25e9,
                per_node=2,
                link_latency=100e-6,
                network_latency=200e-6,
                fewest_tokens=1,
            ),
        )
    }
)
"""SXM accelerators in nodes of eight.

Memory, bandwidth, peaks without sparsity and NVLink (half of the bidirectional figure) are those of NVIDIA's data
sheets (A100 80GB, H100, H200, HGX B200); networks those of the DGX systems' user guides: one ConnectX-6 of 200 Gb/s per
A100, one ConnectX-7 of 400 Gb/s per GPU from H100 on. The share of the peak that products reach is measured: "Maximum
Achievable Matmul FLOPS comparison table" of github.com/stas00/ml-engineering, compute/accelerator/README.md; float32
counts as its peak.

``"cpu"`` is a socket of a Xeon Platinum 8480+ (56 cores at 2.0 GHz, 64 float32 operations per cycle with AVX-512 and
2048 bfloat16 ones with AMX, eight DDR5-4800 channels: Intel's product page and optimization manual) and 10 Gb/s
Ethernet; the shares of its peaks and what gloo moves in a node are assumptions.
"""
