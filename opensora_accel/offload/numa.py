"""Which CPUs sit next to a GPU. Memory of another socket is reached at a fraction of the link's bandwidth."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import torch

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def near_device(index: int) -> Iterator[None]:
    """Within it this thread runs on the CPUs of the GPU's NUMA node, where the machine tells which they are.

    Memory that the thread touches first is then taken from that node.
    """
    near = node_cpus(_pci_address(index)) if hasattr(os, "sched_setaffinity") else set()
    before = os.sched_getaffinity(0) if near else set()
    if not near & before:  # unknown, or a launcher has bound this process elsewhere: its choice stands
        yield
        return
    os.sched_setaffinity(0, near & before)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def node_cpus(pci_address: str | None, sysfs: Path = Path("/sys")) -> set[int]:
    """The CPUs of the node that a PCI device (`0000:1b:00.0`) is attached to; empty where nothing tells."""
    if pci_address is None:
        return set()
    try:
        node = int((sysfs / "bus/pci/devices" / pci_address / "numa_node").read_text(encoding="ascii"))
        if node < 0:  # the firmware does not say
            return set()
        listed = (sysfs / f"devices/system/node/node{node}/cpulist").read_text(encoding="ascii")
        return _parse_cpulist(listed)
    except (OSError, ValueError) as error:
        logger.debug("no NUMA node for %s: %s", pci_address, error)
        return set()


def _parse_cpulist(text: str) -> set[int]:
    """`0-3,8,10-11`, as Linux writes it."""
    cpus: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cpus |= set(range(int(first), int(last or first) + 1))
    return cpus


def _pci_address(index: int) -> str | None:
    properties = torch.cuda.get_device_properties(index)
    numbers = [getattr(properties, f"pci_{name}_id", None) for name in ("domain", "bus", "device")]
    if any(number is None for number in numbers):
        return None
    domain, bus, device = numbers
    return f"{domain:04x}:{bus:02x}:{device:02x}.0"
