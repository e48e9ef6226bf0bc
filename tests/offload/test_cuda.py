"""The same on a real GPU: streams that are slow on purpose, and torch's own CUDA sanitizer."""

import os
import subprocess
import sys

import pytest
import torch

from opensora_accel.offload import OffloadEngine, Queue, Queues
from opensora_accel.offload.arena import Arena
from opensora_accel.offload.device import CudaQueues
from tests.offload import scenarios
from tests.tiers import NEEDS_GPU

pytestmark = NEEDS_GPU

_SLEEP_CYCLES = 20_000_000


class SlowQueues(CudaQueues):
    """Every copy begins about ten milliseconds late."""

    def copy(self, queue, destination, source):
        with torch.cuda.stream(self._stream(queue)):
            torch.cuda._sleep(_SLEEP_CYCLES)
        super().copy(queue, destination, source)


@pytest.fixture(autouse=True)
def on_cuda(monkeypatch):
    monkeypatch.setattr(scenarios, "DEVICE", "cuda")
    # Attention's backward sums with atomics otherwise, and no two runs agree in every bit.
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # which torch then asks for
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("mode", ["full", "selective"])
@pytest.mark.parametrize("scenario", scenarios.SCENARIOS)
def test_slow_copies_change_no_bit(scenario, mode):
    results = []
    for make in (lambda _device: Queues(), SlowQueues, CudaQueues):
        with scenarios.engine(OffloadEngine(make)) as manager:
            results.append(scenarios.SCENARIOS[scenario](manager, mode))
            manager.close()
    for found in results[1:]:
        assert all(map(torch.equal, found, results[0])), "host copies wait, these must too"


def test_an_arena_is_page_locked_while_anything_uses_it():
    arena = Arena(1_000_001)
    (memory,) = arena.memory
    assert memory.numel() == 1_000_001 and memory.is_pinned()
    view, release = arena.allocate(1000)
    del arena, memory, release
    assert view.is_pinned()


def test_arenas_of_any_sizes_are_page_locked(caplog):
    """CUDA locks no page twice, so no two slabs may share one."""
    arena = Arena()
    held = [arena.allocate(size) for size in 4 * (100, 4097, 70_000, 150_000)]
    assert all(view.is_pinned() for view, _ in held) and not caplog.records


def test_copies_run_on_two_streams_of_their_own():
    queues = CudaQueues(torch.device("cuda", 0))
    streams = {queues._stream(queue) for queue in Queue}
    assert len(streams) == 3 and queues._stream(Queue.COMPUTE) == torch.cuda.current_stream()


@pytest.mark.slow
@pytest.mark.parametrize("scenario", ["two_steps", "aborted_backward"])
def test_the_cuda_sanitizer_finds_no_race(scenario):
    program = (
        "from opensora_accel.offload import OffloadEngine\n"
        "from tests.offload import scenarios\n"
        "scenarios.DEVICE = 'cuda'\n"
        f"for mode in ('full', 'selective'):\n"
        "    with scenarios.engine(OffloadEngine()) as manager:\n"
        f"        scenarios.{scenario}(manager, mode)\n"
        "        manager.close()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "TORCH_CUDA_SANITIZER": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and "CSAN" not in done.stderr, done.stderr
