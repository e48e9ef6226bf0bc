"""What GPUs would be given: every launch of every kernel is compiled for them, to machine code, and not run.

`tools/kernel_costs.py` does it and makes a forecast of its speed. `test_kernels.py` runs this file in a process of its
own.
"""

import pytest
import torch

from shardformer.modeling.kernels.gate import GatedResidual
from shardformer.modeling.kernels.norm import ModulatedNorm
from shardformer.modeling.kernels.rotary import NormRotary
from shardformer.modeling.norm_orders import ORDERS
from tools.kernel_costs import CASES, GPUS, compiled_for, costs


@pytest.fixture(params=GPUS, ids=lambda gpu: gpu.name)
def compiled(request):
    """What was launched."""
    with compiled_for(request.param.arch) as launches:
        yield launches


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
@pytest.mark.parametrize("num_features", [128, 1536, 16384])
@pytest.mark.parametrize("function", [norm_and_modulation, norm_with_weight, gate, rotary])
def test_every_size_compiles(compiled, function, num_features, order):
    if function is gate and order is not ORDERS[0]:
        pytest.skip("has no order")
    out = function(num_features, order)
    out.backward(out)
    assert [binary.name for _, binary in compiled] == ["_forward", "_backward", "_sum_chunks"]


# At sizes that models have, of the bandwidth of a copy.
LEAST = {"RMS norm": 0.9, "adaLN": 0.85, "gated residual": 0.9, "RMS norm, rotary": 0.85}
# Backward: of heads in pairs.
LEAST_BACKWARD = {("RMS norm, rotary", 128): 0.8}
# Bytes of a thread. Without them one program would fill a multiprocessor, on a B200 at 43 % of a copy in place of 75.
MOST_SPILLED = {("adaLN", 6144, "A100"): 64, ("adaLN", 6144, "B200"): 64}


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.name)
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.name} {case.num_features}")
def test_nothing_spills_and_the_forecast_holds(case, gpu):
    for cost in costs(case, gpu):
        # What does not fit into registers would go through memory, where the time is.
        most = MOST_SPILLED.get((case.name, case.num_features, gpu.name), 0)
        assert cost.spilled_bytes <= most, cost
        if gpu.name == "H100":
            least = LEAST[case.name.removesuffix(" of halves")]
            if cost.direction == "backward":
                least = LEAST_BACKWARD.get((case.name, case.num_features), least)
            assert round(cost.share, 2) >= least, cost
            # As much of a row as a program holds, another must fit beside it.
            if case.num_features > 128:
                assert cost.programs >= 2, cost
