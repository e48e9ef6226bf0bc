"""The folders of saved states: their names, their manifests, which one a run goes on from, which ones are removed.

`checkpoints/step_000300` is a saved state once it has a manifest, which lists the SHA-256 sum of every file:

    manifest.json
    state.json                                              step, configuration, data position, plan
    optimizer.safetensors                                   or optimizer-00001-of-00003.safetensors, …
    transformer/config.json                                 a model folder of diffusers
    transformer/diffusion_pytorch_model.safetensors         or …-00001-of-00003.safetensors, and an index
    transformer_ema/…                                       the same, averaged
    tokenizer.json

A run of two experts has optimizer_2, transformer_2 and transformer_2_ema beside them.

Ranks on different machines may see different folders, because a listing on a network file system can be old. Each rank
looks for itself, shows the others what it sees, and all of them take the same saved state or fail together.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Annotated, Any

from opensora_accel.communications import gather_objects
from opensora_accel.documents import Between, Count, Finite, parse, read_text
from opensora_accel.files import sha256_of
from opensora_accel.training.ranks import is_first_rank

logger = logging.getLogger(__name__)

# Name of the folder with the saved states of a run.
FOLDER = "checkpoints"
# The newest saved state of the output; an error where there is none, or it is damaged.
NEWEST = "newest"
# The newest whole saved state of the output; damaged ones are reported and skipped, and without one a run starts.
AUTO = "auto"

MANIFEST = "manifest.json"
STATE = "state.json"
TOKENIZER = "tokenizer.json"
CONFIG = "config.json"
# Tensors lie in STEM.safetensors, or in several files of that name with numbers.
WEIGHTS_STEM, OPTIMIZER_STEM = "diffusion_pytorch_model", "optimizer"
MODEL, AVERAGED = "transformer", "transformer_ema"
# Of the second of two experts.
OPTIMIZER_2_STEM, MODEL_2, AVERAGED_2 = "optimizer_2", "transformer_2", "transformer_2_ema"
MODEL_WEIGHTS = f"{MODEL}/{WEIGHTS_STEM}.safetensors"
PARTIAL = ".partial"
_STEP = re.compile(r"step_\d+")
_TAKE_ANOTHER = "resume from another saved state of this run"
_SHARE_THE_FOLDER = (
    "--output must lie on a file system that all machines share; if it does, wait a minute for its listing and "
    "start again"
)


@dataclass(frozen=True)
class DataPosition:
    """Where a run is in its stream of samples, as `VideoLoader.state_dict` gives it."""

    position: Count
    order: str
    excluded: list[str]
    quarantined: dict[str, str]


@dataclass(frozen=True, kw_only=True)
class ModelRecord:
    """What a saved state says of one model's training."""

    ema_updates: Count
    model_class: str = ""
    norms: list[Annotated[float, Between(0.0, 1e38)]] = field(default_factory=list)
    optimizer: list[dict[str, int | Finite]] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Record(ModelRecord):
    """What it says of its run, and of the first model. Sums vouch for the bytes of a file, not for who wrote it."""

    step: Annotated[int, Between(0, 1 << 53)]
    config: dict[str, Any]  # `config_from_dict` looks at the values
    data: DataPosition
    run: str | None = None
    # Of the second of two experts.
    second: ModelRecord | None = None

    @property
    def models(self) -> tuple[ModelRecord, ...]:
        return (self,) if self.second is None else (self, self.second)


def remove_partial(folder: Path) -> None:
    """Removes what a save left that did not end; a link of that name is removed and not followed."""
    for path in folder.glob(f"step_*{PARTIAL}"):
        if _STEP.fullmatch(path.name.removesuffix(PARTIAL)):
            path.unlink() if path.is_symlink() else shutil.rmtree(path)


def remove_old(newest: Path, run: Any, keep: int) -> None:
    """Removes all but the newest `keep` saved states beside `newest` that this run wrote, by its id.

    Links stay: what they lead to was put elsewhere to be kept. Files that the manifest does not list stay too. What
    cannot be removed is reported, and never ends a run whose newest saved state is whole.
    """
    mine = []
    for path in list_saved_states(newest.parent):
        try:
            sums = read_manifest(path)
            writer = _read_state(path).run
        except (OSError, ValueError):
            continue  # damaged, or somebody else's
        if run is not None and writer == run and path != newest and not path.is_symlink():
            mine.append((path, sums))
    for path, sums in mine[: len(mine) + 1 - keep]:
        try:
            # These two last: by them, a removal that was killed is found and ended by the next one.
            for name in [*(name for name in sums if name != STATE), STATE, MANIFEST]:
                (path / name).unlink(missing_ok=True)
            for place in [*{(path / name).parent for name in sums} - {path}, path]:
                if place.is_dir() and not any(place.iterdir()):
                    place.rmdir()
        except OSError as error:
            logger.warning("the old saved state %s could not be removed: %s", path, error)


def list_saved_states(folder: Path) -> list[Path]:
    """The whole saved states in a folder, by step."""
    folders = [path.parent for path in folder.glob(f"step_*/{MANIFEST}") if _STEP.fullmatch(path.parent.name)]
    return sorted(folders, key=_step)


def _step(folder: Path) -> int:
    return int(folder.name.removeprefix("step_"))


def set_newer_aside(folder: Path, step: int) -> list[Path]:
    """Renames the saved states after `step`, which a run that goes on from there will write again."""
    return [set_aside(path) for path in list_saved_states(folder) if _step(path) > step]


def set_aside(path: Path) -> Path:
    """Gives whatever is there, a link too, another name, under which nothing touches it; the name it has now."""
    if not os.path.lexists(path):
        return path
    number = 1
    while os.path.lexists(target := path.with_name(f"{path.name}.kept_{number}")):
        number += 1
    return path.rename(target)


def read_manifest(folder: Path) -> dict[str, str]:
    """The SHA-256 sum of every file of a saved state.

    Raises:
        ValueError: the manifest is damaged, or it leaves out a file that a saved state is read from, which would be
            loaded unverified.
    """
    path = folder / MANIFEST
    try:
        sums = json.loads(read_text(path, inside=path.parent))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged ({error}); {_TAKE_ANOTHER}") from error
    is_sum = re.compile("[0-9a-f]{64}").fullmatch
    if not isinstance(sums, dict) or not all(
        isinstance(text, str) and is_sum(text) for text in sums.values()
    ):
        raise ValueError(f"{path} is damaged (it is no table of SHA-256 sums); {_TAKE_ANOTHER}")
    for name in sums:
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise ValueError(f"{path} lists {name!r}, which is outside of the saved state; {_TAKE_ANOTHER}")
    # Whatever a saved state is read from: without it, or with a file that nobody vouches for, it is none.
    stems = [(OPTIMIZER_STEM, MODEL)]
    if any(listed.startswith((OPTIMIZER_2_STEM, f"{MODEL_2}/")) for listed in sums):
        stems.append((OPTIMIZER_2_STEM, MODEL_2))
    needed = {STATE: STATE}
    for optimizer, model in stems:
        needed |= {
            # optimizer.safetensors or one of several, and not one of optimizer_2.
            f"{optimizer}.safetensors": rf"{optimizer}[.-]",
            f"{model}/{CONFIG}": f"{model}/{CONFIG}",
            f"{model}/{WEIGHTS_STEM}.safetensors": f"{model}/{WEIGHTS_STEM}",
        }
    unlisted = [name for name, start in needed.items() if not any(re.match(start, listed) for listed in sums)]
    read = [folder / TOKENIZER, *folder.glob(f"{OPTIMIZER_STEM}*.safetensors")]
    for model in (MODEL, AVERAGED, MODEL_2, AVERAGED_2):
        read += [folder / model / CONFIG, *folder.glob(f"{model}/{WEIGHTS_STEM}*")]
    present = [path.relative_to(folder).as_posix() for path in read if os.path.lexists(path)]
    unlisted += [name for name in present if name not in sums and name not in unlisted]
    if unlisted:
        raise ValueError(
            f"{path} does not list {', '.join(unlisted)}: whether they are as they were written cannot be checked; "
            f"{_TAKE_ANOTHER}"
        )
    return sums


def read_record(folder: Path) -> Record:
    """The record of a saved state whose files are all as they were written.

    Raises:
        FileNotFoundError: the folder is no saved state.
        ValueError: the manifest is damaged or leaves files out, a file is missing or was changed, or a value is none
            that a run writes.
    """
    if not (folder / MANIFEST).is_file():
        whole = list_saved_states(folder) or list_saved_states(folder.parent)
        hint = f"; there are {', '.join(map(str, whole))}" if whole else ""
        raise FileNotFoundError(f"{folder} is no saved state (it has no {MANIFEST}){hint}")
    for name, expected in read_manifest(folder).items():
        path = folder / name
        if not path.is_file() or sha256_of(path) != expected:
            what = "was changed since it was written" if path.is_file() else "is missing"
            raise ValueError(f"{path} {what}; {_TAKE_ANOTHER}")
    return _read_state(folder)


def _read_state(folder: Path) -> Record:
    path = folder / STATE
    text = read_text(path, inside=folder)
    try:
        record: Record = parse(text, Record, "")
    except ValueError as error:
        words = str(error).removeprefix(": ")
        raise ValueError(f"{path} is no record of a saved state: {words}; {_TAKE_ANOTHER}") from error
    return record


def find_saved_state(resume: str, output: Path) -> tuple[Path, Record] | None:
    """The saved state to go on from and its record, the same on all ranks; None where `resume` is "auto" and none is.

    Args:
        resume: a folder, "newest" or "auto".
        output: the run whose newest saved state is meant.

    Communication: two object all-gathers, and one for each saved state that is looked at.

    Raises:
        FileNotFoundError: on all ranks, where there is no such saved state.
        ValueError: on all ranks, where one is damaged (not with "auto"), or where ranks see different ones.
    """
    if resume not in (NEWEST, AUTO):
        return Path(resume), _agreed_record(Path(resume))
    folder = output / FOLDER
    listings = gather_objects([path.name for path in list_saved_states(folder)])
    # The newest that every rank sees: a rank whose listing is old must not go on from another one.
    seen_by_all = [name for name in listings[0] if all(name in names for names in listings)]
    missing = []
    for name in sorted({name for names in listings for name in names} - set(seen_by_all)):
        blind = ", ".join(str(rank) for rank, names in enumerate(listings) if name not in names)
        missing.append(f"{name} is not seen by rank {blind}")
    if missing and not seen_by_all:
        raise ValueError(
            f"no saved state in {folder} is seen by all ranks ({'; '.join(missing)}): {_SHARE_THE_FOLDER}"
        )
    if missing and is_first_rank():
        print(f"not all ranks see the same saved states in {folder}: {'; '.join(missing)}", flush=True)
    for name in reversed(seen_by_all):
        try:
            return folder / name, _agreed_record(folder / name)
        except ValueError as error:
            if resume != AUTO:
                raise
            if is_first_rank():
                print(f"skipping a saved state: {error}", flush=True)
    if resume == AUTO:
        return None
    raise FileNotFoundError(
        f"there is no saved state in {output}; start without --resume (or with --resume auto), or name a saved state "
        "or another --output"
    )


def _agreed_record(folder: Path) -> Record:
    """The record of a saved state that every rank finds whole, and with the same manifest."""
    record: Record | None = None
    error: ValueError | OSError | None = None
    try:
        record = read_record(folder)
        seen = f"manifest {sha256_of(folder / MANIFEST)}"
    except (ValueError, OSError) as failure:
        error, seen = failure, f"error: {failure}"
    # Every rank shares what it found before any of them raises, so that all raise together.
    views = gather_objects(seen)
    if len(set(views)) == 1:
        if record is None:
            assert error is not None
            raise error
        return record
    failed = [f"rank {rank}: {view}" for rank, view in enumerate(views) if view.startswith("error: ")]
    views_text = failed or [f"rank {rank}: {view[:21]}" for rank, view in enumerate(views)]
    raise ValueError(
        f"the ranks see different files in {folder} ({'; '.join(views_text[:4])}): {_SHARE_THE_FOLDER}"
    )


def run_of(folder: Path) -> Path:
    """The output folder of the run that a saved state lies in: the one above its folder `checkpoints`.

    The path is taken as it was given where it says so, and else where its links lead: a saved state of a run may be a
    link to an archive, and a link `latest` may lie anywhere.

    Raises:
        ValueError: the saved state lies in no run.
    """
    for path in (folder, Path(os.path.abspath(folder)), folder.resolve()):
        if path.parent.name == FOLDER:
            return path.parent.parent
    raise ValueError(
        f"the saved state {folder} lies in no run (no folder {FOLDER} is above it); say with --output where to go on"
    )
