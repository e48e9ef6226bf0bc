"""Samples that are longer than clips: part by part as the pipeline makes them, in runs, and what is refused."""

import dataclasses
import sys

import pytest
import torch
from PIL import Image

from opensora_accel import Plan, init_parallel
from opensora_accel.observe.fakes import fake_world
from opensora_accel.training import build
from opensora_accel.training.buckets import Bucket
from opensora_accel.training.clips import Clip
from opensora_accel.training.codec import LatentFrames, SpaceToDepth
from opensora_accel.training.config import config_from_dict
from opensora_accel.training.flow import draw_noise, generator
from opensora_accel.training.long_samples import lengths_of, part_lengths
from opensora_accel.training.recipes import RECIPES
from opensora_accel.training.samples import SampledClip, continued, sample_latents
from opensora_accel.training.sections import FlowConfig
from opensora_accel.training.text_encoders import text_shapes
from opensora_accel.training.tiny_run import tiny_config as tiny_proof
from tests.tiers import PROVE, some
from tests.training.pipelines import CAPTIONS, FROM_FRAMES, by_pipeline, setting, without_rounding
from tests.training.runs import tiny_config
from tests.training.test_forcing import FORCED, NAME

FORCING = {"diffusion_forcing": "non-decreasing"}


def test_parts_are_those_of_the_pipeline():
    """Their number and lengths as it computes them."""
    for base in range(2, 8):
        for overlap in range(1, base):
            for total in range(base + 1, 25):
                count = 1 + (total - base - 1) // (base - overlap) + 1
                expected = [base]
                for number in range(1, count):
                    left = total - (number * (base - overlap) + overlap)
                    expected.append(min(left + overlap, base))
                assert part_lengths(total, base, overlap) == expected
    assert part_lengths(5, 7, 3) == [5]
    flow = FlowConfig(**FORCING, sample_frames=45, overlap_history=9)
    assert lengths_of(flow, Bucket(25, 8, 8, 1), LatentFrames(4)) == [7, 7, 4]
    assert lengths_of(flow, Bucket(1, 8, 8, 1), LatentFrames(4)) == [1], "an image stays one"


@dataclasses.dataclass(frozen=True)
class Case:
    # Frames of clips, of a sample, and of the overlap.
    base: int
    total: int
    overlap: int
    flow: dict = dataclasses.field(default_factory=dict)
    begins_with_frame: bool = False

    def __str__(self):
        return f"{self.base} {self.total} {self.overlap} {self.flow} {self.begins_with_frame}"


BLOCKS = {"ar_step": 2, "causal_block_size": 2}
CASES = [
    # Of the last part one latent frame is new, and two are; of the third case the last part is whole.
    Case(13, 33, 9, {"ar_step": 2, "addnoise_condition": 20.0}),
    Case(9, 25, 5),
    Case(9, 17, 1, {"ar_step": 1}),
    Case(13, 29, 5, BLOCKS | {"addnoise_condition": 20.0}),
    Case(9, 21, 5, {"addnoise_condition": 20.0, "ar_step": 1}, begins_with_frame=True),
]


@pytest.mark.parametrize("case", some(CASES, CASES[0], CASES[3], CASES[4]), ids=str)
def test_a_long_sample_is_the_pipelines(case, monkeypatch):
    frame = FROM_FRAMES["SkyReels-V2"] if case.begins_with_frame else None
    made = setting(NAME, frame=frame)
    objective, pipeline, rng = made.objective, made.pipeline, torch.Generator().manual_seed(1)
    size = dataclasses.replace(made.bucket, num_frames=case.base)
    of_blocks = case.flow.get("causal_block_size", 0)
    options = {"sample_frames": case.total, "overlap_history": case.overlap, **case.flow}
    flow = dataclasses.replace(objective.config.flow, **options)
    objective.config = dataclasses.replace(objective.config, flow=flow)
    lengths = lengths_of(flow, size, objective.encoders.codec.latent_frames)
    channels, _, *sides = made.shape
    objective.encoders.latent_shapes = {size: (channels, lengths[0], *sides)}
    objective.num_tokens = {size: 1}
    if of_blocks:
        # Blocks are even: of 13 frames there are four latent ones, with an overlap of two, and eight in all.
        objective.model._set_ar_attention(of_blocks)
        objective.model.register_to_config(num_frame_per_block=of_blocks)
    captions = dict(enumerate(CAPTIONS[: 1 if frame else 2], start=5))
    noise = [torch.randn(len(captions), channels, lengths[0], *sides, dtype=torch.float64, generator=rng)]
    with without_rounding():
        # As fp64 is drawn, which is another draw.
        drawn = draw_parts(objective, size, case, lengths, noise, captions)
    module, later, noises = sys.modules[type(pipeline).__module__], iter(noise[1:]), iter(drawn)
    monkeypatch.setattr(module, "randn_tensor", lambda shape, **_: of_shape(next(later).clone(), shape))
    monkeypatch.setattr(torch, "randn_like", lambda like: next(noises)[:, :, : like.size(2)])
    given = {"num_frames": case.total, "base_num_frames": case.base, "overlap_history": case.overlap}
    given |= {name: value for name, value in case.flow.items() if name != "causal_block_size"}
    if frame:
        shape = 1, case.base, size.height, size.width, 3
        frames = 255 * torch.randint(0, 2, shape, dtype=torch.uint8, generator=rng)
        given["image"] = Image.fromarray(frames[0, 0].numpy())
        given["fps"] = int(objective.encoders.frame_rate)
    with without_rounding():
        expected = by_pipeline(made, noise[0], "latent", [*captions.values()], **given)
        condition = None
        if frame:
            clips = [Clip("", 0, size)]
            condition, _ = objective.encoders.encode_condition(["i2v_head"], frames, noise[0], clips, [0])
        (first,) = sample_latents(objective, noise[:1], [*captions.values()], size, condition)
        found = continued(objective, first, captions, size)
    assert next(later, None) is None, "as many parts"
    if flow.addnoise_condition:
        assert next(noises, None) is None, "as many steps"
    assert found.shape[2] == 1 + (case.total - 1) // 4 > lengths[0]
    assert (found - expected).abs().max() < 1e-10


def draw_parts(objective, size, case, lengths, noise, captions):
    """Adds to `noise`, which is that of the first part, that of the others; that of what is given, step by step."""
    seed, of_given = objective.config.seed, []
    shape = noise[0].size(1), noise[0].shape[3:]
    for part, length in enumerate(lengths):
        if part:
            rngs = [generator(seed, f"sample, part {part}", number) for number in captions]
            of_clips = [torch.randn(shape[0], length, *shape[1], generator=each) for each in rngs]
            noise.append(torch.stack(of_clips))
        elif not case.begins_with_frame:
            continue
        for step in flow_rows(objective, size, length, case, part):
            purpose = f"noise of given frames, step {step}" + (f" of part {part}" if part else "")
            of_given.append(draw_noise(noise[part], seed, range(len(captions)), purpose=purpose))
    return of_given


def of_shape(noise, shape):
    assert noise.shape == shape
    return noise


def flow_rows(objective, size, length, case, part):
    """As many as the steps of a part."""
    times = objective.recipe.sample_times(objective.config.flow.sample_steps, objective.time_shift(size))
    num_given = 1 + (case.overlap - 1) // 4 if part else int(case.begins_with_frame)
    block, ar_step = case.flow.get("causal_block_size", 1), case.flow.get("ar_step", 0)
    waiting = (length - 1) // block - num_given // block
    return range(len(times) - 1 + max(0, waiting) * min(ar_step, len(times) - 1))


def sampled(config):
    from opensora_accel.training import samples
    from opensora_accel.training.loop import Trainer

    trainer = Trainer(config)
    trainer.train()
    with torch.no_grad():
        made = samples.sample_clips(trainer.objective, trainer.loader.videos[:1], config.sample_captions)
    return made, trainer.output


@PROVE
@pytest.mark.parametrize("plan", some([Plan(ulysses=3), Plan(ring=2)]), ids=str)
def test_a_run_makes_long_samples_on_any_mesh(ranks, clips, tmp_path, plan):
    changes = FORCED | {"steps": 2, "num_samples": 1, "sample_captions": ["a clip"], "flow.sample_steps": 2}
    changes |= {"flow.sample_frames": 11, "flow.overlap_history": 2, "flow.ar_step": 1}
    changes |= {
        "conditions.i2v_head": 2,
        "flow.addnoise_condition": 20,
        "model.config.inject_sample_info": True,
    }
    changes["model"] = {**FORCED["model"], "config": dict(RECIPES[NAME].tiny)}
    found = []
    for number, each in enumerate((Plan(precision="fp64"), plan.replace(precision="fp64"))):
        config = tiny_config(clips, tmp_path / str(number), each, **changes)
        found.append(ranks(each.world_size, sampled, config)[0])
    (made, folder), (shared, _) = found
    for each, other in zip(made, shared, strict=True):
        assert each.clip.shape == (11, 8, 40, 3) and (each.clip.int() - other.clip.int()).abs().max() <= 1
        assert not torch.equal(each.clip[5:8], each.clip[2:5]), "each part has noise of its own"
    source = made[0].source
    assert len(source) == 5 and made[1].source is None and made[0].kind == "i2v_head"
    # The source is on the left, and its last frame stays.
    shown = made[0].shown
    factor = shown.shape[1] // 8
    assert len(shown) == 11
    assert torch.equal(shown[:5, ::factor, : 40 * factor : factor], source)
    assert torch.equal(shown[10, ::factor, : 40 * factor : factor], source[-1])
    assert (folder / "samples/step_000002/strip.png").is_file()


def test_a_source_that_is_shorter_stands_still_at_its_end():
    clip, source = torch.arange(4), torch.arange(2)
    frames = [each.view(-1, 1, 1, 1).expand(-1, 240, 2, 3).to(torch.uint8) for each in (clip, source)]
    shown = SampledClip("", *frames, 8.0).shown
    assert shown[:, 0, ::2, 0].tolist() == [[0, 0], [1, 1], [1, 2], [1, 3]]


def config_of(flow=None, **tables):
    model = {"class_name": NAME, "config": dict(RECIPES[NAME].tiny)}
    data = {"num_frames": 9, "height": 8, "width": 40}
    return config_from_dict(
        {"model": model, "data": data, "flow": FORCING | (flow or {})} | tables, "the test"
    )


def test_a_proof_makes_no_samples(tmp_path):
    options = {"sample_frames": 21, "overlap_history": 5, "addnoise_condition": 20.0}
    run = config_of(options, sample_every=5, sample_captions=["a clip"])
    proof = tiny_proof(run, tmp_path)
    assert proof.flow.is_forced and not (proof.flow.sample_frames or proof.flow.addnoise_condition)
    assert not (proof.num_samples or proof.sample_captions or proof.sample_every)


def test_what_makes_no_long_sample_is_refused():
    long = {"sample_frames": 21, "overlap_history": 5}
    for tables, message in (
        ({"flow": long}, r"flow\.sample_frames and flow\.overlap_history are for a model .* set flow\.diff"),
        ({"flow": FORCING | {"sample_frames": 21}}, "set both, as to 257 and 17, or leave both out"),
        ({"flow": FORCING | {"overlap_history": 5}}, "set both, as to 257 and 17, or leave both out"),
        ({"flow": FORCING | long, "num_samples": 0}, "and this run has none: .* leave flow.sample_frames"),
    ):
        with pytest.raises(ValueError, match=message):
            config_from_dict({"model": {"class_name": NAME}} | tables, "the test")
    codec = SpaceToDepth(4, torch.float32)
    codec.latent_frames = LatentFrames(4)
    with fake_world(0, 1):
        init_parallel(Plan(), "cpu")

        def built(flow, **tables):
            run = config_of(long | flow, **tables)
            return build.build_model(run, codec, text_shapes(run.text, RECIPES[NAME].text), torch.float32)

        built({})
        # An image stays one, beside clips.
        built({}, data={"buckets": ["1x8x40", "9x8x40"]})
        with pytest.raises(ValueError, match="causal"):
            built({"causal_block_size": 3}, data={"num_frames": 9, "height": 8, "width": 40})
        blocks = {"causal_block_size": 2}
        in_blocks = {"data": {"num_frames": 13, "height": 8, "width": 40}}
        built(blocks | {"sample_frames": 29}, **in_blocks)
        for flow, tables, message in (
            ({"sample_frames": 22}, {}, r"flow\.sample_frames \(22\) must be 1 more .* use 21 or 25"),
            ({"overlap_history": 6}, {}, r"flow\.overlap_history \(6\) must be 1 more .* use 5 or 9"),
            (
                {"overlap_history": 9},
                {},
                r"overlap_history \(9\) leaves nothing to make of a part of 9 frames",
            ),
            ({"sample_frames": 9}, {}, r"longer than a clip, which has 9 frames; set it higher, or leave it"),
            (
                {},
                {"data": {"buckets": ["9x8x40", "25x8x40"]}},
                r"longer than a clip, which has 25 frames; set it higher",
            ),
            (
                blocks | {"sample_frames": 33},
                in_blocks,
                r"of 4, 4, 4, 3 latent frames, of which 2 are given, and the model's causal blocks have 2",
            ),
            (
                blocks | {"sample_frames": 29, "overlap_history": 1},
                in_blocks,
                "of which 1 are given, .* have 2",
            ),
        ):
            with pytest.raises(ValueError, match=message):
                built(flow, **tables)
