"""VideoX-Fun's scripts for Wan 2.1: `scripts/wan2.1/train.py` and `train_lora.py --use_peft_lora`, as commands.

Run of the trainer are the whole script, its WanTransformer3DModel (two blocks, 3 heads, fp64, every parameter trained),
sampler of batches, noise and timesteps, loss, clipping and saved state. Attention is torch's, to which theirs falls
back without flash-attn.

Stood in for are
- the VAE, by one that pools pixels and whose posterior is drawn from; T5 and its tokenizer; random frames as data set;
- what `torch.cuda` has not on a CPU; kernels in Triton, which Wan does not call; packages that read images and videos,
  OmegaConf by PyYAML, einops by functorch's;
- AdamW, by SGD with momentum: a gradient that is rounding alone moves a parameter of AdamW as far as any other;
- the seed of the loader's workers, which the script takes from the global generator and the patch does not;
- `torch_rng`, for one process. The script seeds it by the rank and draws noise from it, the patch draws all from the
  global generator. So there, too, noise is drawn from the global one.
"""

import contextlib
import os
import runpy
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
import yaml
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

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

# Of two clips a batch: 25 tokens for each latent frame, of which 9 frames are 3, and 5 are 2.
ALWAYS = "--train_batch_size 2 --learning_rate 0.1 --lr_warmup_steps 0 --seed 42 --train_data_meta clips.json"
LONG, SHORT = "--video_sample_n_frames 9", "--video_sample_n_frames 5"
FULL = "--trainable_modules . --max_train_steps 3"
TWO_STEPS = "--trainable_modules . --max_train_steps 2"
LORA = "--use_peft_lora --rank 4 --network_alpha 4 --target_name q,k,v,ffn.0,ffn.2 --max_train_steps 3"


def case(ranks: int, arguments: str, more: str = "", script: str = "train.py") -> Case:
    reference = {"arguments": arguments, "script": script, "one_generator": True}
    return Case(ranks, {"arguments": f"{arguments} {more} --ulysses {ranks}", "script": script}, reference)


CASES = {
    "ulysses 2, 75 tokens": case(2, f"{FULL} {LONG}"),
    "ulysses 3, 75 tokens": case(3, f"{FULL} {LONG}"),
    "ulysses 3, 50 tokens": case(3, f"{FULL} {SHORT}"),
    "ulysses 2, --gradient_checkpointing": case(2, f"{TWO_STEPS} {LONG}", "--gradient_checkpointing"),
    "ulysses 2, train_lora.py --use_peft_lora": case(2, f"{LORA} {LONG}", script="train_lora.py"),
}
TWO_CLIPS = {
    "timesteps of any number": Case(4, {"arguments": f"{FULL} {LONG} --ulysses 2", "script": "train.py"}),
    "--uniform_sampling": Case(
        4, {"arguments": f"{FULL} {LONG} --uniform_sampling --ulysses 2", "script": "train.py"}
    ),
}

CHANNELS, TEXT, VOCABULARY = 16, 24, 5
SIZES = {"in_dim": CHANNELS, "out_dim": CHANNELS, "dim": 36, "ffn_dim": 48, "freq_dim": 16, "text_dim": TEXT}
SIZES |= {"text_len": 9, "num_heads": 3, "num_layers": 2}


def train(checkout: Path, options: dict[str, Any]) -> Steps:
    # Accelerate looks for the backend of CPUs only where it is told to.
    os.environ["ACCELERATE_USE_CPU"] = "true"
    import_what_is_absent()
    from accelerate import Accelerator
    from transformers import AutoTokenizer
    from videox_fun import data, models
    from videox_fun.utils import utils

    steps, seen = Steps(), {}
    vae, text_encoder = VAE(), TextEncoder()

    def transformer(*_: Any, **__: Any) -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = models.WanTransformer3DModel(**SIZES).double()
            for parameter in model.parameters():
                # Some are zero at first, and the gradients of others with them.
                nn.init.normal_(parameter, std=0.1)
        return model

    def prepare(accelerator: Accelerator, model: nn.Module, *rest: Any) -> Any:
        seen["model"], seen["tokens"] = model, count_tokens(model.blocks[0])
        draws.clear()  # the model was made
        return prepare_all(accelerator, model, *rest)

    def clip(accelerator: Accelerator, *args: Any) -> Tensor:
        note_step(steps, **seen, draws=draws)
        norm = clip_all(accelerator, *args)
        steps.norms.append(norm.item())
        return norm

    def log(accelerator: Accelerator, values: dict[str, float], step: int) -> None:
        steps.losses.append(values["train_loss"])

    def load(loader: DataLoader, *args: Any, **kwargs: Any) -> None:
        make_loader(loader, *args, **{"generator": torch.Generator().manual_seed(1), **kwargs})

    prepare_all, clip_all, make_loader = Accelerator.prepare, Accelerator.clip_grad_norm_, DataLoader.__init__
    script = checkout / "scripts/wan2.1" / options["script"]
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as patches:
        patches.enter_context(LiftOperations())
        if options.get("one_generator"):
            patches.enter_context(normal_from_the_global_generator())
        draws = patches.enter_context(drawn("randn", "rand", "randint"))
        config = checkout / "config/wan2.1/wan_civitai.yaml"
        places = [f"--config_path={config}", "--pretrained_model_name_or_path=none", f"--output_dir={folder}"]
        for patch in (
            mock.patch("sys.argv", [str(script), *places, *ALWAYS.split(), *options["arguments"].split()]),
            mock.patch("torch.optim.AdamW", lambda groups, lr, **_: torch.optim.SGD(groups, lr, 0.9)),
            mock.patch("torch.cuda.device", lambda device: contextlib.nullcontext()),
            mock.patch("torch.cuda.ipc_collect"),
            mock.patch.multiple(Accelerator, prepare=prepare, clip_grad_norm_=clip, log=log),
            mock.patch.object(DataLoader, "__init__", load),
            mock.patch.object(AutoTokenizer, "from_pretrained", lambda path: tokenize),
            mock.patch.object(models.WanT5EncoderModel, "from_pretrained", lambda *_, **__: text_encoder),
            mock.patch.object(models.AutoencoderKLWan, "from_pretrained", lambda *_, **__: vae),
            mock.patch.object(models.WanTransformer3DModel, "from_pretrained", transformer),
            mock.patch.object(data, "ImageVideoDataset", Clips),
            mock.patch.object(utils, "save_videos_grid"),
        ):
            patches.enter_context(patch)
        runpy.run_path(str(script), run_name="__main__")
    steps.weights = weights_of(seen["model"])
    return steps


def import_what_is_absent() -> None:
    # Before there are stand-ins, as transformers and diffusers look for packages themselves.
    import peft  # noqa: F401
    from diffusers import AutoencoderKL, WanPipeline  # noqa: F401
    from functorch.einops import rearrange
    from transformers import Wav2Vec2Processor  # noqa: F401

    def load(path: str) -> Any:
        return yaml.safe_load(Path(path).read_text())

    omega_conf = SimpleNamespace(load=load, to_container=lambda config: config)
    given = {"einops.rearrange": rearrange, "omegaconf.OmegaConf": omega_conf, "datasets.utils": mock.Mock()}
    stand_in("cv2", "datasets", "decord", "einops", "ftfy", "func_timeout", "imageio", given=given)
    stand_in("librosa", "omegaconf", "pyloudnorm", "scipy", "torchvision", given=given)
    sys.modules["videox_fun.models.attention_kernel"] = mock.Mock()


@contextlib.contextmanager
def normal_from_the_global_generator() -> Iterator[None]:
    """Within it, `torch.randn` takes no other generator."""
    randn = torch.randn

    def draw(*args: Any, **kwargs: Any) -> Tensor:
        return randn(*args, **{**kwargs, "generator": None})

    with mock.patch.object(torch, "randn", draw):
        yield


class VAE(nn.Module):
    """Means over 8 x 8 pixels of every fourth frame, mixed into channels; as many for the logarithm of the variance."""

    def __init__(self) -> None:
        super().__init__()
        mix = torch.randn(2 * CHANNELS, 3, generator=torch.Generator().manual_seed(3))
        self.register_buffer("mix", mix.double())
        self.latent_channels = CHANNELS
        self.config = SimpleNamespace(temporal_compression_ratio=4)

    def encode(self, pixels: Tensor) -> tuple[Any]:
        """pixels: [B, 3, T, H, W]; the posterior of latents [B, C, 1 + (T - 1)/4, H/8, W/8]."""
        from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution

        pooled = F.avg_pool3d(pixels[:, :, ::4], (1, 8, 8))
        return (DiagonalGaussianDistribution(torch.einsum("oc,bcthw->bothw", self.mix, pooled)),)


class TextEncoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        random = torch.Generator().manual_seed(4)
        self.table = nn.Parameter(torch.randn(VOCABULARY, TEXT, generator=random).double())

    def forward(self, ids: Tensor, attention_mask: Tensor) -> tuple[Tensor]:
        return (self.table[ids],)


def tokenize(texts: list[str], **_: Any) -> SimpleNamespace:
    """One token a letter, up to the longest text that `Clips` has."""
    ids = torch.zeros(len(texts), 7, dtype=torch.long)
    for row, text in zip(ids, texts, strict=True):
        row[: len(text)] = torch.tensor(["_abcd".index(letter) for letter in text])
    return SimpleNamespace(input_ids=ids, attention_mask=(ids > 0).long())


class Clips(Dataset):
    """Random frames, each clip's the same on all ranks."""

    def __init__(self, *_: Any, video_sample_n_frames: int, **__: Any):
        self.num_frames = video_sample_n_frames
        self.dataset = [{"type": "video"}] * 12

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> dict[str, Any]:
        random = torch.Generator().manual_seed(index)
        frames = torch.rand(self.num_frames, 3, 80, 80, generator=random).double()
        text = "abcd"[index % 4] * (1 + index % 7)
        return {"pixel_values": 2 * frames - 1, "text": text, "data_type": "video", "idx": index}


if __name__ == "__main__":
    main(train)
