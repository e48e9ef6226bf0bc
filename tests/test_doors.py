"""What comes in at the doors: damaged, hostile and mistaken inputs to the commands that read files of others.

Each ends with a status and a line that says what is wrong, or works: within 10 seconds of work, without a traceback,
with nothing written outside of its folder, and with nothing shown of a file that lies outside.
"""

import itertools
import json
import os
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from opensora_accel import cli
from opensora_accel.pages import charts
from tests.profiler.synthetic import write_run
from tests.tiers import PROVE, some

SECRET = "only its owner may read this"
# Of the processor's time, so that nothing else on the machine counts; who waits for a pipe takes none.
LIMIT_S, WAITING_LIMIT_S = 10, 100
# Each in the place of a number, a name, a list or a table.
WRONG = [
    "a",
    -5,
    2.5,
    10**30,
    1e300,
    float("nan"),
    None,
    True,
    [],
    {},
    [[]],
    {"a": {}},
    "<script>x</script>",
    "$\\frac{",
]


class Late(BaseException):
    """What no command takes for an error of its own."""


@contextmanager
def time_limit():
    limits = {
        signal.SIGALRM: (signal.ITIMER_REAL, WAITING_LIMIT_S),
        signal.SIGPROF: (signal.ITIMER_PROF, LIMIT_S),
    }

    def late(number, _frame):
        raise Late(f"not ended after {limits[number][1]} s")

    before = {number: signal.signal(number, late) for number in limits}
    for timer, limit_s in limits.values():
        signal.setitimer(timer, limit_s)
    try:
        yield
    finally:
        for number, (timer, _limit_s) in limits.items():
            signal.setitimer(timer, 0)
            signal.signal(number, before[number])


class Door:
    """Takes one case after the other, and keeps what went wrong."""

    def __init__(self, folder, capsys, monkeypatch, fault):
        self.folder, self.capsys, self.fault = folder, capsys, fault
        self.outside = folder / "outside"
        self.outside.mkdir()
        (self.outside / "secret").write_text(SECRET)
        (self.outside / "target").write_text("as it was")
        monkeypatch.chdir(self.outside)
        self.count, self.entered, self.wrong, self.accepted = 0, 0, [], []

    def new(self):
        """A folder for the next case."""
        self.count += 1
        made = self.folder / f"case_{self.count}"
        made.mkdir()
        return made

    def enter(self, what, arguments):
        """Runs a command on a case."""
        self.entered += 1
        before = self._state()
        try:
            with time_limit():
                status = cli.main([str(each) for each in arguments])
        except SystemExit as exit_:
            status = exit_.code
        except BaseException as error:  # noqa: BLE001 — whatever it is, a user would see its traceback
            self.wrong.append(f"{what}: {type(error).__name__}: {error}")
            status = None
        told = self.capsys.readouterr()
        if "Traceback" in told.err or (status not in (0, None) and not (told.err + told.out).strip()):
            self.wrong.append(f"{what}: {told.err[-300:]!r}")
        if self._state() != before:
            self.wrong.append(f"{what}: wrote outside of its folder")
        if status == 0:
            self.accepted.append(what)
        return status, told.out + told.err

    def _state(self):
        return {path: path.read_bytes() for path in self.outside.rglob("*") if path.is_file()}

    def done(self):
        shown = [
            path
            for path in self.folder.rglob("*")
            if path.is_file() and not path.is_symlink() and self.outside not in path.parents
            if SECRET.encode() in path.read_bytes()
        ]
        assert not self.wrong, "\n".join(self.wrong)
        assert not shown, f"the text of a file outside is in {shown}"
        self.fault("damaged or hostile input to a command", self.entered)


@pytest.fixture
def door(tmp_path, capsys, monkeypatch, fault):
    return Door(tmp_path, capsys, monkeypatch, fault)


def places(value, at=()):
    """Every place in a document, from the outside in; of a list its first element only."""
    yield at
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from places(inner, (*at, key))
    elif isinstance(value, list) and value:
        yield from places(value[0], (*at, 0))


def with_wrong(document, at, wrong):
    """A copy of the document with something else at this place."""
    if not at:
        return wrong
    copied = json.loads(json.dumps(document))
    inner = copied
    for key in at[:-1]:
        inner = inner[key]
    inner[at[-1]] = wrong
    return copied


def damaged_documents(document, every=1):
    """(what was done, the text): each of the wrong values in turn at every place, and what is no document."""
    wrong = itertools.cycle(WRONG)
    for at in list(places(document)) * every:
        value = next(wrong)
        yield f"{'.'.join(map(str, at))} = {value!r}", json.dumps(with_wrong(document, at, value))
    for at in places(document):
        if at and isinstance(at[-1], str):
            copied = with_wrong(document, at, 0)
            inner = copied
            for key in at[:-1]:
                inner = inner[key]
            del inner[at[-1]]
            yield f"without {'.'.join(map(str, at))}", json.dumps(copied)
    yield "an unknown field", json.dumps({**document, "shoe": 1})
    yield "empty", ""
    yield "brackets 100,000 deep", "[" * 100_000
    yield "a lone surrogate", json.dumps(document).replace('"', '"\\ud800', 1)
    yield "a number with 5,000 digits", json.dumps(document).replace(": ", ": " + "1" * 5000, 1)


NO_FILES = {
    "a pipe": os.mkfifo,
    "a folder": os.mkdir,
    "a link to a file outside": lambda path: path.symlink_to("../outside/secret"),
    "a link to nothing": lambda path: path.symlink_to("nowhere"),
    "a link to itself": lambda path: path.symlink_to(path.name),
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "bytes that are no text": lambda path: path.write_bytes(b"\xff\xfe\x00rubbish" * 50),
}


# Most of these make a page with all its pictures: `make test` takes a twentieth of them.
TWENTIETHS = pytest.mark.parametrize("part", some(range(20)))


@TWENTIETHS
def test_report_on_records(door, part):
    whole = write_run(door.folder / "whole", num_ranks=2, num_steps=2, num_blocks=1)
    lines = (whole / "rank_00001.jsonl").read_text().splitlines()
    run, step = (json.loads(line) for line in lines[:2])
    for what, text in list(damaged_documents(run))[part::20]:
        folder = write_run(door.new(), num_ranks=2, num_steps=2, num_blocks=1)
        (folder / "rank_00001.jsonl").write_text("\n".join([text, *lines[1:], ""]))
        door.enter(f"run: {what}", ["report", folder])
    for what, text in list(damaged_documents(step, every=3))[part::20]:
        folder = write_run(door.new(), num_ranks=2, num_steps=2, num_blocks=1)
        (folder / "rank_00001.jsonl").write_text("\n".join([lines[0], text, *lines[2:], ""]))
        door.enter(f"step: {what}", ["report", folder])
    door.done()
    assert "run: empty" not in door.accepted and "step: step = 'a'" not in door.accepted


@pytest.mark.parametrize(
    "name", some(["<script>x</script>", "$\\frac{", "\x00", "é" * 399, "../../outside/secret", ""])
)
def test_names_in_records_are_text(door, name):
    folder = write_run(door.new(), num_ranks=2, num_steps=3, num_blocks=1)
    for path in folder.glob("rank_*.jsonl"):
        text = path.read_text()
        for word in ("attention", "gradients", "mixed", "all-reduce", "host", "SyntheticTransformer", "loss"):
            text = text.replace(f'"{word}"', json.dumps(name + word[:1]))
        path.write_text(text)
    assert door.enter(name, ["report", folder])[0] == 0
    page = (folder / "report.html").read_text()
    assert "<script" not in page
    door.done()


def test_a_name_without_end_is_refused(door):
    folder = write_run(door.new(), num_ranks=2, num_steps=3, num_blocks=1)
    path = folder / "rank_00001.jsonl"
    path.write_text(path.read_text().replace('"attention"', json.dumps("é" * 5000)))
    status, told = door.enter("a name of 5,000 letters", ["report", folder])
    assert status == 2 and "400" in told
    door.done()


@TWENTIETHS
def test_report_on_what_is_no_file(door, part):
    names = ["rank_00001.jsonl", "report.html", "report.json"]
    for name, (what, make) in list(itertools.product(names, NO_FILES.items()))[part::20]:
        folder = write_run(door.new(), num_ranks=2, num_steps=2, num_blocks=1)
        (folder / name).unlink(missing_ok=True)
        make(folder / name)
        door.enter(f"{name}: {what}", ["report", folder])
    door.done()


@PROVE
def test_report_on_links(door):
    folder = door.new()
    (folder / "profile").symlink_to("../outside", target_is_directory=True)
    door.enter("no records", ["report", folder / "profile"])
    for name in ("report.html", "report.json"):
        folder = write_run(door.new(), num_ranks=2, num_steps=2, num_blocks=1)
        (folder / name).symlink_to("../outside/target")
        assert door.enter(f"{name} is a link outside", ["report", folder])[0] == 0
    twice = write_run(door.new(), num_ranks=2, num_steps=2, num_blocks=1)
    (twice / "rank_00007.jsonl").write_bytes((twice / "rank_00000.jsonl").read_bytes())
    door.enter("two files of one rank", ["report", twice])
    door.done()


CONFIG = {
    "output": "runs/a",
    "steps": 2,
    "data": {"folder": "data"},
    "optim": {"lr": 1e-3},
    "plan": {"ulysses": 2},
}
ROW = {
    "step": 1, "loss": 1.5, "grad_norm": 0.5, "lr": 1e-3, "step_s": 0.5, "tokens": 100, "tokens_per_s": 200.0,
    "memory_gib": 0.5, "cache_hits": 1, "cache_misses": 1, "clips/5x32x56": 2,
}  # fmt: skip


def training_run(folder):
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "metrics.jsonl").write_text("".join(json.dumps({**ROW, "step": n}) + "\n" for n in (1, 2)))
    for step in (1, 2):
        sampled = folder / f"samples/step_{step:06d}"
        sampled.mkdir(parents=True)
        (sampled / "captions.txt").write_text("a caption\n")
        (sampled / "clip_1.mp4").write_bytes(b"no clip")
    return folder


def test_report_on_any_value_in_a_training_run(door, monkeypatch):
    """Each wrong value at each place; without the pictures, which take nearly all of the time."""
    monkeypatch.setattr(charts, "over_steps", lambda *_args: "")
    for name, document in (("config.json", CONFIG), ("metrics.jsonl", ROW)):
        for at, wrong in itertools.product(places(document), [*WRONG, 0]):
            folder = training_run(door.new())
            (folder / name).write_text(json.dumps(with_wrong(document, at, wrong)) + "\n")
            door.enter(f"{name}: {'.'.join(map(str, at))} = {wrong!r}", ["report", folder])
    door.done()


@TWENTIETHS
def test_report_on_a_training_run(door, part):
    for what, text in list(damaged_documents(CONFIG))[part::20]:
        folder = training_run(door.new())
        (folder / "config.json").write_text(text)
        door.enter(f"config: {what}", ["report", folder])
    for what, text in list(damaged_documents(ROW, every=2))[part::20]:
        folder = training_run(door.new())
        (folder / "metrics.jsonl").write_text(json.dumps(ROW) + "\n" + text + "\n")
        door.enter(f"metrics: {what}", ["report", folder])
    names = ["config.json", "metrics.jsonl", "run.html", "samples/step_000002/captions.txt"]
    names += ["samples/step_000002/clip_1.mp4", "samples/step_rubbish/captions.txt"]
    for name, (what, make) in list(itertools.product(names, NO_FILES.items()))[part::20]:
        folder = training_run(door.new())
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).unlink(missing_ok=True)
        make(folder / name)
        door.enter(f"{name}: {what}", ["report", folder])
    door.done()


def test_a_page_shows_nothing_from_outside_and_runs_nothing(door):
    folder = training_run(door.new())
    row = {**ROW, "clips/<script>x</script>": 2}
    (folder / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    (folder / "config.json").write_text(json.dumps({**CONFIG, "<script>x</script>": "<script>x</script>"}))
    (folder / "samples/step_000002/captions.txt").write_text("<script>x</script>\n")
    clip = folder / "samples/step_000002/clip_1.mp4"
    clip.unlink()
    clip.symlink_to("../../../outside/secret")
    (folder / "run.html").symlink_to("../outside/target")
    assert door.enter("a run", ["report", folder])[0] == 0
    page = (folder / "run.html").read_text()
    assert "<script" not in page and "step_000001/clip_1.mp4" in page and "step_000002/clip_1.mp4" not in page
    door.done()


WORKLOAD = ["--model", "wan2.1-1.3b", "--frames", "81", "--height", "480", "--width", "832"]
ON = ["--gpus", "8", "--hardware", "h100x8"]
ASKED = ["plan", *WORKLOAD, *ON]


def test_plan_refuses_before_it_traces(door):
    """Each of these is told at once: a trace would take longer than the limit allows for all of them together."""
    settings = [
        *(
            "ulysses=0",
            "ulysses=-1",
            "ulysses=a",
            "ulysses=2.5",
            "ulysses=[]",
            "ulysses=null",
            "ulysses=true",
        ),
        *("ulysses=NaN", "ulysses=10000000000", "ulysses=3", "ring=16", "dp_shard=100000000000", "tp=2.0"),
        *(
            "checkpoint=sometimes",
            "checkpoint=1",
            "offload=2",
            "offload=-0.1",
            "offload=NaN",
            "offload=never",
        ),
        *(
            "sharding=zero9",
            "mlp_chunks=0",
            "mlp_chunks=a",
            "prefetch=-1",
            "two_level=perhaps",
            "shoe=1",
            "=1",
        ),
        *("ulysses", "ulysses=", "ulysses=$(id)", "__class__=1", "cpu_offload=no"),
    ]
    for setting in settings:
        assert door.enter(f"--set {setting}", [*ASKED, "--set", setting])[0] == 2, setting
    others = {
        "--batch": ["0", "-1", "a", "nan", "2.5"],
        "--micro-batch": ["0", "-1"],
        "--gpus": ["0", "-1", "1000000000", "a"],
        "--frames": ["0", "-1", "1000000000000"],
        "--height": ["0", "7"],
        "--seconds": ["nan", "-1"],
        "--top": ["-1"],
        "--vae-gib": ["nan", "-1", "inf"],
        "--hardware": ["", "h100x0", "x", "h100x8-ib0", "nowhere.json", "h100x" + "9" * 30],
        "--mix": ["", "1x1", "0x0x0", "81x480x832:nan", "81x480x832:-1"],
        "--model": ["", "wan", "../x"],
        "--json": ["/nowhere/at/all.json"],
        "--fits": ["nowhere.json"],
        "--config": ["nowhere.toml"],
    }
    for option, values in others.items():
        for value in values:
            assert door.enter(f"{option} {value}", [*ASKED, option, value])[0] not in (0, None), (
                option,
                value,
            )
    door.done()


def test_plan_on_files(door):
    from opensora_accel import Plan
    from opensora_accel.planner.hardware import Hardware

    hardware = json.loads(Hardware.named("h100x8").to_json())
    for what, text in damaged_documents(hardware):
        path = door.new() / "hardware.json"
        path.write_text(text)
        # A plan that fits nowhere: what is accepted of the file is not traced.
        door.enter(
            f"hardware: {what}", ["plan", *WORKLOAD, "--gpus", "7", "--hardware", path, "--set", "ulysses=2"]
        )
    for what, text in damaged_documents(Plan(ulysses=2).to_dict()):
        path = door.new() / "fits.json"
        path.write_text(text)
        door.enter(
            f"plan: {what}", ["plan", *WORKLOAD, "--gpus", "7", "--hardware", "h100x8", "--fits", path]
        )
    for option, (what, make) in itertools.product(
        ["--hardware", "--fits", "--config", "--step"], NO_FILES.items()
    ):
        path = door.new() / "given.json"
        make(path)
        rest = ["--hardware", "h100x8"] if option != "--hardware" else []
        sizes = WORKLOAD if option in ("--hardware", "--fits") else []
        assert door.enter(f"{option}: {what}", ["plan", *sizes, "--gpus", "7", *rest, option, path])[0] != 0
    door.done()


def test_train_and_profile_on_files(door):
    from opensora_accel import Plan

    text = (Path(__file__).parents[1] / "configs/bunny.toml").read_text()
    wrong = [
        "steps = -1",
        "steps = 'a'",
        "shoe = 1",
        "[plan]\nulysses = 0",
        "plan = 7",
        "[data]\nframes = -1",
        "=",
        "\x00",
    ]
    for command, line in itertools.product(["train", "profile"], wrong):
        path = door.new() / "run.toml"
        path.write_text(f"{line}\n")
        assert door.enter(f"{command}: {line}", [command, "--config", path])[0] != 0
    for command, (what, make) in itertools.product(["train", "profile"], NO_FILES.items()):
        for option in ("--config", "--plan"):
            path = door.new() / "given.toml"
            make(path)
            assert door.enter(f"{command} {option}: {what}", [command, option, path])[0] != 0
    for what, document in damaged_documents(Plan(ulysses=2).to_dict()):
        path = door.new() / "plan.json"
        path.write_text(document)
        config = path.with_name("run.toml")
        config.write_text(text)
        # Of two ranks, which there are not: what is accepted of the file does not run.
        door.enter(
            f"plan: {what}", ["train", "--config", config, "--plan", path, "--output", path.parent / "out"]
        )
    for value in ("0", "-1", "a", "nan"):
        for option in ("--num-steps", "--peak-flops", "--link"):
            assert door.enter(f"profile {option} {value}", ["profile", option, value])[0] != 0
    door.done()


def test_verify_on_files(door):
    for what, make in NO_FILES.items():
        for option in ("--config", "--step", "--plan"):
            path = door.new() / "given.py"
            make(path)
            assert door.enter(f"{option}: {what}", ["verify", option, path])[0] != 0
    step = "def model_fn(): pass\ndef step(model, run): pass\n"
    for source in (
        "",
        "def",
        "raise ValueError('mine')",
        "import nowhere",
        "step = 1",
        "def step(): pass",
        "exit(0)",
    ):
        path = door.new() / "step.py"
        path.write_text(source)
        assert door.enter(f"step: {source}", ["verify", "--step", path])[0] not in (0, None)
    for option in (
        "--timeout nan", "--timeout -1", "--timeout 0", "--timeout a", "--timeout inf", "--max-ranks 0",
        "--max-ranks 1000000", "--max-ranks a", "--seed a", "--seed -1", "--mesh a", "--mesh a=0", "--mesh a=-1",
        "--mesh a=b", "--mesh a=1000000000", "--mesh =", "--world a=0", "--data-axes nowhere", "--json /nowhere/x",
        "--junit /nowhere/x",
    ):  # fmt: skip
        path = door.new() / "step.py"
        path.write_text(step)
        assert door.enter(f"verify {option}", ["verify", "--step", path, *option.split()])[0] not in (0, None)
    door.done()


def test_cache_policy_shard_and_doctor(door):
    for what, make in NO_FILES.items():
        path = door.new() / "given"
        make(path)
        door.enter(f"cache: {what}", ["cache", path])
        inside = door.new()
        (inside / "ab").mkdir()
        make(inside / f"ab/{'ab' * 32}.safetensors")
        door.enter(f"cache entry: {what}", ["cache", inside, "--keep", "0"])
        for option in ("--model", "--inputs"):
            source = path.with_suffix(".py")
            if not os.path.lexists(source):
                make(source)
            both = {"--model": "json:loads", "--inputs": "json:loads", option: f"{source}:make"}
            pairs = itertools.chain.from_iterable(both.items())
            assert door.enter(f"policy {option}: {what}", ["policy", *pairs])[0] != 0
        assert door.enter(f"shard --chain: {what}", ["shard", "--chain", path])[0] != 0
        door.enter(f"doctor --calibrate: {what}", ["doctor", "--calibrate", path / "nowhere" / "file.json"])
    for keep in ("-1", "a", "nan", "inf", "1e400", "", "1XB"):
        assert door.enter(f"--keep {keep}", ["cache", door.new(), "--keep", keep])[0] != 0
    for name in (
        "",
        "json",
        "json:",
        ":x",
        "json:nowhere",
        "nowhere:x",
        "/nowhere.py:x",
        "json:decoder",
        "os:_exit",
    ):
        assert door.enter(f"--model {name}", ["policy", "--model", name, "--inputs", "json:loads"])[0] != 0
    for equation in (
        "",
        "->",
        "a",
        "ab,bc",
        "ab,bc->ad",
        "a->aa",
        "é,a->a",
        "...",
        "a,b,c,d,e->",
        "ab, bc -> ac ->",
        "A1,1->A",
    ):
        door.enter(f"equation {equation}", ["shard", equation, "--axis", "tp: weight=o"])
    good = ["shard", "sbi,io->sbo"]
    for rest in (
        ["--axis", ""], ["--axis", "tp"], ["--axis", "tp: nowhere=o"], ["--axis", "tp: weight=z"],
        ["--axis", "tp: weight"],
        ["--sizes", "s=a"], ["--sizes", "s=-1"], ["--sizes", "s=0"], ["--sizes", "q=4"], ["--degrees", "tp=0"],
        ["--degrees", "tp=a"], ["--degrees", "zz=2"], ["--bandwidth", "nan"], ["--bandwidth", "-1"], ["--latency", "a"],
        ["--flops", "0"], ["--dtype", "int3"], ["--names", "a"], ["--names", "a,a"],
    ):  # fmt: skip
        arguments = good if rest[0] == "--axis" else [*good, "--axis", "tp: weight=o"]
        assert door.enter(f"shard {rest}", [*arguments, *rest])[0] not in (0, None), rest
    door.done()


@pytest.mark.prove
def test_a_pipe_holds_no_program_up(tmp_path):
    """As a process of its own, which a hang cannot take along."""
    os.mkfifo(tmp_path / "plan.json")
    command = [sys.executable, "-m", "opensora_accel.cli", "verify", "--plan", str(tmp_path / "plan.json")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert ended.returncode != 0 and "no plain file" in ended.stderr
