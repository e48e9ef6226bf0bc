"""`opensora-accel train`: from the command line to a run, with every error that a user can make said in one line."""

from __future__ import annotations

import dataclasses
import gc
import os
import statistics
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from opensora_accel.observe import Forecast
from opensora_accel.plan import Plan
from opensora_accel.training.config import (
    AUTO_PLAN,
    ProfileOptions,
    TrainConfig,
    asks_for_a_plan,
    config_from_dict,
    differences,
    load_config,
)
from opensora_accel.training.output import check_inputs, claim, move_aside
from opensora_accel.training.ranks import from_first_rank, is_first_rank
from opensora_accel.training.saved_state import AUTO, NEWEST, SAVING, Record, find_saved_state, run_of

_SHOWN_STEPS = 20


class _Given(NamedTuple):
    """What the command line and the file say."""

    # The file by itself, and the options that are left to tyro.
    file: TrainConfig | None
    options: list[str]
    # By both.
    config: TrainConfig
    # The plan is "auto", and the configurations have the default one in its place.
    wants_plan: bool
    # Whose forecast may lie beside it; "" where no file has the plan.
    plan_file: str = ""


def main(
    arguments: Sequence[str],
    profiling: ProfileOptions | None = None,
) -> int:
    """Trains; the exit status.

    Args:
        profiling: it is recorded where the time of so many steps went, and then it ends.

    Raises:
        ValueError, OSError: what a user can mend.
        MissingRankError: a rank did not come to a collective.
    """
    given = _read(arguments)  # first: what is wrong in it is said before anything starts
    # A run that goes on has the plan that it was saved with.
    chooses = given.wants_plan and not given.config.resume
    chosen, forecast = None, None
    if (
        chooses and os.environ.get("RANK", "0") == "0"
    ):  # before there is any group, which tracing a plan needs
        from opensora_accel.training import planned

        chosen, forecast = planned.choose_plan(given.config)
    elif given.plan_file and os.environ.get("RANK", "0") == "0":
        forecast = _forecast_of(Path(given.plan_file))
    import torch.distributed as dist

    from opensora_accel.communications import MissingRankError, report_failure, waiting
    from opensora_accel.parallel_states import reset, start_distributed

    started_here, has_failed = not dist.is_initialized(), True
    try:
        start_distributed(given.config.timeout_s or None)
        assert dist.group.WORLD is not None
        # Gradients are averaged by torch's own collectives, whose failures name no rank.
        with waiting("a step", dist.group.WORLD):
            if chooses:
                # The others wait here while the first rank chooses.
                plan = from_first_rank(lambda: chosen)
                assert plan is not None, "the first rank has chosen"
                given = given._replace(config=dataclasses.replace(given.config, plan=plan))
            status = _train(*_resolve(given), profiling, forecast)
        has_failed = False
        return status
    except MissingRankError:
        raise
    except Exception as error:
        report_failure(f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}")
        raise
    finally:
        # Where the training failed a save may be under way; it ends soon, or as soon as the ranks that it needs do.
        for thread in threading.enumerate():
            if thread.name == SAVING:
                thread.join(1.0)
        if started_here:
            reset(destroy_process_group=True, abort=has_failed)
            # A group's threads end with its last holder. One that lets go of a tensor while Python shuts down would
            # abort the process, which a launcher takes for a failed rank.
            gc.collect()


def parse(
    arguments: Sequence[str], *, needs_plan: bool = False
) -> tuple[TrainConfig, Path | None, Record | None]:
    """The run's configuration, with the saved state to go on from and its record.

    Options on the command line win over the saved configuration (when resuming) or the file. When resuming, the
    saved configuration wins over the file, and each difference is shown.

    Args:
        needs_plan: refuses the plan "auto", in whose place there is the default one otherwise.

    Communication: when resuming, that of `find_saved_state`, where torch.distributed has been started.

    Raises:
        ValueError, OSError: a wrong option or file, or no saved state to go on from.
    """
    given = _read(arguments)
    if needs_plan and given.wants_plan and not given.config.resume:
        raise ValueError(
            f'the plan is "{AUTO_PLAN}", which is chosen where the run starts; have it chosen first (`opensora-accel '
            "plan --config FILE --gpus N --hardware NAME --output plan.json`), and give --plan plan.json"
        )
    return _resolve(given)


def _read(arguments: Sequence[str]) -> _Given:
    """The configuration of `--config FILE`, the options for tyro, and the configuration by both.

    `--resume` alone means the newest saved state, and `--plan` a plan's file or none at all ("auto"), which is why they
    are not left to tyro.
    """
    file, resume, options = None, None, list[str]()
    plan, plan_file, wants_plan = None, "", False
    remaining = list(arguments)
    while remaining:
        argument = remaining.pop(0)
        name, equals, value = argument.partition("=")
        if name == "--plan":
            value = value if equals else remaining.pop(0) if remaining else ""
            if value == AUTO_PLAN:
                wants_plan, plan_file = True, ""
            elif value.endswith(".json"):
                plan, plan_file = Plan.load(value), value
            else:
                raise ValueError(
                    f"--plan takes a file that `opensora-accel plan` wrote (.json), or {AUTO_PLAN}; a field is set as "
                    f"--plan.ulysses 2; got {value!r}"
                )
            continue
        if name not in ("--config", "--resume"):
            options.append(argument)
            continue
        if not equals and remaining and not remaining[0].startswith("--"):
            value = remaining.pop(0)
        if name == "--resume":
            resume = value or NEWEST
        elif value:
            file = load_config(value)
            wants_plan = wants_plan or asks_for_a_plan(value)
        else:
            raise ValueError("--config needs a file, for example --config configs/bunny.toml")
    if plan is not None:
        # A field on the command line wins over the plan's file, as over the configuration's.
        file = dataclasses.replace(file or TrainConfig(), plan=plan)
        wants_plan = False
    config = _with_options(file or TrainConfig(), options)
    if resume is not None:
        config = dataclasses.replace(config, resume=resume)
    fields = [option.partition("=")[0] for option in options if option.startswith("--plan.")]
    if wants_plan and fields:
        raise ValueError(f'the plan is "{AUTO_PLAN}", which chooses {fields[0]} too; leave one of them out')
    return _Given(file, options, config, wants_plan, plan_file)


def _forecast_of(plan_file: Path) -> Forecast | None:
    """What lies beside a plan. No training ends for a damaged one: it says so."""
    if not Forecast.beside(plan_file).exists():
        return None
    try:
        return Forecast.of_plan(plan_file)
    except (ValueError, OSError) as error:
        print(f"step times are not held against a forecast: {error}", flush=True)
        return None


def _with_options(config: TrainConfig, options: list[str]) -> TrainConfig:
    import tyro

    parsed = tyro.cli(
        TrainConfig,
        default=config,
        args=options,
        prog="opensora-accel train",
        description=__doc__,
        config=(tyro.conf.FlagConversionOff,),
    )
    return config_from_dict(dataclasses.asdict(parsed), "the command line")


def _resolve(given: _Given) -> tuple[TrainConfig, Path | None, Record | None]:
    """The configuration of the run that goes on, its saved state and the record of that; None where it starts."""
    file, options, config, *_ = given
    # Where several ranks run, all of them agree on the saved state here.
    state = find_saved_state(config.resume, Path(config.output)) if config.resume else None
    if state is None:
        return dataclasses.replace(config, resume=""), None, None
    folder, record = state
    output = config.output
    names_output = any(option.partition("=")[0] == "--output" for option in options)
    if config.resume not in (NEWEST, AUTO) and not names_output:
        # A run that was moved since it was saved goes on where its saved state lies.
        output = str(run_of(folder))
    # The run goes on as it was saved; the command line alone changes it, and not the file that it once began with.
    saved = config_from_dict({**record.config, "resume": "", "output": output}, str(folder))
    final = _with_options(saved, options)
    if not is_first_rank():
        return final, folder, record
    print(f"resuming {os.path.abspath(folder)}", flush=True)
    changed = differences(saved, final)
    for name, (before, after) in changed.items():
        print(f"  {name}: {before} → {after} (from the command line)", flush=True)
    # Who has edited the file since would otherwise take it to be in force.
    for name, (before, after) in differences(saved, file or saved).items():
        if name not in changed:
            is_table = name.startswith("model.config.")
            option = "--model.config, as one JSON table," if is_table else f"--{name}"
            kept = f"stays {before} as saved; the file has {after} ({option} changes it)"
            print(f"  {name}: {kept}", flush=True)
    return final, folder, record


def _train(
    config: TrainConfig,
    folder: Path | None,
    record: Record | None,
    profiling: ProfileOptions | None,
    forecast: Forecast | None = None,
) -> int:
    import torch

    from opensora_accel.training.loop import Trainer

    # By default a GPU rounds operands of fp32 convolutions to 10 bits: patches are embedded by one, and codecs are made
    # of them. Products of matrices follow torch.set_float32_matmul_precision, which is fp32 by default.
    torch.backends.cudnn.allow_tf32 = False

    def starts_anew() -> bool:
        # A run that goes on in another folder than its saved state's finds there what any new run would.
        try:
            return folder is None or run_of(folder).resolve() != Path(config.output).resolve()
        except ValueError:
            return True

    with claim(config):
        # Rank 0 decides for all: ranks may see another state of a shared file system.
        is_new = from_first_rank(starts_anew)
        if is_new:
            from_first_rank(lambda: check_inputs(config))
        trainer = Trainer(config, folder, record)
        num_profiled = 0 if profiling is None else trainer.num_profiled(profiling)
        # Only when everything has proven to work is an earlier run moved aside.
        if is_new:
            from_first_rank(lambda: move_aside(config))
        if is_first_rank():
            print(trainer.summary, flush=True)
        losses = trainer.train(profiling, forecast)
    if is_first_rank():
        if len(losses) >= 2 * _SHOWN_STEPS:
            first, last = statistics.fmean(losses[:_SHOWN_STEPS]), statistics.fmean(losses[-_SHOWN_STEPS:])
            print(
                f"loss {first:.4f} → {last:.4f} (mean of the first and last {_SHOWN_STEPS} steps)", flush=True
            )
        print(f"metrics, checkpoints and samples are in {config.output}", flush=True)
        if len(losses) < num_profiled:
            print(f"recorded {len(losses)} steps of the {num_profiled} that were asked for", flush=True)
    # Who asked a run to stop has what it asked for; who asked for a profile has not.
    return int(len(losses) < num_profiled)
