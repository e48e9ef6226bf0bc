"""A rank of a large world in one process: a backend that sends nothing, and tensors that hold nothing."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from opensora_accel import parallel_states
from opensora_accel.offload import GLOBAL_ACTIVATION_MANAGER, ActivationManager

_REAL_DTYPES = (torch.int64, torch.int32, torch.bool)
_GIVE_WHOLE_NUMBERS = ("aten::arange", "aten::randint", "aten::randperm")


class FakeFloats(FakeTensorMode):
    """Tensors have shapes and no memory, but for whole numbers on the CPU, which stay real.

    Programs branch on those: a DeviceMesh reads its ranks, an attention its token counts. Bytes (uint8) are buffers,
    not numbers, and hold nothing either.
    """

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if _is_about_whole_numbers(func, args, kwargs or {}):
            return func(*args, **(kwargs or {}))
        if func is torch.ops.aten._fused_sdp_choice.default:
            return func(*_small(args), **(kwargs or {}))
        result = super().__torch_dispatch__(func, types, args, kwargs or {})
        # It refers weakly to what it has made, and `module.to(dtype)` swaps no tensor that is referred to.
        self.fake_tensor_converter.tensor_memo.clear()
        return result


def _is_about_whole_numbers(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether an operation takes real whole numbers only, and gives such."""
    leaves = tree_leaves((args, dict(kwargs)))
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    if any(
        isinstance(t, FakeTensor) or t.dtype not in _REAL_DTYPES or t.device.type != "cpu" for t in tensors
    ):
        return False
    if kwargs.get("device") not in (None, torch.device("cpu"), "cpu"):
        return False
    dtype = kwargs.get("dtype")
    if dtype is not None:
        return dtype in _REAL_DTYPES
    is_whole = not any(isinstance(leaf, (float, torch.dtype)) for leaf in leaves)
    return is_whole and (bool(tensors) or func._schema.name in _GIVE_WHOLE_NUMBERS)


def _small(args: Sequence[Any]) -> list[Any]:
    """Queries, keys, values and mask as real tensors of two rows, from which a kernel is chosen as from all of them.

    On fake tensors attention would take another kernel than on the CPU's, and a checkpoint keep other outputs.
    """
    small = list(args)
    for index, argument in enumerate(args):
        if isinstance(argument, FakeTensor):
            sizes = [min(size, 2) for size in argument.shape]
            if index < 3:  # not of the mask, whose last dim is the number of keys
                sizes[-1] = argument.size(-1)
            small[index] = torch.empty(sizes, dtype=argument.dtype, device=argument.device)
    return small


class _Chunks:
    """What FSDP2 cuts a parameter into, each piece cut when it is asked for.

    It cuts all of them and reads the first and its own: 1,024 tensors for each of 1,100 parameters, which is minutes
    on fake tensors (a Wan of 14 billion, 2 cores, torch 2.13, 2026-11).
    """

    def __init__(self, tensor: Tensor, num_chunks: int, dim: int):
        self._tensor, self._dim = tensor, dim
        self._size = -(-tensor.size(dim) // num_chunks)  # as torch.chunk does

    def __getitem__(self, index: int) -> Tensor:
        left = self._tensor.size(self._dim) - index * self._size
        if left <= 0:
            return self._tensor.new_empty(0)
        return self._tensor.narrow(self._dim, index * self._size, min(self._size, left))


def _forget_groups() -> None:
    """DTensor keeps the meshes that it has seen, whose groups are known by name: those of another world are gone."""
    propagate = getattr(DTensor._op_dispatcher.sharding_propagator, "propagate_op_sharding", None)
    clear = getattr(getattr(propagate, "cache", None), "cache_clear", None)
    if clear is not None:
        clear()
    if hasattr(torch._C, "_clear_DTensor_sharding_propagator_cache"):
        torch._C._clear_DTensor_sharding_propagator_cache()


@contextlib.contextmanager
def fake_world(rank: int, world_size: int) -> Iterator[None]:
    """This process is `rank` of a world whose other ranks do not exist; afterwards all is as before.

    What arrives is this rank's own data, or nothing. Raises ValueError where a process group exists already.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore  # also registers the backend

    if dist.is_initialized():
        raise ValueError(
            f"a process group of {dist.get_world_size()} ranks ({dist.get_backend()}) is initialised in this process, "
            "and a recording needs to make its own; record in a process of its own, or destroy_process_group() first"
        )
    parallel_states.reset()
    _forget_groups()
    manager = vars(GLOBAL_ACTIVATION_MANAGER).copy()
    generator_state = torch.get_rng_state()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    chunk_with_empty = _fsdp_param._chunk_with_empty
    try:
        _fsdp_param._chunk_with_empty = _Chunks  # type: ignore[assignment]  # it is indexed only
        # The arena that a model opens here may be made of fake tensors: nobody else may meet it.
        vars(GLOBAL_ACTIVATION_MANAGER).update(vars(ActivationManager()))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
            yield
    finally:
        _fsdp_param._chunk_with_empty = chunk_with_empty
        vars(GLOBAL_ACTIVATION_MANAGER).update(manager)
        parallel_states.reset(destroy_process_group=True)
        _forget_groups()
        torch.set_rng_state(generator_state)
