"""Attention that is never recomputed: what Wan-14B sends to the host for it, and what of that compute waits for.

The table of docs/offload.md: `pytest -s -m prove tests/planner/test_kept_attention.py`.
"""

import dataclasses
import itertools

import pytest

from opensora_accel import Plan
from opensora_accel.planner.cost import Placement
from opensora_accel.planner.hardware import Hardware
from opensora_accel.planner.models import named_workload
from opensora_accel.planner.run import trace_step
from opensora_accel.planner.search import simulated
from tests.tiers import PROVE

CLIPS = {37_440: (93, 480, 832), 75_600: (81, 720, 1280)}
BLOCKS, WIDTH, HEADS = 40, 5120, 40
# A link of PCIe 5 for each GPU, one that two share, and one that cannot carry it.
LINKS, SLOW = (50e9, 25e9), 1e9
GIB = 2**30


def moved_bytes(trace):
    return sum(each.num_bytes for each in trace.operations if each.kind == "copy_out")


@PROVE
@pytest.mark.parametrize("tokens", CLIPS)
def test_what_attention_returned_waits_on_the_host_and_nobody_waits_for_it(tokens):
    frames, height, width = CLIPS[tokens]
    workload = named_workload("wan2.1-14b", frames=frames, height=height, width=width)
    assert workload.num_tokens == tokens
    inputs = 2 * tokens * WIDTH
    each = {"full": inputs, "selective": 2 * inputs + 4 * tokens * HEADS}
    step_s = {}
    for (checkpoint, entry), offload in itertools.product(each.items(), (0.0, 1.0)):
        plan = Plan(checkpoint=checkpoint, offload=offload, precision="bf16")
        trace = trace_step(workload, plan)
        assert moved_bytes(trace) == pytest.approx(offload * (BLOCKS - 1) * entry, rel=1e-3)
        for bytes_per_s in (*LINKS, SLOW):
            hardware = Hardware.named("h100x8")
            link = dataclasses.replace(hardware.host_link, bandwidth_bytes_per_s=bytes_per_s)
            timeline = simulated(
                trace, dataclasses.replace(hardware, host_link=link), Placement.on(hardware, 1)
            )
            exposed_s = sum(
                seconds for stream, seconds in timeline.exposed_s.items() if stream.startswith("copy")
            )
            step_s[checkpoint, offload, bytes_per_s] = timeline.step_s
            print(
                f"| {tokens:,} | {checkpoint} | {offload:g} | {moved_bytes(trace) / GIB:.1f} GiB | "
                f"{bytes_per_s / 1e9:.0f} GB/s | {timeline.step_s:.2f} s | {1e3 * exposed_s:.0f} ms |"
            )
            assert (exposed_s > 0.01 * timeline.step_s) == (offload > 0 and bytes_per_s == SLOW)
    for bytes_per_s in LINKS:
        full, kept = (step_s[each, 1.0, bytes_per_s] for each in ("full", "selective"))
        assert kept < 0.9 * full and kept < 1.01 * step_s["selective", 0.0, bytes_per_s]
