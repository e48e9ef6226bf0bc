"""`opensora-accel verify`: are the gradients those of one device, and is what is sent what the plan promises?"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import json
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from opensora_accel.documents import MOST_RANKS
from opensora_accel.files import check_folder_of
from opensora_accel.observe import MAX_RANKS, MeshShape, ModelFn, Step, load_file, meshes_of
from opensora_accel.plan import Plan
from opensora_accel.verify.beside_one_device import Meshes, verify
from opensora_accel.verify.communication import Record, Violation, broken_promises, record_step
from opensora_accel.verify.report import Report, to_junit
from opensora_accel.verify.results import Reference

# Of --timeout: four months, and less than what the clocks of threads can wait.
_MOST_SECONDS = 1e7

_DEFAULT_MESHES: tuple[Mapping[str, int], ...] = (
    {"data": 2, "sequence": 2},
    {"data": 1, "sequence": 4},
    {"data": 4, "sequence": 1},
    {"data": 1, "sequence": 3},
)

# What a step file may import that takes long and much memory: once for all ranks.
_LARGE = ("diffusers", "transformers", "accelerate", "peft")

_DESCRIPTION = """\
Runs a training step in fp64 on a few processes of this machine, on several meshes, and on one device; says whether
every parameter's gradient is the same, and if not: which ones, over which axis of the mesh, by what factor, and what
is probably missing. Then records what the step communicates at the true number of ranks, without sending anything,
and compares it with what the plan promises. No GPU is needed. Exit status: 0 all is right, 1 something is wrong,
2 nothing was compared."""

_EXAMPLES = """\
examples:
  opensora-accel verify --config configs/bunny.toml                       the plan of a configured run
  opensora-accel verify --config configs/bunny.toml --plan.ulysses 4      with another degree
  opensora-accel verify --config configs/bunny.toml --plan plan.json      with what `opensora-accel plan` has written
  opensora-accel verify --step my_step.py --plan plan.json                your own loop, which applies run.plan
  opensora-accel verify --step my_step.py                                 your own model and loop, on 4 meshes
  opensora-accel verify --step my_step.py --mesh fsdp=2,cp=2 --mesh cp=3 --data-axes fsdp
  opensora-accel verify --step my_step.py --world data=128,sequence=8     and what 1,024 ranks would send
  torchrun --nproc-per-node 8 -m opensora_accel.cli verify --step my_step.py   on the ranks of your launch line, too

a step file (docs/verify.md):
  def model_fn():                      # the model, tiny, the same on every rank
      return MyModel(layers=2)

  def step(model, run):                # as in the loop, up to backward
      if not run.is_reference:
          model = DistributedDataParallel(my_parallelism(model, run.mesh))
      loss = my_loss(model, torch.randn(1, 3, 5, 8, 8))
      loss.backward()
      return loss

  def plain_model_fn():                # if there are kernels of your own: the same model without them
      return MyModel(layers=2, attention="plain")"""


@dataclass(frozen=True)
class Proof:
    """What is verified. At true size the step may be another one."""

    step: Step
    model_fn: ModelFn | None
    meshes: Meshes
    reference: Reference = "turns"
    preload: tuple[str, ...] = ()
    # The true mesh, to record what is communicated; None for no record.
    world: Plan | Mapping[str, int] | None = None
    true_step: Step | None = None
    true_model_fn: ModelFn | None = None
    plain_model_fn: ModelFn | None = None


@dataclass(frozen=True)
class Launch:
    """The ranks that a launcher has started this command on; one, where none has."""

    rank: int = 0
    num_ranks: int = 1

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Launch:
        """Those of torchrun, accelerate and `colossalai run`."""
        return cls(int(environment.get("RANK", 0)), int(environment.get("WORLD_SIZE", 1)))

    def add_to(self, proof: Proof) -> Proof:
        """The same, with meshes of all these ranks beside the small ones, which tell causes apart."""
        if self.num_ranks == 1:
            return proof
        given = proof.meshes
        meshes: list[Plan | Mapping[str, int]] = [given] if isinstance(given, (Plan, Mapping)) else [*given]
        more: list[Plan | Mapping[str, int]] = []
        if isinstance(proof.world, Plan):
            more = [proof.world.replace(precision="fp64")] if proof.world.world_size == self.num_ranks else []
        else:
            axes = dict.fromkeys(axis for mesh in meshes if isinstance(mesh, Mapping) for axis in mesh)
            more = [{axis: self.num_ranks} for axis in axes]
        return dataclasses.replace(proof, meshes=[*meshes, *(mesh for mesh in more if mesh not in meshes)])


# From the options of `opensora-accel train` (`--config FILE --plan FILE`), a folder for files that the proof
# needs, and the largest number of ranks.
ProofOfConfig = Callable[[Sequence[str], Path, int], Proof]


def main(arguments: Sequence[str], proof_of_config: ProofOfConfig, folder: Path) -> int:
    """Runs the command; its exit status. `folder`: empty, and gone afterwards.

    Raises:
        ValueError, FileNotFoundError: options or a step that nothing can be verified with; the reason is also in the
            files that were asked for.
    """
    # What is left over are options of `train`, which only a config has.
    options, rest = _parser().parse_known_args(arguments)
    launch = Launch.of(os.environ)
    if launch.rank:
        return 0  # the first rank starts processes of its own, as many as were launched
    if options.max_ranks is None:
        options.max_ranks = max(MAX_RANKS, launch.num_ranks)
    try:
        _check_options(options, rest)
        if options.step is not None:
            proof = _proof_of_file(options)
        else:
            config = [] if options.config is None else ["--config", options.config]
            plan = [] if options.plan is None else ["--plan", options.plan]
            proof = proof_of_config([*config, *plan, *rest], folder, options.max_ranks)
        return _prove(launch.add_to(proof), options)
    except (ValueError, FileNotFoundError) as error:
        _write(options, error=str(error))  # for those who read only the files
        raise


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="opensora-accel verify",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add, a_mesh = parser.add_argument, "AXIS=N,..."
    for_config = "a run, as `opensora-accel train` takes it; its options may follow"
    for_step = "your own: a file that defines step(model, run) and model_fn()"
    for_plan = "the plan, as `opensora-accel plan` writes it; alone, of a run with the defaults of `train`"
    for_mesh = "once for each mesh (with --step)"
    for_axes = "axes whose ranks see different samples (default: those called data, dp, fsdp, …), or none"
    for_batch = "the step shares one batch out over the data ranks (default: each has a batch of its own)"
    for_world = "the true mesh, to record communication on (with --step)"
    add("--config", metavar="FILE", help=for_config)
    add("--step", type=Path, metavar="FILE.py", help=for_step)
    add("--plan", metavar="FILE.json", help=for_plan)
    add("--mesh", action="append", type=_mesh, metavar=a_mesh, help=for_mesh)
    add("--data-axes", type=_names, metavar="A,B", help=for_axes)
    add("--one-batch", action="store_true", help=for_batch)
    add("--world", type=_mesh, metavar=a_mesh, help=for_world)
    for_dtype = "bf16: how far ranks are off in bf16, too, beside one device (default: fp64 alone)"
    add("--dtype", choices=("fp64", "bf16"), default="fp64", help=for_dtype)
    add("--only", choices=("gradients", "communication"), help="one of the two parts")
    for_ranks = f"processes at most (default: {MAX_RANKS}, or as many as torchrun has launched)"
    add("--max-ranks", type=int, metavar="N", help=for_ranks)
    for_timeout = "past it a mesh counts as hanging (default: 60)"
    add("--timeout", type=float, default=60.0, metavar="S", help=for_timeout)
    add("--seed", type=int, default=0, help="of weights and data (default: 0)")
    add("--json", type=Path, metavar="FILE", help="write every figure")
    add("--junit", type=Path, metavar="FILE", help="write a JUnit report, for CI")
    return parser


def _mesh(text: str) -> dict[str, int]:
    """`data=2,sequence=2`."""
    degrees: dict[str, int] = {}
    for part in text.split(","):
        axis, equals, degree = part.partition("=")
        if not equals or not axis.strip() or not degree.strip().isdecimal() or axis.strip() in degrees:
            raise argparse.ArgumentTypeError(
                f"{text!r} is no mesh; write axis=degree, such as data=2,sequence=2"
            )
        degrees[axis.strip()] = int(degree)
    if math.prod(degrees.values()) > MOST_RANKS:
        raise argparse.ArgumentTypeError(
            f"{text!r} has more than {MOST_RANKS:,} ranks, and no job has so many"
        )
    return degrees


def _names(text: str) -> tuple[str, ...]:
    """`a,b`; none for no name."""
    return () if text == "none" else tuple(name.strip() for name in text.split(","))


def _check_options(options: argparse.Namespace, rest: Sequence[str]) -> None:
    """Raises what is wrong with options together: ValueError, or FileNotFoundError for a folder to write to."""
    given = [name for name in ("config", "step") if getattr(options, name) is not None]
    if len(given) == 2 or not (given or options.plan):
        raise ValueError(
            "give --config FILE or --step FILE.py, one of them, or --plan FILE.json alone; --help has examples"
        )
    if options.plan is not None and not options.plan.endswith(".json"):
        raise ValueError(
            f"--plan takes a file that `opensora-accel plan` wrote (.json); got {options.plan!r}"
        )
    if options.step is not None and rest:
        raise ValueError(f"there is no option {rest[0]!r} beside --step; --help lists those there are")
    for name in ("mesh", "data_axes", "world", "one_batch"):
        option = f"--{name.replace('_', '-')}"
        if options.step is None and getattr(options, name):
            raise ValueError(
                f"{option} is for --step: a config's meshes follow from its plan (--plan.ulysses 4)"
            )
        if options.plan is not None and name != "one_batch" and getattr(options, name):
            raise ValueError(f"--plan says which meshes there are; leave {option} out")
    if options.only == "gradients" and options.world is not None:
        raise ValueError("--world is for the communication, which --only gradients leaves out")
    if options.max_ranks < 2 or not 0 < options.timeout <= _MOST_SECONDS:
        raise ValueError(
            "--max-ranks must be at least 2, --timeout a number of seconds above 0; "
            f"got {options.max_ranks} and {options.timeout:g}"
        )
    if options.only == "communication" and options.step is not None and not (options.world or options.plan):
        raise ValueError(
            "--only communication needs the true mesh: --world data=128,sequence=8, or --plan FILE.json"
        )
    if options.world is not None:
        MeshShape.of(options.world, options.data_axes)
    # Better now than after a minute of proving.
    for path in (options.json, options.junit):
        check_folder_of(path)


def _prove(proof: Proof, options: argparse.Namespace) -> int:
    report: Report | None = None
    record: Record | None = None
    violations: list[Violation] = []
    if options.only == "communication" and options.dtype != "fp64":
        raise ValueError("--dtype bf16 is for the gradients, which --only communication leaves out")
    if options.only == "communication" and proof.world is None:
        raise ValueError("the plan has one rank, which sends nothing; give it more (--plan.ulysses 4)")
    if options.only != "communication":
        if isinstance(proof.world, Plan) and proof.world.world_size > options.max_ranks:
            print(
                f"the plan has {proof.world.world_size:,} ranks, and at most {options.max_ranks} run here: its axes "
                "are verified with smaller degrees, from which the factors of large ones follow (--max-ranks N allows "
                "more)",
                flush=True,
            )

        def show_progress(what: str, done: int, total: int) -> None:
            filled = 20 * done // max(total, 1)
            show_on_terminal(f"[{'█' * filled}{'·' * (20 - filled)}] {what}")

        try:
            report = verify(
                proof.step,
                proof.model_fn,
                proof.meshes,
                data_axes=options.data_axes,
                reference=proof.reference,
                dtype=options.dtype,
                plain_model_fn=proof.plain_model_fn,
                seed=options.seed,
                timeout_s=options.timeout,
                preload=proof.preload,
                on_progress=show_progress,
            )
        finally:
            show_on_terminal("")  # the line of progress goes, whatever comes next
        print(report, flush=True)
        _write(options, report)  # whatever becomes of the record
    # The record is of the true mesh, which has its own size; the gradients were proven on small ones.
    if options.only != "gradients" and proof.world is not None:
        shape = MeshShape.of(proof.world, None if isinstance(proof.world, Plan) else options.data_axes)
        # Ranks whose calls are compared: those that share rank 0's sample (up to 8), and the world's last.
        sharing = shape.ranks_of(0)
        ranks = sorted({*sharing[:7], sharing[-1], shape.world_size - 1})
        model_fn = proof.true_model_fn or proof.model_fn
        assert model_fn is not None
        record = record_step(proof.true_step or proof.step, model_fn, shape, ranks=ranks)
        violations = broken_promises(record)
        promise = "the plan promises" if shape.plan is not None else "its mesh allows"
        if report is not None:
            print()
        print(f"communication {record.table()}\n")
        for number, violation in enumerate(violations, 1):
            print(f"{number}. {violation}")
        print(f"what is sent is {'NOT ' if violations else ''}what {promise}", flush=True)
    _write(options, report, record, violations)
    if violations or (report is not None and report.has_compared and not report.ok):
        return 1
    return 0 if report is None or report.ok else 2


def show_on_terminal(text: str) -> None:
    """On one line of a terminal; nothing elsewhere."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def _write(
    options: argparse.Namespace,
    report: Report | None = None,
    record: Record | None = None,
    violations: Sequence[Violation] = (),
    error: str | None = None,
) -> None:
    """The files that were asked for, where there is a folder for them."""
    paths = (options.json, options.junit)
    for_json, for_junit = (p if p is not None and os.path.isdir(p.parent) else None for p in paths)
    if for_json is not None:
        values: dict[str, Any] = {
            "ok": error is None and (report is None or report.ok) and not violations,
            **({} if error is None else {"error": error}),
            "gradients": None if report is None else report.to_dict(),
            "communication": None,
        }
        if record is not None:
            broken = [dataclasses.asdict(violation) for violation in violations]
            values["communication"] = {**record.to_dict(), "violations": broken}
        for_json.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    if for_junit is not None:
        texts = None if record is None else list(map(str, violations))
        for_junit.write_text(to_junit(report, texts, error), encoding="utf-8")


# A step file is loaded by every process for itself.


def _proof_of_file(options: argparse.Namespace) -> Proof:
    path: Path = options.step
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}; --step names a Python file with step and model_fn")
    before = set(sys.modules)
    module = load_file(path)
    preload = tuple(name for name in _LARGE if name in sys.modules and name not in before)
    for name, signature in (("step", "step(model, run)"), ("model_fn", "model_fn()")):
        if not callable(getattr(module, name, None)):
            raise ValueError(
                f"{path} defines no {signature}; `opensora-accel verify --help` shows a step file"
            )
    functions = _StepFunction(path, "step"), _StepFunction(path, "model_fn")
    plain = _StepFunction(path, "plain_model_fn") if hasattr(module, "plain_model_fn") else None
    reference: Reference = "whole" if options.one_batch else "turns"
    if options.plan is not None:
        plan = Plan.load(options.plan)
        plans = meshes_of(plan.replace(precision="fp64"), options.max_ranks)
        world = plan if plan.world_size > 1 else None
        return Proof(*functions, plans, reference, preload, world, plain_model_fn=plain)
    # Meshes of the command line come before those of the file, and both before ours.
    defaults = [mesh for mesh in _DEFAULT_MESHES if math.prod(mesh.values()) <= options.max_ranks]
    if not defaults:
        defaults = [{"data": 2, "sequence": 1}, {"data": 1, "sequence": 2}]
    meshes = options.mesh or getattr(module, "MESHES", None) or defaults
    largest = max(math.prod(mesh.values()) for mesh in meshes)
    if largest > options.max_ranks:
        raise ValueError(
            f"a mesh has {largest} ranks, more than --max-ranks {options.max_ranks}: verify small meshes, the factors "
            "of large ones follow; or raise --max-ranks"
        )
    return Proof(*functions, meshes, reference, preload, options.world, plain_model_fn=plain)


@dataclass(frozen=True)
class _StepFunction:
    """A function of the file, as something that can be sent to another process."""

    path: Path
    name: str

    @property
    def function(self) -> Callable[..., Any]:
        return getattr(load_file(self.path), self.name)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.function)

    def __call__(self, *arguments: Any, **sizes: int) -> Any:
        return self.function(*arguments, **sizes)
