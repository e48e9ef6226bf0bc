"""Tiles give the plain order's values bit for bit, and gradients no less exact; kernels of others must prove it."""

import dataclasses
import re
import sys
import types

import pytest
import torch
import torch.nn.functional as F

from shardformer.modeling.norms import kernels as kernels_module
from shardformer.modeling.norms.choose import choose
from shardformer.modeling.norms.compare import agree, gradient_allowance, relative_error
from shardformer.modeling.norms.kernels import KERNELS, Unfit
from shardformer.modeling.norms.layer_tiles import TiledLayerNorm
from shardformer.modeling.norms.order import ORDERS
from shardformer.modeling.norms.probe import Finding
from shardformer.modeling.norms.tiles import tiled_rms_norm

RMS = [order for order in ORDERS if not order.centres]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
CPU = torch.device("cpu")


def draw(*shape, dtype=torch.float32, seed=0):
    made = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return made.to(dtype).requires_grad_()


def exact(function, tensors, gradient):
    wide = [t.detach().double().requires_grad_() for t in tensors]
    return torch.autograd.grad(function(*wide), wide, gradient.double())


def assert_no_less_exact(mine, plain, truth):
    for name, a, b, c in zip(("x", "weight", "bias"), mine, plain, truth, strict=False):
        assert a.dtype == b.dtype
        assert relative_error(a, c) <= gradient_allowance(relative_error(b, c), "strict"), name


@pytest.mark.parametrize("weight_dtype", [*DTYPES, None])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("order", RMS, ids=lambda order: order.name)
def test_tiles_are_the_plain_order_bit_for_bit_and_no_less_exact_in_gradients(
    small_tiles, order, dtype, weight_dtype
):
    x = draw(2, 7, 50, dtype=dtype)
    weight = None if weight_dtype is None else draw(50, dtype=weight_dtype, seed=1)
    tensors = [x] if weight is None else [x, weight]

    def plain(x, weight=None):
        return order(x, weight, None, 1e-5)

    out, expected = tiled_rms_norm(x, weight, order, 1e-5), plain(*tensors)
    assert torch.equal(out, expected) and out.dtype == expected.dtype
    gradient = draw(2, 7, 50, dtype=out.dtype, seed=2).detach()
    mine, theirs = (torch.autograd.grad(o, tensors, gradient) for o in (out, expected))
    assert_no_less_exact(mine, theirs, exact(plain, tensors, gradient))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("affine", [False, True])
def test_layer_norm_on_fp32_copies_is_bit_for_bit_and_no_less_exact_in_gradients(small_tiles, dtype, affine):
    tensors = [draw(2, 7, 50, dtype=dtype), *(draw(50, dtype=dtype, seed=s) for s in (1, 2) if affine)]
    order = ORDERS[-1]

    def plain(x, weight=None, bias=None):
        return order(x, weight, bias, 1e-5)

    out = KERNELS["tiles"].run(tensors[0], *(tensors[1:] or (None, None)), order, 1e-5)
    assert torch.equal(out, plain(*tensors)) and out.dtype == dtype
    gradient = draw(2, 7, 50, dtype=dtype, seed=3).detach()
    mine, theirs = (torch.autograd.grad(o, tensors, gradient) for o in (out, plain(*tensors)))
    truth = exact(lambda x, *rest: F.layer_norm(x, (50,), *rest, eps=1e-5), tensors, gradient)
    assert_no_less_exact(mine, theirs, truth)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rounding", ["once", "steps"])
def test_adaptive_layer_norm_has_the_values_and_gradients_of_its_operations(small_tiles, rounding, dtype):
    x, scale, shift = (
        draw(*shape, dtype=dtype, seed=s) for s, shape in enumerate([(3, 7, 50), (3, 50), (3, 50)])
    )

    def operations(x, scale, shift):
        return F.layer_norm(x, (50,), None, None, 1e-6) * (1 + scale)[:, None] + shift[:, None]

    out, expected = TiledLayerNorm.apply(x, 1 + scale, shift, 1e-6, rounding), operations(x, scale, shift)
    if rounding == "steps":
        assert torch.equal(out, expected)
    else:
        bound = 4 * torch.finfo(dtype).eps * expected.abs().amax(-1, keepdim=True)
        assert ((out - expected).abs() <= bound).all()
    gradient = draw(3, 7, 50, dtype=dtype, seed=4).detach()
    mine, theirs = (torch.autograd.grad(o, [x, scale, shift], gradient) for o in (out, expected))
    assert_no_less_exact(mine, theirs, exact(operations, [x, scale, shift], gradient))


def test_one_row_for_all_samples_gets_the_sum_of_their_gradients(small_tiles):
    x, weight = draw(3, 5, 40), draw(1, 40, seed=1)
    outs = [
        TiledLayerNorm.apply(x, weight, None, 1e-5, "wide"),
        F.layer_norm(x, (40,), weight[0], None, 1e-5),
    ]
    grads = [torch.autograd.grad(out.square().sum(), [x, weight]) for out in outs]
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b)


def layouts():
    wide = draw(2, 5, 3 * 24)
    yield "transposed heads", draw(2, 5, 3, 24).transpose(1, 2)
    yield "a chunk of a projection", wide.chunk(3, -1)[1]
    yield "one row", draw(24)
    yield "every second row", draw(2, 10, 24)[:, ::2]
    yield "expanded", draw(1, 5, 24).expand(3, 5, 24)


@pytest.mark.parametrize(
    ("name", "x"), list(layouts()), ids=lambda value: value if isinstance(value, str) else ""
)
def test_strided_inputs_give_the_same_and_keep_their_layout(small_tiles, name, x):
    order, weight = ORDERS[0], draw(24, seed=1)
    kernel = KERNELS["tiles"]
    if not kernel.worth(x, order):
        assert name in ("every second row", "expanded")  # no [R, C] without a copy: the plain order runs
        return
    out, expected = kernel.run(x, weight, None, order, 1e-6), order(x, weight, None, 1e-6)
    assert torch.equal(out, expected) and out.stride() == expected.stride()
    gradient = torch.randn(x.shape)
    mine, theirs = (torch.autograd.grad(o, [x, weight], gradient) for o in (out, expected))
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("wanted", ["x", "weight"])
def test_only_the_gradients_that_are_needed_are_computed(small_tiles, wanted):
    x, weight = draw(4, 30), draw(30, seed=1)
    (x if wanted == "weight" else weight).requires_grad_(False)
    tiled_rms_norm(x, weight, ORDERS[0], 1e-6).sum().backward()
    assert (x.grad is None) == (wanted == "weight") and (weight.grad is None) == (wanted == "x")


def test_tiles_can_be_differentiated_twice(small_tiles):
    x, weight, shift = draw(3, 8), draw(8, seed=1), draw(1, 8, seed=2)
    for mine, plain in (
        (lambda: tiled_rms_norm(x, weight, ORDERS[0], 1e-6), lambda: ORDERS[0](x, weight, None, 1e-6)),
        (
            lambda: TiledLayerNorm.apply(x[None], weight[None], shift, 1e-6, "steps")[0],
            lambda: F.layer_norm(x, (8,), None, None, 1e-6) * weight + shift,
        ),
    ):
        seconds = []
        for function in (mine, plain):
            (first,) = torch.autograd.grad(function().square().sum(), x, create_graph=True)
            seconds.append(torch.autograd.grad(first.square().sum(), [x, weight]))
        for a, b in zip(*seconds, strict=True):
            torch.testing.assert_close(a, b)


# ---- kernels of others, on stand-ins


T5 = Finding(ORDERS[0], 1e-6, True, "weight", None, 48)
HALF = (torch.bfloat16, torch.bfloat16)


@pytest.fixture
def as_on_a_gpu(kernels):
    """The CPU is offered the kernels that are for GPUs."""
    for name, kernel in kernels.items():
        kernels[name] = dataclasses.replace(kernel, on_cpu=name != "tiles")


def install(monkeypatch, path, **contents):
    parts = path.split(".")
    for length in range(1, len(parts) + 1):
        name = ".".join(parts[:length])
        module = types.ModuleType(name)
        module.__path__ = []
        monkeypatch.setitem(sys.modules, name, module)
    for name, value in contents.items():
        setattr(sys.modules[path], name, value)


class FakeLiger:
    """Liger's signature: apply(X, W, eps, offset, casting_mode, in_place)."""

    @staticmethod
    def apply(x, weight, eps, offset, casting, in_place):
        assert offset == 0.0 and not in_place
        order = {"llama": ORDERS[1], "gemma": ORDERS[2]}[casting]
        return order(x, weight, None, eps)


def only(kept):
    for name in [name for name in KERNELS if name != kept]:
        del KERNELS[name]


def fakes(monkeypatch, wrong=1.0):
    install(monkeypatch, "liger_kernel.ops.rms_norm", LigerRMSNormFunction=FakeLiger)
    install(monkeypatch, "quack", rmsnorm=lambda x, weight, eps: ORDERS[2](x, weight, None, eps) * wrong)
    install(
        monkeypatch,
        "apex.normalization.fused_layer_norm",
        fused_rms_norm_affine=lambda x, weight, shape, eps: F.rms_norm(x, shape, weight, eps),
    )


@pytest.mark.parametrize("package", ["quack", "liger", "apex"])
def test_an_installed_kernel_that_agrees_is_taken_in_fast_mode_only(monkeypatch, as_on_a_gpu, package):
    fakes(monkeypatch)
    for name in {"quack", "liger", "apex"} - {package}:
        del KERNELS[name]
    choice = choose(T5, HALF, CPU, "fast", {})
    assert choice.kernel == package and (choice.difference > 0) == (package != "liger")
    assert choose(T5, HALF, CPU, "strict", {}).kernel == "F.rms_norm × weight"


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        (1.02, r"quack: its values differ by \d"),
        ("raises", "quack: it failed: TypeError"),
        ("fp32", "returns"),
    ],
)
def test_a_kernel_that_does_not_agree_is_refused_with_the_reason(monkeypatch, as_on_a_gpu, wrong, reason):
    fakes(monkeypatch, wrong if isinstance(wrong, float) else 1.0)
    if wrong == "raises":
        install(monkeypatch, "quack", rmsnorm=lambda: None)
    if wrong == "fp32":
        install(monkeypatch, "quack", rmsnorm=lambda x, weight, eps: x.float())
    only("quack")
    choice = choose(T5, HALF, CPU, "fast", {})
    assert choice.kernel is None
    assert re.search(reason, f"quack: {choice.reason}")


def test_a_kernel_with_a_wrong_gradient_is_refused(monkeypatch, as_on_a_gpu):
    class Frozen(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight, eps):
            return ORDERS[0](x, weight, None, eps)

        @staticmethod
        def backward(ctx, gradient):
            return gradient, gradient.sum(0), None

    install(monkeypatch, "quack", rmsnorm=lambda x, weight, eps: Frozen.apply(x, weight, eps))
    only("quack")
    assert "a gradient's error is" in choose(T5, HALF, CPU, "fast", {}).reason


def test_another_package_of_the_same_name_is_refused(monkeypatch):
    x, weight = draw(2, 8), draw(8, seed=1)
    install(monkeypatch, "apex")  # PyPI's apex is a toolkit for Pyramid
    with pytest.raises(Unfit, match=r"the package apex here has no apex.normalization.fused_layer_norm"):
        KERNELS["apex"].run(x, weight, None, ORDERS[0], 1e-6)
    install(monkeypatch, "quack")
    with pytest.raises(Unfit, match=r"the package quack here has no quack.rmsnorm: another of that name\?"):
        KERNELS["quack"].run(x, weight, None, ORDERS[0], 1e-6)
    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    with pytest.raises(Unfit, match="liger_kernel is not installed"):
        KERNELS["liger"].run(x, weight, None, ORDERS[0], 1e-6)


def test_strict_refuses_f_rms_norm_for_t5_in_halves_and_takes_it_in_fp32(as_on_a_gpu):
    half = choose(T5, HALF, CPU, "strict", {})
    assert half.kernel == "F.rms_norm × weight" and half.difference == 0
    assert choose(T5, (torch.float32, torch.float32), CPU, "strict", {}).kernel == "F.rms_norm"
    assert choose(T5, HALF, CPU, "fast", {}).kernel == "F.rms_norm"


def test_strict_agreement_is_told_from_another_order():
    x, weight = draw(64, 128, dtype=torch.bfloat16), draw(128, dtype=torch.bfloat16, seed=1)
    t5, product = (ORDERS[i](x, weight, None, 1e-6) for i in (0, 2))
    assert not agree(product, t5, "strict") and agree(product, t5, "fast")
    assert not agree(t5.float(), t5, "fast") and not agree(t5 * 1.02, t5, "fast")


@pytest.mark.parametrize("state", ["autocast", "vmap", "forward AD", "jit"])
def test_under_what_acts_on_single_operations_no_kernel_runs(state):
    seen = []

    def look(x):
        seen.append(kernels_module.may_replace(x))
        return x * 1

    x = torch.randn(3, 4)
    assert kernels_module.may_replace(x)
    if state == "autocast":
        with torch.autocast("cpu", torch.bfloat16):
            look(x)
    elif state == "vmap":
        torch.vmap(look)(x)
    elif state == "forward AD":
        with torch.autograd.forward_ad.dual_level():
            look(torch.autograd.forward_ad.make_dual(x, x))
    else:
        torch.jit.trace(look, x)
    assert seen[0] is False


def test_mixed_dtypes_go_to_no_fused_kernel(as_on_a_gpu):
    """F.rms_norm takes them too, by a slow way of its own."""
    choice = choose(T5, (torch.bfloat16, torch.float32), CPU, "strict", {})
    assert choice.kernel is None and "F.rms_norm: it takes one dtype for input and weight" in choice.reason
