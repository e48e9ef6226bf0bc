"""What a block of Wan 14B keeps for backward on a GPU: by hand, of one block alone by kind, and in a traced step."""

from __future__ import annotations

import pytest
import torch
from diffusers import WanTransformer3DModel

from opensora_accel import Plan
from opensora_accel.observe import FakeFloats, operators_of_cuda
from opensora_accel.planner.models import MODELS, named_workload
from opensora_accel.planner.run import trace_step
from tests.planner.block_operators import kept_of
from tests.tiers import PROVE

# A clip of 81 × 720 × 1280, with its caption: tokens S, of text T, channels C in H heads, F of the MLP.
SIZES = {"frames": 81, "height": 720, "width": 1280}
S, T, C, H, F = 75_600, 512, 5120, 40, 13_824
BF16, FP32 = 2, 4
BY_HAND = {
    # Three layer norms keep their input, a cast to fp32, with mean and 1/deviation.
    "layer norms": 3 * (FP32 * S * C + 2 * FP32 * S),
    # Queries and keys, and of cross-attention keys of the text, as the products return them, with 1/rms.
    "norms of queries and keys": 3 * (BF16 * S * C + FP32 * S) + BF16 * T * C + FP32 * T,
    # Two norms' outputs in fp32, for the gradient of the scale that multiplies them; what attention and the MLP
    # return, for that of their gates: the first in bf16, the second cast to fp32. And scales and gates themselves.
    "modulation": 2 * FP32 * S * C + BF16 * S * C + FP32 * S * C + 2 * FP32 * C + FP32 * 6 * C,
    # Inputs in bf16: of the queries, keys and values together, of the cross-attention's queries, of the MLP's first
    # layer, and of its second. Those of attention's own outputs are counted below, those of the text lie outside.
    "products": 3 * BF16 * S * C + BF16 * S * F,
    # Queries and keys that were turned, values, the output, and a log-sum-exp a head and query; then of the text.
    "attention": 4 * BF16 * S * C + FP32 * S * H + 2 * BF16 * S * C + 2 * BF16 * T * C + FP32 * S * H,
    "gelu": BF16 * S * F,
}
KINDS = {
    "NativeLayerNormBackward0": "layer norms",
    "FusedRmsNormBackward0": "norms of queries and keys",
    "MulBackward0": "modulation",
    "AddmmBackward0": "products",
    "ScaledDotProductCudnnAttentionBackward0": "attention",
    "GeluBackward0": "gelu",
}
GIB = 2**30


def test_a_block_keeps_what_is_reckoned_by_hand():
    with FakeFloats(), operators_of_cuda("sm_90"):
        model = WanTransformer3DModel(**{**MODELS["wan2.1-14b"].arguments, "num_layers": 1}).bfloat16()
        hidden, text = (torch.empty(1, n, C, dtype=torch.bfloat16, requires_grad=True) for n in (S, T))
        time = torch.empty(1, 6, C, dtype=torch.bfloat16, requires_grad=True)
        turns = tuple(torch.empty(1, S, 1, C // H) for _ in range(2))
        found = kept_of(model.blocks[0], (hidden, text, time, turns))
    by_kind = {}
    for node, size_bytes in found.items():
        kind = KINDS.get(node, node)
        by_kind[kind] = by_kind.get(kind, 0) + size_bytes
    assert by_kind.keys() == BY_HAND.keys()
    for kind, size_bytes in BY_HAND.items():
        print(f"{kind}: {by_kind[kind] / GIB:.3f} GiB, by hand {size_bytes / GIB:.3f}")
        assert by_kind[kind] == pytest.approx(size_bytes, rel=1e-5), kind
    assert sum(BY_HAND.values()) / GIB == pytest.approx(21.96, abs=0.01)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "gib"),
    [("sm_90", 21.96), pytest.param("sm_80", 21.96, marks=PROVE), pytest.param("cpu", 28.46, marks=PROVE)],
)
def test_a_traced_step_keeps_as_much_for_each_block(architecture, gib):
    workload = named_workload("wan2.1-14b", **SIZES, architecture=architecture)
    memory = trace_step(workload, Plan(precision="bf16"), num_blocks=4).memory
    starts = {}
    for state in memory:
        if state.phase == "forward" and state.block is not None:
            starts.setdefault(state.block, state.device_bytes)
    kept = starts[3] - starts[2]
    assert kept / GIB == pytest.approx(gib, abs=0.01)
    if architecture != "cpu":
        assert kept == pytest.approx(sum(BY_HAND.values()), rel=1e-3)
