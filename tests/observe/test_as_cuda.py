"""What tensors without values run, keep and cast where they stand for those on a GPU."""

from collections import Counter

import pytest
import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from opensora_accel.attention import explain_kernel
from opensora_accel.observe import as_cuda
from opensora_accel.observe.as_cuda import Architecture, operators_of_cuda
from opensora_accel.observe.fakes import FakeFloats
from opensora_accel.observe.modes import OperatorMode

BF16, FP32 = torch.bfloat16, torch.float32
HALF = {"dtype": BF16, "requires_grad": True}


class Names(OperatorMode):
    """The names of operators, without views."""

    def __init__(self):
        super().__init__()
        self.names = []

    def after(self, func, args, kwargs, outputs):
        if not func.is_view and "empty" not in func._schema.name:
            self.names.append(func._schema.name.removeprefix("aten::"))


def run(function, architecture="sm_90"):
    """The operators of a function's forward, and the sizes, types of what it keeps for backward."""
    kept = []

    def pack(tensor):
        kept.append((tuple(tensor.shape), tensor.dtype))
        return tensor

    with (
        FakeFloats(),
        operators_of_cuda(architecture),
        Names() as seen,
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
    ):
        out = function()
        forward = seen.names.copy()
        seen.names.clear()
        if isinstance(out, torch.Tensor) and out.requires_grad:
            out.backward(torch.empty_like(out))
    return forward, seen.names, kept


def test_an_rms_norm_is_one_kernel_each_way_and_keeps_its_input():
    x = (2, 6, 16)

    def norm():
        return functional.rms_norm(torch.empty(x, **HALF), (16,), torch.empty(16, **HALF), 1e-6)

    forward, backward, kept = run(norm)
    assert forward == ["_fused_rms_norm"] and backward == ["_fused_rms_norm_backward"]
    assert sorted(kept, key=str) == [((16,), BF16), ((2, 6, 1), FP32), (x, BF16)]
    # Afterwards the CPU is itself again.
    with Names() as seen:
        norm()
    assert "pow" in seen.names and "_fused_rms_norm" not in seen.names


def test_a_norm_whose_weight_is_wider_is_what_the_cpu_makes_of_it():
    # CUDA's kernel does not take it either.
    forward, _, _ = run(lambda: functional.rms_norm(torch.empty(6, 16, **HALF), (16,), torch.empty(16), 1e-6))
    assert "_fused_rms_norm" not in forward and "rsqrt" in forward


@pytest.mark.parametrize("dtype", [BF16, FP32, torch.float64])
def test_statistics_of_a_layer_norm_are_fp32_at_least(dtype):
    x = torch.Size((2, 6, 16))
    forward, backward, kept = run(
        lambda: functional.layer_norm(torch.empty(x, dtype=dtype, requires_grad=True), (16,))
    )
    assert forward == ["native_layer_norm"] and backward == ["native_layer_norm_backward"]
    assert kept.count(((2, 6, 1), torch.promote_types(dtype, FP32))) == 2


def test_dropout_keeps_a_byte_a_number():
    forward, _, kept = run(lambda: functional.dropout(torch.empty(6, 16, **HALF), 0.1))
    assert forward == ["native_dropout"] and kept == [((6, 16), torch.bool)]
    for p, training in ((0.0, True), (0.1, False)):
        assert run(lambda p=p, t=training: functional.dropout(torch.empty(6, **HALF), p, t))[0] == []
    assert run(lambda: functional.dropout(torch.empty(6, **HALF), 1.0))[0][-1] == "mul"


# ---- attention

CUDNN, FLASH, EFFICIENT = (
    f"_scaled_dot_product_{name}_attention" for name in ("cudnn", "flash", "efficient")
)
# Architecture, head dim, dtype, options, and what takes it: cuda/sdp_utils.cpp of torch.
CHOICES = [
    ("sm_90", 128, BF16, {}, CUDNN),
    ("sm_100", 64, BF16, {}, CUDNN),
    ("sm_80", 128, BF16, {}, FLASH),
    ("sm_89", 128, BF16, {}, FLASH),
    ("sm_120", 128, BF16, {}, FLASH),
    ("gfx942", 128, BF16, {}, FLASH),
    ("sm_90", 128, torch.float16, {"is_causal": True}, CUDNN),
    ("sm_90", 128, FP32, {}, EFFICIENT),
    ("sm_90", 128, torch.float64, {}, "softmax"),
    ("sm_90", 128, BF16, {"mask": True}, CUDNN),
    ("sm_80", 128, BF16, {"mask": True}, EFFICIENT),
    ("sm_90", 160, BF16, {}, FLASH),
    ("sm_90", 512, BF16, {}, EFFICIENT),
    # cuDNN and the memory-efficient kernel want multiples of 8; flash is given padded heads.
    ("sm_90", 12, BF16, {}, FLASH),
    ("sm_90", 12, BF16, {"mask": True}, "softmax"),
    ("sm_90", 12, FP32, {}, EFFICIENT),
    ("sm_90", 10, FP32, {}, "softmax"),
    # cuDNN knows sixteenths.
    ("sm_90", 128, BF16, {"dropout_p": 0.1}, FLASH),
    ("sm_90", 128, BF16, {"dropout_p": 0.125}, CUDNN),
    ("sm_89", 208, BF16, {}, EFFICIENT),
    ("sm_80", 208, BF16, {}, FLASH),
    ("sm_90", 128, BF16, {"enable_gqa": True}, CUDNN),
    ("sm_80", 128, BF16, {"enable_gqa": True}, FLASH),
    ("sm_90", 128, FP32, {"enable_gqa": True}, "softmax"),
    # One key, fewer keys than queries under a triangle.
    ("sm_90", 128, BF16, {"keys": 1}, FLASH),
    ("sm_80", 128, BF16, {"keys": 7, "is_causal": True}, EFFICIENT),
]


@pytest.mark.parametrize(("architecture", "width", "dtype", "options", "kernel"), CHOICES)
def test_attention_takes_the_kernel_that_torch_takes(architecture, width, dtype, options, kernel):
    options = options.copy()
    keys, has_mask = options.pop("keys", 9), options.pop("mask", False)
    heads = 2 if options.get("enable_gqa") else 4

    def attend():
        q = torch.empty(2, 4, 9, width, dtype=dtype, requires_grad=True)
        k, v = (torch.empty(2, heads, keys, width, dtype=dtype, requires_grad=True) for _ in range(2))
        mask = torch.ones(2, 1, 9, keys, dtype=torch.bool) if has_mask else None
        out = functional.scaled_dot_product_attention(q, k, v, mask, **options)
        assert out.shape == q.shape and out.dtype == dtype
        return out

    forward, backward, _ = run(attend, architecture)
    assert any(kernel in name for name in forward), forward
    assert any(f"{kernel}_backward" in name for name in backward), backward


def test_attention_keeps_what_its_kernel_needs_and_no_more():
    q = (1, 4, 9, 128)

    def attend():
        return functional.scaled_dot_product_attention(*(torch.empty(q, **HALF) for _ in range(3)))

    def floats(kept):
        return Counter(each for each in kept if each[1].is_floating_point and all(each[0]) and each[0])

    def expected(lse):
        return {(q, BF16): 4, (lse, FP32): 1}  # q, k, v and the output

    assert floats(run(attend, "sm_90")[2]) == expected((1, 4, 9, 1))
    assert floats(run(attend, "sm_80")[2]) == expected((1, 4, 9))
    # Log-sum-exps of the memory-efficient kernel are in multiples of 32.
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        assert floats(run(attend)[2]) == expected((1, 4, 32))


@pytest.mark.parametrize(("architecture", "dtype", "name"), [
    ("sm_90", BF16, "cuDNN"),
    ("sm_80", BF16, "aten flash"),
    ("gfx942", BF16, "aten flash"),
    ("sm_90", FP32, "aten efficient"),
])  # fmt: skip
def test_a_ring_takes_the_kernel_that_it_would_take_there(architecture, dtype, name):
    x = torch.empty(1, 9, 2, 64, dtype=dtype)
    with operators_of_cuda(architecture):
        assert explain_kernel(x, x, x).kernel.name == name
    assert explain_kernel(x, x, x).kernel.name == "aten flash (CPU)"


# ---- autocast and lists of tensors


def test_autocast_computes_in_fp32_what_it_does_on_cuda():
    def under_autocast():
        x, weight = (torch.empty(16, 16, requires_grad=True) for _ in range(2))
        with torch.autocast("cpu"):
            product = x @ weight
            halves = product.to(BF16)
            found = {
                "product": product,
                "norm": functional.rms_norm(halves, (16,)),
                "layer norm": functional.layer_norm(halves, (16,)),
                "softmax": halves.softmax(-1),
                "sum": halves.sum(),
                "mean": halves.mean(),
                "exponential": halves.exp(),
                "gelu": functional.gelu(halves),
                "beside fp32": torch.addcmul(halves, halves, x),
            }
        assert not torch.is_autocast_enabled("cpu")
        return {name: tensor.dtype for name, tensor in found.items()}

    found = []
    run(lambda: found.append(under_autocast()))
    narrow = {"product": torch.float16, "mean": BF16, "gelu": BF16}
    wide = ("norm", "layer norm", "softmax", "sum", "exponential", "beside fp32")
    assert found == [narrow | dict.fromkeys(wide, FP32)]
    with torch.autocast("cpu"):
        assert torch.get_autocast_dtype("cpu") == BF16
        assert functional.rms_norm(torch.ones(4, dtype=BF16), (4,)).dtype == BF16


def test_every_operator_of_cudas_list_has_a_policy():
    # Those that are in no set are computed in fp32: functions whose results grow, and losses.
    listed = as_cuda._listed("AutocastCUDA")
    known = as_cuda._LOWER | as_cuda._WIDEST | as_cuda._GIVE_FP32 | {as_cuda._REFUSED}
    assert known <= listed
    assert listed - known >= {"layer_norm", "rms_norm", "exp", "pow.Tensor_Scalar", "mse_loss", "softplus"}
    assert not any("mm" in name or "conv" in name or "attention" in name for name in listed - known)


def test_gradients_are_clipped_as_a_list():
    def clip():
        weights = [torch.nn.Parameter(torch.empty(size)) for size in (3, 5)]
        for weight in weights:
            weight.grad = torch.empty_like(weight)
        torch.nn.utils.clip_grad_norm_(weights, 1.0)

    assert {"_foreach_norm", "_foreach_mul_"} <= {name.partition(".")[0] for name in run(clip)[0]}


def test_names_of_architectures():
    assert Architecture.of("sm_80") == (8, 0, False) and Architecture.of("sm_100") == (10, 0, False)
    assert Architecture.of("gfx942") == (9, 4, True) and Architecture.of("gfx90a") == (9, 0, True)
    for name in ("h100", "sm_", "sm90", "cpu", ""):
        with pytest.raises(ValueError, match="an architecture is sm_ or gfx and a number"):
            Architecture.of(name)
