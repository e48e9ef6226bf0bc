"""Tensors on disk: what is read is what was stored, whoever writes, dies or damages files beside it."""

import errno
import fcntl
import logging
import multiprocessing
import os
import random
import signal
import time

import pytest
import torch

from opensora_accel.training import disk_cache
from opensora_accel.training.cache_command import main
from opensora_accel.training.disk_cache import (
    DiskCache,
    code_version,
    entries,
    file_digest,
    remove_left,
    trim,
)
from tests.tiers import PROVE, some

KEY = {"what": "latents", "video": "ab" * 32, "start": 3}


def value_of(number, size=1000):
    return torch.randn(4, size, generator=torch.Generator().manual_seed(number))


def only_file(folder):
    (entry,) = entries(folder)
    return entry.path


@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3, 1, 5)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.uint8])
def test_what_is_read_is_what_was_stored(tmp_path, dtype, shape):
    cache, value = DiskCache(tmp_path / "new" / "folder"), torch.randn(shape).mul(50).to(dtype)
    assert cache.get(KEY) is None
    assert cache.put(KEY, value, "a clip")
    found = DiskCache(tmp_path / "new" / "folder").get(KEY)
    assert found.dtype == dtype and torch.equal(found, value)
    assert cache.get({**KEY, "start": 4}) is None
    assert (cache.counts.hits, cache.counts.misses, cache.counts.stored) == (0, 2, 1)
    path = only_file(cache.folder)
    assert path.parent.name == path.name[:2] and [*path.parent.iterdir()] == [path]
    content = path.read_bytes()
    path.unlink()
    assert cache.put(KEY, value, "a clip") and path.read_bytes() == content, "the same value is the same file"


def test_a_value_that_is_no_contiguous_piece_of_memory(tmp_path):
    cache, value = DiskCache(tmp_path), torch.randn(5, 7).T[::2]
    cache.put(KEY, value, "")
    assert torch.equal(cache.get(KEY), value)


def assert_recomputed(folder, caplog, told=True):
    """The damaged entry of KEY is a miss, told once, and whole after it has been stored again."""
    caplog.clear()
    cache = DiskCache(folder)
    assert cache.get(KEY) is None and cache.get(KEY) is None
    assert sum("is not what was stored there" in line for line in caplog.messages) == told
    assert cache.put(KEY, value_of(0, 30), "clip")
    assert torch.equal(cache.get(KEY), value_of(0, 30))


FLIPS = [*some(range(40), *range(4))]


@pytest.mark.parametrize("share", FLIPS)
def test_a_flipped_bit_is_never_read(tmp_path, caplog, share):
    """40 shares of all the bits of a file; a quarter of those in a run of `make test` that a share has."""
    DiskCache(tmp_path).put(KEY, value_of(0, 30), "clip")
    path = only_file(tmp_path)
    content = path.read_bytes()
    for bit in range(share, 8 * len(content), 40):
        damaged = bytearray(content)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        found = DiskCache(tmp_path).get(KEY)
        assert found is None, f"bit {bit}"
    assert_recomputed(tmp_path, caplog)


@pytest.mark.parametrize("way", ["empty", "torn", "zeros", "longer", "another entry", "another format"])
def test_a_torn_or_foreign_file_is_computed_again(tmp_path, caplog, way):
    from safetensors.torch import save

    DiskCache(tmp_path).put(KEY, value_of(0, 30), "clip")
    path = only_file(tmp_path)
    content = path.read_bytes()
    if way == "another entry":
        DiskCache(tmp_path / "other").put({**KEY, "start": 4}, value_of(1, 30), "clip")
        other = only_file(tmp_path / "other").read_bytes()
    path.write_bytes({
        "empty": lambda: b"",
        "torn": lambda: content[: len(content) // 2],
        "zeros": lambda: bytes(len(content)),
        "longer": lambda: content + b"\0",
        "another entry": lambda: other,
        "another format": lambda: save({"value": value_of(0, 30)}),
    }[way]())  # fmt: skip
    assert_recomputed(tmp_path, caplog)


@pytest.mark.parametrize("length", [*some(range(0, 800, 37), 0, 37)])
def test_a_file_cut_anywhere_is_never_read(tmp_path, length):
    DiskCache(tmp_path).put(KEY, value_of(0, 30), "clip")
    path = only_file(tmp_path)
    path.write_bytes(path.read_bytes()[:length])
    assert DiskCache(tmp_path).get(KEY) is None


@pytest.mark.parametrize("kind", ["folder", "pipe", "link to nothing"])
def test_what_is_no_file_is_no_entry(tmp_path, kind):
    DiskCache(tmp_path).put(KEY, value_of(0), "clip")
    path = only_file(tmp_path)
    path.unlink()
    {"folder": path.mkdir, "pipe": lambda: os.mkfifo(path), "link to nothing": lambda: path.symlink_to("no")}[
        kind
    ]()
    cache = DiskCache(tmp_path)
    assert cache.get(KEY) is None
    assert cache.put(KEY, value_of(0), "clip") == (kind != "folder")
    assert cache.put({**KEY, "start": 9}, value_of(0), "clip"), "the others are stored all the same"


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES])
def test_a_folder_that_takes_nothing_is_told_once(tmp_path, caplog, monkeypatch, number):
    cache = DiskCache(tmp_path)
    assert cache.put(KEY, value_of(0), "clip")

    def refuse(_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(disk_cache.os, "fsync", refuse)
    assert not any(cache.put({**KEY, "start": n}, value_of(n), "clip") for n in range(5, 9))
    (told,) = caplog.messages
    full = number in (errno.ENOSPC, errno.EDQUOT)
    assert os.strerror(number) in told and ("--keep" if full else "let it be writable") in told
    assert not list(tmp_path.rglob("*.partial")) and len(list(entries(tmp_path))) == 1
    assert torch.equal(cache.get(KEY), value_of(0)), "what is there is read on"


def held_partial(path, ready, go):
    with path.open("xb") as file:
        fcntl.lockf(file, fcntl.LOCK_EX)
        ready.set()
        go.wait(60)


def test_leftovers_of_killed_writers_go_and_those_of_living_ones_stay(tmp_path):
    cache = DiskCache(tmp_path)
    cache.put(KEY, value_of(0), "clip")
    entry = only_file(tmp_path)
    left, young, held = (entry.with_name(f".{entry.name}.{name}.partial") for name in ("old", "new", "held"))
    mine = entry.with_name("notes.partial")
    context = multiprocessing.get_context("fork")
    ready, go = context.Event(), context.Event()
    writer = context.Process(target=held_partial, args=(held, ready, go))
    writer.start()
    try:
        assert ready.wait(60)
        for path in (left, young, mine):
            path.touch()
        for path in (left, held, mine):
            os.utime(path, (0, 0))
        # Whoever is the first to write there in its process tidies up.
        DiskCache(tmp_path).put({**KEY, "start": 4}, value_of(0), "clip")
        remove_left(tmp_path)  # what lies in other sub-folders
        assert not left.exists() and young.exists() and held.exists() and mine.exists()
    finally:
        go.set()
        writer.join()
    assert remove_left(tmp_path) == 1 and not held.exists()


NUM_KEYS = 6


def write_for_ever(folder, seed):
    rng = random.Random(seed)
    while True:
        number = rng.randrange(NUM_KEYS)
        cache = DiskCache(folder)
        found = cache.get({"number": number})
        if found is not None and not torch.equal(found, value_of(number, 20_000)):
            (folder / "wrong").touch()
        if rng.random() < 0.5:
            for each in entries(folder):  # so that there is always something to write
                each.path.unlink(missing_ok=True)
        cache.put({"number": number}, value_of(number, 20_000), "")


@pytest.mark.parametrize("rounds", [3, pytest.param(60, marks=PROVE)])
def test_killed_writers_leave_nothing_torn(tmp_path, monkeypatch, rounds):
    """Four processes write the same files, and are killed at random moments."""
    context, rng, left = multiprocessing.get_context("fork"), random.Random(rounds), 0
    for count in range(rounds):
        writers = [
            context.Process(target=write_for_ever, args=(tmp_path, 4 * count + n), daemon=True)
            for n in range(4)
        ]
        for writer in writers:
            writer.start()
        for writer in writers:
            time.sleep(rng.uniform(0, 0.2))
            os.kill(writer.pid, signal.SIGKILL)
        for writer in writers:
            writer.join()
        left += len(list(tmp_path.rglob("*.partial")))
        cache = DiskCache(tmp_path)
        found = [cache.get({"number": number}) for number in range(NUM_KEYS)]
        there = len(list(entries(tmp_path)))
        assert sum(each is not None for each in found) == there, "every file that has its name is whole"
        assert all(each is None or torch.equal(each, value_of(n, 20_000)) for n, each in enumerate(found))
        monkeypatch.setattr(disk_cache, "_LEFT_AFTER_S", 0.0)
        remove_left(tmp_path)
        assert not list(tmp_path.rglob("*.partial"))
    assert not (tmp_path / "wrong").exists()
    print(f"{4 * rounds} writers killed, {left} files left without a name, none of them read")
    assert rounds < 10 or left > 0, "no writer was killed while it wrote"


# What goes into keys


def rewrite_in_place(path, content):
    """Keeps size, time of change and inode."""
    before = path.stat()
    with path.open("r+b") as file:
        file.write(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (path.stat().st_mtime_ns, path.stat().st_size) == (before.st_mtime_ns, before.st_size)


@pytest.mark.parametrize("settled", [False, True])
def test_a_file_that_changes_under_the_same_size_and_time_has_another_digest(tmp_path, monkeypatch, settled):
    path = tmp_path / "clip.mp4"
    path.write_bytes(b"a" * 1000)
    if settled:
        monkeypatch.setattr(disk_cache, "_SETTLED_AFTER_S", -1e9)
    seen = {file_digest(path)}
    for count in range(20):
        if settled:
            time.sleep(0.02)  # the clock of the file system moves on; `_SETTLED_AFTER_S` waits for it
        rewrite_in_place(path, bytes([count]) * 1000)
        seen.add(file_digest(path))
    assert len(seen) == 21


def test_a_file_that_lies_still_is_read_once(tmp_path, monkeypatch):
    path, reads, read = tmp_path / "clip.mp4", [], disk_cache.sha256_of
    path.write_bytes(b"a")
    monkeypatch.setattr(
        disk_cache, "sha256_of", lambda path, opened: reads.append(path) or read(path, opened)
    )
    assert file_digest(path) == file_digest(path) and len(reads) == 2, "it was written just now"
    later = time.time() + 100
    monkeypatch.setattr(disk_cache.time, "time", lambda: later)
    assert file_digest(path) == file_digest(path) and len(reads) == 3
    assert file_digest(tmp_path / "none") is None and file_digest(tmp_path) is None


def test_the_version_of_code_is_what_it_does(tmp_path):
    from types import ModuleType

    def version(source):
        path = tmp_path / "module.py"
        path.write_text(source)
        module = ModuleType("module")
        module.__file__ = str(path)
        return code_version([module])

    plain = version("LIMIT = 3\ndef f(x):\n    return x\n")
    assert (
        version('"""Words."""\nLIMIT = 3  # more\n\n\ndef f( x ):\n    """Its x."""\n    return x\n') == plain
    )
    assert version("LIMIT = 4\ndef f(x):\n    return x\n") != plain
    assert version("LIMIT = 3\ndef f(x):\n    return 'x'\n") != plain


# The command


def filled(folder, number=5):
    cache = DiskCache(folder)
    for count in range(number):
        key = {
            "what": "latents",
            "start": count,
            "encoder": {"class": "AutoencoderKLWan", "files": {"a": "3f"}},
        }
        cache.put(key, value_of(count), "clip")
    for count, entry in enumerate(sorted(entries(folder), key=lambda entry: entry.path)):
        os.utime(entry.path, (1e9 + count, 1e9 + count))
    cache.note_run({"output": "/runs/a", "hits": 1, "misses": 5, "stored": 5})
    return sorted(entry.path for entry in entries(folder))


def test_trimming_removes_what_was_used_least_recently(tmp_path, capsys):
    paths = filled(tmp_path)
    (tmp_path / "mine.safetensors").write_bytes(bytes(10**6))
    size = paths[0].stat().st_size
    key = disk_cache.describe(paths[0])
    os.utime(paths[1], (1e9 - 5, 1e9 - 5))
    assert torch.is_tensor(DiskCache(tmp_path).get(key)), "which marks it as used"
    assert main([str(tmp_path), "--keep", f"{2.5 * size / 1000}KB"]) == 0
    assert sorted(entry.path for entry in entries(tmp_path)) == sorted([paths[0], paths[4]])
    assert "removed 3 entries" in capsys.readouterr().out and (tmp_path / "mine.safetensors").exists()
    assert trim(tmp_path, 10**9) == []
    assert main([str(tmp_path), "--keep", "0"]) == 0 and not list(entries(tmp_path))


def test_the_command_tells_what_is_there(tmp_path, capsys):
    paths = filled(tmp_path)
    paths[0].write_bytes(b"{}")
    assert main([str(tmp_path)]) == 0
    told = capsys.readouterr().out
    assert "5 entries" in told and "4 latents of AutoencoderKLWan" in told and "1 damaged" in told
    assert "1 found, 5 computed, 5 stored  /runs/a" in told


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["/nowhere"], "no folder /nowhere"),
        (["FOLDER", "--keep", "much"], r"--keep is a size, as 200GB.*got 'much'"),
        (["FOLDER", "--keep=-1GB"], "--keep is a size"),
    ],
)
def test_a_wrong_command_is_told(tmp_path, arguments, told):
    with pytest.raises((ValueError, OSError), match=told):
        main([argument.replace("FOLDER", str(tmp_path)) for argument in arguments])


@pytest.fixture(autouse=True)
def warnings_are_seen(caplog):
    caplog.set_level(logging.WARNING)
