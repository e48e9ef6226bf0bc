"""DiffSynth-Studio's script for Wan: `examples/wanvideo/model_training/train.py --task sft:train`, as a command.

Run of the trainer are the script itself, its WanModel (two blocks, 3 heads, fp64), loss, checkpointing, schedule, loop
and what its logger saves, on six random clips as the first half of their split training leaves them in a cache.
`diffsynth_h3.py` runs its script for MiniMax H3 in the same way.

Stood in for are
- `from_pretrained` of its pipeline, which downloads; packages that read images and sound; einops, by functorch's;
- AdamW, by SGD with momentum: a gradient that is rounding alone moves a parameter of AdamW as far as any other;
- flash-attn, where a case asks for it, by torch's attention under its name and signature;
- the order of clips: the loader has a generator. `os.listdir` sorts on even ranks, and the other way on odd ones, as
  folders of several machines might; the patch sorts what was found;
- the seed of noise and timesteps, for one process. The script seeds nothing, and the patch does, by the data rank.
"""

import os
import runpy
import sys
import tempfile
import types
from collections.abc import Callable
from functools import partial
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

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

FULL = "--trainable_models dit --learning_rate 0.1"
LORA = (
    "--lora_base_model dit --lora_rank 4 --learning_rate 1.0 --use_gradient_checkpointing_offload "
    "--gradient_accumulation_steps 2 --dataset_repeat 2 --num_epochs 2"
)


def case(ranks: int, arguments: str, **options: Any) -> Case:
    reference = {"arguments": arguments, "seed": 0, **options}
    return Case(ranks, {"arguments": f"{arguments} --ulysses {ranks}", **options}, reference)


CASES = {
    "full training, ulysses 2": case(2, FULL),
    "full training, ulysses 3": case(3, FULL),
    "image to video, ulysses 3": case(3, FULL, model="image to video"),
    "TI2V, ulysses 3": case(3, FULL, model="TI2V"),
    "LoRA, ulysses 2, two clips a step, --use_gradient_checkpointing_offload": case(2, LORA),
    "ulysses 2, a function of flash-attn's signature": case(2, FULL, flash_attn=True),
}
TWO_CLIPS = {"ulysses 2": Case(4, {"arguments": f"{FULL} --ulysses 2"})}

# Latent frames, rows and columns of tokens: 55 to 105 tokens.
CLIPS = [(5, 1, 11), (3, 5, 5), (2, 5, 7), (3, 5, 7), (4, 4, 5), (3, 3, 7)]
CHANNELS, TEXT = 16, 24
SIZES = {"dim": 36, "ffn_dim": 48, "out_dim": CHANNELS, "text_dim": TEXT, "freq_dim": 16, "eps": 1e-6}
SIZES |= {"patch_size": (1, 2, 2), "num_heads": 3, "num_layers": 2}
MODELS = {
    "text to video": {"in_dim": CHANNELS, "has_image_input": False},
    # Beside the latents stand a mask of 4 channels and the first frame.
    "image to video": {"in_dim": 2 * CHANNELS + 4, "has_image_input": True},
    # The first frame is in the latents, at a time of its own.
    "TI2V": {"in_dim": CHANNELS, "has_image_input": False, "seperated_timestep": True},
}


def train(checkout: Path, options: dict[str, Any]) -> Steps:
    kind = options.get("model", "text to video")

    def make() -> Any:
        from diffsynth.pipelines.wan_video import WanModel, WanVideoPipeline

        made = WanVideoPipeline(device="cpu", torch_dtype=torch.float64)
        made.dit = WanModel(**SIZES, **MODELS[kind]).double()
        return made

    return run_script("wanvideo", checkout, options, make, partial(save_cache, kind=kind))


def run_script(
    family: str,
    checkout: Path,
    options: dict[str, Any],
    make: Callable[[], Any],
    save: Callable[..., None],
    tokens_dim: int = 1,
) -> Steps:
    """The script of a family of examples.

    Args:
        make: a pipeline with its model, in place of one that is downloaded.
        save: `save(folder, offload=…)` writes the cache of clips.
        tokens_dim: of what its first block gets.
    """
    # Accelerate looks for the backend of CPUs only where it is told to.
    os.environ["ACCELERATE_USE_CPU"] = "true"
    script = checkout / f"examples/{family}/model_training/train.py"
    sys.path.insert(0, str(script.parent))  # as where it is a command
    import_what_is_absent(flash_attn=options.get("flash_attn", False))
    from accelerate import Accelerator
    from diffsynth.diffusion import ModelLogger

    torch.manual_seed(0)
    pipeline = make()
    steps, seen = Steps(), {}

    def start_logger(logger: ModelLogger, *args: Any, **kwargs: Any) -> None:
        # Behind the model, where the patch has its line.
        if "seed" in options:
            torch.manual_seed(options["seed"])
        make_logger(logger, *args, **kwargs)

    def prepare(accelerator: Accelerator, module: nn.Module, *rest: Any) -> Any:
        seen["model"], seen["tokens"] = module, count_tokens(module.pipe.dit.blocks[0], tokens_dim)
        return prepare_all(accelerator, module, *rest)

    class RecordedSGD(torch.optim.SGD):
        def __init__(self, parameters: Any, lr: float, weight_decay: float):
            super().__init__(parameters, lr, momentum=0.9, weight_decay=weight_decay)

        def step(self, closure: Any = None) -> None:
            note_step(steps, **seen, draws=draws)
            super().step(closure)

    def end_step(logger: ModelLogger, *args: Any, loss: Tensor) -> None:
        steps.losses.append(loss.item())
        end(logger, *args, loss=loss)

    def load(loader: DataLoader, *args: Any, **kwargs: Any) -> None:
        make_loader(loader, *args, **{"generator": torch.Generator().manual_seed(1), **kwargs})

    make_logger, end, prepare_all = ModelLogger.__init__, ModelLogger.on_step_end, Accelerator.prepare
    make_loader, listed = DataLoader.__init__, os.listdir
    with tempfile.TemporaryDirectory() as folder:
        save(Path(folder), offload="--use_gradient_checkpointing_offload" in options["arguments"])
        places = [f"--dataset_base_path={folder}", f"--output_path={folder}/out"]
        with (
            LiftOperations(),
            drawn("randn_like", "randint") as draws,
            mock.patch("sys.argv", [str(script), *places, "--task=sft:train", *options["arguments"].split()]),
            mock.patch(
                "os.listdir", lambda path: sorted(listed(path), reverse=int(os.environ["RANK"]) % 2 == 1)
            ),
            mock.patch("torch.optim.AdamW", RecordedSGD),
            mock.patch.object(type(pipeline), "from_pretrained", lambda *_, **__: pipeline),
            mock.patch.multiple(ModelLogger, __init__=start_logger, on_step_end=end_step),
            mock.patch.object(Accelerator, "prepare", prepare),
            mock.patch.object(DataLoader, "__init__", load),
        ):
            runpy.run_path(str(script), run_name="__main__")
    steps.weights = weights_of(seen["model"])
    return steps


def import_what_is_absent(*, flash_attn: bool) -> None:
    """Packages that are not installed, and flash-attn where a case asks for it."""
    # Before there are stand-ins, as transformers looks for packages itself.
    import peft  # noqa: F401
    from functorch.einops import rearrange
    from transformers import Wav2Vec2Processor  # noqa: F401

    absent = ("einops", "ftfy", "imageio", "librosa", "modelscope", "pandas", "torchaudio", "torchvision")
    stand_in(*absent, given={"einops.rearrange": rearrange})
    if flash_attn:
        kernel = types.ModuleType("flash_attn")
        kernel.__spec__ = ModuleSpec("flash_attn", None)
        kernel.flash_attn_func = attend
        sys.modules["flash_attn"] = kernel


def attend(q: Tensor, k: Tensor, v: Tensor, softmax_scale: float | None = None, **_windowless: Any) -> Tensor:
    """[B, S, H, D], as flash-attn takes them."""
    q, k, v = (each.transpose(1, 2) for each in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, scale=softmax_scale).transpose(1, 2)


def normals() -> Callable[..., Tensor]:
    """Random numbers in fp64 of the shapes that are asked for, the same ones in every run."""
    random = torch.Generator().manual_seed(2)
    return lambda *shape: torch.randn(shape, generator=random, dtype=torch.float64)


def save_cache(folder: Path, kind: str, offload: bool) -> None:
    """The clips as `sft:data_process` saves them, options of checkpointing included."""
    normal = normals()
    for number, (frames, rows, columns) in enumerate(CLIPS):
        size = (frames, 2 * rows, 2 * columns)
        shared = {"input_latents": normal(1, CHANNELS, *size), "cfg_scale": 1, "cfg_merge": False}
        shared |= {"use_gradient_checkpointing": True, "use_gradient_checkpointing_offload": offload}
        if kind == "image to video":
            shared |= {"clip_feature": normal(1, 257, 1280), "y": normal(1, CHANNELS + 4, *size)}
        elif kind == "TI2V":
            shared |= {
                "first_frame_latents": normal(1, CHANNELS, 1, *size[1:]),
                "fuse_vae_embedding_in_latents": True,
            }
        torch.save((shared, {"context": normal(1, 7, TEXT)}, {}), folder / f"{number}.pth")


if __name__ == "__main__":
    main(train)
