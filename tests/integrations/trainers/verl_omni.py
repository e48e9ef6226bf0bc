"""verl-omni's loop for MiniMax H3: DiffusionNFT on its `NFTDiffusersFSDPEngine`, two steps of two accumulated batches.

All within a step is verl-omni's and verl's own: the engine's meshes, the model from a folder, its adapters "default"
and "old", checkpointing, FSDP2, the draw of the noise, the packing of caption, sound and clip, the three predictions,
the loss, accumulation, clipping, AdamW, and between the steps the update of "old".

Put in the place of its own are the rollout, which needs vLLM and a GPU, and of which a step reads latents, captions,
timesteps and rewards; Ray, which starts the workers and deals them the batches by the engine's data rank, as is done
here; and packages that are imported and not used. verl gets a platform without a GPU, and fp64 in the place of every
precision.

In the folder that OPENSORA_ACCEL_TRAINERS names, `verl` lies beside `verl-omni`; installed are tensordict, hydra-core,
omegaconf and codetiming, of which this toolkit needs none.

The patch seeds each rank by its data rank. On one process nobody does, so there the harness does. Two data ranks are
compared with one process that sees the clips of both, so those come with their noise, which the engine takes too.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import tempfile
import types
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from tests.integrations.trainers import (
    Case,
    Steps,
    count_tokens,
    drawn,
    main,
    note_step,
    of_each_rank,
    stand_in,
    whole,
)

STEPS, ACCUMULATED, CLIPS_OF_A_BATCH, TIMESTEPS = 2, 2, 2, 2
TWO = {"data_ranks": 2, "noise": "given"}
CASES = {
    "ulysses 2": Case(2, {"ulysses": 2}),
    "ulysses 3": Case(3, {"ulysses": 3}),
    "two data ranks of ulysses 2": Case(4, {"ulysses": 2} | TWO, TWO),
    "HSDP of 2 x 2, two data ranks of ulysses 2": Case(4, {"ulysses": 2, "fsdp_size": 2} | TWO, TWO),
}
TWO_CLIPS = {"ulysses 2": Case(4, {"ulysses": 2, "data_ranks": 2})}

# 3 latent frames of 3 x 5 patches, and 2 channels of 4 latents of sound: with captions of 5 to 8 tokens 58 to 61.
FRAMES, ROWS, COLUMNS, SOUND = 3, 6, 10, 4
PATCHES, SOUNDS, LONGEST, TEXT = FRAMES * ROWS * COLUMNS // 4, 2 * SOUND, 8, 16
H3 = {
    "num_attention_heads": 3,
    "attention_head_dim": 12,
    "hidden_size": 36,
    "rope_freq_dim": 2,
    "num_layers": 2,
}
H3 |= {"num_refiner_layers": 1, "ffn_dim": 32, "text_dim": TEXT, "freq_dim": 16, "time_embed_hidden_dim": 24}
H3 |= {"time_embed_dim": 20}
TARGETS = ["to_q", "to_k", "to_v", "to_out.0", "ff.net.0.proj", "ff.net.2"]
BLOCKS = ["MiniMaxH3TransformerBlock", "MiniMaxH3TokenRefinerBlock"]
# Their `__init__` imports every model, rollout and trainer there is, and vLLM with them.
PACKAGES = [
    *(
        "verl_omni",
        "verl_omni.pipelines",
        "verl_omni.pipelines.minimax_h3_diffusion_nft",
        "verl_omni.trainer",
    ),
    *(
        "verl_omni.trainer.diffusion",
        "verl_omni.trainer.omni",
        "verl_omni.workers",
        "verl_omni.workers.engine",
    ),
    *("verl_omni.workers.engine.fsdp", "verl_omni.workers.utils", "verl_omni.utils"),
]


def checkout_of_verl() -> Path:
    """The checkout of verl.

    Raises:
        RuntimeError: it is not there, or what it needs is not installed.
    """
    checkout = Path(os.environ["OPENSORA_ACCEL_TRAINERS"], "verl")
    if not checkout.is_dir():
        raise RuntimeError(f"verl-omni needs verl: clone verl-project/verl to {checkout}")
    packages = {
        "tensordict": "tensordict",
        "hydra": "hydra-core",
        "omegaconf": "omegaconf",
        "codetiming": "codetiming",
    }
    absent = [name for module, name in packages.items() if importlib.util.find_spec(module) is None]
    if absent:
        raise RuntimeError(f"verl needs packages that are not installed: pip install {' '.join(absent)}")
    return checkout


def without_its_init(package: str, checkout: Path) -> None:
    """Makes the modules of a package importable without what its `__init__` imports."""
    module = types.ModuleType(package)
    module.__path__ = [str(checkout.joinpath(*package.split(".")))]
    sys.modules[package] = module


def platform() -> Any:
    """A platform of verl for ranks without a GPU."""
    from verl.plugin.platform.platform_cuda import PlatformCUDA

    class PlatformCPU(PlatformCUDA):
        device_name, vendor_name, device_module = "cpu", "none", torch.cpu

        def current_device(self) -> Any:
            return torch.device("cpu")

    return PlatformCPU()


def configs(folder: str, options: dict[str, Any]) -> tuple[Any, Any]:
    """The model's and the actor's configuration, as the recipe for H3 sets them where this needs nothing else."""
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig
    from verl_omni.workers.config import DiffusionModelConfig, FSDPDiffusionActorConfig
    from verl_omni.workers.config.diffusion.actor import DiffusionLossConfig

    model = DiffusionModelConfig(
        path=folder,
        architecture="MiniMaxH3Pipeline",
        algorithm="diffusion_nft",
        model_type="diffusion_nft_model",
        load_tokenizer=False,
        attn_backend="native",
        lora_rank=4,
        lora_alpha=8,
        target_modules=TARGETS,
        policy_state_adapters=("default", "old"),
        fsdp_layer_prefixes=["transformer_blocks.", "token_refiner.refiner_blocks."],
    )
    engine = FSDPEngineConfig(
        wrap_policy={"transformer_layer_cls_to_wrap": BLOCKS},
        ulysses_sequence_parallel_size=options.get("ulysses", 1),
        fsdp_size=options.get("fsdp_size", -1),
        mixed_precision={"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"},
    )
    actor = FSDPDiffusionActorConfig(
        strategy="fsdp2",
        fsdp_config=engine,
        # Below the norm, so that it cuts.
        optim=FSDPOptimizerConfig(lr=1e-2, clip_grad=0.01, total_training_steps=STEPS),
        ppo_micro_batch_size_per_gpu=CLIPS_OF_A_BATCH,
        rollout_n=1,
        diffusion_loss=DiffusionLossConfig(loss_mode="diffusion_nft", mix_beta=0.1, ref_kl_coef=1e-2),
    )
    return model, actor


def rollout(step: int, data_ranks: int, given_noise: bool) -> Any:
    """What a step reads of the clips that were sampled for it, of all data ranks, as the trainer hands it to them."""
    from tensordict import TensorDict
    from verl_omni.workers.utils.padding import embeds_padding_2_no_padding

    rng = torch.Generator().manual_seed(step)
    clips = ACCUMULATED * CLIPS_OF_A_BATCH * data_ranks
    latents = 96 * PATCHES + 32 * SOUNDS
    lengths = torch.randint(5, LONGEST + 1, (clips, 1), generator=rng)
    meta = [PATCHES, SOUNDS, FRAMES, ROWS, COLUMNS, SOUND]
    data = {
        "latents_clean": torch.randn(clips, latents, generator=rng, dtype=torch.float64),
        "latent_meta": torch.tensor(meta).expand(clips, -1).clone(),
        "train_timesteps": torch.randint(1, 1000, (clips, TIMESTEPS), generator=rng),
        "reward_prob": torch.rand(clips, TIMESTEPS, generator=rng, dtype=torch.float64),
        "prompt_embeds": torch.randn(clips, LONGEST, TEXT, generator=rng, dtype=torch.float64),
        "prompt_embeds_mask": (torch.arange(LONGEST) < lengths).long(),
    }
    if given_noise:
        data["forward_noise"] = torch.randn(clips, TIMESTEPS, latents, generator=rng, dtype=torch.float64)
    return embeds_padding_2_no_padding(TensorDict(data, batch_size=clips))


def with_values(build: Callable[[Any, nn.Module], nn.Module]) -> Callable[[Any, nn.Module], nn.Module]:
    """`_build_lora_module` whose adapters have no zeros, so that every one of them has a gradient in the first step."""

    def built(engine: Any, module: nn.Module) -> nn.Module:
        module, rng = build(engine, module), torch.Generator().manual_seed(3)
        for name, parameter in module.named_parameters():
            if "lora_" in name:
                parameter.data.copy_(torch.randn(parameter.shape, generator=rng, dtype=torch.float64) / 4)
        return module

    return built


def train(checkout: Path, options: dict[str, Any]) -> Steps:
    sys.dont_write_bytecode = True
    sys.path.insert(1, str(checkout_of_verl()))
    for package in PACKAGES:
        without_its_init(package, checkout)
    stand_in("ray", "datasets", "pandas", "transfer_queue")
    dist.init_process_group("gloo")
    from verl.plugin.platform import set_platform

    set_platform(platform())
    from diffusers import MiniMaxH3Transformer3DModel
    from verl.trainer.config import CheckpointConfig
    from verl.utils import tensordict_utils as tu
    from verl.utils.torch_dtypes import PrecisionType
    from verl_omni.pipelines.minimax_h3_diffusion_nft import diffusers_training_adapter  # noqa: F401, it registers
    from verl_omni.workers.engine.fsdp.diffusers_impl import NFTDiffusersFSDPEngine as Engine
    from verl_omni.workers.utils.losses import diffusion_loss

    from opensora_accel.observe.on_cpu import prepare_model
    from opensora_accel.precision import LiftOperations

    steps, data_ranks, given = Steps(), options.get("data_ranks", 1), options.get("noise") == "given"
    optimizer_step = Engine.optimizer_step

    def step_and_note(engine: Any) -> float:
        note_step(steps, engine.module, tokens, draws)
        steps.norms.append(optimizer_step(engine))
        return steps.norms[-1]

    fp64 = mock.patch.object(PrecisionType, "to_dtype", lambda _precision: torch.float64)
    adapters = mock.patch.object(Engine, "_build_lora_module", with_values(Engine._build_lora_module))
    cache = mock.patch.object(torch.cpu, "empty_cache", lambda: None, create=True)
    noted = mock.patch.object(Engine, "optimizer_step", step_and_note)
    with tempfile.TemporaryDirectory() as folder, fp64, adapters, cache, noted, LiftOperations():
        torch.manual_seed(1)
        model = MiniMaxH3Transformer3DModel(**H3)
        prepare_model(model)
        model.save_pretrained(Path(folder, "transformer"))
        model_config, actor = configs(folder, options)
        engine = Engine(model_config, actor.engine, actor.optim, CheckpointConfig())
        engine.initialize()
        tokens = count_tokens(engine.module.transformer_blocks[0].attn.to_q)
        engine.copy_adapter("default", "old")
        if dist.get_world_size() == 1:
            torch.manual_seed(actor.engine.seed)
        with engine.train_mode(), drawn("randn_like") as draws:
            for step in range(STEPS):
                batch = rollout(step, data_ranks, given)
                # One process has the batches of all data ranks.
                dealt = tu.chunk_tensordict(batch, engine.get_data_parallel_size())
                batch = dealt[engine.get_data_parallel_rank()]
                tu.assign_non_tensor(batch, micro_batch_size_per_gpu=CLIPS_OF_A_BATCH)
                trained = engine.train_batch(batch, partial(diffusion_loss, actor))
                losses = of_each_rank(sum(map(sum, trained["loss"])))
                steps.losses.append(sum(losses) / len(losses))
                engine.ema_update_adapter("default", "old", decay=0.5)
        named = engine.module.named_parameters()
        steps.weights = {name: whole(each) for name, each in named if "lora_" in name}  # "old", too
    return steps


if __name__ == "__main__":
    main(train)
