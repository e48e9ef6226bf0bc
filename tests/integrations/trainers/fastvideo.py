"""FastVideo's `run_training_from_config`: two steps of two accumulated batches of supervised fine-tuning.

All is the trainer's own from its configuration file on: groups, loader (meta device, FSDP2, weights from safetensors),
`WanModel`, its `WanTransformer3DModel`, `FineTuneMethod`, batch sampler, `Trainer.run`, clipping, optimizer, and the
seeds, which are those of the group of `sp_size`. The norms and losses are those that it hands to its tracker.

Put in the place of its own: the VAE (statistics of 0 and 1), parquet files (tensors), the empty prompt's embedding,
which it computes and does not use here, and the tracker. So that it runs on a CPU its device and its mesh are told
"cpu", and torch's attention is named for that platform. So that it runs in fp64 its two precisions are named so, and
the assertions of its model, which are of fp32, are compiled away.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import sys
import tempfile
import types
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from tests.integrations.trainers import Case, Steps, count_tokens, gradients_of, main, stand_in, weights_of

CASES = {"ulysses 2": Case(2, {"sp_size": 2}), "ulysses 3": Case(3, {"sp_size": 3})}
PACKAGES = (
    *("cloudpickle", "cv2", "datasets", "einops", "ftfy", "imageio", "pyarrow", "remote_pdb", "scipy"),
    *("torchvision", "wandb"),
)
WAN = {
    **{"num_layers": 2, "num_attention_heads": 6, "attention_head_dim": 12, "ffn_dim": 64, "text_dim": 16},
    **{"freq_dim": 32, "in_channels": 4, "out_channels": 4},
}
# 5 frames of 5 x 7 patches: 175 tokens, which neither 2 nor 3 ranks divide.
LATENT, NUM_CLIPS = (4, 5, 10, 14), 8


def configuration(folder: str) -> dict[str, Any]:
    """What `run.yaml` says; JSON is YAML."""
    ranks = int(os.environ["WORLD_SIZE"])
    model = {
        "_target_": "fastvideo.train.models.wan.WanModel",
        "init_from": folder,
        "attention_backend": "TORCH_SDPA",
    }
    training = {
        "distributed": {"num_gpus": ranks, "sp_size": 1, "hsdp_shard_dim": ranks},
        "data": {"data_path": folder, "seed": 5, "num_latent_t": LATENT[1]},
        "optimizer": {"learning_rate": 1e-2},
        "loop": {"max_train_steps": 2, "gradient_accumulation_steps": 2},
        "checkpoint": {"output_dir": folder},
    }
    return {
        "models": {"student": model},
        "method": {"_target_": "fastvideo.train.methods.fine_tuning.finetune.FineTuneMethod"},
        "training": training,
        # Below the norm, so that it cuts.
        "callbacks": {"grad_clip": {"max_grad_norm": 0.1}},
        "pipeline": {"flow_shift": 3},
    }


def save_model(folder: str) -> None:
    """Weights and configurations as diffusers keeps them, in fp64, none of them with one value throughout."""
    from diffusers import WanTransformer3DModel

    from opensora_accel.observe.on_cpu import prepare_model

    torch.manual_seed(1)
    model = WanTransformer3DModel(**WAN)
    prepare_model(model)
    model.save_pretrained(Path(folder, "transformer"))
    Path(folder, "vae").mkdir()
    parts = {"transformer": ["diffusers", "WanTransformer3DModel"], "vae": ["diffusers", "AutoencoderKLWan"]}
    index = {"_class_name": "WanPipeline", "_diffusers_version": "0", **parts}
    Path(folder, "model_index.json").write_text(json.dumps(index), encoding="utf-8")


def loader_of_tensors(data: Any, **_: Any) -> Any:
    """In the place of the loader of parquet files, with the trainer's batch sampler."""
    from fastvideo.dataset.parquet_dataset_map_style import DP_SP_BatchSampler
    from fastvideo.distributed import get_sp_world_size, get_world_rank, get_world_size
    from torch.utils.data import DataLoader

    def clip(number: int) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(number)
        shapes = {"vae_latent": LATENT, "text_embedding": (7, WAN["text_dim"])}
        drawn = {name: torch.randn(*shape, generator=generator).double() for name, shape in shapes.items()}
        return drawn | {"text_attention_mask": torch.ones(7).double()}

    sampler = DP_SP_BatchSampler(
        batch_size=data.train_batch_size,
        dataset_size=NUM_CLIPS,
        num_sp_groups=get_world_size() // get_sp_world_size(),
        sp_world_size=get_sp_world_size(),
        global_rank=get_world_rank(),
        seed=data.seed,
    )
    return DataLoader([clip(number) for number in range(NUM_CLIPS)], batch_sampler=sampler)


def import_without_assertions(name: str) -> None:
    spec = importlib.util.find_spec(name)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    source = Path(spec.origin).read_text(encoding="utf-8")
    exec(compile(source, spec.origin, "exec", optimize=1), vars(module))


@contextlib.contextmanager
def on_a_cpu_in_fp64() -> Any:
    """The trainer's modules, told that a CPU is a device and fp64 a precision. Its forward runs within."""
    from fastvideo import platforms, utils
    from fastvideo.distributed import parallel_state
    from torch.distributed import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy

    from opensora_accel.precision import LiftOperations

    # In the function itself: others have imported it by its name.
    parallel_state.get_local_torch_device.__code__ = (lambda: torch.device("cpu")).__code__
    attention = "fastvideo.attention.backends.sdpa.SDPABackend"
    platforms.current_platform.get_attn_backend_cls = lambda *_: attention
    import_without_assertions("fastvideo.models.dits.wanvideo")
    from fastvideo.models.loader import fsdp_load

    double = torch.float64
    with (
        mock.patch.dict(utils.PRECISION_TO_TYPE, dict.fromkeys(utils.PRECISION_TO_TYPE, double)),
        mock.patch.object(fsdp_load, "init_device_mesh", lambda _, **shape: init_device_mesh("cpu", **shape)),
        mock.patch.object(
            fsdp_load, "MixedPrecisionPolicy", lambda *_, **__: MixedPrecisionPolicy(double, double)
        ),
        LiftOperations(),
    ):
        yield


def train(checkout: Path, options: dict[str, Any]) -> Steps:
    from transformers.utils import is_torchvision_available

    is_torchvision_available()  # remembers the truth: transformers is to do without
    stand_in(*PACKAGES)
    with on_a_cpu_in_fp64(), tempfile.TemporaryDirectory() as folder:
        from fastvideo.train import trainer
        from fastvideo.train.callbacks import grad_clip
        from fastvideo.train.entrypoint.train import run_training_from_config
        from fastvideo.train.models.wan import wan
        from fastvideo.train.utils import dataloader

        save_model(folder)
        written = Path(folder, "run.yaml")
        written.write_text(json.dumps(configuration(folder)), encoding="utf-8")
        steps, tracker, seen = Steps(), mock.Mock(), {}
        load, clip = wan.load_module_from_path, grad_clip.clip_grad_norm_if_needed
        statistics = types.SimpleNamespace(latents_mean=[0.0] * LATENT[0], latents_std=[1.0] * LATENT[0])

        def load_but_vae(*, module_type: str, **kwargs: Any) -> Any:
            if module_type == "vae":
                return statistics
            seen["model"] = load(module_type=module_type, **kwargs)
            seen["tokens"] = count_tokens(seen["model"].blocks[0].to_q)
            return seen["model"]

        def clip_and_keep(module: torch.nn.Module, max_norm: float) -> float:
            steps.gradients.append(gradients_of(module))
            return clip(module, max_norm)

        empty_prompt = torch.zeros(1, 7, WAN["text_dim"]).double(), torch.ones(1, 7).double()
        with (
            mock.patch.object(trainer, "build_tracker", lambda *_, **__: tracker),
            mock.patch.object(grad_clip, "clip_grad_norm_if_needed", clip_and_keep),
            mock.patch.object(wan, "load_module_from_path", load_but_vae),
            mock.patch.object(wan, "SamplingParam"),
            mock.patch.object(wan, "encode_negative_prompt", lambda *_, **__: empty_prompt),
            mock.patch.object(dataloader, "build_parquet_t2v_train_dataloader", loader_of_tensors),
        ):
            overrides = [f"--training.distributed.{name}={value}" for name, value in options.items()]
            run_training_from_config(str(written), overrides=overrides)
    logged = [call.args[0] for call in tracker.log.call_args_list]
    steps.norms = [each["grad_norm/student"] for each in logged if "grad_norm/student" in each]
    steps.losses = [each["total_loss"] for each in logged if "total_loss" in each]
    steps.weights, steps.tokens = weights_of(seen["model"]), seen["tokens"]()
    return steps


if __name__ == "__main__":
    main(train)
