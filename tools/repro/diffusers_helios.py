"""diffusers: in Helios' context-parallel plan the output is right, and gradients are wrong, both summed and averaged.

The plan (`HeliosTransformer3DModel._cp_plan`) splits before each attention and feed-forward and gathers behind it. The
backward of the split (`EquipartitionSharder.shard`, hooks/context_parallel.py) leaves zeros for other ranks' tokens. So
embeddings and modulation get a part of their gradient through the splits, and all of the rest beside them: a sum over
ranks counts the rest too often, an average the parts too little. Averages are right where the backward of the split
gathers and divides by the number of ranks, and that of the gather multiplies by it.

Run: python diffusers_helios.py [RANKS]. Exit status: 0 the fault shows, 1 it does not, 2 diffusers is not installed.
"""

import os
import sys
from importlib import metadata, util

import torch
import torch.distributed as dist


def step(ranks=1):  # output, and gradients of one loss of one batch that all ranks have in common
    from diffusers import ContextParallelConfig, HeliosTransformer3DModel

    torch.manual_seed(0)
    small = dict(num_attention_heads=6, attention_head_dim=12, text_dim=16, ffn_dim=32, rope_dim=(4, 4, 4))
    model = HeliosTransformer3DModel(num_layers=2, **small)
    if ranks > 1:  # the plan is for 40 blocks
        plan = {path: entry for path, entry in model._cp_plan.items() if path.split(".")[1] in "01*"}
        model.enable_parallelism(config=ContextParallelConfig(ulysses_degree=ranks), cp_plan=plan)
    torch.manual_seed(1)
    velocity = model(torch.randn(1, 16, 3, 8, 16), torch.tensor([500]), torch.randn(1, 6, 16)).sample
    (velocity - torch.randn(1, 16, 3, 8, 16)).square().mean().backward()
    return [velocity.detach()] + [p.grad for p in model.parameters() if p.grad is not None]


def compare(rank, ranks, port, errors):
    dist.init_process_group("gloo", store=dist.TCPStore("127.0.0.1", port), rank=rank, world_size=ranks)
    torch.accelerator.device_count = lambda: 1  # `enable_parallelism` asks for an accelerator
    for i, (one, many) in enumerate(zip(step(), step(ranks), strict=True)):
        dist.all_reduce(many)
        errors[i] = torch.stack([(many - one).norm(), (many / ranks - one).norm()]) / one.norm()
    dist.destroy_process_group()  # else gloo's threads may end the process by an abort


if __name__ == "__main__":
    if not util.find_spec("diffusers"):
        sys.exit(print("diffusers is not installed: pip install diffusers") or 2)
    ranks = int(sys.argv[1]) if sys.argv[1:] else 2
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "PYTHONWARNINGS": "ignore", "CUDA_VISIBLE_DEVICES": ""}
    print(__doc__.partition("Run:")[0] + f"diffusers {metadata.version('diffusers')} on {ranks} ranks, fp32:")
    errors, store = torch.zeros(99, 2).share_memory_(), dist.TCPStore("127.0.0.1", 0, is_master=True)
    torch.multiprocessing.spawn(compare, (ranks, store.port, errors), ranks)
    output, errors = errors[0, 1], errors[1:][errors[1:].any(1)]  # there are fewer than 99
    summed, averaged = (errors > 1e-3).T
    print(
        f"output: largest error {output:.1e}. Gradients: expected 0 of {len(errors)} wrong, found {summed.sum()}"
    )
    print(f"wrong summed over ranks, {averaged.sum()} averaged, {(summed & averaged).sum()} either way.")
    print(f"Gradients, summed or averaged, whichever is nearer: largest error {errors.amin(1).max():.1e}")
    sys.exit(0 if (summed & averaged).any() else 1)
