"""Each release of flash-attn is called as it wants to be, through the public ring, and what was found is told."""

import types

import pytest
import torch
import torch.distributed as dist

from opensora_accel.attention import blocks, ring_attention
from opensora_accel.attention.balance import positions
from opensora_accel.attention.kernels import Problem, choose_kernel, releases
from opensora_accel.attention.kernels.flash_attn import FlashAttn2Kernel, FlashAttn3Kernel
from tests.attention.flash_attn_releases import RELEASES, functions, install
from tests.attention.reference import random_inputs
from tests.attention.test_kernels import expected
from tests.tiers import each_once

ON_GPU = Problem(torch.device("cuda", 0), torch.bfloat16, 64, 64, False, False, False)


def kernel_of(release):
    return FlashAttn3Kernel() if release.startswith("3") else FlashAttn2Kernel()


def ring(release, heads):
    """The error of output and gradients of a causal ring that attends by the release, some of its rows at a time."""
    rank = dist.get_rank()
    q, k, v, _ = random_inputs(9, 9, *heads, False)
    grad = torch.ones(1, dtype=q.dtype).expand(q.shape)
    wanted = expected(q, k, v, None, grad, causal=True)
    rows = positions(9, 2, rank, "zigzag")
    own = [tensor[:, rows].requires_grad_() for tensor in (q, k, v)]
    with pytest.MonkeyPatch.context() as patch:
        releases.find_release.cache_clear()
        install(patch, release)
        patch.setattr(
            blocks, "choose_kernel", lambda _problem: types.SimpleNamespace(kernel=kernel_of(release))
        )
        out = ring_attention(*own, dist.group.WORLD, causal=True, layout="zigzag")
        out.backward(grad[:, rows])
    releases.find_release.cache_clear()
    found = [out.detach(), *(tensor.grad for tensor in own)]
    return max(float((a - b[:, rows]).abs().max()) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize(("release", "heads"), each_once(RELEASES, [(4, 4), (6, 2)]))
def test_a_ring_by_each_release(ranks, release, heads):
    assert max(ranks(2, ring, release, heads)) < 1e-12


@pytest.fixture
def hopper(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device=None: (9, 0))
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: None)
    for cached in (choose_kernel, releases.find_release):
        cached.cache_clear()
    yield
    for cached in (choose_kernel, releases.find_release):
        cached.cache_clear()


@pytest.mark.parametrize(
    ("release", "found"),
    [
        ("2.6", "flash-attn 2 (flash-attn 2.6.3, functions, the window as a pair; "),
        ("2.7", "flash-attn 2 (flash-attn 2.7.3, operators, the window as two numbers; "),
        ("2.8", "flash-attn 2 (flash-attn 2.8.3, operators, the window as two numbers; "),
        ("3, of 2.7.4", "flash-attn 3 (flash-attn-3 of an unknown version, functions, the window as a pair"),
        (
            "3, operators",
            "flash-attn 3 (flash-attn-3 of an unknown version, operators, the window as two numbers",
        ),
    ],
)
def test_the_release_is_told(hopper, monkeypatch, release, found):
    install(monkeypatch, release)
    assert str(choose_kernel(ON_GPU)).startswith(found)


@pytest.mark.parametrize(
    ("parameters", "wrong"),
    [
        ("q k v softmax_scale causal sinks", "its forward wants sinks"),
        ("q k v causal", "has no parameter softmax_scale"),
    ],
)
def test_an_unknown_signature_is_refused(hopper, monkeypatch, parameters, wrong):
    scope = {}
    exec(f"def forward({', '.join(parameters.split())}): raise AssertionError", scope)
    install(monkeypatch, "2.8", (scope["forward"], functions("2.6")[1]))
    choice = choose_kernel(ON_GPU)
    reason = dict(choice.refused)["flash-attn 2"]
    assert choice.kernel.name == "aten flash" and wrong in reason
    assert (
        reason.startswith("flash-attn 2.8.3 has another interface")
        and "install flash-attn 2.6, 2.7 or 2.8" in reason
    )


def test_a_package_without_the_functions_is_refused(hopper, monkeypatch):
    module = install(monkeypatch, "2.8", (None, None))
    del module._flash_attn_forward
    assert (
        "has no functions _flash_attn_forward and _backward"
        in dict(choose_kernel(ON_GPU).refused)["flash-attn 2"]
    )
