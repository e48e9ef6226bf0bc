"""Code that leaves out blocks by what the tokens are: all ranks that share a sample leave out the same, or are told."""

import pytest
import torch
import torch.distributed as dist
from diffusers import FirstBlockCacheConfig
from diffusers.hooks.first_block_cache import FBCHeadBlockHook, FBCSharedBlockState
from diffusers.hooks.hooks import CacheContext, StateManager

import shardformer
from opensora_accel import Plan, init_parallel
from opensora_accel.precision import lift_casts
from shardformer.engine.decisions import has_changed
from shardformer.spread import Tokens
from tests.authors_models.wan import WanAttentionBlock, WanModel, wan_model_inputs
from tests.models import wan, wan_inputs
from tests.tolerances import RELATIVE, relative_error

EXACT = RELATIVE[torch.float64]


def decisions(size, changes):
    """What a first-block cache decides, whose tokens change by another amount on each rank."""
    init_parallel(Plan(ulysses=len(size)))
    tokens = Tokens(dist.group.WORLD)
    tokens.begin()
    tokens.state.splits = size
    mine = torch.ones(2, size[dist.get_rank()], 3)
    hook = FBCHeadBlockHook(StateManager(FBCSharedBlockState), threshold=0.5)
    hook.state_manager.set_context(CacheContext("cond"))
    with tokens.as_running():
        assert has_changed(hook, mine)
        hook.state_manager.get_state().head_block_residual = mine
        return has_changed(hook, mine + changes[dist.get_rank()])


def test_ranks_skip_blocks_together(ranks):
    # The mean change of 7 tokens is (3 · 1 + 2 · 0.1 + 2 · 0) / 7 = 0.46, then (3 · 1 + 2 · 0.4) / 7 = 0.54.
    assert ranks(3, decisions, (3, 2, 2), (1.0, 0.1, 0.0)) == [False] * 3
    assert ranks(3, decisions, (3, 2, 2), (1.0, 0.4, 0.0)) == [True] * 3
    # A rank without tokens goes along.
    assert ranks(2, decisions, (3, 0), (1.0, 0.0)) == [True] * 2


class Skips:
    """Leaves out a block whose tokens have changed little since it last ran, and adds what it added then."""

    def __init__(self, block, ratio, threshold):
        self.block, self.ratio, self.threshold = block.forward, ratio, threshold
        self.before = self.added = None
        self.num_skipped = 0

    def __call__(self, hidden_states, *args, **kwargs):
        before, self.before = self.before, hidden_states
        if before is not None and self.ratio(hidden_states - before, before) < self.threshold:
            self.num_skipped += 1
            return hidden_states + self.added
        out = self.block(hidden_states, *args, **kwargs)
        self.added = out - hidden_states
        return out


def of_own_tokens(change, before):
    return (change.abs().mean() / before.abs().mean()).item()


def of_all_tokens(change, before):
    sums = torch.stack([change.abs().sum(), before.abs().sum()])
    change, before = shardformer.sum_over_tokens(sums).tolist()
    return change / before


def of_two_numbers(change, before):
    """`of_all_tokens`, with one thing forgotten."""
    change, before = torch.stack([change.abs().sum(), before.abs().sum()]).tolist()
    return change / before


def of_every_sample(change, before):
    return (change.abs().mean((1, 2)) / before.abs().mean((1, 2))).numpy().max()


def all_close(change, before):
    return 0.0 if torch.allclose(input=change, other=torch.zeros(()), atol=0.5) else 1.0


def equal(change, before):
    return 1.0 - torch.equal(change, torch.zeros_like(change))


def moved(step):
    """A clip of which one end changes from step to step, and the other hardly does."""
    inputs = wan_inputs()
    inputs["hidden_states"][:, :, -1] += 0.8 * step
    return inputs | {"return_dict": False}


THRESHOLD = 0.14


def first_block(model):
    model.enable_cache(FirstBlockCacheConfig(threshold=THRESHOLD))


def outputs(model, install):
    """Of four steps without gradients, and how many blocks were skipped."""
    skipping = []
    if install is first_block:
        install(model)
    else:
        # Put on the instance that the engine has put its hooks on, as programs do.
        for block in model.blocks[1:]:
            block.forward = Skips(block, install, THRESHOLD)
            skipping.append(block.forward)
    with torch.no_grad():
        if install is first_block:
            with model.cache_context("cond"):
                outs = [model(**moved(step))[0] for step in range(4)]
        else:
            outs = [model(**moved(step))[0] for step in range(4)]
    return outs, sum(each.num_skipped for each in skipping)


def made(plan=None):
    model = wan(layers=3)
    lift_casts(model)
    return model if plan is None else shardformer.shard(model, plan)


def errors(plan, install):
    init_parallel(plan)
    expected, num_skipped = outputs(made(), install)
    uncached, _ = outputs(made(), lambda change, before: 1.0)
    assert max(relative_error(a, b) for a, b in zip(uncached, expected, strict=True)) > 1e-6
    found, num_found = outputs(made(plan), install)
    assert num_found == num_skipped
    return max(relative_error(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("plan", [Plan(ulysses=2), Plan(ring=3)], ids=str)
@pytest.mark.parametrize("install", [first_block, of_all_tokens])
def test_blocks_are_skipped_as_on_one_device(ranks, plan, install):
    assert max(ranks(plan.world_size, errors, plan, install)) < EXACT


def refusal(plan, install):
    init_parallel(plan)
    with pytest.raises(ValueError) as caught:
        outputs(made(plan), install)
    return str(caught.value)


@pytest.mark.parametrize("decide", [of_own_tokens, of_two_numbers, of_every_sample, all_close, equal])
def test_a_cache_that_decides_by_a_ranks_own_tokens_is_refused(ranks, decide):
    for message in ranks(2, refusal, Plan(ulysses=2), decide):
        assert "test_decisions.py" in message and "reads a number out of one rank's tokens" in message
        assert "shardformer.sum_over_tokens" in message


def is_small(hidden_states):
    return hidden_states.square().mean() < 1e-3


def is_small_added_up(hidden_states):
    total, parts = torch.zeros(()), torch.zeros(2)
    parts[0] = hidden_states.square().mean()
    total += parts.sum()
    return total < 1e-3


def layer_skip(plan, decide):
    """A block that is left out in training where its tokens are small; the first forward says so."""
    init_parallel(plan)
    model = made(plan)
    block = model.blocks[1]
    forward = block.forward

    def skipping(hidden_states, *args, **kwargs):
        if decide(hidden_states):
            return hidden_states
        return forward(hidden_states, *args, **kwargs)

    block.forward = skipping
    with pytest.raises(ValueError) as caught:
        model(**moved(0))
    return str(caught.value)


@pytest.mark.parametrize("decide", [is_small, is_small_added_up])
def test_a_layer_that_is_skipped_by_a_ranks_own_tokens_is_refused(ranks, decide):
    for message in ranks(2, layer_skip, Plan(ring=2), decide):
        assert "test_decisions.py" in message and "reads a number out of one rank's tokens" in message


def what_every_rank_has(plan):
    """A decision by the timestep, or by the gathered output, is none of one rank's tokens."""
    init_parallel(plan)
    model = made(plan)
    block, seen = model.blocks[1], []
    forward = block.forward

    def deciding(hidden_states, encoder_hidden_states, temb, rotary_emb):
        seen.append(bool(temb.abs().mean() > 1e-9))
        return forward(hidden_states, encoder_hidden_states, temb, rotary_emb)

    block.forward = deciding
    model.proj_out.register_forward_hook(lambda *call: seen.append(bool(call[-1].abs().mean() > 1e-9)))
    model(**moved(0))[0].sum().backward()
    return seen


def test_a_decision_by_what_every_rank_has_is_taken(ranks):
    assert ranks(2, what_every_rank_has, Plan(ulysses=2)) == [[True, True]] * 2


@torch.compile(backend="eager")
def halved(hidden_states):
    return (hidden_states * 0.5).tanh()


def halving(model):
    for block in model.blocks:
        forward = block.forward
        block.forward = lambda *args, forward=forward: halved(forward(*args))
    with torch.no_grad():
        return model(**moved(0))[0]


def error_with_compiled_code(plan):
    init_parallel(plan)
    return relative_error(halving(made(plan)), halving(made()))


def test_a_function_that_the_model_compiles_runs_as_before(ranks):
    assert max(ranks(2, error_with_compiled_code, Plan(ulysses=2))) < EXACT


class LeftOut(WanAttentionBlock):
    """A block that its model's code does not call, as where a step takes the last one's result for all blocks."""

    def __call__(self, x, **_others):
        return x


def nothing_split(plan):
    init_parallel(plan)
    model = shardformer.shard(WanModel(), plan)
    for block in model.blocks:
        block.__class__ = LeftOut
    with pytest.raises(ValueError) as caught:
        model(**wan_model_inputs())
    return str(caught.value)


def test_a_forward_that_leaves_out_every_block_is_refused(ranks):
    for message in ranks(2, nothing_split, Plan(ulysses=2)):
        assert "gathers head's output, but nothing was split in this forward" in message
