"""Clips in tar archives and in tables of Hugging Face: the same frames, sums, entries and losses as from files."""

import dataclasses
import hashlib
import io
import json
import tarfile

import pytest
import torch
from PIL import Image

from opensora_accel import Plan
from opensora_accel.training.disk_cache import file_digest
from opensora_accel.training.entries import read_entries
from opensora_accel.training.sections import DataConfig
from opensora_accel.training.shards import find_samples, open_file, place_of, size_of
from opensora_accel.training.tiny_run import write_clips
from opensora_accel.training.video import UnreadableVideo, probe, read_clip
from tests.tiers import PROVE
from tests.training.runs import losses, tiny_config


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A folder of five clips and a picture, and the captions by file."""
    folder = write_clips(tmp_path_factory.mktemp("files"))
    Image.linear_gradient("L").resize((40, 24)).convert("RGB").save(folder / "5.png")
    with (folder / "metadata.jsonl").open("a") as file:
        file.write(json.dumps({"file": "5.png", "caption": "a picture"}) + "\n")
    return folder, {entry.file: entry.caption for entry in read_entries(folder)}


def add(archive, name, data):
    member = tarfile.TarInfo(name)
    member.size = len(data)
    archive.addfile(member, io.BytesIO(data))


def write_tar(folder, files):
    """Two archives of three samples each, one with captions as text and one as JSON, and other members beside them."""
    folder.mkdir()
    source, captions = files
    for number in range(2):
        with tarfile.open(folder / f"part-{number}.tar", "w") as archive:
            add(archive, "readme.md", b"of no sample")
            for name, caption in list(captions.items())[3 * number : 3 * number + 3]:
                key, _, ending = name.partition(".")
                add(archive, f"clips/{key}.{ending}", (source / name).read_bytes())
                if number:
                    add(archive, f"clips/{key}.json", json.dumps({"caption": caption}).encode())
                else:
                    add(archive, f"clips/{key}.txt", f"{caption}\n".encode())
    return folder


def write_parquet(folder, files):
    """Two files, the first with two row groups, as `to_parquet` of datasets writes a column of videos."""
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    folder.mkdir()
    source, captions = files
    rows = [{"bytes": (source / name).read_bytes(), "path": name} for name in captions]
    for number in range(2):
        part = slice(3 * number, 3 * number + 3)
        table = pyarrow.table({"video": rows[part], "text": list(captions.values())[part]})
        parquet.write_table(table, folder / f"train-{number}.parquet", row_group_size=2)
    return folder


def write_arrow(folder, files):
    """Two streams of two batches, and what lies beside them, as `save_to_disk` of datasets writes them."""
    pyarrow, ipc = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.ipc")
    folder.mkdir()
    (folder / "state.json").write_text('{"_split": "train"}')
    (folder / "dataset_info.json").write_text("{}")
    source, captions = files
    rows = [{"bytes": (source / name).read_bytes(), "path": name} for name in captions]
    for number in range(2):
        part = slice(3 * number, 3 * number + 3)
        table = pyarrow.table({"video": rows[part], "text": list(captions.values())[part]})
        with ipc.new_stream(folder / f"data-{number:05d}-of-00002.arrow", table.schema) as stream:
            stream.write_table(table, max_chunksize=2)
    return folder


WRITE = {"tar": write_tar, "parquet": write_parquet, "arrow": write_arrow}


@pytest.mark.parametrize("kind", WRITE)
def test_shards_hold_the_same_clips(files, tmp_path, kind):
    folder = WRITE[kind](tmp_path / kind, files)
    source, captions = files
    entries = read_entries(folder)
    assert [entry.caption for entry in entries] == list(captions.values())
    for entry, name in zip(entries, captions, strict=True):
        within, file = folder / entry.file, source / name
        assert place_of(within) is not None and place_of(file) is None
        with open_file(within) as opened:
            assert opened.read() == file.read_bytes()
        assert size_of(within) == file.stat().st_size
        assert file_digest(within) == hashlib.sha256(file.read_bytes()).hexdigest()
        assert probe(within) == probe(file)
        start, length = (0, 1) if name.endswith("png") else (2, 5)
        sizes = {"height": 16, "width": 24}
        assert torch.equal(read_clip(within, start, length, **sizes), read_clip(file, start, length, **sizes))


def test_a_part_of_a_file_is_a_file(files, tmp_path):
    folder = write_tar(tmp_path / "tar", files)
    (name, _) = find_samples(folder)[1]
    whole = (files[0] / "1.mp4").read_bytes()
    with open_file(folder / name) as part:
        assert part.seek(-7, io.SEEK_END) == len(whole) - 7 and part.read(100) == whole[-7:]
        assert part.read(1) == b"" and part.seek(5) == 5 and part.read(3) == whole[5:8]
        assert part.seek(2, io.SEEK_CUR) == 10 and part.read(4) == whole[10:14]


@PROVE
@pytest.mark.parametrize(
    "kind", ["tar", pytest.param("parquet", marks=PROVE), pytest.param("arrow", marks=PROVE)]
)
def test_a_run_on_shards_is_the_run_on_files(ranks, files, tmp_path, kind):
    folder = WRITE[kind](tmp_path / kind, files)

    def of(place):
        config = tiny_config(place, tmp_path / place.name, Plan(ulysses=2))
        buckets = ("5x24x40", "1x24x40")
        data = DataConfig(folder=str(place), buckets=buckets, batch_size=4)
        return dataclasses.replace(config, data=data)

    assert ranks(2, losses, of(folder)) == ranks(2, losses, of(files[0]))


def test_shards_that_are_wrong_say_what_is(files, tmp_path):
    (tmp_path / "a.tar").write_bytes(b"no archive" * 100)
    with pytest.raises(ValueError, match=r"a\.tar is no readable tar archive"):
        read_entries(tmp_path)
    with pytest.raises(UnreadableVideo, match="no readable tar archive"):
        probe(tmp_path / "a.tar" / "0.mp4")
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        add(archive, "0.mp4", b"x")
    with pytest.raises(ValueError, match=r"0\.mp4 has no caption beside it.*0\.txt"):
        read_entries(tmp_path)
    with pytest.raises(UnreadableVideo, match=r"has no member 1\.mp4"):
        probe(tmp_path / "a.tar" / "1.mp4")
    with pytest.raises(UnreadableVideo, match=r"cannot be decoded|no video container"):
        probe(tmp_path / "a.tar" / "0.mp4")
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        add(archive, "0.mp4", b"x")
        add(archive, "0.json", b'{"title": "no caption"}')
    with pytest.raises(ValueError, match="needs a text under one of caption, text, prompt"):
        read_entries(tmp_path)
    (tmp_path / "a.tar").unlink()
    with pytest.raises(FileNotFoundError, match=r"shards \(\.tar of WebDataset, \.parquet and \.arrow"):
        read_entries(tmp_path)


def test_parquet_that_is_wrong_says_what_is(tmp_path, monkeypatch):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")

    def write(columns):
        parquet.write_table(pyarrow.table(columns), tmp_path / "a.parquet")

    write({"clip": [b"x"], "text": ["a"]})
    with pytest.raises(ValueError, match="has the columns clip, text, and none of video, image and mp4"):
        read_entries(tmp_path)
    write({"video": [b"x"], "title": ["a"]})
    with pytest.raises(ValueError, match="no caption under one of caption, text, prompt"):
        read_entries(tmp_path)
    write({"video": [{"bytes": None, "path": "/elsewhere/a.mp4"}], "text": ["a"]})
    (entry,) = read_entries(tmp_path)
    with pytest.raises(UnreadableVideo, match="row 0 has no bytes under 'video'"):
        probe(tmp_path / entry.file)
    (tmp_path / "a.parquet").write_bytes(b"no parquet")
    with pytest.raises(ValueError, match="no readable file of parquet"):
        read_entries(tmp_path)
    (tmp_path / "a.parquet").rename(tmp_path / "a.arrow")
    with pytest.raises(ValueError, match="no readable stream of Arrow"):
        read_entries(tmp_path)
