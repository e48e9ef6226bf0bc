"""What a GPU would be given: every launch of every kernel is compiled for one, to machine code, and not run.

The driver is a stand-in that names the GPU. Triton brings NVIDIA's assembler with it, so no GPU and no CUDA are needed.
`test_kernels.py` runs this file in a process of its own.
"""

import subprocess
from pathlib import Path

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import JITFunction

from shardformer.modeling.kernels.gate import GatedResidual
from shardformer.modeling.kernels.norm import ModulatedNorm
from shardformer.modeling.kernels.rotary import NormRotary
from shardformer.modeling.norm_orders import ORDERS

CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


class Driver:
    def __init__(self, capability):
        self.target = GPUTarget("cuda", capability, 32)

    def get_current_device(self):
        return self.target.arch

    def get_current_stream(self, device):
        return 0

    def get_current_target(self):
        return self.target


@pytest.fixture(params=[80, 90], ids=["A100", "H100"])
def compiled(request, monkeypatch):
    """The binaries of what was launched."""
    triton.runtime.driver.set_active(Driver(request.param))
    binaries, run = [], JITFunction.run
    monkeypatch.setattr(
        JITFunction,
        "run",
        lambda self, *args, **kwargs: binaries.append(run(self, *args, **{**kwargs, "warmup": True})),
    )
    return binaries


def tensors(num_features, dtype):
    """x [2, 64, C], scale [2, 1, C] and weight [C], in halves as a model in bf16 has them."""
    shapes = (2, 64, num_features), (2, 1, num_features), (num_features,)
    return [torch.ones(shape, dtype=dtype).requires_grad_() for shape in shapes]


def norm_and_modulation(num_features, order):
    x, scale, _ = tensors(num_features, torch.bfloat16)
    return ModulatedNorm.apply(x, scale, scale, None, None, order, 1e-6, "each")


def norm_with_weight(num_features, order):
    x, _, weight = tensors(num_features, torch.float16)
    return ModulatedNorm.apply(x.transpose(0, 1), None, None, weight, None, order, 1e-6, "end")


def gate(num_features, order):
    x, scale, _ = tensors(num_features, torch.bfloat16)
    return GatedResidual.apply(x, x, scale.float(), "end")


def rotary(num_features, order):
    x, _, weight = tensors(num_features, torch.bfloat16)
    table = torch.ones(64, 1, 64)
    return NormRotary.apply(x, table, table, weight, None, order, 1e-6, "neighbours", "end")


@pytest.mark.parametrize("order", [ORDERS[0], ORDERS[5]], ids=lambda order: order.name)
@pytest.mark.parametrize("num_features", [128, 5120])
@pytest.mark.parametrize("function", [norm_and_modulation, norm_with_weight, gate, rotary])
def test_compiles_and_spills_nothing(compiled, tmp_path, function, num_features, order):
    if function is gate and order is not ORDERS[0]:
        pytest.skip("has no order")
    out = function(num_features, order)
    out.backward(out)
    assert len(compiled) == 2
    for binary in compiled:
        (tmp_path / "kernel").write_bytes(binary.asm["cubin"])
        command = [CUOBJDUMP, "-res-usage", tmp_path / "kernel"]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        # What does not fit into registers would go through memory, where the time is.
        assert "STACK:0 " in usage and "LOCAL:0 " in usage, usage
