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
from torch.distributed.device_mesh import init_device_mesh

from opensora_accel.observe.on_cpu import flash_attention_of_cuda
from peers import ours
from peers.side import CROSS, MASK, Attention, Problem, Side, share_of_mask

_KERNELS: list[Any] = []


def _config(world: World, problem: Problem, kind: str) -> Any:
    from diffusers.models._modeling_parallel import ContextParallelConfig, ParallelConfig

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
    from diffusers.models import attention_dispatch as its

    parallel = _config(world, problem, kind)
    options: dict[str, Any] = {"parallel_config": parallel, "backend": "_native_flash"}
    if kind == "ulysses":
        options |= {"backend": "native", "attn_mask": share_of_mask(world, mask)}
    if kind == "ulysses" or world.device.type == "cuda":
        return Attention(lambda q, k, v: its.dispatch_attention_fn(q, k, v, **options))
    _KERNELS.append(flash_attention_of_cuda())  # for the life of this process
    options = {
        "forward_op": its._native_flash_attention_forward_op,
        "backward_op": its._native_flash_attention_backward_op,
        "_parallel_config": parallel,
    }
    return Attention(lambda q, k, v: its._templated_context_parallel_attention(q, k, v, **options))


SIDES = (
    Side(
        "diffusers ulysses",
        partial(_make, kind="ulysses"),
        package="diffusers",
        offers=frozenset({MASK, CROSS}),
        beside=ours.ULYSSES,
    ),
    Side(
        "diffusers ring",
        partial(_make, kind="ring"),
        package="diffusers",
        offers=frozenset({CROSS}),
        cuda_dtype="bfloat16",
        beside=ours.RING,
    ),
)
