"""Configurations: read as data, refused in words that help, shown where they differ."""

import dataclasses
import json

import pytest

from opensora_accel.plan import Plan
from opensora_accel.training.config import TrainConfig, config_from_dict, differences, load_config, to_dict
from tests.test_layers import ROOT


def written(tmp_path, text, name="run.toml"):
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.toml")), ids=lambda p: p.name)
def test_every_shipped_config_is_valid_and_survives_json(path, tmp_path):
    config = load_config(path)
    assert load_config(written(tmp_path, json.dumps(to_dict(config)), "saved.json")) == config


def test_toml_and_defaults(tmp_path):
    text = "steps = 7\n[optim]\nlr = 1\nbetas = [0.8, 0.9]\n"
    text += '[plan]\nulysses = 2\ncheckpoint = "full"\noffload = "auto"\n'
    config = load_config(written(tmp_path, text + "[model.config]\nnum_layers = 2\n"))
    assert config.steps == 7 and config.optim.lr == 1.0 and config.optim.betas == (0.8, 0.9)
    assert config.plan == Plan(ulysses=2, checkpoint="full", offload="auto")
    assert config.model.config == {"num_layers": 2} and config.data == TrainConfig().data


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("stepz = 3", "there is no option 'stepz'; did you mean 'steps'?"),
        ("[plan]\nulyses = 2", "there is no option 'plan.ulyses'; did you mean 'plan.ulysses'?"),
        ("lr = 0.1", "there is no option 'lr'; did you mean 'optim.lr'?"),
        ("[data]\nbatchsize = 2", "did you mean 'data.batch_size'?"),
        ("steps = 0", "steps must be at least 1; got 0"),
        ('steps = "many"', "steps must be a whole number; got 'many'"),
        ("steps = true", "steps must be a whole number; got True"),
        ("[optim]\nbetas = [0.9]", "optim.betas must be a list of 2 numbers; got [0.9]"),
        ('[optim]\nschedule = "linear"', "optim.schedule must be one of constant, cosine; got 'linear'"),
        ("plan = 3", "plan must be a table of options; got 3"),
        ("memory_target_gib = 8", "is 0.0; set it to auto, or leave memory_target_gib out"),
        ("[plan]\noffload = 0.5", 'checkpoint is none; set checkpoint="full"'),
        ("[flow]\nshift = -1", "flow.shift must be above 0, or auto"),
        ("steps = ", "cannot be read as toml"),
        ("[data]\nnum_frames = 0", "num_frames must be 1 or more"),
    ],
)
def test_a_wrong_file_is_refused_with_the_remedy(tmp_path, text, message):
    path = written(tmp_path, text)
    with pytest.raises(ValueError) as caught:
        load_config(path)
    assert message in str(caught.value) and str(path) in str(caught.value)


def test_a_file_is_data_and_never_executed(tmp_path):
    marker = tmp_path / "executed"
    path = written(tmp_path, f"output = \"{{__import__('pathlib').Path('{marker}').touch()}}\"")
    assert "__import__" in load_config(path).output and not marker.exists()


def test_a_missing_file_names_its_neighbours(tmp_path):
    written(tmp_path, "", "other.toml")
    with pytest.raises(FileNotFoundError, match=r"there is no config file .*; .* has other\.toml"):
        load_config(tmp_path / "run.toml")


def test_differences_have_full_names():
    before = TrainConfig()
    after = dataclasses.replace(before, steps=5, plan=Plan(ulysses=2))
    after = dataclasses.replace(after, model=dataclasses.replace(after.model, config={"num_layers": 3}))
    assert differences(before, after) == {
        "steps": (1000, 5),
        "plan.ulysses": (1, 2),
        "model.config.num_layers": (None, 3),
    }
    assert differences(before, config_from_dict(json.loads(json.dumps(to_dict(before))), "x")) == {}
