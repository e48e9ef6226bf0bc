"""Clipping by the norm of the whole gradient, in place of `torch.nn.utils.clip_grad_norm_`.

The norm of the gradients that a rank holds differs from rank to rank: one has the first heads of a layer, or the first
rows of a parameter. Clipped by it, each rank would scale by another factor, and parameters that all of them hold would
drift apart. Of two ranks whose gradients have norms 3 and 4 the whole one is 5, since squares add up.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from opensora_accel.dtensors import is_dtensor
from shardformer.tensor_parallel import cuts_of, whole_name


def clip_grad_norm_(model: nn.Module, max_norm: float, norm: Tensor | None = None) -> Tensor:
    """Scales gradients down to `max_norm`, in place; their norm before, a scalar.

    Call it when gradients are averaged, as DDP and FSDP do in backward: then the norm is equal on all ranks. It serves
    whole parameters, the shards of FSDP2 and the parts of tensor-parallel layers. Where the norm is not finite,
    gradients stay as they are: skip such a step on all ranks.

    Args:
        max_norm: 0 scales nothing.
        norm: that of the whole gradient, where it is known already.

    Communication: one all-reduce of a number over tensor ranks, and over shards of FSDP2; none where `norm` is given.
    """
    norm = total_grad_norm(model) if norm is None else norm
    if max_norm > 0:
        # No `if` looks at the norm: on a GPU the host would wait for the whole backward. By a norm of 0 nothing is
        # scaled.
        known = torch.where(norm.isfinite(), norm, 0.0)
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), max_norm, known)
    return norm


@torch.no_grad()
def total_grad_norm(model: nn.Module) -> Tensor:
    """The 2-norm of all gradients, the same on every rank: of the shares on all ranks, and once of what is whole.

    Communication: one all-reduce of a number over the tensor ranks, for each group of them where parts of a model were
    sharded by themselves; that of a DTensor's norm under FSDP2.
    """
    cuts = cuts_of(model)
    # Parameters that are not cut count once: every rank holds the same gradient of them.
    by_group: dict[dist.ProcessGroup | None, list[Tensor | None]] = {group: [] for _, group in cuts.values()}
    for name, parameter in model.named_parameters():
        group = cuts[key][1] if (key := whole_name(name)) in cuts else None
        by_group.setdefault(group, []).append(parameter.grad)
    total = _norm(by_group.pop(None, [])).square()
    for group, grads in by_group.items():
        device = next(model.parameters()).device  # where a norm of no gradients is not
        of_shares = _norm(grads).square().to(device)
        # Squares of norms may be added up over ranks, norms may not.
        dist.all_reduce(of_shares, group=group)
        total = total + of_shares
    return total.sqrt()


def _norm(grads: Iterable[Tensor | None]) -> Tensor:
    """The 2-norm of gradients, of DTensors over their mesh."""
    norm = torch.nn.utils.get_total_norm([grad for grad in grads if grad is not None])
    return norm.full_tensor() if is_dtensor(norm) else norm
