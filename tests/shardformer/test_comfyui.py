"""Adapters under the names that ComfyUI knows, read back by diffusers and held against Wan's own code."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from shardformer.comfyui import write_comfyui_lora

KEY = "lora_adapter_metadata"


def write(path, layers, alpha=6.0, **described):
    tensors = {}
    for number, layer in enumerate(layers):
        tensors[f"transformer.{layer}.lora_A.weight"] = torch.full((2, 4), float(number))
        tensors[f"transformer.{layer}.lora_B.weight"] = torch.full((4, 2), -float(number))
    metadata = {"transformer.lora_alpha": alpha, "transformer.r": 2, **described}
    save_file(tensors, path, {"format": "pt", KEY: json.dumps(metadata)})
    return path


def test_every_layer_of_wan_has_the_name_of_its_authors(tmp_path):
    """Each linear layer of diffusers' class, through diffusers' own table from Wan's names to its own."""
    from diffusers import WanTransformer3DModel
    from diffusers.loaders.lora_conversion_utils import _convert_non_diffusers_wan_lora_to_diffusers
    from diffusers.loaders.single_file_utils import convert_wan_transformer_to_diffusers

    sizes = {"num_attention_heads": 2, "attention_head_dim": 12, "ffn_dim": 32, "num_layers": 2}
    images = {"image_dim": 8, "added_kv_proj_dim": 24}
    with torch.device("meta"):
        model = WanTransformer3DModel(**sizes, **images, text_dim=16, freq_dim=16)
    kinds = (torch.nn.Linear, torch.nn.Conv3d)
    layers = [name for name, module in model.named_modules() if isinstance(module, kinds)]
    assert len(layers) > 30
    path = write_comfyui_lora(write(tmp_path / "in.safetensors", layers), tmp_path / "out.safetensors")
    written = load_file(path)
    assert all(name.startswith("diffusion_model.") for name in written)
    # Wan's names with ".weight" become diffusers' in its conversion of checkpoints.
    theirs = {
        name.removeprefix("diffusion_model.").partition(".lora_")[0] for name in written if "lora_A" in name
    }
    numbered = {f"{name}.weight": torch.tensor(number) for number, name in enumerate(sorted(theirs))}
    back = convert_wan_transformer_to_diffusers(dict(numbered))
    assert {name.removesuffix(".weight") for name in back} == set(layers)
    of_number = {int(value): name.removesuffix(".weight") for name, value in back.items()}
    for number, name in enumerate(sorted(theirs)):
        expected = float(layers.index(of_number[number]))
        assert written[f"diffusion_model.{name}.lora_A.weight"][0, 0] == expected, name
        assert written[f"diffusion_model.{name}.alpha"] == 6.0
    # And as an adapter, those of the blocks.
    blocks = {name: tensor for name, tensor in written.items() if ".blocks." in name}
    read = _convert_non_diffusers_wan_lora_to_diffusers(blocks)
    layer = "blocks.1.attn2.to_out.0"
    found = read[f"transformer.{layer}.lora_B.weight"] @ read[f"transformer.{layer}.lora_A.weight"]
    number = layers.index(layer)
    assert torch.allclose(found, torch.full((4, 4), -2.0 * number * number * 6.0 / 2))


def test_ltx_keeps_the_names_of_blocks(tmp_path):
    layers = ["transformer_blocks.0.attn1.to_q", "proj_in"]
    path = write_comfyui_lora(write(tmp_path / "in.safetensors", layers), tmp_path / "out.safetensors")
    assert {name for name in load_file(path) if "lora_A" in name} == {
        "diffusion_model.transformer_blocks.0.attn1.to_q.lora_A.weight",
        "diffusion_model.patchify_proj.lora_A.weight",
    }


def test_files_that_cannot_be_written_for_it(tmp_path):
    out = tmp_path / "out.safetensors"
    with pytest.raises(
        ValueError, match=r"single_blocks\.0\.proj is no layer that ComfyUI's Wan has a name for"
    ):
        write_comfyui_lora(write(tmp_path / "a.safetensors", ["single_blocks.0.proj"]), out)
    path = write(tmp_path / "b.safetensors", ["proj_out"], **{"transformer.use_rslora": True})
    with pytest.raises(ValueError, match="scales its layers by other rules"):
        write_comfyui_lora(path, out)
    save_file({"weight": torch.zeros(2)}, tmp_path / "c.safetensors")
    with pytest.raises(ValueError, match="is no adapter of a transformer"):
        write_comfyui_lora(tmp_path / "c.safetensors", out)
    (tmp_path / "d.safetensors").write_bytes(b"no tensors")
    with pytest.raises(ValueError, match="is no file of safetensors"):
        write_comfyui_lora(tmp_path / "d.safetensors", out)
    assert not out.exists()
