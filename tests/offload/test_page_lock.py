"""Page-locking as far as it goes without a GPU: what CUDA is asked for, when, and from which CPUs."""

import os

import pytest
import torch

from opensora_accel.offload import arena as module
from opensora_accel.offload import numa
from opensora_accel.offload.arena import Arena


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
        monkeypatch.setattr(numa, "_pci_address", lambda _index: "gpu")
        monkeypatch.setattr(numa, "node_cpus", lambda _address: {max(os.sched_getaffinity(0))})
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
    monkeypatch.setattr(module.torch, "zeros", lambda *a, **k: cleared.append(k) or zeros(1))
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
