"""Named process groups over one DeviceMesh, behind Open-Sora's getters and setters.

The registry of a job; what else outlives a call stands in docs/architecture.md. It is filled by
`init_parallel(plan)`, or group by group through the setters when another library (ColossalAI, Megatron) has made the
groups. For Plan(dp_replicate=2, ulysses=3) on 6 ranks:

    data        ranks 0 3, 1 4, 2 5      ranks that see different samples
    sequence    ranks 0 1 2, 3 4 5       ranks that share a sample
    mixed       all 6                    gradients are averaged over them
    tensor      each rank alone          and every axis by its own name: "ulysses" is 0 1 2, 3 4 5
"""

from __future__ import annotations

import datetime
import json
import logging
import math
import os
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from opensora_accel.experimental import call_experiments
from opensora_accel.plan import DATA_AXES, MESH_AXES, MIXED_AXES, SEQUENCE_AXES, Plan
from opensora_accel.watchdog import BACKGROUND, start_watchdog, stop_watchdog

__all__ = [
    "get_data_parallel_group",
    "get_exchange",
    "get_exchange_groups",
    "get_mesh",
    "get_parallel_group",
    "get_sequence_parallel_group",
    "get_tensor_parallel_group",
    "has_mesh",
    "has_parallel_group",
    "host_group",
    "init_parallel",
    "limit_waiting",
    "lines_along",
    "make_mesh",
    "own_group",
    "reset",
    "set_data_parallel_group",
    "set_exchange",
    "set_mixed_parallel_group",
    "set_sequence_parallel_group",
    "set_tensor_parallel_group",
    "start_distributed",
    "when_reset",
]

logger = logging.getLogger(__name__)

# A copy of this file under another name would have a registry of its own, which nobody fills.
if __name__ != "opensora_accel.parallel_states":
    raise ImportError(
        f"{__name__} would be a second registry of process groups beside opensora_accel.parallel_states; in place of a "
        'line in sys.modules call opensora_accel.install_as("opensora.acceleration")'
    )

_COMPOSED_AXES = {"data": DATA_AXES, "sequence": SEQUENCE_AXES, "mixed": MIXED_AXES}
_GROUP_NAMES = (*_COMPOSED_AXES, "tensor", *MESH_AXES)

# Three years. Backends count in milliseconds, which overflow.
_LONGEST_TIMEOUT_S = 1e8

# How long ranks wait for each other when they start: those of a large job may import from slow storage.
_START_TIMEOUT_S = 600.0


# sent, its group, and how many elements one rank sends to another where that is not always the same → what came.
Exchange = Callable[[Tensor, dist.ProcessGroup, Callable[[int, int], int] | None], Tensor]

_groups: dict[str, dist.ProcessGroup] = {}
_meshes: dict[str, DeviceMesh] = {}
# The same ranks over gloo, by the name of a group that carries device tensors only.
_host_groups: dict[str, dist.ProcessGroup] = {}
# By their ranks: groups of this rank that several names, or the levels of several groups, may share.
_made: dict[tuple[int, ...], dist.ProcessGroup] = {}
# By the name of a group whose all-to-alls somebody else runs: who, and over which groups, by what they are called.
_exchanges: dict[str, Exchange] = {}
_exchange_groups: dict[str, Mapping[str, dist.ProcessGroup]] = {}
# What others keep of a job, and drop with its groups.
_at_reset: list[Callable[[], None]] = []
# What `init_parallel` was given; groups that are made later get it too.
_group_timeout: datetime.timedelta | None = None
# Whether another library has decided who stands where, and made groups of its own.
_is_layout_given = False


def init_parallel(
    plan: Plan,
    device_type: str | None = None,
    timeout_s: float | None = None,
    *,
    ranks: Tensor | None = None,
    groups: Iterable[dist.ProcessGroup] = (),
) -> DeviceMesh:
    """The job's DeviceMesh, with every named group registered.

    Starts torch.distributed when nobody has: from the launcher's environment (torchrun, accelerate,
    colossalai), or as a single rank when there is none. A process group that already exists is used as it is.

    Args:
        plan: its degrees, outermost first, are the mesh's shape.
        device_type: "cuda" or "cpu"; by default cuda where every rank of this machine has a GPU of its own (and
            the process group, where one exists, can use it).
        timeout_s: how long a collective may wait, in every group of the job; by default
            OPENSORA_ACCEL_TIMEOUT, or else that of the process group (torch's own is 30 minutes, and 10 where NCCL is
            its only backend).
        ranks: who stands where on the mesh, [dp_replicate, dp_shard, ring, ulysses, tp], where another library has
            decided that; by default ranks are counted along the innermost axis first.
        groups: of that library. They are used where an axis has just their ranks, instead of new ones.

    Raises:
        ValueError: the degrees do not multiply to the number of ranks (the message lists those that fit), the
            timeout is no positive number, `ranks` do not rise along the axes, or the process has a mesh already.
    """
    global _group_timeout, _is_layout_given
    timeout = _timeout(timeout_s)
    if _meshes:
        raise ValueError(
            "init_parallel was already called in this process; call parallel_states.reset() first"
        )
    device_type = device_type or _device_type()
    if dist.is_initialized():
        plan.check_world_size(dist.get_world_size())
    else:
        # Known before any rank waits for another, so that all of them fail at once.
        plan.check_world_size(int(os.environ["WORLD_SIZE"]) if _launched() else 1)
        _start_distributed(device_type, timeout)
    _is_layout_given = ranks is not None
    if ranks is None:
        ranks = torch.arange(dist.get_world_size()).view(plan.degrees)
    else:
        _check_places(ranks, plan)
    call_experiments("check_ranks", plan, ranks)
    # Axes that span the same ranks share one group: a communicator more would cost memory of every GPU, and sockets.
    _made[tuple(ranks.flatten().tolist())] = dist.distributed_c10d._get_default_group()
    for group in groups:
        _made.setdefault(tuple(dist.get_process_group_ranks(group)), group)
    for axis in MESH_AXES:
        _groups[axis] = _group_along(ranks, (axis,), MESH_AXES, _made)
    # One group for several axes, because a collective takes one group.
    for name, axes in _COMPOSED_AXES.items():
        _groups[name] = _group_along(ranks, axes, MESH_AXES, _made)
    own_groups = [_groups[axis] for axis in MESH_AXES]
    mesh = DeviceMesh.from_group(own_groups, device_type, mesh=ranks, mesh_dim_names=MESH_AXES)
    _meshes["all"] = mesh
    _meshes.update({axis: mesh[axis] for axis in MESH_AXES})
    for name in _COMPOSED_AXES:
        _meshes[name] = DeviceMesh.from_group(_groups[name], device_type, mesh_dim_names=(name,))
    _groups["tensor"] = _groups["tp"]
    # Somebody who started torch.distributed with a timeout meant it for every group.
    backend = dist.distributed_c10d._get_default_group()._get_backend(torch.device(device_type))
    # A simulated one has no options.
    _group_timeout = timeout or getattr(backend.options, "_timeout", None)
    _set_timeout(_groups.values())
    call_experiments("init_parallel", plan, ranks)
    if device_type != "cpu" and plan.ring > 1:
        # NCCL makes a group's communicator in its first collective, in which every rank must take part. A ring passes
        # messages, and a rank without keys has none.
        dist.all_reduce(torch.zeros(1, device=device_type), group=_groups["ring"])
    start_watchdog()
    return mesh


def _check_places(ranks: Tensor, plan: Plan) -> None:
    """Checks a layout of somebody else's: torch sorts the ranks of a group, so a group's order is that of its axis."""
    if ranks.shape != plan.degrees or sorted(ranks.flatten().tolist()) != list(range(dist.get_world_size())):
        raise ValueError(
            f"the plan wants each of {dist.get_world_size()} ranks once in {plan.degrees}; got {ranks.tolist()}"
        )
    for axes in [(axis,) for axis in MESH_AXES] + [DATA_AXES, SEQUENCE_AXES]:
        for line in lines_along(ranks, axes, MESH_AXES):
            if line != sorted(line):
                raise ValueError(
                    f"ranks have to rise along {' × '.join(axes)}, because a process group has them in that order; "
                    f"got {line}"
                )


def make_mesh(num_outer: int, num_inner: int) -> DeviceMesh:
    """The ranks of *mixed* as a mesh [num_outer, num_inner] with process groups of its own; 1-D where num_outer is 1.

    Neighbouring ranks differ along the inner dim; the axis tp stays apart. Every rank of the job has to call.
    """
    # tp is the innermost axis of the job's mesh.
    whole = get_mesh()
    ranks = whole.mesh.reshape(num_outer, num_inner, whole["tp"].size())
    names, made = ("replicate", "shard", "tp"), dict[tuple[int, ...], dist.ProcessGroup]()
    groups = [_group_along(ranks, (name,), names, made) for name in names]
    mesh = DeviceMesh.from_group(groups, whole.device_type, mesh=ranks, mesh_dim_names=names)
    submesh = mesh["shard"] if num_outer == 1 else mesh["replicate", "shard"]
    _set_timeout(submesh.get_all_groups())
    return submesh


def set_exchange(
    group: dist.ProcessGroup, exchange: Exchange, groups: Mapping[str, dist.ProcessGroup]
) -> None:
    """From now on `exchange(sent, group, piece_size)` runs the group's all-to-alls, as `transport.exchange` would.

    Args:
        groups: over which it sends, by what they are called: "within a node".
    """
    _exchanges[group.group_name], _exchange_groups[group.group_name] = exchange, groups


def get_exchange(group: dist.ProcessGroup) -> Exchange | None:
    """Who runs the group's all-to-alls; None where the backend does, at once."""
    return _exchanges.get(group.group_name) if _exchanges else None


def get_exchange_groups(group: dist.ProcessGroup) -> Mapping[str, dist.ProcessGroup]:
    """The groups over which the group's all-to-alls are sent, where somebody else runs them."""
    return _exchange_groups.get(group.group_name, {})


def when_reset(forget: Callable[[], None]) -> None:
    """Calls `forget` when the job's groups are dropped, once."""
    _at_reset.append(forget)


def lines_along(ranks: Tensor, axes: Sequence[str], names: Sequence[str]) -> list[list[int]]:
    """All groups along some axes of a mesh of ranks: [groups, ranks of each]."""
    dims = [names.index(axis) for axis in axes]
    others = [dim for dim in range(ranks.dim()) if dim not in dims]
    size = math.prod(ranks.size(dim) for dim in dims)
    lines: list[list[int]] = ranks.permute(*others, *dims).reshape(-1, size).tolist()
    return lines


def _group_along(
    ranks: Tensor, axes: Sequence[str], names: Sequence[str], made: dict[tuple[int, ...], dist.ProcessGroup]
) -> dist.ProcessGroup:
    """This rank's group along some axes of a mesh of ranks, as `_own_group` finds or makes it."""
    return _own_group(lines_along(ranks, axes, names), "mesh_" + "_".join(axes), made)


def own_group(lines: list[list[int]], description: str) -> dist.ProcessGroup:
    """This rank's one of the groups [groups, ranks], which all ranks of the job name alike; one that is there is used.

    Communication: the ranks of a new group wait for each other.
    """
    group = _own_group(lines, description, _made)
    _set_timeout([group])
    return group


def _own_group(
    lines: list[list[int]], description: str, made: dict[tuple[int, ...], dist.ProcessGroup]
) -> dist.ProcessGroup:
    """This rank's one of the groups [groups, ranks]: one that is in `made`, or a new one, which is added.

    `init_device_mesh` lets all ranks of the job make every group of an axis one after the other, and wait for each
    other each time: 2,504 times for 1,024 ranks of 16 × 8 × 8, where a rank is in six groups.

    Communication: the ranks of a new group wait for each other.
    """
    own = tuple(next(line for line in lines if dist.get_rank() in line))
    if own not in made:
        # Communicators that exist from the start are split from the job's, by all ranks together.
        if dist.distributed_c10d._get_default_group().bound_device_id is not None:
            group = dist.split_group(split_ranks=lines, group_desc=description)
        elif _is_layout_given:
            # Beside groups of another library: torch names one that its ranks make alone by how many groups they are
            # in, which may differ, and they would wait for each other without end. So all ranks make all of them.
            by_line = {tuple(line): dist.new_group(line, group_desc=description) for line in lines}
            group = by_line[own]
        else:
            group = dist.new_group(own, use_local_synchronization=True, group_desc=description)
        assert group is not None
        made[own] = group
    return made[own]


def host_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """The group, or where it carries device tensors only (NCCL alone) one of the same ranks that carries host tensors.

    Communication: the first time that a group has none, its ranks start one of gloo.
    """
    if torch.device("cpu") in group._device_types:
        return group
    on_host = _host_groups.get(group.group_name)
    # A name may come again in another job of this process.
    if on_host is None or on_host not in dist.distributed_c10d._world.pg_map:
        ranks = dist.get_process_group_ranks(group)
        on_host = dist.new_group(ranks, backend="gloo", use_local_synchronization=True, group_desc="host")
        _set_timeout([on_host])
        _host_groups[group.group_name] = on_host
    return on_host


def limit_waiting(timeout_s: float) -> None:
    """From now on no collective waits longer, in any group of this process but those of threads in the background.

    A shorter limit stays, and so does one that OPENSORA_ACCEL_TIMEOUT has set. Every rank has to call.
    """
    global _group_timeout
    timeout = datetime.timedelta(seconds=timeout_s)
    if _timeout(None) is not None or (_group_timeout is not None and _group_timeout <= timeout):
        return
    _group_timeout = timeout
    _set_timeout(group for group in dist.distributed_c10d._world.pg_map if group.group_desc != BACKGROUND)


def _set_timeout(groups: Iterable[dist.ProcessGroup]) -> None:
    """Groups do not inherit the timeout of the group that they are made from."""
    if _group_timeout is not None:
        for group in groups:
            dist.distributed_c10d._set_pg_timeout(_group_timeout, group)


def start_distributed(timeout_s: float | None = None) -> None:
    """Starts torch.distributed as `init_parallel` does, where ranks have to talk before there is a Plan.

    Raises:
        ValueError: the timeout is no positive number, or the environment names ranks that cannot be.
    """
    if not dist.is_initialized():
        _start_distributed(_device_type(), _timeout(timeout_s))


def _device_type() -> str:
    num_ranks, num_gpus = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), torch.cuda.device_count()
    if not num_gpus:
        return "cpu"
    world = dist.group.WORLD
    # Whoever started torch.distributed chose a backend that cannot send from a GPU.
    if world is not None and torch.device("cuda") not in world._device_types:
        return "cpu"
    if num_gpus < num_ranks:
        logger.warning(
            "%d ranks on this machine and %d GPU(s): running on the CPU, as ranks cannot share one; "
            "start at most %d to use them, and where a launcher shows each rank one of its own let it show all "
            "(srun --gpus-per-node in place of --gpus-per-task)",
            num_ranks,
            num_gpus,
            num_gpus,
        )
        return "cpu"
    return "cuda"


def _timeout(timeout_s: float | None) -> datetime.timedelta | None:
    name, value = "timeout_s", str(timeout_s)
    if timeout_s is None:
        name, value = "OPENSORA_ACCEL_TIMEOUT", os.environ.get("OPENSORA_ACCEL_TIMEOUT", "")
        if not value:
            return None
    try:
        seconds = float(value)
    except ValueError:
        # It fails every comparison, so that one message serves whatever is wrong.
        seconds = math.nan
    if not 0 < seconds <= _LONGEST_TIMEOUT_S:
        raise ValueError(
            f"{name} is how many seconds a collective may wait, a positive number up to {_LONGEST_TIMEOUT_S:g}; "
            f"got {value}"
        )
    return datetime.timedelta(seconds=seconds)


def _start_distributed(device_type: str, timeout: datetime.timedelta | None) -> None:
    if device_type == "cuda":
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        # Before anything allocates: every process would otherwise open a context on the first GPU.
        torch.cuda.set_device(local_rank)
        # A kernel that fills every multiprocessor would hold NCCL's back: they get streams of high priority.
        os.environ.setdefault("TORCH_NCCL_HIGH_PRIORITY", "1")
        # gloo beside NCCL: sizes and other host integers are exchanged without a device synchronisation.
        backend = "cpu:gloo,cuda:nccl"
    else:
        backend = "gloo"
    if _launched():
        store, rank, world_size = next(dist.rendezvous("env://"))
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            store = _store_of_this_start(store, rank, world_size)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
    else:
        # A single rank meets nobody, and needs no address or port.
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)


def _store_of_this_start(store: dist.Store, rank: int, world_size: int) -> dist.Store:
    """A part of torchrun's store that no earlier start of the ranks has written to.

    torchrun keeps its store when it starts the ranks again, and gloo then connects to addresses of processes that
    are gone. The count of restarts that torchrun gives cannot tell the starts apart: each node counts its own. So every
    rank writes a name that was never used, and rank 0 writes the names it has read beside its own. A rank that finds
    its name among them knows that rank 0's is of this start, too, and takes it as the prefix.

    Raises:
        ValueError: ranks do not come within `_START_TIMEOUT_S`; the message names them.
    """
    mine = uuid.uuid4().hex
    store.set(f"start/{rank}", mine)
    deadline = time.monotonic() + _START_TIMEOUT_S
    while time.monotonic() < deadline:
        if rank == 0:
            here = [other for other in range(world_size) if store.check([f"start/{other}"])]
            names = {str(other): store.get(f"start/{other}").decode() for other in here}
            store.set("starts", json.dumps({"prefix": mine, "names": names}))
            missing = [other for other in range(1, world_size) if not store.check([f"{mine}/ready/{other}"])]
            if not missing:
                return dist.PrefixStore(mine, store)
        elif store.check(["starts"]):
            starts = json.loads(store.get("starts"))
            if starts["names"].get(str(rank)) == mine:
                store.set(f"{starts['prefix']}/ready/{rank}", "")
                return dist.PrefixStore(starts["prefix"], store)
        time.sleep(0.02)
    lacking = f"rank {', '.join(map(str, missing))}" if rank == 0 else "rank 0"
    raise ValueError(
        f"rank {rank} waited {_START_TIMEOUT_S:.0f} s for {lacking} to start; see what these ranks printed, and "
        "whether their machine reaches MASTER_ADDR"
    )


def _launched() -> bool:
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return False
    rank, world_size = os.environ["RANK"], os.environ["WORLD_SIZE"]
    if not rank.isdecimal() or not world_size.isdecimal() or int(rank) >= int(world_size):
        # It would wait for ranks that cannot come.
        raise ValueError(
            f"the environment says RANK={rank} of WORLD_SIZE={world_size}, but ranks count from 0 to WORLD_SIZE - 1; "
            "start them with a launcher, or unset both"
        )
    return True


def get_mesh(name: str = "all") -> DeviceMesh:
    """The mesh of `init_parallel`: all five axes, one axis, or a composed one (data, sequence, mixed).

    Raises:
        ValueError: there is no mesh of that name, or none yet.
    """
    if name not in _meshes:
        known = ", ".join(_meshes) or "none yet"
        raise ValueError(f"no mesh {name!r} is registered ({known}); call init_parallel(plan) first")
    return _meshes[name]


def has_mesh() -> bool:
    """Whether `init_parallel` has made the job's mesh."""
    return "all" in _meshes


def get_parallel_group(name: str) -> dist.ProcessGroup:
    """The group called `name`: data, sequence, mixed, tensor, or a single mesh axis.

    Raises:
        ValueError: no group has that name, or nobody has registered it yet.
    """
    if name not in _GROUP_NAMES:
        raise ValueError(f"no group is called {name!r}; the groups are {', '.join(_GROUP_NAMES)}")
    if name not in _groups:
        raise ValueError(f"group {name!r} is not registered; call init_parallel(plan) or its setter first")
    return _groups[name]


def has_parallel_group(name: str) -> bool:
    """Whether a group of that name is registered: axes are by `init_parallel` alone."""
    return name in _groups


def _register(name: str, group: dist.ProcessGroup) -> None:
    """Raises TypeError where it is none: the name of one would be found wrong in the first collective only."""
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            f"the {name} group is a torch.distributed.ProcessGroup, as dist.new_group(ranks) or "
            f'mesh.get_group("ulysses") gives it; got {group!r}'
        )
    _groups[name] = group


def set_data_parallel_group(group: dist.ProcessGroup) -> None:
    """Registers the ranks that see different samples."""
    _register("data", group)


def set_sequence_parallel_group(group: dist.ProcessGroup) -> None:
    """Registers the ranks that share one sample."""
    _register("sequence", group)


def set_tensor_parallel_group(group: dist.ProcessGroup) -> None:
    """Registers the ranks that share one layer."""
    _register("tensor", group)


def set_mixed_parallel_group(group: dist.ProcessGroup) -> None:
    """Registers the ranks over which gradients are averaged (data × sequence)."""
    _register("mixed", group)


def get_data_parallel_group(get_mixed_dp_pg: bool = False) -> dist.ProcessGroup | None:
    """The data group (the world where none was set), or the mixed group when `get_mixed_dp_pg`.

    A mixed group that nobody registered is derived where it is certain: it is the data group without sequence
    parallelism, and the world where data × sequence fills it.

    Raises:
        ValueError: the mixed group is not certain. A wrong one would load another rank's optimizer shards.
    """
    if not get_mixed_dp_pg:
        return _groups.get("data", dist.group.WORLD)
    if "mixed" in _groups:
        return _groups["mixed"]
    data = _groups.get("data", dist.group.WORLD)
    sequence = _groups.get("sequence")
    if sequence is None or sequence.size() == 1 or data is None:
        return data
    if "data" in _groups and data.size() * sequence.size() == dist.get_world_size():
        return dist.group.WORLD
    raise ValueError(
        f"the mixed group (data {data.size()} × sequence {sequence.size()}) is not registered and is not the "
        f"world of {dist.get_world_size()} ranks; call set_mixed_parallel_group(group)"
    )


def get_sequence_parallel_group() -> dist.ProcessGroup | None:
    """The sequence group, or None where there is no sequence parallelism (as in Open-Sora)."""
    return _groups.get("sequence")


def get_tensor_parallel_group() -> dist.ProcessGroup | None:
    """The tensor group, or None where there is no tensor parallelism (as in Open-Sora)."""
    return _groups.get("tensor")


def reset(destroy_process_group: bool = False, abort: bool = False) -> None:
    """Forgets every group and mesh; ends torch.distributed too when `destroy_process_group`.

    Args:
        abort: collectives may be under way for which a rank will never come. NCCL would wait for them where a group is
            destroyed, as long as a collective may take; it drops them instead.
    """
    global _group_timeout, _is_layout_given
    stop_watchdog()
    _groups.clear()
    _meshes.clear()
    _host_groups.clear()
    _made.clear()
    _exchanges.clear()
    _exchange_groups.clear()
    while _at_reset:
        _at_reset.pop()()
    _is_layout_given = False
    _group_timeout = None
    _forget_meshes()
    if destroy_process_group and dist.is_initialized():
        if abort and "nccl" in dist.get_backend_config():
            dist.distributed_c10d._abort_process_group()
        else:
            dist.destroy_process_group()


def _forget_meshes() -> None:
    """DTensor keeps the meshes that it has seen, and takes an equal one for them, whose groups have ended."""
    tensor = sys.modules.get("torch.distributed.tensor")
    if tensor is None:
        return
    propagate = getattr(tensor.DTensor._op_dispatcher.sharding_propagator, "propagate_op_sharding", None)
    clear = getattr(getattr(propagate, "cache", None), "cache_clear", None)
    if clear is not None:
        clear()
    if hasattr(torch._C, "_clear_DTensor_sharding_propagator_cache"):
        torch._C._clear_DTensor_sharding_propagator_cache()
    redistribute = sys.modules.get("torch.distributed.tensor._redistribute")
    if redistribute is not None and hasattr(redistribute, "clear_redistribute_planner_cache"):
        redistribute.clear_redistribute_planner_cache()
        redistribute._gen_transform_infos.cache_clear()
