"""Which GPU this is, by the name that its driver gives it.

Names are taken whole. "NVIDIA H100 PCIe" has three quarters of an H100's operations a second, "NVIDIA GeForce RTX 4090
Laptop GPU" is another chip than the desktop's, and "NVIDIA H100 80GB HBM3 MIG 1g.10gb" is a seventh of one: what only
looks like a known GPU is none.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import torch


class Gpu(NamedTuple):
    """Dense products a second in bf16 with fp32 accumulation, and in fp32 without TF32."""

    names: str  # of the driver, as a regular expression
    bf16_flops: float
    fp32_flops: float


# Names as NVML and torch.cuda.get_device_name print them, without the vendor; peaks of the vendors' data sheets.
GPUS = {
    "a100": Gpu(r"A100-SXM4-80GB|A100-SXM-80GB", 312e12, 19.5e12),
    "a100sxm40": Gpu(r"A100-SXM4-40GB|A100-SXM-40GB", 312e12, 19.5e12),
    "a100pcie": Gpu(r"A100 80GB PCIe|A100-PCIE-80GB", 312e12, 19.5e12),
    "a100pcie40": Gpu(r"A100-PCIE-40GB", 312e12, 19.5e12),
    "h100": Gpu(r"H100 80GB HBM3|H100 SXM5( 80GB)?", 989.4e12, 66.9e12),
    "h100pcie": Gpu(r"H100 PCIe", 756e12, 51e12),
    "h100nvl": Gpu(r"H100 NVL", 835e12, 60e12),
    "h200": Gpu(r"H200", 989.4e12, 66.9e12),
    "h200nvl": Gpu(r"H200 NVL", 835e12, 60e12),
    "gh200": Gpu(r"GH200 \d+GB( HBM3e?)?", 989.4e12, 66.9e12),
    "b200": Gpu(r"B200( SXM6)?( \d+GB( HBM3e)?)?", 2250e12, 75e12),
    "gb200": Gpu(r"GB200( \d+GB( HBM3e)?)?", 2500e12, 80e12),
    "gb300": Gpu(r"GB300( \d+GB( HBM3e)?)?", 2500e12, 80e12),
    "mi300x": Gpu(r"Instinct MI300X( OAM)?", 1307.4e12, 163.4e12),
    "l40s": Gpu(r"L40S", 362e12, 91.6e12),
    "rtx4090": Gpu(r"GeForce RTX 4090", 165.2e12, 82.6e12),
    "rtx5090": Gpu(r"GeForce RTX 5090", 209.5e12, 104.8e12),
}


def gpu_of(name: str) -> str | None:
    """The key in `GPUS` of a driver's name; None where it is no GPU of these, or a part of one."""
    plain = re.sub(r"^(NVIDIA|AMD) ", "", name.strip())
    return next((key for key, gpu in GPUS.items() if re.fullmatch(gpu.names, plain)), None)


def peak_of(device: torch.device, precision: str) -> tuple[float | None, str]:
    """A device's peak in operations a second, and where that is from; None where it is not known.

    Args:
        precision: a Plan's.
    """
    if device.type != "cuda" or precision == "fp64":
        return None, ""
    name = torch.cuda.get_device_name(device)
    key = gpu_of(name)
    if key is None:
        return None, ""
    peak = GPUS[key].bf16_flops if precision == "bf16" else GPUS[key].fp32_flops
    return peak, f"the data sheet of {name}, dense {precision}"
