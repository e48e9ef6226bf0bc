"""diffusers' script for CogVideoX LoRA: `examples/cogvideo/train_cogvideox_lora.py`, from its arguments to its end.

Run of the trainer is the whole script, with the diffusers that is installed: it loads a pipeline from disk, encodes
clips on all ranks, trains, saves the LoRA and loads it into a pipeline again. The pipeline has two blocks, 3 heads and
random weights, and computes in fp64.

Stood in for are
- decord, which is not installed, by random frames, and by plain PyTorch the two functions of torchvision that matter;
- Adam, by SGD with momentum: a gradient that is rounding alone moves a parameter of Adam as far as any other;
- the order of clips: where nobody gives the loader a generator, the script takes a seed from the global one as each
  epoch begins, and `data_parallel_dataloader` once, before. So it is given one, and both read the same clips.
"""

import functools
import importlib.util
import os
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from opensora_accel.precision import LiftOperations
from tests.integrations.trainers import (
    Case,
    Steps,
    count_tokens,
    drawn,
    main,
    note_step,
    stand_in,
    weights_of,
)

# 25 tokens each of 9 frames' three latent ones: 75. Of 5 frames: 50.
ARGUMENTS = (
    "--height 80 --width 80 --train_batch_size 1 --rank 4 --lora_alpha 4 "
    "--max_train_steps 3 --learning_rate 0.1 --lr_warmup_steps 0 --seed 42"
)
RECOMPUTED = (
    "--gradient_checkpointing --gradient_accumulation_steps 2 --lr_scheduler cosine --max_num_frames 5"
)
PLAIN = "--max_num_frames 9"
# Two epochs of two steps, and a sample of rank 0 behind each.
VALIDATED = f"{PLAIN} --train_batch_size 6 --max_train_steps 4 --validation_prompt ab --validation_epochs 1"

CASES = {
    "ulysses 2": Case(2, {"arguments": f"{PLAIN} --ulysses 2"}, {"arguments": PLAIN}),
    "ulysses 3": Case(3, {"arguments": f"{PLAIN} --ulysses 3"}, {"arguments": PLAIN}),
    "ulysses 3, --gradient_checkpointing, two batches a step, cosine schedule": Case(
        3, {"arguments": f"{RECOMPUTED} --ulysses 3"}, {"arguments": RECOMPUTED}
    ),
    "ulysses 2, six clips a step, --validation_epochs 1": Case(
        2, {"arguments": f"{VALIDATED} --ulysses 2"}, {"arguments": VALIDATED}
    ),
}
TWO_CLIPS = {"ulysses 2": Case(4, {"arguments": f"{PLAIN} --ulysses 2"})}
NUM_CLIPS = 12


def train(checkout: Path, options: dict[str, Any]) -> Steps:
    # Accelerate looks for the backend of CPUs only where it is told to.
    os.environ["ACCELERATE_USE_CPU"] = "true"
    torch.set_default_dtype(torch.float64)
    script = script_of(checkout)
    steps, seen = Steps(), {}

    def prepare(accelerator: Any, model: nn.Module, *rest: Any) -> Any:
        seen["model"], seen["tokens"] = model, count_tokens(model.transformer_blocks[0])
        return prepare_all(accelerator, model, *rest)

    def clip(accelerator: Any, *args: Any) -> Tensor:
        note_step(steps, **seen, draws=draws)
        norm = clip_all(accelerator, *args)
        steps.norms.append(norm.item())
        return norm

    def log(accelerator: Any, values: dict[str, float], step: int) -> None:
        steps.losses.append(values["loss"])

    prepare_all, clip_all = script.Accelerator.prepare, script.Accelerator.clip_grad_norm_
    with tempfile.TemporaryDirectory() as folder, LiftOperations():
        save_pipeline(Path(folder, "pipeline"))
        save_clips(Path(folder, "clips"))
        places = [
            f"--pretrained_model_name_or_path={folder}/pipeline",
            f"--instance_data_root={folder}/clips",
        ]
        places += ["--video_column=videos.txt", "--caption_column=prompts.txt", f"--output_dir={folder}/out"]
        arguments = f"{ARGUMENTS} {options['arguments']}".split()
        order = torch.Generator().manual_seed(1)
        with (
            drawn("randn_like", "randint") as draws,
            mock.patch("sys.argv", ["train_cogvideox_lora.py", *places, *arguments]),
            mock.patch.multiple(script.Accelerator, prepare=prepare, clip_grad_norm_=clip, log=log),
            mock.patch.object(script, "DataLoader", functools.partial(script.DataLoader, generator=order)),
            mock.patch("torch.optim.Adam", lambda groups, **_: torch.optim.SGD(groups, momentum=0.9)),
        ):
            script.main(script.get_args())
        steps.weights = weights_of(seen["model"])
    return steps


def script_of(checkout: Path) -> Any:
    """The script as a module, with what it needs of packages that are not installed."""
    # Before there are stand-ins, as transformers looks for torchvision itself.
    import peft  # noqa: F401
    from diffusers import CogVideoXPipeline  # noqa: F401

    stand_in("torchvision", "decord", given={"decord.VideoReader": VideoReader, "decord.bridge": mock.Mock()})
    path = checkout / "examples/cogvideo/train_cogvideox_lora.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)

    def resize(frames: Tensor, size: list[int], interpolation: Any) -> Tensor:
        return F.interpolate(frames, size, mode="bicubic")

    def crop(frames: Tensor, top: int, left: int, height: int, width: int) -> Tensor:
        return frames[..., top : top + height, left : left + width]

    script.resize, script.InterpolationMode = resize, mock.Mock()
    script.TT.functional = SimpleNamespace(crop=crop)
    return script


class VideoReader:
    """Random frames, by the number that the file is named by."""

    def __init__(self, uri: str):
        self._seed = int(Path(uri).stem)

    def __len__(self) -> int:
        return 9

    def get_batch(self, indices: list[int]) -> Tensor:
        frames = torch.rand(len(self), 96, 90, 3, generator=torch.Generator().manual_seed(self._seed))
        return 255 * frames[indices]


def save_clips(folder: Path) -> None:
    folder.mkdir()
    names = [f"{number}.mp4" for number in range(NUM_CLIPS)]
    for name in names:
        (folder / name).touch()
    (folder / "videos.txt").write_text("\n".join(names))
    (folder / "prompts.txt").write_text("\n".join("ab"[: 1 + number % 2] * number for number in range(1, 13)))


def save_pipeline(folder: Path) -> None:
    """A CogVideoX pipeline of random weights, which are the same on all ranks."""
    import diffusers
    from transformers import T5Config, T5EncoderModel, T5Tokenizer

    torch.manual_seed(0)
    alphabet = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -1.0), ("a", -1.0), ("b", -1.0)]
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}
    blocks = ("DownBlock3D", "UpBlock3D")
    vae = diffusers.AutoencoderKLCogVideoX(
        down_block_types=(f"CogVideoX{blocks[0]}",) * 4,
        up_block_types=(f"CogVideoX{blocks[1]}",) * 4,
        block_out_channels=(8, 8, 8, 8),
        latent_channels=4,
        layers_per_block=1,
        norm_num_groups=2,
    )
    transformer = diffusers.CogVideoXTransformer3DModel(
        num_attention_heads=3,
        attention_head_dim=16,
        in_channels=4,
        out_channels=4,
        time_embed_dim=16,
        text_embed_dim=sizes["d_model"],
        max_text_seq_length=7,
        num_layers=2,
        use_rotary_positional_embeddings=True,
    )
    pipeline = diffusers.CogVideoXPipeline(
        tokenizer=T5Tokenizer(vocab=alphabet, extra_ids=0),
        text_encoder=T5EncoderModel(T5Config(vocab_size=len(alphabet), **sizes)),
        vae=vae,
        transformer=transformer,
        scheduler=diffusers.CogVideoXDPMScheduler(),
    )
    pipeline.save_pretrained(folder)


if __name__ == "__main__":
    main(train)
