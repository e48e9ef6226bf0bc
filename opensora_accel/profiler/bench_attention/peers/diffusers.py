"""diffusers' context parallelism: the attention that its models call once `enable_parallelism` has been called.

Ulysses is called through `dispatch_attention_fn`, as the attention processors of its models do, with the backend
"native" (torch's SDPA, as ours). For tokens or heads that do not divide, `ulysses_anything=True`, as its
documentation says.

Its ring needs a backend that returns the log-sum-exp. On a GPU that is "_native_flash". On a CPU it has none, so
that the ring itself runs here with torch's CPU flash kernel put in the place of the CUDA one, in the same two
functions, with the same layouts, as `_native_flash_attention_forward_op` and its backward. "_native_flash" takes no
mask, and context parallelism neither grouped heads nor causality. For tokens that do not divide,
`ring_anything=True`. In fp64, `convert_to_fp32=False`: the default would round what is added up.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from opensora_accel.profiler.bench_attention import ours
from opensora_accel.profiler.bench_attention.problem import Problem, World
from opensora_accel.profiler.bench_attention.side import CROSS, MASK, Attention, Side
from opensora_accel.verify.on_cpu import cpu_flash_backward, cpu_flash_forward


def _config(world: World, problem: Problem, kind: str) -> Any:
    from diffusers.models._modeling_parallel import ContextParallelConfig, ParallelConfig
    from torch.distributed.device_mesh import init_device_mesh

    sizes = [problem.queries, problem.keys] + ([problem.heads] if kind == "ulysses" else [])
    options: dict[str, Any] = {f"{kind}_degree": world.num_ranks}
    if any(size % world.num_ranks for size in sizes):
        options[f"{kind}_anything"] = True
    if problem.torch_dtype == torch.float64:
        options["convert_to_fp32"] = False
    config = ContextParallelConfig(**options)
    mesh = init_device_mesh(world.device.type, config.mesh_shape, mesh_dim_names=config.mesh_dim_names)
    parallel = ParallelConfig(context_parallel_config=config)
    parallel.setup(world.rank, world.num_ranks, world.device, mesh=mesh)
    return parallel


def _ulysses(world: World, problem: Problem, mask: Tensor | None) -> Attention:
    from diffusers.models.attention_dispatch import dispatch_attention_fn

    parallel = _config(world, problem, "ulysses")
    local_mask = None if mask is None else mask[:, world.rows(problem.keys, "contiguous")]

    def forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        options = {"attn_mask": local_mask, "backend": "native", "parallel_config": parallel}
        out: Tensor = dispatch_attention_fn(q, k, v, **options)
        return out

    return Attention(forward)


def _ring(world: World, problem: Problem, mask: Tensor | None) -> Attention:
    from diffusers.models import attention_dispatch

    parallel = _config(world, problem, "ring")

    def on_cuda(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        options = {"backend": "_native_flash", "parallel_config": parallel}
        out: Tensor = attention_dispatch.dispatch_attention_fn(q, k, v, **options)
        return out

    def on_cpu(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        operations: dict[str, Any] = {"forward_op": cpu_flash_forward, "backward_op": cpu_flash_backward}
        out: Tensor = attention_dispatch._templated_context_parallel_attention(
            q, k, v, **operations, _parallel_config=parallel
        )
        return out

    return Attention(on_cuda if world.device.type == "cuda" else on_cpu)


_IMPORTS = "diffusers.models.attention_dispatch:dispatch_attention_fn"
SIDES = (
    Side(
        "diffusers ulysses",
        _ulysses,
        package="diffusers",
        imports=_IMPORTS,
        offers=frozenset({MASK, CROSS}),
        beside=ours.ULYSSES,
    ),
    Side(
        "diffusers ring",
        _ring,
        package="diffusers",
        imports=_IMPORTS,
        offers=frozenset({CROSS}),
        cuda_dtype="bfloat16",
        beside=ours.RING,
    ),
)
