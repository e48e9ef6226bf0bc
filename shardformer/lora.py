"""Adapters of a sharded model as files that diffusers and PEFT read.

    model.add_adapter(LoraConfig(r=16, lora_alpha=32, target_modules=["to_q", "to_v"]))
    shardformer.shard(model, plan)
    ...
    shardformer.save_lora(model, "runs/lora")        # on every rank; rank 0 writes
    pipeline.load_lora_weights("runs/lora")          # later, elsewhere, on one device

What diffusers does not know is written for PEFT: `peft.PeftModel.from_pretrained(model, "runs/lora")`.

Each tensor of the adapter is made whole on all ranks, one after another, and rank 0 takes it to the host. So a rank
needs room for one beside what it holds. Weights that are frozen do not travel.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from opensora_accel.communications import gather_objects
from opensora_accel.files import replacing
from shardformer.tensor_parallel import full_tensors

# Pipelines of diffusers look for their transformer's adapter under this name, whatever its class.
_PREFIX = "transformer"
_DIFFUSERS_FILE = "pytorch_lora_weights.safetensors"
# Where a model lies in PEFT's.
_PEFT_PREFIX = "base_model.model."
_PEFT_FILES = ("adapter_config.json", "adapter_model.safetensors")


def save_lora(model: nn.Module, folder: str | Path, adapter: str = "default") -> Path:
    """Writes the adapter of a model, sharded by any Plan or not, to a folder; every rank calls it.

    A model with `add_adapter` of diffusers gives `pytorch_lora_weights.safetensors`, which `load_lora_weights` of its
    pipeline and `load_lora_adapter` of its class read, with its rank, alpha and targets. A model of
    `peft.get_peft_model`, and one of a class that is not of diffusers, gives `adapter_model.safetensors` and
    `adapter_config.json`, which `PeftModel.from_pretrained` reads. Each file is written beside its place and renamed.

    Args:
        adapter: its name in this model; files hold none.

    Returns:
        The path of the file of weights.

    Communication: all-gathers of the adapter's shards, one tensor at a time, and a broadcast.

    Raises:
        ValueError: the model has no such adapter.
        OSError: on all ranks, where rank 0 cannot write.
    """
    model = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
    configs = getattr(model, "peft_config", None) or {}
    if adapter not in configs:
        there = f"it has {', '.join(configs)}" if configs else "it has none"
        raise ValueError(
            f"{type(model).__name__} has no adapter {adapter!r} ({there}); add one before shardformer.shard, by "
            "model.add_adapter(LoraConfig(...)) or peft.get_peft_model, and give the model that has it"
        )
    is_first = not dist.is_initialized() or dist.get_rank() == 0
    tensors: dict[str, Tensor] = {}
    for name, whole in _adapter_tensors(model, adapter):
        if is_first:
            tensors[name] = whole.detach().to("cpu", copy=True).contiguous()
    is_of_peft = hasattr(model, "get_base_model")
    write = _write_peft if is_of_peft or not hasattr(model, "load_config") else _write_diffusers
    error = None
    if is_first:
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
            write(model, configs[adapter], Path(folder), tensors)
        except Exception as problem:  # noqa: BLE001 — safetensors has errors of its own; the other ranks wait for this
            error = f"{type(problem).__name__}: {problem}"
    error = gather_objects(error)[0]
    if error is not None:
        raise OSError(
            f"the adapter could not be written to {folder} ({error}); name a folder that can be written to, with room"
        )
    return Path(folder) / (_PEFT_FILES[-1] if write is _write_peft else _DIFFUSERS_FILE)


def _adapter_tensors(model: nn.Module, adapter: str) -> Iterator[tuple[str, Tensor]]:
    """The adapter's tensors, whole, by the names that PEFT gives them in files."""
    from peft import get_peft_model_state_dict

    state = model.state_dict()
    names = {id(tensor): name for name, tensor in state.items()}
    # PEFT knows which entries are the adapter's, and renames them; it is given shards, and gathers nothing.
    of_adapter = get_peft_model_state_dict(
        model, state_dict=state, adapter_name=adapter, save_embedding_layers=False
    )
    in_files = {names[id(tensor)]: name for name, tensor in of_adapter.items()}
    for name, whole in full_tensors(model, {name: state[name] for name in in_files}):
        yield in_files[name].replace("_orig_mod.", ""), whole


def _write_diffusers(model: nn.Module, config: Any, folder: Path, tensors: dict[str, Tensor]) -> None:
    """Writes whole tensors as `load_lora_adapter` of diffusers reads them."""
    from diffusers.loaders.lora_base import LORA_ADAPTER_METADATA_KEY
    from safetensors.torch import save_file

    described = {
        f"{_PREFIX}.{name}": sorted(value) if isinstance(value, set) else value
        for name, value in config.to_dict().items()
    }
    metadata = {"format": "pt", LORA_ADAPTER_METADATA_KEY: json.dumps(described, indent=2, sort_keys=True)}
    with replacing(folder / _DIFFUSERS_FILE) as path:
        save_file({f"{_PREFIX}.{name}": tensor for name, tensor in tensors.items()}, path, metadata)


def _write_peft(model: Any, config: Any, folder: Path, tensors: dict[str, Tensor]) -> None:
    """Writes whole tensors and their description as PEFT reads them."""
    from safetensors.torch import save_file

    is_of_peft = hasattr(model, "get_base_model")
    base = model.get_base_model() if is_of_peft else model
    described = {
        **config.to_dict(),
        # As PEFT itself saves it.
        "inference_mode": True,
        "auto_mapping": {
            # Without the class that FSDP makes.
            "base_model_class": type(base).__name__.removeprefix("FSDP"),
            "parent_library": type(base).__module__,
        },
    }
    described = {
        name: sorted(value) if isinstance(value, set) else value for name, value in described.items()
    }
    with replacing(folder / _PEFT_FILES[0]) as path:
        path.write_text(json.dumps(described, indent=2, sort_keys=True), encoding="utf-8")
    # Last: whoever finds the weights finds their description.
    with replacing(folder / _PEFT_FILES[1]) as path:
        prefix = "" if is_of_peft else _PEFT_PREFIX
        save_file({f"{prefix}{name}": tensor for name, tensor in tensors.items()}, path, {"format": "pt"})
