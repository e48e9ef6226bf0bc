"""Clips of several sizes in one row: which ones, and that a run learns of each what it would learn of it alone."""

import dataclasses
import itertools
import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from opensora_accel import Plan
from opensora_accel.training.recipes import RECIPES
from opensora_accel.training.rows import Cost, fill_rows, fullest_row
from opensora_accel.training.samples import write_video
from opensora_accel.training.sections import DataConfig
from opensora_accel.training.video import probe, read_clip
from opensora_accel.verify.pool import RankError
from tests.models import wan, wan_inputs
from tests.tiers import PROVE, some
from tests.training.runs import assert_one_run, tiny_config
from tests.training.test_families import config_of, trained, whole
from tests.training.test_faults import die_after, go_on

BUCKETS = ["1x24x40", "5x24x40", "9x24x40", "5x40x24"]
# Of 15, 75, 135 and 75 tokens of Wan's.
FILES = {"9x24x40": 3, "5x24x40": 3, "5x40x24": 2, "1x24x40": 2}
FAMILIES = (
    "WanTransformer3DModel",
    "SkyReelsV2Transformer3DModel",
    "LTXVideoTransformer3DModel",
    "LTX2VideoTransformer3DModel",
    "MiniMaxH3Transformer3DModel",
)


@pytest.fixture(scope="session")
def sizes(tmp_path_factory):
    """A folder with clips of every bucket, and captions of several lengths."""
    folder = tmp_path_factory.mktemp("sizes")
    lines = []
    for size, count in FILES.items():
        num_frames, height, width = map(int, size.split("x"))
        for number in range(count):
            ramp = torch.arange(width).view(1, 1, -1, 1) * 4 + torch.arange(num_frames).view(-1, 1, 1, 1) * 3
            tint = torch.tensor([number * 40, 120, 200 - number * 40])
            frames = ((ramp + tint) % 256).expand(num_frames, height, width, 3).to(torch.uint8)
            name = f"{size}_{number}.mp4"
            write_video(folder / name, frames, 12)
            words = f"{size} of colour number {number}".split()
            lines.append(json.dumps({"file": name, "caption": " ".join(words[number:])}))
    (folder / "metadata.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


def rows_config(name, folder, output, plan=None, **changes):
    """Two rows a step."""
    data = {"folder": str(folder), "buckets": BUCKETS, "batch_size": 2, "packed_tokens": 240}
    if name.startswith(("LTX", "MiniMax")):  # a token for each latent position, or sound beside them
        data["packed_tokens"] = 960
    changes = {"data": data, **changes}
    if name == "WanTransformer3DModel":
        return tiny_config(folder, output, plan, **changes)
    return config_of(name, folder, output, plan, **changes)


# Which samples share a row.

LENGTHS = st.lists(st.integers(1, 20), min_size=1, max_size=12)


@given(LENGTHS, st.integers(1, 5), st.integers(20, 80))
def test_rows_have_a_prefix_of_the_samples_each_once(lengths, num_rows, capacity):
    def size(sample):
        return lengths[sample % len(lengths)]

    rows = fill_rows(size, num_rows, capacity, lambda n: n**2)
    taken = sorted(sample for row in rows for sample in row)
    assert taken == list(range(len(taken))) and len(rows) == num_rows and all(rows)
    assert all(sum(map(size, row)) <= capacity for row in rows)
    # The next one had no room when rows were filled in order, whichever of them is taken.
    assert sum(map(size, taken)) + size(len(taken)) > capacity
    assert rows == fill_rows(size, num_rows, capacity, lambda n: n**2)


def test_the_example_of_the_module():
    sizes = [9, 4, 4, 3, 2, 6]
    assert fill_rows(lambda n: sizes[n], 2, 12, lambda n: n**2) == [[0, 4], [1, 2, 3]]


def test_costs_of_rows_are_even():
    """Lognormal lengths, as clips have: 64 rows, of which no one costs more than 1.05 times the mean."""
    rng = torch.Generator().manual_seed(0)
    lengths = (torch.randn(4096, generator=rng).mul(0.8).exp() * 4000).clamp(200, 30000).long().tolist()
    cost = Cost(2.0 * 14e9, 4.0 * 40 * 5120)
    rows = fill_rows(lambda n: lengths[n], 64, 120_000, cost)
    costs = torch.tensor([sum(cost(lengths[n]) for n in row) for row in rows], dtype=torch.float64)
    assert float(costs.max() / costs.mean()) < 1.05


def test_a_clips_cost_is_what_a_model_computes():
    """Of one frame, two and three: what grows with pairs exactly; what grows with tokens but for captions."""
    model, inputs = wan(), wan_inputs()
    counted = []
    for frames in (1, 2, 3):
        latents = inputs["hidden_states"][:1, :, :1].repeat(1, 1, frames, 1, 1)
        rest = {
            "timestep": inputs["timestep"][:1],
            "encoder_hidden_states": inputs["encoder_hidden_states"][:1],
        }
        # The counter knows nothing of the fused kernel of CPUs.
        with FlopCounterMode(display=False) as counter, torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
            model(hidden_states=latents, **rest)
        counted.append(counter.get_total_flops())
    n = latents[0, 0, 0].numel() // 4
    cost = Cost.of(model, model.config.num_attention_heads, model.config.attention_head_dim)
    assert counted[2] - 2 * counted[1] + counted[0] == 2 * n**2 * cost.per_pair
    per_token = (counted[1] - counted[0]) / n - 3 * n * cost.per_pair
    assert cost.per_token == pytest.approx(per_token, rel=0.3)


def test_where_no_other_order_fits_rows_stay_as_they_were_filled():
    """The largest first, 4 | 3 3 and then 2, leaves no row with room for the last 2; in order all five fit."""
    sizes = [4, 3, 3, 2, 2, 20]
    filled = [[0, 1], [2, 3, 4]]
    assert fill_rows(lambda n: sizes[n], 2, 7, lambda n: n**2) == filled


@given(st.dictionaries(st.sampled_from("abc"), st.integers(2, 9), min_size=1, max_size=3), st.integers(9, 30))
def test_the_fullest_row_has_the_most_pairs_of_those_as_full(tokens, capacity):
    row = fullest_row(tokens, capacity)
    sizes = [tokens[name] for name in row]
    assert sizes == sorted(sizes, reverse=True)
    # All that fit, by numbers of each size.
    counts = itertools.product(*(range(capacity // number + 1) for number in tokens.values()))
    sums = [
        (sum(n * size for n, size in zip(each, tokens.values(), strict=True)),
         sum(n * size**2 for n, size in zip(each, tokens.values(), strict=True)))
        for each in counts
    ]  # fmt: skip
    assert (sum(sizes), sum(size**2 for size in sizes)) == max(each for each in sums if each[0] <= capacity)


def test_the_example_of_the_fullest_row():
    assert fullest_row({"a": 6, "b": 5, "c": 2}, 10) == ["b", "b"]


# What is learned of them.


def in_rows_and_apart(config):
    """Losses and gradients of a step's rows, and of the same samples one by one, each of whose loss is `loss`."""
    from opensora_accel.training.loop import Trainer

    trainer = Trainer(config)
    objective, model = trainer.objective, trainer.state.model
    batch = next(trainer.loader)
    assert len(batch.rows) == 2 and max(map(len, batch.rows)) > 1
    assert len({sample.bucket for row in batch.rows for sample in row}) > 2
    rows = objective.encoders.encode_rows(batch).rows

    def gradients(loss):
        model.zero_grad()
        loss.backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    ours = sum(objective.loss_of_row(row) for row in rows)
    found = ours.item(), gradients(ours)
    alone = sum(objective.loss(sample) for row in rows for sample in row)
    return found, (alone.item(), gradients(alone))


@pytest.mark.parametrize("name", FAMILIES)
def test_a_row_is_learned_as_its_clips_are(sizes, tmp_path, parallel_registry, name):
    """In fp64, of the same draws, by calls of their own."""
    assert_learned_alike(rows_config(name, sizes, tmp_path, Plan(precision="fp64", checkpoint="selective")))


def test_captions_of_a_row_are_modulated_by_their_own_clips_times(sizes, tmp_path, parallel_registry):
    """LTX-2.3's, of clip and sound, which LTX-2 leaves as they are."""
    name = "LTX2VideoTransformer3DModel"
    modulated = {"cross_attn_mod": True, "audio_cross_attn_mod": True}
    model = {"class_name": name, "config": dict(RECIPES[name].tiny) | modulated}
    assert_learned_alike(rows_config(name, sizes, tmp_path, Plan(precision="fp64"), model=model))


def test_each_clip_of_a_row_counts_by_its_own_time(sizes, tmp_path, parallel_registry):
    """Under weights of times and a loss that is not linear."""
    flow = {"flow.weighting": "bell", "flow.huber": 0.05}
    assert_learned_alike(
        rows_config("WanTransformer3DModel", sizes, tmp_path, Plan(precision="fp64"), **flow)
    )


def test_a_steps_loss_is_the_mean_over_its_clips(sizes, tmp_path, parallel_registry):
    """Not over its rows: one of two has more clips than the other."""
    from opensora_accel.training.loop import Trainer

    trainer = Trainer(rows_config("WanTransformer3DModel", sizes, tmp_path, Plan(precision="fp64")))
    of_row, losses, counts = trainer.objective.loss_of_row, [], []

    def recorded(row):
        loss = of_row(row)
        losses.append(loss.item())
        counts.append(len(row))
        return loss

    trainer.objective.loss_of_row = recorded
    found = trainer.step()["loss"]
    assert len(losses) == 2 < sum(counts)
    assert found == pytest.approx(sum(losses) / sum(counts), rel=1e-6)


def assert_learned_alike(config):
    (loss, found), (alone, expected) = in_rows_and_apart(config)
    assert loss == pytest.approx(alone, rel=1e-10) and found.keys() == expected.keys()
    for weight, gradient in expected.items():
        assert torch.allclose(found[weight], gradient, rtol=1e-8, atol=1e-11), weight


def curve(config):
    """Losses and norms of four steps, and the gradients of the last."""
    from opensora_accel.training.loop import Trainer

    trainer = Trainer(config)
    found = [trainer.step() for _ in range(3)]
    model = trainer.state.model
    optimizer, gradients = trainer.state.optimizer, {}
    step = optimizer.step
    optimizer.step = lambda: (
        gradients.update({name: whole(p.grad) for name, p in model.named_parameters()}),
        step(),
    )
    found.append(trainer.step())
    return [each["loss"] for each in found], [each["grad_norm"] for each in found], gradients


@pytest.mark.parametrize(
    "plan",
    some(
        [
            Plan(dp_shard=2, ring=2, sharding="zero3", checkpoint="full"),
            Plan(dp_replicate=2),
            Plan(ulysses=2, checkpoint="selective"),
            Plan(ring=3, sharding="zero2", sharding_factor=3),
            Plan(ring=2, ulysses=2, offload=1.0, checkpoint="full"),
        ]
    ),
    ids=str,
)
@pytest.mark.parametrize("name", some(FAMILIES, "WanTransformer3DModel"))
def test_any_mesh_trains_the_same_run(ranks, sizes, tmp_path, name, plan):
    config = rows_config(name, sizes, tmp_path / "one", Plan(precision="fp64"))
    others = rows_config(name, sizes, tmp_path / "others", plan.replace(precision="fp64"))
    (one,) = ranks(1, curve, config)
    for found in ranks(plan.world_size, curve, others):
        assert_one_run(one, found)


@pytest.mark.parametrize("name", some(FAMILIES))
def test_a_run_of_rows_goes_on_bit_by_bit(ranks, sizes, tmp_path, name):
    plan = Plan(dp_shard=2, ulysses=2, sharding="zero2", checkpoint="full")
    config = rows_config(name, sizes, tmp_path / "run", plan, save_every=2, steps=4)
    losses, weights = ranks(4, trained, config)[0]
    again, found = ranks(4, trained, config, tmp_path / "run" / "checkpoints" / "step_000002")[0]
    assert again == losses[2:] and len(again) == 2
    assert all(torch.equal(found[key], weights[key]) for key in weights)


def test_a_file_that_turns_bad_is_replaced_in_its_row(sizes, tmp_path, parallel_registry):
    from opensora_accel.training.loop import Trainer

    for file in sizes.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    trainer = Trainer(rows_config("WanTransformer3DModel", tmp_path, tmp_path / "run"))
    (tmp_path / "9x24x40_1.mp4").write_bytes(b"gone bad")
    for _ in range(6):
        metrics = trainer.step()
        assert metrics is not None and metrics["loss"] > 0
    assert set(trainer.loader.quarantined) == {"9x24x40_1.mp4"}


def test_the_step_says_what_its_rows_had(sizes, tmp_path, parallel_registry):
    from opensora_accel.training.loop import Trainer

    trainer = Trainer(rows_config("WanTransformer3DModel", sizes, tmp_path))
    assert "data, in rows of at most 240 tokens, 2 per step" in trainer.summary
    position = trainer.loader.position
    metrics = trainer.step()
    clips = {
        name.removeprefix("clips/"): number for name, number in metrics.items() if name.startswith("clips/")
    }
    tokens = {"1x24x40": 15, "5x24x40": 75, "9x24x40": 135, "5x40x24": 75}
    assert sum(clips.values()) == trainer.loader.position - position
    assert metrics["tokens"] == sum(tokens[size] * number for size, number in clips.items()) > 240


@pytest.mark.parametrize(
    ("name", "changes", "told"),
    [
        (
            "MochiTransformer3DModel",
            {},
            "no rows of several .* train one of WanTransformer3DModel, .*MiniMaxH3",
        ),
        ("WanVACETransformer3DModel", {}, "a call of WanVACETransformer3DModel takes clips of one size"),
        (
            "WanTransformer3DModel",
            {"data.packed_tokens": 100},
            "135 tokens, more than a row: set data.packed_tokens",
        ),
        ("WanTransformer3DModel", {"optim.accumulation": 2}, "multiply it by optim.accumulation"),
        (
            "WanTransformer3DModel",
            {"bucket_plans": {"5x24x40": {"checkpoint": "full"}}},
            "bucket_plans tells apart",
        ),
        ("SkyReelsV2Transformer3DModel", {"flow.diffusion_forcing": "none"}, "one time for all tokens"),
        (
            "LTX2VideoTransformer3DModel",
            {"conditions": {"t2v": 0.5, "i2v_head": 0.5}},
            "another time than their sound",
        ),
    ],
)
def test_what_rows_cannot_have_is_told_before_the_run(
    sizes, tmp_path, parallel_registry, name, changes, told
):
    from opensora_accel.training.loop import Trainer

    changes = dict(changes)
    with pytest.raises(ValueError, match=told):
        data = {name: changes.pop(name) for name in list(changes) if name.startswith("data.")}
        config = rows_config(name, sizes, tmp_path, **changes)
        for option, value in data.items():
            config = dataclasses.replace(
                config, data=dataclasses.replace(config.data, **{option.removeprefix("data."): value})
            )
        Trainer(config)


def test_a_bucket_that_says_how_many_clips_it_has_is_refused():
    with pytest.raises(ValueError, match="write 5x24x40 alone"):
        DataConfig(folder="clips", buckets=("5x24x40:3", "1x24x40"), packed_tokens=400)


BUNNY = Path(__file__).resolve().parents[2] / "data" / "bunny"


def bunny_of_three_lengths(folder):
    """The four clips whole, their first 17 and their first 9 frames, at every eighth of which are 5, 3 and 2."""
    folder.mkdir()
    lines = []
    captions = [
        json.loads(line) for line in (BUNNY / "metadata.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    for entry in captions:
        info = probe(BUNNY / entry["file"])
        for length in (33, 17, 9):
            name = f"{length}_{entry['file']}"
            frames = read_clip(BUNNY / entry["file"], 0, length, height=32, width=56)
            write_video(folder / name, frames, round(info.fps))
            lines.append(json.dumps({"file": name, "caption": entry["caption"]}))
    (folder / "metadata.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


def bunny_config(folder, output, plan, **changes):
    """Rows of them, for a hundred steps."""
    data = {
        "buckets": ["2x32x56", "3x32x56", "5x32x56"],
        "frame_stride": 8,
        "batch_size": 2,
        "packed_tokens": 560,
    }
    changes = {"data": {"folder": str(folder), **data}, "text.length": 48, "steps": 100} | changes
    return tiny_config(folder, output, plan, **changes)


BUNNY_IS_THERE = pytest.mark.skipif(
    not BUNNY.is_dir(), reason="its clips are not there: make data/bunny/metadata.jsonl"
)


@PROVE
@BUNNY_IS_THERE
def test_bunny_in_rows_for_a_hundred_steps(tmp_path, parallel_registry):
    """Every sample's loss is that of a call of its own, step by step; how much of a padded batch would be padding."""
    from opensora_accel.training.loop import Trainer

    folder = bunny_of_three_lengths(tmp_path / "clips")
    trainer = Trainer(bunny_config(folder, tmp_path / "run", Plan(precision="fp64")))
    objective, of_row, worst, shapes = trainer.objective, trainer.objective.loss_of_row, 0.0, []

    def beside(row):
        nonlocal worst
        loss = of_row(row)
        with torch.no_grad():
            alone = sum(objective.loss(sample) for sample in row)
        worst = max(worst, abs(loss.item() / alone.item() - 1))
        shapes.append([trainer.num_tokens[sample.bucket] for sample in row])
        return loss

    objective.loss_of_row = beside
    losses = [trainer.step()["loss"] for _ in range(100)]
    assert worst < 1e-9 and sum(losses[-10:]) < 0.8 * sum(losses[:10])
    steps = [[*first, *second] for first, second in zip(shapes[::2], shapes[1::2], strict=True)]
    padding = 1 - sum(map(sum, steps)) / sum(max(step) * len(step) for step in steps)
    print(
        f"worst {worst:.1e}, padding of batches {padding:.2f}, of rows 0; loss {losses[0]:.3f} → {losses[-1]:.3f}"
    )
    assert {size for step in steps for size in step} == {56, 84, 140} and padding > 0.2


@PROVE
@BUNNY_IS_THERE
@pytest.mark.faults
def test_bunny_in_rows_killed_and_gone_on(ranks, tmp_path):
    """Rank 1 is killed in its 57th row, of two a step, and the run goes on to the bits of one that nobody killed."""
    folder = bunny_of_three_lengths(tmp_path / "clips")
    undisturbed, killed = (
        bunny_config(folder, tmp_path / name, Plan(ulysses=2), save_every=20, timeout_s=60.0)
        for name in ("undisturbed", "killed")
    )
    (_, whole), _ = ranks(2, go_on, undisturbed)
    with pytest.raises(RankError, match="rank 1"):
        ranks(2, die_after, killed, 1, 57, 0.0)
    for start, held in ranks(2, go_on, killed):
        assert start == 20
        assert held.keys() == whole.keys() and all(torch.equal(held[key], whole[key]) for key in whole)
