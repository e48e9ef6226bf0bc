"""Compiled blocks: checkpoint and offload stay outside of the compiled region."""

import gc

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import shardformer
from opensora_accel import Plan
from opensora_accel import checkpoint as ck
from tests.authors_models.latte import DIM, TransformerBlock
from tests.checkpoint.steps import assert_identical, data, gradients
from tests.models import wan
from tests.tolerances import RELATIVE, relative_error

MANAGER = ck.GLOBAL_ACTIVATION_MANAGER


class Block(nn.Module):
    """Its dropout-free work is compiled whole, attention too."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, hidden, timestep):
        q, k, v = self.qkv(hidden * timestep).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        attended = torch.nn.functional.scaled_dot_product_attention(q, k, v)
        return hidden + self.out(attended.transpose(1, 2).flatten(2)).sin()


@pytest.fixture(autouse=True)
def arena(device):
    torch._dynamo.reset()
    MANAGER.setup_arena(1 << 20)
    yield
    torch._dynamo.reset()
    gc.collect()


def model(device):
    torch.manual_seed(0)
    return nn.ModuleList([Block() for _ in range(4)]).to(device)


def step(blocks, call=lambda block, x, t: block(x, t)):
    x, t = data()
    hidden = x * 1
    for block in blocks:
        hidden = call(block, hidden, t)
    hidden.square().sum().backward()
    return gradients(blocks, (x, t))


def test_compiled_blocks_move_and_match_plain_checkpointing(device):
    plain, counters = model(device), [CompileCounterWithBackend("aot_eager") for _ in range(2)]
    compiled = [torch.compile(block, backend=counters[0]) for block in plain]
    expected = step(
        plain, lambda b, x, t: torch_checkpoint(compiled[list(plain).index(b)], x, t, use_reentrant=False)
    )
    ours = model(device)
    undo = ck.checkpoint_blocks(ours, "full", 1.0)
    for block in ours:
        block.compile(backend=counters[1])
    assert_identical(step(ours), expected)
    assert counters[1].frame_count >= 1 and counters[1].frame_count == counters[0].frame_count
    assert MANAGER.counters.moved == 3 and MANAGER.counters.prefetched == 3
    undo()
    assert all(block._compiled_call_impl is not None for block in ours), "compiled as it was asked to be"


def test_a_block_is_recomputed_by_the_graph_that_its_forward_took(device):
    torch._C._dynamo.eval_frame._set_lru_cache(True)  # as it is where nothing was compiled before
    torch.manual_seed(0)
    blocks = nn.ModuleList([TransformerBlock() for _ in range(4)]).to(device)
    x, c = (torch.randn(sizes, device=device, requires_grad=True) for sizes in ((6, 9, DIM), (6, DIM)))

    def run():
        for leaf in (x, c, *blocks.parameters()):
            leaf.grad = None
        hidden = x
        for index, block in enumerate(blocks):  # over places and over frames in turn, of which there are more
            sizes = (6, 9) if index % 2 == 0 else (9, 6)
            hidden = block(hidden.reshape(*sizes, DIM), c.repeat(2, 1)[: sizes[0]])
        hidden.square().mean().backward()
        return gradients(blocks, (x, c))

    expected = run()
    ck.checkpoint_blocks(blocks, "full")
    for block in blocks:
        block.compile(backend="aot_eager")
    for found, wanted in zip(run(), expected, strict=True):
        assert relative_error(found, wanted) < RELATIVE[torch.float32]


def test_modules_that_were_compiled_before_are_wrapped_from_outside(device):
    blocks = model(device)
    expected = step(blocks)
    blocks.zero_grad()
    counter = CompileCounterWithBackend("eager")
    outer = nn.ModuleList([torch.compile(block, backend=counter) for block in blocks])
    ck.checkpoint_blocks(outer, "full", 1.0, boundary=())
    assert_identical(step(outer), expected)
    assert counter.frame_count >= 1 and MANAGER.counters.moved == 3


def test_a_model_compiled_as_a_whole_is_right(device):
    blocks = model(device)
    expected = step(blocks)
    blocks.zero_grad()
    ck.checkpoint_blocks(blocks, "full", 1.0)

    @torch.compile(backend="eager")
    def whole(x, t):
        for block in blocks:
            x = block(x, t)
        return x

    x, t = data()
    whole(x * 1, t).square().sum().backward()
    assert_identical(gradients(blocks, (x, t)), expected)
    assert MANAGER.counters.moved == 3


def test_a_full_graph_over_a_checkpoint_says_what_to_compile(device):
    blocks = model(device)
    ck.checkpoint_blocks(blocks, "full")
    x, t = data()
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"compile what is inside by block\.compile\(\)"):
        torch.compile(lambda x, t: blocks[0](x, t), backend="eager", fullgraph=True)(x, t)


def test_an_order_that_cannot_work_is_refused(device):
    blocks = model(device)
    blocks[2].compile(backend="eager")
    with pytest.raises(ValueError, match=r"compiled already.*checkpoint first.*then call block\.compile"):
        ck.checkpoint_blocks(blocks, "full", 1.0)
    assert all("forward" not in vars(block) for block in blocks), "it was left as it was"
    fresh = wan(layers=1)
    shardformer.shard(fresh, Plan(checkpoint="selective"))
    with pytest.raises(ValueError, match="has to see the attention kernels"):
        fresh.blocks[0].compile()
