"""Every test here runs on the host's queues and on late ones, and on a GPU where there is one."""

import gc

import pytest
import torch

from opensora_accel.checkpoint import GLOBAL_ACTIVATION_MANAGER as MANAGER
from tests.checkpoint import steps
from tests.offload.devices import LateQueues

CUDA = pytest.param(
    "cuda", marks=[pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]
)


@pytest.fixture(autouse=True, params=["host", "late", CUDA])
def device(request, monkeypatch):
    """The global manager, new, on one kind of queues; nothing of a test stays in it."""
    monkeypatch.setattr(MANAGER, "_queues", {})
    monkeypatch.setattr(MANAGER, "_num_users", 0)  # models of other tests, which nobody has unwrapped
    if request.param == "late":
        monkeypatch.setattr(MANAGER, "_make_queues", LateQueues)
    if request.param == "cuda":
        monkeypatch.setattr(steps, "DEVICE", "cuda")
        # Attention's backward sums with atomics otherwise, and no two runs agree in every bit.
        torch.use_deterministic_algorithms(True, warn_only=True)
    MANAGER.close()
    MANAGER.reset_counters()
    MANAGER.decisions.clear()
    yield steps.DEVICE
    gc.collect()
    assert MANAGER.counters.in_use_bytes == 0, "a ticket outlived its graph"
    for queues in MANAGER._queues.values():
        assert getattr(queues, "freed_under_copy", 0) == 0, "memory was freed under a copy"
    MANAGER.close()
    MANAGER.reset_counters()
    torch.use_deterministic_algorithms(False)
