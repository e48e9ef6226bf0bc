"""Host memory as far as it goes without a GPU: what CUDA is asked for, when, and from which CPUs."""

import os
from types import SimpleNamespace

import pytest
import torch

from opensora_accel.offload import host_memory
from opensora_accel.offload.arena import Arena


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


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="Linux only")
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
    """CUDA's functions that the arena calls; notes each call."""

    def __init__(self, error=0):
        self.calls, self._error = [], error

    def cudaHostRegister(self, address, size_bytes, flags):
        cpus = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
        self.calls.append(("lock", address, size_bytes, flags, cpus))
        return self._error

    def cudaHostUnregister(self, address):
        self.calls.append(("unlock", address))


@pytest.fixture
def runtime(monkeypatch):
    def install(error=0):
        fake = Runtime(error)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "cudart", lambda: fake)
        monkeypatch.setattr(
            torch.cuda, "synchronize", lambda device: fake.calls.append(("synchronize", device))
        )
        monkeypatch.setattr(host_memory, "pci_address", lambda _index: "gpu")
        monkeypatch.setattr(host_memory, "node_cpus", lambda _address: {max(os.sched_getaffinity(0))})
        return fake

    return install


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="Linux only")
def test_exactly_the_bytes_asked_for_are_locked_near_the_gpu(runtime):
    fake = runtime()
    arena = Arena(1_000_001)
    (memory,) = arena.memory
    ((name, address, size_bytes, flags, cpus),) = fake.calls
    assert (name, address, size_bytes, flags) == ("lock", memory.data_ptr(), 1_000_001, 0)
    assert cpus == {max(os.sched_getaffinity(0))}
    view, _release = arena.allocate(64)
    del arena, memory
    assert len(fake.calls) == 1, "a view still uses the pages"
    del view, _release
    assert fake.calls[1:] == [("synchronize", 0), ("unlock", address)]


def test_pages_that_cannot_be_locked_are_used_all_the_same(runtime, caplog, monkeypatch):
    fake = runtime(error=2)
    cleared = []
    zeros = torch.zeros
    monkeypatch.setattr(host_memory.torch, "zeros", lambda *a, **k: cleared.append(k) or zeros(1))
    arena = Arena(4096)
    assert arena.allocate(4096) is not None
    assert "could not page-lock 4096 bytes for offload (CUDA error 2)" in caplog.text
    assert cleared == [{"device": "cuda"}], "CUDA keeps the error for the next launch: that was it"
    del arena
    assert [call[0] for call in fake.calls] == ["lock"]


def test_a_growing_arena_locks_each_piece(runtime):
    fake = runtime()
    arena = Arena()
    held = [arena.allocate(100), arena.allocate(100)]
    assert [call[2] for call in fake.calls] == [128, 128]
    del held, arena
    assert [call[0] for call in fake.calls] == ["lock", "lock", *["synchronize", "unlock"] * 2]
