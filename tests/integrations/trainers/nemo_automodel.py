"""NVIDIA NeMo Automodel's diffusion recipe: its `setup()` and its training loop, two steps of two accumulated batches.

All is the recipe's own: configuration, process group, model from a configuration file, FSDP2 with its checkpoint
wrappers, flow matching with its adapter, loader of random clips, clipping, optimizer. The norms and losses are those
that it hands to wandb. Put in the place of its own are packages that are not installed, the weights, which it draws
anew on each rank, and what follows.

Where `cp_size` is above 1 the recipe seeds each rank by its data rank when the model is built. On one process it does
not, so there the harness does, with the recipe's `StatefulRNG`. A reference for two data ranks sees the clips of both
in one process, each with the generators that its data rank would have.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from tests.integrations.trainers import (
    Case,
    Steps,
    count_tokens,
    gradients_of,
    main,
    stand_in,
    weights_of,
)

ACCUMULATED, STEPS = 2, 2
CASES = {
    "ulysses 2": Case(2, {"cp_size": 2}),
    "ulysses 3": Case(3, {"cp_size": 3}),
    "ring 2": Case(2, {"cp_size": 2, "cp_ring_degree": 2}),
    "ring 3": Case(3, {"cp_size": 3, "cp_ring_degree": 3}),
    "two data ranks of ulysses 2": Case(4, {"cp_size": 2, "data_ranks": 2}, {"data_ranks": 2}),
}
# 5 frames of 5 x 7 patches: 175 tokens, which neither 2 nor 3 ranks divide.
CLIP = {"num_channels": 4, "num_frame_latents": 5, "spatial_h": 10, "spatial_w": 14}
TEXT = {"text_seq_len": 7, "text_embed_dim": 16}
WAN = {
    **{"num_layers": 2, "num_attention_heads": 3, "attention_head_dim": 12, "ffn_dim": 64, "text_dim": 16},
    **{"freq_dim": 32, "in_channels": 4, "out_channels": 4},
}


def config(folder: str, data_ranks: int, parallel: dict[str, int]) -> dict[str, Any]:
    """What `config.yaml` says."""
    parts = "nemo_automodel.components.datasets.diffusion"
    return {
        "seed": 5,
        "dist_env": {"backend": "gloo"},
        "model": {
            "pretrained_model_name_or_path": folder,
            "mode": "pretrain",
            "torch_dtype": "float64",
            "compute_dtype": "float64",
            "pipeline_spec": {"transformer_cls": "WanTransformer3DModel"},
        },
        "step_scheduler": {
            "global_batch_size": ACCUMULATED * data_ranks,
            "local_batch_size": 1,
            "max_steps": STEPS,
            "num_epochs": 1,
        },
        "data": {
            "dataloader": {
                "_target_": f"{parts}.mock_dataloader.build_mock_dataloader",
                "length": 8 * data_ranks,
                "shuffle": False,
                **CLIP,
                **TEXT,
            }
        },
        "optimizer": {"_target_": "torch.optim.AdamW", "lr": 1e-2},
        # Below the norm, so that it cuts.
        "clip_grad_norm": {"max_norm": 0.1},
        "fsdp": {"reduce_dtype": "float64", **parallel},
        "checkpoint": {"enabled": False, "checkpoint_dir": f"{folder}/checkpoints"},
    }


class DataRanks:
    """The clips and the draws of several data ranks, one after another in one process.

    Args:
        states: of each data rank, what the recipe's `generators` are before the first draw.
    """

    def __init__(self, recipe: Any, generators: Any, states: list[Any]):
        self._loader, self._generators, self._states = recipe.dataloader, generators, states
        self._step = recipe.flow_matching_pipeline.step
        self._microbatch = 0

    @contextlib.contextmanager
    def _drawing(self, rank: int) -> Iterator[None]:
        self._generators.load_state_dict(self._states[rank])
        yield
        self._states[rank] = self._generators.state_dict()

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        """Of each data rank the batches that it accumulates, then of the next."""
        iterators = []
        for rank in range(len(self._states)):
            with self._drawing(rank):
                iterators.append(iter(self._loader))
        for _ in range(STEPS):
            for rank, iterator in enumerate(iterators):
                for _ in range(ACCUMULATED):
                    with self._drawing(rank):
                        batch = next(iterator)
                    yield batch

    def step(self, *args: Any, **kwargs: Any) -> Any:
        rank = self._microbatch // ACCUMULATED % len(self._states)
        self._microbatch += 1
        with self._drawing(rank):
            return self._step(*args, **kwargs)


def weights_alike(build: Callable[..., Any]) -> Callable[..., Any]:
    """`from_config` that gives the same weights on every rank, none of them with one value throughout."""
    from opensora_accel.observe.on_cpu import prepare_model

    def built(*args: Any, **kwargs: Any) -> Any:
        with torch.random.fork_rng():
            torch.manual_seed(1)
            model = build(*args, **kwargs)
        prepare_model(model)
        return model

    return built


def train(checkout: Path, options: dict[str, Any]) -> Steps:
    run = mock.Mock()
    stand_in(
        "wandb",
        "mlflow",
        "megatron_fsdp",
        "torchao",
        "datasets",
        given={"wandb.run": run, "wandb.log": run.log},
    )
    from diffusers import WanTransformer3DModel
    from nemo_automodel.components.config.loader import ConfigNode
    from nemo_automodel.components.training.rng import StatefulRNG
    from nemo_automodel.recipes.diffusion import train as recipes

    from opensora_accel.precision import LiftOperations

    data_ranks = options.pop("data_ranks", 1)
    steps, clip = Steps(), recipes.clip_grad_norm

    def clip_and_keep(max_norm: float, models: list[Any], **kwargs: Any) -> Any:
        steps.gradients.append(gradients_of(models[0]))
        return clip(max_norm, models, **kwargs)

    build = mock.patch.object(
        WanTransformer3DModel, "from_config", weights_alike(WanTransformer3DModel.from_config)
    )
    with (
        tempfile.TemporaryDirectory() as folder,
        build,
        mock.patch.object(recipes, "clip_grad_norm", clip_and_keep),
        LiftOperations(),
    ):
        WanTransformer3DModel(**WAN).save_config(Path(folder, "transformer"))
        recipe = recipes.TrainDiffusionRecipe(ConfigNode(config(folder, data_ranks, options)))
        recipe.setup()
        if recipe.cp_size == 1:
            states = [StatefulRNG(recipe.seed + rank).state_dict() for rank in range(data_ranks)]
            dealt = DataRanks(recipe, recipe.rng, states)
            recipe.dataloader, recipe.flow_matching_pipeline.step = dealt, dealt.step
        tokens = count_tokens(recipe.model.blocks[0].attn1.to_q)
        recipe.run_train_validation_loop()
    logged = [call.args[0] for call in run.log.call_args_list if "grad_norm" in call.args[0]]
    steps.norms = [each["grad_norm"] for each in logged]
    if data_ranks == 1:  # of rank 0's own clips
        steps.losses = [each["train_loss"] for each in logged]
    steps.weights, steps.tokens = weights_of(recipe.model), tokens()
    return steps


if __name__ == "__main__":
    main(train)
