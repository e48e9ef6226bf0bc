"""Rows of several samples: what each gives, and every gradient, are those of calls of their own, in fp64."""

import inspect
import math
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from peft import LoraConfig
from torch import Tensor
from torch.overrides import TorchFunctionMode

import shardformer
from opensora_accel import Plan, init_parallel
from opensora_accel.attention.slices import AttentionSlices, deal
from opensora_accel.precision import LiftOperations, lift_casts
from shardformer import packing
from shardformer.engine.packed import refuse_masks
from shardformer.spread import Alone, Tokens, streams
from tests.models import wan, wan_inputs
from tests.shardformer.conformance import compare, in_double, of_first_rank
from tests.tiers import PROVE, each_once, some
from tests.tolerances import RELATIVE, relative_errors
from tests.video_models import CASES
from tests.video_models.rows import ROWS, Row
from tests.video_models.skyreels_v2 import skyreels

MESHES = {
    "ulysses 2": Plan(ulysses=2),
    "ring 2, checkpoint": Plan(ring=2, checkpoint="full", offload=1.0),
    "ring 3": Plan(ring=3, checkpoint="selective"),
    "ring 2 × ulysses 2": Plan(ring=2, ulysses=2),
}


def fp64(row: Row):
    model = row.make().double()
    lift_casts(model)
    return model


def leaves(row: Row, model):
    samples = [in_double(sample) for sample in row.samples(model)]
    for sample in samples:
        for name in row.differentiated:
            sample[name].requires_grad_()
    return samples


def tensors(out) -> tuple[Tensor, ...]:
    return tuple(each for each in out if each is not None)


def step(model, row: Row, samples, outputs):
    """Gradients of all samples' inputs and of every parameter, of a loss in which no element is like another."""
    generator = torch.Generator().manual_seed(2)
    targets = [torch.randn(out.shape, dtype=out.dtype, generator=generator) for out in outputs]
    sum((out - target).square().sum() for out, target in zip(outputs, targets, strict=True)).backward()
    found = {f"output {i}": out.detach() for i, out in enumerate(outputs)}
    for number, sample in enumerate(samples):
        found |= {f"input {number} {name}": sample[name].grad for name in row.differentiated}
    zeros = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    return zeros | found | {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def apart(row: Row):
    """The reference: one call for each sample, of a model that nothing was done to."""
    model = fp64(row)
    samples = leaves(row, model)
    return step(model, row, samples, row.outputs([tensors(model(**s, return_dict=False)) for s in samples]))


def in_a_row(row: Row, plan: Plan, **options):
    model = fp64(row)
    samples = leaves(row, model)
    shardformer.shard(model, plan, packed=True)
    with packing.run_packed(model, **row.streams, **options):
        out = model(**row.join(model, samples), return_dict=False)
    return step(model, row, samples, tensors(out))


def errors(name, plan, **options):
    init_parallel(plan)
    row = ROWS[name]
    with LiftOperations():
        expected = of_first_rank(lambda: apart(row))
        found = in_a_row(row, plan, **options)
    return compare(found, expected)


@pytest.mark.parametrize("name", ROWS)
def test_a_row_gives_what_its_samples_give(parallel_registry, name):
    """On one device, without a process group."""
    with LiftOperations():
        found, expected = in_a_row(ROWS[name], Plan(checkpoint="full")), apart(ROWS[name])
    worst = max(relative_errors(found, expected).items(), key=lambda each: each[1])
    assert worst[1] < RELATIVE[torch.float64], worst


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        pytest.param(name, mesh, marks=[] if (i + j) % len(MESHES) == 0 or mesh == "ring 3" else PROVE)
        for i, name in enumerate(ROWS)
        for j, mesh in enumerate(MESHES)
    ],
)
def test_over_ranks_too(ranks, name, mesh):
    plan = MESHES[mesh]
    for found in ranks(plan.world_size, errors, name, plan):
        worst = max(found, key=lambda key: found[key])
        assert found[worst] < RELATIVE[torch.float64], worst


class DenseMask(TorchFunctionMode):
    """The reference of a mask: attention among `mask`'s tokens has it in the place of none."""

    def __init__(self, mask: Tensor):
        super().__init__()
        self.mask, self.num_masked = mask, 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if function is torch.nn.functional.scaled_dot_product_attention:
            bound = inspect.Signature.from_callable(reference_arguments).bind(*args, **kwargs).arguments
            if (bound["query"].size(2), bound["key"].size(2)) == tuple(self.mask.shape):
                self.num_masked += 1
                return function(*args, **kwargs | {"attn_mask": self.mask})
        return function(*args, **kwargs)


def reference_arguments(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, **_kwargs):
    """Of torch's attention, which has no signature that Python could read."""


# Samples of 3, 1 and 4 frames of 6, 6 and 10 tokens, two of them with a mask of their own.
ROW_MASKS = (
    AttentionSlices.block_causal(3, 6, block_frames=2),
    None,
    AttentionSlices.block_causal(4, 10, window_frames=2, sink_frames=1),
)


def with_masks(row: Row):
    """The row's streams, in which samples have these masks beside their shapes."""
    shapes = row.streams["hidden_states"]
    pairs = [shape if mask is None else (shape, mask) for shape, mask in zip(shapes, ROW_MASKS, strict=True)]
    return row.streams | {"hidden_states": pairs}


def apart_with_masks(row: Row):
    """The reference: calls of their own, each with torch's attention under its dense mask."""
    model, outs = fp64(row), []
    samples = leaves(row, model)
    for sample, mask in zip(samples, ROW_MASKS, strict=True):
        dense = nullcontext() if mask is None else DenseMask(mask.dense())
        with dense:
            outs.append(tensors(model(**sample, return_dict=False)))
        assert mask is None or dense.num_masked == 2  # in each block once
    return step(model, row, samples, row.outputs(outs))


def errors_of_masks(name, plan):
    init_parallel(plan)
    row = ROWS[name]
    with LiftOperations():
        expected = of_first_rank(lambda: apart_with_masks(row))
        found = in_a_row(replace(row, streams=with_masks(row)), plan)
    return compare(found, expected)


CAUSAL_ROWS = ["Wan", "SkyReels-V2, diffusion forcing"]


@pytest.mark.parametrize(
    ("name", "mesh"),
    each_once(CAUSAL_ROWS, ["ring 3", "ring 2 × ulysses 2", "ring 2, checkpoint", "ulysses 2"]),
)
def test_samples_of_a_row_have_masks_of_their_own(ranks, name, mesh):
    plan = MESHES[mesh]
    for found in ranks(plan.world_size, errors_of_masks, name, plan):
        worst = max(found, key=lambda key: found[key])
        assert found[worst] < RELATIVE[torch.float64], worst


@pytest.mark.parametrize("name", CAUSAL_ROWS)
def test_samples_of_a_row_have_masks_of_their_own_on_one_device(parallel_registry, name):
    row = ROWS[name]
    with LiftOperations():
        found, expected = in_a_row(replace(row, streams=with_masks(row)), Plan()), apart_with_masks(row)
        without = in_a_row(row, Plan())
    assert max(relative_errors(found, expected).values()) < RELATIVE[torch.float64]
    assert max(relative_errors(without, expected).values()) > 1e-3


def runs_of_ranks():
    """What code of the model's own is told of its tokens, where they are dealt out and where they are not."""
    plan, row = Plan(ring=3), ROWS["Wan"]
    found = errors("Wan", plan, balanced=False)
    model = shardformer.shard(fp64(row), plan, packed=True)
    inputs = row.join(model, [in_double(sample) for sample in row.samples(model)])
    asked = []
    model.blocks[0].attn1.register_forward_pre_hook(lambda *_: asked.append(shardformer.local_tokens(64)))
    with packing.run_packed(model, balanced=False, **row.streams):
        model(**inputs)
    with packing.run_packed(model, **row.streams), pytest.raises(ValueError, match="balanced=False"):
        model(**inputs)
    return found, asked


def test_ranks_have_runs_of_a_row_where_the_models_code_counts_on_them(ranks):
    found, asked = zip(*ranks(3, runs_of_ranks), strict=True)
    assert [(run.start, run.stop) for (run,) in asked] == [(0, 22), (22, 43), (43, 64)]
    assert all(max(each.values()) < RELATIVE[torch.float64] for each in found)


def test_a_causal_call_is_refused_within_run_packed():
    with pytest.raises(ValueError, match="attn passed is_causal within run_packed"):
        refuse_masks("attn", Tokens(Alone()), None, True)


def test_a_block_with_a_mask_of_its_own_is_told_apart_from_a_row():
    """Self-attention goes by the first block's, which the others get too."""
    tokens, first = Tokens(Alone()), object()
    tokens.state.packed = streams.Packed({}, {"x": AttentionSlices.causal(4)}, "x", block_mask=first)
    refuse_masks("attn", tokens, first, False)
    for other in (object(), None):
        with pytest.raises(ValueError, match="attn passed another mask than the first block gets"):
            refuse_masks("attn", tokens, other, False)


# MiniMax H3 with adapters, whose 3 heads no two or four ranks share evenly.

H3_MESHES = {
    "ulysses 2": Plan(ulysses=2, checkpoint="full", offload=1.0),
    "ulysses 3": Plan(ulysses=3, checkpoint="selective"),
    "ulysses 4": Plan(ulysses=4),
    "ring 2": Plan(ring=2, checkpoint="selective", offload=1.0),
    "ring 3": Plan(ring=3, checkpoint="full", offload=1.0),
    "ring 2 × ulysses 2": Plan(ring=2, ulysses=2, checkpoint="full"),
}


def with_adapters():
    """H3 whose attention has adapters that are not zero, the only weights that are trained."""
    model = ROWS["MiniMax-H3"].make()
    model.requires_grad_(False)
    layers = ["to_q", "to_k", "to_v", "to_out.0"]
    torch.manual_seed(1)  # the same on all ranks
    model.add_adapter(LoraConfig(r=2, lora_alpha=4, target_modules=layers, init_lora_weights=False))
    return model


def adapted_errors(plan):
    init_parallel(plan)
    row = replace(ROWS["MiniMax-H3"], make=with_adapters)
    with LiftOperations():
        expected = of_first_rank(lambda: apart(row))
        found = in_a_row(row, plan)
    assert sum(float(each.abs().sum()) > 0 for name, each in expected.items() if "lora" in name) == 24
    return compare(found, expected)


@pytest.mark.parametrize("mesh", some(H3_MESHES, "ulysses 4", "ring 3"))
def test_adapters_of_h3_learn_of_a_row_what_they_learn_of_its_samples(ranks, mesh):
    plan = H3_MESHES[mesh]
    for found in ranks(plan.world_size, adapted_errors, plan):
        worst = max(found, key=lambda key: found[key])
        assert found[worst] < RELATIVE[torch.float64], worst


# Three samples of H3: 124 frames of 768 × 1344, 56 of 512 × 896 and 22 of 384 × 640, each with its caption and sound.
# Tokens of its VAE's 8 × 8 pixels in patches of 2 × 2, sound of two channels at 40 a second.
H3_ROWS = [
    text + frames * (height // 16) * (width // 16) + 2 * sound
    for text, frames, height, width, sound in (
        (212, 32, 768, 1344, 207),
        (77, 15, 512, 896, 93),
        (131, 7, 384, 640, 37),
    )
]


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 6, 8, 32])
def test_ranks_have_the_same_work_of_a_row_of_h3(num_ranks):
    """No rank has more than 1.05 times its share of the pairs, where with runs in order one has 1.21 times it."""
    mask = AttentionSlices.packed(H3_ROWS)
    assert deal(mask, num_ranks).imbalance < 1.05


# Wan's 75 tokens are 5 frames of 15.
MASKS = {
    "block-causal": AttentionSlices.block_causal(5, 15, block_frames=2),
    "window and sink": AttentionSlices.block_causal(5, 15, window_frames=2, sink_frames=1),
    "rows that see nothing": AttentionSlices(75, 75, AttentionSlices.full(40, 40).slices),
}


def masked_step(model, inputs, context):
    latents = inputs["hidden_states"].clone().requires_grad_()
    with context:
        out = model(**inputs | {"hidden_states": latents}).sample
    weights = torch.linspace(-1, 2, out.numel(), dtype=out.dtype).view_as(out)
    (out * weights).sum().backward()
    return {"output 0": out.detach(), "input": latents.grad} | {
        n: p.grad for n, p in model.named_parameters()
    }


def masked_errors(kind, plan):
    init_parallel(plan)
    mask, inputs = MASKS[kind], wan_inputs()
    dense = DenseMask(mask.dense())

    def of_one_device():
        found = masked_step(fp64(ROWS["Wan"]), inputs, dense)
        assert dense.num_masked == 2  # in each block once
        return found

    with LiftOperations():
        expected = of_first_rank(of_one_device)
        model = shardformer.shard(fp64(ROWS["Wan"]), plan, packed=True)
        found = masked_step(model, inputs, packing.run_packed(model, hidden_states=mask))
    return compare(found, expected)


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("mesh", some(["ring 3", "ulysses 2", "ring 2 × ulysses 2"]))
def test_a_mask_of_ones_own_is_attended_by(ranks, kind, mesh):
    plan = MESHES[mesh]
    for found in ranks(plan.world_size, masked_errors, kind, plan):
        worst = max(found, key=lambda key: found[key])
        assert found[worst] < RELATIVE[torch.float64], worst


def refused_over_ranks():
    """Every mistake, and what is said of it; behind each the model still works."""
    plan = Plan(ring=2)
    init_parallel(plan)
    rank = torch.distributed.get_rank()
    row = ROWS["Wan"]
    model = shardformer.shard(fp64(row), plan, packed=True)
    inputs = row.join(model, [in_double(sample) for sample in row.samples(model)])
    rest = {"encoder_hidden_states": row.streams["encoder_hidden_states"]}
    grids = row.streams["hidden_states"]
    told = {}

    def refuse(kind, streams, **changed):
        with pytest.raises(ValueError) as error, packing.run_packed(model, **streams):
            model(**inputs | changed)
        told[kind] = str(error.value)

    refuse(
        "ranks differ", {"hidden_states": grids, "encoder_hidden_states": (5, 1, 3) if rank else (4, 2, 3)}
    )
    masks = AttentionSlices.causal(18), AttentionSlices.full(18)
    refuse("masks differ", {"hidden_states": masks[rank]}, **in_double(row.samples(model)[0]))
    refuse("one deals out", row.streams | {"balanced": bool(rank)})
    refuse("left out", {"hidden_states": grids})
    refuse("no such stream", rest | {"latents": grids})
    refuse("other numbers", {"hidden_states": grids[:2], **rest})
    refuse("no shapes", {"hidden_states": [18, 6, 40], **rest})
    refuse("another length", {"hidden_states": [(3, 6, 4), (1, 4, 6), (4, 4, 8)], **rest})
    refuse(
        "mask of another length",
        {"hidden_states": AttentionSlices.causal(63)},
        **in_double(row.samples(model)[0]),
    )
    alike = AttentionSlices.packed(ROW_MASKS[:1] + (6,) + ROW_MASKS[2:])
    refuse("no shapes beside a mask", {"hidden_states": alike, **rest})
    refuse(
        "a mask of no attention",
        rest | {"hidden_states": grids, "encoder_hidden_states": [(4, AttentionSlices.causal(4)), 2, 3]},
    )
    refuse(
        "a mask of another sample", {"hidden_states": [grids[0], (grids[1], ROW_MASKS[0]), grids[2]], **rest}
    )
    pairs = [(grids[0], AttentionSlices.full(18) if rank else ROW_MASKS[0]), *grids[1:]]
    refuse("samples' masks differ", {"hidden_states": pairs, **rest})
    refuse("captions of another length", {"hidden_states": grids, "encoder_hidden_states": (5, 1, 4)})
    with packing.run_packed(model, **row.streams):
        assert model(**inputs).sample.isfinite().all()
    return told


def test_what_cannot_be_packed_is_refused_on_all_ranks(ranks):
    # Every forward is compared, and not the first few alone.
    first, second = ranks(2, refused_over_ranks, env={"OPENSORA_ACCEL_DEBUG": "1"})
    assert first == second
    expected = {
        "left out": "was not told the lengths of encoder_hidden_states",
        "no shapes beside a mask": "not told the lengths of hidden_states, which the row has too; of hidden_states "
        "pass each sample's length or shape in a pair with its mask",
        "a mask of no attention": "encoder_hidden_states does not attend to itself",
        "a mask of another sample": "sample 1 of hidden_states has 6 tokens, and its mask is AttentionSlices(18",
        "no such stream": "has the streams hidden_states, encoder_hidden_states; run_packed got 'latents'",
        "other numbers": "every stream of a row has the same samples",
        "no shapes": "run_packed takes (T, H, W) of each one's hidden_states; got [18, 6, 40]",
        "another length": "has 64 tokens, and run_packed was told of 56 in hidden_states",
        "mask of another length": "has 18 tokens, and run_packed was told of 63",
        "captions of another length": "attn2 has 9 keys, and run_packed was told of 10 in encoder_hidden_states",
        **dict.fromkeys(
            ("ranks differ", "masks differ", "one deals out", "samples' masks differ"),
            "different inputs: run_packed's lengths",
        ),
    }
    assert {kind for kind in expected if expected[kind] not in first[kind]} == set(), first


def test_a_model_that_was_not_sharded_for_it_says_so(parallel_registry):
    model = wan()
    call = packing.run_packed(model, hidden_states=[(1, 2, 2)])
    with pytest.raises(ValueError, match=r"shardformer.shard\(model, plan, packed=True\)"), call:
        pass
    shardformer.shard(model, Plan())
    call = packing.run_packed(model, hidden_states=[(1, 2, 2)])
    with pytest.raises(ValueError, match="was not sharded for rows"), call:
        pass


@pytest.mark.parametrize("name", ["HunyuanVideo 1.5", "Wan VACE", "CogVideoX", "Cosmos 3"])
def test_a_model_whose_table_takes_no_rows_says_why(parallel_registry, name):
    model = CASES[name].make()
    with pytest.raises(ValueError, match=r"takes no rows of several samples: \w.* Leave packed=True out"):
        shardformer.shard(model, Plan(), packed=True)
    shardformer.shard(model, Plan())  # it was left as it was


def test_a_masks_kind_of_its_own_is_refused_beside_lengths(parallel_registry):
    """SkyReels of frames in blocks makes its own mask, which knows nothing of the row's samples."""
    row = ROWS["SkyReels-V2, diffusion forcing"]
    model = skyreels(num_frame_per_block=2).double()
    shardformer.shard(model, Plan(), packed=True)
    samples = [in_double(sample) for sample in row.samples(model)]
    with (
        packing.run_packed(model, **row.streams),
        pytest.raises(ValueError, match="passed a mask within run_packed"),
    ):
        model(**row.join(model, samples))


def test_without_run_packed_the_model_is_as_it_was(parallel_registry):
    """Bit by bit, as both call torch's kernel; and after an error within it."""
    inputs = wan_inputs()
    expected = wan()(**inputs).sample
    model = shardformer.shard(wan(), Plan(), packed=True)
    assert torch.equal(model(**inputs).sample, expected)
    with pytest.raises(RuntimeError), packing.run_packed(model, hidden_states=MASKS["block-causal"]):
        raise RuntimeError
    assert torch.equal(model(**inputs).sample, expected)
    with packing.run_packed(model, hidden_states=MASKS["block-causal"]):
        assert not torch.equal(model(**inputs).sample, expected)
    assert torch.equal(shardformer.unshard(model)(**inputs).sample, expected)


def test_rows_and_clips_are_each_other():
    shapes, patch = [(2, 6, 4), (4, 4, 8)], (2, 2, 4)
    clips = [torch.randn(3, *shape) for shape in shapes]
    row = packing.to_row(clips, patch)
    assert row.shape == (1, 3, sum(math.prod(shape) for shape in shapes) // 8, 2, 4)
    assert all(map(torch.equal, packing.to_clips(row, shapes, patch), clips))
    assert torch.equal(row[0, :, 2:4], clips[0][:, :, 2:4, :])  # the second patch stands below the first
    with pytest.raises(ValueError, match=r"whole patches of \(2, 2, 4\); got \(3, 3, 4, 4\)"):
        packing.to_row([torch.randn(3, 3, 4, 4)], patch)


def test_times_of_clips_and_of_frames():
    times = packing.per_token([0.5, torch.tensor([1.0, 2.0])], [(1, 2, 2), (2, 2, 4)], (1, 2, 2))
    assert times.tolist() == [[0.5, 1.0, 1.0, 2.0, 2.0]]
    of_tokens = packing.per_token([torch.tensor([[3.0, 4.0]])], [(1, 2, 4)], (1, 2, 2))
    assert of_tokens.tolist() == [[3.0, 4.0]]
    for values in ([1.0, 2.0, 3.0], []):
        with pytest.raises(ValueError, match=rf"of 2 tokens cannot have {len(values)} values"):
            packing.per_token([torch.tensor(values)], [(1, 2, 4)], (1, 2, 2))
