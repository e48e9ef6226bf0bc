"""Ulysses whose exchanges run under compute: v is projected while q and k travel, and heads attend in groups.

With the plain exchange nothing computes while q, k and v travel, nor while the output does. Here each leaves by itself,
v and the output a few heads at a time. With two heads a rank, a and b, in two groups:

    compute    project v          attend a            attend b        join the output
    wire       q   k      v of a  v of b              output of a     output of b

Only v of a and the output of b have nothing to hide behind. Backward is the mirror image: the gradient of v's group b
travels while a's attention runs backward, and those of q and k while v's projection does. No order had to be written
down for that. Autograd runs first what forward ran last, so what left before the projection of v comes back under it.

A departure and an arrival are two nodes of autograd. Between them no data passes, only an empty tensor that ties them
together: what travels lies in buffers that nobody may touch before the arrival has waited.

The numbers are those of the plain exchange to the last bit: whole heads are computed as ever, only not all at once.
Source: the idea of leaving early is VeOmni's asynchronous Ulysses, arXiv:2508.02317; attending by groups of heads takes
the place of its split output projection, which adds in another order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from opensora_accel.attention.call import AttentionCall, autocast
from opensora_accel.attention.local import attend_whole
from opensora_accel.communications import Sizes, finish, start_all_to_all

# More groups hide more, and make kernels of fewer heads, which fill a GPU less.
_MAX_GROUPS = 8


def heads_divide(q: Tensor, k: Tensor, group: dist.ProcessGroup) -> bool:
    """Whether every one of several ranks gets as many key heads, each with its query heads, as the pipeline needs.

    Args:
        q: [B, S_q/P, H, D]; k: [B, S_kv/P, H_kv, D].
    """
    are_heads = q.dim() == k.dim() == 4 and k.size(2) > 0  # what else it may be, is refused later
    return group.size() > 1 and are_heads and k.size(2) % group.size() == 0 and q.size(2) % k.size(2) == 0


def attend_in_groups(
    q: Tensor,
    k: Tensor,
    project_v: Callable[[], Tensor],
    gather_mask: Callable[[], Tensor] | None,
    group: dist.ProcessGroup,
    call: AttentionCall,
) -> Tensor:
    """Ulysses attention of what was checked, with its transfers under compute where heads divide.

    Args:
        q: [B, S_q/P, H, D]; k: [B, S_kv/P, H_kv, D].
        project_v: computes v: [B, S_kv/P, H_kv, D_v], while q and k travel.
        gather_mask: makes the key mask whole: [B, S_kv].

    Returns:
        [B, S_q/P, H, D_v].

    Raises:
        ValueError: v has another shape than k, but for its head dim.
    """
    num_ranks = group.size()
    own_heads = k.size(2) // num_ranks
    # Whole key heads, with all of their queries, in each group.
    num_groups = max(n for n in range(1, _MAX_GROUPS + 1) if own_heads % n == 0)
    q_exchange, k_exchange = (
        _Exchange(_send_heads, _send_rows, group, s) for s in (call.splits, call.kv_splits)
    )
    # The heads of a tensor are cut in two dims, [B, S/P, P, H/P, D]: the rank that gets one, and its place there.
    q_handle = _StartExchange.apply(q_exchange, q.unflatten(2, (num_ranks, -1)))
    k_handle = _StartExchange.apply(k_exchange, k.unflatten(2, (num_ranks, -1)))
    (v,) = autocast(project_v())
    if v.shape[:3] != k.shape[:3]:
        raise ValueError(
            f"k and v must agree in batch, tokens and heads; got {tuple(k.shape)}, {tuple(v.shape)}"
        )
    in_flight = []
    for part in v.unflatten(2, (num_ranks, -1)).split(own_heads // num_groups, 3):
        exchange = _Exchange(_send_heads, _send_rows, group, call.kv_splits)
        in_flight.append((exchange, _StartExchange.apply(exchange, part)))
    mask = None if gather_mask is None else gather_mask()
    # [B, S, H/P, D] → of each group of heads [B, S, H/P/groups, D].
    queries = _FinishExchange.apply(q_exchange, q_handle).chunk(num_groups, 2)
    keys = _FinishExchange.apply(k_exchange, k_handle).chunk(num_groups, 2)
    outgoing = []
    for of_q, of_k, (exchange, handle) in zip(queries, keys, in_flight, strict=True):
        out = attend_whole(of_q, of_k, _FinishExchange.apply(exchange, handle), mask, call)
        exchange = _Exchange(_send_rows, _send_heads, group, call.splits)
        outgoing.append((exchange, _StartExchange.apply(exchange, out)))
    # Behind the last group, so that the output of each but that one travels while the next attends.
    outs = [_FinishExchange.apply(*each) for each in outgoing]  # each [B, S/P, P, H/P/groups, D]
    return torch.cat(outs, 3).flatten(2, 3)


class _Pending:
    """A transfer that has begun, and what makes a tensor of what it brings."""

    def __init__(
        self,
        sent: Tensor,
        send_sizes: Sequence[int],
        receive_sizes: Sequence[int],
        group: dist.ProcessGroup,
        unpack: Callable[[Tensor], Tensor],
    ):
        # Both buffers stay alive until the transfer is over.
        self._sent, self._group, self._unpack = sent, group, unpack
        self._received = sent.new_empty(sum(receive_sizes))
        self._works = start_all_to_all(
            self._received, sent, group, receive_sizes, send_sizes, operation="all_to_all"
        )

    def finish(self) -> Tensor:
        """What came, as the sender's inverse had it."""
        finish(self._works, self._group, self._received.device, operation="all_to_all")
        return self._unpack(self._received)


def _send_heads(tensor: Tensor, group: dist.ProcessGroup, splits: Sizes) -> _Pending:
    """[B, S/P, P, h, D] leaves; [B, S, h, D] arrives."""
    batch, _, num_ranks, heads, dim = tensor.shape
    sent = tensor.movedim(2, 0).contiguous().view(-1)  # [P, B, S/P, h, D]
    sizes = [batch * size * heads * dim for size in splits]

    def unpack(received: Tensor) -> Tensor:
        """The tokens [B, S/P, h, D] of every rank, one rank after the other."""
        if batch == 1:
            return received.view(1, sum(splits), heads, dim)
        pieces = received.split(sizes)
        return torch.cat([p.view(batch, s, heads, dim) for p, s in zip(pieces, splits, strict=True)], 1)

    return _Pending(sent, [sent.numel() // num_ranks] * num_ranks, sizes, group, unpack)


def _send_rows(tensor: Tensor, group: dist.ProcessGroup, splits: Sizes) -> _Pending:
    """[B, S, h, D] leaves; [B, S/P, P, h, D] arrives."""
    batch, _, heads, dim = tensor.shape
    # Behind a batch of one the tokens of each rank lie in one piece.
    pieces = [tensor] if batch == 1 else tensor.split(splits, 1)
    sent = torch.cat([piece.reshape(-1) for piece in pieces]) if batch > 1 else tensor.reshape(-1)
    shape = (group.size(), batch, splits[group.rank()], heads, dim)
    own = shape[1] * shape[2] * heads * dim
    return _Pending(
        sent,
        [batch * size * heads * dim for size in splits],
        [own] * group.size(),
        group,
        lambda received: received.view(shape).movedim(0, 2),
    )


Send = Callable[[Tensor, dist.ProcessGroup, Sizes], _Pending]


class _Exchange:
    """A tensor's way to the other ranks in forward, and its gradient's way back."""

    def __init__(self, send: Send, send_back: Send, group: dist.ProcessGroup, splits: Sizes):
        self._send, self._send_back, self._group, self._splits = send, send_back, group, splits
        self._pending: _Pending | None = None

    def start(self, tensor: Tensor, back: bool = False) -> None:
        """Sends a tensor, as it is to arrive elsewhere."""
        self._pending = (self._send_back if back else self._send)(tensor, self._group, self._splits)

    def finish(self) -> Tensor:
        assert self._pending is not None
        # Let go of at once: its buffers are freed, and a second backward (retain_graph) sends anew.
        pending, self._pending = self._pending, None
        return pending.finish()


class _StartExchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exchange: _Exchange, tensor: Tensor) -> Tensor:
        """Sends a tensor; the handle [0] for its arrival."""
        ctx.exchange = exchange
        exchange.start(tensor)
        return tensor.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _handle: Tensor) -> tuple[None, Tensor]:
        """The gradient, for which the arrival's backward sent for a handle [0]."""
        return None, ctx.exchange.finish()


class _FinishExchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exchange: _Exchange, handle: Tensor) -> Tensor:
        """What the other ranks sent, for a handle [0]."""
        ctx.exchange = exchange
        return exchange.finish()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        """Sends the gradient back; a handle [0]."""
        ctx.exchange.start(grad, back=True)
        return None, grad.new_empty(0)
