"""The fused functions without Triton, and the runs of their kernels, each in a process of its own."""

import sys
from pathlib import Path

import pytest
import torch
from torch.nn.functional import layer_norm

from shardformer.modeling.kernels import choose, explain_kernel, gated_residual, modulated_norm, norm_rotary
from shardformer.modeling.norm_orders import ORDERS
from tests.with_triton import run_with_triton

HERE = Path(__file__).parent / "triton"
T5, LAYER = ORDERS[0], ORDERS[4]


@pytest.mark.prove
@pytest.mark.parametrize(
    ("file", "interpret"),
    [("values.py", True), ("compiled_for_gpu.py", False)],
    ids=["interpreted", "compiled for a GPU"],
)
def test_the_kernels(file, interpret, tmp_path):
    run_with_triton(HERE / file, tmp_path, interpret)


@pytest.fixture
def without_triton(monkeypatch):
    """As on a machine where it is not installed."""
    monkeypatch.setitem(sys.modules, "triton", None)
    choose._why_unavailable.cache_clear()
    yield
    choose._why_unavailable.cache_clear()


def test_without_triton_the_plain_operations_run(without_triton):
    x, scale, shift = torch.randn(2, 3, 8), torch.randn(2, 8), torch.randn(2, 1, 8)
    assert "Triton cannot be imported" in explain_kernel(x)
    assert "pip install 'opensora-accel[kernels]'" in explain_kernel(x)
    expected = layer_norm(x, (8,), eps=1e-6) * (1 + scale[:, None]) + shift
    assert torch.equal(modulated_norm(x, scale, shift, order=LAYER, eps=1e-6), expected)
    assert torch.equal(gated_residual(x, expected, scale), x + expected * scale[:, None])
    cos, sin = torch.randn(3, 1, 4), torch.randn(3, 1, 4)
    heads = T5(x, None, None, 1e-6).view(2, 3, 2, 2, 2)
    turned = torch.stack((-heads[..., 1], heads[..., 0]), -1).view(2, 3, 2, 4)
    expected = (heads.view(2, 3, 2, 4) * cos + turned * sin).view(2, 3, 8)
    assert torch.equal(norm_rotary(x, cos, sin, order=T5, eps=1e-6, head_dim=4), expected)


class Subclass(torch.Tensor):
    pass


@pytest.mark.parametrize(
    ("operands", "reason"),
    [
        ([torch.ones(2, 8, dtype=torch.int64)], "no kernel is for torch.int64"),
        ([torch.ones(2, 8), torch.ones(())], "an operand has no dimension"),
        ([torch.ones(2, 8, device="meta")], "a tensor on meta has no values"),
        ([torch.ones(2, 16385)], "16385 features are more than the 16384"),
        ([torch.ones(1, 8).expand(2**31, 8)], "rows are numbered up to 2,147,467,264"),
        ([torch.ones(2, 8).as_subclass(Subclass)], "Subclass is not a plain tensor"),
    ],
)
def test_the_reason_why_no_kernel_runs_is_told(operands, reason):
    assert explain_kernel(*operands).startswith("plain PyTorch: ") and reason in explain_kernel(*operands)


def test_whatever_acts_on_single_operations_gets_them():
    x = torch.ones(2, 8)
    with torch.autocast("cpu", torch.bfloat16):
        assert "autocast" in explain_kernel(x)
    told = []
    torch.func.vmap(lambda row: told.append(explain_kernel(torch.ones(8))) or row)(x)
    with torch.autograd.forward_ad.dual_level():
        told.append(explain_kernel(x))
    assert "torch.func" in told[0] and "forward-mode" in told[1]

    def block(x, scale):
        return gated_residual(modulated_norm(x, scale, scale, order=T5, eps=1e-6), x, scale)

    assert torch.equal(torch.compile(block, backend="eager", fullgraph=True)(x, x), block(x, x))


X = torch.ones(2, 3, 8)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: modulated_norm(X, torch.ones(3, 8), None, order=T5, eps=1e-6), r"scale \[3, 1, 8\] must"),
        (
            lambda: modulated_norm(X, None, None, X[0], order=T5, eps=1e-6),
            r"weight \[3, 8\] must have the feat",
        ),
        (lambda: modulated_norm(X, None, None, order=T5, eps=1e-6, rounds="no"), "use one of each, end"),
        (
            lambda: gated_residual(X, X[:1], X),
            r"y \[1, 3, 8\] must have the shape of x \[2, 3, 8\]; expand it",
        ),
        (
            lambda: norm_rotary(X, X, X, order=T5, eps=1e-6, head_dim=3),
            r"head_dim \(3\) must be even and divide",
        ),
        (
            lambda: norm_rotary(X, X[0, :, :4], X[0, :, :4], order=T5, eps=1e-6, head_dim=4),
            r"cos \[3, 4\] must broadcast to \[2, 3, 2, 4\] or \[2, 3, 8\]; give it a dimension of size 1",
        ),
        (
            lambda: norm_rotary(X, X, X, order=T5, eps=1e-6, head_dim=4, pairs="odd"),
            "use one of neighbours, halves",
        ),
        (
            lambda: norm_rotary(X, X, X.double(), order=T5, eps=1e-6, head_dim=4),
            "cos and sin must have one dtype; they are torch.float32 and torch.float64",
        ),
    ],
)
def test_operands_that_do_not_fit_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
