"""What FSDP2 calls in place of its own collectives: weights gathered in int8 or fp8, gradients averaged in bf16.

FSDP2 has a place for each. P = 2 shards of R = 2 copies:

    all-gather        FSDP2 gives this rank's shards [n] and takes [P·n]; ours sends them compressed
    reduce-scatter    FSDP2 gives whole gradients [P·n] and takes this rank's average [n]; ours sends bf16
    between copies    FSDP2 calls a hook with that average [n]; ours averages it over the R copies, in bf16, by node

Gradients are rounded in the outermost of the two reductions only: between copies where there are several, and in the
reduce-scatter where there is one. There it has the fewest bytes that are kept for feedback (a shard's instead of the
whole model's), and the slowest links.

What rounding left out is no part of a saved state: it belongs to a rank of one Plan, and is worth one rounding of one
step. A run that goes on starts without it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, Comm, ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, HSDPMeshInfo

from opensora_accel.communications import transport, wants_exact
from opensora_accel.experiments import by_node
from opensora_accel.experiments.compressed import WIRE_DTYPES, CompressedShards, RoundedSum, replace_by_exact
from opensora_accel.fsdp import param_groups
from opensora_accel.plan import Plan


def shard_unit(plan: Plan, unit: FSDPModule, kept: FSDPMeshInfo | None) -> None:
    """Makes one module that `fully_shard` has returned send as the plan says. All ranks call.

    Args:
        kept: the mesh of parameters that the model keeps in fp32: those are gathered as they are.

    Raises:
        ValueError: weights of several dtypes are gathered together, which cannot be compressed.
    """
    for group in param_groups(unit):
        # `set_custom_all_gather` and its siblings set these attributes, and refuse a module with two groups, as one
        # that keeps some of its parameters in fp32 has.
        if plan.gather_dtype != "same" and group.mesh_info is not kept:
            dtypes = {group.mp_policy.param_dtype or each.sharded_param.dtype for each in group.fsdp_params}
            if len(dtypes) > 1:
                names = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
                raise ValueError(
                    f'gather_dtype="{plan.gather_dtype}" compresses weights that have one dtype, and those of a '
                    f"{type(unit).__name__} are {names}; call model.float() before shardformer.shard, or set "
                    'gather_dtype="same"'
                )
            group._all_gather_comm = CompressedGather(group.fsdp_params, WIRE_DTYPES[plan.gather_dtype])
        if isinstance(group.mesh_info, HSDPMeshInfo):
            copies, mesh = group.mesh_info.replicate_process_group, group.mesh_info.mesh
            if by_node.split_copies(plan, copies) is None and plan.reduce_dtype == "same":
                continue
            # FSDP2 has no place for another all-reduce. Told that there are no copies it makes none, and calls the hook
            # with the shard's average; the parameters keep the mesh that has the copies.
            group.mesh_info = FSDPMeshInfo(mesh, shard_mesh_dim=group.mesh_info.shard_mesh_dim)
            if group.post_forward_mesh_info is not None:
                group.post_forward_mesh_info = group.mesh_info
            group._all_reduce_hook = AverageOverCopies(group, copies, rounds=plan.reduce_dtype == "bf16")
        elif plan.reduce_dtype == "bf16":
            group._reduce_scatter_comm = RoundedReduceScatter(group.fsdp_params)


class _Allocates(Comm):
    """Buffers as torch allocates them."""

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class CompressedGather(_Allocates, AllGather):
    """An all-gather of the shards of `params` in `wire_dtype`; every rank computes with the same weights."""

    def __init__(self, params: Sequence[Any], wire_dtype: torch.dtype):
        self._params, self._wire_dtype = params, wire_dtype
        self._shards: CompressedShards | None = None

    @property
    def elements_of_message(self) -> dict[int, int]:
        """The elements that its message has, by the message's bytes; nothing before it has run."""
        return {self._shards.message_bytes: self._shards.numel} if self._shards is not None else {}

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        """Fills `output_tensor` [P·n] from the `input_tensor` [n] of every rank: now, or where the work is waited for.

        Communication: one all-gather of `CompressedShards.message_bytes`.
        """
        if self._shards is None:
            # Only the first gather shows in which dtype the shards are.
            numels = [each.padded_sharded_param_size.numel() for each in self._params]
            vectors = [each.sharded_param.dim() < 2 for each in self._params]
            self._shards = CompressedShards(numels, vectors, input_tensor.dtype, self._wire_dtype)
        assert self._shards.numel == input_tensor.numel()
        message = self._shards.pack(input_tensor)
        messages = message.new_empty(group.size() * message.numel())
        shards = self._shards

        output = output_tensor.view(group.size(), -1)
        exact = None
        if wants_exact():
            exact = torch.empty_like(output)
            transport.all_gather(exact.view(-1), input_tensor.clone(), group)

        def unpack() -> None:
            shards.unpack(messages.view(group.size(), -1), output)
            if exact is not None:
                replace_by_exact(output, exact, shards.bound(exact), "a gathered weight")

        if async_op:
            return _Unpacking(transport.start_all_gather(messages, message, group), group, message, unpack)
        transport.all_gather(messages, message, group)
        unpack()
        return None


class _Unpacking(dist.Work):
    """A gather under way: whoever waits for it has the weights afterwards, on the stream that waits."""

    def __init__(
        self, works: list[dist.Work], group: dist.ProcessGroup, message: Tensor, unpack: Callable[[], None]
    ):
        super().__init__()
        # The message [bytes] is kept because it is being sent.
        self._works, self._group, self._message, self._unpack = works, group, message, unpack

    def wait(self, *_timeout: Any) -> bool:
        if self._works:
            transport.finish(self._works, self._group, self._message.device, operation="all_gather")
            self._unpack()
        return True


class RoundedReduceScatter(_Allocates, ReduceScatter):
    """A reduce-scatter of the gradients of `params` that sends bf16 and adds up in the dtype that it is given."""

    def __init__(self, params: Sequence[Any]):
        self._sums, self._params = RoundedSum(), params

    def forget(self) -> None:
        self._sums.forget()

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Fills `output_tensor` [n] from the `input_tensor` [P·n] of every rank, which is used up.

        Raises:
            ValueError: the operation is neither a sum nor an average.
        """
        if op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            raise ValueError(
                'reduce_dtype="bf16" sums or averages gradients; leave FSDP2\'s gradient divide factor at its default, '
                'or set reduce_dtype="same"'
            )
        if not _have_all_gradients(self._params, output_tensor):
            self._sums.forget()
        self._sums.reduce_scatter(output_tensor, input_tensor, group)
        if op == dist.ReduceOp.AVG:
            output_tensor /= group.size()


class AverageOverCopies:
    """Averages shards' gradients over the ranks that hold copies of them, once a step."""

    def __init__(self, param_group: Any, copies: dist.ProcessGroup, *, rounds: bool):
        self._param_group, self._copies = param_group, copies
        self._sums = RoundedSum()
        # Over all copies, or those of two levels that lie on different nodes.
        self._sum = self._sums.all_reduce_ if rounds else transport.all_reduce_
        # The sum over the microbatches before the last one: [n].
        self._added_up: Tensor | None = None

    def forget(self) -> None:
        self._sums.forget()
        self._added_up = None

    def __call__(self, reduced: Tensor) -> None:
        """Averages `reduced` [n] in place; before the last microbatch it is kept, and replaced by zeros."""
        if reduced.is_cuda:
            # Its memory belongs to the stream of the reduce-scatters. FSDP2 drops it when it has added it to a gradient
            # or sent it to the host, and the next block's reduce-scatter would have it while this stream still reads
            # it (torch PRs #140044, #180900, which mend it where FSDP2 sends the all-reduce itself).
            reduced.record_stream(torch.cuda.current_stream())
        if not self._param_group.all_reduce_grads:
            # FSDP2 adds what is left in `reduced` to the gradient: zeros now, and the sum of all in the end.
            if self._added_up is None:
                self._added_up = reduced.clone()
            else:
                self._added_up += reduced
            reduced.zero_()
            return
        if self._added_up is not None:
            reduced += self._added_up
            self._added_up = None
        if not _have_all_gradients(self._param_group.fsdp_params, reduced):
            self._sums.forget()
        reduced /= self._copies.size()
        by_node.all_reduce_(reduced, self._copies, self._sum)


def _have_all_gradients(params: Sequence[Any], reduced: Tensor) -> bool:
    """Whether `reduced` [n] has a gradient of every trained parameter.

    Where one has none in this step, the others lie elsewhere than in the step before: what was left out of that one
    fits no more.
    """
    trained = (each for each in params if each.sharded_param.requires_grad)
    return reduced.numel() == sum(each.padded_sharded_param_size.numel() for each in trained)
