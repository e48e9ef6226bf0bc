"""Open-Sora: gradients are scaled by each rank's share of the tokens. They should be by the number of ranks.

`_GatherForwardSplitBackwardVarLen` (models/mmdit/distributed.py) multiplies by sum(splits) / splits[rank] in backward,
`_SplitForwardGatherBackwardVarLen` by the inverse. The shares of text and image differ, and attention mixes both: text
on one rank alone gets a gradient sp times too large, the trunk is off by some percent, and the loss is right. With sp
and 1 / sp as factors, all would be right where gradients are averaged.

Run: git clone https://github.com/hpcaitech/Open-Sora; python open_sora_shares.py Open-Sora [RANKS]. Exit status: 0 the
fault shows, 1 it does not, 2 there is no source. Broadcasts stand in for all_gather, whose sizes gloo wants to be even.
"""

import ast
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.nn.functional import all_reduce

FILE, WIDTHS = "opensora/models/mmdit/distributed.py", (16, 16, 48, 16)


def peer(rank, ranks, port, gradient):
    dist.init_process_group("gloo", store=dist.TCPStore("127.0.0.1", port), rank=rank, world_size=ranks)
    send = lambda x, src, out: dist.broadcast(out.copy_(x) if src == rank else out, src)  # noqa: E731
    dist.all_gather = lambda outs, x, group: [send(x, *pair) for pair in enumerate(outs)]
    tree = ast.parse(Path(sys.argv[1], FILE).read_text())
    tree.body = [node for node in tree.body if getattr(node, "name", "").endswith("BackwardVarLen")]
    exec(compile(tree, FILE, "exec"), theirs := {"torch": torch, "dist": dist, "List": list})
    split, gather = (theirs[name].apply for name in theirs if name.endswith("VarLen"))
    texts = [int((x < 8).sum()) for x in torch.arange(144).chunk(ranks)]  # as `mmdit_model_forward` splits
    images = [144 // ranks - text for text in texts]
    torch.manual_seed(0)
    weights = torch.randn(16, sum(WIDTHS), requires_grad=True)
    txt_in, img_in, qkv, proj = (weights / 4).split(WIDTHS, 1)
    txt, img = torch.randn(1, 8, 16) @ txt_in, torch.randn(1, 136, 16) @ img_in
    x = torch.cat([split(txt, 1, None, texts), split(img, 1, None, images)], 1)
    q, *kv = (x @ qkv).chunk(3, -1)
    k, v = (all_reduce(torch.cat([x * (r == rank) for r in range(ranks)], 1)) for x in kv)  # of all ranks
    x = x + torch.nn.functional.scaled_dot_product_attention(q, k, v) @ proj
    gather(x[:, texts[rank] :], 1, None, images).square().mean().backward()
    gradient.copy_(all_reduce(weights.grad) / ranks)
    dist.destroy_process_group()  # else gloo's threads may end the process by an abort


if __name__ == "__main__":
    if not Path(*sys.argv[1:2], FILE).exists():
        sys.exit(print("Open-Sora is not there: clone github.com/hpcaitech/Open-Sora, give its path") or 2)
    ranks = int(sys.argv[2]) if sys.argv[2:] else 2
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "PYTHONWARNINGS": "ignore"}
    print(__doc__.partition("Run:")[0] + f"Open-Sora in {sys.argv[1]} on {ranks} ranks, fp32:")
    both = torch.zeros(2, 16, sum(WIDTHS)).share_memory_()
    for gradient, n in zip(both, (1, ranks), strict=True):
        store = dist.TCPStore("127.0.0.1", 0, is_master=True)
        torch.multiprocessing.spawn(peer, (n, store.port, gradient), n)
    for name, weights in zip(("txt_in", "img_in", "qkv", "proj"), both.split(WIDTHS, 2), strict=True):
        one, many, error = (x.norm() for x in (*weights, weights[1] - weights[0]))
        print(f"gradient of {name}: expected norm {one:.4f}, found {many:.4f}, error {error / one:.1e}")
    sys.exit(0 if error / one > 1e-3 else 1)
