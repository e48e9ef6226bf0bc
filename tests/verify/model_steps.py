"""Training steps of whole models: a video transformer in miniature, Wan, and the trainer's own step.

Letters: B batch, S tokens, C channels.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

from opensora_accel import init_parallel
from opensora_accel.observe.meshes import Run
from shardformer.policy.base import Blocks, GatherOutput, Policy, SplitInput, SplitOutput
from tests.verify.defects import Patch
from tests.verify.steps import BATCH, CHANNELS, TOKENS, Attention, draw


class Kernel(Attention):
    """Attention that ends in torch's own, to be led elsewhere from outside."""

    def forward(self, tokens: Tensor, text: Tensor | None) -> Tensor:  # type: ignore[override]
        q, k, v = self.project(tokens)
        if text is not None:
            _, k, v = self.project(text)
        out = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)))
        return self.join(tokens, out.transpose(1, 2))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.self_attention, self.cross_attention = Kernel(), Kernel()
        self.mlp = nn.Sequential(nn.Linear(CHANNELS, 16), nn.GELU(), nn.Linear(16, CHANNELS))

    def forward(self, hidden_states: Tensor, positions: Tensor, text: Tensor, time: Tensor) -> Tensor:
        hidden_states = self.self_attention(hidden_states + positions, None)
        hidden_states = self.cross_attention(hidden_states, text)
        return hidden_states + self.mlp(hidden_states) * time[:, None]


class Positions(nn.Module):
    """Learned places, from a few frequencies."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(4, CHANNELS)

    def forward(self, num_tokens: int) -> Tensor:
        at = torch.arange(num_tokens, dtype=self.project.weight.dtype)
        waves = torch.stack([(at * 0.3).sin(), (at * 0.3).cos(), (at * 0.1).sin(), (at * 0.1).cos()], -1)
        return self.project(waves)[None]


class TinyDiT(nn.Module):
    """A video transformer in miniature, single-device: time, places, text, two blocks, a head."""

    dtype = torch.float64

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.time = nn.Linear(5, CHANNELS), nn.Linear(1, CHANNELS)
        self.positions = Positions()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm_out, self.head = nn.LayerNorm(CHANNELS), nn.Linear(CHANNELS, 5)

    def forward(self, hidden_states: Tensor, timestep: Tensor, text: Tensor) -> Tensor:
        time = self.time(timestep[:, None])
        positions = self.positions(hidden_states.size(1))
        hidden_states = self.patches(hidden_states)
        for block in self.blocks:
            hidden_states = block(hidden_states, positions, text, time)
        return self.head(self.norm_out(hidden_states)).clone()  # FSDP2 warns of views


TINY_POLICY = Policy(
    models=("TinyDiT",),
    split_outputs=(SplitOutput("positions"),),
    split_inputs=(SplitInput("blocks.0", "hidden_states"),),
    gather_outputs=(GatherOutput("norm_out"),),
    self_attention=("blocks.*.self_attention",),
    blocks=(Blocks("blocks"),),
    mlps=("blocks.*.mlp",),
)


@dataclass(frozen=True)
class DiTStep:
    """As the trainer does it: a policy applied from outside, DDP or FSDP2, some accumulated batches."""

    accumulation: int = 1
    policy: Policy = TINY_POLICY
    tokens: int = TOKENS
    divisor: str = ""
    """By which product of the plan's degrees FSDP2 divides gradients; by default its own choice stays."""

    def model(self) -> nn.Module:
        return TinyDiT()

    def __call__(self, model: nn.Module, run: Run) -> Tensor:
        from shardformer import parallelize

        forward: Any = model
        if not run.is_reference:
            init_parallel(run.plan)
            # The trainer's own function takes no policy: it looks one up by the model's class.
            with Patch("shardformer.policy:find_policy", lambda _original, _model: self.policy).applied():
                model, forward = parallelize(model, run.plan, torch.device("cpu"))
            if self.divisor:
                factor = math.prod(getattr(run.plan, name, 1) for name in self.divisor.split(" * "))
                for module in model.modules():
                    if isinstance(module, FSDPModule):
                        module.set_gradient_divide_factor(float(factor))
        total = torch.zeros(())
        for micro in range(self.accumulation):
            loss = _dit_loss(forward, run, self.tokens, micro) / self.accumulation
            loss.backward()
            total += loss.detach()
        return total


def _dit_loss(forward: Callable[..., Tensor], run: Run, num_tokens: int, micro: int) -> Tensor:
    clean = draw(run, BATCH, num_tokens, 5, purpose=3 * micro)
    time = draw(run, BATCH, purpose=3 * micro + 1)
    text = draw(run, BATCH, 7, CHANNELS, purpose=3 * micro + 2)
    return (forward(clean, time, text) - clean).square().mean()


def plain_step(model: nn.Module, run: Run) -> Tensor:
    """Data parallel only, by torch's own means: DDP, or FSDP2 where the plan shards."""
    forward: nn.Module = model
    if not run.is_reference and run.plan.sharding == "none":
        forward = DistributedDataParallel(model)
    elif not run.is_reference:
        fully_shard(model, mesh=init_parallel(run.plan)["dp_shard"])
    loss = _dit_loss(forward, run, TOKENS, 0)
    loss.backward()
    return loss.detach()


@dataclass(frozen=True)
class WanStep:
    """The smallest Wan of the tests, by its own policy."""

    options: tuple[str, ...] = ()
    """Options of `tests.models`: image, per_token_time."""
    size: tuple[int, int, int] = (3, 2, 10)
    """15 tokens."""

    def model(self) -> nn.Module:
        from tests.models import wan

        return wan(image="image" in self.options)

    def __call__(self, model: nn.Module, run: Run) -> Tensor:
        from shardformer import parallelize
        from tests.models import wan_inputs

        forward: Any = model
        if not run.is_reference:
            init_parallel(run.plan)
            model, forward = parallelize(model, run.plan, torch.device("cpu"))
        frames, height, width = self.size
        options: dict[str, Any] = dict.fromkeys(self.options, True)
        inputs = wan_inputs(frames=frames, height=height, width=width, **options)
        inputs["hidden_states"] = draw(run, *inputs["hidden_states"].shape)
        prediction = forward(**inputs, return_dict=False)[0]
        loss = (prediction - draw(run, *prediction.shape, purpose=1)).square().mean()
        loss.backward()
        return loss.detach()


@dataclass(frozen=True)
class TrainerStep:
    """The real thing: a Trainer on real files, one optimizer step. To be verified with reference="whole"."""

    folder: Path
    accumulation: int = 1
    changes: tuple[tuple[str, Any], ...] = ()
    """Values of the configuration, by full name."""

    def __call__(self, run: Run) -> dict[str, float]:
        from opensora_accel.training.loop import Trainer
        from opensora_accel.training.tiny_run import compared_between_ranks
        from tests.training.runs import tiny_config

        changes = {"data.num_workers": 0, "optim.accumulation": self.accumulation, **dict(self.changes)}
        trainer = Trainer(tiny_config(self.folder, self.folder / "out", run.plan, **changes))
        run.watch(trainer.state.model)
        return compared_between_ranks(trainer.step())
