"""What the planner says a step needs is what the operating system sees of the process, to 2 %."""

import ctypes
import gc
import sys
from functools import partial
from pathlib import Path

import psutil
import pytest
import torch
from diffusers import WanTransformer3DModel

from opensora_accel import Plan, parallel_states
from opensora_accel.checkpoint import GLOBAL_ACTIVATION_MANAGER
from opensora_accel.observe.meshes import MeshShape, Run
from opensora_accel.planner.candidates import describe
from opensora_accel.planner.hardware import Hardware
from opensora_accel.planner.run import trace_step
from opensora_accel.planner.search import communication_buffer_bytes
from opensora_accel.planner.workload import workload_of_model

pytestmark = [
    pytest.mark.prove,
    pytest.mark.skipif(sys.platform != "linux", reason="the peak is read from Linux's /proc"),
]
# mallopt's names: from this size on a tensor has pages of its own, which go back as soon as it is freed. By default
# glibc raises the size as it goes, and keeps what was freed.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, OWN_PAGES_BYTES = -1, -3, 2**16


def wan(layers, channels):
    return WanTransformer3DModel(
        num_attention_heads=8, attention_head_dim=channels // 8, in_channels=4, out_channels=4, text_dim=64,
        freq_dim=64, ffn_dim=4 * channels, num_layers=layers, rope_max_seq_len=64,
    )  # fmt: skip


def inputs_of(side, _model, dtype):
    return {
        "hidden_states": torch.randn(1, 4, 4, 2 * side, 2 * side, dtype=dtype),
        "timestep": torch.tensor([500.0]),
        "encoder_hidden_states": torch.randn(1, 16, 64, dtype=dtype),
        "return_dict": False,
    }


def workload(layers, channels, side):
    """4 · side² tokens."""
    return workload_of_model(
        "Wan",
        partial(wan, layers, channels),
        partial(inputs_of, side),
        fused_optimizer=False,
        architecture="cpu",
    )


SMALL, LARGE = (1, 64, 4), (6, 512, 16)


def resident_bytes():
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return psutil.Process().memory_info().rss


def peak_of_process(plan):
    """Bytes of pages that a rank's process has more in its third step than before the model was built."""
    libc = ctypes.CDLL(None)
    libc.mallopt(M_MMAP_THRESHOLD, OWN_PAGES_BYTES)
    libc.mallopt(M_TRIM_THRESHOLD, OWN_PAGES_BYTES)
    shape, rank = MeshShape.of(plan), torch.distributed.get_rank()
    run = Run(shape, rank, shape.data_rank(rank), shape.data_size)

    def steps(sizes, number):
        # Ranks of a sequence group draw the same clip.
        torch.manual_seed(0)
        given = workload(*sizes)
        model = given.model_fn()
        one_pass = given.prepare(model, run)
        optimizer = torch.optim.AdamW(model.parameters(), fused=False)

        def step():
            one_pass(True)
            optimizer.step()
            optimizer.zero_grad()

        for _ in range(number):
            step()
        # Linux forgets the highest number of pages that the process had.
        Path("/proc/self/clear_refs").write_text("5")
        step()
        status = Path("/proc/self/status").read_text().split("VmHWM:")[1]
        return 1024 * int(status.split()[0])

    def forget():
        GLOBAL_ACTIVATION_MANAGER.close()
        parallel_states.reset()

    # Libraries are loaded, and their threads have their stacks.
    steps(SMALL, 1)
    forget()
    before = resident_bytes()
    peak = steps(LARGE, 2)
    forget()
    return peak - before


PLANS = [
    Plan(),
    Plan(checkpoint="full"),
    Plan(checkpoint="selective"),
    Plan(checkpoint="full", offload=1.0),
    Plan(ulysses=2),
    Plan(ring=2, checkpoint="full"),
    Plan(dp_shard=2, sharding="zero3"),
]


@pytest.mark.parametrize("plan", PLANS, ids=describe)
def test_a_process_needs_what_was_planned(ranks, plan):
    trace = trace_step(workload(*LARGE), plan)
    libraries = communication_buffer_bytes(trace, Hardware.named("cpu"))
    planned = trace.peak_bytes + trace.host_bytes + libraries
    found = ranks(plan.world_size, peak_of_process, plan)[0]
    error = found / planned - 1
    print(f"{describe(plan)}: planned {planned / 1e6:.1f} MB, the process {found / 1e6:.1f} MB: {error:+.2%}")
    assert abs(error) <= 0.02
