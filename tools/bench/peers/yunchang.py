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

from functools import partial
from typing import Any

from ranks import World
from torch import Tensor

from opensora_accel.flash_attn import flash_attn_func
from peers import ours
from peers.side import CAUSAL, CROSS, GROUPED, Attention, Problem, Side, cpu_flash_backward, sdpa


def _ulysses(world: World, problem: Problem, mask: Tensor | None) -> Attention:
    from yunchang import UlyssesAttention
    from yunchang.kernels import AttnType

    layer = UlyssesAttention(world.group, attn_type=AttnType.TORCH_EFFICIENT)
    layer.attn_fn = lambda q, k, v, *, causal=False, **unused: sdpa(q, k, v, causal=causal)
    return Attention(lambda q, k, v: layer(q, k, v, causal=problem.causal))


def _ring(world: World, problem: Problem, mask: Tensor | None) -> Attention:
    from yunchang import ring
    from yunchang.globals import HAS_FLASH_ATTN

    if not HAS_FLASH_ATTN:
        stages = {"fwd-only": _forward, "bwd-only": _backward}
        for module in (ring.ring_flash_attn, ring.zigzag_ring_flash_attn):
            module.select_flash_attn_impl = lambda attn_type, stage, attn_processor=None: stages[stage]
    function = ring.zigzag_ring_flash_attn_func if problem.causal else ring.ring_flash_attn_func
    return Attention(lambda q, k, v: function(q, k, v, causal=problem.causal, group=world.group))


def _ring_pytorch(world: World, problem: Problem, mask: Tensor | None) -> Attention:
    from yunchang.ring import ring_pytorch_attn

    if world.device.type == "cpu":
        ring_pytorch_attn.pytorch_attn_forward = _forward
        ring_pytorch_attn.pytorch_attn_backward = _gradients
    function = ring_pytorch_attn.ring_pytorch_attn_func
    return Attention(lambda q, k, v: function(q, k, v, causal=problem.causal, group=world.group))


# In the place of flash-attn's functions, with their arguments; tensors are [B, S, H, D], log-sum-exp is [B, H, S].


def _forward(*args: Any, **options: Any) -> tuple[Tensor, Tensor]:
    out, lse, _ = partial(flash_attn_func, return_attn_probs=True)(*args, **options)
    return out, lse


def _gradients(
    *tensors: Tensor, softmax_lse: Tensor, softmax_scale: float | None = None, causal: bool = False
) -> tuple[Tensor, ...]:
    """dq, dk, dv; the tensors are the gradient of out, q, k, v and out."""
    heads_first = [tensor.transpose(1, 2).contiguous() for tensor in tensors]
    found = cpu_flash_backward(*heads_first, softmax_lse.contiguous(), causal=causal, scale=softmax_scale)
    return tuple(gradient.transpose(1, 2) for gradient in found)


def _backward(*args: Any, **unused: Any) -> None:
    """Into dq, dk, dv, the buffers that are handed in. The rings give all of these by position."""
    *tensors, softmax_lse, dq, dk, dv, _dropout_p, softmax_scale, causal = args[:12]
    found = _gradients(*tensors, softmax_lse=softmax_lse, softmax_scale=softmax_scale, causal=causal)
    for buffer, gradient in zip((dq, dk, dv), found, strict=True):
        buffer.copy_(gradient)


SIDES = (
    Side(
        "yunchang ulysses",
        _ulysses,
        package="yunchang",
        offers=frozenset({CAUSAL, GROUPED, CROSS}),
        beside=ours.ULYSSES,
    ),
    Side(
        "yunchang ring",
        _ring,
        package="yunchang",
        offers=frozenset({CAUSAL, CROSS}),
        causal_layout="zigzag",
        dtype="bfloat16",
        cuda_dtype="bfloat16",
        beside=ours.RING,
    ),
    Side(
        "yunchang ring_pytorch",
        _ring_pytorch,
        package="yunchang",
        offers=frozenset({CAUSAL}),
        dtype="float32",
        cuda_dtype="bfloat16",
        beside=ours.RING,
    ),
)
