"""Attention with gathered keys, and linear attention: rows and gradients of one device."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from opensora_accel.attention import gathered_attention, linear_attention
from opensora_accel.communications import share_sizes
from tests.attention.counting import counted
from tests.tolerances import RELATIVE, relative_error

EXACT = RELATIVE[torch.float64]
B, H, D, TEXT = 2, 4, 6, 3


def randn(*shape, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


def share(tensor, rank, num_ranks):
    return tensor.tensor_split(num_ranks, 1)[rank].clone().requires_grad_()


def largest(tensor):
    return tensor.grad.abs().max().item()


def biases(tokens, keys, kind):
    if kind == "causal":
        return torch.ones(1, 1, tokens, keys, dtype=torch.bool).tril()
    if kind == "one row sees nothing":
        mask = torch.rand(B, 1, tokens, keys, generator=torch.Generator().manual_seed(5)) > 0.3
        mask[:, :, 2] = False
        return mask
    return randn(B, H, tokens, keys, seed=5)


def gathered(kind, tokens, kv_heads, text):
    """Largest errors of output and of the gradients of q, k, v and text."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    full = [
        randn(B, tokens, heads, D, seed=i).requires_grad_() for i, heads in enumerate((H, kv_heads, kv_heads))
    ]
    texts = [randn(B, TEXT, kv_heads, D, seed=7 + i).requires_grad_() for i in range(2)] if text else []
    bias = biases(tokens, tokens + (TEXT if text else 0), kind)
    scale = 0.3 if kind == "bias" else None
    q, k, v = full
    if text:
        k, v = (
            torch.cat([t, x] if text == "first" else [x, t], 1) for t, x in zip(texts, (k, v), strict=True)
        )
    seen = torch.where(bias.any(-1, keepdim=True), bias, True) if bias.dtype == torch.bool else bias
    expected = F.scaled_dot_product_attention(
        *(t.transpose(1, 2) for t in (q, k, v)), attn_mask=seen, scale=scale, enable_gqa=kv_heads != H
    ).transpose(1, 2)
    if bias.dtype == torch.bool:
        expected = expected * bias.any(-1).transpose(1, 2)[..., None]
    expected.square().sum().backward()

    splits = share_sizes(tokens, num_ranks)
    mine = [share(t.detach(), rank, num_ranks) for t in full]
    own_texts = [t.detach().clone().requires_grad_() for t in texts]
    rows = slice(sum(splits[:rank]), sum(splits[: rank + 1]))
    options = {"text_k": own_texts[0], "text_v": own_texts[1], "text_first": text == "first"} if text else {}
    options["scale"] = scale
    with counted() as sent:
        out = gathered_attention(*mine, dist.group.WORLD, bias=bias[:, :, rows], kv_splits=splits, **options)
    assert [call.kind for call in sent.calls] == ["all-gather"] * 2
    out.square().sum().backward()
    # A query that sees one key has no gradient: rows are measured by those of the whole sequence.
    found = [relative_error(out.detach(), expected[:, rows].detach())]
    found += [relative_error(m.grad, f.grad[:, rows], largest(f)) for m, f in zip(mine, full, strict=True)]
    for own, whole in zip(own_texts, texts, strict=True):
        dist.all_reduce(own.grad)  # of what every rank has, each has a part
        found.append(relative_error(own.grad, whole.grad, largest(full[1])))
    return max(found)


@pytest.mark.parametrize("kind", ["causal", "one row sees nothing", "bias"])
@pytest.mark.parametrize(
    ("tokens", "kv_heads", "text"), [(11, 4, None), (9, 2, "first"), (7, 4, "last"), (2, 4, None)]
)
def test_any_mask_gives_the_rows_of_one_device(ranks, kind, tokens, kv_heads, text):
    if tokens == 2 and kind == "one row sees nothing":
        tokens = 3
    assert max(ranks(3, gathered, kind, tokens, kv_heads, text)) < EXACT


def linear(tokens, rotated):
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    q, k, v, turned_q, turned_k = (randn(B, tokens, H, D, seed=i).abs() for i in range(5))
    names = ["q", "k", "v", "rotated_q", "rotated_k"] if rotated else ["q", "k", "v"]
    full = [t.requires_grad_() for t in (q, k, v, turned_q, turned_k)[: len(names)]]
    top_q, top_k = (full[3], full[4]) if rotated else (q, k)
    weights = torch.einsum("bshd,bthd->bhst", top_q, top_k)  # written with every score, which is quadratic
    total = torch.einsum("bshd,bthd->bhst", q, k).sum(-1)
    expected = (torch.einsum("bhst,bthd->bhsd", weights, v) / (total + 1e-15)[..., None]).transpose(1, 2)
    expected.square().sum().backward()

    mine = [share(t.detach(), rank, num_ranks) for t in full]
    with counted() as sent:
        out = linear_attention(*mine[:3], dist.group.WORLD, **dict(zip(names[3:], mine[3:], strict=True)))
        out.square().sum().backward()
    assert [call.kind for call in sent.calls] == ["all-reduce"] * 2
    rows = expected.detach().tensor_split(num_ranks, 1)[rank]
    found = [relative_error(out.detach(), rows)]
    found += [
        relative_error(m.grad, f.grad.tensor_split(num_ranks, 1)[rank], largest(f))
        for m, f in zip(mine, full, strict=True)
    ]
    return max(found)


@pytest.mark.parametrize("tokens", [10, 2])
@pytest.mark.parametrize("rotated", [False, True])
def test_sums_over_all_tokens_give_the_rows_of_one_device(ranks, tokens, rotated):
    """Also of a rank that has none."""
    assert max(ranks(3, linear, tokens, rotated)) < EXACT


def query_of_zeros():
    q, k, v = (randn(1, 3, H, D, seed=i).relu().requires_grad_() for i in range(3))
    with torch.no_grad():
        q[:, 1] = 0
    out = linear_attention(q, k, v, dist.group.WORLD)
    out.sum().backward()
    return bool((out[:, 1] == 0).all()) and all(bool(t.grad.isfinite().all()) for t in (q, k, v))


def test_a_query_that_the_kernel_function_made_zero_gives_zero(ranks):
    assert all(ranks(2, query_of_zeros))
