"""DiffSynth-Studio's script for MiniMax H3: `examples/minimax_h3/model_training/train.py --task sft:train`.

Run of the trainer are the script itself, its MiniMaxH3DiT (two blocks, 3 heads, fp64), its packing of caption, sound
and clip into one sequence with padding behind it, loss, checkpointing, schedule, loop and what its logger saves. What
is stood in for says `diffsynth_studio.py`.
"""

from functools import partial
from pathlib import Path
from typing import Any

import torch

from tests.integrations.trainers import Case, Steps, diffsynth_studio, main
from tests.integrations.trainers.diffsynth_studio import case, normals, run_script

# The script's own default is no length that its VAE takes, and DDP is to know that its frequencies are no parameters.
FULL, LORA = (
    f"--num_frames 39 --find_unused_parameters {each}"
    for each in (diffsynth_studio.FULL, diffsynth_studio.LORA)
)

CASES = {
    "full training, ulysses 2": case(2, FULL),
    "full training, ulysses 3": case(3, FULL),
    "first and last frame, ulysses 3": case(3, FULL, model="first and last frame"),
    "LoRA, ulysses 2, two clips a step, --use_gradient_checkpointing_offload": case(
        2, f"{LORA} --lora_target_modules qkv_proj,out_proj"
    ),
    "ulysses 2, a function of flash-attn's signature": case(2, FULL, flash_attn=True),
}
TWO_CLIPS = {"ulysses 2": Case(4, {"arguments": f"{FULL} --ulysses 2"})}

# Tokens of the caption; latent frames, rows and columns of latents; latents of a channel of sound. That makes 41 to 70
# tokens, 108 with the frames that are given, and padding to 64 or 128 in every clip.
CLIPS = [
    (5, 2, 2, 22, 9),
    (3, 7, 2, 4, 12),
    (7, 2, 6, 8, 13),
    (4, 7, 4, 6, 12),
    (9, 2, 4, 4, 13),
    (6, 2, 6, 14, 9),
]
TEXT = 24
SIZES = {"num_layers": 2, "token_refiner_num_layers": 1, "hidden_size": 36, "num_attention_heads": 3}
SIZES |= {"attention_head_dim": 16, "ffn_hidden_size": 48, "rope_inv_freq_len": 2, "text_dim": TEXT}
SIZES |= {"timestep_input_dim": 16, "time_embed_hidden_size": 24, "time_embed_dim": 20}
SIZES |= {"adaln_out_features": 6 * 36 * 3, "final_adaln_out_features": 2 * 36}


def train(checkout: Path, options: dict[str, Any]) -> Steps:
    def make() -> Any:
        from diffsynth.pipelines.minimax_h3_audio_video import MiniMaxH3DiT, MiniMaxH3Pipeline

        made = MiniMaxH3Pipeline(device="cpu", torch_dtype=torch.float64)
        made.dit = MiniMaxH3DiT(**SIZES).double()
        return made

    keyframes = [0, -1] if options.get("model") == "first and last frame" else []
    save = partial(save_cache, keyframes=keyframes)
    return run_script("minimax_h3", checkout, options, make, save, tokens_dim=0)


def save_cache(folder: Path, keyframes: list[int], offload: bool) -> None:
    """The clips as `sft:data_process` saves them, packed by the trainer itself."""
    from diffsynth.pipelines.minimax_h3_audio_video import MiniMaxH3Unit_PackedSequenceBuilder

    normal, pack = normals(), MiniMaxH3Unit_PackedSequenceBuilder()._build_packed_fl2va
    for number, (length, frames, rows, columns, sound) in enumerate(CLIPS):
        packed = pack(length, frames, rows, columns, sound, keyframes)
        assert packed["seq_len"] > packed["cu_seqlens"][1], "there is padding"
        shared = {
            "input_latents": normal(1, 24, frames, rows, columns),
            "audio_input_latents": normal(2, 32, sound),
            "use_gradient_checkpointing": True,
            "use_gradient_checkpointing_offload": offload,
        }
        if keyframes:
            shared["keyframe_cond_anchor"] = normal(len(keyframes) * rows * columns // 4, 96)
        caption = {"prompt_embeds": normal(length, TEXT), "packed": packed}
        torch.save((shared, caption, {}), folder / f"{number}.pth")


if __name__ == "__main__":
    main(train)
