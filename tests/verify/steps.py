"""Training steps small enough to be verified a hundred times: nothing in them divides evenly.

Letters: B batch, S tokens, T frames, C channels.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from opensora_accel import Plan, init_parallel
from opensora_accel.attention import (
    joint_attention,
    local_attention,
    ring_attention,
    switch_sharded_dim,
    ulysses_attention,
    usp_attention,
)
from opensora_accel.attention.balance import rearrange, restore
from opensora_accel.communications import (
    copy_forward_reduce_backward,
    gather_forward_reduce_scatter_backward,
    gather_forward_split_backward,
    reduce_forward_copy_backward,
    reduce_scatter_forward_gather_backward,
    ring_exchange,
    share_sizes,
    split_forward_gather_backward,
)
from opensora_accel.parallel_states import get_parallel_group
from opensora_accel.verify.meshes import Run
from shardformer.policy.base import Blocks, GatherOutput, Policy, SplitInput, SplitOutput
from tests.verify.defects import Patch

CHANNELS, HEADS, TOKENS, BATCH = 12, 3, 11, 2
ATTENTION = {"ulysses": ulysses_attention, "ring": ring_attention, "usp": usp_attention}

Move = Callable[[Tensor], Tensor]
"""Identity on one device; on ranks, what leads into or out of a region whose tokens are spread."""


def draw(run: Run, *shape: int, purpose: int = 0) -> Tensor:
    """What belongs to the data rank's samples."""
    generator = torch.Generator().manual_seed(100 * purpose + run.data_rank)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def averaged(model: nn.Module) -> nn.Module:
    """Gradients averaged over data × sequence, as every trainer here does."""
    group = get_parallel_group("mixed")
    return DistributedDataParallel(model, process_group=group) if group.size() > 1 else model


def identity(tensor: Tensor) -> Tensor:
    return tensor


class Region(nn.Module):
    """Linear → a region whose tokens may be spread over ranks → linear."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.head = nn.Linear(CHANNELS, CHANNELS), nn.Linear(CHANNELS, CHANNELS)
        self.split: Move = identity
        self.gather: Move = identity

    def spread(self) -> None:
        """Over the registered sequence group."""
        group = get_parallel_group("sequence")
        self.split = lambda x: split_forward_gather_backward(x, group, 1, "down")
        self.gather = lambda x: gather_forward_split_backward(x, group, 1, "up")


class Attention(nn.Module):
    """Queries, keys and values of [B, S, C]; how they meet is the caller's choice."""

    def __init__(self, heads: int = HEADS, kv_heads: int | None = None):
        super().__init__()
        self.head_dim = CHANNELS // heads
        width = self.head_dim * (kv_heads or heads)
        self.norm = nn.LayerNorm(CHANNELS)
        self.to_q = nn.Linear(CHANNELS, CHANNELS)
        # A bias of the keys would have no gradient: softmax does not see it.
        self.to_k = nn.Linear(CHANNELS, width, bias=False)
        self.to_v = nn.Linear(CHANNELS, width)
        self.to_out = nn.Linear(CHANNELS, CHANNELS)

    def project(self, tokens: Tensor) -> list[Tensor]:
        normed = self.norm(tokens)
        return [p(normed).unflatten(-1, (-1, self.head_dim)) for p in (self.to_q, self.to_k, self.to_v)]

    def join(self, tokens: Tensor, attended: Tensor) -> Tensor:
        return tokens + self.to_out(attended.flatten(-2))

    def forward(self, tokens: Tensor, attend: Callable[..., Tensor]) -> Tensor:
        return self.join(tokens, attend(*self.project(tokens)))


class OneLayer(Region):
    def __init__(self, heads: int = HEADS, kv_heads: int | None = None):
        super().__init__()
        self.attention = Attention(heads, kv_heads)
        self.attend: Callable[..., Tensor] = local_attention

    def forward(self, tokens: Tensor) -> Tensor:
        tokens = self.attention(self.split(self.enter(tokens)), self.attend)
        return self.head(self.gather(tokens))


@dataclass(frozen=True)
class AttentionStep:
    """One layer of ulysses, ring or both, by hand: split down, attend, gather up, mean over the group."""

    kind: str = "usp"
    heads: int = HEADS
    kv_heads: int | None = None
    tokens: int = TOKENS
    causal: bool = False
    masked: bool = False
    layout: Any = "contiguous"
    gather_free: bool = False
    """The loss is the rank's own, over its own tokens, with global counts."""

    def model(self) -> nn.Module:
        return OneLayer(self.heads, self.kv_heads)

    def __call__(self, model: OneLayer, run: Run) -> Tensor:
        tokens = draw(run, BATCH, self.tokens, CHANNELS)
        target = draw(run, BATCH, self.tokens, CHANNELS, purpose=1)
        mask = draw(run, BATCH, self.tokens, purpose=2) > -0.7 if self.masked else None
        forward: nn.Module = model
        weight = 1 / target.numel()
        model.attend = partial(local_attention, mask=mask, causal=self.causal)
        if not run.is_reference:
            init_parallel(run.plan)
            forward = averaged(model)
            self._spread(model, run.plan, mask)
            if self.gather_free:
                model.gather, weight = identity, weight * run.plan.sequence
                target = self._share(rearrange(target, run.plan.ring, self.layout))
        loss = (forward(tokens) - target).square().sum() * weight
        loss.backward()
        return loss.detach()

    def _spread(self, model: OneLayer, plan: Plan, mask: Tensor | None) -> None:
        model.spread()
        split, gather = model.split, model.gather
        model.split = lambda x: split(rearrange(x, plan.ring, self.layout))
        model.gather = lambda x: restore(gather(x), plan.ring, self.layout)
        options: dict[str, Any] = {"causal": self.causal}
        if mask is not None:
            options["mask"] = self._share(mask)
        if self.kind != "ulysses":
            options["layout"] = self.layout
        model.attend = partial(ATTENTION[self.kind], **options)

    def _share(self, tensor: Tensor) -> Tensor:
        group = get_parallel_group("sequence")
        return tensor.tensor_split(group.size(), 1)[group.rank()]


class JointModel(Region):
    """Two streams that meet in attention: video, which may be spread, and text, which is whole everywhere."""

    def __init__(self, heads: int = HEADS) -> None:
        super().__init__()
        self.video, self.text = Attention(heads), Attention(heads)
        self.attend: Callable[..., tuple[Tensor, Tensor]] = _attend_jointly

    def forward(self, tokens: Tensor, text: Tensor) -> tuple[Tensor, Tensor]:
        tokens = self.split(self.enter(tokens))
        for _ in range(2):  # the same weights twice: text of the first round meets video in the second
            out, text_out = self.attend(*self.video.project(tokens), *self.text.project(text))
            tokens, text = self.video.join(tokens, out), self.text.join(text, text_out)
        return self.head(self.gather(tokens)), text


def _attend_jointly(q: Tensor, k: Tensor, v: Tensor, *text: Tensor) -> tuple[Tensor, Tensor]:
    out = local_attention(*(torch.cat(pair, 1) for pair in zip(text, (q, k, v), strict=True)))
    num_text = text[0].size(1)
    return out[:, num_text:], out[:, :num_text]


@dataclass(frozen=True)
class JointStep:
    text_tokens: int = 5
    heads: int = HEADS
    tokens: int = TOKENS

    def model(self) -> nn.Module:
        return JointModel(self.heads)

    def __call__(self, model: JointModel, run: Run) -> Tensor:
        forward: nn.Module = model
        if not run.is_reference:
            init_parallel(run.plan)
            forward = averaged(model)
            model.spread()
            model.attend = joint_attention
        video, text = forward(
            draw(run, BATCH, self.tokens, CHANNELS), draw(run, BATCH, self.text_tokens, CHANNELS, purpose=1)
        )
        loss = (video - draw(run, *video.shape, purpose=2)).square().mean() + text.square().mean()
        loss.backward()
        return loss.detach()


class Factorised(Region):
    """Frames attend along space, places along time; [B, T, S, C]."""

    def __init__(self) -> None:
        super().__init__()
        self.space, self.time = Attention(), Attention()
        self.to_places: Move = identity
        self.to_frames: Move = identity

    def forward(self, clip: Tensor) -> Tensor:
        clip = self.split(self.enter(clip))
        for _ in range(2):
            places = self.to_places(_along(self.space, clip))
            clip = self.to_frames(_along(self.time, places.transpose(1, 2)).transpose(1, 2))
        return self.head(self.gather(clip))


def _along(attention: Attention, tokens: Tensor) -> Tensor:
    return attention(tokens.flatten(0, 1), local_attention).view(tokens.shape)


@dataclass(frozen=True)
class FactorisedStep:
    frames: int = 5
    places: int = 7

    def model(self) -> nn.Module:
        return Factorised()

    def __call__(self, model: Factorised, run: Run) -> Tensor:
        forward: nn.Module = model
        if not run.is_reference:
            init_parallel(run.plan)
            forward = averaged(model)
            model.spread()
            model.to_places = partial(switch_sharded_dim, from_dim=1, to_dim=2)
            model.to_frames = partial(switch_sharded_dim, from_dim=2, to_dim=1)
        clip = forward(draw(run, BATCH, self.frames, self.places, CHANNELS))
        loss = (clip - draw(run, *clip.shape, purpose=1)).square().mean()
        loss.backward()
        return loss.detach()


class Shifted(Region):
    """Every token sees the one before it, the first one the last: what a convolution in time asks of neighbours."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(CHANNELS, CHANNELS)
        self.last_of_previous: Move = identity

    def forward(self, tokens: Tensor) -> Tensor:
        tokens = self.split(self.enter(tokens))
        before = torch.cat([self.last_of_previous(tokens[:, -1:]), tokens[:, :-1]], 1)
        return self.head(self.gather(tokens + self.before(before).tanh()))


@dataclass(frozen=True)
class ShiftStep:
    def model(self) -> nn.Module:
        return Shifted()

    def __call__(self, model: Shifted, run: Run) -> Tensor:
        forward: nn.Module = model
        if not run.is_reference:
            init_parallel(run.plan)
            forward = averaged(model)
            model.spread()
            model.last_of_previous = lambda x: ring_exchange(x, get_parallel_group("sequence"))
        tokens = forward(draw(run, BATCH, TOKENS, CHANNELS))
        loss = (tokens - draw(run, *tokens.shape, purpose=1)).square().mean()
        loss.backward()
        return loss.detach()


class Megatron(Region):
    """An MLP whose hidden channels may be spread over ranks: a column-parallel and a row-parallel layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(CHANNELS)
        self.up, self.down = nn.Linear(CHANNELS, 7), nn.Linear(7, CHANNELS, bias=False)
        self.hidden = slice(None)
        self.into_columns: Move = identity
        self.out_of_rows: Move = identity

    def forward(self, tokens: Tensor) -> Tensor:
        tokens = self.split(self.enter(tokens))
        columns = self.into_columns(self.norm(tokens))
        hidden = F.linear(columns, self.up.weight[self.hidden], self.up.bias[self.hidden]).tanh()
        tokens = tokens + self.out_of_rows(F.linear(hidden, self.down.weight[:, self.hidden]))
        return self.head(self.gather(tokens))


@dataclass(frozen=True)
class MegatronStep:
    """Axes `data` and `tensor`; every rank holds whole weights and works with its slice."""

    sequence_parallel: bool = False

    def model(self) -> nn.Module:
        return Megatron()

    def __call__(self, model: Megatron, run: Run) -> dict[str, Any]:
        if not run.is_reference:
            self._spread(model, run)
        tokens = model(draw(run, BATCH, TOKENS, CHANNELS))
        loss = (tokens - draw(run, *tokens.shape, purpose=1)).square().mean()
        loss.backward()
        if run.is_reference:
            return {"loss": loss}
        return {"loss": loss, "gradients": self._gradients(model, run)}

    def _spread(self, model: Megatron, run: Run) -> None:
        group = run.mesh.get_group("tensor")
        sizes = share_sizes(7, group.size())
        start = sum(sizes[: group.rank()])
        model.hidden = slice(start, start + sizes[group.rank()])
        if not self.sequence_parallel:
            model.into_columns = lambda x: copy_forward_reduce_backward(x, group)
            model.out_of_rows = lambda x: reduce_forward_copy_backward(x, group)
            return
        model.split = lambda x: split_forward_gather_backward(x, group, 1)
        model.gather = lambda x: gather_forward_split_backward(x, group, 1)
        model.into_columns = lambda x: gather_forward_reduce_scatter_backward(x, group, 1)
        model.out_of_rows = lambda x: reduce_scatter_forward_gather_backward(x, group, 1)

    def _gradients(self, model: Megatron, run: Run) -> dict[str, Tensor]:
        """Averaged over data; of what a rank holds a slice of, or has seen a part of the tokens of, summed."""
        spread = ("up", "down", "norm") if self.sequence_parallel else ("up", "down")
        found = {}
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            found[name] = parameter.grad.clone()
            if name.startswith(spread):
                dist.all_reduce(found[name], group=run.mesh.get_group("tensor"))
            dist.all_reduce(found[name], group=run.mesh.get_group("data"))
            found[name] /= run.shape.data_size
        return found


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
        from opensora_accel.training.build import parallelize

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
    from torch.distributed.fsdp import fully_shard

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
    """Of `tests.models`: image, per_token_time."""
    size: tuple[int, int, int] = (3, 2, 10)
    """15 tokens."""

    def model(self) -> nn.Module:
        from tests.models import wan

        return wan(image="image" in self.options)

    def __call__(self, model: nn.Module, run: Run) -> Tensor:
        from opensora_accel.training.build import parallelize
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
    """Of the configuration, by full name."""

    def __call__(self, run: Run) -> dict[str, float]:
        from opensora_accel.training.loop import Trainer
        from opensora_accel.training.tiny_run import told_by_all
        from tests.training.runs import tiny_config

        changes = {"data.num_workers": 0, "optim.accumulation": self.accumulation, **dict(self.changes)}
        trainer = Trainer(tiny_config(self.folder, self.folder / "out", run.plan, **changes))
        run.watch(trainer.state.model)
        return told_by_all(trainer.step())
