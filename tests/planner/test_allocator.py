"""What the caching allocator reserves, by torch's rules: by hand, and of whole steps."""

import pytest
import torch

from opensora_accel import Plan
from opensora_accel.planner.allocator import CachingAllocator, Event, StepMemory
from opensora_accel.planner.operators import workspace_bytes
from opensora_accel.planner.run import trace_step
from tests.planner.steps import small
from tests.tiers import PROVE

MIB = 2**20


def test_a_part_that_fits_nowhere_takes_a_segment_although_as_much_is_free():
    allocator = CachingAllocator()
    parts = [allocator.take(100 * MIB) for _ in range(2)]
    for part in parts:
        allocator.give_back(part)
    allocator.take(150 * MIB)
    assert (allocator.live_bytes, allocator.reserved_bytes) == (150 * MIB, 350 * MIB)


@pytest.mark.parametrize(
    ("size_bytes", "segment"),
    [(1, 2 * MIB), (MIB, 2 * MIB), (MIB + 1, 20 * MIB), (10 * MIB - 1024, 20 * MIB), (10 * MIB, 10 * MIB),
     (21 * MIB + 1, 22 * MIB)],
)  # fmt: skip
def test_segments_have_the_sizes_of_torch(size_bytes, segment):
    allocator = CachingAllocator()
    allocator.take(size_bytes)
    assert allocator.reserved_bytes == segment


def test_what_is_left_of_a_large_part_is_split_off_where_it_is_more_than_a_mebibyte():
    allocator = CachingAllocator()
    allocator.take(21 * MIB + 1)
    assert allocator.live_bytes == 22 * MIB
    allocator.take(20 * MIB - 1)
    assert allocator.live_bytes == 42 * MIB
    allocator.take(10 * MIB + 1)
    assert allocator.live_bytes == 52 * MIB + 512


def test_the_smallest_part_that_is_large_enough_is_split_and_neighbours_merge():
    allocator = CachingAllocator()
    first, second = allocator.take(40 * MIB), allocator.take(64 * MIB)
    allocator.give_back(first)
    allocator.give_back(second)
    # Two of the segment of 40, and what is left of it is too small for the third.
    parts = [allocator.take(18 * MIB) for _ in range(2)]
    third = allocator.take(60 * MIB)
    assert allocator.reserved_bytes == 104 * MIB
    for part in (*parts, third):
        allocator.give_back(part)
    allocator.take(64 * MIB)
    allocator.take(40 * MIB)
    assert allocator.reserved_bytes == 104 * MIB


def test_streams_and_small_storages_have_segments_of_their_own():
    allocator = CachingAllocator()
    allocator.give_back(allocator.take(30 * MIB, "compute"))
    allocator.take(30 * MIB, "gather")
    allocator.take(1000, "compute")
    assert allocator.reserved_bytes == 62 * MIB


def test_free_segments_go_back_before_the_driver_gives_more_than_it_has():
    allocator = CachingAllocator(limit_bytes=100 * MIB)
    kept, freed = allocator.take(30 * MIB), allocator.take(30 * MIB)
    allocator.give_back(freed)
    allocator.take(60 * MIB)
    assert allocator.reserved_bytes == allocator.most_reserved_bytes == 90 * MIB
    allocator.give_back(kept)
    # What is left over of a segment that was taken then is free as any other.
    rest = allocator.take(79 * MIB - 1024)
    assert allocator.reserved_bytes == (60 + 80) * MIB  # how much is missing is told
    allocator.give_back(rest)
    allocator.take(80 * MIB)
    assert allocator.reserved_bytes == 140 * MIB


def test_an_optimizer_makes_its_state_among_the_fragments_of_the_first_step():
    # A step holds 100 MiB for a while. The state lies where it was, and the next step finds too little there.
    memory = StepMemory(
        held=[Event(0, 50 * MIB)],
        made_by_optimizer=[Event(1, 20 * MIB)],
        steps=[Event(2, 100 * MIB), Event(2, -100 * MIB), Event(3, MIB, phase="optimizer"),
               Event(3, -MIB, phase="optimizer")],
    )  # fmt: skip
    # Small ones come from a segment of 2 MiB.
    assert memory.replayed(num_steps=1).lost_bytes == (50 + 100 + 2 - 150) * MIB
    assert memory.replayed(num_steps=2).lost_bytes == (50 + 100 + 2 + 100 - 170) * MIB
    # A state of a quarter of it leaves no more room.
    assert memory.replayed(state_ratio=0.25).lost_bytes == (50 + 100 + 2 + 100 - 155) * MIB


def test_a_copy_of_a_block_frees_what_the_one_before_it_made():
    # Three copies of a block make storage 5 each, and free the one before theirs, which was recorded as storage 4.
    steps = [Event(4, 30 * MIB)]
    for _ in range(3):
        steps += [Event(5, 30 * MIB), Event(4, -30 * MIB)]
    steps += [Event(5, -30 * MIB)]
    assert _most_live(StepMemory(steps=steps)) == 60 * MIB


PLANS = (
    Plan(),
    Plan(checkpoint="full", precision="bf16"),
    Plan(dp_shard=2, ulysses=2, sharding="zero3", checkpoint="full", precision="bf16"),
    Plan(dp_replicate=4),
)


@PROVE
@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.parametrize("layers", [3, 12])
def test_the_replay_holds_as_much_as_the_step(layers, plan):
    trace = trace_step(small(layers=layers, fused_optimizer=True, architecture="sm_90"), plan)
    storages = trace.storages
    assert len(storages.steps) > 100
    allocator_live = _most_live(storages)
    # Sizes are rounded up to 512 bytes.
    most = trace.peak_bytes + 512 * (
        len(storages.held) + len(storages.made_by_optimizer) + len(storages.steps)
    )
    # DDP's buckets are made once, and are not among what a step makes.
    least = trace.peak_bytes - trace.bytes_by_kind_at_peak.get("communication", 0)
    assert least <= allocator_live <= most


def _most_live(storages):
    return storages.replayed().most_live_bytes


def test_attentions_backward_holds_what_its_kernel_adds_up():
    """By hand: 16 heads of 128 over 32,768 tokens; in fp32 a row of dq, and one number of the output's row."""
    aten = torch.ops.aten
    q = torch.empty(1, 16, 32_768, 128, device="meta")
    flash = aten._scaled_dot_product_flash_attention_backward.default
    assert workspace_bytes(flash, (q, q)) == 4 * 32_768 * 16 * 129 == 258 * 2**20
    assert workspace_bytes(aten._scaled_dot_product_cudnn_attention_backward.default, (q, q)) == 258 * 2**20
    # Rows of 72 numbers are padded to 96; samples one behind the other are [B · S, H, D].
    assert (
        workspace_bytes(aten._flash_attention_backward.default, (None, q[0, ..., :72]))
        == 4 * 32_768 * 16 * 97
    )
    for others in (
        aten._scaled_dot_product_flash_attention,
        aten._scaled_dot_product_flash_attention_for_cpu_backward,
    ):
        assert workspace_bytes(others.default, (q, q)) == 0


def test_that_memory_is_there_while_the_kernel_runs_and_no_longer():
    workload = small(layers=3, architecture="sm_90")
    trace = trace_step(workload, Plan(precision="bf16"))
    q = next(each for each in trace.operations if each.name.endswith("attention_backward")).shape
    batch, heads, queries, _keys, head_dim = q
    size_bytes = 4 * batch * heads * queries * (-(-head_dim // 32) * 32 + 1)
    events = trace.storages.steps
    made = [index for index, event in enumerate(events) if event.size_bytes == size_bytes]
    # Among the tokens, and to the text.
    assert len(made) == 2 * trace.num_blocks
    for index in made:
        freed = next(
            i for i, event in enumerate(events) if i > index and event.storage == events[index].storage
        )
        assert freed == index + 1
