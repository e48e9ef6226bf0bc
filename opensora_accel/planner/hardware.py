"""What a plan runs on: devices, links, memory and how near to their peaks kernels come, as plain data with sources.

A name gives the device, devices of a node and the network between nodes, in gigabits a second for each device:

    h100x8-ib400     nodes of 8 H100, each with a port of 400 Gb/s = 50 GB/s
    h100x8           one node; more than 8 ranks have no link between them
    rtx4090          one node of as many as such a node commonly has

An efficiency is a share of the peak that depends on the shape. It is known at some points, and between them it is the
mean of all points, weighed by 1/distance⁴, where a distance is counted in doublings of each size. A product of 2e10
operations between points of 1e10 (0.5) and 1e11 (0.85): one doubling from the first and 2.32 from the second, so
(0.5/1 + 0.85/29) / (1/1 + 1/29) = 0.512. A size beyond all points counts as the last of them.

All of it is saved as JSON and read back; `opensora-accel doctor --calibrate FILE` writes such a file of this machine.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from opensora_accel.documents import Amount, Count, Duration, Ranks, parse, read_text
from opensora_accel.links import Link
from opensora_accel.observe import CPU, Architecture, gpu_of
from opensora_accel.planner.devices import DEVICES, NETWORKS

# What an efficiency may depend on.
FEATURES = ("flops", "bytes", "m", "n", "k", "heads", "queries", "keys", "head_dim")
# The bound of a file; doctor --calibrate writes 20,000.
_MOST_BYTES = 1 << 24
DTYPE_NAMES = {"fp32": "float32", "bf16": "bfloat16", "fp64": "float64"}


@dataclass(frozen=True)
class Efficiency:
    """Shares of the peak at some sizes.

    Raises:
        ValueError: no point, a share that is not in (0, 1], sizes that are not above 0, or an unknown feature.
    """

    by: tuple[str, ...]
    points: tuple[tuple[tuple[float, ...], float], ...]

    def __post_init__(self) -> None:
        unknown = [name for name in self.by if name not in FEATURES]
        if unknown or not self.by:
            raise ValueError(f"an efficiency depends on some of {', '.join(FEATURES)}; got {list(self.by)}")
        if not self.points:
            raise ValueError("an efficiency needs at least one point, as [[1e9], 0.5]")
        for sizes, share in self.points:
            if len(sizes) != len(self.by) or not all(0 < size < math.inf for size in sizes):
                raise ValueError(
                    f"a point has one size above 0 for each of {list(self.by)}; got {list(sizes)}"
                )
            if not 0 < share <= 1:
                raise ValueError(f"an efficiency is a share of the peak above 0 and at most 1; got {share}")

    def at(self, sizes: Mapping[str, float]) -> float:
        """The share of the peak at these sizes, of which there is one for each feature of `by`."""
        return _interpolate(self, tuple(max(1e-9, sizes[name]) for name in self.by))


@lru_cache(maxsize=100_000)
def _interpolate(efficiency: Efficiency, sizes: tuple[float, ...]) -> float:
    columns = list(zip(*(point for point, _share in efficiency.points), strict=True))
    clipped = [min(max(size, min(known)), max(known)) for size, known in zip(sizes, columns, strict=True)]
    total = weight = 0.0
    for point, share in efficiency.points:
        squared = sum(math.log2(size / known) ** 2 for size, known in zip(clipped, point, strict=True))
        if squared < 1e-12:
            return share
        total += share / squared**2
        weight += 1 / squared**2
    return total / weight


_UNCERTAIN = ("gemm", "attention", "memory", "collective", "copy", "host")
# What a GPU's allocator reserves; of ranks on a CPU, which only a file of `doctor --calibrate` has, their crowding.
_UNCERTAIN_OF_SOME = ("reserved", "crowding", "oversubscription")


@dataclass(frozen=True)
class InPhase:
    """How many times longer than elsewhere the host takes for an operator in a phase of a step, and a kernel."""

    launch: Amount = 1.0
    slowness: Amount = 1.0


@dataclass(frozen=True)
class Hardware:
    """Figures of one device, of its node and of the network; bytes, bytes a second, seconds.

    Raises:
        ValueError: a figure that cannot be; the message has its name and what it must be.
    """

    name: str
    # Whose operators a step has: of a GPU as compilers name it, sm_90 or gfx942, or "cpu".
    architecture: str
    # Dense operations a second, by dtype.
    peak_flops: dict[str, Amount]
    memory_bytes: Count
    memory_bytes_per_s: Amount
    # From one rank to another of its node, and to one of another node (None: there is a single node).
    within: Link
    between: Link | None
    # From a device to host memory, one way; PCIe.
    host_link: Link
    ranks_per_node: Ranks
    # On a node, whose ranks share them.
    host_memory_bytes: Count
    # The host's time for one operator, and whether kernels run beside it.
    launch_s: Duration
    # What the host takes longer for an operator on a parameter that FSDP2 has sharded.
    sharded_launch_s: Duration
    runs_ahead: bool
    # Cores that the ranks of a node share, where they compute on them.
    cores: Ranks | None
    # How many times longer compute takes while a collective runs, which needs multiprocessors or cores too.
    beside_collective: Amount
    # What is taken beside the live bytes: by the driver, by each communicator, and as a share by the allocator.
    context_bytes: Count
    communicator_bytes: Count
    allocator_slack: Amount
    # By class of kernel ("gemm", "attention", "attention backward", "memory"), or "memory aten.gelu" for one operator.
    efficiencies: dict[str, Efficiency]
    # Relative, by what takes the time: gemm, attention, memory, collective, copy, host; and what memory is "reserved".
    # Where they were measured also crowding, and oversubscription: crowding where there are more ranks than cores.
    uncertainties: dict[str, float]
    # Where each figure is from.
    sources: dict[str, str]
    # Measured collectives: "all-gather 2/4" is of groups of 2 ranks while a node's 4 ranks communicate; as (bytes that
    # a rank sends, seconds). Others follow from the links.
    collectives: dict[str, tuple[tuple[Amount, Duration], ...]] = field(default_factory=dict)
    # How many times longer a rank computes where so many of a node do, as {"2": 1.1}, measured; else by the cores.
    crowding: dict[str, Amount] = field(default_factory=dict)
    # How many times longer collectives of a group take than these figures say, by `cost.collective_group`: from a run
    # that was measured (`report --correct`).
    collective_slowness: dict[str, Amount] = field(default_factory=dict)
    # What FSDP2's hooks take of the host for each parameter of a block, before its forward and on both sides of its
    # backward.
    hook_s: Duration = 0.0
    # By phase of a step ("forward", "recompute", "backward", "optimizer"), where it was measured.
    phases: dict[str, InPhase] = field(default_factory=dict)
    # By which the last of so many ranks of a node comes later to a collective, as {"2": (seconds of compute since the
    # one before, seconds), ...}.
    lateness: dict[str, tuple[tuple[Amount, Amount], ...]] = field(default_factory=dict)
    # How many times longer kernels of a class take in a step than these figures say; `bound` multiplies it.
    slowness: dict[str, Amount] = field(
        default_factory=lambda: dict.fromkeys(("gemm", "attention", "memory"), 1.0)
    )

    def __post_init__(self) -> None:
        if self.architecture != CPU:
            Architecture.of(self.architecture)
        for name in ("memory_bytes", "memory_bytes_per_s", "ranks_per_node", "host_memory_bytes"):
            _check_number(name, getattr(self, name), above=0)
        for name in (
            "launch_s",
            "sharded_launch_s",
            "hook_s",
            "context_bytes",
            "communicator_bytes",
            "allocator_slack",
        ):
            _check_number(name, getattr(self, name), least=0)
        _check_number("beside_collective", self.beside_collective, least=1)
        if not self.peak_flops:
            raise ValueError('peak_flops needs a figure for each dtype, as {"bfloat16": 989e12}')
        for dtype, peak in self.peak_flops.items():
            _check_number(f"peak_flops.{dtype}", peak, above=0)
        for kind in ("gemm", "attention", "memory"):
            if kind not in self.efficiencies:
                raise ValueError(
                    f"efficiencies has nothing for {kind!r}; it needs gemm, attention and memory"
                )
        for name, points in self.collectives.items():
            if len(points) < 2 or any(not (size > 0 and seconds > 0) for size, seconds in points):
                raise ValueError(
                    f"collectives.{name} needs two points or more of bytes and seconds above 0; got {list(points)}"
                )
        for group, times in self.collective_slowness.items():
            _check_number(f"collective_slowness.{group}", times, above=0)
        for ranks, times in self.crowding.items():
            _check_number(f"crowding.{ranks}", times, above=0)
        _check_uncertainties(self.uncertainties)

    def peak(self, dtype: str) -> float:
        """Dense operations a second in a dtype; one that has no figure computes as float32.

        Raises:
            ValueError: there is none for float32 either.
        """
        flops = self.peak_flops.get(dtype, self.peak_flops.get("float32"))
        if flops is None:
            raise ValueError(
                f"{self.name} has no peak for {dtype}; it has {', '.join(self.peak_flops)}: add it to peak_flops"
            )
        return flops

    def efficiency(self, *classes: str) -> Efficiency:
        """That of the first class that has one."""
        return next(self.efficiencies[name] for name in classes if name in self.efficiencies)

    def nodes_of(self, world_size: int) -> int:
        """Nodes that so many ranks take.

        Raises:
            ValueError: there is one node, and it has fewer.
        """
        nodes = -(-world_size // self.ranks_per_node)
        if nodes > 1 and self.between is None:
            raise ValueError(
                f"{world_size} ranks need {nodes} nodes of {self.ranks_per_node}, but the hardware {self.name!r} names "
                f"no network between nodes; name one, as {self.name.partition('-')[0]}-ib400, or plan for at most "
                f"{self.ranks_per_node} ranks"
            )
        return nodes

    def bound(self, sign: int) -> Hardware:
        """The same with every speed at the fast (−1) or the slow (+1) end of what is uncertain."""
        factor = {kind: 1 + sign * share for kind, share in self.uncertainties.items()}

        def slower(link: Link, kind: str) -> Link:
            return Link(link.bandwidth_bytes_per_s / factor[kind], link.latency_s * factor[kind])

        return dataclasses.replace(
            self,
            name=f"{self.name}{'+' if sign > 0 else '-'}",
            within=slower(self.within, "collective"),
            between=slower(self.between, "collective") if self.between else None,
            host_link=slower(self.host_link, "copy"),
            collectives={
                name: tuple((size, seconds * factor["collective"]) for size, seconds in points)
                for name, points in self.collectives.items()
            },
            launch_s=self.launch_s * factor["host"],
            sharded_launch_s=self.sharded_launch_s * factor["host"],
            hook_s=self.hook_s * factor["host"],
            lateness={
                ranks: tuple(
                    (since_s, late_s * factor.get(self._crowd(int(ranks)), 1.0)) for since_s, late_s in points
                )
                for ranks, points in self.lateness.items()
            },
            # A rank by itself is crowded by nobody, and nobody computes faster because others do.
            crowding={
                ranks: 1.0 if ranks == "1" else max(1.0, times * factor.get(self._crowd(int(ranks)), 1.0))
                for ranks, times in self.crowding.items()
            },
            uncertainties=dict.fromkeys(self.uncertainties, 0.0),
            # Peaks are scaled and not shares, which may not pass 1.
            slowness={kind: taken * factor[kind] for kind, taken in self.slowness.items()},
        )

    def _crowd(self, num_ranks: int) -> str:
        """Which uncertainty says how much slower so many ranks of a node may be."""
        return "oversubscription" if self.cores is not None and num_ranks > self.cores else "crowding"

    # ---- as data

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=1, ensure_ascii=False) + "\n"

    def save(self, path: str | Path) -> None:
        Path(path).write_text(self.to_json(), encoding="utf-8")

    @classmethod
    def from_dict(cls, values: Any, source: str = "hardware") -> Hardware:
        """Checks and makes one of plain data.

        Raises:
            ValueError: a field is missing, unknown or wrong; the message has the source and the field.
        """
        if not isinstance(values, dict):
            raise ValueError(f"{source}: hardware is a JSON object; got {type(values).__name__}")
        fields = {each.name: each for each in dataclasses.fields(cls)}
        for key in values:
            if key not in fields:
                raise ValueError(f"{source}: hardware has no field {key!r}; {nearest(key, fields)}")
        needed = [
            name for name, each in fields.items()
            if each.default is dataclasses.MISSING and each.default_factory is dataclasses.MISSING
        ]  # fmt: skip
        missing = [name for name in needed if name not in values]
        if missing:
            raise ValueError(
                f"{source}: {', '.join(missing)} missing; write the file with doctor --calibrate"
            )
        # As JSON, where a list stands for a tuple.
        hardware: Hardware = parse(json.dumps(values), cls, source)
        return hardware

    @classmethod
    def load(cls, path: str | Path) -> Hardware:
        """What `save` wrote.

        Raises:
            ValueError: it is no plain file, or no JSON, or `from_dict` refuses it.
            OSError: the file cannot be read.
        """
        text = read_text(Path(path), most_bytes=_MOST_BYTES)
        return cls.from_dict(parse(text, dict[str, Any], f"{path}: hardware is a JSON object"), str(path))

    @classmethod
    def named(cls, name: str) -> Hardware:
        """The hardware of a name as h100x8-ib400, or of a file that ends in .json.

        Raises:
            ValueError: an unknown device or network, with the nearest name.
            OSError: the file cannot be read.
        """
        if name.endswith(".json"):
            return cls.load(name)
        devices, _, network = name.lower().partition("-")
        match = re.fullmatch(r"([a-z0-9]+?)(?:x(\d+))?", devices)
        # `rtx4090` has an x of its own.
        device, count = (
            (devices, None) if devices in DEVICES else match.groups() if match else (devices, None)
        )
        if device not in DEVICES:
            raise ValueError(
                f"no hardware is named {name!r}: a name is DEVICE, DEVICExCOUNT or DEVICExCOUNT-NETWORK, as "
                f"h100x8-ib400, or a .json file of `opensora-accel doctor --calibrate`; {nearest(device, DEVICES)}"
            )
        if count is not None and int(count) == 0:
            raise ValueError(f"{name!r} has nodes of 0 devices; a node has at least 1, as in {device}x8")
        values = {
            **DEVICES[device],
            "name": name,
            "between": None,
            "sources": dict(DEVICES[device]["sources"]),
        }
        if count is not None:
            share = int(count) / values["ranks_per_node"]
            values["ranks_per_node"] = int(count)
            values["host_memory_bytes"] = round(values["host_memory_bytes"] * min(1.0, share))
            if values["cores"] is not None:
                values["cores"] = int(count)
        if network:
            values["between"], values["sources"]["between"] = _network(name, network)
        return cls.from_dict(values, name)


def hardware_names() -> tuple[str, ...]:
    """Names of the devices that are known."""
    return tuple(DEVICES)


def this_machine(world_size: int) -> Hardware:
    """What this process runs on: as OPENSORA_ACCEL_HARDWARE names it, or the GPU's data sheet, or the CPU.

    Between nodes 400 Gb/s for each GPU are assumed.

    Raises:
        ValueError: the GPU is none of those that are known, and what to do.
    """
    import psutil
    import torch

    given = os.environ.get("OPENSORA_ACCEL_HARDWARE", "")
    if given:
        return Hardware.named(given)
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", str(world_size)))
    network = "-ib400" if per_node < world_size else ""
    host_bytes = psutil.virtual_memory().available
    if not torch.cuda.is_available():
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        named = Hardware.named(f"cpux{per_node}{network}")
        return dataclasses.replace(
            named, memory_bytes=host_bytes // per_node, host_memory_bytes=host_bytes, cores=cores
        )
    name = torch.cuda.get_device_name()
    device = gpu_of(name)
    if device is None:
        part = ", a part of a GPU" if " MIG " in name else ""
        raise ValueError(
            f"the planner has no figures of {name!r}{part}; measure them with `opensora-accel doctor --calibrate FILE` "
            "and set OPENSORA_ACCEL_HARDWARE to that file"
        )
    total_bytes = torch.cuda.get_device_properties(0).total_memory
    return dataclasses.replace(
        Hardware.named(f"{device}x{per_node}{network}"),
        memory_bytes=total_bytes,
        host_memory_bytes=host_bytes,
    )


def nearest(name: str, known: Sequence[str] | Mapping[str, Any]) -> str:
    """A hint for a message: the nearest of the known names, and all of them."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.4)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return f"{hint}There are {', '.join(known)}"


def _network(name: str, network: str) -> tuple[dict[str, float], str]:
    match = re.fullmatch(r"([a-z]+)(\d+)", network)
    if match is None or match[1] not in NETWORKS or int(match[2]) == 0:
        raise ValueError(
            f"{name!r} has no network that is known: it is a kind and gigabits a second for each device, as ib400; "
            f"{nearest(match[1] if match else network, NETWORKS)}"
        )
    latency_s, source = NETWORKS[match[1]]
    bandwidth = 0.9 * int(match[2]) * 1e9 / 8
    return {"bandwidth_bytes_per_s": bandwidth, "latency_s": latency_s}, source


def _check_uncertainties(given: Mapping[str, float]) -> None:
    known = (*_UNCERTAIN, *_UNCERTAIN_OF_SOME)
    for kind in (*_UNCERTAIN, *given):
        if kind not in known:
            raise ValueError(f"uncertainties has no {kind!r}; {nearest(kind, known)}")
        share = given.get(kind)
        if not isinstance(share, (int, float)) or not 0 <= share < 1:
            raise ValueError(f"uncertainties.{kind} is a share from 0 to below 1; got {share!r}")


def _check_number(
    name: str, value: object, *, above: float | None = None, least: float | None = None
) -> None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not is_number or (above is not None and value <= above) or (least is not None and value < least):  # type: ignore[operator]
        bound = f"above {above}" if above is not None else f"at least {least}"
        raise ValueError(f"{name} must be a finite number {bound}; got {value!r}")
