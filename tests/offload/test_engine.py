"""The arena and its tickets: exact size, any order, nothing lost, nothing leaked."""

import gc
import weakref

import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from opensora_accel.offload import ActivationManager, Arena, OffloadEngine, host_memory


def manager(size_bytes=1 << 16):
    made = OffloadEngine()
    made.setup_arena(size_bytes)
    return made


def test_an_arena_has_exactly_the_bytes_asked_for():
    arena = Arena(1000)
    assert arena.size_bytes == 1000
    memory, release = arena.allocate(1000)
    assert memory.numel() == 1000 and arena.allocate(1) is None
    release()
    assert arena.allocate(1000) is not None


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(1, 900), st.integers(0, 9)), max_size=60))
def test_entries_never_overlap_and_all_bytes_come_back(steps):
    arena = Arena(4096)
    live = []
    for number, (size, choice) in enumerate(steps):
        if live and choice < 4:
            memory, release, value = live.pop(choice % len(live))
            assert bool((memory == value).all()), "another entry wrote here"
            release()
        found = arena.allocate(size)
        if found is not None:
            found[0].fill_(number % 256)
            live.append((*found, number % 256))
    for memory, release, value in live:
        assert bool((memory == value).all())
        release()
    assert arena.allocate(4096) is not None


def test_an_open_arena_takes_at_most_half_of_the_free_memory(monkeypatch):
    mine = OffloadEngine()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    mine.setup_arena()
    free = psutil.virtual_memory().available
    assert mine.arena.limit_bytes == pytest.approx(free / 8, rel=0.2)


def test_a_growing_arena_stops_at_its_limit():
    arena = Arena(limit_bytes=256)
    first = arena.allocate(128)
    assert arena.size_bytes == 128
    assert arena.allocate(128) is not None and arena.allocate(64) is None
    first[1]()
    assert arena.allocate(100) is not None and arena.size_bytes == 256


VIEWS = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.transpose(0, 1),
    "offset": lambda x: x[1:],
    "with gaps": lambda x: x[:, ::2],
    "expanded": lambda x: x[:1].expand(5, -1),
    "scalar": lambda x: x[1, 2],
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_what_comes_back_is_what_went(view, dtype):
    x = VIEWS[view](torch.randn(4, 6).to(dtype))
    mine = manager()
    ticket = mine.offload(x)
    before = x.clone()
    if not x.dtype.is_floating_point or view != "expanded":
        x.data = x.data.clone().zero_()
    for _ in range(2):
        back = mine.onload(ticket)
        assert torch.equal(back, before) and back.dtype == dtype
    if view in ("transposed", "expanded"):
        assert back.stride() == VIEWS[view](torch.randn(4, 6)).stride()
    if view == "expanded":
        assert ticket.meta.size_bytes == 6 * x.element_size()


def test_one_copy_serves_a_shared_tensor_until_it_changes():
    mine, x = manager(), torch.randn(8)
    first, second = mine.offload(x), mine.offload(x)
    assert first is second and mine.counters.moved == 1 and mine.counters.shared == 1
    x.neg_()
    third = mine.offload(x)
    assert third is not first
    assert torch.equal(mine.onload(third), x) and torch.equal(mine.onload(first), -x)


def test_bytes_come_back_with_the_last_reference():
    mine, x = manager(256), torch.randn(64)
    ticket = mine.offload(x)
    assert mine.counters.in_use_bytes == 256 and mine.offload(torch.randn(1)) is None
    assert mine.counters.kept == 1 and mine.counters.kept_bytes == 4
    reference = weakref.ref(ticket)
    del ticket
    gc.collect()
    assert reference() is None and mine.counters.in_use_bytes == 0
    assert mine.offload(torch.randn(64)) is not None


def test_a_full_arena_says_so_once(caplog):
    mine = manager(64)
    for _ in range(3):
        assert mine.offload(torch.randn(100)) is None
    assert [r.message for r in caplog.records if "full" in r.message] == [
        "the offload arena (64 bytes) is full: 400 bytes stay on the device; nothing fails, "
        "but setup_arena() with more would free them"
    ]


def test_open_sora_buffer_and_ignored_tensors():
    mine, x = ActivationManager(), torch.randn(10)
    assert mine.offload(x) is None
    mine.setup_buffer(10, torch.bfloat16)
    assert mine.enable and mine.arena.size_bytes == 20
    y = x.bfloat16()
    mine.add_ignore_tensor(y)
    assert mine.offload(y) is None
    assert mine.offload(x[:5]) is not None
    mine.close()
    assert mine.offload(x[:1]) is None
    with pytest.raises(ValueError, match="must not be negative"):
        mine.setup_arena(-1)


def test_a_ticket_that_dies_during_an_allocation_does_not_confuse_it():
    """A finalizer may run between any two instructions: here one runs in the middle of `allocate`."""
    mine = manager(256)
    held = [mine.offload(torch.full((16,), float(n))) for n in range(4)]
    slab = mine.arena._slabs[0]
    original = slab.allocate

    def interrupted(*sizes):
        held[1] = None
        gc.collect()
        return original(*sizes)

    slab.allocate = interrupted
    assert mine.offload(torch.randn(16)) is None, "the bytes were taken back in the middle"
    slab.allocate = original
    fresh = mine.offload(torch.full((16,), 9.0))
    assert [mine.onload(t)[0].item() for t in (held[0], fresh, held[2], held[3])] == [0.0, 9.0, 2.0, 3.0]


def test_a_call_moves_tensors_of_one_device():
    """A tensor of indices that stayed on another device beside the hidden state, say."""
    mine, x, other = manager(), torch.randn(8), torch.empty(8, device="meta")
    with mine.call() as call:
        assert mine.save(x, call) is not None and mine.save(other, call) is None
    assert (mine.counters.moved, mine.counters.kept) == (1, 1)


def test_nothing_is_saved_by_a_call_that_has_ended():
    mine = manager()
    with mine.call() as call:
        pass
    assert mine.save(torch.randn(8), call) is None and mine.counters.moved == 0


def test_an_open_arena_gives_up_what_is_empty_for_other_sizes():
    """Clips of many lengths: what the first one grew is of no use to the second."""
    mine = OffloadEngine()
    mine.setup_arena(limit_bytes=40 * 1024)
    for size in (500, 600, 700, 800, 1000):
        held = [mine.offload(torch.full((size,), n, dtype=torch.uint8)) for n in range(30)]
        assert all(held) and mine.counters.kept == 0
        assert all(bool((mine.onload(ticket) == n).all()) for n, ticket in enumerate(held))
        assert mine.arena.size_bytes <= 40 * 1024
        held.clear()
    mine.trim()
    assert mine.arena.size_bytes == 0


def test_memory_goes_back_to_the_host_after_the_copies():
    settled = []
    arena = Arena(limit_bytes=256, before_freeing=lambda: settled.append(arena.size_bytes))
    arena.allocate(100)[1]()
    assert arena.allocate(200) is not None and settled == [128], "asked while it was still there"
    assert Arena(256).trim() is None, "a fixed one stays"


def test_the_arena_is_on_the_host_whatever_the_default_device():
    with torch.device("meta"):
        assert Arena(64).memory[0].device.type == "cpu"


def test_an_arena_for_users_lasts_as_long_as_they_do():
    mine = OffloadEngine()
    mine.join()
    mine.join()
    mine.leave()
    assert mine.enable, "the other one still moves"
    mine.leave()
    assert not mine.enable
    mine.setup_arena(64)
    mine.join()
    mine.leave()
    assert mine.enable, "what was set up by hand is closed by hand"


@pytest.mark.parametrize(
    ("variables", "ranks"),
    [
        ({"LOCAL_WORLD_SIZE": "4"}, 4),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, 2),
        ({"SLURM_NTASKS_PER_NODE": "8(x2)"}, 8),
        ({}, 1),
    ],
)
def test_the_ranks_of_a_machine_share_its_memory(variables, ranks, monkeypatch):
    for name in host_memory._LOCAL_RANKS:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(host_memory, "_free_host_bytes", lambda: 1600)
    assert host_memory.default_limit_bytes() == 800 // ranks


def test_files_that_were_read_do_not_count_as_used(tmp_path, monkeypatch):
    monkeypatch.setattr(host_memory, "_CGROUP", tmp_path)
    for name, text in (("max", "1000"), ("current", "900"), ("stat", "anon 400\ninactive_file 450\n")):
        (tmp_path / f"memory.{name}").write_text(text)
    assert host_memory._free_container_bytes() == 550
    (tmp_path / "memory.max").write_text("max")
    assert host_memory._free_container_bytes() > 1 << 60
