"""Writes what a machine is, for `first_gpu.py`: GPU, driver, versions, libraries, and which attention kernels run.

    python tools/machine.py machine.json

The file is written anew after every fact, so that a driver or a library that ends the process ends the rest only.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from opensora_accel.attention import explain_kernel

# By import name: flash-attn 2 and 3, triton, apex, liger-kernel and quack, which kernels are compared with.
LIBRARIES = ("flash_attn", "flash_attn_interface", "triton", "apex", "liger_kernel", "quack")
# By `_fused_sdp_choice`, as torch's SDPBackend numbers them, with the names that they have here.
TORCH_KERNELS = {0: "plain", 1: "aten flash", 2: "aten efficient", 3: "cuDNN"}


def facts() -> Iterator[dict[str, Any]]:
    """What the machine is, a few facts at a time."""
    yield {"python": sys.version.split()[0], "torch": torch.__version__, "CUDA of torch": torch.version.cuda}
    yield {"num_gpus": torch.cuda.device_count()}
    has_driver = shutil.which("nvidia-smi") is not None
    if torch.version.cuda is None:
        version = torch.__version__.partition("+")[0]
        remedy = f"install a CUDA build of torch {version} (https://pytorch.org/get-started/locally)"
        yield {"lacks": f"torch {torch.__version__} has no CUDA: {remedy}"}
    elif not torch.cuda.is_available():
        yield {
            "lacks": "no GPU answers: " + ("see nvidia-smi" if has_driver else "there is no NVIDIA driver")
        }
    if has_driver:
        query = [
            "nvidia-smi",
            "--query-gpu=name,driver_version,memory.total,pcie.link.gen.max",
            "--format=csv",
        ]
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            told = subprocess.run(query, capture_output=True, text=True, timeout=15, check=False).stdout
            yield {"nvidia-smi": "; ".join(told.splitlines())}
    if torch.cuda.is_available():
        yield {
            "GPU": torch.cuda.get_device_name(),
            "capability": ".".join(map(str, torch.cuda.get_device_capability())),
            "memory_bytes": torch.cuda.mem_get_info()[1],
            "cuDNN": torch.backends.cudnn.version(),
            "NCCL": ".".join(map(str, torch.cuda.nccl.version())),
        }
    for name in LIBRARIES:
        try:
            module = importlib.import_module(name)
            yield {name: getattr(module, "__version__", "found")}
        except Exception as error:  # noqa: BLE001 - a build for another torch fails in its own ways
            missing = isinstance(error, ModuleNotFoundError)
            yield {name: "not installed" if missing else f"{type(error).__name__}: {error}".splitlines()[0]}


def kernels(device: torch.device) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Facts and claims about attention in bf16, q, k and v [1, 256, 8, 128]."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 1, 256, 8, 128, generator=generator).to(device, torch.bfloat16)
    on_cuda = device.type == "cuda"
    for case in ("plain", "masked", "deterministic"):
        mask = torch.ones(1, 256, dtype=torch.bool, device=device) if case == "masked" else None
        torch.use_deterministic_algorithms(case == "deterministic")
        choice = explain_kernel(q, k, v, mask=mask)
        torch.use_deterministic_algorithms(False)
        claim = {"claim": f"attention in bf16 has a fused kernel: {case}", "why": str(choice)}
        yield (
            {f"attention in bf16, {case}": choice.kernel.name},
            claim | {"held": choice.kernel.name != "plain" if on_cuda else None},
        )
        if case == "plain":
            heads_first = [each.transpose(1, 2) for each in (q, k, v)]
            preferred = TORCH_KERNELS.get(int(torch._fused_sdp_choice(*heads_first)), "another")
            same = choice.kernel.name == preferred or choice.kernel.name.startswith("flash-attn")
            why = f"torch prefers {preferred}, ring attention takes {choice.kernel.name}"
            claim = {"claim": "torch prefers the kernel that ring attention takes", "why": why}
            yield {"torch prefers": preferred}, claim | {"held": same if on_cuda else None}


def product(device: torch.device) -> dict[str, Any]:
    """The claim that the GPU computes."""
    claim: dict[str, Any] = {"claim": "a product on the GPU is that of the CPU"}
    if device.type == "cpu":
        return claim | {"held": None, "why": "no GPU"}
    a = torch.randn(64, 64, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    difference = float(((a.to(device) @ a.to(device)).cpu() - a @ a).abs().max())
    return claim | {
        "value": difference,
        "comparison": "at most",
        "threshold": 1e-9,
        "held": difference <= 1e-9,
    }


def main(path: Path) -> int:
    """0; what raises on the way ends the process, after what was known is written."""
    machine, claims = dict[str, Any](), list[dict[str, Any]]()

    def save() -> None:
        path.write_text(json.dumps({"machine": machine, "claims": claims}, indent=1), encoding="utf-8")

    for some in facts():
        machine |= some
        save()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    claims.append(product(device))
    save()
    for fact, claim in kernels(device):
        machine |= fact
        claims.append(claim)
        save()
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
