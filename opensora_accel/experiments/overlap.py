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
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from opensora_accel import attention
from opensora_accel.attention import AttentionCall, attend_whole, autocast, enter_call, whole_mask
from opensora_accel.communications import Sizes, check_group, finish, start_all_to_all
from opensora_accel.experiments.late_values import LateTensor, computed, project_late
from opensora_accel.parallel_states import get_exchange, get_parallel_group
from opensora_accel.plan import Plan
from shardformer.paths import find
from shardformer.policy import Policy

# More groups hide more, and make kernels of fewer heads, which fill a GPU less.
_MAX_GROUPS = 8


# ---- what a Plan with overlap_ulysses calls


def prepare_attentions(_plan: Plan, model: nn.Module, policy: Policy, undo: ExitStack) -> None:
    """Lets every self-attention project its values when its kernel is called.

    Raises:
        ValueError: the model has none.
    """
    modules = [module for path in policy.self_attention for _name, module in find(model, path)]
    if not modules:
        joint = "joint attention of text and video"
        kind = joint if policy.joint_attention else "attention that keeps its own kernel"
        raise ValueError(
            f"overlap_ulysses overlaps self-attention, and {type(model).__name__} has {kind} alone; leave it out"
        )
    for module in modules:
        for name, child in module.named_children():
            # One that is fused with q and k is there before they are, and only its heads travel in groups.
            if name in policy.value_projections and hasattr(child, "out_features"):
                undo.callback(project_late(module, name))


def ulysses_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor | Callable[[], Tensor],
    group: dist.ProcessGroup | None = None,
    *,
    mask: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    splits: Sequence[int] | None = None,
    kv_splits: Sequence[int] | None = None,
    slices: attention.slices.AttentionSlices | attention.slices.Deal | None = None,
) -> Tensor:
    """`attention.ulysses_attention`, sent under compute where every rank gets as many key heads and sees all keys.

    The same numbers to the last bit. There is no second derivative.

    Args:
        v: [B, S_kv/P, H_kv, D], or what computes it while q and k travel: a function, or a tensor that is late.

    Raises:
        ValueError: besides what that raises, the group's all-to-alls are run by somebody else, in one piece.
    """
    group = check_group(get_parallel_group("sequence") if group is None else group)
    if get_exchange(group) is not None:
        raise ValueError(
            "overlap sends in pieces under compute, and the all-to-all of this group runs in two levels; set "
            'overlap_ulysses=False, or two_level="off" in the plan'
        )
    options: Any = {"causal": causal, "scale": scale, "splits": splits, "kv_splits": kv_splits}
    project_v = v.value if isinstance(v, LateTensor) else v
    # A graph holds no transfer that has only begun.
    if slices is not None or torch.compiler.is_compiling() or not heads_divide(q, k, group):
        v = project_v() if callable(project_v) else project_v
        return attention.ulysses_attention(q, k, v, group, mask=mask, slices=slices, **options)
    q, k = autocast(q, k)
    # Where v is not there yet, only its dtype and shape are checked here: they are to be those of k.
    (known_v,) = (k,) if callable(project_v) else autocast(project_v)
    call = enter_call(q, k, known_v, mask, [group], **options)
    gather_mask = None if mask is None else partial(whole_mask, mask, group, call.kv_splits)
    return attend_in_groups(
        q, k, project_v if callable(project_v) else lambda: known_v, gather_mask, group, call
    )


def gathered_attention(q: Tensor, k: Tensor, v: Tensor, *args: Any, **options: Any) -> Tensor:
    """`attention.gathered_attention`, whose keys and values travel whole: late values are computed first."""
    return attention.gathered_attention(q, k, computed(v), *args, **options)


# ---- the attention


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
