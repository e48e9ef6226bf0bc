"""The kernel call inside a model's attention, led elsewhere: with the arguments that the kernel would have got."""

import pytest
import torch
import torch.nn.functional as F

from opensora_accel import Plan
from opensora_accel.attention import local_attention
from shardformer.modeling.attention import RedirectAttention
from tests.shardformer.conformance import errors
from tests.tolerances import RELATIVE


def call(q, k, v, **options):
    seen = {}

    def attention(q, k, v, **given):
        seen.update(given)
        return local_attention(q, k, v, **given)

    with RedirectAttention(attention) as mode:
        out = F.scaled_dot_product_attention(q, k, v, **options)
    assert mode.num_calls == 1
    return out, seen


def tensors(*dtypes):
    return [torch.randn(2, 3, 5, 8).to(dtype) for dtype in dtypes]


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"scale": 0.3}])
def test_the_result_is_the_kernels(options):
    q, k, v = tensors(*[torch.float64] * 3)
    out, _ = call(q, k, v, **options)
    torch.testing.assert_close(out, F.scaled_dot_product_attention(q, k, v, **options))


def test_dropout_is_refused():
    with pytest.raises(ValueError, match="set it to 0"):
        call(*tensors(*[torch.float32] * 3), dropout_p=0.1)


@pytest.fixture
def rebound(monkeypatch):
    """torch's name is another function's, as in finetrainers: it takes the call and chooses a kernel."""
    torchs = F.scaled_dot_product_attention

    def dispatch(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, **options):
        return torchs(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", dispatch)


def test_the_kernel_is_seen_under_a_name_that_a_program_has_rebound(rebound):
    q, k, v = tensors(*[torch.float64] * 3)
    out, seen = call(q, k, v, scale=0.3)
    torch.testing.assert_close(out, F.scaled_dot_product_attention(q, k, v, scale=0.3))
    assert seen["scale"] == 0.3


def written_out(query, key, value, **_options):
    return (query @ key.mT / query.size(-1) ** 0.5).softmax(-1) @ value


def under_another_kernel(plan, kernel):
    """What a forward says, or how far its output and gradients are from those of one device."""
    torchs = F.scaled_dot_product_attention
    F.scaled_dot_product_attention = written_out if kernel == "other" else lambda *a, **k: torchs(*a, **k)
    try:
        return max(errors("Wan", plan).values())
    except ValueError as error:
        return str(error)
    finally:
        F.scaled_dot_product_attention = torchs


@pytest.mark.parametrize("plan", [Plan(ulysses=2), Plan(ring=2)], ids=str)
def test_a_model_is_exact_under_a_rebound_name(ranks, plan):
    assert max(ranks(2, under_another_kernel, plan, "torch")) < RELATIVE[torch.float64]


def test_a_program_that_rebinds_the_name_to_another_kernel_is_told_so(ranks):
    for message in ranks(2, under_another_kernel, Plan(ulysses=2), "other"):
        assert "blocks.0.attn1 attended to this rank's tokens alone" in message
        assert (
            "has put tests.shardformer.test_attention.written_out in the place of torch.nn.functional"
            in message
        )
