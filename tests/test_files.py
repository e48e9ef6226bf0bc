"""Files on a network may fail for a moment; what cannot pass is told at once."""

import errno
import logging

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from opensora_accel import files
from opensora_accel.files import retried
from opensora_accel.weights import Stored


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr(files, "PAUSES_S", (0.0, 0.0))


def failing(errors):
    """A function that raises these, one at each call, and then gives 7."""
    left = list(errors)

    def work():
        if left:
            raise left.pop(0)
        return 7

    return work, left


def behind(cause):
    error = ValueError("cannot be decoded")
    error.__cause__ = cause
    return error


PASSING = [
    OSError(errno.EIO, "Input/output error"),
    OSError(errno.ESTALE, "Stale file handle"),
    SafetensorError("Error while serializing: I/O error: Input/output error (os error 5)"),
    behind(OSError(errno.EIO, "Input/output error")),
]
LASTING = [
    OSError(errno.ENOSPC, "No space left on device"),
    FileNotFoundError(errno.ENOENT, "No such file"),
    SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
    ValueError("is damaged"),
]


@pytest.mark.parametrize("error", PASSING)
def test_what_passes_is_tried_again_and_told(error, caplog):
    work, _ = failing([error, error])
    with caplog.at_level(logging.WARNING):
        assert retried(work, "reading a.mp4") == 7
    assert caplog.text.count("reading a.mp4 failed") == 2
    work, left = failing([error] * 4)
    with pytest.raises(type(error)):
        retried(work, "reading a.mp4")
    assert len(left) == 1, "three attempts and no more"


@pytest.mark.parametrize("error", LASTING)
def test_what_lasts_is_raised_at_once(error):
    work, left = failing([error, error])
    with pytest.raises(type(error)):
        retried(work, "reading a.mp4")
    assert len(left) == 1


def test_weights_are_read_again(tmp_path, monkeypatch):
    import safetensors

    save_file({"w": torch.arange(4.0)}, tmp_path / "w.safetensors")
    original, calls = safetensors.safe_open, []

    def shaky(*args, **options):
        calls.append(args)
        if len(calls) < 3:
            raise OSError(errno.ESTALE, "Stale file handle")
        return original(*args, **options)

    monkeypatch.setattr(safetensors, "safe_open", shaky)
    assert torch.equal(Stored(tmp_path / "w.safetensors", "w").read(torch.float32), torch.arange(4.0))
