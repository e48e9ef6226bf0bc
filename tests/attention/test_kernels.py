"""Kernels that return the log-sum-exp: each against the definition, block by block, with the whole row's lse.

Those of a GPU run against stand-ins that have their signatures and their demands, written in plain maths, unless there
is a GPU.
"""

import math
import types

import pytest
import torch
import torch.distributed as dist
from blockwise import ring_on_one_device

from opensora_accel.attention import blocks, explain_kernel, ring_attention
from opensora_accel.attention.balance import positions, rearrange
from opensora_accel.attention.blocks import attend, attend_backward, merge_
from opensora_accel.attention.kernels import Problem, Scores, choose_kernel, releases
from opensora_accel.attention.kernels.cpu import CpuFlashKernel
from opensora_accel.attention.kernels.cuda import CudnnKernel, EfficientKernel, FlashKernel
from opensora_accel.attention.kernels.flash_attn import FlashAttn2Kernel, FlashAttn3Kernel
from opensora_accel.attention.kernels.plain import PlainKernel
from opensora_accel.attention.kernels.visible import VisibleKeysKernel
from tests.attention.flash_attn_releases import install
from tests.attention.reference import full_attention, random_inputs, weights_like
from tests.tiers import NEEDS_GPU, some

PLAIN = PlainKernel()
SCALE = 8**-0.5


def blockwise(kernel, q, k, v, mask, grad, sizes):
    """Output and gradients from blocks of keys, each seen by the kernel alone."""
    out, scale = torch.zeros_like(q, dtype=torch.float64), q.size(-1) ** -0.5
    lse = q.new_full(q.shape[:3], -math.inf, dtype=torch.float64)
    blocks = list(zip(*(t.split(sizes, 1) for t in (k, v, mask)), strict=True))
    for block_k, block_v, block_mask in blocks:
        part, part_lse = kernel.forward(q, block_k, block_v, Scores(scale, block_mask))
        assert part.shape == q.shape and part_lse.shape == (q.size(0), q.size(2), q.size(1))
        merge_(out, lse, part, part_lse.transpose(1, 2))
    grads = [torch.zeros_like(q), [], []]
    for block_k, block_v, block_mask in blocks:
        parts = kernel.backward(
            grad, q, block_k, block_v, out.to(q.dtype), lse.transpose(1, 2).to(part_lse.dtype),
            Scores(scale, block_mask),
        )  # fmt: skip
        grads[0] += parts[0]
        grads[1].append(parts[1])
        grads[2].append(parts[2])
    return out, grads[0], torch.cat(grads[1], 1), torch.cat(grads[2], 1)


def expected(q, k, v, mask, grad, causal=False):
    q, k, v = (t.detach().double().requires_grad_() for t in (q, k, v))
    out = full_attention(q, k, v, mask, causal)
    out.backward(grad.double())
    return out.detach(), q.grad, k.grad, v.grad


@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (4, 1)])
@pytest.mark.parametrize("kernel", [CpuFlashKernel(), PLAIN], ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_blocks_add_up_to_the_definition(kernel, heads, dtype):
    q, k, v, mask = random_inputs(9, 14, *heads, True, dtype=dtype)
    mask[:, ::3] = True  # some key in every block: rows that see none are the caller's
    grad = weights_like(q)
    found = blockwise(kernel, q, k, v, mask, grad, [3, 7, 4])
    for actual, wanted in zip(found, expected(q, k, v, mask, grad), strict=True):
        torch.testing.assert_close(
            actual.double(), wanted, rtol=0, atol=1e-12 if dtype == torch.float64 else 2e-5
        )


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("kernel", [CpuFlashKernel(), PLAIN], ids=lambda kernel: kernel.name)
def test_causal_squares(kernel, masked):
    q, k, v, mask = random_inputs(9, 9, 4, 2, masked)
    if masked:
        mask[:, 0] = True
    grad = weights_like(q)
    out, lse = kernel.forward(q, k, v, Scores(SCALE, mask, True))
    found = out, *kernel.backward(grad, q, k, v, out, lse, Scores(SCALE, mask, True))
    for actual, wanted in zip(found, expected(q, k, v, mask, grad, causal=True), strict=True):
        torch.testing.assert_close(actual, wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("causal", [False, True])
def test_rows_that_see_no_key(causal):
    q, k, v, mask = random_inputs(6, 6, 2, 2, True)
    mask[0] = torch.tensor([False, False, True, False, True, True])
    out, lse = attend(q, k, v, Scores(SCALE, mask, causal))
    torch.testing.assert_close(out, full_attention(q, k, v, mask, causal), rtol=0, atol=1e-12)
    sees = torch.zeros(2, 6, dtype=torch.bool)
    sees[0, 2 if causal else 0 :] = True
    assert torch.equal(lse == -math.inf, ~sees[:, None, :].expand_as(lse))
    lse = lse.masked_fill(lse == -math.inf, 0)
    grads = attend_backward(torch.ones_like(q), q, k, v, out, lse, Scores(SCALE, mask, causal))
    for grad, wanted in zip(
        grads, expected(q, k, v, mask, torch.ones_like(q), causal=causal)[1:], strict=True
    ):
        torch.testing.assert_close(grad, wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0)])
def test_nothing_to_attend(shape):
    """torch's CPU kernel ends the process with a floating point exception on these (2.13)."""
    q, k, v, _ = random_inputs(*shape, 2, 2, False)
    out, lse = attend(q, k, v, Scores(SCALE))
    assert out.shape == q.shape and not out.any() and bool((lse == -math.inf).all())
    grads = attend_backward(q, q, k, v, out, lse, Scores(SCALE))
    assert [g.shape for g in grads] == [q.shape, k.shape, v.shape] and not any(g.any() for g in grads)


def problem(**changes):
    facts = {
        "device": torch.device("cpu"), "dtype": torch.float32, "head_dim": 64, "value_dim": 64, "grouped": False,
        "masked": False, "deterministic": False,
    }  # fmt: skip
    return Problem(**{**facts, **changes})


@pytest.mark.parametrize(
    ("mode", "is_deterministic"), [({}, True), ({"warn_only": True}, False)], ids=["strict", "warns only"]
)
def test_who_asks_for_a_warning_alone_gets_torchs_own_choice(mode, is_deterministic):
    """torch's flash kernel reads the mode so: with `warn_only` its backward adds up in any order."""
    q, k, v, _ = random_inputs(4, 4, 2, 2, False)
    torch.use_deterministic_algorithms(True, **mode)
    try:
        assert Problem.of(q, k, v, None).deterministic == is_deterministic
    finally:
        torch.use_deterministic_algorithms(False)


def test_the_choice_can_be_asked_for_its_reason():
    q, k, v, _ = random_inputs(4, 4, 2, 2, False)
    text = str(explain_kernel(q, k, v))
    assert text.startswith("aten flash (CPU) (not flash-attn 3: it runs on CUDA, the tensors are on cpu; ")
    wide = choose_kernel(problem(value_dim=32))
    assert wide.kernel.name == "plain"
    assert dict(wide.refused)["aten flash (CPU)"] == "it needs values as wide as keys, they are 32 and 64"


def test_choosing_the_unfused_kernel_warns(caplog):
    choose_kernel.cache_clear()
    choose_kernel(problem(value_dim=16))
    assert "runs unfused and holds S_q × S_kv scores a head" in caplog.text


@pytest.fixture
def hopper(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device=None: (9, 0))
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91500)
    choose_kernel.cache_clear()
    releases.find_release.cache_clear()
    yield
    choose_kernel.cache_clear()
    releases.find_release.cache_clear()


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({}, "aten flash"),
        ({"masked": True}, "aten flash over visible keys"),
        ({"masked": True, "causal": True}, "aten efficient"),
        ({"masked": True, "head_dim": 256, "value_dim": 256}, "aten flash over visible keys"),
        ({"masked": True, "head_dim": 264, "value_dim": 264}, "aten efficient"),
        ({"dtype": torch.float32}, "aten efficient"),
        ({"dtype": torch.float64}, "plain"),
        ({"deterministic": True}, "aten flash"),
        ({"deterministic": True, "masked": True}, "aten flash over visible keys"),
        ({"deterministic": True, "masked": True, "causal": True}, "aten efficient"),
        ({"deterministic": True, "masked": True, "dtype": torch.float32}, "aten efficient"),
        ({"dtype": torch.float32, "head_dim": 20, "value_dim": 20}, "plain"),
    ],
)
def test_choice_on_a_hopper_gpu(hopper, changes, name):
    """With cuDNN 9.15.0, whose backward is faulty."""
    assert choose_kernel(on_gpu(**changes)).kernel.name == name


def on_gpu(**changes):
    return problem(**{"device": torch.device("cuda", 0), "dtype": torch.bfloat16, **changes})


@pytest.mark.parametrize(
    ("capability", "version", "first"),
    [
        ((9, 0), 91501, "cuDNN"),
        ((10, 0), 91501, "cuDNN"),
        ((10, 3), 92000, "cuDNN"),
        ((9, 0), 91500, "flash-attn 3"),
        ((9, 0), None, "flash-attn 3"),
        ((10, 0), 91500, "flash-attn 2"),
        ((12, 0), 92000, "flash-attn 2"),
        ((8, 0), 92000, "flash-attn 2"),
    ],
)
def test_the_order_is_torchs_own(flash_attn, monkeypatch, capability, version, first):
    """flash-attn 2 and 3 are installed."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device=None: capability)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: version)
    choice = choose_kernel(on_gpu())
    assert choice.kernel.name == first
    # cuDNN is never asked for what it does not take.
    assert choose_kernel(on_gpu(head_dim=256, value_dim=256)).kernel.name.startswith("flash-attn")
    if first == "cuDNN":
        assert choose_kernel(on_gpu(masked=True)).kernel.name == "cuDNN" and choice.refused == ()
    else:
        assert choose_kernel(on_gpu(masked=True)).kernel.name == "aten flash over visible keys"


def test_torchs_switch_turns_cudnn_down(hopper, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 92000)
    monkeypatch.setenv("TORCH_CUDNN_SDPA_DEPRIORITIZED", "1")
    assert choose_kernel(on_gpu()).kernel.name == "aten flash"


def test_the_reason_against_cudnn_is_told(hopper):
    causal = choose_kernel(on_gpu(masked=True, causal=True))
    assert dict(causal.refused)["cuDNN"] == (
        "version 9.15.0 of cuDNN has a faulty backward; 9.15.1 and newer have not"
    )
    assert "hidden ones are left out" in dict(causal.refused)["aten flash over visible keys"]


def as_read_raw(tensor):
    """What a kernel reads that takes the pointer of a tensor [B, H, S] and assumes that it lies in one piece.

    CUDA reads on behind the end of the memory, too; here what lies there is NaN.
    """
    memory = tensor.new_empty(0).set_(tensor.untyped_storage())[tensor.storage_offset() :]
    beyond = memory.new_full((max(0, tensor.numel() - memory.numel()),), math.nan)
    return torch.cat([memory, beyond])[: tensor.numel()].view(tensor.shape)


class AtenStandIns:
    """torch's GPU operations by name, in plain maths: bound to the real schemas, with the real demands."""

    def __init__(self, monkeypatch):
        for name in ("flash", "cudnn", "efficient"):
            for suffix in ("", "_backward"):
                operation = f"_scaled_dot_product_{name}_attention{suffix}"
                schema = getattr(torch.ops.aten, operation).default._schema
                function = getattr(self, "backward" if suffix else "forward")
                monkeypatch.setattr(torch.ops.aten, operation, self.bound(schema, name, function))

    @staticmethod
    def bound(schema, name, function):
        def call(*args, **kwargs):
            names = [a.name.rstrip("_") for a in schema.arguments]
            given = dict(zip(names, args, strict=False)) | kwargs
            assert set(given) <= set(names)
            for operand in ("query", "key", "value", "grad_out", "out"):
                assert operand not in given or given[operand].stride(-1) == 1, f"{operand} is not dense"
            for argument in schema.arguments:
                known = argument.name.rstrip("_") in given or argument.has_default_value()
                assert known, f"{argument.name} is missing"
            return function(name, given)

        return call

    @staticmethod
    def mask(name, given):
        bias = given.get("attn_bias")
        if bias is None:
            return None
        q, k = given["query"], given["key"]
        assert bias.shape == (q.size(0), q.size(1), q.size(2), k.size(2)) and bias.dtype == q.dtype
        assert bias.stride(-1) == 1 and bias.stride(0) % 16 == 0
        assert bool((bias == bias[:, :1, :1]).all())
        return bias[:, 0, 0] == 0

    def forward(self, name, given):
        q, k, v = (given[n].transpose(1, 2) for n in ("query", "key", "value"))
        assert q.size(2) == k.size(2), "this kernel does not group heads"
        out, lse = PLAIN.forward(q, k, v, Scores(given["scale"], self.mask(name, given), given["is_causal"]))
        out = out.transpose(1, 2).contiguous()
        if name == "efficient":
            assert given["compute_log_sumexp"] is True
            lse = torch.nn.functional.pad(lse, (0, -lse.size(2) % 32), value=math.inf)
            return out, lse, None, None
        if name == "cudnn":
            assert given["compute_log_sumexp"] is True
            lse = lse.unsqueeze(-1)
        return out, lse, None, None, q.size(1), k.size(1), None, None, None

    def backward(self, name, given):
        grad, q, k, v, out = (given[n].transpose(1, 2) for n in ("grad_out", "query", "key", "value", "out"))
        lse = as_read_raw(given["logsumexp"])
        if name == "efficient":
            assert lse.size(2) % 32 == 0 and given["grad_input_mask"] == [True, True, True, False]
            assert bool((lse[:, :, q.size(1) :] == math.inf).all())
            lse = lse[:, :, : q.size(1)]
        elif name == "cudnn":
            lse = lse.squeeze(-1)
        if name != "efficient":
            assert (given["max_q"], given["max_k"]) == (q.size(1), k.size(1))
        assert lse.shape == (q.size(0), q.size(2), q.size(1)) and given["dropout_p"] == 0.0
        scores = Scores(given["scale"], self.mask(name, given), given["is_causal"])
        grads = PLAIN.backward(grad, q, k, v, out, lse, scores)
        grads = [tensor.transpose(1, 2) for tensor in grads]
        return (*grads, None) if name == "efficient" else tuple(grads)


@pytest.mark.parametrize("heads", [(4, 4), (6, 2)])
@pytest.mark.parametrize("kernel", [FlashKernel(), CudnnKernel(), EfficientKernel()], ids=lambda k: k.name)
def test_how_the_gpu_kernels_of_torch_are_called(monkeypatch, kernel, heads):
    AtenStandIns(monkeypatch)
    masked = kernel.name != "aten flash"
    q, k, v, mask = random_inputs(9, 14, *heads, True)
    mask[:, ::3] = True
    if not masked:
        mask = torch.ones_like(mask)
    grad = weights_like(q)
    given_mask = mask if masked else _NoMask(mask)
    found = blockwise(kernel, q, k, v, given_mask, grad, [3, 7, 4])
    for actual, wanted in zip(found, expected(q, k, v, mask, grad), strict=True):
        torch.testing.assert_close(actual, wanted, rtol=0, atol=1e-12)


def balanced_ring(name, layout):
    """The error of the gradients of a causal ring whose ranks attend by a stand-in for torch's kernel on a GPU."""
    kernel = {"aten flash": FlashKernel(), "cuDNN": CudnnKernel(), "aten efficient": EfficientKernel()}[name]
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    q, k, v, _ = random_inputs(16, 16, 4, 4, False)
    # As that of a plain sum is: one number expanded.
    grad = torch.ones(1, dtype=q.dtype).expand(q.shape)
    _, *wanted = expected(q, k, v, None, grad, causal=True)
    rows = positions(16, num_ranks, rank, layout)
    own = [t[:, rows].detach().requires_grad_() for t in (q, k, v)]
    with pytest.MonkeyPatch.context() as patch:
        AtenStandIns(patch)
        patch.setattr(blocks, "choose_kernel", lambda _problem: types.SimpleNamespace(kernel=kernel))
        ring_attention(*own, dist.group.WORLD, causal=True, layout=layout).backward(grad[:, rows])
    return max(float((t.grad - w[:, rows]).abs().max()) for t, w in zip(own, wanted, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("layout", some(["zigzag", "striped"]))
@pytest.mark.parametrize("name", ["aten flash", "cuDNN", "aten efficient"])
def test_kernels_that_read_pointers_get_what_they_assume(ranks, name, layout):
    """A rank attends with some of its rows at a time: their log-sum-exps are a part of those of all."""
    assert max(ranks(2, balanced_ring, name, layout)) < 1e-12


class _NoMask:
    """Splits like a mask, into None."""

    def __init__(self, mask):
        self.size = mask.size(1)

    def split(self, sizes, _dim):
        return [None for _ in sizes]


@pytest.fixture
def flash_attn(monkeypatch, hopper):
    install(monkeypatch, "2.8")
    install(monkeypatch, "3, operators")


@pytest.mark.parametrize(("capability", "name"), [((7, 5), "aten efficient"), ((8, 0), "aten flash")])
def test_choice_on_older_gpus(monkeypatch, hopper, capability, name):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device=None: capability)
    choice = choose_kernel(problem(device=torch.device("cuda", 0), dtype=torch.float16))
    assert choice.kernel.name == name


def test_a_single_key_is_not_for_cudnn(hopper, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91501)
    assert choose_kernel(on_gpu(masked=True, causal=True)).kernel.name == "cuDNN"
    assert choose_kernel(on_gpu(masked=True, causal=True, single=True)).kernel.name == "aten efficient"


def test_flash_attn_is_preferred_where_it_fits(flash_attn, monkeypatch):
    assert choose_kernel(on_gpu()).kernel.name == "flash-attn 3"
    choose_kernel.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device=None: (8, 0))
    assert choose_kernel(on_gpu()).kernel.name == "flash-attn 2"


GPU_KERNELS = [
    *(FlashAttn3Kernel(), FlashAttn2Kernel(), FlashKernel()),
    *(VisibleKeysKernel(), CudnnKernel(), EfficientKernel()),
]


@pytest.mark.parametrize("heads", [(4, 4), (6, 2)])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    "kernel", [pytest.param(kernel, marks=NEEDS_GPU, id=kernel.name) for kernel in GPU_KERNELS]
)
def test_gpu_kernels_add_up_to_the_definition(kernel, masked, heads):
    q, k, v, mask = random_inputs(300, 430, *heads, True, dtype=torch.bfloat16, head_dim=64)
    mask[:, ::3] = True
    reason = kernel.refuses(Problem.of(*(t.cuda() for t in (q, k, v)), mask.cuda() if masked else None))
    if reason:
        pytest.skip(reason)
    grad = weights_like(q)
    given = mask.cuda() if masked else _NoMask(mask)
    on_gpu = [t.cuda() for t in (q, k, v)]
    found = blockwise(kernel, *on_gpu, given, grad.cuda(), [100, 257, 73])
    for actual, wanted in zip(found, expected(q, k, v, mask if masked else None, grad), strict=True):
        torch.testing.assert_close(actual.double().cpu(), wanted, rtol=0, atol=0.05)


def errors(found, wanted):
    """Of each tensor, over the size of the whole."""
    pairs = zip(found, wanted, strict=True)
    return [float((one.double().cpu() - other).norm() / other.norm()) for one, other in pairs]


@pytest.mark.parametrize("heads", [(4, 4), (6, 2)])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped"])
@pytest.mark.parametrize(
    ("device", "dtype", "kernel"),
    [
        *(
            ("cpu", dtype, kernel)
            for dtype in (torch.float64, torch.float32)
            for kernel in (CpuFlashKernel(), PLAIN)
        ),
        *(pytest.param("cuda", torch.bfloat16, kernel, marks=NEEDS_GPU) for kernel in GPU_KERNELS),
        *(
            pytest.param("cuda", torch.float32, kernel, marks=NEEDS_GPU)
            for kernel in (EfficientKernel(), PLAIN)
        ),
    ],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_a_causal_ring_on_one_device(device, dtype, kernel, layout, heads):
    """Three ranks, one after the other: the kernel gets some rows at a time, with their part of the log-sum-exp."""
    q, k, v, _ = (
        None if t is None else t.to(device)
        for t in random_inputs(97, 97, *heads, False, dtype=dtype, head_dim=32)
    )
    reason = kernel.refuses(Problem.of(q, k, v, None))
    if reason:
        pytest.skip(reason)
    grad, scores = weights_like(q.cpu()).to(device), Scores(32**-0.5, causal=True)
    wanted = expected(*(t.cpu() for t in (q, k, v)), None, grad.cpu(), causal=True)
    out, lse = kernel.forward(q, k, v, scores)
    one_call = errors([out, *kernel.backward(grad, q, k, v, out, lse, scores)], wanted)
    found = ring_on_one_device(
        *(rearrange(t, 3, layout) for t in (q, k, v, grad)), num_ranks=3, layout=layout, kernel=kernel
    )
    found = errors(found, [rearrange(t, 3, layout) for t in wanted])
    # Twice: rounding the output once more, and the order of the sums.
    assert all(mine <= 2 * its + 1e-15 for mine, its in zip(found, one_call, strict=True)), (found, one_call)
