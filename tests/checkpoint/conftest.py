"""Every test here runs on the host's queues and on late ones, and on a GPU where there is one."""

import gc

import pytest
import torch

from opensora_accel.checkpoint import GLOBAL_ACTIVATION_MANAGER as MANAGER
from opensora_accel.offload import OffloadEngine
from opensora_accel.offload.device import queues_for
from tests.checkpoint import steps
from tests.offload.devices import LateQueues
from tests.tiers import NEEDS_GPU

CUDA = pytest.param("cuda", marks=NEEDS_GPU)


@pytest.fixture(autouse=True, params=["host", "late", CUDA])
def device(request, monkeypatch):
    """The global manager in front of a new engine, on one kind of queues; nothing of a test stays in it."""
    if request.param == "cuda":
        monkeypatch.setattr(steps, "DEVICE", "cuda")
        # Attention's backward sums with atomics otherwise, and no two runs agree in every bit.
        monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # which torch then asks for
        torch.use_deterministic_algorithms(True)
    made = []

    def make_queues(device):
        made.append(LateQueues() if request.param == "late" else queues_for(device))
        return made[-1]

    with MANAGER.show(OffloadEngine(make_queues)):
        yield steps.DEVICE
        gc.collect()
        assert MANAGER.counters.in_use_bytes == 0, "a ticket outlived its graph"
        for queues in made:
            assert getattr(queues, "freed_under_copy", 0) == 0, "memory was freed under a copy"
        MANAGER.close()
    torch.use_deterministic_algorithms(False)
