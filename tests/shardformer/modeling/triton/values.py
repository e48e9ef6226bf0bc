"""The kernels beside the plain operations: values, rounding and every gradient; interpreted, or on a GPU.

`test_kernels.py` runs this file in a process of its own, with TRITON_INTERPRET=1. `make gpu` runs it on a GPU.
"""

import copy
import os
import re
from itertools import product

import pytest
import torch
from torch import nn
from torch.autograd import gradcheck
from torch.autograd.graph import saved_tensors_hooks

from shardformer.modeling import swap_norms
from shardformer.modeling.kernels import (
    explain_kernel,
    gated_residual,
    modulated_norm,
    norm_rotary,
    plain,
)
from shardformer.modeling.norm_orders import ORDERS, agree
from tests.shardformer.modeling.zoo import published
from tests.tiers import NEEDS_GPU, each_once
from tests.with_triton import interpreter_that_rounds  # noqa: F401  (a fixture)

rows = pytest.importorskip("shardformer.modeling.kernels.rows")  # which imports Triton

ORDER = {order.name: order for order in ORDERS}
F32, BF16, F16, F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64
DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"

pytestmark = NEEDS_GPU if DEVICE == "cuda" else []


@pytest.fixture(autouse=True)
def made_on_the_device():
    with torch.device(DEVICE):
        yield


def random(shape, dtype, seed, offset=0.0):
    draw = torch.randn(shape, dtype=F64, generator=torch.Generator().manual_seed(seed), device="cpu")
    return (draw + offset).to(DEVICE, dtype)


def outcome(function, inputs, grad):
    leaves = [None if t is None else t.detach().requires_grad_() for t in inputs]
    out = function(*leaves)
    wanted = [leaf for leaf in leaves if leaf is not None]
    gradients = torch.autograd.grad(out, wanted, grad.to(out.dtype))
    for leaf, gradient in zip(wanted, gradients, strict=True):
        assert gradient.shape == leaf.shape and gradient.dtype == leaf.dtype
    return out, gradients


def error(actual, exact):
    return ((actual.double() - exact).norm() / exact.norm().clamp_min(1e-30)).item()


def agrees_here(out, expected):
    """On a GPU torch sums in an order of its own, and its layer norm in one pass."""
    return agree(out, expected, "strict" if DEVICE == "cpu" or out.dtype != F32 else "fast")


def compare(fused, reference, inputs, agrees=agrees_here):
    """The fused function gives the reference's values, and gradients as close to fp64 as the reference's own."""
    present = [t for t in inputs if t is not None]
    assert explain_kernel(*present) == "Triton kernel"
    with torch.no_grad():
        shape = reference(*inputs).shape
    grad = random(shape, F64, 99)
    if BF16 in {t.dtype for t in present} or F16 in {t.dtype for t in present}:
        grad = grad.bfloat16()  # so that no version rounds the incoming gradient otherwise
    out, gradients = outcome(fused, inputs, grad)
    expected, own = outcome(reference, inputs, grad)
    _, exact = outcome(reference, [None if t is None else t.double() for t in inputs], grad)
    assert out.shape == expected.shape and out.dtype == expected.dtype
    if out.dtype == F64:
        torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-13)
    else:
        assert agrees(out, expected) or but_for_flips(out, expected, present), (out - expected).abs().max()
    for mine, theirs, right in zip(gradients, own, exact, strict=True):
        eps = torch.finfo(F64 if out.dtype == F64 else F32).eps
        # Sums of few terms that cancel leave the noise of an fp32 sum.
        assert error(mine, right) <= 1.25 * error(theirs, right) + 16 * eps


def but_for_flips(out, expected, inputs):
    """On a GPU sums have another order: of halves on the way to fp32 one in a hundred may be rounded the other way."""
    halves = [t.dtype for t in inputs if t.dtype in (BF16, F16)]
    if DEVICE == "cpu" or not halves or out.dtype != F32:
        return False
    difference, row = (out - expected).abs(), expected.abs().amax(-1, keepdim=True)
    is_off = difference > 4 * torch.finfo(F32).eps * row
    return bool((difference <= torch.finfo(halves[0]).eps * row).all()) and is_off.sum() <= max(
        1, 0.01 * out.numel()
    )


def norm_of(order, eps=1e-6, rounds="each"):
    """The fused function and the reference, of (x, scale, shift, weight, bias) as modulated_norm takes them."""

    def over_tokens(x, operand):
        is_per_sample = operand is not None and operand.dim() == 2 and x.dim() > 2
        return operand[(slice(None), *[None] * (x.dim() - 2))] if is_per_sample else operand

    def fused(x, scale, shift, weight, bias):
        return modulated_norm(x, scale, shift, weight, bias, order=order, eps=eps, rounds=rounds)

    def reference(x, scale, shift, weight, bias):
        scale, shift = over_tokens(x, scale), over_tokens(x, shift)
        return plain.modulated_norm(x, scale, shift, weight, bias, order, eps, rounds)

    return fused, reference


def norm_inputs(x_dtype, other_dtype, num_features=100, lead=(2, 7), modulation=(2, 1)):
    shapes = (modulation, modulation, (), ())
    others = [random((*shape, num_features), other_dtype, i + 2) for i, shape in enumerate(shapes)]
    return [random((*lead, num_features), x_dtype, 1, offset=0.3), *others]


# What is left out, of (scale, shift, weight, bias).
PARTS = {
    "norm": (1, 2),
    "all": (),
    "adaLN": (3, 4),
    "scale": (2, 3, 4),
    "shift, weight": (1, 4),
    "bare": (1, 2, 3, 4),
}


# Of x and of the others.
DTYPES = [
    (F32, F32, "each"),
    (BF16, BF16, "each"),
    (F16, F16, "each"),
    (BF16, F32, "each"),
    (BF16, F32, "end"),
    (F64, F64, "each"),
]


# On a GPU, where each kernel takes a second to compile, those that are not left to `make prove`.
@pytest.mark.parametrize(("case", "dtypes"), each_once(product(ORDER, PARTS), DTYPES), ids=str)
def test_norm_and_modulation_match_the_order(case, dtypes):
    (order, parts), (x_dtype, other_dtype, rounds) = case, dtypes
    if DEVICE == "cuda" and order == "layer" and x_dtype != other_dtype and not {3, 4} <= {*PARTS[parts]}:
        pytest.skip("torch's layer norm on a GPU takes one dtype")
    inputs = norm_inputs(x_dtype, other_dtype)
    for i in PARTS[parts]:
        inputs[i] = None
    compare(*norm_of(ORDER[order], rounds=rounds), inputs)


@pytest.mark.parametrize("num_features", [1, 7, 1536, 5120])
@pytest.mark.parametrize("order", ["t5", "layer"])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_odd_and_large_sizes(num_features, order, dtype):
    eps = 1e-2 if num_features == 1 else 1e-6  # one feature less its mean is 0, over the root of eps
    compare(*norm_of(ORDER[order], eps), norm_inputs(dtype, dtype, num_features, lead=(2, 3)))


@pytest.mark.parametrize(
    ("lead", "modulation"),
    [
        ((2, 7), (2,)),
        ((2, 7), (2, 7)),
        ((2, 7), (1, 1)),
        ((2, 7), (1, 7)),
        ((2, 7), ()),
        ((7,), (7,)),
        ((), ()),
        ((2, 3, 5), (2, 3, 1)),
        ((2, 3, 5), (2, 1, 5)),
        ((2, 3, 5), (2,)),
        ((2, 1, 3, 2, 5), (2, 1, 3, 1, 1)),
    ],
)
def test_scale_and_shift_of_every_shape(lead, modulation):
    compare(*norm_of(ORDER["layer"]), norm_inputs(F32, F32, 24, lead, modulation))


def test_scale_and_shift_of_different_shapes():
    inputs = norm_inputs(F32, F32, 24)
    inputs[1], inputs[2] = random((2, 7, 24), F32, 8), random((1, 7, 1), F32, 9)
    compare(*norm_of(ORDER["t5"]), inputs)


STRIDED = {
    "transposed": lambda t: t.transpose(0, 1).contiguous().transpose(0, 1),
    "features first": lambda t: t.movedim(-1, 0).contiguous().movedim(0, -1),
    "sliced": lambda t: torch.cat((t, t), -1)[..., : t.shape[-1]],
    "every other": lambda t: t.repeat_interleave(2, -1)[..., ::2],
    "sliced tokens": lambda t: torch.cat((t, t), 1)[:, 2 : 2 + t.shape[1]],
    "expanded": lambda t: t[:, :1].expand_as(t),
}


@pytest.mark.parametrize("strided", STRIDED)
@pytest.mark.parametrize("lead", [(2, 7), (2, 3, 5), (2, 2, 2, 3)])
def test_strided_inputs(strided, lead):
    x, scale, shift, weight, bias = norm_inputs(F32, F32, 24, lead, lead)
    x, scale, shift = (STRIDED[strided](t) for t in (x, scale, shift))
    weight = torch.stack((weight, weight), -1)[:, 0]
    compare(*norm_of(ORDER["layer"]), [x, scale, shift, weight, bias])
    compare(lambda *t: gated_residual(*t), lambda *t: plain.gated_residual(*t, "each"), [x, scale, shift])
    table = STRIDED[strided](random((*lead, 24), F32, 7))
    compare(*rotary_of("t5", 8, x), [x, table, table + 1, weight, bias])


def test_a_gradient_of_any_strides():
    for grad in (torch.ones(()).expand(2, 7, 24), random((7, 2, 24), F32, 3).transpose(0, 1)):
        found = []
        for function in norm_of(ORDER["layer"]):
            _out, gradients = outcome(function, norm_inputs(F32, F32, 24), grad)
            found.append(gradients)
        for mine, theirs in zip(*found, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("lead", [(0, 7), (2, 0)])
def test_no_rows(lead):
    inputs = norm_inputs(F32, F32, 24, lead, (lead[0], 1))
    out, gradients = outcome(norm_of(ORDER["t5"])[0], inputs, torch.ones(*lead, 24))
    assert out.shape == (*lead, 24) and all((g == 0).all() for g in gradients)
    x, scale = inputs[:2]
    _, gradients = outcome(gated_residual, [x, x.clone(), scale], torch.ones(*lead, 24))
    assert all((g == 0).all() for g in gradients)
    table = torch.ones(lead[1], 1, 8)
    _, gradients = outcome(rotary_of("t5", 8, x)[0], [x, table, table, *inputs[3:]], torch.ones(*lead, 24))
    assert all((g == 0).all() for g in gradients)


def test_rows_in_many_chunks_are_summed_in_one_order(monkeypatch):
    """Several tiles to a chunk, several chunks to a group, and a last chunk that is not full."""
    monkeypatch.setattr(rows, "_TILE", 64)
    monkeypatch.setattr(rows, "_num_running", lambda *_: 6)
    inputs = norm_inputs(F32, F32, 24, (2, 47))
    x, scale, _, weight, _ = inputs
    made = rows.Rows(x, scale)
    assert (made.num_groups, made.num_chunks, made.chunk_tiles, made.tile) == (2, 3, 8, 2)
    compare(*norm_of(ORDER["layer"]), inputs)
    compare(gated_residual, lambda *t: plain.gated_residual(*t, "each"), [x, x + 1, scale])
    table = random((47, 1, 8), F32, 5)
    compare(*rotary_of("layer", 8, x), [x, table, table + 1, weight, weight])
    twice = [outcome(norm_of(ORDER["layer"])[0], inputs, x)[1] for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(*twice, strict=True))


def test_rows_of_zeros_and_no_eps_leave_the_sums_whole():
    """Rows that are beyond the last have no rms; they must not make the sums of the others NaN."""
    x, _, _, weight, _ = norm_inputs(F32, F32, 24, (3,), ())
    compare(*norm_of(ORDER["t5"], eps=0.0), [x, None, None, weight, None])
    compare(*norm_of(ORDER["t5"]), [x * torch.tensor([[0.0], [1.0], [0.0]]), None, None, weight, None])


def test_eps_of_none_is_that_of_fp32():
    x, _, _, weight, _ = norm_inputs(BF16, BF16)
    compare(*norm_of(ORDER["product"], eps=None), [x * 1e-4, None, None, weight, None])


@pytest.mark.parametrize("order", ORDER)
def test_norm_gradcheck(order):
    fused, _ = norm_of(ORDER[order])
    assert gradcheck(fused, [t.requires_grad_() for t in norm_inputs(F64, F64, 3, (2, 2))])


# ---- gated residual


@pytest.mark.parametrize("gate_shape", [(2, 24), (2, 1, 24), (2, 7, 24), (24,), (1, 7, 1)])
@pytest.mark.parametrize(
    ("x_dtype", "y_dtype", "gate_dtype", "rounds"),
    [
        (F32, F32, F32, "each"),
        (BF16, BF16, BF16, "each"),
        (BF16, BF16, F32, "end"),
        (BF16, BF16, F32, "each"),
        (F32, BF16, BF16, "each"),
        (F16, F16, F16, "end"),
        (F64, F64, F64, "each"),
    ],
)
def test_gate_matches_its_operations(gate_shape, x_dtype, y_dtype, gate_dtype, rounds):
    inputs = random((2, 7, 24), x_dtype, 1), random((2, 7, 24), y_dtype, 2), random(gate_shape, gate_dtype, 3)

    def reference(x, y, gate):
        return plain.gated_residual(x, y, gate[:, None] if gate.shape == (2, 24) else gate, rounds)

    compare(lambda *t: gated_residual(*t, rounds=rounds), reference, inputs)


def test_gate_gradcheck():
    inputs = [
        random(shape, F64, i).requires_grad_() for i, shape in enumerate([(2, 3, 5), (2, 3, 5), (2, 5)])
    ]
    assert gradcheck(gated_residual, inputs)


# ---- norm and rotary embedding


def rotary_of(order, head_dim, x, pairs="neighbours", rounds="end"):
    """The fused function and the reference, of (x, cos, sin, weight, bias)."""

    def fused(x, cos, sin, weight, bias):
        return norm_rotary(
            x,
            cos,
            sin,
            weight,
            bias,
            order=ORDER[order],
            eps=1e-6,
            head_dim=head_dim,
            pairs=pairs,
            rounds=rounds,
        )

    def reference(x, cos, sin, weight, bias):
        by_head = [t.unflatten(-1, (-1, head_dim)) if t.shape[-1] == x.shape[-1] else t for t in (cos, sin)]
        return plain.norm_rotary(x, *by_head, weight, bias, ORDER[order], 1e-6, pairs, rounds)

    return fused, reference


def agrees_behind_a_norm(out, expected):
    """As `agree`; but where a sum cancels, a unit of a normed half may be several of the sum."""
    if out.dtype not in (BF16, F16):
        return agrees_here(out, expected)
    difference, row = (out - expected).double().abs(), expected.double().abs().amax(-1, keepdim=True)
    is_close = (difference <= torch.finfo(out.dtype).eps * row).all()
    return bool(is_close) and (difference > 0).sum() <= max(1, 0.01 * out.numel())


# Rows, features, features of a head, and a table.
SHAPES = [
    ((2, 7), 24, 8, (1, 7, 1, 8)),  # all heads normed together
    ((2, 7), 24, 8, (2, 7, 24)),  # with a table for every head
    ((2, 7, 3), 8, 8, (7, 1, 8)),  # each head by itself
    ((2, 3, 7), 8, 8, (7, 8)),  # the heads before the tokens
    ((5,), 4, 2, (2,)),
    ((3,), 5120, 128, (3, 1, 128)),
]
# Of x and of the table.
TABLES = [(F32, F32, "end"), (BF16, F32, "end"), (BF16, BF16, "each"), (F16, F16, "end"), (F64, F64, "end")]


@pytest.mark.parametrize(
    ("case", "dtypes"),
    each_once(product(["t5", "product", "layer"], ["neighbours", "halves"], SHAPES), TABLES),
    ids=str,
)
def test_rotary_matches_its_operations(case, dtypes):
    (order, pairs, (lead, num_features, head_dim, table)), (x_dtype, table_dtype, rounds) = case, dtypes
    x = random((*lead, num_features), x_dtype, 1, offset=0.3)
    others = [random(table, table_dtype, 2), random(table, table_dtype, 3)]
    others += [random((num_features,), x_dtype, 4), random((num_features,), x_dtype, 5)]
    if order != "layer":
        others[3] = None
    compare(*rotary_of(order, head_dim, x, pairs, rounds), [x, *others], agrees_behind_a_norm)


@pytest.mark.parametrize("pairs", ["neighbours", "halves"])
@pytest.mark.parametrize("order", ["t5", "layer"])
def test_rotary_gradcheck(order, pairs):
    shapes = (1, 2, 8), (2, 1, 4), (2, 1, 4), (8,), (8,)
    inputs = [random(shape, F64, i).requires_grad_() for i, shape in enumerate(shapes)]
    assert gradcheck(rotary_of(order, 4, inputs[0], pairs)[0], inputs)


# ---- what the models of diffusers compute


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_wans_block_of_operations(dtype):
    from diffusers.models.normalization import FP32LayerNorm

    x, y, scale, shift = (
        random((2, 7, 96), dtype, 1),
        random((2, 7, 96), dtype, 2),
        *norm_inputs(F32, F32, 96)[1:3],
    )
    norm = FP32LayerNorm(96, 1e-6, elementwise_affine=False)
    expected = (norm(x.float()) * (1 + scale) + shift).type_as(x)
    mine = modulated_norm(x, scale, shift, order=ORDER["layer, fp32"], eps=1e-6, rounds="end")
    assert agrees_here(mine, expected)
    for expected in ((x.float() + y * scale).type_as(x), (x.float() + y.float() * scale).type_as(x)):
        assert agrees_here(gated_residual(x, y, scale, rounds="end"), expected)


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_modules_that_modulate(dtype):
    from diffusers.models.normalization import (
        AdaLayerNormContinuous,
        AdaLayerNormZero,
        CogVideoXLayerNormZero,
    )

    x, emb, eps = random((2, 7, 48), dtype, 1), random((2, 48), dtype, 2), 1e-6
    for module in (
        AdaLayerNormZero(48),
        AdaLayerNormContinuous(48, 48, elementwise_affine=False, eps=eps),
        CogVideoXLayerNormZero(48, 48, eps=eps),
    ):
        module = module.to(dtype)
        parts = module.linear(module.silu(emb)).chunk(module.linear.out_features // 48, 1)
        if isinstance(module, AdaLayerNormContinuous):
            (scale, shift), expected = parts, module(x, emb)
        elif isinstance(module, AdaLayerNormZero):
            (shift, scale), expected = parts[:2], module(x, emb=emb)[0]
        else:
            (shift, scale), expected = parts[:2], module(x, x, emb)[0]
        weight, bias = module.norm.weight, module.norm.bias
        mine = modulated_norm(x, scale, shift, weight, bias, order=ORDER["layer"], eps=eps)
        assert agrees_here(mine, expected)


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_queries_and_keys_of_wan_and_ltx(dtype, monkeypatch):
    """The models' own attention, up to the call of the attention kernel."""
    from diffusers.models.transformers import transformer_ltx, transformer_wan

    seen = []
    for module in (transformer_ltx, transformer_wan):
        monkeypatch.setattr(
            module, "dispatch_attention_fn", lambda q, k, v, **_: seen.append((q, k)) or torch.zeros_like(v)
        )
    x = random((2, 7, 48), dtype, 1)
    processor = transformer_wan.WanAttnProcessor()
    wan = transformer_wan.WanAttention(48, heads=3, dim_head=16, eps=1e-6, processor=processor)
    ltx = transformer_ltx.LTXAttention(48, heads=3, kv_heads=3, dim_head=16)
    tables = {
        "wan": [random((1, 7, 1, 8), F32, i).repeat_interleave(2, -1) for i in (2, 3)],
        "ltx": [random((2, 7, 24), F32, i).repeat_interleave(2, -1) for i in (2, 3)],
    }
    for attention, (cos, sin), eps in ((wan, tables["wan"], 1e-6), (ltx, tables["ltx"], 1e-5)):
        attention = attention.to(dtype)
        for norm in (attention.norm_q, attention.norm_k):
            nn.init.normal_(norm.weight)
        attention(x, None, None, (cos, sin))
        for projection, norm, expected in zip(
            (attention.to_q, attention.to_k), (attention.norm_q, attention.norm_k), seen.pop(), strict=True
        ):
            mine = norm_rotary(
                projection(x), cos, sin, norm.weight, order=ORDER["product"], eps=eps, head_dim=16
            )
            assert agrees_here(mine.unflatten(-1, (3, 16)), expected)


@pytest.mark.parametrize(("pairs", "unbind_dim"), [("neighbours", -1), ("halves", -2)])
def test_the_rotary_embedding_of_diffusers(pairs, unbind_dim):
    from diffusers.models.embeddings import apply_rotary_emb
    from diffusers.models.normalization import RMSNorm

    norm, x = RMSNorm(16, 1e-6).bfloat16(), random((2, 3, 7, 16), BF16, 1)
    cos, sin = random((7, 16), F32, 2), random((7, 16), F32, 3)
    nn.init.normal_(norm.weight)
    expected = apply_rotary_emb(norm(x), (cos, sin), use_real_unbind_dim=unbind_dim)
    mine = norm_rotary(x, cos, sin, norm.weight, order=ORDER["t5"], eps=1e-6, head_dim=16, pairs=pairs)
    assert agrees_here(mine, expected)


# ---- memory, and the swap


def test_backward_keeps_the_inputs_alone():
    inputs = [t.requires_grad_() for t in norm_inputs(BF16, BF16)]
    table = random((7, 1, 20), F32, 7).requires_grad_()
    kept = []
    with saved_tensors_hooks(lambda t: kept.append(t.data_ptr()) or t, lambda t: t):
        modulated_norm(*inputs, order=ORDER["t5"], eps=1e-6)
        gated_residual(inputs[0], inputs[0], inputs[1])
        norm_rotary(inputs[0], table, table, *inputs[3:], order=ORDER["t5"], eps=1e-6, head_dim=20)
    assert kept and set(kept) <= {t.data_ptr() for t in (*inputs, table)}


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("name", [entry[0] for entry in published()])
def test_a_published_norm_is_swapped_unless_torch_computes_it_in_one_pass(name, dtype):
    _, norm, order, _, has_weight, has_bias = next(entry for entry in published() if entry[0] == name)
    norm = norm.to(dtype)
    for parameter in norm.parameters():
        nn.init.normal_(parameter)
    holder = nn.ModuleDict({"norm": norm, "rest": nn.Linear(1, 1, dtype=dtype)})
    before = copy.deepcopy(norm)
    (row,) = swap_norms(holder).rows
    # Torch's own on the CPU keeps what the norm keeps, so that only ours are left. On a GPU it keeps 4 B or 8.
    in_one_pass = order in ("layer", "product") or (not has_weight and not order.startswith("layer"))
    if row.to is None:
        is_own = isinstance(norm, nn.RMSNorm) and "it keeps 4 B a token for backward itself" in row.reason
        assert "in one pass" in row.reason or (DEVICE == "cuda" and is_own), row.reason
        return
    if in_one_pass and not has_bias:
        assert DEVICE == "cuda" and row.to == "F.rms_norm" and row.saved_after == 4 < row.saved_before, (
            row.outcome
        )
    elif DEVICE == "cuda":
        assert row.saved_after < row.saved_before, row.outcome
    elif order.startswith("layer"):
        assert row.to in ("F.layer_norm", "triton.layer_norm")
    else:
        assert row.to == "triton.rms_norm" and row.saved_after == 0 < row.saved_before, row.outcome
    x = random((2, 7, 24), dtype, 3)
    found = []
    for module in (before, norm):
        leaf = x.detach().requires_grad_()
        out = module(leaf)
        # Not the sum of squares: that of a normed row is constant.
        loss = (out.float() * random(out.shape, F32, 4)).sum()
        found.append((out, *torch.autograd.grad(loss, [leaf, *module.parameters()])))
    assert agrees_here(found[1][0], found[0][0])
    for mine, theirs in zip(found[1][1:], found[0][1:], strict=True):
        bound = 0.02 if dtype == BF16 else 1e-5
        assert (mine - theirs).abs().max() <= bound * theirs.abs().max()


def test_a_model_with_swapped_norms_gives_the_same():
    from tests.video_models import CASES
    from tests.video_models.case import change_tensors

    case, found = CASES["HunyuanVideo"], []
    with torch.device("cpu"):  # by a generator of the CPU's
        inputs, model = case.inputs(), case.make()
    inputs, model = change_tensors(inputs, lambda tensor: tensor.to(DEVICE)), model.to(DEVICE)
    for _ in range(2):
        model.zero_grad()
        out = model(**inputs, return_dict=False)[0]
        out.square().mean().backward()
        found.append((out.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}))
        report = swap_norms(model)
    # Nothing was left to swap; which kernels run hangs on what torch computes in one pass on this device.
    assert report.num_swapped == 0 and re.search(r"runs on .*triton\.rms_norm", repr(model))
    torch.testing.assert_close(found[1][0], found[0][0], rtol=1e-4, atol=1e-5)
    for name, gradient in found[0][1].items():
        torch.testing.assert_close(
            found[1][1][name], gradient, rtol=1e-3, atol=1e-5 * gradient.abs().max().item() + 1e-9
        )
