"""diffusers: on three ranks or more, the backward of ring attention gives wrong dK and dV. On two they are right.

In `TemplatedRingAttention.backward` (models/attention_dispatch.py) rank r visits the keys of ranks r, r + 1, r + 2, …
and passes its sum of dK and dV on to rank r + 1 each time, so that the sum it holds is that of r, r − 1, r − 2, … The
two orders meet on two ranks only. Were r, r − 1, r − 2, … visited, all would be right.

Run: python diffusers_ring.py [RANKS]. Exit status: 0 the fault shows, 1 it does not, 2 diffusers is not installed.
diffusers asks for torch's flash attention for CUDA; torch's flash attention for the CPU stands in for it.
"""

import os
import sys
from importlib import metadata, util

import torch
import torch.distributed as dist
from torch.nn.functional import scaled_dot_product_attention


def inputs():  # q, k, v and the gradient of the output: [batch, tokens, heads, channels]
    torch.manual_seed(0)
    return [torch.randn(1, 24, 2, 8, dtype=torch.float64, requires_grad=True) for _ in range(4)]


def peer(rank, ranks, port, found):
    from diffusers.models import _modeling_parallel, attention_dispatch

    flash, no = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu, [torch.empty(0)]
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    cpu, name = torch.library.Library("aten", "IMPL"), "_scaled_dot_product_flash_attention"
    cpu.impl(name, lambda query, key, value, **_: (*flash(query, key, value), *no * 2, 0, 0, *no * 3), "CPU")
    cpu.impl(f"{name}_backward", lambda *tensors, **_: backward(*tensors[:6], 0.0, False), "CPU")
    dist.init_process_group("gloo", store=dist.TCPStore("127.0.0.1", port), rank=rank, world_size=ranks)
    config = _modeling_parallel.ContextParallelConfig(ring_degree=ranks, convert_to_fp32=False)
    parallel = _modeling_parallel.ParallelConfig(context_parallel_config=config)
    mesh = dist.init_device_mesh("cpu", config.mesh_shape, mesh_dim_names=config.mesh_dim_names)
    parallel.setup(rank, ranks, torch.device("cpu"), mesh=mesh)
    q, k, v, grad = (x.chunk(ranks, 1)[rank] for x in inputs())
    out = attention_dispatch.dispatch_attention_fn(q, k, v, backend="_native_flash", parallel_config=parallel)
    shares = torch.stack([out, *torch.autograd.grad(out, (q, k, v), grad)])
    found.chunk(ranks, 2)[rank].copy_(shares.detach())
    dist.destroy_process_group()  # else gloo's threads may end the process by an abort


if __name__ == "__main__":
    if not util.find_spec("diffusers"):
        sys.exit(print("diffusers is not installed: pip install diffusers") or 2)
    ranks = int(sys.argv[1]) if sys.argv[1:] else 3
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "PYTHONWARNINGS": "ignore"}
    print(__doc__.partition("Run:")[0] + f"diffusers {metadata.version('diffusers')} on {ranks} ranks, fp64:")
    q, k, v, grad = inputs()
    out = scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)
    expected = torch.stack([out, *torch.autograd.grad(out, (q, k, v), grad)]).detach()
    found, store = torch.zeros_like(expected).share_memory_(), dist.TCPStore("127.0.0.1", 0, is_master=True)
    torch.multiprocessing.spawn(peer, (ranks, store.port, found), ranks)
    errors = (found - expected).abs().amax((1, 2, 3, 4)) / expected.abs().amax((1, 2, 3, 4))
    for name, one, many, error in zip(("output", "dq", "dk", "dv"), expected, found, errors, strict=True):
        first = f"first value expected {one.flatten()[0]:.4f}, found {many.flatten()[0]:.4f}"
        print(f"{name}: {first}, largest error {error:.1e}")
    sys.exit(0 if errors.max() > 1e-6 else 1)
