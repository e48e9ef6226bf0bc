"""Files and captions in the forms that people have them in give one list, or say what is wrong with them."""

import csv
import json
import re
import shutil

import pytest

from opensora_accel import Plan
from opensora_accel.training.entries import read_entries
from opensora_accel.training.tiny_run import write_clips
from tests.tiers import PROVE
from tests.training.runs import losses, tiny_config

CAPTIONS = {"a.mp4": "a rabbit, resting", "birds/b.mov": 'two "birds"', "birds/c.png": "", "d.webm": "Übung"}


def write_rows(path, columns, rows, **options):
    with path.open("w", newline="", encoding="utf-8", **options) as file:
        csv.writer(file).writerows([columns, *rows])


def write_lines(folder, captions, file="file", caption="caption"):
    lines = (json.dumps({file: name, caption: text}) for name, text in captions.items())
    (folder / "metadata.jsonl").write_text("\n".join(lines), encoding="utf-8")


def write_objects(folder, captions):
    """As VideoX-Fun has them, with whole paths."""
    records = [
        {"file_path": str(folder / name), "text": text, "type": "video"} for name, text in captions.items()
    ]
    (folder / "metadata.json").write_text(json.dumps(records), encoding="utf-8")


def write_beside(folder, captions):
    for number, (name, text) in enumerate(captions.items()):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).touch()
        if number % 2:
            (folder / name).with_suffix(".json").write_text(json.dumps({"prompt": text}), encoding="utf-8")
        else:
            (folder / name).with_suffix(".txt").write_text(f"{text}\n", encoding="utf-8-sig")
    (folder / "readme.md").touch()
    (folder / ".cache").mkdir()
    (folder / ".cache" / "e.mp4").touch()


FORMS = {
    "our lines": write_lines,
    "lines of Hugging Face": lambda folder, captions: write_lines(folder, captions, "file_name", "text"),
    "lines of musubi-tuner": lambda folder, captions: write_lines(folder, captions, "video_path"),
    "table of DiffSynth-Studio": lambda folder, captions: write_rows(
        folder / "metadata.csv", ["video", "prompt"], captions.items()
    ),
    "table of Open-Sora": lambda folder, captions: write_rows(
        folder / "metadata.csv",
        ["path", "text", "num_frames"],
        [(folder / name, text, 9) for name, text in captions.items()],
    ),
    "list of VideoX-Fun": write_objects,
    "captions beside": write_beside,
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_names_the_same_files(tmp_path, form):
    FORMS[form](tmp_path, CAPTIONS)
    assert {entry.file: entry.caption for entry in read_entries(tmp_path)} == CAPTIONS
    assert [entry.file for entry in read_entries(tmp_path)] == list(CAPTIONS)


@pytest.mark.parametrize("form", [*FORMS][-1:] + [pytest.param(form, marks=PROVE) for form in [*FORMS][1:-1]])
def test_a_run_has_the_same_losses_in_every_form(ranks, tmp_path, form):
    folders = [tmp_path / name for name in ("lines", "form")]
    files = write_clips(tmp_path / "clips")
    captions = {entry.file: entry.caption for entry in read_entries(files)}
    (files / "metadata.jsonl").unlink()
    found = []
    for folder, write in zip(folders, (write_lines, FORMS[form]), strict=True):
        folder.mkdir()
        write(folder, captions)
        for name in captions:
            shutil.copy(files / name, folder / name)
        found.append(ranks(2, losses, tiny_config(folder, tmp_path / "run", Plan(ulysses=2))))
    assert found[0] == found[1]


def wrong(name, content):
    """A folder with one list."""
    return lambda folder: (folder / name).write_bytes(content)


def table(content):
    return wrong("metadata.csv", content)


def without_captions(folder):
    for number in range(10):
        (folder / f"{number}.mp4").touch()
    (folder / "0.txt").touch()


def with_bad_caption(name, content):
    def write(folder):
        (folder / "a.mp4").touch()
        (folder / name).write_bytes(content)

    return write


def two_lists(folder):
    (folder / "metadata.jsonl").touch()
    (folder / "metadata.csv").touch()


def below(folder):
    (folder / "train").mkdir()
    write_lines(folder / "train", CAPTIONS)


WRONG = {
    "two lists": (two_lists, r"has metadata\.jsonl and metadata\.csv, .*; leave one of them"),
    "a list below": (below, r"there is no list.*; .*train has one; point --data\.folder at"),
    "no captions": (without_captions, r"9 of 10 videos .* have no caption .*1\.mp4, .*, …\); write 1\.txt"),
    "a caption that is no text": (with_bad_caption("a.txt", b"\xff\xfe\xfa"), r"a\.txt: is not UTF-8"),
    "a caption that is no JSON": (with_bad_caption("a.json", b"{"), r"a\.json: is not JSON"),
    "JSON without a caption": (with_bad_caption("a.json", b"[3]"), r"a\.json: needs a text under one of caption"),
    "a list that is none": (wrong("metadata.json", b'{"file": "a.mp4"}'), "is a JSON dict, not a list"),
    "a list that is no JSON": (wrong("metadata.json", b"["), r"metadata\.json: is not JSON"),
    "a list of texts": (wrong("metadata.json", b'["a.mp4"]'), "entry 1: is a JSON str, not an object"),
    "other columns": (table(b"clip,prompt\na.mp4,a\n"), r"metadata\.csv:2: needs a text under 'file' .*video"),
    "no caption in a row": (table(b"video,prompt\na.mp4\n"), r"metadata\.csv:2: needs a text under 'caption'"),
    "no file in a row": (table(b"video,prompt\n,a\n"), r"metadata\.csv:2: needs a text under 'file'"),
    "a comma": (table(b"video,prompt\na.mp4,a, b\n"), r"metadata\.csv:2: has more values .* into quotes"),
    "no table": (table(b"video,prompt\n\xff,a\n"), r"metadata\.csv: is not a table .* UTF-8"),
    "an empty table": (table(b""), r"metadata\.csv names no video"),
    "a file elsewhere": (table(b"video,prompt\n/elsewhere/a.mp4,a\n"), "must lie inside the folder"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_folder_that_is_wrong_says_what_is(tmp_path, name):
    write, message = WRONG[name]
    write(tmp_path)
    with pytest.raises((ValueError, FileNotFoundError)) as raised:
        read_entries(tmp_path)
    assert re.search(message, str(raised.value)), raised.value
