"""What each device can do, as data with the source of every figure.

Of a whole step two numbers are fitted to published ones: how many times longer it takes than its kernels, and how much
more memory is reserved than is foreseen. How far figures lie from that is what `uncertainties` are for (_FITTED).

Peaks are dense (without sparsity), in operations a second; memory and links in bytes a second, links in one direction.
A figure whose source begins with "assumed" is nobody's measurement: `opensora-accel doctor --calibrate` replaces it.
"""

from __future__ import annotations

from typing import Any

GB, TB, GIB = 10**9, 10**12, 2**30

# Matrix products that were reached, of the peak (bf16): stas00/ml-engineering, compute/accelerator, "Maximum Achievable
# Matmul FLOPS comparison table". Such a product is large and of the best shape.
_MATMUL = "best bf16 product of ml-engineering's MAMF table; smaller products: assumed"
_ASSUMED_MATMUL = "assumed: as an H100"
_DTENSOR = (
    "22 µs measured on an AMD EPYC with torch 2.13.0 (2026-11-24); another host is assumed to be like it"
)
_HOOKS = (
    "20 to 32 µs measured on an AMD EPYC with torch 2.13.0 (2026-11-29); a GPU's host is assumed to be faster"
)
_NCCL_LATENCY = "NCCL's src/graph/tuning.cc, hwLat of a ring with the Simple protocol"
_REACHED = (
    "assumed: 0.8 of NVLink and 0.9 of a network are reached, as nccl-tests commonly print for large messages"
)
_HOST = "assumed: an application moves 0.8 of the data sheet's bandwidth with page-locked memory"
_CONTEXT = "assumed: 0.6 GiB of CUDA context and kernels, and cuBLAS' workspace of 32 MiB"
_BUFFERS = "assumed: 16 channels of 2 × 4 MiB for each communicator (NCCL_BUFFSIZE is 4 MiB)"
# `python tools/bench/published.py` fits them, each time to all sources but the one that is judged.
_IN_A_STEP, _STEP_WITHIN = 1.09, 0.30
_RESERVED_MORE, _RESERVED_WITHIN = 0.02, 0.10
_FITTED = (
    "fitted: published steps take 1.09 times as long as their kernels by themselves, and 33 of 37 figures of 6 sources "
    "lie within 30 % of that, each judged by the other sources (median error 10 %, worst 33 %); memory is 1.02 times "
    "what is foreseen, and 16 of 18 figures of 4 sources lie within 10 % (median 2 %, worst 12 %); collective, copy, "
    "host: assumed"
)
_SLACK = "fitted, beyond what PyTorch's caching allocator loses by its rules: see uncertainties"
_FA2 = "FlashAttention-2, arXiv:2307.08691: up to 73 % of the peak forward and 63 % backward on A100"
_FA_SM90 = (
    "FlashAttention-3, arXiv:2407.08608, bf16, heads of 128 and 32k tokens on an H100 SXM: cuDNN 617 and 533 TFLOP/s "
    "forward and backward, FlashAttention-2 (torch's flash) 375 and 335"
)
_FA_SM100 = (
    "assumed: cuDNN as FlashAttention-4 on a B200, 1,300 and 1,130 TFLOP/s; torch's flash, which has no code for its "
    "tensor cores, as a share of the peak under half of that on an H100"
)
_SHORTER = "half of it at 1k tokens and all from 4k on; below: assumed"
_NARROWER = (
    "heads of 64 reach 0.84 of heads of 128 forward and all backward: FlashAttention-2 at 8k tokens on Hopper, 310 and "
    "299 of 370 and 290 TFLOP/s (Dao-AILab/flash-attention, pull requests 2688 and 1791); other kernels: assumed so"
)
_CONVOLUTIONS = (
    "52 TFLOP/s: encoding and decoding of 81 frames of 480 × 832 by Wan 2.1's VAE in bf16 on an H100 take 4.2 and "
    "5.5 s (ModelTC/ComfyUI-LightVAE, README), less the memory traffic of its trace; without an entry: as products"
)
_EFFICIENT = "torch's memory-efficient kernel: assumed two thirds of FlashAttention-2"


def _gemm(best: float) -> dict[str, Any]:
    """Efficiency by the operations of a product: a small one fills neither the device nor its pipelines."""
    shares = {1e7: 0.02, 1e9: 0.2, 1e10: 0.5, 1e11: 0.85, 1e12: 0.95, 1e13: 1.0}
    return {"by": ["flops"], "points": [[[flops], best * share] for flops, share in shares.items()]}


def _attention(best: float, narrow: float) -> dict[str, Any]:
    """By the queries: short ones are bound by softmax and by starting. Heads of 64 reach the share `narrow`."""
    shares = {64: 0.05, 256: 0.2, 1024: 0.5, 4096: 1.0}
    points = [
        [[queries, head_dim], best * share * of_best]
        for queries, share in shares.items()
        for head_dim, of_best in ((64, narrow), (128, 1.0))
    ]
    return {"by": ["queries", "head_dim"], "points": points}


def _attentions(kernels: dict[str, tuple[float, float]]) -> dict[str, Any]:
    """Forward and backward of each kernel; of any other that of the first."""
    named = {"": next(iter(kernels.values())), **{f" {kernel}": best for kernel, best in kernels.items()}}
    return {
        f"attention{kernel}{phase}": _attention(best[phase != ""], 1.0 if phase else 0.84)
        for kernel, best in named.items()
        for phase in ("", " backward")
    }


def _flat(share: float) -> dict[str, Any]:
    return {"by": ["flops"], "points": [[[1.0], share]]}


def _memory(best: float) -> dict[str, Any]:
    """By the bytes that a kernel moves."""
    shares = {1e4: 0.02, 1e6: 0.35, 1e7: 0.75, 1e8: 0.95, 1e9: 1.0}
    return {"by": ["bytes"], "points": [[[moved], best * share] for moved, share in shares.items()]}


def _gpu(
    *,
    architecture: str,
    peaks: dict[str, float],
    memory_gb: float,
    memory_gb_per_s: float,
    link_gb_per_s: float,
    link_latency_s: float,
    host_gb_per_s: float,
    node: int,
    node_host_gib: int,
    matmul: float,
    attention: dict[str, tuple[float, float]],
    sheet: str,
    sources: dict[str, str],
) -> dict[str, Any]:
    return {
        "architecture": architecture,
        "peak_flops": {name: 1e12 * value for name, value in peaks.items()},
        "memory_bytes": int(memory_gb * GB),
        "memory_bytes_per_s": memory_gb_per_s * GB,
        "within": {"bandwidth_bytes_per_s": 0.8 * link_gb_per_s * GB, "latency_s": link_latency_s},
        "host_link": {"bandwidth_bytes_per_s": 0.8 * host_gb_per_s * GB, "latency_s": 10e-6},
        "ranks_per_node": node,
        "host_memory_bytes": node_host_gib * GIB,
        "launch_s": 6e-6,
        "sharded_launch_s": 20e-6,
        "hook_s": 15e-6,
        "runs_ahead": True,
        "cores": None,
        "beside_collective": 1.06,
        "context_bytes": round(0.6 * GIB) + 32 * 2**20,
        "communicator_bytes": 16 * 2 * 4 * 2**20,
        "allocator_slack": _RESERVED_MORE,
        "efficiencies": {
            "gemm": _gemm(matmul),
            **_attentions(attention),
            "memory": _memory(0.85),
            **({"gemm convolution": _flat(52e12 / (1e12 * peaks["bfloat16"]))} if architecture == "sm_90" else {}),
        },
        "slowness": dict.fromkeys(("gemm", "attention", "memory"), _IN_A_STEP),
        "uncertainties": {
            **dict.fromkeys(("gemm", "attention", "memory"), _STEP_WITHIN),
            **{"collective": 0.3, "copy": 0.25, "host": 0.3, "reserved": _RESERVED_WITHIN},
        },
        "sources": {
            "peak_flops": f"{sheet}, dense",
            "memory_bytes": sheet,
            "memory_bytes_per_s": f"{sheet}; 0.85 of it is reached: assumed",
            "within": f"{sheet}; {_REACHED}; latency: {_NCCL_LATENCY}",
            "host_link": f"{sheet}; {_HOST}",
            "ranks_per_node": sheet,
            "host_memory_bytes": "assumed: what such a node is commonly sold with",
            "launch_s": "assumed: an eager operator of PyTorch takes 6 µs of the host, with autograd",
            "sharded_launch_s": _DTENSOR,
            "hook_s": _HOOKS,
            "beside_collective": "assumed: NCCL's kernels take about 8 of an H100's 132 multiprocessors",
            "context_bytes": _CONTEXT,
            "communicator_bytes": _BUFFERS,
            "allocator_slack": _SLACK,
            "slowness": _FITTED,
            "uncertainties": _FITTED,
            "gemm": _ASSUMED_MATMUL,
            "attention": f"{_FA_SM90}; {_SHORTER}; {_NARROWER}; {_EFFICIENT}",
            "memory": "assumed",
            **({"gemm convolution": _CONVOLUTIONS} if architecture == "sm_90" else {}),
            **sources,
        },
    }  # fmt: skip


# Of the peak forward and backward, by torch's kernel, the one that it prefers first.
_ON_SM80 = {"flash": (0.73, 0.63), "cudnn": (0.73, 0.63), "efficient": (0.49, 0.42)}
_ON_SM90 = {"cudnn": (0.624, 0.539), "flash": (0.379, 0.339), "efficient": (0.25, 0.22)}
_ON_SM100 = {"cudnn": (0.578, 0.502), "flash": (0.17, 0.15), "efficient": (0.11, 0.1)}
_NVLINK_S, _PCIE_S = 3.4e-6, 5.7e-6
_H100_PEAKS = {
    "bfloat16": 989.4,
    "float16": 989.4,
    "float8": 1978.9,
    "float32": 66.9,
    "tf32": 494.7,
    "float64": 66.9,
}

_FIGURES: dict[str, dict[str, Any]] = {
    "a100": dict(
        architecture="sm_80",
        peaks={"bfloat16": 312, "float16": 312, "float32": 19.5, "tf32": 156, "float64": 19.5},
        memory_gb=85.9,  # 80 GiB
        memory_gb_per_s=2039,
        link_gb_per_s=300,
        link_latency_s=_NVLINK_S,
        host_gb_per_s=32,
        node=8,
        node_host_gib=1024,
        matmul=0.859,
        attention=_ON_SM80,
        sheet="NVIDIA's data sheet of A100 80GB SXM",
        sources={
            "gemm": _MATMUL,
            "attention": f"{_FA2}; {_SHORTER}; {_NARROWER}; {_EFFICIENT}; cuDNN: assumed as fast",
        },
    ),
    "h100": dict(
        architecture="sm_90",
        peaks=_H100_PEAKS,
        memory_gb=85.0,  # nvidia-smi: 81,559 MiB of 80 GB
        memory_gb_per_s=3350,
        link_gb_per_s=450,
        link_latency_s=_NVLINK_S,
        host_gb_per_s=64,
        node=8,
        node_host_gib=2048,
        matmul=0.801,
        attention=_ON_SM90,
        sheet="NVIDIA's data sheet of H100 SXM",
        sources={"gemm": _MATMUL, "memory_bytes": "what nvidia-smi prints for H100 80GB HBM3, less what is reserved"},
    ),
    "h200": dict(
        architecture="sm_90",
        peaks=_H100_PEAKS,
        memory_gb=150.1,  # nvidia-smi: 143,771 MiB
        memory_gb_per_s=4800,
        link_gb_per_s=450,
        link_latency_s=_NVLINK_S,
        host_gb_per_s=64,
        node=8,
        node_host_gib=2048,
        matmul=0.801,
        attention=_ON_SM90,
        sheet="NVIDIA's data sheet of H200 SXM",
        sources={"memory_bytes": "what nvidia-smi prints for H200, less what is reserved"},
    ),
    "b200": dict(
        architecture="sm_100",
        peaks={"bfloat16": 2250, "float16": 2250, "float8": 4500, "float32": 75, "tf32": 1125, "float64": 37},
        memory_gb=180,
        memory_gb_per_s=7700,
        link_gb_per_s=900,
        link_latency_s=_NVLINK_S,
        host_gb_per_s=64,
        node=8,
        node_host_gib=2048,
        matmul=0.75,
        attention=_ON_SM100,
        sheet="NVIDIA's data sheet of HGX B200 (an eighth of the board)",
        sources={"attention": _FA_SM100, "gemm": "assumed: 0.75"},
    ),
    "gb200": dict(
        architecture="sm_100",
        peaks={"bfloat16": 2500, "float16": 2500, "float8": 5000, "float32": 80, "tf32": 1250, "float64": 40},
        memory_gb=186,
        memory_gb_per_s=8000,
        link_gb_per_s=900,
        link_latency_s=_NVLINK_S,
        host_gb_per_s=225,
        node=72,
        node_host_gib=17 * 1024,
        matmul=0.75,
        attention=_ON_SM100,
        sheet="NVIDIA's data sheet of GB200 NVL72 (a 72nd of the rack)",
        sources={
            "attention": _FA_SM100,
            "gemm": "assumed: 0.75",
            "host_link": f"NVLink-C2C: 900 GB/s both ways of a Grace, which two GPUs share; {_HOST}",
            "host_memory_bytes": "NVIDIA's data sheet of GB200 NVL72: 17 TB of LPDDR5X",
        },
    ),
    "mi300x": dict(
        architecture="gfx942",
        peaks={**dict.fromkeys(("bfloat16", "float16"), 1307.4), "float8": 2614.9, "tf32": 653.7,
               **dict.fromkeys(("float32", "float64"), 163.4)},
        memory_gb=206.1,  # 192 GiB
        memory_gb_per_s=5300,
        link_gb_per_s=448,
        link_latency_s=_NVLINK_S,
        host_gb_per_s=64,
        node=8,
        node_host_gib=2048,
        matmul=0.601,
        attention={"flash": (0.35, 0.28)},
        sheet="AMD's data sheet of Instinct MI300X",
        sources={
            "gemm": _MATMUL,
            "attention": "assumed",
            "within": f"seven links of 64 GB/s one way, {_REACHED}; latency: assumed as NVLink's",
        },
    ),
    "l40s": dict(
        architecture="sm_89",
        peaks={"bfloat16": 362, "float16": 362, "float8": 733, "float32": 91.6, "tf32": 183, "float64": 1.4},
        memory_gb=48.3,
        memory_gb_per_s=864,
        link_gb_per_s=32,
        link_latency_s=_PCIE_S,
        host_gb_per_s=32,
        node=8,
        node_host_gib=1024,
        matmul=0.75,
        attention={"flash": (0.6, 0.5), "efficient": (0.4, 0.33)},
        sheet="NVIDIA's data sheet of L40S",
        sources={"attention": "assumed: near A100's", "within": f"PCIe 4.0 ×16, shared with the host; {_REACHED}"},
    ),
    "rtx4090": dict(
        architecture="sm_89",
        peaks={"bfloat16": 165.2, "float16": 165.2, "float8": 330.3, "float32": 82.6, "tf32": 82.6, "float64": 1.3},
        memory_gb=25.3,
        memory_gb_per_s=1008,
        link_gb_per_s=16,
        link_latency_s=2 * _PCIE_S,
        host_gb_per_s=32,
        node=8,
        node_host_gib=256,
        matmul=0.85,
        attention=_ON_SM80,
        sheet="NVIDIA's Ada whitepaper, GeForce RTX 4090 (fp32 accumulation)",
        sources={
            "gemm": "assumed",
            "attention": "assumed: near A100's",
            "within": f"assumed: half of PCIe 4.0 ×16, through the host, as there is no peer access; {_REACHED}",
        },
    ),
}  # fmt: skip

_NO_BRIDGE = f"PCIe, as not all have NVLink bridges; {_REACHED}"
_SLOWER_PARTS: dict[str, Any] = {"link_latency_s": _PCIE_S, "node_host_gib": 1024}

# Other forms of these: what is not said is as there.
_FIGURES |= {
    "a100sxm40": _FIGURES["a100"] | {
        "memory_gb": 42.5, "memory_gb_per_s": 1555, "sheet": "NVIDIA's data sheet of A100 40GB SXM",
    },
    "a100pcie": _FIGURES["a100"] | _SLOWER_PARTS | {
        "memory_gb_per_s": 1935, "link_gb_per_s": 32, "sheet": "NVIDIA's data sheet of A100 80GB PCIe",
        "sources": _FIGURES["a100"]["sources"] | {"within": _NO_BRIDGE},
    },
    "a100pcie40": _FIGURES["a100"] | _SLOWER_PARTS | {
        "memory_gb": 42.5, "memory_gb_per_s": 1555, "link_gb_per_s": 32,
        "sheet": "NVIDIA's data sheet of A100 40GB PCIe",
        "sources": _FIGURES["a100"]["sources"] | {"within": _NO_BRIDGE},
    },
    "h100pcie": _FIGURES["h100"] | _SLOWER_PARTS | {
        "peaks": {"bfloat16": 756, "float16": 756, "float8": 1513, "float32": 51, "tf32": 378, "float64": 51},
        "memory_gb_per_s": 2039, "link_gb_per_s": 64, "sheet": "NVIDIA's data sheet of H100 PCIe",
        "sources": {"gemm": f"{_ASSUMED_MATMUL} SXM", "within": _NO_BRIDGE},
    },
    "h100nvl": _FIGURES["h100"] | _SLOWER_PARTS | {
        "peaks": {"bfloat16": 835, "float16": 835, "float8": 1671, "float32": 60, "tf32": 418, "float64": 60},
        "memory_gb": 100.0, "memory_gb_per_s": 3938, "link_gb_per_s": 64,
        "sheet": "NVIDIA's data sheet of H100 NVL (one of the pair)",
        "sources": {"gemm": f"{_ASSUMED_MATMUL} SXM", "within": f"PCIe, as the bridge joins two of a node; {_REACHED}"},
    },
    "h200nvl": _FIGURES["h200"] | {
        "peaks": {"bfloat16": 835, "float16": 835, "float8": 1671, "float32": 60, "tf32": 418, "float64": 60},
        "node": 4, "node_host_gib": 1024, "sheet": "NVIDIA's data sheet of H200 NVL, bridged by four",
        "sources": {"gemm": f"{_ASSUMED_MATMUL} SXM"},
    },
    "gh200": _FIGURES["h100"] | {
        "memory_gb": 102.0, "memory_gb_per_s": 4000, "host_gb_per_s": 450, "node": 1, "node_host_gib": 480,
        "sheet": "NVIDIA's data sheet of GH200 (96 GB of HBM3)",
        "sources": {"host_link": f"NVLink-C2C: 900 GB/s both ways; {_HOST}", "within": "there is one GPU"},
    },
    "gb300": _FIGURES["gb200"] | {
        "peaks": {"bfloat16": 2500, "float16": 2500, "float8": 5000, "float32": 80, "tf32": 1250, "float64": 1.4},
        "memory_gb": 279, "sheet": "NVIDIA's data sheet of GB300 NVL72 (a 72nd of the rack)",
    },
    "rtx5090": _FIGURES["rtx4090"] | {
        "architecture": "sm_120",
        "peaks": {"bfloat16": 209.5, "float16": 209.5, "float8": 419, "float32": 104.8, "tf32": 104.8, "float64": 1.6},
        "memory_gb": 33.7, "memory_gb_per_s": 1792, "link_gb_per_s": 32, "host_gb_per_s": 64,
        "sheet": "NVIDIA's RTX Blackwell whitepaper, GeForce RTX 5090 (fp32 accumulation)",
        "sources": _FIGURES["rtx4090"]["sources"] | {
            "within": f"assumed: half of PCIe 5.0 ×16, through the host, as there is no peer access; {_REACHED}",
        },
    },
}  # fmt: skip

DEVICES = {name: _gpu(**figures) for name, figures in _FIGURES.items()}

# Every rank is a process of one thread. These are orders of magnitude: calibrate.
DEVICES["cpu"] = {
    "architecture": "cpu",
    "peak_flops": {"float32": 60e9, "bfloat16": 30e9, "float64": 30e9},
    "memory_bytes": 8 * GIB,
    "memory_bytes_per_s": 8 * GB,
    "within": {"bandwidth_bytes_per_s": 1.0 * GB, "latency_s": 100e-6},
    "host_link": {"bandwidth_bytes_per_s": 5.0 * GB, "latency_s": 2e-6},
    "ranks_per_node": 4,
    "host_memory_bytes": 64 * GIB,
    "launch_s": 12e-6,
    "sharded_launch_s": 20e-6,
    "hook_s": 25e-6,
    "runs_ahead": False,
    "cores": 4,
    "beside_collective": 1.5,
    "context_bytes": 0,
    "communicator_bytes": 2**20,
    "allocator_slack": 0.0,
    "efficiencies": {
        "gemm": {"by": ["flops"], "points": [[[1e5], 0.2], [[1e7], 0.8], [[1e9], 0.9]]},
        "attention": {"by": ["queries"], "points": [[[64], 0.2], [[4096], 0.5]]},
        "memory": {"by": ["bytes"], "points": [[[1e4], 0.3], [[1e8], 0.9]]},
    },
    "uncertainties": {"gemm": 0.5, "attention": 0.5, "memory": 0.5, "collective": 0.5, "copy": 0.5, "host": 0.5},
    "sources": dict.fromkeys(
        ("peak_flops", "memory_bytes", "memory_bytes_per_s", "within", "host_link", "ranks_per_node",
         "host_memory_bytes", "launch_s", "sharded_launch_s", "hook_s", "beside_collective", "context_bytes",
         "communicator_bytes", "allocator_slack", "uncertainties", "gemm", "attention", "memory"),
        "assumed for one core of a server and gloo over loopback: `opensora-accel doctor --calibrate` measures",
    ),
}  # fmt: skip

# A network's gigabits a second are those of one GPU: `ib400` is a port of 400 Gb/s for each.
NETWORKS: dict[str, tuple[float, str]] = {
    "ib": (14e-6, f"InfiniBand; {_REACHED}; latency: {_NCCL_LATENCY}"),
    "roce": (14e-6, f"RDMA over Ethernet; {_REACHED}; latency: {_NCCL_LATENCY}"),
    "efa": (25e-6, f"Elastic Fabric Adapter; {_REACHED}; latency: assumed"),
    "eth": (50e-6, f"TCP over Ethernet; {_REACHED}; latency: assumed"),
}
