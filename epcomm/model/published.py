"""What others have published, with the configuration that a comparison needs. None of it was measured here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

DEEPEP_V1 = "DeepEP docs/legacy.md"
DEEPEP_V2 = "DeepEP README"
HYBRID_EP = "DeepEP hybrid-ep docs/README_Hybrid-EP.md"
PPLX_GARDEN = "pplx-garden, vendor's numbers"
FLASHINFER = "FlashInfer / TensorRT-LLM one-sided all-to-all, vendor's numbers"
MORI = "MORI README and docs"
UCCL = "UCCL-EP, vendor's numbers"
TRITON_DISTRIBUTED = "Triton-distributed, vendor's numbers"
PPLX_KERNELS = "pplx-kernels, vendor's numbers"
MSCCLPP = "mscclpp test/deploy/perf_ndmv5.jsonl"
VLLM = "vllm pull request 24111"


@dataclass(frozen=True)
class ExpertParallelFigure:
    """One published dispatch or combine."""

    system: str
    gpu: str  # a key of GPUS, else a name of hardware that is not modelled
    ranks: int
    tokens: int  # per rank
    mode: str
    operation: str
    dtype: str
    value: float
    unit: str  # "µs" or "GB/s"
    source: str
    wire: str | None  # what crosses the wire, one of WIRES; None: the source doesn't say
    counted: str = "rank"  # GB/s: the rows counted, those that stay on the rank or node included
    kernel_only: bool = False  # timed without the launch
    hidden: int = 7168
    experts: int = 256
    topk: int = 8
    groups: int = 1
    topk_groups: int = 1
    note: str = ""


@dataclass(frozen=True)
class AllreduceFigure:
    """One published allreduce, `num_bytes` per rank."""

    system: str
    gpu: str
    ranks: int
    num_bytes: int
    microseconds: float
    source: str
    algorithm: str | None  # one of SIGNALS; None: another one
    below_floor: str = ""  # why it may be under the floor


def _latency(
    system: str,
    gpu: str,
    source: str,
    wire: str | None,
    dtype: str,
    rows: Sequence[tuple[int, float, float]],
    **more: Any,
) -> list[ExpertParallelFigure]:
    """Figures of a latency kernel with 128 tokens (or `tokens`): ranks, µs of dispatch, µs of combine (0: none).

    A source that doesn't name dispatch's dtype is taken to use float8, which gives it the lower floor.
    """
    tokens = more.pop("tokens", 128)
    return [
        ExpertParallelFigure(system, gpu, ranks, tokens, "latency", name, used, value, "µs", source, wire, **more)
        for ranks, dispatch, combine in rows
        for name, used, value in (("dispatch", dtype, dispatch), ("combine", "bfloat16", combine))
        if value
    ]


def _throughput(
    system: str, gpu: str, source: str, rows: Sequence[tuple[int, str, float, float]], nodes: bool = False, **more: Any
) -> list[ExpertParallelFigure]:
    """GB/s of a throughput kernel with 4096 tokens (or `tokens`): ranks, dispatch's dtype, dispatch, combine."""
    tokens = more.pop("tokens", 4096)
    rows_of = "node" if nodes else "rank"
    return [
        ExpertParallelFigure(
            system,
            gpu,
            ranks,
            tokens,
            "throughput",
            name,
            used,
            value,
            "GB/s",
            source,
            rows_of,
            rows_of,
            **more,
        )
        for ranks, dtype, dispatch, combine in rows
        for name, used, value in (("dispatch", dtype, dispatch), ("combine", "bfloat16", combine))
        if value
    ]


def _hybrid_ep() -> list[ExpertParallelFigure]:
    """Kernel only, 8 local experts; "algorithm bandwidth", taken as all rows delivered, once per rank or node.

    Rows: ranks, then dispatch in float8, dispatch in bfloat16, combine.
    """
    h100 = [(16, 62.0, 76.8, 68.0), (32, 51.3, 54.5, 56.4), (64, 46.63, 50.55, 51.03)]
    b200 = [(8, 599.27, 734.95, 673.84)]
    gb200 = [
        (8, 713.98, 764.03, 737.13),
        (16, 650.48, 706.95, 666.26),
        (24, 577.96, 665.97, 639.8),
        (32, 538.86, 642.23, 605.15),
        (36, 489.27, 632.31, 596.99),
    ]
    figures = []
    for gpu, sms, table in (("h100", 8, h100), ("b200", 16, b200), ("gb200", 32, gb200)):
        for ranks, float8, bfloat16, combine in table:
            rows = [(ranks, "float8", float8, 0.0), (ranks, "bfloat16", bfloat16, combine)]
            figures += _throughput(
                f"hybrid-EP, {sms} SMs", gpu, HYBRID_EP, rows, gpu == "h100", experts=8 * ranks, kernel_only=True
            )
    return figures


_DEEPEP_LATENCY: list[tuple[int, float, float]] = [
    (8, 77, 114),
    (16, 118, 195),
    (32, 155, 273),
    (64, 173, 314),
    (128, 192, 369),
    (256, 194, 360),
]
_H800_NOTE = "called pure RDMA, but 98 GB/s at 8 ranks is more than the adapter has: NVLink is used inside the node"
# 8 groups, 4 per token: the gate of DeepSeek-V3, which the source names for its throughput table.
_GROUP_LIMITED: dict[str, Any] = {"groups": 8, "topk_groups": 4}

EXPERT_PARALLEL = [
    *_latency("DeepEP V1", "h800", DEEPEP_V1, "expert", "float8", _DEEPEP_LATENCY, kernel_only=True, note=_H800_NOTE),
    *_latency(
        "DeepEP V1, measured by pplx",
        "h200",
        PPLX_GARDEN,
        "expert",
        "float8",
        [(8, 42.6, 72.0), (16, 123.9, 203), (32, 159.1, 285), (64, 177.9, 325)],
    ),
    *_latency(
        "pplx-garden, CX7",
        "h200",
        PPLX_GARDEN,
        "expert",
        "float8",
        [(8, 50.5, 65.3), (16, 110.2, 185.5), (32, 153.9, 266.3), (64, 187.5, 309.1)],
    ),
    *_latency(
        "pplx-garden, EFA",
        "h200",
        PPLX_GARDEN,
        "expert",
        "float8",
        [(8, 49.7, 64.2), (16, 214.8, 241.5), (32, 229.1, 335), (64, 266.7, 391.2)],
    ),
    *_latency("pplx-kernels", "h100", PPLX_KERNELS, None, "float8", [(8, 83.6, 102.3), (64, 317, 530)]),
    *_latency("Triton-distributed", "h800", TRITON_DISTRIBUTED, None, "float8", [(8, 76, 126), (32, 137, 0)]),
    *_latency("UCCL-EP, EFA", "h200", UCCL, "expert", "float8", [(16, 226, 293), (32, 465, 694)]),
    *_latency("UCCL-EP", "b200", UCCL, "expert", "float8", [(16, 228, 318)]),
    *_latency(
        "FlashInfer one-sided",
        "gb200",
        FLASHINFER,
        "rank",
        "bfloat16",
        [(8, 31.7, 38.1), (16, 34.6, 39.9), (32, 37.8, 41.1), (64, 41.6, 44.5)],
    ),
    *_latency("FlashInfer one-sided", "gb200", FLASHINFER, "rank", "bfloat16", [(8, 18.9, 31.0)], tokens=1),
    *_latency("MORI, AINIC", "MI355X", MORI, "rank", "float8", [(8, 31, 36), (16, 84, 108), (32, 152, 187)]),
    *_latency("MORI, CX7", "MI300X", MORI, "rank", "float8", [(8, 35, 47), (16, 76, 122)]),
    *_throughput("DeepEP V1", "h800", DEEPEP_V1, [(8, "float8", 153, 158)], **_GROUP_LIMITED),
    *_throughput(
        "DeepEP V1",
        "h800",
        DEEPEP_V1,
        [(16, "float8", 43, 43), (32, "float8", 58, 57), (64, "float8", 51, 50)],
        nodes=True,
        note="58 GB/s exceed the adapter because rows for the own node count too",
        **_GROUP_LIMITED,
    ),
    *_throughput(
        "DeepEP V2",
        "h100",
        DEEPEP_V2,
        [(16, "float8", 90, 81), (32, "float8", 61, 61)],
        nodes=True,
        tokens=8192,
        kernel_only=True,
        note="the source says SM90; rows for the own node count too",
    ),
    *_throughput("DeepEP V2", "b200", DEEPEP_V2, [(16, "float8", 90, 91)], nodes=True, tokens=8192, kernel_only=True),
    *_throughput(
        "DeepEP V2, 64 SMs",
        "b200",
        DEEPEP_V2,
        [(8, "float8", 726, 740)],
        tokens=8192,
        kernel_only=True,
        note="without the copy out of the receive buffer",
    ),
    *_throughput(
        "DeepEP V2, 24 SMs",
        "b200",
        DEEPEP_V2,
        [(8, "float8", 643, 675)],
        tokens=8192,
        kernel_only=True,
        note="without the copy out of the receive buffer",
    ),
    *_throughput("DeepEP V1, 48 SMs", "b200", HYBRID_EP, [(8, "float8", 554, 0), (8, "bfloat16", 646, 586)]),
    *_hybrid_ep(),
    *_throughput("FlashInfer one-sided", "gb200", FLASHINFER, [(8, "bfloat16", 753, 728)], tokens=2048),
    *_throughput("FlashInfer one-sided", "gb200", FLASHINFER, [(64, "bfloat16", 588, 631)], tokens=2048),
    *_throughput("MORI", "MI355X", MORI, [(8, "float8", 345, 420)]),
    *_throughput("MORI", "MI300X", MORI, [(8, "float8", 307, 330)]),
]

_TOO_FAST = (
    "one-shot takes the inputs of 7 peers: 524 GB/s at 4 MiB, where NVLink has 450; the source doesn't explain it"
)
_VLLM_COLUMNS = (
    ("custom 1-stage", "one-shot"),
    ("custom 2-stage", "two-shot"),
    ("NCCL", None),
    ("symmetric memory, multimem", "multimem"),
    ("symmetric memory, two-shot", "two-shot"),
)
_VLLM_MIB = {0.5: (13, 25, 28, 16, 23), 1: (20, 26, 30, 17, 24), 2: (31, 28, 34, 20, 25), 4: (56, 46, 54, 26, 35)}

ALLREDUCE = [
    *(
        AllreduceFigure("mscclpp, packets", "h100", 8, kib * 1024, microseconds, MSCCLPP, None)
        for kib, microseconds in ((24, 6.18), (48, 6.62), (72, 6.91))
    ),
    *(
        AllreduceFigure(
            f"vLLM: {system}",
            "h100",
            8,
            int(mib * 2**20),
            microseconds,
            VLLM,
            algorithm,
            _TOO_FAST if algorithm == "one-shot" and mib >= 2 else "",
        )
        for mib, row in _VLLM_MIB.items()
        for (system, algorithm), microseconds in zip(_VLLM_COLUMNS, row)
    ),
    AllreduceFigure("vLLM: custom 1-stage", "h100", 4, 2**19, 10, "vllm pull request 24532", "one-shot"),
    AllreduceFigure("vLLM: custom 1-stage", "h100", 2, 2**19, 7, VLLM, "one-shot"),
]
