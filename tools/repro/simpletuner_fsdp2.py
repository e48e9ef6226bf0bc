"""SimpleTuner: under FSDP2, context_parallel_size splits no sequence. Every rank computes all tokens of one batch.

`apply_standalone_context_parallel` (helpers/training/context_parallel.py) returns where `dp_shard_size` is not 1, as it
is under FSDP2, and nothing else splits: accelerate's `maybe_context_parallel`, which would, is called nowhere.

Run: python simpletuner_fsdp2.py [SOURCE]. Exit status: 0 the fault shows, 1 it does not, 2 it or diffusers is missing.
It is asked for 2 ranks without FSDP2 and for 4 with it; the tokens that a block of a small Wan is given are counted.
"""

import logging
import os
import sys
from importlib import util
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist


def tokens_of_a_block(its, fsdp, ranks):
    from diffusers import WanTransformer3DModel

    small = dict(num_attention_heads=4, attention_head_dim=12, text_dim=16, ffn_dim=32)
    model, seen = WanTransformer3DModel(num_layers=1, **small), []
    config = SimpleNamespace(fsdp_enable=fsdp, fsdp_version=2)
    topology = its.build_context_parallel_topology(config, ranks, cp_size=2, strategy="alltoall")
    accelerator = SimpleNamespace(device=torch.device("cpu"))
    its.configure_cp_only_accelerator(accelerator, topology)  # as its Trainer calls them
    its.apply_standalone_context_parallel(accelerator, model, topology)
    model.blocks[0].attn1.register_forward_pre_hook(lambda module, args: seen.append(args[0].shape[1]))
    model(torch.randn(1, 16, 3, 8, 16), torch.tensor([500]), torch.randn(1, 6, 16), return_dict=False)
    return seen[0]


def peer(rank, port, file, found):
    spec = util.spec_from_file_location("context_parallel", file)
    its = sys.modules["context_parallel"] = util.module_from_spec(spec)
    spec.loader.exec_module(its)
    dist.init_process_group("gloo", store=dist.TCPStore("127.0.0.1", port), rank=rank, world_size=2)
    torch.accelerator.device_count = lambda: 1  # diffusers asks for an accelerator
    logging.Logger.warning_once = logging.Logger.warning  # diffusers calls it, transformers brings it
    found[rank] = torch.tensor([tokens_of_a_block(its, False, 2), tokens_of_a_block(its, True, 4)])


if __name__ == "__main__":
    folders = [Path(path, "simpletuner") for path in (*sys.argv[1:2], *sys.path)]
    files = [x / "helpers/training/context_parallel.py" for x in folders]
    file = next((file for file in files if file.exists()), None)
    if not file or not util.find_spec("diffusers"):
        sys.exit(print("SimpleTuner or diffusers is not installed: give the path of its source") or 2)
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "PYTHONWARNINGS": "ignore", "CUDA_VISIBLE_DEVICES": ""}
    print(__doc__.partition("Run:")[0] + f"{file}, 96 tokens, context_parallel_size 2:")
    found, store = torch.zeros(2, 2, dtype=int).share_memory_(), dist.TCPStore("127.0.0.1", 0, is_master=True)
    torch.multiprocessing.spawn(peer, (store.port, file, found), 2)
    splits = any("maybe_context_parallel(" in path.read_text() for path in file.parents[2].rglob("*.py"))
    alone, fsdp2 = found[0].tolist()
    found = f"found {alone} without FSDP2, {fsdp2} with it"
    print(f"tokens a rank: expected 48, {found}, error {fsdp2 / 48 - 1:.1e}")
    sys.exit(0 if fsdp2 != 48 and not splits else 1)
