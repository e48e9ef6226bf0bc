"""Layers in training steps, small enough to be verified a hundred times: nothing in them divides evenly.

Letters: B batch, S tokens, T frames, C channels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
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
from opensora_accel.observe.meshes import Run
from opensora_accel.parallel_states import get_parallel_group

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
class RegionStep:
    """A region's step by hand: split down, gather up, gradients averaged, the mean of squares as its loss."""

    def model(self) -> Any:
        raise NotImplementedError

    def shapes(self) -> list[tuple[int, ...]]:
        """The shapes of what goes in."""
        return [(BATCH, TOKENS, CHANNELS)]

    def spread(self, model: Any) -> None:
        """What stands between the split and the gather, on ranks."""

    def __call__(self, model: Any, run: Run) -> Tensor:
        forward: nn.Module = model
        if not run.is_reference:
            init_parallel(run.plan)
            forward = averaged(model)
            model.spread()
            self.spread(model)
        given = [draw(run, *shape, purpose=purpose) for purpose, shape in enumerate(self.shapes())]
        found = forward(*given)
        found, *others = found if isinstance(found, tuple) else (found,)
        loss = (found - draw(run, *found.shape, purpose=len(given))).square().mean()
        loss = loss + sum(other.square().mean() for other in others)
        loss.backward()
        return loss.detach()


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
class JointStep(RegionStep):
    text_tokens: int = 5
    heads: int = HEADS
    tokens: int = TOKENS

    def model(self) -> JointModel:
        return JointModel(self.heads)

    def shapes(self) -> list[tuple[int, ...]]:
        return [(BATCH, self.tokens, CHANNELS), (BATCH, self.text_tokens, CHANNELS)]

    def spread(self, model: JointModel) -> None:
        model.attend = joint_attention


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
class FactorisedStep(RegionStep):
    frames: int = 5
    places: int = 7

    def model(self) -> Factorised:
        return Factorised()

    def shapes(self) -> list[tuple[int, ...]]:
        return [(BATCH, self.frames, self.places, CHANNELS)]

    def spread(self, model: Factorised) -> None:
        model.to_places = partial(switch_sharded_dim, from_dim=1, to_dim=2)
        model.to_frames = partial(switch_sharded_dim, from_dim=2, to_dim=1)


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
class ShiftStep(RegionStep):
    def model(self) -> Shifted:
        return Shifted()

    def spread(self, model: Shifted) -> None:
        model.last_of_previous = lambda x: ring_exchange(x, get_parallel_group("sequence"))


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
