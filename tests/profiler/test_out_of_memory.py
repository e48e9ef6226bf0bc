"""Out of memory: what is told fits one screen, the change that is named fits, and the one before it does not."""

import contextlib
import gc
import io
import re
import traceback

import pytest
import torch
from torch import nn

from opensora_accel import Plan, init_parallel, parallel_states
from opensora_accel.checkpoint import GLOBAL_ACTIVATION_MANAGER, checkpoint_blocks, chunk_tokens
from opensora_accel.fsdp import shard_parameters
from opensora_accel.observe.fitting import BlockMemory, StepMemory, changes, smallest_change
from opensora_accel.observe.owners import plain_tensors
from opensora_accel.profiler import LimitedBytes, LiveBytes, explain_out_of_memory
from tests.tiers import some

WIDTH, TOKENS, LAYERS = 32, 2000, 8
ARENA_BYTES = 2 * LAYERS * TOKENS * WIDTH * 4


class Block(nn.Module):
    """A residual MLP behind a norm, and a projection beside it; hidden [S, C]."""

    def __init__(self):
        super().__init__()
        self.norm, self.project = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, hidden):
        hidden = hidden + self.project(self.norm(hidden)).sin()
        return hidden + self.mlp(hidden)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(4, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))

    def forward(self, x):
        hidden = self.embed(x)
        for block in self.blocks:
            hidden = block(hidden)
        return hidden


@pytest.fixture(autouse=True)
def clean_manager():
    yield
    gc.collect()
    GLOBAL_ACTIVATION_MANAGER.close()


def built(plan):
    """A model and its optimizer as the plan has them on one device."""
    GLOBAL_ACTIVATION_MANAGER.close()
    if plan.offload:
        GLOBAL_ACTIVATION_MANAGER.setup_arena(ARENA_BYTES)
    torch.manual_seed(0)
    model = Model()
    if plan.mlp_chunks > 1:
        for block in model.blocks:
            chunk_tokens(block.mlp, plan.mlp_chunks)
    if plan.checkpoint != "none":
        checkpoint_blocks(list(model.blocks), plan.checkpoint, plan.offload)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def train(model, optimizer):
    """Two steps: the optimizer's state is there in the second one's backward."""
    for _ in range(2):
        model(torch.ones(TOKENS, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def counting(live, model):
    live.count(model.parameters())
    for memory in GLOBAL_ACTIVATION_MANAGER.arena.memory if GLOBAL_ACTIVATION_MANAGER.arena else ():
        live.ignore(memory)
    return live


def peak_of(plan):
    model, optimizer = built(plan)
    with counting(LiveBytes(), model) as live:
        train(model, optimizer)
    return live.peak_bytes


def told(plan, limit_bytes):
    """The lines that a step prints which has so many bytes, and the exception."""
    model, optimizer = built(plan)
    printed, raised = io.StringIO(), None
    mlps = [block.mlp for block in model.blocks]
    try:
        with (
            counting(LimitedBytes(limit_bytes), model),
            explain_out_of_memory(model, optimizer, plan, mlps=mlps, limit_bytes=limit_bytes, file=printed),
        ):
            train(model, optimizer)
    except torch.OutOfMemoryError as error:
        raised = error
    return printed.getvalue().splitlines(), raised


def named(lines):
    """The fields of the change that is told."""
    chosen = re.fullmatch(r"Set (.*?)( on \d+ ranks)?: the smallest change that would fit, .*", lines[-1])
    assert chosen, lines[-1]
    return eval(f"dict({chosen[1]})")


CANDIDATES = [
    {"checkpoint": "full"},
    {"checkpoint": "full", "offload": 0.5},
    {"checkpoint": "full", "offload": 1.0},
]


@pytest.mark.parametrize("index", some(range(len(CANDIDATES)), 0, 2))
def test_the_named_change_fits_and_the_one_before_it_does_not(index):
    plans = [Plan(), *(Plan(**fields) for fields in CANDIDATES)]
    peaks = [peak_of(plan) for plan in plans]
    assert peaks == sorted(peaks, reverse=True)
    limit = (peaks[index] + peaks[index + 1]) // 2
    lines, raised = told(Plan(), limit)
    assert raised is not None
    assert named(lines) == CANDIDATES[index]
    model, optimizer = built(plans[index + 1])
    with counting(LimitedBytes(limit), model):
        train(model, optimizer)
    model, optimizer = built(plans[index])
    with pytest.raises(torch.OutOfMemoryError), counting(LimitedBytes(limit), model):
        train(model, optimizer)


def test_a_checkpointed_model_that_fails_in_its_recomputation_is_told_to_chunk_its_mlps():
    plan = Plan(checkpoint="full", offload=1.0)
    chunked = plan.replace(mlp_chunks=2)
    limit = (peak_of(plan) + peak_of(chunked)) // 2
    assert peak_of(chunked) < limit < peak_of(plan)
    lines, raised = told(plan, limit)
    assert raised is not None and lines[0].startswith(
        ("Out of memory in recompute", "Out of memory in backward")
    )
    assert named(lines) == {"mlp_chunks": 2}


def sharded_on_two_ranks(index):
    """Under plans that share less and less: peaks, and what is named halfway from one plan to the next."""
    plans = [Plan(dp_replicate=2), Plan(dp_shard=2, sharding="zero2"), Plan(dp_shard=2, sharding="zero3")]

    def model_of(plan):
        parallel_states.reset()
        init_parallel(plan)
        torch.manual_seed(0)
        model = Model()
        if plan.sharding != "none":
            shard_parameters(model, plan, list(model.blocks))
        return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def train_few_tokens(model, optimizer):
        for _ in range(2):
            model(torch.ones(2, 4)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    def fits(plan, live):
        model, optimizer = model_of(plan)
        live.count(plain for p in model.parameters() for plain in plain_tensors(p))
        with live:
            train_few_tokens(model, optimizer)
        return live.peak_bytes

    peaks = [fits(plan, LiveBytes()) for plan in plans]
    limit = (peaks[index] + peaks[index + 1]) // 2
    assert fits(plans[index + 1], LimitedBytes(limit)) <= limit
    model, optimizer = model_of(plans[0])
    printed = io.StringIO()
    with (
        contextlib.suppress(torch.OutOfMemoryError),
        counting(LimitedBytes(limit), model),
        explain_out_of_memory(model, optimizer, plans[0], limit_bytes=limit, file=printed),
    ):
        train_few_tokens(model, optimizer)
    return peaks, printed.getvalue().splitlines()


# As for the bucket below, gloo must not hold what it has sent.
@pytest.mark.alone
@pytest.mark.parametrize("index", [0, 1])
def test_where_weights_fill_the_memory_the_named_sharding_fits(ranks, index):
    for peaks, lines in ranks(2, sharded_on_two_ranks, index):
        assert peaks == sorted(peaks, reverse=True)
        # Where gloo has not let go of a message yet it counts as needed, and more than the sharding may be named.
        wanted = {"sharding": ("zero2", "zero3")[index], "dp_replicate": 1, "dp_shard": 2}
        assert wanted.items() <= named(lines).items()


def under_ddp():
    """What a step of a few tokens is seen to need beyond weights, and how large those are."""
    parallel_states.reset()
    init_parallel(plan := Plan(dp_replicate=2))
    model = Model()
    reduced = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step():
        reduced(torch.ones(2, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    # DDP makes its buckets anew in the second step.
    for _ in range(2):
        step()
    teller = explain_out_of_memory(model, optimizer, plan)
    with teller:
        step()
    # What was the largest in each block is shown by a failure.
    largest = dict(teller.timeline.counter.largest)
    return teller.memory("", {}).work, sum(p.nbytes for p in model.parameters()), largest


# Beside other work on the cores gloo may hold a message for longer than a step takes.
@pytest.mark.alone
def test_a_bucket_that_is_reduced_is_nothing_that_a_block_computes(ranks):
    for work, weights, largest in ranks(2, under_ddp):
        assert work < weights / 4, largest


def test_one_screen_and_the_exception_is_what_it_was():
    limit = peak_of(Plan()) * 2 // 3
    lines, raised = told(Plan(), limit)
    assert len(lines) <= 40 and max(map(len, lines)) <= 100
    assert re.match(r"Out of memory in forward of blocks\.\d, step 1 ", lines[0])
    assert any(re.match(r"blocks\.0 ", line) for line in lines)
    assert type(raised) is torch.OutOfMemoryError and raised.__notes__ == [lines[-1]]
    assert str(raised).startswith("Tried to allocate ") and raised.__cause__ is None
    frames = [frame.name for frame in traceback.extract_tb(raised.__traceback__)]
    assert frames[:2] == ["told", "train"] and frames[-1] == "after"


def test_other_exceptions_and_steps_that_end_print_nothing():
    model, optimizer = built(Plan())
    printed = io.StringIO()
    with explain_out_of_memory(model, optimizer, Plan(), file=printed):
        train(model, optimizer)
    with pytest.raises(KeyError), explain_out_of_memory(model, optimizer, Plan(), file=printed):
        raise KeyError
    assert printed.getvalue() == ""
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_mlps_of_another_model_are_refused():
    model, optimizer = built(Plan())
    with pytest.raises(ValueError, match="none of the blocks"):
        explain_out_of_memory(model, optimizer, mlps=[nn.Linear(2, 2)])


GIB = 2**30


def of_model(plan, **changed):
    """40 blocks of 1 GiB of weights, 2 GiB of inputs and 30 GiB that they keep, of which 12 are the MLP's."""
    blocks = (BlockMemory(GIB, 2 * GIB, 30 * GIB, 12 * GIB),) * 40
    return StepMemory(plan, blocks, GIB, gradient_ratio=1.0, state_ratio=2.0, **changed)


def test_what_another_plan_needs_is_what_it_holds():
    memory = of_model(Plan())
    # Weights, their state, all that 40 blocks keep; or their inputs and what one keeps.
    assert memory.needs(Plan()) == (3 * 41 + 40 * 30) * GIB
    assert memory.needs(Plan(checkpoint="full")) == (3 * 41 + 40 * 2 + 30) * GIB
    # At the first block's backward: its own, two slots, and the gradients of the 39 others.
    assert memory.needs(Plan(checkpoint="full", offload=1.0)) == (3 * 41 + 2 * 2 + 30 + 39) * GIB
    assert (
        memory.needs(Plan(checkpoint="full", offload=1.0, mlp_chunks=4)) == (3 * 41 + 4 + 30 - 9 + 39) * GIB
    )
    # 8 shards; the block that computes and the next one are gathered, and one block's whole gradients twice.
    sharded = Plan(checkpoint="full", sharding="zero3", dp_shard=8)
    assert memory.needs(sharded) == pytest.approx((3 * 41 / 8 + 80 + 30 + 1 + 2 + 2) * GIB, rel=0.001)
    # Four sequence ranks hold a quarter of what has tokens; the peak is the first block's backward then.
    # Whole gradients are averaged by DDP, which keeps buckets of their size.
    assert memory.needs(Plan(checkpoint="full", ulysses=4)) == (3 * 41 + 41 + (2 + 30) // 4 + 39) * GIB
    # bf16 halves activations. Beside whole weights in fp32 lie those that two blocks and the rest compute with, and
    # one block's gradients, as autograd made them and in fp32.
    assert memory.needs(Plan(precision="bf16")) == (3 * 41 + 40 * 15 + (0.5 * (1 + 2) + 0.5 + 1)) * GIB
    in_bf16 = of_model(Plan(precision="bf16"))
    assert in_bf16.needs(Plan()) == (3 * 41 + 40 * 60) * GIB
    full = in_bf16.plan.replace(checkpoint="full")
    assert in_bf16.needs(in_bf16.plan) - in_bf16.needs(full) == (40 * 30 - (40 * 2 + 30)) * GIB


def test_changes_come_in_the_order_of_what_they_cost():
    told_changes = [str(change) for change in changes(of_model(Plan(dp_replicate=4)))]
    assert told_changes == [
        'checkpoint="full"',
        'checkpoint="full", offload=0.5',
        'checkpoint="full", offload=1.0',
        "mlp_chunks=2",
        "mlp_chunks=4",
        "mlp_chunks=8",
        'sharding="zero2", dp_replicate=1, dp_shard=4',
        'sharding="zero3", dp_replicate=1, dp_shard=4',
        'sharding="zero3", dp_replicate=1, dp_shard=4, cpu_offload=True',
        "ulysses=2",
        "ulysses=4",
        "ulysses=8",
    ]


def test_shards_on_the_host_take_nothing_of_the_device():
    memory = of_model(Plan(checkpoint="full", sharding="zero3", dp_shard=8))
    on_host = memory.plan.replace(cpu_offload=True)
    # Inputs and what a block computes, and weights and whole gradients of those that are gathered.
    assert memory.needs(on_host) == (80 + 30 + (1 + 2) + 2) * GIB
    assert memory.host_bytes(memory.plan) == 0
    assert memory.host_bytes(on_host) == pytest.approx(4 * 41 / 8 * GIB, rel=1e-6)
    moved = on_host.replace(offload=1.0)
    assert memory.host_bytes(moved) == pytest.approx((4 * 41 / 8 + 39 * 2) * GIB, rel=1e-6)
    # A single rank's shard is all of it.
    alone = of_model(Plan(checkpoint="full"))
    assert 'sharding="zero3", cpu_offload=True' in map(str, changes(alone))
    assert alone.needs(Plan(checkpoint="full", sharding="zero3", cpu_offload=True)) == memory.needs(on_host)
    # More ranks hold less of what has tokens, there too; fp32 holds twice of bf16.
    in_bf16 = of_model(Plan(checkpoint="full", precision="bf16"))
    half = Plan(checkpoint="full", offload=1.0, ulysses=2)
    assert in_bf16.host_bytes(half) == 2 * 39 * GIB == 2 * alone.host_bytes(half)


def test_a_change_that_the_host_does_not_hold_is_not_named():
    memory = of_model(Plan(checkpoint="full"))
    every = {str(change): change for change in changes(memory)}
    limit = every["offload=1.0"].needs_bytes
    fits, _best = smallest_change(memory, limit, host_limit_bytes=every["offload=1.0"].host_bytes)
    assert str(fits) == "offload=1.0"
    fits, _best = smallest_change(memory, limit, host_limit_bytes=every["offload=1.0"].host_bytes - 1)
    assert fits is not None and str(fits) != "offload=1.0"
    assert fits.needs_bytes <= limit and fits.host_bytes < every["offload=1.0"].host_bytes
    _fits, best = smallest_change(memory, GIB, host_limit_bytes=0)
    assert best is not None and best.host_bytes == 0
    # 78 GiB of inputs fit there, and 20.5 GiB of shards, and both together do not.
    sharded = of_model(Plan(checkpoint="full", sharding="zero3", dp_shard=8))
    for limit, both in ((90 * GIB, False), (100 * GIB, True)):
        _fits, best = smallest_change(sharded, GIB, host_limit_bytes=limit)
        assert best is not None and best.fields["offload"] == 1.0 and ("cpu_offload" in best.fields) == both


def test_what_the_host_does_not_hold_is_told():
    limit = (peak_of(Plan(checkpoint="full")) + peak_of(Plan(checkpoint="full", offload=1.0))) // 2
    model, optimizer = built(Plan())
    printed = io.StringIO()
    teller = explain_out_of_memory(
        model, optimizer, Plan(), limit_bytes=limit, host_limit_bytes=0, file=printed
    )
    with contextlib.suppress(torch.OutOfMemoryError), counting(LimitedBytes(limit), model), teller:
        train(model, optimizer)
    lines = printed.getvalue().splitlines()
    (row,) = (line for line in lines if line.startswith('  checkpoint="full", offload=1.0'))
    assert row.endswith("not on the host") and max(map(len, lines)) <= 100
    assert "offload" not in lines[-1]


def test_several_changes_together_where_none_suffices_alone_and_the_best_where_nothing_does():
    memory = of_model(Plan())
    alone = min(change.needs_bytes for change in changes(memory))
    fits, best = smallest_change(memory, alone - 1)
    assert best is None and fits is not None
    assert fits.fields["checkpoint"] == "full" and fits.fields["offload"] == 1.0 and len(fits.fields) > 2
    assert memory.needs(Plan().replace(**fits.fields)) == fits.needs_bytes < alone
    fits, best = smallest_change(memory, GIB)
    assert fits is None and best is not None and best.needs_bytes > GIB


def test_a_step_that_failed_needs_at_least_what_was_seen():
    memory = of_model(Plan(checkpoint="full"))
    seen = memory.needs(memory.plan) + 7 * GIB
    assert memory.explained(seen, in_optimizer=False).needs(memory.plan) == seen
    in_optimizer = memory.explained(seen, in_optimizer=True)
    assert in_optimizer.needs(memory.plan) == seen
    assert in_optimizer.needs(memory.plan.replace(offload=1.0)) == seen, "activations are gone by then"
