"""Which checkpoint a run goes on from: found, verified and agreed on by all ranks before anything is loaded.

Ranks on different machines may see different folders: a listing on a network file system can be old. Each rank
looks for itself, tells the others what it sees, and all of them take the same checkpoint or fail together.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from opensora_accel.training.output import CHECKPOINTS
from opensora_accel.training.state import digest, list_checkpoints, read_record
from opensora_accel.training.together import from_all_ranks, is_first_rank

NEWEST = "newest"
"""The newest checkpoint of the output; an error where there is none, or it is damaged."""
AUTO = "auto"
"""The newest whole checkpoint of the output; damaged ones are told and skipped, and without one a run starts."""


def find_checkpoint(resume: str, output: Path) -> tuple[Path, dict[str, Any]] | None:
    """The checkpoint to go on from and its record, the same on all ranks; None where `resume` is "auto" and none is.

    Args:
        resume: a checkpoint folder, "newest" or "auto".
        output: of the run whose newest checkpoint is meant.

    Communication: two object all-gathers, and one for each checkpoint that is looked at.

    Raises, on all ranks:
        FileNotFoundError: there is no such checkpoint.
        ValueError: a checkpoint is damaged (not with "auto"), or ranks see different ones.
    """
    if resume not in (NEWEST, AUTO):
        checkpoint = Path(resume)
        return checkpoint, _agreed_record(checkpoint)
    folder = output / CHECKPOINTS
    listings = from_all_ranks([path.name for path in list_checkpoints(folder)])
    seen_by_all = [name for name in listings[0] if all(name in names for names in listings)]
    seen_by_some = sorted({name for names in listings for name in names} - set(seen_by_all))
    if seen_by_some:
        lacking = {
            name: [r for r, names in enumerate(listings) if name not in names] for name in seen_by_some
        }
        told = "; ".join(
            f"{name} is not seen by rank {', '.join(map(str, r))}" for name, r in lacking.items()
        )
        if not seen_by_all:
            raise ValueError(
                f"no checkpoint in {folder} is seen by all ranks ({told}): --output must lie on a file system that all "
                "machines share; if it does, wait a minute for its listing and start again"
            )
        _tell(f"not all ranks see the same checkpoints in {folder}: {told}")
    for name in reversed(seen_by_all):
        try:
            return folder / name, _agreed_record(folder / name)
        except ValueError as error:
            if resume != AUTO:
                raise
            _tell(f"skipping a checkpoint: {error}")
    if resume == AUTO:
        return None
    raise FileNotFoundError(
        f"there is no checkpoint in {output}; start without --resume (or with --resume auto), or name a checkpoint or "
        "another --output"
    )


def _agreed_record(checkpoint: Path) -> dict[str, Any]:
    """The checkpoint's record, where every rank finds it whole and with the same manifest."""
    record: dict[str, Any] = {}
    error: ValueError | OSError | None = None
    seen = ""
    try:
        record = read_record(checkpoint)
        seen = digest(checkpoint)
    except (ValueError, OSError) as failure:
        error, seen = failure, f"error: {failure}"
    views = from_all_ranks(seen)
    if len(set(views)) == 1:
        if error is not None:
            raise error
        return record
    failures = [f"rank {rank}: {view}" for rank, view in enumerate(views) if view.startswith("error: ")]
    found = failures or [f"rank {rank}: manifest {view[:12]}" for rank, view in enumerate(views)]
    raise ValueError(
        f"the ranks see different files in {checkpoint} ({'; '.join(found[:4])}): --output must lie on a file system "
        "that all machines share; if it does, wait a minute for its listing and start again"
    )


def run_of(checkpoint: Path) -> Path:
    """The output folder of the run that a checkpoint lies in: the one above its folder `checkpoints`.

    The path is taken as it was given where it says so, and else where its links lead: a checkpoint of a run may be a
    link to an archive, and a link `latest` may lie anywhere.

    Raises ValueError for a checkpoint that lies in no run.
    """
    for path in (checkpoint, Path(os.path.abspath(checkpoint)), checkpoint.resolve()):
        if path.parent.name == CHECKPOINTS:
            return path.parent.parent
    raise ValueError(
        f"the checkpoint {checkpoint} lies in no run (no folder {CHECKPOINTS} is above it); say with --output where to "
        "go on"
    )


def _tell(message: str) -> None:
    if is_first_rank():
        print(message, flush=True)
