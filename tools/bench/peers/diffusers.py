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

from functools import partial
from typing import Any

import torch
from ranks import World
from torch import Tensor

from opensora_accel.verify.on_cpu import flash_attention_of_cuda
from peers import ours
from peers.side import CROSS, MASK, Attention, Problem, Side, rows_of

_KERNELS: list[Any] = []


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


def _make(world: World, problem: Problem, mask: Tensor | None, kind: str) -> Attention:
    from diffusers.models import attention_dispatch

    options: dict[str, Any] = {"parallel_config": _config(world, problem, kind)}
    if kind == "ulysses":
        local_mask = None if mask is None else mask[:, rows_of(world, problem.keys, "contiguous")]
        options |= {"attn_mask": local_mask, "backend": "native"}
    elif world.device.type == "cuda":
        options |= {"backend": "_native_flash"}
    else:
        _KERNELS.append(flash_attention_of_cuda())  # for the life of this process
        operations: dict[str, Any] = {
            "forward_op": attention_dispatch._native_flash_attention_forward_op,
            "backward_op": attention_dispatch._native_flash_attention_backward_op,
        }
        ring = attention_dispatch._templated_context_parallel_attention
        parallel = options["parallel_config"]
        return Attention(lambda q, k, v: ring(q, k, v, **operations, _parallel_config=parallel))
    return Attention(lambda q, k, v: attention_dispatch.dispatch_attention_fn(q, k, v, **options))


def _side(kind: str, **options: Any) -> Side:
    imports = "diffusers.models.attention_dispatch:dispatch_attention_fn"
    return Side(
        f"diffusers {kind}", partial(_make, kind=kind), package="diffusers", imports=imports, **options
    )


SIDES = (
    _side("ulysses", offers=frozenset({MASK, CROSS}), beside=ours.ULYSSES),
    _side("ring", offers=frozenset({CROSS}), cuda_dtype="bfloat16", beside=ours.RING),
)
