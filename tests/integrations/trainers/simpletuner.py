"""SimpleTuner's `Trainer` and its `train()`: two steps of two accumulated batches of its own Wan.

All is the trainer's own: configuration, accelerator and topology, loading, adapters, freezing, optimizer, scheduler,
`resume_and_prepare`, and the loop with the synchronizer of batches and draws, losses, backward and clipping. The norms
and losses are those that it logs. The loop ends when the second step is logged, before anything is saved.

Put in the place of its own: packages that are not installed, and its data backends, of which one stands there that
deals clips of random latents to data ranks. Of its model families Wan alone is known, as it imports all of them to know
their options. accelerate takes its FSDP2 plugin where there is an accelerator, and here on CPUs, too.

Where `context_parallel_size` is above 1 draws are seeded by data rank and step. On one process they are not, so there
the harness does that. A reference for two data ranks accumulates the clips of both, with the draws of both.
"""

from __future__ import annotations

import contextlib
import os
import random
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from tests.integrations.trainers import Case, Steps, count_tokens, gradients_of, main, stand_in, weights_of

LORA = {"model_type": "lora", "lora_rank": 4, "gradient_checkpointing": True}
FSDP2 = {"fsdp_enable": True, "fsdp_version": 2, "fsdp_transformer_layer_cls_to_wrap": "WanTransformerBlock"}
ALL_TO_ALL = {"context_parallel_size": 2, "context_parallel_comm_strategy": "alltoall"}
CASES = {
    "alltoall 2, DDP": Case(2, ALL_TO_ALL),
    "allgather 3, DDP": Case(3, {"context_parallel_size": 3, "context_parallel_comm_strategy": "allgather"}),
    "alltoall 2, FSDP2": Case(2, ALL_TO_ALL | FSDP2),
    "two data ranks of alltoall 2, FSDP2": Case(4, ALL_TO_ALL | FSDP2 | {"data_ranks": 2}, {"data_ranks": 2}),
    "alltoall 2, DDP, LoRA": Case(2, ALL_TO_ALL | LORA, LORA),
}
PACKAGES = (
    *(
        "atomicwrites",
        "boto3",
        "botocore",
        "einops",
        "fastapi",
        "ftfy",
        "hangul_romanize",
        "imageio",
        "loguru",
    ),
    *("music_vocoder", "num2words", "pandas", "py3langid", "pypinyin", "scipy", "skrample", "spacy", "toml"),
    *("torchaudio", "torchvision", "trainingsample", "wandb"),
)
WAN = {
    **{"num_layers": 2, "num_attention_heads": 3, "attention_head_dim": 12, "ffn_dim": 64, "text_dim": 16},
    **{"freq_dim": 32, "in_channels": 4, "out_channels": 4},
}
ACCUMULATED, STEPS, SEED = 2, 2, 5
# 5 frames of 5 x 7 patches: 175 tokens, which neither 2 nor 3 ranks divide.
LATENT = (4, 5, 10, 14)


class Finished(BaseException):
    """The last step was logged. Not an Exception, as the trainer ignores those there."""


class Clips:
    """The loader of a data backend: every `iter` goes on where the last one was."""

    def __init__(self, rank: int, num_ranks: int):
        self._next, self._num_ranks = rank, num_ranks

    def __iter__(self) -> Clips:
        return self

    def __next__(self) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(self._next)
        self._next += self._num_ranks
        latents = torch.randn(1, *LATENT, generator=generator).double()
        return {
            "latent_batch": latents,
            "prompt_embeds": torch.randn(1, 7, WAN["text_dim"], generator=generator).double(),
            "data_backend_id": "clips",
        }


@contextlib.contextmanager
def seeded_by_step(data_ranks: int) -> Iterator[None]:
    """Within it one process draws for its batches what so many data ranks draw for theirs, one after another."""
    from simpletuner.helpers.data_backend.runtime.context_parallel_sync import (
        ContextParallelBatchSynchronizer,
    )

    @contextlib.contextmanager
    def draws(_synchronizer: Any, base_seed: int, step: int) -> Iterator[None]:
        with torch.random.fork_rng():
            # Those of data rank r in step s are seeded with base + s * data_ranks + r.
            random.seed(base_seed + step - 1 + data_ranks)
            torch.manual_seed(base_seed + step - 1 + data_ranks)
            yield

    with mock.patch.object(ContextParallelBatchSynchronizer, "synchronized_rng", draws):
        yield


def save_model(folder: str) -> None:
    """Weights in fp64, none of them with one value throughout, and configurations, as diffusers keeps them."""
    from diffusers import FlowMatchEulerDiscreteScheduler
    from simpletuner.helpers.models.wan.transformer import WanTransformer3DModel

    from opensora_accel.observe.on_cpu import prepare_model

    torch.manual_seed(1)
    model = WanTransformer3DModel(**WAN)
    prepare_model(model)
    model.save_pretrained(Path(folder, "transformer"))
    FlowMatchEulerDiscreteScheduler().save_pretrained(Path(folder, "scheduler"))


def make_trainer(folder: str, options: dict[str, Any], accumulated: int) -> Any:
    from simpletuner.helpers.training.trainer import Trainer

    given = {
        **{"model_family": "wan", "model_type": "full", "pretrained_model_name_or_path": folder},
        **{"output_dir": f"{folder}/out", "data_backend_config": f"{folder}/none.json", "report_to": "none"},
        **{"mixed_precision": "no", "seed": SEED, "train_batch_size": 1, "max_train_steps": STEPS},
        **{"num_train_epochs": 0, "gradient_accumulation_steps": accumulated, "lr_scheduler": "constant"},
        # The norm is above, so that it cuts.
        **{
            "optimizer": "torch-adamw",
            "learning_rate": 1e-2,
            "grad_clip_method": "norm",
            "max_grad_norm": 0.1,
        },
        "validation_disable": True,
        **options,
    }
    with mock.patch.object(sys, "argv", ["train.py"]):
        trainer = Trainer(
            {f"--{name}": value for name, value in given.items()} | {"__skip_config_fallback__": True}
        )
    trainer.config.weight_dtype = torch.float64
    return trainer


def train(checkout: Path, options: dict[str, Any]) -> Steps:
    from transformers.utils import is_torchvision_available

    is_torchvision_available()  # remembers the truth: transformers is to do without
    stand_in(*PACKAGES)
    from simpletuner.helpers.models.registry import ModelRegistry

    ModelRegistry._load_metadata()
    ModelRegistry._metadata = {"wan": ModelRegistry._metadata["wan"]}
    from simpletuner.helpers.training.state_tracker import StateTracker

    from opensora_accel.observe.on_cpu import prepare_model
    from opensora_accel.precision import LiftOperations
    from tests.integrations.test_accelerate import fsdp_on_cpu

    os.environ["ACCELERATE_USE_CPU"] = "true"
    data_ranks = options.pop("data_ranks", 1)
    group = options.get("context_parallel_size", 1)
    steps, clip = Steps(), torch.nn.utils.clip_grad_norm_

    def clip_and_keep(*args: Any, **kwargs: Any) -> torch.Tensor:
        steps.gradients.append(gradients_of(trainer.model.model))
        return clip(*args, **kwargs)

    def keep_logged(logged: dict[str, Any], step: int) -> None:
        steps.losses.append(float(logged["train_loss"]))
        steps.norms.append(float(logged["grad_norm"]))
        if step == STEPS:
            raise Finished

    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as within:
        within.enter_context(fsdp_on_cpu())
        within.enter_context(LiftOperations())
        save_model(folder)
        trainer = make_trainer(folder, options, ACCUMULATED * (data_ranks if group == 1 else 1))
        if group == 1:
            within.enter_context(seeded_by_step(data_ranks))
        clips = Clips(trainer.accelerator.process_index // group, data_ranks if group > 1 else 1)
        size = {"metadata_backend": range(64), "sampler": range(64)}
        StateTracker.register_data_backend(
            {"id": "clips", "train_dataloader": clips, "dataset_type": "video", "config": {}, **size}
        )
        trainer.init_seed()
        trainer.init_huggingface_hub()
        trainer.init_load_base_model()
        trainer.init_precision()
        trainer.init_freeze_models()
        trainer.init_trainable_peft_adapter()
        prepare_model(trainer.model.model)  # of an adapter one half is 0
        tokens = count_tokens(trainer.model.model.blocks[0].attn1.to_q)
        trainer.move_models(destination="accelerator")
        trainer.init_validations()
        trainer.resume_and_prepare()
        within.enter_context(mock.patch.object(torch.nn.utils, "clip_grad_norm_", clip_and_keep))
        within.enter_context(mock.patch.object(trainer.accelerator, "log", keep_logged))
        within.enter_context(contextlib.suppress(Finished))
        trainer.train()
    steps.weights, steps.tokens = weights_of(trainer.model.model), tokens()
    return steps


if __name__ == "__main__":
    main(train)
