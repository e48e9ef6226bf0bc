"""opensora-accel: train video diffusion transformers, sequence-parallel and proven exact.

commands:
  new       write a configuration that trains a pipeline's model, by what lies in its folder
  train     train a diffusers video transformer on a folder of clips
  plan      find the parallel plan that fits a job and is the fastest, on GPUs that need not be here
  shard     derive what a sharded einsum communicates, forward and backward
  verify    prove that a training step has the gradients of one device, whatever the mesh
  policy    propose how a model of your own is made sequence-parallel, and prove it
  profile   train a few steps, and show where their time, memory and bytes went
  report    make one page of a profiled run: where time, memory and bytes went, and what to do about it
  cache     show what a run's --cache_folder holds, and keep the part of it that was used last
  doctor    check this machine: torch, GPUs, backends, threads, packages

`opensora-accel COMMAND --help` lists its options, `opensora-accel --version` shows what is installed. On several
ranks, start the same program with a launcher:
  torchrun --nproc-per-node 2 -m opensora_accel.cli train --config FILE --plan.ulysses 2
"""

from __future__ import annotations

import difflib
import inspect
import json
import logging
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from opensora_accel.observe import Forecast, MeasuredParts
    from opensora_accel.planner import Job
    from opensora_accel.verify import Proof


def _train(arguments: Sequence[str]) -> int:
    from opensora_accel.training import command

    return command.main(arguments)


def _plan(arguments: Sequence[str]) -> int:
    from opensora_accel.planner import command

    def job_of_config(path: Path) -> Job:
        from opensora_accel.training import job_of, load_config

        return job_of(load_config(path))

    return command.main(arguments, job_of_config)


def _shard(arguments: Sequence[str]) -> int:
    from opensora_accel.sharding_command import command

    return command.main(arguments)


def _verify(arguments: Sequence[str]) -> int:
    import tempfile

    from opensora_accel.verify import command

    def proof_of_config(options: Sequence[str], folder: Path, max_ranks: int) -> Proof:
        from opensora_accel.training import command, proof_of

        config, _, _ = command.parse(options, needs_plan=True)
        return proof_of(config, folder, max_ranks)

    with tempfile.TemporaryDirectory(prefix="opensora-accel-") as folder:
        return command.main(arguments, proof_of_config, Path(folder))


def _policy(arguments: Sequence[str]) -> int:
    from opensora_accel.proposal import command

    return command.main(arguments)


def _profile(arguments: Sequence[str]) -> int:
    """Trains a few steps with the options of `train`, and records where their time, memory and bytes went.

    Writes OUTPUT/profile/rank_00000.jsonl, and one for each other rank. OUTPUT is that of the configuration with
    "_profile" behind it, unless --output is given: a run that lies there stays as it is.

    options:
      --num-steps N   how many steps are recorded (20, or as many as the run has)
      --memory        also what fills the memory, in the last of them (on a CPU that step takes longer)
      --report FILE   makes the page of `opensora-accel report` of it
      --against PLAN  holds it against the forecast that `opensora-accel plan --output PLAN` has written beside the plan
      --correct FILE  with --against: writes a hardware file that is corrected by what was measured
      --link AXIS=BYTES_PER_S   what a link of this axis can do, for the page: --link ring=25e9 (may be repeated;
                      `opensora-accel doctor --links` measures)
      --peak-flops N  operations a second of one device, for MFU, where it is none of those that are known
      any of `opensora-accel train --help`: --config FILE, --plan FILE, --plan.ulysses 2, --resume, ...

    example, on two ranks:
      torchrun --nproc-per-node 2 -m opensora_accel.cli profile --config configs/bunny.toml --num-steps 20
    """
    import argparse

    if not arguments or arguments[0] in ("-h", "--help"):
        print(inspect.cleandoc(_profile.__doc__ or ""))
        return 0
    parser = argparse.ArgumentParser("opensora-accel profile", add_help=False, allow_abbrev=False)
    parser.add_argument("--num-steps", type=int)
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--report", default="")
    parser.add_argument("--against", default="")
    parser.add_argument("--correct", default="")
    parser.add_argument("--link", action="append", default=[])
    parser.add_argument("--peak-flops", type=float)
    own, options = parser.parse_known_args(arguments)
    if own.num_steps is not None and own.num_steps < 1:
        raise ValueError(f"--num-steps is a number of steps, at least 1; got {own.num_steps}")
    links = {}
    for given in own.link:
        axis, _, speed = given.partition("=")
        try:
            links[axis] = float(speed)
        except ValueError:
            links[axis] = 0.0
        if not axis or not 0 < links[axis] < float("inf"):
            raise ValueError(
                f"--link is an axis and its bytes a second, as in --link ring=25e9; got {given!r}"
            )
    if own.peak_flops is not None and not 0 < own.peak_flops < float("inf"):
        raise ValueError(f"--peak-flops is a number of operations a second, as 989e12; got {own.peak_flops}")
    if own.correct and not own.against:
        raise ValueError("--correct follows from --against PLAN; give both")
    if own.against:
        from opensora_accel.observe import Forecast

        # What is wrong with it is said before the steps are run.
        Forecast.of_plan(Path(own.against))
    from opensora_accel.training import ProfileOptions, command

    config, _, _ = command.parse(options)
    output = config.output
    if not any(option.partition("=")[0] == "--output" for option in options):
        output = f"{output.rstrip('/')}_profile"
        options += ["--output", output]
    status = command.main(options, ProfileOptions(own.num_steps, own.memory, links, own.peak_flops))
    if (own.report or own.against) and status == 0 and os.environ.get("RANK", "0") == "0":
        asked = {"--out": own.report, "--against": own.against, "--correct": own.correct}
        return _report([f"{output}/profile", *(part for each in asked.items() if each[1] for part in each)])
    return status


def _report(arguments: Sequence[str]) -> int:
    from opensora_accel.profiler import report

    def correct(path: Path, forecast: Forecast, measured: MeasuredParts) -> list[str]:
        from opensora_accel.planner import correct

        return correct.correct(path, forecast, measured)

    return report.main(arguments, correct)


def _cache(arguments: Sequence[str]) -> int:
    from opensora_accel.training import cache_command

    return cache_command.main(arguments)


def _new(arguments: Sequence[str]) -> int:
    from opensora_accel.training import new_command

    return new_command.main(arguments)


def _doctor(arguments: Sequence[str]) -> int:
    from opensora_accel.doctor import main as doctor

    def calibrate(path: Path) -> None:
        from opensora_accel.planner import calibrate

        calibrate.write(path)

    return doctor(arguments, calibrate)


# Commands import what they need when they run: torch takes a second, a model of diffusers more, and --help nothing.
COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "train": _train,
    "plan": _plan,
    "shard": _shard,
    "verify": _verify,
    "policy": _policy,
    "profile": _profile,
    "report": _report,
    "new": _new,
    "cache": _cache,
    "doctor": _doctor,
}


def main(arguments: Sequence[str] | None = None) -> int | None:
    """Runs one command, and returns its exit status. What a user can mend is said in one line, without a traceback."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(__doc__.strip())
        return 0
    if arguments[0] == "--version":
        print(_version())
        return 0
    name, *rest = arguments
    if name not in COMMANDS:
        nearest = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"did you mean {nearest[0]!r}? " if nearest else ""
        return _fail(f"there is no command {name!r}; {hint}The commands are {', '.join(COMMANDS)}")
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    try:
        return _told_to_torchrun(COMMANDS[name])(rest)
    except (ValueError, OSError, ModuleNotFoundError, RuntimeError) as error:
        message = _one_line(name, error)
        # For those whose message does not say enough: OPENSORA_ACCEL_DEBUG=1 shows where it was raised.
        if message is None or os.environ.get("OPENSORA_ACCEL_DEBUG", "0") not in ("", "0"):
            raise
        return _fail(message)
    except KeyboardInterrupt:
        saved = (
            "; what was saved before is whole (--resume auto goes on from there)" if name == "train" else ""
        )
        return _fail(f"interrupted{saved}", status=130)


def _one_line(name: str, error: Exception) -> str | None:
    """What a user can mend, in one line; None where the mistake is ours."""
    if isinstance(error, ModuleNotFoundError):
        missing = str(error.name).partition(".")[0]
        if missing in ("opensora_accel", "shardformer"):
            return None
        extra = "plot" if missing in ("matplotlib", "jinja2", "markupsafe", "pydantic") else "train"
        return f"{name} needs the package {missing}; install it with pip install 'opensora-accel[{extra}]'"
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    if isinstance(error, (ValueError, OSError)):
        return str(error)
    if type(error).__name__ == "MissingRankError":
        return f"{error}. Go on from the newest saved state with --resume auto"
    return None


def _told_to_torchrun(command: Callable[[Sequence[str]], int]) -> Callable[[Sequence[str]], int | None]:
    """The command, which under torchrun writes its error, in one line, where torchrun's summary reads it.

    Without it the summary says how to enable tracebacks, and record() by itself prints them there a second time.
    """
    if "TORCHELASTIC_ERROR_FILE" not in os.environ:
        return command
    from torch.distributed.elastic.multiprocessing.errors import ErrorHandler, record

    class OneLine(ErrorHandler):
        def record_exception(self, e: BaseException) -> None:
            line = f"{type(e).__name__}: {str(e).strip().partition(chr(10))[0]}"
            details = {"py_callstack": line, "timestamp": str(int(time.time()))}
            with open(os.environ["TORCHELASTIC_ERROR_FILE"], "w", encoding="utf-8") as file:
                json.dump({"message": {"message": line, "extraInfo": details}}, file)

    return record(command, OneLine())


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return f"opensora-accel {version('opensora-accel')} (torch {version('torch')})"
    except PackageNotFoundError as error:
        return f"opensora-accel from a source folder ({error.name} is not installed)"


def _fail(message: str, status: int = 2) -> int:
    rank = os.environ.get("RANK", "0")
    if rank != "0":
        # The launcher ends the other ranks as soon as one has failed: mostly only rank 0 says what all would say.
        time.sleep(2)
    print(f"error{'' if rank == '0' else f' (rank {rank})'}: {message}", file=sys.stderr, flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main())
