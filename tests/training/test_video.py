"""Video files: exact frames wherever decoding starts, one exception for every bad file, whole files out."""

import collections
import contextlib
import multiprocessing
import os
import random

import av
import numpy
import pytest
import torch
from PIL import Image

from opensora_accel.training import video
from opensora_accel.training.samples import write_strip, write_video
from opensora_accel.training.video import UnreadableVideo, probe, read_clip
from tests.tiers import some
from tests.training.fuzz import damaged_videos, impossible_videos

HEIGHT, WIDTH, NUM_FRAMES = 48, 64, 96


def make_video(
    path, *, num_frames=NUM_FRAMES, codec="libx264", times=None, rotation=0, movflags="", **options
):
    """A video in which no two frames are alike: a rolling noise picture that grows brighter."""
    noise = numpy.random.default_rng(0).integers(0, 128, (HEIGHT, WIDTH, 3))
    with av.open(str(path), "w", options={"movflags": movflags} if movflags else {}) as container:
        stream = container.add_stream(codec, rate=25, options=options)
        stream.height, stream.width, stream.pix_fmt = HEIGHT, WIDTH, "yuv420p"
        stream.codec_context.gop_size = 12
        if rotation:
            stream.set_display_rotation(rotation)
        for number in range(num_frames):
            array = (numpy.roll(noise, number, axis=1) + number).astype(numpy.uint8)
            picture = av.VideoFrame.from_ndarray(array, format="rgb24")
            picture.pts = number if times is None else times[number]
            container.mux(stream.encode(picture))
        container.mux(stream.encode())
    return path


def decode_all(path):
    with av.open(str(path)) as container:
        return torch.stack(
            [torch.from_numpy(f.to_ndarray(format="rgb24")) for f in container.decode(video=0)]
        )


VARIANTS = {
    "b_frames.mp4": {},
    "open_groups.mp4": {"x264-params": "open-gop=1:bframes=3:scenecut=0"},
    "variable_rate.mp4": {"times": [n * n // 7 + n for n in range(NUM_FRAMES)]},
    "leading_frames.mkv": {"codec": "mpeg2video", "bf": "2"},
    "no_count.mkv": {},
    "no_b_frames.avi": {"codec": "mpeg4"},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_every_clip_equals_the_full_decode(tmp_path, name):
    path = make_video(tmp_path / name, **VARIANTS[name])
    frames = decode_all(path)
    assert len(frames) == NUM_FRAMES and (frames[1:] != frames[:-1]).flatten(1).any(1).all()
    assert probe(path).num_frames == NUM_FRAMES
    # Around keyframes (60, 72, 84), just before them, in the middle, up to the last frame.
    for start, stride in [
        (0, 1),
        (5, 3),
        (48, 1),
        (58, 2),
        (59, 1),
        (60, 1),
        (61, 1),
        (71, 4),
        (83, 1),
        (91, 1),
    ]:
        clip = read_clip(path, start, 5, stride=stride, height=HEIGHT, width=WIDTH)
        assert clip.dtype == torch.uint8
        assert torch.equal(clip, frames[start : start + 5 * stride : stride]), (start, stride)


def as_array(path):
    return read_clip(path, 3, 5, height=HEIGHT, width=WIDTH).numpy()


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="this system forks nothing")
def test_a_forked_worker_decodes_what_its_parent_has_decoded(tmp_path):
    """The parent's converter has threads that the worker lacks; PyAV 19 keeps one for all frames of a thread."""
    path = make_video(tmp_path / "clip.mp4")
    decode_all(path)
    expected = as_array(path)
    with multiprocessing.get_context("fork").Pool(1) as workers:
        found = workers.apply_async(as_array, (path,)).get(timeout=60)
    assert (found == expected).all()


@pytest.mark.parametrize("name", some(VARIANTS))
def test_far_clips_are_decoded_from_a_keyframe(tmp_path, monkeypatch, name):
    path = make_video(tmp_path / name, **VARIANTS[name])
    frames = decode_all(path)

    def fail(*_):
        raise AssertionError("decoded from the first frame")

    monkeypatch.setattr(video, "_decode_from_start", fail)
    for start in range(48, 92):
        assert torch.equal(read_clip(path, start, 4, height=HEIGHT, width=WIDTH), frames[start : start + 4])


def test_time_stamps_that_do_not_number_the_frames_are_not_trusted(tmp_path, monkeypatch):
    # As when each field of an interlaced frame comes in a packet of its own: two time stamps per frame.
    path = make_video(tmp_path / "clip.mp4")
    frames = decode_all(path)
    table = video._packet_table(*video._identity(path))
    times = tuple(sorted([*table.times, *(time + 1 for time in table.times)]))
    monkeypatch.setattr(video, "_packet_table", lambda *_: video._PacketTable(times, table.keyframes))
    assert torch.equal(read_clip(path, 75, 9, height=HEIGHT, width=WIDTH), frames[75:84])


def test_frames_cut_by_an_edit_list_are_not_counted(tmp_path):
    path = tmp_path / "cut.mp4"
    whole = make_video(tmp_path / "whole.mp4")
    with av.open(str(whole)) as source, av.open(str(path), "w", options={"avoid_negative_ts": "0"}) as target:
        stream = target.add_stream_from_template(source.streams.video[0])
        for packet in source.demux(video=0):
            if packet.size:
                packet.pts, packet.dts = packet.pts - 10 * 512, packet.dts - 10 * 512
                packet.stream = stream
                target.mux(packet)
    frames = decode_all(path)
    assert len(frames) == probe(path).num_frames == NUM_FRAMES - 10
    assert torch.equal(frames, decode_all(whole)[10:])
    assert torch.equal(read_clip(path, 70, 5, height=HEIGHT, width=WIDTH), frames[70:75])


@pytest.mark.parametrize("height,width", [(48, 64), (20, 20), (17, 63), (96, 30), (1, 1)])
def test_clips_have_the_size_asked_for(tmp_path, height, width):
    path = make_video(tmp_path / "clip.mp4", num_frames=3)
    assert read_clip(path, 0, 3, height=height, width=width).shape == (3, height, width, 3)


def test_the_crop_is_centred_and_covers(tmp_path):
    bars = torch.zeros(2, 48, 96, 3, dtype=torch.uint8)
    bars[:, :, 24:72] = 200  # the centred square; what lies beside it must not be seen
    write_video(tmp_path / "bars.mp4", bars, 25)
    square = read_clip(tmp_path / "bars.mp4", 0, 2, height=24, width=24)
    assert square[:, :, 1:-1].min() > 180
    wide = read_clip(tmp_path / "bars.mp4", 0, 2, height=24, width=48).float()
    assert wide[:, :, :11].max() < 30 and wide[:, :, 37:].max() < 30 and wide[:, :, 13:35].min() > 170


def test_resizing_down_is_antialiased(tmp_path):
    stripes = torch.zeros(1, 64, 64, 3, dtype=torch.uint8)
    stripes[:, ::2] = 200
    write_video(tmp_path / "stripes.mp4", stripes, 25)
    small = read_clip(tmp_path / "stripes.mp4", 0, 1, height=8, width=8).float()
    # Even grey, where a filter of fixed width would show some stripes and skip others.
    assert (small[:, 1:-1] - 100).abs().max() < 12


def test_sideways_films_are_turned_upright(tmp_path):
    flat = decode_all(make_video(tmp_path / "flat.mp4", num_frames=2))
    turned = make_video(tmp_path / "turned.mp4", num_frames=2, rotation=90)
    clip = read_clip(turned, 0, 2, height=WIDTH, width=HEIGHT)
    assert torch.equal(clip, torch.rot90(flat, 1, (1, 2)))


def damage(path, how):
    content = path.read_bytes()
    middle = len(content) // 2
    if how == "truncated":
        path.write_bytes(content[:middle])
    elif how == "bits":
        flipped = bytes(byte ^ 0x5A for byte in content[middle : middle + 2000])
        path.write_bytes(content[:middle] + flipped + content[middle + 2000 :])
    elif how == "codec":
        path.write_bytes(content.replace(b"avc1", b"zzzz").replace(b"avcC", b"zzzz"))
    elif how == "header":
        path.write_bytes(bytes(64) + content[64:])
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "text":
        path.write_text("not a video\n" * 40)
    elif how == "missing":
        path.unlink()
    return path


@pytest.mark.parametrize("movflags", ["", "faststart"])
@pytest.mark.parametrize("how", ["truncated", "bits", "header", "codec", "empty", "text", "missing"])
def test_bad_files_are_unreadable_and_named(tmp_path, how, movflags):
    path = damage(make_video(tmp_path / "broken.mp4", movflags=movflags), how)
    # Flipped bits are noticed only if they have to be decoded, and the header knows nothing of them.
    for start, num_frames in [(0, 90)] if how == "bits" else [(0, 90), (70, 20)]:
        with pytest.raises(UnreadableVideo, match=r"broken\.mp4: \w+") as caught:
            read_clip(path, start, num_frames, height=8, width=8)
        assert len(str(caught.value)) < 400
    if how != "bits":
        with pytest.raises(UnreadableVideo, match=r"broken\.mp4: \w+"):
            probe(path)


PLAYLISTS = {
    "hls.m3u8": "#EXTM3U\n#EXT-X-TARGETDURATION:10\n#EXTINF:10,\n{target}\n#EXT-X-ENDLIST\n",
    "concat.ffconcat": "ffconcat version 1.0\nfile {name}\n",
    "concat.mp4": "ffconcat version 1.0\nfile {name}\n",
    "dash.mpd": '<?xml version="1.0"?><MPD xmlns="urn:mpeg:dash:schema:mpd:2011" type="static"><Period><AdaptationSet>'
    '<Representation id="1"><BaseURL>{target}</BaseURL></Representation></AdaptationSet></Period></MPD>',
    "session.sdp": "v=0\no=- 0 0 IN IP4 127.0.0.1\nc=IN IP4 127.0.0.1\nt=0 0\nm=video 5004 RTP/AVP 96\n",
}


@pytest.mark.parametrize("name", PLAYLISTS)
def test_a_playlist_is_no_video(tmp_path, name):
    """It would read other media of this machine: here one beside it, which is a good video by itself."""
    target = make_video(tmp_path / "private.mp4", num_frames=3)
    (tmp_path / name).write_text(PLAYLISTS[name].format(target=target, name=target.name))
    for read in (probe, lambda path: read_clip(path, 0, 3, height=8, width=8)):
        with pytest.raises(UnreadableVideo, match=rf"{name}: (is no video container|cannot be decoded)"):
            read(tmp_path / name)


def test_a_name_with_a_colon_is_a_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_video(tmp_path / "private.mp4", num_frames=3)
    with pytest.raises(UnreadableVideo, match="No such file"):
        probe("concat:private.mp4")
    make_video(tmp_path / "concat:.mp4", num_frames=5)
    assert probe("concat:.mp4").num_frames == 5


def test_a_pipe_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe.mp4")
    for path in (tmp_path / "pipe.mp4", tmp_path, "/dev/zero"):
        for read in (probe, lambda path: read_clip(path, 0, 3, height=8, width=8)):
            with pytest.raises(UnreadableVideo, match="is no regular file"):
                read(path)


@pytest.mark.parametrize("name", ["b_frames.mp4", "no_b_frames.avi"])
def test_frames_that_build_on_damage_are_refused(tmp_path, name):
    path = make_video(tmp_path / name, **VARIANTS[name])
    frames = decode_all(path)
    with av.open(str(path)) as container:
        packet = [packet for packet in container.demux(video=0) if packet.size][5]
    content = bytearray(path.read_bytes())
    half = packet.pos + packet.size // 2
    content[half : packet.pos + packet.size] = bytes(packet.pos + packet.size - half)
    path.write_bytes(content)
    assert len(decode_all(path)) == NUM_FRAMES  # the decoder paints over it
    with pytest.raises(UnreadableVideo, match=r"the frame shown at time stamp .* is damaged"):
        read_clip(path, 7, 3, height=HEIGHT, width=WIDTH)
    assert torch.equal(read_clip(path, 75, 9, height=HEIGHT, width=WIDTH), frames[75:84])


def test_probe_notices_a_truncated_file_whose_header_is_whole(tmp_path):
    path = damage(make_video(tmp_path / "broken.mp4", movflags="faststart"), "truncated")
    with pytest.raises(UnreadableVideo, match="truncated: its header promises 96 frames"):
        probe(path)


@pytest.mark.parametrize("start", [0, 90])
def test_a_short_file_says_what_it_lacks(tmp_path, start):
    path = make_video(tmp_path / "short.mp4")
    with pytest.raises(
        UnreadableVideo, match=rf"short\.mp4: too short: .* need {start + 100} frames, it has 96"
    ):
        read_clip(path, start, 100, height=8, width=8)


def test_a_file_without_pictures_is_unreadable(tmp_path):
    path = tmp_path / "sound.mkv"
    with av.open(str(path), "w") as container:
        stream = container.add_stream("pcm_s16le", rate=8000)
        sound = av.AudioFrame.from_ndarray(numpy.zeros((1, 800), numpy.int16), format="s16", layout="mono")
        sound.sample_rate = 8000
        container.mux(stream.encode(sound))
        container.mux(stream.encode())
    with pytest.raises(UnreadableVideo, match="no video stream"):
        probe(path)


def test_what_a_caller_gets_wrong_is_not_the_fault_of_the_file(tmp_path):
    with pytest.raises(ValueError, match=r"start must be 0 or more .* got start=-1") as caught:
        read_clip(tmp_path / "clip.mp4", -1, 2, height=8, width=8)
    assert not isinstance(caught.value, UnreadableVideo)


@pytest.mark.parametrize("height,width", [(48, 64), (47, 63)])
def test_written_videos_can_be_read_back(tmp_path, height, width):
    ramp = torch.linspace(0, 180, width).expand(5, height, width)
    frames = torch.stack([ramp, ramp.flip(2), torch.full_like(ramp, 90)], dim=3)
    frames = (frames + torch.arange(5).view(5, 1, 1, 1) * 10).to(torch.uint8)
    path = tmp_path / "new folder" / "sample.mp4"
    write_video(path, frames, 12.5)
    info = probe(path)
    assert (info.num_frames, info.height, info.width, info.fps) == (5, 48, 64, 12.5)
    decoded = decode_all(path)[:, :height, :width].float()
    assert (decoded - frames.float()).abs().mean() < 4
    assert [p.name for p in path.parent.iterdir()] == ["sample.mp4"]


def test_a_failed_write_leaves_the_old_file_alone(tmp_path, monkeypatch):
    path = tmp_path / "sample.mp4"
    path.write_text("old")

    pictures = iter([numpy.zeros((8, 8, 3), numpy.uint8)] * 60)

    def fail_after_some(_):
        picture = next(pictures, None)
        if picture is None:
            raise RuntimeError("disk on fire")
        return picture

    monkeypatch.setattr(video.numpy, "ascontiguousarray", fail_after_some)
    with pytest.raises(RuntimeError, match="disk on fire"):
        write_video(path, torch.zeros(90, 8, 8, 3, dtype=torch.uint8), 25)
    assert path.read_text() == "old" and [p.name for p in tmp_path.iterdir()] == ["sample.mp4"]


@pytest.mark.parametrize("frames", [torch.zeros(2, 8, 8, 3), torch.zeros(2, 3, 8, 8, dtype=torch.uint8)])
def test_frames_of_another_layout_are_refused_with_a_remedy(tmp_path, frames):
    with pytest.raises(ValueError, match=r"must be uint8 \[T, H, W, 3\].*channels last"):
        write_video(tmp_path / "sample.mp4", frames, 25)
    with pytest.raises(ValueError, match=r"must be uint8 \[T, H, W, 3\].*channels last"):
        write_strip(tmp_path / "strip.png", [("clip", frames)])


def test_a_strip_shows_each_clip_under_its_label(tmp_path):
    red = torch.zeros(9, 20, 40, 3, dtype=torch.uint8)
    red[..., 0] = torch.linspace(55, 255, 9).view(9, 1, 1)
    rows = [("step 100", red), ("a very long caption " * 40, red[:3].flip(3))]
    write_strip(tmp_path / "strip.png", rows, max_frames=5, tile_width=100)
    sheet = numpy.asarray(Image.open(tmp_path / "strip.png").convert("RGB")).astype(int)
    assert 5 * 100 < sheet.shape[1] < 5 * 110 and sheet.shape[0] > 2 * 50
    first_row, second_row = sheet[52], sheet[-30]
    reds = [first_row[6 + 106 * column + 50, 0] for column in range(5)]
    assert (
        reds == sorted(reds) and reds[0] == 55 and reds[-1] == 255
    )  # the first and the last frame are there
    assert (first_row[56, 1:] == 0).all() and second_row[56, 2] == 55 and (second_row[-50] == 255).all()
    labels = sheet[6:24].min(axis=(0, 2)), sheet[84:104].min(axis=(0, 2))
    assert labels[0][:80].min() < 100 and labels[0][200:].min() == 255  # short text at the left
    assert labels[1][400:520].min() < 100 and labels[1][-6:].min() == 255  # cut inside the margin


# Whatever is done to a file: it is found in one line, or decodes exactly

FUZZ_SEED = int(os.environ.get("OPENSORA_ACCEL_FUZZ_SEED", "0"))
NUM_SHORT = 72
ONLY_LENGTH = {"cut", "append", "twice"}
"""Damages that leave the content of every frame alone."""


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    folder = tmp_path_factory.mktemp("originals")
    kinds = {
        "a.mp4": {},
        "b.mp4": {"movflags": "faststart"},
        "c.mkv": {},
        "d.avi": {"codec": "mpeg4"},
        "e.webm": {"codec": "libvpx"},
        "f.ts": {},
    }
    return [make_video(folder / name, num_frames=NUM_SHORT, **options) for name, options in kinds.items()]


def decode_until_an_error(path):
    """What FFmpeg by itself gives, without our options, from the first frame on."""
    frames = []
    with contextlib.suppress(av.error.FFmpegError), av.open(str(path)) as container:
        container.streams.video[0].codec_context.thread_count = 1
        for frame in container.decode(video=0):
            frames.append(torch.from_numpy(frame.to_ndarray(format="rgb24")))
    return frames


# 600 files take half a minute (2 cores, 2026-11).
@pytest.mark.faults
@pytest.mark.parametrize("num_files", [30, pytest.param(600, marks=pytest.mark.prove)])
def test_any_damaged_file_is_found_or_decodes_exactly(originals, tmp_path, num_files, fault):
    """A bit that was flipped within a picture, and still makes one, cannot be told: containers have no checksums."""
    whole = {path: decode_all(path) for path in originals}
    rng, outcomes = random.Random(FUZZ_SEED), collections.Counter()
    for path, how, original in damaged_videos(tmp_path, originals, FUZZ_SEED, num_files):
        try:
            info = probe(path)
            start = rng.choice([0, rng.randrange(info.num_frames)])
            length = min(6, info.num_frames - start)
            clip = read_clip(path, start, length, height=info.height, width=info.width)
        except UnreadableVideo as error:
            outcomes["found"] += 1
            assert str(error).startswith(f"{path}: ") and len(str(error).splitlines()) == 1
            assert len(str(error)) < 500 + len(str(path))
            continue
        outcomes["decoded"] += 1
        expected = whole[original] if how in ONLY_LENGTH else decode_until_an_error(path)
        for number, picture in enumerate(clip, start):
            # Behind a place where FFmpeg gives up, a clip is decoded from a keyframe.
            right = expected[number] if number < len(expected) else whole[original][number % NUM_SHORT]
            assert torch.equal(picture, right), (FUZZ_SEED, path.name, how, number)
    assert min(outcomes["found"], outcomes["decoded"]) > num_files / 10, outcomes
    fault("a damaged video that is set aside", outcomes["found"])
    fault("a damaged video that decodes as FFmpeg decodes it", outcomes["decoded"])


def test_what_is_no_video_at_all_is_found(originals, tmp_path):
    impossible = impossible_videos(tmp_path, originals[0])
    for path in impossible.values():
        for read in (probe, lambda path: read_clip(path, 0, 3, height=8, width=8)):
            with pytest.raises(UnreadableVideo) as caught:
                read(path)
            assert str(caught.value).startswith(f"{path}: ") and len(str(caught.value).splitlines()) == 1
