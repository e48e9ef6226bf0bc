"""Clips of several sizes and images in one run: which file goes where, which batch comes when, that nobody waits."""

import collections
import itertools
import json
import statistics
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from opensora_accel import Plan
from opensora_accel.observe import FlopCounter
from opensora_accel.training.buckets import Bucket, batch_sizes, bucket_of, cropped_share, parse_buckets
from opensora_accel.training.config import config_from_dict
from opensora_accel.training.data import ClipLoader
from opensora_accel.training.recipes import RECIPES
from opensora_accel.training.sampler import GlobalBatchSampler, Portion
from opensora_accel.training.samples import write_video
from opensora_accel.training.sections import DataConfig
from opensora_accel.training.tiny_run import proof_meshes
from opensora_accel.training.tiny_run import tiny_config as tiny_config_of
from opensora_accel.training.true_size import TrueSize
from opensora_accel.training.video import Entry, UnreadableVideo, index_videos, probe, read_clip
from tests.tiers import PROVE, some
from tests.training.runs import TINY_WAN, tiny_config

# Which bucket a file belongs to

SIZES = parse_buckets(
    ["1x480x480", "1x480x832", "1x832x480", "33x480x832", "33x832x480", "81x480x832", "81x720x1280"]
)


@pytest.mark.parametrize(
    "file,expected",
    [
        ((200, 1080, 1920), "81x720x1280"),
        ((200, 1280, 720), "33x832x480"),  # upright before longer
        ((200, 540, 960), "81x480x832"),  # not enlarged
        ((200, 240, 426), "81x480x832"),  # enlarged least
        ((81, 480, 832), "81x480x832"),
        ((80, 480, 832), "33x480x832"),
        ((32, 480, 832), "1x480x832"),  # shorter than every clip
        ((1, 1000, 1000), "1x480x480"),
        ((1, 2000, 1000), "1x832x480"),
    ],
)
def test_a_file_goes_where_it_is_cropped_least_and_then_where_it_shows_most(file, expected):
    assert str(bucket_of(*file, SIZES, stride=1)) == expected


def test_a_video_goes_to_a_clip_that_crops_it_rather_than_to_a_single_picture():
    """As docs/training.md says: frames first, then the aspect ratio; and how much that cuts off."""
    buckets = parse_buckets(["1x480x832", "33x480x480", "81x480x832"])
    found = bucket_of(50, 1080, 1920, buckets, stride=1)
    assert str(found) == "33x480x480"
    assert cropped_share(found, 1080, 1920) == pytest.approx(0.4375)
    assert cropped_share(found, 1920, 1080) == pytest.approx(0.4375)
    assert cropped_share(parse_buckets(["81x480x832"])[0], 480, 832) == pytest.approx(0)


def test_what_a_bucket_cuts_off_is_told(tmp_path, caplog):
    sizes = {"wide.png": (64, 36), "square.png": (40, 40), "tall.png": (36, 80)}
    for file, size in sizes.items():
        Image.new("RGB", size).save(tmp_path / file)
    entries = [Entry(file, "a picture") for file in sizes]
    index_videos(entries, tmp_path, DataConfig(folder=str(tmp_path), buckets=("1x32x32", "1x64x32")))
    (told,) = caplog.messages
    assert told.startswith(
        "1 of 3 files lose more than 25 % of their picture in the bucket 1x32x32, wide.png the most, 44"
    )
    caplog.clear()
    index_videos(
        entries, tmp_path, DataConfig(folder=str(tmp_path), buckets=("1x32x32", "1x64x32", "1x32x56"))
    )
    assert not caplog.messages


def test_a_stride_asks_for_longer_videos_and_too_short_ones_have_no_bucket():
    assert str(bucket_of(161, 480, 832, SIZES, stride=2)) == "81x480x832"
    assert str(bucket_of(160, 480, 832, SIZES, stride=2)) == "33x480x832"
    assert bucket_of(4, 480, 832, parse_buckets(["5x480x832"]), stride=1) is None


@given(st.integers(1, 200), st.integers(16, 2000), st.integers(16, 2000), st.integers(1, 3))
def test_every_file_fits_its_bucket_whatever_the_order_of_the_buckets(num_frames, height, width, stride):
    bucket = bucket_of(num_frames, height, width, SIZES, stride)
    assert bucket.frames_needed(stride) <= num_frames
    assert bucket == bucket_of(num_frames, height, width, SIZES[::-1], stride)


@pytest.mark.parametrize(
    "buckets,told",
    [
        (["33x480"], r"data\.buckets are FRAMESxHEIGHTxWIDTH, .* got '33x480'"),
        (["0x480x832"], "got '0x480x832'"),
        (["1x480x832:0"], "got '1x480x832:0'"),
        (["1x480x832:-4"], "got '1x480x832:-4'"),
        ([" 1x480x832"], "got ' 1x480x832'"),
        (["9x48x80", "9x48x80:3"], "9x48x80 more than once"),
    ],
)
def test_a_wrong_bucket_is_told(buckets, told):
    with pytest.raises(ValueError, match=told):
        config_from_dict({"data": {"buckets": buckets}}, "the test")


@pytest.mark.parametrize("name", ["num_frames", "height", "width"])
def test_one_size_beside_several_is_refused(name):
    values = {"buckets": ["9x48x80"], name: 16}
    with pytest.raises(ValueError, match=rf"leave data\.{name} out, or leave data\.buckets out"):
        config_from_dict({"data": values}, "the test")


# How many clips a batch has, and which batch comes when

# Six buckets of Wan at 480p and 720p, with the tokens of a clip.
TOKENS = dict(
    zip(
        parse_buckets(["1x480x480", "1x480x832", "33x480x832", "81x480x832", "33x720x1280", "81x720x1280"]),
        (900, 1560, 14040, 32760, 32400, 75600),
        strict=True,
    )
)


def test_smaller_clips_come_as_many_as_have_no_more_tokens():
    sizes = batch_sizes(TOKENS, 4, list(TOKENS))
    assert list(sizes.values()) == [4 * 84, 4 * 48, 4 * 5, 4 * 2, 4 * 2, 4]
    assert all(TOKENS[bucket] * size <= 4 * 75600 for bucket, size in sizes.items())
    given_size = parse_buckets(["1x480x480:24", "81x480x832"])
    assert list(batch_sizes(dict.fromkeys(given_size, 7), 4, given_size).values()) == [24, 4]


VIDEOS = (9, 30, 17, 1, 12, 40)


def portions(batch_size=4):
    sizes, start = batch_sizes(TOKENS, batch_size, list(TOKENS)), itertools.accumulate(VIDEOS, initial=0)
    return [
        Portion(bucket, range(first, first + number), sizes[bucket])
        for bucket, first, number in zip(TOKENS, start, VIDEOS, strict=False)
    ]


def drawn(num_batches, data_rank=0, data_size=1, position=0):
    sampler = GlobalBatchSampler(portions(), data_rank, data_size, seed=3)
    sampler.position = position
    return list(itertools.islice(sampler, num_batches))


@pytest.mark.parametrize("data_size", [2, 4])
def test_the_batches_of_all_ranks_are_those_of_one(data_size):
    shares = [drawn(40, data_rank, data_size) for data_rank in range(data_size)]
    assert [list(itertools.chain(*batch)) for batch in zip(*shares, strict=True)] == drawn(40)


def test_positions_count_on_and_a_job_resumes_at_any_batch():
    batches = drawn(60)
    assert [position for batch in batches for position, _ in batch] == list(range(sum(map(len, batches))))
    for number in range(0, 60, 7):
        position = sum(map(len, batches[:number]))
        assert drawn(60 - number, position=position) == batches[number:]


def test_of_a_position_that_no_batch_begins_at_the_rest_is_skipped():
    first, second = drawn(2)
    assert drawn(1, position=1) == [second] and second[0][0] == len(first)


def test_each_video_comes_about_once_in_an_epoch_and_each_bucket_at_least_once():
    by_bucket = {portion.bucket: portion for portion in portions()}
    num_batches = sum(max(1, round(len(p.videos) / p.batch_size)) for p in by_bucket.values())
    seen = [index for batch in drawn(10 * num_batches) for _, index in batch]
    for portion in by_bucket.values():
        times = [seen.count(index) for index in portion.videos]
        assert max(times) - min(times) <= 1
        expected = 10 * max(1, round(len(portion.videos) / portion.batch_size)) * portion.batch_size
        assert sum(times) == expected
    both = drawn(2 * num_batches)
    first, second = (
        [[video for _, video in batch] for batch in epoch]
        for epoch in (both[:num_batches], both[num_batches:])
    )
    assert first != second, "each epoch has an order of its own"


def work(bucket, number, width=1536, layers=30):
    """Multiplications of a Wan of 1.3B: of the layers, which grow with tokens, and of attention, with their square."""
    tokens = TOKENS[bucket]
    return number * layers * (8 * width * width * tokens * 3 + 4 * width * tokens * tokens)


def test_data_ranks_have_the_same_work_in_every_step_of_six_buckets():
    by_index = {index: portion.bucket for portion in portions() for index in portion.videos}
    shares = [drawn(200, data_rank, 4) for data_rank in range(4)]
    for batch in zip(*shares, strict=True):
        kinds = {by_index[index] for share in batch for _, index in share}
        assert len(kinds) == 1  # one size: nothing is padded
        of_ranks = [work(*kinds, len(share)) for share in batch]
        assert max(of_ranks) == min(of_ranks)


# A folder of videos and images


BUCKETS = ("1x32x32", "5x24x40", "9x24x40", "5x40x24")
FILES = {
    "9x24x40": [f"long_{n}.mp4" for n in range(4)],
    "5x24x40": [f"short_{n}.mp4" for n in range(3)],
    "5x40x24": [f"upright_{n}.mp4" for n in range(2)],
    "1x32x32": ["a.png", "b.jpg", "c.webp", "on_its_side.jpg", "still.mp4"],
}


def picture(num_frames, height, width, number):
    ramp = torch.arange(num_frames).view(-1, 1, 1, 1) * 9 + torch.arange(width).view(1, 1, -1, 1) * 3
    tint = torch.tensor([number * 17, 90, 200])
    return ((ramp + tint) % 256).expand(num_frames, height, width, 3).to(torch.uint8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mixed")
    sizes = {"long": (12, 24, 40), "short": (6, 24, 40), "upright": (12, 40, 24), "still": (1, 24, 40)}
    files = [file for of_bucket in FILES.values() for file in of_bucket]
    for number, file in enumerate(files):
        kind = file.partition("_")[0].partition(".")[0]
        if file.endswith(".mp4"):
            write_video(folder / file, picture(*sizes[kind], number), 12)
            continue
        image, exif = Image.fromarray(picture(1, 40, 36, number)[0].numpy()), Image.Exif()
        exif[0x0112] = 6 if kind == "on" else 1  # on its side, or upright
        image.save(folder / file, exif=exif)
    lines = [json.dumps({"file": file, "caption": f"a file named {file}"}) for file in files]
    (folder / "metadata.jsonl").write_text("\n".join(lines))
    return folder


def make_loader(folder, data_rank=0, data_size=1, group=None, **options):
    config = DataConfig(folder=str(folder), buckets=BUCKETS, **options)
    return ClipLoader(config, seed=0, data_rank=data_rank, data_size=data_size, group=group)


def test_an_image_is_one_upright_frame(folder):
    info, on_its_side = probe(folder / "a.png"), probe(folder / "on_its_side.jpg")
    assert (info.num_frames, info.height, info.width) == (1, 40, 36)
    assert (on_its_side.num_frames, on_its_side.height, on_its_side.width) == (1, 36, 40)
    frames = read_clip(folder / "a.png", 0, 1, height=40, width=36)
    assert torch.equal(frames, picture(1, 40, 36, 9))
    assert read_clip(folder / "on_its_side.jpg", 0, 1, height=36, width=40).shape == (1, 36, 40, 3)
    with pytest.raises(UnreadableVideo, match="an image is one frame, and frame 4 was asked for"):
        read_clip(folder / "a.png", 0, 5, height=8, width=8)


@pytest.mark.parametrize("content", [b"", b"no picture", b"\x89PNG\r\n\x1a\n" + bytes(40)])
def test_a_damaged_image_is_unreadable(content, tmp_path):
    (tmp_path / "bad.png").write_bytes(content)
    with pytest.raises(UnreadableVideo, match=r"bad\.png: cannot be decoded"):
        read_clip(tmp_path / "bad.png", 0, 1, height=8, width=8)


def test_a_truncated_image_is_unreadable(folder, tmp_path):
    whole = (folder / "b.jpg").read_bytes()
    (tmp_path / "cut.jpg").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UnreadableVideo, match=r"cut\.jpg: cannot be decoded"):
        read_clip(tmp_path / "cut.jpg", 0, 1, height=8, width=8)


def test_an_image_that_would_fill_the_memory_is_unreadable(tmp_path, monkeypatch):
    Image.new("RGB", (64, 64)).save(tmp_path / "huge.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 64 * 60)
    with pytest.raises(UnreadableVideo, match=r"huge\.png: cannot be decoded \(DecompressionBomb"):
        probe(tmp_path / "huge.png")


def test_batches_have_the_size_of_their_bucket_and_files_of_no_other(folder):
    loader = make_loader(folder, batch_size=2)
    seen = set()
    for batch in itertools.islice(loader, 12):
        bucket = batch.bucket
        assert batch.frames.shape == (2, bucket.num_frames, bucket.height, bucket.width, 3)
        assert set(batch.files) <= set(FILES[str(bucket)])
        seen |= set(batch.files)
    assert seen == {file for of_bucket in FILES.values() for file in of_bucket}


def test_a_resumed_run_sees_the_same_clips(folder):
    def take(loader, number):
        return [(b.positions, b.files, b.frames) for b in itertools.islice(loader, number)]

    tokens = dict.fromkeys(parse_buckets(BUCKETS), 10) | {Bucket(1, 32, 32): 4}
    loader = make_loader(folder)
    loader.balance(tokens)
    take(loader, 3)
    state = json.loads(json.dumps(loader.state_dict()))
    expected = take(loader, 5)
    resumed = make_loader(folder)
    resumed.balance(tokens)
    resumed.load_state_dict(state)
    for ours, theirs in zip(take(resumed, 5), expected, strict=True):
        assert ours[:2] == theirs[:2] and torch.equal(ours[2], theirs[2])


def test_other_batches_are_another_order_at_the_same_position(folder, caplog):
    loader = make_loader(folder)
    list(itertools.islice(loader, 2))
    state = loader.state_dict()
    other = make_loader(folder)
    other.balance(dict.fromkeys(parse_buckets(BUCKETS), 10) | {Bucket(1, 32, 32): 4})
    other.load_state_dict(state)
    assert "what is held out are not those of the saved run: training goes on at sample 8" in caplog.text
    assert next(other).positions[0] >= 8


def test_a_file_that_turns_bad_is_replaced_from_its_bucket(folder, tmp_path):
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    loader = make_loader(tmp_path)
    (tmp_path / "short_1.mp4").write_bytes(b"gone bad")
    for batch in itertools.islice(loader, 12):
        assert set(batch.files) <= set(FILES[str(batch.bucket)]) - {"short_1.mp4"}
    assert "short_1.mp4" in loader.quarantined
    for file in FILES["5x24x40"]:
        (tmp_path / file).write_bytes(b"gone bad")
    with pytest.raises(ValueError, match=r"all 3 files of the bucket 5x24x40 .* --data\.buckets"):
        list(itertools.islice(loader, 12))


def test_a_bucket_without_files_has_no_batches(folder):
    config = DataConfig(folder=str(folder), buckets=(*BUCKETS, "49x24x40"), batch_size=2)
    loader = ClipLoader(config, seed=0, data_rank=0, data_size=1, group=None)
    assert "49x24x40" not in {str(portion.bucket) for portion in loader.portions}


def test_a_batch_of_a_bucket_has_to_divide_too(folder):
    config = DataConfig(folder=str(folder), buckets=("5x24x40:3", "1x32x32"), batch_size=4)
    with pytest.raises(ValueError, match=r"batch_size \(3\) .* use --data\.buckets 5x24x40: 2 or 4"):
        ClipLoader(config, seed=0, data_rank=0, data_size=2, group=None)


def test_a_size_that_does_not_fit_the_model_is_told_with_its_bucket(folder, tmp_path, ranks):
    from opensora_accel.training.loop import Trainer

    with pytest.raises(
        Exception, match=r"data\.buckets 1x36x32: data\.height \(36\) must be a multiple of 8"
    ):
        ranks(1, Trainer, mixed_config(folder, tmp_path, **{"data.buckets": ["9x24x40", "1x36x32"]}))


# A run

CHANGES = {"data.num_frames": 9, "data.height": 48, "data.width": 80, "data.buckets": list(BUCKETS)}


def mixed_config(folder, output, plan=None, **changes):
    return tiny_config(folder, output, plan, **CHANGES | changes)


def trained(config):
    from opensora_accel.training.loop import Trainer

    trainer = Trainer(config)
    return [trainer.step() for _ in range(6)], trainer.summary


@pytest.mark.parametrize(
    "plan", some([Plan(ulysses=2), Plan(dp_shard=2, sharding="zero3"), Plan(ring=2, dp_replicate=2)], 0)
)
def test_a_mix_trains_alike_on_any_mesh(folder, tmp_path, ranks, plan):
    plan = plan.replace(precision="fp64")
    ((expected, summary),) = ranks(1, trained, mixed_config(folder, tmp_path, Plan(precision="fp64")))
    assert len({metrics["tokens"] for metrics in expected}) > 2
    assert "clips of 9 × 24 × 40, 135 tokens each, 4 per step" in summary
    assert "5 videos in" in summary and "16 tokens each, 32 per step" in summary
    for found, _ in ranks(plan.world_size, trained, mixed_config(folder, tmp_path, plan)):
        for ours, theirs in zip(found, expected, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-9)


@PROVE
def test_images_train_beside_clips_that_begin_with_a_frame(folder, tmp_path, ranks):
    """Frames of SANA-Video's clips are shared whole, and an image has fewer than there are ranks."""
    name = "SanaVideoTransformer3DModel"
    changes = {"model.class_name": name, "model.config": dict(RECIPES[name].tiny), "conditions.i2v_head": 3}
    found = []
    for plan in (Plan(precision="fp64"), Plan(precision="fp64", ulysses=2)):
        ((steps, _), *_) = ranks(plan.world_size, trained, mixed_config(folder, tmp_path, plan, **changes))
        found.append(steps)
    for ours, theirs in zip(*found, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-9)


# Three buckets have settings of their own, one has the run's.
OWN = {
    "9x24x40": {"checkpoint": "full", "offload": 1.0, "mlp_chunks": 2},
    "5x24x40": {"checkpoint": "selective"},
    "1x32x32": {"mlp_chunks": 3},
}


def trained_and_counted(config):
    """What each step told, and how often its blocks ran attention and each MLP's first layer."""
    from opensora_accel.training.loop import Trainer

    trainer, steps, counts = Trainer(config), [], collections.Counter()
    block = trainer.state.model.blocks[0]
    for name, module in [("attention", block.attn1.to_q), ("MLP", block.ffn.net[0].proj)]:
        module.register_forward_hook(lambda *_, name=name: counts.update([name]))
    for _ in range(8):
        counts.clear()
        metrics = trainer.step()
        (bucket,) = (name[len("clips/") :] for name in metrics if name.startswith("clips/"))
        steps.append((metrics, bucket, dict(counts)))
    return steps, trainer.summary


@pytest.mark.parametrize(
    "plan", some([Plan(ulysses=2), Plan(dp_shard=2, sharding="zero3"), Plan(ring=2, precision="bf16")], 0)
)
def test_buckets_with_their_own_settings_train_as_with_the_runs(folder, tmp_path, ranks, plan):
    plan = plan if plan.precision == "bf16" else plan.replace(precision="fp64")
    ran = {
        "9x24x40": {"attention": 2, "MLP": 6},
        "5x24x40": {"attention": 2, "MLP": 2},
        "1x32x32": {"attention": 1, "MLP": 6},
        "5x40x24": {"attention": 1, "MLP": 1},
    }
    plain = ranks(plan.world_size, trained_and_counted, mixed_config(folder, tmp_path, plan))
    changes = {"bucket_plans": OWN}
    owned = ranks(plan.world_size, trained_and_counted, mixed_config(folder, tmp_path, plan, **changes))
    for (ours, summary), (theirs, _) in zip(owned, plain, strict=True):
        assert "135 tokens each, 4 per step, with checkpoint=full, offload=1.0, mlp_chunks=2" in summary
        assert {bucket for _, bucket, _ in ours} == set(ran)
        for (found, bucket, counts), (expected, _, _) in zip(ours, theirs, strict=True):
            assert counts == ran[bucket]
            # An MLP in pieces adds up its weights' gradients in another order.
            assert found == pytest.approx(expected, rel=1e-9 if plan.precision == "fp64" else 1e-2)


@pytest.mark.parametrize(
    "plans,told",
    [
        (
            {"9x24x80": {"checkpoint": "full"}},
            r"has '9x24x80', which is none of data\.buckets \(1x32x32, 5x24x40",
        ),
        ({"9x24x40": {"ulysses": 2}}, r"bucket_plans\.9x24x40 is a table of .* put the others into plan"),
        (
            {"9x24x40": {}},
            r"bucket_plans\.9x24x40 is a table of one or more of checkpoint, offload, mlp_chunks",
        ),
        ({"9x24x40": "full"}, "got 'full'"),
        ({"9x24x40": {"offload": 1.0}}, r'bucket_plans\.9x24x40: offload=1.0 .* set checkpoint="full"'),
        ({"9x24x40": {"checkpoint": "some"}}, r"bucket_plans\.9x24x40: checkpoint must be one of none, full"),
    ],
)
def test_wrong_settings_of_a_bucket_are_told(plans, told):
    with pytest.raises(ValueError, match=told):
        config_from_dict({"data": {"buckets": list(BUCKETS)}, "bucket_plans": plans}, "the test")


def test_settings_of_a_bucket_need_buckets():
    with pytest.raises(ValueError, match=r"none of data\.buckets \(there are none\)"):
        config_from_dict({"bucket_plans": {"9x48x80": {"checkpoint": "full"}}}, "the test")


def test_a_memory_target_is_for_a_buckets_automatic_offload_too():
    values = {"data": {"buckets": list(BUCKETS)}, "memory_target_gib": 1.0}
    with pytest.raises(ValueError, match="set it to auto, or leave memory_target_gib out"):
        config_from_dict(values, "the test")
    auto = {"9x24x40": {"checkpoint": "full", "offload": "auto"}}
    config = config_from_dict(values | {"bucket_plans": auto}, "the test")
    assert [plan.offload for plan in config.plans.values()] == ["auto"]


def test_a_buckets_settings_are_proven_as_well(folder, tmp_path):
    plan = Plan(ulysses=2)
    config = mixed_config(folder, tmp_path, plan, bucket_plans=OWN)
    meshes = proof_meshes(config, 4)
    assert {(mesh.checkpoint, mesh.offload, mesh.mlp_chunks) for mesh in meshes} == {
        ("none", 0.0, 1), ("full", 1.0, 2), ("selective", 0.0, 1), ("none", 0.0, 3)
    }  # fmt: skip
    assert not tiny_config_of(config, tmp_path).bucket_plans
    assert TrueSize.of(config).plan == config.plans[Bucket(9, 24, 40)]


def work_of_steps(config):
    """Of this rank: tokens and floating-point operations of the first steps, and of more the seconds of its thread.

    The thread has none while it waits for others.
    """
    from opensora_accel.training.loop import Trainer

    trainer, seconds, tokens, operations = Trainer(config), [], [], []
    for _ in range(12):
        # Not torch's, which knows more operators in a process that has imported this one.
        with FlopCounter() as counter:
            tokens.append(trainer.step()["tokens"])
        operations.append(counter.hardware_flops)
    for _ in range(13):
        start = time.thread_time()
        trainer.step()
        seconds.append(time.thread_time() - start)
    return tokens, operations, seconds


@PROVE
def test_data_ranks_compute_equally_much(folder, tmp_path, ranks):
    """Six buckets in one run. Times, which a machine that others use blurs, are printed: 1 to 6 % apart."""
    sizes = ["1x32x32", "1x64x64", "5x24x40", "9x24x40", "5x40x24", "9x40x24:8"]
    plan = Plan(dp_replicate=2)
    model = {**TINY_WAN, "num_attention_heads": 8, "attention_head_dim": 32, "ffn_dim": 512}
    changes = {"data.buckets": sizes, "data.batch_size": 8, "steps": 120, "model.config": model}
    config = mixed_config(folder, tmp_path, plan, **changes)
    (tokens, operations, first), (_, of_other, second) = ranks(2, work_of_steps, config)
    assert operations == of_other and len(set(operations)) > 2 and len(set(tokens)) > 2
    apart = [abs(one - other) / max(one, other) for one, other in zip(first, second, strict=True)]
    print(f"two data ranks are {statistics.median(apart):.1%} apart in the median of {len(apart)} steps")
