"""Bad input: a ValueError with the remedy, on every rank, before data is sent, also where one rank alone errs."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from opensora_accel.attention import (
    joint_attention,
    local_attention,
    ring_attention,
    ulysses_attention,
    usp_attention,
)
from tests.attention.counting import counted

Q = (2, 4, 6, 8)


def zeros(*shape, dtype=torch.float32):
    return torch.zeros(*shape, dtype=dtype)


def attention_of(name):
    if name == "usp":
        mesh = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("ring", "ulysses"))
        return lambda *qkv, **options: usp_attention(*qkv, mesh, **options)
    function = {"ring": ring_attention, "ulysses": ulysses_attention}[name]
    return lambda *qkv, **options: function(*qkv, dist.group.WORLD, **options)


GOOD = (zeros(*Q), zeros(2, 3, 6, 8), zeros(2, 3, 6, 8), {})
BAD = {
    "must be [B, S, H, D]": (zeros(4, 6, 8), zeros(2, 3, 6, 8), zeros(2, 3, 6, 8), {}),
    "repeat the key heads": (zeros(*Q), zeros(2, 3, 4, 8), zeros(2, 3, 4, 8), {}),
    "agree in batch, tokens and heads": (zeros(*Q), zeros(2, 3, 6, 8), zeros(2, 2, 6, 8), {}),
    "agree in batch and head dim": (zeros(*Q), zeros(1, 3, 6, 8), zeros(1, 3, 6, 8), {}),
    "share one floating-point dtype": (zeros(*Q), *[zeros(2, 3, 6, 8, dtype=torch.float64)] * 2, {}),
    "head dim of at least 1": (zeros(2, 4, 6, 0), zeros(2, 3, 6, 0), zeros(2, 3, 6, 0), {}),
    "got torch.float32 (2, 3)": (*GOOD[:3], {"mask": zeros(2, 3)}),
    "bool key mask [B, S_kv] = (2, 3)": (*GOOD[:3], {"mask": torch.ones(2, 4, dtype=torch.bool)}),
    "scale must be a number above 0; got -1.0": (*GOOD[:3], {"scale": -1.0}),
    "scale must be a number above 0; got nan": (*GOOD[:3], {"scale": float("nan")}),
    "true where a key may be seen": (*GOOD[:3], {"mask": torch.ones(2, 1, 4, 3, dtype=torch.bool)}),
}
ON_ALL_RANKS = {
    "as many queries as keys; got 8 and 6": (*GOOD[:3], {"causal": True}),
    "splits=(4, 4, 4) must be one size": (*GOOD[:3], {"splits": (4, 4, 4), "kv_splits": (3, 3)}),
    "give rank ": (*GOOD[:3], {"splits": (5, 3), "kv_splits": (3, 3)}),
}


def refused(name, cases, bad_rank):
    attention, messages = attention_of(name), []
    for q, k, v, options in cases:
        if bad_rank is not None and dist.get_rank() != bad_rank:
            q, k, v, options = GOOD
        with counted() as sent, pytest.raises(ValueError) as caught:
            attention(q, k, v, **options)
        assert sent.num_collectives == 0
        messages.append(str(caught.value))
    return messages


@pytest.mark.parametrize("name", ["ring", "ulysses", "usp"])
@pytest.mark.parametrize("bad_rank", [None, 0, 1])
def test_shapes_that_are_no_attention(ranks, name, bad_rank):
    cases = list(BAD.values()) + (list(ON_ALL_RANKS.values()) if bad_rank is None else [])
    parts = [*BAD, *ON_ALL_RANKS]
    for messages in ranks(2, refused, name, cases, bad_rank):
        for part, message in zip(parts, messages, strict=bad_rank is None):
            assert part in message
            assert bad_rank is None or f"rank {bad_rank}: " in message


def disagreeing(name):
    attention, rank, messages = attention_of(name), dist.get_rank(), []
    for q, k, v, options in (
        (zeros(2, 4, 6 + 6 * rank, 8), *GOOD[1:3], {}),
        (zeros(2 + rank, 4, 6, 8), *[zeros(2 + rank, 3, 6, 8)] * 2, {}),
        (*[zeros(*Q, dtype=(torch.float32, torch.float64)[rank])] * 3, {}),
        (*[zeros(*Q)] * 3, {"causal": rank == 1}),
        (*[zeros(*Q)] * 3, {"scale": 0.5 + rank}),
        (*[zeros(*Q)] * 3, {"scale": 1.0 if rank else None}),
        (*[zeros(*Q)] * 3, {"mask": torch.ones(2, 4, dtype=torch.bool) if rank else None}),
    ):
        with counted() as sent, pytest.raises(ValueError) as caught:
            attention(q, k, v, **options)
        assert sent.num_collectives == 0
        messages.append(str(caught.value))
    return messages


@pytest.mark.parametrize("name", ["ring", "ulysses", "usp"])
def test_ranks_that_disagree(ranks, name):
    parts = [
        "q is torch.float32 (2, 4, 6, 8) on rank 0 and torch.float32 (2, 4, 12, 8) on rank 1; only the number of tok",
        "q is torch.float32 (2, 4, 6, 8) on rank 0 and torch.float32 (3, 4, 6, 8) on rank 1",
        "q is torch.float32 (2, 4, 6, 8) on rank 0 and torch.float64 (2, 4, 6, 8) on rank 1",
        "causal is False on rank 0 and True on rank 1",
        "scale is 0.5 on rank 0 and 1.5 on rank 1",
        "scale is None on rank 0 and 1.0 on rank 1",
        "mask is None on rank 0 and torch.bool (2, 4) on rank 1",
    ]
    for messages in ranks(2, disagreeing, name):
        for part, message in zip(parts, messages, strict=True):
            assert part in message


def given_but_wrong_on_one_rank():
    """With the sizes given nothing is exchanged, unless in debug mode."""
    q = zeros(2, 4, 6 + 6 * dist.get_rank(), 8)
    sizes = {"splits": (4, 4), "kv_splits": (3, 3)}
    with counted() as sent, pytest.raises(ValueError, match="the ranks disagree"):
        ring_attention(q, *GOOD[1:3], dist.group.WORLD, **sizes)
    return sent.num_collectives


def test_debug_mode_compares_the_ranks_although_sizes_are_given(ranks):
    assert ranks(2, given_but_wrong_on_one_rank, env={"OPENSORA_ACCEL_DEBUG": "1"}) == [0, 0]


def layouts_and_meshes():
    group, (q, k, v, _) = dist.group.WORLD, GOOD
    messages = []
    for call in (
        lambda: ring_attention(q, q, q, group, causal=True, layout="zig-zag"),
        lambda: ring_attention(q, q, q, group, layout=("zigzag", "striped")[dist.get_rank()]),
        lambda: ring_attention(*[zeros(2, 3 + 2 * dist.get_rank(), 6, 8)] * 3, group, causal=True, layout="striped"),
        lambda: ring_attention(q, k, v),
        lambda: ulysses_attention(q, k, v),
        lambda: usp_attention(q, k, v),
        lambda: usp_attention(q, k, v, init_device_mesh("cpu", (2,), mesh_dim_names=("sequence",))),
    ):  # fmt: skip
        with pytest.raises(ValueError) as caught:
            call()
        messages.append(str(caught.value))
    return messages


def test_layouts_and_meshes_that_cannot_work(ranks):
    parts = [
        "layout must be one of contiguous, zigzag, striped; got 'zig-zag'",
        "layout is zigzag on rank 0 and striped on rank 1",
        "stripes of 8 tokens have the sizes (4, 4); got (3, 5); use zigzag",
        "call init_parallel(plan)",
        "call init_parallel(plan)",
        "call init_parallel(plan)",
        "the mesh needs the axes ring and ulysses, of size 1 where unused; it has ('sequence',)",
    ]
    for messages in ranks(2, layouts_and_meshes):
        for part, message in zip(parts, messages, strict=True):
            assert part in message


def bad_text():
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("ring", "ulysses"))
    video, messages = [zeros(2, 4, 6, 8)] * 3, []
    text = [zeros(2, 5, 6, 8)] * 3
    for wrong, options in (
        ([zeros(2, 5, 3, 8)] * 3, {}),
        ([zeros(1, 5, 6, 8)] * 3, {}),
        ([text[0], zeros(2, 4, 6, 8), text[2]], {}),
        ([zeros(2, 5 + dist.get_rank(), 6, 8)] * 3, {}),
        (text, {"text_mask": torch.ones(2, 4, dtype=torch.bool)}),
        (text, {"text_first": bool(dist.get_rank())}),
        ([zeros(2, 5, 6, 8, dtype=torch.float64)] * 3, {}),
    ):
        with counted() as sent, pytest.raises(ValueError) as caught:
            joint_attention(*video, *wrong, mesh, **options)
        assert sent.num_collectives == 0
        messages.append(str(caught.value))
    return messages


def test_text_that_does_not_fit(ranks):
    parts = [
        "q and text_q must agree in all but tokens",
        "q and text_q must agree in all but tokens",
        "text_k and text_v must agree in batch, tokens and heads",
        "text_q is torch.float32 (2, 5, 6, 8) on rank 0 and torch.float32 (2, 6, 6, 8) on rank 1; it must be the same",
        "text_mask must be a bool key mask [B, S_kv] = (2, 5)",
        "text_first is False on rank 0 and True on rank 1",
        "q and text_q must agree in all but tokens",
    ]
    for messages in ranks(2, bad_text):
        for part, message in zip(parts, messages, strict=True):
            assert part in message


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            (zeros(2, 5, 2, 8), *[zeros(2, 7, 2, 8)] * 2, {"causal": True}),
            "as many queries as keys; got 5 and 7",
        ),
        ((*[zeros(2, 5, 2, 8)] * 3, {"mask": torch.ones(1, 5, dtype=torch.bool)}), "bool key mask"),
        ((*[zeros(2, 5, 2, 8)] * 3, {"mask": zeros(2, 5)}), "bool key mask"),
        ((zeros(2, 5, 3, 8), *[zeros(2, 5, 2, 8)] * 2, {}), "repeat the key heads"),
    ],
)
def test_local_attention_checks_too(arguments, message):
    *tensors, options = arguments
    with pytest.raises(ValueError) as caught:
        local_attention(*tensors, **options)
    assert message in str(caught.value)


def twice():
    q = torch.randn(1, 4, 2, 8, requires_grad=True)
    out = ring_attention(q, q, q, dist.group.WORLD)
    (grad,) = torch.autograd.grad(out.sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="ring attention has no second derivative"):
        grad.sum().backward()
    return True


def test_a_second_derivative_is_refused(ranks):
    assert all(ranks(2, twice))


def test_local_attention_of_a_row_without_keys_is_zero():
    q, k, v = (torch.randn(2, n, 2, 8, requires_grad=True) for n in (5, 7, 7))
    mask = torch.ones(2, 7, dtype=torch.bool)
    mask[1] = False
    out = local_attention(q, k, v, mask=mask)
    out.sum().backward()
    assert torch.equal(out[1], torch.zeros_like(out[1]))
    assert torch.equal(q.grad[1], torch.zeros_like(q.grad[1]))
