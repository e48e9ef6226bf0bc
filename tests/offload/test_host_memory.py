"""Host memory as far as it goes without a GPU: what CUDA is asked for, when, and from which CPUs."""

import gc
import logging
import mmap
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from opensora_accel.offload import Arena, OffloadEngine, host_memory

PAGE = mmap.PAGESIZE
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="Linux only")


@pytest.fixture
def sysfs(tmp_path):
    def write(path, text):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)

    write("bus/pci/devices/0000:1b:00.0/local_cpulist", "0-2,8,10-11\n")
    write("bus/pci/devices/0000:2b:00.0/local_cpulist", "\n")
    return tmp_path


@pytest.mark.parametrize(
    ("address", "cpus"),
    [("0000:1b:00.0", {0, 1, 2, 8, 10, 11}), ("0000:2b:00.0", set()), ("0000:3b:00.0", set()), (None, set())],
)
def test_node_cpus(sysfs, address, cpus):
    assert host_memory.node_cpus(address, sysfs) == cpus


def test_the_address_of_a_gpu(monkeypatch):
    properties = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x1B, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _index: properties)
    assert host_memory.pci_address(0) == "0000:1b:00.0"
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _index: SimpleNamespace())
    assert host_memory.pci_address(0) is None


@LINUX
def test_the_thread_is_bound_and_let_go_again(monkeypatch):
    before = os.sched_getaffinity(0)
    monkeypatch.setattr(host_memory, "pci_address", lambda _index: "gpu")
    monkeypatch.setattr(host_memory, "node_cpus", lambda _address: {min(before), 10_000})
    with host_memory.near_device(0):
        assert os.sched_getaffinity(0) == {min(before)}
    assert os.sched_getaffinity(0) == before
    # A launcher that has bound the process to another node has its reasons.
    monkeypatch.setattr(host_memory, "node_cpus", lambda _address: {10_000})
    with host_memory.near_device(0):
        assert os.sched_getaffinity(0) == before


# ---- page-locking


class Runtime:
    """CUDA's functions that lock pages, with CUDA's refusals: no page twice, nothing unlocked that is not locked.

    `error` is what every call to lock returns instead.
    """

    ALREADY_LOCKED, NOT_LOCKED = 712, 713  # cudaErrorHostMemoryAlreadyRegistered, ...NotRegistered

    def __init__(self, error=0):
        self.calls, self.locked, self._error = [], {}, error

    def cudaHostRegister(self, address, size_bytes, flags):
        cpus = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
        pages = set(range(address // PAGE, -(-(address + size_bytes) // PAGE)))
        error = self._error or (any(pages & other for other in self.locked.values()) and self.ALREADY_LOCKED)
        self.calls.append(("lock", address, size_bytes, flags, cpus))
        if not error:
            self.locked[address] = pages
        return error

    def cudaHostUnregister(self, address):
        self.calls.append(("unlock", address))
        assert is_mapped(address), "the pages went back to the system while they were locked"
        return 0 if self.locked.pop(address, None) else self.NOT_LOCKED

    @property
    def locked_bytes(self):
        return PAGE * sum(len(pages) for pages in self.locked.values())


def is_mapped(address):
    """Whether this process has memory there."""
    areas = (
        line.split(maxsplit=1)[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines()
    )
    return any(int(start, 16) <= address < int(end, 16) for start, end in areas)


@pytest.fixture
def runtime(monkeypatch):
    """Installs it; whatever a test locks must be unlocked once nothing uses it."""
    installed = []

    def install(error=0):
        fake = Runtime(error)
        installed.append(fake)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "cudart", lambda: fake)
        monkeypatch.setattr(
            torch.cuda, "synchronize", lambda device: fake.calls.append(("synchronize", device))
        )
        monkeypatch.setattr(host_memory, "pci_address", lambda _index: "gpu")
        monkeypatch.setattr(host_memory, "node_cpus", lambda _address: {max(os.sched_getaffinity(0))})
        return fake

    yield install
    gc.collect()
    assert not any(fake.locked for fake in installed), "pages stay locked for ever"


@LINUX
def test_whole_pages_are_locked_near_the_gpu_while_anything_uses_them(runtime):
    fake = runtime()
    arena = Arena(1_000_001)
    (memory,) = arena.memory
    ((name, address, size_bytes, flags, cpus),) = fake.calls
    assert memory.numel() == 1_000_001
    assert (name, address, size_bytes, flags) == ("lock", memory.data_ptr(), 245 * 4096, 0)
    assert cpus == {max(os.sched_getaffinity(0))}
    view, _release = arena.allocate(64)
    del arena, memory
    assert len(fake.calls) == 1, "a view still uses the pages"
    del view, _release
    assert fake.calls[1:] == [("synchronize", 0), ("unlock", address)]
    assert not is_mapped(address)


@LINUX
def test_no_page_is_locked_twice_whatever_the_sizes(runtime, caplog):
    """Sizes that the C library puts side by side on the heap: small ones, and all once its threshold has grown."""
    fake = runtime()
    for _ in range(2):  # the second round comes after memory was freed, which moves the threshold
        engine = OffloadEngine()
        engine.setup_arena(limit_bytes=1 << 26)
        sizes = 4 * (100, 4095, 4096, 4097, 70_000, 150_000, 1_000_001)
        tickets = [engine.offload(torch.full((size,), 7, dtype=torch.uint8)) for size in sizes]
        assert len(fake.locked) == len(sizes) and not caplog.records
        assert all(bool((engine.onload(ticket) == 7).all()) for ticket in tickets)
        # What is rounded: less than a page a slab.
        asked = sum(memory.numel() for memory in engine.arena.memory)
        assert asked <= fake.locked_bytes < asked + PAGE * len(sizes)
        engine.close()
        assert fake.locked, "the tickets can still be read"
        tickets.clear()
        gc.collect()
        assert not fake.locked


@LINUX
def test_pages_that_cannot_be_locked_are_used_all_the_same(runtime, caplog, monkeypatch):
    fake = runtime(error=2)
    cleared = []
    zeros = torch.zeros
    monkeypatch.setattr(host_memory.torch, "zeros", lambda *a, **k: cleared.append(k) or zeros(1))
    arena = Arena(4096)
    assert arena.allocate(4096) is not None
    assert "could not page-lock 4096 bytes for offload (CUDA error 2)" in caplog.text
    assert cleared == [{"device": "cuda"}], "CUDA keeps the error for the next launch: that was it"
    address = arena.memory[0].data_ptr()
    del arena
    assert [call[0] for call in fake.calls] == ["lock"]
    assert not is_mapped(address)


@LINUX
def test_a_growing_arena_locks_each_piece(runtime):
    fake = runtime()
    arena = Arena()
    held = [arena.allocate(100), arena.allocate(100)]
    assert [call[2] for call in fake.calls] == [PAGE, PAGE]
    assert arena.size_bytes == 256, "what is rounded is not counted"
    del held, arena
    assert [call[0] for call in fake.calls] == ["lock", "lock", *["synchronize", "unlock"] * 2]


# ---- pages


def mapped_flags(address):
    """What Linux notes of the memory there: `dc` is left out of a fork, `hg` wants huge pages."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        start, _, end = line.split(maxsplit=1)[0].partition("-")
        if end:
            inside = int(start, 16) <= address < int(end, 16)
        elif inside and start == "VmFlags:":
            return set(line.split()[1:])
    return set()


@LINUX
def test_pages_are_huge_and_left_out_of_a_fork_where_the_system_can(caplog):
    caplog.set_level(logging.DEBUG)
    arena = Arena(8 << 20)
    address = arena.memory[0].data_ptr()
    assert address % PAGE == 0 and "dc" in mapped_flags(address)
    has_huge_pages = Path("/sys/kernel/mm/transparent_hugepage").exists()
    assert ("hg" in mapped_flags(address)) is has_huge_pages
    (record,) = caplog.records
    assert "8388608 bytes in whole pages" in record.message
    assert ("huge pages where they fit" in record.message) is has_huge_pages
    assert "forked processes do not see it" in record.message and "there is no GPU" in record.message


@LINUX
def test_what_the_system_refuses_is_said(monkeypatch, caplog):
    caplog.set_level(logging.DEBUG)
    monkeypatch.setattr(mmap, "MADV_HUGEPAGE", 9_999)
    monkeypatch.delattr(mmap, "MADV_DONTFORK")
    Arena(100)
    (record,) = caplog.records
    assert "no huge pages (Invalid argument)" in record.message
    assert "forked processes see it (this system has no MADV_DONTFORK)" in record.message


FORK = """
import ctypes, gc, mmap, os, sys, torch
from pathlib import Path
from opensora_accel.offload import OffloadEngine
from tests.offload.test_host_memory import is_mapped

engine = OffloadEngine()
engine.setup_arena(1 << 26)
ticket = engine.offload(torch.arange(1000))
address = engine.arena.memory[0].data_ptr() + (1 << 25)
child = os.fork()
if not child:
    unseen = not is_mapped(address)
    # What the child maps may come to lie where the parent's pages are: dropping the arena must leave that alone.
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    mine = libc.mmap(address, 4096, 3, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    ctypes.memset(mine, 5, 4096)
    del engine, ticket
    gc.collect()
    os._exit(0 if unseen and mine == address and is_mapped(address) and ctypes.string_at(mine, 1) == b"\5" else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert torch.equal(engine.onload(ticket), torch.arange(1000))
"""


@pytest.mark.slow
@LINUX
def test_a_forked_process_does_not_see_the_pages():
    """Nor does it give back what it does not have; the parent reads on. What is alive at the end does no harm."""
    done = subprocess.run([sys.executable, "-c", FORK], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")


@LINUX
def test_memory_goes_back_to_the_system_with_the_last_ticket():
    engine = OffloadEngine()
    engine.setup_arena()
    first, second = (engine.offload(torch.full((1 << 16,), value)) for value in (1.0, 2.0))
    addresses = [ticket.host.data_ptr() for ticket in (first, second)]
    del first
    gc.collect()
    engine.trim()
    assert list(map(is_mapped, addresses)) == [False, True]
    engine.close()
    assert is_mapped(addresses[1]) and bool((engine.onload(second) == 2).all())
    del second
    gc.collect()
    assert not is_mapped(addresses[1])


@pytest.fixture
def no_memory():
    """This process may map 64 MiB more than it has, no more."""
    import resource

    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * PAGE + (64 << 20), before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


@LINUX
def test_memory_that_cannot_be_had_is_told_with_the_remedy(no_memory, caplog):
    with pytest.raises(
        MemoryError,
        match=r"no 1073741824 bytes of host memory for offload \(Cannot allocate memory\); .*ulimit -v.*setup_arena",
    ):
        Arena(1 << 30)
    # In the middle of a step nothing fails: the tensor stays on the device, as with any full arena.
    engine = OffloadEngine()
    engine.setup_arena(limit_bytes=1 << 40)
    small = torch.ones(1 << 20, dtype=torch.uint8)
    assert engine.offload(small) is not None
    assert engine.arena.allocate(1 << 30) is None and engine.arena.allocate(1 << 30) is None
    warned = [record.message for record in caplog.records]
    assert len(warned) == 1 and "the offload arena stays at 1048576 bytes" in warned[0]
