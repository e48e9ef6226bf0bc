"""yunchang: its ring for torch's own attention raises in every backward.

`RingAttentionFunc.backward` (ring/ring_pytorch_attn.py) returns five gradients for six inputs: the None of the first,
`group`, is missing. Before that it calls `pytorch_attn_backward` (kernels/attention.py), which is not implemented.
Formulas stand in for that here, and for `pytorch_attn_forward`, which is for CUDA. With the None, all would be right.

Run: python yunchang_ring_pytorch.py [RANKS]. Exit status: 0 the fault shows, 1 it does not, 2 yunchang is missing.
"""

import os
import sys
from importlib import metadata, util

import torch
import torch.distributed as dist

# q, k, v and the gradient of the output: [batch, tokens, heads, channels].
INPUTS = torch.randn(4, 1, 24, 2, 8, generator=torch.manual_seed(0)).requires_grad_()


def forward(q, k, v, **_):
    s = torch.einsum("bqhd, bkhd -> bhqk", q, k) / 8**0.5
    return torch.einsum("bhqk, bkhd -> bqhd", s.softmax(-1), v), s.logsumexp(-1)


def backward(grad, q, k, v, out, softmax_lse, **_):
    p = (torch.einsum("bqhd, bkhd -> bqhk", q, k) / 8**0.5 - softmax_lse[..., None]).exp()
    ds = p * (torch.einsum("bqhd, bkhd -> bqhk", grad, v) - (grad * out).sum(-1, keepdim=True)) / 8**0.5
    terms = ("bqhk, bkhd -> bqhd", ds, k), ("bqhk, bqhd -> bkhd", ds, q), ("bqhk, bqhd -> bkhd", p, grad)
    return [torch.einsum(*term).contiguous() for term in terms]


def peer(rank, ranks, port, found):
    from yunchang.ring import ring_pytorch_attn

    ring_pytorch_attn.pytorch_attn_forward, ring_pytorch_attn.pytorch_attn_backward = forward, backward
    dist.init_process_group("gloo", store=dist.TCPStore("127.0.0.1", port), rank=rank, world_size=ranks)
    q, k, v, grad = (x.chunk(ranks, 1)[rank] for x in INPUTS)
    out = ring_pytorch_attn.ring_pytorch_attn_func(q, k, v, group=dist.group.WORLD)
    found[0].chunk(ranks, 1)[rank].copy_(out.detach())
    found[1:].chunk(ranks, 2)[rank].copy_(torch.stack(torch.autograd.grad(out, (q, k, v), grad)))


if __name__ == "__main__":
    if not util.find_spec("yunchang"):
        sys.exit(print("yunchang is not installed: pip install --no-deps yunchang") or 2)
    ranks = int(sys.argv[1]) if sys.argv[1:] else 2
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "PYTHONWARNINGS": "ignore"}
    print(__doc__.partition("Run:")[0] + f"yunchang {metadata.version('yunchang')} on {ranks} ranks, fp32:")
    out = torch.nn.functional.scaled_dot_product_attention(*INPUTS.transpose(2, 3)[:3]).transpose(1, 2)
    expected = torch.cat([out[None], torch.autograd.grad(out, INPUTS, INPUTS[3])[0][:3]]).detach()
    found, store = torch.full_like(expected, torch.nan), dist.TCPStore("127.0.0.1", 0, is_master=True)
    try:
        torch.multiprocessing.spawn(peer, (ranks, store.port, found.share_memory_()), ranks)
    except torch.multiprocessing.ProcessRaisedException as error:
        print("raised", str(error).strip().splitlines()[-1])
    errors = (found - expected).nan_to_num(torch.inf).flatten(1).norm(dim=1) / expected.flatten(1).norm(dim=1)
    for name, one, many, error in zip(("output", "dq", "dk", "dv"), expected, found, errors, strict=True):
        print(f"{name}: expected norm {one.norm():.4f}, found {many.norm():.4f}, error {error:.1e}")
    sys.exit(0 if errors.max() > 1e-3 else 1)
