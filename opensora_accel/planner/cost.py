"""Seconds of one operation by itself: a roofline for kernels, and latency and bandwidth for what travels.

A kernel takes the longer of its operations at the device's reached peak and of its bytes at the reached bandwidth:

    seconds = max(flops / (peak × efficiency), bytes / (bandwidth × efficiency))

A collective takes α for each message one after another and 1/β for each byte, and which link counts follows from where
the ranks of its group stand: the mesh has its outermost axis first, and consecutive ranks fill a node. With 16 ranks as
dp_shard=2 × ulysses=8 on nodes of 8, ulysses stays on NVLink, and dp_shard pairs ranks 0 and 8 over the network.

`opensora_accel/links.py` has the formulas. A collective that was measured on as many ranks takes what it took.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

from opensora_accel.links import one_level_s, sent_bytes
from opensora_accel.plan import Plan
from opensora_accel.planner.hardware import Hardware, InPhase
from opensora_accel.planner.simulate import Contention
from opensora_accel.planner.trace import Operation, Phase

_AS_ELSEWHERE = InPhase()
# Of a device's PCIe, by the copies that take them.
_LANES = {"copy_out": "lanes out", "copy_in": "lanes in"}
# What a host's AdamW moves in a second for one rank; assumed.
HOST_OPTIMIZER_BYTES_PER_S = 20e9


@dataclass(frozen=True)
class Placement:
    """Where the ranks of a job stand: consecutive ones fill a node."""

    world_size: int
    ranks_per_node: int

    @classmethod
    def on(cls, hardware: Hardware, world_size: int) -> Placement:
        """As a launcher fills the hardware's nodes.

        Raises:
            ValueError: they do not fit on the one node that there is.
        """
        hardware.nodes_of(world_size)
        return cls(world_size, min(world_size, hardware.ranks_per_node))

    def spread(self, group: tuple[int, ...]) -> tuple[int, int]:
        """Nodes that have ranks of a group, and the fewest of its ranks on one of them."""
        return _spread(group, self.ranks_per_node)


@lru_cache(maxsize=10_000)
def _spread(group: tuple[int, ...], ranks_per_node: int) -> tuple[int, int]:
    counts: dict[int, int] = {}
    for rank in group:
        counts[rank // ranks_per_node] = counts.get(rank // ranks_per_node, 0) + 1
    return len(counts), min(counts.values())


def operation_s(operation: Operation, hardware: Hardware, placement: Placement) -> float:
    """Seconds of one operation that runs alone."""
    if operation.kind == "collective":
        return collective_s(operation, hardware, placement)
    if operation.kind in ("copy_out", "copy_in"):
        return hardware.host_link.time_s(1, operation.num_bytes)
    return kernel_s(operation, hardware) * core_share(hardware, placement)


def alone_s(operation: Operation, hardware: Hardware, placement: Placement, plan: Plan) -> float:
    """Seconds of an operation of a plan's step, with what the host takes for it where nothing hides that."""
    # Where kernels run on the host's cores, starting one is part of it.
    beside_s = 0.0 if hardware.runs_ahead else host_s(operation, hardware, placement, plan)
    if plan.cpu_offload and operation.phase == "optimizer":
        return operation.num_bytes / HOST_OPTIMIZER_BYTES_PER_S + beside_s
    return operation_s(operation, hardware, placement) + beside_s


def core_share(hardware: Hardware, placement: Placement) -> float:
    """How much longer a rank computes because ranks of its node share its cores; 1 where each has a device."""
    if not hardware.cores:
        return 1.0
    measured = hardware.crowding.get(str(placement.ranks_per_node))
    return measured or max(1.0, placement.ranks_per_node / hardware.cores)


def host_s(operation: Operation, hardware: Hardware, placement: Placement, plan: Plan) -> float:
    """The host's time to start an operation of a plan's step, after what FSDP2 does before it."""
    own_s = launch_s(operation.phase, hardware) + hardware.hook_s * operation.hooked
    if plan.uses_fsdp and operation.phase == "optimizer":
        own_s += hardware.sharded_launch_s
    return own_s * core_share(hardware, placement)


def launch_s(phase: Phase, hardware: Hardware) -> float:
    """The host's time to start one operation in a phase, on a core of its own."""
    return hardware.launch_s * _in_phase(phase, hardware).launch


def _in_phase(phase: Phase, hardware: Hardware) -> InPhase:
    as_forward = hardware.phases.get("forward", _AS_ELSEWHERE) if phase == "recompute" else _AS_ELSEWHERE
    return hardware.phases.get(phase, as_forward)


def contention(hardware: Hardware, placement: Placement) -> Contention:
    """What shares a link: collectives of a node, and those that leave it; and how late ranks come to them.

    Where nothing but PCIe is between the GPUs of a node, a device's copies to the host and back go over the same lanes
    as what its collectives send and receive.
    """
    # NVLink is faster than the lanes to the host.
    to_ranks, to_host = hardware.within.bandwidth_bytes_per_s, hardware.host_link.bandwidth_bytes_per_s
    by_pcie = hardware.runs_ahead and to_ranks <= to_host
    late = hardware.lateness.get(str(placement.ranks_per_node))

    def links(operation: Operation) -> Sequence[str]:
        if operation.kind == "collective":
            if placement.spread(operation.group)[0] > 1:
                return ("network",)
            return ("node", *_LANES.values()) if by_pcie else ("node",)
        return (_LANES[operation.kind],) if by_pcie and operation.kind in _LANES else ()

    def late_s(computed_s: float) -> float:
        return between_points(late, computed_s) if late and placement.world_size > 1 else 0.0

    # Where ranks compute on cores, whoever carries their messages needs one too.
    return Contention(links, hardware.beside_collective, hardware.cores is not None, late_s)


def kernel_s(operation: Operation, hardware: Hardware) -> float:
    """Seconds of a product, of attention, or of an operator that is bound by memory traffic, in its phase of a step."""
    return _by_figures_s(operation, hardware) * _in_phase(operation.phase, hardware).slowness


def _by_figures_s(operation: Operation, hardware: Hardware) -> float:
    moved_s = 0.0
    if operation.num_bytes:
        classes = _of_dtype((f"memory {operation.name}", "memory"), operation.dtype)
        reached = hardware.efficiency(*classes).at({"bytes": operation.num_bytes})
        moved_s = operation.num_bytes / (hardware.memory_bytes_per_s * reached) * hardware.slowness["memory"]
    if operation.kind == "memory" or not operation.flops:
        return moved_s
    if operation.kind == "gemm":
        batch, m, n, k = operation.shape if len(operation.shape) == 4 else (1, 1.0, 1.0, 1.0)
        sizes = {"flops": operation.flops / max(1, batch), "m": m, "n": n, "k": k}
        classes = _product_classes(operation.name)
    else:
        _batch, heads, queries, keys, head_dim = (
            operation.shape if len(operation.shape) == 5 else (1, 1, 1, 1, 1)
        )
        sizes = {
            "flops": operation.flops,
            "heads": heads,
            "queries": queries,
            "keys": keys,
            "head_dim": head_dim,
        }
        classes = _attention_classes(operation.name)
    share = hardware.efficiency(*_of_dtype(classes, operation.dtype)).at(sizes)
    computed_s = (
        operation.flops / (hardware.peak(operation.dtype) * share) * hardware.slowness[operation.kind]
    )
    # A point that was measured by its shape has its traffic in it.
    return computed_s if hardware.cores else max(computed_s, moved_s)


@cache
def _product_classes(name: str) -> tuple[str, ...]:
    return ("gemm convolution", "gemm") if "convolution" in name else (f"gemm {name}", "gemm")


@cache
def _of_dtype(classes: tuple[str, ...], dtype: str) -> tuple[str, ...]:
    """`memory aten.add bfloat16` and `memory bfloat16` before `memory aten.add` and `memory`: CPUs differ in these."""
    return *(f"{each} {dtype}" for each in classes), *classes


@cache
def _attention_classes(name: str) -> tuple[str, ...]:
    """`attention cudnn backward` before `attention backward`, and that before `attention`."""
    kernel = next((f" {each}" for each in ("cudnn", "flash", "efficient") if f"{each}_attention" in name), "")
    phases = (" backward", "") if "backward" in name else ("",)
    return tuple(dict.fromkeys(f"attention{k}{phase}" for phase in phases for k in (kernel, "")))


def collective_group(operation: Operation, placement: Placement) -> str:
    """What a collective is corrected by: "all-to-all 2/8" of groups of 2 ranks on nodes of 8, "... on 2 nodes"."""
    nodes, _fewest = placement.spread(operation.group)
    kind = "send" if operation.collective == "recv" else operation.collective
    beyond = f" on {nodes} nodes" if nodes > 1 else ""
    return f"{kind} {len(operation.group)}/{placement.ranks_per_node}{beyond}"


def collective_s(operation: Operation, hardware: Hardware, placement: Placement) -> float:
    """Seconds of a collective whose ranks all come at the same time."""
    times = hardware.collective_slowness.get(collective_group(operation, placement), 1.0)
    return times * _collective_by_figures_s(operation, hardware, placement)


def _collective_by_figures_s(operation: Operation, hardware: Hardware, placement: Placement) -> float:
    num_ranks = len(operation.group)
    # Messages go both ways at once, and where nothing is sent one still waits for what comes.
    kind: Any = "send" if operation.collective == "recv" else operation.collective
    num_bytes = max(operation.num_bytes, operation.received_bytes)
    if num_ranks < 2 or kind == "barrier":
        return 0.0
    nodes, _fewest = placement.spread(operation.group)
    measured = hardware.collectives.get(f"{kind} {num_ranks}/{placement.ranks_per_node}")
    if measured is not None and nodes == 1:
        return between_points(measured, num_bytes)
    if nodes > 1 and hardware.between is None:
        # Says what to do.
        hardware.nodes_of(placement.world_size)
    size_bytes = num_bytes / sent_bytes(kind, 1, num_ranks)
    links = hardware.within, hardware.between or hardware.within
    return one_level_s(kind, size_bytes, nodes, num_ranks / nodes, links)


def between_points(points: Sequence[tuple[float, float]], size: float) -> float:
    """Seconds on the straight line between the two points around a size; beyond the last ones it goes on."""
    after = next((i for i, (known, _seconds) in enumerate(points) if known >= size), len(points) - 1)
    (low, low_s), (high, high_s) = points[max(0, after - 1)], points[max(1, after)]
    return max(low_s if size < low else 0.0, low_s + (high_s - low_s) * (size - low) / (high - low))
