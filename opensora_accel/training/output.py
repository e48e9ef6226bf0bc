"""The output folder of a run: locked while a run writes to it, and never written to where it is somebody else's.

A run writes the names of `WRITTEN` and no others. A folder that has some of them is a run if its config.json is
that of a run; otherwise it is the user's, a model folder of diffusers for example, and is refused. A new run moves
what an earlier one wrote into `earlier_N` inside the folder: the folder itself may be a mount point, and may hold
files of the user, which stay where they are.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import socket
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from opensora_accel.documents import read_text
from opensora_accel.files import replacing
from opensora_accel.profiler import CONFIG, METRICS, PAGE, SAMPLES
from opensora_accel.training import saved_state
from opensora_accel.training.config import TrainConfig
from opensora_accel.training.ranks import from_first_rank

logger = logging.getLogger(__name__)

TENSORBOARD = "tensorboard"
OFFLOAD = "offload.json"
LORA, COMFYUI = "lora", "comfyui.safetensors"
# That of the second of two experts beside it.
LORAS = (LORA, "lora_2")
PROFILE = "profile"
WRITTEN = (CONFIG, METRICS, TENSORBOARD, OFFLOAD, saved_state.FOLDER, SAMPLES, *LORAS, PROFILE, PAGE)
_LOCK = ".opensora-accel.lock"


def write_text(path: Path, text: str) -> None:
    """Writes the whole text, or leaves the file as it was."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


@contextmanager
def claim(config: TrainConfig) -> Iterator[None]:
    """Within it no other run can write to `config.output`; every rank enters, rank 0 holds the lock.

    The folder is made where there is none, and removed again where nothing was written to it.

    Raises:
        ValueError, OSError: on all ranks, for a folder that another run uses, that cannot be written to, that holds
            files of somebody else under the names that a run writes, or whose files are links.
    """
    held: list[IO[str]] = []
    output = Path(config.output)
    # Only what is made here is removed at the end.
    made = [folder for folder in (output, *output.parents) if not folder.exists()]

    def enter() -> None:
        if os.path.lexists(output) and not output.is_dir():
            what = "a link to nothing" if output.is_symlink() else "a file"
            raise ValueError(f"--output {output} is {what}; name a folder")
        _refuse_foreign(output)
        output.mkdir(parents=True, exist_ok=True)
        held.append(_lock(output))

    try:
        from_first_rank(enter)
        yield
    finally:
        for lock in held:
            (output / _LOCK).unlink(missing_ok=True)
            lock.close()
            for folder in made:
                with suppress(OSError):  # not empty: the run's, or somebody else's by now
                    folder.rmdir()


def _refuse_foreign(output: Path) -> None:
    present = [name for name in WRITTEN if os.path.lexists(output / name)]
    _refuse_links([output / CONFIG])  # through which nobody looks whether it is a run's
    if present and not _is_run(output):
        raise ValueError(
            f"--output {output} has {', '.join(present)}, which no run of opensora-accel wrote (it has no config.json "
            "of a run); name another folder, or move them out of it"
        )
    # A run that was received from somebody else could lead our writing anywhere.
    _refuse_links(output / name for name in present)
    for name in (TENSORBOARD, SAMPLES, LORA):
        _refuse_links((output / name).rglob("*"))


def _refuse_links(places: Iterable[Path]) -> None:
    for place in places:
        if place.is_symlink():
            raise ValueError(
                f"{place} is a link (to {os.readlink(place)}), and a run writes through none; put the file or folder "
                "itself there, or name another --output"
            )


def _is_run(folder: Path) -> bool:
    """Whether its config.json is one that a run wrote; without config.json, whether it has a saved state."""
    if not os.path.lexists(folder / CONFIG):
        return bool(saved_state.list_saved_states(folder / saved_state.FOLDER))
    try:
        values = json.loads(read_text(folder / CONFIG, inside=folder))
    except (OSError, ValueError, RecursionError):
        return False
    # A model folder of diffusers has a config.json too, without these.
    return isinstance(values, dict) and {"output", "steps", "data", "optim", "plan"} <= set(values)


def _lock(output: Path) -> IO[str]:
    """The open file that holds the lock. The system frees it however this process ends."""
    path = output / _LOCK
    while True:
        # A link in the place of the lock would have us write to whatever it points at.
        opened = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        file = os.fdopen(opened, "r+", encoding="utf-8")
        try:
            # A record lock, not flock(): decoding processes that outlive a killed rank would inherit the latter.
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError) as error:
            holder = file.read().strip() or "unknown"
            file.close()
            raise ValueError(
                f"--output {output} is in use by another run ({holder}); wait for its end or stop it, or name another "
                "--output"
            ) from error
        except OSError as error:
            logger.warning(
                "%s has no locks (%s): nothing stops a second run from writing to it", output, error
            )
            return file
        # The run before may have removed the file between our opening and locking it.
        if path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat()):
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
            file.flush()
            return file
        file.close()  # the run before ended just now, and took the file with it


def move_aside(config: TrainConfig) -> None:
    """Moves what an earlier run left in the output into `earlier_N`, so that nothing of it is lost."""
    output = Path(config.output)
    names = [name for name in WRITTEN if os.path.lexists(output / name)]
    if not names:
        return
    # The first name that is free, also where somebody has removed one in between.
    number = 1
    while os.path.lexists(target := output / f"earlier_{number}"):
        number += 1
    target.mkdir()
    for name in names:
        (output / name).rename(target / name)
    kept = f"it is in {target} now (--resume would have gone on with it)"
    print(f"{output} had an earlier run; {kept}", flush=True)


def check_inputs(config: TrainConfig) -> None:
    """Checks that `move_aside` would not move what a new run reads.

    Raises:
        ValueError: its videos, or a model that it starts from, lie in what an earlier run wrote.
    """
    output = Path(config.output).resolve()
    written = [output / name for name in WRITTEN if (output / name).exists()]
    folders = [("data.folders", name) for name in config.data.folders]
    inputs = {
        "data.folder": config.data.folder,
        "model.path": config.model.path,
        "model.path_2": config.model.path_2,
        "lora.path": config.lora.path,
        "lora.path_2": config.lora.path_2,
        "codec.path": config.codec.path,
        "text.path": config.text.path,
        "text.path_2": config.text.path_2,
        "image.path": config.image.path,
        "cache_folder": config.cache_folder,
    }
    for option, path in [*folders, *inputs.items()]:
        if path and any(Path(path).resolve().is_relative_to(place.resolve()) for place in written):
            raise ValueError(
                f"--{option} {path} lies in what an earlier run wrote to --output {config.output}, and would be moved "
                "with it; a new run needs another --output (or --resume goes on with the earlier one)"
            )
