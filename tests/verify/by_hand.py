"""A ring attention as a user might write it, with the mistakes that such code makes.

Every rank keeps its queries; keys and values travel round the ring. With P = 3, rank 1 meets its own block, then
rank 0's, then rank 2's. In backward the blocks travel again, and with each of them the sum of its gradients. Rank r
adds its part, the sum goes on, and after P hops it is home: block 1 starts at rank 1, collects the parts of ranks 2
and 0, and comes back to rank 1.

Letters: B batch, S tokens of this rank, H heads, D head dim, P ranks of the ring.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from opensora_accel.attention import local_attention
from opensora_accel.communications import share_sizes
from opensora_accel.parallel_states import get_parallel_group
from tests.verify.steps import BATCH, CHANNELS, TOKENS, OneLayer, RegionStep

Mistake = Literal[
    "",
    "sums the other way",
    "another owner",
    "the last hop dropped",
    "sums start anew",
    "only the own sums",
    "the own sums dropped",
    "sums of another block",
    "only the last step's queries",
    "to another group",
    "sums never sent",
    "the keys of the first hop",
]


@dataclass(frozen=True)
class _Ring:
    group: dist.ProcessGroup
    tokens: int
    causal: bool
    mistake: Mistake

    @property
    def rank(self) -> int:
        return self.group.rank()

    @property
    def size(self) -> int:
        return self.group.size()

    def owner(self, step: int) -> int:
        """Whose block is here after so many hops."""
        return (self.rank + step if self.mistake == "another owner" else self.rank - step) % self.size

    def pass_on(self, tensor: Tensor, sizes: Sequence[int], *, is_sum: bool = False) -> Tensor:
        """The previous rank's tensor [2, B, S, H, D]; `sizes`: how many tokens every rank holds now."""
        ahead, behind = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        if is_sum and self.mistake == "sums the other way":
            ahead, behind = behind, ahead
        received = tensor.new_empty(*tensor.shape[:2], sizes[behind], *tensor.shape[3:])
        if self.mistake == "to another group":
            to, of = ahead, behind
        else:
            to, of = dist.get_global_rank(self.group, ahead), dist.get_global_rank(self.group, behind)
        operations = [dist.P2POp(dist.irecv, received, of, self.group)]
        if not (is_sum and self.mistake == "sums never sent"):
            operations.insert(0, dist.P2POp(dist.isend, tensor.contiguous(), to, self.group))
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        return received

    def scores(self, q: Tensor, k: Tensor, step: int) -> Tensor:
        """[B, H, S, S of the block]; a key after the query is masked."""
        scores = torch.einsum("bshd,bthd->bhst", q, k) / math.sqrt(q.size(-1))
        if self.causal:
            shares = share_sizes(self.tokens, self.size)
            first, first_key = sum(shares[: self.rank]), sum(shares[: self.owner(step)])
            is_later = first_key + torch.arange(k.size(1)) > first + torch.arange(q.size(1))[:, None]
            scores = scores.masked_fill(is_later, -math.inf)
        return scores


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, ring: _Ring) -> Tensor:
        block, sizes = torch.stack([k, v]), list(share_sizes(ring.tokens, ring.size))
        scores, values = [], []
        for step in range(ring.size):
            if step:
                block = ring.pass_on(block, sizes)
                sizes = [sizes[-1], *sizes[:-1]]
            if ring.mistake != "the last hop dropped" or step < ring.size - 1:
                scores.append(ring.scores(q, block[0], step))
                values.append(block[1])
        whole = torch.cat(scores, -1)
        out = torch.einsum("bhst,bthd->bshd", whole.softmax(-1), torch.cat(values, 1))
        ctx.save_for_backward(q, k, v, out, whole.logsumexp(-1))
        ctx.ring = ring
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, out, lse = ctx.saved_tensors
        ring, mistake = ctx.ring, ctx.ring.mistake
        delta = (grad * out).sum(-1).transpose(1, 2)[..., None]  # [B, H, S, 1]
        block, sizes = torch.stack([k, v]), list(share_sizes(ring.tokens, ring.size))
        sums, grad_q, own = torch.zeros_like(block), torch.zeros_like(q), None
        for step in range(ring.size):
            weights = (ring.scores(q, block[0], step) - lse[..., None]).exp()
            grad_scores = weights * (torch.einsum("bshd,bthd->bhst", grad, block[1]) - delta)
            grad_scores = grad_scores / math.sqrt(q.size(-1))
            part_of_q = torch.einsum("bhst,bthd->bshd", grad_scores, block[0])
            part = torch.stack(
                [
                    torch.einsum("bhst,bshd->bthd", grad_scores, q),
                    torch.einsum("bhst,bshd->bthd", weights, grad),
                ]
            )
            own = part if own is None else own
            grad_q = part_of_q if mistake == "only the last step's queries" else grad_q + part_of_q
            if mistake == "sums of another block" and own.shape == part.shape:
                part = own
            is_left_out = (mistake == "the own sums dropped" and step == 0) or (
                mistake == "only the own sums" and step > 0
            )
            if not is_left_out:
                sums = part if mistake == "sums start anew" else sums + part
            sums = ring.pass_on(sums, sizes, is_sum=True)
            if step < ring.size - 1:
                travelled = ring.pass_on(block, sizes)
                block = block if mistake == "the keys of the first hop" else travelled
                sizes = [sizes[-1], *sizes[:-1]]
        return grad_q, sums[0], sums[1], None


@dataclass(frozen=True)
class RingByHand(RegionStep):
    """One layer of attention on a ring, with or without a mistake."""

    mistake: Mistake = ""
    tokens: int = TOKENS
    causal: bool = False

    def model(self) -> OneLayer:
        layer = OneLayer()
        layer.attend = partial(local_attention, causal=self.causal)
        return layer

    def shapes(self) -> list[tuple[int, ...]]:
        return [(BATCH, self.tokens, CHANNELS)]

    def spread(self, model: OneLayer) -> None:
        ring = _Ring(get_parallel_group("ring"), self.tokens, self.causal, self.mistake)
        if ring.size > 1:
            model.attend = lambda q, k, v: _Attend.apply(q, k, v, ring)
