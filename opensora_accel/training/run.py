"""`opensora-accel train`: from the command line to a run, with every error that a user can make said in one line."""

from __future__ import annotations

import dataclasses
import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from opensora_accel.training.config import TrainConfig, config_from_dict, differences, load_config
from opensora_accel.training.output import check_inputs, claim, move_aside
from opensora_accel.training.resume import AUTO, NEWEST, find_checkpoint, run_of
from opensora_accel.training.together import from_first_rank, is_first_rank

_SHOWN_STEPS = 20


@dataclass(frozen=True)
class _Given:
    """What the command line and its file say."""

    config: TrainConfig
    file: TrainConfig | None
    options: list[str]

    @property
    def names_output(self) -> bool:
        return any(option.partition("=")[0] == "--output" for option in self.options)


def _read(arguments: Sequence[str]) -> _Given:
    file, resume, options = _extract(arguments)
    base = load_config(file) if file else None
    config = _with_options(base or TrainConfig(), options)
    if resume is not None:
        config = dataclasses.replace(config, resume=resume or NEWEST)
    return _Given(config, base, options)


def _with_options(config: TrainConfig, options: list[str]) -> TrainConfig:
    import tyro

    return tyro.cli(
        TrainConfig,
        default=config,
        args=options,
        prog="opensora-accel train",
        description=__doc__,
        config=(tyro.conf.FlagConversionOff,),
    )


def parse(arguments: Sequence[str]) -> tuple[TrainConfig, Path | None, dict[str, Any] | None]:
    """The run's configuration, with the checkpoint to go on from and its record.

    Options on the command line win over the saved configuration (when resuming) or the file. When resuming, the
    saved configuration wins over the file, and each difference is shown.

    Communication: when resuming, that of `find_checkpoint`, where torch.distributed has been started.
    """
    return _resolve(_read(arguments))


def _resolve(given: _Given) -> tuple[TrainConfig, Path | None, dict[str, Any] | None]:
    resume, output = given.config.resume, given.config.output
    found = find_checkpoint(resume, Path(output)) if resume else None
    if found is None:
        return dataclasses.replace(given.config, resume=""), None, None
    checkpoint, record = found
    if resume not in (NEWEST, AUTO) and not given.names_output:
        # A run that was moved since it was saved goes on where its checkpoint lies.
        output = str(run_of(checkpoint))
    saved = config_from_dict({**record["config"], "resume": "", "output": output}, str(checkpoint))
    final = _with_options(saved, given.options)
    if is_first_rank():
        _show_differences(given.file, saved, final, checkpoint)
    return final, checkpoint, record


def run(arguments: Sequence[str]) -> int:
    """Trains; the exit status."""
    given = _read(arguments)  # first: what is wrong in it is said before anything starts
    import torch.distributed as dist

    from opensora_accel.communications.waiting import MissingRankError, report_failure, waiting
    from opensora_accel.parallel_states import reset, start_distributed

    started_here = not dist.is_initialized()
    try:
        start_distributed(given.config.timeout_s or None)
        assert dist.group.WORLD is not None
        # Gradients are averaged by torch's own collectives, whose failures name no rank.
        with waiting("a step", dist.group.WORLD):
            return _train(*_resolve(given))
    except MissingRankError:
        raise
    except Exception as error:
        report_failure(f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}")
        raise
    finally:
        if started_here:
            reset(destroy_process_group=True)


def _train(config: TrainConfig, checkpoint: Path | None, record: dict[str, Any] | None) -> int:
    from opensora_accel.training.loop import Trainer

    with claim(config):
        # A run that goes on in another folder than its checkpoint's finds there what any new run would.
        is_new = from_first_rank(lambda: checkpoint is None or not _lies_in(checkpoint, Path(config.output)))
        if is_new:
            from_first_rank(lambda: check_inputs(config))
        trainer = Trainer(config, checkpoint, record)
        if is_new:
            from_first_rank(lambda: move_aside(config))
        if is_first_rank():
            print(trainer.summary, flush=True)
        losses = trainer.train()
    if is_first_rank() and len(losses) >= 2 * _SHOWN_STEPS:
        first, last = statistics.fmean(losses[:_SHOWN_STEPS]), statistics.fmean(losses[-_SHOWN_STEPS:])
        print(f"loss {first:.4f} → {last:.4f} (mean of the first and last {_SHOWN_STEPS} steps)", flush=True)
    if is_first_rank():
        print(f"metrics, checkpoints and samples are in {config.output}", flush=True)
    return 0


def _lies_in(checkpoint: Path, output: Path) -> bool:
    try:
        return run_of(checkpoint).resolve() == output.resolve()
    except ValueError:
        return False


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


def _show_differences(
    file: TrainConfig | None, saved: TrainConfig, final: TrainConfig, checkpoint: Path
) -> None:
    print(f"resuming {os.path.abspath(checkpoint)}", flush=True)
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
