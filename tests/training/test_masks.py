"""Masks: what is black is not learned, on any mesh, and a mask that is not its clip's is told."""

import logging
import shutil

import numpy
import pytest
import torch
from PIL import Image

from opensora_accel import Plan
from opensora_accel.training.beside import latent_shares, read_mask, with_masks
from opensora_accel.training.codec import LatentFrames
from opensora_accel.training.entries import entries_of
from opensora_accel.training.flow import draw_noise, drop_captions
from opensora_accel.training.samples import write_video
from opensora_accel.training.tiny_run import write_clips
from opensora_accel.training.video import index_videos, read_clip
from tests.tiers import some
from tests.training.runs import losses, tiny_config


def save_picture(path, picture):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(picture.numpy()).save(path)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Five clips of 12 frames, and masks of four: halves, a video that grows dark, all white, all black."""
    folder = tmp_path_factory.mktemp("masked")
    write_clips(folder / "clips")
    half = torch.zeros(24, 40, dtype=torch.uint8)
    half[:, :10] = 255
    save_picture(folder / "masks" / "0.png", half)
    growing = torch.linspace(255, 0, 12).round().to(torch.uint8).view(12, 1, 1, 1).expand(12, 24, 40, 3)
    write_video(folder / "masks" / "1.mp4", growing.contiguous(), 12, None)
    save_picture(folder / "masks" / "2.png", torch.full((24, 40), 255, dtype=torch.uint8))
    save_picture(folder / "masks" / "3.png", torch.zeros(24, 40, dtype=torch.uint8))
    return folder


def config_of(folder, output, plan=None, **changes):
    options = {"data.masks": str(folder / "masks"), "data.batch_size": 5, **changes}
    return tiny_config(folder / "clips", output, plan, **options)


def test_a_latent_is_learned_as_far_as_its_pixels_are():
    masks = torch.zeros(1, 5, 16, 8, dtype=torch.uint8)
    masks[0, 0, :8] = 255  # all of the first latent above
    masks[0, 1:, 8:, :4] = 255  # half of the second below
    masks[0, 3:, :8] = 255  # two frames of it above
    assert latent_shares(masks, LatentFrames(4), 2, 1).tolist() == [[[[1.0], [0.0]], [[0.5], [0.5]]]]
    # Of a VAE that begins anew with each chunk of two latent frames, of 1 and of 4 frames.
    numbered = torch.tensor([1, 0, 0, 1, 1, 1, 1, 1, 1, 1]) * 255
    shares = latent_shares(
        numbered.to(torch.uint8).view(1, 10, 1, 1), LatentFrames(4, chunk=2, fewest=2, step=2), 1, 1
    )
    assert shares.flatten().tolist() == [1.0, 0.5, 1.0, 1.0]


def test_a_mask_is_cut_as_its_clip_is(tmp_path):
    # In its own place each frame has a number of its own.
    frames = (torch.arange(20).view(20, 1, 1, 1) * 12).expand(20, 24, 60, 3).to(torch.uint8)
    write_video(tmp_path / "mask.mp4", frames.contiguous(), 12, None)
    which = {"start": 6, "num_frames": 5, "stride": 3, "height": 24, "width": 40}
    mask = read_mask(str(tmp_path / "mask.mp4"), **which)
    assert torch.equal(mask, read_clip(tmp_path / "mask.mp4", **which).float().mean(-1).round().byte())
    assert mask.shape == (5, 24, 40) and mask[:, 0, 0].tolist() == pytest.approx(
        [72, 108, 144, 180, 216], abs=3
    )
    # The middle of a picture, for every frame: ten columns are cut off on either side.
    picture = torch.zeros(24, 60, dtype=torch.uint8)
    picture[:, 10:20] = 255
    save_picture(tmp_path / "mask.png", picture)
    mask = read_mask(str(tmp_path / "mask.png"), **which)
    assert mask.shape == (5, 24, 40) and (mask[:, :, :10] == 255).all() and (mask[:, :, 10:] == 0).all()
    assert (read_mask(None, **which) == 255).all()


def by_hand(config):
    """The loss of a batch, and what it is by hand: of each clip the mean over what its mask shows."""
    from opensora_accel.training.loop import Trainer

    trainer = Trainer(config)
    objective, flow = trainer.objective, config.flow
    batch = next(iter(trainer.loader))
    encoded = objective.encoders.encode(batch)
    clean, positions = encoded.clean, batch.positions
    with torch.no_grad():
        found = objective.loss(encoded).item()
        times = objective.recipe.draw_times(flow, objective.time_shift(batch.bucket), config.seed, positions)
        noise = draw_noise(clean, config.seed, positions)
        t = times.view(-1, 1, 1, 1, 1)
        captions = drop_captions(batch.captions, flow.caption_drop, config.seed, positions)
        (velocity,) = objective.predict([(1 - t) * clean + t * noise], times * 1000, batch.bucket, captions)
    squares = (velocity - (noise - clean)).square().mean(1)
    means = {}
    for row, file in enumerate(batch.files):
        # A latent is a patch of 4 × 4 of one frame.
        weights = torch.nn.functional.avg_pool2d(batch.masks[row].double() / 255, 4)
        total = weights.sum()
        means[file] = ((squares[row] * weights).sum() / total).item() if total else 0.0
    return found, means, clean.shape


def test_the_loss_is_that_of_what_is_white(ranks, folder, tmp_path):
    config = config_of(folder, tmp_path, Plan(precision="fp64"))
    found, means, shape = ranks(1, by_hand, config)[0]
    assert len(means) == 5 == shape[0] and means["3.mp4"] == 0.0 < min(
        means[f"{n}.mp4"] for n in (0, 1, 2, 4)
    )
    # All clips count alike, however much of them is learned. Shares are in fp32.
    assert found == pytest.approx(sum(means.values()) / 5, rel=1e-6)


PLANS = [
    Plan(ulysses=3, precision="fp64"),
    Plan(ring=2, precision="fp64"),
    Plan(dp_shard=5, sharding="zero3", precision="fp64"),
]


@pytest.mark.parametrize("plan", some(PLANS), ids=str)
def test_masks_are_the_same_on_any_mesh(ranks, folder, tmp_path, plan):
    # A frame that is given is not learned either.
    changes = {"conditions.t2v": 1, "conditions.i2v_head": 1, "conditions.learn_given": False}
    whole = ranks(1, losses, config_of(folder, tmp_path / "one", Plan(precision="fp64"), **changes))[0]
    shared = ranks(plan.world_size, losses, config_of(folder, tmp_path / "shared", plan, **changes))
    # Each rank tells the mean of all.
    assert all(rank == pytest.approx(whole, rel=1e-9) for rank in shared)
    unmasked = ranks(1, losses, tiny_config(folder / "clips", tmp_path / "none", **{"data.batch_size": 5}))[0]
    assert abs(unmasked[0] - whole[0]) > 1e-3


def looked_at(config):
    videos, _ = index_videos(entries_of(config), config.root, config)
    return with_masks(videos, config)


def test_a_mask_that_is_not_its_clips_is_set_aside_with_it(folder, tmp_path, caplog):
    masks = shutil.copytree(folder / "masks", tmp_path / "masks")
    save_picture(masks / "0.png", torch.zeros(40, 24, dtype=torch.uint8))
    short = torch.zeros(11, 24, 40, 3, dtype=torch.uint8)
    write_video(masks / "1.mp4", short, 12, None)
    (masks / "2.png").write_bytes(b"no picture")
    (masks / "notes.txt").write_text("nothing of a mask")
    config = config_of(folder, tmp_path, **{"data.masks": str(masks)}).data
    with caplog.at_level(logging.WARNING):
        videos, set_aside = looked_at(config)
    assert [video.file for video in videos] == ["3.mp4", "4.mp4"]
    assert [video.mask for video in videos] == [str(masks / "3.png"), None]
    assert "is 24 × 40, and the clip of this mask" in set_aside["0.mp4"]
    assert "has 11 frames" in set_aside["1.mp4"] and set_aside["1.mp4"].endswith("or a picture")
    assert "cannot be decoded" in set_aside["2.mp4"]
    assert "1 of 5 files have no mask" in caplog.text and "4.mp4 among them" in caplog.text


def test_a_smaller_mask_of_the_same_shape_will_do(folder, tmp_path):
    save_picture(tmp_path / "masks" / "0.png", torch.zeros(12, 20, dtype=torch.uint8))
    config = config_of(folder, tmp_path, **{"data.masks": str(tmp_path / "masks")}).data
    videos, set_aside = looked_at(config)
    assert videos[0].mask == str(tmp_path / "masks" / "0.png") and not set_aside


@pytest.mark.parametrize(
    ("names", "error", "message"),
    [
        (None, FileNotFoundError, "is no folder; give one with a mask for each file"),
        (["x.png"], ValueError, r"has a mask for none of the 5 files; that of 0\.mp4 would be .*0\.png"),
        (["0.png", "0.webp"], ValueError, "for one file; leave one of them"),
    ],
    ids=["no folder", "no mask", "two masks"],
)
def test_a_folder_without_masks_is_refused(folder, tmp_path, names, error, message):
    for name in names or []:
        save_picture(tmp_path / "masks" / name, torch.zeros(24, 40, dtype=torch.uint8))
    config = config_of(folder, tmp_path, **{"data.masks": str(tmp_path / "masks")}).data
    with pytest.raises(error, match=message):
        looked_at(config)


def test_a_grey_mask_counts_in_part(tmp_path):
    Image.fromarray(numpy.full((24, 40), 51, dtype=numpy.uint8)).save(tmp_path / "grey.png")
    mask = read_mask(str(tmp_path / "grey.png"), 0, 1, stride=1, height=24, width=40)
    assert latent_shares(mask[None], LatentFrames(4), 6, 10).unique().tolist() == pytest.approx([0.2])
