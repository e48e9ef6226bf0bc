"""What is checked before a collective, so that all ranks fail together instead of hanging."""

from __future__ import annotations

import contextlib
import ctypes
import os
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from opensora_accel.communications.sizes import exchange_integers
from opensora_accel.communications.transport import all_gather
from opensora_accel.parallel_states import host_group

T = TypeVar("T")


def debug_enabled() -> bool:
    """Whether OPENSORA_ACCEL_DEBUG=1 asks for comparisons that cost communication."""
    return os.environ.get("OPENSORA_ACCEL_DEBUG", "0") not in ("", "0")


_compares_inputs = True


def inputs_are_compared() -> bool:
    """Whether a sharded model looks if the ranks that share a sample have the same one."""
    return _compares_inputs


_compares_next_forwards = False


def every_forward_is_compared() -> bool:
    """Whether inputs are compared in this forward too, though the first ones have been."""
    return _compares_next_forwards or debug_enabled()


def compare_next_forwards(are_compared: bool) -> None:
    """Says whether the inputs of the forwards that follow are compared; who watches a run asks for some steps'."""
    global _compares_next_forwards
    _compares_next_forwards = are_compared


@contextlib.contextmanager
def without_comparing_inputs() -> Iterator[None]:
    """The verifier compares more than inputs, and has to see the whole of a wrong step."""
    global _compares_inputs
    before, _compares_inputs = _compares_inputs, False
    try:
        yield
    finally:
        _compares_inputs = before


def check_group(process_group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """The group, or the world for None.

    Raises:
        ValueError: torch.distributed has no world yet, or this rank is not in the group.
    """
    group = dist.group.WORLD if process_group is None else process_group
    if group is None:
        raise ValueError(
            "torch.distributed is not initialised; call opensora_accel.init_parallel(plan) first"
        )
    if not isinstance(group, dist.ProcessGroup):
        raise ValueError(f"this rank is not a member of the process group it was given ({group!r})")
    return group


def check_dim(name: str, dim: int, input_: Tensor) -> int:
    """`dim`, counted from 0.

    Args:
        input_: of any shape.

    Raises:
        ValueError: the tensor has no such dim.
    """
    if not -input_.dim() <= dim < input_.dim():
        raise ValueError(
            f"{name}={dim} is out of range for a tensor of {input_.dim()} dims, shape {tuple(input_.shape)}"
        )
    return dim % input_.dim()


def gather_objects(mine: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """What every rank of the group passed, in order of ranks; of one process without a group, its own alone.

    Args:
        mine: anything that can be pickled; small, because it goes through host memory.
        group: by default all ranks of the job.

    Communication: a gather of one integer, and one of as many bytes as the longest has.
    """
    group = dist.group.WORLD if group is None and dist.is_initialized() else group
    if group is None:
        return [mine]
    group, text = host_group(group), pickle.dumps(mine)
    lengths = [length for (length,) in exchange_integers([len(text)], group)]
    # An all-gather needs one size on all ranks.
    padded = torch.zeros(max(lengths), dtype=torch.uint8)
    padded[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    gathered = torch.empty(group.size() * len(padded), dtype=torch.uint8)
    all_gather(gathered, padded, group)
    rows = gathered.view(group.size(), -1)
    # Pickles end by themselves: the padding behind them is not read. numpy would give bytes too; a step needs none.
    return [pickle.loads(ctypes.string_at(row.data_ptr(), row.numel())) for row in rows]


# What ranks have to have alike: what is compared, and how it is shown.
Facts = Mapping[str, tuple[Any, str]]


def compare_facts(
    facts: Facts,
    groups: Sequence[dist.ProcessGroup],
    problem: str = "",
    rules: Callable[[str], str] = lambda name: "",
) -> None:
    """Compares what the ranks are about to do.

    Args:
        groups: from the innermost axis outwards.
        problem: what is wrong with this rank's facts by themselves, if anything is.
        rules: for a fact's name what else is to be said where it differs.

    Communication: an object all-gather for each group.

    Raises:
        ValueError: the same on every rank, where one has a problem, or other facts than the first rank.
    """
    everyone = [(dist.get_rank(), problem, facts)]
    for group in groups:
        everyone = [each for of_rank in gather_objects(everyone, group) for each in of_rank]
    # What is wrong by itself says more than that it differs from others.
    for rank, wrong, _ in everyone:
        if wrong:
            raise ValueError(f"rank {rank}: {wrong}")
    first, _, expected = everyone[0]
    for rank, _, other in everyone:
        for name, (compared, shown) in expected.items():
            if other[name][0] != compared:
                raise ValueError(
                    f"the ranks disagree: {name} is {shown} on rank {first} and {other[name][1]} on rank {rank}"
                    f"{rules(name)}"
                )


def check_agreement(
    operation: str, input_: Tensor, group: dist.ProcessGroup, free_dim: int | None = None, **options: Any
) -> None:
    """In debug mode, compares a collective's call over the ranks of the group.

    Args:
        input_: of any shape; `free_dim` is the dim whose size may differ between ranks.
        options: what else must be equal.

    Raises:
        ValueError: on every rank; it names the first rank whose call differs from rank 0's.
    """
    if group.size() == 1 or torch.compiler.is_compiling() or not debug_enabled():
        return
    shape = ["any" if dim == free_dim else size for dim, size in enumerate(input_.shape)]
    shown = ", ".join(
        [
            f"shape {tuple(input_.shape)}",
            str(input_.dtype),
            *(f"{name}={value}" for name, value in options.items()),
        ]
    )
    free = "" if free_dim is None else f" (dim {free_dim} may differ between ranks)"
    call = (operation, shape, str(input_.dtype), free_dim, options), f"{operation}({shown}){free}"
    compare_facts({"the call": call}, [group])


_wants_exact = False


@contextlib.contextmanager
def exact_collectives() -> Iterator[None]:
    """Within it collectives that round give exact results, and fail where their own are beyond their bounds."""
    global _wants_exact
    before, _wants_exact = _wants_exact, True
    try:
        yield
    finally:
        _wants_exact = before


def wants_exact() -> bool:
    """Whether a proof runs, in which a collective that rounds is held against the exact one."""
    return _wants_exact
