"""The data of a run depends on its seed and nothing else: not on ranks, workers, restarts or bad files."""

import collections
import itertools
import json
import logging
import os
import shutil

import pytest
import torch
import torch.distributed as dist

from opensora_accel.training.buckets import Bucket
from opensora_accel.training.clips import VideoFolder
from opensora_accel.training.config import config_from_dict
from opensora_accel.training.data import ClipLoader, index_videos
from opensora_accel.training.entries import read_entries
from opensora_accel.training.sampler import GlobalBatchSampler, Portion
from opensora_accel.training.samples import write_video
from opensora_accel.training.sections import DataConfig

NUM_VIDEOS = 7  # does not divide into batches of four: every batch position meets every video


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    """Seven videos of 20 frames; brightness and tint tell the video and the frame."""
    folder = tmp_path_factory.mktemp("originals")
    for number in range(NUM_VIDEOS):
        frames = torch.full((20, 16, 32, 3), 20 + 20 * number, dtype=torch.uint8)
        frames[:, :, :16] += torch.arange(20, dtype=torch.uint8).mul(5).view(20, 1, 1, 1)
        write_video(folder / f"{number}.mp4", frames, 25)
    write_metadata(folder, [{"file": f"{n}.mp4", "caption": f"video {n}"} for n in range(NUM_VIDEOS)])
    return folder


@pytest.fixture
def folder(originals, tmp_path):
    return shutil.copytree(originals, tmp_path / "videos")


def write_metadata(folder, records):
    (folder / "metadata.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


def cut(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def make_config(folder, **options):
    return DataConfig(**{"folder": str(folder), "num_frames": 3, "height": 8, "width": 16} | options)


def make_loader(folder, *, seed=0, data_rank=0, data_size=1, group=None, **options):
    config = make_config(folder, **options)
    return ClipLoader(config, seed=seed, data_rank=data_rank, data_size=data_size, group=group)


def take(loader, num_batches):
    """(position, caption, frames) of every sample of the next batches."""
    batches = itertools.islice(loader, num_batches)
    return [item for b in batches for item in zip(b.positions, b.captions, b.frames, strict=True)]


def assert_same(samples, expected):
    assert [sample[:2] for sample in samples] == [sample[:2] for sample in expected]
    assert all(torch.equal(ours[2], theirs[2]) for ours, theirs in zip(samples, expected, strict=True))


# Reading the folder


@pytest.mark.parametrize("folder", ["", "nowhere", "."])
def test_a_missing_folder_says_how_to_make_one(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        FileNotFoundError, match=r'--data\.folder .*metadata\.jsonl .*\{"file": .*"caption": '
    ):
        read_entries(folder)


@pytest.mark.parametrize(
    "line,rule",
    [
        (b'{"file": "a.mp4", "caption": ', "is not a line of JSON"),
        (b'{"file": "\xff.mp4", "caption": "a"}', "is not a line of JSON"),
        (b'["a.mp4", "a"]', "is a JSON list, not an object"),
        (b'{"caption": "a"}', "needs a text under 'file'"),
        (b'{"file": "a.mp4", "caption": 3}', "needs a text under 'caption'"),
        (b'{"file": "../a.mp4", "caption": "a"}', "must lie inside the folder"),
        (b'{"file": "b/../../a.mp4", "caption": "a"}', "must lie inside the folder"),
        (b'{"file": "/a.mp4", "caption": "a"}', "must lie inside the folder"),
        (
            b'{"file": "a.mp4", "caption": "' + b"a" * 300_000 + b'"}',
            "the caption has 300,000 characters, and 10,000 are the most",
        ),
    ],
)
def test_a_bad_line_is_named_by_file_and_number(tmp_path, line, rule):
    good = b'{"file": "sub/..a.mp4", "caption": "good"}\n\n'
    (tmp_path / "metadata.jsonl").write_bytes(good + line + b"\n")
    with pytest.raises(ValueError, match=rf"metadata\.jsonl:3: .*{rule}"):
        read_entries(tmp_path)


def test_an_empty_list_is_an_error(tmp_path):
    (tmp_path / "metadata.jsonl").write_text("\n")
    with pytest.raises(ValueError, match="names no video; write one line per video"):
        read_entries(tmp_path)


def test_unusable_files_are_set_aside_with_their_reason(folder):
    cut(folder / "1.mp4")
    (folder / "2.mp4").unlink()
    write_video(folder / "3.mp4", torch.zeros(4, 16, 32, 3, dtype=torch.uint8), 25)
    config = make_config(folder, num_frames=3, frame_stride=2)
    usable, quarantined = index_videos(read_entries(folder), folder, config)
    assert [video.file for video in usable] == ["0.mp4", "4.mp4", "5.mp4", "6.mp4"]
    assert usable[0].info.num_frames == 20
    assert list(quarantined) == ["1.mp4", "2.mp4", "3.mp4"]
    assert "1.mp4: cannot be decoded" in quarantined["1.mp4"] and "No such file" in quarantined["2.mp4"]
    assert quarantined["3.mp4"] == (
        "3.mp4: too short: has 4 frames, a clip of 3 frames in steps of 2 needs 5"
    )


def test_a_folder_without_usable_videos_gives_five_reasons(folder):
    with pytest.raises(ValueError, match=r"(?s)none of the 7 videos .* lower --data\.num_frames") as caught:
        make_loader(folder, num_frames=21)
    assert str(caught.value).count("needs 21") == 5


@pytest.mark.parametrize(
    "name", ["num_frames", "frame_stride", "height", "width", "batch_size", "num_workers"]
)
def test_configurations_that_cannot_work_are_refused(name):
    with pytest.raises(ValueError, match=rf"data\.{name} must be greater than or equal to [01]; got -1"):
        config_from_dict({"data": {name: -1}}, "the test")


# The order of samples


def sampled(num_batches, data_rank=0, data_size=1, seed=0, batch_size=4):
    return list(itertools.islice(make_sampler(data_rank, data_size, seed, batch_size), num_batches))


def make_sampler(data_rank, data_size, seed=0, batch_size=4):
    portion = Portion(Bucket(3, 8, 16), range(NUM_VIDEOS), batch_size)
    return GlobalBatchSampler([portion], data_rank, data_size, seed)


@pytest.mark.parametrize("data_size", [2, 4])
def test_global_batches_do_not_depend_on_the_number_of_ranks(data_size):
    shares = [sampled(9, data_rank, data_size) for data_rank in range(data_size)]
    together = [[key for share in batch for key in share] for batch in zip(*shares, strict=True)]
    assert together == sampled(9)


def test_every_epoch_shows_every_video_once_in_a_new_order():
    keys = [key for batch in sampled(NUM_VIDEOS * 2) for key in batch]
    assert [position for position, _ in keys] == list(range(8 * NUM_VIDEOS))
    epochs = [tuple(v for _, v in keys[n : n + NUM_VIDEOS]) for n in range(0, len(keys), NUM_VIDEOS)]
    assert all(sorted(epoch) == list(range(NUM_VIDEOS)) for epoch in epochs)
    assert len(set(epochs)) > 6
    assert sampled(3, seed=1) != sampled(3)


def test_the_sampler_resumes_where_it_was():
    sampler = make_sampler(1, 2)
    list(itertools.islice(sampler, 3))
    resumed = make_sampler(1, 2)
    resumed.position = sampler.position
    assert list(itertools.islice(resumed, 4)) == sampled(7, 1, 2)[3:]


def test_a_batch_that_does_not_divide_says_what_would():
    with pytest.raises(ValueError, match=r"batch_size \(6\) .* ranks \(4\); use .* 4 or 8, .* 1, 2, 3, 6$"):
        make_sampler(0, 4, batch_size=6)


# The loader


def test_batches_have_the_declared_shape_and_say_what_they_show(folder):
    loader = make_loader(folder, batch_size=2)
    batch = next(loader)
    assert batch.frames.shape == (2, 3, 8, 16, 3) and batch.frames.dtype == torch.uint8
    for frames, caption in zip(batch.frames.float(), batch.captions, strict=True):
        right_half = frames[:, :, 10:].mean()  # 20 + 20 * number, by construction
        assert caption == f"video {round((right_half.item() - 20) / 20)}"


def test_start_frames_vary_and_follow_from_seed_and_position(folder):
    config = make_config(folder)
    videos, _ = index_videos(read_entries(folder), folder, config)
    clips = [VideoFolder(videos, config, seed=0)[position, 0].frames for position in range(12)]
    again = VideoFolder(videos, config, seed=0)[5, 0].frames
    assert torch.equal(clips[5], again)
    assert len({clip.sum().item() for clip in clips}) > 5


def test_a_bad_file_gives_a_sample_with_an_error(folder):
    config = make_config(folder)
    videos, _ = index_videos(read_entries(folder), folder, config)
    cut(folder / "2.mp4")
    sample = VideoFolder(videos, config, seed=0)[9, 2]
    assert (sample.position, sample.file, sample.frames) == (9, "2.mp4", None)
    assert "2.mp4: cannot be decoded" in sample.error


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_resumed_run_sees_the_same_clips(folder, num_workers):
    expected = take(make_loader(folder), 7)
    loader = make_loader(folder, num_workers=num_workers)
    assert_same(take(loader, 3), expected[:12])
    state = json.loads(json.dumps(loader.state_dict()))
    assert state["position"] == 12
    assert_same(take(loader, 4), expected[12:])  # a second loop goes on
    resumed = make_loader(folder, num_workers=num_workers)
    next(resumed)
    resumed.load_state_dict(state)
    assert_same(take(resumed, 4), expected[12:])


def test_a_run_resumes_with_another_batch_size(folder):
    expected = take(make_loader(folder), 6)
    loader = make_loader(folder)
    take(loader, 3)
    resumed = make_loader(folder, batch_size=6)
    resumed.load_state_dict(loader.state_dict())
    assert_same(take(resumed, 2), expected[12:])


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_file_that_breaks_later_is_replaced_and_named_once(folder, num_workers, caplog):
    expected = take(make_loader(folder), 8)
    loader = make_loader(folder, num_workers=num_workers)
    cut(folder / "2.mp4")
    with caplog.at_level(logging.WARNING):
        samples = take(loader, 8)
    assert [record.message for record in caplog.records if "2.mp4" in record.message] == [
        f"set aside a video (1 of 7 so far): {loader.quarantined['2.mp4']}"
    ]
    assert list(loader.quarantined) == ["2.mp4"]
    stand_in = {"video 2": "video 3"}
    assert sum(caption == "video 2" for _, caption, _ in expected) > 2
    assert [s[:2] for s in samples] == [(p, stand_in.get(caption, caption)) for p, caption, _ in expected]
    untouched = [n for n, sample in enumerate(expected) if sample[1] != "video 2"]
    assert_same([samples[n] for n in untouched], [expected[n] for n in untouched])


def test_stand_ins_that_break_are_replaced_in_turn(folder):
    loader = make_loader(folder)
    for number in (5, 6, 0):
        cut(folder / f"{number}.mp4")
    captions = [sample[1] for sample in take(loader, 7)]
    assert sorted(loader.quarantined) == ["0.mp4", "5.mp4", "6.mp4"]
    assert captions.count("video 1") == 4 * 4 and captions.count("video 2") == 4


def test_a_resume_keeps_the_order_when_files_went_bad_meanwhile(folder):
    (folder / "4.mp4").unlink()  # never usable: not part of the order
    loader = make_loader(folder)
    take(loader, 2)
    state = loader.state_dict()
    cut(folder / "2.mp4")
    expected = take(loader, 6)  # finds out while it runs
    resumed = make_loader(folder)  # finds out when it reads the headers
    resumed.load_state_dict(state)
    assert_same(take(resumed, 6), expected)
    assert resumed.state_dict() == loader.state_dict() | {"quarantined": resumed.quarantined}
    assert sorted(resumed.quarantined) == ["2.mp4", "4.mp4"]


def test_a_resume_on_other_videos_says_so_and_goes_on(folder, caplog):
    (folder / "4.mp4").rename(folder / "lost")
    loader = make_loader(folder)
    take(loader, 2)
    state = loader.state_dict()
    (folder / "lost").rename(folder / "4.mp4")
    write_metadata(folder, [{"file": f"{n}.mp4", "caption": f"video {n}"} for n in range(5)])
    resumed = make_loader(folder)
    with caplog.at_level(logging.WARNING):
        resumed.load_state_dict(state)
    assert "training goes on at sample 8, in a new order" in caplog.text
    samples = take(resumed, 2)
    assert [sample[0] for sample in samples] == list(range(8, 16))
    assert {sample[1] for sample in samples} == {f"video {n}" for n in range(5)} and not resumed.quarantined


def test_a_state_of_something_else_is_refused(folder):
    with pytest.raises(ValueError, match=r"lacks \['excluded', 'order', 'quarantined'\]"):
        make_loader(folder).load_state_dict({"position": 3})


def test_the_last_failure_ends_the_run(folder):
    loader = make_loader(folder)
    for path in folder.glob("*.mp4"):
        cut(path)
    with pytest.raises(ValueError, match="none of the 7 videos"):
        next(loader)


# Several ranks


def run_share(folders, data_size, num_batches, broken=None):
    """One rank of a job in which neighbouring ranks share a data rank."""
    rank, size = dist.get_rank(), dist.get_world_size()
    group = dist.group.WORLD
    loader = make_loader(folders[rank], data_rank=rank * data_size // size, data_size=data_size, group=group)
    dist.barrier()
    if broken is not None and broken[0] == rank:
        cut(folders[rank] / broken[1])
    samples = [(p, c, f.clone()) for p, c, f in take(loader, num_batches)]
    return samples, loader.state_dict()


def together(results, data_size):
    """The samples of all data ranks, in the order of their positions; ranks of a data rank agree."""
    per_data_rank = len(results) // data_size
    for rank, (samples, _) in enumerate(results):
        assert_same(samples, results[rank // per_data_rank * per_data_rank][0])
    shares = [samples for samples, _ in results[::per_data_rank]]
    return sorted((sample for share in shares for sample in share), key=lambda sample: sample[0])


@pytest.mark.parametrize("num_ranks,data_size", [(2, 2), (4, 4), (4, 2), (2, 1)])
def test_any_number_of_ranks_trains_on_the_same_clips(ranks, folder, num_ranks, data_size):
    loader = make_loader(folder)
    expected = take(loader, 5)
    results = ranks(num_ranks, run_share, [folder] * num_ranks, data_size, 5)
    assert_same(together(results, data_size), expected)
    assert all(state == loader.state_dict() for _, state in results)


@pytest.mark.parametrize("num_ranks,data_size,bad_rank", [(2, 2, 0), (2, 2, 1), (4, 2, 3), (2, 1, 1)])
def test_a_file_that_one_rank_cannot_read_is_replaced_on_all(
    ranks, folder, originals, tmp_path, num_ranks, data_size, bad_rank
):
    # Each rank reads a copy of its own, as from a local disk; one copy of one file is damaged. With one data
    # rank the other rank could read it, and must drop it all the same.
    folders = [shutil.copytree(originals, tmp_path / f"rank{n}") for n in range(num_ranks)]
    results = ranks(num_ranks, run_share, folders, data_size, 6, (bad_rank, "4.mp4"))
    states = [state for _, state in results]
    assert all(state == states[0] for state in states) and list(states[0]["quarantined"]) == ["4.mp4"]
    healthy = take(make_loader(folder), 6)
    first_seen = next(
        position
        for position, caption, _ in healthy
        if caption == "video 4" and position % 4 * data_size // 4 == bad_rank * data_size // num_ranks
    )
    batch_start = first_seen // 4 * 4  # before it, another data rank may read its own good copy
    expected = [
        (p, "video 5" if caption == "video 4" and p >= batch_start else caption) for p, caption, _ in healthy
    ]
    assert [sample[:2] for sample in together(results, data_size)] == expected


class Records(logging.Handler):
    def __init__(self):
        super().__init__()
        self.texts = []

    def emit(self, record):
        self.texts.append(record.getMessage())


def run_and_listen(folder):
    """What this rank logs when both ranks of one data rank fail to read the same file."""
    records = Records()
    logging.getLogger("opensora_accel").addHandler(records)
    loader = make_loader(folder, group=dist.group.WORLD)
    dist.barrier()
    if dist.get_rank() == 0:
        cut(folder / "4.mp4")
    dist.barrier()
    take(loader, 4)
    logging.getLogger("opensora_accel").removeHandler(records)
    return records.texts, loader.quarantined


def test_a_file_that_several_ranks_cannot_read_is_named_once_by_rank_0(ranks, folder):
    (first, quarantined), (second, same) = ranks(2, run_and_listen, folder)
    assert first == [f"set aside a video (1 of 7 so far): {quarantined['4.mp4']}"] and second == []
    assert quarantined == same and list(quarantined) == ["4.mp4"]


def run_into_error(folder):
    try:
        make_loader(folder, data_size=2, data_rank=dist.get_rank(), group=dist.group.WORLD)
    except (FileNotFoundError, ValueError) as error:
        return type(error).__name__, str(error)


def test_what_rank_0_cannot_read_is_raised_on_all_ranks(ranks, tmp_path):
    missing, same = ranks(2, run_into_error, tmp_path)
    assert missing == same and missing[0] == "FileNotFoundError" and "--data.folder" in missing[1]
    (tmp_path / "metadata.jsonl").write_text("{")
    bad_line, same = ranks(2, run_into_error, tmp_path)
    assert bad_line == same and bad_line[0] == "ValueError" and "metadata.jsonl:1" in bad_line[1]


def run_out_of_videos(folder):
    loader = make_loader(folder, data_size=2, data_rank=dist.get_rank(), group=dist.group.WORLD)
    dist.barrier()
    if dist.get_rank() == 1:
        for path in folder.glob("*.mp4"):
            cut(path)
    dist.barrier()
    try:
        next(loader)
    except ValueError as error:
        return str(error)


def test_the_last_failure_ends_the_run_on_all_ranks(ranks, folder):
    first, second = ranks(2, run_out_of_videos, folder)
    assert first == second and first.startswith("none of the 7 videos")


# Several folders


def test_files_of_several_folders_come_as_often_as_each_folder_says(folder, tmp_path, caplog):
    """Of 7 and 2 files, those of the second three times: 13 to an epoch."""
    other = tmp_path / "deep" / "others"
    other.mkdir(parents=True)
    for number in range(2):
        shutil.copy(folder / f"{number}.mp4", other / f"{number}.mp4")
        (other / f"{number}.txt").write_text(f"other {number}")
    times = {str(folder): 1, str(other): 3}
    options = {"batch_size": 2}
    loader = make_loader("", **options, folders=times)
    expected = take(loader, 26)  # four epochs of 13
    for epoch in range(4):
        counts = collections.Counter(caption for _, caption, _ in expected[13 * epoch : 13 * epoch + 13])
        assert counts == {f"video {n}": 1 for n in range(7)} | {f"other {n}": 3 for n in range(2)}
    halves = [make_loader("", **options, folders=times, data_rank=rank, data_size=2) for rank in range(2)]
    shares = [take(half, 26) for half in halves]
    assert_same(sorted(shares[0] + shares[1], key=lambda sample: sample[0]), expected)
    assert "deep/others/0.mp4" in [video.file for video in loader.videos]
    # A run that goes on with other numbers has another order, and says so.
    resumed = make_loader("", **options, folders={str(folder): 1, str(other): 2})
    with caplog.at_level(logging.WARNING):
        resumed.load_state_dict(loader.state_dict())
    assert "training goes on at sample 52, in a new order" in caplog.text
    same = make_loader("", **options, folders=times)
    same.load_state_dict(loader.state_dict())
    assert_same(take(same, 2), take(loader, 2))


def test_files_are_named_from_the_folder_that_all_lie_in(folder):
    alone = make_loader("", folders={str(folder): 2})
    assert [video.file for video in alone.videos] == [video.file for video in make_loader(folder).videos]
    assert alone.config.root == str(folder)
    assert DataConfig(folders={"a": 1, "b/c": 2}).root == os.getcwd()


@pytest.mark.parametrize(
    ("folders", "message"),
    [
        ({"a": 0}, r"how often the files of each come, from 1 to 1,000; got 0 for a"),
        ({"a": True}, "got True for a"),
        ({"a": 1.5}, r"got 1\.5 for a"),
        ({"a": 1, "a/b": 1}, r"data\.folders has 'a/b', which is no folder or lies in another"),
        ({"a": 1, "./a": 2}, r"data\.folders has 'a' twice"),
        ({"\0": 1}, "which is no folder"),
    ],
)
def test_folders_that_cannot_be_are_refused(folders, message):
    with pytest.raises(ValueError, match=message):
        DataConfig(folders=folders)
    with pytest.raises(ValueError, match=r"data\.folders stands in place of data\.folder"):
        DataConfig(folder="a", folders={"b": 1})
