"""A swapped model has the same names, parameters, values and gradients; the report tells why; undo brings all back."""

import copy
import json
import pickle

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from shardformer.modeling import T5LayerNorm, swap_norms
from shardformer.modeling.norms import KERNELS, Kernel, SwappedNorm, Unfit
from tests.shardformer.modeling.zoo import Lookalike, published, t5
from tests.shardformer.test_t5 import encoder
from tests.video_models import CASES


def real(name, dtype=torch.float32):
    if name in ("t5", "umt5"):
        return encoder(name, dtype), {"input_ids": torch.arange(18).view(2, 9)}
    case = CASES[name]
    inputs = {
        key: value.to(dtype) if torch.is_tensor(value) and value.is_floating_point() else value
        for key, value in case.inputs().items()
    }
    return case.make().to(dtype), {**inputs, "return_dict": False}


def run(model, inputs):
    model.zero_grad()
    out = model(**inputs)[0]
    out.float().square().mean().backward()
    return out.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    ("name", "num_swapped"),
    [
        ("Wan", 8),
        ("HunyuanVideo", 12),
        ("LTX-Video", 12),
        ("t5", 5),
        ("umt5", 5),
    ],
)
def test_a_real_model_gives_the_same_and_comes_back_as_it_was(stand_in, name, num_swapped):
    model, inputs = real(name)
    kinds, parameters = {n: type(m) for n, m in model.named_modules()}, dict(model.named_parameters())
    keys = list(model.state_dict())
    out, grads = run(model, inputs)
    report = swap_norms(model)
    assert report.num_swapped == num_swapped, report
    assert {n: id(p) for n, p in model.named_parameters()} == {n: id(p) for n, p in parameters.items()}
    assert list(model.state_dict()) == keys
    mine, my_grads = run(model, inputs)
    assert torch.equal(mine, out)
    assert my_grads.keys() == grads.keys()
    for key, grad in grads.items():
        torch.testing.assert_close(my_grads[key], grad, rtol=1e-4, atol=1e-5 * grad.abs().max().item() + 1e-9)
    report.undo()
    assert {n: type(m) for n, m in model.named_modules()} == kinds
    assert not any("_runs_on" in vars(module) for module in model.modules())
    with pytest.raises(ValueError, match="these swaps were undone already"):
        report.undo()


@pytest.mark.parametrize("name", ["Wan", "HunyuanVideo", "LTX-Video", "t5"])
def test_a_real_model_in_bf16_gives_the_same_bits(stand_in, name):
    model, inputs = real(name, torch.bfloat16)
    out, _ = run(model, inputs)
    report = swap_norms(model)
    assert report.num_swapped > 0
    mine, grads = run(model, inputs)
    assert torch.equal(mine, out) and all(torch.isfinite(grad).all() for grad in grads.values())


def test_the_kernels_did_run(stand_in, kernels, monkeypatch):
    calls, original = [], kernels["stand-in"]
    model, inputs = real("Wan")
    swap_norms(model)
    kernels["stand-in"] = Kernel(lambda *args: calls.append(1) or original.run(*args))
    model(**inputs)
    assert len(calls) == 8


ALL = [entry[:2] for entry in published()]


@pytest.mark.parametrize(("name", "norm"), ALL, ids=[name for name, _ in ALL])
def test_a_swapped_norm_is_itself_and_of_its_class(stand_in, name, norm):
    holder = nn.ModuleDict({"norm": norm, "rest": nn.Linear(1, 1)})
    kind, parameters, x = type(norm), dict(norm.named_parameters()), torch.randn(23, 24)
    expected = norm(x)
    report = swap_norms(holder)
    (row,) = report.rows
    assert holder["norm"] is norm and dict(norm.named_parameters()) == parameters
    if row.to is None:
        assert type(norm) is kind and "no less than the norm itself" in row.reason
        return
    assert type(norm) is not kind and isinstance(norm, kind) and isinstance(norm, SwappedNorm)
    assert row.difference == 0 and row.saved_after == 0 < row.saved_before
    assert torch.equal(norm(x), expected)
    wide = norm(x.double())
    report.undo()
    assert type(norm) is kind and torch.equal(norm(x.double()), wide)


def test_a_swapped_norm_can_be_copied_pickled_cast_and_loaded(stand_in):
    holder = nn.ModuleDict({"norm": nn.RMSNorm(24, eps=1e-6)})
    swap_norms(holder)
    x = torch.randn(5, 24)
    for made in (copy.deepcopy(holder), pickle.loads(pickle.dumps(holder))):
        assert type(made["norm"]) is type(holder["norm"]) and torch.equal(made["norm"](x), holder["norm"](x))
        assert made["norm"].weight is not holder["norm"].weight
    holder.load_state_dict({"norm.weight": torch.full((24,), 2.0)})
    assert torch.equal(holder["norm"](x), nn.functional.rms_norm(x, (24,), torch.full((24,), 2.0), 1e-6))
    half = x.bfloat16()
    assert torch.equal(
        holder.bfloat16()["norm"](half), nn.functional.rms_norm(half, (24,), half.new_full((24,), 2), 1e-6)
    )


def test_what_happens_to_a_swapped_norm_stays_when_it_is_undone(stand_in):
    """It is the same module: parameters that were assigned, and hooks."""
    holder = nn.ModuleDict({"norm": nn.RMSNorm(24)})
    report = swap_norms(holder)
    holder["norm"].register_forward_hook(lambda *_: None)
    holder.load_state_dict({"norm.weight": torch.full((24,), 2.0)}, assign=True)
    report.undo()
    assert type(holder["norm"]) is nn.RMSNorm and holder["norm"]._forward_hooks
    assert torch.equal(holder["norm"].weight, torch.full((24,), 2.0))


def test_norms_are_swapped_alike_where_gradients_are_off(stand_in):
    """As in code that loads a model."""
    for off in (torch.no_grad, torch.inference_mode):
        holder = nn.ModuleDict({"norm": nn.RMSNorm(24)})
        with off():
            assert swap_norms(holder).num_swapped == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_a_swapped_norm_returns_may_be_written_to(stand_in, dtype):
    norm, x = nn.RMSNorm(24).to(dtype), torch.randn(2, 3, 5, 24, dtype=dtype).transpose(1, 2)
    holder, grads = nn.ModuleDict({"norm": norm}), []
    for _ in range(2):
        leaf = x.detach().requires_grad_()
        out = holder["norm"](leaf)
        out[..., 1:].mul_(3)
        out.mul_(2).square().sum().backward()
        grads.append(leaf.grad)
        swap_norms(holder)
    assert isinstance(holder["norm"], SwappedNorm)
    assert (grads[1] - grads[0]).abs().max() < (2e-2 if dtype == torch.bfloat16 else 1e-6) * grads[
        0
    ].abs().max()


def test_the_default_dtype_is_not_what_a_norm_computes_in(stand_in):
    holder, x = nn.ModuleDict({"norm": nn.RMSNorm(24)}), torch.randn(5, 24, requires_grad=True)
    swap_norms(holder)
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        torch.set_default_dtype(dtype)
        try:
            out = holder["norm"](x)
            found.append((out, *torch.autograd.grad(out.square().sum(), [x, holder["norm"].weight])))
        finally:
            torch.set_default_dtype(torch.float32)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_the_default_device_is_not_what_a_norm_is_probed_on(stand_in):
    reports = []
    for device in ("cpu", "meta"):
        holder = nn.ModuleDict({"t5": T5LayerNorm(24), "torch": nn.RMSNorm(24)})
        with torch.device(device):  # as a user's set_default_device("cuda")
            reports.append(str(swap_norms(holder)))
    assert reports[0] == reports[1] and "not a norm" not in reports[0]


def test_a_norm_found_in_two_places_stays_one(stand_in):
    norm = nn.RMSNorm(24)
    holder = nn.ModuleDict({"a": norm, "b": nn.ModuleDict({"c": norm})})
    report = swap_norms(holder)
    assert isinstance(norm, SwappedNorm) and [row.name for row in report.rows] == ["a", "b.c"]
    report.undo()
    assert type(norm) is nn.RMSNorm


def test_within_limits_the_swap_to_paths(stand_in):
    model, _ = real("Wan")
    report = swap_norms(model, within=("blocks.*.attn1", "blocks.0.attn2.norm_q"))
    assert [row.name for row in report.rows] == [
        *(f"blocks.0.{name}" for name in ("attn1.norm_q", "attn1.norm_k", "attn2.norm_q")),
        *(f"blocks.1.attn1.{name}" for name in ("norm_q", "norm_k")),
    ]
    with pytest.raises(ValueError, match=r"within='block.0' fits no module of WanTransformer3DModel"):
        swap_norms(model, within=("block.0",))
    with pytest.raises(ValueError, match="mode='loose' is unknown; use one of strict, fast"):
        swap_norms(model, "loose")


def test_swapping_twice_changes_nothing_more(stand_in):
    model, _ = real("Wan")
    swap_norms(model)
    before = [type(module) for module in model.modules()]
    assert swap_norms(model).num_swapped == 0
    assert [type(module) for module in model.modules()] == before


def test_an_exception_on_the_way_leaves_the_model_as_it_was(stand_in, kernels):
    model, _ = real("Wan")
    before, calls, original = [type(module) for module in model.modules()], [], kernels["stand-in"]

    def interrupted(x, *rest):
        calls.append(x)
        if x.dim() == 3 and sum(call.dim() == 3 for call in calls) == 4:  # the fourth norm, in its own dtype
            raise KeyboardInterrupt
        return original.run(x, *rest)

    kernels["stand-in"] = Kernel(interrupted)
    with pytest.raises(KeyboardInterrupt):
        swap_norms(model)
    assert [type(module) for module in model.modules()] == before


def test_the_report_groups_what_is_the_same_and_says_why_something_was_kept(stand_in):
    hooked = nn.RMSNorm(24, eps=1e-6)  # else as those of the blocks
    hooked.register_forward_hook(lambda *_: None)
    model = nn.ModuleDict(
        {
            "blocks": nn.ModuleList(nn.ModuleDict({"norm": nn.RMSNorm(24, eps=1e-6)}) for _ in range(3)),
            "odd": Lookalike(lambda x, w: t5(x, w) * 1.1),
            "out": nn.LayerNorm(24),
            "act": nn.SiLU(),
            "late": nn.ModuleDict({"hooked": hooked}),
        }
    )
    report = swap_norms(model)
    assert str(report).splitlines() == [
        "norms swapped (strict): 3 of 6",
        "     module         class        order    eps    now",
        "3 ×  blocks.*.norm  RMSNorm      product  1e-06  "
        "stand-in, bit for bit, keeps 0 B a token for backward, not 100",
        "1 ×  odd            T5LayerNorm                  kept: its values fit no known order of normalisation",
        "1 ×  out            LayerNorm    layer    1e-05  "
        "kept: F.layer_norm: it keeps 8 B a token for backward, no less than the norm itself; "
        "triton.layer_norm: F.layer_norm computes this order in one pass",
        "1 ×  late.hooked    RMSNorm                      kept: it has hooks",
    ]
    told = json.loads(json.dumps(report.as_dict()))
    assert told["mode"] == "strict" and len(told["norms"]) == 6
    assert told["norms"][0] == {
        **{"name": "blocks.0.norm", "was": "RMSNorm", "order": "product", "eps": 1e-6, "to": "stand-in"},
        **{"reason": "", "difference": 0.0, "saved_before": 100, "saved_after": 0},
    }


def test_what_is_no_norm_is_not_reported_for_its_hooks():
    """As in a model under a profiler, where every module has some."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.LayerNorm(4)), nn.RMSNorm(4))
    for module in model:
        module.register_forward_hook(lambda *_: None)
    assert [(row.name, row.was) for row in swap_norms(model).rows] == [("1.0", "LayerNorm"), ("2", "RMSNorm")]


def test_a_norm_whose_own_weights_give_other_values_is_kept(stand_in):
    """Two norms of one class and the same attributes, one of which was changed where a probe does not look."""

    class Sly(nn.Module):
        def __init__(self, factor):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(24))
            self._factor = factor

        def forward(self, x):
            return t5(x, self.weight) * self._factor

    report = swap_norms(nn.ModuleList([Sly(1.0), Sly(1.1)]))
    assert [row.reason for row in report.rows] == ["", "with its own parameters its values are others"]


@pytest.mark.slow
@pytest.mark.parametrize("state", ["autocast", "compile", "no_grad"])
def test_elsewhere_the_original_forward_runs(stand_in, state):
    model, inputs = real("t5")

    def outcome():
        if state == "autocast":
            with torch.autocast("cpu", torch.bfloat16):
                return model(**inputs)[0]
        if state == "compile":
            return torch.compile(model, backend="eager", fullgraph=True)(**inputs)[0]
        with torch.no_grad():
            return model(**inputs)[0]

    expected = outcome()
    report = swap_norms(model)
    assert report.num_swapped == 5
    torch.compiler.reset()
    assert torch.equal(outcome(), expected)


def test_checkpointing_a_swapped_model_keeps_its_gradients(stand_in):
    model, inputs = real("Wan")
    swap_norms(model)
    _, expected = run(model, inputs)
    model.enable_gradient_checkpointing()
    _, grads = run(model.train(), inputs)
    assert all(torch.equal(grads[name], expected[name]) for name in expected)


def test_a_model_on_the_meta_device_is_swapped_too(stand_in):
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(24, 24), nn.RMSNorm(24, eps=1e-6))
    report = swap_norms(model)
    assert report.num_swapped == 1 and model[1].weight.is_meta
    model.to_empty(device="cpu")
    nn.init.ones_(model[1].weight)
    x = torch.randn(2, 24)
    assert torch.equal(model[1](x), nn.functional.rms_norm(x, (24,), model[1].weight, 1e-6))


def test_a_norm_that_keeps_as_little_itself_stays(stand_in):
    """As torch's own does on a GPU, where it runs on the kernel that would take its place."""
    lean = Lookalike(lambda x, weight: checkpoint(t5, x, weight, use_reentrant=False))
    report = swap_norms(nn.ModuleDict({"lean": lean, "other": Lookalike(t5)}))
    assert [row.to for row in report.rows] == [None, "stand-in"]
    assert report.rows[0].reason == "it keeps 0 B a token for backward itself, and stand-in 0"


WRONG = {
    "its values differ by": lambda x, w, b, order, eps: order(x, w, b, eps) * 1.001,
    "it returns (23, 24) torch.float64": lambda x, w, b, order, eps: order(x, w, b, eps).double(),
    "a gradient's error is": lambda x, w, b, order, eps: order(x, w, b, eps).detach() + 0 * (x * w),
    "it failed: KeyError: 'no such kernel'": lambda x, w, b, order, eps: {}["no such kernel"],
    "no less than the norm itself": lambda x, w, b, order, eps: order(x, w, b, eps),
}


@pytest.mark.parametrize("reason", WRONG)
def test_a_kernel_that_does_not_agree_is_not_taken(kernels, reason):
    kernels.clear()
    kernels["wrong"] = Kernel(WRONG[reason])
    (row,) = swap_norms(nn.ModuleDict({"norm": nn.RMSNorm(24, eps=1e-6)})).rows
    assert row.to is None and reason in row.reason


@pytest.mark.parametrize(
    ("dtype", "kernel", "mode", "is_taken"),
    [
        (torch.float32, "F.rms_norm", "strict", True),
        (torch.bfloat16, "F.rms_norm", "strict", False),  # it rounds after the product
        (torch.bfloat16, "F.rms_norm", "fast", True),
        (torch.bfloat16, "F.rms_norm × weight", "strict", True),
    ],
)
def test_torchs_kernels_compute_t5s_order(kernels, dtype, kernel, mode, is_taken):
    """Their values and gradients; what they keep for backward is less on a GPU alone."""
    torch_kernel = kernels[kernel].run

    class Kept(torch.autograd.Function):
        """The kernel, keeping its inputs alone."""

        @staticmethod
        def forward(ctx, x, weight, order, eps):
            ctx.save_for_backward(x, weight)
            ctx.options = order, eps
            return torch_kernel(x, weight, None, order, eps)

        @staticmethod
        def backward(ctx, grad):
            x, weight = (t.detach().requires_grad_() for t in ctx.saved_tensors)
            with torch.enable_grad():
                out = torch_kernel(x, weight, None, *ctx.options)
            return *torch.autograd.grad(out, (x, weight), grad), None, None

    kernels.clear()
    kernels["kept"] = Kernel(lambda x, w, b, order, eps: Kept.apply(x, w, order, eps))
    holder = nn.ModuleDict({"norm": T5LayerNorm(24).to(dtype)})
    (row,) = swap_norms(holder, mode).rows
    assert (row.to is not None) == is_taken, row.reason


@pytest.mark.parametrize(
    ("package", "reason"), [("quack", "quack is not installed"), ("apex", "another of that name")]
)
def test_a_package_that_is_not_the_kernels_is_told(monkeypatch, package, reason):
    import types

    from shardformer.modeling.norm_orders import ORDERS

    monkeypatch.setitem(
        __import__("sys").modules, package, types.ModuleType("apex") if package == "apex" else None
    )
    with pytest.raises(Unfit, match=reason):
        KERNELS[package].run(torch.ones(2, 24), torch.ones(24), None, ORDERS[0], 1e-6)


# ---- T5's norm in plain PyTorch


def test_t5s_norm_replaces_another_on_its_parameter():
    from transformers.models.t5.modeling_t5 import T5LayerNorm as Reference

    reference = Reference(24, eps=1e-5).bfloat16()
    nn.init.normal_(reference.weight)
    x = torch.randn(4, 24).bfloat16()
    plain = T5LayerNorm.from_native_module(reference, process_group=None)
    assert type(plain) is T5LayerNorm and plain.weight is reference.weight
    for norm in (plain, copy.deepcopy(plain), pickle.loads(pickle.dumps(plain))):
        assert torch.equal(norm(x), reference(x)) and norm.variance_epsilon == 1e-5


def test_an_eps_of_none_is_that_of_fp32():
    """In torch's RMSNorm, also where the weight is a half."""
    assert T5LayerNorm.from_native_module(nn.RMSNorm(24).bfloat16()).variance_epsilon == 2**-23


def test_what_is_no_rms_norm_or_has_no_eps_is_refused():
    with pytest.raises(ValueError, match="LayerNorm is none: leave it out"):
        T5LayerNorm.from_native_module(nn.LayerNorm(24, bias=False))
    nameless = Lookalike(t5)
    del nameless.variance_epsilon
    with pytest.raises(ValueError, match="finds no eps on this T5LayerNorm, neither `eps` nor"):
        T5LayerNorm.from_native_module(nameless)
