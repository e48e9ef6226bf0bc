"""diffusers: under FSDP2 over the ranks of its context parallelism, every gradient is divided by the number of ranks.

The backward of its gather (`AllGatherFunction`, hooks/context_parallel.py) keeps a rank's own chunk of the gradient, so
that a rank's gradient of a parameter is the part of its own tokens. Parts are to be summed; FSDP2 and DDP average.
Either this backward multiplies by the number of ranks, or the documentation asks for a sum.

Run: python diffusers_fsdp2.py [RANKS]. Exit status: 0 the fault shows, 1 it does not, 2 diffusers is not installed.
"""

import os
import sys
from importlib import metadata, util

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard


def gradients(ranks=1):  # of one loss of one batch that all ranks have in common
    from diffusers import ContextParallelConfig, WanTransformer3DModel

    torch.manual_seed(0)
    small = dict(num_attention_heads=6, attention_head_dim=12, text_dim=16, ffn_dim=32)
    model = WanTransformer3DModel(num_layers=2, **small)
    if ranks > 1:
        model.enable_parallelism(config=ContextParallelConfig(ulysses_degree=ranks))
        fully_shard(model, mesh=dist.init_device_mesh("cpu", (ranks,)))
    torch.manual_seed(1)
    velocity = model(
        torch.randn(1, 16, 3, 8, 16), torch.tensor([500]), torch.randn(1, 6, 16), return_dict=False
    )[0]
    (velocity - torch.randn(1, 16, 3, 8, 16)).square().mean().backward()
    return [parameter.grad for parameter in model.parameters()]


def compare(rank, ranks, port, norms):
    dist.init_process_group("gloo", store=dist.TCPStore("127.0.0.1", port), rank=rank, world_size=ranks)
    torch.accelerator.device_count = lambda: 1  # `enable_parallelism` asks for an accelerator
    for i, (one, many) in enumerate(zip(gradients(), gradients(ranks), strict=True)):
        norms[i] = torch.stack([one.norm(), many.full_tensor().norm()])
    dist.destroy_process_group()  # else gloo's threads may end the process by an abort


if __name__ == "__main__":
    if not util.find_spec("diffusers"):
        sys.exit(print("diffusers is not installed: pip install diffusers") or 2)
    ranks = int(sys.argv[1]) if sys.argv[1:] else 2
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "PYTHONWARNINGS": "ignore", "CUDA_VISIBLE_DEVICES": ""}
    print(__doc__.partition("Run:")[0] + f"diffusers {metadata.version('diffusers')} on {ranks} ranks, fp32:")
    norms, store = torch.zeros(99, 2).share_memory_(), dist.TCPStore("127.0.0.1", 0, is_master=True)
    torch.multiprocessing.spawn(compare, (ranks, store.port, norms), ranks)
    expected, found = norms[norms[:, 0] > 1e-6 * norms.max()].T  # a bias that softmax cancels has no gradient
    ratios, error = found / expected, (found / expected - 1).abs().max()
    print(
        f"largest gradient: expected norm {expected.max():.6f}, found {found.max():.6f}, largest error {error:.1e}"
    )
    print(f"found over expected: {ratios.min():.6f} to {ratios.max():.6f} for all {len(ratios)} gradients")
    sys.exit(0 if error > 1e-3 else 1)
