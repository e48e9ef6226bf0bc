"""`opensora-accel train`: from the command line to a run, with every error that a user can make said in one line."""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from opensora_accel.training.config import TrainConfig, config_from_dict, differences, load_config

_SHOWN_STEPS = 20


def is_first_rank() -> bool:
    """Before torch.distributed has started, too."""
    return os.environ.get("RANK", "0") == "0"


def parse(arguments: Sequence[str]) -> tuple[TrainConfig, Path | None, dict[str, Any] | None]:
    """The run's configuration, with the checkpoint to go on from and its record.

    Options on the command line win over the saved configuration (when resuming) or the file. When resuming, the
    saved configuration wins over the file, and each difference is shown.
    """
    import tyro

    from opensora_accel.training.state import read_record

    file, resume, options = _extract(arguments)
    base = load_config(file) if file else TrainConfig()
    given = tyro.cli(
        TrainConfig,
        default=base,
        args=options,
        prog="opensora-accel train",
        description=__doc__,
        config=(tyro.conf.FlagConversionOff,),
    )
    resume = resume if resume is not None else given.resume or None
    if resume is None:
        _check_output(given)
        return given, None, None
    checkpoint = Path(resume) if resume else _newest(Path(given.output))
    record = read_record(checkpoint)
    # A run that was moved since it was saved goes on where its checkpoint lies.
    values = {**record["config"], "resume": "", "output": str(checkpoint.parent.parent)}
    saved = config_from_dict(values, str(checkpoint))
    final = tyro.cli(
        TrainConfig,
        default=saved,
        args=options,
        prog="opensora-accel train",
        config=(tyro.conf.FlagConversionOff,),
    )
    if is_first_rank():
        _show_differences(base if file else None, saved, final, checkpoint)
    return final, checkpoint, record


def run(arguments: Sequence[str]) -> int:
    """Trains; the exit status."""
    import torch.distributed as dist

    from opensora_accel.parallel_states import reset

    config, checkpoint, record = parse(arguments)
    started_here = not dist.is_initialized()
    try:
        return _train(config, checkpoint, record)
    finally:
        if started_here:
            reset(destroy_process_group=True)


def _train(config: TrainConfig, checkpoint: Path | None, record: dict[str, Any] | None) -> int:
    from opensora_accel.training.loop import Trainer

    trainer = Trainer(config, checkpoint, record)
    if is_first_rank():
        if checkpoint is None:
            _move_aside(Path(config.output))
        print(trainer.summary, flush=True)
    losses = trainer.train()
    if is_first_rank() and len(losses) >= 2 * _SHOWN_STEPS:
        first, last = statistics.fmean(losses[:_SHOWN_STEPS]), statistics.fmean(losses[-_SHOWN_STEPS:])
        print(f"loss {first:.4f} → {last:.4f} (mean of the first and last {_SHOWN_STEPS} steps)", flush=True)
    if is_first_rank():
        print(f"metrics, checkpoints and samples are in {config.output}", flush=True)
    return 0


def _extract(arguments: Sequence[str]) -> tuple[str | None, str | None, list[str]]:
    """`--config FILE` and `--resume [FOLDER]` (empty: the newest), and what is left for tyro."""
    file, resume, rest = None, None, []
    remaining = list(arguments)
    while remaining:
        argument = remaining.pop(0)
        name, equals, value = argument.partition("=")
        if name not in ("--config", "--resume"):
            rest.append(argument)
            continue
        if not equals and remaining and not remaining[0].startswith("--"):
            value = remaining.pop(0)
        if name == "--resume":
            resume = value
        elif value:
            file = value
        else:
            raise ValueError("--config needs a file, for example --config configs/bunny.toml")
    return file, resume, rest


def _newest(output: Path) -> Path:
    from opensora_accel.training.state import list_checkpoints

    found = list_checkpoints(output / "checkpoints")
    if not found:
        raise FileNotFoundError(
            f"there is no checkpoint in {output}; start without --resume, or name a checkpoint or another --output"
        )
    return found[-1]


def _show_differences(
    file: TrainConfig | None, saved: TrainConfig, final: TrainConfig, checkpoint: Path
) -> None:
    print(f"resuming {checkpoint}", flush=True)
    for name, (before, after) in differences(saved, final).items():
        print(f"  {name}: {before} → {after} (from the command line)", flush=True)
    if file is not None:
        for name, (before, after) in differences(saved, file).items():
            if name not in differences(saved, final):
                option = (
                    "--model.config, as one JSON table," if name.startswith("model.config.") else f"--{name}"
                )
                print(
                    f"  {name}: stays {before} as saved; the file has {after} ({option} changes it)",
                    flush=True,
                )


def _is_run(folder: Path) -> bool:
    return (folder / "config.json").is_file() or (folder / "checkpoints").is_dir()


def _check_output(config: TrainConfig) -> None:
    """An earlier run is moved aside later; what would be moved with it must not be needed, or the user's own."""
    output, data = Path(config.output).resolve(), Path(config.data.folder).resolve()
    if output.exists() and not output.is_dir():
        raise ValueError(f"--output {config.output} is a file; name a folder")
    if _is_run(output) and config.data.folder and data.is_relative_to(output):
        raise ValueError(
            f"--output {config.output} holds an earlier run and the videos ({config.data.folder}); "
            "a new run needs another --output (or --resume goes on with the earlier one)"
        )


def _move_aside(output: Path) -> None:
    """An earlier run in the same folder keeps all it wrote, under the next free name."""
    output = output if output.name else output.resolve()
    if not _is_run(output):
        return
    number = 1
    while (target := output.with_name(f"{output.name}.{number}")).exists():
        number += 1
    output.rename(target)
    print(
        f"{output} had an earlier run; it is {target} now (--resume would have gone on with it)", flush=True
    )
