"""What a storage is for, and where the step was at its peak, on models whose sizes are counted by hand."""

import collections
import gc
import weakref

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from opensora_accel.checkpoint import GLOBAL_ACTIVATION_MANAGER, checkpoint_blocks
from opensora_accel.observe.kinds import KINDS
from opensora_accel.observe.owners import DETAILED_KINDS, ELSEWHERE, Owners
from opensora_accel.observe.places import OPTIMIZER, Place, Places, find_blocks
from opensora_accel.profiler import MemoryPeak, MemoryTimeline
from opensora_accel.profiler.memory import AllocatorCounter, Moment, table_of
from opensora_accel.profiler.records import MemorySample

WIDTH, ROWS = 16, 100
# Of a layer's weights and bias, and of what goes in or comes out.
WEIGHTS, HIDDEN = 4 * (WIDTH * WIDTH + WIDTH), 4 * ROWS * WIDTH


class Model(nn.Module):
    """Three blocks of a linear layer and a sine; with `checkpointed` they are recomputed by torch's checkpoint."""

    def __init__(self, checkpointed):
        super().__init__()
        self.checkpointed = checkpointed
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sigmoid(), nn.Softplus()) for _ in range(3)
        )

    def forward(self, x):
        hidden = self.embed(x)
        for block in self.blocks:
            hidden = checkpoint(block, hidden, use_reentrant=False) if self.checkpointed else block(hidden)
        return hidden


@pytest.fixture(autouse=True)
def no_slots():
    """Nothing that another test of this process has moved to the host leaves slots behind, which are memory too."""
    GLOBAL_ACTIVATION_MANAGER.close()


def step(model, optimizer=None):
    model(torch.ones(ROWS, WIDTH)).sum().backward()
    if optimizer is not None:
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("fake", [False, True])
def test_a_checkpointed_model_holds_its_inputs_and_what_one_block_recomputes(fake):
    with FakeTensorMode(allow_non_fake_inputs=True) if fake else torch.enable_grad():
        model = Model(checkpointed=True)
        with MemoryTimeline(model) as timeline:
            step(model)
    peak = timeline.peak
    kinds = peak.sample.bytes_by_kind
    assert kinds["parameters"] == 4 * WEIGHTS and kinds["block inputs"] == 3 * HIDDEN
    # A sigmoid's backward starts from its output, and that of the softplus from the same.
    assert kinds["recomputation"] == HIDDEN
    assert peak.place == Place("block", "blocks.2", "backward") and peak.step == 0
    assert peak.by_block["blocks.1"] == {"parameters": WEIGHTS, "block inputs": HIDDEN}
    assert peak.by_block["blocks.2"]["recomputation"] == HIDDEN
    assert timeline.samples[-1].bytes_by_kind["gradients"] == 4 * WEIGHTS
    assert [sample.time_s for sample in timeline.samples] == sorted(s.time_s for s in timeline.samples)


def test_without_a_checkpoint_every_block_holds_what_it_has_made():
    model = Model(checkpointed=False)
    with MemoryTimeline(model) as timeline:
        step(model)
    held = timeline.peak.by_block
    # The sigmoid's output, from which two backwards start, and the next layer's input.
    assert [held[f"blocks.{index}"]["other"] for index in range(2)] == [2 * HIDDEN] * 2
    others = timeline.peak.other_by_class
    assert (
        sum(others.values()) == timeline.peak.sample.bytes_by_kind["other"]
        and others["elementwise"] >= 2 * HIDDEN
    )
    assert "other was made" in str(timeline) and "by elementwise" in str(timeline)
    assert timeline.peak.sample.bytes_by_kind["block inputs"] == 0
    assert timeline.peak.sample.bytes_by_kind["recomputation"] == 0


def test_an_optimizers_first_step_is_where_its_state_comes():
    model = nn.Sequential(nn.ModuleList([nn.Linear(300, 300)])[0])
    optimizer = torch.optim.AdamW(model.parameters())
    size = 4 * (300 * 300 + 300)
    with MemoryTimeline(model, optimizer) as timeline:
        for _ in range(2):
            model(torch.ones(1, 300)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    kinds = timeline.peak.sample.bytes_by_kind
    assert timeline.peak.place == OPTIMIZER and "the optimizer's step" in str(timeline)
    assert kinds["gradients"] == kinds["parameters"] == size
    assert 2 * size <= kinds["optimizer state"] <= 2 * size + 16
    assert timeline.places.step == 2


def test_gradients_are_those_of_a_step_that_nobody_follows():
    torch.manual_seed(0)
    model = Model(checkpointed=True)
    step(model)
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    with MemoryTimeline(model):
        step(model)
    assert all(torch.equal(p.grad, e) for p, e in zip(model.parameters(), expected, strict=True))
    hooks = [h for m in model.modules() for h in (m._forward_hooks, m._forward_pre_hooks)]
    assert not any(hooks)


def test_a_model_that_was_followed_is_freed_when_nobody_has_it():
    model = Model(checkpointed=True)
    optimizer = torch.optim.AdamW(model.parameters())
    with MemoryTimeline(model, optimizer):
        step(model, optimizer)
    gone = weakref.ref(model), weakref.ref(optimizer)
    del model, optimizer
    gc.collect()
    assert [each() for each in gone] == [None, None]


def test_a_timeline_goes_on_with_another_step():
    model = Model(checkpointed=True)
    timeline = MemoryTimeline(model)
    with pytest.raises(ValueError, match="run a step within"):
        _ = timeline.peak
    with timeline:
        step(model)
    first, model.checkpointed = timeline.peak, False
    step(model)
    assert timeline.peak is first, "this step was not followed"
    with timeline:
        step(model)
    assert timeline.peak.sample.device_bytes > first.sample.device_bytes
    assert str(timeline).startswith("peak of ") and "blocks.1" in str(timeline)


def test_a_block_of_another_model_is_refused():
    with pytest.raises(ValueError, match="no part of the model"):
        MemoryTimeline(Model(False), blocks=[nn.Linear(2, 2)])
    assert list(find_blocks(Model(False))) == ["blocks.0", "blocks.1", "blocks.2"]


def test_a_failed_step_leaves_no_place_behind():
    model = Model(checkpointed=True)
    model.blocks[1].register_forward_hook(lambda *_: 1 / 0)
    timeline = MemoryTimeline(model)
    with pytest.raises(ZeroDivisionError), timeline:
        step(model)
    assert timeline.places.now == Place()


def test_a_table_of_all_kinds_has_100_columns():
    row = {kind: 300 * 2**10 for kind in DETAILED_KINDS}
    sample = MemorySample(0.0, dict.fromkeys(KINDS, 2**20))
    blocks = {f"a_long_name_of_transformer_blocks.{index}": row for index in range(30)}
    lines = table_of(MemoryPeak(sample, blocks, Place(), 0), most_rows=8)
    assert max(map(len, lines)) == 100 and len(lines) == 4 + 8 + 1
    assert lines[-1].startswith("all ") and lines[-2].startswith("23 others")
    assert all(word in " ".join(lines[:4]) for word in ("gathered", "putation", "host", "KiB"))


class FakeAllocator:
    """torch.cuda.memory_stats of a device that has what it is told."""

    def __init__(self, monkeypatch):
        self.stats = collections.Counter()
        monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: dict(self.stats))

    def set(self, now_bytes, peak_bytes):
        self.stats["allocated_bytes.all.current"] = now_bytes
        self.stats["allocated_bytes.all.peak"] = peak_bytes
        self.stats["reserved_bytes.all.current"] = 2 * now_bytes
        self.stats["inactive_split_bytes.all.current"] = now_bytes // 2


def test_what_cudas_allocator_has_in_use_is_told_by_kind_and_the_rest_is_other(monkeypatch):
    allocator = FakeAllocator(monkeypatch)
    allocator.set(100_000, 150_000)
    model = Model(checkpointed=False)
    step(model)
    hidden = torch.ones(ROWS, WIDTH)
    owners = Owners(model, find_blocks(model))
    owners.add_inputs("blocks.1", [hidden, hidden[1:]])
    with AllocatorCounter(owners, torch.device("cpu")) as counter:
        sample = counter.sample(counter.holdings(), 1.5)
        assert list(sample.bytes_by_kind) == list(KINDS)
        assert sample.bytes_by_kind["parameters"] == sample.bytes_by_kind["gradients"] == 4 * WEIGHTS
        assert sample.bytes_by_kind["block inputs"] == HIDDEN
        assert sample.device_bytes == 100_000 == counter.now_bytes
        assert (sample.reserved_bytes, sample.fragmented_bytes) == (200_000, 50_000)
        assert counter.risen_to() is None, "it was as high before"
        allocator.set(90_000, 170_000)
        assert counter.risen_to() == 170_000 and counter.risen_to() is None
        assert sum(counter.holdings(170_000).values()) == 170_000
        del hidden
        assert counter.sample(counter.holdings(), 2.0).bytes_by_kind["block inputs"] == 0


def test_on_cuda_a_sample_is_taken_wherever_the_step_comes_to_another_place(monkeypatch):
    allocator = FakeAllocator(monkeypatch)
    allocator.set(100_000, 100_000)
    model = Model(checkpointed=True)
    timeline, places = MemoryTimeline(model), []
    timeline.counter = AllocatorCounter(timeline.owners, torch.device("cpu"))
    keep = timeline._keep

    def keep_and_note(holdings, moment: Moment):
        places.append(moment.place)
        # One more step of the fake: the block before has grown the peak.
        now = allocator.stats["allocated_bytes.all.current"] + 1000
        allocator.set(now, now + 5000)
        keep(holdings, moment)

    monkeypatch.setattr(timeline, "_keep", keep_and_note)
    with timeline:
        step(model)
    assert [p.block for p in dict.fromkeys(places) if p.phase == "forward" and p.block] == list(
        find_blocks(model)
    )
    assert {p.phase for p in places} == {"", "forward", "backward", "recompute"}
    assert timeline.peak.sample.device_bytes == max(sample.device_bytes for sample in timeline.samples)
    assert "the allocator has" in str(timeline)


def test_places_of_a_step():
    model, seen = Model(checkpointed=True), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Places(model, find_blocks(model), optimizer, moved=lambda before, now: seen.append(str(now))):
        step(model, optimizer)
    blocks = [f"blocks.{index}" for index in range(3)]
    forward = [place for place in seen if place.startswith("forward of")]
    recomputed = [place for place in dict.fromkeys(seen) if place.startswith("recompute of")]
    backward = [place for place in dict.fromkeys(seen) if place.startswith("backward of")]
    assert forward == [f"forward of {name}" for name in blocks]
    assert recomputed == [f"recompute of {name}" for name in blocks[::-1]]
    assert backward == [f"backward of {name}" for name in blocks[::-1]]
    assert seen[-2:] == ["the optimizer's step", "outside of the model"]
    assert ELSEWHERE not in seen


@pytest.mark.parametrize("arena_bytes", [None, 100_000])
def test_host_memory_for_offload_is_told_beside_the_devices_also_where_it_grows(arena_bytes):
    GLOBAL_ACTIVATION_MANAGER.setup_arena(arena_bytes)
    model = Model(checkpointed=False)
    undo = checkpoint_blocks(list(model.blocks), "full", 1.0)
    try:
        with MemoryTimeline(model) as timeline:
            step(model)
    finally:
        undo()
        GLOBAL_ACTIVATION_MANAGER.close()
    kinds = timeline.peak.sample.bytes_by_kind
    # The last block's input stays; two slots are there for the others'.
    assert kinds["block inputs"] == 3 * HIDDEN and kinds["block inputs on the host"] == 2 * HIDDEN
    assert max(s.bytes_by_kind["other"] for s in timeline.samples) < 3 * HIDDEN + 2 * WEIGHTS
