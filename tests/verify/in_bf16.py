"""Steps that are right in fp64 and round more on ranks than on one device in bf16, and right ones beside them."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from opensora_accel.attention import ring_attention, ulysses_attention
from opensora_accel.communications import (
    copy_forward_reduce_backward,
    gather_forward_reduce_scatter_backward,
    gather_forward_split_backward,
    reduce_forward_copy_backward,
    split_forward_gather_backward,
)
from opensora_accel.observe.meshes import Run

HEADS, HEAD_DIM, TOKENS = 4, 8, 48
Attend = Callable[..., Tensor]


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(*(each.transpose(1, 2) for each in (q, k, v))).transpose(1, 2)


def through(dtype: torch.dtype, tensor: Tensor) -> Tensor:
    """Rounded on its way, and its gradient not."""
    return tensor + (tensor.to(dtype).to(tensor.dtype) - tensor).detach()


class Block(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.norm, self.wide, self.back = (
            nn.LayerNorm(width),
            nn.Linear(width, 2 * width),
            nn.Linear(2 * width, width),
        )

    def forward(self, x: Tensor, attend: Attend, normalise: Callable[[nn.Module, Tensor], Tensor]) -> Tensor:
        y = normalise(self.norm, x)
        q, k, v = (project(y).unflatten(-1, (HEADS, HEAD_DIM)) for project in (self.q, self.k, self.v))
        x = x + self.o(attend(q, k, v).flatten(-2))
        return x + self.back(F.gelu(self.wide(x)))


def call(module: nn.Module, x: Tensor) -> Tensor:
    return module(x)


class Model(nn.Module):
    """Two blocks over tokens with places; `group` spreads the tokens."""

    def __init__(self) -> None:
        super().__init__()
        width = HEADS * HEAD_DIM
        self.embed, self.places, self.out = nn.Linear(6, width), nn.Linear(8, width), nn.Linear(width, 6)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.pool = nn.Linear(width, width)
        self.group: Any = None
        self.attend: Attend = plain
        self.normalise, self.move = call, lambda x: x
        self.place_dtype: torch.dtype | None = None
        self.mean: Callable[[Tensor], Tensor] = lambda x: x.mean(1, keepdim=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x) + self.places(self._features(x.size(1)).to(x.dtype))
        if self.group is not None:
            x = split_forward_gather_backward(x, self.group, 1, "down")
        for block in self.blocks:
            x = block(x, self.attend, self.normalise)
        x = self.move(x) + self.pool(self.mean(x))
        x = self.out(x)
        return x if self.group is None else gather_forward_split_backward(x, self.group, 1, "up")

    def _features(self, num_tokens: int) -> Tensor:
        """Sines and cosines of places far along a sequence."""
        places = torch.arange(num_tokens, dtype=torch.get_default_dtype()) + 1000
        if self.place_dtype is not None:
            places = places.to(self.place_dtype)
        frequencies = torch.logspace(0, -3, 4, dtype=torch.get_default_dtype())
        angles = places[:, None].to(frequencies.dtype) * frequencies
        return torch.cat([angles.sin(), angles.cos()], -1)


def ring_by_hand(
    dtype: torch.dtype, lse_dtype: torch.dtype, group: Any, q: Tensor, k: Tensor, v: Tensor
) -> Tensor:
    """Block by block, merged in `dtype`, with log-sum-exps kept in `lse_dtype`."""
    blocks = [gather_forward_reduce_scatter_backward(each.contiguous(), group, 1) for each in (k, v)]
    out = lse = None
    for key, value in zip(*(each.chunk(group.size(), 1) for each in blocks), strict=True):
        scores = torch.einsum("bqhd,bkhd->bhqk", q, key).to(torch.promote_types(q.dtype, torch.float32))
        own_lse = torch.logsumexp(scores / math.sqrt(HEAD_DIM), -1, keepdim=True)
        weights = (scores / math.sqrt(HEAD_DIM) - own_lse).exp().to(q.dtype)
        own = torch.einsum("bhqk,bkhd->bhqd", weights, value).to(dtype)
        own_lse = own_lse.to(lse_dtype)
        if out is None:
            out, lse = own, own_lse
            continue
        out = (out - torch.sigmoid(own_lse - lse).to(dtype) * (out - own)).to(dtype)
        lse = (lse - F.logsigmoid(lse - own_lse)).to(lse_dtype)
    assert out is not None
    return out.to(q.dtype).transpose(1, 2)


def around_attention(dtype: torch.dtype, inner: Attend, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Keys and values travel in eight bits."""
    return inner(q, through(dtype, k), through(dtype, v))


def over_ranks(group: Any, dtype: torch.dtype, x: Tensor) -> Tensor:
    """The mean of all ranks' tokens, summed in `dtype`."""
    count = x.size(1) * group.size()
    own = x.sum(1, keepdim=True) / count
    total = reduce_forward_copy_backward(through(dtype, own) if dtype.itemsize == 1 else own, group)
    return copy_forward_reduce_backward(total, group)


def moments_in(dtype: torch.dtype, module: Any, x: Tensor) -> Tensor:
    """LayerNorm by E[x²] − E[x]², where x is far from 0."""
    far = (x + 8).to(dtype)
    mean, square = far.mean(-1, keepdim=True), far.square().mean(-1, keepdim=True)
    variance = (square - mean.square()).clamp_min(0) + module.eps
    return ((far - mean) * variance.rsqrt()).to(x.dtype) * module.weight + module.bias


@dataclass(frozen=True)
class Step:
    """A step with what its ranks do of their own: `attention`, and what of their gradients becomes."""

    attention: str = "ring"
    gradients: str = ""
    has_autocast: bool = False
    options: dict[str, Any] = field(default_factory=dict)

    def __call__(self, model: Any, run: Run) -> Tensor:
        forward: nn.Module = model
        if not run.is_reference:
            if run.shape.degree("sequence") > 1:
                self._spread(model, run.mesh.get_group("sequence"))
            if self.gradients:
                self._change(model, run.world_size)
            forward = DistributedDataParallel(model)
        x, target = torch.randn(2, TOKENS, 6), torch.randn(2, TOKENS, 6)
        with torch.autocast("cuda", torch.bfloat16) if self.has_autocast else nullcontext():
            out = forward(x)
        loss = (out - target).square().mean()
        loss.backward()
        return loss

    def _spread(self, model: Any, group: Any) -> None:
        attentions: dict[str, Attend] = {
            "ring": partial(ring_attention, group=group),
            "ulysses": partial(ulysses_attention, group=group),
            "by hand": partial(ring_by_hand, torch.float32, torch.float32, group),
            "by hand, half": partial(ring_by_hand, torch.bfloat16, torch.bfloat16, group),
            "by hand, half sums": partial(ring_by_hand, torch.bfloat16, torch.float32, group),
        }
        model.group, model.attend = group, attentions[self.attention]
        model.mean = partial(over_ranks, group, self.options.get("mean", torch.float32))
        if "travel" in self.options:
            model.attend = partial(around_attention, self.options["travel"], model.attend)
        if "moments" in self.options:
            model.normalise = partial(moments_in, self.options["moments"])
        if "move" in self.options:
            model.move = partial(through, self.options["move"])
        model.place_dtype = self.options.get("places")

    def _change(self, model: Any, num_ranks: int) -> None:
        """What a communication hook would do to gradients on their way."""
        changes = {
            "sixteen bits": lambda g: g.bfloat16().to(g.dtype),
            "eight bits": lambda g: g.to(torch.float8_e5m2).to(g.dtype),
            # So small that half precision has no digits for them.
            "fp16, not scaled": lambda g: (g * 1e-5).half().to(g.dtype) / 1e-5,
            "eight bits, finer": lambda g: g.to(torch.float8_e4m3fn).to(g.dtype),
            "in turns": lambda g: sum(each for each in (g / 64).bfloat16().expand(64, *g.shape)).to(g.dtype),
        }
        for parameter in model.parameters():
            parameter.register_hook(changes[self.gradients])


WRONG = {
    "a ring merges outputs and sums in bf16": Step("by hand, half"),
    "a ring merges outputs alone in bf16": Step("by hand, half sums"),
    "keys and values travel in eight bits": Step("ring", options={"travel": torch.float8_e4m3fn}),
    "keys and values travel in eight bits, ulysses": Step("ulysses", options={"travel": torch.float8_e5m2}),
    "a mean over ranks in eight bits": Step("ring", options={"mean": torch.float8_e4m3fn}),
    "moments of a norm in bf16": Step("ulysses", options={"moments": torch.bfloat16}),
    "tokens leave in eight bits": Step("ulysses", options={"move": torch.float8_e4m3fn}),
    "places counted in bf16": Step("ring", options={"places": torch.bfloat16}),
    "gradients in sixteen bits, hidden by all other roundings": Step("ulysses", "sixteen bits"),
    "gradients in eight bits": Step("ring", "eight bits"),
    "gradients in fp16 that underflow": Step("ulysses", "fp16, not scaled"),
    "gradients in eight bits, finer ones": Step("ring", "eight bits, finer"),
    "gradients added up one by one in bf16": Step("ulysses", "in turns"),
    "keys and values in eight bits, under the step's autocast": Step(
        "ring", has_autocast=True, options={"travel": torch.float8_e4m3fn}
    ),
}
RIGHT = {
    "ring": Step("ring"),
    "ulysses": Step("ulysses"),
    "a ring by hand": Step("by hand"),
    "ring, under the step's autocast": Step("ring", has_autocast=True),
    "ulysses, under the step's autocast": Step("ulysses", has_autocast=True),
}


def without_a_scaler(model: Any, run: Run) -> Tensor:
    """fp16, whose least number many gradients are below: a scaler is there to lift them."""
    forward = model if run.is_reference else DistributedDataParallel(model)
    x, target = torch.randn(2, TOKENS, 6), torch.randn(2, TOKENS, 6)
    with torch.autocast("cuda", torch.float16):
        out = forward(x)
    loss = (out - target).square().mean() * 1e-5
    loss.backward()
    return loss


def two_regions(model: Any, run: Run) -> Tensor:
    """A teacher's answer, then the student's."""
    forward = model if run.is_reference else DistributedDataParallel(model)
    x = torch.randn(2, TOKENS, 6)
    with torch.autocast("cuda", torch.bfloat16), torch.no_grad():
        target = model(x + 0.1)
    with torch.autocast("cuda", torch.bfloat16):
        out = forward(x)
    loss = (out - target).square().mean()
    loss.backward()
    return loss
