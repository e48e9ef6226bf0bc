"""Host memory that a GPU reaches at the full speed of its link: whole pages, page-locked, on its own NUMA node.

CUDA locks whole pages, and no page twice. So every piece of memory has pages of its own, mapped for it alone, and is
rounded up to them: 100 bytes take 4096, 1,000,001 bytes take 1,003,520.

Memory of another CPU socket is reached at a fraction of the bandwidth. A page belongs to the node of the thread that
touches it first, and page-locking touches it. So the thread moves next to the GPU while it locks.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
import os
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

# ---- pages

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *3 * [ctypes.c_int], ctypes.c_long]
_LIBC.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_LIBC.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

# What the system is asked to do with the pages: the advice, and what holds where it is taken and where it is refused.
_ADVICE = (
    # One page of 2 MiB instead of 512, wherever one fits whole: so it never takes more memory.
    ("MADV_HUGEPAGE", "huge pages where they fit", "no huge pages"),
    # Otherwise a process that is forked, to decode videos say, shares the pages. The first one to write to such a
    # page gets a copy of it, and the GPU goes on with the other one.
    ("MADV_DONTFORK", "forked processes do not see it", "forked processes see it"),
)


def allocate_on_host(size_bytes: int) -> Tensor:
    """uint8 [size_bytes] in whole pages of its own, page-locked where there is a GPU.

    Of the last page a part may be unused; `pin_memory=True` would round up to a power of two. The pages go back to
    the system when no tensor uses them any more. Forked processes cannot read them.

    Raises:
        MemoryError: the system has no memory for it.
    """
    # The device is named, because `torch.set_default_device` would have it elsewhere.
    is_fake = (
        type(torch.empty(0, device="cpu")) is not Tensor
    )  # FakeTensorMode counts memory without having it
    if not size_bytes or is_fake:
        return torch.empty(size_bytes, dtype=torch.uint8, device="cpu")
    num_bytes = -(-size_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
    address = _map_pages(num_bytes)
    advised = "; ".join(_advise(address, num_bytes, *advice) for advice in _ADVICE)
    device, locked = (
        _lock_pages(address, num_bytes) if torch.cuda.is_available() else (None, "there is no GPU")
    )
    logger.debug("%d bytes in whole pages for offload: %s; %s", num_bytes, advised, locked)
    # torch holds `memory` for as long as any tensor uses its bytes. At the interpreter's end CUDA may be gone
    # already, and the system takes everything back.
    memory = (ctypes.c_uint8 * size_bytes).from_address(address)
    weakref.finalize(memory, _give_back, address, num_bytes, device, os.getpid()).atexit = False
    return torch.frombuffer(memory, dtype=torch.uint8)


def _map_pages(num_bytes: int) -> int:
    """The address of new pages. Two tensors on the heap may share a page, which CUDA refuses to lock twice."""
    access, kind = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    address: int = _LIBC.mmap(None, num_bytes, access, kind, -1, 0)
    if address == ctypes.c_void_p(-1).value:
        raise MemoryError(
            f"the system has no {num_bytes} bytes of host memory for offload ({os.strerror(ctypes.get_errno())}); "
            "free host memory, raise the limit of this process (ulimit -v) or container, or ask for a smaller arena "
            "(setup_arena)"
        )
    return address


def _advise(address: int, num_bytes: int, name: str, taken: str, refused: str) -> str:
    """What holds after the advice `name`."""
    if not hasattr(mmap, name):
        return f"{refused} (this system has no {name})"
    if _LIBC.madvise(address, num_bytes, getattr(mmap, name)):
        return f"{refused} ({os.strerror(ctypes.get_errno())})"
    return taken


def _lock_pages(address: int, num_bytes: int) -> tuple[int | None, str]:
    """The GPU for which they are page-locked now, if they are, and how that went."""
    device = torch.cuda.current_device()
    with near_device(device) as cpus:
        error = int(torch.cuda.cudart().cudaHostRegister(address, num_bytes, 0))
    if not error:
        where = (
            f"by one of the CPUs {sorted(cpus)} next to"
            if cpus
            else "by any CPU, none is known to be next to"
        )
        return device, f"page-locked {where} GPU {device}"
    logger.warning(
        "could not page-lock %d bytes for offload (CUDA error %d): copies will wait for the host; "
        "free host memory, or ask for a smaller arena (setup_arena)",
        num_bytes,
        error,
    )
    with contextlib.suppress(RuntimeError):
        # CUDA keeps the error for the next launch, which would fail for it: let that be this one.
        torch.zeros(1, device="cuda")
    return None, f"not page-locked (CUDA error {error})"


def _give_back(address: int, num_bytes: int, device: int | None, process: int) -> None:
    # A forked process has copies of its parent's objects, and drops them, but not of the pages. What it has at their
    # address is other memory.
    if process != os.getpid():
        return
    if device is not None:
        torch.cuda.synchronize(device)  # a copy from these pages may be under way
        torch.cuda.cudart().cudaHostUnregister(address)
    _LIBC.munmap(address, num_bytes)


# ---- the node of a GPU


@contextlib.contextmanager
def near_device(index: int) -> Iterator[set[int]]:
    """Within it this thread runs on the CPUs of GPU `index`'s NUMA node, where the machine says which they are.

    Yields those CPUs, or none where the thread stays where it was. Containers allow it, whereas Docker's refuse
    `mbind` without CAP_SYS_NICE.
    """
    near = node_cpus(pci_address(index)) if hasattr(os, "sched_setaffinity") else set()
    before = os.sched_getaffinity(0) if near else set()
    if not near & before:  # unknown, or a launcher has bound this process elsewhere: its choice stands
        yield set()
        return
    os.sched_setaffinity(0, near & before)
    try:
        yield near & before
    finally:
        os.sched_setaffinity(0, before)


def pci_address(index: int) -> str | None:
    """Where GPU `index` is attached, as Linux writes it (`0000:1b:00.0`); None where CUDA does not say."""
    properties = torch.cuda.get_device_properties(index)
    domain, bus, device = (
        getattr(properties, f"pci_{name}_id", None) for name in ("domain", "bus", "device")
    )
    if domain is None or bus is None or device is None:
        return None
    return f"{domain:04x}:{bus:02x}:{device:02x}.0"


def node_cpus(address: str | None, sysfs: Path = Path("/sys")) -> set[int]:
    """The CPUs next to a PCI device; all of them where the firmware does not say, none where nothing says so."""
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


# ---- how much

_CGROUP = Path("/sys/fs/cgroup")

# Ranks of this machine, by launcher: torchrun, accelerate and colossalai; Open MPI; MPICH; srun.
_LOCAL_RANKS = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "SLURM_NTASKS_PER_NODE")


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
