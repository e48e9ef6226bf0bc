"""Runs on a GPU, once, everything that could not run without one, and writes one report.

    python tools/first_gpu.py --out runs/first_gpu            (or: make gpu)
    python tools/first_gpu.py --out runs/first_gpu --node     (or: make gpus) what needs 2 to 8 GPUs of one machine

Each stage is a process of its own with a time limit: a test file, a benchmark. One that crashes, hangs, runs out of
memory or lacks a library ends alone, and the next one starts. The stages measure; this program starts them, reads what
they wrote, and says of each claim whether it held, failed or did not run, and why. The report is written anew after
every stage, so that it is there whatever comes: `report.md`, `report.json`, each stage's log, results and picture.

The stages and their claims stand in `gpu_stages.py`. Both files import nothing but Python's own, so a broken torch ends
the stages and not the report.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gpu_stages import STAGES, Stage

ROOT = Path(__file__).resolve().parents[1]
# What the report and the last child's end may take of the whole time.
RESERVE_S = 10.0
# How many times as long as its limit a stage may take in a dry run.
_DRY_TIMES = 4
# What a stage of tests, in as many as 14 processes, may take to tell how some failed when its time is over.
TELL_S = 8.0
HELD, FAILED, NOT_RUN = "held", "failed", "not run"


class Stopped(Exception):
    """By a signal."""


# ---- one stage


def run_stage(stage: Stage, command: str, out: Path, limit_s: float) -> dict[str, Any]:
    """Starts a stage, waits at most so long, and ends whatever it started; how it ended, and after how many seconds."""
    words = shlex.split(command.replace("{out}", shlex.quote(str(out))))
    if words[0] == "pytest":
        # -vv names each test before it starts, and so the one that took the process with it.
        # A stage may ask for more processes than one.
        options = ["-vv", "-rs", "-n0", "-m", "cuda", "--tb=short", "-p", "no:cacheprovider"]
        words = ["-m", words[0], *options, *words[1:]]
    # Before what the caller has there: wheels that were carried along, say.
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "COLUMNS": "200", "PYTHONPATH": path}
    environment |= stage.environment
    started, log = time.monotonic(), out / f"{stage.name}.log"
    with log.open("wb") as file:
        child = subprocess.Popen(
            [sys.executable, *words],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            env=environment,
            start_new_session=True,
        )
        try:
            child.wait(limit_s)
            ended = _how(child.returncode, words, log)
        except subprocess.TimeoutExpired:
            ended = f"was ended after {limit_s:.0f} s"
            if "pytest" in words:  # which then tells how tests failed that had
                child.send_signal(signal.SIGINT)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(TELL_S)
        finally:
            _end(child)
    return {"ended": ended, "seconds": round(time.monotonic() - started, 1)}


def _end(child: subprocess.Popen[bytes]) -> None:
    """Also what the child started: its session is its own."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    # A process that waits for a driver can outlive SIGKILL; it is left behind then.
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(5)


def _how(status: int, words: Sequence[str], log: Path) -> str:
    """How a process ended: "done", or what became of it."""
    # pytest: 1 where tests failed, which they tell by themselves, and 5 where there was none.
    if status == 0 or ("pytest" in words and status in (1, 5)):
        return "done"
    if status < 0:
        return f"died of {signal.Signals(-status).name}"
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return (
        f"exit status {status}: {next((line.strip() for line in reversed(lines) if line.strip()), '')[:300]}"
    )


# ---- what a stage found

Check = dict[str, Any]


def read_checks(stage: Stage, out: Path, ended: str) -> list[Check]:
    """What a stage checked: each test of its log, each claim of its JSON; `held` is None where it did not run."""
    log, result = out / f"{stage.name}.log", out / stage.result
    if "pytest" in stage.command:
        return list(_tests_of(log.read_text(encoding="utf-8", errors="replace"), ended))
    checks = []
    for claim in read_json(result).get("claims", []):
        name = ": ".join(filter(None, (claim.get("case"), claim["claim"])))
        value, held = claim.get("value"), claim["held"]
        shown = f"{value:.4g}" if isinstance(value, float) else value
        why = f"{shown}, asked {claim.get('comparison')} {claim.get('threshold')}" if held is not None else ""
        fails = claim.get("fails")
        why += f" ({', '.join(map(str, fails[:5]))})" if fails and held is False else ""
        checks.append({"check": name, "held": held, "why": claim.get("why") or why or "not measured"})
    return checks


def read_json(path: Path) -> dict[str, Any]:
    """What a stage wrote; nothing where it wrote none, or was ended as it did."""
    try:
        read: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return read
    except (OSError, ValueError):
        return {}


def _tests_of(log: str, ended: str) -> Iterator[Check]:
    reasons = dict(re.findall(r"^(?:FAILED|ERROR) (tests/\S+::.*?) - (.*)$", log, re.M))
    words = {"PASSED": True, "XFAIL": True, "SKIPPED": None}
    outcomes = "PASSED|FAILED|ERROR|SKIPPED|XFAIL"
    told = re.findall(rf"^(tests/\S+?::.*?) ({outcomes})(?: \((.*)\))?(?: *\[ *\d+%\])?\s*$", log, re.M)
    # Of several processes.
    told += [
        (name, outcome, "")
        for outcome, name in re.findall(
            rf"^\[gw\d+\] \[ *\d+%\] ({outcomes}) (tests/\S+?::.*?)\s*$", log, re.M
        )
    ]
    for name, outcome, why in told:
        yield {
            "check": name,
            "held": words.get(outcome, False),
            "why": why or reasons.get(name, outcome.lower()),
        }
    unfinished = re.search(r"^(tests/\S+?::.*\S)\s*\Z", log.partition("Fatal Python error")[0], re.M)
    if ended.startswith("died") and unfinished:
        yield {"check": unfinished[1], "held": False, "why": f"the process {ended}"}
    seen = {name.partition("::")[0] for name, _, _ in told}
    for name, why in re.findall(r"^SKIPPED \[\d+\] (tests/\S+\.py):\d+: (.*)$", log, re.M):
        if name not in seen:  # a whole file, which needs a library
            yield {"check": name, "held": None, "why": why}
    for name, why in re.findall(r"^ERROR (tests/\S+\.py)(?: - (.*))?$", log, re.M):
        yield {"check": name, "held": False, "why": why or "could not be read"}


def judge(stage: Stage, checks: Sequence[Check], ended: str) -> list[dict[str, Any]]:
    """The claims of a stage, each held, failed or not run; a failed check of none of them stands for itself."""
    claims, matched = [], set[str]()
    for claim, pattern in stage.claims.items():
        found = [check for check in checks if re.search(pattern, check["check"])]
        matched |= {check["check"] for check in found}
        failed = [check for check in found if check["held"] is False]
        held = [check for check in found if check["held"]]
        reasons = sorted({check["why"] for check in found if check["held"] is None})
        if failed:
            shown = "; ".join(f"{check['check']}: {check['why']}" for check in failed[:3])
            outcome, why = FAILED, f"{len(failed)} of {len(found)} checks: {shown}"
        elif held and ended == "done":
            outcome, why = HELD, f"{len(held)} checks" if len(held) > 1 else held[0]["why"]
            why += f"; {len(found) - len(held)} did not run: {'; '.join(reasons)}" if reasons else ""
        else:
            outcome, why = NOT_RUN, "; ".join(reasons) or "nothing checked it"
            if ended != "done":
                why = f"the stage {ended}" + (f", after {len(held)} checks that held" if held else "")
        claims.append({"claim": claim, "stage": stage.name, "outcome": outcome, "why": why})
    for check in checks:
        if check["held"] is False and check["check"] not in matched:
            own = {"claim": check["check"], "stage": stage.name, "outcome": FAILED, "why": check["why"]}
            claims.append(own)
    return claims


# ---- all of them


def drive(stages: Sequence[Stage], out: Path, limit_s: float, dry: bool = False) -> dict[str, Any]:
    """Runs the stages one after the other within so many seconds, and leaves the report in `out`, whatever comes.

    What a stage leaves of its time is for those after it.

    SIGINT, SIGTERM and the end of the time end the stage that runs; those after it do not start.
    """
    started, out = time.monotonic(), out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    # A run of some stages goes on with the report of those that ran before, in as much time again.
    chosen = {stage.name for stage in stages}
    earlier = read_json(out / "report.json") if chosen < {stage.name for stage in STAGES} else {}
    earlier_stages = {name: each for name, each in earlier.get("stages", {}).items() if name not in chosen}
    report: dict[str, Any] = {
        "command": shlex.join(["python", "tools/first_gpu.py", *map(_without_folder, sys.argv[1:])]),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        **{"dry_run": dry, "limit_s": limit_s, "machine": {}, "stages": earlier_stages},
        "claims": [claim for claim in earlier.get("claims", []) if claim["stage"] in earlier_stages],
    }
    if earlier_stages:
        report["with_stages_of"] = earlier["date"]

    def stop(number: int, _frame: Any) -> None:
        for each in before:
            signal.signal(each, signal.SIG_IGN)  # the report is being written from here on
        raise Stopped("the time was over" if number == signal.SIGALRM else signal.Signals(number).name)

    before = {each: signal.signal(each, stop) for each in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)}
    # The cores of a laptop take longer than a GPU and those beside it.
    times = _DRY_TIMES if dry else 1
    limit_s *= times
    signal.setitimer(signal.ITIMER_REAL, max(limit_s - RESERVE_S / 2, 0.1))
    stopped, given_s = "", 0.0
    try:
        for index, stage in enumerate(stages):
            used_s = time.monotonic() - started
            left_s = limit_s - RESERVE_S - used_s
            # A quarter of its limit is kept for each stage that comes after.
            left_s -= times * sum(later.limit_s for later in stages[index + 1 :]) / 4
            own_s, surplus_s = times * stage.limit_s, max(0.0, given_s - used_s)
            given_s += own_s
            missing = stopped or _missing(stage, report["machine"], dry)
            missing = missing or (left_s < 2 and f"did not start: no time was left of {limit_s:.0f} s") or ""
            found: dict[str, Any] = {"ended": missing, "seconds": 0}
            for old in (f"{stage.name}.log", stage.result, f"{stage.name}.png"):
                (out / old).unlink(missing_ok=True)  # of a run before
            if not missing:
                print(f"{stage.name} …", end=" ", file=sys.stderr, flush=True)
                command = stage.dry if dry and stage.dry is not None else stage.command
                try:
                    found = run_stage(stage, command, out, min(own_s + surplus_s, left_s))
                except (Stopped, OSError) as error:
                    found["ended"] = f"was stopped: {error}"
                    if isinstance(error, Stopped):
                        stopped = f"did not start: the run was stopped ({error})"
                print(f"{found['ended']} ({found['seconds']} s)", file=sys.stderr, flush=True)
            ran = (out / f"{stage.name}.log").exists()
            checks = read_checks(stage, out, found["ended"]) if ran else []
            report["stages"][stage.name] = found | {"checks": checks}
            report["machine"] |= read_json(out / stage.result).get("machine", {})
            report["claims"] += judge(stage, checks, found["ended"])
            write(report, out)
    except Stopped as error:
        # Between two stages: what has not started is told by the claims that it would have checked.
        ended = f"did not start: the run was stopped ({error})"
        for stage in (each for each in stages if each.name not in report["stages"]):
            report["stages"][stage.name] = {"ended": ended, "seconds": 0, "checks": []}
            report["claims"] += judge(stage, [], ended)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for each, handler in before.items():
            signal.signal(each, handler)
    report["seconds"] = round(time.monotonic() - started, 1)
    write(report, out)
    return report


def _missing(stage: Stage, machine: Mapping[str, Any], dry: bool) -> str:
    """What the machine lacks for a stage, or nothing."""
    if dry or not machine or stage.gpus <= machine.get("num_gpus", 0):
        return ""
    return f"did not start: it needs {stage.gpus} GPU(s); " + machine.get(
        "lacks", f"there is {machine['num_gpus']}"
    )


def _without_folder(argument: str) -> str:
    """As it can be typed elsewhere."""
    return Path(argument).name if "/" in argument else argument


# ---- the report


def write(report: Mapping[str, Any], out: Path) -> None:
    """report.json and report.md, each whole: one that is being written has another name."""
    for name, text in (
        ("report.json", json.dumps(report, indent=1, ensure_ascii=False) + "\n"),
        ("report.md", to_markdown(report, out)),
    ):
        begun = out / f".{name}"
        begun.write_text(text, encoding="utf-8")
        begun.replace(out / name)


def to_markdown(report: Mapping[str, Any], out: Path) -> str:
    """The report to read; its first line counts."""
    claims = report["claims"]
    num = {
        outcome: sum(claim["outcome"] == outcome for claim in claims) for outcome in (HELD, FAILED, NOT_RUN)
    }
    lines = [f"{num[HELD]} claims held, {num[FAILED]} failed, {num[NOT_RUN]} did not run", ""]
    lines += [f"`{report['command']}`, {report['date']}", ""]
    if "with_stages_of" in report:
        lines += [f"Stages that it did not run are of {report['with_stages_of']}.", ""]
    if report["dry_run"]:
        lines += [
            "A dry run on the CPU with tiny sizes: it tests the stages, and says nothing about a GPU.",
            "",
        ]
    lines += [f"- {name}: {value}" for name, value in report["machine"].items() if value not in ("", None)]
    for outcome in (FAILED, NOT_RUN, HELD):
        rows = [claim for claim in claims if claim["outcome"] == outcome]
        if rows:
            lines += ["", f"## {outcome.capitalize()}", "", "| claim | stage | why |", "|---|---|---|"]
            lines += [f"| {_cell(row['claim'])} | {row['stage']} | {_cell(row['why'])} |" for row in rows]
    lines += [
        "",
        "## Stages",
        "",
        "| stage | ended | seconds | checks held, failed, not run |",
        "|---|---|---|---|",
    ]
    for name, stage in report["stages"].items():
        counts = [sum(check["held"] is held for check in stage["checks"]) for held in (True, False, None)]
        lines.append(
            f"| {name} | {_cell(stage['ended'])} | {stage['seconds']} | {counts[0]}, {counts[1]}, {counts[2]} |"
        )
    pictures = [f"{name}.png" for name in report["stages"] if (out / f"{name}.png").exists()]
    lines += ["", *(f"![{picture}]({picture})" for picture in pictures)]
    return "\n".join(lines).rstrip() + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def main(arguments: Sequence[str] | None = None) -> int:
    """0; claims that failed are told by the report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add, names = parser.add_argument, [stage.name for stage in STAGES]
    add("--out", type=Path, required=True, metavar="DIR", help="the report and all logs go there")
    add("--only", nargs="+", choices=names, metavar="STAGE", help=f"beside the first: {', '.join(names)}")
    add("--node", action="store_true", help="what needs several GPUs, in place of what needs one")
    add("--limit-s", type=float, default=780.0, help="seconds for everything (default: 780)")
    add("--dry-run", action="store_true", help="tiny, on the CPU: it tests the stages")
    options = parser.parse_args(arguments)
    if options.only:
        names = ["machine", *options.only]
    else:
        names = [stage.name for stage in STAGES if not stage.gpus or (stage.gpus > 1) == options.node]
    chosen = [stage for stage in STAGES if stage.name in names]
    drive(chosen, options.out, options.limit_s, options.dry_run)
    print((options.out / "report.md").read_text(encoding="utf-8").splitlines()[0])
    print(f"{options.out}/report.md")
    return 0


if __name__ == "__main__":
    sys.exit(main())
