"""An MLP in chunks of tokens: the gradients of the whole, a fraction of its hidden layer."""

import pytest
import torch
from torch import nn

import shardformer
from opensora_accel import Plan
from opensora_accel import checkpoint as ck
from opensora_accel.profiler import LiveBytes
from tests.checkpoint import steps
from tests.checkpoint.steps import Block, blocks, data, gradients, run
from tests.models import wan, wan_inputs
from tests.tolerances import RELATIVE, relative_error

MANAGER = ck.GLOBAL_ACTIVATION_MANAGER


def mlp(device="cpu", dtype=torch.float64):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 8)).to(device, dtype)


@pytest.mark.parametrize("num_chunks", [1, 2, 3, 7, 50])
@pytest.mark.parametrize("dim", [0, 1])
def test_chunks_have_the_gradients_of_the_whole(num_chunks, dim, device):
    results = []
    for chunks in (None, num_chunks):
        module = mlp(device)
        x = (
            torch.linspace(-1, 1, 2 * 7 * 8, dtype=torch.float64, device=device)
            .view(2, 7, 8)
            .requires_grad_()
        )
        undo = ck.chunk_tokens(module, chunks, dim) if chunks else None
        out = module(x)
        (out * torch.linspace(0, 1, 8, dtype=torch.float64, device=device)).sum().backward()
        results.append([out.detach(), x.grad, *[p.grad for p in module.parameters()]])
        if undo:
            undo()
            assert "forward" not in vars(module)
    for whole, pieces in zip(*results, strict=True):
        assert relative_error(pieces, whole) < RELATIVE[torch.float64]


def test_one_piece_of_the_hidden_layer_is_alive():
    peaks = []
    for num_chunks in (1, 8):
        module, x = mlp(), torch.randn(1, 4096, 8, dtype=torch.float64, requires_grad=True)
        ck.chunk_tokens(module, num_chunks)
        with LiveBytes() as live:
            out = ck.checkpoint(module, x * 1).sum()
            live.peak_bytes = live.now_bytes
            out.backward()
        peaks.append(live.peak_bytes)
    hidden_bytes = 4096 * 64 * 8
    assert peaks[0] > 2 * hidden_bytes
    assert peaks[1] < peaks[0] - 1.5 * hidden_bytes


@pytest.mark.parametrize("mode", ["none", "full", "selective"])
def test_a_plan_with_chunks_has_the_gradients_of_the_plain_model(mode):
    results = []
    for plan in (Plan(), Plan(checkpoint=mode, mlp_chunks=4)):
        model, inputs = wan(), wan_inputs()
        shardformer.shard(model, plan)
        model(**inputs, return_dict=False)[0].square().mean().backward()
        results.append([p.grad for p in model.parameters()])
        shardformer.unshard(model)
        assert not any("forward" in vars(module) for module in model.modules())
    for whole, pieces in zip(*results, strict=True):
        assert relative_error(pieces, whole) < RELATIVE[torch.float64]


def test_what_chunks_cannot_do_is_refused():
    with pytest.raises(ValueError, match=r"with dropout \(1\) cannot be run in chunks"):
        ck.chunk_tokens(nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1)), 2)
    with pytest.raises(ValueError, match="at least 1; got 0"):
        ck.chunk_tokens(mlp(), 0)
    with pytest.raises(ValueError, match="mlp_chunks must be a whole number of pieces, at least 1; got 0"):
        Plan(mlp_chunks=0)
    policy = shardformer.Policy(models=("Linear",))
    with pytest.raises(ValueError, match="names the model's MLPs"):
        shardformer.shard(nn.Linear(2, 2), Plan(mlp_chunks=2), policy=policy)


def test_without_gradients_it_is_chunked_as_well():
    module, x = mlp(), torch.randn(1, 7, 8, dtype=torch.float64)
    whole, sizes = module(x), []
    module[0].register_forward_hook(lambda _m, args, _o: sizes.append(args[0].size(1)))
    ck.chunk_tokens(module, 3)
    with torch.no_grad():
        assert relative_error(module(x), whole) < RELATIVE[torch.float64]
    assert sizes == [3, 2, 2]


def test_chunks_inside_of_an_offloaded_block():
    results = []
    for chunked in (False, True):
        model, inputs = blocks().double().eval(), [t.detach().double().requires_grad_() for t in data()]
        MANAGER.setup_arena(1 << 20)
        if chunked:
            for block in model:
                ck.chunk_tokens(block.up, 2)
            ck.checkpoint_blocks(model, "selective", 1.0)
        # eval does not reach functional dropout: without it the draws cannot differ.
        torch.nn.functional.dropout, kept = (lambda x, *_a, **_k: x), torch.nn.functional.dropout
        try:
            run(model, inputs).square().sum().backward()
        finally:
            torch.nn.functional.dropout = kept
        results.append(gradients(model, inputs))
    # On a GPU no kernel of attention is for fp64, and a block's input alone is moved.
    assert isinstance(model[0], Block) and MANAGER.counters.moved == (9 if steps.DEVICE == "cpu" else 3)
    for whole, pieces in zip(*results, strict=True):
        assert relative_error(pieces, whole) < RELATIVE[torch.float64]
