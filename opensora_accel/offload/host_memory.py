"""Host memory that a GPU reaches at the full speed of its link: page-locked to the byte, and on its own NUMA node.

Memory of another CPU socket is reached at a fraction of the bandwidth. A page belongs to the node of the thread that
touches it first, and page-locking touches it. So the thread moves next to the GPU while it locks.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

_CGROUP = Path("/sys/fs/cgroup")

# Ranks of this machine, by launcher: torchrun, accelerate and colossalai; Open MPI; MPICH; srun.
_LOCAL_RANKS = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "SLURM_NTASKS_PER_NODE")


def allocate_on_host(size_bytes: int) -> Tensor:
    """uint8 [size_bytes], page-locked where there is a GPU; `pin_memory=True` would round up to a power of two."""
    # The device is named, because `torch.set_default_device` would have it elsewhere.
    memory = torch.empty(size_bytes, dtype=torch.uint8, device="cpu")
    is_fake = type(memory) is not Tensor  # FakeTensorMode accounts for memory without having it
    if not size_bytes or not torch.cuda.is_available() or is_fake:
        return memory
    device, address = torch.cuda.current_device(), memory.data_ptr()
    with near_device(device):
        error = int(torch.cuda.cudart().cudaHostRegister(address, size_bytes, 0))
    if not error:

        def unlock_pages() -> None:
            torch.cuda.synchronize(device)  # a copy from these pages may be under way
            torch.cuda.cudart().cudaHostUnregister(address)

        # The storage lives for as long as any view of it does. At the interpreter's end CUDA may be gone already,
        # and the system takes everything back.
        weakref.finalize(memory.untyped_storage(), unlock_pages).atexit = False
        return memory
    logger.warning(
        "could not page-lock %d bytes for offload (CUDA error %d): copies will wait for the host; "
        "free host memory, or ask for a smaller arena (setup_arena)",
        size_bytes,
        error,
    )
    with contextlib.suppress(RuntimeError):
        # CUDA keeps the error for the next launch, which would fail for it: let that be this one.
        torch.zeros(1, device="cuda")
    return memory


@contextlib.contextmanager
def near_device(index: int) -> Iterator[None]:
    """Within it this thread runs on the CPUs of GPU `index`'s NUMA node, where the machine tells which they are."""
    near = node_cpus(pci_address(index)) if hasattr(os, "sched_setaffinity") else set()
    before = os.sched_getaffinity(0) if near else set()
    if not near & before:  # unknown, or a launcher has bound this process elsewhere: its choice stands
        yield
        return
    os.sched_setaffinity(0, near & before)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def pci_address(index: int) -> str | None:
    """Where GPU `index` is attached, as Linux writes it (`0000:1b:00.0`); None where CUDA does not tell."""
    properties = torch.cuda.get_device_properties(index)
    domain, bus, device = (
        getattr(properties, f"pci_{name}_id", None) for name in ("domain", "bus", "device")
    )
    if domain is None or bus is None or device is None:
        return None
    return f"{domain:04x}:{bus:02x}:{device:02x}.0"


def node_cpus(address: str | None, sysfs: Path = Path("/sys")) -> set[int]:
    """The CPUs next to a PCI device; all of them where the firmware does not say, none where nothing tells."""
    if address is None:
        return set()
    try:
        listed = (sysfs / "bus/pci/devices" / address / "local_cpulist").read_text(encoding="ascii")
        cpus: set[int] = set()
        for part in filter(None, listed.strip().split(",")):  # 0-3,8,10-11
            first, _, last = part.partition("-")
            cpus |= set(range(int(first), int(last or first) + 1))
        return cpus
    except (OSError, ValueError) as error:
        logger.debug("no NUMA node for %s: %s", address, error)
        return set()


def default_limit_bytes() -> int:
    """Half of the host memory that is free now, shared by the ranks of this machine."""
    given = next((os.environ[name] for name in _LOCAL_RANKS if name in os.environ), "1")
    return _free_host_bytes() // 2 // int(given.partition("(")[0])  # srun writes 8(x2) for two machines


def _free_host_bytes() -> int:
    """What Linux calls available, within the container's limit."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            fields = dict(line.split(":", 1) for line in file)
        available = int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):
        # macOS: it counts no free pages, so half of all of them stands for what is free.
        available = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    return min(available, _free_container_bytes())


def _free_container_bytes() -> int:
    """What a container's own limit (cgroup v2) leaves; no limit is as much as there can be."""
    try:
        limit, used, statistics = (
            (_CGROUP / f"memory.{name}").read_text(encoding="ascii").strip()
            for name in ("max", "current", "stat")
        )
        # Files that were read count as used, and are let go when memory is asked for.
        files = dict(line.split() for line in statistics.splitlines())["inactive_file"]
        return max(0, int(limit) - int(used) + int(files)) if limit != "max" else sys.maxsize
    except (OSError, ValueError, KeyError):
        return sys.maxsize
