"""`opensora-accel plan`: which Plan fits a job and is the fastest, on hardware that need not be here."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opensora_accel.files import check_folder_of, replacing
from opensora_accel.plan import Plan
from opensora_accel.planner.bill import Bill, interval, prices
from opensora_accel.planner.candidates import (
    GIB,
    OPTIMIZERS,
    Candidate,
    Frozen,
    Outcome,
    Request,
    Residents,
    describe,
    passes_of,
)
from opensora_accel.planner.document import document_of
from opensora_accel.planner.explain import Explanation, explain
from opensora_accel.planner.foresee import forecast_of
from opensora_accel.planner.hardware import Hardware, hardware_names
from opensora_accel.planner.jobs import Job, JobOfConfig, nothing_fits, progress
from opensora_accel.planner.models import MODELS, PARTS, named_workload
from opensora_accel.planner.search import Show, exact, search
from opensora_accel.planner.workload import Workload, step_file

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

EXAMPLES = """\
examples:
  opensora-accel plan --model wan2.1-14b --frames 81 --height 720 --width 1280 --gpus 64 --hardware h100x8-ib400
      ranks plans for 64 H100 on 8 nodes
  ... --output plan.json        writes the best one, which others take as it is: train, verify and profile by
      --plan plan.json, a program by Plan.load("plan.json")
  ... --batch 64                a step has 64 samples, whatever the plan: it decides between data and sequence ranks
  ... --mix 81x480x832:3 --mix 1x720x1280:1
      three of four batches are clips of 81 frames, one is images; --frames, --height and --width are left out
  ... --on-device text_encoder vae                counts both beside the transformer, with the model's sizes
  ... --set ulysses=8 --set checkpoint=full       searches the rest
  ... --fits my_plan.json       answers for one plan: does it fit, how fast, why
  ... --fits my_plan.json --brief                 the same in one line, for scripts: exit status 1 if it does not fit
  ... --samples 1000000 --price 2.5               GPU-hours and cost of a million samples at 2.5 a GPU-hour
  ... --hardware h100x8-ib400 b200x8-ib400 --samples 1000000 --price h100x8-ib400=2.5 b200x8-ib400=5
      the best plan on each, side by side
  ... --report plan.html        a page with the picture of time against memory
  opensora-accel plan --config configs/bunny.toml --gpus 8 --hardware a100x8
      plans a configured run of `opensora-accel train`
  opensora-accel plan --step my_step.py --gpus 8 --hardware my_machine.json
      plans a loop of your own: the file defines model_fn() and step(model, run), as for `opensora-accel verify`

how to read the table: memory and step are intervals from the fast to the slow end of what is uncertain. A plan fits if
the high end does. "traced" plans were run on tensors without values under the plan itself, operator by operator, and
simulated; the others are estimated. Samples a second is of all GPUs together.

hardware: DEVICE, DEVICExCOUNT or DEVICExCOUNT-NETWORK: h100x8-ib400 is nodes of 8 H100, each with a port of 400 Gb/s.
Devices are {devices}; networks ib, roce, efa, eth. `opensora-accel doctor --calibrate FILE` measures
this machine into a .json file that --hardware takes."""


def main(arguments: Sequence[str], job_of_config: JobOfConfig | None = None) -> int:
    """Prints what was found, and writes what is asked for. The exit status is 1 where nothing fits.

    Args:
        job_of_config: what `--config FILE` is planned as, which the trainer knows.

    Raises:
        ValueError, OSError: what a user can mend.
    """
    options = _parser().parse_args(arguments)
    for path in (options.json, options.report, options.output):
        check_folder_of(path)
    if options.top < 1 or not options.seconds >= 0:
        raise ValueError(
            f"--top is a number of rows, at least 1, --seconds at least 0; got {options.top} and {options.seconds:g}"
        )
    price_of = _prices(options)
    hardware = {name: Hardware.named(name) for name in options.hardware}
    job = _job(options, job_of_config)
    requests = {
        name: Request(
            job.mix, each, options.gpus, options.precision or job.precision, _residents(options, job),
            job.global_batch if options.batch is None else options.batch, job.resize, job.accumulation,
            _fixed(options.set),
        )
        for name, each in hardware.items()
    }  # fmt: skip
    if len(requests) > 1:
        return _compare(requests, options, price_of)
    ((name, request),) = requests.items()
    price = price_of.get(name)
    with progress() as show:
        if options.fits is not None:
            return _answer(request, Plan.load(options.fits), show, options, price)
        outcome = search(request, show, options.seconds)
    explanation = explain(outcome.best, outcome) if outcome.best else None
    if options.brief:
        print(_brief(request, outcome.best) if outcome.best else nothing_fits(outcome))
    else:
        _print(outcome, explanation, options.top)
    bill = Bill.of(outcome.best, options.samples, price) if outcome.best and options.samples else None
    if bill is not None:
        print(bill)
    document = document_of(outcome, explanation, bill)
    if options.json is not None:
        _write(options.json, json.dumps(document, indent=1, ensure_ascii=False) + "\n")
    if options.report is not None:
        from opensora_accel.planner.page import page

        _write(options.report, page(document))
    if outcome.best is None:
        return 1
    if options.output is not None:
        outcome.best.plan.save(options.output)
        # Whoever replaces the plan replaces its forecast: one of another plan would be refused.
        of_file = str(Path(name).resolve()) if name.endswith(".json") else ""
        forecast = forecast_of(request, outcome.best, of_file).save(options.output)
        print(f"wrote {options.output}, and what is foreseen of it to {forecast}")
    elif not options.brief:
        print(
            "--output plan.json writes this plan, for train, verify and profile to take by --plan plan.json"
        )
    return 0


def _write(path: Path, text: str) -> None:
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="opensora-accel plan",
        description=f"{__doc__} Needs no GPU: the step is traced on tensors without values, and simulated.",
        epilog=EXAMPLES.format(devices=", ".join(hardware_names())),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    what = parser.add_argument_group("what is trained")
    what.add_argument("--model", metavar="NAME", help="a published model: wan2.1-1.3b, wan2.1-14b, ...")
    what.add_argument("--config", type=Path, metavar="FILE", help="a configuration of `opensora-accel train`")
    what.add_argument(
        "--step", type=Path, metavar="FILE", help="a Python file with model_fn() and step(model, run)"
    )
    for name in ("frames", "height", "width"):
        what.add_argument(f"--{name}", type=int, metavar="N", help="of a clip, in pixels where it is one")
    what.add_argument(
        "--mix", action="append", default=[], metavar="FxHxW[:SHARE]", help="sizes of a mix; repeat it"
    )
    what.add_argument(
        "--micro-batch", type=int, default=1, metavar="N", help="samples of a data rank in one pass (1)"
    )
    what.add_argument("--batch", type=int, metavar="N", help="samples of an optimizer step, over all GPUs")
    what.add_argument(
        "--precision", choices=("bf16", "fp32"), help="compute precision (bf16, or the configuration's)"
    )
    what.add_argument(
        "--optimizer", choices=tuple(OPTIMIZERS), help="adamw, with moments in fewer bits, muon or prodigy"
    )
    what.add_argument("--ema", action="store_true", help="averaged weights are kept on the GPU")
    what.add_argument(
        "--on-device", nargs="+", choices=PARTS, default=[],
        help="parts of the --model that stay on the GPU while it trains (none: captions and clips are encoded before)",
    )  # fmt: skip
    what.add_argument(
        "--text-encoder-gib", type=float, metavar="GIB", help="of a text encoder that stays on the GPU"
    )
    what.add_argument("--vae-gib", type=float, metavar="GIB", help="of a VAE that stays on the GPU")
    on = parser.add_argument_group("on what")
    on.add_argument("--gpus", type=int, required=True, metavar="N", help="ranks, over all nodes")
    on.add_argument(
        "--hardware",
        required=True,
        nargs="+",
        metavar="NAME",
        help="h100x8-ib400, or a calibrated .json file; several are compared",
    )
    on.add_argument(
        "--set", action="append", default=[], metavar="FIELD=VALUE", help="a field of the Plan; repeat it"
    )
    on.add_argument("--fits", type=Path, metavar="PLAN", help="answer for this plan only")
    for_money = parser.add_argument_group("what it costs")
    for_money.add_argument(
        "--samples", type=int, metavar="N", help="GPU-hours of training on so many samples"
    )
    for_money.add_argument(
        "--price",
        nargs="+",
        default=[],
        metavar="PRICE",
        help="of a GPU for an hour: 2.5, or NAME=2.5 for one of --hardware",
    )
    out = parser.add_argument_group("what is written")
    out.add_argument("--brief", action="store_true", help="print one line alone: does it fit, how fast")
    out.add_argument(
        "--output", type=Path, metavar="FILE", help="the best plan; without it nothing is written"
    )
    out.add_argument("--json", type=Path, metavar="FILE", help="every candidate")
    out.add_argument("--report", type=Path, metavar="FILE", help="a page with pictures")
    out.add_argument("--top", type=int, default=8, metavar="N", help="rows of the table (8)")
    out.add_argument(
        "--seconds",
        type=float,
        default=35.0,
        metavar="S",
        help="trace no further finalist after these (35; inf: trace all)",
    )
    return parser


def _job(options: argparse.Namespace, job_of_config: JobOfConfig | None) -> Job:
    given = [name for name in ("model", "config", "step") if getattr(options, name) is not None]
    if len(given) != 1:
        raise ValueError(
            "say what is trained by one of --model NAME, --config FILE and --step FILE; "
            f"got {' and '.join(f'--{name}' for name in given) or 'none of them'}"
        )
    sizes = [name for name in ("frames", "height", "width") if getattr(options, name) is not None]
    if options.config is not None or options.step is not None:
        if sizes or options.mix:
            raise ValueError(f"--{given[0]} says how large clips are; leave --{(sizes or ['mix'])[0]} out")
        if options.config is not None:
            if job_of_config is None:
                raise ValueError(
                    "--config is read by the command line; call plan_for(model, ...) in a program"
                )
            return job_of_config(options.config)
        # A step that clips does so in its trace.
        residents = Residents(clips=False)
        return Job(((step_file(options.step, batch=options.micro_batch), 1.0),), residents=residents)
    if options.micro_batch < 1:
        raise ValueError(f"--micro-batch is a number of samples, at least 1; got {options.micro_batch}")
    if options.mix and sizes:
        raise ValueError(f"--mix says how large clips are; leave --{sizes[0]} out")
    if not options.mix and len(sizes) < 3:
        missing = [name for name in ("frames", "height", "width") if name not in sizes]
        raise ValueError(
            f"--{' and --'.join(missing)} missing: a clip is --frames 81 --height 720 --width 1280, say, or use --mix"
        )
    mix = options.mix or [f"{options.frames}x{options.height}x{options.width}"]
    return Job(tuple(_size(options.model, each, options.micro_batch) for each in mix))


def _size(model: str, text: str, micro_batch: int) -> tuple[Workload, float]:
    """A workload of FRAMESxHEIGHTxWIDTH[:SHARE]."""
    sizes, _, share = text.partition(":")
    try:
        frames, height, width = (int(each) for each in sizes.split("x"))
        weight = float(share) if share else 1.0
    except ValueError as error:
        raise ValueError(
            f"a size is FRAMESxHEIGHTxWIDTH and a share, as 81x480x832:3; got {text!r}"
        ) from error
    if not 0 < weight < float("inf"):
        raise ValueError(f"the share of {sizes} must be a finite number above 0; got {share!r}")
    return named_workload(model, frames=frames, height=height, width=width, batch=micro_batch), weight


def _residents(options: argparse.Namespace, job: Job) -> Residents:
    frozen = dict(job.residents.frozen)
    for part in PARTS:
        gib, option = getattr(options, f"{part}_gib"), f"--{part.replace('_', '-')}-gib"
        if gib is not None and not 0 <= gib < float("inf"):
            raise ValueError(f"{option} is a size in GiB, at least 0; got {gib}")
        if gib is not None:
            frozen[part.replace("_", " ")] = Frozen(round(gib * GIB), f"given by {option}")
        elif part in options.on_device:
            frozen[part.replace("_", " ")] = _named_part(options, part, option)
    return replace(
        job.residents,
        optimizer=options.optimizer or job.residents.optimizer,
        ema=options.ema or job.residents.ema,
        frozen=frozen,
    )


def _named_part(options: argparse.Namespace, part: str, option: str) -> Frozen:
    if options.model is not None:
        return MODELS[options.model].frozen(part)
    if options.config is not None:
        raise ValueError(
            f"--on-device is for a --model: a configuration says itself what it loads; leave it out, or give {option} "
            "for another size"
        )
    raise ValueError(
        f"--on-device {part} takes the size from a published --model, and a --step has none; give {option} instead"
    )


def _fixed(settings: Sequence[str]) -> dict[str, Any]:
    """`--set ulysses=8` as fields of a Plan."""
    fixed: dict[str, Any] = {}
    for text in settings:
        name, equals, value = text.partition("=")
        if not equals or not value:
            raise ValueError(
                f"--set takes a field of the Plan and its value, as --set ulysses=8; got {text!r}"
            )
        try:
            fixed[name] = json.loads(value.lower() if value in ("True", "False") else value)
        except json.JSONDecodeError:
            fixed[name] = value
    return fixed


# ---- what is said


def _prices(options: argparse.Namespace) -> Mapping[str, float]:
    """By the name of the hardware.

    Raises:
        ValueError: options that cannot be together.
    """
    if options.samples is not None and options.samples < 1:
        raise ValueError(f"--samples is a number of samples, at least 1; got {options.samples}")
    if options.price and options.samples is None:
        raise ValueError("--price is of --samples N, how many are trained on; give both")
    if len(set(options.hardware)) < len(options.hardware):
        raise ValueError(f"--hardware has one of them twice: {' '.join(options.hardware)}")
    if len(options.hardware) > 1:
        alone = [name for name in ("fits", "output", "report", "brief") if getattr(options, name)]
        if alone:
            raise ValueError(f"--{alone[0]} is for one --hardware; several are compared in one table")
    return prices(options.price, options.hardware)


def _compare(
    requests: Mapping[str, Request], options: argparse.Namespace, price_of: Mapping[str, float]
) -> int:
    """The best plan on each hardware, side by side."""
    rows: list[tuple[str, Outcome, Bill | None]] = []
    with progress() as show:
        for name, request in requests.items():
            outcome = search(request, partial(_show_on, show, name), options.seconds)
            best = outcome.best
            bill = Bill.of(best, options.samples, price_of.get(name)) if best and options.samples else None
            rows.append((name, outcome, bill))
    columns = ["hardware", "best plan", *_FIGURES]
    columns += [] if options.samples is None else ["GPU-hours"]
    columns += ["cost"] if price_of else []
    names = ", ".join(workload.name for workload, _share in rows[0][1].request.mix)
    console, table = _table(f"{names} on {options.gpus} GPUs of each (simulated)", columns)
    for name, outcome, bill in rows:
        cells = [name, nothing_fits(outcome)]
        if outcome.best is not None:
            cells = [name, describe(outcome.best.plan), *_figures(outcome.best)]
            cells += ["", ""] if bill is None else [interval(bill.gpu_hours), interval(bill.cost)]
        table.add_row(*cells[: len(columns)])
    console.print(table)
    if options.json is not None:
        documents = {name: document_of(outcome, None, bill) for name, outcome, bill in rows}
        _write(options.json, json.dumps(documents, indent=1, ensure_ascii=False) + "\n")
    return 0 if all(outcome.best for _name, outcome, _bill in rows) else 1


def _show_on(show: Show, hardware: str, what: str, share: float) -> None:
    show(f"{hardware}: {what}", share)


def _brief(request: Request, candidate: Candidate) -> str:
    """`fits: 61.2 to 66.0 GiB of 79.6 GiB, 3.1 to 4.4 s for 64 samples: ulysses=8 checkpoint=full`."""
    low, high = candidate.memory_bytes
    has = request.hardware.memory_bytes
    verdict = "fits" if candidate.fits else "may fit" if low <= has < high else "does NOT fit"
    fast, slow = candidate.step_time_s
    return (
        f"{verdict}: {low / GIB:.1f} to {high / GIB:.1f} GiB of {has / GIB:.1f} GiB, {fast:.3f} to {slow:.3f} s for "
        f"{candidate.samples} sample(s): {describe(candidate.plan)}"
    )


def _answer(
    request: Request, plan: Plan, show: Show, options: argparse.Namespace, price: float | None
) -> int:
    """`--fits PLAN`."""
    plan.check_world_size(request.world_size)
    show(f"tracing {describe(plan)}", 0.5)
    passes = passes_of(request, plan.data)
    if passes is None:
        raise ValueError(
            f"the plan's {plan.data} data rank(s) of {request.largest.batch} sample(s) do not divide the global batch "
            f"of {request.global_batch}; use a multiple of {plan.data * request.largest.batch}, or more sequence ranks"
        )
    candidate = exact(request, plan, passes)
    print(_brief(request, candidate))
    if options.samples:
        print(Bill.of(candidate, options.samples, price))
    if not options.brief:
        print(explain(candidate, Outcome(request, (candidate,), {}, 0.0)).text())
    return 0 if candidate.fits else 1


_FIGURES = ("memory GiB", "step s", "samples/s")
_NUMBERS = (*_FIGURES, "GPU-hours", "cost")


def _table(title: str, columns: Sequence[str]) -> tuple[Console, Table]:
    """Numbers stand at the right, words at the left."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for name in columns:
        table.add_column(name, justify="right" if name in _NUMBERS else "left", overflow="fold")
    return Console(width=None if sys.stdout.isatty() else 160, highlight=False), table


def _figures(candidate: Candidate) -> tuple[str, str, str]:
    """Memory, seconds of a step, and samples a second."""
    return (
        f"{candidate.memory_bytes[0] / GIB:.1f}–{candidate.memory_bytes[1] / GIB:.1f}",
        f"{candidate.step_time_s[0]:.3g}–{candidate.step_time_s[1]:.3g}",
        f"{1 / candidate.seconds_per_sample:.3g}" if candidate.seconds_per_sample else "–",
    )


def _print(outcome: Outcome, explanation: Explanation | None, top: int) -> None:
    request = outcome.request
    names = ", ".join(workload.name for workload, _share in request.mix)
    console, table = _table(
        f"{names} on {request.world_size} × {request.hardware.name} (simulated)",
        ["plan", *_FIGURES, "why not"],
    )
    for each in outcome.candidates[:top]:
        table.add_row(
            describe(each.plan)
            + (f" accumulation={each.passes.accumulation}" if each.passes.accumulation > 1 else ""),
            *_figures(each),
            ("" if each.is_traced else "estimated: ") + (each.reason or "the best"),
        )
    console.print(table)
    fitting = sum(each.fits for each in outcome.candidates)
    traced = sum(each.is_traced for each in outcome.candidates)
    print(
        f"{len(outcome.candidates)} plans, {fitting} fit, {traced} traced, in {outcome.seconds:.0f} s; a GPU has "
        f"{request.hardware.memory_bytes / GIB:.1f} GiB"
    )
    if len(outcome.ties) > 1:
        print(f"as fast to 1 %: {'; '.join(describe(each.plan) for each in outcome.ties)}")
    if outcome.may_win:
        print(
            f"not traced: {len(outcome.may_win)} plans that may be up to {outcome.gain:.0%} faster by estimate, as "
            f"{describe(outcome.may_win[0])}; --seconds N gives more time to trace them"
        )
    for rule, times in outcome.excluded.items():
        print(f"excluded: {rule} ({times} sets of degrees)")
    if explanation is not None:
        print(f"\nthe best: {explanation.text()}")
    else:
        print(f"\n{nothing_fits(outcome)}")
