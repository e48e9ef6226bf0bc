"""`opensora-accel verify`: are the gradients those of one device, and is what is sent what the plan promises?"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from opensora_accel.plan import Plan
from opensora_accel.verify.communication import Record, Violation, broken_promises, record_step
from opensora_accel.verify.meshes import MAX_RANKS, MeshShape, ModelFn, Step
from opensora_accel.verify.report import Report, to_junit
from opensora_accel.verify.results import Reference
from opensora_accel.verify.step_file import StepFile
from opensora_accel.verify.verify import Meshes, verify

DEFAULT_MESHES: tuple[Mapping[str, int], ...] = (
    {"data": 2, "sequence": 2},
    {"data": 1, "sequence": 4},
    {"data": 4, "sequence": 1},
    {"data": 1, "sequence": 3},
)

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
  opensora-accel verify --step my_step.py                                 your own model and loop, on 4 meshes
  opensora-accel verify --step my_step.py --mesh fsdp=2,cp=2 --mesh cp=3 --data-axes fsdp
  opensora-accel verify --step my_step.py --world data=128,sequence=8     and what 1,024 ranks would send

a step file (docs/verify.md):
  def model_fn():                      # the model, tiny, the same on every rank
      return MyModel(layers=2)

  def step(model, run):                # as in the loop, up to backward
      if not run.is_reference:
          model = DistributedDataParallel(my_parallelism(model, run.mesh))
      loss = my_loss(model, torch.randn(1, 3, 5, 8, 8))
      loss.backward()
      return loss"""


@dataclass(frozen=True)
class Proof:
    """What is verified."""

    step: Step
    model_fn: ModelFn | None
    meshes: Meshes
    reference: Reference = "turns"
    preload: tuple[str, ...] = ()
    world: Plan | Mapping[str, int] | None = None
    """The true mesh, for the record of what is communicated; None for no record."""
    true_step: Step | None = None
    """At true size, where `step` is not."""
    true_model_fn: ModelFn | None = None


ProofOfConfig = Callable[[Sequence[str], Path, int], Proof]
"""From the options of `opensora-accel train` (`--config FILE --plan.ulysses 4`), a folder for files that the proof
needs, and the largest number of ranks."""


def main(arguments: Sequence[str], proof_of_config: ProofOfConfig, folder: Path) -> int:
    """Runs the command; its exit status. `folder`: empty, and gone afterwards."""
    parsed, rest = _parser().parse_known_args(arguments)
    try:
        return _run(parsed, rest, proof_of_config, folder)
    except (ValueError, FileNotFoundError) as error:
        _write_error(parsed, str(error))
        raise


def _run(
    parsed: argparse.Namespace, rest: Sequence[str], proof_of_config: ProofOfConfig, folder: Path
) -> int:
    _check_options(parsed, rest)
    if parsed.config is not None:
        proof = proof_of_config(["--config", parsed.config, *rest], folder, parsed.max_ranks)
    else:
        proof = _proof_of_file(parsed)
    report: Report | None = None
    record: Record | None = None
    violations: list[Violation] = []
    if parsed.only == "communication" and proof.world is None:
        raise ValueError("the plan has one rank, which sends nothing; give it more (--plan.ulysses 4)")
    if parsed.only != "communication":
        report = _verify(proof, parsed)
        print(report, flush=True)
        _write(parsed, report, record, violations)  # whatever becomes of the record
    if parsed.only != "gradients" and proof.world is not None:
        record, violations = _record(proof, parsed)
        if report is not None:
            print()
        print(_communication_text(record, violations), flush=True)
    _write(parsed, report, record, violations)
    return 0 if (report is None or report.ok) and not violations else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="opensora-accel verify",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--config", metavar="FILE", help="a run, as `opensora-accel train` takes it; its options may follow")
    add(
        "--step",
        type=Path,
        metavar="FILE.py",
        help="your own: a file that defines step(model, run) and model_fn()",
    )
    add("--mesh", action="append", type=_mesh, metavar="AXIS=N,...", help="once for each mesh (with --step)")
    add(
        "--data-axes",
        type=_names,
        metavar="A,B",
        help="axes whose ranks see different samples (default: those called data, dp, fsdp, …), or none",
    )
    add(
        "--one-batch",
        action="store_true",
        help="the step shares one batch out over the data ranks (default: each has a batch of its own)",
    )
    add(
        "--world",
        type=_mesh,
        metavar="AXIS=N,...",
        help="the true mesh, to record communication on (with --step)",
    )
    add("--only", choices=("gradients", "communication"), help="one of the two parts")
    add(
        "--max-ranks",
        type=int,
        default=MAX_RANKS,
        metavar="N",
        help=f"processes at most (default: {MAX_RANKS})",
    )
    add(
        "--timeout",
        type=float,
        default=60.0,
        metavar="S",
        help="past it a mesh counts as hanging (default: 60)",
    )
    add("--seed", type=int, default=0, help="of weights and data (default: 0)")
    add("--json", type=Path, metavar="FILE", help="write every figure")
    add("--junit", type=Path, metavar="FILE", help="write a JUnit report, for CI")
    return parser


def _mesh(text: str) -> dict[str, int]:
    """`data=2,sequence=2`."""
    found: dict[str, int] = {}
    for part in text.split(","):
        axis, equals, degree = part.partition("=")
        if not equals or not axis.strip() or not degree.strip().isdecimal() or axis.strip() in found:
            raise argparse.ArgumentTypeError(
                f"{text!r} is no mesh; write axis=degree, such as data=2,sequence=2"
            )
        found[axis.strip()] = int(degree)
    return found


def _names(text: str) -> tuple[str, ...]:
    """`a,b`; none for no name."""
    return () if text == "none" else tuple(name.strip() for name in text.split(","))


def _check_options(parsed: argparse.Namespace, rest: Sequence[str]) -> None:
    if (parsed.config is None) == (parsed.step is None):
        raise ValueError("give --config FILE or --step FILE.py, one of them; --help has examples")
    if parsed.step is not None and rest:
        raise ValueError(f"there is no option {rest[0]!r} beside --step; --help lists those there are")
    if parsed.config is not None:
        for name in ("mesh", "data_axes", "world", "one_batch"):
            if getattr(parsed, name):
                option = f"--{name.replace('_', '-')}"
                raise ValueError(
                    f"{option} is for --step: a config's meshes follow from its plan (--plan.ulysses 4)"
                )
    if parsed.only == "gradients" and parsed.world is not None:
        raise ValueError("--world is for the communication, which --only gradients leaves out")
    if parsed.max_ranks < 2 or parsed.timeout <= 0:
        raise ValueError(
            f"--max-ranks must be at least 2, --timeout above 0; got {parsed.max_ranks} and {parsed.timeout:g}"
        )
    if parsed.only == "communication" and parsed.step is not None and parsed.world is None:
        raise ValueError("--only communication needs the true mesh: --world data=128,sequence=8")
    for path in (parsed.json, parsed.junit):
        if path is not None and not path.resolve().parent.is_dir():
            raise FileNotFoundError(f"there is no folder {path.parent} for {path.name}")


def _proof_of_file(parsed: argparse.Namespace) -> Proof:
    file = StepFile(parsed.step)
    defaults = [mesh for mesh in DEFAULT_MESHES if math.prod(mesh.values()) <= parsed.max_ranks]
    meshes = (
        parsed.mesh or file.meshes or defaults or [{"data": 2, "sequence": 1}, {"data": 1, "sequence": 2}]
    )
    largest = max(math.prod(mesh.values()) for mesh in meshes)
    if largest > parsed.max_ranks:
        raise ValueError(
            f"a mesh has {largest} ranks, more than --max-ranks {parsed.max_ranks}: verify small meshes, the factors "
            "of large ones follow; or raise --max-ranks"
        )
    return Proof(
        file.function("step"),
        file.function("model_fn"),
        meshes,
        reference="whole" if parsed.one_batch else "turns",
        world=parsed.world,
    )


def _verify(proof: Proof, parsed: argparse.Namespace) -> Report:
    with _Progress() as progress:
        return verify(
            proof.step,
            proof.model_fn,
            proof.meshes,
            data_axes=parsed.data_axes,
            reference=proof.reference,
            seed=parsed.seed,
            timeout_s=parsed.timeout,
            preload=proof.preload,
            on_progress=progress,
        )


class _Progress:
    """What runs now, on one line of a terminal; nothing elsewhere."""

    def __enter__(self) -> _Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self._show("")

    def __call__(self, what: str, done: int, total: int) -> None:
        filled = 20 * done // max(total, 1)
        self._show(f"[{'█' * filled}{'·' * (20 - filled)}] {what}")

    def _show(self, text: str) -> None:
        if sys.stderr.isatty():
            print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def _record(proof: Proof, parsed: argparse.Namespace) -> tuple[Record, list[Violation]]:
    assert proof.world is not None
    axes = parsed.data_axes if not isinstance(proof.world, Plan) else None
    shape = MeshShape.of(proof.world, axes)
    model_fn = proof.true_model_fn or proof.model_fn
    assert model_fn is not None
    record = record_step(proof.true_step or proof.step, model_fn, shape, ranks=_told_apart(shape))
    return record, broken_promises(record)


def _told_apart(shape: MeshShape) -> list[int]:
    """Ranks whose calls are compared: those that share rank 0's sample (up to 8), and the world's last."""
    sharing = [rank for rank in range(shape.world_size) if shape.data_rank(rank) == 0]
    return sorted({*sharing[:7], sharing[-1], shape.world_size - 1})


def _communication_text(record: Record, violations: Sequence[Violation]) -> str:
    lines = [f"communication {record.table()}", ""]
    lines += [f"{number}. {violation}" for number, violation in enumerate(violations, 1)]
    promise = "the plan promises" if record.shape.plan is not None else "its mesh allows"
    lines.append(f"what is sent is {'NOT ' if violations else ''}what {promise}")
    return "\n".join(lines)


def _write(
    parsed: argparse.Namespace, report: Report | None, record: Record | None, violations: Sequence[Violation]
) -> None:
    if parsed.json is not None:
        values: dict[str, Any] = {
            "ok": (report is None or report.ok) and not violations,
            "gradients": None if report is None else report.to_dict(),
            "communication": None
            if record is None
            else {**record.to_dict(), "violations": [dataclasses.asdict(each) for each in violations]},
        }
        parsed.json.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    if parsed.junit is not None:
        broken = None if record is None else list(map(str, violations))
        parsed.junit.write_text(to_junit(report, broken), encoding="utf-8")


def _write_error(parsed: argparse.Namespace, text: str) -> None:
    """For those who read only the files: why nothing was compared."""
    if parsed.json is not None and parsed.json.resolve().parent.is_dir():
        values = {"ok": False, "error": text, "gradients": None, "communication": None}
        parsed.json.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    if parsed.junit is not None and parsed.junit.resolve().parent.is_dir():
        parsed.junit.write_text(to_junit(None, None, text), encoding="utf-8")
