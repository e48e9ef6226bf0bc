"""Whether ranks that should hold the same parameters and gradients do, to the last bit, by a number for each of them.

Of a weight of rows 0 … 3 on four ranks, two copies of two shards (FSDP2's HSDP), ranks 0 and 2 hold the same:

    rank             0        1        2        3
    rows             0 1      2 3      0 1      2 3
    digest           17       42       17       40        rank 3 got something else than rank 1, or lost it
    least, greatest  17 17    40 42    17 17    40 42     over the copies, in one all-reduce of both

A digest is made on the device. It reads each number once, as an integer, in sums along rows and columns of a table with
odd weights. One number that is another, two that changed places, all with the other sign: each gives another digest.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from opensora_accel.communications import gather_objects
from opensora_accel.parallel_states import get_data_parallel_group, get_mesh, has_mesh
from opensora_accel.watchdog import named
from shardformer.tensor_parallel import group_of_cut

# Columns of the table that a tensor is read as.
_COLUMNS = 4096
# Numbers of 64 bits are read as two: the highest bit of a sum, which wraps around, would be blind to pairs of signs.
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int32}
# Odd factors with many bits: of two places no weight is that of another (Knuth's and a Weyl sequence's).
_OF_ROWS, _OF_COLUMNS = 0x9E3779B97F4A7C15 - 2**64, 0xD1B54A32D192ED03 - 2**64
# A digest and its negative have to fit.
_MASK = 2**62 - 1
# In the place of a digest, of a rank that has none to compare.
_UNASKED = 2**62
_STATE = "state"
_KINDS: dict[str, Literal["weights", "gradients", "optimizer states"]] = {
    "weight": "weights", "gradient": "gradients", _STATE: "optimizer states",
}  # fmt: skip


def digest(tensor: Tensor) -> Tensor:
    """A number from 0 to 2^62 - 1 of the bits of a tensor, an int64 scalar on its device."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    bits = tensor.detach().contiguous().view(-1)
    bits = bits.view(torch.int8 if tensor.dtype == torch.bool else INTEGERS[tensor.element_size()])
    num_rows = bits.numel() // _COLUMNS
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for table in (
        bits[: num_rows * _COLUMNS].view(num_rows, _COLUMNS),
        bits[num_rows * _COLUMNS :].view(1, -1),
    ):
        # int64 sums wrap around, which loses nothing.
        rows, columns = (
            torch.arange(1, 2 * size + 1, 2, device=tensor.device) * factor
            for size, factor in zip(table.shape, (_OF_ROWS, _OF_COLUMNS), strict=True)
        )
        total = total + (table.sum(1, dtype=torch.int64) * rows).sum()
        total = total * 3 + (table.sum(0, dtype=torch.int64) * columns).sum()
    return (total ^ (total >> 31)) & _MASK


def digest_of_all(tensors: Iterable[Tensor]) -> Tensor:
    """One number of the bits of several tensors, in this order, as `digest` gives it."""
    total = torch.zeros((), dtype=torch.int64)
    for tensor in tensors:
        each = digest(local_part(tensor))
        total = total.to(each.device) * 3 + each
    return (total ^ (total >> 31)) & _MASK


def states_of(model: nn.Module, optimizers: Iterable[torch.optim.Optimizer]) -> dict[str, dict[str, Tensor]]:
    """What optimizers keep of each parameter, by its name and that of the entry: numbers, and tensors of its shape.

    What is kept in codes of few bits is left out.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found: dict[str, dict[str, Tensor]] = {}
    for optimizer in optimizers:
        for parameter, entries in optimizer.state.items():
            kept = {
                entry: value
                for entry, value in sorted(entries.items())
                if isinstance(value, Tensor)
                and type(local_part(value)) in (Tensor, nn.Parameter)
                and (value.numel() == 1 or value.shape == parameter.shape)
            }
            if id(parameter) in names and kept:
                found.setdefault(names[id(parameter)], {}).update(kept)
    return found


def norms(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The 2-norm of each tensor, as scalars on their devices: fp32, or fp64 where one of the tensors is."""
    # torch refuses to round to less than it was given.
    is_double = any(tensor.dtype == torch.float64 for tensor in tensors)
    return tuple(torch._foreach_norm(list(tensors), 2, dtype=torch.float64 if is_double else torch.float32))


@dataclass(frozen=True)
class Holders:
    """Which ranks hold a parameter: those that hold the same part of it, and those that hold other parts."""

    # By the axis' name.
    same: Mapping[str, dist.ProcessGroup]
    parts: tuple[dist.ProcessGroup, ...]


def holders_of(model: nn.Module) -> dict[str, Holders]:
    """The holders of each parameter, by its name: whole ones, FSDP2's shards, and parts of tensor-parallel layers."""
    holders: dict[str, Holders] = {}
    if not dist.is_initialized():
        return {name: Holders({}, ()) for name, _ in model.named_parameters()}
    world = dist.group.WORLD
    assert world is not None
    tensor_group = get_mesh().get_group("tp") if has_mesh() and get_mesh()["tp"].size() > 1 else None
    cuts = group_of_cut(model)
    for name, parameter in model.named_parameters():
        cut = cuts.get(name)
        same: dict[str, dist.ProcessGroup] = {}
        parts = [] if cut is None else [cut]
        if isinstance(parameter, DTensor):
            mesh = parameter.device_mesh
            # HSDP replicates along one dim of the mesh, and FSDP2 shards along the other.
            for dim, placement in enumerate(parameter.placements):
                group = mesh.get_group(dim)
                if placement.is_replicate():
                    same["dp_replicate"] = group
                else:
                    parts.append(group)
            # Not cut between tensor ranks: each of them has the same shard.
            if cut is None and tensor_group is not None:
                same["tp"] = tensor_group
        elif cut is None:
            same["world"] = world
        else:
            # A part of a tensor-parallel layer is the same on all ranks at this place of tp.
            mixed = get_data_parallel_group(get_mixed_dp_pg=True)
            if mixed is not None:
                same["data × sequence"] = mixed
        holders[name] = Holders(
            {axis: group for axis, group in same.items() if group.size() > 1},
            tuple(group for group in parts if group.size() > 1),
        )
    return holders


class Difference(NamedTuple):
    """The first tensor that differs between ranks that should hold the same."""

    kind: Literal["weights", "gradients", "optimizer states"]
    # Who has what.
    text: str


@torch.no_grad()
def first_difference(
    model: nn.Module,
    holders: Mapping[str, Holders],
    optimizers: Iterable[torch.optim.Optimizer] | None = None,
) -> Difference | None:
    """Names the first parameter, or else gradient or optimizer state, that differs between ranks that should hold the
    same.

    None where all are equal; the same on every rank.

    Args:
        optimizers: those whose states are compared too, on all ranks or none. A rank that has no state of a parameter,
            as where ranks share the states, is not asked.

    Communication: two integers for each parameter, its gradient and its state, over the ranks that hold the same; where
    one differs, an object all-gather.
    """
    # Weights come first: where they differ, so will all that is computed with them.
    tensors: dict[str, Tensor] = {f"weight {name}": parameter for name, parameter in model.named_parameters()}
    tensors |= {f"gradient {name}": p.grad for name, p in model.named_parameters() if p.grad is not None}
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    device = next(iter(tensors.values())).device
    digests = {key: digest(local_part(tensor)).to(device) for key, tensor in tensors.items()}
    kinds: tuple[str, ...] = ("weight", "gradient")
    if optimizers is not None:
        kinds += (_STATE,)
        for name, states in states_of(model, optimizers).items():
            tensors[f"{_STATE} {name}"] = next(iter(states.values()))
            digests[f"{_STATE} {name}"] = digest_of_all(states.values()).to(device)
    # A gradient that one rank alone lacks has to differ, and not to hang.
    keys = [f"{kind} {name}" for kind in kinds for name, _ in model.named_parameters()]
    lacking = {kind: torch.full((), -1, dtype=torch.int64, device=device) for kind in kinds}
    lacking[_STATE] = torch.full((), _UNASKED, dtype=torch.int64, device=device)
    by_holders: dict[tuple[tuple[str, dist.ProcessGroup], ...], list[str]] = defaultdict(list)
    for key in keys:
        by_holders[tuple(holders[key.partition(" ")[2]].same.items())].append(key)
    compared: list[tuple[list[str], Tensor]] = []
    for axes, names in by_holders.items():
        mine = torch.stack([digests.get(key, lacking[key.partition(" ")[0]]) for key in names])
        for _axis, group in axes:
            # One reduction for both: the greatest is the least of the negatives. Who is not asked is never the least.
            extremes = torch.cat([mine, torch.where(mine == _UNASKED, mine, -mine)])
            dist.all_reduce(extremes, dist.ReduceOp.MIN, group)
            least, greatest = extremes[: len(names)], -extremes[len(names) :]
            compared.append((names, (least != greatest) & (least != _UNASKED)))
            mine = least
    any_differs = torch.tensor(0.0, device=device)
    for _, differs in compared:
        any_differs = torch.maximum(any_differs, differs.any().float())
    # Ranks of other shards do not see it by themselves.
    dist.all_reduce(any_differs, dist.ReduceOp.MAX)
    if not any_differs.item():
        return None
    seen = {
        key: (
            int(digests[key]) if key in digests else None,
            float(torch.linalg.vector_norm(local_part(tensors[key]).float())) if key in digests else 0.0,
            {axis: dist.get_process_group_ranks(group) for axis, group in holders[_name(key)].same.items()},
        )
        for names, differs in compared
        for key, is_other in zip(names, differs.tolist(), strict=True)
        if is_other
    }
    return _describe(keys, gather_objects(seen))


def _describe(keys: Sequence[str], everyone: Sequence[Mapping[str, Any]]) -> Difference:
    """Names the first of `keys` that some rank has seen to differ, with the ranks of each value.

    Args:
        everyone: of each rank, by key: the digest or None, the norm, and by axis the ranks that should hold the same.
    """
    everywhere = {key for each in everyone for key in each}
    # More than one axis may hold the same: the narrowest that differs is named.
    key = next(key for key in keys if key in everywhere)
    values = {rank: each[key] for rank, each in enumerate(everyone) if key in each}
    _, _, groups = next(iter(values.values()))
    axis, members = min(
        (
            (axis, ranks)
            for axis, ranks in groups.items()
            if len({values[r][0] for r in ranks if r in values}) > 1
        ),
        key=lambda item: len(item[1]),
        default=("world", [*values]),
    )
    by_value: dict[int | None, list[int]] = defaultdict(list)
    for member in members:
        by_value[values[member][0]].append(member)
    # What most ranks hold is taken to be right; where none has a majority all are listed.
    most = max(Counter({value: len(ranks) for value, ranks in by_value.items()}).values())
    shown = [
        f"{named(ranks, 'rank')} {'has' if len(ranks) == 1 else 'have'} "
        f"{'none' if value is None else f'the norm {values[ranks[0]][1]:.9g}'}"
        for value, ranks in sorted(by_value.items(), key=lambda item: (len(item[1]) == most, item[1]))
    ]
    along = "over all ranks" if axis == "world" else f"along {axis}"
    others = f"; {len(everywhere) - 1} more tensors differ" if len(everywhere) > 1 else ""
    kind = key.partition(" ")[0]
    told = {_STATE: "optimizer's state"}.get(kind, kind)
    text = f"the {told} of {_name(key)} differs {along}: {', '.join(shown)}{others}"
    return Difference(_KINDS[kind], text)


def _name(key: str) -> str:
    return key.partition(" ")[2]


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
