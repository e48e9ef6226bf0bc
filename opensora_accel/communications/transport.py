"""The collectives as torch.distributed has them: on whole buffers, without gradients.

Everything that this package sends goes through here, so that a collective which fails because a rank is missing says
which one (`waiting`). Shapes are the caller's matter; buffers are contiguous.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from opensora_accel.communications.missing_ranks import waiting
from opensora_accel.interception import seen_anyway
from opensora_accel.parallel_states import get_exchange


def all_gather(output: Tensor, input_: Tensor, group: dist.ProcessGroup) -> None:
    """Fills `output` [P·n, ...] with the `input_` [n, ...] of every rank, in order of ranks."""
    # torch 2.13 deprecates the name that older versions have.
    function = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    with waiting("all_gather", group), seen_anyway():
        function(output, input_, group=group)


def start_all_gather(output: Tensor, input_: Tensor, group: dist.ProcessGroup) -> list[dist.Work]:
    """`all_gather` of `input_` [n, ...] into `output` [P·n, ...] that has only begun.

    Neither buffer may be touched before `finish` has waited for what is returned.
    """
    function = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    with waiting("all_gather", group), seen_anyway():
        return [function(output, input_, group=group, async_op=True)]


def reduce_scatter(output: Tensor, input_: Tensor, group: dist.ProcessGroup) -> None:
    """Fills `output` [n, ...] with this rank's part of the sum over ranks of `input_` [P·n, ...]."""
    function = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    with waiting("reduce_scatter", group), seen_anyway():
        function(output, input_, group=group)


def all_reduce_(tensor: Tensor, group: dist.ProcessGroup) -> None:
    """Replaces `tensor` by its sum over ranks."""
    with waiting("all_reduce", group), seen_anyway():
        dist.all_reduce(tensor, group=group)


def all_to_all_single(
    output: Tensor,
    input_: Tensor,
    group: dist.ProcessGroup,
    output_sizes: Sequence[int] | None = None,
    input_sizes: Sequence[int] | None = None,
) -> None:
    """Sends the j-th run of rows of `input_` [N, ...] to rank j, and fills `output` [M, ...] in order of ranks.

    The runs have the lengths `input_sizes` and `output_sizes`; without them all runs are equal.
    """
    with waiting("all_to_all", group), seen_anyway():
        if output_sizes is None:
            dist.all_to_all_single(output, input_, group=group)
        else:
            dist.all_to_all_single(output, input_, list(output_sizes), list(input_sizes or ()), group=group)


def start_all_to_all(
    output: Tensor,
    input_: Tensor,
    group: dist.ProcessGroup,
    output_sizes: Sequence[int],
    input_sizes: Sequence[int],
    *,
    operation: str,
) -> list[dist.Work]:
    """`all_to_all_single` of `input_` [N] into `output` [M] that has only begun.

    Neither buffer may be touched before `finish` has waited for what is returned.
    """
    with waiting(operation, group), seen_anyway():
        work = dist.all_to_all_single(
            output, input_, list(output_sizes), list(input_sizes), group=group, async_op=True
        )
    return [work]


def start_shift(
    sent: Tensor, received: Tensor, group: dist.ProcessGroup, *, shift: int = 1, operation: str
) -> list[dist.Work]:
    """Starts to send `sent` [N] to the rank `shift` places on, and to receive [M] from as many places before.

    Neither buffer may be touched before `finish` has waited for what is returned. Empty messages are not sent.
    """
    rank, num_ranks = group.rank(), group.size()
    messages = []
    # Both ends know the size, and where nothing is sent nothing is waited for.
    if sent.numel():
        messages.append(dist.P2POp(dist.isend, sent, group=group, group_peer=(rank + shift) % num_ranks))
    if received.numel():
        messages.append(dist.P2POp(dist.irecv, received, group=group, group_peer=(rank - shift) % num_ranks))
    if not messages:
        return []
    with waiting(operation, group), seen_anyway():
        return dist.batch_isend_irecv(messages)


def finish(works: list[dist.Work], group: dist.ProcessGroup, device: torch.device, *, operation: str) -> None:
    """Waits for each transfer between devices of this kind, and takes it off the list.

    It leaves the list before it is waited for: Ctrl-C is raised where the wait returns, and a second wait for one
    transfer would never end.
    """
    if not works:
        return
    backend = group._get_backend(device)
    is_gloo = dist.is_gloo_available() and isinstance(backend, dist.ProcessGroupGloo)
    with waiting(operation, group):
        while works:
            work = works.pop(0)
            # A transfer of gloo knows the timeout that its group was made with, and none that was set since.
            work.wait(backend.options._timeout) if is_gloo else work.wait()


def exchange(
    sent: Tensor, group: dist.ProcessGroup, piece_size: Callable[[int, int], int] | None = None
) -> Tensor:
    """What the ranks of the group have for this one, in order of ranks.

    Args:
        sent: a piece for each rank, in order: [N, ...], in equal pieces; or [N] and `piece_size`.
        piece_size: how many elements one rank (first) sends to another (second), where that is not always the same.

    Communication: one `all_to_all_single`, where the group's all-to-alls are not run by somebody else.
    """
    other = get_exchange(group)
    return exchange_at_once(sent, group, piece_size) if other is None else other(sent, group, piece_size)


def exchange_at_once(
    sent: Tensor, group: dist.ProcessGroup, piece_size: Callable[[int, int], int] | None = None
) -> Tensor:
    """`exchange` by one `all_to_all_single`."""
    if piece_size is None:
        received = torch.empty_like(sent)
        all_to_all_single(received, sent, group)
        return received
    rank, ranks = group.rank(), range(group.size())
    send_sizes = [piece_size(rank, target) for target in ranks]
    receive_sizes = [piece_size(source, rank) for source in ranks]
    received = sent.new_empty(sum(receive_sizes))
    all_to_all_single(received, sent, group, receive_sizes, send_sizes)
    return received
