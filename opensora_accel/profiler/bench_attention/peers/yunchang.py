"""yunchang (USP): its Ulysses with torch's SDPA inside, and its rings.

`UlyssesAttention` takes the local attention from a table. The table's torch entries are rings of CUDA-only kernels
without a backward, so the layer is made with one of them and its public attribute `attn_fn` is then set to SDPA,
which is called with the keyword arguments that the layer passes. It has no mask.

"yunchang ring" is `ring_flash_attn_func`, and for causal problems its zigzag, on flash-attn (`AttnType.FA`) as its
documentation uses it. Where flash-attn is missing, torch's CPU flash kernel is put in its place, with the same
arguments and layouts. Its errors are measured in bf16, as flash-attn takes no fp32: in fp32 the sum of dQ would be
the very buffer that the next block's part is written to (`block_dq_buffer.to(torch.float32)`, 0.6.4).

"yunchang ring_pytorch" is `ring_pytorch_attn_func`, its ring for machines without flash-attn, with the same kernel in
the place of one that is CUDA-only and of a backward that only raises. It returns five gradients for its six inputs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from opensora_accel.profiler.bench_attention import ours
from opensora_accel.profiler.bench_attention.problem import Problem, World
from opensora_accel.profiler.bench_attention.side import CAUSAL, CROSS, GROUPED, Attention, Side, sdpa


def _local(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, **unused: Any) -> Tensor:
    return sdpa(q, k, v, causal=causal)


def _ulysses(world: World, problem: Problem, mask: Tensor | None) -> Attention:
    from yunchang import UlyssesAttention
    from yunchang.kernels import AttnType

    layer = UlyssesAttention(world.group, attn_type=AttnType.TORCH_EFFICIENT)
    layer.attn_fn = _local
    return Attention(lambda q, k, v: layer(q, k, v, causal=problem.causal))


def _ring(world: World, problem: Problem, mask: Tensor | None) -> Attention:
    from yunchang import ring
    from yunchang.globals import HAS_FLASH_ATTN

    if not HAS_FLASH_ATTN:
        for module in (ring.ring_flash_attn, ring.zigzag_ring_flash_attn):
            module.select_flash_attn_impl = _select
    function = ring.zigzag_ring_flash_attn_func if problem.causal else ring.ring_flash_attn_func
    return Attention(lambda q, k, v: function(q, k, v, causal=problem.causal, group=world.group))


def _ring_pytorch(world: World, problem: Problem, mask: Tensor | None) -> Attention:
    from yunchang.ring import ring_pytorch_attn

    if world.device.type == "cpu":
        ring_pytorch_attn.pytorch_attn_forward = _forward
        ring_pytorch_attn.pytorch_attn_backward = _gradients
    function = ring_pytorch_attn.ring_pytorch_attn_func
    return Attention(lambda q, k, v: function(q, k, v, causal=problem.causal, group=world.group))


def _select(attn_type: Any, stage: str, attn_processor: Any = None) -> Any:
    """In the place of yunchang's choice of flash-attn's functions."""
    return {"fwd-only": _forward, "bwd-only": _backward}[stage]


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    **unused: Any,
) -> tuple[Tensor, Tensor]:
    """out [B, S, H, D], log-sum-exp [B, H, S]."""
    heads_first = (t.transpose(1, 2) for t in (q, k, v))
    operation = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out, lse = operation(*heads_first, 0.0, causal, scale=softmax_scale)
    return out.transpose(1, 2), lse


def _gradients(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
) -> tuple[Tensor, ...]:
    heads_first = [t.transpose(1, 2).contiguous() for t in (grad, q, k, v, out)]
    operation = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    gradients = operation(*heads_first, softmax_lse.contiguous(), 0.0, causal, scale=softmax_scale)
    return tuple(gradient.transpose(1, 2) for gradient in gradients)


def _backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    *unused: Any,
    **also_unused: Any,
) -> None:
    """Into dq, dk, dv."""
    found = _gradients(grad, q, k, v, out, softmax_lse, softmax_scale, causal)
    for buffer, gradient in zip((dq, dk, dv), found, strict=True):
        buffer.copy_(gradient)


def _side(name: str, make: Any, imports: str, offers: frozenset[str], **options: Any) -> Side:
    return Side(name, make, "yunchang", "yunchang", imports, offers, **options)


SIDES = (
    _side(
        "yunchang ulysses",
        _ulysses,
        "yunchang:UlyssesAttention",
        frozenset({CAUSAL, GROUPED, CROSS}),
        beside=ours.ULYSSES,
    ),
    _side(
        "yunchang ring",
        _ring,
        "yunchang.ring:zigzag_ring_flash_attn_func",
        frozenset({CAUSAL, CROSS}),
        causal_layout="zigzag",
        dtype="bfloat16",
        cuda_dtype="bfloat16",
        beside=ours.RING,
        beside_causal=ours.ZIGZAG,
    ),
    _side(
        "yunchang ring_pytorch",
        _ring_pytorch,
        "yunchang.ring.ring_pytorch_attn:ring_pytorch_attn_func",
        frozenset({CAUSAL}),
        dtype="float32",
        cuda_dtype="bfloat16",
        beside=ours.RING,
    ),
)
