"""torch.compile on a sharded model's blocks: as many graphs as on one device, with attention inside of them."""

import os
from contextlib import nullcontext
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounterWithBackend

import shardformer
from opensora_accel import Plan, init_parallel
from opensora_accel.attention import local_attention
from shardformer.modeling.attention import RedirectTraced, redirect_attention
from tests.opensora_models.mmdit import flash_attention
from tests.shardformer import test_positions
from tests.shardformer.conformance import compare, step
from tests.tiers import PROVE, some
from tests.tolerances import RELATIVE
from tests.video_models import CASES

pytestmark = pytest.mark.slow

CLOSE = RELATIVE[torch.float32]
BACKEND = "aot_eager"  # traces forward and backward as inductor does, without needing a C++ compiler
NAMES = ["Wan", "HunyuanVideo", "LTX-Video", "MMDiT", "MMDiT, flash-attn"]
PLANS = [
    Plan(ring=2, checkpoint="full", offload=1.0),
    Plan(ulysses=2),
    Plan(ulysses=2, checkpoint="full", offload=1.0),
]
# These leave their own graphs for the tokens' numbers, or spread a grid that each attention module changes.
BROKEN = (
    *("WanModel", "Wan 2.1, VideoX-Fun's", "Wan 2.2, VideoX-Fun's", "SkyReels-V2, its authors'"),
    *("STDiT3", "Mochi"),
    # Attention by slices is not traced.
    *("AnyFlow FAR", "Causal Wan", "SkyReels-V2, diffusion forcing"),
)


class Compiled:
    """The blocks of a model compiled: how many graphs were made of them, and why the compiler left one."""

    def __init__(self, model, backend=BACKEND):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        self.counter = CompileCounterWithBackend(backend)
        for block in shardformer.blocks_of(model):
            block.compile(backend=self.counter)

    def graphs(self):
        return self.counter.frame_count, dict(torch._dynamo.utils.counters["graph_break"])


def graphs(name, plan, backend=BACKEND):
    """Graphs of one device's blocks, on rank 0, of sharded ones after each of three steps, and gradients' errors."""
    context = flash_attention if "flash" in name else nullcontext
    case = CASES[name.split(", flash")[0]]
    inputs, plain = case.inputs(), case.make()
    init_parallel(plan)
    with context():
        expected = step(plain, case, inputs)
        alone = None
        if torch.distributed.get_rank() == 0:  # the others wait
            plain = case.make()
            of_plain = Compiled(plain, "eager")
            step(plain, case, inputs)
            alone = of_plain.graphs()
        model = shardformer.shard(case.make(), plan)
        of_sharded, found, errors = Compiled(model, backend), [], []
        for _ in range(3):
            model.zero_grad()
            errors.append(max(compare(step(model, case, inputs), expected).values()))
            found.append(of_sharded.graphs())
    return alone, found, errors


@PROVE
@pytest.mark.parametrize("case", some(product(NAMES, PLANS), ("Wan", PLANS[1])), ids=str)
def test_a_sharded_block_is_one_graph_as_on_one_device(ranks, case):
    name, plan = case
    results = ranks(plan.world_size, graphs, name, plan)
    alone = results[0][0]
    for _, (first, second, third), errors in results:
        assert first == (0, {})  # it is checked
        assert second == third == alone and alone[1] == {}
        assert max(errors) < CLOSE


def num_gloo_threads():
    """Each group of this process has one, which wakes up a hundred times a second."""
    names = (Path("/proc/self/task") / thread / "comm" for thread in os.listdir("/proc/self/task"))
    return sum("gloo" in name.read_text() for name in names)


@pytest.mark.prove
@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="threads have their names in Linux's /proc")
def test_what_was_compiled_keeps_no_groups(ranks):
    counts = []
    for _ in range(4):
        ranks(2, graphs, "Wan", PLANS[1])
        counts.append(max(ranks(2, num_gloo_threads)))
    # Kept, a job's three groups are three threads; a few of the last job may still be about to end.
    assert counts[3] - counts[0] < 6, counts


@pytest.mark.prove
@pytest.mark.parametrize("name", NAMES)
def test_a_ring_of_ulysses_groups_is_compiled_too(ranks, name):
    plan = Plan(ring=2, ulysses=2)
    results = ranks(4, graphs, name, plan)
    alone = results[0][0]
    for _, (_, second, third), errors in results:
        assert second == third == alone
        assert max(errors) < CLOSE


@pytest.mark.prove
@pytest.mark.parametrize("name", CASES)
def test_every_model_is_compiled(ranks, name):
    """Under one plan: what a ring and checkpointing compile to is that of few models, above, and takes as long."""
    results = ranks(2, graphs, name, Plan(ulysses=2))
    alone = results[0][0]
    for _, (_, second, third), errors in results:
        # Some compute in bf16 what one device does too, and lie further apart; compiling adds nothing to that.
        assert max(errors) < max(CLOSE, 2 * errors[0])
        assert second == third
        # One device, compiled from its first forward on, may make graphs that it needs only there.
        assert name.startswith(BROKEN) or (second[0] <= alone[0] and second[1].keys() <= alone[1].keys())


@PROVE
@pytest.mark.parametrize("name", ["Wan", "HunyuanVideo"])
def test_blocks_compiled_by_inductor(ranks, name):
    for _, found, errors in ranks(2, graphs, name, Plan(ulysses=2, checkpoint="full"), "inductor"):
        assert found[2][0] >= 1 and max(errors) < CLOSE


def in_flight(plan):
    """Two forwards before the first backward, of which the first is uncompiled and so recomputed."""
    init_parallel(plan)
    case, inputs, found = CASES["Wan"], CASES["Wan"].inputs(), []
    for sharded in (False, True):
        model = shardformer.shard(case.make(), plan) if sharded else case.make()
        if sharded:
            compiled = Compiled(model)
            with torch.no_grad():  # a validation before the first step checks nothing
                model(**inputs)
        outs = [model(**inputs, return_dict=False)[0] for _ in range(2)]
        for out in outs:
            out.square().mean().backward()
        found.append({name: parameter.grad for name, parameter in model.named_parameters()})
    return compare(found[1], found[0]), compiled.graphs()


@PROVE
def test_microbatches_in_flight(ranks):
    for errors, (num_graphs, _) in ranks(2, in_flight, Plan(ulysses=2, checkpoint="full")):
        assert max(errors.values()) < CLOSE and num_graphs > 1


def of_lengths(name, plan):
    """Clips of other lengths: a graph for each, and back to the first without another."""
    init_parallel(plan)
    case, found = CASES[name], []
    model, plain = shardformer.shard(case.make(), plan), case.make()
    compiled = Compiled(model)
    for frames in (5, 5, 4, 3, 5, 4):
        inputs = case.inputs()
        inputs["hidden_states"] = inputs["hidden_states"][:, :, :frames]
        model.zero_grad()
        plain.zero_grad()
        errors = compare(step(model, case, inputs), step(plain, case, inputs))
        found.append((max(errors.values()), compiled.graphs()[0]))
    return found


@pytest.mark.prove
@pytest.mark.parametrize("name", ["Wan", "HunyuanVideo"])
def test_clips_of_other_lengths(ranks, name):
    for found in ranks(2, of_lengths, name, Plan(ulysses=2)):
        errors, counts = zip(*found, strict=True)
        assert max(errors) < CLOSE
        assert counts[0] == 0 < counts[1] < counts[2] < counts[3] == counts[4] == counts[5]


def refused_first(plan):
    """Compiled at once, a model that counts positions from a rank's own tokens is refused as it is uncompiled."""
    init_parallel(plan)
    case = test_positions.case_of("counted", "sdpa")
    model = shardformer.shard(case.make(), plan, policy=test_positions.UNTOLD)
    for block in shardformer.blocks_of(model, test_positions.UNTOLD):
        block.compile(backend=BACKEND)
    with pytest.raises(ValueError, match="positions would count from 0 on every rank"):
        step(model, case, case.inputs())


def test_a_first_forward_is_checked(ranks):
    ranks(2, refused_first, Plan(ulysses=2))


def overlapped(plan):
    init_parallel(plan)
    case, inputs = CASES["Wan"], CASES["Wan"].inputs()
    expected = step(case.make(), case, inputs)
    model = shardformer.shard(case.make(), plan)
    compiled = Compiled(model)
    errors = [max(compare(step(model, case, inputs), expected).values())]
    model.zero_grad()
    errors.append(max(compare(step(model, case, inputs), expected).values()))
    model = shardformer.unshard(model)
    model.zero_grad()
    alone = step(model, case, inputs)
    return errors, compiled.graphs()[1], all(torch.allclose(alone[key], expected[key]) for key in expected)


@PROVE
def test_overlapped_ulysses_stays_out_of_the_graph_and_unshard_takes_all_back(ranks):
    for errors, breaks, is_plain in ranks(2, overlapped, Plan(ulysses=2, overlap_ulysses=True)):
        assert max(errors) < CLOSE and is_plain
        assert len(breaks) == 1 and "sequence-parallel attention" in next(iter(breaks))


class Attends(torch.nn.Module):
    """Calls torch's kernel as most code does, or by a name that it imported."""

    def __init__(self, by_name):
        super().__init__()
        self.by_name = by_name

    def forward(self, x):
        return (IMPORTED if self.by_name else F.scaled_dot_product_attention)(x, x, x)


IMPORTED = F.scaled_dot_product_attention


def redirected(by_name):
    module, x = Attends(by_name), torch.randn(2, 3, 5, 8)
    attention = lambda q, k, v, **given: 2 * local_attention(q, k, v)  # noqa: E731
    redirect_attention(module, "attn", attention, frozenset, lambda: 0, lambda: True)
    torch._dynamo.reset()
    expected = module(x.requires_grad_())
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(module, backend=counter, fullgraph=True)
    return module, compiled, x, expected, counter


def test_what_is_traced_is_torchs_own_function_again():
    _, compiled, x, expected, counter = redirected(by_name=False)
    torch.testing.assert_close(compiled(x), expected)
    torch.testing.assert_close(expected, 2 * IMPORTED(x, x, x))
    assert counter.frame_count == 1 and F.scaled_dot_product_attention is IMPORTED


def test_a_kernel_that_the_trace_does_not_meet_is_refused():
    _, compiled, x, _, _ = redirected(by_name=True)
    with pytest.raises(Exception, match="imports scaled_dot_product_attention by name"):
        compiled(x)
    assert F.scaled_dot_product_attention is IMPORTED


def test_one_redirected_module_within_another():
    with RedirectTraced(lambda q, k, v, **_: q) as outer:
        with RedirectTraced(lambda q, k, v, **_: 2 * q) as inner:
            x = torch.randn(2, 3, 5, 8)
            assert torch.equal(F.scaled_dot_product_attention(x, x, x), 2 * x)
        assert torch.equal(F.scaled_dot_product_attention(x, x, x), x)
    assert outer.num_calls == inner.num_calls == 1 and F.scaled_dot_product_attention is IMPORTED
