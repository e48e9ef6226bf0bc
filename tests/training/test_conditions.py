"""Frames that are given: which ones, what the model is told of them, and that such a run is one on any mesh."""

import dataclasses
import json
from types import SimpleNamespace

import pytest
import torch

from opensora_accel import Plan
from opensora_accel.training import configured
from opensora_accel.training.buckets import parse_buckets
from opensora_accel.training.codec import LatentFrames, SpaceToDepth, VideoVAE
from opensora_accel.training.conditions import (
    KINDS,
    Conditioning,
    Given,
    check_conditions,
    draw_conditions,
    encode_condition,
    mask_of,
    weights_of,
)
from opensora_accel.training.config import config_from_dict
from opensora_accel.training.flow import Stream, flow_loss
from opensora_accel.training.recipes import RECIPES, check_conditioning
from opensora_accel.training.sections import ConditionsConfig
from opensora_accel.training.tiny_run import tiny_config as tiny_proof
from opensora_accel.training.tiny_run import write_clips
from opensora_accel.verify.pool import RankError
from tests.tiers import PROVE, some
from tests.training.runs import assert_one_run, class_of, tiny_config
from tests.training.test_loop import curve

WAN = Conditioning("channels", "frames", others="grey")
FOURS = LatentFrames(4)
ALL = {"conditions.t2v": 1, "conditions.i2v_head": 5, "conditions.i2v_tail": 2, "conditions.i2v_loop": 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_clips(tmp_path_factory.mktemp("clips"))


@pytest.mark.parametrize(
    ("kind", "frames", "learned"),
    [
        ("t2v", [], [1, 1, 1]),
        ("i2v_head", [0], [0, 1, 1]),
        # A latent frame of which one frame of four is given has three to learn.
        ("i2v_tail", [8], [1, 1, 1]),
        ("i2v_loop", [0, 8], [0, 1, 1]),
    ],
)
def test_what_is_given_of_nine_frames(kind, frames, learned):
    """As Wan's pipeline has it: the first frame four times, then four frames to a latent frame."""
    given = KINDS[kind].frames(9)
    assert given.nonzero().flatten().tolist() == frames
    mask = mask_of(given.unsqueeze(0), FOURS)
    expected = torch.zeros(3, 4)
    for frame in frames:
        if frame == 0:
            expected[0] = 1
        else:
            expected[1 + (frame - 1) // 4, (frame - 1) % 4] = 1
    assert torch.equal(mask[0].T.float(), expected) and (~mask.all(1))[0].tolist() == [
        bool(x) for x in learned
    ]


@pytest.mark.parametrize("kind", ["i2v_head", "i2v_loop"])
def test_the_model_is_told_what_wans_pipeline_tells(kind):
    """`WanImageToVideoPipeline.prepare_latents` of diffusers, given the same first and last picture."""
    from diffusers import AutoencoderKLWan, WanImageToVideoPipeline

    torch.manual_seed(0)
    sizes = {"base_dim": 8, "z_dim": 4, "dim_mult": [1, 1, 1, 1], "num_res_blocks": 1}
    statistics = {"latents_mean": [0.1] * 4, "latents_std": [0.5] * 4}
    vae = AutoencoderKLWan(**sizes, **statistics)
    frames = torch.randint(0, 256, (1, 9, 32, 32, 3), dtype=torch.uint8)
    pixels = frames.permute(0, 4, 1, 2, 3) / 127.5 - 1

    class Pipeline(WanImageToVideoPipeline):
        def __init__(self):  # nothing but the VAE has a part in it
            self.vae, self.vae_scale_factor_temporal, self.vae_scale_factor_spatial = vae, 4, 8

        config = SimpleNamespace(expand_timesteps=False)

    last = pixels[:, :, -1] if kind == "i2v_loop" else None
    with torch.no_grad():
        _, expected = Pipeline().prepare_latents(
            pixels[:, :, 0],
            1,
            4,
            32,
            32,
            9,
            torch.float32,
            torch.device("cpu"),
            torch.Generator(),
            None,
            last,
        )
    codec, given = VideoVAE(vae), [KINDS[kind]]
    clean = codec.encode(frames)
    (condition, *_), _ = encode_condition(
        WAN, lambda _: WAN.encode(codec, frames, given), given, 9, FOURS, clean
    )
    assert condition.shape == expected.shape == (1, 4 + 4, 3, 4, 4)
    assert torch.equal(condition[:, :4], expected[:, :4])
    assert torch.allclose(condition[:, 4:], expected[:, 4:], rtol=1e-5, atol=1e-5)


def test_frames_that_are_not_given_leave_no_trace():
    frames = torch.randint(0, 256, (3, 5, 8, 8, 3), dtype=torch.uint8)
    codec = SpaceToDepth(4, torch.float64)
    given = [KINDS[kind] for kind in ("t2v", "i2v_head", "i2v_loop")]

    def told(frames):
        def encode(rows):
            return WAN.encode(codec, frames[rows], [given[row] for row in rows])

        condition, whole = encode_condition(WAN, encode, given, 5, codec.latent_frames, codec.encode(frames))
        assert condition.given is None
        assert (~whole).tolist() == [[True] * 5, [False] + [True] * 4, [False, True, True, True, False]]
        return condition.latents

    condition = told(frames)
    assert condition.shape == (3, 1 + 48, 5, 2, 2) and not condition[0].any()
    hidden = frames.clone()
    hidden[1, 1:], hidden[2, 1:4] = 0, 0
    assert torch.equal(told(hidden), condition)
    assert torch.equal(condition[2, 1:, [0, 4]], codec.encode(frames)[2][:, [0, 4]])


def test_frames_in_the_place_of_noise_are_put_back_and_not_learned():
    frames, like = torch.randint(0, 256, (3, 5, 8, 8, 3), dtype=torch.uint8), torch.randn(3, 48, 5, 2, 2)
    codec, inside = SpaceToDepth(4, torch.float32), Conditioning("latents")
    given = [KINDS["t2v"], KINDS["i2v_head"], Given(2, 0)]

    def encode(rows):
        return inside.encode(codec, frames[rows], [given[row] for row in rows])

    condition, _ = encode_condition(inside, encode, given, 5, LatentFrames(1), like)
    learned = ~condition.given
    assert learned.tolist() == [[True] * 5, [False] + [True] * 4, [False] * 2 + [True] * 3]
    made = condition.put(like)
    assert torch.equal(made[0], like[0]) and torch.equal(made[2, :, 2:], like[2, :, 2:])
    assert torch.equal(made[2, :, :2], codec.encode(frames)[2, :, :2])
    clean, noise, times = torch.zeros(3, 1, 5, 2, 2), torch.zeros(3, 1, 5, 2, 2), torch.full((3,), 0.5)
    errors = learned.float()[:, None, :, None, None].expand_as(clean)
    streams = [Stream(clean, noise, learned[:, None, :, None, None])]
    assert flow_loss(lambda *_: [errors], streams, times).item() == pytest.approx(1.0)
    assert flow_loss(lambda *_: [1 - errors], streams, times).item() == 0.0
    weights = torch.tensor([1.0, 2.0, 3.0])
    assert flow_loss(lambda *_: [errors], streams, times, weights=weights).item() == pytest.approx(2.0)


def test_kinds_are_drawn_by_weight_and_only_where_something_is_left_to_learn():
    config = ConditionsConfig(t2v=1, i2v_head=3, v2v_head=1, v2v_tail_easy=1)
    assert weights_of(config, 1, FOURS) == {"t2v": 1}
    assert set(weights_of(config, 33, FOURS)) == {"t2v", "i2v_head"}
    assert set(weights_of(config, 37, FOURS)) == {"t2v", "i2v_head", "v2v_head"}
    assert len(weights_of(config, 81, FOURS)) == 4
    assert weights_of(ConditionsConfig(t2v=0, v2v_head=1), 17, FOURS) == {"t2v": 1}
    kinds = draw_conditions(config, 9, FOURS, 0, range(4000))
    assert 2850 < kinds.count("i2v_head") < 3150 and set(kinds) == {"t2v", "i2v_head"}
    assert kinds[10:20] == draw_conditions(config, 9, FOURS, 0, range(10, 20))
    with pytest.raises(ValueError, match="all weights of conditions are 0"):
        ConditionsConfig(t2v=0)


@pytest.mark.parametrize(
    "plans",
    [
        [Plan(), Plan(ring=2, ulysses=2)],
        pytest.param([Plan(), Plan(ulysses=2), Plan(dp_shard=2, ulysses=2, sharding="zero3")], marks=PROVE),
    ],
    ids=["sequence", "sharded"],
)
def test_one_job_whatever_the_mesh(ranks, folder, tmp_path, plans):
    found = []
    for number, plan in enumerate(plans):
        config = tiny_config(folder, tmp_path / str(number), plan.replace(precision="fp64"), **ALL)
        found.append(ranks(plan.world_size, curve, config, 4)[0])
    (losses, norms, gradients), *others = found
    for other_losses, other_norms, other_gradients in others:
        assert other_losses == pytest.approx(losses, rel=1e-9) and other_norms == pytest.approx(
            norms, rel=1e-9
        )
        for name, gradient in gradients.items():
            assert torch.allclose(other_gradients[name], gradient, rtol=1e-9, atol=1e-12), name


def sampled(config):
    from opensora_accel.training.loop import Trainer

    trainer = Trainer(config)
    return trainer.train(), trainer.output, trainer.state.model.config.in_channels


@pytest.mark.parametrize("name", ["WanTransformer3DModel", "LTXVideoTransformer3DModel"])
def test_a_run_trains_and_samples_with_frames_that_are_given(ranks, folder, tmp_path, name):
    kinds = ALL if name.startswith("Wan") else {"conditions.i2v_head": 5}
    config = tiny_config(
        folder,
        tmp_path / "run",
        Plan(),
        **kinds,
        **{"steps": 3, "num_samples": 2, "flow.sample_steps": 2, "flow.guidance": 2.0},
        **{"model.class_name": name, "model.config": dict(RECIPES[name].tiny)},
    )
    losses, output, channels = ranks(1, sampled, config)[0]
    assert len(losses) == 3 and (output / "samples/step_000003/strip.png").is_file()
    assert channels == (2 * 48 + 1 if name.startswith("Wan") else 48)


def test_a_condition_that_trains_nothing_is_refused(ranks, folder, tmp_path):
    """It fell back to the caption alone, of which the configuration may have said 0."""
    told = r"conditions\.v2v_head gives 33 frames of a clip, which leaves nothing to learn of one of 5x24x40; set it"
    values = {"model.config.in_channels": 97, "conditions.v2v_head": 1}
    with pytest.raises(RankError, match=told):
        ranks(1, curve, tiny_config(folder, tmp_path, Plan(), **values), 1)
    config, image, short, long = (
        ConditionsConfig(t2v=0, v2v_head=1),
        *parse_buckets(["1x24x40", "33x24x40", "37x24x40"]),
    )
    check_conditions(config, [image, long], FOURS)  # an image is trained by its caption
    told = r"anything to learn of a clip of 33x24x40, and conditions\.t2v is 0; give t2v a weight"
    with pytest.raises(ValueError, match=told):
        check_conditions(config, [image, short, long], FOURS)
    check_conditions(ConditionsConfig(t2v=1, v2v_head=1), [image, short, long], FOURS)


def test_a_model_without_the_channels_is_told_of_conditions(ranks, folder, tmp_path):
    values = {"model.config.in_channels": 97}
    with pytest.raises(RankError, match=r"conditions, as --conditions.i2v_head 1, take 49 of 97"):
        ranks(1, curve, tiny_config(folder, tmp_path, Plan(), **values), 1)


def test_the_proof_has_frames_of_the_same_sides(tmp_path):
    config = config_from_dict({"conditions": {"t2v": 1, "v2v_head": 2, "v2v_tail_easy": 3}}, "the test")
    conditions = tiny_proof(config, tmp_path).conditions
    assert dataclasses.asdict(conditions) | {"t2v": 1, "i2v_head": 2, "i2v_tail": 3} == dataclasses.asdict(
        conditions
    )


# Wan's way is that of the tests above.
OTHER_WAYS = {
    "WanTransformer3DModel": {"model.config": {**RECIPES["WanTransformer3DModel"].tiny, "in_channels": 48}},
    "LTXVideoTransformer3DModel": {},
    "LTX2VideoTransformer3DModel": {},
    "SanaVideoTransformer3DModel": {},
    "Kandinsky5Transformer3DModel": {},
    "CosmosTransformer3DModel": {},
    "CosmosTransformer3DModel, Predict 2": {
        "model.config": dict(RECIPES["CosmosTransformer3DModel"].variants[0].tiny)
    },
    "CogVideoXTransformer3DModel": {},
    "HunyuanVideo15Transformer3DModel": {"conditions.t2v": 0, "image.width": 8},
}


@pytest.mark.parametrize("degrees", some([{"ulysses": 3}, {"ring": 2}]), ids=str)
@pytest.mark.parametrize("name", some(OTHER_WAYS, "LTXVideoTransformer3DModel"))
def test_frames_are_given_in_other_ways(ranks, folder, tmp_path, name, degrees):
    """Losses, norms and gradients are those of one rank; three share a clip unevenly."""
    changes = {"model.config": dict(RECIPES[class_of(name)].tiny), "conditions.i2v_head": 2}
    changes |= {"model.class_name": class_of(name), **OTHER_WAYS[name]}
    found = []
    for number, plan in enumerate((Plan(precision="fp64"), Plan(precision="fp64", **degrees))):
        config = tiny_config(folder, tmp_path / str(number), plan, **changes)
        found.append(ranks(plan.world_size, curve, config, 2)[0])
        # The proof of a run takes frames as the run does.
        way = configured.conditioning_of(config, SpaceToDepth(4, torch.float32))
        assert way == RECIPES[class_of(name)].frames[-1]
        assert configured.conditioning_of(tiny_proof(config, tmp_path), SpaceToDepth(4, torch.float32)) == way
    assert_one_run(*found)


def test_a_frame_at_the_end_is_refused_where_a_model_takes_one_at_the_beginning(ranks, folder, tmp_path):
    name = "LTXVideoTransformer3DModel"
    changes = {"model.class_name": name, "model.config": dict(RECIPES[name].tiny), "conditions.i2v_tail": 1}
    with pytest.raises(
        RankError, match=r"conditions\.i2v_tail gives frames at the end of a clip, and this model"
    ):
        ranks(1, curve, tiny_config(folder, tmp_path, Plan(), **changes), 1)


def learned(config):
    """Which latent frames of the first batch are learned; and what the model gets of a batch without frames."""
    from opensora_accel.training.loop import Trainer

    trainer = Trainer(config)
    objective, batch = trainer.objective, next(iter(trainer.loader))
    first = objective.encoders.encode(batch).learned
    if first is not None:
        first = first[..., 0, 0]
    objective.encoders._draw_conditions = lambda bucket, positions: ["t2v"] * len(positions)
    return first, objective.encoders.encode(batch).condition


def test_given_frames_are_learned_where_a_sampler_makes_them(ranks, folder, tmp_path):
    """Open-Sora's `no_i2v_ref_loss` leaves them out; in the place of noise nothing is left to learn of them."""
    given = {"conditions.t2v": 0, "conditions.i2v_head": 1}
    ltx = {"model.class_name": "LTXVideoTransformer3DModel"}
    ltx |= {"model.config": dict(RECIPES[ltx["model.class_name"]].tiny)}
    kandinsky = {"model.class_name": "Kandinsky5Transformer3DModel"}
    kandinsky |= {"model.config": dict(RECIPES[kandinsky["model.class_name"]].tiny)}
    rows = [[False] + [True] * 4] * 4
    for number, (changes, expected) in enumerate(
        (({}, None), ({"conditions.learn_given": False}, rows), (ltx, rows), (kandinsky, rows))
    ):
        config = tiny_config(folder, tmp_path / str(number), Plan(), **given, **changes)
        found, of_text = ranks(1, learned, config)[0]
        assert found is expected is None or found.tolist() == expected
        # Tokens of a clip from text alone have one time for all.
        assert (of_text is None) == (changes == ltx)
    changes = {**given, **ltx, "conditions.learn_given": False}
    with pytest.raises(
        RankError, match=r"in the place of noise are never in the loss; leave conditions\.learn"
    ):
        ranks(1, learned, tiny_config(folder, tmp_path, Plan(), **changes))
    with pytest.raises(ValueError, match="this run gives none"):
        ConditionsConfig(learn_given=False)


def test_two_experts_take_frames_in_one_way():
    folders = [{"in_channels": 97}, {"in_channels": 48}]
    codec, configs = SpaceToDepth(4, torch.float32), []
    for given in folders:
        values = {"model": {"config": given}, "conditions": {"i2v_head": 1.0}}
        configs.append(config_from_dict(values, "the test"))
    assert configured.conditioning_of_all(configs[:1] * 2, codec).place == "channels"
    with pytest.raises(ValueError, match=r"in different ways \(their in_channels are 97 and 48\)"):
        configured.conditioning_of_all(configs, codec)


@pytest.mark.parametrize("takes_frames", [True, False])
def test_weights_from_text_alone_take_no_frames(tmp_path, takes_frames):
    """Wan 2.1 T2V and Wan 2.2 5B differ in their pipeline alone."""
    (tmp_path / "model_index.json").write_text(json.dumps({"expand_timesteps": takes_frames}))
    (tmp_path / "transformer").mkdir()
    values = {"model": {"path": str(tmp_path / "transformer")}, "conditions": {"i2v_head": 1.0}}
    config, recipe = config_from_dict(values, "the test"), RECIPES["WanTransformer3DModel"]
    _, inside = recipe.frames
    if takes_frames:
        check_conditioning(recipe, inside, config)
        return
    with pytest.raises(ValueError, match=r"no channels for frames that are given, and .*expand_timesteps"):
        check_conditioning(recipe, inside, config)
