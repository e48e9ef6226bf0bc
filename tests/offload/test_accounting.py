"""Bytes at full size, on fake tensors: Wan-14B, whose 40 block inputs are 28.8 GiB at 720p, 81 frames."""

import functools
import gc
import mmap
import sys
from pathlib import Path

import pytest
import torch
from torch._subclasses import FakeTensorMode

import shardformer
from opensora_accel import Plan
from opensora_accel.checkpoint import GLOBAL_ACTIVATION_MANAGER as MANAGER
from opensora_accel.offload import Arena
from opensora_accel.profiler import LiveBytes
from tests.tiers import PROVE

LAYERS, HEADS, HEAD_DIM = 40, 40, 128
# By tokens, the latent: 93 frames of 480 × 832, and 81 of 720 × 1280; patches are 1 × 2 × 2.
LATENTS = {37_440: (24, 60, 104), 75_600: (21, 90, 160)}


def entry_bytes(mode, tokens):
    """What a checkpoint keeps of a block, in bf16: its input; attention's output, and the log-sum-exp in fp32."""
    inputs, log_sum_exp = tokens * HEADS * HEAD_DIM * 2, tokens * HEADS * 4
    return inputs if mode == "full" else 2 * inputs + log_sum_exp


def wan_14b():
    from diffusers import WanTransformer3DModel

    torch.set_default_dtype(torch.bfloat16)
    try:
        return WanTransformer3DModel(
            num_layers=LAYERS, num_attention_heads=HEADS, attention_head_dim=HEAD_DIM, ffn_dim=13824
        )
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.fixture(autouse=True)
def clean_manager():
    MANAGER.close()
    MANAGER.reset_counters()
    yield
    gc.collect()
    MANAGER.close()


@functools.lru_cache
def step(plan, tokens, layers=LAYERS):
    """Device bytes after the forward and at the peak of the step, without the weights; bytes on the host."""
    # Gradients of the weights would grow through backward and hide where the activations' peak is.
    model = wan_14b().requires_grad_(False)
    del model.blocks[layers:]
    if plan.offload:
        MANAGER.setup_arena(LAYERS * entry_bytes("selective", tokens))
    shardformer.shard(model, plan)
    live = LiveBytes()
    live.count(model.parameters())
    weights = live.now_bytes
    for memory in MANAGER.arena.memory if MANAGER.arena else ():
        live.ignore(memory)
    with live:
        out = model(
            hidden_states=torch.randn(1, 16, *LATENTS[tokens], dtype=torch.bfloat16, requires_grad=True),
            timestep=torch.ones(1),
            encoder_hidden_states=torch.randn(1, 512, 4096, dtype=torch.bfloat16),
            return_dict=False,
        )[0]
        loss = out.float().square().mean()
        del out
        after_forward, host = live.now_bytes - weights, MANAGER.counters.in_use_bytes
        loss.backward()
    return after_forward, host, live.peak_bytes - weights


@PROVE
@pytest.mark.parametrize("tokens", LATENTS)
@pytest.mark.parametrize(("mode", "offload"), [("full", 0.5), ("full", 1.0), ("selective", 1.0)])
def test_wan_14b_holds_two_slots_and_the_kept_blocks(mode, offload, tokens):
    entry = entry_bytes(mode, tokens)
    moved = min(round(offload * LAYERS), LAYERS - 1)
    with FakeTensorMode():
        after_all, _, peak_all = step(Plan(checkpoint=mode), tokens)
        # What a forward leaves beside its blocks' entries: embeddings, rotary tables, text, output.
        besides = step(Plan(checkpoint=mode), tokens, layers=1)[0] - entry
        after, host, peak = step(Plan(checkpoint=mode, offload=offload), tokens)
    print(
        f"{tokens:,} tokens, {mode} {offload:g}: {(after - besides) / 2**30:.1f} GiB, host {host / 2**30:.1f} GiB"
    )
    assert after_all - besides == pytest.approx(LAYERS * entry, rel=0.01)
    assert entry % 64 == 0 and MANAGER.slot_bytes == 2 * entry
    assert after - besides == pytest.approx((2 + LAYERS - moved) * entry, rel=0.01)
    assert host == pytest.approx(moved * entry, rel=0.01)
    # The peak falls by as much: nothing else is alive when backward fetches.
    assert peak_all - peak == pytest.approx((moved - 2) * entry, rel=0.01)
    assert (MANAGER.counters.overflows, MANAGER.counters.prefetched) == (0, moved)


def bytes_left_out_of_a_fork():
    """What Linux holds for this process in areas that a fork leaves out, as those of an arena are."""
    found = size_bytes = 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, *values = line.split()
        if name == "Size:":
            size_bytes = int(values[0]) * 1024
        elif name == "VmFlags:" and "dc" in values:
            found += size_bytes
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="Linux only")
def test_the_system_holds_less_than_a_page_a_slab_more_than_is_counted():
    before, arena = bytes_left_out_of_a_fork(), Arena()
    sizes = [64, 4096, 4160, 100_032, 1_000_064]
    held = [arena.allocate(size) for size in sizes]
    assert all(held) and arena.size_bytes == sum(sizes)
    pages = [-(-size // mmap.PAGESIZE) for size in sizes]
    assert bytes_left_out_of_a_fork() - before == sum(pages) * mmap.PAGESIZE
    assert sum(pages) * mmap.PAGESIZE < arena.size_bytes + len(sizes) * mmap.PAGESIZE
    del held, arena
    assert bytes_left_out_of_a_fork() == before
    with FakeTensorMode():
        assert Arena(2**34).size_bytes == 2**34
        assert bytes_left_out_of_a_fork() == before, "fake memory takes none"
