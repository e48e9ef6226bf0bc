"""One rank of a large world in one process: a backend that sends nothing, and tensors that hold nothing.

The backend fills an all-gather with this rank's own data. Most steps do not look at what arrives, but some branch on
sizes that ranks send each other. So all wanted ranks are recorded in turn, what each has given to its first, second, …
all-gather of whole numbers is kept, and all are recorded again with these sizes. With P = 3 ranks of 4, 4 and 3
tokens: the first time rank 2 takes all shares for 3; the second time it gets [4, 4, 3], as on real ranks.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.fsdp._fully_shard import _fsdp_collectives, _fsdp_param
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from opensora_accel import parallel_states
from opensora_accel.offload import GLOBAL_ACTIVATION_MANAGER, OffloadEngine
from opensora_accel.wrapping import replaced

_REAL_DTYPES = (torch.int64, torch.int32, torch.bool)
_GIVE_WHOLE_NUMBERS = ("aten::full", "aten::arange", "aten::randint", "aten::randperm")
_NOT_FAKE = (
    fake_tensor.DataDependentOutputException,
    fake_tensor.DynamicOutputShapeException,
    fake_tensor.UnsupportedFakeTensorException,
    fake_tensor.UnsupportedOperatorException,
    fake_tensor.UnsupportedMutationAliasingException,
)
_FAKE_MESSAGES = (".numpy() is not supported", "data is not allocated", "Cannot access data pointer")
# What has one known value all over.
_MADE_AS = {torch.ops.aten.zeros.default: 0, torch.ops.aten.ones.default: 1}


class FakeFloats(FakeTensorMode):
    """Tensors have shapes and no memory, but for whole numbers on the CPU, which stay real.

    Programs branch on those: a DeviceMesh reads its ranks, an attention its token counts. Bytes (uint8) are buffers,
    not numbers, and hold nothing either. Of rows that a whole mask chooses the number is known, and of what was made as
    zeros, or as ones, that it is.
    """

    # What another device returns of an operator, given what the CPU does.
    corrections: ClassVar[dict[Any, Callable[[Any], Any]]] = {}

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if _is_about_whole_numbers(func, args, kwargs or {}):
            return func(*args, **(kwargs or {}))
        if func is torch.ops.aten._fused_sdp_choice.default:
            return func(*_small(args), **(kwargs or {}))
        if func is torch.ops.aten.index.Tensor:
            args = args[0], [_rows_of(each) for each in args[1]]
        if func is torch.ops.aten.eq.Scalar:
            value, version = getattr(args[0], "made_as", (None, None))
            if value is not None and version == args[0]._version:
                return torch.full(args[0].shape, args[1] == value)
        result = super().__torch_dispatch__(func, types, args, kwargs or {})
        if func in self.corrections:
            result = self.corrections[func](result)
        if func in _MADE_AS and isinstance(result, FakeTensor) and result.device.type == "cpu":
            # Until it is written to.
            result.made_as = _MADE_AS[func], result._version  # type: ignore[attr-defined]
        # It refers weakly to what it has made, and `module.to(dtype)` swaps no tensor that is referred to.
        self.fake_tensor_converter.tensor_memo.clear()
        return result


def _is_about_whole_numbers(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether an operation takes real whole numbers only, and gives such."""
    leaves = tree_leaves((args, dict(kwargs)))
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    if any(
        isinstance(t, FakeTensor) or t.dtype not in (*_REAL_DTYPES, torch.int8) or t.device.type != "cpu"
        for t in tensors
    ):
        return False
    if kwargs.get("device") not in (None, torch.device("cpu"), "cpu"):
        return False
    dtype = kwargs.get("dtype")
    if dtype is not None:
        # Block masks of flex attention are counted in int8, of real numbers. Elsewhere it is a message's buffer.
        return dtype in _REAL_DTYPES or (dtype is torch.int8 and bool(tensors))
    # What pads whole numbers gives such, whichever number it is given for the padding.
    is_whole = func is torch.ops.aten.constant_pad_nd.default or not any(
        isinstance(leaf, (float, torch.dtype)) for leaf in leaves
    )
    return is_whole and (bool(tensors) or func._schema.name in _GIVE_WHOLE_NUMBERS)


def _rows_of(index: Any) -> Any:
    """The numbers of the rows that a whole mask [N] chooses; any other index as it is."""
    is_mask = isinstance(index, Tensor) and index.dtype == torch.bool and not isinstance(index, FakeTensor)
    return index.nonzero()[:, 0] if is_mask and index.dim() == 1 else index


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


class LazyChunks:
    """What FSDP2 cuts a parameter into, each piece cut when it is asked for.

    It cuts all of them and reads the first and its own: 1,024 tensors for each of 1,100 parameters, which is minutes
    on fake tensors (a Wan of 14 billion, 2 cores, torch 2.13, 2026-11).
    """

    def __init__(self, tensor: Tensor, num_chunks: int, dim: int):
        """tensor: [..., N at dim, ...], to be cut into `num_chunks` along it."""
        self._tensor, self._dim = tensor, dim
        self._size = -(-tensor.size(dim) // num_chunks)  # as torch.chunk does

    def __getitem__(self, index: int) -> Tensor:
        left = self._tensor.size(self._dim) - index * self._size
        if left <= 0:
            return self._tensor.new_empty(0)
        return self._tensor.narrow(self._dim, index * self._size, min(self._size, left))


@dataclass(frozen=True)
class _Pieces:
    """A tensor [..., N at dim, ...] in so many pieces along it, none of which is made."""

    tensor: Tensor
    number: int
    dim: int


class _TorchWithoutPieces:
    """torch, but that what is cut into pieces and joined along another dim is copied there at once.

    FSDP2 does so where it has cut a weight along another dim than the first: for 1,024 ranks into 1,024 tensors, three
    times a block and step, which on fake tensors is most of the time of a recording.
    """

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def chunk(tensor: Tensor, number: int, dim: int = 0) -> _Pieces:
        assert tensor.size(dim) % number == 0, "FSDP2 cuts other dims than the first into even pieces only"
        return _Pieces(tensor, number, dim)

    @staticmethod
    def cat(pieces: Any, dim: int = 0, *, out: Tensor | None = None) -> Tensor:
        """Of [..., N, ..., M, ...], cut along N into P pieces: [..., N/P, ..., P·M, ...]."""
        if not isinstance(pieces, _Pieces):
            return torch.cat(pieces, dim) if out is None else torch.cat(pieces, dim, out=out)
        cut, number = pieces.dim, pieces.number
        size = list(pieces.tensor.shape)
        size[cut] //= number
        size[dim] *= number
        result = pieces.tensor.new_empty(size) if out is None else out
        # The pieces have a dim of their own, which goes before the one along which they are joined.
        stacked = pieces.tensor.unflatten(cut, (number, -1)).movedim(cut, dim)
        result.unflatten(dim, (number, -1)).copy_(stacked)
        return result


@contextlib.contextmanager
def fake_world(rank: int, world_size: int) -> Iterator[None]:
    """Within it this process is `rank` of a world whose other ranks do not exist; afterwards all is as before.

    What arrives is this rank's own data, or nothing.

    Raises:
        ValueError: a process group exists already.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore  # also registers the backend

    if dist.is_initialized():
        raise ValueError(
            f"a process group of {dist.get_world_size()} ranks ({dist.get_backend()}) is initialised in this process, "
            "and a recording needs to make its own; record in a process of its own, or destroy_process_group() first"
        )
    # Groups that are registered here are of another world.
    parallel_states.reset()
    with (
        # A recording draws numbers, and the caller's must go on as if it had not.
        torch.random.fork_rng(devices=[]),
        replaced(_fsdp_param, "_chunk_with_empty", LazyChunks),  # it is indexed only
        replaced(_fsdp_collectives, "torch", _TorchWithoutPieces()),
        # The arena that a model opens here may be made of fake tensors: nobody else may meet it.
        GLOBAL_ACTIVATION_MANAGER.show(OffloadEngine()),
        warnings.catch_warnings(),
    ):
        warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
        try:
            yield
        finally:
            parallel_states.reset(destroy_process_group=True)


class _Finished(dist.Work):
    """A finished work whose future holds what was communicated; DDP's reducer asks for it."""

    def __init__(self, tensors: list[Tensor]):
        super().__init__()
        self._future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
        self._future.set_result(tensors)

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        return self._future

    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


# For each group: what every rank has given to its first, second, … all-gather of whole numbers.
Exchanges = dict[tuple[int, ...], list[dict[int, Tensor]]]


class OtherRanks(TorchDispatchMode):
    """What the fake backend leaves out: results of all-reduces, and sizes that other ranks send.

    It fills an all-gather with this rank's own data. Where that is whole numbers, and `known` says what every rank of
    the group gives, they are filled in.
    """

    def __init__(self, known: Exchanges | None = None) -> None:
        super().__init__()
        self.given: dict[tuple[int, ...], list[Tensor]] = {}
        self._known = known or {}
        self._works: list[_Finished] = []  # C++ keeps its half only: Python's must live as long

    def forget_works(self) -> None:
        """Lets go of what was all-reduced in steps that are done."""
        self._works.clear()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.c10d.allreduce_.default:
            # DDP's reducer reads the sum from the work, and the fake backend's work holds nothing.
            self._works.append(_Finished(list(args[0])))
            return result[0], self._works[-1].boxed()
        if func is torch.ops.c10d._allgather_base_.default:
            self._exchange(list(args[0].view(-1).chunk(len(_ranks(args[2])))), args[1], _ranks(args[2]))
        elif func is torch.ops.c10d.allgather_.default:
            self._exchange(args[0][0], args[1][0], _ranks(args[2]))
        return result

    def _exchange(self, outputs: Sequence[Tensor], given: Tensor, ranks: tuple[int, ...]) -> None:
        """Notes what this rank gives, and fills the ranks' outputs with what is known of them."""
        # Counts and sizes are int64. In place of all else this rank's own data serves.
        if given.dtype != torch.int64 or isinstance(given, FakeTensor):
            return
        mine = self.given.setdefault(ranks, [])
        mine.append(given.clone())  # the caller may write over it
        rounds = self._known.get(ranks, [])
        # What ranks got the last time may have led to one more exchange, of which nothing is known yet.
        known_sizes = rounds[len(mine) - 1] if len(mine) <= len(rounds) else {}
        for rank, output in zip(ranks, outputs, strict=True):
            if rank in known_sizes and known_sizes[rank].numel() == output.numel():
                output.copy_(known_sizes[rank].view(output.shape))


def _ranks(boxed_group: Any) -> tuple[int, ...]:
    return tuple(dist.get_process_group_ranks(dist.ProcessGroup.unbox(boxed_group)))


def merge_exchanges(given: Mapping[int, Mapping[tuple[int, ...], Sequence[Tensor]]]) -> Exchanges:
    """What all recorded ranks have given, by group and in order: tensors of whole numbers."""
    merged: Exchanges = {}
    for rank, groups in given.items():
        for ranks, tensors in groups.items():
            rounds = merged.setdefault(ranks, [])
            rounds.extend({} for _ in range(len(tensors) - len(rounds)))
            for number, tensor in enumerate(tensors):
                rounds[number][rank] = tensor
    return merged


def are_settled(exchanges: Exchanges, known: Exchanges) -> bool:
    """Whether a recording with `known` gave its ranks what they would send each other."""
    for ranks, rounds in exchanges.items():
        before = known.get(ranks, [])
        for number, tensors in enumerate(rounds):
            known_sizes = before[number] if number < len(before) else {}
            first, *others = tensors.values()
            if all(torch.equal(first, other) for other in others):
                continue  # its own data is right
            if any(
                rank not in known_sizes or not torch.equal(known_sizes[rank], each)
                for rank, each in tensors.items()
            ):
                return False
    return True


@contextlib.contextmanager
def without_values(are_fake: bool = True) -> Iterator[None]:
    """Within it tensors have no values, unless `are_fake` is False; what reads one is refused with the remedy.

    Raises:
        ValueError: a step reads values of fake tensors.
    """
    if not are_fake:
        yield
        return
    try:
        with FakeFloats():
            yield
    except (*_NOT_FAKE, RuntimeError) as error:
        if not isinstance(error, _NOT_FAKE) and not any(text in str(error) for text in _FAKE_MESSAGES):
            raise
        raise ValueError(
            "a step is recorded on tensors without values, and this one reads some "
            f"({type(error).__name__}: {str(error).splitlines()[0]}); keep .item() and .numpy() out of it (return the "
            "tensor itself), or, in Python, call record_step(..., fake_tensors=False), which needs the model's memory"
        ) from error
