"""Adapters for ComfyUI, which knows a model's layers by the names that its authors gave them.

    from shardformer.comfyui import write_comfyui_lora

    path = shardformer.save_lora(model, "runs/lora")          # as pipelines of diffusers read it
    write_comfyui_lora(path, "runs/lora/comfyui.safetensors")  # goes into ComfyUI's models/loras

The numbers are the same; names and the place of alpha differ. An example of Wan, rank 16 and alpha 32:

    diffusers   transformer.blocks.0.attn1.to_out.0.lora_A.weight        alpha 32 stands in the file's metadata
    ComfyUI     diffusion_model.blocks.0.self_attn.o.lora_A.weight       diffusion_model.blocks.0.self_attn.o.alpha = 32
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import torch

from opensora_accel.files import replacing

# What stands in diffusers, as a pattern of the whole name of a layer, and in the authors' code.
_WAN = {
    r"(blocks\.\d+)\.attn1\.to_([qkv])": r"\1.self_attn.\2",
    r"(blocks\.\d+)\.attn2\.to_([qkv])": r"\1.cross_attn.\2",
    r"(blocks\.\d+)\.attn1\.to_out\.0": r"\1.self_attn.o",
    r"(blocks\.\d+)\.attn2\.to_out\.0": r"\1.cross_attn.o",
    r"(blocks\.\d+)\.attn2\.add_([kv])_proj": r"\1.cross_attn.\2_img",
    r"(blocks\.\d+)\.ffn\.net\.0\.proj": r"\1.ffn.0",
    r"(blocks\.\d+)\.ffn\.net\.2": r"\1.ffn.2",
    r"condition_embedder\.time_embedder\.linear_1": "time_embedding.0",
    r"condition_embedder\.time_embedder\.linear_2": "time_embedding.2",
    r"condition_embedder\.text_embedder\.linear_1": "text_embedding.0",
    r"condition_embedder\.text_embedder\.linear_2": "text_embedding.2",
    r"condition_embedder\.time_proj": "time_projection.1",
    r"condition_embedder\.image_embedder\.ff\.net\.0\.proj": "img_emb.proj.1",
    r"condition_embedder\.image_embedder\.ff\.net\.2": "img_emb.proj.3",
    r"patch_embedding": "patch_embedding",
    r"proj_out": "head.head",
}
# Layers of blocks have their authors' names in diffusers.
_LTX = {r"transformer_blocks\.\d+\..+": r"\g<0>", r"proj_in": "patchify_proj", r"proj_out": "proj_out"}
_PART = re.compile(r"transformer\.(?P<layer>.+)\.(?P<part>lora_[AB]\.weight|lokr_w[12](_[ab])?)")
_FAMILIES = {"Wan": _WAN, "LTX-Video": _LTX}


def write_comfyui_lora(source: str | Path, target: str | Path) -> Path:
    """Writes an adapter that `save_lora` or diffusers wrote in the form that ComfyUI reads; the file.

    Args:
        source: pytorch_lora_weights.safetensors of a Wan or an LTX-Video.

    Raises:
        ValueError: it is no such file, has layers that have no name there, or an alpha or a rank of a layer's own.
        OSError: a file cannot be read or written.
    """
    from diffusers.loaders.lora_base import LORA_ADAPTER_METADATA_KEY
    from safetensors import SafetensorError, safe_open
    from safetensors.torch import save_file

    try:
        with safe_open(source, "pt") as file:
            described = json.loads((file.metadata() or {}).get(LORA_ADAPTER_METADATA_KEY, "{}"))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 — it is no dict
    except SafetensorError as error:
        raise ValueError(f"{source} is no file of safetensors ({error})") from error
    settings = {name.removeprefix("transformer."): value for name, value in described.items()}
    alpha = settings.get("lora_alpha", settings.get("alpha"))
    if any("lora_magnitude_vector" in name for name in tensors):
        raise ValueError(
            f"{source} is a DoRA, whose rows ComfyUI divides by their length without the adapter and PEFT with it; "
            "merge it into the model"
        )
    parts = {name: _PART.fullmatch(name) for name in tensors}
    is_lokr = any(".lokr_" in name for name in tensors)
    if alpha is None or not all(parts.values()) or (is_lokr and not settings.get("r")):
        raise ValueError(
            f"{source} is no adapter of a transformer with its rank and alpha, as shardformer.save_lora writes it; "
            "give that file"
        )
    if settings.get("alpha_pattern") or settings.get("use_rslora"):
        raise ValueError(
            f"{source} scales its layers by other rules than alpha / rank, which ComfyUI has no place for"
        )
    renamed = {}
    for name, part in parts.items():
        assert part is not None
        theirs = f"diffusion_model.{_renamed(part['layer'], tensors)}"
        renamed[f"{theirs}.{part['part']}"] = tensors[name]
        if part["part"].startswith("lora"):
            renamed[f"{theirs}.alpha"] = torch.tensor(float(alpha))
        elif part["part"] in ("lokr_w1", "lokr_w1_a"):
            # ComfyUI scales a LoKr by alpha and rank only where it has low matrices, and by nothing without alpha.
            renamed[f"{theirs}.{part['part']}"] = tensors[name] * (float(alpha) / settings["r"])
    with replacing(target) as path:
        save_file(renamed, path, {"format": "pt"})
    return Path(target)


def _renamed(layer: str, tensors: dict[str, torch.Tensor]) -> str:
    """A layer's name in its authors' code."""
    # LTX-Video calls its blocks otherwise, which tells the two apart.
    family = "LTX-Video" if any("transformer_blocks." in name for name in tensors) else "Wan"
    for ours, theirs in _FAMILIES[family].items():
        if re.fullmatch(ours, layer):
            return re.sub(ours, theirs, layer)
    raise ValueError(
        f"{layer} is no layer that ComfyUI's {family} has a name for; adapters of Wan and of LTX-Video can be written "
        "for it (others: load the file of diffusers by a node that takes its names)"
    )
