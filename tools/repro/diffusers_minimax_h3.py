"""diffusers: MiniMax H3's one sequence of caption, sound and clip is split only where rows and heads divide by ranks.

Its context-parallel plan gives right gradients where they do, if these are summed over ranks. Averaged, as by DDP and
FSDP2, each is too small by the number of ranks. With a row or a head more, the step raises.

Run: python diffusers_minimax_h3.py [RANKS]. Exit status: 0 the fault shows, 1 it does not, 2 diffusers is not there.
"""

import os
import sys
from importlib import metadata, util

import torch
import torch.distributed as dist


def step(rows, heads, ranks=1):  # gradients; of the rows 5 are of a caption and 18 of sound
    from diffusers import ContextParallelConfig, MiniMaxH3Transformer3DModel

    torch.manual_seed(0)
    small = dict(num_attention_heads=heads, attention_head_dim=12, rope_freq_dim=2, num_layers=2, ffn_dim=32)
    model = MiniMaxH3Transformer3DModel(hidden_size=12 * heads, text_dim=16, in_channels=4, **small)
    if ranks > 1:
        model.enable_parallelism(config=ContextParallelConfig(ulysses_degree=ranks))
    torch.manual_seed(1)
    at = torch.arange(rows).split((rows - 23, 18, 5))
    tags = torch.tensor([0] * (rows - 23) + [2] * 18 + [1] * 5)  # clip, sound, text
    given = torch.randn(1, rows - 23, 16), torch.randn(1, 18, 32), torch.randn(1, 5, 16), torch.rand(2)
    out = model(*given, (tags == 2).long(), tags, 20 * torch.rand(rows, 3), *at, return_dict=False)
    sum((each - torch.randn(each.shape)).square().mean() for each in out).backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


def compare(rank, ranks, port, errors):
    dist.init_process_group("gloo", store=dist.TCPStore("127.0.0.1", port), rank=rank, world_size=ranks)
    torch.accelerator.device_count = lambda: 1  # `enable_parallelism` asks for an accelerator
    rows, heads = 24 * ranks, 2 * ranks
    for i, (one, many) in enumerate(zip(step(rows, heads), step(rows, heads, ranks), strict=True)):
        dist.all_reduce(many)
        errors[i] = torch.stack([(many - one).norm(), (many / ranks - one).norm()]) / one.norm()
    for what, wrong in (("a row", (rows + 1, heads)), ("a head", (rows, heads + 1))):
        try:
            print(f"with {what} more: {len(step(*wrong, ranks))} gradients")
        except (AssertionError, RuntimeError) as error:
            print(f"with {what} more: expected gradients, found {error!r}", flush=True)
    dist.destroy_process_group()  # else gloo's threads may end the process by an abort


if __name__ == "__main__":
    if not util.find_spec("diffusers"):
        sys.exit(print("diffusers is not installed: pip install diffusers") or 2)
    ranks = int(sys.argv[1]) if sys.argv[1:] else 2
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "PYTHONWARNINGS": "ignore", "CUDA_VISIBLE_DEVICES": ""}
    print(__doc__.partition("Run:")[0] + f"diffusers {metadata.version('diffusers')}, {ranks} ranks, fp32:")
    errors, store = torch.zeros(199, 2).share_memory_(), dist.TCPStore("127.0.0.1", 0, is_master=True)
    torch.multiprocessing.spawn(compare, (ranks, store.port, errors), ranks)
    errors = errors[errors.any(1)]  # there are fewer than 199
    wrong = (errors > 1e-3).sum(0).tolist()  # summed, and averaged
    print(f"gradients: expected 0 of {len(errors)} wrong, found {wrong}; error {errors[:, 1].max():.2f}")
    sys.exit(0 if wrong[1] else 1)
