"""torch's own context parallelism, two ways.

"torch ring" is `_templated_ring_attention` and its backward, which `context_parallel` dispatches to. On a GPU it is
reached that way, with the flash kernel. On a CPU the dispatcher knows no kernel, so the two functions are called with
the CPU's flash kernel, which has the signature that they ask for. Causal problems are spread in its own zigzag
(`_HeadTailLoadBalancer`), others contiguously, with the balancing off, as it demands.

"torch context_parallel" is the public context manager with the MATH kernel, the only one that it runs on a CPU:
SDPA becomes matrix products of DTensors, with balancing off, because these know nothing of the zigzag. A key mask goes
in as SDPA takes it, [B, 1, S_q/P, S_kv] on each rank. The context holds a forward and its backward; entering it is
not timed, because a training step enters it once for all layers. Known of it: a causal problem raises
(github.com/pytorch/pytorch/issues/147793), and where the head dim is not small beside the tokens the output has
another shape than the rows that went in (issue 159706).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from ranks import World
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.attention import SDPBackend, sdpa_kernel

from peers import ours
from peers.side import CAUSAL, CROSS, Attention, Problem, Side, rows_of

SEQUENCE_DIM = 2


def _settings(balance: bool, problem: Problem) -> Any:
    """Within it, torch's options are these."""
    from torch.distributed.tensor.experimental._attention import _cp_options

    to_fp32 = problem.torch_dtype != torch.float64
    return mock.patch.multiple(_cp_options, enable_load_balance=balance, convert_to_f32=to_fp32)


class _TemplatedRing(torch.autograd.Function):
    """The pair of functions as one differentiable one."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, world: World, causal: bool) -> Tensor:
        """q, k, v: [B, H, S/P, D] → [B, H, S/P, D]."""
        from torch.distributed.tensor.experimental._context_parallel import _attention

        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        inputs: dict[str, Any] = {"query": q, "key": k, "value": v, "is_causal": causal}
        out, lse = _attention._templated_ring_attention(world.group, SEQUENCE_DIM, kernel, **inputs)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.world, ctx.causal = world, causal
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        from torch.distributed.tensor.experimental._context_parallel import _attention

        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
        options = dict(zip(("query", "key", "value", "out", "logsumexp"), ctx.saved_tensors, strict=True))
        options |= {"grad_out": grads[0], "grad_out_name": "grad_out"}
        options |= {"is_causal": ctx.causal, "dropout_p": 0.0}
        backward = _attention._templated_ring_attention_backward
        return (*backward(ctx.world.group, SEQUENCE_DIM, kernel, **options), None, None)


def _ring(world: World, problem: Problem, mask: Tensor | None) -> Attention:
    if world.device.type == "cuda":
        return _in_context(world, problem, None, SDPBackend.FLASH_ATTENTION, balance=problem.causal)

    def forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
        return _TemplatedRing.apply(q, k, v, world, problem.causal).transpose(1, 2)

    return Attention(forward, lambda: _settings(problem.causal, problem))


def _context_parallel(world: World, problem: Problem, mask: Tensor | None) -> Attention:
    if mask is not None:
        num_rows = len(rows_of(world, problem.queries, "contiguous"))
        mask = mask[:, None, None, :].expand(-1, 1, num_rows, -1)
    return _in_context(world, problem, mask, SDPBackend.MATH, balance=False)


def _in_context(
    world: World, problem: Problem, mask: Tensor | None, backend: SDPBackend, *, balance: bool
) -> Attention:
    from torch.distributed.tensor.experimental import context_parallel

    mesh = init_device_mesh(world.device.type, (world.num_ranks,), mesh_dim_names=("cp",))
    options = {"is_causal": problem.causal, "enable_gqa": problem.heads != problem.kv_heads}

    @contextlib.contextmanager
    def around() -> Iterator[None]:
        # The context spreads the buffers that it is given and wants one; q, k and v are spread already.
        at = torch.arange(problem.queries, device=world.device)
        shared = context_parallel(mesh, buffers=[at], buffer_seq_dims=[0], no_restore_buffers={at})
        with _settings(balance, problem), shared, sdpa_kernel(backend):
            yield

    def forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, **options).transpose(1, 2)

    return Attention(forward, around)


SIDES = (
    Side(
        "torch ring",
        _ring,
        offers=frozenset({CAUSAL, CROSS}),
        causal_layout="zigzag",
        cuda_dtype="bfloat16",
        beside=ours.RING,
    ),
    Side("torch context_parallel", _context_parallel, beside=ours.RING, holds_scores=True),
)
