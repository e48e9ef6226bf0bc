"""diffusers: Ulysses raises in backward where keys are not as many as queries, as in LTX-Video's attention to text.

`TemplatedUlyssesAttention.backward` (models/attention_dispatch.py) lays out the gradients of key and value with the
number of tokens of the output, `S_LOCAL`, which is that of the queries. Its forward tells `S_KV_LOCAL` apart.

Run: python diffusers_ulysses_cross.py [RANKS]. Exit status: 0 the fault shows, 1 it does not, 2 diffusers is missing.
"""

import os
import sys
from importlib import metadata, util

import torch
import torch.distributed as dist
from torch.nn.functional import scaled_dot_product_attention


def inputs():  # q, k, v and the gradient of the output: [batch, tokens, heads, channels]
    torch.manual_seed(0)
    return [torch.randn(1, s, 6, 8, dtype=torch.float64, requires_grad=True) for s in (24, 12, 12, 24)]


def peer(rank, ranks, port, found):
    from diffusers.models import _modeling_parallel, attention_dispatch

    dist.init_process_group("gloo", store=dist.TCPStore("127.0.0.1", port), rank=rank, world_size=ranks)
    config = _modeling_parallel.ContextParallelConfig(ulysses_degree=ranks)
    parallel = _modeling_parallel.ParallelConfig(context_parallel_config=config)
    mesh = dist.init_device_mesh("cpu", config.mesh_shape, mesh_dim_names=config.mesh_dim_names)
    parallel.setup(rank, ranks, torch.device("cpu"), mesh=mesh)
    q, k, v, grad = (x.chunk(ranks, 1)[rank] for x in inputs())
    out = attention_dispatch.dispatch_attention_fn(q, k, v, backend="native", parallel_config=parallel)
    found[0].chunk(ranks, 1)[rank].copy_(out.detach())
    for whole, share in zip(found[1:], torch.autograd.grad(out, (q, k, v), grad), strict=True):
        whole.chunk(ranks, 1)[rank].copy_(share)


if __name__ == "__main__":
    if not util.find_spec("diffusers"):
        sys.exit(print("diffusers is not installed: pip install diffusers") or 2)
    ranks = int(sys.argv[1]) if sys.argv[1:] else 2
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "PYTHONWARNINGS": "ignore"}
    print(__doc__.partition("Run:")[0] + f"diffusers {metadata.version('diffusers')} on {ranks} ranks, fp64:")
    q, k, v, grad = inputs()
    out = scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)
    expected = [out.detach(), *torch.autograd.grad(out, (q, k, v), grad)]
    found = [torch.full(x.shape, torch.nan, dtype=x.dtype).share_memory_() for x in expected]
    store = dist.TCPStore("127.0.0.1", 0, is_master=True)
    try:
        torch.multiprocessing.spawn(peer, (ranks, store.port, found), ranks)
    except torch.multiprocessing.ProcessRaisedException as error:
        print("raised", str(error).strip().splitlines()[-1])
    errors = [
        (a - b).abs().nan_to_num(torch.inf).max() / a.abs().max()
        for a, b in zip(expected, found, strict=True)
    ]
    for name, one, many, error in zip(("output", "dq", "dk", "dv"), expected, found, errors, strict=True):
        first = f"first value expected {one.flatten()[0]:.4f}, found {many.flatten()[0]:.4f}"
        print(f"{name}: {first}, largest error {error:.1e}")
    sys.exit(0 if max(errors) > 1e-6 else 1)
