"""ring-attention-pytorch: on a CPU, the backward of the ring gives wrong dK and dV on any number of ranks.

In `RingFlashAttentionFunction.backward` (ring_flash_attention.py), `ring_pass` returns what was received and what was
sent, each of them dK and dV stacked; `dk, dv = dkv` takes that pair apart, not the stack. Autograd sums the dimension
too many away: this rank's dK + dV comes back as dK, the next rank's as dV. `dkv, _ = ring_pass(…)` is right.

Run: python ring_attention_pytorch_ring.py [RANKS]. Exit status: 0 the fault shows, 1 it does not, 2 not installed.
"""

import os
import sys
from importlib import metadata, util

import torch
import torch.distributed as dist
from torch.nn.functional import scaled_dot_product_attention


def inputs():  # q, k, v and the gradient of the output: [batch, tokens, heads, channels]
    torch.manual_seed(0)
    return [torch.randn(1, 24, 2, 8, requires_grad=True) for _ in range(4)]


def peer(rank, ranks, port, found):
    from ring_attention_pytorch import ring_flash_attn

    dist.init_process_group("gloo", store=dist.TCPStore("127.0.0.1", port), rank=rank, world_size=ranks)
    q, k, v, grad = (x.chunk(ranks, 1)[rank] for x in inputs())
    out = ring_flash_attn(q, k, v, bucket_size=24 // ranks, ring_reduce_col=True, ring_size=ranks)
    shares = torch.stack([out, *torch.autograd.grad(out, (q, k, v), grad)])
    found.chunk(ranks, 2)[rank].copy_(shares.detach())
    dist.destroy_process_group()  # else gloo's threads may end the process by an abort


if __name__ == "__main__":
    if not util.find_spec("ring_attention_pytorch"):
        sys.exit(print("ring-attention-pytorch is not installed: pip install ring-attention-pytorch") or 2)
    ranks = int(sys.argv[1]) if sys.argv[1:] else 2
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "PYTHONWARNINGS": "ignore"}
    version = metadata.version("ring-attention-pytorch")
    print(__doc__.partition("Run:")[0] + f"ring-attention-pytorch {version} on {ranks} ranks, fp32:")
    q, k, v, grad = inputs()
    out = scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)
    expected = torch.stack([out, *torch.autograd.grad(out, (q, k, v), grad)]).detach()
    found, store = torch.zeros_like(expected).share_memory_(), dist.TCPStore("127.0.0.1", 0, is_master=True)
    torch.multiprocessing.spawn(peer, (ranks, store.port, found), ranks)
    errors = (found - expected).abs().amax((1, 2, 3, 4)) / expected.abs().amax((1, 2, 3, 4))
    for name, one, many, error in zip(("output", "dq", "dk", "dv"), expected, found, errors, strict=True):
        first = f"first value expected {one.flatten()[0]:.4f}, found {many.flatten()[0]:.4f}"
        print(f"{name}: {first}, largest error {error:.1e}")
    sys.exit(0 if errors.max() > 1e-3 else 1)
