"""`opensora-accel verify` as it is typed."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from xml.etree import ElementTree

import psutil
import pytest

from opensora_accel.cli import main
from opensora_accel.observe.step_file import load_file
from opensora_accel.verify.report import to_junit
from tests.tiers import PROVE

GUIDE = Path(__file__).parents[2] / "docs" / "verify.md"


def step_file(folder, changes=()):
    """The guide's own example."""
    text = next(
        code for code in re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.S) if "def step(" in code
    )
    for before, after in changes:
        assert text.count(before) == 1, before
        text = text.replace(before, after)
    path = folder / "my_step.py"
    path.write_text(text)
    return str(path)


def run(*arguments, **options):
    """In a process of its own, as it is typed."""
    command = [sys.executable, "-m", "opensora_accel.cli", "verify", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, **options)


@pytest.mark.prove
def test_the_guides_step_file_is_right(tmp_path):
    meshes = ["--mesh", "data=2,sequence=2", "--mesh", "sequence=3", "--data-axes", "data"]
    done = run("--step", step_file(tmp_path), *meshes)
    assert done.returncode == 0, done.stderr + done.stdout
    assert "✓ sequence=3" in done.stdout and "the gradients are those of a single device" in done.stdout


@PROVE
def test_a_wrong_step_fails_with_its_reasons_in_every_form(tmp_path):
    file = step_file(tmp_path, [('"up"', "None")])
    done = run(
        "--step", file, "--mesh", "data=2,sequence=2", "--mesh", "sequence=3", "--mesh", "data=2",
        "--world", "data=128,sequence=8", "--json", str(tmp_path / "a.json"), "--junit", str(tmp_path / "a.xml"),
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert "scale sequence⁻¹ on" in done.stdout and "NOT those of a single device" in done.stdout
    assert "1,024 ranks" in done.stdout and "what is sent is what its mesh allows" in done.stdout
    values = json.loads((tmp_path / "a.json").read_text())
    assert values["gradients"]["findings"][0]["factor"] == "sequence⁻¹"
    assert values["communication"]["world_size"] == 1024 and not values["communication"]["violations"]
    suite = ElementTree.parse(tmp_path / "a.xml").getroot()
    assert (suite.get("tests"), suite.get("failures")) == ("4", "2")


@PROVE
def test_the_plan_of_a_configured_run(tmp_path):
    config = Path(__file__).parents[2] / "configs" / "bunny.toml"
    done = run("--config", str(config), "--plan.ring", "2", "--optim.accumulation", "2", cwd=tmp_path)
    assert done.returncode == 0, done.stderr + done.stdout
    assert "✓ ring=2 × ulysses=2" in done.stdout and "69 right" in done.stdout
    assert "what is sent is what the plan promises" in done.stdout
    assert not list(tmp_path.iterdir())


@PROVE
def test_under_a_launcher_the_first_rank_proves_the_meshes_of_all_of_them(tmp_path):
    file = step_file(tmp_path)
    launched = {**os.environ, "WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3"}
    assert run("--step", file, env={**launched, "RANK": "1"}).stdout == ""
    meshes = ["--mesh", "data=2", "--only", "gradients", "--json", str(tmp_path / "a.json")]
    done = run("--step", file, *meshes, env={**launched, "RANK": "0"})
    assert done.returncode == 0, done.stderr + done.stdout
    found = json.loads((tmp_path / "a.json").read_text())["gradients"]
    assert [mesh["mesh"] for mesh in found["meshes"]] == ["data=2", "data=3"]
    assert "tokens = 12" in found["variations"]["tried"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give --config FILE or --step FILE.py"),
        (["--step", "none.py"], "there is no file none.py"),
        (["--step", "{empty}"], "defines no step(model, run)"),
        (["--step", "{step}", "--plan.ulysses", "2"], "no option '--plan.ulysses' beside --step"),
        (["--step", "{step}", "--mesh", "data=3,sequence=3"], "more than --max-ranks 8"),
        (["--step", "{step}", "--only", "communication"], "needs the true mesh"),
        (
            ["--step", "{step}", "--only", "gradients", "--world", "data=8"],
            "which --only gradients leaves out",
        ),
        (["--step", "{step}", "--max-ranks", "1"], "--max-ranks must be at least 2"),
        (["--step", "{step}", "--timeout", "0"], "--timeout a number of seconds above 0"),
        (
            ["--config", "configs/bunny.toml", "--plan.ulysses", "1", "--only", "communication"],
            "sends nothing",
        ),
        (["--step", "{step}", "--json", "nowhere/a.json"], "nowhere to write a.json to; make it first"),
        (["--config", "configs/bunny.toml", "--mesh", "data=2"], "--mesh is for --step"),
        (["--config", "none.toml"], "there is no config file none.toml"),
        (["--config", "{auto}"], "have it chosen first (`opensora-accel plan --config FILE"),
        (
            ["--config", "configs/bunny.toml", "--plan", "auto"],
            "takes a file that `opensora-accel plan` wrote",
        ),
        (["--plan", "none.json"], "none.json: No such file"),
        (["--plan", "plan.json", "--world", "data=8"], "--world is for --step"),
        (["--step", "{step}", "--plan", "plan.json", "--mesh", "data=2"], "leave --mesh out"),
        (["--config", "{step}", "--plan.ulyses", "2"], "cannot be read"),
    ],
)
def test_bad_calls_say_what_to_do(tmp_path, capsys, arguments, message):
    (tmp_path / "empty.py").write_text("")
    (tmp_path / "auto.toml").write_text('plan = "auto"\n')
    paths = {name.partition(".")[0]: str(tmp_path / name) for name in ("empty.py", "auto.toml")}
    paths["step"] = step_file(tmp_path)
    assert main(["verify", *(argument.format(**paths) for argument in arguments)]) == 2
    assert message in capsys.readouterr().err


@PROVE
def test_a_step_that_fails_on_every_mesh_is_not_told_to_be_wrong(tmp_path):
    """Nothing was compared, so nothing is known of its gradients."""
    line = "        model.group = run.mesh"
    file = step_file(tmp_path, [(line, f"        raise ValueError('4 heads, 3 ranks')\n{line}")])
    files = ["--junit", str(tmp_path / "a.xml"), "--json", str(tmp_path / "a.json")]
    done = run("--step", file, "--mesh", "data=2", "--mesh", "sequence=2", *files)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "the step fails on every mesh: ValueError: 4 heads, 3 ranks" in done.stdout
    assert done.stdout.rstrip().endswith("nothing was compared: the step fails on every mesh")
    assert "NOT those" not in done.stdout
    suite = ElementTree.parse(tmp_path / "a.xml").getroot()
    assert (suite.get("tests"), suite.get("failures"), suite.get("errors")) == ("2", "0", "2")
    values = json.loads((tmp_path / "a.json").read_text())
    assert not values["ok"] and not values["gradients"]["compared"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param(
            "def step(model, run:\n    pass\n", "cannot be loaded (line 1 of bad.py): SyntaxError: ", marks=PROVE
        ),
        pytest.param(
            "import torch\n\ntorch.no_such_name\n", "cannot be loaded (line 3): AttributeError: ", marks=PROVE
        ),
        pytest.param(
            "import no_such_package\n", "cannot be loaded (line 1): ModuleNotFoundError: No module named", marks=PROVE
        ),
        pytest.param(
            "import sys\nsys.exit(0)\n", "it ends the program while it is imported; put that under `if __name__",
            marks=PROVE,
        ),
        pytest.param(
            "def step(model, run):\n    1 / 0\n\n\ndef model_fn():\n    1 / 0\n", "fails on a single device",
            marks=PROVE,
        ),
    ],
    ids=["syntax", "name", "import", "exit", "single device"],
)  # fmt: skip
def test_what_cannot_be_compared_is_told_in_every_form(tmp_path, text, message):
    (tmp_path / "bad.py").write_text(text)
    files = ["--junit", str(tmp_path / "a.xml"), "--json", str(tmp_path / "a.json")]
    done = run("--step", str(tmp_path / "bad.py"), *files)
    assert done.returncode == 2 and message in done.stderr
    suite = ElementTree.parse(tmp_path / "a.xml").getroot()
    assert (suite.get("tests"), suite.get("failures"), suite.get("errors")) == ("1", "0", "1")
    assert message in suite.find("testcase/error").text
    values = json.loads((tmp_path / "a.json").read_text())
    assert not values["ok"] and message in values["error"]


@pytest.mark.parametrize(
    ("line", "ending", "arguments", "message"),
    [
        pytest.param(
            "def model_fn(width=8):", "os._exit(0)\n", ["--mesh", "data=2"], "it ends the program while it is imported",
            marks=PROVE,
        ),
        pytest.param(
            "    return Model(width)", "    os._exit(0)\n", ["--mesh", "data=2"],
            "model_fn() ends its process: os._exit(0)", marks=PROVE,
        ),
        pytest.param(
            "    loss.backward()", "    os._exit(0)\n", ["--mesh", "data=2"],
            "step(model, run) ends its process: os._exit(0)", marks=PROVE,
        ),
        pytest.param(
            "    loss.backward()", "    os._exit(0)\n", ["--only", "communication", "--world", "data=8"],
            "step(model, run) ends its process: os._exit(0)", marks=PROVE,
        ),
        pytest.param(
            "    loss.backward()", "    sys.exit(0)\n", ["--only", "communication", "--world", "data=8"],
            "step(model, run) ends its process: sys.exit(0)", marks=PROVE,
        ),
        pytest.param(
            "    loss.backward()", "    t = threading.Thread(target=os._exit, args=(0,)); t.start(); t.join()\n",
            ["--only", "communication", "--world", "data=8"], "a thread of the step ends the process: os._exit(0)",
            marks=PROVE,
        ),
    ],
    ids=["import", "model_fn", "step", "step, recorded", "step by sys.exit, recorded", "thread, recorded"],
)  # fmt: skip
def test_a_step_that_ends_the_process_proves_nothing(tmp_path, line, ending, arguments, message):
    file = step_file(
        tmp_path,
        [(line, ending + line), ("import torch\n", "import os, sys, threading\nimport torch\n")],
    )
    done = run("--step", file, *arguments)
    assert done.returncode == 2 and message in done.stderr, done.stdout + done.stderr


def test_a_mesh_that_is_none_is_refused(capsys):
    with pytest.raises(SystemExit):
        main(["verify", "--step", "a.py", "--mesh", "4"])
    assert "write axis=degree, such as data=2,sequence=2" in capsys.readouterr().err


def test_a_report_of_colours_is_still_xml():
    text = to_junit(None, ["\x1b[31mred\x1b[0m and \x00 nothing"])
    assert ElementTree.fromstring(text).find("testcase/failure").get("message") == "red and  nothing"


@pytest.mark.parametrize(
    ("signal_", "delay_s"),
    [
        pytest.param(signal.SIGINT, 0, marks=PROVE),
        pytest.param(signal.SIGINT, 3, marks=PROVE),
        pytest.param(signal.SIGKILL, 3, marks=PROVE),
    ],
)
def test_interrupted_it_leaves_no_process_behind(tmp_path, signal_, delay_s):
    file = step_file(tmp_path, [("loss.backward()", "import time; time.sleep(600); loss.backward()")])
    command = [sys.executable, "-m", "opensora_accel.cli", "verify", "--step", file]
    with open(tmp_path / "errors", "w") as stderr:
        # A shell starts what runs in its background with Ctrl-C ignored, which a test run may be.
        heard = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
        process = subprocess.Popen(command, stderr=stderr, start_new_session=True, preexec_fn=heard)
    deadline, started = time.monotonic() + 60, []
    while len(started) < 3 and time.monotonic() < deadline:
        time.sleep(0.2)
        started = psutil.Process(process.pid).children(recursive=True)
    time.sleep(delay_s)
    os.killpg(process.pid, signal_) if signal_ == signal.SIGINT else process.kill()
    assert process.wait(timeout=20) == (130 if signal_ == signal.SIGINT else -signal_)
    # The server that ranks are forked from may still import what they need, before it looks whether anyone is there.
    _, alive = psutil.wait_procs(started, timeout=60)
    # One that has ended may wait for the system's first process to take note of it.
    alive = [each for each in alive if each.is_running() and each.status() != psutil.STATUS_ZOMBIE]
    assert len(started) >= 3 and not alive
    if signal_ == signal.SIGINT:
        assert (tmp_path / "errors").read_text() == "error: interrupted\n"


def test_files_of_one_name_in_two_folders_are_two(tmp_path):
    found = []
    for number in (1, 2):
        path = tmp_path / str(number) / "my_step.py"
        path.parent.mkdir()
        path.write_text(f"NUMBER = {number}\n", encoding="utf-8")
        found.append(load_file(path).NUMBER)
    assert found == [1, 2]
    assert load_file(tmp_path / "1" / "my_step.py") is load_file(tmp_path / "2" / ".." / "1" / "my_step.py")
