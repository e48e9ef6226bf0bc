"""Wrong inputs of `opensora-accel plan`: each is refused in one line with its remedy, before minutes have gone."""

import json

import pytest

from opensora_accel import cli
from opensora_accel.plan import Plan
from opensora_accel.planner import plan_for
from opensora_accel.planner.hardware import Hardware

MODEL = ("--model", "wan2.1-1.3b")
CLIP = ("--frames", "81", "--height", "480", "--width", "832")
ON = ("--gpus", "8", "--hardware", "h100x8")

WRONG = {
    "no model": ((*CLIP, *ON), "one of --model NAME, --config FILE and --step FILE"),
    "two of them": ((*MODEL, "--config", "a.toml", *CLIP, *ON), "--model and --config"),
    "an unknown model": (("--model", "wan2.1-15b", *CLIP, *ON), "did you mean 'wan2.1-1"),
    "no sizes": ((*MODEL, *ON), "--frames and --height and --width missing"),
    "no height": ((*MODEL, "--frames", "81", "--width", "832", *ON), "--height missing"),
    "frames of no codec": ((*MODEL, "--frames", "80", "--height", "480", "--width", "832", *ON), "use 77 or 81"),
    "a height of no patch": ((*MODEL, "--frames", "81", "--height", "481", "--width", "832", *ON), "height"),
    "no frames": ((*MODEL, "--frames", "0", "--height", "480", "--width", "832", *ON), "at least 1"),
    "sizes twice": ((*MODEL, *CLIP, "--mix", "1x480x832", *ON), "leave --frames out"),
    "a size that is none": ((*MODEL, "--mix", "81x480", *ON), "FRAMESxHEIGHTxWIDTH"),
    "a share that is none": ((*MODEL, "--mix", "81x480x832:0", *ON), "finite number above 0"),
    "no samples": ((*MODEL, *CLIP, "--micro-batch", "0", *ON), "--micro-batch is a number of samples"),
    "no batch": ((*MODEL, *CLIP, "--batch", "-1", *ON), "the global batch is a number of samples"),
    "no GPUs": ((*MODEL, *CLIP, "--gpus", "0", "--hardware", "h100x8"), "at least 1"),
    "an unknown GPU": ((*MODEL, *CLIP, "--gpus", "8", "--hardware", "h101x8"), "did you mean 'h100'"),
    "an unknown network": ((*MODEL, *CLIP, "--gpus", "16", "--hardware", "h100x8-ob400"), "did you mean 'ib'"),
    "no network": ((*MODEL, *CLIP, "--gpus", "16", "--hardware", "h100x8"), "name one, as h100x8-ib400"),
    "nodes of nothing": ((*MODEL, *CLIP, "--gpus", "8", "--hardware", "h100x0"), "at least 1"),
    "no hardware file": ((*MODEL, *CLIP, "--gpus", "8", "--hardware", "none.json"), "No such file"),
    "a broken hardware file": ((*MODEL, *CLIP, "--gpus", "8", "--hardware", "broken.json"), "Invalid JSON"),
    "another file": ((*MODEL, *CLIP, "--gpus", "8", "--hardware", "other.json"), "has no field 'colour'"),
    "no field": ((*MODEL, *CLIP, *ON, "--set", "ulises=2"), "did you mean 'ulysses'"),
    "a field without a value": ((*MODEL, *CLIP, *ON, "--set", "ulysses"), "as --set ulysses=8"),
    "a wrong value": ((*MODEL, *CLIP, *ON, "--set", "checkpoint=all"), "checkpoint must be one of none, full"),
    "a negative encoder": ((*MODEL, *CLIP, *ON, "--text-encoder-gib", "-1"), "at least 0"),
    "a VAE that is no number": ((*MODEL, *CLIP, *ON, "--vae-gib", "nan"), "--vae-gib is a size"),
    "an encoder of a step": (("--step", "step.py", *ON, "--on-device", "vae"), "give --vae-gib instead"),
    "an encoder of a config": (("--config", "run.toml", *ON, "--on-device", "vae"), "says itself what it loads"),
    "no folder for JSON": ((*MODEL, *CLIP, *ON, "--json", "nowhere/a.json"), "make it first"),
    "no folder for a page": ((*MODEL, *CLIP, *ON, "--report", "nowhere/a.html"), "make it first"),
    "no plan file": ((*MODEL, *CLIP, *ON, "--fits", "none.json"), "No such file"),
    "a plan of other ranks": ((*MODEL, *CLIP, *ON, "--fits", "four.json"), "the plan needs 4 ranks"),
    "a plan that is none": ((*MODEL, *CLIP, *ON, "--fits", "broken.json"), "not JSON"),
    "a plan beside the batch": ((*MODEL, *CLIP, *ON, "--fits", "eight.json", "--batch", "4"), "do not divide"),
    "no config": (("--config", "none.toml", *ON), "there is no config file"),
    "sizes of a config": (("--config", "none.toml", *CLIP, *ON), "leave --frames out"),
    "no step file": (("--step", "none.py", *ON), "there is no file"),
    "a step file without a step": (("--step", "empty.py", *ON), "defines no step"),
}  # fmt: skip


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "empty.py").write_text("")
    (tmp_path / "step.py").write_text("def model_fn(): ...\ndef step(model, run): ...\n")
    (tmp_path / "run.toml").write_text("[data]\nnum_frames = 5\nheight = 16\nwidth = 16\n")
    other = json.loads(Hardware.named("h100x8").to_json()) | {"colour": "green"}
    (tmp_path / "other.json").write_text(json.dumps(other))
    Plan(dp_replicate=4).save("four.json")
    Plan(dp_replicate=8).save("eight.json")


@pytest.mark.parametrize(("arguments", "said"), WRONG.values(), ids=WRONG)
def test_a_wrong_input_is_refused_with_its_remedy(arguments, said, files, capsys):
    assert cli.main(["plan", *arguments]) == 2
    told = capsys.readouterr().err
    assert said in told and told.startswith("error: ") and told.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((*MODEL, *CLIP, "--hardware", "h100x8"), "--gpus"),
        ((*MODEL, *CLIP, "--gpus", "8"), "--hardware"),
        ((*MODEL, *CLIP, *ON, "--optimizer", "adam"), "adamw-8bit"),
        ((*MODEL, *CLIP, *ON, "--precision", "fp8"), "bf16"),
        ((*MODEL, *CLIP, *ON, "--on-device", "encoder"), "text_encoder"),
        ((*MODEL, *CLIP, "--gpus", "many", "--hardware", "h100x8"), "invalid int"),
        ((*MODEL, *CLIP, *ON, "--frame", "81"), "unrecognized arguments"),
    ],
)
def test_a_wrong_option_is_refused_by_its_name(arguments, said, capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["plan", *arguments])
    assert stopped.value.code == 2 and said in capsys.readouterr().err


def test_plan_for_wants_a_function():
    import torch

    with pytest.raises(ValueError, match="a function that builds the model"):
        plan_for(torch.nn.ModuleList(), lambda model, dtype: {})


def test_calibrate_refuses_before_it_measures(tmp_path, capsys):
    assert cli.main(["doctor", "--calibrate", str(tmp_path / "no" / "hardware.json")]) == 2
    assert "make it first" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--plan", "best"), "--plan takes a file that `opensora-accel plan` wrote"),
        (("--plan", "none.json"), "No such file"),
        (("--plan", "auto", "--plan.ulysses", "2"), "leave one of them out"),
    ],
)
def test_a_wrong_plan_of_the_trainer_is_refused(arguments, said, capsys):
    assert cli.main(["train", *arguments]) == 2
    assert said in capsys.readouterr().err
