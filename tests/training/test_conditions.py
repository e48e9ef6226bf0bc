"""Frames that are given: which ones, what the model is told of them, and that such a run is one on any mesh."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch

from opensora_accel import Plan
from opensora_accel.training.buckets import parse_buckets
from opensora_accel.training.codec import SpaceToDepth, VideoVAE
from opensora_accel.training.conditions import (
    KINDS,
    check_conditions,
    draw_conditions,
    encode_condition,
    mask_of,
    weights_of,
)
from opensora_accel.training.config import config_from_dict
from opensora_accel.training.flow import flow_loss
from opensora_accel.training.sections import ConditionsConfig
from opensora_accel.training.tiny_run import tiny_config as tiny_proof
from opensora_accel.training.tiny_run import write_clips
from opensora_accel.verify.pool import RankError
from tests.tiers import PROVE
from tests.training.runs import tiny_config
from tests.training.test_loop import curve

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
    mask = mask_of(given.unsqueeze(0), 4)
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
    codec, given = VideoVAE(vae), KINDS[kind]
    shown = given.frames(9).unsqueeze(0)
    clean = codec.encode(frames)
    condition, _ = encode_condition(lambda rows: codec.encode(frames, shown), [given], 9, 4, clean)
    assert condition.shape == expected.shape == (1, 4 + 4, 3, 4, 4)
    assert torch.equal(condition[:, :4], expected[:, :4])
    assert torch.allclose(condition[:, 4:], expected[:, 4:], rtol=1e-5, atol=1e-5)


def test_frames_that_are_not_given_leave_no_trace():
    frames = torch.randint(0, 256, (3, 5, 8, 8, 3), dtype=torch.uint8)
    codec = SpaceToDepth(4, torch.float64)
    given = [KINDS[kind] for kind in ("t2v", "i2v_head", "i2v_loop")]

    def told(frames):
        def encode(rows):
            return codec.encode(frames[rows], torch.stack([given[row].frames(5) for row in rows]))

        return encode_condition(encode, given, 5, codec.temporal, codec.encode(frames))

    condition, learned = told(frames)
    assert condition.shape == (3, 1 + 48, 5, 2, 2) and not condition[0].any()
    assert learned.tolist() == [[True] * 5, [False] + [True] * 4, [False, True, True, True, False]]
    hidden = frames.clone()
    hidden[1, 1:], hidden[2, 1:4] = 0, 0
    assert torch.equal(told(hidden)[0], condition)
    assert torch.equal(condition[2, 1:, [0, 4]], codec.encode(frames)[2][:, [0, 4]])
    # What is given is not in the loss.
    clean, noise, times = torch.zeros(3, 1, 5, 2, 2), torch.zeros(3, 1, 5, 2, 2), torch.full((3,), 0.5)
    errors = learned.float()[:, None, :, None, None].expand_as(clean)
    assert flow_loss(lambda x, t: errors, clean, noise, times, learned=learned).item() == pytest.approx(1.0)
    assert flow_loss(lambda x, t: 1 - errors, clean, noise, times, learned=learned).item() == 0.0
    weights = torch.tensor([1.0, 2.0, 3.0])
    assert flow_loss(
        lambda x, t: errors, clean, noise, times, learned=learned, weights=weights
    ).item() == pytest.approx(2.0)


def test_kinds_are_drawn_by_weight_and_only_where_something_is_left_to_learn():
    config = ConditionsConfig(t2v=1, i2v_head=3, v2v_head=1, v2v_tail_easy=1)
    assert weights_of(config, 1, 4) == {"t2v": 1}
    assert set(weights_of(config, 33, 4)) == {"t2v", "i2v_head"}
    assert set(weights_of(config, 37, 4)) == {"t2v", "i2v_head", "v2v_head"}
    assert len(weights_of(config, 81, 4)) == 4
    assert weights_of(ConditionsConfig(t2v=0, v2v_head=1), 17, 4) == {"t2v": 1}
    kinds = draw_conditions(config, 9, 4, 0, range(4000))
    assert 2850 < kinds.count("i2v_head") < 3150 and set(kinds) == {"t2v", "i2v_head"}
    assert kinds[10:20] == draw_conditions(config, 9, 4, 0, range(10, 20))
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
    assert trainer.state.model.config.in_channels == 2 * 48 + 1
    losses = trainer.train()
    return losses, trainer.output


def test_a_run_trains_and_samples_with_frames_that_are_given(ranks, folder, tmp_path):
    config = tiny_config(
        folder,
        tmp_path / "run",
        Plan(),
        **ALL,
        **{"steps": 3, "num_samples": 2, "flow.sample_steps": 2, "flow.guidance": 2.0},
    )
    losses, output = ranks(1, sampled, config)[0]
    assert len(losses) == 3 and (output / "samples/step_000003/strip.png").is_file()


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
    check_conditions(config, [image, long], 4)  # an image is trained by its caption
    told = r"anything to learn of a clip of 33x24x40, and conditions\.t2v is 0; give t2v a weight"
    with pytest.raises(ValueError, match=told):
        check_conditions(config, [image, short, long], 4)
    check_conditions(ConditionsConfig(t2v=1, v2v_head=1), [image, short, long], 4)


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
