"""The kernel call inside a model's attention, led elsewhere: with the arguments that the kernel would have got."""

import pytest
import torch
import torch.nn.functional as F

from opensora_accel.attention import local_attention
from shardformer.modeling.attention import RedirectAttention


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
