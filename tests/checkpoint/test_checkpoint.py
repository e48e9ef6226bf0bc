"""Checkpointing with offload gives the gradients of no checkpointing, bit for bit, and holds no block input."""

import gc
import weakref
from dataclasses import dataclass, replace

import pytest
import torch
from torch import nn

from opensora_accel import checkpoint as ck
from tests.checkpoint import steps
from tests.checkpoint.steps import Block, assert_identical, baseline, blocks, data, gradients, run

MANAGER = ck.GLOBAL_ACTIVATION_MANAGER


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mode", ["full", "selective"])
@pytest.mark.parametrize("offload", [0.0, 0.5, 1.0, "auto"])
def test_gradients_are_bit_identical(dtype, mode, offload):
    model, inputs = blocks(dtype=dtype), data(dtype)
    MANAGER.setup_arena(1 << 20)
    undo = ck.checkpoint_blocks(model, mode, offload)
    run(model, inputs).float().square().sum().backward()
    assert_identical(gradients(model, inputs), baseline(dtype))
    # With a block's input also what its attention's backward needs, if a kernel has it: none of a GPU's has fp64.
    has_kernel = steps.DEVICE == "cpu" or dtype != torch.float64
    num_moved = 3 if mode == "selective" and has_kernel else 1
    assert MANAGER.counters.moved == {0.0: 0, 0.5: 2, 1.0: 3, "auto": 3}[offload] * num_moved
    undo()
    assert all("forward" not in vars(block) for block in model)


def test_block_inputs_leave_the_device():
    model, inputs = blocks(), data()
    MANAGER.setup_arena(1 << 20)
    alive = []

    def call(block, x, t):
        alive.append(weakref.ref(x))
        return ck.checkpoint(block, x, t)

    out = run(model, inputs, call)
    gc.collect()
    assert [reference() is None for reference in alive] == [True] * 4
    assert MANAGER.counters.in_use_bytes == 4 * 2 * 5 * 16 * 4
    out.sum().backward()


def test_without_offload_block_inputs_stay():
    model, inputs, alive = blocks(), data(), []

    def call(block, x, t):
        alive.append(weakref.ref(x))
        return ck.checkpoint(block, x, t)

    out = run(model, inputs, call)
    assert all(reference() is not None for reference in alive)
    out.sum().backward()


def test_microbatches_in_flight_in_any_order():
    """1F1B: two forwards are open at once and end in the order they began, not as a stack."""
    expected = None
    for offloaded in (False, True):
        model, pairs = blocks(), [data(seed=s) for s in (1, 2, 3)]
        if offloaded:
            MANAGER.setup_arena(1 << 20)
            ck.checkpoint_blocks(model, "full", 1.0)
        outs = [run(model, pairs[0]), run(model, pairs[1])]
        outs[0].square().sum().backward()
        outs.append(run(model, pairs[2]))
        outs[1].square().sum().backward()
        outs[2].square().sum().backward()
        found = gradients(model, [t for pair in pairs for t in pair])
        if expected is not None:
            assert_identical(found, expected)
        expected = found
        del outs


def test_no_grad_moves_nothing():
    model, inputs = blocks(), data()
    MANAGER.setup_arena(1 << 20)
    ck.checkpoint_blocks(model, "full", 1.0)
    with torch.no_grad():
        out = run(model, inputs)
    assert MANAGER.counters.moved == 0
    assert torch.equal(out, run(blocks(), inputs).detach())


def test_a_full_arena_keeps_the_rest_on_the_device():
    model, inputs = blocks(), data()
    MANAGER.setup_arena(2 * 2 * 5 * 16 * 4)
    ck.checkpoint_blocks(model, "full", 1.0)
    run(model, inputs).square().sum().backward()
    assert (MANAGER.counters.moved, MANAGER.counters.kept) == (2, 1)
    assert_identical(gradients(model, inputs), baseline())


def test_mixed_dtypes_share_one_arena():
    model, inputs = blocks(), data()
    MANAGER.setup_buffer(4096, torch.bfloat16)

    def call(block, x, t):
        with torch.autocast("cpu", torch.bfloat16):
            return ck.checkpoint(block, x.bfloat16() if len(seen) % 2 else x, t)

    seen = []
    for offloaded in (True, False):
        MANAGER.enable = offloaded
        seen.clear()
        run(model, inputs, lambda b, x, t: (seen.append(1), call(b, x, t))[1]).float().sum().backward()
        seen.append(gradients(model, inputs))
        if offloaded:
            expected = seen[-1]
            model.zero_grad()
            for tensor in inputs:
                tensor.grad = None
    assert_identical(seen[-1], expected)


def test_shared_conditioning_is_moved_once():
    model, inputs = blocks(), data()
    MANAGER.setup_arena(1 << 20)
    run(model, inputs, lambda b, x, t: ck.checkpoint(b, x, t, offload_args=(0, 1))).square().sum().backward()
    assert (MANAGER.counters.moved, MANAGER.counters.shared) == (5, 3)
    assert_identical(gradients(model, inputs), baseline())


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_an_exception_leaves_nothing_behind(where):
    model, inputs = blocks(), data()
    MANAGER.setup_arena(1 << 20)
    ck.checkpoint_blocks(model, "full", 1.0)

    class Boom(Exception):
        pass

    def explode(*_):
        raise Boom

    handle = model[2].up.register_forward_hook(explode)
    if where == "backward":
        handle.remove()
        out = run(model, inputs)
        handle = model[2].up.register_forward_hook(explode)
    with pytest.raises(Boom):
        run(model, inputs) if where == "forward" else out.sum().backward()
    handle.remove()
    out = None
    gc.collect()
    assert MANAGER.counters.in_use_bytes == 0
    model.zero_grad()
    for tensor in inputs:
        tensor.grad = None
    run(model, inputs).float().square().sum().backward()
    assert_identical(gradients(model, inputs), baseline())


def test_keyword_arguments_are_bound():
    model, inputs = blocks(1), data()
    MANAGER.setup_arena(1 << 20)
    ck.checkpoint_blocks(model, "full", 1.0, boundary=("hidden",), keep_last=0)
    torch.manual_seed(7)
    model[0](gain=1.0, timestep=inputs[1], hidden=inputs[0] * 1).float().square().sum().backward()
    assert MANAGER.counters.moved == 1
    assert_identical(gradients(model, inputs), baseline(num=1))


@dataclass(frozen=True)
class Stream:
    hidden: torch.Tensor | None
    timestep: torch.Tensor


class OfStreams(Block):
    def forward(self, stream, other=None):
        return replace(stream, hidden=super().forward(stream.hidden, stream.timestep)), other


def test_a_tensor_that_an_argument_holds_leaves_the_device():
    torch.manual_seed(0)
    model, inputs = nn.ModuleList([OfStreams() for _ in range(4)]).to(steps.DEVICE), data()
    MANAGER.setup_arena(1 << 20)
    ck.checkpoint_blocks(model, "full", 1.0, boundary=("stream.hidden", "other.hidden"), keep_last=0)
    alive = []

    def call(block, x, t):
        alive.append(weakref.ref(x))
        return block(Stream(x, t))[0].hidden

    out = run(model, inputs, call)
    gc.collect()
    assert [reference() is None for reference in alive] == [True] * 4
    assert MANAGER.counters.moved == 4
    out.float().square().sum().backward()
    assert_identical(gradients(model, inputs), baseline())


def test_a_boundary_that_is_no_argument_is_refused():
    with pytest.raises(ValueError, match="no argument 'hiden' to offload; it has hidden, timestep"):
        ck.checkpoint_blocks(blocks(1), "full", 1.0, boundary=("hiden",))


@pytest.mark.parametrize("use_reentrant", [None, True, False])
def test_open_sora_calls(use_reentrant):
    model, inputs = blocks(), data()
    MANAGER.setup_buffer(10_000, torch.float32)
    run(
        model, inputs, lambda b, x, t: ck.checkpoint(b, x, t, use_reentrant=use_reentrant)
    ).square().sum().backward()
    assert_identical(gradients(model, inputs), baseline())
    model.zero_grad()
    inputs = data()
    apply = ck.CheckpointFunctionWithOffload.apply
    run(model, inputs, lambda b, x, t: apply(b, True, x, t)).square().sum().backward()
    assert_identical(gradients(model, inputs), baseline())


@pytest.mark.parametrize("gc_step", [1, 2, 3, 9])
def test_auto_grad_checkpoint(gc_step):
    model, inputs = blocks(), data()
    assert torch.equal(ck.auto_grad_checkpoint(model[0].out, inputs[0]), model[0].out(inputs[0]))
    ck.set_grad_checkpoint(model, use_fp32_attention=True, gc_step=gc_step)
    assert model[1].fp32_attention and model[1].grad_checkpointing_step == gc_step
    MANAGER.setup_arena(1 << 20)
    torch.manual_seed(7)
    ck.auto_grad_checkpoint(model, inputs[0] * 1, inputs[1]).float().square().sum().backward()
    assert MANAGER.counters.moved == min(gc_step, 4)
    assert_identical(gradients(model, inputs), baseline())


def test_bad_open_sora_calls():
    with pytest.raises(ValueError, match=r"takes an nn\.Module; got list"):
        ck.set_grad_checkpoint([1])
    with pytest.raises(ValueError, match="at least 1; got 0"):
        ck.set_grad_checkpoint(blocks(1), gc_step=0)
    with pytest.raises(ValueError, match="empty list"):
        ck.auto_grad_checkpoint(nn.ModuleList(), torch.ones(1))
